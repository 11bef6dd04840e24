"""Memory straight from the operating system, and files mapped into it."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import OutOfMemoryError

#: Bytes past the end that kernels may read, because they load several at a time.
SLACK = 64


def map_bytes(nbytes: int, path: Path | None = None) -> mmap.mmap:
    """Return ``nbytes`` bytes of zeros, and `SLACK` more, in memory or in a new file.

    Not from ``malloc``: pages become resident when they are first written, and are returned when the map is closed.
    """
    size = max(nbytes, 1) + SLACK
    if path is None:
        try:
            if hasattr(mmap, "MAP_PRIVATE"):
                # the default is shared with forked children
                return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return mmap.mmap(-1, size)
        except OSError as problem:
            if problem.errno != errno.ENOMEM:
                raise
            raise OutOfMemoryError(
                f"cannot allocate {size} bytes; lower the capacity of the buffer, or set max_bytes where there is one"
            ) from problem
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def zeros(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Like ``np.zeros``, but every page takes memory only once it is written."""
    kind = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else shape
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(map_bytes(count * kind.itemsize), kind, count).reshape(shape)


def lengthen(column: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Return a copy of ``column`` (one axis) that is padded with zeros to ``size``."""
    longer = zeros(size, column.dtype) if size * column.itemsize >= mmap.PAGESIZE else np.zeros(size, column.dtype)
    longer[: len(column)] = column
    return longer


def resident_bytes(array: npt.NDArray[Any]) -> int:
    """Bytes in pages of an array from `zeros` that hold anything but zeros."""
    flat = array.reshape(-1).view(np.uint8)
    whole = flat[: flat.size // mmap.PAGESIZE * mmap.PAGESIZE].reshape(-1, mmap.PAGESIZE)
    pages = sum(int(whole[i : i + 1024].any(axis=1).sum()) for i in range(0, len(whole), 1024))
    rest = flat[whole.size :]
    return pages * mmap.PAGESIZE + (rest.size if rest.any() else 0)
