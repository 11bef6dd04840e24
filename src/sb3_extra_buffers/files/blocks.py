"""Arrays as checksummed blocks of a file that only ever grows."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import DamagedFileError, FileFormatError, FileWriteError
from sb3_extra_buffers.stores.arena import SLACK, zeros
from sb3_extra_buffers.stores.frames import PAGE
from sb3_extra_buffers.stores.snapshot import parse_dtype

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

#: bytes of an array that have a checksum of their own; small, as a save writes whole ones
BLOCK = PAGE
#: bytes of payloads that have one; these are only ever added
STRETCH = 1 << 14
#: first bytes of every data file; so that no block begins at 0, which stands for a block of zeros
MAGIC = b"sb3-extra-buffers data 1\n"
#: one entry for each block: where it is and its checksum
INDEX = np.dtype([("offset", "<u8"), ("crc32", "<u4")])
#: payloads are checked in stretches of this kind
CHUNK = np.dtype([("offset", "<i8"), ("length", "<i4"), ("crc32", "<u4")])
# how much is written in one go
_PENDING = 1 << 20
# blocks that are compared in one go
_PIECE = 64
_ZEROS = np.zeros(_PIECE * BLOCK, np.uint8)


class ArrayRecord(NamedTuple):
    """An array in a file: its blocks are entries ``first`` and following of the index."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    first: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def n_blocks(self) -> int:
        return -(-self.nbytes // BLOCK)

    def to_json(self) -> list[Any]:
        return [self.dtype.str, list(self.shape), self.first]

    @classmethod
    def from_json(cls, record: Any, n_index: int) -> ArrayRecord:
        """An array that the index has room for, or an error: no size is believed before that."""
        try:
            dtype, shape, first = record
        except (TypeError, ValueError):
            raise FileFormatError(f"{record!r} describes no array") from None
        if not isinstance(shape, list) or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
            raise FileFormatError(f"{shape!r} is no shape of an array")
        made = cls(parse_dtype(dtype), tuple(shape), first)
        if type(first) is not int or not 0 <= first <= n_index - made.n_blocks or any(n >= 1 << 48 for n in shape):
            raise FileFormatError(f"an array of {made.nbytes} bytes has no place among {n_index} blocks")
        return made


@contextlib.contextmanager
def named_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn what the system says into an error that says what it means for the file."""
    try:
        yield
    except OSError as problem:
        if isinstance(problem, FileWriteError):
            raise
        raise FileWriteError(
            problem.errno,
            f"{doing} failed: {problem.strerror or problem}; what was saved before is untouched",
            str(path),
        ) from problem


class Appender:
    """Writes to the end of a file, in few large pieces.

    Nothing that is there is ever changed. After an error the file is as long as it was.
    """

    def __init__(self, path: Path, new: bool) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT | os.O_EXCL if new else 0) | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags, 0o666)
        self._began = self.end = os.fstat(self._descriptor).st_size
        self._pending = bytearray()
        self.n_bytes = 0

    def put(self, data: Any) -> int:
        """Append bytes; return where they begin."""
        start = self.end
        view = memoryview(data).cast("B")
        self.end += len(view)
        self.n_bytes += len(view)
        if len(self._pending) + len(view) < _PENDING:
            self._pending += view
        else:
            self._write_out()
            self._write(view)
        return start

    def flush(self, sync: bool = True) -> None:
        self._write_out()
        if sync:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def undo(self) -> None:
        """Give back the room that was taken; somebody else's file may have grown meanwhile, then nothing is cut."""
        with contextlib.suppress(OSError):
            if os.fstat(self._descriptor).st_size <= self.end:
                os.ftruncate(self._descriptor, self._began)
        self.close()

    def _write_out(self) -> None:
        if self._pending:
            self._write(memoryview(self._pending))
            self._pending = bytearray()

    def _write(self, view: memoryview) -> None:
        while len(view):
            view = view[os.write(self._descriptor, view) :]


class BlockWriter:
    """Puts arrays into a data file; blocks that are there already, byte for byte, are used again."""

    def __init__(self, out: Appender, before: SavedBlocks | None) -> None:
        self._out = out
        self._before = before
        self._entries: list[Array] = []
        self._n_entries = 0
        self.records: dict[str, ArrayRecord] = {}
        self.live_bytes = 0

    def put(self, name: str, array: Array, touched: npt.NDArray[np.bool_] | None = None) -> None:
        """Add ``array``; one that is not in one piece is copied, all others are written as they lie.

        ``touched`` says of each block whether it may have changed since the last save; without it, all may have.
        """
        record = ArrayRecord(array.dtype, array.shape, self._n_entries)
        flat: Bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        entries = np.zeros(record.n_blocks, INDEX)
        offsets, crcs = entries["offset"], entries["crc32"]
        todo: list[int] = list(range(record.n_blocks))
        if self._before is not None:
            known = self._before.blocks_like(name, record)
            entries[: len(known)] = known
            todo = self._before.changed_blocks(known, flat, touched) + todo[len(known) :]
        for block in todo:
            data = flat[block * BLOCK : (block + 1) * BLOCK]
            # zeros take no place
            filled = bool(data.any())
            offsets[block] = self._out.put(data) if filled else 0
            crcs[block] = zlib.crc32(data.data) if filled else 0
        n_kept = int(np.count_nonzero(offsets))
        self.live_bytes += n_kept * BLOCK - (-flat.size % BLOCK if n_kept and offsets[-1] else 0)
        self.records[name] = record
        self._entries.append(entries)
        self._n_entries += record.n_blocks

    def finish(self) -> dict[str, Any]:
        """Write the index; return where it is, JSON-ready."""
        index = np.concatenate([np.zeros(0, INDEX), *self._entries])
        data = index.view(np.uint8) if index.size else np.zeros(0, np.uint8)
        start = self._out.put(data)
        # kernels may read a little past a payload: there is always something
        self._out.put(bytes(SLACK))
        self.index = index
        self.live_bytes += data.nbytes
        return {"offset": start, "n_blocks": len(index), "crc32": zlib.crc32(data.data)}


class BlockReader:
    """Reads arrays of a data file; every block is checked before it is used."""

    def __init__(self, data: Bytes, index: Array, records: Mapping[str, ArrayRecord], path: Path) -> None:
        self.data = data
        self.index = index
        self.records = dict(records)
        self.path = path

    def read(self, name: str) -> Array:
        """The array ``name``, in memory of its own."""
        record = self.records.get(name)
        if record is None:
            raise FileFormatError(f"{self.path} has no array {name!r}")
        out = self._room(record)
        flat: Bytes = out.reshape(-1).view(np.uint8)
        bad = self.copy_blocks(record, flat)
        if len(bad):
            raise DamagedFileError(
                f"{self.path}: {len(bad)} of {record.n_blocks} blocks of {name!r} are damaged, the first at byte "
                f"{self.index['offset'][record.first + bad[0]]}; 'sb3-extra-buffers repair' keeps what is whole"
            )
        return out

    def copy_blocks(self, record: ArrayRecord, flat: Bytes) -> list[int]:
        """Fill ``flat`` with the blocks of an array; return those that are damaged, left as they were."""
        bad: list[int] = []
        entries = self.index[record.first : record.first + record.n_blocks]
        for block in np.flatnonzero(entries["offset"]).tolist():
            target = flat[block * BLOCK : (block + 1) * BLOCK]
            at = int(entries["offset"][block])
            found = self.data[at : at + target.size]
            if found.size != target.size or zlib.crc32(found.data) != entries["crc32"][block]:
                bad.append(block)
            else:
                target[:] = found
        return bad

    def _room(self, record: ArrayRecord) -> Array:
        try:
            if record.nbytes < 1 << 16:
                return np.zeros(record.shape, record.dtype)
            return zeros(record.shape, record.dtype)
        except (OSError, MemoryError, OverflowError, ValueError) as problem:
            raise FileFormatError(f"no room for an array of {record.shape} {record.dtype}: {problem}") from problem


class SavedBlocks:
    """The blocks of the last save, to find out which are as they were.

    They are read, not mapped: a page that is looked at once costs more to map than to copy.
    """

    def __init__(self, path: Path, index: Array, records: Mapping[str, ArrayRecord]) -> None:
        self.index, self.records = index, records
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._read = np.empty(_PIECE * BLOCK, np.uint8)

    def close(self) -> None:
        os.close(self._descriptor)

    def blocks_like(self, name: str, record: ArrayRecord) -> Array:
        """The blocks of ``name`` that may be as they were; of an array that grew, those that were whole before."""
        old = self.records.get(name)
        if old is None:
            return self.index[:0]
        count = old.n_blocks if old.nbytes == record.nbytes else min(old.nbytes, record.nbytes) // BLOCK
        return self.index[old.first : old.first + count]

    def changed_blocks(self, entries: Array, flat: Bytes, touched: npt.NDArray[np.bool_] | None = None) -> list[int]:
        """Which blocks of ``flat`` are not in the file as they are, compared byte for byte.

        ``touched`` tells of each block whether it needs to be looked at.
        """
        offsets = entries["offset"].astype(np.int64)
        if touched is None or len(touched) < len(offsets):
            candidates = np.arange(len(offsets))
        else:
            candidates = np.flatnonzero(touched[: len(offsets)])
        if not len(candidates):
            return []
        # runs of blocks that follow each other here and in the file
        places = offsets[candidates]
        apart = (np.diff(candidates) != 1) | (np.diff(places) != np.where(places[:-1] > 0, BLOCK, 0))
        firsts = np.concatenate([[0], np.flatnonzero(apart) + 1]).tolist()
        changed: list[int] = []
        for first, stop in zip(firsts, [*firsts[1:], len(candidates)], strict=True):
            for piece in range(first, stop, _PIECE):
                begin = int(candidates[piece])
                end = begin + min(_PIECE, stop - piece)
                changed += self._compare(int(places[piece]), flat, begin, end)
        return changed

    def _compare(self, offset: int, flat: Bytes, first: int, stop: int) -> list[int]:
        """Compare a run of blocks with the file; those that differ."""
        part = flat[first * BLOCK : stop * BLOCK]
        if offset:
            found = self._read[: part.size]
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            if _read_into(self._descriptor, found) != part.size:
                return list(range(first, stop))
        else:
            found = _ZEROS[: part.size]
        if equal_bytes(found, part):
            return []
        whole = part.size // BLOCK
        different = (found != part)[: whole * BLOCK].reshape(whole, BLOCK).any(axis=1)
        changed: list[int] = (np.flatnonzero(different) + first).tolist()
        if part.size % BLOCK and not equal_bytes(found[whole * BLOCK :], part[whole * BLOCK :]):
            changed.append(stop - 1)
        return changed


def _read_into(descriptor: int, target: Bytes) -> int:
    if hasattr(os, "readv"):
        return os.readv(descriptor, [target.data])
    data = os.read(descriptor, target.size)
    target[: len(data)] = np.frombuffer(data, np.uint8)
    return len(data)


def _find_memcmp() -> Any:
    """The C library's comparison: one call for megabytes, and no copy."""
    try:
        compare: Any = ctypes.CDLL(None if os.name != "nt" else "msvcrt").memcmp
    except (OSError, AttributeError):
        return None
    compare.argtypes, compare.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int
    return compare


_memcmp = _find_memcmp()


def equal_bytes(first: Bytes, second: Bytes) -> bool:
    """Whether two stretches of bytes are equal."""
    if _memcmp is None:
        return first.tobytes() == second.tobytes()
    return first.size == second.size and _memcmp(first.ctypes.data, second.ctypes.data, first.size) == 0


def map_file(path: Path, size: int, private: bool = False) -> Bytes:
    """The first ``size`` bytes of a file, mapped; ``private`` ones may be written to, which changes nothing outside.

    Kernels that were compiled for arrays that can be written take those.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing; a saved buffer is its whole folder") from None
    except OSError as problem:
        raise FileFormatError(f"{path} cannot be read: {problem.strerror}") from problem
    try:
        found = os.fstat(descriptor).st_size
        if found < size:
            raise DamagedFileError(f"{path} has {found} bytes where {size} were written; it was cut short")
        if private and hasattr(mmap, "MAP_PRIVATE"):
            # without a claim on memory for pages that nobody writes to: the file may be larger than memory
            no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().sysname == "Linux" else 0)
            area = mmap.mmap(
                descriptor, size, flags=mmap.MAP_PRIVATE | no_reserve, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        else:
            area = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY if private else mmap.ACCESS_READ)
    except (OSError, ValueError, OverflowError) as problem:
        if isinstance(problem, DamagedFileError):
            raise
        raise FileFormatError(f"{path} cannot be mapped: {problem}") from problem
    finally:
        os.close(descriptor)
    return np.frombuffer(area, np.uint8)


def read_index(data: Bytes, record: Any, path: Path) -> Array:
    """The index that ``record`` points to."""
    try:
        offset, count, crc = record["offset"], record["n_blocks"], record["crc32"]
    except (KeyError, TypeError):
        raise FileFormatError(f"{path} does not say where its index is") from None
    if not all(type(n) is int and 0 <= n < 1 << 60 for n in (offset, count, crc)):
        raise FileFormatError(f"{path} does not say where its index is")
    nbytes = count * INDEX.itemsize
    if offset + nbytes > data.size:
        raise DamagedFileError(f"{path} is cut short: its index reaches to byte {offset + nbytes} of {data.size}")
    found = data[offset : offset + nbytes]
    if zlib.crc32(found.data) != crc:
        raise DamagedFileError(f"{path}: the index at byte {offset} is damaged; 'sb3-extra-buffers repair' may help")
    return found.view(INDEX)
