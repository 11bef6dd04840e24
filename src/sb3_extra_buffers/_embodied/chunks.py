"""Chunks of consecutive steps: which slots hold a window, which ids its steps have, and which chunks are in use."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.stores.arena import lengthen
from sb3_extra_buffers.stores.base import Indices
from sb3_extra_buffers.stores.checks import require, within

if TYPE_CHECKING:
    from sb3_extra_buffers.files.parts import LoadedParts

StepIds = npt.NDArray[np.uint8]  # [..., 20]

#: Bytes of a step id: 8 of the replay, 8 of the chunk's serial number, 4 of the position in the chunk.
ID_BYTES = 20
NONE = -1
# columns that are saved, with a value for each chunk
_COLUMNS = ("serials", "starts", "used", "successors")


#: An array or a dict, a key, and the new value.
Entry = tuple[Any, Any, Any]


@dataclass(slots=True)
class Change:
    """A change that is checked and only has to be applied; idempotent."""

    entries: list[Entry] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    """New values of the owner's attributes."""
    freed: list[int] = field(default_factory=list)
    """Chunks that nothing refers to any more."""
    online: int | None = None
    """A window to append to the online queue."""

    def set(self, target: Indices | MutableMapping[Any, Any], key: Any, value: Any) -> None:
        self.entries.append((target, key, value))

    def apply(self) -> None:
        """Set all entries; None removes a key."""
        for target, key, value in self.entries:
            if value is None:
                target.pop(key, None)
            else:
                target[key] = value


