"""`ItemTable`: the items of a storage, key by key."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch.utils._pytree import tree_map  # torch has no public tree functions

from sb3_extra_buffers._torchrl.groups import Group
from sb3_extra_buffers._torchrl.indexing import Positions, as_indices, is_on_gpu, numpy_index, wrap_indices, wrap_on_gpu
from sb3_extra_buffers._torchrl.schema import Key, Spec, key_name
from sb3_extra_buffers._torchrl.stored_tensor import SelectedTensor, StoredTensor
from sb3_extra_buffers.errors import IndexOutOfRangeError
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["Batch", "ItemTable", "example_item", "shape_batches"]

_BASELINE = "TorchRL's LazyTensorStorage"


class Batch(NamedTuple):
    """A TensorDict in an item: the item itself, whose key is None, or one that is nested in it."""

    key: Key | None
    size: tuple[int, ...]
    names: list[str | None]


class ItemTable:
    """Small leaves as tensors with one row per item, large leaves in groups.

    ``lead`` are the axes that count items, ``(steps, *inner)``; a position numbers the items over all of them. The
    structure never changes, only what the tensors and groups hold: a storage replaces its table in one assignment.
    """

    def __init__(
        self,
        lead: tuple[int, ...],
        specs: dict[Key, Spec],
        dense: dict[Key, torch.Tensor],
        groups: Sequence[Any],
    ) -> None:
        self.lead, self.specs, self.dense = lead, specs, dense
        self.groups: list[Any] = list(groups)  # of `Group`
        self.n_items = math.prod(lead)
        self.width = math.prod(lead[1:])
        #: Of the items that `like` was called with.
        self.batches: list[Batch] = []

    def with_groups(self, groups: Sequence[Group]) -> ItemTable:
        """Return a table with the same dense leaves and other groups."""
        return ItemTable(self.lead, self.specs, self.dense, groups)

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Return a tensor over all items for each key."""
        steps, *inner = self.lead
        stored = {
            key: StoredTensor(group, which, range(steps), tuple(inner))
            for group in self.groups
            for which, key in enumerate(group.keys)
        }
        return {
            key: stored[key] if key in stored else self.dense[key].view(*self.lead, *self.dense[key].shape[1:])
            for key in self.specs
        }

    def like(self, item: Any, device: Any) -> Any:
        """Return a TensorDict or tree over all items, structured like ``item``."""
        tensors = self.tensors()
        if is_tensor_collection(item):
            self.batches = _batches(item)
            batch_size = [self.lead[0], *item.shape]
            items = item.named_apply(
                lambda key, value: tensors[key], nested_keys=True, batch_size=batch_size, device=device
            )
            return shape_batches(items, self.lead[:1], self.batches)
        leaves = iter(tensors.values())
        return tree_map(lambda _: next(leaves), item)

    # ---- positions ----

    def steps_at(self, cursor: Any) -> Positions | None:
        """Return the steps that ``cursor`` names on the first axis, or None if it names anything else."""
        n_steps = self.lead[0]
        if isinstance(cursor, slice):
            try:
                return np.arange(n_steps)[cursor]
            except (TypeError, ValueError) as error:
                raise IndexOutOfRangeError(f"cannot slice {n_steps} items with {cursor!r}: {error}") from None
        if isinstance(cursor, (int, np.integer)) and not isinstance(cursor, bool):
            return wrap_indices(np.array([cursor]), n_steps)
        indices = as_indices(cursor)
        return None if indices is None or indices.ndim > 1 else wrap_indices(indices.reshape(-1), n_steps)

    def positions_of(self, steps: Positions) -> Positions:
        """Return the positions of all items of ``steps``."""
        width = self.width
        return steps if width == 1 else (steps[:, None] * width + np.arange(width)).reshape(-1)

    def positions_at(self, index: Any, length: int) -> Positions | torch.Tensor | None:
        """Return the positions among the first ``length`` that integers name, or None for slices, masks and so on.

        Those of indices on a GPU stay there, if all groups can read them.
        """
        parts = index if isinstance(index, tuple) else (index,)
        if all(map(is_on_gpu, parts)) and all(group.reads_tensors for group in self.groups):
            return self._positions_on_gpu(parts, length)
        if isinstance(index, tuple):
            if len(index) != len(self.lead):
                return None
            arrays = [array for array in map(as_indices, index) if array is not None and array.ndim]
            if len(arrays) < len(self.lead) or len({array.shape for array in arrays}) > 1:
                return None
            lengths = (-(-length // self.width), *self.lead[1:])
            wrapped = [wrap_indices(part, size) for part, size in zip(arrays, lengths, strict=True)]
            return np.ravel_multi_index(wrapped, self.lead).astype(np.int64)
        array = as_indices(index)
        if array is None or not array.ndim or len(self.lead) > 1:
            return None
        return wrap_indices(array, length)

    def _positions_on_gpu(self, parts: tuple[torch.Tensor, ...], length: int) -> torch.Tensor | None:
        integers = all(part.ndim and not part.is_floating_point() and part.dtype != torch.bool for part in parts)
        if len(parts) != len(self.lead) or not integers or len({part.shape for part in parts}) > 1:
            return None
        lengths = (-(-length // self.width), *self.lead[1:])
        positions = torch.zeros_like(parts[0], dtype=torch.int64)
        for part, size, n in zip(parts, lengths, self.lead, strict=True):
            positions = positions * n + wrap_on_gpu(part, size)
        return positions

    def select(self, index: Any) -> Positions:
        """Return the positions that any index selects, in the shape of the selection."""
        try:
            return np.asarray(np.arange(self.n_items).reshape(self.lead)[numpy_index(index)])
        except (IndexError, TypeError, ValueError) as error:
            raise IndexOutOfRangeError(f"cannot index items with {index!r}: {error}") from None

    # ---- contents ----

    def read_flags(self, positions: Positions | torch.Tensor) -> dict[Key, torch.Tensor]:
        """Like `read` for a caller that uses flags and little else: other compressed keys are decoded on first use.

        The caller must drop them before the items change.
        """
        unread = {
            key: SelectedTensor(group, which, positions)
            for group in self.groups
            if group.dtype != torch.bool
            for which, key in enumerate(group.keys)
        }
        return {**self.read(positions, self.specs.keys() - unread.keys()), **unread}

    def read(self, positions: Positions | torch.Tensor, keys: Collection[Key] | None = None) -> dict[Key, torch.Tensor]:
        """Decode the items at ``positions``; all keys, or ``keys`` alone."""
        tensors: dict[Key, torch.Tensor] = {}
        flat = positions.reshape(-1)
        index: torch.Tensor | None = None
        for key, leaf in self.dense.items():
            if keys is None or key in keys:
                if index is None:
                    index = flat if isinstance(flat, torch.Tensor) else torch.from_numpy(flat).to(leaf.device)
                tensors[key] = leaf.index_select(0, index)
        for group in self.groups:
            wanted = group.keys if keys is None else [key for key in group.keys if key in keys]
            if not wanted:
                continue
            # None decodes frames that the keys share only once
            which = None if len(wanted) == len(group.keys) else [group.keys.index(key) for key in wanted]
            tensors.update(zip(wanted, group.read(flat, which), strict=True))
        if positions.ndim > 1:
            return {key: part.reshape(*positions.shape, *part.shape[1:]) for key, part in tensors.items()}
        return tensors

    def clear(self) -> None:
        """Make every compressed row unwritten."""
        for group in self.groups:
            group.clear()

    def memory_usage(self, length: int) -> MemoryUsage:
        """Return the memory in use for ``length`` items, compared with what TorchRL's tensor storages would take."""
        n_items = max(self.n_items, 1)
        small = sum(leaf.nbytes for leaf in self.dense.values()) * length // n_items
        large = sum(group.spec.nbytes * len(group.keys) for group in self.groups) * length
        # on the CPU, memory that was never written is not resident
        other = sum(leaf.nbytes if leaf.is_cuda else leaf.nbytes * length // n_items for leaf in self.dense.values())
        total = MemoryUsage(other=other)
        for group in self.groups:
            usage = group.memory_usage()
            total += replace(usage, codecs={key_name(key): usage.codecs[""] for key in group.keys})
        return replace(total, transitions=length, dense=small + large, dense_observations=large, baseline=_BASELINE)

    def check(self) -> None:
        """Raise if a group is inconsistent."""
        for group in self.groups:
            group.check()


def example_item(structure: Any) -> Any:
    """Return an item like those of ``structure``, which has one more leading axis; its tensors have no memory."""

    def empty(value: torch.Tensor) -> torch.Tensor:
        return torch.empty(value.shape[1:], dtype=value.dtype, device="meta")

    if is_tensor_collection(structure):
        item = structure.apply(empty, batch_size=structure.shape[1:], device=None)
        return shape_batches(item, (), _batches(structure), 1)
    return tree_map(empty, structure)


def _batches(item: Any) -> list[Batch]:
    """Return what `shape_batches` needs to make TensorDicts like ``item``; usually nothing."""
    batches = [Batch(None, tuple(item.batch_size), item.names)]
    for key, value in item.items(include_nested=True):
        if is_tensor_collection(value):
            batches.append(Batch(key, tuple(value.batch_size), value.names))
    return [batch for batch in batches if any(batch.names) or batch.size != tuple(item.batch_size)]


def shape_batches(items: Any, lead: Sequence[int], batches: list[Batch], n_inner: int = 0) -> Any:
    """Give ``items`` and the TensorDicts nested in them their batch sizes and names of axes, behind ``lead``.

    ``lead`` replaces the first ``n_inner`` axes of ``batches``.
    """
    for key, size, names in batches:
        part = items if key is None else items.get(key)
        part.batch_size = [*lead, *size[n_inner:]]
        if any(names[n_inner:]):
            part.names = [*[None] * len(lead), *names[n_inner:]]
    return items
