"""What all replay buffers of `benchmarks.peers` are given, and what they must return."""

from __future__ import annotations

import copy
import itertools
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import feed

Array = npt.NDArray[Any]

BATCHES = (32, 256)
N_WINDOWS, LENGTH = 16, 65
# what can be sampled: transitions, windows of consecutive steps, transitions by priority
UNIFORM, WINDOWS, PRIORITIES = "uniform", "windows", "priorities"
# an episode of vectors
_VECTOR_EPISODE = 250


class Stream(NamedTuple):
    """A recording and how much of it is stored."""

    title: str
    recorded: int  # steps of every environment in the recording
    n_steps: int  # of every environment that a buffer holds
    stack: int = 1
    recording: str = ""


STREAMS = {
    "MsPacman": Stream("MsPacman, stacks of 4 frames", 5000, 3000, 4, "MsPacman"),
    "vizdoom-rgb": Stream("ViZDoom, RGB", 1000, 1000, 1, "vizdoom-rgb"),
    "video": Stream("camera, RGB", 500, 500, 1, "video"),
    "17 floats": Stream("vectors of 17 floats", 25_000, 25_000),
}


class Step(NamedTuple):
    """Four transitions that are added together; the reward of each is its number, by which it is recognised."""

    obs: Array
    next_obs: Array
    actions: Array  # [4, 1] int64, with vectors [4, 6] float32
    rewards: Array  # [4] float32
    dones: Array  # [4] bool


class Columns(NamedTuple):
    """A batch as NumPy arrays: of transitions, or with a second axis of windows, which have no next observations."""

    obs: Array
    next_obs: Array | None
    actions: Array
    rewards: Array
    dones: Array


def vectors(n_steps: int) -> Iterator[feed.Step]:
    """Random vectors of 17 floats in episodes of 250 steps."""
    draw = np.random.default_rng(0)
    shape = (feed.N_ENVS, 17)
    obs = draw.normal(size=shape).astype(np.float32)
    for step in range(1, n_steps + 1):
        next_obs = draw.normal(size=shape).astype(np.float32)
        done = step % _VECTOR_EPISODE == 0
        yield feed.Step(obs, next_obs, np.full(feed.N_ENVS, done))
        obs = draw.normal(size=shape).astype(np.float32) if done else next_obs


class Case:
    """One stream and the size of the buffers it is stored in."""

    def __init__(self, name: str, limit: int | None = None, channels_last: bool = False) -> None:
        self.name, self.stream, self.channels_last = name, STREAMS[name], channels_last
        self.stack, self.is_vector = self.stream.stack, not self.stream.recording
        self.n_steps = min(self.stream.n_steps, limit or self.stream.n_steps)
        self.n_overwritten = self.n_steps // 4
        self.n_recorded = self.stream.recorded if limit is None or self.stream.recording else self.n_steps
        first = next(self._replay()).obs
        self.shape, self.dtype = first.shape[1:], first.dtype
        self.size = self.n_steps * feed.N_ENVS
        self.action_shape, self.action_dtype = ((6,), np.float32) if self.is_vector else ((1,), np.int64)

    def spaces(self) -> tuple[Any, Any]:
        """The spaces of observations and actions."""
        from gymnasium import spaces

        low, high = (-np.inf, np.inf) if self.is_vector else (0, 255)
        actions = spaces.Box(-1, 1, (6,), np.float32) if self.is_vector else spaces.Discrete(4)
        return spaces.Box(low, high, self.shape, self.dtype.type), actions

    def _replay(self) -> Iterator[feed.Step]:
        if not self.stream.recording:
            return vectors(self.n_recorded)
        return feed.steps(self.stream.recording, self.n_recorded, self.stack, self.channels_last)

    def _episodes(self, n_steps: int) -> Iterator[feed.Step]:
        """The first steps of the recording; the last one ends the episodes."""
        for number, step in enumerate(itertools.islice(self._replay(), n_steps), 1):
            yield step._replace(dones=step.dones | (number == n_steps))

    def _in_turn(self) -> Iterator[feed.Step]:
        """The recorded environments one after another, four consecutive steps at a time."""
        for env in range(feed.N_ENVS):
            steps = self._episodes(self.n_steps)
            while group := list(itertools.islice(steps, feed.N_ENVS)):
                yield feed.Step(*(np.stack([part[env] for part in column]) for column in zip(*group, strict=True)))

    def steps(self, order: str = "steps") -> Iterator[Step]:
        """Transitions without end, of four environments at a time or, in order ``streams``, of one after another."""
        rng, numbers = np.random.default_rng(0), itertools.count(step=feed.N_ENVS)
        while True:
            for step in self._in_turn() if order == "streams" else self._episodes(self.n_recorded):
                shape = (feed.N_ENVS, *self.action_shape)
                draw = rng.random(shape, np.float32) if self.is_vector else rng.integers(0, 4, shape)
                rewards = (np.arange(feed.N_ENVS) + next(numbers)).astype(np.float32)
                yield Step(step.obs, step.next_obs, draw, rewards, step.dones)


