"""`ItemStorage`: a TorchRL storage over an `ItemTable`, whose writes are transactions."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection, is_tensorclass
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves  # torch has no public tree functions
from torchrl.data.replay_buffers.storages import TensorStorage

from sb3_extra_buffers._torchrl.env_probe import PROBE_ROWS, EnvProbe
from sb3_extra_buffers._torchrl.groups import GroupConfig, HostGroup
from sb3_extra_buffers._torchrl.indexing import Positions, is_on_gpu, wrap_indices
from sb3_extra_buffers._torchrl.layout import KeyLayout, check_methods, lay_out, options_for
from sb3_extra_buffers._torchrl.schema import Key, check_items, first_item, key_names, specs_of, stack_items
from sb3_extra_buffers._torchrl.table import ItemTable, example_item, shape_batches
from sb3_extra_buffers._torchrl.tensors import CPU, tensor_spec
from sb3_extra_buffers._torchrl.transactions import PendingWrite, track_cursor
from sb3_extra_buffers._torchrl.wire import ItemParts, gather_items
from sb3_extra_buffers.arguments import check_count
from sb3_extra_buffers.errors import (
    ArgumentError,
    IndexOutOfRangeError,
    SharingError,
    SpecMismatchError,
    UnknownFieldError,
)
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.choice import add_preference
from sb3_extra_buffers.stores.locks import fork_safe_lock
from sb3_extra_buffers.stores.reentry import is_inside, refuse, writes
from sb3_extra_buffers.stores.transfer import RowPacket
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["CONTENTS", "ItemStorage", "group_class"]

#: attributes that the first write sets, that a failed write restores and that loading replaces
CONTENTS = ("_storage", "initialized", "max_size", "table", "device", "_probe", "_last_cursor")

_SAMPLERS = "torchrl.data.replay_buffers.samplers"


def group_class(device: torch.device) -> Any:
    """Return the class of the groups of a storage on ``device``."""
    if device_base.stays_on_host(device):
        return HostGroup
    from sb3_extra_buffers._torchrl.device_group import DeviceGroup

    return DeviceGroup


class ItemStorage(TensorStorage):  # type: ignore[misc]  # torchrl ships no types
    """Writes and reads the items of a `CompressedStorage`, which documents the arguments.

    After any exception, a write has happened completely or not at all.
    """

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
        prefer: Literal["memory", "speed"] | None = None,
    ) -> None:
        max_size, ndim = check_count(max_size, "max_size"), check_count(ndim, "ndim")
        if n_envs is not None:
            n_envs = check_count(n_envs, "n_envs")
            if ndim > 1:
                raise ArgumentError(f"n_envs={n_envs} needs ndim=1; with ndim={ndim} it follows from the data")
        if prefer is not None:
            compression_kwargs = add_preference(prefer, compression_kwargs, compression_method)
        check_methods(compression_method, compression_kwargs)
        try:
            device = device if device == "auto" else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"device={device!r} is not a device: {error}") from None
        # the number of items; in shared memory once other processes use the storage
        self._count = 0
        self._shared_count: Any = None
        self._owner = os.getpid()
        super().__init__(None, max_size, device=device, ndim=ndim)
        #: `max_size` as given; with ``ndim > 1`` the first item rounds `max_size` up to whole steps
        self.capacity = max_size
        self.n_envs = n_envs
        self.compression_method = compression_method
        self.compression_kwargs = dict(compression_kwargs or {})
        self.table = ItemTable((0,), {}, {}, [])
        self._lock = fork_safe_lock(of_buffer=True)
        # the write that a writer is about to begin, and the one in progress
        self.announced: PendingWrite | None = None
        self._open: PendingWrite | None = None
        # the first items, while the number of environments is not known
        self._probe: EnvProbe | None = None

    # TensorStorage keeps its length in shared memory from the beginning, which takes a lock to read

    @property
    def _len(self) -> int:
        return self._count if self._shared_count is None else int(self._shared_count.value)

    @_len.setter
    def _len(self, value: int) -> None:
        if self._shared_count is None:
            self._count = int(value)
        else:
            self._shared_count.value = int(value)

    # ---- the first item determines the table ----

    def _init(self, item: Any) -> None:
        """Create the table for items like ``item``."""
        device = self.device
        if device == "auto":
            leaf = item if is_tensor_collection(item) or isinstance(item, torch.Tensor) else tree_leaves(item)[0]
            device = leaf.device or CPU
        table = self.new_table(item, device=device)
        probe = None
        if self.ndim == 1 and self.n_envs is None and table.groups:
            probe = EnvProbe(table.groups[_probed_group(table)].spec, table.n_items)
        self.use_table(table, item, device, probe)

    def new_table(
        self, item: Any, layout: KeyLayout | None = None, kind: Any = None, device: torch.device | None = None
    ) -> ItemTable:
        """Return an empty table for items like ``item``, with groups of class ``kind``."""
        device, n_inner = device or self.device, self.ndim - 1
        leaf = item if is_tensor_collection(item) or not n_inner else tree_leaves(item)[0]
        inner = tuple(leaf.shape[:n_inner]) if n_inner else ()
        lead = (-(-self.capacity // math.prod(inner)), *inner)
        n_items, specs = math.prod(lead), specs_of(item)
        if layout is None:
            named = () if isinstance(self.compression_method, str) else self.compression_method
            layout = lay_out(specs, n_inner, {key: self.compression(key)[0] for key in specs}, named)
        n_streams = math.prod(inner) if n_inner else (self.n_envs or 1)
        dense, groups = {}, []
        for key in layout.dense:
            shape, dtype = specs[key]
            dense[key] = torch.empty((n_items, *shape[n_inner:]), dtype=dtype, device=device)
        for keys in layout.groups:
            shape, dtype = specs[keys[0]]
            config = GroupConfig(keys, tensor_spec(shape[n_inner:], dtype), dtype, n_items, *self.compression(keys[0]))
            groups.append((kind or group_class(device))(config, n_streams, device))
        return ItemTable(lead, specs, dense, groups)

    def compression(self, key: Key) -> tuple[str, dict[str, Any]]:
        """Return the method and the options for ``key``."""
        methods = self.compression_method
        method = methods if isinstance(methods, str) else methods.get(key, "auto")
        return method, options_for(method, self.compression_kwargs)

    def use_table(self, table: ItemTable, item: Any, device: torch.device, probe: EnvProbe | None = None) -> None:
        """Hold ``table`` from now on, whose items are structured like ``item``."""
        # one call: nothing may see a part of it
        self.__dict__.update(
            table=table, _storage=table.like(item, device), initialized=True, max_size=table.n_items, device=device,
            _probe=probe,
        )  # fmt: skip

    # ---- writing ----

    def _max_size_along_dim0(self, *, single_data: Any = None, batched_data: Any = None) -> int:
        # writers call this before they move their cursor, so data that is refused here leaves the writer unchanged
        data = batched_data if single_data is None else single_data
        if data is not None:
            if self.initialized:
                self.check_data(data, 1 if single_data is None else 0)
            track_cursor(self, sys._getframe(1))
            self.announced = PendingWrite(data, checked=self.initialized)
        size: int = super()._max_size_along_dim0(single_data=single_data, batched_data=batched_data)
        return size

    def check_data(self, data: Any, n_batch: int | None) -> None:
        """Raise `SpecMismatchError` unless ``data`` matches the first item, behind ``n_batch`` leading axes."""
        if not isinstance(data, list):
            check_items(self.table.specs, is_tensor_collection(self._storage), data, n_batch)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Store ``data`` at ``cursor``: one item if that is an integer, else one item per position.

        With ``set_cursor=False``, ``cursor`` does not count as the last one that was written, as in TorchRL's storages.
        All items are stored or none. An interrupt that arrives while items are being overwritten is raised after the
        call is complete.
        """
        if os.getpid() != self._owner:
            raise SharingError(
                "this CompressedStorage belongs to the parent process, and what this forked process writes would be "
                "lost; start processes with 'spawn', or keep the buffer in Ray (CompressedRayReplayBuffer)"
            )
        with self._lock:
            self.recover()
            write, self.announced = self.announced, None
            if write is None or write.data is not data:
                write = PendingWrite(data)
            try:
                self._set(write, cursor, data, set_cursor)
            except BaseException:
                self.recover()
                raise
            finally:
                write.data = None

    @writes
    def _set(self, write: PendingWrite, cursor: Any, data: Any, set_cursor: bool) -> None:
        if isinstance(data, list):
            data = stack_items(data)
        # TorchRL's buffers pass a tensor without axes on as an array
        is_single = isinstance(cursor, (int, np.integer)) or (
            isinstance(cursor, (torch.Tensor, np.ndarray)) and not cursor.ndim
        )
        length = self._len
        write.before = {name: self.__dict__[name] for name in CONTENTS}, length, self._last_cursor_index
        self._open = write
        if not self.initialized:
            self._init(data if is_single else first_item(data))
        table = self.table
        steps = write.steps_at(table, cursor)
        if not write.checked:
            self.check_data(data, None if steps is None else 0 if is_single else 1)
        if steps is not None:
            n_steps = 1 if is_single else len(data) if is_tensor_collection(data) else len(tree_leaves(data)[0])
            if len(steps) != n_steps:
                raise SpecMismatchError(f"cannot write {n_steps} items to {len(steps)} positions")
            shape, positions = None, table.positions_of(steps)
            n_items = positions.size
        else:
            selected = table.select(cursor)
            shape, positions = selected.shape, selected.reshape(-1)
            leaf = data if is_tensor_collection(data) else tree_leaves(data)[0]
            n_items = math.prod(leaf.shape[: self.ndim - isinstance(cursor, int)])
        write.stage(table, positions, data, shape)
        if self._probe is not None:
            self._update_probe(self._probe, write)
        if set_cursor:
            if is_on_gpu(cursor) or not isinstance(cursor, (int, np.integer, slice, range, torch.Tensor)):
                # in a form that TorchRL can record without waiting
                cursor = torch.from_numpy(positions // table.width)
            write.cursor, write.length = cursor, min(length + n_items, self.max_size)
        # items beyond the length cannot be read: if the write fails, they are not counted and need no repair
        write.overwrites = int(write.positions.min(initial=1 << 62)) < length
        self._apply(write)

    def _apply(self, write: PendingWrite) -> None:
        """Write everything; may be repeated."""
        # first, so that caches of what was there before are invalid from here on
        self._bump_mutation_revision()
        write.write_to(self.table)
        if write.length is not None:
            self._set_last_cursor(write.cursor)
            self._len = write.length
        # this assignment commits the write
        write.done = True
        self._open = None

    @writes
    def recover(self) -> None:
        """Complete or undo a write that was interrupted, if there is one; raise if it is still running."""
        if self._open is None:
            return
        with self._lock:
            # another thread may have done it in the meantime
            write: PendingWrite | None = vars(self)["_open"]
            if write is None:
                return
            if is_inside(lambda owner: owner is self):
                raise refuse(f"this {type(self).__name__}")
            if write.before is not None and not write.done:
                if write.overwrites and write.has_begun(self.table):
                    self._apply(write)
                else:
                    contents, length, last_cursor = write.before
                    self.__dict__.update(contents)
                    self.__dict__.pop("_total_shape_value", None)
                    self._len = length
                    self._last_cursor_index_value.value = -1 if last_cursor is None else last_cursor
            self._open = None

    def _update_probe(self, probe: EnvProbe, write: PendingWrite) -> None:
        """Add ``write`` to the probe; once the number of environments is known, use as many streams."""
        table = self.table
        number = _probed_group(table)
        rows, group = write.rows[number], table.groups[number]
        if rows is None:
            return
        if isinstance(rows, RowPacket):
            rows = list(rows.read())
        # on the host, where only the first rows are needed
        rows = [group.as_rows(part[:PROBE_ROWS]) if isinstance(part, torch.Tensor) else part for part in rows]
        result = probe.extend(write.positions, rows)
        if isinstance(result, EnvProbe):
            self._probe = result
        elif result == 1:
            self._probe = None
        else:
            table = table.with_groups([group.with_streams(result, probe.count) for group in table.groups])
            self.use_table(table, example_item(self._storage), self.device)

    def _empty(self) -> None:
        with self._lock:
            self.recover()
            if self.announced is not None:
                # abandoned: the writer's cursor stays where it is
                self.announced.done = True
            # first, so that nothing half cleared is read
            super()._empty()
            self.table.clear()

    # ---- reading ----

    def get(self, index: Any) -> Any:
        """Return the items at ``index``; those of a slice are decoded when they are used, key by key."""
        if is_compiling():
            return _get_untraced(self, index)
        return self._get(index, _is_sampler(sys._getframe(1)))

    def __getitem__(self, index: Any) -> Any:
        if is_compiling():
            return _get_untraced(self, index)
        return self._get(index, True) if _is_sampler(sys._getframe(1)) else self.get(index)

    def _get(self, index: Any, for_flags: bool) -> Any:
        """Return the items at ``index``; ``for_flags`` decodes only flags at once, and images when they are used."""
        if isinstance(index, str):
            raise IndexOutOfRangeError(f"items are indexed by position, got {index!r}; use get_fields for a field")
        with self._lock:
            self.recover()
            if not self.initialized or not is_tensor_collection(self._storage):
                return super().get(index)
            if isinstance(index, (int, np.integer)):
                wrap_indices(np.array([index]), self._len_along_dim0)
                return super().get(index)
            positions = self.table.positions_at(index, self._len)
            if positions is None:
                return super().get(index)
            read = self.table.read_flags if for_flags else self.table.read
            return self._items(positions, read(positions))

    def get_fields(self, index: Any, keys: Sequence[Key]) -> list[torch.Tensor]:
        """Return the tensors of ``keys`` at ``index``; nothing else is decoded."""
        if not isinstance(keys, (list, tuple)):
            raise UnknownFieldError(f"keys must be a list of fields, got {keys!r}")
        known = list(self.table.specs)
        unknown = [key for key in keys if key not in known]
        if unknown:
            raise UnknownFieldError(f"unknown field {', '.join(map(repr, unknown))}; the fields are {key_names(known)}")
        with self._lock:
            self.recover()
            positions = self.table.positions_at(index, self._len)
            if positions is None:
                raise IndexOutOfRangeError(f"items are indexed by integers, got {index!r}")
            tensors = self.table.read(positions, set(keys))
        return [tensors[key] for key in keys]

    def gather(self, index: Any, extra: Mapping[Key, torch.Tensor]) -> ItemParts:
        """Return the parts of a packet with the items at ``index`` and ``extra`` tensors; nothing is decoded."""
        with self._lock:
            self.recover()
            positions = self.table.positions_at(index, self._len)
            if not isinstance(positions, np.ndarray):
                raise IndexOutOfRangeError(f"items are indexed by integers, got {index!r}")
            return gather_items(self.table, positions, extra)

    def _items(self, positions: Positions | torch.Tensor, tensors: Mapping[Key, torch.Tensor]) -> Any:
        """Return ``tensors``, read at ``positions``, as items."""
        shape = [*positions.shape, *self._storage.shape[self.ndim :]]
        if is_tensorclass(self._storage):
            items = self._storage[:1].named_apply(
                lambda key, value: tensors[key], nested_keys=True, batch_size=shape, device=self.device
            )
        else:
            items = TensorDict({key: tensors[key] for key in self.table.specs}, batch_size=shape, device=self.device)
        return shape_batches(items, positions.shape, self.table.batches, self.ndim - 1)

    # ---- information ----

    def memory_usage(self) -> MemoryUsage:
        """Return the memory in use, and what TorchRL's tensor storages would take for the same items."""
        self.recover()
        return self.table.memory_usage(self._len)

    def check(self) -> None:
        """Raise if the storage is inconsistent."""
        with self._lock:
            self.recover()
            self.table.check()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(len={self._len}, max_size={self.max_size}, ndim={self.ndim}, "
            f"keys=[{key_names(self.table.specs)}], {self.memory_usage().summary})"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch ships no types for it
def _get_untraced(storage: ItemStorage, index: Any) -> Any:
    return storage.get(index)


def _is_sampler(caller: FrameType) -> bool:
    """Whether ``caller`` is code of TorchRL's own samplers.

    Slice samplers read the items that they draw for their flags alone; the buffer then reads the same items again.
    """
    return str(caller.f_globals.get("__name__")).startswith(_SAMPLERS)


def _probed_group(table: ItemTable) -> int:
    """Return the number of a group from which to count the environments, if possible with next observations."""
    return max(range(len(table.groups)), key=lambda number: len(table.groups[number].keys))
