"""`CompressedStorage`: what TorchRL's tensor storages hold, in a hundredth of the memory."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from sb3_extra_buffers.errors import (
    IndexOutOfRangeError,
    MissingExtraError,
    SharingError,
    SpecMismatchError,
    UnknownFieldError,
)
from sb3_extra_buffers.replay_buffers.groups import PILOT_ROWS, Group, find_n_envs, join_keys
from sb3_extra_buffers.replay_buffers.stored_tensor import Positions, StoredTensor, leaf_spec, to_numpy, wrap
from sb3_extra_buffers.stores.choice import choose_unseen
from sb3_extra_buffers.stores.usage import MemoryUsage

try:
    from tensordict import TensorDict, is_non_tensor, is_tensor_collection, is_tensorclass
    from torchrl.data.replay_buffers.storages import Storage, TensorStorage
except ImportError as error:
    raise MissingExtraError(
        "CompressedStorage needs 'torchrl' and 'tensordict': pip install 'sb3-extra-buffers[torchrl]'"
    ) from error

from sb3_extra_buffers.replay_buffers.checkpoint import CompressedStorageCheckpointer

__all__ = ["CompressedStorage"]

Key = Any
Keys = set[Any] | None
Spec = tuple[tuple[int, ...], torch.dtype]

# TorchRL's writers add it to what they are given, just before they store it
_ADDED = "index"


class CompressedStorage(TensorStorage):  # type: ignore[misc]  # torchrl ships no types
    """A storage for TensorDicts that holds images in about a hundredth of the memory, lossless.

    Takes the place of `LazyTensorStorage` and `LazyMemmapStorage` in any TorchRL buffer: same samples at the same
    seed, with every sampler and writer. Large leaves are compressed, ``("next", key)`` beside ``key`` almost for
    free; small ones (rewards, flags, vectors) stay tensors. All else that TorchRL does with its storages works as
    with those, except that rows which were read are copies.

    Frames that repeat are found where the items of one environment lie on one stream. Which stream an item is on
    follows from where it is written: with ``ndim=2`` every column is one; with ``ndim=1`` it is the position modulo
    ``n_envs``. Items that come as whole trajectories, one environment after the other, make one stream; items that
    come as steps of ``n`` environments make ``n``.

    Args:
        max_size: The most items it holds.
        device: Where sampled tensors are put. What is compressed stays in main memory.
        ndim: Leading axes that count as items, as for TorchRL's storages.
        n_envs: How many environments take turns; found from the first items if it is not given.
        compression_method: ``"auto"``, another method for all large leaves, or one for each key.
        compression_kwargs: Options of that method.

    Example:
        >>> from torchrl.data import TensorDictReplayBuffer
        >>> buffer = TensorDictReplayBuffer(storage=CompressedStorage(100_000), batch_size=32)
    """

    _default_checkpointer = CompressedStorageCheckpointer
    _storage: Any
    device: Any

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        n_envs: int | None = None,
        compression_method: str | Mapping[Key, str] = "auto",
        compression_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if max_size < 1:
            raise ValueError(f"max_size must be at least 1, got {max_size}")
        if n_envs is not None and (n_envs < 1 or ndim > 1):
            raise ValueError(
                f"n_envs must be at least 1, and with ndim={ndim} it follows from the data; got {n_envs}"
                if ndim > 1
                else f"n_envs must be at least 1, got {n_envs}"
            )
        self._count = 0
        super().__init__(None, max_size, device=device, ndim=ndim)
        self.n_envs = n_envs
        self.compression_method = compression_method
        self.compression_kwargs = dict(compression_kwargs or {})
        self._requested_size = int(max_size)
        self._owner = os.getpid()
        self._forget()

    def _forget(self) -> None:
        """As before anything was written."""
        self._storage = None
        self.initialized = False
        self._count = 0
        self.max_size = self._requested_size
        self.groups: list[Group] = []
        self.lead: tuple[int, ...] = ()
        self.specs: dict[Key, Spec] = {}
        # leaves that are not compressed, seen as one row an item
        self._dense: dict[Key, torch.Tensor] = {}
        self._pilot: list[list[Any]] | None = None
        # what a writer is about to write, looked at already
        self._checked: Any = None
        self.__dict__.pop("_total_shape_value", None)

    # ---- what TensorStorage keeps in shared memory, although the data is not ----

    @property
    def _len(self) -> int:
        return self._count

    @_len.setter
    def _len(self, value: int) -> None:
        self._count = int(value)

    # ---- the first item says what all others look like ----

    def _init(self, data: Any) -> None:
        """Make room for ``max_size`` items like ``data``."""
        try:
            self._make_room(data)
        except BaseException:
            self._forget()
            raise

    def _make_room(self, data: Any) -> None:
        if self.device == "auto":
            first = data if is_tensor_collection(data) or isinstance(data, torch.Tensor) else tree_leaves(data)[0]
            self.device = first.device or torch.device("cpu")
        shape = self._item_shape(data)
        steps = -(-self.max_size // math.prod(shape))
        self.lead = (steps, *shape)
        self.max_size = math.prod(self.lead)
        if is_tensor_collection(data):
            self.specs = {key: (tuple(value.shape), value.dtype) for key, value in _items(data)}
            self._make_groups(self.specs)
            leaves = self._leaves()
            self._storage = data.named_apply(
                lambda key, value: leaves[key], nested_keys=True, batch_size=[steps, *data.shape], device=self.device
            )
        else:
            flat = tree_leaves(data)
            self.specs = {place: (tuple(value.shape), value.dtype) for place, value in enumerate(flat)}
            self._make_groups(self.specs)
            made = iter(self._leaves().values())
            self._storage = tree_map(lambda value: next(made), data)
        self.initialized = True

    def _item_shape(self, data: Any) -> tuple[int, ...]:
        """The leading axes of one item that count as items themselves."""
        if self.ndim == 1:
            return ()
        leaf = data if is_tensor_collection(data) else tree_leaves(data)[0]
        return tuple(leaf.shape[: self.ndim - 1])

    def _make_groups(self, specs: Mapping[Key, Spec]) -> None:
        inner = self.ndim - 1
        n_rows = math.prod(self.lead)
        n_streams = math.prod(self.lead[1:]) if inner else (self.n_envs or 1)
        large = []
        for key, (shape, dtype) in specs.items():
            spec = leaf_spec(shape[inner:], dtype)
            method = self._method(key)
            if method == "none" or (method == "auto" and choose_unseen(spec) is not None) or not spec.nbytes:
                self._dense[key] = torch.empty((n_rows, *shape[inner:]), dtype=dtype, device=self.device)
            else:
                large.append(key)
        for keys in join_keys(large):
            parts = [keys] if len({(specs[key], self._method(key)) for key in keys}) == 1 else [[key] for key in keys]
            for part in parts:
                shape, dtype = specs[part[0]]
                spec = leaf_spec(shape[inner:], dtype)
                options = self.compression_kwargs
                self.groups.append(
                    Group(part, spec, dtype, n_rows, n_streams, self.device, self._method(part[0]), options)
                )
        self._pilot = [] if not inner and self.n_envs is None and self.groups else None

    def _method(self, key: Key) -> str:
        method = self.compression_method
        if isinstance(method, str):
            return method
        return method.get(key, "auto")

    def _leaves(self) -> dict[Key, torch.Tensor]:
        """Each key's tensor of all items."""
        steps, *inner = self.lead
        leaves: dict[Key, torch.Tensor] = {}
        stored = {key: leaf for group in self.groups for key, leaf in zip(group.keys, group.leaves, strict=True)}
        for key in self.specs:
            if key in stored:
                leaves[key] = StoredTensor(stored[key], range(steps), tuple(inner))
            else:
                leaves[key] = self._dense[key].view(*self.lead, *self._dense[key].shape[1:])
        return leaves

    def _renew(self) -> None:
        """Show the groups there are now."""
        leaves = self._leaves()
        if is_tensor_collection(self._storage):
            self._storage = self._storage.named_apply(lambda key, value: leaves[key], nested_keys=True)
        else:
            made = iter(leaves.values())
            self._storage = tree_map(lambda value: next(made), self._storage)

    # ---- at the door ----

    def _max_size_along_dim0(self, *, single_data: Any = None, batched_data: Any = None) -> int:
        # writers ask this before they move their cursor: the last chance to refuse data and leave all as it was
        if self.initialized:
            if single_data is not None:
                self.check_data(single_data, 0, complete=False)
            elif batched_data is not None:
                self.check_data(batched_data, 1, complete=False)
                self._checked = batched_data
        size: int = super()._max_size_along_dim0(single_data=single_data, batched_data=batched_data)
        return size

    def check_data(self, data: Any, n_batch: int, complete: bool = True) -> None:
        """Raise `SpecMismatchError` unless ``data`` is like the first item, with ``n_batch`` axes before it.

        With ``complete=False`` it may lack what a writer adds.
        """
        if isinstance(data, list) or not is_tensor_collection(data):
            return
        if not is_tensor_collection(self._storage):
            raise SpecMismatchError(f"got a {type(data).__name__}, but the first item was a {type(self._storage)}")
        found = dict(_items(data))
        missing, unknown = self.specs.keys() - found.keys(), found.keys() - self.specs.keys() - {_ADDED}
        if not complete:
            missing -= {_ADDED}
        if missing or unknown:
            parts = [f"{_names(keys)} {what}" for keys, what in ((missing, "missing"), (unknown, "new")) if keys]
            raise SpecMismatchError(f"the keys differ from those of the first item: {', '.join(parts)}")
        for key, (shape, dtype) in self.specs.items():
            value = found.get(key)
            if value is None or key == _ADDED:
                continue
            if value.dtype != dtype or tuple(value.shape[n_batch:]) != shape:
                raise SpecMismatchError(
                    f"{key!r} is {tuple(value.shape[n_batch:])} of {value.dtype}, but the first item's was {shape} of "
                    f"{dtype}; nothing was stored"
                )

    # ---- writing ----

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Store ``data`` at ``cursor``: one item at an integer, else one for each position."""
        if os.getpid() != self._owner:
            raise SharingError(
                "this CompressedStorage belongs to another process and what is written here would be lost; "
                "let that process write, or hold the buffer in Ray (CompressedRayReplayBuffer)"
            )
        if isinstance(data, list) and data and all(map(is_tensor_collection, data)):
            data = torch.stack(data)
        single = isinstance(cursor, (int, np.integer)) or (isinstance(cursor, torch.Tensor) and not cursor.ndim)
        if not self.initialized:
            if isinstance(data, list):
                super().set(cursor, data, set_cursor=set_cursor)
                return
            if single:
                self._init(data)
            else:
                self._init(data[0] if is_tensor_collection(data) else tree_map(lambda value: value[0], data))
        steps = self._steps(cursor)
        if steps is None or not is_tensor_collection(data):
            if is_tensor_collection(data):
                self._check_keys(data)
            super().set(cursor, data, set_cursor=set_cursor)
            return
        checked, self._checked = self._checked, None
        if data is not checked or _ADDED in self.specs.keys() - data.keys():
            self.check_data(data, 0 if single else 1)
        if not single and len(steps) != len(data):
            raise SpecMismatchError(f"{len(data)} items cannot be written to {len(steps)} positions")
        self._write(steps, data)
        if set_cursor:
            self._set_last_cursor(cursor)
            self._get_new_len(data, cursor)
        self._bump_mutation_revision()

    def _check_keys(self, data: Any) -> None:
        keys = {key for key, _ in _items(data)} - ({_ADDED} - self.specs.keys())
        if keys != self.specs.keys():
            raise SpecMismatchError(f"the keys {_names(keys)} differ from those of the first item")

    def _steps(self, cursor: Any) -> Positions | None:
        """Where on the first axis ``cursor`` points; None where it says more than that."""
        size = self.lead[0]
        if isinstance(cursor, slice):
            return np.arange(size)[cursor]
        if isinstance(cursor, (int, np.integer)):
            return wrap(np.array([cursor]), size)
        if isinstance(cursor, (torch.Tensor, np.ndarray, range, list)):
            array = cursor.detach().cpu().numpy() if isinstance(cursor, torch.Tensor) else np.asarray(cursor)
            if array.dtype.kind in "iu" and array.ndim <= 1:
                return wrap(array.reshape(-1), size)
        return None

    def _positions_of(self, steps: Positions) -> Positions:
        width = math.prod(self.lead[1:])
        return steps if width == 1 else (steps[:, None] * width + np.arange(width)).reshape(-1)

    def _write(self, steps: Positions, data: Any) -> None:
        positions = self._positions_of(steps)
        if self._dense:
            index: Any = torch.from_numpy(positions)
            if positions[-1] - positions[0] == len(positions) - 1 and (np.diff(positions) == 1).all():
                index = slice(int(positions[0]), int(positions[-1]) + 1)
            for key, leaf in self._dense.items():
                leaf[index if isinstance(index, slice) else index.to(leaf.device)] = (
                    data.get(key).reshape(-1, *leaf.shape[1:]).to(leaf.device)
                )
        batches = [
            [leaf.as_rows(data.get(key)) for key, leaf in zip(group.keys, group.leaves, strict=True)]
            for group in self.groups
        ]
        if self._pilot is not None:
            self._look_at(positions, batches[self._pilot_group()])
        for group, rows in zip(self.groups, batches, strict=True):
            group.write(positions, rows)

    # ---- how many environments take turns ----

    def _pilot_group(self) -> int:
        return max(range(len(self.groups)), key=lambda place: len(self.groups[place].keys))

    def _look_at(self, positions: Positions, batches: Sequence[Any]) -> None:
        """Collect the first items until they tell how many environments take turns; then have that many streams."""
        pilot = self._pilot
        if pilot is None:
            return
        held = sum(len(rows) for rows, *_ in pilot)
        if not np.array_equal(positions, np.arange(held, held + len(positions))):
            # written in no order that means anything
            self._pilot = None
            return
        pilot.append([rows[: PILOT_ROWS - held].copy() for rows in batches])
        if held + len(positions) < min(PILOT_ROWS, self.max_size):
            return
        columns = [np.concatenate(column) for column in zip(*pilot, strict=True)]
        self._pilot = None
        spec = self.groups[self._pilot_group()].store.spec
        n_envs = find_n_envs(spec, columns[0], columns[1] if len(columns) > 1 else None)
        if n_envs > 1:
            self.groups = [group.rewrite(n_envs, held) for group in self.groups]
            self._renew()

    # ---- reading ----

    def get(self, index: Any) -> Any:
        """Items at ``index``; those of a slice are decoded key by key, when they are used."""
        if not self.initialized or not is_tensor_collection(self._storage):
            return super().get(index)
        if isinstance(index, (int, np.integer)):
            wrap(np.array([index]), self._len_along_dim0)
            return super().get(index)
        positions = self._positions(index)
        if positions is None:
            return super().get(index)
        return self._read(positions, None)

    def get_fields(self, index: Any, keys: Sequence[Key]) -> list[torch.Tensor]:
        """Only ``keys`` of the items at ``index``; nothing else is decoded."""
        unknown = [key for key in keys if key not in self.specs]
        if unknown:
            raise UnknownFieldError(f"no field {_names(unknown)}; there are {_names(self.specs)}")
        positions = self._positions(index)
        if positions is None:
            raise IndexOutOfRangeError(f"items are found by integers, got {index!r}")
        found = self._columns(positions, set(keys))
        return [found[key] for key in keys]

    def _positions(self, index: Any) -> Positions | None:
        """Positions that ``index`` names one by one; None for slices, masks and the like."""
        if isinstance(index, tuple):
            if len(index) != self.ndim:
                return None
            arrays = [array for array in map(_as_indices, index) if array is not None]
            if len(arrays) < self.ndim or len({array.shape for array in arrays}) > 1:
                return None
            lengths = (self._len_along_dim0, *self.lead[1:])
            wrapped = [wrap(part, size) for part, size in zip(arrays, lengths, strict=True)]
            return np.ravel_multi_index(wrapped, self.lead).astype(np.int64)
        array = _as_indices(index)
        if array is None or self.ndim > 1:
            return None
        return wrap(array, self._count)

    def _columns(self, positions: Positions, keys: Keys) -> dict[Key, torch.Tensor]:
        found: dict[Key, torch.Tensor] = {}
        flat = positions.reshape(-1)
        index: torch.Tensor | None = None
        for key, leaf in self._dense.items():
            if keys is None or key in keys:
                if index is None:
                    index = torch.from_numpy(flat).to(leaf.device)
                found[key] = leaf.index_select(0, index).reshape(*positions.shape, *leaf.shape[1:])
        for group in self.groups:
            wanted = group.keys if keys is None else [key for key in group.keys if key in keys]
            if len(wanted) == len(group.keys):
                tensors = [part.reshape(*positions.shape, *part.shape[1:]) for part in group.read(flat)]
                found.update(zip(wanted, tensors, strict=True))
            else:
                found.update({key: group.leaves[group.keys.index(key)].read(positions) for key in wanted})
        return found

    def _read(self, positions: Positions, keys: Keys) -> Any:
        found = self._columns(positions, keys)
        shape = [*positions.shape, *self._storage.shape[self.ndim :]]
        if is_tensorclass(self._storage) or len(found) < len(tuple(self._storage.keys(True, True))):
            return self._storage[:1].named_apply(
                lambda key, value: found[key], nested_keys=True, batch_size=shape, device=self.device
            )
        return TensorDict({key: found[key] for key in self.specs}, batch_size=shape, device=self.device)

    # ---- the rest ----

    def _empty(self) -> None:
        for group in self.groups:
            group.store.clear()
        super()._empty()

    def memory_usage(self) -> MemoryUsage:
        """What is held, by purpose; ``dense`` is what TorchRL's tensor storages take for the same items."""
        share = self._count / max(self.max_size, 1)
        small = sum(leaf.nbytes for leaf in self._dense.values())
        total = MemoryUsage(0, 0, 0, other=int(small * share), dense=small)
        for group in self.groups:
            usage = group.store.memory_usage()
            codecs = {_name(key): usage.codecs[""] for key in group.keys}
            total += MemoryUsage(
                usage.payload, usage.index, usage.keyframes, usage.other, dense=usage.dense, codecs=codecs
            )
        return total

    def check(self) -> None:
        """Raise if anything inside disagrees."""
        for group in self.groups:
            group.store.check()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(len={self._count}, max_size={self.max_size}, ndim={self.ndim}, "
            f"keys=[{_names(self.specs)}], {self.memory_usage()})"
        )

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` of another storage of this size needs; tensors, numbers and text."""
        from sb3_extra_buffers.replay_buffers.checkpoint import pack_storage

        manifest, arrays = pack_storage(self)
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        return {"manifest": manifest, "arrays": tensors, "initialized": self.initialized, "_len": self._count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hold what the storage held whose `state_dict` this is."""
        from sb3_extra_buffers.replay_buffers.checkpoint import unpack_storage

        arrays = {name: to_numpy(tensor) for name, tensor in state_dict["arrays"].items()}
        unpack_storage(self, state_dict["manifest"], arrays)
        self._bump_mutation_revision()

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise SharingError(
                "a CompressedStorage cannot be shared with a process that is being started: its tables live in one "
                "process. Hold the buffer in Ray (CompressedRayReplayBuffer), or use LazyMemmapStorage"
            )
        state: dict[str, Any] = Storage.__getstate__(self)
        # decoded if it were pickled as it is; rebuilt from the groups instead
        state["_checked"] = None
        state["_storage"] = None if self._storage is None else _blank(self._storage)
        state.pop("_attached_entities_list", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        Storage.__setstate__(self, state)
        self._owner = os.getpid()
        if self._storage is not None:
            leaves = self._leaves()
            if is_tensor_collection(self._storage):
                shape = [self.lead[0], *self._storage.shape[1:]]
                self._storage = self._storage.named_apply(
                    lambda key, value: leaves[key], nested_keys=True, batch_size=shape
                )
            else:
                self._renew()


def _blank(storage: Any) -> Any:
    """A stand-in of the same structure that weighs nothing."""

    def empty(value: torch.Tensor) -> torch.Tensor:
        return torch.empty((0, *value.shape[1:]), dtype=value.dtype)

    if is_tensor_collection(storage):
        return storage.apply(empty, batch_size=[0, *storage.shape[1:]])
    return tree_map(empty, storage)


def _items(data: Any) -> list[tuple[Key, torch.Tensor]]:
    """Keys and tensors of a TensorDict, nested ones included."""
    found = []
    for key, value in data.items(include_nested=True):
        if isinstance(value, torch.Tensor):
            found.append((key, value))
        elif is_non_tensor(value):
            raise SpecMismatchError(f"{key!r} holds no tensor; a CompressedStorage keeps tensors only")
    return found


def _as_indices(index: Any) -> np.ndarray[Any, Any] | None:
    """An array of integers, or None if ``index`` is none."""
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    elif isinstance(index, (list, range)):
        index = np.asarray(index, np.int64) if not len(index) else np.asarray(index)
    if isinstance(index, np.ndarray) and index.ndim and index.dtype.kind in "iu":
        return index
    return None


def _name(key: Key) -> str:
    return ".".join(key) if isinstance(key, tuple) else str(key)


def _names(keys: Any) -> str:
    return ", ".join(sorted(map(_name, keys)))
