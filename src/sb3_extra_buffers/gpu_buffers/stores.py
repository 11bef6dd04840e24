"""Documented stores that write and read one flat observation at a time.

The buffers use `sb3_extra_buffers.stores` instead, which works on whole batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.gpu_buffers.compression import GpuCompressionMethod
from sb3_extra_buffers.gpu_buffers.metadata import SlotMetadata
from sb3_extra_buffers.gpu_buffers.raw_buffer import SharedRawHeap
from sb3_extra_buffers.gpu_buffers.utils import estimate_total_heap_bytes

__all__ = ["DenseObservationStore", "RawObservationStore", "create_observation_store"]


class DenseObservationStore:
    """Stores flat observations in a dense torch tensor.

    Args:
        buffer_size: Number of steps.
        n_envs: Number of environments.
        flat_len: Number of elements of an observation.
        elem_type: Their dtype.
        device: torch device of the tensor.

    Examples:
        >>> import torch
        >>> from sb3_extra_buffers.gpu_buffers import DenseObservationStore
        >>> store = DenseObservationStore(10, 2, 84 * 84, torch.uint8, "cpu")
        >>> store.write(0, 1, torch.ones(84, 84, dtype=torch.uint8))
        >>> int(store.read(0, 1).sum())
        7056
    """

    def __init__(
        self, buffer_size: int, n_envs: int, flat_len: int, elem_type: torch.dtype, device: str | torch.device
    ) -> None:
        self.rows = torch.zeros((buffer_size, n_envs, flat_len), dtype=elem_type, device=device)
        self._flat: torch.Tensor | None = None

    def write(self, pos: int, env_idx: int, flat_tensor: torch.Tensor) -> None:
        """Write ``flat_tensor`` as the observation of step ``pos`` of environment ``env_idx``."""
        self.rows[pos, env_idx] = flat_tensor.reshape(-1)

    def read(self, pos: int, env_idx: int) -> torch.Tensor:
        """Return the observation of step ``pos`` of environment ``env_idx``."""
        return self.rows[pos, env_idx]

    def read_flat(self, flat_idx: int) -> torch.Tensor:
        """Return the observation with index ``flat_idx`` in the order of `flatten`, which must be called before."""
        if self._flat is None:
            raise ValueError("call flatten() first")
        return self._flat[flat_idx]

    def flatten(self) -> None:
        """Order observations for `read_flat` as SB3's ``swap_and_flatten`` does."""
        self._flat = self.rows.swapaxes(0, 1).reshape(-1, self.rows.shape[-1])


