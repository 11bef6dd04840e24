"""Changes to JSON trees, arrays and bytes, of which none knows what they mean."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_VALUES: list[Any] = [
    0, -1, 1, 2, 255, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, 10**40, -(2**31), 1.5, -0.0, 1e300, "", "x", "../x",
    "/etc/passwd", "\x00", "data-0001.bin", "manifest.json", None, True, False, [], {}, [[]], [1] * 40, {"": 0},
    {"$array": "x"}, {"$object": "os:system"}, {"$tuple": [1]}, {"$dtype": "O"}, {"$dtype": "<V8"}, {"$float": "nan"},
    {"$dict": [[1, 2]]}, {"$what": 1}, "O", "<V8", "|O", "<f8", "<i8", "none", "delta", "zstd", "replay", "array",
]  # fmt: skip


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Every place of a JSON tree that holds a value: its container and key."""
    found: list[tuple[Any, Any]] = []
    if isinstance(tree, (dict, list)):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            found.append((tree, key))
            found += nodes(tree[key])
    return found


def mutate_json(tree: Any, rng: random.Random) -> str:
    """Change one value of ``tree`` in place; say which."""
    places = nodes(tree)
    if not places:
        return "nothing to change"
    node, key = rng.choice(places)
    value, how = node[key], rng.random()
    if how < 0.08:
        del node[key]
        return f"{key!r} removed"
    if how < 0.16:
        other, other_key = rng.choice(places)
        with contextlib.suppress(KeyError, IndexError):
            node[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(value)
        return f"{key!r} and {other_key!r} exchanged"
    if how < 0.22 and isinstance(node, dict):
        node[rng.choice(["x", "", str(key) + "2", "../x"])] = copy.deepcopy(value)
        return f"{key!r} there twice"
    if how < 0.26 and isinstance(node, list):
        node.insert(rng.randrange(len(node) + 1), copy.deepcopy(value))
        return f"element {key} there twice"
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.6:
        node[key] = rng.choice([value + 1, value - 1, value * 2, -value, value // 2, value + rng.randrange(100)])
    elif isinstance(value, str) and value and rng.random() < 0.4:
        at = rng.randrange(len(value))
        node[key] = rng.choice([value + "x", value[:at], "../" + value, value[:at] + "9" + value[at + 1 :]])
    else:
        node[key] = copy.deepcopy(rng.choice(_VALUES))
    return f"{key!r}: {str(value)[:40]} -> {str(node[key])[:40]}"


def mutate_array(array: Array, rng: random.Random, others: list[Array]) -> tuple[Array, str]:
    """Another array in the place of ``array``; and how it differs."""
    how = rng.choices(
        ["elements", "extremes", "shift", "exchange", "fill", "length", "shape", "dtype", "other", "noise"],
        [10, 10, 4, 3, 2, 3, 2, 2, 2, 2],
    )[0]
    changed = array.copy()
    flat = changed.reshape(-1)
    generator = np.random.default_rng(rng.randrange(1 << 30))
    if how in ("elements", "extremes", "shift", "exchange", "fill", "noise") and not flat.size:
        how = "length"
    count = rng.choice([1, 1, 2, max(flat.size // 2, 1)])
    at = generator.integers(0, max(flat.size, 1), count)
    with np.errstate(all="ignore"):
        if how == "elements":
            step = generator.integers(-3, 4, count)
            flat[at] = (flat[at].astype(np.float64) + step).astype(flat.dtype) if flat.dtype != bool else ~flat[at]
        elif how == "extremes":
            flat[at] = _extreme(flat.dtype, rng)
        elif how == "shift":
            changed = np.roll(changed, rng.choice([1, -1, 3]))
        elif how == "exchange":
            flat[at] = flat[at[::-1]]
        elif how == "fill":
            flat[:] = _extreme(flat.dtype, rng)
        elif how == "noise":
            flat.view(np.uint8)[:] = generator.integers(0, 256, flat.nbytes, np.uint8)
            if flat.dtype == bool:
                flat[:] = generator.integers(0, 2, flat.size)
        elif how == "length":
            rows = array.reshape(1) if array.ndim == 0 else array
            changed = rng.choice([rows[:-1], rows[1:], rows[:0], np.concatenate([rows, rows[:1]])])
        elif how == "shape":
            changed = rng.choice([array.reshape(-1), array[None], array[..., None]])
        elif how == "dtype":
            changed = array.astype(rng.choice(["<i8", "<i4", "<u1", "<f8", "<f4", "|b1", "<u4", "<i2"]))
        elif how == "other" and others:
            changed = rng.choice(others).copy()
    return changed, how


def _extreme(dtype: np.dtype[Any], rng: random.Random) -> Any:
    if dtype.kind == "b":
        return rng.random() < 0.5
    if dtype.kind == "f":
        return rng.choice([np.nan, np.inf, -np.inf, 0.0, -1.0, 1e30])
    info = np.iinfo(dtype)
    return rng.choice([info.min, info.max, 0, 1, info.max // 2, max(info.min, -1)])


def damage(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """``data`` with a bit flipped, an end cut off, or a stretch overwritten; and which of these it was."""
    kind = rng.choices(["flip", "cut", "zeros", "noise", "double"], [8, 4, 1, 1, 1])[0]
    at = rng.randrange(max(len(data), 1))
    if kind == "flip" and data:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :], kind
    if kind == "cut":
        return data[:at], kind
    stretch = data[at : at + rng.choice([1, 8, 100, 4096])]
    new = rng.randbytes(len(stretch)) if kind == "noise" else stretch * 2 if kind == "double" else bytes(len(stretch))
    return data[:at] + new + data[at + len(stretch) :], kind


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Damaged ``data``."""
    return damage(data, rng)[0]
