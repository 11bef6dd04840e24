"""`CompressedArray` as an object: what it tells of itself, copies, dtypes, errors, siblings."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sb3_extra_buffers.compressed import CompressedArray, find_buffer_dtypes
from sb3_extra_buffers.errors import (
    ArgumentError,
    CodecLevelError,
    CodecOptionError,
    ExtraBuffersError,
    HeapFullError,
    SpecMismatchError,
    UnknownCodecError,
)
from tests.contracts.store import Walk, method_params, transitions

METHODS = method_params("auto", "delta", "delta2", "zstd", "gzip", "rle", "none", "palette")


def stacks(n_steps: int, n_envs: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """``[step, env, 4, 12, 11]``"""
    return np.stack([before for before, _ in transitions((12, 11), 4, "first", n_envs, n_steps, seed)])


def both(method: str = "auto", n_steps: int = 40) -> tuple[CompressedArray, npt.NDArray[np.uint8]]:
    dense = stacks(n_steps, 3)
    array = CompressedArray((n_steps, 3), (4, 12, 11), np.uint8, compression_method=method)
    for step in range(n_steps):
        array[step] = dense[step]
    return array, dense


@pytest.mark.parametrize("method", METHODS)
def test_it_behaves_like_a_dense_array(method: str) -> None:
    array, dense = both(method)
    assert (array.shape, array.dtype, array.ndim, array.size) == (dense.shape, dense.dtype, dense.ndim, dense.size)
    assert array.itemsize == dense.itemsize
    assert len(array) == len(dense)
    assert isinstance(array.nbytes, int)
    assert array.nbytes > 0
    np.testing.assert_array_equal(np.asarray(array), dense)
    np.testing.assert_array_equal(np.array(array, dtype=np.float32), dense.astype(np.float32))
    np.testing.assert_array_equal(array.copy(), dense)
    assert array.astype(np.int32).dtype == np.int32
    for ours, theirs in zip(array, dense, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.stack(list(reversed(list(array)))), dense[::-1])
    array.store.check()


@pytest.mark.parametrize("method", METHODS)
def test_wrapping_round_many_times(method: str) -> None:
    array = CompressedArray((10, 2), (4, 12, 11), np.uint8, compression_method=method)
    dense = np.zeros(array.shape, np.uint8)
    for step, batch in enumerate(stacks(70, 2)):
        array[step % 10] = dense[step % 10] = batch
        if step % 7 == 0:
            np.testing.assert_array_equal(np.asarray(array), dense)
            array.store.check()
    np.testing.assert_array_equal(np.asarray(array), dense)


@pytest.mark.parametrize("method", METHODS)
def test_unwritten_is_zero(method: str) -> None:
    array = CompressedArray((40, 2), (4, 12, 11), np.uint8, compression_method=method)
    assert not np.asarray(array).any()
    assert array[3].shape == (2, 4, 12, 11)
    array[7, 1] = 9
    dense = np.zeros(array.shape, np.uint8)
    dense[7, 1] = 9
    np.testing.assert_array_equal(np.asarray(array), dense)
    array[:30] = dense[:30] = stacks(30, 2)
    np.testing.assert_array_equal(np.asarray(array), dense)
    assert not array[35:].any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_steps", [2, 40])
def test_results_belong_to_the_caller(method: str, n_steps: int) -> None:
    array, dense = both(method, n_steps)
    index = np.array([0, 1, 0])
    for read in (
        lambda: array[index, index],
        lambda: array[0],
        lambda: array[0, 1],
        lambda: np.asarray(array),
        lambda: array[:, 0, 1],
    ):
        found = read()
        assert found.flags.writeable
        found[...] = 111
        np.testing.assert_array_equal(np.asarray(array), dense)
    batch = array[index, index]
    batch[0] = 3  # the third is a copy of the same observation, not the same memory
    np.testing.assert_array_equal(batch[2], dense[0, 0])


@pytest.mark.parametrize("n_steps", [1, 40])
def test_written_observations_are_copied(n_steps: int) -> None:
    array = CompressedArray((50, 3), (4, 12, 11), np.uint8)
    source = stacks(n_steps, 3)
    for step in range(n_steps):
        batch = source[step].copy()
        array[step] = batch
        batch[...] = 0  # as environments do that reuse their arrays
    np.testing.assert_array_equal(array[:n_steps], source)


OPERATIONS: list[Callable[[Any], Any]] = [
    lambda a: a == 3, lambda a: a != a[0], lambda a: a > 2, lambda a: a + 1, lambda a: 1 + a, lambda a: a / 255.0,
    lambda a: -a, lambda a: a & 3, lambda a: a - a, np.mean, np.max, lambda a: np.add(a, a),
    lambda a: np.sum(a, axis=0), lambda a: np.concatenate([a, a]), lambda a: np.array_equal(a, a), np.shape,
    lambda a: a == np.zeros(11, np.uint8), lambda a: 0 in a, lambda a: 300 in a,
]  # fmt: skip


@pytest.mark.parametrize("operation", range(len(OPERATIONS)))
def test_operators_give_plain_arrays(operation: int) -> None:
    array, dense = both(n_steps=6)
    ours, theirs = OPERATIONS[operation](array), OPERATIONS[operation](dense)
    assert type(ours) is type(theirs)
    np.testing.assert_array_equal(ours, theirs)


def test_conversion_without_a_copy_is_refused() -> None:
    array, _ = both(n_steps=4)
    with pytest.raises(ValueError, match="without a copy"):
        array.__array__(copy=False)
    with pytest.raises(TypeError):
        np.add(1, 1, out=array)  # type: ignore[call-overload]  # that is the point


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_steps", [2, 40])
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, copy.copy, lambda array: pickle.loads(pickle.dumps(array))],
    ids=["deepcopy", "copy", "pickle"],
)
def test_copies_are_equal_and_independent(method: str, n_steps: int, duplicate: Callable[[Any], Any]) -> None:
    array, dense = both(method, n_steps)
    other = duplicate(array)
    assert type(other) is CompressedArray
    assert (other.shape, other.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(np.asarray(other), dense)
    other[0] = 5
    array[1] = 6
    other.store.check()
    array.store.check()
    np.testing.assert_array_equal(array[0], dense[0])
    np.testing.assert_array_equal(other[1], dense[1])
    more = stacks(n_steps, 3, seed=9)
    for step in range(n_steps):
        array[step] = other[step] = more[step]
    np.testing.assert_array_equal(np.asarray(array), more)
    np.testing.assert_array_equal(np.asarray(other), more)


def test_views_and_siblings_keep_their_store_when_pickled_together() -> None:
    array, dense = both()
    following = array.next_view()
    following[:39] = dense[1:]
    pair = pickle.loads(pickle.dumps({"obs": array, "next": following}))
    assert pair["obs"].store is pair["next"].store
    np.testing.assert_array_equal(np.asarray(pair["obs"]), dense)
    np.testing.assert_array_equal(pair["next"][:39], dense[1:])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_siblings_share_frames(method: str, late: bool) -> None:
    array = CompressedArray((60, 2), (4, 12, 11), np.uint8, compression_method=method)
    if late:
        array[:50] = 1  # decided before there is a sibling
    following = array.next_view()
    assert type(following) is CompressedArray
    obs, after = np.zeros(array.shape, np.uint8), np.zeros(array.shape, np.uint8)
    if late:
        obs[:50] = 1
    for step, (before, then) in enumerate(transitions((12, 11), 4, "first", 2, 150)):
        array[step % 60], obs[step % 60] = before, before
        following[step % 60], after[step % 60] = then, then
    array.store.check()
    np.testing.assert_array_equal(np.asarray(array), obs)
    np.testing.assert_array_equal(np.asarray(following), after)
    steps, envs = np.random.default_rng(0).integers(0, 60, 32), np.random.default_rng(1).integers(0, 2, 32)
    found = array.read_with([following], (steps, envs))
    np.testing.assert_array_equal(found[0], obs[steps, envs])
    np.testing.assert_array_equal(found[1], after[steps, envs])
    assert all(part.flags.writeable for part in found)
    # others of another shape, and the same one twice
    found = array.read_with([array, following.reshape(60, 2, 4, 12, 11)], 3)
    for part, wanted in zip(found, (obs, obs, after), strict=True):
        np.testing.assert_array_equal(part, wanted[3])


@pytest.mark.parametrize("method", METHODS)
def test_writing_together_is_writing_twice(method: str) -> None:
    array = CompressedArray((30, 2), (4, 12, 11), np.uint8, compression_method=method)
    following = array.next_view()
    obs, after = np.zeros(array.shape, np.uint8), np.zeros(array.shape, np.uint8)
    for step, (before, then) in enumerate(transitions((12, 11), 4, "first", 2, 80)):
        at = step % 30
        array.write_with(following, at, before, then if step % 3 else np.asfortranarray(then))
        obs[at], after[at] = before, then
    array.store.check()
    np.testing.assert_array_equal(np.asarray(array), obs)
    np.testing.assert_array_equal(np.asarray(following), after)
    with pytest.raises(SpecMismatchError):
        array.write_with(following, 0, obs[0], after[0, :, :2])
    with pytest.raises(IndexError):
        array.write_with(following, 30, obs[0], after[0])


def test_only_whole_observations_of_one_store_are_read_together() -> None:
    array, _ = both(n_steps=4)
    other, _ = both(n_steps=4)
    with pytest.raises(SpecMismatchError, match="different stores"):
        array.read_with([other], 0)
    with pytest.raises(IndexError, match="parts of observations"):
        array.read_with([], (0, 0, 1))


@pytest.mark.parametrize("method", METHODS)
def test_fill(method: str) -> None:
    array, _ = both(method)
    array.fill(7)
    assert (np.asarray(array) == 7).all()
    array.fill(0)
    assert not np.asarray(array).any()
    array.store.check()


DTYPES = ["float64", "float32", "float16", "bool", "uint16", "int8", "int64", "complex64", ">i4", "uint8"]


@pytest.mark.parametrize("method", method_params("auto", "delta", "zstd", "none"))
@pytest.mark.parametrize("per_obs", [(), (7,), (9, 31)], ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_of_every_dtype(name: str, per_obs: tuple[int, ...], method: str) -> None:
    dtype = np.dtype(name)
    rng = np.random.default_rng(0)
    dense = np.frombuffer(rng.bytes(40 * 2 * int(np.prod(per_obs, dtype=int)) * dtype.itemsize), np.uint8).copy()
    if dtype == np.bool_:
        dense &= 1
    dense = dense.view(dtype).reshape(40, 2, *per_obs)  # NaN payloads included
    if dtype.kind == "f":
        dense[0], dense[1], dense[2] = np.nan, -0.0, np.inf
    array = CompressedArray((40, 2), per_obs, dtype, compression_method=method)
    for step in range(40):
        array[step] = dense[step]
    found = np.asarray(array)
    assert found.dtype == dtype
    assert found.tobytes() == dense.tobytes()
    steps = np.array([0, 1, 2, 39])
    assert array[steps, 1].tobytes() == dense[steps, 1].tobytes()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("uint8", 256), ("uint8", -1), ("uint8", 1.5), ("uint8", np.nan), ("int8", np.uint8(200)), ("bool", 2),
     ("float32", 1e300), ("float32", 0.1), ("float16", np.float32(1.0001)), ("uint16", 1 << 16), ("int64", 2.0**63),
     ("uint8", "a"), ("float32", 1j), ("float64", np.int64(2**53 + 1)), ("float64", np.uint64(2**64 - 1)),
     ("uint64", np.int64(-1)), ("int64", np.uint64(2**63)), ("uint8", np.datetime64("2020-01-01"))],
)  # fmt: skip
@pytest.mark.parametrize("n_written", [1, 40])
def test_values_that_do_not_fit_change_nothing(dtype: str, value: Any, n_written: int) -> None:
    array = CompressedArray((40, 2), (30, 30), dtype)
    array[:n_written] = 1
    before = np.asarray(array).tobytes()
    batch = np.zeros((2, 30, 30), np.asarray(value).dtype)
    batch[1, 29, 29] = value
    for index, what in ((3, batch), ((3, 1, 5), value)):
        with pytest.raises(SpecMismatchError):
            array[index] = what
        assert np.asarray(array).tobytes() == before


def test_values_that_fit_are_taken_from_any_dtype() -> None:
    array = CompressedArray((6,), (4,), np.uint8)
    array[0] = [1, 2, 3, 255]
    array[1] = np.array([1.0, 2.0, 0.0, 255.0])
    array[2] = np.array([True, False, True, True])
    array[3] = np.arange(4, dtype=np.int64)
    np.testing.assert_array_equal(array[:4], [[1, 2, 3, 255], [1, 2, 0, 255], [1, 0, 1, 1], [0, 1, 2, 3]])
    floats = CompressedArray((2,), (2,), np.float32)
    floats[0] = np.array([np.nan, 0.5])
    assert np.isnan(floats[0, 0])
    floats[1] = np.array([1 + 0j, 2**24])
    np.testing.assert_array_equal(floats[1], [1, 2**24])


def test_torch_decodes_the_array_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    array, dense = both(n_steps=5)
    monkeypatch.setattr(CompressedArray, "__getitem__", lambda *_: pytest.fail("read number by number"))
    for convert in (torch.as_tensor, torch.tensor, torch.utils.dlpack.from_dlpack):
        tensor = convert(array)
        assert tensor.dtype == torch.uint8
        np.testing.assert_array_equal(tensor.numpy(), dense)
    assert array.__dlpack_device__() == dense.__dlpack_device__()
    with pytest.raises(BufferError, match="without a copy"):
        array.__dlpack__(copy=False)


@pytest.mark.parametrize("shape", [-1, (5, -1), (2.5,), (True,)])
def test_axes_must_be_counts(shape: Any) -> None:
    with pytest.raises(ArgumentError, match="every axis of shape must be an integer of at least 0, got"):
        CompressedArray(shape, (4, 12, 11))


@pytest.mark.parametrize(
    "shape", [(2,), (3, 12, 11), (3, 4, 12, 10), (2, 4, 12, 11), (4, 3, 12, 11), (2, 3, 4, 12, 11)]
)
def test_other_shapes_are_refused_and_change_nothing(shape: tuple[int, ...]) -> None:
    array, dense = both(n_steps=5)
    with pytest.raises(SpecMismatchError, match="shape"):
        array[2] = np.zeros(shape, np.uint8)
    np.testing.assert_array_equal(np.asarray(array), dense)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"compression_method": "zstd99"}, CodecLevelError, "99"),
        ({"compression_method": "gzip10"}, CodecLevelError, "0"),
        ({"compression_method": "delta4"}, CodecLevelError, r"1\.\.3"),
        ({"compression_method": "nothing"}, UnknownCodecError, "nothing"),
        ({"compression_method": "gzip", "compression_kwargs": {"levle": 3}}, CodecOptionError, "levle"),
        ({"compression_method": "delta", "compression_kwargs": {"frames": 0}}, None, ""),
        ({"compression_method": "delta", "compression_kwargs": {"frames": 256}}, CodecOptionError, "256"),
        ({"compression_method": "delta", "compression_kwargs": {"frames": 2.5}}, CodecOptionError, "2.5"),
        ({"compression_method": "camera", "compression_kwargs": {"frames": "8"}}, CodecOptionError, "'8'"),
        ({"compression_method": "palette:auto"}, CodecOptionError, "auto"),
        ({"prefer": "memory", "compression_kwargs": {"prefer": "speed"}}, CodecOptionError, "pass only one"),
        ({"compression_method": "auto", "compression_kwargs": {"level": 3}}, CodecOptionError, "auto"),
        (
            {"compression_method": "gzip", "decompression_kwargs": {"level": 3}},
            CodecOptionError,
            "decompression_kwargs",
        ),
        ({"dtype": np.float32, "dtypes": {"elem_type": np.uint8}}, SpecMismatchError, "differ"),
        ({"dtype": object}, SpecMismatchError, "fixed size"),
    ],
)
def test_bad_options_are_refused_by_the_constructor(
    options: dict[str, Any], error: type[Exception] | None, match: str
) -> None:
    if options.get("compression_method") == "zstd99":
        pytest.importorskip("zstandard")
    if error is None:
        CompressedArray((4,), (40, 40), **options)
        return
    with pytest.raises(error, match=match) as caught:
        CompressedArray((4,), (40, 40), **options)
    assert isinstance(caught.value, ExtraBuffersError)


def test_constructor_forms() -> None:
    assert CompressedArray(5).shape == (5,)
    assert CompressedArray(5, 3).shape == (5, 3)
    assert CompressedArray([5, 2], [3, 4]).shape == (5, 2, 3, 4)
    assert CompressedArray((np.int64(5),), (np.int64(3),)).shape == (5, 3)  # type: ignore[arg-type]  # integers all the same
    assert CompressedArray(5).dtype == np.uint8
    dtypes = find_buffer_dtypes((12, 11), np.float32, "gzip")
    assert CompressedArray(5, (12, 11), dtypes=dtypes).dtype == np.float32
    assert CompressedArray(5, (12, 11), np.uint8, compression_method="gzip", compression_kwargs={"compresslevel": 9})
    assert CompressedArray(0, (12, 11)).shape == (0, 12, 11)
    assert np.asarray(CompressedArray(0, (12, 11))).shape == (0, 12, 11)
    assert np.asarray(CompressedArray((3, 2), (0, 4))).shape == (3, 2, 0, 4)
    empty = CompressedArray((3, 2), (0, 4), compression_method="gzip")
    empty[1] = np.zeros((2, 0, 4), np.uint8)
    assert empty[1].shape == (2, 0, 4)


@pytest.mark.parametrize("method", method_params("delta", "gzip"))
def test_a_full_heap_is_an_error_and_nothing_is_lost(method: str) -> None:
    rng = np.random.default_rng(0)
    array = CompressedArray((200, 1), (16, 16), np.uint8, compression_method=method, heap_bytes=20_000)
    dense = np.zeros(array.shape, np.uint8)
    step, batch, refused = 0, dense[0], None
    while refused is None and step < 200:
        batch = rng.integers(0, 256, (1, 16, 16)).astype(np.uint8)
        try:
            array[step] = batch
        except HeapFullError as error:
            refused = error
        else:
            dense[step] = batch
            step += 1
    assert refused is not None
    assert refused.limit == 20_000
    assert 20 < step < 199
    array.store.check()
    np.testing.assert_array_equal(array[:step], dense[:step])
    array.erase(slice(0, step))  # room again
    array[step] = batch
    np.testing.assert_array_equal(array[step], batch)


def test_payloads_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "frames.bin"
    array = CompressedArray((100, 2), (16, 16), np.uint8, compression_method="delta", path=path)
    chain_bytes = [Walk((16, 16), seed) for seed in range(2)]
    dense = np.zeros(array.shape, np.uint8)
    for step in range(250):
        array[step % 100] = dense[step % 100] = np.stack([walk.step() for walk in chain_bytes])
    np.testing.assert_array_equal(np.asarray(array), dense)
    assert path.stat().st_size > 0
    copied = pickle.loads(pickle.dumps(array))
    np.testing.assert_array_equal(np.asarray(copied), dense)
    copied.fill(0)
    np.testing.assert_array_equal(np.asarray(array), dense)


def test_clearing_the_store() -> None:
    array, _ = both()
    array.store.clear()
    array.store.check()
    assert not np.asarray(array).any()


def test_repr() -> None:
    array, _ = both("delta")
    assert repr(array) == "CompressedArray(shape=(40, 3, 4, 12, 11), dtype=uint8, delta)"
    young = CompressedArray((400, 3), (4, 12, 11), np.uint8)
    assert "auto (not compressed yet: the method is chosen after 256 observations, 0 so far)" in repr(young)


def test_memory_usage_adds_up() -> None:
    array, dense = both("delta")
    usage = array.memory_usage()
    assert usage.total == usage.payload + usage.index + usage.keyframes + usage.other
    assert usage.dense == dense.nbytes
    assert usage.ratio == usage.total / dense.nbytes
    assert usage.codecs == {"": "delta"}
    assert usage.as_dict()["total"] == usage.total
    assert f"{100 * usage.total / dense.nbytes:.1f} % of the {dense.nbytes / 1e3:.1f} kB in a NumPy array" in str(usage)
    assert (usage + usage).payload == 2 * usage.payload
    assert (usage + usage).transitions == usage.transitions == 120
