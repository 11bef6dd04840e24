"""Argument checks: what they accept, convert and refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sb3_extra_buffers.arguments import as_array, cast, cast_exactly, check_count, check_index, parse_bytes
from sb3_extra_buffers.errors import ArgumentError, IndexOutOfRangeError, SpecMismatchError


@pytest.mark.parametrize("value", [1, np.int64(7), np.array(3)])
def test_counts_are_integers(value: Any) -> None:
    assert check_count(value, "n") == int(value)


@pytest.mark.parametrize("value", [0, -1, 2.0, "3", None, True, np.True_, np.array([1, 2])])
def test_other_counts_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ArgumentError, match="batch_size must be an integer of at least 1"):
        check_count(value, "batch_size")


def test_counts_have_an_upper_limit() -> None:
    with pytest.raises(ArgumentError, match=r"n must be an integer of less than 2\*\*48, got 1152921504606846976"):
        check_count(1 << 60, "n")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, 7),
        (np.int64(10**9), 10**9),
        (4e9, 4 * 10**9),
        ("123", 123),
        ("500MB", 500 * 10**6),
        ("4GB", 4 * 10**9),
        ("2GiB", 2 << 30),
        ("1.5 GB", 1_500_000_000),
        (" 64 kib ", 64 << 10),
        ("3tb", 3 * 10**12),
        ("10 b", 10),
    ],
)
def test_bytes_have_units(value: Any, expected: int) -> None:
    assert parse_bytes(value, "max_bytes") == expected


@pytest.mark.parametrize(
    "value", [0, -1, 1.5, True, "", "GB", "4 XB", "-4GB", "0MB", "4GB free", "1e9", [4], float("nan")]
)
def test_other_bytes_are_refused_by_name(value: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"max_bytes must be a positive number of bytes, or a string such as '500MB'"
    ):
        parse_bytes(value, "max_bytes")


def test_indices_wrap_and_stay_inside() -> None:
    assert [check_index(i, 3, "i") for i in (-3, -1, 0, 2)] == [0, 2, 0, 2]
    for bad in (-4, 3, 1.5, "0"):
        with pytest.raises(IndexOutOfRangeError, match="-3 to 2"):
            check_index(bad, 3, "i")


def test_arrays_come_from_anything_array_like() -> None:
    assert as_array(torch.ones(2, requires_grad=True), "x").tolist() == [1.0, 1.0]
    with pytest.raises(SpecMismatchError, match="x cannot be converted"):
        as_array([[1], [2, 3]], "x")


@pytest.mark.parametrize(
    ("values", "dtype", "bad"),
    [
        ([1.0, 256.0], "uint8", "256.0"),
        ([1, -1], "uint8", "-1"),
        ([0.0, 0.5], "int64", "0.5"),
        ([float("nan")], "int64", "nan"),
        ([2**53, 2**53 + 1], "float64", "9007199254740993"),
        ([2**64 - 1], "int64", "18446744073709551615"),
    ],
)
def test_a_value_that_would_change_is_refused(values: list[Any], dtype: str, bad: str) -> None:
    with pytest.raises(SpecMismatchError, match=bad):
        cast_exactly(np.array(values), np.dtype(dtype), "x")


def test_exact_casts_keep_every_value() -> None:
    assert cast_exactly(np.array([0.0, 255.0]), np.dtype(np.uint8), "x").tolist() == [0, 255]
    assert np.isnan(cast_exactly(np.array([np.nan]), np.dtype(np.float32), "x")).all()


def test_floats_are_rounded_and_nothing_else_is() -> None:
    assert cast(np.array([1 / 3]), np.dtype(np.float32), "x")[0] == np.float32(1 / 3)
    with pytest.raises(SpecMismatchError, match=r"1e\+300"):
        cast(np.array([1e300]), np.dtype(np.float32), "x")
    with pytest.raises(SpecMismatchError, match=r"0\.5"):
        cast(np.array([0.5]), np.dtype(np.uint8), "x")
    with pytest.raises(SpecMismatchError, match="cannot be stored as"):
        cast(np.array(["a"]), np.dtype(np.uint8), "x")
