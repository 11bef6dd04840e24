"""Compressed storages to files and back, and what TorchRL's own storages saved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from sb3_extra_buffers.errors import (
    DamagedFileError,
    ExtraBuffersError,
    FileFormatError,
    MissingExtraError,
    NotSaveableError,
    SharingError,
    SpecMismatchError,
    UnsupportedVersionError,
    UntrustedFileError,
)
from sb3_extra_buffers.replay_buffers.arrays import (
    MANIFEST,
    Arrays,
    keep,
    load_arrays,
    pack_part,
    save_arrays,
    unpack_part,
)
from sb3_extra_buffers.replay_buffers.groups import Group
from sb3_extra_buffers.replay_buffers.stored_tensor import to_numpy
from sb3_extra_buffers.stores.observation import ObservationStore

try:
    from tensordict import TensorDict, is_tensor_collection
    from torchrl.data.replay_buffers.checkpointers import TensorStorageCheckpointer
except ImportError as error:
    raise MissingExtraError(
        "CompressedStorage needs 'torchrl' and 'tensordict': pip install 'sb3-extra-buffers[torchrl]'"
    ) from error

if TYPE_CHECKING:
    from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage

__all__ = ["CompressedStorageCheckpointer", "pack_storage", "take_over", "unpack_storage"]

FORMAT = "sb3-extra-buffers/torchrl-storage"
VERSION = 1
# of a folder that TorchRL's tensor storages wrote
_THEIRS = "storage_metadata.json"
# items that are taken over at once
_CHUNK = 256


class CompressedStorageCheckpointer(TensorStorageCheckpointer):  # type: ignore[misc]  # torchrl ships no types
    """Saves a `CompressedStorage` as it is, compressed. The manifest is replaced last: no manifest, no snapshot.

    Hooks that were registered want to see the data: with them it is saved as TorchRL's storages are. What those wrote
    is loaded too.
    """

    def dumps(self, storage: CompressedStorage, path: Any) -> None:
        if not storage.initialized:
            raise RuntimeError("Cannot save a non-initialized storage.")
        folder = Path(path)
        if self._save_hooks:
            folder.mkdir(parents=True, exist_ok=True)
            super().dumps(storage, folder)
            (folder / MANIFEST).unlink(missing_ok=True)
            return
        manifest, arrays = pack_storage(storage)
        save_arrays(folder, manifest, arrays)

    def loads(self, storage: CompressedStorage, path: Any) -> None:
        folder = Path(path)
        if (folder / _THEIRS).exists() and not (folder / MANIFEST).exists():
            data, length = _load_theirs(folder)
            for hook in self._load_hooks:
                data = hook(data, out=None)
            take_over(storage, data, length)
            return
        manifest, arrays = load_arrays(folder)
        unpack_storage(storage, manifest, arrays)


def _load_theirs(folder: Path) -> tuple[Any, int]:
    """What a tensor storage of TorchRL saved, and how many items of it count."""
    if any(folder.rglob("*.pickle")):
        raise UntrustedFileError(f"{folder} holds a pickle, which is not opened; load it with TorchRL's own storage")
    try:
        note = json.loads((folder / _THEIRS).read_text())
        if note["is_pytree"]:
            raise FileFormatError(f"{folder} holds a tree of tensors; only TensorDicts are taken over from TorchRL")
        return TensorDict.load_memmap(folder), int(note["len"])
    except (OSError, KeyError, TypeError, RuntimeError, ValueError) as error:
        if isinstance(error, ExtraBuffersError):
            raise
        raise DamagedFileError(f"{folder} is missing or damaged: {error}") from error


def take_over(storage: CompressedStorage, data: Any, length: int) -> None:
    """Let ``storage`` hold the first ``length`` items of ``data``; on an error it still holds what it did."""
    width = int(np.prod(data.shape[1 : storage.ndim]))
    steps = -(-length // width)
    if length > storage._requested_size:
        raise SpecMismatchError(f"{length} items were saved, this storage has room for {storage._requested_size}")
    new = storage.empty_copy()
    for first in range(0, steps, _CHUNK):
        part = data[first : min(first + _CHUNK, steps)]
        new.set(range(first, first + len(part)), part)
    _move(new, storage, None)


# ---- a storage and its parts ----


def pack_storage(storage: CompressedStorage) -> tuple[dict[str, Any], Arrays]:
    """``storage`` as JSON and the arrays that it names."""
    arrays: Arrays = {}
    held: Any = storage._storage
    structure = "tensordict" if is_tensor_collection(held) else "tensor" if isinstance(held, torch.Tensor) else "tree"
    if structure == "tensordict" and set(held.keys(True, True)) != set(storage.specs):
        raise NotSaveableError("only tensors can be saved, but this TensorDict holds something else")
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
        "dense": [
            [_key_json(key), keep(to_numpy(leaf[: storage._len]), arrays)] for key, leaf in storage._dense.items()
        ],
        "groups": [
            {
                "keys": [_key_json(key) for key in group.keys],
                "bases": [leaf.base for leaf in group.leaves],
                "store": pack_part(group.store, arrays),
            }
            for group in _on_host(storage)
        ],
    }
    return manifest, arrays


def _on_host(storage: CompressedStorage) -> list[Group]:
    """The groups as they are on the host, where any machine reads them; what lies on a device is encoded again."""
    found = []
    for group in storage.groups:
        if not isinstance(group, Group):
            on_device, store = group, group.store
            cpu, method = torch.device("cpu"), on_device.method
            group = Group(
                on_device.keys, on_device.spec, on_device.dtype, on_device.n_rows, store.n_streams, cpu, method,
                on_device.options,
            )  # fmt: skip
            for first in range(0, storage._len, _CHUNK):
                positions = np.arange(first, min(first + _CHUNK, storage._len))
                rows = zip(group.leaves, on_device.read(positions), strict=True)
                group.write(positions, [leaf.as_rows(part) for leaf, part in rows])
        found.append(group)
    return found


def unpack_storage(storage: CompressedStorage, manifest: Any, arrays: Mapping[str, Any]) -> None:
    """Let ``storage`` hold what was packed; on an error it still holds what it did."""
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
    n_leaves = len(manifest["leaves"])
    if manifest["structure"] == "tree" and len(tree_leaves(storage._storage)) != n_leaves:
        raise RuntimeError(
            f"Cannot fill a non-initialized pytree-based TensorStorage: a tree of {n_leaves} tensors was saved, "
            "without its structure; store an item like them first"
        )
    new = storage.empty_copy()
    try:
        if manifest["initialized"]:
            _fill(new, manifest, arrays, _example(storage, manifest))
            new.check()
    except ExtraBuffersError:
        raise
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise DamagedFileError(f"the saved storage contradicts itself: {error}") from error
    _move(new, storage, manifest["last_cursor"])


def _move(new: CompressedStorage, storage: CompressedStorage, last_cursor: int | None) -> None:
    """Let ``storage`` hold what ``new`` does."""
    if storage._shared_count is not None:
        raise SharingError("other processes have this storage; load it before they are started")
    if storage.initialized and new.initialized and storage.specs != new.specs:
        raise SpecMismatchError(
            f"the saved storage holds {_describe(new)}, this one {_describe(storage)}; load it into an empty one"
        )
    for name in ("_storage", "initialized", "_count", "max_size", "groups", "lead", "specs", "_dense", "_pilot"):
        setattr(storage, name, getattr(new, name))
    storage.__dict__.pop("_total_shape_value", None)
    storage._set_last_cursor(new._last_cursor_index if last_cursor is None else last_cursor)


def _example(storage: CompressedStorage, manifest: Mapping[str, Any]) -> Any:
    """An item like those that were saved. A tree's structure is not in the file, only its leaves are."""
    leaves = {
        _key(leaf["key"]): torch.empty(tuple(leaf["shape"]), dtype=getattr(torch, leaf["dtype"]))
        for leaf in manifest["leaves"]
    }
    if manifest["structure"] == "tensordict":
        return TensorDict(leaves, batch_size=manifest["batch_shape"])
    if manifest["structure"] == "tensor":
        return leaves[0]
    made = iter(leaves.values())
    return tree_map(lambda _: next(made), storage._storage)


