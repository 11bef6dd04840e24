"""What TensorDict wrote to a folder of memory-mapped files, read without running any of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import stat
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch

from sb3_extra_buffers._torchrl.schema import parse_dtype, parse_shape
from sb3_extra_buffers._torchrl.stored_tensor import bits_of, to_torch
from sb3_extra_buffers.errors import DamagedFileError, FileFormatError, MissingExtraError, UntrustedFileError
from sb3_extra_buffers.files import disk
from sb3_extra_buffers.files.saving import OURS

try:
    from tensordict import TensorDict
except ImportError as error:
    raise MissingExtraError("TensorDicts need 'tensordict': pip install 'sb3-extra-buffers[torchrl]'") from error

__all__ = ["read_json", "read_memmaps", "remove_saved", "write_json"]

_MOST_JSON = 1 << 22
_MOST_LEVELS = 32
_PLAIN = "<class 'tensordict._td.TensorDict'>"
_CPU = torch.device("cpu")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of moderate size, in a regular file."""
    try:
        found = json.loads(disk.read_bytes(path, _MOST_JSON))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, (FileFormatError, DamagedFileError)):
            raise
        raise FileFormatError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise FileFormatError(f"{path} holds no JSON object")
    return found


def write_json(path: Path, note: dict[str, Any]) -> None:
    """Replace a file by ``note``; the new one is on the disk when this returns."""
    staged = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = disk.create(staged)
    try:
        try:
            disk.write_all(descriptor, [json.dumps(note, indent=1).encode()])
            disk.fsync(descriptor)
        finally:
            disk.close(descriptor)
        disk.replace(staged, path)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(staged)
        raise
    disk.sync_folder(path.parent)


def remove_saved(folder: Path) -> None:
    """Delete what `files.save` wrote to ``folder``, and the folder if nothing else is in it; no link is followed."""
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        return
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if OURS.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                disk.unlink(Path(entry.path))
        os.rmdir(folder)


def read_memmaps(folder: Path, levels: int = _MOST_LEVELS) -> Any:
    """The TensorDict that was saved in ``folder``, its tensors mapped; tensors and nothing else.

    Only ``meta.json`` and the files and folders that it names are opened, and no links are followed. What would have
    to be unpickled or built from a class is an `UntrustedFileError`.
    """
    meta = read_json(folder / "meta.json")
    kind = meta.get("_type", _PLAIN)
    if kind != _PLAIN:
        raise UntrustedFileError(f"{folder} holds a {kind!r}, which is not built from a file; only TensorDicts are")
    shape = parse_shape(meta.get("shape", []))
    found: dict[str, Any] = {}
    for key, about in meta.items():
        if not isinstance(about, dict):
            continue
        name = quote(key, safe="")
        if name in ("", ".", ".."):
            raise FileFormatError(f"{folder}: {key!r} names no file")
        if "type" in about:
            if about["type"] != "TensorDict":
                raise UntrustedFileError(f"{folder}: {key!r} holds a {about['type']!r}; only tensors are read")
            found[key] = _read_nested(folder / name, levels)
        else:
            found[key] = _read_tensor(folder / f"{name}.memmap", about)
    try:
        return TensorDict(found, batch_size=shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise DamagedFileError(f"{folder} contradicts itself: {error}") from error


def _read_nested(folder: Path, levels: int) -> Any:
    if levels <= 0:
        raise FileFormatError(f"{folder} lies too deep")
    try:
        mode = os.lstat(folder).st_mode
    except OSError as error:
        raise DamagedFileError(f"{folder} is missing: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise UntrustedFileError(f"{folder} is a link or no folder; it is not followed")
    return read_memmaps(folder, levels - 1)


def _read_tensor(path: Path, about: dict[str, Any]) -> torch.Tensor:
    if about.get("is_nested"):
        raise FileFormatError(f"{path} holds a nested tensor, which a storage cannot")
    shape = parse_shape(about.get("shape"))
    dtype = parse_dtype(about.get("dtype"))
    count = math.prod(shape)
    if not count:
        # no file is written for these
        return torch.empty(shape, dtype=dtype)
    kind = torch.empty(0, dtype=bits_of(dtype)).numpy().dtype
    size = count * kind.itemsize
    data = disk.map_file(path, private=True)
    if data.size != size:
        raise DamagedFileError(f"{path} has {data.size} bytes where {size} were written")
    return to_torch(np.frombuffer(data, kind).reshape(shape), dtype, _CPU)
