"""`CompressedStorage`: what TorchRL's tensor storages hold, in a hundredth of the memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from sb3_extra_buffers._torchrl.groups import Group, Pilot, join_keys
from sb3_extra_buffers._torchrl.portable import PortableStorage
from sb3_extra_buffers._torchrl.schema import (
    Key,
    Spec,
    at_least,
    check_items,
    items,
    name_of,
    names_of,
    specs_of,
)
from sb3_extra_buffers._torchrl.stored_tensor import Positions, StoredTensor, leaf_spec, wrap
from sb3_extra_buffers._torchrl.transactions import Write, follow_cursor
from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.errors import (
    ArgumentError,
    CodecOptionError,
    IndexOutOfRangeError,
    MissingExtraError,
    SpecMismatchError,
    UnknownFieldError,
)
from sb3_extra_buffers.stores import device_observation
from sb3_extra_buffers.stores.choice import choose_unseen
from sb3_extra_buffers.stores.locks import fork_safe_lock
from sb3_extra_buffers.stores.usage import MemoryUsage

try:
    from tensordict import TensorDict, is_tensor_collection, is_tensorclass
except ImportError as error:
    raise MissingExtraError(
        "CompressedStorage needs 'torchrl' and 'tensordict': pip install 'sb3-extra-buffers[torchrl]'"
    ) from error

from sb3_extra_buffers._torchrl.checkpoint import CompressedStorageCheckpointer

__all__ = ["CompressedStorage"]

Keys = set[Any] | None
Layout = tuple[list[Key], list[list[Key]]]  # keys that are not compressed, and those that share a store

# what the first write decides, and what a write may replace
_STATE = (
    "_storage", "initialized", "max_size", "groups", "lead", "specs", "_dense", "_pilot", "device", "_last_cursor",
)  # fmt: skip


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
    # what comes from a file is looked at on the host first
    _host_only = False

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
        max_size, ndim = at_least("max_size", max_size, 1), at_least("ndim", ndim, 1)
        if n_envs is not None:
            n_envs = at_least("n_envs", n_envs, 1)
            if ndim > 1:
                raise ArgumentError(f"n_envs={n_envs} is for ndim=1; with ndim={ndim} it follows from the data")
        _check_methods(compression_method, compression_kwargs)
        try:
            device = device if device == "auto" else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"device={device!r} is no device: {error}") from None
        super().__init__(None, max_size, device=device, ndim=ndim)
        self.n_envs = n_envs
        self.compression_method = compression_method
        self.compression_kwargs = dict(compression_kwargs or {})
        self._requested_size = max_size
        self._lock = fork_safe_lock(of_buffer=True)
        # what a writer is about to write, and what is being written
        self.announced: Write | None = None
        self._open: Write | None = None
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

    def _init(self, data: Any, layout: Layout | None = None) -> None:
        """Make room for ``max_size`` items like ``data``, with keys laid out as in a file if ``layout`` says so."""
        try:
            self._reserve(data, layout)
        except BaseException:
            self._forget()
            raise

    def _reserve(self, data: Any, layout: Layout | None) -> None:
        if self.device == "auto":
            first = data if is_tensor_collection(data) or isinstance(data, torch.Tensor) else tree_leaves(data)[0]
            self.device = first.device or torch.device("cpu")
        shape = self._item_shape(data)
        steps = -(-self.max_size // math.prod(shape))
        self.lead = (steps, *shape)
        self.max_size = math.prod(self.lead)
        self.specs = specs_of(data)
        self._make_groups(self.specs, layout or self._layout(self.specs))
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

    def _layout(self, specs: Mapping[Key, Spec]) -> Layout:
        """Which keys stay as they are, and which others share a store."""
        dense: list[Key] = []
        large: list[Key] = []
        for key, (shape, dtype) in specs.items():
            spec = leaf_spec(shape[self.ndim - 1 :], dtype)
            method = self._method(key)
            small = method == "none" or (method == "auto" and choose_unseen(spec) is not None) or not spec.nbytes
            (dense if small else large).append(key)
        joined = []
        for keys in join_keys(large):
            alike = len({(specs[key], self._method(key)) for key in keys}) == 1
            joined += [keys] if alike else [[key] for key in keys]
        return dense, joined

    def _make_groups(self, specs: Mapping[Key, Spec], layout: Layout) -> None:
        inner, n_rows = self.ndim - 1, math.prod(self.lead)
        n_streams = math.prod(self.lead[1:]) if inner else (self.n_envs or 1)
        dense, groups = {}, []
        for key in layout[0]:
            shape, dtype = specs[key]
            dense[key] = torch.empty((n_rows, *shape[inner:]), dtype=dtype, device=self.device)
        for keys in layout[1]:
            shape, dtype = specs[keys[0]]
            spec, method = leaf_spec(shape[inner:], dtype), self._method(keys[0])
            options = self.compression_kwargs
            groups.append(self._new_group(keys, spec, dtype, n_rows, n_streams, self.device, method, options))
        self._dense, self.groups = dense, groups
        if not inner and self.n_envs is None and groups:
            self._pilot = Pilot(groups[self._pilot_group()].leaves[0].spec, n_rows)

    def _new_group(self, *arguments: Any) -> Any:
        if self._host_only or device_observation.stays_on_host(self.device):
            return Group(*arguments)
        from sb3_extra_buffers._torchrl.device_group import DeviceGroup

        return DeviceGroup(*arguments)

    def _method(self, key: Key) -> str:
        method = self.compression_method
        if isinstance(method, str):
            return method
        return method.get(key, "auto")

    def _leaves(self, groups: Sequence[Any] | None = None) -> dict[Key, torch.Tensor]:
        """Each key's tensor of all items."""
        steps, *inner = self.lead
        leaves: dict[Key, torch.Tensor] = {}
        groups = self.groups if groups is None else groups
        stored = {key: leaf for group in groups for key, leaf in zip(group.keys, group.leaves, strict=True)}
        for key in self.specs:
            if key in stored:
                leaves[key] = StoredTensor(stored[key], range(steps), tuple(inner))
            else:
                leaves[key] = self._dense[key].view(*self.lead, *self._dense[key].shape[1:])
        return leaves

    def _use_groups(self, groups: list[Any]) -> None:
        """Hold what is compressed in ``groups`` from now on, which are known to be of the right streams."""
        leaves = self._leaves(groups)
        shown: Any
        if is_tensor_collection(self._storage):
            shown = self._storage.named_apply(lambda key, value: leaves[key], nested_keys=True)
        else:
            made = iter(leaves.values())
            shown = tree_map(lambda value: next(made), self._storage)
        # at once: nothing may see one without the others
        self.__dict__.update(groups=groups, _storage=shown, _pilot=None)

    # ---- at the door ----

    def _max_size_along_dim0(self, *, single_data: Any = None, batched_data: Any = None) -> int:
        # writers ask this before they move their cursor: the last chance to refuse data and leave all as it was
        data = batched_data if single_data is None else single_data
        if data is not None:
            if self.initialized:
                self.check_data(data, 1 if single_data is None else 0)
            follow_cursor(self, sys._getframe(1))
            self.announced = Write(data, checked=self.initialized)
        size: int = super()._max_size_along_dim0(single_data=single_data, batched_data=batched_data)
        return size

    def check_data(self, data: Any, n_batch: int | None) -> None:
        """Raise `SpecMismatchError` unless ``data`` is like the first item, with ``n_batch`` axes before it."""
        if not isinstance(data, list):
            check_items(self.specs, is_tensor_collection(self._storage), data, n_batch)

    # ---- writing ----

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Store ``data`` at ``cursor``: one item at an integer, else one for each position.

        All of it is stored or nothing. If this is interrupted while items are overwritten, the call is completed
        before the interrupt goes on.
        """
        self._check_owner()
        with self._lock:
            self.recover()
            write, self.announced = self.announced, None
            if write is None or write.data is not data:
                write = Write(data)
            try:
                self._set(write, cursor, data, set_cursor)
            except BaseException:
                self.recover()
                raise
            finally:
                write.data = None

    def _set(self, write: Write, cursor: Any, data: Any, set_cursor: bool) -> None:
        if isinstance(data, list):
            data = _stack(data)
        single = isinstance(cursor, (int, np.integer)) or (isinstance(cursor, torch.Tensor) and not cursor.ndim)
        write.before = {name: self.__dict__[name] for name in _STATE}, self._len, self._last_cursor_index
        self._open = write
        if not self.initialized:
            self._init(data if single else _first(data))
        steps = self._steps(cursor)
        if not write.checked:
            self.check_data(data, None if steps is None else 0 if single else 1)
        shape = None
        if steps is not None:
            n_items = 1 if single else len(data) if is_tensor_collection(data) else len(tree_leaves(data)[0])
            if len(steps) != n_items:
                raise SpecMismatchError(f"{n_items} items cannot be written to {len(steps)} positions")
            positions = self._positions_of(steps)
        else:
            table = self._table(cursor)
            shape, positions = table.shape, table.reshape(-1)
        self._prepare(write, positions, data, shape)
        if set_cursor:
            counted = positions.size if steps is not None else self._count_items(data, cursor)
            if not isinstance(cursor, (int, np.integer, slice, range, torch.Tensor)):
                # as TorchRL knows it
                cursor = torch.from_numpy(positions // math.prod(self.lead[1:]))
            write.cursor, write.length = cursor, min(write.before[1] + counted, self.max_size)
        # what nobody can read yet is simply not counted if this fails
        # those in turn begin with the lowest
        first = write.index.start if isinstance(write.index, slice) else int(write.positions.min(initial=1 << 62))
        write.repeat = first < write.before[1]
        self._apply(write)

    def _steps(self, cursor: Any) -> Positions | None:
        """Where on the first axis ``cursor`` points; None where it says more than that."""
        size = self.lead[0]
        if isinstance(cursor, slice):
            try:
                return np.arange(size)[cursor]
            except (TypeError, ValueError) as error:
                raise IndexOutOfRangeError(f"{cursor!r} is no slice of {size} items: {error}") from None
        if isinstance(cursor, (int, np.integer)) and not isinstance(cursor, bool):
            return wrap(np.array([cursor]), size)
        if isinstance(cursor, (torch.Tensor, np.ndarray, range, list)):
            array = cursor.detach().cpu().numpy() if isinstance(cursor, torch.Tensor) else _as_array(cursor)
            if array.dtype.kind in "iu" and array.ndim <= 1:
                return wrap(array.reshape(-1), size)
        return None

    def _table(self, index: Any) -> Positions:
        """Positions that any other index names, in its shape."""
        parts = index if isinstance(index, tuple) else (index,)
        known = tuple(
            part.detach().cpu().numpy()
            if isinstance(part, torch.Tensor)
            else _as_array(part)
            if isinstance(part, (list, range))
            else part
            for part in parts
        )
        try:
            return np.asarray(np.arange(math.prod(self.lead)).reshape(self.lead)[known])
        except (IndexError, TypeError, ValueError) as error:
            raise IndexOutOfRangeError(f"{index!r} names no items: {error}") from None

    def _count_items(self, data: Any, cursor: Any) -> int:
        leaf = data if is_tensor_collection(data) else tree_leaves(data)[0]
        return math.prod(leaf.shape[: self.ndim - isinstance(cursor, (int, np.integer))])

    def _positions_of(self, steps: Positions) -> Positions:
        width = math.prod(self.lead[1:])
        return steps if width == 1 else (steps[:, None] * width + np.arange(width)).reshape(-1)

    def _prepare(self, write: Write, positions: Positions, data: Any, shape: tuple[int, ...] | None) -> None:
        """Have everything ready that can fail: rows for the groups, and values where they belong."""
        values: Any = data if is_tensor_collection(data) else dict(items(data))
        n_rows, kept = len(positions), None
        in_turn = bool(n_rows) and positions[-1] - positions[0] == n_rows - 1 and bool((np.diff(positions) == 1).all())
        if not in_turn and len(np.unique(positions)) != n_rows:
            # the last of those for one position counts
            kept = np.sort(n_rows - 1 - np.unique(positions[::-1], return_index=True)[1])
            positions = positions[kept]

        def rows_of(key: Key, leaf_shape: tuple[int, ...]) -> Any:
            value = values.get(key, None)
            if value is None:
                # TorchRL's own, which `buffer[i] = item` leaves as it was
                return None
            if value.requires_grad:
                value = value.detach()
            if shape is not None:
                value = _expand(value, (*shape, *leaf_shape))
            if value.ndim != 1 + len(leaf_shape):
                value = value.reshape(-1, *leaf_shape)
            return value if kept is None else value[torch.from_numpy(kept).to(value.device)]

        dense = [(leaf, rows_of(key, tuple(leaf.shape[1:]))) for key, leaf in self._dense.items()]
        write.dense = [(leaf, value.to(leaf.device)) for leaf, value in dense if value is not None]
        write.index = slice(int(positions[0]), int(positions[-1]) + 1) if in_turn else torch.from_numpy(positions)
        batches: list[Any] = []
        for group in self.groups:
            found = [rows_of(key, leaf.shape) for key, leaf in zip(group.keys, group.leaves, strict=True)]
            if any(value is None for value in found):
                batches.append(None)
            else:
                batches.append([leaf.as_rows(part) for leaf, part in zip(group.leaves, found, strict=True)])
        write.positions, write.rows = positions, batches
        pilots = None if self._pilot is None else batches[self._pilot_group()]
        if pilots is not None:
            self._look_at(positions, pilots)

    def _apply(self, write: Write) -> None:
        """Write everything; again and again, if need be."""
        # first: whoever looks afterwards sees that what it remembers may be of before
        self._bump_mutation_revision()
        for group, rows in zip(self.groups, write.rows, strict=True):
            if rows is not None and len(write.positions):
                group.write(write.positions, rows)
        for leaf, value in write.dense:
            leaf[write.index if isinstance(write.index, slice) else write.index.to(leaf.device)] = value
        if write.length is not None:
            self._set_last_cursor(write.cursor)
            self._len = write.length
        # the one assignment that makes it so
        write.done = True
        self._open = None

    def recover(self) -> None:
        """See to a write that was interrupted, if there is one: complete it, or have all as it was before."""
        if self._open is None:
            return
        with self._lock:
            # another thread may have done it meanwhile
            write: Write | None = vars(self)["_open"]
            if write is None:
                return
            if write.before is not None and not write.done:
                if write.repeat and not self._is_untouched(write):
                    self._apply(write)
                else:
                    attributes, length, last = write.before
                    self.__dict__.update(attributes)
                    self.__dict__.pop("_total_shape_value", None)
                    self._len = length
                    self._last_cursor_index_value.value = -1 if last is None else last
            self._open = None

    def _is_untouched(self, write: Write) -> bool:
        """Whether not even the first row is there: groups come first, and their stores write a row or do not."""
        for group, rows in zip(self.groups, write.rows, strict=True):
            if rows is not None:
                [held] = group.read_rows([0], write.positions[:1])
                return not np.array_equal(held[0], rows[0][0])
        return False

    # ---- how many environments take turns ----

    def _pilot_group(self) -> int:
        return max(range(len(self.groups)), key=lambda place: len(self.groups[place].keys))

    def _look_at(self, positions: Positions, batches: Sequence[Any]) -> None:
        """Have as many streams as environments take turns, once the first items tell how many."""
        pilot = self._pilot
        found = None if pilot is None else pilot.look_at(positions, batches)
        if pilot is not None and isinstance(found, int) and found > 1:
            self._use_groups([group.rewrite(found, pilot.held) for group in self.groups])
        else:
            self._pilot = found if isinstance(found, Pilot) else None

    # ---- reading ----

    def get(self, index: Any) -> Any:
        """Items at ``index``; those of a slice are decoded key by key, when they are used."""
        with self._lock:
            self.recover()
            return self._get(index)

    def _get(self, index: Any) -> Any:
        if isinstance(index, str):
            raise IndexOutOfRangeError(f"items are found by position, got {index!r}; use get_fields for a field")
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
        if not isinstance(keys, (list, tuple)):
            raise UnknownFieldError(f"keys must be a list of fields, got {keys!r}")
        known = list(self.specs)
        unknown = [key for key in keys if key not in known]
        if unknown:
            raise UnknownFieldError(f"no field {', '.join(map(repr, unknown))}; there are {names_of(self.specs)}")
        positions = self._positions(index)
        if positions is None:
            raise IndexOutOfRangeError(f"items are found by integers, got {index!r}")
        with self._lock:
            self.recover()
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
        with self._lock:
            self.recover()
            if self.announced is not None:
                # given up: the cursor is where it should be
                self.announced.done = True
            # first, so that what is half cleared is not read
            super()._empty()
            for group in self.groups:
                group.clear()

    def memory_usage(self) -> MemoryUsage:
        """What is held, by purpose; ``dense`` is what TorchRL's tensor storages take for the same items."""
        self.recover()
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
        with self._lock:
            self.recover()
            for group in self.groups:
                group.check()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(len={self._len}, max_size={self.max_size}, ndim={self.ndim}, "
            f"keys=[{names_of(self.specs)}], {self.memory_usage()})"
        )


