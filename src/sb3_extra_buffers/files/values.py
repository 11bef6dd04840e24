"""Plain Python and NumPy values as JSON; what JSON lacks is an object with one key that starts with ``$``."""

from __future__ import annotations

import enum
import math
import sys
from typing import Any

import numpy as np

from sb3_extra_buffers.errors import FileFormatError, NotSaveableError
from sb3_extra_buffers.stores.checks import only_named_errors, parse_dtype

_MAX_DEPTH = 64
# arrays are written into the JSON, so they must be small
_MAX_BYTES = 1 << 12
FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def value_to_json(value: Any, name: str) -> Any:
    """``value`` as JSON; an error names it as ``name`` and says why it cannot be saved."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, enum.Enum):
        return value_to_json(value.value, name)
    if isinstance(value, (np.ndarray, np.generic)):
        return _array_to_json(value, name)
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: value_to_json(part, f"{name}.{key}") for key, part in value.items()}
        pairs = [[value_to_json(key, name), value_to_json(part, f"{name}.{key}")] for key, part in value.items()]
        return {"$dict": pairs}
    if isinstance(value, (list, tuple)):
        parts = [value_to_json(part, f"{name}.{index}") for index, part in enumerate(value)]
        return parts if isinstance(value, list) else {"$tuple": parts}
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return {"$dtype": np.dtype(value).str}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return {"$torch": str(value).removeprefix("torch.")}
    cls = type(value)
    raise NotSaveableError(
        f"{name} is a {cls.__module__}.{cls.__qualname__}, which cannot be saved without pickle; "
        "use numbers, strings, arrays, lists or dicts"
    )


def _array_to_json(value: Any, name: str) -> Any:
    if value.dtype.kind not in "biufc" or value.nbytes > _MAX_BYTES:
        raise NotSaveableError(
            f"{name} holds {value.nbytes} bytes of dtype {value.dtype}; only numbers and bools of up to {_MAX_BYTES} "
            "bytes can be saved"
        )
    key = "$array" if isinstance(value, np.ndarray) else "$scalar"
    return {key: [value.dtype.str, list(value.shape), value.tobytes().hex()]}


def value_from_json(value: Any, depth: int = 0) -> Any:
    """The inverse of `value_to_json`; anything else is a `FileFormatError`."""
    if depth > _MAX_DEPTH:
        raise FileFormatError(f"values are nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [value_from_json(part, depth + 1) for part in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$")]
    if not marks:
        return {key: value_from_json(part, depth + 1) for key, part in value.items()}
    with only_named_errors(f"a saved {marks[0]}"):
        return _from_marked(marks[0], value[marks[0]], depth + 1)


def _from_marked(mark: str, value: Any, depth: int) -> Any:
    if mark == "$float":
        return FLOATS[value]
    if mark in ("$array", "$scalar"):
        dtype, shape, text = value
        array = np.frombuffer(bytes.fromhex(text), parse_dtype(dtype)).reshape(shape).copy()
        return array if mark == "$array" else array[()]
    if mark == "$tuple":
        return tuple(value_from_json(part, depth) for part in value)
    if mark == "$dict":
        return {value_from_json(key, depth): value_from_json(part, depth) for key, part in value}
    if mark == "$dtype":
        return parse_dtype(value)
    if mark == "$torch":
        import torch

        dtype = getattr(torch, str(value), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    raise FileFormatError(f"unknown value mark {mark!r}; a newer version may have written it: update sb3-extra-buffers")
