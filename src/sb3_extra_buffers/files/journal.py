"""An append-only file of records, each of which is there entirely or not at all."""

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
# magic and the fields of `_Header`; its checksum follows
_HEADER = struct.Struct("<4s8sQIII")
_HEADER_BYTES = _HEADER.size + 4
_MAX_BYTES = 1 << 31
# the unit that a disk writes atomically
_SECTOR = 512


class Journal(disk.OpenFile):
    """Appends records, each a JSON object and some arrays.

    When `append` returns, the record survives the end of the process; with ``sync`` also a power cut. A failed append
    leaves the file as it was; if even that fails, `broken` is set and nothing more can be appended.
    """

    def __init__(self, path: str | Path, sync: bool = False, new: bool = True) -> None:
        self.path, self.sync, self.broken = Path(path), sync, False
        records = [] if new else list(_scan(disk.map_file(self.path), self.path))
        # one tuple, so that an interrupt cannot separate the two
        self._size = (len(records), records[-1].end if records else 0)
        self._id = records[0].header.journal_id if records else secrets.token_bytes(8)
        with disk.named_errors(self.path, f"opening {self.path.name}"):
            self.descriptor = disk.create(self.path) if new else disk.open_to_append(self.path)
            if not new:
                disk.truncate(self.descriptor, self.n_bytes)
            if sync:
                disk.fsync(self.descriptor)
                disk.sync_folder(self.path.parent)

    @classmethod
    def reopen(cls, path: str | Path, sync: bool = False) -> Journal:
        """Continue an existing journal after its last complete record; anything behind it is cut off."""
        return cls(path, sync, new=False)

    @property
    def n_records(self) -> int:
        return self._size[0]

    @property
    def n_bytes(self) -> int:
        return self._size[1]

    def append(self, fields: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
        """Write one record."""
        if self.broken or self.descriptor < 0:
            raise FileWriteError(5, f"{self.path} cannot be appended to after a failed write; begin another journal")
        for array in arrays:
            if array.dtype.kind not in "biufc":
                raise NotSaveableError(f"a journal cannot hold an array of dtype {array.dtype}, only numbers and bools")
        described = [[array.dtype.str, list(array.shape)] for array in arrays]
        try:
            text = json.dumps({"words": fields, "arrays": described}, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise NotSaveableError(f"the fields of a record are not JSON: {error}") from error
        body = b"".join([len(text).to_bytes(4, "little"), text, *(array.tobytes() for array in arrays)])
        if len(body) >= _MAX_BYTES:
            raise NotSaveableError(f"a record of {len(body)} bytes exceeds the {_MAX_BYTES - 1} of a journal")
        n_zeros = _count_zero_sectors(np.frombuffer(body, np.uint8), self.n_bytes + _HEADER_BYTES)
        header = _HEADER.pack(MAGIC, self._id, self.n_records, len(body), zlib.crc32(body), n_zeros)
        try:
            with disk.named_errors(self.path, f"appending to {self.path.name}"):
                disk.write_all(self.descriptor, [header, zlib.crc32(header).to_bytes(4, "little"), body])
                if self.sync:
                    disk.fsync(self.descriptor)
            self._size = self.n_records + 1, self.n_bytes + _HEADER_BYTES + len(body)
        except BaseException:
            self._cut(self.n_bytes)
            raise

    def truncate(self, n_bytes: int, n_records: int) -> None:
        """Drop everything after the first ``n_bytes``, which hold ``n_records`` records."""
        self._cut(n_bytes)
        if self.broken:
            raise FileWriteError(5, f"{self.path} cannot be truncated; begin another journal")
        self._size = n_records, n_bytes

    def _cut(self, n_bytes: int) -> None:
        try:
            disk.truncate(self.descriptor, n_bytes)
            if self.sync:
                disk.fsync(self.descriptor)
        except OSError:
            # a partial record may only be the last thing in the file
            self.broken = True

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        with disk.named_errors(self.path, f"writing {self.path.name}"):
            disk.fsync(self.descriptor)


class _Header(NamedTuple):
    journal_id: bytes
    number: int
    n_bytes: int
    """Length of the body."""
    crc32: int
    """Checksum of the body."""
    n_zeros: int
    """Sectors of the body that hold only zeros, as sectors that a disk never wrote do."""


class _Record(NamedTuple):
    header: _Header
    body: Bytes
    end: int


def read_journal(path: str | Path) -> Iterator[tuple[dict[str, Any], list[Array]]]:
    """Yield every complete record as ``fields, arrays``.

    A last record that a crash or power cut left incomplete is dropped. Any other damage is a `DamagedFileError`,
    raised after the records before it.
    """
    path = Path(path)
    for record in _scan(disk.map_file(path), path):
        yield _parse(record, path)


def _scan(data: Bytes, path: Path) -> Iterator[_Record]:
    offset = number = 0
    journal_id: bytes | None = None
    while offset < data.size:
        record = _record_at(data, offset)
        if record is None or not _follows(record.header, number, journal_id):
            if _is_torn(data, offset, number, journal_id):
                return
            raise DamagedFileError(
                f"{path}: record {number} at byte {offset} is damaged; 'sb3-extra-buffers repair' saves the records "
                "before it"
            )
        yield record
        journal_id, offset, number = record.header.journal_id, record.end, number + 1


def _follows(header: _Header, number: int, journal_id: bytes | None) -> bool:
    """Whether this is the header of record ``number`` of the journal, or of any journal if its id is not known yet."""
    return header.number == number and journal_id in (None, header.journal_id)


def _record_at(data: Bytes, offset: int) -> _Record | None:
    """The complete record at ``offset``, if there is one."""
    header = _header_at(data, offset)
    start = offset + _HEADER_BYTES
    if header is None or start + header.n_bytes > data.size:
        return None
    body = data[start : start + header.n_bytes]
    return _Record(header, body, start + header.n_bytes) if zlib.crc32(body.tobytes()) == header.crc32 else None


def _header_at(data: Bytes, offset: int) -> _Header | None:
    """The intact header at ``offset``, if there is one."""
    head = data[offset : offset + _HEADER_BYTES].tobytes()
    if len(head) < _HEADER_BYTES or head[:4] != MAGIC:
        return None
    if zlib.crc32(head[: _HEADER.size]) != int.from_bytes(head[_HEADER.size :], "little"):
        return None
    _, *fields = _HEADER.unpack_from(head)
    return _Header(*fields)


def _is_torn(data: Bytes, offset: int, number: int, journal_id: bytes | None) -> bool:
    """Whether the bytes from ``offset`` on are a last record that was never written completely.

    A disk writes whole sectors; those it did not get to are missing or read as zeros.
    """
    text = data[offset:].tobytes()
    at = text.find(MAGIC, 1)
    while at >= 0:
        later = _record_at(data, offset + at)
        if later is not None and later.header.number >= number and journal_id in (None, later.header.journal_id):
            return False
        at = text.find(MAGIC, at + 1)
    head = data[offset : offset + _HEADER_BYTES]
    if head.size < _HEADER_BYTES or _count_zero_sectors(head, offset):
        return True
    header = _header_at(data, offset)
    if header is None or not _follows(header, number, journal_id):
        return False
    start = offset + _HEADER_BYTES
    body = data[start : start + header.n_bytes]
    return body.size < header.n_bytes or _count_zero_sectors(body, start) > header.n_zeros


def _count_zero_sectors(part: Bytes, offset: int) -> int:
    """How many of the sectors that ``part``, at ``offset`` of a file, extends over hold only zeros of it."""
    starts = np.arange(-(offset % _SECTOR), part.size, _SECTOR).clip(0)
    return int(np.count_nonzero(np.maximum.reduceat(part, starts) == 0)) if part.size else 0


def _parse(record: _Record, path: Path) -> tuple[dict[str, Any], list[Array]]:
    with only_named_errors(f"{path}: record {record.header.number}"):
        body = record.body.tobytes()
        end = 4 + int.from_bytes(body[:4], "little")
        parsed, arrays = json.loads(body[4:end]), []
        for dtype_text, shape_json in parsed["arrays"]:
            dtype, shape = parse_dtype(dtype_text), parse_shape(shape_json)
            n_bytes = math.prod(shape) * dtype.itemsize
            require(end + n_bytes <= len(body), f"an array of {shape} {dtype} is longer than its record")
            arrays.append(np.frombuffer(body, dtype, math.prod(shape), end).reshape(shape))
            end += n_bytes
        return entry(parsed, "words", kind=dict), arrays
