"""Palettes and tables of numbers: lossless for any observations, and as small as indices."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.codecs import ByteRows, ObsSpec, get_codec, is_available, registry
from sb3_extra_buffers.compressed import CompressedArray, CompressedReplayBuffer
from sb3_extra_buffers.errors import CodecOptionError, FileFormatError, MissingExtraError, SpecMismatchError
from sb3_extra_buffers.files import load, open_saved, save, verify
from sb3_extra_buffers.files.parts import flatten, unflatten
from sb3_extra_buffers.stores import tables
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.registry import find_store, make_store
from sb3_extra_buffers.stores.tables import TableStore
from sb3_extra_buffers.stores.unit_table import UnitTable, find_geometry
from tests.contracts.store import KERNELS, Walk, examples, needs
from tests.contracts.store_contract import Case, StoreContract

UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True)
class ManyColours(Case):
    """Some of the observations have colours for which a palette has no space."""

    method: str = "palette"
    frame: tuple[int, ...] = (11, 13)
    channels: int = 3

    def rows(self, planes: Any) -> ByteRows:
        rows = super().rows(planes)
        mixed = planes.reshape(len(planes), -1).max(axis=1) > 250
        noise = np.random.default_rng(0).integers(0, 256, rows.shape).astype(np.uint8)
        rows[mixed] ^= noise[mixed]
        return rows


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("case", [ManyColours(), ManyColours(stack=2, axis="last")], ids=str)
class TestObservationsOutsideTheTable(StoreContract):
    def test_there_are_some(self, case: Case, compiled: bool) -> None:
        store, _ = self.filled(case, compiled)
        assert store.outside is not None
        assert "have other colours" in store.describe()


# ---- which observations ----


@pytest.mark.parametrize(
    ("shape", "stack", "axis", "unit", "plane", "inner"),
    [
        ((20, 30, 3), 1, "first", 3, 0, (20, 30)),
        ((20, 30, 4), 1, "first", 4, 0, (20, 30)),
        ((3, 20, 30), 1, "first", 3, 600, (20, 30)),
        ((20, 30, 12), 4, "last", 3, 0, (20, 30, 4)),
        ((12, 20, 30), 4, "first", 3, 600, (4, 20, 30)),
        ((4, 3, 20, 30), 4, "first", 3, 600, (4, 20, 30)),
        ((4, 20, 30, 3), 4, "first", 3, 0, (4, 20, 30)),
        ((20, 30, 6), 1, "first", 3, 0, (20, 30, 2)),
        ((6, 20, 30), 1, "first", 3, 600, (2, 20, 30)),
        ((3, 20, 60), 2, "last", 3, 1200, (20, 60)),
    ],
)
def test_images_of_any_layout_have_one_index_per_pixel(
    shape: tuple[int, ...], stack: int, axis: Any, unit: int, plane: int, inner: tuple[int, ...]
) -> None:
    layout = StackLayout(ObsSpec(shape, UINT8), stack, axis)
    geometry = find_geometry(layout)
    assert geometry is not None
    assert (geometry.unit, geometry.plane, geometry.inner.spec.shape) == (unit, plane, inner)
    assert (geometry.inner.stack, geometry.inner.axis) == (stack, axis)

    colours = np.random.default_rng(0).integers(0, 256, (50, unit), np.uint8)
    picks = np.random.default_rng(1).integers(0, 50, (9, np.prod(shape) // unit))
    pixels = colours[picks]
    rows = (np.moveaxis(pixels.reshape(9, -1, plane, unit), -1, 2) if plane else pixels).reshape(9, -1).copy()
    store = make_store(layout, 9, 1, get_codec("palette").bind(layout.frame_spec))
    assert isinstance(store, TableStore)
    store.write(np.arange(9), np.zeros(9, np.int64), rows)
    np.testing.assert_array_equal(store.read(np.arange(9)), rows)
    assert store.describe() == "palette of 51 colours over delta"  # and black


@pytest.mark.parametrize("method", ["palette:delta", pytest.param("palette:scroll", marks=needs("scroll"))])
@pytest.mark.parametrize(
    ("shape", "stack", "axis"),
    [
        ((3, 40, 48), 1, "first"),
        ((3, 13, 27), 1, "first"),
        ((40, 48, 3), 1, "first"),
        ((24, 32, 4), 1, "first"),
        ((6, 24, 32), 2, "first"),
        ((24, 32, 6), 2, "last"),
    ],
)
def test_batches_larger_than_the_caches_are_exact(shape: tuple[int, ...], stack: int, axis: Any, method: str) -> None:
    layout = StackLayout(ObsSpec(shape, UINT8), stack, axis)
    geometry = find_geometry(layout)
    assert geometry is not None
    rng = np.random.default_rng(0)
    colours, n_pixels = rng.integers(0, 256, (200, geometry.unit), np.uint8), layout.spec.nbytes // geometry.unit
    pixels = colours[rng.integers(0, 200, (9, n_pixels))].reshape(9, -1, max(geometry.plane, 1), geometry.unit)
    rows = np.ascontiguousarray(np.moveaxis(pixels, -1, 2) if geometry.plane else pixels).reshape(9, -1)
    store = make_store(layout, 11, 1, get_codec(method).bind(layout.frame_spec))
    store.write(np.arange(9), np.zeros(9, np.int64), rows)
    rows = np.concatenate([rows, np.zeros((2, layout.spec.nbytes), np.uint8)])  # two that were never written
    # from 8 MiB on, batches are written past the caches
    for n_bytes in (1 << 16, 9 << 20):
        indices = rng.integers(0, 11, (2, n_bytes // layout.spec.nbytes // 2 + 1))
        np.testing.assert_array_equal(store.read(indices), rows[indices])
        np.testing.assert_array_equal(store.read_windows(indices), rows[indices])


@pytest.mark.parametrize("inner", ["delta", "camera"])
def test_large_batches_of_numbers_are_exact(inner: str) -> None:
    layout = StackLayout(ObsSpec((40, 48), np.dtype(np.float32)), 1, "first")
    rng = np.random.default_rng(0)
    rows = (rng.integers(0, 256, (9, 40 * 48)) / np.float32(255)).astype(np.float32).view(np.uint8)
    store = make_store(layout, 10, 1, get_codec(f"table:{inner}").bind(layout.frame_spec))
    store.write(np.arange(9), np.zeros(9, np.int64), rows)
    rows = np.concatenate([rows, np.zeros((1, layout.spec.nbytes), np.uint8)])
    for n_rows in (7, 1200):
        indices = rng.integers(0, 10, (2, n_rows))
        np.testing.assert_array_equal(store.read(indices), rows[indices])
        np.testing.assert_array_equal(store.read_windows(indices), rows[indices])


@pytest.mark.parametrize(("shape", "stack"), [((84, 84), 1), ((4, 84, 84), 4), ((20, 30, 3, 4), 4), ((17,), 1)])
def test_other_observations_of_bytes_go_to_the_byte_codec(shape: tuple[int, ...], stack: int) -> None:
    layout = StackLayout(ObsSpec(shape, UINT8), stack, "last" if shape[-1] == stack else "first")
    assert find_store(get_codec("palette").bind(layout.frame_spec), layout) is not TableStore


def test_tables_of_bytes_are_refused() -> None:
    with pytest.raises(SpecMismatchError, match="use 'palette'"):
        CompressedArray(10, (84, 84), np.uint8, compression_method="table")
    with pytest.raises(CodecOptionError, match="inner"):
        get_codec("table:palette")


@needs("zstd")
def test_the_inner_method_is_part_of_the_method() -> None:
    assert get_codec("palette:zstd1") == get_codec("palette", inner="zstd1")
    array = CompressedArray(40, (9, 9), np.float32, compression_method="table:gzip1")
    array[:] = np.ones((9, 9), np.float32)
    assert array.memory_usage().codecs[""].endswith("over gzip1")


# ---- numbers ----


GRIDS: dict[str, Callable[[npt.NDArray[np.uint8]], npt.NDArray[Any]]] = {
    "x/255": lambda x: x.astype(np.float32) / 255,
    "x/255 float16": lambda x: (x / 255).astype(np.float16),
    "x/255 float64": lambda x: x / 255,
    "x/127.5 - 1": lambda x: x.astype(np.float32) / np.float32(127.5) - 1,
    "x - 128": lambda x: x.astype(np.int16) - 128,
    "x": lambda x: x.astype(np.float32),
    "3x + 1000": lambda x: 3 * x.astype(np.int32) + 1000,
    "big-endian": lambda x: (x / 255).astype(">f4"),
}


@pytest.mark.parametrize("name", GRIDS)
def test_numbers_on_a_grid_have_their_position_as_index(name: str) -> None:
    x = np.random.default_rng(0).permutation(256).astype(np.uint8)
    numbers = GRIDS[name](x)
    table = UnitTable(numbers.dtype, numbers.itemsize)
    out = np.empty((1, 256), np.uint8)

    # few of them at first; the others are found their place when they are seen
    first = GRIDS[name](np.array([0, 1, 7, 90, 255], np.uint8))
    table.learn(first.view(np.uint8).reshape(1, -1))
    assert table.map(numbers.view(np.uint8).reshape(1, -1), out) is None

    np.testing.assert_array_equal(out[0], x)
    table.check()


def test_numbers_off_a_grid_keep_their_order() -> None:
    numbers = np.sort(np.random.default_rng(0).normal(size=100)).astype(np.float32)
    rows = np.random.default_rng(1).permutation(numbers).view(np.uint8).reshape(4, -1)
    table = UnitTable(numbers.dtype, 4)
    table.learn(rows)
    out = np.empty((1, 100), np.uint8)
    table.map(numbers.view(np.uint8).reshape(1, -1), out)
    assert (np.diff(out[0].astype(int)) > 0).all()


@examples(80)
@given(
    dtype=st.sampled_from(["<f4", "<f8", "<f2", "<i4", ">u2", "<c8"]),
    batches=st.lists(st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=30), min_size=1, max_size=5),
    compiled=st.sampled_from([None, False]),
)
def test_any_bits_are_read_back(dtype: str, batches: list[list[bytes]], compiled: bool | None) -> None:
    size = np.dtype(dtype).itemsize
    layout = StackLayout(ObsSpec((3,), np.dtype(dtype)))
    store = make_store(layout, 30, 1, get_codec("table:none").bind(layout.spec), compiled=compiled)
    for batch in batches:
        numbers = [(batch * 3)[3 * row : 3 * row + 3] for row in range(len(batch))]
        rows = np.array([[list(number[:size]) for number in row] for row in numbers], np.uint8).reshape(len(batch), -1)
        store.write(np.arange(len(rows)), np.zeros(len(rows), np.int64), rows)
        np.testing.assert_array_equal(store.read(np.arange(len(rows))), rows)
        store.check()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_special_floats_keep_their_bits(dtype: Any) -> None:
    word, limits = np.dtype(f"u{np.dtype(dtype).itemsize}"), np.finfo(dtype)
    special = [np.nan, -np.nan, -0.0, 0.0, np.inf, -np.inf, 1.0, 0.5, limits.max, limits.min, limits.smallest_subnormal]
    numbers = np.array([*special, np.inf], dtype)
    numbers.view(word)[0] |= word.type(5)  # a payload inside the NaN
    numbers.view(word)[-1] |= word.type(1)  # a signalling NaN
    array = CompressedArray(40, numbers.shape, dtype, compression_method="table")
    for step in range(40):
        array[step] = np.roll(numbers, step)
    for step in range(40):
        np.testing.assert_array_equal(array[step].view(word), np.roll(numbers, step).view(word))


# ---- buffers ----


def float_image(observation: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return observation.astype(np.float32) / np.float32(255)


def colour_image(observation: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.stack([observation, 255 - observation, observation // 2], axis=-1)


def fill_beside_sb3(convert: Callable[[Any], Any], method: str, n_steps: int = 150) -> tuple[Any, Any]:
    """A compressed buffer and SB3's own with the same transitions, most of which repeat the last next observation."""
    walks = [Walk((12, 16), env) for env in range(2)]
    obs = convert(np.stack([walk.step() for walk in walks]))
    space = spaces.Box(0, 255, obs.shape[1:], obs.dtype)
    arguments = 2 * n_steps, space, spaces.Discrete(3)
    ours = CompressedReplayBuffer(*arguments, device="cpu", n_envs=2, compression_method=method)
    theirs = ReplayBuffer(*arguments, device="cpu", n_envs=2)
    for step in range(n_steps):
        next_obs = convert(np.stack([walk.step() for walk in walks]))
        for buffer in (ours, theirs):
            buffer.add(obs, next_obs, np.zeros((2, 1)), np.ones(2), np.zeros(2), [{}, {}])
        obs = next_obs if step % 9 else convert(np.stack([walk.step() for walk in walks]))
    return ours, theirs


