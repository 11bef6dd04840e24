"""`auto`: which method is chosen for which observations, and how it is reported."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces

from sb3_extra_buffers.codecs import ObsSpec, is_available
from sb3_extra_buffers.compressed import (
    CompressedArray,
    CompressedDictReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)
from sb3_extra_buffers.errors import CodecOptionError
from sb3_extra_buffers.files import load, save
from sb3_extra_buffers.stores.layout import StackLayout, find_layout


def play(n_steps: int, shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[np.uint8]:
    """Frames of a game in which a little moves."""
    rng = np.random.default_rng(seed)
    screen = np.repeat(rng.integers(0, 5, shape), 1).reshape(shape).astype(np.uint8)
    frames = []
    for _ in range(n_steps):
        screen = screen.copy()
        y, x = rng.integers(0, shape[0] - 5), rng.integers(0, shape[1] - 5)
        screen[y : y + 5, x : x + 5] = rng.integers(0, 256)
        frames.append(screen)
    return np.stack(frames)


def stacked(frames: npt.NDArray[np.uint8], stack: int, axis: int) -> npt.NDArray[np.uint8]:
    """Windows of ``stack`` frames, joined along ``axis`` of an observation where they have one, or a new one."""
    windows = []
    for step in range(len(frames) - stack + 1):
        window = list(frames[step : step + stack])
        if window[0].ndim == 2:
            windows.append(np.stack(window, axis=axis))
        else:
            windows.append(np.concatenate(window, axis=axis))
    return np.stack(windows)


def store_all(observations: npt.NDArray[Any], **options: Any) -> CompressedArray:
    array = CompressedArray(len(observations), observations.shape[1:], observations.dtype, **options)
    for step, observation in enumerate(observations):
        array[step] = observation
    np.testing.assert_array_equal(np.asarray(array), observations)
    return array


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), "float32"), ((17,), "float64"), ((5000,), "float32"), ((4, 4), "uint8"), ((3, 5, 5), "float16")],
)
def test_vectors_and_small_observations_stay_dense(shape: tuple[int, ...], dtype: str) -> None:
    array = CompressedArray((300, 2), shape, dtype)
    assert "not compressed yet" not in array.store.describe()  # no trial is needed
    array[:200] = 1
    assert array.store.layout is None
    assert array.memory_usage().codecs[""].startswith("none (auto: ")
    assert "too few to compress" in repr(array)
    usage = array.memory_usage()
    assert 200 * array[0].nbytes <= usage.payload <= usage.dense + 4096
    assert usage.total <= usage.dense + 4096


@pytest.mark.parametrize(
    ("frame", "stack", "axis", "axis_name"),
    [((42, 40), 4, 0, "first"), ((42, 40), 4, -1, "last"), ((42, 40), 3, 0, "first"), ((42, 40), 2, -1, "last")],
)
def test_stacked_gray_frames_become_differences(frame: tuple[int, int], stack: int, axis: int, axis_name: str) -> None:
    observations = stacked(play(320, frame), stack, axis)
    array = store_all(observations)
    layout = array.store.layout
    assert layout is not None
    assert (layout.stack, layout.axis) == (stack, axis_name)
    what = array.memory_usage().codecs[""]
    assert what.startswith(
        f"delta (auto: stacks of {stack} along the {axis_name} axis; bytes for a frame of 1680: delta "
    )
    assert what in repr(array)
    assert (array.memory_usage().ratio or 1) < 0.2


@pytest.mark.parametrize(("channels_first", "axis_name"), [(True, "first"), (False, "last")])
def test_stacked_rgb_frames_are_cut_into_frames(channels_first: bool, axis_name: str) -> None:
    gray = play(300, (30, 28))
    rgb = np.stack([gray, gray // 2, 255 - gray], axis=1 if channels_first else -1)
    observations = stacked(rgb, 4, 0 if channels_first else -1)
    assert observations.shape[1:] == ((12, 30, 28) if channels_first else (30, 28, 12))
    array = store_all(observations)
    layout = array.store.layout
    assert layout is not None
    assert (layout.stack, layout.axis) == (4, axis_name)
    assert "delta" in array.memory_usage().codecs[""].partition("(")[0]


def test_single_frames_become_differences() -> None:
    array = store_all(play(300, (42, 40)))
    assert array.store.layout == StackLayout(ObsSpec((42, 40), np.dtype(np.uint8)))
    assert array.memory_usage().codecs[""].startswith("delta (auto: whole observations; ")


def test_noise_stays_dense() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (100, 40, 40)).astype(np.uint8)
    array = store_all(noise)
    what = array.memory_usage().codecs[""]
    assert what.startswith("none (auto: ")
    assert "camera 1602 (" in what  # it was tried
    assert array.memory_usage().total <= noise.nbytes * 1.03


def test_rgb_frames_of_few_colours_use_a_palette() -> None:
    """Every frame another view of the same world: differences do not help, indices do."""
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (9, 3)).astype(np.uint8)
    array = store_all(colours[rng.integers(0, 9, (120, 40, 40))])
    assert array.memory_usage().codecs[""].startswith("palette")
    assert (array.memory_usage().ratio or 1) < 0.4


def test_prefer_shifts_the_choice_between_memory_and_speed() -> None:
    """Noise of few bits: compression halves it and takes several times as long to read."""
    noise = np.random.default_rng(0).normal(100, 2, (120, 40, 40)).astype(np.uint8)
    by_default, small, fast = (store_all(noise, prefer=prefer) for prefer in (None, "memory", "speed"))
    assert (small.memory_usage().ratio or 1) < 0.7
    assert small.memory_usage().total <= by_default.memory_usage().total <= 1.03 * fast.memory_usage().total
    assert fast.memory_usage().codecs[""].startswith("none")
    game = stacked(play(320, (42, 40)), 4, 0)
    assert store_all(game, prefer="speed").memory_usage().codecs[""].startswith("delta")  # also the fastest


def test_prefer_is_an_option_of_auto() -> None:
    kwargs: dict[str, Any] = {"compression_kwargs": {"prefer": "memory"}}
    assert CompressedArray(9, (40, 40), np.uint8, **kwargs).store.options == {"prefer": "memory"}
    with pytest.raises(CodecOptionError, match="'memory' or 'speed', got 'size'"):
        CompressedArray(9, (40, 40), np.uint8, compression_kwargs={"prefer": "size"})
    with pytest.raises(CodecOptionError, match="is for compression_method='auto', got 'delta'"):
        CompressedArray(9, (40, 40), np.uint8, compression_method="delta", prefer="memory")
    with pytest.raises(CodecOptionError, match="has no option 'level', only 'prefer'"):
        CompressedArray(9, (40, 40), np.uint8, compression_kwargs={"level": 3})


@pytest.mark.parametrize("kind", [CompressedReplayBuffer, CompressedRolloutBuffer])
def test_buffers_take_a_preference_and_keep_it_in_files(kind: Any, tmp_path: Path) -> None:
    image, actions = spaces.Box(0, 255, (40, 40), np.uint8), spaces.Discrete(3)
    buffer = kind(40, image, actions, "cpu", prefer="speed")
    save(buffer, tmp_path / "saved")
    for made in (buffer, load(tmp_path / "saved"), pickle.loads(pickle.dumps(buffer))):
        assert made.storage_options.compression_kwargs == {"prefer": "speed"}
        assert made.observations.store.options == {"prefer": "speed"}
    with pytest.raises(CodecOptionError, match="is for compression_method='auto', got 'zstd'"):
        kind(40, image, actions, "cpu", compression_method="zstd", prefer="speed")


def test_prefer_applies_to_the_keys_that_are_left_to_auto() -> None:
    space = spaces.Dict(
        a=spaces.Box(0, 255, (40, 40), np.uint8), b=spaces.Box(0, 255, (40, 40), np.uint8), c=spaces.Box(-1, 1, (3,))
    )
    buffer = CompressedDictReplayBuffer(
        40, space, spaces.Discrete(3), "cpu", compression_method={"a": "gzip1"}, prefer="memory"
    )
    assert {key: buffer.observations[key].store.options for key in "ab"} == {"a": {}, "b": {"prefer": "memory"}}
    CompressedDictReplayBuffer(40, space, spaces.Discrete(3), "cpu", prefer="memory")


@pytest.mark.parametrize("n_envs", [1, 4])
def test_keyframes_of_an_opening_do_not_count_for_ever(n_envs: int) -> None:
    """The first scenes differ completely, then little changes: the differences decide, not the keyframes."""
    rng = np.random.default_rng(0)
    scenes = np.kron(rng.integers(0, 256, (12, 12, 12)), np.ones((1, 7, 7))).astype(np.uint8)
    game = play(60, (84, 84), 1)
    frames = np.concatenate([np.repeat(scenes, 2, axis=0), game, game[::-1]])
    observations = stacked(frames, 4, 0)
    array = CompressedArray((len(observations), n_envs), observations.shape[1:], np.uint8)
    for step, observation in enumerate(observations):
        array[step] = observation
    assert array.memory_usage().codecs[""].startswith("delta (auto")


def test_a_named_method_is_used_even_if_it_saves_nothing() -> None:
    array = store_all(
        np.random.default_rng(0).integers(0, 256, (60, 40, 40)).astype(np.uint8), compression_method="gzip3"
    )
    assert array.memory_usage().codecs == {"": "gzip3"}


def test_each_method_is_described_by_its_name() -> None:
    frames = play(40, (30, 30))
    for method in ("delta", "delta2", "zstd-5", "igzip1", "lz4-frame/3", "rle", "none", "gzip0"):
        if not is_available(method.split("/")[0].rstrip("0123456789-")) or (
            method == "delta2" and not is_available("zstd")
        ):
            continue
        assert store_all(frames, compression_method=method).memory_usage().codecs[""] == method


def test_the_choice_is_kept_when_cleared_and_copied() -> None:
    array = store_all(stacked(play(200, (42, 40)), 4, 0))
    what = array.store.describe()
    array.store.clear()
    assert array.store.describe() == what
    array[0] = 3
    assert (array[0] == 3).all()


def test_choosing_without_observations_stays_undecided() -> None:
    array = CompressedArray(50, (40, 40), np.uint8)
    array.store.choose_method()
    assert "not compressed yet" in array.store.describe()
    array[:] = play(50, (40, 40))
    assert "not compressed yet" not in array.store.describe()


def rows_of(observations: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return observations.reshape(len(observations), -1)


def test_layout_needs_evidence() -> None:
    spec = ObsSpec((4, 20, 20), np.dtype(np.uint8))
    moving = stacked(play(60, (20, 20)), 4, 0)
    still = np.repeat(moving[:1], 30, axis=0)
    noise = np.random.default_rng(0).integers(0, 256, (30, 4, 20, 20)).astype(np.uint8)
    assert find_layout(spec, [rows_of(moving)]).stack == 4
    assert find_layout(spec, [rows_of(still)]).stack == 1
    assert find_layout(spec, [rows_of(noise)]).stack == 1
    assert find_layout(spec, []).stack == 1
    assert find_layout(spec, [rows_of(moving[:1])]).stack == 1
    # streams are looked at one by one: neighbours of different envs prove nothing
    assert find_layout(spec, [rows_of(moving[:25]), rows_of(moving[30:])]).stack == 4


@pytest.mark.parametrize("dtype", ["uint8", "float32", "uint16"])
def test_a_stack_of_any_dtype_is_found(dtype: str) -> None:
    observations = stacked(play(80, (24, 24)), 4, -1).astype(dtype)
    array = store_all(observations)
    assert array.store.layout is not None
    assert (array.store.layout.stack, array.store.layout.axis) == (4, "last")
