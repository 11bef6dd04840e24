"""Replay buffers with vectors: SB3's batches to the last bit, whatever is written in whatever order."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_extra_buffers import files
from sb3_extra_buffers._sb3 import transitions, views
from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedReplayBuffer,
)
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.kernels import has_numba, timeline_kernels
from sb3_extra_buffers.kernels.dispatch import is_refusal
from sb3_extra_buffers.stores import timeline
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.timeline import TimelineStore
from tests.contracts.buffer import (
    ACTIONS,
    SPACES,
    assert_same_contents,
    assert_same_samples,
    contents,
    is_same,
    play,
    sample,
)
from tests.contracts.store import KERNELS, examples
from tests.torture.interrupts import interrupt_at

# without it vectors are plain arrays, which the tests of all spaces cover
pytestmark = pytest.mark.skipif(not has_numba(), reason="numba is not installed")

VECTORS = ["vector", "double", "discrete", "multi discrete", "multi binary"]
BOX = SPACES["vector"]
TWO = spaces.Dict({"a": SPACES["vector"], "b": SPACES["double"], "c": SPACES["discrete"]})


def without_numba(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transitions, "step_kernels", lambda: None)
    patch.setattr(timeline, "timeline_kernels", lambda compiled: timeline_kernels(False))


@pytest.fixture(params=KERNELS)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Steps and batches by one compiled call, or through the store with the reference kernels."""
    if not request.param:
        without_numba(monkeypatch)
    return bool(request.param)


def pair(space: Any, size: int, n_envs: int, actions: Any = ACTIONS["box"], **options: Any) -> tuple[Any, Any]:
    ours, theirs = (
        (CompressedDictReplayBuffer, DictReplayBuffer)
        if isinstance(space, spaces.Dict)
        else (CompressedReplayBuffer, ReplayBuffer)
    )
    arguments: Any = (size, space, actions, "cpu", n_envs)
    return ours(*arguments, **options), theirs(*arguments, **options)


def add_all(buffers: Any, space: Any, n_steps: int, n_envs: int, actions: Any = ACTIONS["box"], seed: int = 0) -> None:
    for step in play(space, n_envs, n_steps, seed, actions):
        for buffer in buffers:
            # a Dict buffer of SB3 changes the dict that it is given
            buffer.add(*copy.deepcopy(tuple(step)))


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("name", [*VECTORS, "two"])
def test_samples_are_those_of_sb3(name: str, actions: str, n_envs: int, compiled: bool) -> None:
    space = TWO if name == "two" else SPACES[name]
    ours, theirs = pair(space, 30 * n_envs, n_envs, ACTIONS[actions])
    assert (ours._transitions is not None) == compiled
    for part, n_steps in enumerate((1, 10, 25, 40)):
        add_all((ours, theirs), space, n_steps, n_envs, ACTIONS[actions], part)
        assert_same_contents(contents(theirs), contents(ours))
        for batch_size in (0, 1, 32):
            assert_same_samples(ours, theirs, seed=part, batch_size=batch_size)


@pytest.mark.parametrize("n_steps", [17, 30, 71])
def test_samples_are_those_of_optimize_memory_usage(n_steps: int, compiled: bool) -> None:
    options = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    ours, theirs = pair(BOX, 60, 2, **options)
    add_all((ours, theirs), BOX, n_steps, 2)
    mine, other = sample(ours, 200, 0), sample(theirs, 200, 0)
    assert mine[1] == other[1]
    for name in ("observations", "actions", "dones", "rewards"):
        is_same(getattr(mine[0], name), getattr(other[0], name))


class Env(gym.Env[Any, Any]):
    observation_space, action_space = BOX, ACTIONS["box"]


def test_normalised_samples_are_those_of_sb3(compiled: bool) -> None:
    ours, theirs = pair(BOX, 60, 2)
    add_all((ours, theirs), BOX, 50, 2)
    env = VecNormalize(DummyVecEnv([Env] * 2))
    env.obs_rms.update(theirs.observations[:20].reshape(-1, 17))
    env.ret_rms.update(theirs.rewards.reshape(-1))
    assert_same_samples(ours, theirs, env=env)


