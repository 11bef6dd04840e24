"""A write of a GPU buffer that is interrupted anywhere leaves the buffer unchanged, or stores the whole step."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.errors import HeapFullError
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer
from sb3_extra_buffers.kernels.columns_torch import gather_columns_reference
from sb3_extra_buffers.kernels.delta_tables import HALF_BITS, WriteJob
from sb3_extra_buffers.kernels.delta_torch import write_rows_reference
from sb3_extra_buffers.stores import device_base, device_columns
from sb3_extra_buffers.stores.device_base import IndexBatch
from sb3_extra_buffers.stores.device_frames import DeviceFrameStore, DeviceFrameWrite
from tests.torture.interrupts import Injector

N_ENVS, SIZE = 2, 12
IMAGE = spaces.Box(0, 255, (4, 12, 12), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
SPACES: dict[str, spaces.Space[Any]] = {
    "image": IMAGE,
    "vector": VECTOR,
    # channels last: rows are rearranged on their way
    "last": spaces.Box(0, 255, (11, 11, 3), np.uint8),
    "dict": spaces.Dict({"image": IMAGE, "speed": VECTOR, "other": IMAGE}),
}

Contents = dict[str, Any]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store observations as on a GPU, with reference kernels."""
    monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
    monkeypatch.setattr(device_base, "has_triton", lambda: True)