def _fill(storage: CompressedStorage, manifest: Mapping[str, Any], arrays: Mapping[str, Any], example: Any) -> None:
    storage._init(example)
    specs = storage.specs
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
        store = unpack_part(saved["store"], arrays)
        if not isinstance(store, ObservationStore) or store.spec != group.store.spec:
            raise DamagedFileError(f"the store of {saved['keys']} is of another kind")
        bases = saved["bases"]
        if len(bases) != len(group.keys) or not all(0 <= base <= store.n_cells - n_rows for base in bases):
            raise DamagedFileError(f"{n_rows} items from {bases} on are not among {store.n_cells}")
        if isinstance(group, Group):
            group.store = store
            for leaf, base in zip(group.leaves, bases, strict=True):
                leaf.store, leaf.base = store, base
        else:
            _to_device(storage, group, store, bases, length, manifest["last_cursor"])
    storage._use_groups(storage.groups)
    storage._count = length


def _to_device(
    storage: CompressedStorage, group: Any, store: ObservationStore, bases: list[int], length: int, last: int | None
) -> None:
    """Put what ``store`` holds into a group on a device, the oldest first."""
    made = group.with_streams(store.n_streams)
    oldest = (last + 1) * int(np.prod(storage.lead[1:])) if last is not None and length == storage.max_size else 0
    made.take(lambda positions: [store.read(positions + base) for base in bases], length, oldest % storage.max_size)
    storage.groups[storage.groups.index(group)] = made


def _describe(storage: CompressedStorage) -> str:
    return ", ".join(f"{key!r} {shape} {dtype}" for key, (shape, dtype) in storage.specs.items())


def _what(manifest: Any) -> str:
    return repr(manifest.get("format", "something else")) if isinstance(manifest, Mapping) else "something else"


def _key_json(key: Any) -> Any:
    return list(key) if isinstance(key, tuple) else key


def _key(stored: Any) -> Any:
    return tuple(stored) if isinstance(stored, list) else stored


def _restore(array: Any, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