def test_a_batch_is_one_allocation_of_aligned_tensors() -> None:
    ours, _ = pair(TWO, 60, 2)
    add_all((ours,), TWO, 50, 2)
    batch = ours.sample(33)
    tensors = [
        *batch.observations.values(),
        *batch.next_observations.values(),
        batch.actions,
        batch.dones,
        batch.rewards,
    ]
    assert all(tensor.data_ptr() % 64 == 0 and tensor.is_contiguous() for tensor in tensors)
    addresses = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    for (address, nbytes), (following, _) in itertools.pairwise(addresses):
        assert address + nbytes <= following < address + nbytes + 64
    before = contents(ours)
    for tensor in tensors:
        tensor.zero_()
    assert_same_contents(before, contents(ours))


@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 257, 1000])
def test_the_global_generator_is_used_as_by_numpy(size: int) -> None:
    ours, theirs = pair(BOX, size, 1)
    add_all((ours, theirs), BOX, size, 1)
    for seed in range(5):
        assert_same_samples(ours, theirs, seed=seed, batch_size=50)


def test_another_bit_generator_and_another_randint_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair(BOX, 60, 3)
    add_all((ours, theirs), BOX, 20, 3)
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        batches = []
        for buffer in (ours, theirs):
            np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
            batches.append(buffer.sample(40))
        is_same(*batches)
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]
    monkeypatch.setattr(np.random, "randint", lambda low, high=None, size=None: np.zeros(size, np.int64))
    is_same(ours.sample(5), theirs.sample(5))


CONVERTED: dict[str, Any] = {
    "as they are": lambda array: array,
    "double": lambda array: array.astype(np.float64),
    "strided": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "column by column": np.asfortranarray,
    "read-only": lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape),
    "lists": lambda array: array.tolist(),
    "unaligned": lambda array: np.frombuffer(b"0" + array.tobytes(), array.dtype, offset=1).reshape(array.shape).copy(),
    "one more axis": lambda array: array[None][0],
}


@pytest.mark.parametrize("how", CONVERTED)
def test_arguments_of_every_kind_are_stored_as_in_sb3(how: str, compiled: bool) -> None:
    ours, theirs = pair(BOX, 40, 2)
    convert = CONVERTED[how]
    for step in play(BOX, 2, 33, 0, ACTIONS["box"]):
        theirs.add(*step)
        done = step.done if how == "double" else convert(step.done)
        ours.add(
            convert(step.obs), convert(step.next_obs), convert(step.action), convert(step.reward), done, step.infos
        )
    assert_same_contents(contents(theirs), contents(ours))


@pytest.mark.parametrize(
    "wrong",
    [
        {"obs": np.zeros((2, 16), np.float32)},
        {"obs": np.zeros((3, 17), np.float32)},
        {"next_obs": np.zeros((2, 17, 1), np.float32)},
        {"next_obs": None},
        {"action": np.zeros((2, 4), np.float32)},
        {"reward": np.zeros(3, np.float32)},
        {"reward": []},
        {"done": np.zeros(3, np.bool_)},
        {"infos": [{}] * 3},
        {"infos": 3},
    ],
)
def test_wrong_arguments_change_nothing(wrong: dict[str, Any], compiled: bool) -> None:
    ours, _ = pair(BOX, 40, 2)
    add_all((ours,), BOX, 25, 2)
    before = contents(ours)
    step = next(play(BOX, 2, 1, 7, ACTIONS["box"]))
    with pytest.raises(SpecMismatchError):
        ours.add(*step._replace(**wrong))
    assert_same_contents(before, contents(ours))
    assert ours.n_added == 25


