"""The manifest: what a person reads, and what makes a save count."""

from __future__ import annotations

import contextlib
import json
import os
import re
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
_TRAILER = re.compile(rb',\n "crc32": "([0-9a-f]{8})"\n\}\n')


def dump(record: dict[str, Any]) -> bytes:
    """The manifest as bytes: JSON, one line to an entry, its own checksum last."""
    parts = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in record.items()]
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


def replace(folder: Path, record: dict[str, Any], sync: bool = True) -> int:
    """Make ``record`` the manifest, all at once: before it there is the old one, after it the new one."""
    data = dump(record)
    staged, path = folder / STAGED, folder / NAME
    with staged.open("wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    with contextlib.suppress(OSError):
        # a second name for the old one; where there are no links, there is no second chance either
        (folder / PREVIOUS).unlink(missing_ok=True)
        os.link(path, folder / PREVIOUS)
    staged.replace(path)
    if sync:
        sync_folder(folder)
    return len(data)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` last, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
