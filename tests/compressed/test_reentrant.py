"""Signal handlers that use a buffer in the middle of a call: the call goes on, and they see it between two steps."""

from __future__ import annotations

import contextlib
import copy
import dis
import pickle
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.compressed import (
    CompressedArray,
    CompressedDictReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
    CompressedSequenceReplayBuffer,
)
from sb3_extra_buffers.errors import EmptyBufferError, ReentrantCallError
from sb3_extra_buffers.files import load
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer
from sb3_extra_buffers.recording import RecordBuffer
from sb3_extra_buffers.replay_buffers.embodied import CompressedEmbodiedReplay
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_base import IndexBatch
from tests.contracts.buffer import SPACES, assert_same_contents, contents, is_same, play, rollouts, sample

Handler = Callable[[], Any]

N_STEPS, N_ENVS = 20, 2
SIZE = N_STEPS * N_ENVS
IMAGES: Any = SPACES["frames first"]
RGB: Any = spaces.Box(0, 255, (12, 16, 3), np.uint8)
VECTORS: Any = spaces.Box(-9, 9, (5,), np.float32)
DICT: Any = spaces.Dict({"image": IMAGES, "vector": VECTORS})
ACTIONS = spaces.Discrete(4)


def make(kind: type[Any], space: Any, **options: Any) -> Callable[[], Any]:
    return lambda: kind(SIZE, space, ACTIONS, "cpu", n_envs=N_ENVS, **options)


SUBJECTS: dict[str, tuple[Callable[[], Any], Any]] = {
    "delta": (make(CompressedReplayBuffer, IMAGES, compression_method="delta"), IMAGES),
    "gzip": (make(CompressedReplayBuffer, IMAGES, compression_method="gzip1"), IMAGES),
    "palette": (make(CompressedReplayBuffer, RGB, compression_method="palette"), RGB),
    "auto": (make(CompressedReplayBuffer, IMAGES), IMAGES),
    "vectors": (make(CompressedReplayBuffer, VECTORS), VECTORS),
    "dict": (make(CompressedDictReplayBuffer, DICT, compression_method={"image": "delta"}), DICT),
    "evicting": (make(CompressedReplayBuffer, IMAGES, compression_method="delta", max_bytes=40_000), IMAGES),
    "prioritised": (make(CompressedPrioritizedReplayBuffer, IMAGES, compression_method="delta"), IMAGES),
    "n-step": (make(CompressedNStepReplayBuffer, VECTORS), VECTORS),
    "sequences": (make(CompressedSequenceReplayBuffer, IMAGES, compression_method="delta"), IMAGES),
}


def can_be_signalled(frame: Any, previous: int) -> bool:
    """Whether Python handles signals after the bytecode at ``previous``."""
    if previous < 0:
        return True
    name = dis.opname[frame.f_code.co_code[previous]]
    return str(name).startswith(("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE"))