def test_episodes_share_all_but_their_ends() -> None:
    ours, theirs = pair(BOX, 1000, 1)
    add_all((ours, theirs), BOX, 2500, 1)
    inner = ours.observations.store.inner
    assert isinstance(inner, TimelineStore)
    inner.check()
    assert inner.n_aside <= int((theirs.dones > 0).sum()) + 2
    assert_same_contents(contents(theirs), contents(ours))


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 9)),
    st.tuples(st.just("obs"), st.lists(st.integers(0, 11), min_size=1, max_size=5)),
    st.tuples(st.just("next"), st.lists(st.integers(0, 11), min_size=1, max_size=5)),
    st.tuples(st.just("shift"), st.integers(0, 10)),
    st.tuples(st.just("part"), st.integers(0, 11)),
    st.tuples(st.just("pickle"), st.just(0)),
    st.tuples(st.just("copy"), st.just(0)),
    st.tuples(st.just("columns"), st.just(0)),
    st.tuples(st.just("reset"), st.just(0)),
)


@pytest.mark.parametrize("is_compiled", KERNELS)
@examples(40)
@given(operations=st.lists(OPERATIONS, max_size=25), n_envs=st.integers(1, 3))
def test_it_holds_what_arrays_hold(is_compiled: bool, operations: list[Any], n_envs: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not is_compiled:
            without_numba(patch)
        _check_against_arrays(operations, n_envs)


def _check_against_arrays(operations: list[Any], n_envs: int) -> None:
    space = SPACES["double"]
    ours, theirs = pair(space, 12 * n_envs, n_envs)
    steps = play(space, n_envs, 10**6, 0, ACTIONS["box"])
    rng = np.random.default_rng(0)
    for operation, argument in operations:
        if operation == "add":
            for _ in range(argument):
                step = next(steps)
                ours.add(*step)
                theirs.add(*step)
        elif operation in ("obs", "next"):
            name = "observations" if operation == "obs" else "next_observations"
            values = rng.normal(size=(len(argument), n_envs, 5))
            for buffer in (ours, theirs):
                getattr(buffer, name)[argument] = values
        elif operation == "shift":
            # values that are shared, moved
            for buffer in (ours, theirs):
                buffer.observations[argument] = np.array(buffer.next_observations[argument])
                buffer.next_observations[argument] = np.array(buffer.observations[argument + 1])
        elif operation == "part":
            for buffer in (ours, theirs):
                buffer.next_observations[argument, 0, 1:3] = -0.0
        elif operation == "pickle":
            ours = pickle.loads(pickle.dumps(ours))
        elif operation == "copy":
            ours = copy.deepcopy(ours)
        elif operation == "columns":
            for buffer in (ours, theirs):
                buffer.rewards = buffer.rewards * 2
                buffer.dones = buffer.dones.copy()
        elif operation == "reset":
            ours.reset()
            theirs.reset()
        assert_same_contents(contents(theirs), contents(ours))
        ours.observations.store.check()
        if theirs.size():
            assert_same_samples(ours, theirs)


def test_columns_of_another_kind_are_written_and_read(compiled: bool) -> None:
    ours, theirs = pair(BOX, 20, 2)
    for buffer in (ours, theirs):
        buffer.rewards = np.asfortranarray(buffer.rewards)
        buffer.dones = buffer.dones.astype(np.float64).astype(np.float32)[:, ::-1]
    add_all((ours, theirs), BOX, 15, 2)
    assert_same_contents(contents(theirs), contents(ours))
    assert_same_samples(ours, theirs)


class TenTimes(CompressedReplayBuffer):
    def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
        samples = super()._get_samples(batch_inds, env)
        return samples._replace(rewards=samples.rewards * 10)


def test_a_subclass_may_read_batches_itself(compiled: bool) -> None:
    class Doubled(CompressedReplayBuffer):
        def _fit_step(self, *args: Any) -> Any:
            step = super()._fit_step(*args)
            return (*step[:6], step[6] * 2, *step[7:])

    theirs = ReplayBuffer(40, BOX, ACTIONS["box"], "cpu", 2)
    scaled, doubled = (cls(40, BOX, ACTIONS["box"], "cpu", 2) for cls in (TenTimes, Doubled))
    add_all((theirs, scaled, doubled), BOX, 30, 2)
    want = sample(theirs, 16, 0)[0]
    is_same(sample(scaled, 16, 0)[0], want._replace(rewards=want.rewards * 10))
    is_same(sample(doubled, 16, 0)[0], want._replace(rewards=want.rewards * 2))


def test_a_subclass_that_is_loaded_reads_batches_itself(tmp_path: Path) -> None:
    ours, theirs = pair(BOX, 40, 2)
    add_all((ours, theirs), BOX, 30, 2)
    files.save(ours, tmp_path / "saved")
    loaded = files.load(tmp_path / "saved", TenTimes)
    assert type(loaded) is TenTimes
    want = sample(theirs, 16, 0)[0]
    is_same(sample(loaded, 16, 0)[0], want._replace(rewards=want.rewards * 10))


def test_indices_count_from_the_end_as_in_numpy(compiled: bool) -> None:
    ours, theirs = pair(BOX, 40, 2)
    add_all((ours, theirs), BOX, 30, 2)
    steps = np.array([-1, 3, -20, 19])
    np.random.seed(0)  # noqa: NPY002
    mine = ours._get_samples(steps)
    np.random.seed(0)  # noqa: NPY002
    is_same(mine, theirs._get_samples(steps))
    for bad in (20, -21):
        with pytest.raises(IndexError):
            ours._get_samples(np.array([0, bad]))
    envs = np.array([0, -1, 1, -2])
    for name in ("observations", "next_observations"):
        for index in ((steps, envs), (steps, envs, slice(None)), (steps, envs, slice(2)), (steps[:, None], envs)):
            np.testing.assert_array_equal(getattr(ours, name)[index], getattr(theirs, name)[index])


@pytest.mark.parametrize("n_envs", [1, 2])
def test_n_step_returns(n_envs: int, compiled: bool) -> None:
    ours, theirs = (
        cls(40 * n_envs, BOX, ACTIONS["box"], "cpu", n_envs, n_steps=3, gamma=0.9)
        for cls in (CompressedNStepReplayBuffer, NStepReplayBuffer)
    )
    add_all((ours, theirs), BOX, 70, n_envs)
    assert_same_samples(ours, theirs, batch_size=64)


COPIES: dict[str, Any] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda buffer: pickle.loads(pickle.dumps(buffer)),
    "pickle of a copy": lambda buffer: pickle.loads(pickle.dumps(copy.deepcopy(buffer))),
}


