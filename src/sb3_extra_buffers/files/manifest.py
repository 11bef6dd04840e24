"""The manifest: what a person reads, and what makes a save count."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import zlib
from pathlib import Path
from typing import Any

from sb3_extra_buffers.errors import DamagedFileError, FileFormatError, UnsupportedVersionError

NAME = "manifest.json"
#: the manifest before this one; what it speaks of is still there, most of the time
PREVIOUS = "manifest.previous.json"
STAGED = "manifest.json.tmp"
FORMAT = "sb3-extra-buffers"
#: version of the format; a reader refuses newer ones
VERSION = 1

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
    version = record.get("version")
    if type(version) is not int or version < 1:
        raise FileFormatError(f"{path} has no version")
    if version > VERSION:
        raise UnsupportedVersionError(
            f"{path} has version {version} of the format, the newest known here is {VERSION}; update sb3-extra-buffers"
        )
    return record


def read(folder: Path, name: str = NAME) -> dict[str, Any]:
    """The manifest of a saved buffer."""
    path = folder / name
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise FileFormatError(f"{path} is too large to be a manifest")
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if not folder.exists():
            what = "there is nothing"
        elif not folder.is_dir():
            what = "this is a file; a saved buffer is a folder"
        else:
            what = f"there is no {name}"
        raise FileFormatError(f"{folder} is no saved buffer: {what}") from None
    except OSError as problem:
        raise FileFormatError(f"{path} cannot be read: {problem.strerror}") from problem
    return parse(data, path)


def replace(folder: Path, data: bytes, sync: bool = True) -> None:
    """Make ``data`` the manifest, all at once: before it there is the old one, after it the new one."""
    staged, path, previous = (f"{folder}{os.sep}{name}" for name in (STAGED, NAME, PREVIOUS))
    descriptor = _stage(staged, previous)
    try:
        view = memoryview(data)
        while len(view):
            view = view[os.write(descriptor, view) :]
        os.ftruncate(descriptor, len(data))
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        # a second name for the old one; where there are no links, there is no second chance either
        os.link(path, previous)
    os.replace(staged, path)


def _stage(staged: str, previous: str) -> int:
    """A file to write the next manifest to: the one before the last, written over where nobody else has a name for it.

    A new file in place of an old one makes some file systems write it out and wait, which takes longer than the rest
    of a small save.
    """
    with contextlib.suppress(OSError):
        os.replace(previous, staged)
    flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0)
    descriptor = os.open(staged, flags, 0o666)
    if os.fstat(descriptor).st_nlink == 1:
        return descriptor
    os.close(descriptor)
    os.unlink(staged)
    return os.open(staged, flags | os.O_EXCL, 0o666)


# ---- the copy at the end of a data file ----


def tail(data: bytes, offset: int) -> bytes:
    """What is written behind a copy of the manifest at ``offset``, so that it can be found from the end."""
    fields = _TAIL.pack(_TAIL_MAGIC, offset, len(data), zlib.crc32(data))
    return fields + zlib.crc32(fields).to_bytes(4, "little")


def read_tail(path: Path) -> dict[str, Any] | None:
    """The manifest at the end of a data file, if there is a whole one."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size < TAIL_BYTES:
                return None
            file.seek(size - TAIL_BYTES)
            end = file.read(TAIL_BYTES)
            magic, offset, length, crc = _TAIL.unpack_from(end)
            if magic != _TAIL_MAGIC or zlib.crc32(end[: _TAIL.size]) != int.from_bytes(end[_TAIL.size :], "little"):
                return None
            if length > _MOST_BYTES or offset + length > size:
                return None
            file.seek(offset)
            data = file.read(length)
        if zlib.crc32(data) != crc:
            return None
        return parse(data, path)
    except (OSError, DamagedFileError, FileFormatError):
        return None


def newest(folder: Path) -> dict[str, Any]:
    """The manifest of the last save that was completed.

    A save is on the disk once its data file is, with a copy of the manifest at its end; the manifest itself may follow
    later. Where the two differ, the one that was written last counts.
    """
    found: dict[str, Any] | None = None
    problem: DamagedFileError | None = None
    try:
        found = read(folder)
    except DamagedFileError as error:
        problem = error
    if found is not None:
        data = found.get("data")
        name = data.get("name") if isinstance(data, dict) else None
        ends = [read_tail(folder / name)] if isinstance(name, str) and "/" not in name and "\\" not in name else []
        newer = [
            end
            for end in ends
            if end is not None and end.get("folder_id") == found.get("folder_id") and _number(end) > _number(found)
        ]
        return newer[0] if newer else found
    whole = [end for path in folder.glob("data-*.bin") if (end := read_tail(path)) is not None and _names(end, path)]
    if not whole or problem is None:
        raise problem or DamagedFileError(f"{folder} has no manifest that is whole")
    return max(whole, key=_number)


def _number(record: dict[str, Any]) -> int:
    number = record.get("number")
    return number if type(number) is int else -1


def _names(record: dict[str, Any], path: Path) -> bool:
    data = record.get("data")
    return isinstance(data, dict) and data.get("name") == path.name


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` last, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
