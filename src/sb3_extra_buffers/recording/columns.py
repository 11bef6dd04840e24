"""Columns of a recording: one row per record, of numbers, arrays, or dicts and tuples of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.arguments import as_array, cast_exactly
from sb3_extra_buffers.errors import FileFormatError, SpecMismatchError
from sb3_extra_buffers.stores.checks import check_flags, require

if TYPE_CHECKING:
    from sb3_extra_buffers.files.parts import LoadedParts

__all__ = ["Column", "as_scalar"]

Array = npt.NDArray[Any]
# keys and tuple indices that lead to an array
Path = tuple[str, ...]

_MAX_DEPTH = 32


class Column:
    """``size`` rows of one type of value, set by the first value or by ``dtype``.

    Dicts and tuples, such as the actions of Dict and Tuple spaces, are stored as one array per leaf.
    """

    def __init__(self, name: str, size: int, dtype: npt.DTypeLike | None = None) -> None:
        self.name = name
        self.size = size
        # how the leaves are nested, JSON-ready: None for a leaf, else a dict or a list of structures
        self.structure: Any = None
        self.arrays: dict[Path, Array] = {}
        if dtype is not None:
            try:
                declared = np.dtype(dtype)
            except (TypeError, ValueError) as problem:
                raise SpecMismatchError(f"{name}: {dtype!r} is not a dtype: {problem}") from problem
            if declared.base.kind not in "biuf":
                raise SpecMismatchError(f"{name} has dtype {declared.base}; recordings hold numbers and arrays of them")
            self.arrays = {(): np.zeros((size, *declared.shape), declared.base)}

    def prepare(self, value: Any) -> tuple[Column, list[tuple[Array, Array]]]:
        """Check ``value`` and return the column to use from now on, and its arrays paired with the leaves to store.

        Nothing is written; the column is a new one if this one has no arrays yet.
        """
        leaves: dict[Path, Array] = {}
        structure = self._flatten(value, (), leaves)
        column = self
        if not self.arrays:
            column = Column(self.name, self.size)
            column.arrays = {path: np.zeros((self.size, *leaf.shape), leaf.dtype) for path, leaf in leaves.items()}
            column.structure = structure
        elif structure != self.structure or leaves.keys() != self.arrays.keys():
            raise SpecMismatchError(
                f"{self.name} has parts {_names(leaves)}, but earlier records have {_names(self.arrays)}; every record "
                "needs the same parts"
            )
        return column, [(column.arrays[path], column.cast(path, leaf)) for path, leaf in leaves.items()]

    def _flatten(self, value: Any, path: Path, leaves: dict[Path, Array]) -> Any:
        """Add the leaves of ``value`` to ``leaves`` and return their structure, which JSON can represent."""
        if len(path) > _MAX_DEPTH:
            raise SpecMismatchError(f"{self.name} is nested more than {_MAX_DEPTH} levels deep")
        if isinstance(value, Mapping):
            structure = {str(key): self._flatten(part, (*path, str(key)), leaves) for key, part in value.items()}
            if len(structure) != len(value):
                raise SpecMismatchError(f"{'/'.join((self.name, *path))} has keys that are equal as strings")
            return structure
        if isinstance(value, tuple):
            return [self._flatten(part, (*path, str(index)), leaves) for index, part in enumerate(value)]
        leaves[path] = as_numbers(value, "/".join((self.name, *path)))
        return None

    def cast(self, path: Path, leaf: Array) -> Array:
        """Return ``leaf`` in the dtype of the array at ``path``, or raise if the shape or a value does not fit."""
        column = self.arrays[path]
        name = "/".join((self.name, *path))
        if leaf.shape != column.shape[1:]:
            raise SpecMismatchError(f"{name} has shape {leaf.shape}, but earlier records have {column.shape[1:]}")
        return leaf if leaf.dtype == column.dtype else cast_exactly(leaf, column.dtype, name)

    def read(self, rows: Any) -> Any:
        """Return the values of ``rows`` as they were added, with a leading axis if ``rows`` are several."""
        return self._nest(self.structure, (), rows) if self.arrays else None

    def _nest(self, structure: Any, path: Path, rows: Any) -> Any:
        if isinstance(structure, dict):
            return {key: self._nest(part, (*path, key), rows) for key, part in structure.items()}
        if isinstance(structure, list):
            return tuple(self._nest(part, (*path, str(index)), rows) for index, part in enumerate(structure))
        values = self.arrays[path][rows]
        # copied: a later record will overwrite the row
        return values.copy() if isinstance(values, np.ndarray) else values

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def restore(self, parts: LoadedParts, key: str, structure: Any, n: int) -> set[str]:
        """Fill the first ``n`` rows from the arrays ``key/0``, ``key/1``, ... of a file; return their names."""
        paths = {f"{key}/{number}": path for number, path in enumerate(_paths(structure))}
        for name, path in paths.items():
            rows = parts.columns.get(name)
            if rows is None or rows.dtype.kind not in "biuf" or rows.ndim < 1 or len(rows) != n:
                raise FileFormatError(f"{key} does not have {n} numbers for {'/'.join(path) or 'its value'}")
            check_flags(key, rows)
            self.arrays[path] = np.zeros((self.size, *rows.shape[1:]), rows.dtype)
            self.arrays[path][:n] = rows
        self.structure = structure
        return set(paths)


def _names(leaves: dict[Path, Array]) -> str:
    return ", ".join("/".join(path) or "(one value)" for path in leaves) or "(none)"


def _paths(structure: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of each leaf of a structure read from a file."""
    require(len(path) <= _MAX_DEPTH, f"a column is nested more than {_MAX_DEPTH} levels deep")
    if structure is None:
        yield path
        return
    require(isinstance(structure, dict | list), f"{structure!r} is not the structure of a column")
    for key, part in structure.items() if isinstance(structure, dict) else enumerate(structure):
        yield from _paths(part, (*path, str(key)))


def as_numbers(value: Any, name: str) -> Array:
    """Return ``value`` as an array of numbers or bools."""
    array = as_array(value, name)
    if array.dtype.kind not in "biuf":
        raise SpecMismatchError(
            f"{name} is a {type(value).__name__} of dtype {array.dtype}; recordings hold numbers and arrays of them"
        )
    return array


def as_scalar(value: Any, name: str) -> Any:
    """Return ``value`` as a single number or bool."""
    if type(value) is float or type(value) is bool:
        return value
    try:
        array = as_numbers(value, name)
    except SpecMismatchError as problem:
        raise SpecMismatchError(f"{name} must be one number: {problem}") from problem
    if array.size != 1:
        raise SpecMismatchError(f"{name} must be one number, got {value!r}; record one environment at a time")
    return array.item()
