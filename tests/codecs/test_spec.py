"""Batches become rows and come back; what would change on the way is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sb3_extra_buffers.codecs import ObsSpec
from sb3_extra_buffers.errors import SpecMismatchError

BATCHES = hnp.arrays(
    dtype=st.one_of(hnp.scalar_dtypes(), hnp.complex_number_dtypes()),
    shape=hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4),
)


@given(BATCHES)
def test_rows_are_the_bytes_of_the_batch(batch: npt.NDArray[Any]) -> None:
    spec = ObsSpec(batch.shape[1:], batch.dtype)
    rows = spec.to_rows(batch)

    assert rows.dtype == np.uint8
    assert rows.shape == (len(batch), spec.nbytes)
    assert rows.tobytes() == batch.tobytes()
    assert spec.from_rows(rows).tobytes() == batch.tobytes()
    assert spec.from_rows(rows).shape == batch.shape
    assert spec.from_rows(rows).dtype == batch.dtype


def test_only_batches_that_are_not_contiguous_are_copied() -> None:
    spec = ObsSpec((3, 4), np.dtype(np.float32))
    batch = np.arange(48, dtype=np.float32).reshape(4, 3, 4)

    assert np.shares_memory(spec.to_rows(batch), batch)
    assert np.shares_memory(spec.from_rows(spec.to_rows(batch)), batch)
    np.testing.assert_array_equal(spec.from_rows(spec.to_rows(batch[::-2])), batch[::-2])
    turned = np.asfortranarray(batch)
    np.testing.assert_array_equal(spec.from_rows(spec.to_rows(turned)), batch)


@pytest.mark.parametrize(
    ("given_dtype", "wanted"),
    [("u1", "u2"), ("u1", "f4"), ("i4", "f8"), ("f4", "f8"), ("?", "u1"), ("<f4", ">f4"), ("u2", "i4")],
)
def test_widening_keeps_every_value(given_dtype: str, wanted: str) -> None:
    batch = np.array([[0, 1], [1, 0]], given_dtype)
    spec = ObsSpec((2,), np.dtype(wanted))

    back = spec.from_rows(spec.to_rows(batch))

    assert back.dtype == np.dtype(wanted)
    np.testing.assert_array_equal(back, batch)


@pytest.mark.parametrize(
    ("given_dtype", "wanted"),
    [
        ("f4", "u1"),
        ("f8", "f4"),
        ("i4", "u1"),
        ("i8", "f8"),  # rounds above 2**53, although NumPy considers it safe
        ("u8", "f8"),
        ("i4", "f4"),
        ("i8", "U21"),  # NumPy considers this safe, too
        ("u1", "?"),
    ],
)
def test_a_cast_that_could_change_a_value_is_refused(given_dtype: str, wanted: str) -> None:
    with pytest.raises(SpecMismatchError, match=r"expected a batch of .* got \(2, 2\)"):
        ObsSpec((2,), np.dtype(wanted)).to_rows(np.zeros((2, 2), given_dtype))


@pytest.mark.parametrize("shape", [(), (2,), (2, 4), (2, 3, 1), (3,)])
def test_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecMismatchError, match=r"'n', 3"):
        ObsSpec((3,), np.dtype(np.uint8)).to_rows(np.zeros(shape, np.uint8))


def test_scalar_is_not_a_batch_of_scalars() -> None:
    with pytest.raises(SpecMismatchError):
        ObsSpec((), np.dtype(np.uint8)).to_rows(np.uint8(3))


def test_rows_of_the_wrong_size_are_refused() -> None:
    with pytest.raises(SpecMismatchError, match="rows of 12 bytes"):
        ObsSpec((3,), np.dtype(np.float32)).from_rows(np.zeros((2, 8), np.uint8))


@pytest.mark.parametrize("dtype", [object, "U0", [("a", object)]])
def test_dtype_of_variable_size_is_refused(dtype: Any) -> None:
    with pytest.raises(SpecMismatchError, match="fixed size"):
        ObsSpec((3,), np.dtype(dtype))


def test_specs_compare_by_value() -> None:
    spec = ObsSpec([np.int64(2), 3], "uint8")  # type: ignore[arg-type]  # as spaces have them

    assert spec == ObsSpec((2, 3), np.dtype(np.uint8))
    assert hash(spec) == hash(ObsSpec((2, 3), np.dtype(np.uint8)))
    assert str(spec) == "2x3-uint8"
    assert str(ObsSpec((), np.dtype(np.float64))) == "scalar-float64"
