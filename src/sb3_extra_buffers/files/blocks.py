"""Arrays as checksummed blocks of an append-only data file."""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import DamagedFileError, FileFormatError
from sb3_extra_buffers.files import disk
from sb3_extra_buffers.files.checksums import crc32_function
from sb3_extra_buffers.files.locking import lock_if_possible
from sb3_extra_buffers.kernels.fingerprints import PAGE, fingerprints_of
from sb3_extra_buffers.stores.arena import SLACK, zeros
from sb3_extra_buffers.stores.checks import entry, parse_dtype, parse_shape, require, whole

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

#: bytes of an array with a checksum of their own; small, because a save writes whole blocks
BLOCK = PAGE
#: first bytes of every data file. No block starts at offset 0, which marks a block of zeros
MAGIC = b"sb3-extra-buffers data 2\n"
#: one entry per block
INDEX = np.dtype([("offset", "<u8"), ("crc32", "<u4")])
# an `Appender` collects up to this many bytes and pieces for one system call
_MAX_PENDING_BYTES = 1 << 20
_MAX_PENDING = 512
_ZEROS = bytes(BLOCK)


class ArrayRecord(NamedTuple):
    """An array in a file; its blocks are consecutive entries of the index, from ``first`` on."""

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
    def from_json(cls, json: Any, n_index: int) -> ArrayRecord:
        """Parse a record; an array larger than an index of ``n_index`` blocks is an error, before memory is taken."""
        require(isinstance(json, list) and len(json) == 3, f"{json!r} does not describe an array")
        record = cls(parse_dtype(json[0]), parse_shape(json[1]), whole(json[2], "the first block of an array"))
        fits = record.first <= n_index - record.n_blocks
        require(fits, f"an array of {record.nbytes} bytes from block {record.first} on exceeds {n_index} blocks")
        return record


class Appender(disk.OpenFile):
    """Appends to a data file in few large writes; never changes what the file holds. `undo` restores its length.

    Folders that share the file may belong to several processes: `BlockingIOError` while another one appends to it.
    """

    def __init__(self, path: Path, new: bool) -> None:
        self.path, self._new = path, new
        self.descriptor = disk.create(path) if new else disk.open_to_append(path)
        if not new:
            lock_if_possible(self.descriptor)
        self._initial_size = self.end = os.fstat(self.descriptor).st_size
        self._pending: list[Any] = []
        self._n_pending_bytes = 0
        if new:
            self.put(MAGIC)

    @classmethod
    def reopen(cls, path: Path, size: int) -> Appender | None:
        """Append to an existing file; None if it is missing, shorter than ``size`` or in use."""
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            out = cls(path, new=False)
            if out.end >= size:
                return out
            out.close()
        return None

    @property
    def n_bytes(self) -> int:
        """Bytes appended so far."""
        return self.end - self._initial_size

    def put(self, data: Any) -> int:
        """Append bytes, which must not change before `flush`; return their offset."""
        start = self.end
        self._pending.append(data)
        self._n_pending_bytes += len(data)
        self.end += len(data)
        if self._n_pending_bytes >= _MAX_PENDING_BYTES or len(self._pending) == _MAX_PENDING:
            self.flush(sync=False)
        return start

    def flush(self, sync: bool) -> None:
        pending, self._pending, self._n_pending_bytes = self._pending, [], 0
        disk.write_all(self.descriptor, pending)
        if sync:
            disk.fsync(self.descriptor)

    def undo(self) -> None:
        """Remove what was appended, unless the file has grown since: folders that share it may append too."""
        with contextlib.suppress(OSError):
            if self._new:
                disk.unlink(self.path)
            elif os.fstat(self.descriptor).st_size <= self.end:
                disk.truncate(self.descriptor, self._initial_size)
        self.close()


class NamedArray(NamedTuple):
    """An array to write."""

    name: str
    array: Array
    dirty_pages: npt.NDArray[np.int64] | None = None
    """Blocks that may have changed since the last save; None if any may have."""


@dataclass(frozen=True, slots=True)
class SavedArrays:
    """Arrays as they are in a file, with a fingerprint per block to tell which have changed since."""

    records: dict[str, ArrayRecord]
    index: Array
    fingerprints: npt.NDArray[np.uint64]
    live_bytes: int = 0

    def reusable_blocks(self, name: str, record: ArrayRecord) -> tuple[int, int]:
        """First and number of the blocks of ``name`` that may be unchanged: of an array that grew, the full ones."""
        old = self.records.get(name)
        if old is None:
            return 0, 0
        return old.first, old.n_blocks if old.nbytes == record.nbytes else min(old.nbytes, record.nbytes) // BLOCK


