"""The manifest: JSON that describes a save; replacing it atomically is what commits one."""

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
from sb3_extra_buffers.files.blocks import MAGIC

NAME = "manifest.json"
STAGED = "manifest.json.tmp"
FORMAT = "sb3-extra-buffers"
#: version of the format; newer ones are refused. Version 1 was never released
VERSION = 2
#: names of the files of a saved folder; no other file in it is ever opened or deleted
FILE_NAMES = re.compile(r"data-\d{4,9}\.bin|heap-\d{1,9}-\d{4,9}\.bin|journal-\d{4,9}\.bin|manifest\.json(\.tmp)?|lock")

_MAX_BYTES = 1 << 26
_TAIL = struct.Struct("<8sQQI")
_TAIL_MAGIC = b"SEBsaved"
TAIL_BYTES = _TAIL.size + 4
_to_json = json.JSONEncoder(allow_nan=False).encode
_TRAILER = re.compile(rb',\n "crc32": "([0-9a-f]{8})"\n\}\n')


def dump(record: dict[str, Any]) -> bytes:
    """The manifest as bytes: JSON with one line per entry, its own checksum last."""
    lines = [f" {_to_json(key)}: {_to_json(value)}" for key, value in record.items()]
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def parse(data: bytes, path: Path) -> dict[str, Any]:
    """The inverse of `dump`."""
    trailer = _TRAILER.search(data, max(len(data) - 32, 0))
    if trailer is None or trailer.end() != len(data):
        raise DamagedFileError(f"{path} was cut short or changed: it does not end with a checksum")
    if zlib.crc32(data[: trailer.start()]) != int(trailer[1], 16):
        raise DamagedFileError(f"{path} is damaged: its checksum does not match")
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise FileFormatError(f"{path} is not the manifest of a saved buffer")
    del record["crc32"]
    version = record.get("version")
    if type(version) is not int or version < VERSION:
        raise FileFormatError(f"{path} was written by a development version, which is not supported any more")
    if version > VERSION:
        raise UnsupportedVersionError(
            f"{path} has format version {version}, but this release reads up to {VERSION}; update sb3-extra-buffers"
        )
    return record


def read(folder: Path) -> dict[str, Any]:
    """Read the manifest of a saved folder."""
    path = folder / NAME
    check_is_saved(folder)
    if not folder.is_dir():
        raise FileFormatError(f"{folder} is a file; a saved buffer is a folder. Single files are read by load_file()")
    if not os.path.lexists(path):
        raise DamagedFileError(f"{path} is missing; repair() may be able to restore it")
    return parse(disk.read_bytes(path, _MAX_BYTES), path)


def check_is_saved(path: Path) -> None:
    """Raise unless ``path`` is a folder or file that this library wrote, intact or damaged."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        raise FileFormatError(f"{path}: no such file or directory") from None
    except NotADirectoryError:
        _check_is_saved_file(path)
        return
    except OSError as error:
        raise FileFormatError(f"{path} cannot be read: {error.strerror}") from error
    if any(FILE_NAMES.fullmatch(name) and name.endswith(".bin") for name in names):
        return
    if NAME not in names:
        inside = [name for name in sorted(names) if (path / name / NAME).is_file()]
        hint = f"; it contains {path / inside[-1]}, which may be one" if inside else ""
        raise FileFormatError(f"{path} is not a saved buffer: it has no {NAME}{hint}")
    if FORMAT.encode() not in disk.read_bytes(path / NAME, _MAX_BYTES):
        raise FileFormatError(f"{path} is not a saved buffer: its {NAME} was written by another program")


def _check_is_saved_file(path: Path) -> None:
    if not path.exists():
        # below a file, as in "file.txt/folder"
        raise FileFormatError(f"{path}: no such file or directory")
    try:
        with os.fdopen(disk.open_to_read(path), "rb") as file:
            start = file.read(len(MAGIC))
            file.seek(-min(TAIL_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
            end = file.read(len(_TAIL_MAGIC))
    except OSError as error:
        raise FileFormatError(f"{path} cannot be read: {error.strerror}") from error
    if not start:
        raise DamagedFileError(f"{path} is empty")
    if start == MAGIC or end == _TAIL_MAGIC:
        return
    if start.startswith(b"\x80") or path.suffix in (".pkl", ".pickle"):
        raise FileFormatError(
            f"{path} is a pickle, not a saved buffer; convert it first: sb3-extra-buffers convert {path} FOLDER --trust"
        )
    raise FileFormatError(f"{path} is not a saved buffer")


def write(folder: Path, data: bytes, sync: bool = True) -> None:
    """Replace the manifest atomically by ``data``; durable once the folder is synced."""
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


# ---- names of files ----


def check_file_name(name: Any, stem: str) -> str:
    """``name``, if it is one of a ``stem`` file ("data", "heap", "journal") and not a path to somewhere else."""
    number = r"\d{1,9}-" if stem == "heap" else ""
    if not isinstance(name, str) or not re.fullmatch(rf"{stem}-{number}\d{{4,9}}\.bin", name, re.ASCII):
        raise FileFormatError(f"{name!r} is not the name of a {stem} file")
    return name


def next_file(folder: Path, stem: str) -> Path:
    """The path of a new ``stem`` file, numbered after those in the folder."""
    numbers = [path.stem.rsplit("-", 1)[1] for path in folder.glob(f"{stem}-*.bin")]
    return folder / f"{stem}-{1 + max((int(number) for number in numbers if number.isdigit()), default=0):04}.bin"


# ---- copies in a data file ----


def tail(data: bytes, offset: int) -> bytes:
    """The bytes that follow a copy of the manifest at ``offset``, so that it can be found from the end."""
    fields = _TAIL.pack(_TAIL_MAGIC, offset, len(data), zlib.crc32(data))
    return fields + zlib.crc32(fields).to_bytes(4, "little")


def read_tail(path: Path) -> dict[str, Any]:
    """Read the manifest at the end of a data file."""
    check_is_saved(path)
    data = disk.map_file(path)
    record = _copy_at(data, data.size - TAIL_BYTES, path)
    if record is None:
        raise DamagedFileError(f"{path} was cut short or changed: it does not end with a manifest")
    return record


def copies(path: Path) -> Iterator[dict[str, Any]]:
    """Every intact manifest in a data file, newest first."""
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


def newest_copy(folder: Path) -> dict[str, Any] | None:
    """The newest intact manifest in the data files of ``folder``; None if no save there was ever complete."""
    for path in sorted(folder.glob("data-*.bin"), reverse=True):
        if FILE_NAMES.fullmatch(path.name):
            for record in copies(path):
                return record
    return None


def _copy_at(data: npt.NDArray[np.uint8], at: int, path: Path) -> dict[str, Any] | None:
    end = data[max(at, 0) : at + TAIL_BYTES].tobytes()
    if len(end) < TAIL_BYTES:
        return None
    magic, offset, length, crc = _TAIL.unpack_from(end)
    if magic != _TAIL_MAGIC or zlib.crc32(end[: _TAIL.size]) != int.from_bytes(end[_TAIL.size :], "little"):
        return None
    if length > _MAX_BYTES or offset + length > at:
        return None
    copy = data[offset : offset + length].tobytes()
    return parse(copy, path) if zlib.crc32(copy) == crc else None
