"""Windows of a ring: their indices, where they end, and what views read of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.view import StoreView
from sb3_extra_buffers.stores.windows import (
    append_next,
    cut_at_ends,
    mask_of,
    pad_windows,
    steps_to_end,
    window_indices,
    window_steps,
)
from tests.contracts.store import examples, transitions


def test_windows_go_on_at_the_start_of_the_ring() -> None:
    starts, streams = np.array([3, 1]), np.array([0, 1])
    assert window_steps(starts, 3, 5).tolist() == [[3, 4, 0], [1, 2, 3]]
    assert window_indices(starts, streams, 3, 5, 2).tolist() == [[6, 8, 0], [3, 5, 7]]
    assert window_indices(starts, streams, 0, 5, 2).shape == (2, 0)


def test_a_window_ends_with_the_episode_of_its_first_step() -> None:
    ends = np.array([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]], bool)
    lengths = cut_at_ends(ends)
    assert lengths.tolist() == [2, 1, 4, 4]
    assert mask_of(lengths, 4).sum(axis=1).tolist() == [2, 1, 4, 4]
    assert cut_at_ends(ends[:, :0]).tolist() == [0, 0, 0, 0]
    indices = np.arange(16).reshape(4, 4)
    assert pad_windows(indices, lengths).tolist() == [[0, 1, 1, 1], [4, 4, 4, 4], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert append_next(indices, lengths, 100).tolist() == [
        [0, 1, 101, 101, 101], [4, 104, 104, 104, 104], [8, 9, 10, 11, 111], [12, 13, 14, 15, 115],
    ]  # fmt: skip


@examples(60)
@given(st.data())
def test_steps_to_the_end_are_those_that_a_walk_takes(data: st.DataObject) -> None:
    n_steps, n_streams = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    flags = data.draw(st.lists(st.booleans(), min_size=n_steps * n_streams, max_size=n_steps * n_streams))
    ends = np.array(flags).reshape(n_steps, n_streams)
    newest, n_valid = data.draw(st.integers(0, n_steps - 1)), data.draw(st.integers(0, n_steps))
    before = ends.copy()

    found = steps_to_end(ends, newest, n_valid)

    np.testing.assert_array_equal(ends, before)
    expected = np.zeros(ends.shape, np.int64)
    for stream in range(n_streams):
        for age in range(n_valid):
            step = (newest - age) % n_steps
            count = 1
            while not ends[(step + count - 1) % n_steps, stream] and count <= age:
                count += 1
            expected[step, stream] = count
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("n_steps", [4, 60])
@pytest.mark.parametrize("axis", ["first", "last"])
def test_a_view_reads_windows_and_their_last_next_observation(n_steps: int, axis: str) -> None:
    shape = (4, 12, 12) if axis == "first" else (12, 12, 4)
    store = ObservationStore(ObsSpec(shape, np.dtype(np.uint8)), 3, "delta")
    view = StoreView(store, (n_steps, 3))
    next_view = view.next_view()
    pairs = list(transitions((12, 12), 4, axis, 3, n_steps))
    for step, (obs, next_obs) in enumerate(pairs):
        view.write_with(next_view, step, obs, next_obs)
    dense, next_dense = (np.stack(part) for part in zip(*pairs, strict=True))
    steps, envs = window_steps(np.array([0, 1, n_steps - 2]), 3, n_steps), np.array([0, 2, 1])

    np.testing.assert_array_equal(view.read_windows(steps, envs), dense[steps, envs[:, None]])
    np.testing.assert_array_equal(view.read_windows(steps - n_steps, envs), dense[steps, envs[:, None]])
    windows = view.read_windows(steps, envs, next_view=next_view)
    np.testing.assert_array_equal(windows[:, :-1], dense[steps, envs[:, None]])
    np.testing.assert_array_equal(windows[:, -1], next_dense[steps[:, -1], envs])
    out = np.full(windows.shape, 0xAA, np.uint8)
    assert view.read_windows(steps, envs, out=out, next_view=next_view) is out
    np.testing.assert_array_equal(out, windows)

    newest = view.read_windows(steps, envs, newest_only=True)
    if store.layout is None:
        assert n_steps == 4  # too few to know how observations are stacked
        np.testing.assert_array_equal(newest, windows[:, :-1])
    else:
        np.testing.assert_array_equal(newest, windows[:, :-1, 3] if axis == "first" else windows[:, :-1, ..., 3])


@pytest.mark.parametrize("size", [(84, 84), (83, 85)])
@pytest.mark.parametrize("axis", ["first", "last"])
@pytest.mark.parametrize("method", ["delta", "none"])
def test_batches_larger_than_the_caches_are_read_exactly(size: tuple[int, int], axis: str, method: str) -> None:
    shape = (4, *size) if axis == "first" else (*size, 4)
    store = ObservationStore(ObsSpec(shape, np.dtype(np.uint8)), 2, method)
    view = StoreView(store, (60, 2))
    dense = np.stack([obs for obs, _ in transitions(size, 4, axis, 2, 60)])
    view[...] = dense
    steps, envs = window_steps(np.arange(16) * 7 % 60, 60, 60), np.arange(16) % 2
    expected = dense[steps, envs[:, None]]
    assert expected.nbytes > 24 << 20
    assert store.layout is not None
    assert store.layout.stack == 4
    out = np.full(expected.shape, 0xAA, np.uint8)
    np.testing.assert_array_equal(view.read_windows(steps, envs, out=out), expected)
    np.testing.assert_array_equal(view[steps, np.broadcast_to(envs[:, None], steps.shape)], expected)
    # memory that is not aligned
    odd = np.full(expected.size + 1, 0xAA, np.uint8)[1:].reshape(expected.shape)
    np.testing.assert_array_equal(view.read_windows(steps, envs, out=odd), expected)


def test_a_view_of_another_dtype_converts_windows() -> None:
    store = ObservationStore(ObsSpec((5,), np.dtype(np.uint8)), 2, "none")
    view = StoreView(store, (6, 2), dtype=np.dtype(np.float32))
    values = np.arange(60, dtype=np.uint8).reshape(6, 2, 5)
    view[...] = values
    windows = view.read_windows(np.array([[1, 2]]), np.array([1]))
    assert windows.dtype == np.float32
    np.testing.assert_array_equal(windows, values[[[1, 2]], 1])


@pytest.mark.parametrize("method", ["none", "delta", "gzip", "auto"])
def test_memory_that_does_not_fit_windows_is_refused(method: str) -> None:
    store = ObservationStore(ObsSpec((6, 7), np.dtype(np.uint8)), 1, method)
    store.allocate(40)
    rows = np.random.default_rng(0).integers(1, 256, (40, 42)).astype(np.uint8)
    # auto holds the first rows as they come
    n_written = 4 if method == "auto" else 40
    store.write(np.arange(n_written), np.zeros(n_written, np.int64), rows[:n_written])
    indices = np.arange(4).reshape(2, 2)
    wide = np.zeros((2, 2, 84), np.uint8)
    for out in (np.zeros((2, 2, 41), np.uint8), np.zeros((2, 3, 42), np.uint8), wide[..., ::2], wide.view("<u2")):
        with pytest.raises(SpecMismatchError, match="out must be"):
            store.read_windows(indices, out=out)
    np.testing.assert_array_equal(
        store.read_windows(indices, out=wide.reshape(-1)[:168].reshape(2, 2, 42)), rows[indices]
    )


def test_windows_that_do_not_fit_are_refused() -> None:
    store = ObservationStore(ObsSpec((5,), np.dtype(np.uint8)), 2, "none")
    view = StoreView(store, (6, 2))
    steps = np.array([[1, 2], [2, 3]])
    with pytest.raises(IndexOutOfRangeError, match=r"got int64 of shape \(2, 2\) and int64 of shape \(1,\)"):
        view.read_windows(steps, np.array([1]))
    with pytest.raises(IndexOutOfRangeError, match="expected integer steps"):
        view.read_windows(steps + 0.5, np.array([0, 1]))  # type: ignore[arg-type]
    with pytest.raises(IndexOutOfRangeError, match="out of bounds"):
        view.read_windows(steps + 4, np.array([0, 1]))
    with pytest.raises(SpecMismatchError, match="C-contiguous"):
        view.read_windows(steps, np.array([0, 1]), out=np.zeros((2, 3, 5), np.uint8))
    with pytest.raises(SpecMismatchError, match="got int8 of shape"):
        view.read_windows(steps, np.array([0, 1]), out=np.zeros((2, 2, 5), np.int8))
    other = StoreView(ObservationStore(store.spec, 2, "none"), (6, 2))
    with pytest.raises(SpecMismatchError, match="the same store"):
        view.read_windows(steps, np.array([0, 1]), next_view=other)