class RawObservationStore:
    """Stores compressed flat observations in a `SharedRawHeap`.

    Args:
        buffer_size: Number of steps.
        n_envs: Number of environments.
        flat_len: Number of elements of an observation.
        elem_type: Their dtype.
        device: torch device of the heap.
        field_offset: Which of the ``n_fields`` observations of a step this store holds.
        compress: Stores an observation in the heap, as `GpuCompressionMethods.compress` does.
        decompress: Reads it, as `GpuCompressionMethods.decompress` does.
        compression_method: The method, to estimate the size of the heap.
        runs_type: Dtype of run lengths, to estimate the size of the heap.
        shared_heap: A heap that several stores share; None to create one.
        n_fields: Number of observations of a step in the heap, such as 2 with next observations.

    Examples:
        >>> import torch
        >>> from sb3_extra_buffers.gpu_buffers import GpuCompressionMethods, RawObservationStore
        >>> method = GpuCompressionMethods.find("rle", 84 * 84)
        >>> store = RawObservationStore(
        ...     10, 2, 84 * 84, torch.uint8, "cpu", 0, method.compress, method.decompress
        ... )
        >>> store.write(0, 1, torch.ones(84 * 84, dtype=torch.uint8))
        >>> int(store.read(0, 1).sum()), store.heap.live_bytes < 10
        (7056, True)
    """

    def __init__(
        self,
        buffer_size: int,
        n_envs: int,
        flat_len: int,
        elem_type: torch.dtype,
        device: str | torch.device,
        field_offset: int,
        compress: Callable[..., SlotMetadata],
        decompress: Callable[..., torch.Tensor],
        compression_method: str = "rle",
        runs_type: torch.dtype = torch.uint16,
        shared_heap: SharedRawHeap | None = None,
        n_fields: int = 1,
    ) -> None:
        self.buffer_size, self.n_envs, self.n_fields, self.field_offset = buffer_size, n_envs, n_fields, field_offset
        self._compress, self._decompress = compress, decompress
        self._owns_heap = shared_heap is None
        if shared_heap is None:
            n_cells = buffer_size * n_envs * n_fields
            needed = estimate_total_heap_bytes(n_cells, flat_len, elem_type, runs_type, compression_method)
            shared_heap = SharedRawHeap(n_cells, needed, device)
        self.heap = shared_heap
        self._metadata: dict[int, SlotMetadata] = {}
        self._empty = torch.zeros(flat_len, dtype=elem_type, device=device)
        self._flattened = False

    def cell_id(self, pos: int, env_idx: int) -> int:
        """Return the cell of the heap for step ``pos`` of environment ``env_idx``."""
        return (pos * self.n_envs + env_idx) * self.n_fields + self.field_offset

    def write(self, pos: int, env_idx: int, flat_tensor: torch.Tensor) -> None:
        """Compress ``flat_tensor`` as the observation of step ``pos`` of environment ``env_idx``."""
        cell = self.cell_id(pos, env_idx)
        self._metadata[cell] = self._compress(flat_tensor, self.heap, cell)

    def read(self, pos: int, env_idx: int) -> torch.Tensor:
        """Return the observation of step ``pos`` of environment ``env_idx``; zeros if none was written."""
        cell = self.cell_id(pos, env_idx)
        if cell not in self._metadata:
            return self._empty.clone()
        # compaction may have moved it
        self._metadata[cell].byte_start = int(self.heap.start_idx[cell])
        return self._decompress(self.heap, self._metadata[cell])

    def read_flat(self, flat_idx: int) -> torch.Tensor:
        """Return the observation with index ``flat_idx`` in the order of `flatten`, which must be called before."""
        if not self._flattened:
            raise ValueError("call flatten() first")
        return self.read(flat_idx % self.buffer_size, flat_idx // self.buffer_size)

    def flatten(self) -> None:
        """Order observations for `read_flat` as SB3's ``swap_and_flatten`` does."""
        self._flattened = True

    def compact(self) -> None:
        """Compact the heap, unless it is shared."""
        if self._owns_heap:
            self.heap.compact()


def create_observation_store(
    compression_method: str,
    buffer_size: int,
    n_envs: int,
    flat_len: int,
    elem_type: torch.dtype,
    device: str | torch.device,
    field_offset: int = 0,
    compress: Callable[..., SlotMetadata] | None = None,
    decompress: Callable[..., torch.Tensor] | None = None,
    runs_type: torch.dtype = torch.uint16,
    shared_heap: SharedRawHeap | None = None,
    n_fields: int = 1,
) -> DenseObservationStore | RawObservationStore:
    """Create a `DenseObservationStore` for ``"none"``, or a `RawObservationStore`, whose arguments these are.

    Args:
        compression_method: The method.
        buffer_size: Number of steps.
        n_envs: Number of environments.
        flat_len: Number of elements of an observation.
        elem_type: Their dtype.
        device: torch device of the store.
        field_offset: Which of the ``n_fields`` observations of a step the store holds.
        compress: Stores an observation in the heap; None for that of the method.
        decompress: Reads an observation from the heap; None for that of the method.
        runs_type: Dtype of run lengths, to estimate the size of the heap.
        shared_heap: A heap that several stores share; None to create one.
        n_fields: Number of observations of a step in the heap.

    Examples:
        >>> import torch
        >>> from sb3_extra_buffers.gpu_buffers import create_observation_store
        >>> store = create_observation_store("rle", 10, 2, 84 * 84, torch.uint8, "cpu")
        >>> store.write(0, 1, torch.ones(84 * 84, dtype=torch.uint8))
        >>> int(store.read(0, 1).sum())
        7056
    """
    if parse_method(compression_method)[0] == "none":
        return DenseObservationStore(buffer_size, n_envs, flat_len, elem_type, device)
    method: Any = GpuCompressionMethod.find(compression_method, flat_len, elem_type)
    return RawObservationStore(
        buffer_size, n_envs, flat_len, elem_type, device, field_offset, compress or method.compress,
        decompress or method.decompress, compression_method, runs_type, shared_heap, n_fields,
    )  # fmt: skip
