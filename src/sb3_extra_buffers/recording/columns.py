"""Columns of a recording: numbers, arrays, or dicts and tuples of them, a row for each record."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import SpecMismatchError

Array = npt.NDArray[Any]
# a path of keys and places, and the array there
Leaves = dict[tuple[str, ...], Array]
# dicts and tuples within each other
MOST_DEPTH = 32


class Row(NamedTuple):
    """A value that fits its column."""

    leaves: Leaves
    shape: Any
    """How the leaves hang together: None for a leaf, dicts and lists of such."""


class Column:
    """``size`` rows of one kind of value, which the first value decides unless ``dtype`` says it.

    Dicts and tuples, as actions of such spaces are, become a plain array for each of their leaves.
    """

    def __init__(self, name: str, size: int, dtype: npt.DTypeLike | None = None) -> None:
        self.name = name
        self.size = size
        self.shape: Any = None
        self.arrays: Leaves = {}
        if dtype is not None:
            try:
                kind = np.dtype(dtype)
            except (TypeError, ValueError) as problem:
                raise SpecMismatchError(f"{name} has no dtype {dtype!r}: {problem}") from problem
            if kind.base.kind not in "biuf":
                raise SpecMismatchError(f"{name} has dtype {kind.base}; recordings hold numbers and arrays of numbers")
            self.arrays = {(): np.zeros((size, *kind.shape), kind.base)}

    def made_for(self, row: Row) -> Column:
        """A column like this that holds values like ``row``; nothing is written yet."""
        made = Column(self.name, self.size)
        made.arrays = {path: np.zeros((self.size, *leaf.shape), leaf.dtype) for path, leaf in row.leaves.items()}
        made.shape = row.shape
        return made

    def pairs(self, row: Row) -> list[tuple[Array, Array]]:
        """Each leaf of what `fit` returned, behind the array that it goes to."""
        return [(self.arrays[path], leaf) for path, leaf in row.leaves.items()]

    def fit(self, value: Any) -> Row:
        """``value`` as it will be stored, or an error; nothing is written."""
        leaves: Leaves = {}
        shape = self._take(value, (), leaves)
        if not self.arrays:
            return Row(leaves, shape)
        if shape != self.shape or leaves.keys() != self.arrays.keys():
            raise SpecMismatchError(
                f"{self.name} has parts {_paths(leaves)}, those before had {_paths(self.arrays)}; "
                "every record needs the same"
            )
        return Row({path: self._cast(path, leaf) for path, leaf in leaves.items()}, shape)

    def _take(self, value: Any, path: tuple[str, ...], leaves: Leaves) -> Any:
        """Collect the leaves below ``path``; return how they hang together, JSON-ready."""
        if len(path) > MOST_DEPTH:
            raise SpecMismatchError(f"{self.name} has parts within parts, more than {MOST_DEPTH} deep")
        if isinstance(value, Mapping):
            taken = {str(key): self._take(part, (*path, str(key)), leaves) for key, part in value.items()}
            if len(taken) != len(value):
                raise SpecMismatchError(f"{'/'.join((self.name, *path))} has keys that are the same as text")
            return taken
        if isinstance(value, tuple):
            return [self._take(part, (*path, str(place)), leaves) for place, part in enumerate(value)]
        leaves[path] = as_numbers(value, "/".join((self.name, *path)))
        return None

    def _cast(self, path: tuple[str, ...], leaf: Array) -> Array:
        column = self.arrays[path]
        name = "/".join((self.name, *path))
        if leaf.shape != column.shape[1:]:
            raise SpecMismatchError(f"{name} has shape {leaf.shape}, those before had {column.shape[1:]}")
        if leaf.dtype == column.dtype:
            return leaf
        with np.errstate(invalid="ignore", over="ignore"):
            cast = leaf.astype(column.dtype)
        if not np.array_equal(cast, leaf, equal_nan=column.dtype.kind == "f" and leaf.dtype.kind == "f"):
            raise SpecMismatchError(
                f"{name} is {leaf.tolist()!r} ({leaf.dtype}), which {column.dtype} cannot hold; "
                f"the first record decides, or declare it when the buffer is made"
            )
        return cast

    def read(self, rows: Any) -> Any:
        """Values of ``rows`` as they were added, leaves with an axis more where rows are several."""
        if not self.arrays:
            return None
        return self._build(self.shape, (), rows)

    def _build(self, shape: Any, path: tuple[str, ...], rows: Any) -> Any:
        if isinstance(shape, dict):
            return {key: self._build(part, (*path, key), rows) for key, part in shape.items()}
        if isinstance(shape, list):
            return tuple(self._build(part, (*path, str(place)), rows) for place, part in enumerate(shape))
        values = self.arrays[path][rows]
        # a row is the caller's to keep: the next lap writes where it came from
        return values.copy() if isinstance(values, np.ndarray) else values

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def _paths(leaves: Leaves) -> str:
    return ", ".join("/".join(path) or "(one value)" for path in leaves) or "(none)"


def as_numbers(value: Any, name: str) -> Array:
    """``value`` as an array of numbers or flags, or an error that names it."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise SpecMismatchError(f"{name} is {type(value).__name__}, which is no array: {problem}") from problem
    if array.dtype.kind not in "biuf":
        raise SpecMismatchError(
            f"{name} is {type(value).__name__} of dtype {array.dtype}; recordings hold numbers and arrays of numbers"
        )
    return array


def one_number(value: Any, name: str) -> Any:
    """``value`` as a single number, or an error that names it."""
    if type(value) is float or type(value) is bool:
        return value
    try:
        array = as_numbers(value, name)
    except SpecMismatchError as problem:
        raise SpecMismatchError(f"{name} must be one number: {problem}") from problem
    if array.size != 1:
        raise SpecMismatchError(f"{name} must be one number, got {value!r}; record one environment at a time")
    return array.item()


def check_count(value: Any, name: str) -> int:
    """``value``, if it is a whole number from 1 on."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
        raise SpecMismatchError(f"{name} must be a whole number from 1 on, got {value!r}")
    return operator.index(value)
