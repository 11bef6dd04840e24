"""A lock on a folder, so that only one process writes to it; released when the process ends."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

from sb3_extra_buffers.errors import FolderInUseError
from sb3_extra_buffers.files import disk

NAME = "lock"

_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock(disk.OpenFile):
    """The exclusive right to write to a folder, until `close`. A forked child does not inherit it."""

    def __init__(self, folder: Path) -> None:
        self.pid = os.getpid()
        self.descriptor = disk.open_lock(folder / NAME)
        try:
            _lock(self.descriptor)
        except OSError:
            self.close()
            raise FolderInUseError(
                11, f"another buffer is writing to {folder}; drop it (del) or end its process first, open the folder "
                "with mode='r' to read, or load() it to work on a copy",
            ) from None  # fmt: skip
        _locks.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process holds the lock."""
        return self.descriptor >= 0 and self.pid == os.getpid()


def lock_if_used(folder: Path) -> contextlib.AbstractContextManager[object]:
    """Hold the lock of a folder that has one, from a buffer that was kept there; an error if one still is."""
    return contextlib.closing(FolderLock(folder)) if (folder / NAME).is_file() else contextlib.nullcontext()


def _lock(descriptor: int) -> None:
    if os.name == "nt":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]  # of Windows
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _close_in_child() -> None:
    # a forked child's copy of the descriptor would keep the lock after the parent has ended
    for lock in list(_locks):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