def put_arrays(
    out: Appender, arrays: Sequence[NamedArray], last: SavedArrays | None
) -> tuple[SavedArrays, dict[str, Any]]:
    """Append ``arrays`` and their index; return both, the index as a JSON record of where it is.

    Blocks whose fingerprint is that of the ``last`` save are not written again. Contiguous arrays are not copied.
    """
    records: dict[str, ArrayRecord] = {}
    n_index = 0
    for name, array, _ in arrays:
        records[name] = ArrayRecord(array.dtype, array.shape, n_index)
        n_index += records[name].n_blocks
    index, fingerprints = np.zeros(n_index, INDEX), np.zeros((n_index, 2), np.uint64)
    live_bytes = index.nbytes
    for name, array, dirty_pages in arrays:
        blocks = slice(records[name].first, records[name].first + records[name].n_blocks)
        flat: Bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        old, n_old = (0, 0) if last is None else last.reusable_blocks(name, records[name])
        if last is not None and n_old:
            index[blocks][:n_old] = last.index[old : old + n_old]
            fingerprints[blocks][:n_old] = last.fingerprints[old : old + n_old]
        changed = _update_fingerprints(flat, fingerprints[blocks], n_old, dirty_pages)
        live_bytes += _put_blocks(out, flat, index[blocks], changed)
    data = index.view(np.uint8).data if n_index else memoryview(b"")
    where = {"offset": out.put(data), "n_blocks": n_index, "crc32": zlib.crc32(data)}
    # kernels may read a little past a payload, so a data file never ends with one
    out.put(bytes(SLACK))
    return SavedArrays(records, index, fingerprints, live_bytes), where


def _update_fingerprints(
    flat: Bytes, fingerprints: npt.NDArray[np.uint64], n_old: int, dirty_pages: npt.NDArray[np.int64] | None
) -> list[int]:
    """Bring the fingerprints of an array up to date; return the blocks that are new or have changed."""
    old = np.arange(n_old) if dirty_pages is None else dirty_pages[dirty_pages < n_old]
    new = np.arange(n_old, len(fingerprints))
    current = fingerprints_of(flat, None if dirty_pages is None else np.concatenate([old, new]))
    changed = old[(current[: len(old)] != fingerprints[old]).any(axis=1)]
    fingerprints[old], fingerprints[n_old:] = current[: len(old)], current[len(old) :]
    return [*changed.tolist(), *new.tolist()]


def _put_blocks(out: Appender, flat: Bytes, index: Array, changed: list[int]) -> int:
    """Append the ``changed`` blocks of an array and enter them in its ``index``; return how many bytes it has."""
    offsets, crcs, crc32 = index["offset"], index["crc32"], crc32_function()
    # consecutive blocks are appended as one piece of bytes `first` to `stop`
    first = stop = 0
    for block in changed:
        start, end = block * BLOCK, min((block + 1) * BLOCK, flat.size)
        data = flat[start:end].data
        # blocks of zeros are not written
        if data == _ZEROS[: len(data)]:
            offsets[block] = crcs[block] = 0
            continue
        if start != stop or stop - first >= _MAX_PENDING_BYTES:
            out.put(flat[first:stop].data)
            first = start
        stop = end
        offsets[block], crcs[block] = out.end + start - first, crc32(data)
    out.put(flat[first:stop].data)
    n_written = int(np.count_nonzero(offsets))
    return n_written * BLOCK - (-flat.size % BLOCK if n_written and offsets[-1] else 0)


class BlockReader:
    """Reads arrays of a data file; every block is checked before it is used."""

    def __init__(self, data: Bytes, index: Array, records: Mapping[str, ArrayRecord], path: Path) -> None:
        self.data = data
        self.index = index
        self.records = dict(records)
        self.path = path
        self.fingerprints = np.zeros((len(index), 2), np.uint64)

    def read(self, name: str, fingerprint: bool = False) -> Array:
        """The array ``name``, copied to memory; ``fingerprint`` it if it will be saved again."""
        record = self.records.get(name)
        if record is None:
            raise FileFormatError(f"{self.path} has no array {name!r}")
        out, bad = self.read_valid(record)
        if bad:
            raise DamagedFileError(
                f"{self.path}: {len(bad)} of {record.n_blocks} blocks of {name!r} are damaged, the first at byte "
                f"{self.index['offset'][record.first + bad[0]]}; 'sb3-extra-buffers repair' saves what is intact"
            )
        if fingerprint:
            flat = out.reshape(-1).view(np.uint8)
            self.fingerprints[record.first : record.first + record.n_blocks] = fingerprints_of(flat)
        return out

    def read_valid(self, record: ArrayRecord) -> tuple[Array, list[int]]:
        """An array with its damaged blocks left as zeros, and the numbers of those."""
        out = _allocate(record)
        flat: Bytes = out.reshape(-1).view(np.uint8)
        bad: list[int] = []
        crc32 = crc32_function()
        index = self.index[record.first : record.first + record.n_blocks]
        for block, (offset, crc) in enumerate(zip(index["offset"].tolist(), index["crc32"].tolist(), strict=True)):
            if not offset:
                continue
            target = flat[block * BLOCK : (block + 1) * BLOCK]
            data = self.data[offset : offset + target.size]
            if data.size != target.size or crc32(data.data) != crc:
                bad.append(block)
            else:
                target[:] = data
        return out, bad


def _allocate(record: ArrayRecord) -> Array:
    try:
        if record.nbytes < 1 << 16:
            return np.zeros(record.shape, record.dtype)
        return zeros(record.shape, record.dtype)
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        raise FileFormatError(f"cannot allocate an array of {record.shape} {record.dtype}: {error}") from error


def read_index(data: Bytes, record: Any, path: Path) -> Array:
    """The index that the manifest's ``record`` points to."""
    offset, count, crc = (whole(entry(record, name), name, stop=1 << 59) for name in ("offset", "n_blocks", "crc32"))
    index = data[offset : offset + count * INDEX.itemsize]
    if index.size != count * INDEX.itemsize or zlib.crc32(index.data) != crc:
        raise DamagedFileError(f"{path}: the index at byte {offset} is damaged; try 'sb3-extra-buffers repair'")
    return index.view(INDEX)
