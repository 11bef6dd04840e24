"""A heap that packs payloads end to end and reclaims them oldest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import HeapFullError
from sb3_extra_buffers.stores.arena import SLACK, lengthen, map_bytes
from sb3_extra_buffers.stores.reentry import RawCopier, refuse

# bytes that a new arena has to spare, at least
_MIN_SPARE = 1 << 14
# a ring turns back to its start, rather than write to pages that were never written, once 1/32 of the live bytes is
# free there; if that is too little and causes repacks, 1/16, then 1/8, which is all that there is to spare
_FIRST_MARGIN, _LAST_MARGIN = 32, 8
# larger heaps use all that they have to spare first: a repack takes as much memory again
_EASY_REPACK = 1 << 28
_MAX_NUMBER = 0xFFFFFFFF


class Arena(NamedTuple):
    """Bytes, and where payloads start in them; replaced by one assignment, so that the two never contradict."""

    area: Any  # owns the memory: a map, or an array
    data: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]  # [payload id]; free for other use where a payload has no bytes


class Heap:
    """One payload per payload id, packed in write order.

    The arena is a ring. Replay and rollout buffers free payloads roughly in the order in which they were written, so
    that free space is one gap, and a write is a copy to its front. If payloads are freed in another order, the gap runs
    out early; then the live ones are repacked into an arena an eighth larger than they are or, while nothing was freed
    yet, the arena is extended in place. So the arena never exceeds 9/8 of the most bytes that were ever live, plus
    `_MIN_SPARE` and one payload, and it shrinks when less than half of it is live.

    In a heap that is not large, most of the spare eighth never takes memory: the ring turns back as soon as there is
    enough free space at its start.

    ``starts``, ``lengths`` and the bytes define everything else; `rebuild` derives it after a change was interrupted.

    ``limit`` bounds the live bytes. ``path`` puts the arena into a file.
    """

    #: Allocates the arenas of this heap, if they are not in private memory or in ``path``.
    new_area: Callable[[int], Any] | None = None

    def __init__(self, n_payloads: int = 0, limit: int | None = None, path: Path | None = None) -> None:
        self.limit = limit
        self.path = path
        self.lengths = np.zeros(n_payloads, np.int32)
        self.live_bytes = 0
        self.n_repacks = self._n_rebuilds = 0
        area = self._allocate(0, path)
        self._arena = Arena(area, np.frombuffer(area, np.uint8), np.zeros(n_payloads, np.int64))
        self._head = 0
        # end of the bytes that were ever written
        self._touched = 0
        # the ring turns back there once 1/_margin of the live bytes is free at its start
        self._margin = _FIRST_MARGIN
        # payload ids in write order, a ring. Each write has a number, modulo 2**32; an entry is stale once its payload
        # was freed or written under another number
        self._order = np.zeros(64, np.int32)
        self._first = 0
        self._n_order = 0
        self._first_number = 0
        self._numbers = np.zeros(n_payloads, np.uint32)
        # payloads written or freed since `saved`
        self._unsaved = np.zeros(n_payloads, np.bool_)

    @classmethod
    def of(cls, data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]) -> Heap:
        """Return a heap of payloads in ``data``, which is not copied; it can only be read."""
        heap = object.__new__(Heap)
        heap.limit, heap.path, heap.lengths, heap._arena = None, None, lengths, Arena(data, data, starts)
        return heap

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The arena's bytes."""
        return self._arena.data

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each payload starts."""
        return self._arena.starts

    @property
    def capacity(self) -> int:
        """Bytes of the arena."""
        return int(self.data.size - SLACK)

    @property
    def index_bytes(self) -> int:
        """Bytes of the tables."""
        columns = (self.starts, self.lengths, self._numbers, self._order, self._unsaved)
        return sum(column.nbytes for column in columns)

    def _allocate(self, nbytes: int, path: Path | None) -> Any:
        return map_bytes(nbytes, path) if self.new_area is None else self.new_area(nbytes)

    @property
    def area(self) -> Any:
        """The memory of the arena."""
        return self._arena.area

    def move_to_area(self, new_area: Callable[[int], Any]) -> None:
        """Move all payloads to memory that ``new_area`` allocates, and allocate there from now on."""
        self.new_area = new_area
        self._repack(0)

    def use_tables(self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]) -> None:
        """Continue with copies of the tables."""
        self._arena = self._arena._replace(starts=starts)
        self.lengths = lengths

    def map_payloads(
        self, data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]
    ) -> None:
        """Read the payloads of another heap from its memory; this heap is read-only from then on."""
        self._arena = Arena(data, data, starts)
        self.lengths = lengths

    def grow(self, n_payloads: int) -> None:
        """Have table entries for ``n_payloads``."""
        for name in ("lengths", "_numbers", "_unsaved"):
            column = getattr(self, name)
            if len(column) < n_payloads:
                setattr(self, name, lengthen(column, n_payloads))
        if len(self.starts) < n_payloads:
            self._arena = self._arena._replace(starts=lengthen(self.starts, n_payloads))

    def write(self, payload_ids: Sequence[int], payloads: Sequence[Any]) -> None:
        """Store one payload per id, and release what these ids held before."""
        views = [np.frombuffer(payload, np.uint8) for payload in payloads]
        needed = sum(view.size for view in views)
        held = int(self.lengths[list(payload_ids)].sum()) if len(payload_ids) else 0
        if self.limit is not None and self.live_bytes - held + needed > self.limit:
            raise HeapFullError(needed, self.live_bytes - held, self.limit)
        for payload_id, view in zip(payload_ids, views, strict=True):
            self._put(payload_id, view)

    def put(self, payload_id: int, payload: npt.NDArray[np.uint8]) -> None:
        """`write` for a single payload."""
        self.check_limit(payload_id, payload.size)
        self._put(payload_id, payload)

    def put_together(
        self, payload_ids: npt.NDArray[np.int32], data: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int32]
    ) -> None:
        """`write` for payloads that are one after the other in ``data``; these ids hold nothing yet."""
        total = int(lengths.sum(dtype=np.int64))
        if self.limit is not None and self.live_bytes + total > self.limit:
            raise HeapFullError(total, self.live_bytes, self.limit)
        start = self._reserve(total)
        self.data[start : start + total] = data[:total]
        self._append(payload_ids)
        self.starts[payload_ids] = start + np.cumsum(lengths, dtype=np.int64) - lengths
        self.lengths[payload_ids] = lengths
        self.live_bytes += total

    def check_limit(self, payload_id: int, nbytes: int) -> None:
        """Raise if replacing a payload by ``nbytes`` exceeds the limit."""
        if self.limit is not None:
            others = self.live_bytes - int(self.lengths[payload_id])
            if others + nbytes > self.limit:
                raise HeapFullError(nbytes, others, self.limit)

    def _put(self, payload_id: int, payload: npt.NDArray[np.uint8]) -> None:
        self._release([payload_id])
        start = self._reserve(payload.size)
        self.data[start : start + payload.size] = payload
        self._append(np.array([payload_id], np.int32))
        self.starts[payload_id], self.lengths[payload_id] = start, payload.size
        self.live_bytes += payload.size

    def gap(self) -> tuple[int, int]:
        """Begin and end of the free bytes that a kernel may fill with payloads, one after the other, for `adopt`."""
        tail = self._tail()
        head = 0 if tail is None else self._head
        end = self.capacity if tail is None else self._turn(tail) if head > tail else tail - 1
        return head, end if self.limit is None else min(end, head + self.limit - self.live_bytes)

    def adopt(self, payload_ids: npt.NDArray[np.int32]) -> None:
        """Register payloads that were written into the gap in this order, with ``starts`` and ``lengths`` set."""
        self._append(payload_ids)
        self._head = int(self.starts[payload_ids[-1]]) + int(self.lengths[payload_ids[-1]])
        self._touched = max(self._touched, self._head)
        self.live_bytes += int(self.lengths[payload_ids].sum())

    def free(self, payload_ids: Sequence[int]) -> None:
        """Release these payloads."""
        self._release(payload_ids)
        if self.capacity > 2 * self.live_bytes + 4 * _MIN_SPARE:
            self._repack(0)

    def read(self, payload_id: int) -> memoryview:
        """The bytes of a payload, not copied; valid until the next write."""
        start = int(self.starts[payload_id])
        return self.data[start : start + int(self.lengths[payload_id])].data

    def clear(self) -> None:
        """Release everything, and return the memory."""
        self._release_all()
        self._head = self._touched = 0
        area = self._allocate(0, self.path)
        self._arena = Arena(area, np.frombuffer(area, np.uint8), self.starts)

    def rebuild(self) -> None:
        """Derive the order and the totals from where payloads are, after a change that was interrupted."""
        self.grow(max(len(self.starts), len(self.lengths), len(self._numbers), len(self._unsaved)))
        if not self.data.size:
            # interrupted while the arena was extended
            self._arena = self._arena._replace(data=np.frombuffer(self._arena.area, np.uint8))
        self._unsaved[:] = True
        live = np.flatnonzero(self.lengths).astype(np.int32)
        live = live[np.argsort(self.starts[live], kind="stable")]
        starts, lengths = self.starts[live], self.lengths[live].astype(np.int64)
        if len(live):
            # the ring starts after its widest gap, the last one of several
            gaps = np.append(starts[1:], self.capacity + starts[0]) - (starts + lengths)
            live = np.roll(live, int(np.argmax(gaps[::-1])))
        self._n_rebuilds += 1
        self._first = self._n_order = self._first_number = 0
        self._append(live)
        self._head = self._end_of(live)
        self._touched = min(max(self._touched, int((starts + lengths).max(initial=0))), self.capacity)
        self.live_bytes = int(lengths.sum())

    def _end_of(self, payload_ids: npt.NDArray[np.int32]) -> int:
        """Where the next payload goes, after these, oldest first."""
        return int(self.starts[payload_ids[-1]]) + int(self.lengths[payload_ids[-1]]) if len(payload_ids) else 0

    # ---- copies of the heap, kept up to date ----

    @property
    def mark(self) -> tuple[object, int, int]:
        """The present state, for `written_since`."""
        return self._arena.area, self._n_rebuilds, (self._first_number + self._n_order) & _MAX_NUMBER

    def written_since(self, mark: tuple[object, int, int]) -> npt.NDArray[np.int32] | None:
        """Payloads written since ``mark``; None if that may be all of them."""
        area, n_rebuilds, number = self.mark
        if mark[0] is not area or mark[1] != n_rebuilds:
            return None
        return self._listed((number - mark[2]) & _MAX_NUMBER)

    # ---- files ----

    def unsaved(self, everything: bool = False) -> npt.NDArray[np.int32]:
        """Live payloads written since `saved`, or all of them; oldest first."""
        if everything:
            return self._listed()
        payload_ids = np.flatnonzero(self._unsaved & (self.lengths > 0)).astype(np.int32)
        order: npt.NDArray[np.int32] = payload_ids[
            np.argsort(self._numbers[payload_ids] - np.uint32(self._first_number))
        ]
        return order

    def changed(self) -> npt.NDArray[np.int64]:
        """Payloads written or freed since `saved`."""
        return np.flatnonzero(self._unsaved)

    def saved(self, but: npt.NDArray[Any] | None = None) -> None:
        """Everything up to now has been saved, except the payloads ``but``."""
        self._unsaved[:] = False
        if but is not None:
            self._unsaved[but] = True

    def copy_payloads(
        self, payload_ids: npt.NDArray[np.int32], data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]
    ) -> None:
        """Fill an empty heap with copies of payloads in ``data``, oldest first; ``lengths`` is set already."""
        lengths = self.lengths[payload_ids]
        size = int(lengths.sum(dtype=np.int64))
        area = self._allocate(size + size // 8 + _MIN_SPARE, self.path)
        self._arena = Arena(area, np.frombuffer(area, np.uint8), self.starts)
        self._number_all(payload_ids, pack_payloads(data, starts, lengths, self.data), size)

    def refer_to(
        self, payload_ids: npt.NDArray[np.int32], data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]
    ) -> None:
        """Let an empty heap read payloads from ``data``, without a copy; it cannot be written to then."""
        self._arena = Arena(data, data, self.starts)
        self._number_all(payload_ids, starts, int(self.lengths[payload_ids].sum(dtype=np.int64)))

    @property
    def order_capacity(self) -> int:
        """How many writes can be listed without allocating."""
        return len(self._order)

    def reserve_order(self, n_writes: int) -> None:
        """Set `order_capacity`, as far as the present list allows."""
        if self._first == 0:
            self._order = lengthen(self._order[: self._n_order], max(n_writes, self._n_order))

    def _number_all(self, payload_ids: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], size: int) -> None:
        self.starts[payload_ids] = starts
        self.live_bytes = self._head = self._touched = size
        self._append(payload_ids)

    def _release(self, payload_ids: Sequence[int]) -> None:
        for payload_id in payload_ids:
            self.live_bytes -= int(self.lengths[payload_id])
            self.lengths[payload_id] = 0
            self._unsaved[payload_id] = True

    def _release_all(self) -> None:
        self.lengths[:] = 0
        self._unsaved[:] = True
        self.live_bytes = self._first = self._n_order = 0

    def _reserve(self, nbytes: int) -> int:
        start = self._gap(nbytes)
        if start is None:
            if not self._extend(nbytes):
                self._repack(nbytes)
            start = self._gap(nbytes)
            if start is None:
                raise AssertionError(f"no space for {nbytes} bytes after repacking")
        self._head = start + nbytes
        self._touched = max(self._touched, self._head)
        return start

    def _extend(self, nbytes: int) -> bool:
        """Extend the arena in place if it is full from end to end; return whether that worked."""
        size = self.live_bytes + nbytes
        longer = size + size // 8 + _MIN_SPARE
        # with many dead bytes before the oldest payload, the new one would still not fit behind the newest
        if (self._tail() or 0) > self._head or self.capacity > size or self._head + nbytes > longer:
            return False
        arena = self._arena
        # memory that an array refers to cannot be resized
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
            if nbytes <= self._turn(tail) - self._head:
                return self._head
            if nbytes < tail:
                return 0
            return self._head if nbytes <= self.capacity - self._head else None
        return self._head if nbytes < tail - self._head else None

    def _turn(self, tail: int) -> int:
        """Where the ring turns back to its start, which is free up to ``tail``: before unwritten pages."""
        if tail == 0 or self.live_bytes > _EASY_REPACK:
            return self.capacity
        margin = self.live_bytes // self._margin + _MIN_SPARE
        written = max(self._touched, self._head)
        return min(self.capacity, written if tail > margin else written + margin)

    def _tail(self) -> int | None:
        """Start of the oldest live payload; drops stale entries before it."""
        while self._n_order:
            payload_id = self._order[self._first]
            if self.lengths[payload_id] and self._numbers[payload_id] == self._first_number:
                return int(self.starts[payload_id])
            self._first = (self._first + 1) % len(self._order)
            self._first_number = (self._first_number + 1) & _MAX_NUMBER
            self._n_order -= 1
        return None

    def _append(self, payload_ids: npt.NDArray[np.int32]) -> None:
        size, count = len(self._order), self._n_order + len(payload_ids)
        if count > size:
            in_order = np.roll(self._order, -self._first)
            size = count + count // 4 + 64
            self._order, self._first = lengthen(in_order, size), 0
        entries = np.arange(self._n_order, count)
        self._order[(self._first + entries) % size] = payload_ids
        self._numbers[payload_ids] = (self._first_number + entries) & _MAX_NUMBER
        self._unsaved[payload_ids] = True
        self._n_order = count

    def _listed(self, n_newest: int | None = None) -> npt.NDArray[np.int32]:
        """Live payloads, oldest first; only those of the ``n_newest`` writes, if given."""
        first = 0 if n_newest is None else max(self._n_order - n_newest, 0)
        entries = np.arange(first, self._n_order)
        payload_ids = self._order[(self._first + entries) % len(self._order)]
        numbers = ((self._first_number + entries) & _MAX_NUMBER).astype(np.uint32)
        alive: npt.NDArray[np.int32] = payload_ids[
            (self.lengths[payload_ids] > 0) & (self._numbers[payload_ids] == numbers)
        ]
        return alive

    def _repack(self, extra: int) -> None:
        """Move the live payloads, in write order, to the front of a new arena that fits them."""
        size = self.live_bytes + extra
        if extra and self.n_repacks and self._first_number < self._n_order:
            # less than one round after the last repack
            self._margin = max(self._margin // 2, _LAST_MARGIN)
        new_file = None if self.path is None else self.path.with_name(self.path.name + ".new")
        area = self._allocate(size + size // 8 + _MIN_SPARE, new_file)
        self._move_to(Arena(area, np.frombuffer(area, np.uint8), self.starts), new_file)

    def _move_to(self, arena: Arena, new_file: Path | None = None) -> None:
        """Continue in ``arena``, with the live payloads at its front; ``new_file`` replaces the present file."""
        payload_ids = self._listed()
        starts = lengthen(self.starts, len(self.starts))
        starts[payload_ids] = pack_payloads(self.data, self.starts[payload_ids], self.lengths[payload_ids], arena.data)
        if new_file is not None and self.path is not None:
            new_file.replace(self.path)
        self._arena = arena._replace(starts=starts)
        self._order = lengthen(payload_ids, len(payload_ids) + len(payload_ids) // 8 + 64)
        self._numbers[payload_ids] = np.arange(len(payload_ids), dtype=np.uint32)
        self._first, self._n_order, self._first_number = 0, len(payload_ids), 0
        self._head = self._touched = self.live_bytes
        self.n_repacks += 1

    def check(self) -> None:
        """Raise `AssertionError` if the tables and the arena contradict each other."""
        live = np.flatnonzero(self.lengths)
        order = live[np.argsort(self.starts[live])]
        ends = self.starts[order] + self.lengths[order]
        if (ends[:-1] > self.starts[order][1:]).any() or (ends > self.capacity).any():
            raise AssertionError("payloads overlap or leave the arena")
        if int(self.lengths.sum()) != self.live_bytes:
            raise AssertionError(f"{self.lengths.sum()} bytes are live, {self.live_bytes} are counted")
        if set(self._listed().tolist()) != set(live.tolist()):
            raise AssertionError("live payloads and the write order disagree")

    def raw_copy(self, copier: RawCopier) -> Heap:
        """See `RawCopier`."""
        if type(self) is not Heap or self.new_area is not None or self.path is not None:
            raise refuse("this store, in a file or in shared memory,")
        copied: Heap = copier.shell(self)
        for name, value in vars(self).items():
            if name != "_arena":
                vars(copied)[name] = copier.copy(value)
        arena = self._arena
        # interrupted while it was extended, the arena has no bytes
        data = arena.data if arena.data.size else np.frombuffer(arena.area, np.uint8)
        area = map_bytes(data.size - SLACK)
        copied._arena = Arena(area, np.frombuffer(area, np.uint8), copier.copy(arena.starts))
        copied._arena.data[:] = data
        copier.put(arena.data, copied._arena.data)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """A packed copy of the live payloads and their tables, which later writes do not change."""
        payload_ids = self._listed()
        data, starts = np.empty(self.live_bytes, np.uint8), self.starts.copy()
        starts[payload_ids] = pack_payloads(self.data, starts[payload_ids], self.lengths[payload_ids], data)
        return {"limit": self.limit, "lengths": self.lengths.copy(), "starts": starts, "data": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        data = state["data"]
        Heap.__init__(self, 0, state["limit"])
        area = map_bytes(len(data))
        self.lengths = state["lengths"]
        self._arena = Arena(area, np.frombuffer(area, np.uint8), state["starts"])
        self.data[: len(data)] = data
        self.rebuild()


def pack_payloads(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    target: npt.NDArray[np.uint8],
) -> npt.NDArray[np.int64]:
    """Copy payloads of ``data`` to the front of ``target``, one after the other; return where each one starts there."""
    packed = np.cumsum(lengths, dtype=np.int64) - lengths
    for start, to, length in merge_runs(starts, packed, lengths.astype(np.int64)):
        target[to : to + length] = data[start : start + length]
    return packed


def merge_runs(
    starts: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> list[tuple[int, int, int]]:
    """Merge copies of payloads that are neighbours: ``(start, target, length)`` of each run."""
    if len(starts) == 0:
        return []
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1
    firsts = np.concatenate([[0], breaks])
    total = np.add.reduceat(lengths, firsts)
    return list(zip(starts[firsts].tolist(), targets[firsts].tolist(), total.tolist(), strict=True))
