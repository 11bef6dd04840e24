"""The documented imports, signatures and snippets of `sb3_extra_buffers.compressed`."""

from __future__ import annotations

import importlib.util
import inspect

import numpy as np
import pytest

import sb3_extra_buffers.compressed as module
from sb3_extra_buffers.codecs import is_available
from sb3_extra_buffers.compressed import (
    CompressedArray,
    find_buffer_dtypes,
    find_smallest_dtype,
    has_igzip,
    has_lz4,
    has_numba,
    has_zstd,
    init_jit,
)
from sb3_extra_buffers.errors import MissingExtraError, UnknownCodecError


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]  # any callable


def test_all_names_exist() -> None:
    assert sorted(module.__all__) == list(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__doc__, f"{name} says nothing of itself"
    exec("from sb3_extra_buffers.compressed import *", {})


@pytest.mark.parametrize("name", ["CompressedMaskableRolloutBuffer", "use_rollout_buffer"])
def test_names_that_need_sb3_contrib(name: str) -> None:
    if importlib.util.find_spec("sb3_contrib") is None:
        assert name not in module.__all__
        with pytest.raises(MissingExtraError, match=r"pip install '\.\[contrib\]'"):
            getattr(module, name)
    else:
        assert name in module.__all__


def test_signatures() -> None:
    assert parameters(find_buffer_dtypes) == ["obs_shape", "elem_dtype", "compression_method"]
    assert parameters(find_smallest_dtype) == ["max_val", "signed", "fallback"]
    assert parameters(CompressedArray)[:2] == ["shape", "obs_shape"]
    wanted = {"dtype", "dtypes", "compression_method", "compression_kwargs", "decompression_kwargs"}
    assert wanted <= set(parameters(CompressedArray))
    assert inspect.signature(CompressedArray).parameters["compression_method"].default == "auto"
    assert "compression_method" in parameters(init_jit)
    for has in (has_igzip, has_lz4, has_numba, has_zstd):
        assert parameters(has) == []


@pytest.mark.parametrize(
    ("has", "package"), [(has_igzip, "isal"), (has_lz4, "lz4"), (has_numba, "numba"), (has_zstd, "zstandard")]
)
def test_has_says_what_is_installed(has: object, package: str) -> None:
    assert has() is (importlib.util.find_spec(package) is not None)  # type: ignore[operator]  # a function


@pytest.mark.parametrize(
    ("shape", "runs"),
    [
        ((255,), "uint8"),
        ((16, 16), "uint16"),
        ((4, 84, 84), "uint16"),
        ((84, 84, 4), "uint16"),
        ((256, 256), "uint32"),
        (7, "uint8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "method", ["rle", "rle-jit", "gzip5", "igzip1", "zstd-5", "lz4-frame/1", "delta", "auto", "none"]
)
def test_find_buffer_dtypes(shape: int | tuple[int, ...], runs: str, method: str) -> None:
    if not is_available(method.split("/")[0].rstrip("0123456789-")) and method != "auto":
        with pytest.raises(MissingExtraError, match="pip install"):
            find_buffer_dtypes(obs_shape=shape, elem_dtype=np.uint8, compression_method=method)
        return
    found = find_buffer_dtypes(obs_shape=shape, elem_dtype=np.uint8, compression_method=method)
    assert found == {"elem_type": np.dtype(np.uint8), "runs_type": np.dtype(runs)}


def test_the_dtypes_found_build_an_array() -> None:
    dtypes = find_buffer_dtypes(obs_shape=(20, 20), elem_dtype=np.float32, compression_method="rle")
    array = CompressedArray((5, 2), (20, 20), dtypes=dtypes, compression_method="rle")
    array[0] = np.float32(0.25)
    assert array.dtype == np.float32
    assert (array[0] == 0.25).all()


def test_find_buffer_dtypes_refuses_unknown_methods() -> None:
    with pytest.raises(UnknownCodecError, match="made-up"):
        find_buffer_dtypes((84, 84), np.uint8, "made-up")


@pytest.mark.parametrize(
    ("most", "signed", "wanted"),
    [
        (0, False, "uint8"),
        (255, False, "uint8"),
        (256, False, "uint16"),
        (65_535, False, "uint16"),
        (65_536, False, "uint32"),
        (2**32, False, "uint64"),
        (2**64, False, "float32"),
        (127, True, "int8"),
        (128, True, "int16"),
        (2**31, True, "int64"),
        (2**63, True, "float32"),
        (-1, True, "int8"),
    ],
)
def test_find_smallest_dtype(most: int, signed: bool, wanted: str) -> None:
    assert find_smallest_dtype(most, signed) == np.dtype(wanted)


def test_find_smallest_dtype_falls_back() -> None:
    assert find_smallest_dtype(2**64, fallback=np.float64) == np.dtype(np.float64)


def test_init_jit_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("delta", "auto", "gzip", *(["rle-jit"] if has_numba() else [])):
        assert init_jit(compression_method=method) is None  # type: ignore[func-returns-value]  # that is the point
    assert capsys.readouterr() == ("", "")


def test_the_docstring_example() -> None:
    frames = CompressedArray((1000, 4), (4, 84, 84), np.uint8)
    frames[0] = np.zeros((4, 4, 84, 84), np.uint8)
    assert frames[[0, 0], [1, 2]].shape == (2, 4, 84, 84)
