"""`CompressedStorage`: what TorchRL's tensor storages hold, in a hundredth of the memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from sb3_extra_buffers.errors import (
    IndexOutOfRangeError,
    MissingExtraError,
    SpecMismatchError,
    UnknownFieldError,
)
from sb3_extra_buffers.replay_buffers.groups import Group, Pilot, join_keys
from sb3_extra_buffers.replay_buffers.portable import PortableStorage
from sb3_extra_buffers.replay_buffers.schema import ADDED, Key, Spec, check_items, name_of, names_of, specs_of
from sb3_extra_buffers.replay_buffers.stored_tensor import Positions, StoredTensor, leaf_spec, wrap
from sb3_extra_buffers.stores import device_observation
from sb3_extra_buffers.stores.choice import choose_unseen
from sb3_extra_buffers.stores.usage import MemoryUsage

try:
    from tensordict import TensorDict, is_tensor_collection, is_tensorclass
except ImportError as error:
    raise MissingExtraError(
        "CompressedStorage needs 'torchrl' and 'tensordict': pip install 'sb3-extra-buffers[torchrl]'"
    ) from error

from sb3_extra_buffers.replay_buffers.checkpoint import CompressedStorageCheckpointer

__all__ = ["CompressedStorage"]

Keys = set[Any] | None


class CompressedStorage(PortableStorage):
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
        device: Where sampled tensors are put. On CUDA what is compressed as differences lives there as well, and what
            is written in turn is decoded there; else it stays in main memory.
        ndim: Leading axes that count as items, as for TorchRL's storages.
        n_envs: How many environments take turns; found from the first items if it is not given.
        compression_method: ``"auto"``, another method for all large leaves, or one for each key.
        compression_kwargs: Options of that method.

    Example:
        >>> from torchrl.data import TensorDictReplayBuffer
        >>> buffer = TensorDictReplayBuffer(storage=CompressedStorage(100_000), batch_size=32)
    """

    _default_checkpointer = CompressedStorageCheckpointer

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
        super().__init__(None, max_size, device=device, ndim=ndim)
        self.n_envs = n_envs
        self.compression_method = compression_method
        self.compression_kwargs = dict(compression_kwargs or {})
        self._requested_size = int(max_size)
        self._forget()

    def _forget(self) -> None:
        """As before anything was written."""
        self._storage = None
        self.initialized = False
        self._count = 0
        self.max_size = self._requested_size
        self.groups: list[Any] = []  # a `Group` each, or a `DeviceGroup`
        self.lead: tuple[int, ...] = ()
        self.specs: dict[Key, Spec] = {}
        # leaves that are not compressed, seen as one row an item
        self._dense: dict[Key, torch.Tensor] = {}
        self._pilot: Pilot | None = None
        # what a writer is about to write, looked at already
        self._checked: Any = None
        self.__dict__.pop("_total_shape_value", None)

    def empty_copy(self) -> CompressedStorage:
        """Another one with the same options, and nothing in it."""
        return CompressedStorage(
            self._requested_size,
            device=self.device,
            ndim=self.ndim,
            n_envs=self.n_envs,
            compression_method=self.compression_method,
            compression_kwargs=self.compression_kwargs,
        )

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
        self.specs = specs_of(data)
        self._make_groups(self.specs)
        if is_tensor_collection(data):
            leaves = self._leaves()
            self._storage = data.named_apply(
                lambda key, value: leaves[key], nested_keys=True, batch_size=[steps, *data.shape], device=self.device
            )
        else:
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
                method, options = self._method(part[0]), self.compression_kwargs
                self.groups.append(self._new_group(part, spec, dtype, n_rows, n_streams, self.device, method, options))
        if not inner and self.n_envs is None and self.groups:
            self._pilot = Pilot(self.groups[self._pilot_group()].store.spec, n_rows)

    def _new_group(self, *arguments: Any) -> Any:
        if device_observation.stays_on_host(self.device):
            return Group(*arguments)
        from sb3_extra_buffers.replay_buffers.device_group import DeviceGroup

        return DeviceGroup(*arguments)

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
                self.check_data(single_data, 0)
            elif batched_data is not None:
                self.check_data(batched_data, 1)
                self._checked = batched_data
        size: int = super()._max_size_along_dim0(single_data=single_data, batched_data=batched_data)
        return size

    def check_data(self, data: Any, n_batch: int | None) -> None:
        """Raise `SpecMismatchError` unless ``data`` is like the first item, with ``n_batch`` axes before it."""
        if not isinstance(data, list):
            check_items(self.specs, is_tensor_collection(self._storage), data, n_batch)

    # ---- writing ----

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Store ``data`` at ``cursor``: one item at an integer, else one for each position."""
        self._check_owner()
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
        checked, self._checked = self._checked, None
        if data is not checked:
            self.check_data(data, None if steps is None else 0 if single else 1)
        if steps is None or not is_tensor_collection(data):
            super().set(cursor, data, set_cursor=set_cursor)
            return
        if not single and len(steps) != len(data):
            raise SpecMismatchError(f"{len(data)} items cannot be written to {len(steps)} positions")
        self._write(steps, data)
        if set_cursor:
            self._set_last_cursor(cursor)
            self._get_new_len(data, cursor)
        self._bump_mutation_revision()

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
                value = data.get(key, None)
                if value is None:
                    # TorchRL's own, which `buffer[i] = item` leaves as it was
                    continue
                leaf[index if isinstance(index, slice) else index.to(leaf.device)] = value.reshape(
                    -1, *leaf.shape[1:]
                ).to(leaf.device)
        left_out = ADDED in self.specs and ADDED not in self._dense and ADDED not in set(data.keys())
        batches = [
            [leaf.as_rows(data.get(key)) for key, leaf in zip(group.keys, group.leaves, strict=True)]
            if not (left_out and ADDED in group.keys)
            else None
            for group in self.groups
        ]
        pilots = None if self._pilot is None else batches[self._pilot_group()]
        if pilots is not None:
            self._look_at(positions, pilots)
        for group, rows in zip(self.groups, batches, strict=True):
            if rows is not None:
                group.write(positions, rows)

    # ---- how many environments take turns ----

    def _pilot_group(self) -> int:
        return max(range(len(self.groups)), key=lambda place: len(self.groups[place].keys))

    def _look_at(self, positions: Positions, batches: Sequence[Any]) -> None:
        """Have as many streams as environments take turns, once the first items tell how many."""
        pilot = self._pilot
        n_envs = None if pilot is None else pilot.look_at(positions, batches)
        if pilot is None or n_envs is None:
            return
        self._pilot = None
        if n_envs > 1:
            self.groups = [group.rewrite(n_envs, pilot.held) for group in self.groups]
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
            raise UnknownFieldError(f"no field {names_of(unknown)}; there are {names_of(self.specs)}")
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
        return wrap(array, self._len)

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
            group.clear()
        super()._empty()

    def memory_usage(self) -> MemoryUsage:
        """What is held, by purpose; ``dense`` is what TorchRL's tensor storages take for the same items."""
        share = self._len / max(self.max_size, 1)
        small = sum(leaf.nbytes for leaf in self._dense.values())
        total = MemoryUsage(0, 0, 0, other=int(small * share), dense=small)
        for group in self.groups:
            usage = group.memory_usage()
            codecs = {name_of(key): usage.codecs[""] for key in group.keys}
            total += MemoryUsage(
                usage.payload, usage.index, usage.keyframes, usage.other, dense=usage.dense, codecs=codecs
            )
        return total

    def check(self) -> None:
        """Raise if anything inside disagrees."""
        for group in self.groups:
            group.check()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(len={self._len}, max_size={self.max_size}, ndim={self.ndim}, "
            f"keys=[{names_of(self.specs)}], {self.memory_usage()})"
        )


def _as_indices(index: Any) -> np.ndarray[Any, Any] | None:
    """An array of integers, or None if ``index`` is none."""
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    elif isinstance(index, (list, range)):
        index = np.asarray(index, np.int64) if not len(index) else np.asarray(index)
    if isinstance(index, np.ndarray) and index.ndim and index.dtype.kind in "iu":
        return index
    return None
