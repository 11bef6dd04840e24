"""What the first item looks like, and what all others are held against."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from sb3_extra_buffers.errors import ArgumentError, FileFormatError, MissingExtraError, SpecMismatchError

try:
    from tensordict import is_non_tensor, is_tensor_collection
except ImportError as error:
    raise MissingExtraError(
        "CompressedStorage needs 'torchrl' and 'tensordict': pip install 'sb3-extra-buffers[torchrl]'"
    ) from error

__all__ = [
    "ADDED",
    "Key",
    "Spec",
    "at_least",
    "check_items",
    "items",
    "key_from_json",
    "key_to_json",
    "name_of",
    "names_of",
    "parse_dtype",
    "parse_shape",
    "specs_of",
]

Key = Any  # of a TensorDict, nested ones as tuples; of anything else the place among its leaves
Spec = tuple[tuple[int, ...], torch.dtype]

_NEWER = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")

# TorchRL's writers add it to what they are given, just before they store it
ADDED = "index"


def at_least(name: str, value: Any, least: int) -> int:
    """``value`` as an integer, or an error that names the argument."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name} must be an integer, got {value!r}") from None
    if not least <= number < 1 << 48 or isinstance(value, bool):
        raise ArgumentError(
            f"{name} must be at least {least} and a number of things that memory can hold, got {value!r}"
        )
    return number


def items(data: Any) -> list[tuple[Key, torch.Tensor]]:
    """Keys and tensors of a TensorDict, nested ones included, or of a tree of tensors."""
    if is_tensor_collection(data):
        return _items_of(data)
    leaves = tree_leaves(data)
    others = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    if others or not leaves:
        found = f"a {others[0]}" if others else "nothing"
        raise SpecMismatchError(f"a CompressedStorage keeps tensors, got {found}; nothing was stored")
    return list(enumerate(leaves))


def _items_of(data: Any) -> list[tuple[Key, torch.Tensor]]:
    found = []
    try:
        pairs = list(data.items(include_nested=True))
    except RuntimeError as error:
        raise SpecMismatchError(
            "tensors of several shapes lie under one key; a CompressedStorage keeps one shape to a key"
        ) from error
    for key, value in pairs:
        if isinstance(value, torch.Tensor):
            found.append((key, value))
        elif is_non_tensor(value):
            raise SpecMismatchError(f"{key!r} holds no tensor; a CompressedStorage keeps tensors only")
    return found


def specs_of(data: Any) -> dict[Key, Spec]:
    """Shape and dtype of every leaf."""
    return {key: (tuple(value.shape), value.dtype) for key, value in items(data)}


def check_items(specs: Mapping[Key, Spec], structured: bool, data: Any, n_batch: int | None) -> None:
    """Raise `SpecMismatchError` unless ``data`` is like the first item, with ``n_batch`` axes before it.

    With ``n_batch=None`` shapes may differ, as they do where values are repeated to fill a slice.
    """
    if is_tensor_collection(data) != structured:
        expected = "a TensorDict" if structured else "no TensorDict"
        raise SpecMismatchError(f"got a {type(data).__name__}, but the first item was {expected}; nothing was stored")
    found = dict(_items_of(data) if structured else items(data))
    missing, unknown = specs.keys() - found.keys() - {ADDED}, found.keys() - specs.keys() - {ADDED}
    if missing or unknown:
        parts = [f"{names_of(keys)} {what}" for keys, what in ((missing, "missing"), (unknown, "new")) if keys]
        raise SpecMismatchError(f"the keys differ from those of the first item: {', '.join(parts)}; nothing was stored")
    for key, (shape, dtype) in specs.items():
        value = found.get(key)
        if value is None or key == ADDED:
            continue
        if value.dtype != dtype or (n_batch is not None and tuple(value.shape[n_batch:]) != shape):
            there = tuple(value.shape[n_batch or 0 :])
            raise SpecMismatchError(
                f"{key!r} is {there} of {value.dtype}, but the first item's was {shape} of {dtype}; nothing was stored"
            )


# ---- in files and packets ----

# a name from outside is looked up here, and nowhere else
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.complex64, torch.complex128,
        *(getattr(torch, name) for name in _NEWER if hasattr(torch, name)),
    )
}  # fmt: skip


def parse_dtype(text: Any) -> torch.dtype:
    """The dtype that ``text`` names."""
    dtype: torch.dtype | None = _DTYPES.get(text.removeprefix("torch.")) if isinstance(text, str) else None
    if dtype is None:
        raise FileFormatError(f"{text!r} names no dtype of tensors")
    return dtype


def parse_shape(shape: Any, most_axes: int = 32) -> tuple[int, ...]:
    """A shape that was read from JSON."""
    fits = (
        isinstance(shape, list) and len(shape) <= most_axes and all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
    )
    if not fits or math.prod(shape) >= 1 << 48:
        raise FileFormatError(f"{shape!r} is no shape of a tensor")
    return tuple(shape)


def key_to_json(key: Key) -> Any:
    """``key`` as JSON has it."""
    return list(key) if isinstance(key, tuple) else key


def key_from_json(stored: Any) -> Key:
    """Undo `key_to_json`."""
    if isinstance(stored, list) and 0 < len(stored) <= 64 and all(isinstance(part, str) for part in stored):
        return tuple(stored)
    if isinstance(stored, str) or type(stored) is int:
        return stored
    raise FileFormatError(f"{stored!r} is no key")


def name_of(key: Key) -> str:
    """``key`` as people write it."""
    return ".".join(key) if isinstance(key, tuple) else str(key)


def names_of(keys: Any) -> str:
    """Several of them."""
    return ", ".join(sorted(map(name_of, keys)))
