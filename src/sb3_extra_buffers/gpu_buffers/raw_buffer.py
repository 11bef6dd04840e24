"""Untyped bytes on a device, and a heap of payloads in them."""

from __future__ import annotations

import numpy as np
import torch

from sb3_extra_buffers.errors import HeapFullError

__all__ = ["RawBuffer", "SharedRawHeap", "read_at", "write_at"]


class RawBuffer:
    """Bytes on a device, backed by ``torch.UntypedStorage``.

    Regions are ``malloc`` pairs of first byte and number of bytes.

    Args:
        size: Number of bytes.
        device: torch device of the storage.

    Examples:
        >>> import torch
        >>> from sb3_extra_buffers.gpu_buffers import RawBuffer
        >>> buffer = RawBuffer(16)
        >>> buffer.write_bytes((4, 8), torch.tensor([1.0, 2.0]))
        >>> buffer.read_bytes((4, 8), torch.float32)
        tensor([1., 2.])
    """

    def __init__(self, size: int, device: str | torch.device = "cpu") -> None:
        self.size = size
        self.device = torch.device(device)
        self.storage = torch.UntypedStorage(size, device=self.device)  # type: ignore[no-untyped-call]  # torch's own
        self.bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)

    def write_bytes(self, malloc: tuple[int, int], tensor: torch.Tensor) -> None:
        """Copy ``tensor``'s bytes into the region ``malloc``."""
        data = _as_bytes(tensor)
        if data.numel() != malloc[1]:
            raise ValueError(f"expected {malloc[1]} bytes for the region, got {data.numel()}")
        self._region(malloc).copy_(data)

    def read_bytes(self, malloc: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """View the region ``malloc`` as a 1D tensor; a copy if it is not aligned for ``dtype``."""
        region = self._region(malloc)
        if malloc[0] % dtype.itemsize:
            region = region.clone()
        return region.view(dtype)

    def read_into(self, malloc: tuple[int, int], tensor: torch.Tensor) -> None:
        """Copy the bytes of the region ``malloc`` into the start of ``tensor``."""
        contiguous = tensor.contiguous()
        target = contiguous.view(-1).view(torch.uint8)
        if target.numel() < malloc[1]:
            raise ValueError(f"{malloc[1]} bytes do not fit into a tensor of {target.numel()}")
        target[: malloc[1]].copy_(self._region(malloc))
        if contiguous is not tensor:
            tensor.copy_(contiguous)

    def copy_region(self, src_start: int, length: int, dst_start: int) -> None:
        """Copy ``length`` bytes from ``src_start`` to ``dst_start``; the two may overlap."""
        source, target = self._region((src_start, length)), self._region((dst_start, length))
        overlaps = abs(src_start - dst_start) < length
        target.copy_(source.clone() if overlaps else source)

    def _region(self, malloc: tuple[int, int]) -> torch.Tensor:
        start, length = malloc
        if start < 0 or length < 0 or start + length > self.size:
            raise IndexError(f"bytes {start} to {start + length} are outside of a buffer of {self.size} bytes")
        return self.bytes[start : start + length]


def write_at(buffer: RawBuffer, byte_start: int, rel_byte_offset: int, tensor: torch.Tensor) -> None:
    """Write ``tensor``'s bytes at ``byte_start + rel_byte_offset``.

    Args:
        buffer: The bytes to write to.
        byte_start: Position of a payload.
        rel_byte_offset: Position in the payload.
        tensor: What to write.

    Examples:
        >>> import torch
        >>> from sb3_extra_buffers.gpu_buffers.raw_buffer import RawBuffer, read_at, write_at
        >>> buffer = RawBuffer(16)
        >>> write_at(buffer, 8, 4, torch.tensor([7], dtype=torch.int32))
        >>> read_at(buffer, 8, 4, 1, torch.int32)
        tensor([7], dtype=torch.int32)
    """
    data = _as_bytes(tensor)
    buffer.write_bytes((byte_start + rel_byte_offset, data.numel()), data)


def read_at(
    buffer: RawBuffer, byte_start: int, rel_byte_offset: int, elem_count: int, dtype: torch.dtype
) -> torch.Tensor:
    """Read elements at ``byte_start + rel_byte_offset``.

    Args:
        buffer: The bytes to read from.
        byte_start: Position of a payload.
        rel_byte_offset: Position in the payload.
        elem_count: Number of elements.
        dtype: Their dtype.

    Examples:
        >>> import torch
        >>> from sb3_extra_buffers.gpu_buffers.raw_buffer import RawBuffer, read_at, write_at
        >>> buffer = RawBuffer(16)
        >>> write_at(buffer, 8, 0, torch.arange(4, dtype=torch.uint8))
        >>> read_at(buffer, 8, 2, 2, torch.uint8)
        tensor([2, 3], dtype=torch.uint8)
    """
    return buffer.read_bytes((byte_start + rel_byte_offset, elem_count * dtype.itemsize), dtype)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class SharedRawHeap:
    """A byte heap with one payload per cell: ``lengths[c]`` bytes at ``start_idx[c]``.

    New payloads are appended at ``data_end``. When that reaches the end of the heap, `compact` moves the payloads that
    are still in use to the front.

    Args:
        n_cells: Number of cells.
        heap_bytes: Number of bytes.
        device: torch device of the bytes.

    Examples:
        >>> import torch
        >>> from sb3_extra_buffers.gpu_buffers import SharedRawHeap
        >>> heap = SharedRawHeap(n_cells=2, heap_bytes=100)
        >>> start = heap.put(1, torch.arange(60, dtype=torch.uint8))
        >>> start = heap.put(1, torch.arange(30, dtype=torch.uint8))  # replaces the payload
        >>> heap.data_end, heap.live_bytes
        (90, 30)
        >>> heap.compact()
        >>> heap.data_end
        30
    """

    def __init__(self, n_cells: int, heap_bytes: int, device: str | torch.device = "cpu") -> None:
        self.buffer = RawBuffer(heap_bytes, device)
        self.heap_bytes = heap_bytes
        self.start_idx = np.zeros(n_cells, np.int64)
        self.lengths = np.zeros(n_cells, np.int64)
        self.data_end = 0

    @property
    def live_bytes(self) -> int:
        """Bytes of all payloads."""
        return int(self.lengths.sum())

    def compact(self) -> None:
        """Pack all cell payloads into a contiguous prefix of the heap."""
        end = 0
        # by position, so that no payload overwrites one that has yet to move
        for cell in np.argsort(self.start_idx, kind="stable").tolist():
            start, length = int(self.start_idx[cell]), int(self.lengths[cell])
            if length and start != end:
                self.buffer.copy_region(start, length, end)
                self.start_idx[cell] = end
            end += length
        self.data_end = end

    def ensure_space(self, needed: int) -> None:
        """Make sure that ``needed`` bytes are free at ``data_end``; compact if necessary, or raise `HeapFullError`."""
        if self.data_end + needed > self.heap_bytes:
            live = self.live_bytes
            if live + needed > self.heap_bytes:
                raise HeapFullError(needed, live, self.heap_bytes)
            self.compact()

    def put(self, cell: int, payload: torch.Tensor) -> int:
        """Store ``payload`` (bytes) for ``cell`` and return its position; the previous one stays until that is done."""
        needed, live = payload.numel(), self.live_bytes
        if live + needed > self.heap_bytes >= live + needed - int(self.lengths[cell]):
            # it fits only if the previous payload goes first
            self.lengths[cell] = 0
        self.ensure_space(needed)
        start = self.data_end
        write_at(self.buffer, start, 0, payload)
        self.start_idx[cell], self.lengths[cell] = start, payload.numel()
        self.data_end += payload.numel()
        return start
