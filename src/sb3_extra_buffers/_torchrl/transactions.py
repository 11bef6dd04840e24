"""Writes to a storage as transactions, including the cursor of the TorchRL writer that makes the write.

TorchRL's writers have no public API for their cursors, so this is the one module that uses their private attributes.
"""

from __future__ import annotations

import threading
import weakref
from itertools import pairwise
from multiprocessing.sharedctypes import Synchronized
from types import FrameType
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from torchrl.data.replay_buffers.writers import RoundRobinWriter, TensorDictRoundRobinWriter

from sb3_extra_buffers._torchrl.groups import HostGroup
from sb3_extra_buffers._torchrl.indexing import Positions, is_on_gpu, keep_last
from sb3_extra_buffers._torchrl.packet_group import whole_packet
from sb3_extra_buffers._torchrl.schema import Key, leaf_items
from sb3_extra_buffers._torchrl.table import ItemTable
from sb3_extra_buffers._torchrl.tensors import flatten_lead
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.stores.transfer import RowPacket

__all__ = ["PendingWrite", "TransactionalCursor", "get_cursor", "set_cursor", "track_cursor"]


class PendingWrite:
    """A call that stores items, from the moment a writer announces it until ``done``, which commits it.

    ``before`` holds the contents of the storage before it. ``overwrites`` is set if items that can be read are being
    overwritten: the write is then completed after an interrupt, not undone.
    """

    __slots__ = (
        "before", "checked", "cursor", "data", "dense", "done", "index", "length", "moved", "overwrites", "positions",
        "rows", "thread",
    )  # fmt: skip

    def __init__(self, data: Any, checked: bool = False) -> None:
        self.data = data
        self.checked = checked
        self.thread = threading.get_ident()
        self.done = False
        self.before: tuple[dict[str, Any], int, int | None] | None = None
        self.overwrites = False
        # the writer's cursor before and after, if it stores items one after the other
        self.moved: tuple[int, int] | None = None
        # what to write: for each group rows, a packet, or None to skip the group, at `positions`; for each dense leaf
        # values, whose positions and subsets are in `index`
        self.positions: Any = None
        self.rows: list[Any] = []
        self.index: list[tuple[Any, slice]] = []
        self.dense: list[tuple[torch.Tensor, torch.Tensor]] = []
        # the cursor and the length afterwards; None leaves both unchanged
        self.cursor: Any = None
        self.length: int | None = None

    def steps_at(self, table: ItemTable, cursor: Any) -> Positions | None:
        """Return `ItemTable.steps_at`, without waiting for a GPU if the writer's cursor tells the steps too."""
        if self.moved is not None and is_on_gpu(cursor) and cursor.ndim == 1:
            first, after = self.moved
            n_steps = table.lead[0]
            if (first + len(cursor)) % n_steps == after:
                return (first + np.arange(len(cursor))) % n_steps
        return table.steps_at(cursor)

    def stage(self, table: ItemTable, positions: Positions, data: Any, shape: tuple[int, ...] | None) -> None:
        """Do everything that can fail before the first row is written; ``shape`` is what values are broadcast to."""
        values: Any = data if is_tensor_collection(data) else dict(leaf_items(data))
        n_rows, last = len(positions), None
        in_order = bool(n_rows) and positions[-1] - positions[0] == n_rows - 1 and bool((np.diff(positions) == 1).all())
        if not in_order and len(np.unique(positions)) != n_rows:
            last = keep_last(positions)
            positions = positions[last]

        def rows_of(key: Key, row_shape: tuple[int, ...]) -> torch.Tensor | None:
            value: torch.Tensor | None = values.get(key, None)
            if value is None:
                # TorchRL's own "index", which `buffer[i] = item` leaves unchanged
                return None
            if value.requires_grad:
                value = value.detach()
            if shape is not None:
                value = _broadcast(value, (*shape, *row_shape))
            if value.ndim != 1 + len(row_shape):
                value = flatten_lead(value, row_shape)
            return value if last is None else value[torch.from_numpy(last).to(value.device)]

        for key, leaf in table.dense.items():
            value = rows_of(key, tuple(leaf.shape[1:]))
            if value is not None:
                self.dense.append((leaf, value.to(leaf.device)))
        for group in table.groups:
            tensors = [rows_of(key, group.spec.shape) for key in group.keys]
            complete = all(part is not None for part in tensors)
            packet = whole_packet(tensors) if isinstance(group, HostGroup) else None
            if isinstance(group, HostGroup) and group.can_import(packet):
                self.rows.append(packet)
            else:
                self.rows.append([group.stage(part) for part in tensors] if complete else None)
        self.positions = positions
        # around the end of the ring there are two runs; slices need no copy of the positions to a GPU
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        if in_order or len(breaks) == 1:
            ends = [0, *breaks.tolist(), len(positions)]
            runs = [slice(*run) for run in pairwise(ends)]
            self.index = [(slice(int(positions[run][0]), int(positions[run][-1]) + 1), run) for run in runs]
        else:
            self.index = [(torch.from_numpy(positions), slice(None))]

    def write_to(self, table: ItemTable) -> None:
        """Write what was staged; may be repeated."""
        for group, rows in zip(table.groups, self.rows, strict=True):
            if isinstance(rows, RowPacket):
                group.import_packet(self.positions, rows)
            elif rows is not None and len(self.positions):
                group.write(self.positions, rows)
        for leaf, value in self.dense:
            for where, which in self.index:
                leaf[where if isinstance(where, slice) else where.to(leaf.device)] = value[which]

    def has_begun(self, table: ItemTable) -> bool:
        """Whether anything may have been written: groups come first, and write their first row as a whole."""
        for group, rows in zip(table.groups, self.rows, strict=True):
            if rows is not None:
                first = rows.read(np.zeros(1, np.int64)) if isinstance(rows, RowPacket) else rows[0][:1]
                expected = group.as_rows(first) if isinstance(first, torch.Tensor) else first
                return np.array_equal(group.read_rows(self.positions[:1], [0])[0], expected)
        return True


