"""Gymnasium's spaces as JSON, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sb3_extra_buffers.errors import FileFormatError, NotSaveableError
from sb3_extra_buffers.stores.snapshot import parse_dtype

_MAX_BOUNDS = 1 << 26


def space_to_json(space: Any) -> dict[str, Any]:
    """``space`` in words; `space_from_json` makes an equal one."""
    from gymnasium import spaces

    kind: Any = type(space)
    about: dict[str, Any] = {"kind": kind.__name__}
    if kind is spaces.Box:
        about |= {"shape": list(space.shape), "dtype": np.dtype(space.dtype).str}
        return about | {"low": _bound_to_json(space.low), "high": _bound_to_json(space.high)}
    if kind is spaces.Discrete:
        return about | {"n": int(space.n), "start": int(space.start)}
    if kind is spaces.MultiDiscrete:
        start = getattr(space, "start", np.zeros_like(space.nvec))
        about |= {"nvec": space.nvec.tolist(), "start": start.tolist()}
        return about | {"dtype": np.dtype(space.dtype).str}
    if kind is spaces.MultiBinary:
        return about | {"shape": list(space.shape)}
    if kind is spaces.Dict:
        return about | {"spaces": [[key, space_to_json(part)] for key, part in space.spaces.items()]}
    raise NotSaveableError(
        f"a space of type {kind.__name__} cannot be saved; Box, Discrete, MultiDiscrete, MultiBinary and Dict can"
    )


def space_from_json(record: Any) -> Any:
    """Undo `space_to_json`."""
    from gymnasium import spaces

    try:
        kind = record["kind"]
        if kind == "Box":
            return _box(record)
        if kind == "Discrete":
            return spaces.Discrete(_whole(record["n"]), start=_whole(record["start"]))
        if kind == "MultiDiscrete":
            dtype: Any = parse_dtype(record["dtype"])
            nvec, start = np.array(record["nvec"], dtype), np.array(record["start"], dtype)
            given: Any = {"start": start} if start.any() else {}
            return spaces.MultiDiscrete(nvec, dtype=dtype.type, **given)
        if kind == "MultiBinary":
            shape = _shape(record["shape"])
            return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
        if kind == "Dict":
            # in the order in which they were; gymnasium keeps that of pairs
            return spaces.Dict([(str(key), space_from_json(part)) for key, part in record["spaces"]])
    except (AssertionError, KeyError, TypeError, ValueError, OverflowError, MemoryError, RecursionError) as problem:
        if isinstance(problem, FileFormatError):
            raise
        raise FileFormatError(f"the saved space makes no sense: {type(problem).__name__}: {problem}") from problem
    raise FileFormatError(f"a space of kind {kind!r} is unknown here; update sb3-extra-buffers")


def _box(record: Any) -> Any:
    from gymnasium import spaces

    shape, dtype = _shape(record["shape"]), parse_dtype(record["dtype"])
    if math.prod(shape) > _MAX_BOUNDS:
        raise FileFormatError(f"a Box of shape {shape} is larger than any that is saved")
    low, high = (_bound_from_json(record[name], shape, dtype) for name in ("low", "high"))
    kind: Any = dtype.type
    return spaces.Box(low, high, shape, kind)


def _bound_to_json(bound: Any) -> Any:
    if bound.size and (bound == bound.flat[0]).all():
        return _number_to_json(bound.flat[0].item())
    return [_number_to_json(number) for number in bound.ravel().tolist()]


def _bound_from_json(bound: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    numbers = [_number(each) for each in bound] if isinstance(bound, list) else _number(bound)
    with np.errstate(over="ignore"):
        array = np.broadcast_to(np.array(numbers, dtype), shape if not isinstance(bound, list) else len(numbers))
    if np.isinf(array).any() and not np.isinf(np.array(numbers, np.float64)).any():
        raise FileFormatError(f"a bound is too large for {dtype}")
    return array.reshape(shape).copy()


def _number_to_json(number: Any) -> Any:
    return repr(number) if isinstance(number, float) and not math.isfinite(number) else number


def _number(number: Any) -> Any:
    if isinstance(number, str):
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[number]
    if not isinstance(number, (bool, int, float)):
        raise FileFormatError(f"{number!r} is no number")
    return number


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise FileFormatError(f"{number!r} is no whole number")
    return number


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > 32 or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
        raise FileFormatError(f"{shape!r} is no shape")
    return tuple(shape)
