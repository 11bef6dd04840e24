"""A recording as one file: a zip archive of plain arrays and a manifest in JSON."""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import DamagedFileError, FileFormatError, UnsupportedVersionError
from sb3_extra_buffers.recording.buffers import BaseRecordBuffer, FramelessRecordBuffer, RecordBuffer
from sb3_extra_buffers.recording.columns import Column

FORMAT_VERSION = 1
# frames that are decoded, and deflated, at once
_BLOCK = 256

_Buffer = TypeVar("_Buffer", bound=BaseRecordBuffer)


def save(buffer: BaseRecordBuffer, path: str | os.PathLike[str]) -> Path:
    """Write ``buffer``; what was at ``path`` before is replaced when all is written."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.part")
    places = buffer._order()
    manifest: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "kind": buffer.kind,
        "size": buffer.size,
        "n_records": len(buffer),
        "ended": buffer._ended,
        "features": None if buffer._features is None else list(buffer._features),
        "columns": {},
    }
    try:
        with zipfile.ZipFile(staged, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            if isinstance(buffer, RecordBuffer):
                manifest["frames"] = {
                    "res": buffer.res,
                    "ch_num": buffer.ch_num,
                    "dtype": buffer.dtype.str,
                    "shape": buffer.frame_shape,
                    "compression_method": buffer.compression_method,
                    "compression_kwargs": buffer.compression_kwargs,
                }
                for start in range(0, len(buffer), _BLOCK):
                    _put(archive, f"frames/{start}", buffer._read_frame(places[start : start + _BLOCK]))
            for name, array in (
                ("rewards", buffer._rewards),
                ("dones", buffer._dones),
                ("starts", buffer._starts),
            ):
                _put(archive, name, array[places])
            for number, (name, column) in enumerate(_columns(buffer).items()):
                leaves = [[list(path), f"columns/{number}.{leaf}"] for leaf, path in enumerate(column.arrays)]
                manifest["columns"][name] = {"shape": column.shape, "leaves": leaves}
                for (_, place), array in zip(leaves, column.arrays.values(), strict=True):
                    _put(archive, str(place), array[places])
            archive.writestr("manifest.json", json.dumps(manifest, indent=2))
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)
    return target


def _columns(buffer: BaseRecordBuffer) -> dict[str, Column]:
    features = {f"feature:{name}": column for name, column in (buffer._features or {}).items()}
    return {"action": buffer._actions} | features


def _put(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def load(cls: type[_Buffer], path: str | os.PathLike[str], compression_method: str | None = None) -> _Buffer:
    """Read the buffer at ``path``, which must be a ``cls``."""
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read("manifest.json"))
            version = manifest["format"]
            if version > FORMAT_VERSION:
                raise UnsupportedVersionError(
                    f"{path} was written in version {version} of its format, the newest known here is "
                    f"{FORMAT_VERSION}; update sb3-extra-buffers"
                )
            return _read(cls, path, manifest, archive, compression_method)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, json.JSONDecodeError) as error:
        raise DamagedFileError(f"{path} is no recording, or is damaged: {error}") from error


def _read(
    cls: type[_Buffer],
    path: Any,
    manifest: dict[str, Any],
    archive: zipfile.ZipFile,
    compression_method: str | None,
) -> _Buffer:
    kinds: dict[str, type[BaseRecordBuffer]] = {made.kind: made for made in (RecordBuffer, FramelessRecordBuffer)}
    made = kinds.get(manifest["kind"])
    if made is None or not issubclass(made, cls):
        raise FileFormatError(
            f"{path} holds a recording of kind {manifest['kind']!r}, which is no {cls.__name__}; "
            "BaseRecordBuffer.load reads any"
        )
    n = manifest["n_records"]
    buffer: Any
    if made is RecordBuffer:
        about = manifest["frames"]
        options = about["compression_kwargs"] if compression_method is None else None
        buffer = RecordBuffer(
            tuple(about["res"]),
            about["ch_num"],
            manifest["size"],
            dtype=about["dtype"],
            compression_method=compression_method or about["compression_method"],
            compression_kwargs=options,
        )
        buffer._frames = buffer._make_frames(tuple(about["shape"]))
        for start in range(0, n, _BLOCK):
            block = _get(archive, f"frames/{start}")
            for offset, frame in enumerate(block):
                buffer._frames[start + offset] = frame
    else:
        buffer = made(size=manifest["size"])
    for name in ("rewards", "dones", "starts"):
        getattr(buffer, f"_{name}")[:n] = _get(archive, name)
    buffer._n_added, buffer._ended = n, manifest["ended"]
    names = manifest["features"]
    buffer._features = None if names is None else {name: Column(f"feature {name!r}", buffer.size) for name in names}
    for name, column in _columns(buffer).items():
        about = manifest["columns"][name]
        column.shape = about["shape"]
        for parts, place in about["leaves"]:
            rows = _get(archive, place)
            column.arrays[tuple(parts)] = np.zeros((buffer.size, *rows.shape[1:]), rows.dtype)
            column.arrays[tuple(parts)][:n] = rows
    result: _Buffer = buffer
    return result


def _get(archive: zipfile.ZipFile, name: str) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.lib.format.read_array(io.BytesIO(archive.read(f"{name}.npy")), allow_pickle=False)
    return array
