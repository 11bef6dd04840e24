"""Steps of images that one compiled call writes: SB3's contents, whatever `add` is given and wherever it ends."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers._sb3.frame_steps import FrameSteps
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.kernels import has_numba
from sb3_extra_buffers.stores.segments import SegmentStore
from tests.contracts.buffer import ACTIONS, SPACES, assert_same_contents, assert_same_samples, contents, play
from tests.torture.interrupts import interrupt_at

pytestmark = pytest.mark.skipif(not has_numba(), reason="numba is not installed")

IMAGES: Any = SPACES["frames first"]
DISCRETE = spaces.Discrete(5)


def pair(n_steps: int = 30, n_envs: int = 2, actions: Any = DISCRETE, **options: Any) -> tuple[Any, Any]:
    """A compressed buffer and SB3's."""
    size = n_steps * n_envs
    ours = CompressedReplayBuffer(size, IMAGES, actions, "cpu", n_envs, compression_method="delta", **options)
    return ours, ReplayBuffer(size, IMAGES, actions, "cpu", n_envs)


def steps_of(count: int, n_envs: int = 2, seed: int = 0, actions: Any = DISCRETE) -> list[Any]:
    return list(play(IMAGES, n_envs, count, seed, actions))


def was_direct(buffer: Any) -> bool:
    """Whether the newest step was written by one compiled call."""
    steps = buffer._frame_steps
    return steps is not None and bool(steps._last[0] == buffer.n_added)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("actions", [DISCRETE, ACTIONS["box"]], ids=["discrete", "box"])
@pytest.mark.parametrize("handle_timeouts", [False, True])
def test_contents_are_those_of_sb3(n_envs: int, actions: Any, handle_timeouts: bool) -> None:
    ours, theirs = pair(40, n_envs, actions, handle_timeout_termination=handle_timeouts)
    theirs.handle_timeout_termination = handle_timeouts
    n_direct = 0
    for number, step in enumerate(steps_of(100, n_envs, actions=actions)):
        ours.add(*copy.deepcopy(tuple(step)))
        theirs.add(*step)
        n_direct += was_direct(ours)
        if number in (39, 70):
            ours = pickle.loads(pickle.dumps(ours))
    assert n_direct > 40
    assert_same_contents(contents(theirs), contents(ours))
    assert_same_samples(ours, theirs)
    ours._views.by_key[""].store.check()


CONVERTED: dict[str, Callable[[Any], Any]] = {
    "channels last": lambda array: np.moveaxis(np.moveaxis(array, 1, -1).copy(), -1, 1) if array.ndim == 4 else array,
    "read-only": lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape),
    "lists": lambda array: array.tolist(),
    "flat": lambda array: array.reshape(-1) if array.dtype == np.int64 else array,
    "wider": lambda array: array.astype({"u": np.int64, "b": np.float32}.get(array.dtype.kind, np.float64)),
}


@pytest.mark.parametrize("how", CONVERTED)
def test_arguments_of_every_kind_are_stored_as_in_sb3(how: str) -> None:
    ours, theirs = pair()
    convert = CONVERTED[how]
    for number, step in enumerate(steps_of(60)):
        converted = [convert(part) for part in step[:5]] if number % 3 else step[:5]
        ours.add(*converted, step.infos)
        theirs.add(*step)
    assert_same_contents(contents(theirs), contents(ours))


def test_arguments_of_the_usual_kinds_take_one_compiled_call() -> None:
    ours, theirs = pair()
    for number, step in enumerate(steps_of(60)):
        step = step._replace(infos=[{"TimeLimit.truncated": False}, {}])
        theirs.add(*step)
        ours.add(*step[:2], CONVERTED["flat"](step.action), *step[3:])
        assert number < 20 or was_direct(ours)
    assert_same_contents(contents(theirs), contents(ours))


@pytest.mark.parametrize(
    "wrong",
    [
        {"obs": np.zeros((3, *IMAGES.shape), np.uint8)},
        {"next_obs": np.zeros((2, *IMAGES.shape[:2], 5), np.uint8)},
        {"next_obs": None},
        {"action": np.zeros(3, np.int64)},
        {"reward": np.zeros(3, np.float32)},
        {"reward": []},  # another error of numba's than for other lists
        {"done": np.zeros(3, np.bool_)},
        {"infos": [{}] * 3},
    ],
)  # fmt: skip
def test_wrong_arguments_change_nothing(wrong: dict[str, Any]) -> None:
    ours, _ = pair()
    for step in steps_of(36):
        ours.add(*step)
    before = contents(ours)
    with pytest.raises(SpecMismatchError):
        ours.add(*steps_of(1, seed=7)[0]._replace(**wrong))
    assert_same_contents(before, contents(ours))
    assert ours.n_added == 36


def test_columns_that_are_replaced_are_written() -> None:
    ours, theirs = pair()
    for number, step in enumerate(steps_of(70)):
        if number == 40:
            for name in ("actions", "rewards", "dones", "timeouts"):
                setattr(ours, name, getattr(ours, name).copy())
        if number == 60:
            ours.pos, theirs.pos = 3, 3
        ours.add(*step)
        theirs.add(*step)
    assert was_direct(ours)
    assert_same_contents(contents(theirs), contents(ours))


