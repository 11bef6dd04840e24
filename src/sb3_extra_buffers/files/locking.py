"""One writer to a folder: a lock that goes with the process."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from sb3_extra_buffers.errors import FolderInUseError
from sb3_extra_buffers.files import disk

NAME = "lock"

_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """The right to write to a folder, until it is released or the process ends. A forked child does not have it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pid, self._descriptor = folder, os.getpid(), -1
        self._descriptor = disk.open_lock(folder / NAME)
        try:
            _lock(self._descriptor)
        except OSError:
            self.release()
            raise FolderInUseError(
                11, f"another buffer is writing to {folder}; close it or end its process first, open it with mode='r' "
                "to read, or load() it to work on a copy",
            ) from None  # fmt: skip
        _held.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that has the lock."""
        return self._descriptor >= 0 and self.pid == os.getpid()

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.release()


@contextlib.contextmanager
def hold_if_locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that buffers have lived in; an error if one does now."""
    if not (folder / NAME).is_file():
        yield
        return
    lock = FolderLock(folder)
    try:
        yield
    finally:
        lock.release()


def _lock(descriptor: int) -> None:
    if os.name == "nt":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]  # of Windows
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _release_all() -> None:
    # the child's copy of the descriptor would keep the lock after the parent has gone
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_all)