class ChunkTable:
    """Chunks of ``size`` slots. The steps of a stream fill one chunk after the other, each linked to its successor.

    A chunk is in use while its reference count is above 0. It is referred to by every window that begins in it, by
    every step in it at which one of the next windows of its stream may begin, by its predecessor, and by the stream
    that fills it. Serial numbers are never reused, so ids of evicted steps differ from those of new steps.
    """

    def __init__(self, size: int, n_chunks: int) -> None:
        self.size = size
        none: Indices = np.zeros(0, np.int64)
        self.serials = none  # 0: not in use
        self.starts = none  # earlier steps have been evicted
        self.used = none
        self.successors = none  # of a chunk that was never used: 0
        self.references = none
        #: When each step was added: its number among all steps.
        self.numbers = none
        self.by_serial: dict[int, int] = {}
        self.next_serial = 1
        #: Chunks that were in use, in the order in which they are used again: the last one first.
        self.unused: list[int] = []
        #: Number of chunks that were ever in use; the others come after those in `unused`.
        self.n_begun = 0
        self.grow(n_chunks)

    def __len__(self) -> int:
        return len(self.serials)

    @property
    def n_slots(self) -> int:
        return len(self) * self.size

    @property
    def in_use(self) -> Indices:
        """Chunks in use, oldest first."""
        chunks = np.flatnonzero(self.serials[: self.n_begun])
        return chunks[np.argsort(self.serials[chunks])]

    def count_steps(self) -> int:
        """Number of steps that are held."""
        chunks = self.in_use
        return int((self.used[chunks] - self.starts[chunks]).sum())

    @property
    def is_full(self) -> bool:
        """Whether all chunks are in use."""
        return not self.unused and self.n_begun == len(self)

    def grow(self, n_chunks: int) -> None:
        """Increase the number of chunks to ``n_chunks``; new ones take memory once they are used."""
        longer = {name: lengthen(getattr(self, name), n_chunks) for name in (*_COLUMNS, "references")}
        longer["numbers"] = lengthen(self.numbers, n_chunks * self.size)
        self.__dict__.update(longer)

    # ---- changes ----

    def begin(self, change: Change, predecessor: int) -> tuple[int, int]:
        """Plan to use an unused chunk for the stream that has filled ``predecessor``, which is `NONE` for a new stream.

        Returns:
            The chunk, and the number of references that it will have.
        """
        serial, unused = self.next_serial, self.unused
        if unused:
            chunk, unused = unused[-1], unused[:-1]
        else:
            chunk = self.n_begun
            change.set(self.__dict__, "n_begun", chunk + 1)
        for column, value in ((self.serials, serial), (self.starts, 0), (self.used, 0), (self.successors, NONE)):
            change.set(column, chunk, value)
        change.set(self.by_serial, serial, chunk)
        n_references = 1
        if predecessor != NONE:
            unused = self._release(change, predecessor, unused)
            if predecessor not in change.freed:
                change.set(self.successors, predecessor, chunk)
                n_references = 2
        change.set(self.references, chunk, n_references)
        change.set(self.__dict__, "next_serial", serial + 1)
        change.set(self.__dict__, "unused", unused)
        return chunk, n_references

    def evict(self, change: Change, slot: int) -> None:
        """Plan to remove the oldest window, which begins at ``slot``, and the chunks that nothing will refer to."""
        chunk, offset = divmod(slot, self.size)
        change.set(self.starts, chunk, offset + 1)
        self.release(change, chunk)

    def release(self, change: Change, chunk: int) -> None:
        """Plan to drop a reference to ``chunk``."""
        change.set(self.__dict__, "unused", self._release(change, chunk, self.unused))

    def _release(self, change: Change, chunk: int, unused: list[int]) -> list[int]:
        """Plan to drop a reference to ``chunk``; return ``unused`` with the chunks that nothing will refer to."""
        while chunk != NONE:
            count = int(self.references[chunk]) - 1
            change.set(self.references, chunk, count)
            if count:
                break
            change.set(self.by_serial, int(self.serials[chunk]), None)
            change.set(self.serials, chunk, 0)
            change.freed.append(chunk)
            unused = [*unused, chunk]
            chunk = int(self.successors[chunk])
        return unused

    # ---- windows ----

    def window_slots(self, starts: Indices, length: int) -> Indices:
        """Slots ``[batch, length]`` of the windows that begin at the slots ``starts [batch]``."""
        positions = (starts % self.size)[:, None] + np.arange(length)
        n_linked = int(positions.max(initial=0)) // self.size
        chunks = np.empty((len(starts), n_linked + 1), np.int64)
        chunks[:, 0] = starts // self.size
        for number in range(n_linked):
            # the last chunk of a stream has no successor: no window needs it, so any valid chunk can stand in
            chunks[:, number + 1] = np.maximum(self.successors[chunks[:, number]], 0)
        rows = np.arange(len(starts))[:, None]
        slots: Indices = chunks[rows, positions // self.size] * self.size + positions % self.size
        return slots

    def step_ids(self, slots: Indices, replay_id: bytes) -> StepIds:
        """Return the ids ``[..., 20]`` of the steps at ``slots``."""
        ids = np.empty((*slots.shape, ID_BYTES), np.uint8)
        ids[..., :8] = np.frombuffer(replay_id, np.uint8)
        serials = np.ascontiguousarray(self.serials[slots // self.size].astype(">i8")[..., None])
        offsets = np.ascontiguousarray((slots % self.size).astype(">u4")[..., None])
        ids[..., 8:16], ids[..., 16:] = serials.view(np.uint8), offsets.view(np.uint8)
        return ids

    def locate(self, ids: StepIds, replay_id: bytes) -> Indices:
        """Return the slots ``[n]`` of the steps with these ids ``[n, 20]``; `NONE` for steps that are not held."""
        ids = np.ascontiguousarray(ids)
        serials = np.ascontiguousarray(ids[:, 8:16]).view(">i8")[:, 0].astype(np.int64)
        offsets = np.ascontiguousarray(ids[:, 16:]).view(">u4")[:, 0].astype(np.int64)
        different, which = np.unique(serials, return_inverse=True)
        chunks = np.array([self.by_serial.get(serial, NONE) for serial in different.tolist()], np.int64)[which]
        held = (chunks != NONE) & (offsets >= self.starts[chunks]) & (offsets < self.used[chunks])
        held &= (ids[:, :8] == np.frombuffer(replay_id, np.uint8)).all(axis=1)
        return np.where(held, chunks * self.size + offsets, NONE)

    def chains(self) -> list[tuple[list[int], Indices]]:
        """Return the chunks of each stream, and the slots of all its steps in order."""
        heads = self.in_use
        follows = set(self.successors[heads].tolist())
        found = []
        for head in heads.tolist():
            if head in follows:
                continue
            chunks, chunk = [], head
            while chunk != NONE:
                chunks.append(chunk)
                chunk = int(self.successors[chunk])
            slots = [np.arange(self.starts[chunk], self.used[chunk]) + chunk * self.size for chunk in chunks]
            found.append((chunks, np.concatenate(slots)))
        return found

    def close_streams(self, length: int) -> tuple[Indices, list[int]]:
        """End all streams, and free the chunks of those that are shorter than a window.

        Returns:
            The slots that windows of ``length`` begin at, oldest window first, and the chunks that were freed.
        """
        self.references[: self.n_begun] = 0
        windows, ends, freed = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], []
        for chunks, slots in self.chains():
            n_windows = max(len(slots) - length + 1, 0)
            if not n_windows:
                freed += chunks
                continue
            windows.append(slots[:n_windows])
            ends.append(self.numbers[slots[length - 1 :]])
            self.references[chunks[1:]] += 1
        for chunk in freed:
            self.by_serial.pop(int(self.serials[chunk]), None)
            self.serials[chunk] = 0
        self.unused = [*self.unused, *freed]
        begins = np.concatenate(windows)
        np.add.at(self.references, begins // self.size, 1)
        return begins[np.argsort(np.concatenate(ends), kind="stable")], freed

    # ---- files ----

    @property
    def n_saved(self) -> int:
        """Number of chunks to save: all up to the last one in use."""
        return int(self.in_use.max(initial=-1)) + 1

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Indices]]:
        """Return a description, and the columns to save."""
        n = self.n_saved
        columns = {f"chunks/{name}": getattr(self, name)[:n] for name in _COLUMNS}
        columns["numbers"] = self.numbers[: n * self.size]
        return {"size": self.size, "n_chunks": n, "next_serial": self.next_serial}, columns

    @classmethod
    def from_parts(cls, parts: LoadedParts, n_chunks: int) -> ChunkTable:
        """Restore what `to_parts` returned, with at least ``n_chunks``; nothing in ``parts`` is trusted."""
        size, n_saved = parts.number("chunks", "size", low=1, stop=1 << 31), parts.number("chunks", "n_chunks")
        # from the columns, which are in the file: ``n_saved`` and ``size`` alone may be any numbers
        table = cls(size, 0)
        for name in _COLUMNS:
            setattr(table, name, parts.column(f"chunks/{name}", np.int64, (n_saved,)).copy())
        table.numbers = lengthen(parts.column("numbers", np.int64, (n_saved * size,)), n_saved * size)
        table.references, table.n_begun = np.zeros(n_saved, np.int64), n_saved
        table.next_serial = parts.number("chunks", "next_serial", low=1, stop=1 << 62)
        table._check()
        table.by_serial = {int(table.serials[chunk]): chunk for chunk in table.in_use.tolist()}
        table.unused = [chunk for chunk in reversed(range(n_saved)) if not table.serials[chunk]]
        if n_chunks > n_saved:
            table.grow(n_chunks)
        return table

    def _check(self) -> None:
        """Raise `FileFormatError` if the columns contradict each other."""
        in_use = self.in_use
        serials, starts, used, successors = (getattr(self, name)[in_use] for name in _COLUMNS)
        within(self.serials, 0, self.next_serial, "the serial number of a chunk")
        require(len(np.unique(serials)) == len(serials), "two chunks have the same serial number")
        within(used, 0, self.size + 1, "the number of steps in a chunk")
        within(starts, 0, self.size + 1, "the first step of a chunk")
        require(starts <= used, "a chunk starts after its last step")
        within(successors, NONE, len(self), "the successor of a chunk")
        linked = successors[successors != NONE]
        # if all successors are newer, there are no cycles
        newer = self.serials[linked] > serials[successors != NONE]
        require(newer & (self.starts[linked] == 0), "the successor of a chunk is older, or has lost its first step")
        require(used[successors != NONE] == self.size, "a chunk has a successor before it is full")
        require(len(np.unique(linked)) == len(linked), "two chunks have the same successor")
        within(self.numbers, 0, 1 << 62, "the number of a step")