@pytest.mark.parametrize("space", [BOX, spaces.Dict({"a": BOX, "b": SPACES["double"]})], ids=["box", "dict"])
@pytest.mark.parametrize("how", COPIES)
def test_copies_add_and_sample_with_one_compiled_call_too(
    space: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair(space, 40, 2)
    add_all((ours, theirs), space, 27, 2)
    ours = COPIES[how](ours)
    slow: list[str] = []

    def note(cls: Any, name: str) -> None:
        method = getattr(cls, name)

        def run(*args: Any) -> Any:
            slow.append(name)
            return method(*args)

        monkeypatch.setattr(cls, name, run)

    note(type(ours), "_fit_step")
    for name in ("read", "read_pairs", "write", "write_step"):
        note(ObservationStore, name)
    for step in play(space, 2, 30, 5, ACTIONS["box"]):
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(tuple(step._replace(infos=[{}, {}]))))
    assert_same_samples(ours, theirs)
    # where more next observations have to be kept, a step takes the usual path
    assert set(slow) <= {"_fit_step"}
    assert len(slow) < 5


@pytest.mark.parametrize("space", [BOX, TWO], ids=["box", "dict"])
@pytest.mark.parametrize("is_odd", [False, True])
def test_an_interrupt_leaves_a_whole_step_or_none(space: Any, is_odd: bool, compiled: bool) -> None:
    ours, _ = pair(space, 40, 2)
    add_all((ours,), space, 27, 2)
    step: Any = next(play(space, 2, 1, 5, ACTIONS["box"]))
    if is_odd:
        step = step._replace(infos=[{"TimeLimit.truncated": True}, {}], reward=step.reward.astype(np.float64))
    before, after = contents(ours), copy.deepcopy(ours)
    after.add(*copy.deepcopy(tuple(step)))
    added = contents(after)
    position = 1
    while True:
        buffer = copy.deepcopy(ours)
        if not interrupt_at(position, functools.partial(buffer.add, *copy.deepcopy(tuple(step)))).where:
            break
        buffer.recover()
        assert_same_contents(added if buffer.n_added == 28 else before, contents(buffer))
        for view in (buffer._views.by_key).values():
            view.store.check()
        assert_same_samples(buffer, after if buffer.n_added == 28 else ours)
        buffer.add(*copy.deepcopy(tuple(step)))
        position += max(position // 9, 1)
    assert position > 50


def test_rewards_of_another_dtype_are_not_refused_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair(BOX, 400, 2)
    refused, staged = [], []
    stage = transitions.Transitions._stage

    def note_refused(problem: BaseException) -> bool:
        refused.append(ours.n_added)
        return is_refusal(problem)

    def note_staged(self: Any, *step: Any) -> bool:
        staged.append(ours.n_added)
        return stage(self, *step)

    add_all((ours, theirs), BOX, 200, 2)
    monkeypatch.setattr(transitions, "is_refusal", note_refused)
    monkeypatch.setattr(transitions.Transitions, "_stage", note_staged)
    for number, step in enumerate(play(BOX, 2, 190, 5, ACTIONS["box"])):
        step = step._replace(infos=[{}, {}])
        if number < 100:
            # as from environments in other processes
            step = step._replace(reward=step.reward.astype(np.float64))
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(tuple(step)))
    # an error of numba's takes ten times as long as the step
    assert 0 < len(refused) < 5
    # what fits takes the fastest path again before long
    assert max(staged) < 380
    assert_same_contents(contents(theirs), contents(ours))
    assert_same_samples(ours, theirs)


