"""A heap of the host, copied to a device as it changes, so that payloads are decoded there."""

from __future__ import annotations

import numpy as np
import torch

from sb3_extra_buffers.codecs.rle import RleCodec
from sb3_extra_buffers.stores.heap import Heap, merge_runs
from sb3_extra_buffers.stores.staging import Staging

__all__ = ["HeapMirror", "decode_runs"]

_BYTE = np.dtype(np.uint8)
# pieces that one pass of staging may take; more than that is copied as it lies
_MOST_STAGED = 1 << 22


class HeapMirror:
    """The bytes of a `Heap` at the same places on a device. Only what was written since the last time is copied."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._bytes = torch.empty(0, dtype=torch.uint8, device=staging.device)
        self._mark: tuple[object, int, int] = (None, 0, 0)

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    def follow(self, heap: Heap) -> torch.Tensor:
        """Copy what is new in ``heap``; return all of it. Nobody waits for the copies."""
        payload_ids, mark = heap.written_since(self._mark), heap.mark
        if heap.data.size > self._bytes.numel():
            longer = torch.empty(heap.data.size + heap.data.size // 8, dtype=torch.uint8, device=self._staging.device)
            longer[: self._bytes.numel()] = self._bytes
            self._bytes = longer
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
        piece, target = heap.data[start : start + length], self._bytes[start : start + length]
        if length > _MOST_STAGED:
            target.copy_(torch.from_numpy(piece))
            return
        room = max(1 << (length - 1).bit_length(), 1 << 12)
        lease = self._staging.acquire(self._staging.layout(((room,), _BYTE)))
        lease.arrays[0][:length] = piece
        target.copy_(lease.tensors[0][:length], non_blocking=True)
        self._staging.release(lease)


def decode_runs(
    codec: RleCodec, heap: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, size: int
) -> torch.Tensor:
    """Rows of ``size`` bytes ``[*lead, byte]`` of the payloads at ``starts[*lead]``; zeros for those of no length."""
    from sb3_extra_buffers.kernels.rle_triton import decode_rle  # needs Triton, as nothing else here does

    out = torch.empty((*starts.shape, size), dtype=torch.uint8, device=heap.device)
    decode_rle(heap, starts, lengths, out, np.dtype(codec.elem).itemsize, np.dtype(codec.run).itemsize)
    return out
