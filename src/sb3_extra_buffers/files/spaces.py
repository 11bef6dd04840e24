"""Gymnasium spaces as JSON, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sb3_extra_buffers.errors import FileFormatError, NotSaveableError
from sb3_extra_buffers.files.values import FLOATS
from sb3_extra_buffers.stores.checks import only_named_errors, parse_dtype, parse_shape, require, whole

# in all spaces of a Dict together: a Box takes memory for each of its bounds, even if the file has only one number
_MAX_BOUNDS = 1 << 26


def space_to_json(space: Any) -> dict[str, Any]:
    """``space`` as JSON; `space_from_json` is the inverse."""
    from gymnasium import spaces

    kind: Any = type(space)
    record: dict[str, Any] = {"kind": kind.__name__}
    if kind is spaces.Box:
        record |= {"shape": list(space.shape), "dtype": np.dtype(space.dtype).str}
        return record | {"low": _bound_to_json(space.low), "high": _bound_to_json(space.high)}
    if kind is spaces.Discrete:
        return record | {"n": int(space.n), "start": int(space.start), "dtype": np.dtype(space.dtype).str}
    if kind is spaces.MultiDiscrete:
        start = getattr(space, "start", np.zeros_like(space.nvec))
        return record | {"nvec": space.nvec.tolist(), "start": start.tolist(), "dtype": np.dtype(space.dtype).str}
    if kind is spaces.MultiBinary:
        return record | {"shape": list(space.shape)}
    if kind is spaces.Dict:
        for key in space.spaces:
            if not isinstance(key, str) or not key:
                raise NotSaveableError(f"the key {key!r} of a Dict space cannot be saved; use a non-empty string")
        return record | {"spaces": [[key, space_to_json(part)] for key, part in space.spaces.items()]}
    raise NotSaveableError(
        f"a space of type {kind.__name__} cannot be saved; Box, Discrete, MultiDiscrete, MultiBinary and Dict can"
    )


@only_named_errors("the saved space")
def space_from_json(record: Any) -> Any:
    """The inverse of `space_to_json`."""
    n_bounds = _count_bounds(record)
    require(n_bounds <= _MAX_BOUNDS, f"a space with {n_bounds} bounds is too large; at most {_MAX_BOUNDS} are allowed")
    return _make_space(record)


def _count_bounds(record: Any) -> int:
    if record["kind"] == "Dict":
        return sum(_count_bounds(part) for _, part in record["spaces"])
    return math.prod(parse_shape(record["shape"])) if record["kind"] == "Box" else 0


def _make_space(record: Any) -> Any:
    from gymnasium import spaces

    kind = record["kind"]
    if kind == "Box":
        shape, dtype = parse_shape(record["shape"]), parse_dtype(record["dtype"])
        low, high = (_bound_from_json(record[name], shape, dtype) for name in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        integers: Any = parse_dtype(record.get("dtype", "<i8"))  # earlier versions saved int64 only
        require(integers.kind in "iu", f"a Discrete space of {integers}")
        limits = np.iinfo(integers)
        n, first = (whole(record[name], name, int(limits.min), int(limits.max) + 1) for name in ("n", "start"))
        # older versions of gymnasium have int64 only, and no such argument
        of_type: Any = {} if integers == np.int64 else {"dtype": integers.type}
        return spaces.Discrete(n, start=first, **of_type)
    if kind == "MultiDiscrete":
        numbers: Any = parse_dtype(record["dtype"])
        nvec, start = np.array(record["nvec"], numbers), np.array(record["start"], numbers)
        given: Any = {"start": start} if start.any() else {}
        return spaces.MultiDiscrete(nvec, dtype=numbers.type, **given)
    if kind == "MultiBinary":
        shape = parse_shape(record["shape"])
        return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
    if kind == "Dict":
        # gymnasium sorts the keys of a dict, but keeps the order of pairs
        return spaces.Dict([(str(key), _make_space(part)) for key, part in record["spaces"]])
    raise FileFormatError(f"unknown space {kind!r}; a newer version may have written it: update sb3-extra-buffers")


def _bound_to_json(bound: Any) -> Any:
    numbers = [repr(n) if isinstance(n, float) and not math.isfinite(n) else n for n in bound.ravel().tolist()]
    return numbers[0] if numbers and (bound == bound.flat[0]).all() else numbers


def _bound_from_json(bound: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    numbers = [FLOATS[n] if isinstance(n, str) else n for n in (bound if isinstance(bound, list) else [bound])]
    require(all(isinstance(n, (bool, int, float)) for n in numbers), "a bound is not a number")
    with np.errstate(over="ignore"):
        array = np.array(numbers, dtype)
    too_large = np.isinf(array).any() and not np.isinf(np.array(numbers, np.float64)).any()
    require(not too_large, f"a bound is too large for {dtype}")
    return array.reshape(shape).copy() if isinstance(bound, list) else np.full(shape, array[0])