def run_with(handler: Handler, position: int, action: Callable[[], Any], *, real_only: bool = False) -> bool:
    """Run ``action``, with ``handler`` at the ``position``-th bytecode of this package; return whether it ran."""
    count = 0
    done = False
    previous: dict[int, int] = {}

    def step(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count, done
        if event == "opcode" and not done:
            before = previous.get(id(frame), -1)
            previous[id(frame)] = frame.f_lasti
            if not real_only or can_be_signalled(frame, before):
                count += 1
                if count == position:
                    done = True
                    sys.settrace(None)
                    handler()
        return step

    def enter(frame: Any, event: str, arg: Any) -> Any:
        if "sb3_extra_buffers" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        previous.pop(id(frame), None)
        return step

    sys.settrace(enter)
    try:
        action()
    finally:
        sys.settrace(None)
    return done


def saved(buffer: Any, place: Path) -> Any:
    buffer.save(place / "saved")
    return contents(load(place / "saved"))


def sampled(buffer: Any) -> Any:
    np.random.seed(7)  # noqa: NPY002  # the generator that SB3 draws from
    return buffer.sample(6)


READING: dict[str, Callable[[Any, Path], Any]] = {
    "pickle": lambda buffer, _: contents(pickle.loads(pickle.dumps(buffer))),
    "deepcopy": lambda buffer, _: contents(copy.deepcopy(buffer)),
    "save": saved,
    "sample": lambda buffer, _: sampled(buffer),
    "usage": lambda buffer, _: {"transitions": buffer.memory_usage().transitions, "held": buffer.held_bytes() > 0},
}


def assert_same(wanted: Any, found: Any) -> None:
    if isinstance(wanted, dict):
        assert_same_contents(wanted, found)
    elif isinstance(wanted, (tuple, list)):
        for one, other in zip(wanted, found, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, (np.ndarray, float)):
        np.testing.assert_array_equal(wanted, found)
    else:
        is_same(found, wanted)


def is_either(found: Any, wanted: list[Any]) -> bool:
    """Whether a handler has seen one of two states."""
    for each in wanted:
        with contextlib.suppress(AssertionError):
            assert_same(each, found)
            return True
    return False


@pytest.mark.parametrize("call", READING)
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_handler_reads_the_buffer_between_two_steps(name: str, call: str, tmp_path: Path) -> None:
    create, space = SUBJECTS[name]
    buffer, undisturbed = create(), create()
    read, rng = READING[call], np.random.default_rng(3)
    found: list[Any] = []
    n_calls = 0

    def handler() -> None:
        found.append(read(buffer, tmp_path))

    for number, step in enumerate(play(space, N_ENVS, 70)):
        is_disturbed = number > 2 and number % 3 > 0
        wanted = [read(undisturbed, tmp_path)] if is_disturbed else []
        undisturbed.add(*step)
        if is_disturbed:
            wanted.append(read(undisturbed, tmp_path))
            at = int(rng.integers(1, 900 if number % 2 else 150))
            found.clear()
            n_calls += run_with(handler, at, partial(buffer.add, *step))
            # a step and what is evicted for it are two changes
            assert not found or name == "evicting" or is_either(found[0], wanted), f"step {number}, bytecode {at}"
        else:
            buffer.add(*step)
        assert_undisturbed(undisturbed, buffer)
    assert n_calls > 15
    assert_same(sample(undisturbed, 9, 1), sample(buffer, 9, 1))


def assert_undisturbed(undisturbed: Any, buffer: Any) -> None:
    assert_same_contents(contents(undisturbed), contents(buffer))
    for each in (buffer, undisturbed):
        for view in each._views.stored.values():
            view.store.check()


def other_step(space: Any) -> Any:
    return next(iter(play(space, N_ENVS, 1, seed=9)))


CHANGING: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda buffer, step: buffer.add(*step),
    "extend": lambda buffer, step: buffer.extend(*([part] for part in step)),
    "reset": lambda buffer, step: buffer.reset(),
}


@pytest.mark.parametrize("call", CHANGING)
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "evicting"])
def test_a_handler_cannot_change_the_buffer_in_the_middle_of_a_step(name: str, call: str) -> None:
    create, space = SUBJECTS[name]
    buffer, undisturbed = create(), create()
    extra, rng, n_refused = other_step(space), np.random.default_rng(4), 0
    ran: list[str] = []

    def handler() -> None:
        when = "before" if buffer.n_added == n_added else "after"
        try:
            CHANGING[call](buffer, extra)
        except ReentrantCallError:
            when = "refused"
        ran.append(when)

    for number, step in enumerate(play(space, N_ENVS, 90)):
        n_added = buffer.n_added
        ran.clear()
        at = int(rng.integers(1, 200 if number % 2 else 50)) if number > 2 and number % 3 else 0
        # Python handles signals after calls only, so a whole change may come before the step or after it
        run_with(handler, at, partial(buffer.add, *step), real_only=True)
        n_refused += ran == ["refused"]
        if ran == ["before"]:
            CHANGING[call](undisturbed, extra)
        undisturbed.add(*step)
        if ran == ["after"]:
            CHANGING[call](undisturbed, extra)
        assert_undisturbed(undisturbed, buffer)
        assert buffer.n_added == undisturbed.n_added
    assert n_refused > 10
    assert_same(sample(undisturbed, 9, 1), sample(buffer, 9, 1))


