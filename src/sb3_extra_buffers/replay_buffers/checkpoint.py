"""Compressed storages as files: a manifest a person can read, and arrays beside it; no pickle."""

from __future__ import annotations

import json
import shutil
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import codec_from_config
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import (
    DamagedFileError,
    ExtraBuffersError,
    FileFormatError,
    MissingExtraError,
    NotSaveableError,
    SpecMismatchError,
    UnsupportedVersionError,
)
from sb3_extra_buffers.stores import payloads
from sb3_extra_buffers.stores.choice import Choice
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.observation import DenseStore, ObservationStore
from sb3_extra_buffers.stores.payloads import PayloadStore
from sb3_extra_buffers.stores.segments import SegmentStore

try:
    from tensordict import TensorDict, is_tensor_collection
    from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase
except ImportError as error:
    raise MissingExtraError(
        "CompressedStorage needs 'torchrl' and 'tensordict': pip install 'sb3-extra-buffers[torchrl]'"
    ) from error

if TYPE_CHECKING:
    from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage

__all__ = ["CompressedStorageCheckpointer", "load_arrays", "pack_storage", "save_arrays", "unpack_storage"]

FORMAT = "sb3-extra-buffers/torchrl-storage"
VERSION = 1
MANIFEST = "manifest.json"

Arrays = dict[str, Any]

# what a store is made of; nothing else is ever built from a file
_STATEFUL: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (ObservationStore, DenseStore, SegmentStore, PayloadStore, Heap, payloads._Average)
}
_VALUES: dict[str, type[Any]] = {cls.__name__: cls for cls in (ObsSpec, StackLayout, Choice)}


class CompressedStorageCheckpointer(StorageCheckpointerBase):  # type: ignore[misc]  # torchrl ships no types
    """Saves a `CompressedStorage` as it is, compressed. The manifest is replaced last: no manifest, no snapshot."""

    def dumps(self, storage: CompressedStorage, path: Any) -> None:
        if not storage.initialized:
            raise RuntimeError("Cannot save a non-initialized storage.")
        manifest, arrays = pack_storage(storage)
        save_arrays(Path(path), manifest, arrays)

    def loads(self, storage: CompressedStorage, path: Any) -> None:
        manifest, arrays = load_arrays(Path(path))
        unpack_storage(storage, manifest, arrays)


# ---- a storage and its parts ----


def pack_storage(storage: CompressedStorage) -> tuple[dict[str, Any], Arrays]:
    """``storage`` as JSON and the arrays that it names."""
    arrays: Arrays = {}
    held: Any = storage._storage
    structure = "tensordict" if is_tensor_collection(held) else "tensor"
    if storage.initialized:
        keys = set(held.keys(True, True)) if structure == "tensordict" else {0}
        if (structure == "tensor" and not isinstance(held, torch.Tensor)) or keys != set(storage.specs):
            raise NotSaveableError("only TensorDicts of tensors and plain tensors can be saved, not trees or objects")
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "structure": structure,
        "initialized": storage.initialized,
        "len": storage._len,
        "max_size": storage.max_size,
        "requested_size": storage._requested_size,
        "ndim": storage.ndim,
        "lead": list(storage.lead),
        "batch_shape": list(held.shape[1:]) if storage.initialized and structure == "tensordict" else [],
        "last_cursor": storage._last_cursor_index,
        "leaves": [
            {"key": _key_json(key), "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
            for key, (shape, dtype) in storage.specs.items()
        ],
        "dense": [[_key_json(key), _keep(leaf[: storage._len], arrays)] for key, leaf in storage._dense.items()],
        "groups": [
            {
                "keys": [_key_json(key) for key in group.keys],
                "bases": [leaf.base for leaf in group.leaves],
                "store": _pack(group.store, arrays),
            }
            for group in storage.groups
        ],
    }
    return manifest, arrays


