"""Steps since the last checkpoint, each written as a whole before it counts."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import DamagedFileError, FileFormatError
from sb3_extra_buffers.stores.snapshot import parse_dtype

Array = npt.NDArray[Any]

# length of what follows, its checksum, number of the record; then the checksum of these three
_HEADER = struct.Struct("<IIQI")
_FIELDS = struct.Struct("<IIQ")
_MOST_BYTES = 1 << 31


class Journal:
    """Appends records; each is a few words of JSON and some arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags, 0o666)
        self.n_records = 0
        self.n_bytes = 0

    def append(self, words: dict[str, Any], arrays: list[Array]) -> None:
        """Write one record; when this returns, it outlives the process."""
        words = words | {"arrays": [[array.dtype.str, list(array.shape)] for array in arrays]}
        text = json.dumps(words, separators=(",", ":")).encode()
        parts = [len(text).to_bytes(4, "little"), text, *(np.ascontiguousarray(array).tobytes() for array in arrays)]
        body = b"".join(parts)
        fields = _FIELDS.pack(len(body), zlib.crc32(body), self.n_records)
        record = fields + zlib.crc32(fields).to_bytes(4, "little") + body
        view = memoryview(record)
        try:
            while len(view):
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            # half a record may only be the last thing in the file
            os.ftruncate(self._descriptor, self.n_bytes)
            raise
        self.n_records += 1
        self.n_bytes += len(record)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def read_journal(path: Path) -> Iterator[tuple[dict[str, Any], list[Array]]]:
    """Every record that was written as a whole; what follows the last one is the beginning of one that was not."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing; a saved buffer is its whole folder") from None
    except OSError as problem:
        raise FileFormatError(f"{path} cannot be read: {problem.strerror}") from problem
    at = number = 0
    while at + _HEADER.size <= len(data):
        length, crc, counted, header_crc = _HEADER.unpack_from(data, at)
        if zlib.crc32(data[at : at + _FIELDS.size]) != header_crc or counted != number:
            raise DamagedFileError(f"{path}: record {number} at byte {at} is damaged")
        at += _HEADER.size
        if at + length > len(data):
            return
        body = data[at : at + length]
        if zlib.crc32(body) != crc:
            raise DamagedFileError(f"{path}: record {number} at byte {at} is damaged")
        yield _parse(body, path)
        at += length
        number += 1


def _parse(body: bytes, path: Path) -> tuple[dict[str, Any], list[Array]]:
    try:
        end = 4 + int.from_bytes(body[:4], "little")
        words = json.loads(body[4:end])
        arrays = []
        for dtype, shape in words.pop("arrays"):
            kind = parse_dtype(dtype)
            count = int(np.prod(np.array(shape, object), dtype=object)) if shape else 1
            if not all(type(n) is int and n >= 0 for n in shape) or end + count * kind.itemsize > len(body):
                raise FileFormatError(f"{path}: an array of {shape} {dtype} is longer than its record")
            arrays.append(np.frombuffer(body, kind, count, end).reshape(shape))
            end += count * kind.itemsize
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        if isinstance(problem, FileFormatError):
            raise
        raise FileFormatError(f"{path} holds a record that makes no sense: {problem}") from problem
    return words, arrays
