"""Records appended to a file, each of which is there as a whole or not at all."""

from __future__ import annotations

import json
import math
import secrets
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import DamagedFileError, FileWriteError, NotSaveableError
from sb3_extra_buffers.files import disk
from sb3_extra_buffers.stores.checks import entry, only_named_errors, parse_dtype, parse_shape, require

__all__ = ["Journal", "read_journal"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

#: first bytes of every record
MAGIC = b"SEBr"
# magic, id of the journal, number of the record, length and checksum of the body, how many sectors of it are zeros;
# then the checksum of these
_FIELDS = struct.Struct("<4s8sQIII")
_HEADER_BYTES = _FIELDS.size + 4
_MOST_BYTES = 1 << 31
# what a disk writes as a whole
_SECTOR = 512


class Journal:
    """Appends records; each is a JSON object and some arrays.

    When `append` returns, the record outlives the process, and with ``sync`` a power cut as well. An append that fails
    leaves the file as it was; where even that fails, `broken` says that nothing may be appended any more.
    """

    def __init__(self, path: str | Path, sync: bool = False, new: bool = True) -> None:
        self.path, self.sync, self.broken, self._descriptor = Path(path), sync, False, -1
        records = [] if new else list(_scan(disk.map_file(self.path), self.path))
        # both at once: what interrupts the one may not tell the other apart
        self._size = (len(records), records[-1].end if records else 0)
        self._id = records[0].journal if records else secrets.token_bytes(8)
        with disk.named_errors(self.path, f"opening {self.path.name}"):
            self._descriptor = disk.create(self.path) if new else disk.open_to_append(self.path)
            if not new:
                disk.truncate(self._descriptor, self.n_bytes)
            if sync:
                disk.fsync(self._descriptor)
                disk.sync_folder(self.path.parent)

    @classmethod
    def reopen(cls, path: str | Path, sync: bool = False) -> Journal:
        """Go on behind the last whole record of a journal that is there; what follows it is cut off."""
        return cls(path, sync, new=False)

    @property
    def n_records(self) -> int:
        return self._size[0]

    @property
    def n_bytes(self) -> int:
        return self._size[1]

    def append(self, words: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
        """Write one record."""
        if self.broken or self._descriptor < 0:
            raise FileWriteError(5, f"{self.path} cannot be appended to after a failed write; begin another journal")
        for array in arrays:
            if array.dtype.kind not in "biufc":
                raise NotSaveableError(f"an array of dtype {array.dtype} has no place in a journal; numbers have")
        listed = [[array.dtype.str, list(array.shape)] for array in arrays]
        try:
            text = json.dumps({"words": words, "arrays": listed}, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError) as problem:
            raise NotSaveableError(f"a record of a journal is JSON and arrays: {problem}") from problem
        body = b"".join([len(text).to_bytes(4, "little"), text, *(array.tobytes() for array in arrays)])
        if len(body) >= _MOST_BYTES:
            raise NotSaveableError(f"a record of {len(body)} bytes is too long for a journal")
        n_zeros = _zero_sectors(np.frombuffer(body, np.uint8), self.n_bytes + _HEADER_BYTES)
        fields = _FIELDS.pack(MAGIC, self._id, self.n_records, len(body), zlib.crc32(body), n_zeros)
        try:
            with disk.named_errors(self.path, f"appending to {self.path.name}"):
                disk.write_all(self._descriptor, [fields, zlib.crc32(fields).to_bytes(4, "little"), body])
                if self.sync:
                    disk.fsync(self._descriptor)
            self._size = self.n_records + 1, self.n_bytes + _HEADER_BYTES + len(body)
        except BaseException:
            self._cut(self.n_bytes)
            raise

    def truncate(self, n_bytes: int, n_records: int | None = None) -> None:
        """Drop what was appended since the journal had ``n_bytes`` and ``n_records`` (one less, unless it is given)."""
        n_records = self.n_records - (n_bytes < self.n_bytes) if n_records is None else n_records
        self._cut(n_bytes)
        if self.broken:
            raise FileWriteError(5, f"{self.path} cannot be cut back; begin another journal")
        self._size = n_records, n_bytes

    def _cut(self, n_bytes: int) -> None:
        try:
            disk.truncate(self._descriptor, n_bytes)
            if self.sync:
                disk.fsync(self._descriptor)
        except OSError:
            # half a record may only be the last thing in the file
            self.broken = True

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        with disk.named_errors(self.path, f"writing {self.path.name}"):
            disk.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            disk.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


class _Record(NamedTuple):
    journal: bytes
    number: int
    begin: int
    end: int
    body: Bytes


def read_journal(path: str | Path) -> Iterator[tuple[dict[str, Any], list[Array]]]:
    """Every record that was written as a whole.

    What a crash or a power cut left of the last record is dropped. A record that is damaged in any other way, or that
    others follow, is a `DamagedFileError`, raised after the records before it.
    """
    path = Path(path)
    for record in _scan(disk.map_file(path), path):
        yield _parse(record.body.tobytes(), path, record)


def _scan(data: Bytes, path: Path) -> Iterator[_Record]:
    at = number = 0
    journal: bytes | None = None
    while at < data.size:
        record = _record_at(data, at)
        if record is None or record.number != number or (journal is not None and record.journal != journal):
            if _is_torn(data, at, number, journal):
                return
            raise DamagedFileError(
                f"{path}: record {number} at byte {at} is damaged; 'sb3-extra-buffers repair' keeps the records before"
            )
        yield record
        journal, at, number = record.journal, record.end, number + 1


def _record_at(data: Bytes, at: int) -> _Record | None:
    """The whole record that begins at ``at``, if there is one."""
    fields = _fields_at(data, at)
    begin = at + _HEADER_BYTES
    if fields is None or begin + fields[2] > data.size:
        return None
    journal, number, length, crc, _ = fields
    body = data[begin : begin + length]
    return _Record(journal, number, at, begin + length, body) if zlib.crc32(body.tobytes()) == crc else None


def _fields_at(data: Bytes, at: int) -> tuple[bytes, int, int, int, int] | None:
    """What the header at ``at`` says, if it is one."""
    head = data[at : at + _HEADER_BYTES].tobytes()
    if len(head) < _HEADER_BYTES or head[:4] != MAGIC:
        return None
    if zlib.crc32(head[: _FIELDS.size]) != int.from_bytes(head[_FIELDS.size :], "little"):
        return None
    _, *fields = _FIELDS.unpack_from(head)
    return tuple(fields)


def _is_torn(data: Bytes, at: int, number: int, journal: bytes | None) -> bool:
    """Whether what begins at ``at`` is the last record, and was never written as a whole.

    A disk writes whole sectors: those that it did not get to are missing, or read as zeros.
    """
    text = data[at:].tobytes()
    found = text.find(MAGIC, 1)
    while found >= 0:
        follower = _record_at(data, at + found)
        if follower is not None and follower.number >= number and journal in (None, follower.journal):
            return False
        found = text.find(MAGIC, found + 1)
    head = data[at : at + _HEADER_BYTES]
    if head.size < _HEADER_BYTES or _zero_sectors(head, at):
        return True
    fields = _fields_at(data, at)
    if fields is None or fields[1] != number or journal not in (None, fields[0]):
        return False
    begin, length, n_zeros = at + _HEADER_BYTES, fields[2], fields[4]
    return begin + length > data.size or _zero_sectors(data[begin : begin + length], begin) > n_zeros


def _zero_sectors(part: Bytes, offset: int) -> int:
    """How many of the sectors that ``part`` lies in have nothing but zeros of it."""
    starts = np.arange(-(offset % _SECTOR), part.size, _SECTOR).clip(0)
    return int(np.count_nonzero(np.maximum.reduceat(part, starts) == 0)) if part.size else 0


def _parse(body: bytes, path: Path, record: _Record) -> tuple[dict[str, Any], list[Array]]:
    with only_named_errors(f"{path}: record {record.number}"):
        end = 4 + int.from_bytes(body[:4], "little")
        parsed, arrays = json.loads(body[4:end]), []
        for dtype, shape in parsed["arrays"]:
            kind, shape = parse_dtype(dtype), parse_shape(shape)
            count = math.prod(shape)
            require(end + count * kind.itemsize <= len(body), f"an array of {shape} {dtype} is longer than its record")
            arrays.append(np.frombuffer(body, kind, count, end).reshape(shape))
            end += count * kind.itemsize
        return entry(parsed, "words", kind=dict), arrays
