"""Segments of whole frames: uncompressed stacks, `scroll` with its dictionaries, `camera`."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sb3_extra_buffers.codecs import ObsSpec, get_codec
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.registry import make_store
from tests.contracts.store import KERNELS, needs

Frames = npt.NDArray[np.uint8]
FRAME = ObsSpec((32, 32), np.dtype(np.uint8))


def make(method: str, n_obs: int, compiled: bool | None = None, **options: Any) -> Any:
    codec = get_codec(method, **options).bind(FRAME)
    return make_store(StackLayout(FRAME), n_obs, 1, codec, compiled=compiled)


def write(store: Any, frames: Frames, n_obs: int | None = None) -> None:
    for number, frame in enumerate(frames.reshape(len(frames), -1)):
        store.write(np.array([number % (n_obs or len(frames))]), np.array([0]), frame[None])


def returning_scenery(n_frames: int, seed: int = 0) -> Frames:
    """A few images, one after the other, over and over: nothing repeats within a segment."""
    images = np.random.default_rng(seed).integers(0, 256, (37, 32, 32), np.uint8)
    return images[np.arange(n_frames) % 37]


@pytest.mark.parametrize("axis", ["first", "last"])
def test_uncompressed_stacks_hold_each_frame_once(axis: Any) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (303, 32, 32), np.uint8)
    stacks = np.stack([frames[i : i + 4] for i in range(300)])
    if axis == "last":
        stacks = np.moveaxis(stacks, 1, -1)
    layout = StackLayout(ObsSpec(stacks.shape[1:], np.dtype(np.uint8)), 4, axis)
    rows = np.ascontiguousarray(stacks).reshape(300, -1)
    store = make_store(layout, 300, 1, get_codec("none"))
    store.write(np.arange(300), np.zeros(300, np.int64), rows)
    np.testing.assert_array_equal(store.read(np.arange(300)), rows)
    assert store.memory_usage().total < 1.2 * frames.nbytes


@needs("zstd")
@pytest.mark.parametrize("compiled", KERNELS)
def test_scenery_that_returns_is_found_in_a_dictionary(compiled: bool) -> None:
    frames = returning_scenery(2000)
    store = make("scroll2", len(frames), compiled)
    write(store, frames)
    usage = store.memory_usage()
    assert usage.keyframes > 0
    assert usage.total < 0.8 * frames.nbytes  # 16 of 37 images are in the dictionary
    np.testing.assert_array_equal(store.read(np.arange(2000)), frames.reshape(2000, -1))
    copied = pickle.loads(pickle.dumps(store))
    write(copied, frames[:100], 2000)
    copied.check()
    np.testing.assert_array_equal(copied.read(np.arange(2000)), frames.reshape(2000, -1))


@needs("zstd")
def test_dictionaries_are_dropped_when_nothing_refers_to_them() -> None:
    store, size = make("scroll2", 600), FRAME.nbytes
    for seed in range(8):
        write(store, returning_scenery(1200, seed), 600)
        store.check()
    expected = returning_scenery(1200, 7)[600:].reshape(600, -1)
    np.testing.assert_array_equal(store.read(np.arange(600)), expected)
    n_dictionaries = len(store.state.keyframe_refs)
    assert n_dictionaries * store.state.config.keyframe_bytes < 6 * 17 * size


@pytest.mark.parametrize("method", [pytest.param("scroll", marks=needs("scroll")), "camera", "none"])
def test_noise_takes_no_more_than_it_is(method: str) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (2000, 32, 32), np.uint8)
    store = make(method, len(frames))
    write(store, frames)
    assert store.memory_usage().payload < 1.01 * frames.nbytes


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("method", [pytest.param("scroll", marks=needs("scroll")), "camera"])
def test_kernels_of_both_kinds_write_the_same_segments(method: str, compiled: bool) -> None:
    pytest.importorskip("numba")
    frames = np.cumsum(np.random.default_rng(0).integers(0, 2, (100, 32, 32), np.uint8), axis=0, dtype=np.uint8)
    store, other = make(method, 100, compiled), make(method, 100, not compiled)
    write(store, frames)
    write(other, frames)
    for segment in np.flatnonzero(store.heap.lengths).tolist():
        assert bytes(store.heap.read(segment)) == bytes(other.heap.read(segment))


@pytest.mark.parametrize("stack", [2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 2, 3), (3, 5, 3), (9, 7, 3), (2, 3, 2), (4, 4, 8), (3, 3, 9)])
def test_stacks_along_the_last_axis_are_joined(shape: tuple[int, ...], stack: int) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (40 + stack, *shape), np.uint8)
    rows = np.stack([np.concatenate(list(frames[i : i + stack]), axis=-1) for i in range(40)])
    layout = StackLayout(ObsSpec(rows.shape[1:], np.dtype(np.uint8)), stack, "last")
    for method in ("none", "delta"):
        store = make_store(layout, 40, 1, get_codec(method))
        store.write(np.arange(40), np.zeros(40, np.int64), rows.reshape(40, -1))
        np.testing.assert_array_equal(store.read(np.arange(40)), rows.reshape(40, -1))
