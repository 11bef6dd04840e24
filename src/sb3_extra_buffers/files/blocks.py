"""Arrays as checksummed blocks of a file that only ever grows."""

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
from sb3_extra_buffers.kernels.fingerprints import PAGE, fingerprints_of
from sb3_extra_buffers.stores.arena import SLACK, zeros
from sb3_extra_buffers.stores.checks import entry, parse_dtype, parse_shape, require, whole

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

#: bytes of an array that have a checksum of their own; small, as a save writes whole ones
BLOCK = PAGE
#: first bytes of every data file; so that no block begins at 0, which stands for a block of zeros
MAGIC = b"sb3-extra-buffers data 2\n"
#: one entry for each block: where it is and its checksum
INDEX = np.dtype([("offset", "<u8"), ("crc32", "<u4")])
# how much is written in one go, and from how many places
_PENDING = 1 << 20
_PARTS = 512
_ZEROS = bytes(BLOCK)


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
        require(isinstance(record, list) and len(record) == 3, f"{record!r} describes no array")
        made = cls(parse_dtype(record[0]), parse_shape(record[1]), whole(record[2], "the place of an array"))
        fits = made.first <= n_index - made.n_blocks
        require(fits, f"an array of {made.nbytes} bytes has no place among {n_index} blocks")
        return made


class Appender:
    """Writes to the end of a data file, in few large pieces.

    Nothing that is there is ever changed. `undo` leaves the file as long as it was.
    """

    def __init__(self, path: Path, new: bool) -> None:
        self.path, self._new = path, new
        self._descriptor = disk.create(path) if new else disk.open_to_append(path)
        self._began = self.end = os.fstat(self._descriptor).st_size
        self._pending: list[Any] = []
        self._n_pending = 0
        if new:
            self.put(MAGIC)

    @property
    def n_bytes(self) -> int:
        return self.end - self._began

    def put(self, data: Any) -> int:
        """Append bytes, which must stay as they are until `flush`; return where they begin."""
        start = self.end
        self._pending.append(data)
        self._n_pending += len(data)
        self.end += len(data)
        if self._n_pending >= _PENDING or len(self._pending) == _PARTS:
            self.flush(sync=False)
        return start

    def flush(self, sync: bool) -> None:
        parts, self._pending, self._n_pending = self._pending, [], 0
        disk.write_all(self._descriptor, parts)
        if sync:
            disk.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            disk.close(self._descriptor)
            self._descriptor = -1

    def undo(self) -> None:
        """Give back the room that was taken; another folder's file may have grown meanwhile, then nothing is cut."""
        with contextlib.suppress(OSError):
            if self._new:
                disk.unlink(self.path)
            elif os.fstat(self._descriptor).st_size <= self.end:
                disk.truncate(self._descriptor, self._began)
        self.close()


class NamedArray(NamedTuple):
    """An array to be written."""

    name: str
    array: Array
    dirty_pages: npt.NDArray[np.int64] | None = None
    """Blocks that may have changed since the last save; without this, all may have."""


@dataclass(frozen=True, slots=True)
class SavedArrays:
    """Arrays as they are in a file, and by what to know whether they still are."""

    records: dict[str, ArrayRecord]
    index: Array
    fingerprints: npt.NDArray[np.uint64]  # per block of the index
    live_bytes: int = 0

    def blocks_like(self, name: str, record: ArrayRecord) -> tuple[int, int]:
        """The first of the blocks of ``name``, and how many of them may be as they were.

        Of an array that grew, those are the ones that were whole before.
        """
        old = self.records.get(name)
        if old is None:
            return 0, 0
        return old.first, old.n_blocks if old.nbytes == record.nbytes else min(old.nbytes, record.nbytes) // BLOCK


