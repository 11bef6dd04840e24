"""Checks of what comes from outside: whatever fails one is a `FileFormatError`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import ArgumentError, ExtraBuffersError, FileFormatError

Array = npt.NDArray[Any]

_MISFITS = (
    ArithmeticError, AssertionError, AttributeError, BufferError, LookupError, MemoryError, OSError, TypeError,
    ValueError, RuntimeError,
)  # fmt: skip


@contextlib.contextmanager
def only_named_errors(what: str) -> Iterator[None]:
    """What is raised by numbers that make no sense together, as an error of ours."""
    try:
        yield
    except ExtraBuffersError as problem:
        if not isinstance(problem, ArgumentError):
            raise
        raise FileFormatError(f"{what} makes no sense: {problem}") from problem
    except _MISFITS as problem:
        raise FileFormatError(f"{what} makes no sense: {type(problem).__name__}: {problem}") from problem


def require(holds: Any, message: str) -> None:
    """Raise unless ``holds``, a truth or an array of them, is true throughout."""
    if not (holds if isinstance(holds, bool) else np.all(holds)):
        raise FileFormatError(message)


def within(values: Array, low: int, stop: int, what: str) -> None:
    """Raise unless all of ``values`` are at least ``low`` and below ``stop``."""
    if values.size and (int(values.min()) < low or int(values.max()) >= stop):
        raise FileFormatError(f"{what} is {values.min()} or {values.max()}, outside {low}..{stop - 1}")


def whole(value: Any, what: str, low: int = 0, stop: int = 1 << 48) -> int:
    """A whole number from ``low`` to below ``stop``."""
    if type(value) is not int or not low <= value < stop:
        raise FileFormatError(f"{what} is {value!r}, which is no whole number of {low}..{stop - 1}")
    return value


def parse_shape(shape: Any) -> tuple[int, ...]:
    """The shape of an array."""
    if not isinstance(shape, list) or len(shape) > 32 or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise FileFormatError(f"{shape!r} is no shape")
    return tuple(shape)


def parse_dtype(text: Any) -> np.dtype[Any]:
    """The plain dtype that ``text`` names; nothing that holds objects, fields or nothing at all."""
    require(isinstance(text, str) and len(text) <= 16, f"{text!r} names no dtype")
    try:
        dtype: np.dtype[Any] = np.dtype(text)
    except (TypeError, ValueError) as problem:
        raise FileFormatError(f"{text!r} names no dtype") from problem
    require(dtype.kind in "biufc" and dtype.itemsize > 0, f"arrays of dtype {text!r} are not kept in files")
    return dtype


def entry(record: Any, *names: str, kind: type[Any] | tuple[type[Any], ...] = object) -> Any:
    """An entry of JSON, or of an entry of it, which must be of type ``kind``."""
    value = record
    for name in names:
        require(isinstance(value, Mapping) and name in value, f"there is no {'.'.join(names)}")
        value = value[name]
    if kind is not object and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        raise FileFormatError(f"{'.'.join(names)} is {value!r}, which it cannot be")
    return value


def column(arrays: Mapping[str, Array], name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> Array:
    """The array ``name``, which must have this dtype and shape; None is any length."""
    array = arrays.get(name)
    if array is None:
        raise FileFormatError(f"the column {name!r} is missing")
    fits = len(shape) == array.ndim and all(due in (None, n) for due, n in zip(shape, array.shape, strict=True))
    if array.dtype != np.dtype(dtype) or not fits:
        raise FileFormatError(
            f"the column {name!r} has {array.shape} {array.dtype} where {shape} {np.dtype(dtype)} is due"
        )
    check_flags(name, array)
    return array


def check_flags(name: str, array: Array) -> None:
    """Raise if ``array`` holds flags that are neither true nor false."""
    if array.dtype == np.bool_:
        within(np.ascontiguousarray(array).view(np.uint8), 0, 2, f"a flag of {name!r}")
