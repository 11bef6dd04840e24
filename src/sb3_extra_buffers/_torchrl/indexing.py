"""Indices as TorchRL passes them (integers, lists, ranges, slices, tensors, tuples of these) as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.errors import IndexOutOfRangeError

__all__ = [
    "Positions",
    "are_slices",
    "as_indices",
    "is_on_gpu",
    "keep_last",
    "numpy_index",
    "wrap_indices",
    "wrap_on_gpu",
]

Positions = npt.NDArray[np.int64]


def are_slices(positions: Positions, n_streams: int) -> bool:
    """Whether most ``positions`` follow the one before them in its stream, as in slices of trajectories."""
    return bool(2 * np.count_nonzero(positions[1:] - positions[:-1] == n_streams) > len(positions))


def is_on_gpu(index: Any) -> bool:
    """Whether ``index`` is a tensor whose values the host would have to wait for."""
    return isinstance(index, torch.Tensor) and index.is_cuda


def as_indices(index: Any) -> npt.NDArray[Any] | None:
    """Return ``index`` as an array of integers, or None if it is anything else, such as a slice or a mask."""
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    elif isinstance(index, (list, range, np.ndarray)):
        index = _as_array(index)
    if isinstance(index, np.ndarray) and index.dtype.kind in "iu":
        return index
    return None


def numpy_index(index: Any) -> tuple[Any, ...]:
    """Return ``index`` as a tuple that NumPy can index with."""
    return tuple(_numpy_part(part) for part in (index if isinstance(index, tuple) else (index,)))


def _numpy_part(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        array = part.detach().cpu().numpy()
        return array if array.ndim else (bool(array) if array.dtype == np.bool_ else int(array))
    if isinstance(part, (list, range)):
        return _as_array(part)
    return int(part) if isinstance(part, np.integer) else part


def _as_array(values: Any) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise IndexOutOfRangeError(f"cannot index with {values!r}: {error}") from None
    return array if array.size else array.astype(np.int64)


def wrap_indices(indices: npt.NDArray[Any], size: int) -> Positions:
    """Return ``indices`` with negative ones counted from the end, or raise if one is out of range."""
    if indices.dtype.kind not in "iu":
        raise IndexOutOfRangeError(f"indices must be integers, got {indices.dtype}")
    indices = indices.astype(np.int64, copy=False)
    # one comparison for both ends: as unsigned numbers, negative ones are huge
    if (indices.view(np.uint64) >= size).any():
        outside = indices[(indices < -size) | (indices >= size)]
        if outside.size:
            raise IndexOutOfRangeError(f"index {outside[0]} is out of range: {size} items are stored")
        indices = np.where(indices < 0, indices + size, indices)
    return indices


def wrap_on_gpu(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Like `wrap_indices` for a tensor, without waiting: the GPU stops with an error if one is out of range."""
    wrapped = torch.where(indices < 0, indices + size, indices).long()
    torch._assert_async(((wrapped >= 0) & (wrapped < size)).all(), f"an index is out of range: {size} items are stored")
    return wrapped


def keep_last(positions: Positions) -> npt.NDArray[np.intp]:
    """Return where ``positions`` holds each position for the last time, in order."""
    return np.sort(len(positions) - 1 - np.unique(positions[::-1], return_index=True)[1])
