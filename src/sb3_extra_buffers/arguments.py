"""Checks and conversions of arguments, shared by every layer: each returns a value to use or raises a named error."""

from __future__ import annotations

import math
import numbers
import operator
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import ArgumentError, IndexOutOfRangeError, ReentrantCallError, SpecMismatchError

__all__ = [
    "MAX_ERROR",
    "as_array",
    "cast",
    "cast_exactly",
    "check_alpha",
    "check_beta",
    "check_count",
    "check_dtypes",
    "check_epsilon",
    "check_flags",
    "check_index",
    "check_number",
    "narrow",
    "parse_bytes",
]

#: The largest TD error of prioritised replay: the sum of a million of these is still finite in float64.
MAX_ERROR = float(np.finfo(np.float32).max)


Array = npt.NDArray[Any]

_NUMBERS = frozenset("biuf")
_UNITS = {"": 1, "b": 1} | {f"{prefix}b": 1000**i for i, prefix in enumerate("kmgt", 1)}
_UNITS |= {f"{prefix}ib": 1024**i for i, prefix in enumerate("kmgt", 1)}
_SIZE = re.compile(rf"(\d+(?:\.\d*)?)\s*({'|'.join(_UNITS)})", re.IGNORECASE)
# NumPy 2 moved it
_ComplexWarning: Any = getattr(np, "exceptions", np).ComplexWarning


def check_count(value: Any, name: str, least: int = 1) -> int:
    """Return ``value`` if it is an integer of at least ``least``, and small enough to count anything in memory."""
    try:
        count = least - 1 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        count = least - 1
    if not least <= count < 1 << 48:
        limit = f"at least {least}" if count < least else "less than 2**48"
        raise ArgumentError(f"{name} must be an integer of {limit}, got {value!r}")
    return count


def check_dtypes(dtypes: Any, where: str = "") -> Mapping[str, Any] | None:
    """Return ``dtypes`` if it is a mapping or None; ``where`` says in an error which of several it is."""
    if not isinstance(dtypes, Mapping | None):
        raise SpecMismatchError(
            f"dtypes{where} must be a dict such as find_buffer_dtypes returns, {{'elem_type': ...}}; got {dtypes!r}"
        )
    return dtypes


def check_number(value: Any, name: str) -> float:
    """Return ``value``, a real number, as a float."""
    if not isinstance(value, numbers.Real):
        raise ArgumentError(f"{name} must be a number, got {value!r}")
    return float(value)


def check_alpha(alpha: Any) -> float:
    """Return the exponent of priorities as a float."""
    value = check_number(alpha, "alpha")
    if not 0 <= value <= 1:
        raise ArgumentError(f"alpha must be from 0 (uniform) to 1 (proportional), got {alpha}")
    return value


def check_beta(beta: Any, when: str = "") -> float:
    """Return the exponent of importance weights as a float; ``when`` says in an error where ``beta`` comes from."""
    value = check_number(beta, "beta")
    if not 0 <= value < math.inf:
        raise ArgumentError(f"beta must be 0 or more, got {beta}{when}")
    return value


def check_epsilon(epsilon: Any) -> float:
    """Return what is added to every TD error, as a float."""
    value = check_number(epsilon, "epsilon")
    if not 0 < value <= MAX_ERROR:
        raise ArgumentError(
            f"epsilon must be above 0, or transitions whose TD error is 0 are never sampled; got {epsilon}"
        )
    return value


def parse_bytes(value: Any, name: str) -> int:
    """Return a number of bytes, given as a number or as a string such as ``"500MB"`` or ``"1.5 GiB"``."""
    count = value
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        count = float(match[1]) * _UNITS[match[2].lower()] if match is not None else 0
    if isinstance(count, float) and 0 < count < 1 << 60 and (count == int(count) or isinstance(value, str)):
        count = int(count)
    try:
        return check_count(count, name)
    except ArgumentError:
        raise ArgumentError(
            f"{name} must be a positive number of bytes, or a string such as '500MB' or '4GiB'; got {value!r}"
        ) from None


