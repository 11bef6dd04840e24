"""Untyped byte storage on a device, for packed observation heaps."""

from __future__ import annotations

import numpy as np
import torch

from sb3_extra_buffers.errors import HeapFullError

__all__ = ["RawBuffer", "SharedRawHeap", "read_at", "write_at"]


class RawBuffer:
    """Linear byte storage backed by ``torch.UntypedStorage``."""

    def __init__(self, size: int, device: str | torch.device = "cpu") -> None:
        self.size = size
        self.device = torch.device(device)
        self.storage = torch.UntypedStorage(size, device=self.device)  # type: ignore[no-untyped-call]  # torch's own
        self.bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)

    def write_bytes(self, malloc: tuple[int, int], tensor: torch.Tensor) -> None:
        """Copy ``tensor``'s bytes into the region ``(start, length)``."""
        data = _as_bytes(tensor)
        if data.numel() != malloc[1]:
            raise ValueError(f"{data.numel()} bytes do not fill a region of {malloc[1]}")
        self._region(malloc).copy_(data)

    def read_bytes(self, malloc: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """View the region ``(start, length)`` as a 1D tensor; a copy where ``dtype`` needs another alignment."""
        region = self._region(malloc)
        if malloc[0] % dtype.itemsize:
            region = region.clone()
        return region.view(dtype)

    def read_into(self, malloc: tuple[int, int], tensor: torch.Tensor) -> None:
        """Copy the bytes of the region into the start of ``tensor``."""
        whole = tensor.contiguous()
        target = whole.view(-1).view(torch.uint8)
        if target.numel() < malloc[1]:
            raise ValueError(f"{malloc[1]} bytes do not fit into a tensor of {target.numel()}")
        target[: malloc[1]].copy_(self._region(malloc))
        if whole is not tensor:
            tensor.copy_(whole)

    def copy_region(self, src_start: int, length: int, dst_start: int) -> None:
        """Copy ``length`` bytes from ``src_start`` to ``dst_start``; the two may overlap."""
        source, target = self._region((src_start, length)), self._region((dst_start, length))
        overlap = abs(src_start - dst_start) < length
        target.copy_(source.clone() if overlap else source)

    def _region(self, malloc: tuple[int, int]) -> torch.Tensor:
        start, length = malloc
        if start < 0 or length < 0 or start + length > self.size:
            raise IndexError(f"bytes {start} to {start + length} are outside of a buffer of {self.size}")
        return self.bytes[start : start + length]


def write_at(buffer: RawBuffer, byte_start: int, rel_byte_offset: int, tensor: torch.Tensor) -> None:
    """Write ``tensor``'s bytes at ``byte_start + rel_byte_offset``."""
    data = _as_bytes(tensor)
    buffer.write_bytes((byte_start + rel_byte_offset, data.numel()), data)


def read_at(
    buffer: RawBuffer, byte_start: int, rel_byte_offset: int, elem_count: int, dtype: torch.dtype
) -> torch.Tensor:
    """Read ``elem_count`` elements at ``byte_start + rel_byte_offset``."""
    return buffer.read_bytes((byte_start + rel_byte_offset, elem_count * dtype.itemsize), dtype)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class SharedRawHeap:
    """A byte heap with one payload a cell: cell ``c`` holds ``lengths[c]`` bytes from ``start_idx[c]`` on.

    New payloads go to ``data_end``. When no room is left there, `compact` packs the live ones to the front.
    """

    def __init__(self, n_cells: int, heap_bytes: int, device: str | torch.device = "cpu") -> None:
        self.buffer = RawBuffer(heap_bytes, device)
        self.heap_bytes = heap_bytes
        self.start_idx = np.zeros(n_cells, np.int64)
        self.lengths = np.zeros(n_cells, np.int64)
        self.data_end = 0

    @property
    def live_bytes(self) -> int:
        """Bytes that cells refer to."""
        return int(self.lengths.sum())

    def compact(self) -> None:
        """Pack all cell payloads into a contiguous prefix of the heap."""
        end = 0
        # in the order in which they lie, so that none is copied over one that has yet to move
        for cell in np.argsort(self.start_idx, kind="stable").tolist():
            start, length = int(self.start_idx[cell]), int(self.lengths[cell])
            if length and start != end:
                self.buffer.copy_region(start, length, end)
                self.start_idx[cell] = end
            end += length
        self.data_end = end

    def ensure_space(self, needed: int) -> None:
        """Compact until at least ``needed`` bytes are free at ``data_end``, or raise `HeapFullError`."""
        if self.data_end + needed > self.heap_bytes:
            live = self.live_bytes
            if live + needed > self.heap_bytes:
                raise HeapFullError(needed, live, self.heap_bytes)
            self.compact()

    def put(self, cell: int, payload: torch.Tensor) -> int:
        """Make ``payload`` (bytes) the cell's; what it held before stays until that is done. Return where it lies."""
        needed, live = payload.numel(), self.live_bytes
        if live + needed > self.heap_bytes >= live + needed - int(self.lengths[cell]):
            # there is no room but that of what it replaces
            self.lengths[cell] = 0
        self.ensure_space(needed)
        start = self.data_end
        write_at(self.buffer, start, 0, payload)
        self.start_idx[cell], self.lengths[cell] = start, payload.numel()
        self.data_end += payload.numel()
        return start
