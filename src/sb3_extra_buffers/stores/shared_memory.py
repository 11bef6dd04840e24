"""Memory that other processes of the same user can map, and the lock between one writer and many readers.

The memory is anonymous (``memfd_create``), so that nothing is left behind however a process ends, and the size of
``/dev/shm`` does not matter; systems without it use files in a private folder. Locks are ``flock`` locks, which the
kernel releases when a process ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import InterruptedChangeError, OutOfMemoryError, OwnerEndedError, SharingError
from sb3_extra_buffers.stores.arena import SLACK
from sb3_extra_buffers.stores.checks import parse_dtype, parse_shape, require, whole

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Array = npt.NDArray[Any]

_MAGIC = 0x5242_5345_3353_4253
_VERSION = 1
# words of the header
_MAGIC_AT, _VERSION_AT, _TOKEN_AT, _PID_AT, _GATE_AT, _LIFE_AT = 0, 1, 2, 4, 5, 6
_CHANGES_AT = 7  # number of changes that have begun or ended: odd while a change is under way
_GENERATION_AT = 8  # descriptions written
_LENGTH_AT = 9  # bytes of the description
_WAITING_AT = 10  # whether the writer waits for readers
_CLOSED_AT = 11
_STATE_AT = 16  # numbers that every change may set, up to the end of the header
_N_WORDS = 64
_N_STATE = _N_WORDS - _STATE_AT
# where the description starts
_DESCRIPTION_AT = 4096
_MAX_DESCRIPTION = 1 << 28
# arrays are copied in parts of this many bytes, except parts that contain only zeros
_PART = 1 << 16
# seconds between two checks whether the writer is alive
_LIFE_INTERVAL = 0.02

_NAME = re.compile(r"(?:(?P<pid>[1-9][0-9]{0,9})|(?P<folder>/.+))\.(?P<number>[0-9]{1,9})\.(?P<token>[0-9a-f]{32})")


def check_supported() -> None:
    """Raise `SharingError` where memory cannot be shared."""
    if fcntl is None:
        raise SharingError("sharing a buffer through memory needs Linux or macOS")


# ---- memory ----


def _has_anonymous_memory() -> bool:
    """Whether the system has anonymous memory that another process can open."""
    try:
        descriptor = os.memfd_create("sb3-extra-buffers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):  # macOS; a sandbox
        return False
    try:
        return os.path.exists(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


class SharedPlace:
    """Allocates memory that other processes can map, in numbered pieces."""

    def __init__(self, in_files: bool = False) -> None:
        check_supported()
        self.folder: str | None = None
        self._n_files = 0
        if in_files or not _has_anonymous_memory():
            where = "/dev/shm" if os.path.isdir("/dev/shm") else None
            self.folder = tempfile.mkdtemp(prefix="sb3-extra-buffers-", dir=where)
            # not in a forked child, whose exit must not remove the files
            self._remove = weakref.finalize(self, _remove_folder, self.folder, os.getpid())

    @property
    def root(self) -> str:
        """How names of this place begin."""
        return str(os.getpid()) if self.folder is None else self.folder

    def create(self, size: int) -> tuple[int, int]:
        """Create ``size`` bytes of zeros; return their number and a descriptor."""
        try:
            if self.folder is None:
                descriptor = number = os.memfd_create("sb3-extra-buffers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            else:
                self._n_files = number = self._n_files + 1
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                descriptor = os.open(f"{self.folder}/{number}", flags, 0o600)
            try:
                os.fchmod(descriptor, 0o400)  # other processes cannot open it to write
                self.reserve(descriptor, size)
                if self.folder is None:
                    # readers rely on what they have mapped
                    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as problem:
            raise _out_of_memory(problem, size) from problem
        return number, descriptor

    def reserve(self, descriptor: int, size: int) -> None:
        """Resize a piece to ``size`` bytes. Files get disk space now: writing to a full disk would kill the process."""
        if self.folder is None or not hasattr(os, "posix_fallocate"):
            os.ftruncate(descriptor, size)
        else:
            os.posix_fallocate(descriptor, 0, size)

    def new_area(self, nbytes: int) -> SharedArea:
        """Return ``nbytes`` bytes of zeros, and `SLACK` more."""
        return SharedArea.of(self, max(nbytes, 1) + SLACK)


class SharedArea(mmap.mmap):
    """A mapped piece of a `SharedPlace`."""

    place: SharedPlace
    number: int
    descriptor: int
    #: Replaced when the size changes.
    version: object

    @classmethod
    def of(cls, place: SharedPlace, size: int) -> SharedArea:
        """Create a piece of ``size`` bytes, and map it."""
        number, descriptor = place.create(size)
        try:
            area = cls(descriptor, size)
        except BaseException as problem:
            os.close(descriptor)
            if isinstance(problem, OSError):
                raise _out_of_memory(problem, size) from problem
            raise
        area.place, area.number, area.descriptor, area.version = place, number, descriptor, object()
        weakref.finalize(area, _drop_piece, place.folder, number, descriptor, os.getpid())
        return area

    def resize(self, newsize: int, /) -> None:
        """Make the piece larger."""
        self.place.reserve(self.descriptor, newsize)
        super().resize(newsize)
        self.version = object()

    def describe(self, array: Array) -> list[Any]:
        """Return what `SharedView.map_array` needs to map ``array``, which starts where this area starts."""
        return [self.number, os.fstat(self.descriptor).st_ino, array.dtype.str, list(array.shape)]


def _drop_piece(folder: str | None, number: int, descriptor: int, pid: int) -> None:
    os.close(descriptor)
    if folder is not None and os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/{number}")


def _remove_folder(folder: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _out_of_memory(problem: OSError, size: int) -> Exception:
    if problem.errno in (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OutOfMemoryError(f"cannot allocate {size} bytes of shared memory: {problem.strerror}")
    if problem.errno in (errno.EMFILE, errno.ENFILE):
        return SharingError(f"cannot allocate shared memory: {problem.strerror}; raise the limit (ulimit -n)")
    return SharingError(f"cannot allocate shared memory: {problem}")


def copy_sparsely(source: Array, target: Array) -> None:
    """Copy ``source`` to ``target``, which holds zeros, without writing to pages that stay zero."""
    flat, out = source.reshape(-1).view(np.uint8), target.reshape(-1).view(np.uint8)
    for begin in range(0, flat.size, _PART):
        part = flat[begin : begin + _PART]
        if part.any():
            out[begin : begin + _PART] = part


# ---- the writer ----

_writers: weakref.WeakSet[SharedWriter] = weakref.WeakSet()


class SharedWriter:
    """The side of the process that owns what is shared.

    Every change is made between `begin` and `end`, in one thread at a time. ``state`` holds numbers that readers see
    after every change; `describe` publishes everything else.
    """

    def __init__(self, in_files: bool = False) -> None:
        self.place = SharedPlace(in_files)
        self._pid = os.getpid()
        # closed by `__del__` even if the constructor fails
        self._descriptors: list[int] = []
        number, self._main = self._create(_DESCRIPTION_AT)
        (gate, self._gate), (life, self._life) = self._create(1), self._create(1)
        self._map = mmap.mmap(self._main, _DESCRIPTION_AT)
        self._words = memoryview(self._map).cast("q")
        token = secrets.token_bytes(16)
        self._map[8 * _TOKEN_AT : 8 * _TOKEN_AT + 16] = token
        words = self._words
        words[_VERSION_AT], words[_PID_AT] = _VERSION, self._pid
        words[_GATE_AT], words[_LIFE_AT] = gate, life
        words[_MAGIC_AT] = _MAGIC
        fcntl.flock(self._life, fcntl.LOCK_EX)
        #: The name under which other processes open it.
        self.name = f"{self.place.root}.{number}.{token.hex()}"
        #: Numbers that readers see after every change.
        self.state = words[_STATE_AT:_N_WORDS]
        self.is_changing = False
        self.is_closed = False
        _writers.add(self)

    def _create(self, size: int) -> tuple[int, int]:
        number, descriptor = self.place.create(size)
        self._descriptors.append(descriptor)
        return number, descriptor

    def begin(self) -> None:
        """Wait for active readers, and let no other reader begin until `end`."""
        if self.is_closed:
            return
        try:
            # first: `end` releases the lock after any interrupt. May be set already, by an `end` that was interrupted
            self.is_changing = True
            try:
                fcntl.flock(self._main, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._wait()
            self._words[_CHANGES_AT] |= 1
        except BaseException:
            self.is_changing = False
            fcntl.flock(self._main, fcntl.LOCK_UN)
            raise

    def _wait(self) -> None:
        """Take the lock once active readers have finished; readers that arrive later wait for the gate lock."""
        try:
            self._words[_WAITING_AT] = 1
            fcntl.flock(self._gate, fcntl.LOCK_EX)
            fcntl.flock(self._main, fcntl.LOCK_EX)
        finally:
            self._words[_WAITING_AT] = 0
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def end(self, is_complete: bool = True) -> None:
        """Let readers continue; after an incomplete change, reading raises `InterruptedChangeError`."""
        if not self.is_changing:
            return
        if is_complete:
            self._words[_CHANGES_AT] = (self._words[_CHANGES_AT] | 1) + 1
        fcntl.flock(self._main, fcntl.LOCK_UN)
        self.is_changing = False

    def abandon(self) -> None:
        """Let readers continue after an interrupt in `end`; they raise an error unless the change was complete."""
        self.end(is_complete=False)

    def describe(self, description: Any) -> None:
        """Publish a description, as JSON; between `begin` and `end`."""
        text = json.dumps(description, separators=(",", ":")).encode()
        try:
            self.place.reserve(self._main, max(os.fstat(self._main).st_size, _DESCRIPTION_AT + len(text)))
            written = 0
            while written < len(text):
                written += os.pwrite(self._main, text[written:], _DESCRIPTION_AT + written)
        except OSError as problem:
            raise _out_of_memory(problem, len(text)) from problem
        self._words[_LENGTH_AT] = len(text)
        self._words[_GENERATION_AT] += 1

    def close(self) -> None:
        """Stop sharing: readers get an error from now on."""
        if self.is_closed or os.getpid() != self._pid:
            return
        self.begin()
        self._words[_CLOSED_AT] = 1
        self.end(is_complete=False)
        self.is_closed = True
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)

    def _leave(self) -> None:
        """Called in a forked child: close the parent's locks, which must not outlive the parent here."""
        self.is_closed = True
        self._close_descriptors()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._close_descriptors()


