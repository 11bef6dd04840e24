"""Writing frames, compiled; `kernels.frames` defines what it does.

Bookkeeping is compiled from the reference kernels as it is; only functions that touch every byte are written again.
"""

from __future__ import annotations

from typing import Any

from sb3_extra_buffers.kernels import frames as reference
from sb3_extra_buffers.kernels import (
    lz4_numba,  # noqa: F401  # registers the compiled byte work of lz4_block
    policy,
    state,
)
from sb3_extra_buffers.kernels.columns_numba import flat, part
from sb3_extra_buffers.kernels.compiling import inner, replaces, use_reference
from sb3_extra_buffers.kernels.delta_numba import encode
from sb3_extra_buffers.kernels.intrinsics import copy_bytes, equal_bytes, load_int

replaces(reference.part)(part)


@replaces(reference.is_same)
@inner
def is_same(frames: Any, row: Any, j: Any, recent: Any, stream: Any, position: Any) -> bool:
    _, stack, size = frames.shape
    at = (stream * recent.shape[1] + position) * recent.shape[2]
    return equal_bytes(frames, (row * stack + j) * size, recent, at, size)


@replaces(reference.is_zero)
@inner
def is_zero(frames: Any, row: Any, j: Any) -> bool:
    _, stack, size = frames.shape
    start = (row * stack + j) * size
    # every byte equals the one before
    return load_int(frames, start) == 0 and equal_bytes(frames, start, frames, start + 1, size - 1)


@replaces(reference.put_frame)
@inner
def put_frame(recent: Any, stream: Any, position: Any, frames: Any, row: Any, j: Any) -> None:
    _, stack, size = frames.shape
    to = (stream * recent.shape[1] + position) * recent.shape[2]
    copy_bytes(recent, to, frames, (row * stack + j) * size, size)


@replaces(reference.put_whole)
@inner
def put_whole(target: Any, at: Any, recent: Any, stream: Any, position: Any, size: Any) -> None:
    copy_bytes(target, at, recent, (stream * recent.shape[1] + position) * recent.shape[2], size)


@inner
def _encode_frame(
    target: Any, at: Any, rows: Any, frame_at: Any, reference: Any, reference_at: Any, size: Any, scratch: Any
) -> int:
    length = encode(target, at, rows, frame_at, reference, reference_at, size, scratch)
    if length >= size:
        copy_bytes(target, at, rows, frame_at, size)
        return size
    return length


@replaces(reference.encode_frame)
@inner
def encode_frame(
    target: Any, at: Any, recent: Any, stream: Any, position: Any, reference: Any, reference_at: Any, size: Any,
    scratch: Any,
) -> int:  # fmt: skip
    frame_at = (stream * recent.shape[1] + position) * recent.shape[2]
    return _encode_frame(target, at, flat(recent), frame_at, flat(reference), reference_at, size, scratch)


use_reference(policy)
use_reference(state)
use_reference(reference)