@pytest.mark.parametrize("inner", [*READING, *CHANGING])
@pytest.mark.parametrize("outer", ["pickle", "save", "sample"])
@pytest.mark.parametrize("name", ["delta", "gzip", "palette", "vectors", "dict", "sequences"])
def test_a_handler_does_not_disturb_a_call_that_reads(name: str, outer: str, inner: str, tmp_path: Path) -> None:
    create, space = SUBJECTS[name]
    steps = list(play(space, N_ENVS, 33))
    original = create()
    for step in steps:
        original.add(*step)
    before = contents(original)
    wanted_inner = READING[inner](original, tmp_path) if inner in READING else None
    changed = copy.deepcopy(original)
    if inner in CHANGING:
        CHANGING[inner](changed, steps[0])
    (tmp_path / "inner").mkdir()
    n_calls = 0
    for at in range(1, 700, 5 if outer == "sample" else 41):
        buffer = copy.deepcopy(original)
        seen: list[Any] = []
        read: list[Any] = []

        def handler(buffer: Any = buffer, seen: list[Any] = seen) -> None:
            nonlocal n_calls
            n_calls += 1
            if inner in READING:
                state = np.random.get_state()  # noqa: NPY002  # that of the interrupted call
                seen.append(READING[inner](buffer, tmp_path / "inner"))
                np.random.set_state(state)  # noqa: NPY002
            else:
                CHANGING[inner](buffer, steps[0])

        def action(buffer: Any = buffer, read: list[Any] = read) -> None:
            read.append(READING[outer](buffer, tmp_path))

        is_refused = False
        try:
            run_with(handler, at, action, real_only=True)
        except ReentrantCallError:
            is_refused = True
        except EmptyBufferError:
            assert inner == "reset"
        if inner in READING:
            assert not is_refused
            assert not seen or is_either(seen[0], [wanted_inner])
            assert_same(READING[outer](original, tmp_path), read[0])
            assert_same_contents(before, contents(buffer))
        elif is_refused:
            assert_same_contents(before, contents(buffer))
        else:
            states = [before, contents(changed)]
            assert is_either(contents(buffer), states)
            assert outer == "sample" or is_either(read[0], states)
        for view in buffer._views.stored.values():
            view.store.check()
    assert n_calls > 5


def test_handlers_of_real_signals_save_the_buffer(tmp_path: Path) -> None:
    create, space = SUBJECTS["delta"]
    buffer, undisturbed = create(), create()
    rng, n_saved = np.random.default_rng(0), 0

    def handler(*_: Any) -> None:
        nonlocal n_saved
        buffer.save(tmp_path / "saved")
        load(tmp_path / "saved")._views.by_key[""].store.check()
        n_saved += 1

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for step in play(space, N_ENVS, 400):
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 4e-4))
            buffer.add(*step)
            buffer.sample(4)
            undisturbed.add(*step)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert n_saved > 50
    assert_undisturbed(undisturbed, buffer)


def test_a_handler_sees_observations_without_the_step_that_it_interrupts() -> None:
    create, space = SUBJECTS["delta"]
    buffer, undisturbed = create(), create()
    seen: list[Any] = []
    for number, step in enumerate(play(space, N_ENVS, 60)):
        states = [np.array(undisturbed.observations)]
        undisturbed.add(*step)
        states.append(np.array(undisturbed.observations))
        seen.clear()
        run_with(lambda: seen.append(np.array(buffer.observations)), 3 * number, partial(buffer.add, *step))
        assert not seen or is_either(seen[0], states)
    assert_undisturbed(undisturbed, buffer)


@pytest.mark.parametrize("kind", ["mmap", "shared"])
def test_what_cannot_be_copied_refuses_to_be_read_in_a_handler(kind: str, tmp_path: Path) -> None:
    options = {"storage": "mmap", "path": tmp_path / "buffer"} if kind == "mmap" else {}
    buffer = make(CompressedReplayBuffer, IMAGES, compression_method="delta", **options)()
    undisturbed = SUBJECTS["delta"][0]()
    if kind == "shared":
        buffer.share()
    n_refused = 0

    def handler() -> None:
        nonlocal n_refused
        for call in ("pickle", "save", "sample", "usage"):
            try:
                READING[call](buffer, tmp_path)
            except ReentrantCallError:
                n_refused += 1
            except EmptyBufferError:
                assert not buffer.size()

    for number, step in enumerate(play(IMAGES, N_ENVS, 60)):
        run_with(handler, number * 7 % 300 if number > 2 else 0, partial(buffer.add, *step))
        undisturbed.add(*step)
        assert_undisturbed(undisturbed, buffer)
    assert n_refused > 20
    if kind == "shared":
        buffer.stop_sharing()


@pytest.mark.parametrize("call", ["pickle", "deepcopy", "reset"])
def test_rollouts_are_not_disturbed(call: str, tmp_path: Path) -> None:
    buffer = make(CompressedRolloutBuffer, IMAGES, compression_method="delta")()
    undisturbed = copy.deepcopy(buffer)
    rng, n_refused, n_read = np.random.default_rng(0), 0, 0
    found: list[Any] = []

    def handler() -> None:
        nonlocal n_refused, n_read
        if call == "reset":
            with contextlib.suppress(ReentrantCallError):
                n_refused += 1
                buffer.reset()
                n_refused -= 1
        else:
            found.append(READING[call](buffer, tmp_path))
            n_read += 1

    for step in play(IMAGES, N_ENVS, SIZE):
        value = th.from_numpy(step.reward.copy())
        arguments = step.obs, step.action, step.reward, step.done, value, value
        states = [contents(undisturbed)]
        undisturbed.add(*arguments)
        states.append(contents(undisturbed))
        found.clear()
        # past the first calls, before which a reset is a reset
        at = int(rng.integers(60, 200))
        run_with(handler, at, partial(buffer.add, *arguments))
        assert not found or is_either(found[0], states)
        assert_undisturbed(undisturbed, buffer)
    assert n_refused + n_read > 10
    assert_same(rollouts(undisturbed, 8, 1), rollouts(buffer, 8, 1))