def test_an_interrupt_of_sample_leaves_the_random_numbers_of_sb3() -> None:
    filled, theirs = pair(BOX, 40, 2)
    add_all((filled, theirs), BOX, 27, 2)
    for position in itertools.count(1):
        # a copy looks for NumPy's generator again
        ours: Any = copy.deepcopy(filled)
        if not interrupt_at(position, ours._transitions._random.find).where:
            break
        assert_same_samples(ours, theirs)
    assert position > 10


def test_a_step_for_which_there_is_no_memory_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair(BOX, 400, 1)
    theirs = ReplayBuffer(400, BOX, ACTIONS["box"], "cpu")

    def fail(*_: Any) -> Any:
        raise MemoryError("no more")

    failed = 0
    for step in play(BOX, 1, 400, 0, ACTIONS["box"]):
        with monkeypatch.context() as patch:
            patch.setattr(TimelineStore, "_resize", fail)
            try:
                ours.add(*step)
            except MemoryError:
                failed += 1
                assert_same_contents(contents(theirs), contents(ours))
            else:
                theirs.add(*step)
                continue
        ours.add(*step)
        theirs.add(*step)
    assert failed > 1
    assert_same_contents(contents(theirs), contents(ours))


def test_threads_read_whole_rows_while_steps_are_added(compiled: bool) -> None:
    space = spaces.Box(-np.inf, np.inf, (17,), np.float32)
    ours = CompressedReplayBuffer(64, space, ACTIONS["box"], "cpu")
    problems: list[Any] = []
    stop = threading.Event()

    def check(batch: Any) -> None:
        for values in batch:
            # every element of a row is the number of its step
            if not (values == values[:, :1]).all():
                problems.append(values)

    def read() -> None:
        rng = np.random.default_rng()
        while not stop.is_set():
            samples = ours.sample(16)
            check([samples.observations.numpy(), samples.next_observations.numpy()])
            further = samples.next_observations[:, 0] - samples.observations[:, 0]
            if not th.isin(further, th.tensor([1.0, 1000.0])).all():
                problems.append(samples)
            steps = rng.integers(0, 64, 16)
            check([ours.observations[steps, np.zeros(16, np.int64)], ours.next_observations[:, 0]])

    def row(number: float) -> Any:
        return np.full((1, 17), number, np.float32)

    ours.add(row(0), row(1), np.zeros((1, 3), np.float32), np.zeros(1), np.zeros(1), [{}])
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    number = 1.0
    for count in range(1500):
        ends = count % 7 == 0
        after = row(number + (1000 if ends else 1))
        ours.add(row(number), after, np.zeros((1, 3), np.float32), np.zeros(1, np.float32), np.array([ends]), [{}])
        number += 2 if ends else 1
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems


