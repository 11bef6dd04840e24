"""``auto`` looks at its choice again as a store fills, and moves observations to a better method."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.compressed import CompressedArray, CompressedReplayBuffer
from sb3_extra_buffers.files import load, save
from sb3_extra_buffers.stores import observation
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.observation import ObservationStore
from tests.torture.interrupts import Injector

Rows = npt.NDArray[np.uint8]

SHAPE = (40, 40)
N_ENVS, N_STEPS = 2, 400
# steps after which 1,024 observations have been written, half of them next observations
LOOK = 256


def opening_then_game(n_steps: int = N_STEPS, n_envs: int = N_ENVS, n_noise: int = 70) -> Rows:
    """``[step, env, ...]``: ``n_noise`` steps of noise, then a scene in which little changes."""
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (n_steps, n_envs, *SHAPE)).astype(np.uint8)
    for step in range(n_noise + 1, n_steps):
        frames[step] = frames[step - 1]
        frames[step, :, rng.integers(40), :3] = rng.integers(0, 256, 3)
    return frames


def new_store(method: str = "auto", n_steps: int = N_STEPS, **arguments: Any) -> ObservationStore:
    store = ObservationStore(ObsSpec(SHAPE, np.dtype(np.uint8)), N_ENVS, method, **arguments)
    store.allocate(n_steps * N_ENVS)
    store.allocate(n_steps * N_ENVS)
    return store


def add(store: ObservationStore, step: int, frames: Rows, n_steps: int = N_STEPS) -> None:
    index = step % n_steps * N_ENVS
    rows, following = (frames[at % len(frames)].reshape(N_ENVS, -1) for at in (step, step + 1))
    store.write_step(index, index + n_steps * N_ENVS, rows, following)


def filled(n_steps: int, **arguments: Any) -> tuple[ObservationStore, Rows]:
    store, frames = new_store(**arguments), opening_then_game()
    for step in range(n_steps):
        add(store, step, frames)
    return store, frames


def contents(store: ObservationStore) -> Rows:
    return store.read(np.arange(store.n_obs))


def expected(frames: Rows, n_steps: int) -> Rows:
    """What a store holds after ``n_steps``."""
    rows = np.zeros((2, N_STEPS, N_ENVS, int(np.prod(SHAPE))), np.uint8)
    rows[0, :n_steps] = frames[:n_steps].reshape(n_steps, N_ENVS, -1)
    rows[1, :n_steps] = np.roll(frames, -1, axis=0)[:n_steps].reshape(n_steps, N_ENVS, -1)
    return rows.reshape(2 * N_STEPS * N_ENVS, -1)


def test_the_method_changes_when_the_opening_was_not_typical(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sb3_extra_buffers")
    store, frames = filled(LOOK - 1)
    assert store.describe().startswith("none (auto")
    add(store, LOOK - 1, frames)
    assert store.describe().startswith("delta (auto")
    assert [record.message for record in caplog.records if "changed from none to delta" in record.message]
    np.testing.assert_array_equal(contents(store), expected(frames, LOOK))
    for step in range(LOOK, N_STEPS):
        add(store, step, frames)
    np.testing.assert_array_equal(contents(store), expected(frames, N_STEPS))
    store.check()
    # frames that follow each other are stored once
    assert store.memory_usage().total < 0.5 * frames.nbytes


def test_observations_are_shared_with_their_successors_after_a_change() -> None:
    store, frames = filled(LOOK)
    written, _ = filled(LOOK, method="delta")
    # copied in order, it takes what it would have taken from the start
    assert store.memory_usage().payload <= 1.02 * written.memory_usage().payload
    assert np.array_equal(contents(store), contents(written))
    del frames


def test_a_ring_is_copied_from_the_oldest_step_on() -> None:
    n_steps = 150
    frames = np.concatenate([opening_then_game(80), np.roll(opening_then_game(), -71, 0)[:328]])
    store, plain = new_store(n_steps=n_steps), new_store("none", n_steps)
    for step in range(2 * n_steps):
        add(store, step, frames, n_steps)
        add(plain, step, frames, n_steps)
        if step == LOOK:
            assert store.describe().startswith("delta (auto")
    np.testing.assert_array_equal(contents(store), contents(plain))
    store.check()


def test_the_same_writes_lead_to_the_same_store() -> None:
    first, _ = filled(N_STEPS)
    second, _ = filled(N_STEPS)
    assert first.describe() == second.describe()
    assert first.memory_usage().payload == second.memory_usage().payload


def test_a_change_can_be_undone_with_the_write_that_led_to_it() -> None:
    store, frames = filled(LOOK - 1)
    store.commit()
    add(store, LOOK - 1, frames)
    assert store.describe().startswith("delta")
    assert store.undo_write()
    np.testing.assert_array_equal(contents(store), expected(frames, LOOK - 1))
    assert not store.undo_write()
    add(store, LOOK - 1, frames)
    np.testing.assert_array_equal(contents(store), expected(frames, LOOK))
    store.check()


def test_an_interrupt_at_any_moment_leaves_the_old_store_or_the_new_one() -> None:
    store, frames = filled(LOOK - 1, compiled=False)
    before, after = expected(frames, LOOK - 1), expected(frames, LOOK)
    with Injector() as counter:
        add(copy.deepcopy(store), LOOK - 1, frames)
    moments = np.random.default_rng(0).integers(1, counter.count, 10)
    for at in moments.tolist():
        tried = copy.deepcopy(store)
        tried.commit()
        with contextlib.suppress(KeyboardInterrupt), Injector(at, KeyboardInterrupt()):
            add(tried, LOOK - 1, frames)
        found = contents(tried)
        assert np.array_equal(found, before) or np.array_equal(found, after), f"interrupt {at}"
        add(tried, LOOK - 1, frames)
        np.testing.assert_array_equal(contents(tried), after)
        tried.check()
        assert tried.choice is not None
        assert tried.inner is not None
        assert tried.choice.method == tried.inner.describe()


def test_a_change_that_runs_out_of_memory_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store, frames = filled(LOOK - 1)

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no")

    monkeypatch.setattr(observation, "make_store", fail)
    for step in range(LOOK - 1, N_STEPS):
        add(store, step, frames)
    assert store.describe().startswith("none")
    np.testing.assert_array_equal(contents(store), expected(frames, N_STEPS))


@pytest.mark.parametrize("arguments", [{"method": "none"}, {"method": "gzip1"}, {"heap_bytes": 10_000_000}])
def test_a_named_method_or_a_limit_keeps_the_method(arguments: dict[str, Any]) -> None:
    store, frames = filled(LOOK - 1, **arguments)
    before = store.describe()
    add(store, LOOK - 1, frames)
    assert store.describe() == before


def test_a_store_with_a_journal_keeps_its_method() -> None:
    store, frames = filled(LOOK - 1)
    changes: list[Any] = []
    store.on_change = lambda *change: changes.append(change)
    add(store, LOOK - 1, frames)
    assert changes
    assert store.describe().startswith("none")


def test_copies_look_again_as_the_original_does() -> None:
    store, frames = filled(LOOK - 1)
    for copied in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        add(copied, LOOK - 1, frames)
        assert copied.describe().startswith("delta")
        again = pickle.loads(pickle.dumps(copied))
        np.testing.assert_array_equal(contents(again), expected(frames, LOOK))
        assert again.describe() == copied.describe()


def test_a_saved_array_looks_again_after_loading(tmp_path: Path) -> None:
    frames = opening_then_game(1200, 1, 300)[:, 0]
    array = CompressedArray(1200, SHAPE, np.uint8)
    array[:300], array[300:1000] = frames[:300], frames[300:1000]
    assert array.store.describe().startswith("none")
    save(array, tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    for copied in (array, loaded):
        for step in range(1000, 1200):
            copied[step] = frames[step]
        assert copied.store.describe().startswith("delta")
        np.testing.assert_array_equal(np.asarray(copied), frames)
    # an incremental save of another kind of store
    save(array, tmp_path / "saved")
    np.testing.assert_array_equal(np.asarray(load(tmp_path / "saved")), frames)


def test_a_saved_buffer_looks_again_after_loading(tmp_path: Path) -> None:
    frames = opening_then_game(n_noise=250)
    space = spaces.Box(0, 255, SHAPE, np.uint8)
    buffer: Any = CompressedReplayBuffer(2000 * N_ENVS, space, spaces.Discrete(3), "cpu", n_envs=N_ENVS)

    def add_to(buffer: Any, steps: range) -> None:
        for step in steps:
            rest: Any = np.zeros((N_ENVS, 1), np.int64), np.full(N_ENVS, step), np.zeros(N_ENVS, bool), [{}] * N_ENVS
            buffer.add(frames[step], frames[step + 1], *rest)

    add_to(buffer, range(200))
    assert buffer.memory_usage().codecs[""].startswith("none")
    buffer.save(tmp_path / "saved")
    loaded = CompressedReplayBuffer.load(tmp_path / "saved")
    for each in (loaded, buffer):
        for _ in range(6):
            add_to(each, range(251, 399))
        assert each.memory_usage().codecs[""].startswith("delta")
        np.testing.assert_array_equal(each.observations[200:348], frames[251:399])


def test_a_stack_that_the_opening_hid_is_found() -> None:
    rng = np.random.default_rng(0)
    frames = np.zeros((700, 4, *SHAPE), np.uint8) + rng.integers(0, 9, SHAPE).astype(np.uint8)
    for step in range(300, 700):
        frames[step, :3] = frames[step - 1, 1:]
        frames[step, 3] = frames[step - 1, 3]
        row = rng.integers(30)
        frames[step, 3, row : row + 10, :20] = rng.integers(0, 256, (10, 20))
    array = CompressedArray(1400, frames.shape[1:], np.uint8)
    for step in range(1400):
        array[step] = frames[step % 700] if step < 700 else frames[300 + step % 400]
        if step == 600:
            assert array.store.layout == StackLayout(array.store.spec)
    assert array.store.layout == StackLayout(array.store.spec, 4)
    np.testing.assert_array_equal(array[:700], frames)


def test_samples_are_those_of_sb3_across_a_change() -> None:
    frames = opening_then_game()
    space = spaces.Box(0, 255, SHAPE, np.uint8)
    ours: Any = CompressedReplayBuffer(300 * N_ENVS, space, spaces.Discrete(3), "cpu", n_envs=N_ENVS)
    theirs: Any = ReplayBuffer(300 * N_ENVS, space, spaces.Discrete(3), "cpu", n_envs=N_ENVS)
    for step in range(N_STEPS - 1):
        for buffer in (ours, theirs):
            rest: Any = np.zeros((N_ENVS, 1), np.int64), np.full(N_ENVS, step), np.zeros(N_ENVS, bool), [{}] * N_ENVS
            buffer.add(frames[step], frames[step + 1], *rest)
        if step % 40 == 39 or abs(step - LOOK) < 3:
            batches = []
            for buffer in (ours, theirs):
                np.random.seed(step)  # noqa: NPY002  # SB3's generator
                batches.append(buffer.sample(50))
            for mine, other in zip(*batches, strict=True):
                assert (mine is None and other is None) or np.array_equal(mine, other)
    assert ours.memory_usage().codecs[""].startswith("delta")
