"""Observations that are held as they came, until a method is chosen for them."""

from __future__ import annotations

import numpy as np

from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.stores.base import Indices


class CollectedRows:
    """Indices, streams and rows of each write, in order. Never changes, so that a write can be undone."""

    def __init__(self, row_bytes: int, writes: tuple[tuple[Indices, Indices, ByteRows], ...] = ()) -> None:
        self._row_bytes, self._writes = row_bytes, writes

    def __len__(self) -> int:
        return sum(len(indices) for indices, _, _ in self._writes)

    def count_written(self) -> int:
        """How many different indices were written."""
        return len(np.unique(self.join()[0]))

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(array.nbytes for write in self._writes for array in write)

    def add(self, indices: Indices, streams: Indices, rows: ByteRows) -> CollectedRows:
        """Return these and one more write, which is copied."""
        return CollectedRows(self._row_bytes, (*self._writes, (indices.copy(), streams.copy(), rows.copy())))

    def erase(self, erased: Indices) -> CollectedRows:
        """Return what is left without the indices ``erased``."""
        masks = (~np.isin(indices, erased) for indices, _, _ in self._writes)
        left = (
            (indices[mask], streams[mask], rows[mask])
            for (indices, streams, rows), mask in zip(self._writes, masks, strict=True)
            if mask.any()
        )
        return CollectedRows(self._row_bytes, tuple(left))

    def read(self, indices: Indices) -> ByteRows:
        """Return the newest row of each index, zeros where there is none."""
        newest = {
            index: row for written, _, rows in self._writes for index, row in zip(written.tolist(), rows, strict=True)
        }
        out = np.zeros((indices.size, self._row_bytes), np.uint8)
        for i, index in enumerate(indices.ravel().tolist()):
            if index in newest:
                out[i] = newest[index]
        return out.reshape(*indices.shape, self._row_bytes)

    def join(self) -> tuple[Indices, Indices, ByteRows]:
        """Return all indices, streams and rows, in the order in which they were written."""
        empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, self._row_bytes), np.uint8))
        indices, streams, rows = (np.concatenate(parts) for parts in zip(empty, *self._writes, strict=True))
        return indices, streams, rows
