"""NumPy's indexing rules for the leading axes of an array that is not in memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from sb3_extra_buffers.errors import ArgumentError, IndexOutOfRangeError
from sb3_extra_buffers.stores.base import Array, Indices

ALL = slice(None)


def locate(index: Any, shape: tuple[int, ...], table: Indices) -> tuple[Indices | None, Any]:
    """Return the observations that ``index`` selects of an array of ``shape``, and the index to apply to their values.

    ``table`` has the index of each observation, over the leading axes of ``shape``. The result is ``(indices, None)``
    if whole observations are selected, and ``(None, index)`` for forms that need the whole array.
    """
    parts = _expand(index if isinstance(index, tuple) else (index,), shape)
    if parts is None:
        return None, index
    lead: list[Any] = []
    n_axes = 0
    while parts and n_axes < table.ndim:
        part = parts.pop(0)
        lead.append(part)
        n_axes += part is not None and part is not Ellipsis
    if all(isinstance(part, slice) and part == ALL for part in parts):
        return select(table, tuple(lead)), None
    # part of each observation: narrow the leading axes to what is used, and leave the rest to NumPy
    remapped: list[Any] = []
    axis = 0
    for part in lead:
        if part is None or part is Ellipsis:
            remapped.append(part)
            continue
        used, local = _narrow(part, table.shape[axis])
        table = np.take(table, used, axis=axis)
        remapped.append(local)
        axis += 1
    return table, (*remapped, *parts)


def select(array: Array, index: Any) -> Array:
    """Return ``array[index]``; what NumPy does not accept raises a named error."""
    try:
        selected: Array = array[index]
    except IndexError as problem:
        raise IndexOutOfRangeError(str(problem)) from None
    return selected


def wrap(indices: Array, size: int, axis: int) -> Indices:
    """Count negative indices from the end; raise if one is out of bounds."""
    indices = indices.astype(np.int64, copy=False)
    # one comparison finds those past the end and, read as unsigned, the negative ones
    if (indices.view(np.uint64) >= size).any():
        outside = indices[(indices < -size) | (indices >= size)]
        if outside.size:
            raise IndexOutOfRangeError(f"index {outside[0]} is out of bounds for axis {axis} with size {size}")
        indices = np.where(indices < 0, indices + size, indices)
    return indices


def are_index_arrays(*arrays: Any) -> bool:
    """Whether these are integer arrays of one shape."""
    return all(
        isinstance(array, np.ndarray) and array.dtype.kind in "iu" and array.shape == arrays[0].shape
        for array in arrays
    )


def as_integers(values: Iterable[Any], name: str) -> list[int]:
    """Return ``values`` as integers; raise if one of them is not."""
    try:
        return [operator.index(value) for value in values]
    except TypeError as problem:
        raise ArgumentError(f"{name} must be integers: {problem}") from None


def _expand(index: tuple[Any, ...], shape: tuple[int, ...]) -> list[Any] | None:
    """One entry per axis: ellipses written out, masks as positions. None for forms that need the array itself."""
    parts: list[Any] = []
    for part in index:
        if part is None or part is Ellipsis or isinstance(part, slice):
            parts.append(part)
            continue
        try:
            array = np.asarray(part)
        except ValueError as problem:
            raise IndexOutOfRangeError(f"{part!r} is not an index: {problem}") from problem
        if array.dtype == np.bool_:
            if array.ndim == 0 or any(earlier is Ellipsis for earlier in parts):
                return None
            axis = sum(earlier is not None for earlier in parts)
            if array.shape != shape[axis : axis + array.ndim]:
                raise IndexOutOfRangeError(
                    f"boolean index of shape {array.shape} does not match axes of {shape[axis : axis + array.ndim]}"
                )
            parts.extend(np.nonzero(array))
        elif array.size == 0 and not isinstance(part, np.ndarray):
            parts.append(array.astype(np.int64))
        elif array.dtype.kind in "iu":
            parts.append(operator.index(part) if array.ndim == 0 and not isinstance(part, np.ndarray) else array)
        else:
            raise IndexOutOfRangeError(f"only integers, slices, masks, None and ... can be indices, got {part!r}")
    return _fill_axes(parts, len(shape))


def _fill_axes(parts: list[Any], n_axes: int) -> list[Any]:
    """Replace the ellipsis, or append, so that every axis has an entry."""
    ellipses = [position for position, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) > 1:
        raise IndexOutOfRangeError("an index can only have a single ellipsis ('...')")
    n_indexed = sum(part is not None and part is not Ellipsis for part in parts)
    if n_indexed > n_axes:
        raise IndexOutOfRangeError(f"too many indices: the array has {n_axes} axes, {n_indexed} were indexed")
    filler: list[Any] = [ALL] * (n_axes - n_indexed)
    if ellipses and not filler:
        # an ellipsis that stands for no axis still separates the indices on both sides of it
        filler = [Ellipsis]
    position = ellipses[0] if ellipses else len(parts)
    return [*parts[:position], *filler, *parts[position + len(ellipses) :]]


def _narrow(part: Any, size: int) -> tuple[Indices, Any]:
    """The positions of an axis that ``part`` uses, and ``part`` counted among those."""
    if isinstance(part, slice):
        return np.arange(size)[part], ALL
    positions = wrap(np.asarray(part), size, 0)
    used, local = np.unique(positions, return_inverse=True)
    local = local.reshape(positions.shape)
    return used, int(local) if isinstance(part, int) else local
