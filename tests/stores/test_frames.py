"""The frame store: exact whatever is written, in whatever order, and no larger than it says."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis.stateful import run_state_machine_as_test

from sb3_extra_buffers.codecs import get_codec
from sb3_extra_buffers.errors import HeapFullError
from sb3_extra_buffers.kernels import has_numba
from sb3_extra_buffers.kernels.state import PACKED_LZ4, PACKED_ZSTD
from sb3_extra_buffers.stores import frames, layout, payloads, segments
from sb3_extra_buffers.stores.registry import make_store
from tests.contracts.store import (
    KERNELS,
    Walk,
    check_content,
    check_rows,
    examples,
    method_params,
    n_frames_held,
    n_frames_live,
    needs,
    poison_empty,
    transitions,
    write_rows,
)
from tests.contracts.store_contract import CASES, Axis, Case, StoreMachine, planes_of


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch, frames, layout, payloads, segments)


WIDE = [
    pytest.param(case, id=str(case), marks=needs("zstd") if case.method == "delta2" else ())
    for case in (
        Case(frame=(257, 257), stack=2, n_streams=1, frames=3),
        Case("delta2", (70_000,), n_streams=1, frames=3),
    )
]


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("case", WIDE)
def test_store_of_large_frames_holds_what_a_dict_holds(case: Case, compiled: bool) -> None:
    make = staticmethod(lambda n_obs: case.build(n_obs, compiled))
    machine = type("Machine", (StoreMachine,), {"case": case, "make": make})
    run_state_machine_as_test(machine, settings=examples(2, 8))


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("method", method_params("delta", "delta2", "gzip"))
def test_a_frame_is_stored_once(method: str, compiled: bool) -> None:
    case = Case(method, (16, 16), stack=4, n_streams=1)
    store = case.build(400, compiled)
    walk = [np.full((16, 16), 0, np.uint8)]
    for step in range(203):
        frame = walk[-1].copy()
        frame.flat[step % 256] ^= step % 255 + 1
        walk.append(frame)
    frames = np.stack(walk[1:])
    stacks = np.stack([frames[row : row + 4] for row in range(200)])
    rows = case.rows(stacks)

    for row in range(199):  # as a replay buffer does: obs, then next_obs
        write_rows(store, [row, 200 + row], [0, 0], rows[[row, row + 1]])

    store.check()
    assert n_frames_live(store) == len(frames)
    assert n_frames_held(store) == len(frames)
    np.testing.assert_array_equal(store.read(np.arange(199)), rows[:199])
    np.testing.assert_array_equal(store.read(np.arange(200, 399)), rows[1:200])


@pytest.mark.parametrize("compiled", KERNELS)
def test_zero_frames_take_no_memory(compiled: bool) -> None:
    store = Case(stack=4).build(50, compiled)
    write_rows(store, list(range(50)), [0] * 50, np.zeros((50, 1024), np.uint8))
    store.check()
    assert n_frames_held(store) == 0
    assert not store.read(np.arange(50)).any()


@pytest.mark.parametrize("compiled", KERNELS)
def test_every_kind_of_segment_occurs_in_these_tests(compiled: bool) -> None:
    """Keyframes, whole frames, light and packed segments: what the machines write leads to all of them."""
    case = Case(frame=(40, 40), n_streams=2)
    store = case.build(600, compiled)
    model: dict[int, bytes] = {}
    for stream in range(2):
        rows = case.rows(planes_of(case, 300, stream))
        write_rows(store, list(range(stream, 600, 2)), [stream] * 300, rows)
        model.update(zip(range(stream, 600, 2), [row.tobytes() for row in rows], strict=True))
    check_content(store, model)
    state = store.state
    sealed = np.flatnonzero(state.lengths)
    flags = set(state.heap[state.starts[sealed]].tolist())
    assert flags == ({0, PACKED_LZ4} if compiled else {0})
    assert (state.keyframes[sealed] >= 0).any()
    assert len(np.unique(state.keyframes[sealed])) > 2
    assert n_frames_live(store) < 600


@pytest.mark.skipif(not has_numba(), reason="only compiled kernels compress")
def test_views_seen_once_are_packed_with_their_segment() -> None:
    """A view that no second segment starts from is not held as a whole frame."""
    case = Case(frame=(64, 64), n_streams=1)
    store = case.build(600, compiled=True)
    rng = np.random.default_rng(0)
    # another view of 32 x 32 tiles at every step
    tiles = [rng.integers(0, 256, (32, 32)) for _ in range(600)]
    rows = np.array([tile.repeat(2, axis=0).repeat(2, axis=1).ravel() for tile in tiles], np.uint8)
    write_rows(store, list(range(600)), [0] * 600, rows)
    store.check()
    np.testing.assert_array_equal(store.read(np.arange(600)), rows)
    # as whole frames, those that begin a segment take 1.2 MB
    assert store.memory_usage().keyframes < 120 << 10


@needs("zstd")
@pytest.mark.parametrize("compiled", KERNELS)
def test_strong_levels_pack_their_segments(compiled: bool) -> None:
    case = Case("delta2", (40, 40), n_streams=1)
    store = case.build(200, compiled)
    rows = case.rows(planes_of(case, 200))
    write_rows(store, list(range(200)), [0] * 200, rows)
    state = store.state
    sealed = np.flatnonzero(state.lengths)
    assert PACKED_ZSTD in state.heap[state.starts[sealed]]
    np.testing.assert_array_equal(store.read(np.arange(200)), rows)


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("method", method_params("delta", "delta2", "gzip"))
def test_random_overwrite_stays_bounded(method: str, compiled: bool) -> None:
    case = Case(method, (8, 8), n_streams=2)
    store = case.build(300, compiled)
    rng = np.random.default_rng(0)
    model: dict[int, bytes] = {}
    walk = Walk(case.frame, 7)
    rounds = 60 if compiled else 25
    for turn in range(rounds):
        store._next_clean = 64
        indices = rng.integers(0, 300, 100).tolist()
        rows = case.rows(walk.frames(100)[:, None])
        write_rows(store, indices, [turn % 2] * 100, rows)
        model.update(zip(indices, [row.tobytes() for row in rows], strict=True))
        # what a write leaves since the last clean-up comes on top
        slack = store.per_segment * (store.n_streams + 1) + 100
        assert n_frames_held(store) <= 2 * n_frames_live(store) + slack
    store.check()
    check_content(store, model)


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("stack", [1, 4])
def test_cleaning_again_and_again_is_exact(stack: int, compiled: bool) -> None:
    """Frames that were moved out of a dying segment lie in one that dies, too."""
    case = Case("delta", (6, 6), stack=stack, n_streams=1, frames=4 * stack)
    store = case.build(30, compiled)
    rng = np.random.default_rng(1)
    model: dict[int, bytes] = {}
    n_cleaned = 0
    for turn in range(120):
        # few stay for long, so that old segments are mostly dead
        indices = rng.integers(0, 4 if turn % 3 else 30, 8).tolist()
        rows = rng.integers(0, 256, (8, case.spec.nbytes)).astype(np.uint8)
        for i in range(8):
            # one by one: what a write replaces counts as live until the next
            held = n_frames_held(store)
            store._next_clean = 0
            write_rows(store, indices[i : i + 1], [0], rows[i : i + 1])
            n_cleaned += n_frames_held(store) < held
        model.update(zip(indices, [row.tobytes() for row in rows], strict=True))
        store.check()
        check_content(store, model)
    assert n_cleaned > 5


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("spare", [0, 300, 900, 2000])
def test_cleaning_a_full_heap_is_exact_and_raises_nothing(spare: int, compiled: bool) -> None:
    case = Case("delta", (8, 8), n_streams=2)
    store = case.build(300, compiled)
    store._next_clean = 1 << 40
    rng = np.random.default_rng(0)
    model: dict[int, bytes] = {}
    for turn in range(12):
        indices = rng.integers(0, 300, 100).tolist()
        rows = rng.integers(0, 256, (100, 64)).astype(np.uint8)
        write_rows(store, indices, [turn % 2] * 100, rows)
        model.update(zip(indices, [row.tobytes() for row in rows], strict=True))
    held = n_frames_held(store)
    # with space for what the write brings
    store.heap.limit = store.payload_bytes + 2 * 64 + spare
    store._next_clean, store._n_fresh = 0, 1

    write_rows(store, [7], [0], rows[:1])

    model[7] = rows[0].tobytes()
    store.check()
    check_content(store, model)
    assert store.payload_bytes <= store.heap.limit
    assert n_frames_held(store) <= held + 1


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize(("stack", "frames"), [(12, None), (4, 1), (4, 3), (64, None)])
def test_stacks_longer_than_a_segment(stack: int, frames: int | None, compiled: bool) -> None:
    case = Case("delta", (4, 4), stack=stack, n_streams=1, frames=frames)
    store = case.build(20, compiled)
    rows = np.random.default_rng(0).integers(0, 256, (20, case.spec.nbytes)).astype(np.uint8)
    write_rows(store, list(range(20)), [0] * 20, rows)
    store.check()
    np.testing.assert_array_equal(store.read(np.arange(20)), rows)


@pytest.mark.parametrize("compiled", KERNELS)
def test_overwriting_in_order_frees_what_is_overwritten(compiled: bool) -> None:
    case = Case(stack=4, n_streams=2)
    store = case.build(200, compiled)
    rows = [case.rows(planes_of(case, 500, stream)) for stream in range(2)]
    held = []
    for step in range(500):
        indices = [2 * step % 200, (2 * step + 1) % 200]
        write_rows(store, indices, [0, 1], np.stack([rows[0][step], rows[1][step]]))
        if step % 100 == 99:
            store.check()
            held.append(n_frames_held(store))
    # open segments, and those on the edge between old and new
    assert max(held) <= 200 + 6 + 4 * 2 * store.per_segment
    last = np.stack([np.stack([rows[0][step], rows[1][step]]) for step in range(400, 500)]).reshape(200, -1)
    np.testing.assert_array_equal(store.read(np.arange(200)), last)


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("case", CASES)
def test_a_full_heap_keeps_what_is_stored(case: Case, compiled: bool) -> None:
    store = case.build(64, compiled, heap_bytes=case.layout.frame_bytes * 6)
    model: dict[int, bytes] = {}
    refused = 0
    walk = Walk(case.frame, 3)
    for turn in range(40):
        store._next_clean = 8
        indices = [(5 * turn + step * 3) % 64 for step in range(5)]
        planes = [np.stack([walk._noise(256).astype(np.uint8) for _ in range(case.stack)]) for _ in indices]
        rows = case.rows(np.stack(planes))
        new = dict(zip(indices, [row.tobytes() for row in rows], strict=True))
        try:
            write_rows(store, indices, [turn % case.n_streams] * 5, rows)
            model.update(new)
        except HeapFullError:
            refused += 1
            # rows of the refused call are there or not, each as a whole; all others are untouched
            now = store.read(np.array(indices))
            empty = bytes(case.spec.nbytes)
            for index, row in zip(indices, now, strict=True):
                assert row.tobytes() in (new[index], model.get(index, empty))
                model[index] = row.tobytes()
        store.check()
        check_rows(store, model, list(range(64)), case.spec.nbytes)
        if turn == 20:
            store = pickle.loads(pickle.dumps(store))
    assert refused
    # overwriting with less frees space
    for index in range(64):
        try:
            write_rows(store, [index], [0], np.zeros((1, case.spec.nbytes), np.uint8))
        except HeapFullError:
            continue
    store.check()


@pytest.mark.parametrize("compiled", KERNELS)
def test_clear_forgets_and_goes_on(compiled: bool) -> None:
    case = Case(stack=4, n_streams=1)
    store = case.build(100, compiled)
    rows = case.rows(planes_of(case, 150))
    write_rows(store, list(range(100)), [0] * 100, rows[:100])

    store.clear()

    store.check()
    assert not store.read(np.arange(100)).any()
    assert store.heap.live_bytes == 0
    write_rows(store, list(range(50, 100)), [0] * 50, rows[100:])
    store.check()
    np.testing.assert_array_equal(store.read(np.arange(50, 100)), rows[100:])
    assert not store.read(np.arange(50)).any()


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("axis", ["first", "last"])
@pytest.mark.parametrize("method", method_params("delta", "delta2", "zstd"))
def test_episodes_of_several_envs_are_exact(method: str, axis: Axis, compiled: bool) -> None:
    n_envs, n_steps, size = 3, 90, 40  # 2.25 times round
    case = Case(method, (12, 9), stack=4, axis=axis, n_streams=n_envs)
    store = case.build(2 * size * n_envs, compiled)
    model: dict[int, bytes] = {}
    seen_zero_stack = False
    for step, (before, after) in enumerate(transitions((12, 9), 4, axis, n_envs, n_steps)):
        envs = np.arange(n_envs)
        for part, batch in ((0, before), (1, after)):
            indices = (part * size + step % size) * n_envs + envs
            rows = np.ascontiguousarray(batch).reshape(n_envs, -1)
            store.write(indices, envs, rows)
            model.update(zip(indices.tolist(), [row.tobytes() for row in rows], strict=True))
        planes = before if axis == "first" else np.moveaxis(before, -1, 1)
        seen_zero_stack |= not planes[:, :3].any(axis=(1, 2, 3)).all()
        if step % 10 == 0:
            store.check()
    assert seen_zero_stack
    store.check()
    check_content(store, model)
    # obs and next_obs of a batch in one walk
    steps = np.random.default_rng(0).integers(0, size * n_envs, 32)
    together = store.read(np.stack([steps, steps + size * n_envs]))
    for part in (0, 1):
        for i, index in enumerate(steps + part * size * n_envs):
            assert together[part, i].tobytes() == model[int(index)]


@pytest.fixture(scope="module")
def game() -> list[Any]:
    """Observations, terminal ones included, of a real game: ``[step, env, height, width, stack]``."""
    ale_py = pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    gymnasium = pytest.importorskip("gymnasium")
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gymnasium.register_envs(ale_py)
    env: Any = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", n_envs=2, seed=1), n_stack=4)
    rng = np.random.default_rng(0)
    observation: Any = env.reset()
    steps = []
    n_ends = 0
    for _ in range(300):
        following, _, dones, infos = env.step(rng.integers(0, 4, 2))
        terminal = following.copy()
        for index in np.flatnonzero(dones):
            n_ends += 1
            terminal[index] = infos[index]["terminal_observation"]
        steps.append((observation.copy(), terminal))
        observation = following
    env.close()
    assert n_ends > 2
    return steps


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("axis", ["first", "last"])
@pytest.mark.parametrize("method", method_params("delta", "delta2", "zstd"))
def test_a_real_game_is_exact_and_small(
    game: Any, method: str, axis: Axis, compiled: bool, save_observations: Callable[[Any], Path | None]
) -> None:
    case = Case(method, (84, 84), stack=4, axis=axis, n_streams=2)
    store = case.build(2 * 250 * 2, compiled)
    dense = np.zeros((2, 250, 2, *case.spec.shape), np.uint8)
    flat = dense.reshape(1000, -1)
    if axis == "first":
        game = [tuple(np.moveaxis(part, -1, 1) for part in step) for step in game]
    for step, pair in enumerate(game[: 300 if compiled else 120]):
        for part, batch in enumerate(pair):
            dense[part, step % 250] = batch
            indices = (part * 250 + step % 250) * 2 + np.arange(2)
            store.write(indices, np.arange(2), np.ascontiguousarray(batch).reshape(2, -1))
    store.check()

    for begin in range(0, 1000, 250):
        np.testing.assert_array_equal(store.read(np.arange(begin, begin + 250)), flat[begin : begin + 250])
    assert store.heap.live_bytes < flat.nbytes // 2 // (20 if method == "zstd" else 60)
    save_observations(store.read(np.arange(40, 200, 40)).reshape(-1, *case.spec.shape))


@pytest.mark.skipif(sys.platform != "linux", reason="maps cannot be extended here")
@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("method", method_params("delta", "gzip"))
def test_a_heap_to_which_frames_are_only_added_grows_in_place(method: str, compiled: bool) -> None:
    """Moving it to a larger one would hold both for a moment."""
    case = Case(method, (32, 32), n_streams=1)
    store = case.build(300, compiled)
    rows = np.random.default_rng(0).integers(0, 256, (300, 1024)).astype(np.uint8)
    for step in range(300):
        write_rows(store, [step], [0], rows[step : step + 1])
    assert store.heap.capacity > 100_000
    assert store.heap.n_repacks == 0
    np.testing.assert_array_equal(store.read(np.arange(300)), rows)


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("method", method_params("delta", "gzip"))
def test_a_store_in_a_file(method: str, compiled: bool, tmp_path: Path) -> None:
    case = Case(method, stack=4, n_streams=1)
    store = case.build(100, compiled, path=tmp_path / "frames.bin")
    rows = case.rows(planes_of(case, 300))
    for step in range(300):
        write_rows(store, [step % 100], [0], rows[step : step + 1])
    store.check()
    np.testing.assert_array_equal(store.read(np.arange(100)), rows[200:])
    assert (tmp_path / "frames.bin").stat().st_size >= store.heap.live_bytes > 0


@needs("zstd")
def test_a_dictionary_is_trained_again_when_it_stops_paying() -> None:
    case = Case("zstd", (32, 32), n_streams=1)
    codec = get_codec("zstd", dictionary=4096).bind(case.layout.frame_spec)
    store: Any = make_store(case.layout, 4000, 1, codec)
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, 256, (2, 64, 16), np.uint8)

    def level(which: int, count: int) -> Any:
        picks = rng.integers(0, 8 if which == 0 else 64, (count, 64))
        return tiles[which][picks].reshape(count, 1024)

    first = level(0, 1200)
    store.train(first[:200])
    second = level(1, 1500)
    for begin in range(0, 1200, 50):
        write_rows(store, list(range(begin, begin + 50)), [0] * 50, first[begin : begin + 50])
    for begin in range(0, 1500, 5):
        write_rows(store, list(range(1200 + begin, 1205 + begin)), [0] * 5, second[begin : begin + 5])

    store.check()
    assert len(store.codecs) > 1
    np.testing.assert_array_equal(store.read(np.arange(2700)), np.concatenate([first, second]))
    copied = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(copied.read(np.arange(2700)), np.concatenate([first, second]))
