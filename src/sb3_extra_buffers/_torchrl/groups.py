"""Keys of the data that share a store, and how what comes in one after the other gets there."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sb3_extra_buffers._torchrl.stored_tensor import Leaf, Positions
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.stores.layout import find_layout
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["Group", "Pilot", "find_n_envs", "join_keys", "steps_of"]

# rows that tell how many environments take turns
_PILOT_ROWS = 128
# environments that may take turns
_MOST_ENVS = 64

Key = Any  # what TensorDict calls a nested key: a string or a tuple of them


def as_tuple(key: Key) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)


def join_keys(keys: Sequence[Key]) -> list[list[Key]]:
    """Keys that repeat each other: ``("next", *key)`` beside ``key``."""
    by_path = {as_tuple(key): key for key in keys}
    joined = []
    for path, key in by_path.items():
        if path[0] == "next" and path[1:] in by_path:
            continue
        following = by_path.get(("next", *path))
        joined.append([key] if following is None else [key, following])
    return joined


class Group:
    """A key, and the one that repeats it, in one store: a frame they share is held once.

    Positions are counted over all leading axes. A row continues the stream ``position % n_streams``.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        spec: ObsSpec,
        dtype: torch.dtype,
        n_rows: int,
        n_streams: int,
        device: torch.device,
        method: str,
        options: dict[str, Any],
    ) -> None:
        self.keys = list(keys)
        self.store = ObservationStore(spec, n_streams=n_streams, method=method, options=options)
        self.leaves = [Leaf(self.store, n_rows, dtype, device) for _ in keys]

    def read(self, positions: Positions) -> list[torch.Tensor]:
        """The rows at ``positions`` for each key; frames they share are decoded once."""
        sets = np.empty((len(self.leaves), positions.size), np.int64)
        for row, leaf in zip(sets, self.leaves, strict=True):
            np.add(positions, leaf.base, out=row)
        rows = self.store.read(sets)
        return [leaf.as_tensor(part, positions.shape) for leaf, part in zip(self.leaves, rows, strict=True)]

    def read_rows(self, places: Sequence[int], positions: Positions) -> list[ByteRows]:
        """The rows at ``positions`` for some of the keys."""
        return list(self.store.read(np.stack([positions + self.leaves[place].base for place in places])))

    def write_set(self, place: int, positions: Positions, rows: ByteRows) -> None:
        """Store ``rows`` of one key alone."""
        self.store.write(positions + self.leaves[place].base, positions % self.store.n_streams, rows)

    def write(self, positions: Positions, batches: Sequence[ByteRows]) -> None:
        """Store ``batches`` of rows, one for each key, as if they came one step after the other."""
        store = self.store
        n_streams = store.n_streams
        if len(self.leaves) == 1:
            store.write(positions + self.leaves[0].base, positions % n_streams, batches[0])
            return
        base, next_base = (leaf.base for leaf in self.leaves)
        rows, next_rows = batches
        for first, stop in steps_of(positions, n_streams):
            index = int(positions[first])
            if stop - first == n_streams:
                store.write_step(index + base, index + next_base, rows[first:stop], next_rows[first:stop])
                continue
            indices = positions[first:stop]
            streams = indices % n_streams
            store.write(indices + base, streams, rows[first:stop])
            store.write(indices + next_base, streams, next_rows[first:stop])

    def rewrite(self, n_streams: int, count: int) -> Group:
        """A group of as many rows with other streams that holds the first ``count`` of this one's."""
        store = self.store
        leaf = self.leaves[0]
        new = Group(self.keys, store.spec, leaf.dtype, leaf.n_rows, n_streams, leaf.device, store.method, store.options)
        positions = np.arange(count)
        new.write(positions, [store.read(positions + leaf.base) for leaf in self.leaves])
        return new

    def clear(self) -> None:
        """Make every position unwritten."""
        self.store.clear()

    def memory_usage(self) -> MemoryUsage:
        """What is held, by purpose."""
        return self.store.memory_usage()

    def describe(self) -> str:
        """The method in use and why."""
        return self.store.describe()

    def check(self) -> None:
        """Raise if anything inside disagrees."""
        self.store.check()


class Pilot:
    """The first rows of a storage, until they tell how many environments take turns. Never changes."""

    def __init__(self, spec: ObsSpec, n_rows: int) -> None:
        self.spec = spec
        self.held = 0
        self._enough = min(_PILOT_ROWS, n_rows)
        self._parts: tuple[list[ByteRows], ...] = ()

    def look_at(self, positions: Positions, batches: Sequence[ByteRows]) -> int | Pilot:
        """How many it are, once that is known, or a pilot that has seen these rows too.

        1 where rows come in no order that means anything.
        """
        if not np.array_equal(positions, np.arange(self.held, self.held + len(positions))):
            return 1
        more = Pilot(self.spec, self._enough)
        more._parts = (*self._parts, [rows[: _PILOT_ROWS - self.held].copy() for rows in batches])
        more.held = self.held + len(positions)
        return more.decide() if more.held >= self._enough else more

    def decide(self) -> int:
        """How many it are, judging by what there is."""
        if not self._parts:
            return 1
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        return find_n_envs(self.spec, columns[0], columns[1] if len(columns) > 1 else None)


def steps_of(positions: Positions, n_streams: int) -> Iterator[tuple[int, int]]:
    """Runs of consecutive positions that begin and end with a step of all streams, or within one."""
    if n_streams == 1:
        return ((row, row + 1) for row in range(len(positions)))
    breaks = (positions[1:] != positions[:-1] + 1) | (positions[1:] % n_streams == 0)
    ends = [*(np.flatnonzero(breaks) + 1).tolist(), len(positions)] if len(positions) else []
    return zip([0, *ends[:-1]][: len(ends)], ends, strict=True)


def find_n_envs(spec: ObsSpec, rows: ByteRows, next_rows: ByteRows | None) -> int:
    """How many environments take turns in ``rows``: 1 where successive rows are of the same one.

    A wrong answer costs memory, not correctness.
    """
    most = min(_MOST_ENVS, len(rows) // 2)
    if next_rows is None:
        for n_envs in range(1, most + 1):
            if find_layout(spec, [rows[env::n_envs] for env in range(n_envs)]).stack > 1:
                return n_envs
        return 1
    sums = np.array([zlib.crc32(row) for row in rows])
    next_sums = np.array([zlib.crc32(row) for row in next_rows])
    # what follows an observation is the environment's next one, unless an episode ended
    followed = [float((sums[n_envs:] == next_sums[:-n_envs]).mean()) for n_envs in range(1, most + 1)]
    best = int(np.argmax(followed)) if followed else 0
    return best + 1 if followed and followed[best] >= 0.5 else 1
