"""Base class of stores of uncompressed observations: undoes writes, and limits the bytes held."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.errors import HeapFullError
from sb3_extra_buffers.stores.base import Indices, Store
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.reentry import is_inside_method, refuse


class UncompressedStore(Store):
    """A store of uncompressed rows that remembers what its last write replaced, to undo it.

    A write sets ``replaced``, then ``dirty``, and clears ``dirty`` when it is complete.
    """

    #: The most bytes that observations may take; None for no limit.
    limit: int | None
    #: What the last write replaced, to undo it; None once it is committed.
    replaced: Any

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of an observation."""

    # ---- writing ----

    def write(self, indices: Indices, streams: Indices, rows: ByteRows) -> None:
        self.recover()
        if self.limit is not None:
            live, needed = self.count_written() * self.row_bytes, self._count_new(np.unique(indices)) * self.row_bytes
            if live + needed > self.limit:
                raise HeapFullError(needed, live, self.limit)
        self._write(indices, rows)

    @abstractmethod
    def _write(self, indices: Indices, rows: ByteRows) -> None:
        """Store one row per index, and keep the replaced rows, so that the write can be undone."""

    @abstractmethod
    def _count_new(self, indices: Indices) -> int:
        """How many of ``indices``, which are distinct, are still unwritten."""

    # ---- transactions ----

    @abstractmethod
    def _put_back(self, replaced: Any) -> None:
        """Restore what the last write replaced. If interrupted, it is run again."""

    def recover(self) -> None:
        if self.dirty:
            if is_inside_method(self):
                raise refuse("this store")
            if self.replaced is not None:
                self._put_back(self.replaced)
                self.replaced = None
            self.dirty = False

    def commit(self) -> None:
        self.recover()
        self.replaced = None

    def undo_write(self) -> bool:
        self.recover()
        if self.replaced is None:
            return False
        self.dirty = True
        self.recover()
        return True

    # ---- reports ----

    def describe(self) -> str:
        return "none"

    @classmethod
    def trial_bytes(cls, layout: StackLayout, codec: Codec, streams: Indices, rows: ByteRows, n_streams: int) -> float:
        return float(layout.frame_bytes)
