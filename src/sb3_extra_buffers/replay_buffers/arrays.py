"""Stores and their parts as JSON and arrays, and folders of those: a manifest to read, arrays beside it; no pickle."""

from __future__ import annotations

import json
import shutil
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import codec_from_config
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import DamagedFileError, FileFormatError, NotSaveableError
from sb3_extra_buffers.stores import payloads
from sb3_extra_buffers.stores.choice import Choice
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.observation import DenseStore, ObservationStore
from sb3_extra_buffers.stores.payloads import PayloadStore
from sb3_extra_buffers.stores.segments import SegmentStore

__all__ = ["MANIFEST", "Arrays", "keep", "load_arrays", "pack_part", "save_arrays", "unpack_part"]

MANIFEST = "manifest.json"

Arrays = dict[str, Any]

# what a store is made of; nothing else is ever built from a file
_STATEFUL: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (ObservationStore, DenseStore, SegmentStore, PayloadStore, Heap, payloads._Average)
}
_VALUES: dict[str, type[Any]] = {cls.__name__: cls for cls in (ObsSpec, StackLayout, Choice)}


def keep(value: Any, arrays: Arrays) -> dict[str, Any]:
    """A note of an array, which goes to the others."""
    name = f"{len(arrays):04d}"
    arrays[name] = value
    return {"array": name}


def pack_part(value: Any, arrays: Arrays) -> Any:
    """``value`` in JSON, its arrays apart."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return keep(value, arrays)
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": keep(np.frombuffer(value, np.uint8), arrays)["array"]}
    if isinstance(value, np.dtype):
        return {"dtype": value.str}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [pack_part(part, arrays) for part in value]}
    if isinstance(value, dict):
        return {"dict": {str(key): pack_part(part, arrays) for key, part in value.items()}}
    if isinstance(value, Codec):
        return {"codec": value.name or value.codec_id, "config": pack_part(value.config(), arrays)}
    kind = type(value).__name__
    if kind in _STATEFUL and type(value) is _STATEFUL[kind]:
        state = value.__getstate__() if hasattr(value, "__getstate__") else value.__dict__
        # a file elsewhere is no part of this one
        return {"object": kind, "state": pack_part({k: None if k == "_path" else v for k, v in state.items()}, arrays)}
    if kind in _VALUES and is_dataclass(value):
        given = {part.name: getattr(value, part.name) for part in fields(value) if part.init}
        return {"value": kind, "fields": pack_part(given, arrays)}
    raise NotSaveableError(f"a {type(value).__name__} has no place in a file")


def unpack_part(note: Any, arrays: Mapping[str, Any]) -> Any:
    """Undo `pack_part`."""
    if not isinstance(note, dict):
        return note
    if "array" in note:
        return arrays[note["array"]]
    if "bytes" in note:
        return arrays[note["bytes"]].tobytes()
    if "dtype" in note:
        return np.dtype(note["dtype"])
    if "list" in note:
        return [unpack_part(part, arrays) for part in note["list"]]
    if "tuple" in note:
        return tuple(unpack_part(part, arrays) for part in note["tuple"])
    if "dict" in note:
        return {key: unpack_part(part, arrays) for key, part in note["dict"].items()}
    if "codec" in note:
        return codec_from_config(note["codec"], unpack_part(note["config"], arrays))
    if "value" in note:
        return _VALUES[note["value"]](**unpack_part(note["fields"], arrays))
    made = object.__new__(_STATEFUL[note["object"]])
    state = unpack_part(note["state"], arrays)
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        made.__dict__.update(state)
    return made


# ---- files ----


def save_arrays(folder: Path, manifest: Mapping[str, Any], arrays: Arrays) -> None:
    """Write ``arrays`` under a name of their own, then the manifest over the one before, then drop what that named."""
    folder.mkdir(parents=True, exist_ok=True)
    within = f"arrays-{uuid.uuid4().hex[:12]}"
    (folder / within).mkdir()
    sums = {}
    for name, array in arrays.items():
        array = np.asarray(array)
        np.save(folder / within / f"{name}.npy", array, allow_pickle=False)
        sums[name] = zlib.crc32(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    staged = folder / f"{MANIFEST}.new"
    staged.write_text(json.dumps({**manifest, "folder": within, "checksums": sums}, indent=1))
    staged.replace(folder / MANIFEST)
    for old in folder.glob("arrays-*"):
        if old.name != within:
            shutil.rmtree(old, ignore_errors=True)


def load_arrays(folder: Path) -> tuple[dict[str, Any], Arrays]:
    """What `save_arrays` wrote, checked."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise FileFormatError(f"{folder} holds no {MANIFEST}: nothing was saved there") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise FileFormatError(f"{folder / MANIFEST} is no manifest: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("checksums"), dict):
        raise FileFormatError(f"{folder / MANIFEST} is the manifest of something else")
    arrays = {}
    for name, expected in manifest["checksums"].items():
        path = folder / str(manifest["folder"]) / f"{name}.npy"
        try:
            array = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DamagedFileError(f"{path} is missing or cut short: {error}") from error
        if zlib.crc32(np.ascontiguousarray(array).data.cast("B") if array.size else b"") != expected:
            raise DamagedFileError(f"{path} is not what was written: its checksum differs")
        arrays[name] = array
    return manifest, arrays
