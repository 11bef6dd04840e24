"""Bad arguments of GPU buffers are reported and change nothing; every kind of space gives SB3's shapes."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, DictRolloutBuffer, ReplayBuffer, RolloutBuffer

from sb3_extra_buffers.errors import (
    AlgorithmMismatchError,
    ArgumentError,
    ExtraBuffersError,
    IndexOutOfRangeError,
    SpecMismatchError,
)
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer
from sb3_extra_buffers.stores import device_base
from tests.gpu_buffers.test_interrupts import IMAGE, N_ENVS, SPACES, add, contents, observed, same

SIZE = 6
TEXT = np.array(["a", "b"])
RAGGED = [[1.0], [1.0, 2.0]]


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "device":
        monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
        monkeypatch.setattr(device_base, "has_triton", lambda: True)
    return str(request.param)


def replay(space: spaces.Space[Any] = IMAGE, **options: Any) -> Any:
    options = {"compression_method": "delta", **options}
    return GpuReplayBuffer(SIZE * N_ENVS, space, spaces.Discrete(4), "cpu", N_ENVS, **options)


def rollout(space: spaces.Space[Any] = IMAGE, **options: Any) -> Any:
    options = {"compression_method": "delta", **options}
    return GpuRolloutBuffer(SIZE, space, spaces.Discrete(4), "cpu", n_envs=N_ENVS, **options)


#: Bad values for one argument of `add`, for both kinds of buffers.
BAD_NUMBERS: dict[str, Any] = {
    "too many": np.zeros(3, np.float32),
    "too few axes in the right number": np.zeros((2, 2)),
    "none": np.zeros(0),
    "text": TEXT,
    "None": None,
    "ragged": RAGGED,
    "complex": np.zeros(2, complex),
    "dict": {"a": 1},
}
BAD_FLAGS: dict[str, Any] = {
    "NaN": np.array([0, np.nan], np.float32),
    "infinity in double precision": np.array([np.inf, 0]),
    "NaN as a tensor": th.tensor([0, float("nan")]),
}
BAD_OBSERVATIONS: dict[str, Any] = {
    "another shape": np.zeros((N_ENVS, 4, 11, 12), np.uint8),
    "another number of environments": np.zeros((3, 4, 12, 12), np.uint8),
    "too large": np.full((N_ENVS, 4, 12, 12), 300, np.int64),
    "fractions": np.full((N_ENVS, 4, 12, 12), 0.5),
    "text": TEXT,
    "None": None,
    "ragged": RAGGED,
}
BAD_INFOS: dict[str, Any] = {
    "too many": [{}] * 3,
    "no dicts": [1, 2],
    "a dict without truncations": {"other": 1},
    "a dict with too many": {"TimeLimit.truncated": np.zeros(3)},
    "text in them": [{"TimeLimit.truncated": "yes"}, {}],
    "arrays in them": [{"TimeLimit.truncated": np.zeros(3)}, {}],
    "NaN in them": [{"TimeLimit.truncated": float("nan")}, {}],
}


def replay_arguments(at: int) -> list[Any]:
    return [
        observed(IMAGE, at), observed(IMAGE, at + 1), np.ones((N_ENVS, 1), np.int64), np.ones(N_ENVS, np.float32),
        np.ones(N_ENVS, np.float32), [{}] * N_ENVS,
    ]  # fmt: skip


def rollout_arguments(at: int) -> list[Any]:
    return [
        observed(IMAGE, at), np.ones((N_ENVS, 1), np.int64), np.ones(N_ENVS, np.float32),
        np.ones(N_ENVS, np.float32), th.ones(N_ENVS), th.ones(N_ENVS),
    ]  # fmt: skip


def bad_calls() -> list[Any]:
    cases = []
    for what, value in BAD_OBSERVATIONS.items():
        cases += [("replay", place, what, value) for place in (0, 1)] + [("rollout", 0, what, value)]
    for what, value in BAD_NUMBERS.items():
        if what != "too few axes in the right number":
            cases += [("replay", 2, what, value), ("rollout", 1, what, value)]
        cases += [("replay", place, what, value) for place in (3, 4)]
        cases += [("rollout", place, what, value) for place in (2, 3, 4, 5)]
    cases += [("replay", 2, "fractions", np.full((N_ENVS, 1), 0.5)), ("rollout", 1, "fractions", np.full(N_ENVS, 0.5))]
    cases += [("replay", 5, what, value) for what, value in BAD_INFOS.items()]
    for what, value in BAD_FLAGS.items():
        cases += [("replay", 4, what, value), ("rollout", 3, what, value)]
    cases += [("replay", 5, f"a dict with {what}", {"TimeLimit.truncated": value}) for what, value in BAD_FLAGS.items()]
    return [pytest.param(kind, place, value, id=f"{kind}-{place}-{what}") for kind, place, what, value in cases]


@pytest.mark.parametrize(("kind", "place", "value"), bad_calls())
def test_a_bad_argument_of_add_is_reported_and_changes_nothing(kind: str, place: int, value: Any) -> None:
    # full, so that something could be overwritten
    buffer = replay() if kind == "replay" else rollout()
    for at in range(SIZE + 2 if kind == "replay" else SIZE - 1):
        add(buffer, at)
    before = contents(buffer)
    arguments = replay_arguments(9) if kind == "replay" else rollout_arguments(9)
    arguments[place] = value

    with pytest.raises(SpecMismatchError):
        buffer.add(*arguments)

    assert same(contents(buffer), before)
    add(buffer, SIZE + 2)
    buffer.check()


def test_warnings_raised_as_errors_change_nothing() -> None:
    buffer = replay()
    add(buffer, 0)
    before = contents(buffer)
    arguments = replay_arguments(1)
    arguments[3] = np.array([1e300, 0.0])

    with pytest.raises(RuntimeWarning, match="overflow"):
        buffer.add(*arguments)

    assert same(contents(buffer), before)


def test_missing_keys_and_non_dicts_are_reported() -> None:
    space = SPACES["dict"]
    buffer = replay(space)
    add(buffer, 0)
    before = contents(buffer)
    whole = observed(space, 1)
    part = {key: value for key, value in whole.items() if key != "other"}
    rest = replay_arguments(1)[2:]
    for pair, lacking in (((part, whole), "obs lacks other"), ((whole, part), "next_obs lacks other")):
        with pytest.raises(SpecMismatchError, match=lacking):
            buffer.add(*pair, *rest)
    for bad in (np.zeros((N_ENVS, 4, 12, 12), np.uint8), None, "text"):
        with pytest.raises(SpecMismatchError, match="the space has"):
            buffer.add(bad, whole, *rest)
    assert same(contents(buffer), before)


@pytest.mark.parametrize("size", [-1, "3", 2.5, None, True, np.float32(2), [3], int, 1 << 62])
def test_bad_batch_sizes_are_reported_before_random_numbers_are_drawn(size: Any) -> None:
    buffer, rolled = replay(), rollout()
    for at in range(SIZE):
        add(buffer, at)
        add(rolled, at)
    state: Any = np.random.get_state()  # noqa: NPY002  # SB3 draws from this generator
    with pytest.raises(ArgumentError, match="batch_size"):
        buffer.sample(size)
    if size not in (None, 1 << 62):
        with pytest.raises(ArgumentError, match="batch_size"):
            next(rolled.get(size))
    with pytest.raises(ArgumentError, match="batch_size"):
        next(rolled.get(0))
    now: Any = np.random.get_state()  # noqa: NPY002  # the same
    assert np.array_equal(now[1], state[1])
    assert not rolled.generator_ready
    assert len(buffer.sample(0).rewards) == 0
    assert len(buffer.sample(np.int64(3)).rewards) == 3


def test_sampling_a_rollout_raises() -> None:
    buffer = rollout()
    for at in range(SIZE):
        add(buffer, at)
    with pytest.raises(AlgorithmMismatchError, match="get"):
        buffer.sample(4)


def test_indices_out_of_range_are_reported() -> None:
    buffer, rolled = replay(), rollout()
    add(buffer, 0)
    add(rolled, 0)
    calls: list[Callable[[], Any]] = [
        lambda: buffer.reconstruct_obs(SIZE, 0), lambda: buffer.reconstruct_obs(0, N_ENVS),
        lambda: buffer.reconstruct_nextobs(-SIZE - 1, 0), lambda: buffer.reconstruct_obs("a", 0),
        lambda: buffer.reconstruct_obs(0.5, 0), lambda: rolled.reconstruct_obs(SIZE * N_ENVS),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(IndexOutOfRangeError):
            call()
    np.testing.assert_array_equal(buffer.reconstruct_obs(-SIZE, -1), observed(IMAGE, 0)[1].reshape(-1))


@pytest.mark.parametrize("options", [
    {"heap_bytes": -1}, {"heap_bytes": 0}, {"heap_bytes": "1 GB"}, {"heap_bytes": 1.5}, {"compression_method": 7},
    {"compression_method": "made-up"}, {"compression_kwargs": {"level": "x"}}, {"compression_kwargs": 3},
    {"decompression_kwargs": "x"}, {"dtypes": 3},
])  # fmt: skip
def test_bad_options_are_reported_at_construction(options: dict[str, Any]) -> None:
    for make in (replay, rollout):
        with pytest.raises(ExtraBuffersError):
            make(**options)


@pytest.mark.parametrize("sizes", [(0, 1), (-3, 1), ("a", 1), (8, 0), (8, -1), (8, 1.5), (2.5, 1)])
def test_bad_sizes_are_reported_at_construction(sizes: Any) -> None:
    with pytest.raises(ArgumentError, match="integer"):
        GpuReplayBuffer(sizes[0], IMAGE, spaces.Discrete(4), "cpu", sizes[1])
    with pytest.raises(ArgumentError, match="integer"):
        GpuRolloutBuffer(sizes[0], IMAGE, spaces.Discrete(4), "cpu", n_envs=sizes[1])


def test_adding_to_a_complete_rollout_raises() -> None:
    buffer = rollout()
    for at in range(SIZE):
        add(buffer, at)
    before = contents(buffer)
    with pytest.raises(IndexOutOfRangeError, match="reset"):
        add(buffer, SIZE)
    assert same(contents(buffer), before)


def test_returns_need_a_value_per_environment_and_an_unread_rollout() -> None:
    buffer = rollout()
    for at in range(SIZE):
        add(buffer, at)
    for values, dones in ((th.zeros(3), np.zeros(N_ENVS)), (th.zeros(N_ENVS), np.zeros(3)), ("a", np.zeros(N_ENVS))):
        with pytest.raises(SpecMismatchError):
            buffer.compute_returns_and_advantage(values, dones)
    assert not buffer.advantages.any()
    next(buffer.get())
    with pytest.raises(SpecMismatchError, match="before get"):
        buffer.compute_returns_and_advantage(th.zeros(N_ENVS), np.zeros(N_ENVS))


# ---- spaces ----

ALL_SPACES: dict[str, spaces.Space[Any]] = {
    "a number": spaces.Box(-1, 1, (), np.float32),
    "one": spaces.Box(-1, 1, (1,), np.float32),
    "vector": spaces.Box(-1, 1, (5,), np.float64),
    "matrix": spaces.Box(-9, 9, (2, 3), np.int16),
    "image": spaces.Box(0, 255, (3, 20, 30), np.uint8),
    "discrete": spaces.Discrete(5),
    "discrete from 3": spaces.Discrete(5, start=3),
    "several discrete": spaces.MultiDiscrete([3, 4, 5]),
    "bits": spaces.MultiBinary(6),
    "bits in rows": spaces.MultiBinary((2, 3)),
    "no elements": spaces.Box(-1, 1, (0,), np.float32),
    "dict": spaces.Dict({
        "number": spaces.Box(-1, 1, (), np.float32), "discrete": spaces.Discrete(3), "bits": spaces.MultiBinary(2),
        "image": spaces.Box(0, 255, (20, 30, 3), np.uint8),
    }),
}  # fmt: skip
ALL_ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "box": spaces.Box(-1, 1, (2, 2), np.float32),
    "several discrete": spaces.MultiDiscrete([2, 3]),
    "bits": spaces.MultiBinary(3),
}


def drawn(space: spaces.Space[Any]) -> Any:
    """An observation of each environment, as a `VecEnv` gives it."""
    if isinstance(space, spaces.Dict):
        return {key: drawn(part) for key, part in space.items()}
    return np.stack([space.sample() for _ in range(N_ENVS)])


def same_samples(ours: Any, theirs: Any) -> None:
    for name in theirs._fields:
        a, b = getattr(ours, name), getattr(theirs, name)
        parts = [(a[key], b[key]) for key in b] if isinstance(b, dict) else [(a, b)]
        for mine, other in parts:
            if other is not None:
                assert mine.shape == other.shape
                assert mine.dtype == other.dtype
                assert th.equal(mine, other)


@pytest.mark.parametrize("action", ALL_ACTIONS)
@pytest.mark.parametrize("name", ALL_SPACES)
@pytest.mark.parametrize("method", ["none", "auto", "zstd1"])
def test_rollouts_of_any_space_have_sb3s_shapes(method: str, name: str, action: str, where: str) -> None:
    space, actions = ALL_SPACES[name], ALL_ACTIONS[action]
    kind: Any = DictRolloutBuffer if isinstance(space, spaces.Dict) else RolloutBuffer
    ours = GpuRolloutBuffer(4, space, actions, "cpu", n_envs=N_ENVS, compression_method=method)
    theirs = kind(4, space, actions, "cpu", n_envs=N_ENVS)
    for _ in range(4):
        step: Any = drawn(space), drawn(actions), np.ones(N_ENVS), np.zeros(N_ENVS), th.rand(N_ENVS, 1), th.rand(N_ENVS)
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(step))
    for buffer in (ours, theirs):
        buffer.compute_returns_and_advantage(th.zeros(N_ENVS), np.zeros(N_ENVS))
    batches = []
    for buffer in (ours, theirs):
        np.random.seed(0)  # noqa: NPY002  # SB3 draws from this generator
        batches.append(list(buffer.get(3)))
    for a, b in zip(*batches, strict=True):
        same_samples(a, b)


@pytest.mark.parametrize("action", ALL_ACTIONS)
@pytest.mark.parametrize("name", [name for name in ALL_SPACES if name not in ("a number", "dict")])
@pytest.mark.parametrize("method", ["none", "auto", "zstd1"])
def test_replays_of_any_space_have_sb3s_shapes(method: str, name: str, action: str, where: str) -> None:
    """SB3 cannot sample observations that are bare numbers."""
    space, actions = ALL_SPACES[name], ALL_ACTIONS[action]
    kind: Any = DictReplayBuffer if isinstance(space, spaces.Dict) else ReplayBuffer
    ours = GpuReplayBuffer(4 * N_ENVS, space, actions, "cpu", N_ENVS, compression_method=method)
    theirs = kind(4 * N_ENVS, space, actions, "cpu", N_ENVS)
    for _ in range(7):
        step: Any = drawn(space), drawn(space), drawn(actions), np.ones(N_ENVS), np.zeros(N_ENVS), [{}] * N_ENVS
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(step))
    batches = []
    for buffer in (ours, theirs):
        np.random.seed(0)  # noqa: NPY002  # SB3 draws from this generator
        batches.append(buffer.sample(5))
    same_samples(*batches)


# ---- copies ----


def numbered(buffer: Any, at: int) -> None:
    """Add a step whose every value is ``at``."""
    obs = np.full((N_ENVS, *IMAGE.shape), at % 256, np.uint8)
    rest: Any = np.full(N_ENVS, at % 4), np.full(N_ENVS, at % 256), np.zeros(N_ENVS), [{}] * N_ENVS
    buffer.add(obs, obs, *rest)


def agrees(buffer: Any) -> bool:
    """Whether every observation matches its reward."""
    found = contents(buffer)
    pairs = found["observations "].reshape(2, buffer.size() * N_ENVS, -1)
    return bool((pairs == found["rewards"].reshape(1, -1, 1)).all()) and buffer.size() == SIZE


@contextlib.contextmanager
def full_buffer_beside_a_writer(method: str) -> Iterator[Any]:
    """A full buffer that another thread keeps adding to."""
    buffer = replay(compression_method=method)
    for at in range(SIZE):
        numbered(buffer, at)
    stop = threading.Event()

    def write() -> None:
        for at in itertools.count(SIZE):
            if stop.is_set():
                return
            numbered(buffer, at)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield buffer
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("method", ["none", "delta"])
@pytest.mark.parametrize("take", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_copies_never_contain_half_a_step(method: str, take: Callable[[Any], Any]) -> None:
    with full_buffer_beside_a_writer(method) as buffer:
        for _ in range(40):
            copied = take(buffer)
            assert agrees(copied)
            copied.check()
            numbered(copied, 3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("method", ["none", "delta"])
def test_a_forked_child_never_sees_half_a_step(method: str) -> None:
    with full_buffer_beside_a_writer(method) as buffer:
        for _ in range(15):
            child = os.fork()
            if child == 0:
                os._exit(0 if agrees(buffer) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_pickled_state_does_not_change_with_later_steps(where: str) -> None:
    buffer = replay()
    for at in range(SIZE + 2):
        add(buffer, at)
    copied = pickle.loads(pickle.dumps(buffer))
    state = buffer.__reduce_ex__(4)[2]
    before = contents(buffer)
    for at in range(SIZE):
        add(buffer, 50 + at)
    # neither copy has changed
    again = GpuReplayBuffer.__new__(GpuReplayBuffer)
    again.__setstate__(pickle.loads(pickle.dumps(state)))
    for other in (copied, again):
        assert same(contents(other), before)
        other.check()
        add(other, 60)
