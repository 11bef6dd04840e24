"""Checks of untrusted data: every failure is a `FileFormatError`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import ArgumentError, ExtraBuffersError, FileFormatError

Array = npt.NDArray[Any]

# what code raises when it is given values that contradict each other
_CONSEQUENCES = (
    ArithmeticError, AssertionError, AttributeError, BufferError, LookupError, MemoryError, OSError, TypeError,
    ValueError, RuntimeError,
)  # fmt: skip


@contextlib.contextmanager
def only_named_errors(what: str) -> Iterator[None]:
    """Turn any error that invalid values lead to into a `FileFormatError` about ``what``."""
    try:
        yield
    except ExtraBuffersError as problem:
        if not isinstance(problem, ArgumentError):
            raise
        raise FileFormatError(f"{what} is invalid: {problem}") from problem
    except _CONSEQUENCES as problem:
        raise FileFormatError(f"{what} is invalid: {type(problem).__name__}: {problem}") from problem


def require(holds: Any, message: str) -> None:
    """Raise unless ``holds``, a bool or an array of bools, is true everywhere."""
    if not (holds if isinstance(holds, bool) else np.all(holds)):
        raise FileFormatError(message)


def within(values: Array, low: int, stop: int, what: str) -> None:
    """Raise unless all of ``values`` are at least ``low`` and below ``stop``."""
    if values.size and (int(values.min()) < low or int(values.max()) >= stop):
        raise FileFormatError(
            f"{what} must be in {low}..{stop - 1}; values range from {values.min()} to {values.max()}"
        )


def whole(value: Any, what: str, low: int = 0, stop: int = 1 << 48) -> int:
    """Return ``value`` if it is an integer from ``low`` to below ``stop``."""
    if type(value) is not int or not low <= value < stop:
        raise FileFormatError(f"{what} must be an integer in {low}..{stop - 1}, got {value!r}")
    return value


def parse_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape that was saved as a list."""
    if not isinstance(shape, list) or len(shape) > 32 or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise FileFormatError(f"{shape!r} is not a valid shape")
    return tuple(shape)


def parse_dtype(text: Any) -> np.dtype[Any]:
    """Return the dtype that ``text`` names, which must be a number or bool."""
    require(isinstance(text, str) and len(text) <= 16, f"{text!r} is not a dtype")
    try:
        dtype: np.dtype[Any] = np.dtype(text)
    except (TypeError, ValueError) as problem:
        raise FileFormatError(f"{text!r} is not a dtype") from problem
    require(dtype.kind in "biufc" and dtype.itemsize > 0, f"dtype {text!r} is not supported in files")
    return dtype


def entry(record: Any, *names: str, kind: type[Any] | tuple[type[Any], ...] = object) -> Any:
    """Return ``record[name][name]...`` of a JSON value, which must be of type ``kind``."""
    value = record
    for name in names:
        require(isinstance(value, Mapping) and name in value, f"{'.'.join(names)} is missing")
        value = value[name]
    if kind is not object and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        raise FileFormatError(f"{'.'.join(names)} has an invalid value: {value!r}")
    return value


def column(arrays: Mapping[str, Array], name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> Array:
    """Return the array ``name``, which must have this dtype and shape; None stands for any length."""
    array = arrays.get(name)
    if array is None:
        raise FileFormatError(f"the array {name!r} is missing")
    fits = len(shape) == array.ndim and all(size in (None, n) for size, n in zip(shape, array.shape, strict=True))
    if array.dtype != np.dtype(dtype) or not fits:
        raise FileFormatError(
            f"the array {name!r} must be {np.dtype(dtype)} of shape {shape}, got {array.dtype} of shape {array.shape}"
        )
    check_flags(name, array)
    return array


def check_flags(name: str, array: Array) -> None:
    """Raise if ``array`` is of bools whose bytes are neither 0 nor 1."""
    if array.dtype == np.bool_:
        within(np.ascontiguousarray(array).view(np.uint8), 0, 2, f"a flag of {name!r}")