@pytest.mark.parametrize(
    ("convert", "method"),
    [
        (float_image, "table"),
        pytest.param(float_image, "table:scroll", marks=needs("zstd")),
        (float_image, "table:camera"),
        (float_image, "table:none"),
        (float_image, "auto"),
        (colour_image, "palette"),
        (colour_image, "palette:camera"),
        (colour_image, "auto"),
    ],
)
@pytest.mark.parametrize("keeps_guess", [True, False])
def test_samples_equal_those_of_sb3(
    convert: Any, method: str, keeps_guess: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_GUESS_SHARE", 0 if keeps_guess else 1 << 40)
    ours, theirs = fill_beside_sb3(convert, method)
    for seed in range(3):
        batches = []
        for buffer in (ours, theirs):
            np.random.seed(seed)  # noqa: NPY002  # SB3 draws from this generator
            batches.append(buffer.sample(64))
        for mine, other in zip(*batches, strict=True):
            assert mine is other is None or mine.numpy().tobytes() == other.numpy().tobytes()


def test_float_images_take_as_much_as_their_bytes() -> None:
    sizes: list[int] = []
    for convert in (np.asarray, float_image):
        walk = Walk((40, 40))
        array = CompressedArray(
            600, (40, 40), convert(walk.frame).dtype, compression_method=("delta", "table")[len(sizes)]
        )
        array[:] = np.stack([convert(walk.step()) for _ in range(600)])
        sizes.append(array.memory_usage().payload)
    assert sizes[1] <= 1.02 * sizes[0]


def test_next_observations_take_no_memory_without_compression() -> None:
    ours, theirs = fill_beside_sb3(colour_image, "palette:none", 400)
    usage = ours.memory_usage()
    assert usage.payload <= 0.34 * theirs.observations.nbytes


# ---- saving ----


def filled_array(n_outside: int = 5, method: str = "palette") -> tuple[CompressedArray, npt.NDArray[np.uint8]]:
    rng, walk = np.random.default_rng(0), Walk((12, 16))
    truth = np.stack([colour_image(walk.step()) for _ in range(60)])
    truth[20 : 20 + n_outside] = rng.integers(0, 256, (n_outside, 12, 16, 3))
    array = CompressedArray(60, (12, 16, 3), np.uint8, compression_method=method)
    for step in range(60):
        array[step] = truth[step]
    return array, truth


@pytest.mark.parametrize("method", ["palette", "palette:none", "palette:camera", "palette:gzip1"])
@pytest.mark.parametrize("n_outside", [0, 5])
def test_saved_and_copied_arrays_hold_the_same(n_outside: int, method: str, tmp_path: Path) -> None:
    array, truth = filled_array(n_outside, method)
    assert isinstance(array.store.inner, TableStore)
    assert (array.store.inner.outside is not None) == (n_outside > 0)
    save(array, tmp_path / "saved")
    loaded = [load(tmp_path / "saved"), open_saved(tmp_path / "saved")]
    for other in (*loaded, pickle.loads(pickle.dumps(array)), copy.deepcopy(array)):
        np.testing.assert_array_equal(other[:], truth)
        if not other.store.read_only:
            other.store.check()
    again = load(tmp_path / "saved")
    again[3], truth[3] = truth[25], truth[25]
    again[22], truth[22] = truth[1], truth[1]
    save(again, tmp_path / "saved")
    np.testing.assert_array_equal(load(tmp_path / "saved")[:], truth)
    assert load(tmp_path / "saved").memory_usage().codecs == again.memory_usage().codecs


FORGERIES: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "unit": lambda record, arrays: record["table"].update(unit=4),
    "plane": lambda record, arrays: record["table"].update(plane=64),
    "grid": lambda record, arrays: record["table"].update(grid=[0.0, 1.0]),
    "misfits": lambda record, arrays: record["table"].update(n_misfits=-1),
    "flag": lambda record, arrays: record["table"].update(is_empty=3),
    "empty": lambda record, arrays: record["table"].update(is_empty=True),
    "no table": lambda record, arrays: record.pop("table"),
    "inner method": lambda record, arrays: record["inner"].update(choice=["palette", ""]),
    "inner layout": lambda record, arrays: record["inner"].update(stack=2),
    "inner length": lambda record, arrays: record["inner"].update(n_cells=59),
    "inner kind": lambda record, arrays: record["inner"].update(kind="table"),
    "pending": lambda record, arrays: record["inner"].update(kind="pending"),
    "outside kind": lambda record, arrays: record["outside"].update(kind="dense"),
    "outside gone": lambda record, arrays: record.update(outside=None),
    "outside list": lambda record, arrays: record.update(outside=[1]),
    "places": lambda record, arrays: arrays["places"].fill(7),
    "short places": lambda record, arrays: arrays.update(places=arrays["places"][:-1]),
    "equal entries": lambda record, arrays: arrays["table"].__setitem__(2, arrays["table"][1]),
    "long entry": lambda record, arrays: arrays["table"].__setitem__(2, 1 << 30),
    "unused entry": lambda record, arrays: arrays["table_used"].__setitem__(2, False),
    "not black": lambda record, arrays: arrays["table"].__setitem__(0, 3),
    "short table": lambda record, arrays: arrays.update(table=arrays["table"][:-1]),
    "outside payload": lambda record, arrays: arrays.update({"outside.payload": arrays["outside.payload"][:9]}),
    "outside start": lambda record, arrays: arrays["outside.starts"].fill(1 << 40),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_parts_are_refused(name: str) -> None:
    array, _ = filled_array(20)
    described, arrays = flatten(array.to_parts())
    prefix = "stores/0/"
    (saved,) = described["stores"].values()
    forged = {key.removeprefix(prefix): np.array(table) for key, table in arrays.items() if key.startswith(prefix)}
    FORGERIES[name](saved["record"], forged)
    with pytest.raises(FileFormatError):
        unflatten(described, arrays | {prefix + key: table for key, table in forged.items()})


def test_a_buffer_in_a_folder_is_continued(tmp_path: Path) -> None:
    walk, rng = Walk((12, 16)), np.random.default_rng(0)
    space = spaces.Box(0, 255, (12, 16, 3), np.uint8)
    images = np.stack([colour_image(walk.step()) for _ in range(121)])
    images[50:70] = rng.integers(0, 256, (20, 12, 16, 3))
    kept: Any = CompressedReplayBuffer(
        120, space, spaces.Discrete(3), "cpu", compression_method="palette", storage="mmap", path=tmp_path / "kept"
    )
    plain = ReplayBuffer(120, space, spaces.Discrete(3), "cpu")
    for step in range(120):
        if step == 80:
            kept.mmap_folder.close()
            kept = open_saved(tmp_path / "kept", mode="r+")
        for buffer in (kept, plain):
            buffer.add(images[step], images[step + 1], np.zeros(1), np.zeros(1), np.zeros(1), [{}])
    np.testing.assert_array_equal(load(tmp_path / "kept").observations[:], plain.observations)
    kept.mmap_folder.checkpoint()
    kept.mmap_folder.close()
    assert list(verify(tmp_path / "kept")) == []
    for other in (load(tmp_path / "kept"), open_saved(tmp_path / "kept")):
        np.testing.assert_array_equal(other.observations[:], plain.observations)
        np.testing.assert_array_equal(other.next_observations[:], plain.next_observations)
    assert "have other colours" in load(tmp_path / "kept").memory_usage().codecs[""]


def test_a_palette_of_bytes_names_its_inner_method() -> None:
    # no images: payloads of a byte codec, which depends on what is installed where they are written
    array = CompressedArray(4, (50,), np.uint8, compression_method="palette")
    array[:] = np.arange(200, dtype=np.uint8).reshape(4, 50)
    array.store.choose_method()

    record = array.store.to_parts().record

    assert [config["inner"] for _, _, config in record["codecs"]] == ["zstd1" if is_available("zstd") else "gzip1"]


@needs("zstd")
@pytest.mark.parametrize("method", ["scroll2", "delta2"])
def test_a_copy_needs_the_packages_of_its_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    array = CompressedArray(4, (12, 16), np.uint8, compression_method=method)
    array[:] = np.arange(4 * 12 * 16, dtype=np.uint8).reshape(4, 12, 16)
    array.store.choose_method()
    pickled = pickle.dumps(array)
    monkeypatch.setitem(registry._ENTRIES, "zstd", replace(registry._ENTRIES["zstd"], requires="not_installed"))

    with pytest.raises(MissingExtraError, match="codec 'zstd' needs the package"):
        pickle.loads(pickled)