def test_an_argument_cannot_add_to_the_buffer_that_reads_it() -> None:
    create, space = SUBJECTS["delta"]
    buffer = create()
    steps = list(play(space, N_ENVS, 3))

    class Reward:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            buffer.add(*steps[1])
            return steps[0].reward

    with pytest.raises(ReentrantCallError, match="set a flag"):
        buffer.add(*steps[0]._replace(reward=Reward()))  # type: ignore[arg-type]  # on purpose
    assert buffer.size() == 0
    for step in steps:
        buffer.add(*step)
    assert buffer.size() == 3


def record_all(buffer: Any) -> list[Any]:
    record = buffer[:]
    return [np.array(record.frame), np.array(record.reward)]


def gpu_contents(buffer: Any) -> list[Any]:
    n_held = buffer.buffer_size if buffer.full else buffer.pos
    indices = np.arange(n_held * N_ENVS)
    read = buffer._read(IndexBatch(np.stack([indices, indices + SIZE])))
    return [
        *(part.cpu().numpy() for part in read.values()),
        np.array(buffer.rewards[:n_held].tolist()),
        np.array(buffer.pos),
    ]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store observations as on a GPU, with reference kernels."""
    monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
    monkeypatch.setattr(device_base, "has_triton", lambda: True)


@pytest.mark.parametrize("kind", ["recording", "array", "embodied", "gpu"])
@pytest.mark.usefixtures("on_device")
def test_other_kinds_are_not_disturbed(kind: str) -> None:
    make_kind: dict[str, Callable[[], Any]] = {
        "recording": lambda: RecordBuffer((20, 16), 4, 20, compression_method="delta"),
        "array": lambda: CompressedArray(20, IMAGES.shape, compression_method="delta"),
        "embodied": lambda: CompressedEmbodiedReplay(length=3, capacity=12),
        "gpu": lambda: GpuReplayBuffer(SIZE, IMAGES, ACTIONS, "cpu", N_ENVS, compression_method="delta"),
    }
    add: dict[str, Callable[[Any, Any, int], Any]] = {
        "recording": lambda buffer, step, _: buffer.add(step.obs[0], step.reward[0], step.action[0]),
        "array": lambda buffer, step, number: buffer.__setitem__(number % 20, step.obs[0]),
        "embodied": lambda buffer, step, _: buffer.add({"image": step.obs[0], "reward": step.reward[0]}),
        "gpu": lambda buffer, step, _: buffer.add(*step),
    }
    read: dict[str, Callable[[Any], Any]] = {
        "recording": record_all,
        "array": lambda buffer: [np.array(buffer)],
        "embodied": lambda buffer: [np.array(len(buffer))],
        "gpu": gpu_contents,
    }
    buffer, undisturbed = make_kind[kind](), make_kind[kind]()
    rng, outcomes = np.random.default_rng(0), {"read": 0, "refused": 0}
    extra = other_step(IMAGES)
    seen: list[Any] = []

    def handler() -> None:
        with contextlib.suppress(ReentrantCallError):
            outcomes["refused"] += 1
            copied = pickle.loads(pickle.dumps(buffer)) if kind != "embodied" else buffer.memory_usage() and buffer
            buffer.memory_usage() if kind != "array" else None
            seen.append(read[kind](copied))
            outcomes["refused"] -= 1
            outcomes["read"] += 1
        if buffer_is_busy():
            with pytest.raises(ReentrantCallError):
                add[kind](buffer, extra, 0)

    def buffer_is_busy() -> bool:
        return getattr(buffer, "_unfinished", None) is not None

    for number, step in enumerate(play(IMAGES, N_ENVS, 60)):
        states = [read[kind](undisturbed)] if number > 4 else []
        add[kind](undisturbed, step, number)
        states.append(read[kind](undisturbed)) if number > 4 else None
        at = int(rng.integers(1, 800)) if number > 4 else 0
        seen.clear()
        run_with(handler, at, partial(add[kind], buffer, step, number))
        assert kind == "embodied" or not seen or is_either(seen[0], states), number
        assert_same(read[kind](undisturbed), read[kind](buffer)) if number > 4 else None
    assert outcomes["read"] + outcomes["refused"] > 20
    if kind in ("embodied", "gpu"):
        buffer.check()