class System:
    """A replay buffer under test.

    A subclass says what it cannot do in ``lacks``, by `UNIFORM`, `WINDOWS`, `PRIORITIES` or ``files``, with the reason.
    """

    title: ClassVar[str]
    #: of the Python package that it is in
    package: ClassVar[str]
    #: how it is made and used, as shown on the page
    calls: ClassVar[str]
    #: which environment of the Makefile has it
    environment: ClassVar[str] = ".venv-peers"
    #: ``streams`` if consecutive transitions must be of one environment
    order: ClassVar[str] = "steps"
    channels_last: ClassVar[bool] = False
    #: False if the next observation at the end of an episode is documented to be the next episode's first
    next_at_ends: ClassVar[bool] = True
    #: calls that are timed together, because work continues between them
    block: ClassVar[int] = 1
    #: transitions that are stored, where as many as the others hold would take hours
    most: ClassVar[int | None] = None
    lacks: ClassVar[dict[str, str]] = {}

    def __init__(self, case: Case, kind: str = UNIFORM) -> None:
        self.case, self.kind = case, kind
        self.seed = 0
        self._folder: Path | None = None

    def prepare(self, step: Step) -> Any:
        """The step in the container that `add` takes; not timed."""
        raise NotImplementedError

    def add(self, data: Any) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until everything that was added can be sampled."""

    def outdated(self) -> int:
        """How many transitions beyond the newest ``case.size`` may still be returned."""
        return 0

    def sample(self, batch: int) -> Any:
        raise NotImplementedError

    def windows(self) -> Any:
        """`N_WINDOWS` windows of `LENGTH` steps."""
        raise NotImplementedError

    def sample_and_update(self) -> Any:
        """Sample 256 transitions by priority, and give them new priorities."""
        raise NotImplementedError

    def columns(self, batch: Any) -> Columns:
        """What the batch contains, for comparison with what was added; not timed."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def load(self, folder: Path) -> System:
        """A buffer that samples what was saved."""
        raise NotImplementedError

    def like(self) -> Any:
        """A second object of this kind, not initialised, for `load`."""
        return copy.copy(self)

    def scratch(self) -> Path:
        """A folder of this buffer's own, removed with it."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="peers-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def disk_bytes(self) -> int:
        """Bytes of files that the buffer keeps its contents in."""
        return folder_bytes(self._folder) if self._folder else 0


def folder_bytes(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


class Ledger:
    """Checksums of everything that was added, by the number of the transition."""

    def __init__(self) -> None:
        self.sums: list[tuple[int, int, int, bool]] = []

    def add(self, step: Step) -> None:
        for obs, next_obs, action, done in zip(step.obs, step.next_obs, step.actions, step.dones, strict=True):
            self.sums.append((checksum(obs), checksum(next_obs), checksum(action), bool(done)))

    def check(self, system: System, batch: Any, name: str) -> None:
        """End the process unless the batch consists of the latest transitions that were added."""
        columns = system.columns(batch)
        numbers = columns.rewards.reshape(columns.obs.shape[: columns.rewards.ndim]).astype(np.int64)
        oldest = len(self.sums) - system.case.size - system.outdated()
        if not (numbers.max() < len(self.sums) and numbers.min() >= oldest):
            raise SystemExit(f"{name}: returns transitions that it should not hold; it is not timed")
        dtype, action_dtype = system.case.dtype, system.case.action_dtype
        for index in np.ndindex(*numbers.shape):
            obs, next_obs, action, done = self.sums[numbers[index]]
            found = [checksum(columns.obs[index].astype(dtype)) == obs, bool(columns.dones[index]) == done]
            found.append(checksum(columns.actions[index].astype(action_dtype)) == action)
            if columns.next_obs is not None and (system.next_at_ends or not done):
                found.append(checksum(columns.next_obs[index].astype(dtype)) == next_obs)
            if not all(found):
                raise SystemExit(f"{name}: transition {numbers[index]} is not as it was added; it is not timed")
        if numbers.ndim == 2:
            stride = 1 if system.order == "streams" else feed.N_ENVS
            if numbers.shape != (N_WINDOWS, LENGTH) or not (np.diff(numbers, axis=1) == stride).all():
                raise SystemExit(f"{name}: windows are not of consecutive steps; it is not timed")

    def check_complete(self, system: System, name: str) -> None:
        """End the process unless samples come from the whole buffer, from its oldest transitions to its newest."""
        batches = [system.columns(system.sample(BATCHES[-1])).rewards.reshape(-1) for _ in range(4)]
        ages = len(self.sums) - np.concatenate(batches).astype(np.int64)
        if len(np.unique(np.minimum(10 * ages // system.case.size, 9))) < 10:
            raise SystemExit(f"{name}: samples only some of the transitions that it should hold; it is not timed")


def checksum(array: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
