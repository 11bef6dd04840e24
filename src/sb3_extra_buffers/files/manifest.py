"""The manifest: what a person reads, and what makes a save count."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import DamagedFileError, ExtraBuffersError, FileFormatError, UnsupportedVersionError
from sb3_extra_buffers.files import disk

NAME = "manifest.json"
STAGED = "manifest.json.tmp"
FORMAT = "sb3-extra-buffers"
#: version of the format; a reader refuses newer ones. The first was that of development versions
VERSION = 2

_MOST_BYTES = 1 << 26
_TAIL = struct.Struct("<8sQQI")
_TAIL_MAGIC = b"SEBsaved"
TAIL_BYTES = _TAIL.size + 4
_to_json = json.JSONEncoder(allow_nan=False).encode
_TRAILER = re.compile(rb',\n "crc32": "([0-9a-f]{8})"\n\}\n')


def dump(record: dict[str, Any]) -> bytes:
    """The manifest as bytes: JSON, one line to an entry, its own checksum last."""
    parts = [f" {_to_json(key)}: {_to_json(value)}" for key, value in record.items()]
    body = ("{\n" + ",\n".join(parts)).encode()
    return body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def parse(data: bytes, path: Path) -> dict[str, Any]:
    """Undo `dump`, or say what is wrong with it."""
    trailer = _TRAILER.search(data, max(len(data) - 32, 0))
    if trailer is None or trailer.end() != len(data):
        raise DamagedFileError(f"{path} does not end as it should; it was cut short or changed")
    if zlib.crc32(data[: trailer.start()]) != int(trailer[1], 16):
        raise DamagedFileError(f"{path} is not what was written: its checksum differs")
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise FileFormatError(f"{path} is no JSON: {problem}") from problem
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise FileFormatError(f"{path} is no manifest of a saved buffer")
    del record["crc32"]
    version = record.get("version")
    if type(version) is not int or version < VERSION:
        raise FileFormatError(f"{path} was written by a development version and is not read any more")
    if version > VERSION:
        raise UnsupportedVersionError(
            f"{path} has version {version} of the format, the newest known here is {VERSION}; update sb3-extra-buffers"
        )
    return record


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a saved buffer."""
    path = folder / NAME
    if not folder.is_dir() or not os.path.lexists(path):
        what = "this is a file; a saved buffer is a folder" if folder.is_file() else f"there is no {NAME}"
        raise FileFormatError(f"{folder} is no saved buffer: {what if folder.exists() else 'there is nothing'}")
    return parse(disk.read_bytes(path, _MOST_BYTES), path)


def replace(folder: Path, data: bytes, sync: bool = True) -> None:
    """Make ``data`` the manifest, all at once; it lasts when the folder is synced."""
    staged = folder / STAGED
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(staged)
    descriptor = disk.create(staged)
    try:
        try:
            disk.write_all(descriptor, [data])
            if sync:
                disk.fsync(descriptor)
        finally:
            disk.close(descriptor)
        disk.replace(staged, folder / NAME)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(staged)
        raise


# ---- copies in a data file ----


def tail(data: bytes, offset: int) -> bytes:
    """What is written behind a copy of the manifest at ``offset``, so that it can be found from the end."""
    fields = _TAIL.pack(_TAIL_MAGIC, offset, len(data), zlib.crc32(data))
    return fields + zlib.crc32(fields).to_bytes(4, "little")


def read_tail(path: Path) -> dict[str, Any]:
    """The manifest at the end of a data file."""
    data = disk.map_file(path)
    record = _copy_at(data, data.size - TAIL_BYTES, path)
    if record is None:
        raise DamagedFileError(f"{path} does not end as a saved file does; it was cut short or changed")
    return record


def copies(path: Path) -> Iterator[dict[str, Any]]:
    """Every manifest in a data file that is whole, newest first."""
    data = disk.map_file(path)
    text = data.tobytes()
    at = text.rfind(_TAIL_MAGIC)
    while at >= 0:
        record = None
        with contextlib.suppress(ExtraBuffersError):
            record = _copy_at(data, at, path)
        if record is not None:
            yield record
        at = text.rfind(_TAIL_MAGIC, 0, at)


def _copy_at(data: npt.NDArray[np.uint8], at: int, path: Path) -> dict[str, Any] | None:
    end = data[max(at, 0) : at + TAIL_BYTES].tobytes()
    if len(end) < TAIL_BYTES:
        return None
    magic, offset, length, crc = _TAIL.unpack_from(end)
    if magic != _TAIL_MAGIC or zlib.crc32(end[: _TAIL.size]) != int.from_bytes(end[_TAIL.size :], "little"):
        return None
    if length > _MOST_BYTES or offset + length > at:
        return None
    copy = data[offset : offset + length].tobytes()
    return parse(copy, path) if zlib.crc32(copy) == crc else None
