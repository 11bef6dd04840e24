"""Torch dtypes, and estimated sizes of heaps, for GPU buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import MissingExtraError
from sb3_extra_buffers.gpu_buffers.size_estimation import save_ratio

__all__ = [
    "estimate_max_slot_bytes",
    "estimate_total_heap_bytes",
    "find_smallest_dtype",
    "numpy_dtype_to_torch",
    "torch_dtype_element_size",
    "torch_dtype_to_numpy",
]

_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def find_smallest_dtype(max_val: int, signed: bool = False, fallback: torch.dtype = torch.float32) -> torch.dtype:
    """Return the smallest integer dtype that holds ``max_val``, or ``fallback`` if none does.

    Args:
        max_val: The value to hold.
        signed: Whether to choose among the signed dtypes.
        fallback: The dtype to return if no integer dtype is large enough.

    Examples:
        >>> from sb3_extra_buffers.gpu_buffers.utils import find_smallest_dtype
        >>> find_smallest_dtype(4 * 84 * 84)
        torch.uint16
    """
    for dtype in _SIGNED if signed else _UNSIGNED:
        limits = torch.iinfo(dtype)
        if limits.min <= max_val <= limits.max:
            return dtype
    return fallback


def torch_dtype_element_size(dtype: torch.dtype) -> int:
    """Return the bytes of one element of ``dtype``.

    Examples:
        >>> import torch
        >>> from sb3_extra_buffers.gpu_buffers.utils import torch_dtype_element_size
        >>> torch_dtype_element_size(torch.float32)
        4
    """
    return dtype.itemsize


def estimate_max_slot_bytes(
    flat_len: int,
    elem_type: torch.dtype,
    runs_type: torch.dtype,
    compression_method: str,
    overalloc_factor: float = 1.5,
    compresslevel: int | None = None,
) -> int:
    """Estimate the bytes that one encoded observation takes in a heap.

    Returns the larger of two sizes: the size measured on MsPacman times ``overalloc_factor``, and the worst case of the
    method, so that noise fits too. The worst case is usually the larger one: even for ``"gzip0"``, measured at a
    quarter of the observation, ``overalloc_factor`` makes no difference below about 5.

    Args:
        flat_len: Number of elements of an observation.
        elem_type: Dtype of an element.
        runs_type: Dtype of run lengths, for ``"rle"``.
        compression_method: A method such as ``"zstd3"`` or ``"zstd-5"``.
        overalloc_factor: Headroom for observations that compress worse than those of MsPacman.
        compresslevel: Overrides the level in ``compression_method``.

    Examples:
        >>> import torch
        >>> from sb3_extra_buffers.gpu_buffers.utils import estimate_max_slot_bytes
        >>> estimate_max_slot_bytes(4 * 84 * 84, torch.uint8, torch.uint16, "zstd-5")
        28384
    """
    nbytes = flat_len * elem_type.itemsize
    measured = int(nbytes * save_ratio(compression_method, compresslevel) * overalloc_factor)
    # every run has one element; a byte codec adds a few bytes to what it cannot compress
    worst = flat_len * (elem_type.itemsize + runs_type.itemsize) if compression_method == "rle" else nbytes + 64
    return max(measured, worst, _bound(flat_len, elem_type, compression_method))


def _bound(flat_len: int, elem_type: torch.dtype, compression_method: str) -> int:
    """The worst case of the codec, or 0 if it is not installed."""
    if compression_method == "auto":
        return 0
    try:
        spec = ObsSpec((flat_len,), torch_dtype_to_numpy(elem_type))
        return get_codec(compression_method).bind(spec).bound(spec.nbytes)
    except MissingExtraError:
        return 0


def estimate_total_heap_bytes(
    n_cells: int,
    flat_len: int,
    elem_type: torch.dtype,
    runs_type: torch.dtype,
    compression_method: str,
    overalloc_factor: float = 1.5,
    compresslevel: int | None = None,
) -> int:
    """Estimate total heap capacity for ``n_cells`` packed observations: `estimate_max_slot_bytes` for each.

    A replay buffer has ``2 * buffer_size`` cells (observations and next observations), a rollout buffer
    ``buffer_size * n_envs``. Buffers do not need the estimate: their heap grows with their contents, up to
    ``heap_bytes`` if that is given.

    Args:
        n_cells: Number of observations, next observations included.
        flat_len: Number of elements of an observation.
        elem_type: Their dtype.
        runs_type: Dtype of the run lengths of ``"rle"``.
        compression_method: A method such as ``"rle"`` or ``"zstd-5"``.
        overalloc_factor: Headroom for observations that compress worse than those of MsPacman.
        compresslevel: Overrides the level in ``compression_method``.

    Examples:
        >>> import torch
        >>> from sb3_extra_buffers.gpu_buffers.utils import estimate_total_heap_bytes
        >>> estimate_total_heap_bytes(1000, 84 * 84, torch.uint8, torch.uint16, "rle")
        21168000
    """
    per_cell = estimate_max_slot_bytes(
        flat_len, elem_type, runs_type, compression_method, overalloc_factor, compresslevel
    )
    return n_cells * per_cell


def numpy_dtype_to_torch(dtype: npt.DTypeLike) -> torch.dtype:
    """Return the torch dtype that matches the NumPy dtype ``dtype``.

    Examples:
        >>> from sb3_extra_buffers.gpu_buffers.utils import numpy_dtype_to_torch
        >>> numpy_dtype_to_torch("uint8")
        torch.uint8
    """
    return torch.from_numpy(np.empty(0, dtype)).dtype


def torch_dtype_to_numpy(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the NumPy dtype that matches the torch dtype ``dtype``.

    Examples:
        >>> import torch
        >>> from sb3_extra_buffers.gpu_buffers.utils import torch_dtype_to_numpy
        >>> torch_dtype_to_numpy(torch.float32)
        dtype('float32')
    """
    return np.dtype(torch.empty(0, dtype=dtype).numpy().dtype)
