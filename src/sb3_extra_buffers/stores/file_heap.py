"""A heap whose bytes are those of a file, so that they outlive the process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import FileWriteError
from sb3_extra_buffers.stores.arena import SLACK, lengthen
from sb3_extra_buffers.stores.heap import Arena, Heap, merge_runs

_STEP = 1 << 20


class FileHeap(Heap):
    """One payload per slot, one after the other in a file, none ever written over.

    What a slot held stays in the file after it was freed or written again, so whoever knew where it was can
    still read it. `compact` moves what is live to another file.
    """

    def __init__(self, file: Path, limit: int | None = None) -> None:
        super().__init__(limit=limit)
        self._arena = self._map(file, _STEP)

    def attach(self, heap: Heap, payload_ids: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], end: int) -> None:
        """Take over the payloads of ``heap``, which lie in this file at ``starts``; writing goes on at ``end``."""
        self.grow(len(heap.lengths))
        self.lengths[:] = heap.lengths
        self._arena = self._map(self.file, max(end, _STEP))
        self._number_all(payload_ids, starts, int(self.lengths[payload_ids].sum(dtype=np.int64)))
        self._head = end

    @property
    def file(self) -> Path:
        """Where the bytes are."""
        file: Path = self._arena.area.file
        return file

    def _map(self, file: Path, nbytes: int) -> Arena:
        """Map ``file`` with room for ``nbytes``, blocks and all: a full disk must show here, not at a write."""
        size = nbytes + SLACK
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            try:
                size = max(size, os.fstat(descriptor).st_size)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(descriptor, 0, size)
                else:
                    os.ftruncate(descriptor, size)
                area = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as problem:
            raise FileWriteError(
                problem.errno,
                f"no room for {size} bytes: {problem.strerror or problem}; every step that was completed is kept",
                str(file),
            ) from problem
        # two maps of one file show the same bytes: whoever still looks at the old one sees no difference
        return Arena(_MappedFile(file, area), np.frombuffer(area, np.uint8), self.starts)

    @property
    def end(self) -> int:
        """Bytes that have been written to the file."""
        return self._head

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        self._arena.area.map.flush()

    @property
    def dead_bytes(self) -> int:
        return self._head - self.live_bytes

    def gap(self) -> tuple[int, int]:
        end = self.capacity
        return self._head, end if self.limit is None else min(end, self._head + self.limit - self.live_bytes)

    def free(self, payload_ids: Sequence[int]) -> None:
        for payload_id in payload_ids:
            self._release(payload_id)
        self._unsaved[list(payload_ids)] = True

    def clear(self) -> None:
        self.lengths[:] = 0
        self._unsaved[:] = True
        self.live_bytes = 0
        self._first = self._n_order = 0

    def _gap(self, nbytes: int) -> int | None:
        return self._head if nbytes <= self.capacity - self._head else None

    def _extend(self, nbytes: int) -> bool:
        longer = self._head + nbytes
        self._arena = self._map(self.file, longer + longer // 8 + _STEP)
        return True

    def _end_of(self, payload_ids: npt.NDArray[np.int32]) -> int:
        # nothing that was written is ever written over
        return max(self._head, int((self.starts[payload_ids] + self.lengths[payload_ids]).max(initial=0)))

    def compact(self, file: Path) -> None:
        """Move what is live to the beginning of another file, in the order in which it was written."""
        payload_ids = self._listed()
        lengths = self.lengths[payload_ids].astype(np.int64)
        packed = np.cumsum(lengths) - lengths
        arena = self._map(file, self.live_bytes + _STEP)
        for start, to, length in merge_runs(self.starts[payload_ids], packed, lengths):
            arena.data[to : to + length] = self.data[start : start + length]
        moved = lengthen(self.starts, len(self.starts))
        moved[payload_ids] = packed
        self._arena = arena._replace(starts=moved)
        self._head = self.live_bytes
        self._order = lengthen(payload_ids, len(payload_ids) + 64)
        self._numbers[payload_ids] = np.arange(len(payload_ids), dtype=np.uint32)
        self._first, self._n_order, self._first_number = 0, len(payload_ids), 0
        self.n_repacks += 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        # a copy lives in memory: two processes cannot write to one file
        return _plain_heap, (), self.__getstate__()


class _MappedFile(NamedTuple):
    """A file and its bytes in memory."""

    file: Path
    map: mmap.mmap


def _plain_heap() -> Heap:
    return object.__new__(Heap)