def unpack_storage(storage: CompressedStorage, manifest: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Let ``storage`` hold what was packed; on an error it still holds what it did."""
    from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage

    if not isinstance(manifest, Mapping) or manifest.get("format") != FORMAT:
        raise FileFormatError(f"this is no saved CompressedStorage but {_what(manifest)}")
    if manifest["version"] > VERSION:
        raise UnsupportedVersionError(
            f"this storage was saved in version {manifest['version']}, the newest known here is {VERSION}; "
            "update sb3-extra-buffers"
        )
    for name, ours in (("ndim", storage.ndim), ("requested_size", storage._requested_size)):
        if manifest[name] != ours:
            called = "max_size" if name == "requested_size" else name
            raise SpecMismatchError(f"a storage of {called}={manifest[name]} was saved, this one has {called}={ours}")
    new = CompressedStorage(
        storage._requested_size,
        device=storage.device,
        ndim=storage.ndim,
        compression_method=storage.compression_method,
        compression_kwargs=storage.compression_kwargs,
    )
    try:
        if manifest["initialized"]:
            _fill(new, manifest, arrays)
            new.check()
    except ExtraBuffersError:
        raise
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise DamagedFileError(f"the saved storage contradicts itself: {error}") from error
    if storage.initialized and new.initialized and storage.specs != new.specs:
        raise SpecMismatchError(
            f"the saved storage holds {_describe(new)}, this one {_describe(storage)}; load it into an empty one"
        )
    for name in ("_storage", "initialized", "_count", "max_size", "groups", "lead", "specs", "_dense", "_pilot"):
        setattr(storage, name, getattr(new, name))
    storage.__dict__.pop("_total_shape_value", None)
    storage._set_last_cursor(manifest["last_cursor"])


def _fill(storage: CompressedStorage, manifest: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    specs = {_key(leaf["key"]): (tuple(leaf["shape"]), getattr(torch, leaf["dtype"])) for leaf in manifest["leaves"]}
    if not all(isinstance(dtype, torch.dtype) for _, dtype in specs.values()):
        raise DamagedFileError("a leaf has a dtype that is none")
    items = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in specs.items()}
    structured = manifest["structure"] == "tensordict"
    storage._init(TensorDict(items, batch_size=manifest["batch_shape"]) if structured else items[0])
    if list(storage.lead) != manifest["lead"]:
        raise DamagedFileError(f"items of {manifest['lead']} do not make {list(storage.lead)}")
    length = int(manifest["len"])
    if not 0 <= length <= storage.max_size:
        raise DamagedFileError(f"{length} of {storage.max_size} items are said to be there")
    storage._dense = {}
    n_rows = storage.max_size
    for key_json, name in manifest["dense"]:
        shape, dtype = specs[_key(key_json)]
        column = torch.empty((n_rows, *shape[storage.ndim - 1 :]), dtype=dtype, device=storage.device)
        column[:length] = _restore(arrays[name["array"]], dtype).to(column.device)
        storage._dense[_key(key_json)] = column
    # each in the groups that were saved, which may have found other streams than new ones start with
    made = {tuple(group.keys): group for group in storage.groups}
    for saved in manifest["groups"]:
        group = made[tuple(_key(key) for key in saved["keys"])]
        store = _unpack(saved["store"], arrays)
        if not isinstance(store, ObservationStore) or store.spec != group.store.spec:
            raise DamagedFileError(f"the store of {saved['keys']} is of another kind")
        group.store = store
        for leaf, base in zip(group.leaves, saved["bases"], strict=True):
            if not 0 <= base <= store.n_cells - n_rows:
                raise DamagedFileError(f"{n_rows} items from {base} on are not among {store.n_cells}")
            leaf.store, leaf.base = store, base
    storage._pilot = None
    storage._renew()
    storage._count = length


def _describe(storage: CompressedStorage) -> str:
    return ", ".join(f"{key!r} {shape} {dtype}" for key, (shape, dtype) in storage.specs.items())


def _what(manifest: Any) -> str:
    return repr(manifest.get("format", "something else")) if isinstance(manifest, Mapping) else "something else"


def _key_json(key: Any) -> Any:
    return list(key) if isinstance(key, tuple) else key


def _key(stored: Any) -> Any:
    return tuple(stored) if isinstance(stored, list) else stored


# ---- any part of a store ----


def _keep(value: Any, arrays: Arrays) -> dict[str, Any]:
    """A note of an array, which goes to the others."""
    if isinstance(value, torch.Tensor):
        from sb3_extra_buffers.replay_buffers.stored_tensor import to_numpy

        value = to_numpy(value)
    name = f"{len(arrays):04d}"
    arrays[name] = value
    return {"array": name}


def _restore(array: Any, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _pack(value: Any, arrays: Arrays) -> Any:
    """``value`` in JSON, its arrays apart."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _keep(value, arrays)
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": _keep(np.frombuffer(value, np.uint8), arrays)["array"]}
    if isinstance(value, np.dtype):
        return {"dtype": value.str}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_pack(part, arrays) for part in value]}
    if isinstance(value, dict):
        return {"dict": {str(key): _pack(part, arrays) for key, part in value.items()}}
    if isinstance(value, Codec):
        return {"codec": value.name or value.codec_id, "config": _pack(value.config(), arrays)}
    kind = type(value).__name__
    if kind in _STATEFUL and type(value) is _STATEFUL[kind]:
        state = value.__getstate__() if hasattr(value, "__getstate__") else value.__dict__
        # a file elsewhere is no part of this one
        return {"object": kind, "state": _pack({k: None if k == "_path" else v for k, v in state.items()}, arrays)}
    if kind in _VALUES and is_dataclass(value):
        given = {part.name: getattr(value, part.name) for part in fields(value) if part.init}
        return {"value": kind, "fields": _pack(given, arrays)}
    raise NotSaveableError(f"a {type(value).__name__} has no place in a file")


def _unpack(note: Any, arrays: Mapping[str, Any]) -> Any:
    if not isinstance(note, dict):
        return note
    if "array" in note:
        return arrays[note["array"]]
    if "bytes" in note:
        return arrays[note["bytes"]].tobytes()
    if "dtype" in note:
        return np.dtype(note["dtype"])
    if "list" in note:
        return [_unpack(part, arrays) for part in note["list"]]
    if "tuple" in note:
        return tuple(_unpack(part, arrays) for part in note["tuple"])
    if "dict" in note:
        return {key: _unpack(part, arrays) for key, part in note["dict"].items()}
    if "codec" in note:
        return codec_from_config(note["codec"], _unpack(note["config"], arrays))
    if "value" in note:
        return _VALUES[note["value"]](**_unpack(note["fields"], arrays))
    made = object.__new__(_STATEFUL[note["object"]])
    state = _unpack(note["state"], arrays)
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
