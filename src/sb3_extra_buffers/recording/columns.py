"""Columns of a recording: one row per record, of numbers, arrays, or dicts and tuples of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.arguments import as_array, cast_exactly
from sb3_extra_buffers.errors import FileFormatError, SpecMismatchError
from sb3_extra_buffers.stores.checks import check_flags, require

if TYPE_CHECKING:
    from sb3_extra_buffers.files.parts import LoadedParts

__all__ = ["Column", "Target", "as_scalar"]

Array = npt.NDArray[Any]
# an array, and the value to store in one of its rows
Target = tuple[Array, Any]
# keys and tuple indices that lead to an array
Path = tuple[str, ...]

_MAX_DEPTH = 32


class Column:
    """``size`` rows of one type of value, set by the first value or by ``dtype``.

    Dicts and tuples, such as the actions of Dict and Tuple spaces, are stored as one array per leaf.
    """

    #: Which rows have no value; None if all of them have one. Not the opposite: zeros take no memory until written.
    missing: Array | None = None

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

    def prepare(self, value: Any) -> tuple[Column, list[Target]]:
        """Check ``value`` and return the column to use from now on, and its arrays paired with the leaves to store.

        Nothing is written; the column is a new one if this one has no arrays yet.
        """
        leaves: dict[Path, Array] = {}
        structure = self._flatten(value, (), leaves)
        column = self
        if not self.arrays:
            column = Column(self.name, self.size)
            column.arrays = {path: np.zeros((self.size, *leaf.shape), leaf.dtype) for path, leaf in leaves.items()}
            column.structure, column.missing = structure, self.missing
        elif structure != self.structure or leaves.keys() != self.arrays.keys():
            raise SpecMismatchError(
                f"{self.name} has parts {_names(leaves)}, but earlier records have {_names(self.arrays)}; every record "
                "needs the same parts"
            )
        targets: list[Target] = [(column.arrays[path], column.cast(path, leaf)) for path, leaf in leaves.items()]
        return column, targets if column.missing is None else [*targets, (column.missing, np.False_)]

    def prepare_missing(self) -> tuple[Column, list[Target]]:
        """`prepare` for a record without a value."""
        column = copy.copy(self)
        if column.missing is None:
            column.missing = np.zeros(self.size, np.bool_)
        return column, [*((array, 0) for array in self.arrays.values()), (column.missing, np.True_)]

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

    def has(self, rows: Any) -> bool:
        """Whether there is anything to read: False only for a single row without a value."""
        return self.missing is None or np.ndim(rows) > 0 or not self.missing[rows]

    def read(self, rows: Any) -> Any:
        """Return the values of ``rows`` as they were added, with a leading axis if ``rows`` are several.

        If some of several rows have no value, arrays are masked.
        """
        missing = None if self.missing is None or not np.ndim(rows) else self.missing[rows]
        if missing is not None and not missing.any():
            missing = None
        return self._nest(self.structure, (), rows, missing) if self.arrays else None

    def _nest(self, structure: Any, path: Path, rows: Any, missing: Array | None) -> Any:
        if isinstance(structure, dict):
            return {key: self._nest(part, (*path, key), rows, missing) for key, part in structure.items()}
        if isinstance(structure, list):
            return tuple(self._nest(part, (*path, str(index)), rows, missing) for index, part in enumerate(structure))
        values = self.arrays[path][rows]
        if missing is not None:
            mask = np.broadcast_to(missing.reshape(-1, *[1] * (values.ndim - 1)), values.shape)
            return np.ma.MaskedArray(values, mask)
        # copied: a later record will overwrite the row
        return values.copy() if isinstance(values, np.ndarray) else values

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values()) + (0 if self.missing is None else self.size)

    def to_parts(self, key: str, n: int) -> tuple[Any, dict[str, Array]]:
        """Return a description and the first ``n`` rows as arrays ``key/0``, ``key/1``, ... for a file."""
        if not self.arrays:
            return None, {}  # before the first value
        arrays = {f"{key}/{number}": array[:n] for number, array in enumerate(self.arrays.values())}
        if self.missing is None:
            return {"of": self.structure}, arrays
        return {"of": self.structure, "optional": True}, arrays | {f"{key}/present": ~self.missing[:n]}

    def restore(self, parts: LoadedParts, key: str, described: Any, n: int) -> set[str]:
        """Fill the first ``n`` rows with what `to_parts` returned; return the names of the arrays."""
        optional = isinstance(described, dict) and described.get("optional") is True
        fits = isinstance(described, dict) and described.keys() == ({"of", "optional"} if optional else {"of"})
        require(fits, f"the structure of {key} is {described!r}")
        structure = described["of"]
        paths = {f"{key}/{number}": path for number, path in enumerate(_paths(structure))}
        for name, path in paths.items():
            rows = parts.columns.get(name)
            if rows is None or rows.dtype.kind not in "biuf" or rows.ndim < 1 or len(rows) != n:
                raise FileFormatError(f"{key} does not have {n} numbers for {'/'.join(path) or 'its value'}")
            check_flags(key, rows)
            self.arrays[path] = np.zeros((self.size, *rows.shape[1:]), rows.dtype)
            self.arrays[path][:n] = rows
        self.structure = structure
        if not optional:
            return set(paths)
        self.missing = np.zeros(self.size, np.bool_)
        self.missing[:n] = ~parts.column(f"{key}/present", np.bool_, (n,))
        return {*paths, f"{key}/present"}


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