def put_arrays(
    out: Appender, arrays: Sequence[NamedArray], before: SavedArrays | None
) -> tuple[SavedArrays, dict[str, Any]]:
    """Append ``arrays`` and their index, which is then at the place that is returned.

    Blocks that are there already are used again: those that have the prints they had. An array that is not in one piece
    is copied, all others are written as they lie.
    """
    records: dict[str, ArrayRecord] = {}
    n_index = 0
    for name, array, _ in arrays:
        records[name] = ArrayRecord(array.dtype, array.shape, n_index)
        n_index += records[name].n_blocks
    index, fingerprints = np.zeros(n_index, INDEX), np.zeros((n_index, 2), np.uint64)
    offsets, crcs = index["offset"], index["crc32"]
    live_bytes = index.nbytes
    for name, array, dirty_pages in arrays:
        first, stop = records[name].first, records[name].first + records[name].n_blocks
        flat: Bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        known, n_known = (0, 0) if before is None else before.blocks_like(name, records[name])
        if before is not None and n_known:
            offsets[first : first + n_known] = before.index["offset"][known : known + n_known]
            crcs[first : first + n_known] = before.index["crc32"][known : known + n_known]
            fingerprints[first : first + n_known] = before.fingerprints[known : known + n_known]
        todo = _new_fingerprints(flat, fingerprints[first:stop], n_known, dirty_pages)
        for block in todo:
            data = flat[block * BLOCK : (block + 1) * BLOCK].data
            # zeros take no place
            if data == _ZEROS[: len(data)]:
                offsets[first + block] = crcs[first + block] = 0
            else:
                offsets[first + block], crcs[first + block] = out.put(data), zlib.crc32(data)
        n_kept = int(np.count_nonzero(offsets[first:stop]))
        live_bytes += n_kept * BLOCK - (-flat.size % BLOCK if n_kept and offsets[stop - 1] else 0)
    data = index.view(np.uint8).data if n_index else memoryview(b"")
    where = {"offset": out.put(data), "n_blocks": n_index, "crc32": zlib.crc32(data)}
    # kernels may read a little past a payload: there is always something
    out.put(bytes(SLACK))
    return SavedArrays(records, index, fingerprints, live_bytes), where


def _new_fingerprints(
    flat: Bytes, fingerprints: npt.NDArray[np.uint64], n_known: int, dirty_pages: npt.NDArray[np.int64] | None
) -> list[int]:
    """Bring the prints of an array up to date; return the blocks that are new or have changed."""
    blocks = np.arange(n_known) if dirty_pages is None else dirty_pages[dirty_pages < n_known]
    new = np.arange(n_known, len(fingerprints))
    found = fingerprints_of(flat, None if dirty_pages is None else np.concatenate([blocks, new]))
    changed = blocks[(found[: len(blocks)] != fingerprints[blocks]).any(axis=1)]
    fingerprints[blocks], fingerprints[n_known:] = found[: len(blocks)], found[len(blocks) :]
    return [*changed.tolist(), *new.tolist()]


class BlockReader:
    """Reads arrays of a data file; every block is checked before it is used."""

    def __init__(self, data: Bytes, index: Array, records: Mapping[str, ArrayRecord], path: Path) -> None:
        self.data = data
        self.index = index
        self.records = dict(records)
        self.path = path
        self.fingerprints = np.zeros((len(index), 2), np.uint64)

    def read(self, name: str, printed: bool = False) -> Array:
        """The array ``name``, in memory of its own; ``printed`` where it will be saved again."""
        record = self.records.get(name)
        if record is None:
            raise FileFormatError(f"{self.path} has no array {name!r}")
        out = self.room(record)
        flat: Bytes = out.reshape(-1).view(np.uint8)
        bad = self.copy_blocks(record, flat)
        if len(bad):
            raise DamagedFileError(
                f"{self.path}: {len(bad)} of {record.n_blocks} blocks of {name!r} are damaged, the first at byte "
                f"{self.index['offset'][record.first + bad[0]]}; 'sb3-extra-buffers repair' keeps what is whole"
            )
        if printed:
            self.fingerprints[record.first : record.first + record.n_blocks] = fingerprints_of(flat)
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

    def room(self, record: ArrayRecord) -> Array:
        """Memory for an array; the index has as many blocks as it needs."""
        try:
            if record.nbytes < 1 << 16:
                return np.zeros(record.shape, record.dtype)
            return zeros(record.shape, record.dtype)
        except (OSError, MemoryError, OverflowError, ValueError) as problem:
            raise FileFormatError(f"no room for an array of {record.shape} {record.dtype}: {problem}") from problem


def read_index(data: Bytes, record: Any, path: Path) -> Array:
    """The index that ``record`` points to."""
    offset, count, crc = (whole(entry(record, name), name, stop=1 << 59) for name in ("offset", "n_blocks", "crc32"))
    found = data[offset : offset + count * INDEX.itemsize]
    if found.size != count * INDEX.itemsize or zlib.crc32(found.data) != crc:
        raise DamagedFileError(f"{path}: the index at byte {offset} is damaged; 'sb3-extra-buffers repair' may help")
    return found.view(INDEX)