def test_saved_buffers_are_loaded_with_their_next_observations(tmp_path: Path, compiled: bool) -> None:
    ours, theirs = pair(TWO, 60, 2)
    add_all((ours, theirs), TWO, 50, 2)
    files.save(ours, tmp_path / "saved")
    loaded = files.load(tmp_path / "saved")
    assert_same_contents(contents(theirs), contents(loaded))
    assert all(isinstance(view.store.inner, TimelineStore) for view in loaded.observations.values())
    add_all((loaded, theirs), TWO, 20, 2, seed=3)
    assert_same_samples(loaded, theirs)
    report = files.save(loaded, tmp_path / "saved")
    assert report.incremental
    assert_same_contents(contents(theirs), contents(files.load(tmp_path / "saved")))
    assert list(files.verify(tmp_path / "saved", deep=True)) == []


def test_arrays_of_earlier_versions_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair(TWO, 60, 2)
    with monkeypatch.context() as patch:
        patch.setattr(views, "has_numba", lambda: False)
        old, _ = pair(TWO, 60, 2)
    assert all(type(array) is np.ndarray for array in old.observations.values())
    add_all((ours, theirs, old), TWO, 50, 2)
    files.save(old, tmp_path / "old")
    loaded = files.load(tmp_path / "old")
    assert_same_contents(contents(theirs), contents(loaded))
    assert all(isinstance(view.store.inner, TimelineStore) for view in loaded.observations.values())
    add_all((loaded, theirs), TWO, 20, 2, seed=3)
    assert_same_samples(loaded, theirs)


def test_without_numba_vectors_are_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair(TWO, 60, 2)
    add_all((ours, theirs), TWO, 50, 2)
    files.save(ours, tmp_path / "saved")
    without_numba(monkeypatch)
    monkeypatch.setattr(views, "has_numba", lambda: False)
    loaded = files.load(tmp_path / "saved")
    assert all(type(array) is np.ndarray for array in loaded.observations.values())
    assert_same_contents(contents(theirs), contents(loaded))
    add_all((loaded, theirs), TWO, 20, 2, seed=3)
    assert_same_contents(contents(theirs), contents(loaded))
    assert_same_samples(loaded, theirs)


def test_what_is_intact_of_a_damaged_save_is_kept(tmp_path: Path) -> None:
    ours, _ = pair(BOX, 4000, 1)
    add_all((ours,), BOX, 3000, 1)
    files.save(ours, tmp_path / "saved")
    (data,) = (tmp_path / "saved").glob("data-*.bin")
    content = bytearray(data.read_bytes())
    row = np.asarray(ours.observations[2000]).tobytes()
    content[content.index(row)] ^= 1
    data.write_bytes(content)
    repaired = files.repair(tmp_path / "saved", tmp_path / "repaired")
    assert 1900 < repaired.n_steps < 2100
    loaded = files.load(tmp_path / "repaired")
    kept = loaded.pos
    np.testing.assert_array_equal(loaded.observations[:kept], ours.observations[:kept])
    np.testing.assert_array_equal(loaded.next_observations[:kept], ours.next_observations[:kept])
    assert_same_samples(loaded, loaded)
