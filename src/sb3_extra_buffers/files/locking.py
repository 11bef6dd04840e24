"""Locks on folders and files, so that only one process writes to them; released when the process ends."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

from sb3_extra_buffers.errors import FolderInUseError
from sb3_extra_buffers.files import disk

NAME = "lock"

_locks: weakref.WeakSet[FolderLock | SaveLock] = weakref.WeakSet()


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


class SaveLock(disk.OpenFile):
    """The exclusive right to save to a folder, inside ``with``; no file is created for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        # Windows cannot open folders
        if os.name == "nt" or not self.folder.is_dir():
            return
        try:
            self.descriptor = os.open(self.folder, os.O_RDONLY)
            _locks.add(self)
            lock_if_possible(self.descriptor)
        except BlockingIOError:
            self.close()
            raise FolderInUseError(
                11, f"another process or thread is saving to {self.folder}; save again when it has finished, or to a "
                "folder of its own",
            ) from None  # fmt: skip
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_if_possible(descriptor: int) -> None:
    """Lock an open file or folder until it is closed, where the file system can; `BlockingIOError` if it is locked."""
    if os.name == "nt":
        return
    try:
        _lock(descriptor)
    except BlockingIOError:
        raise
    except OSError:
        # NFS, for example, has no locks on folders
        return


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
