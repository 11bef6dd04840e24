"""A heap that packs payloads end to end and reclaims them oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import HeapFullError
from sb3_extra_buffers.stores.arena import SLACK, lengthen, map_bytes

_LEAST = 1 << 14
_NUMBER = 0xFFFFFFFF


class Arena(NamedTuple):
    """Bytes and where payloads lie in them: replaced by one assignment, so that the two never disagree."""

    area: Any
    """What keeps the memory: a map, or an array."""
    data: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    """Per slot; where a segment is open, its store's own business."""


class Heap:
    """One payload per slot, packed in write order.

    The arena is a ring. Replay and rollout buffers free payloads about in the order they wrote them, so free
    space is one gap and a write is a copy to its front. Where payloads die in another order the gap runs out
    early; then the live ones are repacked into an arena an eighth larger than they are, or, while nothing was
    freed yet, the arena is lengthened where it lies. So the arena never exceeds 9/8 of the largest amount ever
    live, plus `_LEAST` and one payload, and it shrinks when less than half of it is live.

    What lies where follows from ``starts``, ``lengths`` and the bytes alone; `rebuild` derives everything else from
    them, wherever a change was interrupted.

    ``limit`` bounds the live bytes. ``path`` puts the arena into a file.
    """

    def __init__(self, n_slots: int = 0, limit: int | None = None, path: Path | None = None) -> None:
        self.limit = limit
        self.path = path
        self.lengths = np.zeros(n_slots, np.int32)
        self.live_bytes = 0
        self.n_repacks = self._n_rebuilds = 0
        area = map_bytes(0, path)
        self._arena = Arena(area, np.frombuffer(area, np.uint8), np.zeros(n_slots, np.int64))
        self._head = 0
        # slots in write order. Each write has a number, counted modulo 2**32; an entry is stale
        # once its slot was freed or written under another number
        self._order = np.zeros(64, np.int32)
        self._first = 0
        self._n_order = 0
        self._first_number = 0
        self._numbers = np.zeros(n_slots, np.uint32)
        # slots written or freed since `saved`, so that a file need only be given what is new
        self._unsaved = np.zeros(n_slots, np.bool_)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The arena's bytes."""
        return self._arena.data

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where the payload of each slot begins."""
        return self._arena.starts

    @property
    def capacity(self) -> int:
        """Bytes of the arena."""
        return int(self.data.size - SLACK)

    @property
    def index_bytes(self) -> int:
        columns = (self.starts, self.lengths, self._numbers, self._order, self._unsaved)
        return sum(column.nbytes for column in columns)

    def grow(self, n_slots: int) -> None:
        """Make room for slots up to ``n_slots``."""
        for name in ("lengths", "_numbers", "_unsaved"):
            column = getattr(self, name)
            if len(column) < n_slots:
                setattr(self, name, lengthen(column, n_slots))
        if len(self.starts) < n_slots:
            self._arena = self._arena._replace(starts=lengthen(self.starts, n_slots))

    def write(self, slots: Sequence[int], payloads: Sequence[Any]) -> None:
        """Store one payload per slot, releasing what those slots held before."""
        views = [np.frombuffer(payload, np.uint8) for payload in payloads]
        needed = sum(view.size for view in views)
        held = int(self.lengths[list(slots)].sum()) if len(slots) else 0
        if self.limit is not None and self.live_bytes - held + needed > self.limit:
            raise HeapFullError(needed, self.live_bytes - held, self.limit)
        for slot, view in zip(slots, views, strict=True):
            self._put(slot, view)

    def put(self, slot: int, payload: npt.NDArray[np.uint8]) -> None:
        """`write` for a single payload."""
        self.check_limit(slot, payload.size)
        self._put(slot, payload)

    def check_limit(self, slot: int, nbytes: int) -> None:
        """Raise unless ``slot`` may hold ``nbytes``."""
        if self.limit is not None and self.live_bytes - int(self.lengths[slot]) + nbytes > self.limit:
            raise HeapFullError(nbytes, self.live_bytes - int(self.lengths[slot]), self.limit)

    def _put(self, slot: int, payload: npt.NDArray[np.uint8]) -> None:
        self._release(slot)
        start = self._reserve(payload.size)
        self.data[start : start + payload.size] = payload
        self._append(np.array([slot], np.int32))
        self.starts[slot], self.lengths[slot] = start, payload.size
        self.live_bytes += payload.size

    def gap(self) -> tuple[int, int]:
        """Begin and end of the free bytes that payloads may be put into by hand, one after the other, for `adopt`."""
        tail = self._tail()
        head = 0 if tail is None else self._head
        end = self.capacity if tail is None or head > tail else tail - 1
        return head, end if self.limit is None else min(end, head + self.limit - self.live_bytes)

    def adopt(self, slots: npt.NDArray[np.int32]) -> None:
        """Take over payloads that were put into the gap in this order, with ``starts`` and ``lengths`` set."""
        self._append(slots)
        self._head = int(self.starts[slots[-1]]) + int(self.lengths[slots[-1]])
        self.live_bytes += int(self.lengths[slots].sum())

    def free(self, slots: Sequence[int]) -> None:
        """Release what ``slots`` hold."""
        for slot in slots:
            self._release(slot)
        self._unsaved[list(slots)] = True
        if self.capacity > 2 * self.live_bytes + 4 * _LEAST:
            self._repack(0)

    def read(self, slot: int) -> memoryview:
        """The payload without a copy; valid until the next write."""
        start = int(self.starts[slot])
        return self.data[start : start + int(self.lengths[slot])].data

    def clear(self) -> None:
        """Release everything, and give the memory back."""
        self.lengths[:] = 0
        self._unsaved[:] = True
        self.live_bytes = 0
        self._first = self._n_order = self._head = 0
        area = map_bytes(0, self.path)
        self._arena = Arena(area, np.frombuffer(area, np.uint8), self.starts)

    def rebuild(self) -> None:
        """Derive the order and the totals from where payloads lie, after a change that was interrupted."""
        self.grow(max(len(self.starts), len(self.lengths), len(self._numbers), len(self._unsaved)))
        if not self.data.size:
            # the arena was about to be lengthened
            self._arena = self._arena._replace(data=np.frombuffer(self._arena.area, np.uint8))
        self._unsaved[:] = True
        live = np.flatnonzero(self.lengths).astype(np.int32)
        live = live[np.argsort(self.starts[live], kind="stable")]
        starts, lengths = self.starts[live], self.lengths[live].astype(np.int64)
        if len(live):
            # the ring begins after its widest gap, the last one of several
            gaps = np.append(starts[1:], self.capacity + starts[0]) - (starts + lengths)
            live = np.roll(live, int(np.argmax(gaps[::-1])))
        self._n_rebuilds += 1
        self._first = self._n_order = self._first_number = 0
        self._append(live)
        self._head = self._end_of(live)
        self.live_bytes = int(lengths.sum())

    def _end_of(self, slots: npt.NDArray[np.int32]) -> int:
        """Where the next payload goes, after all of ``slots``, oldest first."""
        return int(self.starts[slots[-1]]) + int(self.lengths[slots[-1]]) if len(slots) else 0

    # ---- copies elsewhere ----

    @property
    def mark(self) -> tuple[object, int, int]:
        """The state of things, for `written_since`."""
        return self._arena.area, self._n_rebuilds, (self._first_number + self._n_order) & _NUMBER

    def written_since(self, mark: tuple[object, int, int]) -> npt.NDArray[np.int32] | None:
        """Slots whose payloads were written since then; None if that may be all of them."""
        area, n_rebuilds, number = self.mark
        if mark[0] is not area or mark[1] != n_rebuilds:
            return None
        return self._listed((number - mark[2]) & _NUMBER)

    # ---- files ----

    def unsaved(self, everything: bool = False) -> npt.NDArray[np.int32]:
        """Slots whose payloads were written since `saved`, or all of them; oldest first."""
        if everything:
            return self._listed()
        slots = np.flatnonzero(self._unsaved & (self.lengths > 0)).astype(np.int32)
        order: npt.NDArray[np.int32] = slots[np.argsort(self._numbers[slots] - np.uint32(self._first_number))]
        return order

    def changed(self) -> npt.NDArray[np.int64]:
        """Slots that were written or freed since `saved`."""
        return np.flatnonzero(self._unsaved)

    def saved(self, but: npt.NDArray[Any] | None = None) -> None:
        """What there is now has been saved; of the slots ``but``, more is to come."""
        self._unsaved[:] = False
        if but is not None:
            self._unsaved[but] = True

    def adopt_all(
        self, slots: npt.NDArray[np.int32], data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]
    ) -> None:
        """Fill an empty heap with payloads that lie in ``data``, oldest first; ``lengths`` is set already."""
        lengths = self.lengths[slots].astype(np.int64)
        packed = np.cumsum(lengths) - lengths
        size = int(lengths.sum())
        area = map_bytes(size + size // 8 + _LEAST, self.path)
        self._arena = Arena(area, np.frombuffer(area, np.uint8), self.starts)
        for start, to, length in merge_runs(starts, packed, lengths):
            self.data[to : to + length] = data[start : start + length]
        self._number_all(slots, packed, size)

    def look_into(
        self, slots: npt.NDArray[np.int32], data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]
    ) -> None:
        """Let an empty heap answer from ``data``, without a copy; nothing can be written to it then."""
        self._arena = Arena(data, data, self.starts)
        self._number_all(slots, starts, int(self.lengths[slots].sum(dtype=np.int64)))

    def make_room(self, n_writes: int) -> None:
        """Have room to list as many writes as ``n_writes``, or as few, if there are no more."""
        if self._first == 0:
            self._order = lengthen(self._order[: self._n_order], max(n_writes, self._n_order))

    def _number_all(self, slots: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], size: int) -> None:
        self.starts[slots] = starts
        self.live_bytes = self._head = size
        self._append(slots)

    def _release(self, slot: int) -> None:
        self.live_bytes -= int(self.lengths[slot])
        self.lengths[slot] = 0

    def _reserve(self, nbytes: int) -> int:
        start = self._gap(nbytes)
        if start is None:
            if not self._extend(nbytes):
                self._repack(nbytes)
            start = self._gap(nbytes)
            if start is None:
                raise AssertionError(f"no room for {nbytes} bytes after making some")
        self._head = start + nbytes
        return start

    def _extend(self, nbytes: int) -> bool:
        """Lengthen the arena where it lies, if it is full from end to end; False if it can't be."""
        size = self.live_bytes + nbytes
        longer = size + size // 8 + _LEAST
        # dead bytes before the oldest payload may be so many that it would not fit behind the newest one
        if (self._tail() or 0) > self._head or self.capacity > size or self._head + nbytes > longer:
            return False
        arena = self._arena
        # an area with views on it cannot change its size
        self._arena = arena._replace(data=np.zeros(0, np.uint8))
        area = arena.area
        del arena
        try:
            area.resize(longer + SLACK)
        except (BufferError, OSError, SystemError, ValueError):
            return False
        finally:
            self._arena = self._arena._replace(data=np.frombuffer(area, np.uint8))
        return True

    def _gap(self, nbytes: int) -> int | None:
        """Where ``nbytes`` fit, without moving anything."""
        tail = self._tail()
        if tail is None:
            return 0 if nbytes <= self.capacity else None
        if self._head > tail:
            if nbytes <= self.capacity - self._head:
                return self._head
            return 0 if nbytes < tail else None
        return self._head if nbytes < tail - self._head else None

    def _tail(self) -> int | None:
        """Start of the oldest live payload; forgets stale entries on the way."""
        while self._n_order:
            slot = self._order[self._first]
            if self.lengths[slot] and self._numbers[slot] == self._first_number:
                return int(self.starts[slot])
            self._first = (self._first + 1) % len(self._order)
            self._first_number = (self._first_number + 1) & _NUMBER
            self._n_order -= 1
        return None

    def _append(self, slots: npt.NDArray[np.int32]) -> None:
        size, count = len(self._order), self._n_order + len(slots)
        if count > size:
            in_order = np.roll(self._order, -self._first)
            size = count + count // 4 + 64
            self._order, self._first = lengthen(in_order, size), 0
        entries = np.arange(self._n_order, count)
        self._order[(self._first + entries) % size] = slots
        self._numbers[slots] = (self._first_number + entries) & _NUMBER
        self._unsaved[slots] = True
        self._n_order = count

    def _listed(self, n_newest: int | None = None) -> npt.NDArray[np.int32]:
        """Live slots, oldest first; of the ``n_newest`` writes only, if that is given."""
        first = 0 if n_newest is None else max(self._n_order - n_newest, 0)
        entries = np.arange(first, self._n_order)
        slots = self._order[(self._first + entries) % len(self._order)]
        numbers = ((self._first_number + entries) & _NUMBER).astype(np.uint32)
        alive: npt.NDArray[np.int32] = slots[(self.lengths[slots] > 0) & (self._numbers[slots] == numbers)]
        return alive

    def _repack(self, extra: int) -> None:
        """Move the live payloads, in write order, to the front of an arena that fits them."""
        slots = self._listed()
        starts = self.starts[slots]
        lengths = self.lengths[slots].astype(np.int64)
        packed = np.cumsum(lengths) - lengths
        size = self.live_bytes + extra
        area = map_bytes(size + size // 8 + _LEAST, self._staging())
        data = np.frombuffer(area, np.uint8)
        for start, to, length in merge_runs(starts, packed, lengths):
            data[to : to + length] = self.data[start : start + length]
        moved = lengthen(self.starts, len(self.starts))
        moved[slots] = packed
        self._settle()
        self._arena = Arena(area, data, moved)
        self._order = lengthen(slots, len(slots) + len(slots) // 8 + 64)
        self._numbers[slots] = np.arange(len(slots), dtype=np.uint32)
        self._first, self._n_order, self._first_number = 0, len(slots), 0
        self._head = self.live_bytes
        self.n_repacks += 1

    def _staging(self) -> Path | None:
        return None if self.path is None else self.path.with_name(self.path.name + ".new")

    def _settle(self) -> None:
        staging = self._staging()
        if staging is not None and self.path is not None:
            staging.replace(self.path)

    def check(self) -> None:
        """Raise if the slot table and the arena disagree. Tests call this after every write."""
        live = np.flatnonzero(self.lengths)
        order = live[np.argsort(self.starts[live])]
        ends = self.starts[order] + self.lengths[order]
        if (ends[:-1] > self.starts[order][1:]).any() or (ends > self.capacity).any():
            raise AssertionError("payloads overlap or leave the arena")
        if int(self.lengths.sum()) != self.live_bytes:
            raise AssertionError(f"{self.lengths.sum()} bytes are live, {self.live_bytes} are counted")
        if set(self._listed().tolist()) != set(live.tolist()):
            raise AssertionError("live payloads and the write order disagree")

    def __getstate__(self) -> dict[str, Any]:
        """The live payloads, packed in write order, and where each one lies; a copy that later writes do not change."""
        slots = self._listed()
        lengths = self.lengths[slots].astype(np.int64)
        packed = np.cumsum(lengths) - lengths
        data = np.empty(int(lengths.sum()), np.uint8)
        for start, to, length in merge_runs(self.starts[slots], packed, lengths):
            data[to : to + length] = self.data[start : start + length]
        starts = self.starts.copy()
        starts[slots] = packed
        return {"limit": self.limit, "lengths": self.lengths.copy(), "starts": starts, "data": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        data = state["data"]
        Heap.__init__(self, 0, state["limit"])
        area = map_bytes(len(data))
        self.lengths = state["lengths"]
        self._arena = Arena(area, np.frombuffer(area, np.uint8), state["starts"])
        self.data[: len(data)] = data
        self.rebuild()


def merge_runs(
    starts: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> list[tuple[int, int, int]]:
    """Merge payloads that are neighbours before and after into single copies."""
    if len(starts) == 0:
        return []
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1
    firsts = np.concatenate([[0], breaks])
    total = np.add.reduceat(lengths, firsts)
    return list(zip(starts[firsts].tolist(), targets[firsts].tolist(), total.tolist(), strict=True))
