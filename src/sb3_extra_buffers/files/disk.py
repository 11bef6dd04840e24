"""Every system call that writes to disk, so that tests can record or fail it; and safe reading of regular files."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import DamagedFileError, ExtraBuffersError, FileFormatError, FileWriteError

Bytes = npt.NDArray[np.uint8]

# never follow a symbolic link, never wait for a FIFO
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_SAFE |= getattr(os, "O_CLOEXEC", 0)


# ---- writing ----


def create(path: Path) -> int:
    """Create a file to append to."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | _SAFE, 0o666)


def open_to_append(path: Path) -> int:
    """Open an existing regular file to append to."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | _SAFE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileWriteError(22, "not a regular file", str(path))
    return descriptor


def open_lock(path: Path) -> int:
    """Open a file to lock, created if needed; nothing is ever written to it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | _SAFE, 0o666)


def write_all(descriptor: int, parts: Sequence[Any]) -> None:
    """Append all of ``parts``."""
    left = [view for part in parts if len(view := memoryview(part).cast("B"))]
    while left:
        written = os.writev(descriptor, left[:512]) if hasattr(os, "writev") else os.write(descriptor, left[0])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def truncate(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, size)


def fsync(descriptor: int) -> None:
    """Wait until a file is on the disk."""
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    os.close(descriptor)


class OpenFile:
    """Base of objects that own a file descriptor, closed with the object at the latest."""

    descriptor = -1

    def close(self) -> None:
        # forgotten first: interrupted after closing it, a second call would close whatever has the number by then
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def flush(heap: Any) -> None:
    """Wait until what was written to a `FileHeap` is on the disk."""
    heap.flush()


def replace(source: Path, target: Path) -> None:
    os.replace(source, target)


def link(source: Path, target: Path) -> None:
    os.link(source, target, follow_symlinks=False)


def unlink(path: Path) -> None:
    os.unlink(path)


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its missing parents; their names are on the disk when this returns."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each)
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk, where the system supports it."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def named_errors(path: Path, doing: str) -> Iterator[None]:
    """Raise an `OSError` as a `FileWriteError` that says what was being done and that the last save is intact."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ExtraBuffersError):
            raise
        message = f"{doing} failed: {error.strerror or error}; what was saved before is untouched"
        raise FileWriteError(error.errno, message, str(path)) from error


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield the path of a new file to write, which replaces ``target`` at the end, or is deleted after an exception.

    It has the suffix of ``target``, from which writers of images find the format.
    """
    staged = target.with_name(f".{secrets.token_hex(8)}{target.suffix}")
    with named_errors(target, f"writing {target}"):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try:
            yield staged
            replace(staged, target)
        except BaseException:
            with contextlib.suppress(OSError):
                unlink(staged)
            raise


# ---- reading ----


def open_to_read(path: Path) -> int:
    """Open a regular file; links, folders, devices and FIFOs are an error."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFE)
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing; a saved buffer needs all files of its folder") from None
    except OSError as error:
        if path.is_symlink():
            raise FileFormatError(f"{path} is a symbolic link, which is not followed; copy the file itself") from None
        raise FileFormatError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileFormatError(f"{path} is not a regular file")
    return descriptor


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read a file of at most ``max_bytes``."""
    with os.fdopen(open_to_read(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise FileFormatError(f"{path} has {size} bytes, more than the {max_bytes} expected at most")
        try:
            return file.read()
        except OSError as error:
            raise FileFormatError(f"{path} cannot be read: {error.strerror}") from error


def map_file(path: Path, size: int | None = None, private: bool = False) -> Bytes:
    """Map the first ``size`` bytes of a file, read-only, or ``private``: writable, without effect on the file.

    Compiled kernels accept only writable arrays.
    """
    descriptor = open_to_read(path)
    try:
        file_size = os.fstat(descriptor).st_size
        size = file_size if size is None else size
        if file_size < size:
            raise DamagedFileError(f"{path} has {file_size} bytes where {size} were written; it was cut short")
        if not size:
            return np.zeros(0, np.uint8)
        if private and hasattr(mmap, "MAP_PRIVATE"):
            # reserve no memory for pages that nobody writes to: the file may be larger than memory
            no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().sysname == "Linux" else 0)
            area = mmap.mmap(
                descriptor, size, flags=mmap.MAP_PRIVATE | no_reserve, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        else:
            area = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY if private else mmap.ACCESS_READ)
    except (OSError, ValueError, OverflowError) as error:
        if isinstance(error, ExtraBuffersError):
            raise
        raise FileFormatError(f"{path} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)
    return np.frombuffer(area, np.uint8)
