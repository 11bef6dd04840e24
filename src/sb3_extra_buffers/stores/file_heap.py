"""A heap in a file that outlives the process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import FileWriteError
from sb3_extra_buffers.stores.arena import SLACK
from sb3_extra_buffers.stores.heap import Arena, Heap

_STEP = 1 << 20


class FileHeap(Heap):
    """Payloads one after the other in a file, none of them ever overwritten.

    A payload stays in the file after it was freed or replaced, so that an older table of contents remains valid.
    `compact` moves what is live to another file.
    """

    def __init__(self, file: Path, limit: int | None = None) -> None:
        super().__init__(limit=limit)
        self._arena = self._map(file, _STEP)

    def attach(self, heap: Heap, payload_ids: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], end: int) -> None:
        """Take over the payloads of ``heap``, which this file has at ``starts``; the next one is written at ``end``."""
        self.grow(len(heap.lengths))
        self.lengths[:] = heap.lengths
        self._arena = self._map(self.file, max(end, _STEP))
        self._number_all(payload_ids, starts, int(self.lengths[payload_ids].sum(dtype=np.int64)))
        self._head = end

    @property
    def file(self) -> Path:
        """The file in use."""
        file: Path = self._arena.area.file
        return file

    def _map(self, file: Path, nbytes: int) -> Arena:
        """Map ``file`` with ``nbytes`` allocated on disk: a full disk must fail here, not when bytes are written."""
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
                f"cannot allocate {size} bytes: {problem.strerror or problem}; every completed step is saved",
                str(file),
            ) from problem
        # two maps of one file show the same bytes, so that references to the old one stay valid
        return Arena(_MappedFile(file, area), np.frombuffer(area, np.uint8), self.starts)

    @property
    def end(self) -> int:
        """Bytes written to the file."""
        return self._head

    def flush(self) -> None:
        """Write everything to disk."""
        self._arena.area.map.flush()

    @property
    def dead_bytes(self) -> int:
        return self._head - self.live_bytes

    def gap(self) -> tuple[int, int]:
        end = self.capacity
        return self._head, end if self.limit is None else min(end, self._head + self.limit - self.live_bytes)

    def free(self, payload_ids: Sequence[int]) -> None:
        self._release(payload_ids)

    def clear(self) -> None:
        self._release_all()

    def _gap(self, nbytes: int) -> int | None:
        return self._head if nbytes <= self.capacity - self._head else None

    def _extend(self, nbytes: int) -> bool:
        longer = self._head + nbytes
        self._arena = self._map(self.file, longer + longer // 8 + _STEP)
        return True

    def _end_of(self, payload_ids: npt.NDArray[np.int32]) -> int:
        # what was written is never overwritten
        return max(self._head, int((self.starts[payload_ids] + self.lengths[payload_ids]).max(initial=0)))

    def compact(self, file: Path) -> None:
        """Move the live payloads to another file, in write order."""
        self._move_to(self._map(file, self.live_bytes + _STEP))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # a copy is in memory: two processes cannot write to one file
        return _plain_heap, (), self.__getstate__()


class _MappedFile(NamedTuple):
    """A file and its bytes in memory."""

    file: Path
    map: mmap.mmap


def _plain_heap() -> Heap:
    return object.__new__(Heap)
