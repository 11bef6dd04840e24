"""Keys, shapes and dtypes of items: taken from the first item, checked for all others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import is_non_tensor, is_tensor_collection
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten  # nothing public

from sb3_extra_buffers.errors import FileFormatError, SpecMismatchError
from sb3_extra_buffers.stores import checks

__all__ = [
    "INDEX_KEY",
    "Key",
    "Spec",
    "check_items",
    "check_keys",
    "first_item",
    "key_from_json",
    "key_name",
    "key_names",
    "key_to_json",
    "leaf_items",
    "non_tensor_keys",
    "parse_tensor_shape",
    "specs_of",
    "stack_items",
]

Key = Any  # a key of a TensorDict, a tuple if nested; the number of the leaf in any other tree of tensors
Spec = tuple[tuple[int, ...], torch.dtype]

# TorchRL's writers add this key to the data just before they store it
INDEX_KEY = "index"


def leaf_items(data: Any) -> list[tuple[Key, torch.Tensor]]:
    """Return the keys and tensors of a TensorDict, nested ones included, or of a tree of tensors."""
    if is_tensor_collection(data):
        return _tensordict_items(data)
    leaves = tree_leaves(data)
    others = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    if others or not leaves:
        got = f"a {others[0]}" if others else "nothing"
        raise SpecMismatchError(f"a CompressedStorage stores tensors, got {got}; nothing was stored")
    return list(enumerate(leaves))


def _tensordict_items(data: Any) -> list[tuple[Key, torch.Tensor]]:
    items = []
    try:
        pairs = list(data.items(include_nested=True))
    except RuntimeError as error:
        raise SpecMismatchError(
            "a key holds tensors of several shapes; a CompressedStorage needs one shape per key"
        ) from error
    for key, value in pairs:
        if isinstance(value, torch.Tensor):
            items.append((key, value))
        elif is_non_tensor(value):
            raise SpecMismatchError(f"{key!r} does not hold a tensor; a CompressedStorage stores tensors only")
    return items


def non_tensor_keys(data: Any) -> list[Key]:
    """Return the keys of a TensorDict that hold anything but tensors."""
    return [key for key, value in data.items(include_nested=True) if is_non_tensor(value)]


def specs_of(data: Any) -> dict[Key, Spec]:
    """Return the shape and dtype of every leaf."""
    return {key: (tuple(value.shape), value.dtype) for key, value in leaf_items(data)}


def check_items(specs: Mapping[Key, Spec], is_tensordict: bool, data: Any, n_batch: int | None) -> None:
    """Raise `SpecMismatchError` unless ``data`` matches the first item, behind ``n_batch`` leading axes.

    With ``n_batch=None`` shapes are not compared: ``storage[:] = item`` broadcasts.
    """
    if is_tensor_collection(data) != is_tensordict:
        expected = "was a TensorDict" if is_tensordict else "was not a TensorDict"
        raise SpecMismatchError(f"got a {type(data).__name__}, but the first item {expected}; nothing was stored")
    leaves = dict(_tensordict_items(data) if is_tensordict else leaf_items(data))
    missing, unknown = specs.keys() - leaves.keys() - {INDEX_KEY}, leaves.keys() - specs.keys() - {INDEX_KEY}
    if missing or unknown:
        parts = [f"{key_names(keys)} {what}" for keys, what in ((missing, "missing"), (unknown, "new")) if keys]
        raise SpecMismatchError(f"the keys differ from those of the first item: {', '.join(parts)}; nothing was stored")
    for key, (shape, dtype) in specs.items():
        value = leaves.get(key)
        if value is None or key == INDEX_KEY:
            continue
        if value.dtype != dtype or (n_batch is not None and tuple(value.shape[n_batch:]) != shape):
            got = tuple(value.shape[n_batch or 0 :])
            raise SpecMismatchError(
                f"{key!r} has shape {got} and {value.dtype}, but in the first item it has {shape} and {dtype}; "
                "nothing was stored"
            )


def first_item(data: Any) -> Any:
    """Return the first item of a batch."""
    try:
        return data[0] if is_tensor_collection(data) else tree_map(lambda value: value[0], data)
    except (IndexError, TypeError, KeyError, RuntimeError) as error:
        raise SpecMismatchError(f"a {type(data).__name__} without items: {error}; nothing was stored") from None


def stack_items(items: Sequence[Any]) -> Any:
    """Return a list of items as one batch."""
    try:
        if items and all(map(is_tensor_collection, items)):
            return torch.stack(list(items))
        flat = [tree_flatten(item) for item in items]
        if not flat or any(structure != flat[0][1] for _, structure in flat):
            raise SpecMismatchError("the items of the list do not share one structure; nothing was stored")
        leaves = [torch.stack(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    except (RuntimeError, KeyError, TypeError) as error:
        raise SpecMismatchError(f"the items of the list differ: {error}; nothing was stored") from None
    return tree_unflatten(leaves, flat[0][1])


# ---- in files, packets and messages ----


def parse_tensor_shape(shape: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, read from JSON that is not trusted."""
    parsed = checks.parse_shape(shape)
    checks.require(math.prod(parsed) < 1 << 48, f"{shape!r} is too large for the shape of a tensor")
    return parsed


def key_to_json(key: Key) -> Any:
    """Return ``key`` as JSON."""
    return list(key) if isinstance(key, tuple) else key


def key_from_json(value: Any) -> Key:
    """Undo `key_to_json` for JSON that is not trusted."""
    if isinstance(value, list) and 0 < len(value) <= 64 and all(isinstance(part, str) for part in value):
        return tuple(value)
    if isinstance(value, str) or type(value) is int:
        return value
    raise FileFormatError(f"not a key of a TensorDict: {value!r}")


def check_keys(keys: Sequence[Key]) -> None:
    """Raise `FileFormatError` unless a TensorDict can have all of these keys, which are not trusted."""
    paths = {key if isinstance(key, tuple) else (key,) for key in keys}
    checks.require(len(paths) == len(keys), "a key occurs twice")
    for path in paths:
        inside = any(path[:stop] in paths for stop in range(1, len(path)))
        checks.require(not inside, f"{path!r} is inside a key that holds a tensor")


def key_name(key: Key) -> str:
    """Return ``key`` for messages and reports: nested keys with dots."""
    return ".".join(key) if isinstance(key, tuple) else str(key)


def key_names(keys: Iterable[Key]) -> str:
    """Return several keys for a message."""
    return ", ".join(sorted(map(key_name, keys)))
