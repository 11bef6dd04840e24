"""Compressed buffers and arrays for observations in main memory."""

from sb3_extra_buffers.compressed.array import CompressedArray
from sb3_extra_buffers.compressed.dtypes import (
    find_buffer_dtypes,
    find_smallest_dtype,
    has_igzip,
    has_lz4,
    has_numba,
    has_zstd,
    init_jit,
)

__all__ = [
    "CompressedArray",
    "find_buffer_dtypes",
    "find_smallest_dtype",
    "has_igzip",
    "has_lz4",
    "has_numba",
    "has_zstd",
    "init_jit",
]
