"""Processes that share a buffer, for the tests: ``python -m tests.compressed.shared_processes SCENARIO [argument]``.

The contents of every transition follow from its number, so that any process can check what it reads.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedDictReplayBuffer, CompressedReplayBuffer, SharedReader
from sb3_extra_buffers.errors import InterruptedChangeError, SharingError

N_ENVS = 2
IMAGE = spaces.Box(0, 255, (4, 40, 40), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
EPISODE = 37

Array = npt.NDArray[Any]


def frames(numbers: Array, envs: Array, noisy: bool = False) -> Array:
    """The newest frames of observations ``numbers``: ``[i, 40, 40]``."""
    count = len(numbers)
    out = np.zeros((count, 40, 40), np.uint8)
    at = np.arange(count)
    out[:, 0, :4] = numbers.astype("<u4").view(np.uint8).reshape(-1, 4)
    out[:, 0, 4] = envs
    for k in range(5):
        out[at, 2 + (numbers * 3 + 7 * k) % 37, (numbers * 5 + 11 * k + envs) % 40] = 50 + 40 * k
    if noisy:
        for i, number in enumerate(numbers):
            out[i, 20:] = np.random.default_rng(number).integers(0, 256, (20, 40))
    return out


def images(numbers: Array, envs: Array, noisy: bool = False) -> Array:
    """Stacks of frames: ``[i, 4, 40, 40]``."""
    return np.stack([frames(np.maximum(numbers - 3 + k, 0), envs, noisy) for k in range(4)], axis=1)


def vectors(numbers: Array, envs: Array, noisy: bool = False) -> Array:
    return np.stack([numbers, numbers * 2 + 1, envs], axis=1).astype(np.float32)


class Case:
    """A kind of buffer, and how to fill and to check it."""

    def __init__(self, kind: str = "image", method: str = "delta", n_steps: int = 200, **options: Any) -> None:
        self.kind, self.noisy = kind, bool(options.pop("noisy", False))
        parts = {"image": (IMAGE, images), "vector": (VECTOR, vectors)}
        self.keys = {kind: parts[kind]} if kind in parts else parts
        space = (
            IMAGE
            if kind == "image"
            else VECTOR
            if kind == "vector"
            else spaces.Dict({"image": IMAGE, "vector": VECTOR})
        )
        make: Any = CompressedDictReplayBuffer if kind == "dict" else CompressedReplayBuffer
        options = {"compression_method": method, "n_envs": N_ENVS, "device": "cpu", **options}
        self.buffer = make(n_steps * N_ENVS, space, spaces.Discrete(5), **options)
        self.n_added = 0

    def observations(self, numbers: Array, envs: Array) -> Any:
        made = {key: make(numbers, envs, self.noisy) for key, (_, make) in self.keys.items()}
        return made if self.kind == "dict" else made[self.kind]

    def add(self, count: int = 1) -> None:
        """Add steps with the next numbers."""
        envs = np.arange(N_ENVS)
        for _ in range(count):
            numbers = np.full(N_ENVS, self.n_added)
            obs, next_obs = self.observations(numbers, envs), self.observations(numbers + 1, envs)
            action, reward = (numbers % 5).reshape(-1, 1), (numbers + envs / 4).astype(np.float32)
            done = numbers % EPISODE == EPISODE - 1
            self.buffer.add(obs, next_obs, action, reward, done, [{} for _ in envs])
            self.n_added += 1

    def check(self, batch: Any, low: int = 0, high: int = 1 << 40) -> None:
        """Raise unless every transition of ``batch`` is what was added under its number."""
        rewards = batch.rewards.numpy().reshape(-1)
        numbers, envs = rewards.astype(np.int64), ((rewards % 1) * 4).astype(np.int64)
        outside = numbers[(numbers < low) | (numbers >= high)]
        assert not len(outside), f"{outside} are not in {low}..{high - 1}"
        for got, expected in ((batch.observations, numbers), (batch.next_observations, numbers + 1)):
            made = self.observations(expected, envs)
            for key in self.keys:
                values = (got[key] if self.kind == "dict" else got).numpy()
                wanted = made[key] if self.kind == "dict" else made
                assert np.array_equal(values, wanted), f"{key} differs"
        assert np.array_equal(batch.actions.numpy().reshape(-1), numbers % 5)
        assert np.array_equal(batch.dones.numpy().reshape(-1), (numbers % EPISODE == EPISODE - 1).astype(np.float32))


def check_batches(name: str, case: dict[str, Any], stop: Any, answers: Any) -> None:
    """Check batches until told to stop; answer with how many there were, or with what went wrong."""
    try:
        checker, reader = Case(**case), SharedReader.open(name)
        count = 0
        while not stop.is_set():
            n_added = reader.n_added
            if not n_added:
                continue
            batch = reader.sample(32)
            checker.check(batch, n_added - checker.buffer.buffer_size, reader.n_added)
            count += 1
        answers.put(count)
    except BaseException as problem:
        answers.put(f"{type(problem).__name__}: {problem}")


def write_beside_readers(context: Any, case: dict[str, Any], count: int, n_readers: int = 2) -> list[Any]:
    """Add ``count`` steps while other processes read; return their answers."""
    owner = Case(**case)
    handle, stop, answers = owner.buffer.share(), context.Event(), context.Queue()
    arguments = handle.name, case, stop, answers
    readers = [context.Process(target=check_batches, args=arguments, daemon=True) for _ in range(n_readers)]
    for reader in readers:
        reader.start()
    owner.add(count)
    for view in owner.buffer.obs_views()["observations"].stored.values():
        view.store.check()
    time.sleep(0.2)
    stop.set()
    found = [answers.get(timeout=120) for _ in readers]
    for reader in readers:
        reader.join(30)
    return found


def add_forever(case: dict[str, Any], names: Any) -> None:
    """Share a buffer, and add steps until killed."""
    owner = Case(**case)
    owner.add(3)
    names.put(owner.buffer.share().name)
    while True:
        owner.add()


def kill_writers(context: Any, case: dict[str, Any], count: int) -> list[str]:
    """Kill processes that add steps, at random moments; return the errors that a reader of each then gets."""
    found = []
    checker = Case(**case)
    for seed in range(count):
        names = context.Queue()
        process = context.Process(target=add_forever, args=(case, names), daemon=True)
        process.start()
        reader = SharedReader.open(names.get(timeout=120))
        delay = random.Random(seed).random() * 0.1
        killed_at = 0.0
        started = time.monotonic()
        try:
            while True:
                checker.check(reader.sample(16))
                if not killed_at and time.monotonic() > started + delay:
                    os.kill(process.pid, signal.SIGKILL)
                    killed_at = time.monotonic()
                assert not killed_at or time.monotonic() < killed_at + 10, "the reader did not notice"
        except SharingError as problem:
            found.append(type(problem).__name__)
        process.join(30)
        assert not reader.is_live
    return found


def end_in_a_change(case: dict[str, Any], names: Any) -> None:
    """Be killed in the middle of a step."""
    owner = Case(**case)
    owner.add(10)
    names.put(owner.buffer.share().name)
    names.get(timeout=120)
    store = owner.buffer.observations.store
    store.on_change = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    owner.add()


def kill_in_a_change(context: Any) -> str:
    """The error of a reader whose writer was killed in the middle of a step."""
    names = context.Queue()
    process = context.Process(target=end_in_a_change, args=({}, names), daemon=True)
    process.start()
    reader = SharedReader.open(names.get(timeout=120))
    Case().check(reader.sample(16), 0, 10)
    names.put("go")
    process.join(60)
    try:
        reader.sample(16)
    except InterruptedChangeError as problem:
        return str(problem)
    return "none"


def kill_readers(context: Any, case: dict[str, Any], count: int) -> int:
    """Kill processes that read, at random moments, while steps are added; return how many steps were."""
    owner = Case(**case)
    owner.add(5)
    handle = owner.buffer.share()
    random.seed(0)
    for _ in range(count):
        stop, answers = context.Event(), context.Queue()
        reader = context.Process(target=check_batches, args=(handle.name, case, stop, answers), daemon=True)
        reader.start()
        end = time.monotonic() + 0.05 + random.random() * 0.2
        while time.monotonic() < end:
            owner.add()
        os.kill(reader.pid, signal.SIGKILL)
        owner.add()
        reader.join(30)
        owner.add(20)
    owner.check(handle.open().sample(64), 0, owner.n_added)
    return owner.n_added


def inherit(case: dict[str, Any]) -> list[str]:
    """What a forked child gets when it uses the buffer of its parent."""
    owner = Case(**case)
    owner.add(20)
    handle = owner.buffer.share()
    reader = handle.open()
    read, write = os.pipe()
    if not os.fork():
        lines = []
        for action in (lambda: owner.add(), lambda: owner.buffer.sample(4), lambda: owner.buffer.observations[0]):
            try:
                action()
                lines.append("none")
            except SharingError as problem:
                lines.append(type(problem).__name__)
        # what the parent has opened, and what the child opens
        for each in (reader, handle.open()):
            owner.check(each.sample(8), 0, 21)
        os.write(write, ",".join(lines).encode())
        os._exit(0)
    os.wait()
    owner.add()
    owner.check(reader.sample(8), 0, 21)
    return os.read(read, 1000).decode().split(",")


def fork_while_drawing() -> list[int]:
    """How children end that are forked while another thread draws from the generator of the reader they use."""
    owner = Case()
    owner.add(20)
    reader, stop = owner.buffer.share().open(), threading.Event()
    reader.sample(8)  # numba compiles with a lock that a fork does not wait for

    def draw() -> None:
        while not stop.is_set():
            reader.sample(512)

    drawing = threading.Thread(target=draw)
    drawing.start()
    ends = []
    for _ in range(25):
        child = os.fork()
        if not child:
            signal.alarm(60)  # kills a child that waits for a thread which it does not have
            owner.check(reader.sample(8), 0, 20)
            os._exit(0)
        ends.append(os.waitpid(child, 0)[1])
    stop.set()
    drawing.join()
    return ends


def leave_files(how: str) -> None:
    """End in some way while a buffer is shared in files, whose folder is printed."""
    from sb3_extra_buffers._sb3.sharing import BufferSharing

    owner = Case()
    owner.add(20)
    owner.buffer._sharing = BufferSharing(owner.buffer, in_files=True)
    handle = owner.buffer.share()
    owner.check(handle.open().sample(8), 0, 20)
    owner.add(300)
    owner.check(handle.open().sample(8), 120, 320)
    print(handle.name.rpartition(".")[0].rpartition(".")[0], flush=True)
    if how == "error":
        raise RuntimeError("on purpose")
    if how == "exit":
        sys.exit(3)
    if how == "drop":
        owner.buffer.stop_sharing()


if __name__ == "__main__":
    scenario, *arguments = sys.argv[1:]
    fork: Any = mp.get_context("fork")
    if scenario == "write":
        print(write_beside_readers(mp.get_context(arguments[0]), json.loads(arguments[1]), int(arguments[2])))
    elif scenario == "kill-writers":
        print(*kill_writers(fork, json.loads(arguments[0]), int(arguments[1])))
    elif scenario == "kill-in-a-change":
        print(kill_in_a_change(fork))
    elif scenario == "kill-readers":
        print(kill_readers(fork, json.loads(arguments[0]), int(arguments[1])))
    elif scenario == "inherit":
        print(*inherit({}))
    elif scenario == "fork-while-drawing":
        print(*fork_while_drawing())
    else:
        leave_files(scenario)
