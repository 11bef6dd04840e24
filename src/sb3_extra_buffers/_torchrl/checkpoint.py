"""Compressed storages as parts for files, and back; folders that TorchRL's own storages saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection
from torchrl.data.replay_buffers.checkpointers import TensorStorageCheckpointer

from sb3_extra_buffers import files
from sb3_extra_buffers._torchrl.groups import HostGroup
from sb3_extra_buffers._torchrl.layout import KeyLayout
from sb3_extra_buffers._torchrl.memmaps import read_json, read_memmaps
from sb3_extra_buffers._torchrl.schema import Key, Spec, key_from_json, key_to_json, parse_tensor_shape, specs_of
from sb3_extra_buffers._torchrl.table import Batch, shape_batches
from sb3_extra_buffers._torchrl.tensors import CPU, as_tensor, dtype_name, numpy_dtype, parse_tensor_dtype, to_numpy
from sb3_extra_buffers.errors import FileFormatError, NotSaveableError
from sb3_extra_buffers.files import disk, manifest, registry, values
from sb3_extra_buffers.files.parts import LoadedParts, Parts
from sb3_extra_buffers.stores.checks import require

if TYPE_CHECKING:
    from sb3_extra_buffers._torchrl.portable import PortableStorage

__all__ = ["CompressedStorageCheckpointer", "embedded_storage", "restore_storage", "storage_parts", "tensor_column"]

_KIND = "torchrl-storage"
# in a folder that one of TorchRL's tensor storages wrote
_TORCHRL_METADATA = "storage_metadata.json"


class CompressedStorageCheckpointer(TensorStorageCheckpointer):  # type: ignore[misc]  # torchrl ships no types
    """Saves a `CompressedStorage` compressed, in the format of `files.save`.

    With save hooks, which need the decoded data, the format is that of TorchRL's tensor storages. Folders in that
    format can be loaded too, if they hold tensors only.
    """

    def dumps(self, storage: PortableStorage, path: Any) -> None:
        if not storage.initialized:
            raise RuntimeError("Cannot save a non-initialized storage.")
        folder = Path(path)
        if not self._save_hooks:
            files.save(storage, folder)
            return
        with disk.named_errors(folder, f"saving to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            super().dumps(storage, folder)
            (folder / manifest.NAME).unlink(missing_ok=True)

    def loads(self, storage: PortableStorage, path: Any) -> None:
        folder = Path(path)
        if (folder / _TORCHRL_METADATA).exists() and not (folder / manifest.NAME).exists():
            data, length = _read_torchrl_folder(folder)
            for hook in self._load_hooks:
                data = hook(data, out=None)
            storage.load_items(data, length)
        else:
            storage.take_over(files.load(folder, type(storage)))


def _read_torchrl_folder(folder: Path) -> tuple[Any, int]:
    """Return the data that a tensor storage of TorchRL saved, and its number of items."""
    metadata = read_json(folder / _TORCHRL_METADATA)
    if metadata.get("is_pytree") is not False:
        raise FileFormatError(f"{folder} holds a tree of tensors; only TensorDicts can be loaded from TorchRL's format")
    data, length = read_memmaps(folder), metadata.get("len")
    if type(length) is not int or not data.ndim or not 0 <= length <= data.numel():
        raise FileFormatError(f"{folder} should hold {length!r} items, but its tensors have shape {tuple(data.shape)}")
    return data, length


# ---- to parts ----


def storage_parts(storage: PortableStorage) -> Parts:
    """Return the parts of ``storage``."""
    data, table, length = storage.structure, storage.table, len(storage)
    structure = "tensordict" if is_tensor_collection(data) else "tensor" if isinstance(data, torch.Tensor) else "tree"
    if structure == "tensordict" and set(data.keys(True, True)) != set(table.specs):
        raise NotSaveableError("only tensors can be saved, but this TensorDict holds something else")
    groups = [_on_host(group, length) for group in table.groups]
    description = {
        "structure": structure,
        "initialized": storage.initialized,
        "length": length,
        "max_size": storage.capacity,
        "ndim": storage.ndim,
        "n_envs": storage.n_envs,
        "method": values.value_to_json(storage.compression_method, "compression_method"),
        "options": values.value_to_json(storage.compression_kwargs, "compression_kwargs"),
        "batch_shape": list(data.shape[1:]) if storage.initialized and structure == "tensordict" else [],
        "last_cursor": storage.last_cursor,
        "leaves": [[key_to_json(key), list(shape), dtype_name(dtype)] for key, (shape, dtype) in table.specs.items()],
        "dense": [key_to_json(key) for key in table.dense],
        "groups": [{"keys": [key_to_json(key) for key in group.keys], "bases": group.bases} for group in groups],
    }
    if table.batches:
        # only in files that need it
        description["batches"] = [[key and key_to_json(key), list(size), names] for key, size, names in table.batches]
    columns = {f"leaf-{number}": to_numpy(leaf[:length]) for number, leaf in enumerate(table.dense.values())}
    return Parts(_KIND, description, columns, {f"group-{number}": group.store for number, group in enumerate(groups)})


def _on_host(group: Any, length: int) -> HostGroup:
    """Return ``group`` itself or, if it is on a device, a copy on the host, which any machine can read."""
    if isinstance(group, HostGroup):
        return group
    copy = HostGroup(group.config, group.n_streams, CPU)
    copy.copy_from(group, length)
    return copy


# ---- from parts that are not trusted ----


def restore_storage(parts: LoadedParts) -> PortableStorage:
    """Return a storage on the host with the contents of ``parts``; a tree of tensors as a tuple of its leaves."""
    storage: PortableStorage = (parts.target or registry.class_of(_KIND))(
        parts.number("max_size", low=1),
        ndim=parts.number("ndim", low=1, stop=32),
        n_envs=None if parts.entry("n_envs") is None else parts.number("n_envs", low=1),
        compression_method=values.value_from_json(parts.entry("method")),
        compression_kwargs=values.value_from_json(parts.entry("options")),
    )
    if not parts.entry("initialized", kind=bool):
        return storage
    item, groups = _example(parts), parts.entry("groups", kind=list)
    table = storage.new_table(item, _layout(parts, specs_of(item)), HostGroup)
    length = parts.number("length", stop=table.n_items + 1)
    last_cursor = None if parts.entry("last_cursor") is None else parts.number("last_cursor", stop=table.lead[0])
    for number, leaf in enumerate(table.dense.values()):
        leaf[:length] = tensor_column(parts, f"leaf-{number}", leaf.dtype, (length, *leaf.shape[1:]))
    any_streams = storage.ndim == 1 and storage.n_envs is None
    for number, (group, entry) in enumerate(zip(table.groups, groups, strict=True)):
        group.adopt(parts.stores.get(f"group-{number}"), entry["bases"], any_streams)
    storage.use_table(table, item, CPU)
    storage.set_length(length, last_cursor)
    table.check()
    return storage


def embedded_storage(parts: LoadedParts) -> PortableStorage:
    """Return the storage inside ``parts`` of something larger, described under ``held``."""
    return restore_storage(LoadedParts(_KIND, parts.entry("held", kind=dict), parts.columns, parts.stores))


def tensor_column(
    parts: LoadedParts, name: str, dtype: torch.dtype, shape: tuple[int | None, ...] | None = None
) -> torch.Tensor:
    """Return a column of ``parts`` as a tensor of ``dtype``; None is any length."""
    if shape is None:
        shape = (None,) * getattr(parts.columns.get(name), "ndim", 1)
    return as_tensor(np.array(parts.column(name, numpy_dtype(dtype), shape)), dtype)


def _example(parts: LoadedParts) -> Any:
    """Return an item like those that were saved; its tensors have no memory, whatever their shape."""
    leaves: dict[Key, torch.Tensor] = {}
    for entry in parts.entry("leaves", kind=list):
        if not isinstance(entry, list) or len(entry) != 3:
            raise FileFormatError(f"expected a leaf as [key, shape, dtype], got {entry!r}")
        key, shape, dtype = key_from_json(entry[0]), parse_tensor_shape(entry[1]), parse_tensor_dtype(entry[2])
        leaves[key] = torch.empty(shape, dtype=dtype, device="meta")
    structure = parts.entry("structure", kind=str)
    if structure == "tensordict":
        item = TensorDict(leaves, batch_size=parse_tensor_shape(parts.entry("batch_shape")))
        return _shaped(item, parts.description.get("batches", []))
    if structure not in ("tensor", "tree") or list(leaves) != list(range(len(leaves))) or not leaves:
        raise FileFormatError(f"cannot build a {structure!r} from the leaves {list(leaves)}")
    return leaves[0] if structure == "tensor" else tuple(leaves.values())


def _shaped(item: Any, described: Any) -> Any:
    """Give an item, and the TensorDicts nested in it, the batch sizes and names of axes that were saved."""
    try:
        batches = []
        for key, size, names in described:
            batch = Batch(None if key is None else key_from_json(key), parse_tensor_shape(size), list(names))
            is_valid = all(name is None or isinstance(name, str) for name in names) and len(names) == len(batch.size)
            require(
                is_valid and (key is None or is_tensor_collection(item.get(batch.key))), f"{key!r} has no such batch"
            )
            batches.append(batch)
        return shape_batches(item, (), batches)
    except (RuntimeError, TypeError, ValueError) as error:
        raise FileFormatError(f"the batch sizes {described!r} do not fit the leaves: {error}") from error


def _layout(parts: LoadedParts, specs: dict[Key, Spec]) -> KeyLayout:
    dense = [key_from_json(key) for key in parts.entry("dense", kind=list)]
    groups = []
    for entry in parts.entry("groups", kind=list):
        keys = entry.get("keys") if isinstance(entry, dict) else None
        if not isinstance(keys, list) or not 1 <= len(keys) <= 2 or "bases" not in entry:
            raise FileFormatError(f"expected one or two keys and their bases, got {entry!r}")
        groups.append([key_from_json(key) for key in keys])
    named = dense + [key for keys in groups for key in keys]
    if sorted(map(repr, named)) != sorted(map(repr, specs)):
        raise FileFormatError(f"the keys {named} of the layout are not the keys {list(specs)} of the items")
    if any(len({specs[key] for key in keys}) > 1 for keys in groups):
        raise FileFormatError("keys that differ in shape or dtype cannot share a store")
    return KeyLayout(dense, groups)
