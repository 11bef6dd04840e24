"""Methods of the documented one-observation-at-a-time stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import get_codec, is_available
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.gpu_buffers.metadata import SlotMetadata
from sb3_extra_buffers.gpu_buffers.raw_buffer import SharedRawHeap, read_at
from sb3_extra_buffers.gpu_buffers.utils import torch_dtype_to_numpy

__all__ = ["GpuCompressionMethod", "GpuCompressionMethods", "has_zstd"]


@dataclass(frozen=True)
class GpuCompressionMethod:
    """A method for flat observations, as `RawObservationStore` uses it.

    Args:
        codec: The codec, bound to these observations.
        flat_len: Number of elements of an observation.
        elem_type: Their dtype.

    Examples:
        >>> import torch
        >>> from sb3_extra_buffers.gpu_buffers import GpuCompressionMethods, SharedRawHeap
        >>> method = GpuCompressionMethods.find("rle", flat_len=100)
        >>> heap = SharedRawHeap(n_cells=10, heap_bytes=1000)
        >>> metadata = method.compress(torch.ones(100, dtype=torch.uint8), heap, cell=3)
        >>> int(method.decompress(heap, metadata).sum())
        100
    """

    codec: Codec
    flat_len: int
    elem_type: torch.dtype

    @classmethod
    def find(
        cls, method: str, flat_len: int, elem_type: torch.dtype = torch.uint8, **options: Any
    ) -> GpuCompressionMethod:
        """Return the method for a string such as ``"rle"`` or ``"zstd-5"``.

        Args:
            method: The string.
            flat_len: Number of elements of an observation.
            elem_type: Their dtype.
            **options: Options of the method.
        """
        spec = ObsSpec((flat_len,), torch_dtype_to_numpy(elem_type))
        return cls(get_codec(method, **options).bind(spec), flat_len, elem_type)

    def compress(self, flat_tensor: torch.Tensor, heap: SharedRawHeap, cell: int) -> SlotMetadata:
        """Encode ``flat_tensor`` and store it in ``heap`` as the payload of ``cell``."""
        row = np.ascontiguousarray(flat_tensor.detach().cpu().numpy()).reshape(-1).view(np.uint8)
        payload = np.frombuffer(self.codec.encode(row.data), np.uint8).copy()
        start = heap.put(cell, torch.from_numpy(payload).to(heap.buffer.device))
        run_bytes = np.dtype(getattr(self.codec, "run", "u1")).itemsize
        n_runs = payload.size // (run_bytes + self.elem_type.itemsize) if self.codec.codec_id == "rle" else 0
        return SlotMetadata(start, 0, n_runs * run_bytes, n_runs, payload.size)

    def decompress(self, heap: SharedRawHeap, metadata: SlotMetadata) -> torch.Tensor:
        """Decode the payload of ``heap`` that ``metadata`` describes."""
        device = heap.buffer.device
        row = torch.zeros(self.flat_len * self.elem_type.itemsize, dtype=torch.uint8)
        if metadata.payload_bytes:
            payload = read_at(heap.buffer, metadata.byte_start, 0, metadata.payload_bytes, torch.uint8)
            self.codec.decode_into(payload.cpu().numpy().data, row.numpy().data)
        return row.view(self.elem_type).to(device)


GpuCompressionMethods = GpuCompressionMethod


def has_zstd() -> bool:
    """Return whether the Zstandard backend is available.

    Examples:
        >>> from sb3_extra_buffers.gpu_buffers import has_zstd
        >>> method = "zstd" if has_zstd() else "rle"
    """
    return is_available("zstd")
