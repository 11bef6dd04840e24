"""Folders of memory-mapped files that TensorDict wrote, read without running code from them; small JSON files."""

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
from tensordict import TensorDict

from sb3_extra_buffers._torchrl.schema import parse_tensor_shape
from sb3_extra_buffers._torchrl.tensors import as_tensor, numpy_dtype, parse_tensor_dtype
from sb3_extra_buffers.errors import DamagedFileError, FileFormatError, UntrustedFileError
from sb3_extra_buffers.files import disk
from sb3_extra_buffers.files.manifest import FILE_NAMES

__all__ = ["read_json", "read_memmaps", "remove_saved", "write_json"]

_MAX_JSON_BYTES = 1 << 22
_MAX_DEPTH = 32
_TENSORDICT = "<class 'tensordict._td.TensorDict'>"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a regular file of moderate size."""
    try:
        content = json.loads(disk.read_bytes(path, _MAX_JSON_BYTES))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, (FileFormatError, DamagedFileError)):
            raise
        raise FileFormatError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{path} does not hold a JSON object")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file by one that holds ``content``; it is on disk when this returns."""
    staged = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = disk.create(staged)
    try:
        try:
            disk.write_all(descriptor, [json.dumps(content, indent=1).encode()])
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
    """Delete the files that `files.save` wrote to ``folder``, and the folder if it is then empty; follow no links."""
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        return
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if FILE_NAMES.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                disk.unlink(Path(entry.path))
        os.rmdir(folder)


def read_memmaps(folder: Path, max_depth: int = _MAX_DEPTH) -> Any:
    """Return the TensorDict that was saved in ``folder``, with its tensors mapped from the files.

    Only ``meta.json`` and the files and folders that it names are opened, and no links are followed. Anything but
    tensors, which would have to be unpickled or built from a class, raises `UntrustedFileError`.
    """
    meta = read_json(folder / "meta.json")
    kind = meta.get("_type", _TENSORDICT)
    if kind != _TENSORDICT:
        raise UntrustedFileError(f"{folder} holds a {kind!r}; only TensorDicts are loaded from files")
    shape = parse_tensor_shape(meta.get("shape", []))
    leaves: dict[str, Any] = {}
    for key, entry in meta.items():
        if not isinstance(entry, dict):
            continue
        name = quote(key, safe="")
        if name in ("", ".", ".."):
            raise FileFormatError(f"{folder}: {key!r} cannot be the name of a file")
        if "type" not in entry:
            leaves[key] = _read_tensor(folder / f"{name}.memmap", entry)
        elif entry["type"] == "TensorDict":
            leaves[key] = _read_nested(folder / name, max_depth)
        else:
            raise UntrustedFileError(f"{folder}: {key!r} holds a {entry['type']!r}; only tensors are loaded from files")
    try:
        return TensorDict(leaves, batch_size=shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise DamagedFileError(f"the tensors in {folder} do not match its meta.json: {error}") from error


def _read_nested(folder: Path, max_depth: int) -> Any:
    if max_depth <= 0:
        raise FileFormatError(f"{folder} is nested more than {_MAX_DEPTH} levels deep")
    try:
        mode = os.lstat(folder).st_mode
    except OSError as error:
        raise DamagedFileError(f"{folder} is missing: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise UntrustedFileError(f"{folder} is not a folder; links are not followed")
    return read_memmaps(folder, max_depth - 1)


def _read_tensor(path: Path, entry: dict[str, Any]) -> torch.Tensor:
    if entry.get("is_nested"):
        raise FileFormatError(f"{path} holds a nested tensor, which a storage cannot hold")
    shape = parse_tensor_shape(entry.get("shape"))
    dtype = parse_tensor_dtype(entry.get("dtype"))
    count = math.prod(shape)
    if not count:
        # TensorDict writes no file for these
        return torch.empty(shape, dtype=dtype)
    size = count * dtype.itemsize
    data = disk.map_file(path, private=True)
    if data.size != size:
        raise DamagedFileError(f"{path} has {data.size} bytes, expected {size}")
    return as_tensor(np.frombuffer(data, numpy_dtype(dtype)).reshape(shape), dtype)
