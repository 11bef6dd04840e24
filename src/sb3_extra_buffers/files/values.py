"""Plain values as JSON and back: what JSON lacks is an object with one key that begins with ``$``."""

from __future__ import annotations

import enum
import math
import sys
from typing import Any

import numpy as np

from sb3_extra_buffers.errors import FileFormatError, NotSaveableError
from sb3_extra_buffers.stores.checks import only_named_errors, parse_dtype

_MOST_DEPTH = 64
# arrays are kept among the JSON, so they had better be small
_MOST_BYTES = 1 << 12
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any, name: str) -> Any:
    """``value`` as JSON, or an error that says what ``name`` holds and why it cannot be saved."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, enum.Enum):
        return encode(value.value, name)
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_array(value, name)
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(part, f"{name}.{key}") for key, part in value.items()}
        return {"$dict": [[encode(key, name), encode(part, f"{name}.{key}")] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        parts = [encode(part, f"{name}.{place}") for place, part in enumerate(value)]
        return parts if isinstance(value, list) else {"$tuple": parts}
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return {"$dtype": np.dtype(value).str}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return {"$torch": str(value).removeprefix("torch.")}
    kind = type(value)
    raise NotSaveableError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickle; "
        "keep it as numbers, strings, arrays, lists or dicts"
    )


def _encode_array(value: Any, name: str) -> Any:
    if value.dtype.kind not in "biufc" or value.nbytes > _MOST_BYTES:
        raise NotSaveableError(
            f"{name} holds {value.nbytes} bytes of dtype {value.dtype}; files keep numbers, up to {_MOST_BYTES} bytes"
        )
    key = "$array" if isinstance(value, np.ndarray) else "$scalar"
    return {key: [value.dtype.str, list(value.shape), value.tobytes().hex()]}


def decode(value: Any, depth: int = 0) -> Any:
    """Undo `encode`; anything else is an error."""
    if depth > _MOST_DEPTH:
        raise FileFormatError(f"values are nested more than {_MOST_DEPTH} deep")
    if isinstance(value, list):
        return [decode(part, depth + 1) for part in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$")]
    if not marks:
        return {key: decode(part, depth + 1) for key, part in value.items()}
    with only_named_errors(f"a saved {marks[0]}"):
        return _decode_marked(marks[0], value[marks[0]], depth + 1)


def _decode_marked(mark: str, value: Any, depth: int) -> Any:
    if mark == "$float":
        return _FLOATS[value]
    if mark in ("$array", "$scalar"):
        dtype, shape, text = value
        array = np.frombuffer(bytes.fromhex(text), parse_dtype(dtype)).reshape(shape).copy()
        return array if mark == "$array" else array[()]
    if mark == "$tuple":
        return tuple(decode(part, depth) for part in value)
    if mark == "$dict":
        return {decode(key, depth): decode(part, depth) for key, part in value}
    if mark == "$dtype":
        return parse_dtype(value)
    if mark == "$torch":
        import torch

        dtype = getattr(torch, str(value), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    raise FileFormatError(f"a value marked {mark} is unknown here; update sb3-extra-buffers")