def _check_methods(methods: Any, options: Any) -> None:
    """Raise unless each of ``methods`` is a method, with ``options`` that it has."""
    if options is not None and not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        raise CodecOptionError(f"compression_kwargs maps names of options to values, got {options!r}")
    if not isinstance(methods, (str, Mapping)):
        raise ArgumentError(f"compression_method is a method or a mapping of keys to methods, got {methods!r}")
    for method in [methods] if isinstance(methods, str) else methods.values():
        if not isinstance(method, str):
            raise ArgumentError(f"{method!r} is no compression method")
        if method != "auto":
            get_codec(method, **dict(options or {}))


def _stack(data: Sequence[Any]) -> Any:
    """Items of a list as one batch."""
    if data and all(map(is_tensor_collection, data)):
        try:
            return torch.stack(list(data))
        except (RuntimeError, KeyError) as error:
            raise SpecMismatchError(f"the items of the list differ: {error}; nothing was stored") from None
    flat = [tree_flatten(item) for item in data]
    if not flat or any(spec != flat[0][1] for _, spec in flat):
        raise SpecMismatchError("the items of the list have no structure in common; nothing was stored")
    try:
        leaves = [torch.stack(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    except (RuntimeError, TypeError) as error:
        raise SpecMismatchError(f"the items of the list differ: {error}; nothing was stored") from None
    return tree_unflatten(leaves, flat[0][1])


def _first(data: Any) -> Any:
    """The first item of a batch."""
    try:
        return data[0] if is_tensor_collection(data) else tree_map(lambda value: value[0], data)
    except (IndexError, TypeError, KeyError, RuntimeError) as error:
        raise SpecMismatchError(f"a {type(data).__name__} holds no items: {error}; nothing was stored") from None


def _expand(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        return value.expand(shape)
    except RuntimeError:
        raise SpecMismatchError(f"a tensor of {tuple(value.shape)} cannot fill {shape}; nothing was stored") from None


def _as_array(values: Any) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise IndexOutOfRangeError(f"{values!r} names no items: {error}") from None
    return array.astype(np.int64) if not array.size else array


def _as_indices(index: Any) -> np.ndarray[Any, Any] | None:
    """An array of integers, or None if ``index`` is none."""
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    elif isinstance(index, (list, range)):
        index = _as_array(index)
    if isinstance(index, np.ndarray) and index.ndim and index.dtype.kind in "iu":
        return index
    return None
