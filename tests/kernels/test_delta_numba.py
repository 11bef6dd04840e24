"""Operations on lines of 64 bytes: at once and word by word, against plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("numba")

from sb3_extra_buffers.kernels import delta_numba, intrinsics
from tests.kernels.wrapping import callable_from_python

Bytes = npt.NDArray[np.uint8]
NAMES = ["unequal", "cut", "fill", "merge"]
MASKS = [0, 1, 1 << 63, (1 << 64) - 1, 0xFF, 0xFF << 56, 0x0101010101010101, 0x8000000080000000]


def expected_line(name: str, target: Bytes, source: Bytes, mask: int) -> Bytes:
    """The result of an operation, byte by byte."""
    chosen = [i for i in range(64) if mask >> i & 1]
    result = target.copy()
    if name == "cut":
        result = source[chosen]
    elif name == "merge":
        result[chosen] = source[: len(chosen)]
    else:
        for i in range(64):
            # the first byte is that before the fresh ones
            result[i] = source[sum(position <= i for position in chosen)]
    return result


def variants(name: str) -> list[Callable[..., Any]]:
    by_word = [getattr(delta_numba, f"{name}_words")] if name in ("unequal", "cut") else []
    functions = [callable_from_python(function) for function in by_word]
    if intrinsics.HAS_LINES:
        arguments = "a, at, b, bt" if name == "unequal" else "a, at, b, bt, mask"
        functions.append(callable_from_python(getattr(intrinsics, f"{name}_line"), arguments))
    return functions


@pytest.mark.parametrize("name", NAMES)
def test_line_operations(name: str) -> None:
    rng = np.random.default_rng(0)
    masks = MASKS + [int(x) for x in rng.integers(0, 1 << 63, 40)] + [1 << i | 1 << j for i in (3, 31) for j in (8, 60)]
    for run in variants(name):
        for mask in masks:
            target = rng.integers(0, 256, 192).astype(np.uint8)
            source = rng.integers(0, 256, 192).astype(np.uint8)
            if name == "unequal":
                chosen = np.array([mask >> i & 1 for i in range(64)], bool)
                target[64:128][~chosen] = source[70:134][~chosen]
                target[64:128][chosen] = source[70:134][chosen] + 1
                assert run(target, 64, source, 70) == mask
                continue
            expected = expected_line(name, target[64:128], source[70:135], mask)
            before = target.copy()
            run(target, 64, source, 70, np.uint64(mask))
            assert (target[64 : 64 + len(expected)] == expected).all(), (name, hex(mask))
            assert (target[:64] == before[:64]).all()
            assert (target[128:] == before[128:]).all()
