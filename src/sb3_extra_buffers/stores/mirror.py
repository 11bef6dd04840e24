"""A copy of a host heap on a device, so that payloads can be decoded there."""

from __future__ import annotations

import numpy as np
import torch

from sb3_extra_buffers.stores.heap import Heap, merge_runs
from sb3_extra_buffers.stores.staging import Staging

__all__ = ["HeapMirror"]

_BYTE = np.dtype(np.uint8)
# longer runs are copied straight from the heap
_MAX_STAGED = 1 << 22


class HeapMirror:
    """The bytes of a `Heap`, at the same offsets. Only what was written since the last `follow` is copied."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._bytes = torch.empty(0, dtype=torch.uint8, device=staging.device)
        self._mark: tuple[object, int, int] = (None, 0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory in use."""
        return self._bytes.numel()

    def follow(self, heap: Heap) -> torch.Tensor:
        """Copy what is new in ``heap``, without waiting; return all of it."""
        payload_ids, mark = heap.written_since(self._mark), heap.mark
        if heap.data.size > self._bytes.numel():
            grown = torch.empty(heap.data.size + heap.data.size // 8, dtype=torch.uint8, device=self._staging.device)
            grown[: self._bytes.numel()] = self._bytes
            self._bytes = grown
        if payload_ids is None:
            payload_ids = np.flatnonzero(heap.lengths).astype(np.int32)
        if len(payload_ids):
            payload_ids = payload_ids[np.argsort(heap.starts[payload_ids])]
            starts, lengths = heap.starts[payload_ids], heap.lengths[payload_ids].astype(np.int64)
            for start, _, length in merge_runs(starts, starts, lengths):
                self._copy(heap, start, length)
        self._mark = mark
        return self._bytes

    def _copy(self, heap: Heap, start: int, length: int) -> None:
        source, target = heap.data[start : start + length], self._bytes[start : start + length]
        if length > _MAX_STAGED:
            target.copy_(torch.from_numpy(source))
            return
        # powers of two, so that there are few layouts
        capacity = max(1 << (length - 1).bit_length(), 1 << 12)
        lease = self._staging.acquire(self._staging.layout(((capacity,), _BYTE)))
        lease.arrays[0][:length] = source
        target.copy_(lease.tensors[0][:length], non_blocking=True)
        self._staging.release(lease)