def observed(space: spaces.Space[Any], at: int, noise: bool = False) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: observed(part, at + number, noise) for number, (key, part) in enumerate(space.items())}
    assert isinstance(space, spaces.Box)
    random = np.random.default_rng(at)
    if space.dtype == np.float32:
        return random.standard_normal((N_ENVS, *space.shape)).astype(np.float32)
    if noise:
        return random.integers(0, 256, (N_ENVS, *space.shape)).astype(np.uint8)
    if space.shape[0] != 4:
        shown = np.tile(np.arange(space.shape[0], dtype=np.uint8)[:, None, None], (N_ENVS, 1, *space.shape[1:]))
        shown[:, at % 11] = at
        return shown
    frames = []
    for number in range(at, at + 4):
        frame = np.tile(np.arange(12, dtype=np.uint8) // 3, (N_ENVS, 12, 1))
        frame[0, number % 12, (5 * number) % 12] = 200
        frame[1, (3 * number) % 12, number % 12] = number % 250 + 1
        frames.append(frame)
    return np.stack(frames, axis=1)


def add(buffer: Any, at: int, noise: bool = False) -> None:
    space = buffer.observation_space
    random = np.random.default_rng(at)
    action, reward = random.integers(0, 4, (N_ENVS, 1)), random.standard_normal(N_ENVS).astype(np.float32)
    done = random.random(N_ENVS) < 0.2
    if isinstance(buffer, GpuReplayBuffer):
        infos = [{"TimeLimit.truncated": bool(at % 2)}] * N_ENVS
        buffer.add(observed(space, at, noise), observed(space, at + 1, noise), action, reward, done, infos)
    else:
        value = th.from_numpy(reward)
        buffer.add(observed(space, at, noise), action, reward, done, value[:, None] + 1, value - 1)


def contents(buffer: Any) -> Contents:
    """Everything that can be read."""
    held = buffer.size()
    names = ("actions", "rewards", "dones", "timeouts", "episode_starts", "values", "log_probs")
    found: Contents = {name: getattr(buffer, name)[:held].copy() for name in names if hasattr(buffer, name)}
    found["pos"], found["full"] = buffer.pos, buffer.full
    for key, store in buffer.obs_stores.items():
        indices = np.arange(store.n_sets)[:, None] * store.n_obs + np.arange(held * N_ENVS)
        found[f"observations {key}"] = store.read(IndexBatch(indices)).numpy()
    return found


def same(a: Contents, b: Contents) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def filled(make: Callable[[], Any], count: int, noise: bool = False) -> Any:
    buffer = make()
    for at in range(count):
        if isinstance(buffer, GpuRolloutBuffer) and buffer.full:
            buffer.reset()
        add(buffer, at, noise)
    if isinstance(buffer, GpuRolloutBuffer) and buffer.full:
        buffer.reset()
    return buffer


def interrupt_everywhere(
    make: Callable[[], Any], count: int, n_points: int = 60, noise: bool = False, write: Any = add
) -> None:
    """Interrupt the write of step ``count`` at ``n_points`` bytecodes, and compare what the buffer holds then."""
    saved = pickle.dumps(filled(make, count, noise))
    before, done = contents(pickle.loads(saved)), pickle.loads(saved)
    with Injector() as counter:
        write(done, count, noise)
    after, seen = contents(done), set()
    done.reset() if isinstance(done, GpuRolloutBuffer) and done.full else None
    add(done, count + 1, noise)
    later = contents(done)
    for point in np.unique(np.linspace(1, counter.count, n_points).astype(int)).tolist():
        error = MemoryError("injected") if point % 3 == 0 else KeyboardInterrupt()
        buffer = pickle.loads(saved)
        injector = Injector(point, error)
        with contextlib.suppress(KeyboardInterrupt, MemoryError), injector:
            write(buffer, count, noise)
        if not injector.where:
            break  # the first write took more bytecodes: something was cached
        found = contents(buffer)
        whole = same(found, after)
        assert whole or same(found, before), injector.where
        seen.add(whole)
        buffer.check()
        if isinstance(buffer, GpuReplayBuffer) and buffer.size():
            buffer.sample(5)
        if not whole:
            write(buffer, count, noise)
            assert same(contents(buffer), after), injector.where
        if isinstance(buffer, GpuRolloutBuffer) and buffer.full:
            buffer.reset()
        add(buffer, count + 1, noise)
        assert same(contents(buffer), later), injector.where
        buffer.check()
    assert False in seen


def replay(space: str, method: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        return GpuReplayBuffer(
            SIZE * N_ENVS, SPACES[space], spaces.Discrete(4), "cpu", N_ENVS, compression_method=method, **options
        )

    return make


def rollout(space: str, method: str) -> Callable[[], Any]:
    def make() -> Any:
        return GpuRolloutBuffer(
            SIZE, SPACES[space], spaces.Discrete(4), "cpu", n_envs=N_ENVS, compression_method=method
        )

    return make


@pytest.mark.parametrize("count", [0, 5, SIZE - 1, SIZE, 20])
@pytest.mark.parametrize("space", ["vector", "image"])
def test_interrupted_writes_of_raw_observations(space: str, count: int) -> None:
    interrupt_everywhere(replay(space, "none"), count)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("count", [0, 3, 5, 9, SIZE - 1, SIZE, 30])
@pytest.mark.parametrize("space", ["vector", "image", "last", "dict"])
def test_interrupted_writes_of_raw_observations_to_a_device_store(space: str, count: int) -> None:
    interrupt_everywhere(replay(space, "none"), count, n_points=40)


@pytest.mark.usefixtures("on_device")
# empty, collecting, choosing a method, the first lap, its end, and later laps
@pytest.mark.parametrize("count", [0, 3, 5, 9, SIZE - 1, SIZE, 30])
@pytest.mark.parametrize("space", ["image", "last", "dict"])
def test_interrupted_writes_to_a_device_store(space: str, count: int) -> None:
    interrupt_everywhere(replay(space, "delta"), count, n_points=40)


@pytest.mark.usefixtures("on_device")
def test_interrupted_writes_while_the_heap_is_packed_or_nearly_full() -> None:
    make = replay("image", "delta", heap_bytes=18_000)
    for count in range(14, 34, 3):
        interrupt_everywhere(make, count, n_points=25, noise=True)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("method", ["none", "delta"])
@pytest.mark.parametrize("count", [3, SIZE - 1, 17])
def test_interrupted_writes_of_rollouts(method: str, count: int) -> None:
    interrupt_everywhere(rollout("image", method), count)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("method", ["palette:none", "palette:delta"])
@pytest.mark.parametrize("count", [0, 5, SIZE - 1, SIZE, 30])
def test_interrupted_writes_of_indices(method: str, count: int) -> None:
    interrupt_everywhere(replay("last", method), count, n_points=40)
    # more colours than a palette has
    interrupt_everywhere(replay("last", method), count, n_points=20, noise=True)


class OneLaunch:
    """A GPU kernel as the host sees it: launched by one call that nothing interrupts."""

    def __init__(self, tables: Any, shape: Any, columns: Any = None) -> None:
        self.tables, self.shape, self.columns = tables, shape, columns

    def write(
        self, job: tuple[int, ...], obs: th.Tensor, next_obs: th.Tensor, n_sets: int, report: th.Tensor, columns: Any
    ) -> None:
        traced = sys.gettrace()
        sys.settrace(None)
        step, oldest, parity, *tail = job[:5]
        *launch, _, _, first, last = job[7:]
        indices, tail_and_launch = (first, last)[:n_sets], [high << HALF_BITS | low for high, low in (tail, launch)]
        unpacked = WriteJob(step, oldest, indices, parity, tail_and_launch[0])
        shape = (self.tables.tails.numel(), self.shape.stack, -1)
        frames = [part.view(-1).view(th.uint8).view(shape) for part in (obs, next_obs)[:n_sets]]
        if columns is not None:
            self._write_columns(step, *columns)
        write_rows_reference(self.tables, self.shape, frames, unpacked, report, tail_and_launch[1])
        sys.settrace(traced)

    def _write_columns(self, step: int, action: th.Tensor, numbers: tuple[th.Tensor, ...]) -> None:
        table, rows = self.columns, step * N_ENVS + th.arange(N_ENVS)
        for i, number in enumerate((*numbers, *[th.zeros(N_ENVS)] * (table.n_numbers - len(numbers)))):
            table.numbers.view(-1)[rows * table.row + i * table.column] = number.float()
        size, at, n_bytes, _ = table.action
        target = (rows * size + at)[:, None] + th.arange(n_bytes)
        table.actions.view(-1)[target] = action.view(-1).view(th.uint8).view(N_ENVS, -1)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("count", [9, SIZE - 1, SIZE, 30])
@pytest.mark.parametrize("space", ["image", "last", "dict"])
@pytest.mark.parametrize("with_columns", [False, True])
def test_an_interrupted_launch_is_neither_lost_nor_repeated(
    space: str, count: int, with_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    if with_columns:
        monkeypatch.setattr(device_columns, "runs_kernels", lambda device: True)
        monkeypatch.setattr(device_columns.DeviceTable, "kernels", property(ColumnsInOneLaunch))
        monkeypatch.setattr(DeviceFrameStore, "use_columns", lambda store, table: store.__dict__.update(columns=table))
    real = DeviceFrameStore.launch

    def launch(store: Any, *args: Any) -> None:
        # launch as on a GPU; reads still use the reference kernel
        store._triton = True
        try:
            real(store, *args)
        finally:
            store._triton = False

    monkeypatch.setattr(DeviceFrameStore, "launch", launch)
    monkeypatch.setattr(
        DeviceFrameStore, "writer", lambda store, state: OneLaunch(state.tables, store.shape, store.columns)
    )
    monkeypatch.setattr(
        DeviceFrameStore,
        "_plan_launch",
        lambda store, source, job, after: DeviceFrameWrite(store, after, store._launches + 1, job, source),
    )
    interrupt_everywhere(replay(space, "delta"), count, n_points=60)


class ColumnsInOneLaunch:
    """The kernels of columns as the host sees them."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def write(self, step: int, columns: Any) -> None:
        traced = sys.gettrace()
        sys.settrace(None)
        action, numbers = columns
        views = list(self.table.views.values())[: 1 + self.table.written]
        for view, value in zip(views, (action, *numbers, *[th.zeros(N_ENVS)] * 3), strict=False):
            view[step] = value
        sys.settrace(traced)

    def gather(self, indices: th.Tensor, columns: Any) -> None:
        gather_columns_reference(indices, columns)


def add_tensors(buffer: Any, at: int, noise: bool = False) -> None:
    """`add` as an environment on the device would call it."""
    random, space = np.random.default_rng(at), buffer.observation_space
    action, reward = th.from_numpy(random.integers(0, 4, (N_ENVS, 1))), th.from_numpy(random.standard_normal(N_ENVS))
    done = th.from_numpy(random.random(N_ENVS) < 0.2)
    obs, next_obs = (th.from_numpy(observed(space, number, noise)) for number in (at, at + 1))
    if isinstance(buffer, GpuReplayBuffer):
        infos = {"TimeLimit.truncated": th.full((N_ENVS,), bool(at % 2))}
        buffer.add(obs, next_obs, action, reward.float(), done, infos)
    else:
        buffer.add(obs, action, reward.numpy(), done, reward.float()[:, None] + 1, reward.float() - 1)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("write", [add, add_tensors])
@pytest.mark.parametrize("count", [9, SIZE - 1, SIZE, 30])
@pytest.mark.parametrize("method", ["none", "delta"])
@pytest.mark.parametrize("kind", [replay, rollout])
def test_columns_that_a_kernel_writes_belong_to_the_step(
    kind: Any, method: str, count: int, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_columns, "runs_kernels", lambda device: True)
    monkeypatch.setattr(device_columns.DeviceTable, "kernels", property(ColumnsInOneLaunch))
    interrupt_everywhere(kind("image", method), count, n_points=30, write=write)


@pytest.mark.parametrize("count", [0, 3, 5, 9, SIZE - 1, SIZE, 30])
@pytest.mark.parametrize("space", ["image", "dict"])
@pytest.mark.parametrize("method", ["delta", "gzip1"])
def test_interrupted_writes_to_a_host_store(method: str, space: str, count: int) -> None:
    interrupt_everywhere(replay(space, method), count, n_points=40)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("kind", [replay, rollout])
@pytest.mark.parametrize("method", ["none", "delta"])
def test_an_interrupted_reset_is_completed_or_undone(kind: Any, method: str) -> None:
    saved = pickle.dumps(filled(kind("image", method), 8))
    before = contents(pickle.loads(saved))
    cleared = pickle.loads(saved)
    with Injector() as counter:
        cleared.reset()
    for point in range(1, counter.count + 1, 5):
        buffer = pickle.loads(saved)
        with pytest.raises(KeyboardInterrupt), Injector(point, KeyboardInterrupt()):
            buffer.reset()
        assert buffer.size() == 0 or same(contents(buffer), before)
        buffer.reset()
        assert buffer.size() == 0
        for at in range(20, 25):
            add(buffer, at)
        buffer.check()
        again = filled(kind("image", method), 0)
        for at in range(20, 25):
            add(again, at)
        assert same(contents(buffer), contents(again))


@pytest.mark.usefixtures("on_device")
def test_reading_a_rollout_may_be_interrupted() -> None:
    buffer = rollout("image", "delta")()
    for at in range(SIZE):
        add(buffer, at)
    saved = pickle.dumps(buffer)

    def read(buffer: Any) -> list[Any]:
        np.random.seed(3)  # noqa: NPY002  # SB3 draws from this generator
        return [part.numpy() for batch in buffer.get(7) for part in batch]

    buffer = pickle.loads(saved)
    with Injector() as counter:
        expected = read(buffer)
    for point in range(1, counter.count + 1, max(counter.count // 60, 1)):
        again = pickle.loads(saved)
        with contextlib.suppress(KeyboardInterrupt), Injector(point, KeyboardInterrupt()):
            read(again)
        found = read(again)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.usefixtures("on_device")
def test_a_write_whose_recovery_was_interrupted_is_completed_at_the_next_use() -> None:
    buffer = filled(replay("image", "delta"), 9)
    store = buffer.obs_stores[""].inner
    assert isinstance(store, DeviceFrameStore)
    after = copy.deepcopy(buffer)
    add(after, 9)
    # as after an exception, and another one during recovery
    plan = store.plan(9, [observed(IMAGE, 9), observed(IMAGE, 10)])
    store.unfinished = plan
    expected = after.obs_stores[""].inner
    assert not th.equal(store.read(IndexBatch(np.array([[18]]))), expected.read(IndexBatch(np.array([[17]]))))
    assert buffer.obs_stores[""].inner.unfinished is None
    indices = IndexBatch(np.array([[18, 19], [42, 43]]))
    assert th.equal(store.read(indices), expected.read(indices))
    store.check()


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("method", ["delta", "auto"])
def test_collected_observations_count_against_heap_bytes(method: str) -> None:
    limit = 6_000
    buffer = GpuReplayBuffer(400, IMAGE, spaces.Discrete(4), "cpu", N_ENVS, compression_method=method, heap_bytes=limit)
    observations = buffer.obs_stores[""]

    def fill() -> None:
        for at in range(200):
            add(buffer, at, noise=True)
            # the buffer adds two steps to its limit
            assert observations.collected_bytes <= (observations.ring.heap_bytes or 0)

    with pytest.raises(HeapFullError, match="heap_bytes>="):
        fill()
    assert 0 < buffer.pos < 20
    for at in range(buffer.pos):
        np.testing.assert_array_equal(buffer.reconstruct_obs(at, 1), observed(IMAGE, at, noise=True)[1].reshape(-1))
    buffer.check()


@pytest.mark.usefixtures("on_device")
def test_a_step_is_stored_for_all_keys_or_none() -> None:
    quiet = replay("dict", "delta", heap_bytes=5_000)()
    for at in range(SIZE + 3):
        add(quiet, at)
    before = contents(quiet)
    space = SPACES["dict"]
    obs = observed(space, 99)

    def fill() -> None:
        nonlocal before
        for at in range(100, 200):
            obs["other"] = observed(IMAGE, at, noise=True)
            quiet.add(obs, obs, np.zeros(N_ENVS), np.full(N_ENVS, 7.0), np.zeros(N_ENVS), [{}] * N_ENVS)
            before = contents(quiet)

    with pytest.raises(HeapFullError):
        fill()
    assert same(contents(quiet), before)
    quiet.check()
    quiet.sample(8)