def check_index(value: Any, count: int, name: str) -> int:
    """Return ``value`` as an index from 0 to ``count - 1``; negative ones count from the end."""
    try:
        index = operator.index(value)
    except TypeError:
        index = count
    if not -count <= index < count:
        raise IndexOutOfRangeError(f"{name} must be an integer from {-count} to {count - 1}, got {value!r}")
    return index % count


def as_array(values: Any, name: str) -> Array:
    """Return ``values``, which may be a tensor on any device, as an array."""
    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except ReentrantCallError:
        raise
    except (ValueError, TypeError, RuntimeError) as problem:
        raise SpecMismatchError(f"{name} cannot be converted to an array: {problem}") from problem


def check_flags(values: Any, name: str) -> None:
    """Raise if any of ``values``, an array of numbers that say whether an episode ended, is NaN or infinite."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        bad = values[~np.isfinite(values)]
        raise SpecMismatchError(
            f"{name} holds {bad[0]}, which is neither true nor false; pass whether each episode ended, as bools"
        )


def cast(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """Return ``array`` in another dtype as SB3 stores it: floats are rounded, everything else must stay exact."""
    if array.dtype.kind not in _NUMBERS or dtype.kind not in _NUMBERS:
        raise SpecMismatchError(f"{name} has dtype {array.dtype}, which cannot be stored as {dtype}")
    if dtype.kind != "f":
        return cast_exactly(array, dtype, name)
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = array.astype(dtype)
    bad = np.isinf(rounded) & ~np.isinf(array)
    if bad.any():
        raise _inexact(array, bad, dtype, name)
    return rounded


def cast_exactly(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """Return ``array`` in another dtype, or raise if that changes a value; NaN stays NaN."""
    if array.dtype.kind != dtype.kind and not {array.dtype.kind, dtype.kind} <= _NUMBERS | {"c"}:
        raise SpecMismatchError(f"{name} has dtype {array.dtype}, which cannot be stored as {dtype}")
    with np.errstate(invalid="ignore", over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", _ComplexWarning)
        converted = array.astype(dtype)
        # there and back: a large integer compares equal to the float that it is rounded to
        same = np.asarray((converted == array) & (converted.astype(array.dtype) == array))
        if array.dtype.kind in "fc" and dtype.kind in "fc":
            same |= np.isnan(array) & np.isnan(converted)
    if not same.all():
        raise _inexact(array, ~same, dtype, name)
    return converted


def narrow(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """Return ``array`` in a smaller dtype, or raise unless converting it back gives the same bits."""
    array = np.ascontiguousarray(array)
    bits = f"u{min(array.dtype.itemsize, 8)}"
    try:
        # infinity as an integer is undefined, and may happen to be the value that became infinity
        with np.errstate(invalid="raise", over="raise"):
            converted = array.astype(dtype)
            if np.array_equal(converted.astype(array.dtype).view(bits), array.view(bits)):
                return converted
    except FloatingPointError:
        pass
    with np.errstate(invalid="ignore", over="ignore"):
        converted = array.astype(dtype)
        bad = (converted.astype(array.dtype).view(bits) != array.view(bits)).reshape(*array.shape, -1).any(axis=-1)
    value, limits = array[bad | (converted != array)][0], ""
    if dtype.kind in "iu":
        limits = f" (whole numbers from {np.iinfo(dtype).min} to {np.iinfo(dtype).max})"
    raise SpecMismatchError(
        f"{name} holds {value}, which dtypes['elem_type'] {dtype}{limits} cannot store exactly; leave elem_type out, "
        f"or pass {array.dtype}"
    )


def _inexact(array: Array, bad: Array, dtype: np.dtype[Any], name: str) -> SpecMismatchError:
    return SpecMismatchError(
        f"{name} holds {array[bad].ravel()[0]} ({array.dtype}), which {dtype} cannot hold; convert "
        f"{name} before storing it"
    )