@pytest.mark.parametrize("needs_space", [False, True])
def test_an_interrupt_leaves_a_whole_step_or_none(needs_space: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    reserve = SegmentStore._reserve

    def note(self: SegmentStore, stack: int) -> None:
        reserved.append(stack)
        reserve(self, stack)

    monkeypatch.setattr(SegmentStore, "_reserve", note)
    ours, _ = pair()
    for step in steps_of(200):
        before = copy.deepcopy(ours)
        # after a copy, the first step takes the usual path
        before._frame_steps = FrameSteps.of(before, *before._stored[0][1:])
        reserved.clear()
        ours.add(*step)
        if was_direct(ours) and ours.full and bool(reserved) == needs_space:
            break
    held, added = contents(before), contents(ours)
    position = 1
    while True:
        buffer = copy.deepcopy(before)
        buffer._frame_steps = FrameSteps.of(buffer, *buffer._stored[0][1:])
        if not interrupt_at(position, functools.partial(buffer.add, *step)).where:
            break
        buffer.recover()
        if buffer.n_added == before.n_added:
            assert_same_contents(held, contents(buffer))
            buffer.add(*step)
        assert_same_contents(added, contents(buffer))
        buffer._views.by_key[""].store.check()
        position += max(position // 12, 1)
    assert was_direct(buffer)
    assert position > 50


@pytest.mark.parametrize("error", [TypeError, ValueError])
@pytest.mark.parametrize("space", [IMAGES, SPACES["vector"]], ids=["images", "vector"])
def test_an_error_from_a_signal_handler_is_raised(space: Any, error: type[Exception]) -> None:
    ours = CompressedReplayBuffer(60, space, DISCRETE, "cpu", 2, handle_timeout_termination=False)
    theirs = ReplayBuffer(60, space, DISCRETE, "cpu", 2, handle_timeout_termination=False)
    steps = list(play(space, 2, 80, 0, DISCRETE))
    for step in steps[:40]:
        ours.add(*step)
        theirs.add(*step)
    writer: Any = ours._frame_steps or ours._transitions
    name = "write" if isinstance(writer, FrameSteps) else "_direct"
    kernel = getattr(writer, name)

    def interrupted(*arguments: Any) -> Any:
        written = kernel(*arguments)
        if is_due:
            # where the handler of a signal that arrived meanwhile runs
            raise error("time is up")
        return written

    setattr(writer, name, interrupted)
    for number, step in enumerate(steps[40:]):
        is_due = number % 3 == 0
        if is_due:
            with pytest.raises(error, match="time is up"):
                ours.add(*step)
            assert ours.n_added in (40 + number, 41 + number)
        if ours.n_added == 40 + number:
            is_due = False
            ours.add(*step)
        theirs.add(*step)
        writer = ours._frame_steps or ours._transitions
        setattr(writer, name, interrupted)
    assert_same_contents(contents(theirs), contents(ours))


def test_an_interrupt_while_addresses_are_replaced_leaves_none_of_the_old_ones() -> None:
    ours, theirs = pair()
    steps = steps_of(60)
    for step in steps[:41]:
        ours.add(*step)
        theirs.add(*step)
    inner, writer = ours._views.by_key[""].store.inner, ours._frame_steps
    for before_end, step in enumerate(steps[41:]):
        inner._sync()
        n_opcodes = interrupt_at(0, functools.partial(writer.bind, inner)).count
        assert writer.is_bound_to(inner)
        # all tables are replaced, as when a segment is moved
        inner._sync()
        interrupt_at(n_opcodes - 4 - 2 * before_end, functools.partial(writer.bind, inner))
        assert not writer.is_bound_to(inner)
        ours.add(*step)
        theirs.add(*step)
        assert was_direct(ours)
    assert_same_contents(contents(theirs), contents(ours))


def test_a_step_for_which_there_is_no_memory_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair(300, 1)

    def fail(*_: Any) -> Any:
        raise MemoryError("no more")

    failed = 0
    for step in steps_of(300, 1):
        with monkeypatch.context() as patch:
            patch.setattr(SegmentStore, "_reserve", fail)
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


def test_a_subclass_may_finish_steps_itself() -> None:
    class Counting(CompressedReplayBuffer):
        n_finished = 0

        def _finish_step(self, step: Any) -> None:
            super()._finish_step(step)
            self.n_finished += 1

    buffer: Any = Counting(60, IMAGES, DISCRETE, "cpu", 2, compression_method="delta")
    for step in steps_of(40):
        buffer.add(*step)
    assert buffer.n_finished == 40
    assert not isinstance(buffer._frame_steps, FrameSteps)


def test_memory_grows_in_place() -> None:
    """A step that needs more memory must not copy everything stored so far, which would take as much memory again."""
    noise = np.random.default_rng(0)
    buffer: Any = CompressedReplayBuffer(400, IMAGES, DISCRETE, "cpu", 2, compression_method="delta")
    n_direct = 0
    for _ in range(200):
        obs, next_obs = noise.integers(0, 256, (2, 2, *IMAGES.shape), np.uint8)
        buffer.add(obs, next_obs, np.zeros((2, 1), np.int64), np.zeros(2, np.float32), np.zeros(2, bool), [{}, {}])
        n_direct += was_direct(buffer)
    heap = buffer._views.by_key[""].store.inner.heap
    assert n_direct > 100
    assert heap.live_bytes > 500_000
    assert heap.n_repacks == 0


def test_a_step_that_the_next_one_completes_is_counted() -> None:
    ours, theirs = pair()
    steps = steps_of(20)
    for step in steps[:17]:
        ours.add(*step)
    writer = ours._frame_steps
    assert writer is not None
    write = writer.put

    def interrupted(*arguments: Any) -> None:
        write(*arguments)
        raise KeyboardInterrupt

    def failing(number: int) -> None:
        del writer.has_written
        raise MemoryError

    writer.put, writer.has_written = interrupted, failing
    with pytest.raises(KeyboardInterrupt):
        ours.add(*steps[17])
    del writer.put
    for step in steps[18:]:
        ours.add(*step)
    for step in steps:
        theirs.add(*step)
    assert ours.n_added == 20
    assert_same_contents(contents(theirs), contents(ours))
