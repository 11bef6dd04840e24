"""`RowEncoder`: encodes observations into packets in the process that collects them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.portable_segments import PortableSegmentStore
from sb3_extra_buffers.stores.tables import TableStore
from sb3_extra_buffers.stores.transfer import RowPacket, export_rows, rows_packet

__all__ = ["RowEncoder"]

# a method that was chosen from fewer rows is not used for the next packet
_ENOUGH_ROWS = 64


class RowEncoder:
    """Encodes packets of observations with a store of its own.

    Packets are independent of each other, but each one reuses the keyframes of the previous packet, which the receiver
    usually has already. Not thread-safe.
    """

    def __init__(
        self,
        spec: ObsSpec,
        n_streams: int = 1,
        method: str = "auto",
        options: Mapping[str, Any] | None = None,
        compiled: bool | None = None,
    ) -> None:
        self.spec, self.n_streams = spec, n_streams
        self._settings = method, options, None, None, compiled
        # the store, the number of batches and rows that it has space for, and the rows that it has encoded so far
        self._store: ObservationStore | None = None
        self._capacity = 0, 0
        self._n_rows = 0

    def encode(self, batches: Sequence[ByteRows]) -> RowPacket:
        """Encode one batch of rows, or observations and their next observations; row ``i`` continues stream
        ``i % n_streams``. The packet has the shape ``[batch, row]``.
        """
        n_rows = len(batches[0])
        if self._store is None and n_rows * len(batches) < _ENOUGH_ROWS:
            # few rows are better encoded by the receiver, which has the rows before them
            return rows_packet(self.spec, np.stack(list(batches)))
        store, self._store = self._store, None  # if anything fails, the next packet starts with a new store
        if store is None or len(batches) != self._capacity[0] or n_rows > self._capacity[1]:
            per_batch = -(-n_rows // self.n_streams) * self.n_streams
            store = ObservationStore(self.spec, self.n_streams, *self._settings)
            for _ in batches:
                store.allocate(per_batch)
            self._capacity, self._n_rows = (len(batches), per_batch), 0
        self._write(store, batches)
        if store.inner is None:
            store.choose_method()
        inner = store.inner
        if inner is None:
            return rows_packet(self.spec, np.stack(list(batches)))
        frames = inner.inner if isinstance(inner, TableStore) else inner
        if isinstance(frames, PortableSegmentStore):
            store.run_exclusively(frames.seal_segments)
        indices = np.arange(len(batches))[:, None] * self._capacity[1] + np.arange(n_rows)
        packet = export_rows(store, indices)
        self._n_rows += n_rows * len(batches)
        if self._n_rows >= _ENOUGH_ROWS:
            # not `clear`, which returns the memory of the heap
            store.erase(indices.reshape(-1))
            self._store = store
        return packet

    def _write(self, store: ObservationStore, batches: Sequence[ByteRows]) -> None:
        n_streams, n_rows = self.n_streams, len(batches[0])
        if len(batches) == 1:
            indices = np.arange(n_rows)
            store.write(indices, indices % n_streams, batches[0])
            return
        rows, next_rows = batches
        base = self._capacity[1]
        n_whole = n_rows // n_streams * n_streams
        for first in range(0, n_whole, n_streams):
            part = slice(first, first + n_streams)
            store.write_step(first, base + first, rows[part], next_rows[part])
        if n_whole < n_rows:
            indices = np.arange(n_whole, n_rows)
            for at, batch in ((0, rows), (base, next_rows)):
                store.write(indices + at, indices % n_streams, batch[n_whole:])
