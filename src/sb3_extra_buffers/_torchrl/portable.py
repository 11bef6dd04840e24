"""How a compressed storage leaves its process: saved, copied, or shared with other processes."""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import pickle
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils._pytree import tree_leaves, tree_map  # torch has no public tree functions
from torchrl.data.replay_buffers.storages import Storage

from sb3_extra_buffers._torchrl.checkpoint import CompressedStorageCheckpointer, storage_parts
from sb3_extra_buffers._torchrl.groups import HostGroup
from sb3_extra_buffers._torchrl.sharing import GroupServer, RemoteGroup
from sb3_extra_buffers._torchrl.storage import CONTENTS, ItemStorage, group_class
from sb3_extra_buffers._torchrl.table import ItemTable, example_item
from sb3_extra_buffers._torchrl.tensors import to_numpy
from sb3_extra_buffers.errors import FileFormatError, SharingError, SpecMismatchError
from sb3_extra_buffers.files import registry
from sb3_extra_buffers.files.parts import Parts, flatten, unflatten
from sb3_extra_buffers.stores.locks import fork_safe_lock

__all__ = ["PortableStorage"]

# items copied from TorchRL's own storages at a time
_CHUNK = 256


class PortableStorage(ItemStorage):
    """The part of `CompressedStorage` that saves, copies and shares it.

    A storage belongs to the process that created it. Spawned processes send their requests to that process; a forked
    child can read what was stored before the fork, and writing raises an error there.
    """

    _default_checkpointer = CompressedStorageCheckpointer

    # the server that answers other processes, once there are any
    _server: GroupServer | None = None

    @property
    def structure(self) -> Any:
        """The TensorDict or tree over all items."""
        return self._storage

    @property
    def last_cursor(self) -> int | None:
        """The step that was written last."""
        cursor: int | None = self._last_cursor_index
        return cursor

    @property
    def lock(self) -> Any:
        """Held while the storage is written to, read or saved."""
        return self._lock

    def set_length(self, length: int, last_cursor: int | None) -> None:
        """Declare the first ``length`` items stored."""
        self._len = length
        self._set_last_cursor(last_cursor)

    # ---- saving ----

    def to_parts(self) -> Parts:
        """Return what `files.save` and `state_dict` store."""
        self.recover()
        self._check_local()
        return storage_parts(self)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers and strings for `load_state_dict` of another storage of this size."""
        with self._lock:
            description, arrays = flatten(self.to_parts())
            tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
            return {
                "description": description, "arrays": tensors, "initialized": self.initialized, "_len": self._len,
            }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ``state_dict``, that of a `CompressedStorage` or of one of TorchRL's tensor storages."""
        if not isinstance(state_dict, Mapping):
            raise FileFormatError(f"a state must be a dict, got a {type(state_dict).__name__}")
        if "_storage" in state_dict:
            self._load_tensors(state_dict)
        else:
            arrays = state_dict.get("arrays")
            if not isinstance(arrays, Mapping) or not all(isinstance(part, torch.Tensor) for part in arrays.values()):
                raise FileFormatError("not the state of a storage: it has no arrays")
            tables = {name: to_numpy(tensor) for name, tensor in arrays.items()}
            parts = unflatten(state_dict.get("description"), tables, type(self))
            registry.check_target(parts.kind, type(self))
            self.take_over(registry.from_parts(parts))
        self._bump_mutation_revision()

    def _load_tensors(self, state_dict: Mapping[str, Any]) -> None:
        data, length = state_dict["_storage"], state_dict.get("_len")
        try:
            if not isinstance(data, torch.Tensor):
                data = TensorDict().load_state_dict(data, strict=False)
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(f"not the state of a storage: {error}") from error
        if type(length) is not int or not 0 <= length <= data.numel():
            raise FileFormatError(f"the state of a storage cannot have {length!r} items")
        self.load_items(data, length)

    def load_items(self, data: Any, length: int) -> None:
        """Replace all items by the first ``length`` of ``data``; if that fails, nothing changes."""
        if length > self.capacity:
            raise SpecMismatchError(
                f"{length} items were saved, but this storage holds at most {self.capacity}; create a larger one"
            )
        steps = -(-length // max(math.prod(data.shape[1 : self.ndim]), 1))
        loaded = PortableStorage(
            self.capacity, device=self.device, ndim=self.ndim, n_envs=self.n_envs,
            compression_method=self.compression_method, compression_kwargs=self.compression_kwargs,
        )  # fmt: skip
        for first in range(0, steps, _CHUNK):
            part = data[first : min(first + _CHUNK, steps)]
            loaded.set(range(first, first + len(part)), part)
        self.take_over(loaded)

    def take_over(self, other: PortableStorage) -> None:
        """Replace all items by those of ``other``, which is used up; if that fails, nothing changes."""
        for name, theirs, ours in (("ndim", other.ndim, self.ndim), ("max_size", other.capacity, self.capacity)):
            if theirs != ours:
                raise SpecMismatchError(f"the saved storage has {name}={theirs}, but this one has {name}={ours}")
        if self._shared_count is not None:
            raise SharingError("other processes use this storage; load it before they are started")
        contents = {name: vars(other)[name] for name in CONTENTS}
        if other.initialized:
            contents |= self._fitted_contents(other)
        length, last_cursor = len(other), other.last_cursor
        with self._lock:
            self.recover()
            if self.announced is not None:
                self.announced.done = True
            # one call: nothing may see a part of it
            self.__dict__.update(contents | {"_count": length})
            self.__dict__.pop("_total_shape_value", None)
            self._set_last_cursor(last_cursor)

    def _fitted_contents(self, other: PortableStorage) -> dict[str, Any]:
        """Return the contents of ``other`` in the structure of this storage and on its device."""
        structure, table = other.structure, other.table
        # files keep the leaves of a tree, but not its structure
        is_loaded_tree = isinstance(structure, tuple)
        n_leaves = len(tree_leaves(structure)) if is_loaded_tree else 0
        if is_loaded_tree and not (self.initialized and len(tree_leaves(self._storage)) == n_leaves):
            raise SpecMismatchError(
                f"a tree of {n_leaves} tensors was saved without its structure; store an item of that structure first"
            )
        if self.initialized and self.table.specs != table.specs:
            raise SpecMismatchError(
                f"the saved storage holds {_describe(table)}, but this one holds {_describe(self.table)}; load it into "
                "an empty storage"
            )
        if is_loaded_tree:
            leaves = iter(structure)
            structure = tree_map(lambda _: next(leaves), self._storage)
        device = other.device if self.device == "auto" else self.device
        kind = group_class(device)
        if device != other.device or any(type(group) is not kind for group in table.groups):
            table = self._moved_table(other, device)
            structure = table.like(example_item(structure), device)
        return {"_storage": structure, "table": table, "device": device}

    def _moved_table(self, other: PortableStorage, device: torch.device) -> ItemTable:
        """Return the table of ``other`` on ``device``; what has to be encoded again is written oldest first."""
        table, length, last_cursor = other.table, len(other), other.last_cursor
        dense = {}
        for key, leaf in table.dense.items():
            dense[key] = torch.empty_like(leaf, device=device)
            dense[key][:length] = leaf[:length]
        oldest = 0
        if last_cursor is not None and length == table.n_items:
            oldest = (last_cursor + 1) * table.width % table.n_items
        kind = group_class(device)
        groups: list[Any] = []
        for group in table.groups:
            if type(group) is kind is HostGroup:
                # stays on the host; only what is decoded goes to the device
                group.device = device
                groups.append(group)
            else:
                method, options = self.compression(group.keys[0])
                config = group.config._replace(method=method, options=options)
                moved = kind(config, group.n_streams, device)
                moved.copy_from(group, length, oldest)
                groups.append(moved)
        return ItemTable(table.lead, table.specs, dense, groups)

    # ---- copies and other processes ----

    def _check_local(self) -> None:
        if any(isinstance(group, RemoteGroup) for group in self.table.groups):
            raise SharingError("only the process that created a shared CompressedStorage can copy or save it")

    def _share(self) -> None:
        """Let processes that are started from now on use this storage; this process answers their requests."""
        if not self.initialized:
            raise SharingError(
                "a CompressedStorage cannot be shared between processes before it is initialized; store an item first"
            )
        if self._shared_count is not None:
            return
        with self._lock:
            self.recover()
            table, probe = self.table, self._probe
            n_envs = 1 if probe is None else probe.decide()
            if probe is not None and n_envs > 1:
                # the last chance: other processes rely on the number of streams
                table = table.with_groups([group.with_streams(n_envs, probe.count) for group in table.groups])
            for leaf in table.dense.values():
                leaf.share_memory_()  # type: ignore[no-untyped-call]  # torch's own
            self.use_table(table, example_item(self._storage), self.device)
            self._server = GroupServer(self) if table.groups else None
            self._shared_count = mp.Value("q", self._count)

    def answer(self, group: int, request: str, arguments: tuple[Any, ...]) -> Any:
        """Call the method ``request`` of a group for another process."""
        with self._lock:
            self.recover()
            return getattr(self.table.groups[group], request)(*arguments)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self.recover()
            return self._frozen_state()

    def _frozen_state(self) -> dict[str, Any]:
        """Return a state that later writes do not change, or for a process that is being spawned a shared one."""
        spawning = get_spawning_popen() is not None
        if spawning:
            self._share()
        else:
            self._check_local()
        state: dict[str, Any] = Storage.__getstate__(self)
        for name in ("_lock", "_open", "announced", "_server", "_attached_entities_list"):
            state.pop(name, None)
        # stored tensors would be pickled decoded; they are made again from the table
        state["_storage"] = None if self._storage is None else example_item(self._storage)
        table = self.table
        if not spawning:
            state["_count"], state["_shared_count"] = self._len, None
            dense = {key: leaf.clone() for key, leaf in table.dense.items()}
            state["table"] = ItemTable(table.lead, table.specs, dense, [])
            state["pickled_groups"] = pickle.dumps(table.groups, protocol=pickle.HIGHEST_PROTOCOL)
        elif self._server is not None:
            address = self._server.address
            state["table"] = table.with_groups(
                [RemoteGroup(address, number, group) for number, group in enumerate(table.groups)]
            )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = state.pop("pickled_groups", None)
        if groups is not None:
            state["table"] = state["table"].with_groups(pickle.loads(groups))
        Storage.__setstate__(self, state)
        self._owner = os.getpid()
        self._lock = fork_safe_lock(of_buffer=True)
        self._server = self._open = self.announced = None
        if self._storage is not None:
            self._storage = self.table.like(self._storage, self.device)


def _describe(table: ItemTable) -> str:
    return ", ".join(f"{key!r} {shape} {dtype}" for key, (shape, dtype) in table.specs.items())