# ---- readers ----

_views: weakref.WeakSet[SharedView] = weakref.WeakSet()
# whether a descriptor can be opened again without its path
_HAS_PROC = os.path.isdir("/proc/self/fd")


class _Piece:
    """An open piece of shared memory with its own descriptor, because copies of a descriptor share their lock."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def reopened(self) -> _Piece:
        """The same memory, with locks of its own."""
        piece = _Piece(f"/proc/self/fd/{self.descriptor}" if _HAS_PROC else self.path)
        piece.path = self.path
        return piece

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class _Thread(threading.local):
    """Per thread: the pieces that it locks, and how deeply its calls of `reading` are nested."""

    main: _Piece | None = None
    gate: _Piece | None = None
    depth = 0


class SharedView:
    """The side of a process that reads what a `SharedWriter` shares.

    Raises:
        SharingError: No running process of this user shares anything under this name.
    """

    def __init__(self, name: str) -> None:
        check_supported()
        found = _NAME.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            raise SharingError(f"{name!r} is not the name of a shared buffer; pass the name of what share() returned")
        self.name = name
        self._root = found["folder"] or f"/proc/{found['pid']}/fd"
        self._main = self._open(int(found["number"]))
        size = os.fstat(self._main.descriptor).st_size
        if size < _DESCRIPTION_AT:
            raise SharingError(f"{name!r} is not a shared buffer: it has only {size} bytes")
        self._map = mmap.mmap(self._main.descriptor, _DESCRIPTION_AT, access=mmap.ACCESS_READ)
        words = self._words = memoryview(self._map).cast("q")
        token = self._map[8 * _TOKEN_AT : 8 * _TOKEN_AT + 16]
        if words[_MAGIC_AT] != _MAGIC or token.hex() != found["token"]:
            raise OwnerEndedError(f"{name!r} is no longer shared")
        if words[_VERSION_AT] != _VERSION:
            raise SharingError(
                f"{name!r} is shared in version {words[_VERSION_AT]} of the format, but this release reads version "
                f"{_VERSION}; use the same release in all processes"
            )
        self._gate, self._life = self._open(words[_GATE_AT]), self._open(words[_LIFE_AT])
        #: Numbers that every change may set; valid while reading.
        self.state = words[_STATE_AT:_N_WORDS]
        self._thread = _Thread()
        # pieces of other threads, which a forked child must close
        self._pieces: weakref.WeakSet[_Piece] = weakref.WeakSet()
        self._next_check = 0.0
        _views.add(self)

    def _open(self, number: int) -> _Piece:
        try:
            piece = _Piece(f"{self._root}/{number}")
        except FileNotFoundError as problem:
            raise OwnerEndedError(
                f"{self.name!r} is no longer shared: its process has ended or has stopped sharing it"
            ) from problem
        except OSError as problem:
            raise SharingError(f"{self.name!r} cannot be opened: {problem.strerror}") from problem
        status = os.fstat(piece.descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise SharingError(f"{self.name!r} does not belong to this user, or others may read it")
        return piece

    @property
    def is_live(self) -> bool:
        """Whether the owner is running and still shares this."""
        return not (self._words[_CLOSED_AT] or self._has_ended())

    def _has_ended(self) -> bool:
        """Whether the owner has ended, which releases a lock that it holds all the time."""
        try:
            fcntl.flock(self._life.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._life.descriptor, fcntl.LOCK_UN)
        return True

    @property
    def generation(self) -> int:
        """A number that changes when the description does; valid while reading."""
        return self._words[_GENERATION_AT]

    @property
    def n_changes(self) -> int:
        """A number that changes when anything changes; valid while reading."""
        return self._words[_CHANGES_AT]

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the writer out. Calls may be nested, and several threads may read at the same time.

        Raises:
            OwnerEndedError: The owner has ended, or has stopped sharing.
            InterruptedChangeError: The last change was interrupted.
        """
        thread = self._thread
        if thread.depth:
            yield
            return
        main, gate = thread.main, thread.gate
        if main is None or gate is None:
            main, gate = thread.main, thread.gate = self._main.reopened(), self._gate.reopened()
            self._pieces.update((main, gate))
        try:
            if self._words[_WAITING_AT]:
                # wait until the writer, which holds the gate, has the lock; if it was killed, the gate is free
                try:
                    fcntl.flock(gate.descriptor, fcntl.LOCK_SH)
                finally:
                    fcntl.flock(gate.descriptor, fcntl.LOCK_UN)
            fcntl.flock(main.descriptor, fcntl.LOCK_SH)
            thread.depth = 1
            self._check()
            yield
        finally:
            thread.depth = 0
            fcntl.flock(main.descriptor, fcntl.LOCK_UN)

    def _check(self) -> None:
        words = self._words
        if words[_CLOSED_AT]:
            raise OwnerEndedError(f"the owner of {self.name!r} has stopped sharing it")
        if words[_CHANGES_AT] & 1:
            if self._has_ended():
                raise InterruptedChangeError(
                    f"the process that shared {self.name!r} ended in the middle of a change, which is incomplete"
                )
            raise InterruptedChangeError(
                f"the last change of {self.name!r} was interrupted; its owner completes it when it next uses the buffer"
            )
        now = time.monotonic()
        if now >= self._next_check:
            if self._has_ended():
                raise OwnerEndedError(f"the process that shared {self.name!r} has ended")
            self._next_check = now + _LIFE_INTERVAL

    def description(self) -> Any:
        """Return what `SharedWriter.describe` published; to be called while reading."""
        length = self._words[_LENGTH_AT]
        require(0 < length < _MAX_DESCRIPTION, f"a description of {length} bytes")
        text = b""
        while len(text) < length:
            part = os.pread(self._main.descriptor, length - len(text), _DESCRIPTION_AT + len(text))
            require(bool(part), "the description is cut short")
            text += part
        return json.loads(text)

    def map_array(self, described: Any) -> Array:
        """Map the array that `SharedArea.describe` described; to be called while reading."""
        require(isinstance(described, list) and len(described) == 4, f"invalid description {described!r}")
        number, inode = whole(described[0], "a number", stop=1 << 31), whole(described[1], "an inode", stop=1 << 64)
        dtype, shape = parse_dtype(described[2]), parse_shape(described[3])
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        piece = self._open(number)
        status = os.fstat(piece.descriptor)
        require(status.st_ino == inode, "a piece of shared memory was replaced")
        require(nbytes + SLACK <= status.st_size, f"{nbytes} bytes do not fit {status.st_size} bytes of shared memory")
        # A private mapping shows what the owner writes as long as nothing is written here, and what is written here is
        # not seen by others. Kernels are compiled for writable arrays, so the mapping cannot be read-only
        area = mmap.mmap(piece.descriptor, max(nbytes, 1) + SLACK, access=mmap.ACCESS_COPY)
        array: Array = np.frombuffer(area, dtype, nbytes // max(dtype.itemsize, 1)).reshape(shape)
        return array

    def _renew(self) -> None:
        """Called in a forked child: replace the parent's locks, which must not outlive the parent here."""
        pieces = [self._main, self._gate, self._life, *self._pieces]
        self._main, self._gate, self._life = (piece.reopened() for piece in pieces[:3])
        self._thread = _Thread()
        for piece in pieces:
            piece.close()


def _after_fork() -> None:
    for writer in list(_writers):
        writer._leave()
    for view in list(_views):
        view._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
