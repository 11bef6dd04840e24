"""Methods of arrays: the same results as with a plain array, to the last bit, type and dtype."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sb3_extra_buffers.compressed import CompressedArray
from sb3_extra_buffers.stores import array_methods

DTYPES = ["?", "u1", "i1", "u2", "i4", "u8", "i8", "f2", "f4", "f8"]
REDUCTIONS = ["sum", "mean", "min", "max", "any", "all", "std", "var", "argmin", "argmax"]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_methods, "_BLOCK_BYTES", 40)


def assert_identical(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, (np.ndarray, np.generic)):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tobytes() == theirs.tobytes()
    else:
        assert repr(ours) == repr(theirs)


def compressed(dense: Any, n_lead: int) -> CompressedArray:
    array = CompressedArray(dense.shape[:n_lead], dense.shape[n_lead:], dense.dtype)
    array[...] = dense
    return array


@st.composite
def arrays(draw: Any) -> Any:
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, max_side=6))
    dense = draw(hnp.arrays(draw(st.sampled_from(DTYPES)), shape))
    return dense, compressed(dense, draw(st.integers(1, len(shape))))


@settings(max_examples=150, deadline=None)
@given(arrays(), st.sampled_from(REDUCTIONS), st.data())
def test_reductions(pair: Any, name: str, data: Any) -> None:
    dense, array = pair
    one_axis = st.none() | st.integers(-dense.ndim, dense.ndim - 1)
    axis = data.draw(one_axis if name.startswith("arg") else one_axis | hnp.valid_tuple_axes(dense.ndim))
    options: dict[str, Any] = {"axis": axis, "keepdims": data.draw(st.booleans())}
    if name in ("sum", "mean"):
        options["dtype"] = data.draw(st.sampled_from([None, np.float32, np.float64]))
    if name not in ("std", "var", "argmin", "argmax") and data.draw(st.integers(0, 4)) == 0:
        options["where"] = np.bool_(True)
        if name in ("min", "max"):
            options["initial"] = 0
    with np.errstate(all="ignore"):
        expected = getattr(dense, name)(**options)
        assert_identical(getattr(array, name)(**options), expected)
        if "where" not in options:
            assert_identical(getattr(np, name)(array, **options), expected)


@settings(max_examples=60, deadline=None)
@given(arrays(), st.sampled_from("CFA"))
def test_conversions(pair: Any, order: Any) -> None:
    dense, array = pair
    assert_identical(array.T, dense.T)
    assert_identical(array.transpose(), dense.transpose())
    assert_identical(array.flatten(order), dense.flatten(order))
    assert_identical(array.ravel(order), dense.ravel(order))
    assert array.copy(order).flags.f_contiguous == dense.copy(order).flags.f_contiguous
    assert_identical(array.copy(order), dense.copy(order))
    assert array.tolist() == dense.tolist() or np.isnan(dense).any()
    assert array.tobytes(order) == dense.tobytes(order)
    assert repr(array.item(0)) == repr(dense.item(0))
    with np.errstate(all="ignore"):
        assert_identical(array.astype(np.float32), dense.astype(np.float32))
        assert_identical(array.astype("i2", casting="unsafe"), dense.astype("i2", casting="unsafe"))
    assert_identical(np.asarray(array), dense)
    assert_identical(np.array(array, dtype=np.complex128), dense.astype(np.complex128))


def test_out_and_bad_axes() -> None:
    dense = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    array, out = compressed(dense, 1), np.zeros((3, 2), np.uint64)
    assert array.sum(0, out=out) is out
    assert_identical(out, dense.sum(0, out=np.zeros((3, 2), np.uint64)))
    axes: list[Any] = [3, (0, 0), "x"]
    for axis in axes:
        with pytest.raises((ValueError, TypeError)) as expected:
            dense.sum(axis)
        with pytest.raises(expected.type):
            array.sum(axis)
    empty = CompressedArray(0, (3,), np.uint8)
    assert empty.sum() == 0
    with pytest.raises(ValueError, match="zero-size"):
        empty.max()


def test_torch_takes_the_decoded_array() -> None:
    dense = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    tensor = torch.from_numpy(np.asarray(compressed(dense, 2)))
    tensor += 1
    assert tensor.tolist() == (dense + 1).tolist()
    with pytest.raises(ValueError, match="without a copy"):
        compressed(dense, 1).__array__(copy=False)


def test_a_large_array_of_integers_is_not_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_methods, "_BLOCK_BYTES", 1 << 20)
    frames = CompressedArray(300, (4, 84, 84), np.uint8, compression_method="delta")
    frames[200] = 255
    tracemalloc.start()
    try:
        assert frames.max() == 255
        assert frames.mean() == 255 / 300
        assert frames.sum(axis=0).shape == (4, 84, 84)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.5 * frames.size