def _broadcast(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        return value.expand(shape)
    except RuntimeError:
        raise SpecMismatchError(
            f"cannot broadcast a tensor of shape {tuple(value.shape)} to {shape}; nothing was stored"
        ) from None


class TransactionalCursor:
    """A writer's cursor that moves back if the write that it was moved for did not take place.

    TorchRL's writers move their cursor before they store anything, and leave it there if that fails. This one moves
    back when it is read next.
    """

    def __init__(self, writer: Any, storage: Any) -> None:
        self._inner = writer._cursor_value
        self._writer, self._storage = weakref.ref(writer), weakref.ref(storage)
        # the write, the cursor and the write count before it, and the cursor after it
        self._moved: tuple[PendingWrite, int, int, int] | None = None

    @property
    def value(self) -> int:
        """The position of the next item."""
        if self._moved is not None:
            self._move_back(*self._moved)
        return int(self._inner.value)

    @value.setter
    def value(self, value: int) -> None:
        storage, writer = self._storage(), self._writer()
        write = None if storage is None else storage.announced
        if write is None or write.done or writer is None:
            self._moved = None
        else:
            before = int(self._inner.value)
            if type(writer) in (RoundRobinWriter, TensorDictRoundRobinWriter):
                write.moved = before, value
            self._moved = write, before, int(writer._write_count), value
        self._inner.value = value

    def _move_back(self, write: PendingWrite, cursor: int, count: int, moved_to: int) -> None:
        if not write.done and write.thread != threading.get_ident():
            # still in progress in another thread
            return
        storage, writer = self._storage(), self._writer()
        if storage is not None:
            storage.recover()
        if not write.done and self._inner.value == moved_to:
            self._inner.value = cursor
            if writer is not None:
                writer._write_count = count
        self._moved = None

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __reduce__(self) -> Any:
        # other processes get TorchRL's own cursor
        return _identity, (self._inner,)


def _identity(value: Any) -> Any:
    return value


def track_cursor(storage: Any, caller: FrameType | None) -> None:
    """Give the writer that is calling ``storage`` a `TransactionalCursor`.

    It is found in the caller's frame: a storage is not told who writes to it, and the buffers of copies are not
    attached to their storages.
    """
    writer: Any = None if caller is None else caller.f_locals.get("self")
    if (
        isinstance(getattr(writer, "_cursor_value", None), Synchronized)
        and getattr(writer, "_storage", None) is storage
    ):
        writer._cursor_value = TransactionalCursor(writer, storage)


def get_cursor(writer: Any) -> int:
    """Return the position that ``writer`` stores the next item at."""
    return int(writer._cursor)


def set_cursor(writer: Any, cursor: int) -> None:
    """Let ``writer`` store the next item at ``cursor``."""
    writer._cursor = cursor
