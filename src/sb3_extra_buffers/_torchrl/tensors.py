"""Tensors as NumPy arrays and rows of bytes, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import FileFormatError, SpecMismatchError

__all__ = [
    "CPU",
    "as_rows",
    "as_tensor",
    "dtype_name",
    "flatten_lead",
    "numpy_dtype",
    "parse_tensor_dtype",
    "tensor_spec",
    "to_numpy",
]

CPU = torch.device("cpu")

_BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NEWER_DTYPES = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
# dtype names in files and packets are looked up here and nowhere else
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.complex64, torch.complex128,
        *(getattr(torch, name) for name in _NEWER_DTYPES if hasattr(torch, name)),
    )
}  # fmt: skip


@cache
def _bit_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype`` if NumPy has it too, else an integer dtype of the same size."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        if dtype.itemsize not in _BIT_DTYPES:
            raise SpecMismatchError(f"tensors of {dtype} cannot be stored: NumPy has no dtype of that size") from None
        return _BIT_DTYPES[dtype.itemsize]
    return dtype


@cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the dtype of the array that `to_numpy` makes of a tensor of ``dtype``."""
    return torch.empty(0, dtype=_bit_dtype(dtype)).numpy().dtype


def tensor_spec(shape: tuple[int, ...], dtype: torch.dtype) -> ObsSpec:
    """Return the spec of a store whose observations are such tensors."""
    return ObsSpec(tuple(shape), numpy_dtype(dtype))


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return ``tensor`` as a contiguous array, without a copy if it already is one in host memory."""
    tensor = tensor.detach().to("cpu").contiguous()
    bits = _bit_dtype(tensor.dtype)
    return (tensor if bits is tensor.dtype else tensor.view(bits)).numpy()


def as_tensor(array: npt.NDArray[Any], dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    """Undo `to_numpy`; on the CPU the tensor shares the array's memory."""
    tensor = torch.from_numpy(array)
    if tensor.dtype is not dtype:
        tensor = tensor.view(dtype)
    return tensor if device.type == "cpu" else tensor.to(device)


def as_rows(spec: ObsSpec, tensor: torch.Tensor) -> ByteRows:
    """Return a tensor of shape ``(*lead, *spec.shape)`` as one row of bytes per observation."""
    array = to_numpy(flatten_lead(tensor, spec.shape))
    rows: ByteRows = array.reshape(len(array), math.prod(spec.shape)).view(np.uint8)
    return rows


def flatten_lead(tensor: torch.Tensor, row_shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of shape ``(*lead, *row_shape)`` with one leading axis; rows may have no elements."""
    return tensor.reshape(math.prod(tensor.shape[: tensor.ndim - len(row_shape)]), *row_shape)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` in files and packets."""
    return str(dtype).removeprefix("torch.")


def parse_tensor_dtype(name: Any) -> torch.dtype:
    """Undo `dtype_name` for a name that is not trusted."""
    dtype = _DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if dtype is None:
        raise FileFormatError(f"unknown tensor dtype {name!r}")
    return dtype
