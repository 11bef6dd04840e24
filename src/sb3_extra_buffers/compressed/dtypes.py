"""Helpers for the ``dtypes`` argument, for compiling ahead of time, and for optional packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.arguments import check_dtypes
from sb3_extra_buffers.codecs.registry import get_codec, is_available, parse_method
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.kernels import compiled_kernels, frame_kernels, has_numba

__all__ = [
    "find_buffer_dtypes",
    "find_smallest_dtype",
    "has_igzip",
    "has_lz4",
    "has_numba",
    "has_zstd",
    "init_jit",
    "warmup",
]


def find_smallest_dtype(max_val: int, signed: bool = False, fallback: npt.DTypeLike = np.float32) -> np.dtype[Any]:
    """Return the smallest integer dtype that holds ``max_val``, or ``fallback`` if none does.

    Args:
        max_val: The value to hold.
        signed: Whether to choose among the signed dtypes.
        fallback: The dtype to return if no integer dtype is large enough.

    Examples:
        >>> from sb3_extra_buffers.compressed import find_smallest_dtype
        >>> find_smallest_dtype(4 * 84 * 84)
        dtype('uint16')
    """
    kinds = (np.int8, np.int16, np.int32, np.int64) if signed else (np.uint8, np.uint16, np.uint32, np.uint64)
    for kind in kinds:
        limits = np.iinfo(kind)
        if limits.min <= max_val <= limits.max:
            return np.dtype(kind)
    return np.dtype(fallback)


def find_buffer_dtypes(
    obs_shape: int | tuple[int, ...],
    elem_dtype: npt.DTypeLike = np.uint8,
    compression_method: str = "rle",
) -> dict[str, np.dtype[Any]]:
    """Return the ``dtypes`` argument of buffers, and compile the code of the method.

    Call it before worker processes are started, so that they inherit the compiled code.

    Args:
        obs_shape: Shape of one observation.
        elem_dtype: Its dtype.
        compression_method: The method that the buffer will use.

    Examples:
        >>> import numpy as np
        >>> from sb3_extra_buffers.compressed import find_buffer_dtypes
        >>> find_buffer_dtypes((4, 84, 84), np.uint8, "rle")
        {'elem_type': dtype('uint8'), 'runs_type': dtype('uint16')}
    """
    n_elements = int(np.prod(obs_shape, dtype=np.int64))
    init_jit(compression_method=compression_method, obs_shape=obs_shape, elem_dtype=elem_dtype)
    return {"elem_type": np.dtype(elem_dtype), "runs_type": find_smallest_dtype(n_elements)}


def init_jit(
    compression_method: str = "rle-jit",
    obs_shape: int | tuple[int, ...] = (84, 84),
    elem_dtype: npt.DTypeLike = np.uint8,
) -> None:
    """Compile the code of ``compression_method`` now instead of at the first observation.

    Args:
        compression_method: The method that will be used.
        obs_shape: Shape of one observation.
        elem_dtype: Its dtype.

    Examples:
        >>> from sb3_extra_buffers.compressed import init_jit
        >>> init_jit("rle-jit", (4, 84, 84))
    """
    shape = (obs_shape,) if isinstance(obs_shape, int) else tuple(obs_shape)
    spec = ObsSpec(shape, np.dtype(elem_dtype))
    if compression_method == "auto" or parse_method(compression_method)[0] == "delta":
        if has_numba():
            _use_store("delta", "first")
            _use_store("delta", "last")
        return
    codec = get_codec(compression_method).bind(spec)
    row = np.zeros((1, spec.nbytes), np.uint8)
    payload = codec.encode_batch(row)
    codec.decode_batch([memoryview(payload[0])], row)


def warmup(compression_method: str = "auto", observation_space: Any = None) -> None:
    """Compile everything that buffers with ``compression_method`` will call, instead of at the first observations.

    Compiling takes about five seconds. numba caches the result on disk: later processes on the same machine load it in
    less than a second. Without numba there is nothing to compile. Priorities and windows have kernels of
    their own, which are compiled in about a second each, and cached, when a buffer first samples by priority or
    samples windows.

    Args:
        compression_method: The method that the buffer will use.
        observation_space: The space of the observations, or None for images with the channels first. Only the position
            of the channels matters.

    Examples:
        >>> from sb3_extra_buffers.compressed import warmup
        >>> warmup()
        >>> warmup("zstd-5")
    """
    if not has_numba():
        return
    methods = ["delta", *(["zstd"] if has_zstd() else [])] if compression_method == "auto" else [compression_method]
    spaces = getattr(observation_space, "spaces", {"": observation_space}).values()
    shapes = [shape for space in spaces if (shape := getattr(space, "shape", None))]
    channels_last = any(len(shape) == 3 and shape[2] < shape[0] for shape in shapes)
    for method in methods:
        _use_store(method, "last" if channels_last else "first")
    zero = np.zeros(1, np.int64)
    frame_kernels().flat_indices(zero, zero, 1, 1, zero, np.zeros((1, 1), np.int64))
    compiled_kernels("steps").compile_all()


def _use_store(method: str, axis: Literal["first", "last"]) -> None:
    """Write and read a few observations, which compiles what a buffer will call."""
    from sb3_extra_buffers.stores.layout import StackLayout
    from sb3_extra_buffers.stores.registry import make_store

    # many repeated changes, so that a segment is also compressed and decompressed with LZ4
    rows = np.tile(np.arange(64, dtype=np.uint8), (16, 32)) + np.arange(16, dtype=np.uint8)[:, None]
    indices, streams = np.arange(16), np.zeros(16, np.int64)
    layout = StackLayout(ObsSpec((2, 512, 2), np.dtype(np.uint8)), 2, axis)
    store = make_store(layout, 32, 1, get_codec(method).bind(layout.frame_spec))
    store.write(indices, streams, rows)
    store.write_step(0, 16, rows[-1:], rows[:1])
    store.read(indices)


def has_igzip() -> bool:
    """Return whether python-isal (``igzip``) is installed.

    Examples:
        >>> from sb3_extra_buffers.compressed import has_igzip
        >>> method = "igzip1" if has_igzip() else "gzip"
    """
    return is_available("igzip")


def has_zstd() -> bool:
    """Return whether the Zstandard backend is available.

    Examples:
        >>> from sb3_extra_buffers.compressed import has_zstd
        >>> method = "zstd-5" if has_zstd() else "gzip"
    """
    return is_available("zstd")


def has_lz4() -> bool:
    """Return whether python-lz4 (``lz4-frame``, ``lz4-block``) is installed.

    Examples:
        >>> from sb3_extra_buffers.compressed import has_lz4
        >>> method = "lz4-frame/1" if has_lz4() else "gzip"
    """
    return is_available("lz4-frame")


def element_dtype(dtype: npt.DTypeLike | None, dtypes: Mapping[str, Any] | None) -> np.dtype[Any]:
    """Return the dtype given as ``dtype`` or ``dtypes["elem_type"]``; uint8 by default."""
    elem_type = (check_dtypes(dtypes) or {}).get("elem_type")
    if dtype is None:
        return np.dtype(np.uint8 if elem_type is None else elem_type)
    if elem_type is not None and np.dtype(dtype) != np.dtype(elem_type):
        raise SpecMismatchError(
            f"dtype {np.dtype(dtype)} and dtypes['elem_type'] {np.dtype(elem_type)} differ; pass one of them"
        )
    return np.dtype(dtype)
