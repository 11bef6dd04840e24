"""Compressed storages as parts that files keep, and back; and what TorchRL's own storages saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from sb3_extra_buffers import files
from sb3_extra_buffers._torchrl.groups import Group
from sb3_extra_buffers._torchrl.memmaps import read_json, read_memmaps
from sb3_extra_buffers._torchrl.schema import (
    key_from_json,
    key_to_json,
    parse_dtype,
    parse_shape,
    specs_of,
)
from sb3_extra_buffers._torchrl.stored_tensor import bits_of, to_numpy, to_torch
from sb3_extra_buffers.errors import (
    FileFormatError,
    MissingExtraError,
    NotSaveableError,
    SharingError,
    SpecMismatchError,
)
from sb3_extra_buffers.files import disk, kinds, manifest, values
from sb3_extra_buffers.files.parts import LoadedParts, Parts
from sb3_extra_buffers.stores import device_observation
from sb3_extra_buffers.stores.observation import ObservationStore

try:
    from tensordict import TensorDict, is_tensor_collection
    from torchrl.data.replay_buffers.checkpointers import TensorStorageCheckpointer
except ImportError as error:
    raise MissingExtraError(
        "CompressedStorage needs 'torchrl' and 'tensordict': pip install 'sb3-extra-buffers[torchrl]'"
    ) from error

CompressedStorage = Any

__all__ = ["KIND", "CompressedStorageCheckpointer", "make_storage", "move", "storage_parts", "take_over"]

KIND = "torchrl-storage"
# of a folder that TorchRL's tensor storages wrote
_THEIRS = "storage_metadata.json"
# items that are taken over at once
_CHUNK = 256
_CPU = torch.device("cpu")


class CompressedStorageCheckpointer(TensorStorageCheckpointer):  # type: ignore[misc]  # torchrl ships no types
    """Saves a `CompressedStorage` as it is, compressed, as `files.save` does.

    Hooks that were registered want to see the data: with them it is saved as TorchRL's storages are. What those wrote
    is loaded too, as long as it is tensors.
    """

    def dumps(self, storage: CompressedStorage, path: Any) -> None:
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

    def loads(self, storage: CompressedStorage, path: Any) -> None:
        folder = Path(path)
        if (folder / _THEIRS).exists() and not (folder / manifest.NAME).exists():
            data, length = _read_theirs(folder)
            for hook in self._load_hooks:
                data = hook(data, out=None)
            take_over(storage, data, length)
        else:
            move(files.load(folder, type(storage)), storage)


def _read_theirs(folder: Path) -> tuple[Any, int]:
    """What a tensor storage of TorchRL saved, and how many items of it count."""
    note = read_json(folder / _THEIRS)
    if note.get("is_pytree") is not False:
        raise FileFormatError(f"{folder} holds a tree of tensors; only TensorDicts are taken over from TorchRL")
    data, length = read_memmaps(folder), note.get("len")
    if type(length) is not int or not data.ndim or not 0 <= length <= data.numel():
        raise FileFormatError(f"{folder} cannot hold {length!r} items")
    return data, length


def take_over(storage: CompressedStorage, data: Any, length: int) -> None:
    """Let ``storage`` hold the first ``length`` items of ``data``; on an error it still holds what it did."""
    width = math.prod(data.shape[1 : storage.ndim])
    if length > storage._requested_size:
        raise SpecMismatchError(f"{length} items were saved, this storage has room for {storage._requested_size}")
    steps = -(-length // max(width, 1))
    new = storage.empty_copy()
    for first in range(0, steps, _CHUNK):
        part = data[first : min(first + _CHUNK, steps)]
        new.set(range(first, first + len(part)), part)
    move(new, storage)


# ---- a storage and its parts ----


def storage_parts(storage: CompressedStorage) -> Parts:
    """What ``storage`` is made of."""
    held: Any = storage._storage
    structure = "tensordict" if is_tensor_collection(held) else "tensor" if isinstance(held, torch.Tensor) else "tree"
    if structure == "tensordict" and set(held.keys(True, True)) != set(storage.specs):
        raise NotSaveableError("only tensors can be saved, but this TensorDict holds something else")
    length, groups = storage._len, _on_host(storage)
    description = {
        "structure": structure,
        "initialized": storage.initialized,
        "length": length,
        "max_size": storage._requested_size,
        "ndim": storage.ndim,
        "n_envs": storage.n_envs,
        "method": values.encode(storage.compression_method, "compression_method"),
        "options": values.encode(storage.compression_kwargs, "compression_kwargs"),
        "batch_shape": list(held.shape[1:]) if storage.initialized and structure == "tensordict" else [],
        "last_cursor": storage._last_cursor_index,
        "leaves": [
            [key_to_json(key), list(shape), str(dtype).removeprefix("torch.")]
            for key, (shape, dtype) in storage.specs.items()
        ],
        "dense": [key_to_json(key) for key in storage._dense],
        "groups": [
            {"keys": [key_to_json(key) for key in group.keys], "bases": [leaf.base for leaf in group.leaves]}
            for group in groups
        ],
    }
    columns = {f"leaf-{place}": to_numpy(leaf[:length]) for place, leaf in enumerate(storage._dense.values())}
    return Parts(KIND, description, columns, {f"group-{place}": group.store for place, group in enumerate(groups)})


def _on_host(storage: CompressedStorage) -> list[Group]:
    """The groups as they are on the host, where any machine reads them; what lies on a device is encoded again."""
    found = []
    for group in storage.groups:
        if not isinstance(group, Group):
            on_device = group
            group = Group(
                on_device.keys, on_device.spec, on_device.dtype, on_device.n_rows, on_device.store.n_streams, _CPU,
                on_device.method, on_device.options,
            )  # fmt: skip
            for first in range(0, storage._len, _CHUNK):
                positions = np.arange(first, min(first + _CHUNK, storage._len))
                rows = zip(group.leaves, on_device.read(positions), strict=True)
                group.write(positions, [leaf.as_rows(part) for leaf, part in rows])
        found.append(group)
    return found


def make_storage(parts: LoadedParts) -> CompressedStorage:
    """A storage on the host that holds what ``parts`` say; a tree of tensors as a tuple of its leaves."""
    n_envs = None if parts.entry("n_envs") is None else parts.number("n_envs", low=1)
    storage: CompressedStorage = (parts.target or kinds.class_of(KIND))(
        parts.number("max_size", low=1),
        ndim=parts.number("ndim", low=1, stop=32),
        n_envs=n_envs,
        compression_method=values.decode(parts.entry("method")),
        compression_kwargs=values.decode(parts.entry("options")),
    )
    storage._host_only = True
    if not parts.entry("initialized", kind=bool):
        return storage
    example, groups = _example(parts), parts.entry("groups", kind=list)
    storage._init(example, _layout(parts, specs_of(example)))
    length = parts.number("length", stop=storage.max_size + 1)
    last = None if parts.entry("last_cursor") is None else parts.number("last_cursor", stop=storage.lead[0])
    for place, column in enumerate(storage._dense.values()):
        kind = torch.empty(0, dtype=bits_of(column.dtype)).numpy().dtype
        saved = parts.column(f"leaf-{place}", kind, (length, *column.shape[1:]))
        column[:length] = to_torch(np.array(saved), column.dtype, _CPU)
    for place, (group, about) in enumerate(zip(storage.groups, groups, strict=True)):
        _use_store(storage, group, about["bases"], parts.stores.get(f"group-{place}"))
    storage._use_groups(storage.groups)
    storage._count = length
    storage._set_last_cursor(last)
    storage.check()
    return storage


def _example(parts: LoadedParts) -> Any:
    """An item like those that were saved."""
    leaves: dict[Any, torch.Tensor] = {}
    for about in parts.entry("leaves", kind=list):
        if not isinstance(about, list) or len(about) != 3:
            raise FileFormatError(f"{about!r} describes no leaf")
        key, shape, dtype = key_from_json(about[0]), parse_shape(about[1]), parse_dtype(about[2])
        # takes no memory, whatever the shape
        leaves[key] = torch.empty((), dtype=dtype).expand(shape)
    structure = parts.entry("structure", kind=str)
    if structure == "tensordict":
        return TensorDict(leaves, batch_size=parse_shape(parts.entry("batch_shape")))
    if structure not in ("tensor", "tree") or list(leaves) != list(range(len(leaves))) or not leaves:
        raise FileFormatError(f"{len(leaves)} leaves make no {structure!r}")
    return leaves[0] if structure == "tensor" else tuple(leaves.values())


def _layout(parts: LoadedParts, specs: dict[Any, Any]) -> Any:
    """Which keys are compressed, and which of them share a store."""
    dense = [key_from_json(key) for key in parts.entry("dense", kind=list)]
    groups = []
    for about in parts.entry("groups", kind=list):
        keys = about.get("keys") if isinstance(about, dict) else None
        if not isinstance(keys, list) or not 1 <= len(keys) <= 2 or "bases" not in about:
            raise FileFormatError(f"{about!r} describes no keys that share a store")
        groups.append([key_from_json(key) for key in keys])
    named = dense + [key for keys in groups for key in keys]
    if sorted(map(repr, named)) != sorted(map(repr, specs)):
        raise FileFormatError(f"{named} are not the keys {list(specs)}")
    if any(len({specs[key] for key in keys}) > 1 for keys in groups):
        raise FileFormatError("keys that differ in shape or dtype cannot share a store")
    return dense, groups


def _use_store(storage: CompressedStorage, group: Group, bases: Any, store: ObservationStore | None) -> None:
    n_rows = group.leaves[0].n_rows
    if store is None or store.spec != group.store.spec:
        raise FileFormatError(f"the store of {group.keys} is missing or of other observations")
    n_streams = store.n_streams
    due = group.store.n_streams
    if n_streams != due and (storage.ndim > 1 or storage.n_envs is not None):
        raise FileFormatError(f"the store of {group.keys} has {n_streams} streams where {due} are due")
    # each key has a row of cells of its own, in whole steps
    per_key = -(-n_rows // n_streams) * n_streams
    if bases != [place * per_key for place in range(len(group.keys))] or store.n_obs != per_key * len(group.keys):
        raise FileFormatError(f"{n_rows} items from {bases!r} on are not those of {store.n_obs}")
    group.store = store
    for leaf, base in zip(group.leaves, bases, strict=True):
        leaf.store, leaf.base = store, base


# ---- into a storage that is there ----


def move(new: CompressedStorage, storage: CompressedStorage) -> None:
    """Let ``storage`` hold what ``new`` does, or say why it cannot; ``new`` is on the host, and used up."""
    for name, saved, ours in (
        ("ndim", new.ndim, storage.ndim), ("max_size", new._requested_size, storage._requested_size),
    ):  # fmt: skip
        if saved != ours:
            raise SpecMismatchError(f"a storage of {name}={saved} was saved, this one has {name}={ours}")
    if storage._shared_count is not None:
        raise SharingError("other processes have this storage; load it before they are started")
    shown: Any = new._storage
    if new.initialized and isinstance(shown, tuple):
        n_leaves = len(shown)
        if not storage.initialized or len(tree_leaves(storage._storage)) != n_leaves:
            raise SpecMismatchError(
                f"a tree of {n_leaves} tensors was saved, without its structure; store an item like them first"
            )
        made = iter(shown)
        shown = tree_map(lambda _: next(made), storage._storage)
    if storage.initialized and new.initialized and storage.specs != new.specs:
        raise SpecMismatchError(
            f"the saved storage holds {_describe(new)}, this one {_describe(storage)}; load it into an empty one"
        )
    elsewhere = storage.device not in ("auto", new.device) or not device_observation.stays_on_host(new.device)
    if new.initialized and new._host_only and elsewhere:
        new = _on_device(new, storage)
        shown = new._storage
    last = new._last_cursor_index
    names = ("initialized", "max_size", "groups", "lead", "specs", "_dense", "_pilot", "device")
    state = {name: getattr(new, name) for name in names}
    with storage._lock:
        storage.recover()
        if storage.announced is not None:
            storage.announced.done = True
        # at once: nothing may see one without the others
        storage.__dict__.update(state | {"_storage": shown, "_count": new._len})
        storage.__dict__.pop("_total_shape_value", None)
        storage._set_last_cursor(last)


def _on_device(new: CompressedStorage, storage: CompressedStorage) -> CompressedStorage:
    """A storage on the device of ``storage`` that holds what ``new`` does, written oldest first."""
    made = storage.empty_copy()
    made._init(_item(new), (list(new._dense), [group.keys for group in new.groups]))
    length, last = new._len, new._last_cursor_index
    for key, column in new._dense.items():
        made._dense[key][:length] = column[:length].to(made._dense[key].device)
    oldest = (last + 1) * math.prod(new.lead[1:]) if last is not None and length == new.max_size else 0
    groups: list[Any] = []
    for mine, theirs in zip(made.groups, new.groups, strict=True):
        if isinstance(mine, Group):
            for leaf in theirs.leaves:
                leaf.device = mine.leaves[0].device
            groups.append(theirs)
            continue

        def read(positions: Any, group: Group = theirs) -> Sequence[Any]:
            return group.read_rows(range(len(group.keys)), positions)

        groups.append(mine.with_streams(theirs.store.n_streams).take(read, length, oldest % new.max_size))
    made._use_groups(groups)
    made._count = length
    made._set_last_cursor(last)
    return made


def _item(storage: CompressedStorage) -> Any:
    """An item like those of ``storage``, of no memory."""

    def empty(value: torch.Tensor) -> torch.Tensor:
        return torch.empty((), dtype=value.dtype).expand(value.shape[1:])

    held: Any = storage._storage
    if is_tensor_collection(held):
        return held.apply(empty, batch_size=held.shape[1:], device=None)
    return tree_map(empty, held)


def _describe(storage: CompressedStorage) -> str:
    return ", ".join(f"{key!r} {shape} {dtype}" for key, (shape, dtype) in storage.specs.items())
