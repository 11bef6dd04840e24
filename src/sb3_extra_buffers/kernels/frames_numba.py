"""The frame store's kernels, compiled. `kernels.frames` and `kernels.reading` define what each one does.

Bookkeeping is compiled from the reference kernels as it is; only functions that touch every byte are written again.
Everything that Python calls is defined in this file, so that `kernels.dispatch` can find its cache entries.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.experimental import structref

from sb3_extra_buffers.errors import OutOfMemoryError
from sb3_extra_buffers.kernels import frames as reference
from sb3_extra_buffers.kernels import (
    lz4_block,
    lz4_numba,  # noqa: F401  # registers the compiled byte work of lz4_block
    policy,
    reading_numba,
    state,
)
from sb3_extra_buffers.kernels.compiling import entry, replaces, use_reference
from sb3_extra_buffers.kernels.delta_numba import encode
from sb3_extra_buffers.kernels.intrinsics import copy_bytes, equal_bytes, load_word
from sb3_extra_buffers.kernels.state import FrameState


@structref.register
class _TablesType(types.StructRef):  # type: ignore[misc]  # numba has no types
    pass


class Tables(structref.StructRefProxy):  # type: ignore[misc]  # numba has no types
    """`FrameState` as one argument: numba takes 0.4 us to inspect each array that it is passed."""

    def __new__(cls, *columns: Any) -> Any:
        return structref.StructRefProxy.__new__(cls, *columns)


structref.define_proxy(Tables, _TablesType, FrameState._fields)


def bind_state(state: FrameState) -> Any:
    """Convert ``state`` to what the compiled kernels take; the result keeps the arrays alive."""
    try:
        return Tables(*state)
    except TypeError as problem:
        # numba reports a failed allocation like this
        raise OutOfMemoryError(f"not enough memory for the tables of the compiled kernels: {problem}") from problem


# ---- functions that touch every byte ----


@replaces(reference.is_same)
def is_same(frames: Any, row: Any, j: Any, recent: Any, stream: Any, position: Any) -> bool:
    _, stack, size = frames.shape
    at = (stream * recent.shape[1] + position) * recent.shape[2]
    return equal_bytes(frames, (row * stack + j) * size, recent, at, size)


@replaces(reference.is_zero)
def is_zero(frames: Any, row: Any, j: Any) -> bool:
    _, stack, size = frames.shape
    start = (row * stack + j) * size
    done = 0
    while size - done >= 8:
        if load_word(frames, start + done):
            return False
        done += 8
    for i in range(done, size):  # noqa: SIM110  # numba compiles no generators
        if frames[row, j, i]:
            return False
    return True


@replaces(reference.put_frame)
def put_frame(recent: Any, stream: Any, position: Any, frames: Any, row: Any, j: Any) -> None:
    _, stack, size = frames.shape
    to = (stream * recent.shape[1] + position) * recent.shape[2]
    copy_bytes(recent, to, frames, (row * stack + j) * size, size)


@replaces(reference.put_whole)
def put_whole(target: Any, at: Any, recent: Any, stream: Any, position: Any, size: Any) -> None:
    copy_bytes(target, at, recent, (stream * recent.shape[1] + position) * recent.shape[2], size)


@replaces(reference.encode_frame)
def encode_frame(
    target: Any, at: Any, recent: Any, stream: Any, position: Any, reference: Any, reference_at: Any, size: Any,
    scratch: Any,
) -> int:  # fmt: skip
    frame_at = (stream * recent.shape[1] + position) * recent.shape[2]
    length = encode(target, at, recent, frame_at, reference, reference_at, size, scratch)
    if length >= size:
        copy_bytes(target, at, recent, frame_at, size)
        return size
    return length


use_reference(reference, inline=reference.find_frame)
use_reference(policy)
use_reference(state)


# ---- kernels ----
# wrappers rather than ``entry(reference.f)``: what kernels call and what Python calls would share a cache entry, and
# only the latter can be called from Python


@entry
def write_step(
    state: Any, frame_ids: Any, frames: Any, next_frames: Any, index: int, next_index: int, first: int
) -> int:
    return reference.write_step(state, frame_ids, frames, next_frames, index, next_index, first)


@entry
def write_frames(state: Any, frame_ids: Any, frames: Any, streams: Any, indices: Any, first: int, logged: bool) -> int:
    return reference.write_frames(state, frame_ids, frames, streams, indices, first, logged)


@entry
def release_rows(state: Any) -> None:
    reference.release_rows(state)


@entry
def read_frames(state: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int) -> Any:
    return reading_numba.read_rows(state, frame_ids, sets, out, first, stop)


@entry
def flat_indices(steps: Any, streams: Any, n_steps: int, n_streams: int, bases: Any, out: Any) -> int:
    return reference.flat_indices(steps, streams, n_steps, n_streams, bases, out)


@entry
def pack_block(source: Any, size: int, target: Any, table: Any) -> int:
    return lz4_block.pack_block(source, size, target, table)


@entry
def split_stack(observations: Any, frames: Any) -> None:
    n_rows, pixels, stack, unit = observations.shape
    for r in range(n_rows):
        flat = observations[r].reshape(-1)
        if stack == 4 and unit == 1:
            # the common case, spelled out so that the compiler vectorises it
            a, b, c, d = frames[r, 0], frames[r, 1], frames[r, 2], frames[r, 3]
            for pixel in range(pixels):
                a[pixel] = flat[4 * pixel]
                b[pixel] = flat[4 * pixel + 1]
                c[pixel] = flat[4 * pixel + 2]
                d[pixel] = flat[4 * pixel + 3]
        else:
            for j in range(stack):
                frame = frames[r, j]
                for pixel in range(pixels):
                    for byte in range(unit):
                        frame[pixel * unit + byte] = flat[(pixel * stack + j) * unit + byte]


@entry
def join_stack(frames: Any, observations: Any) -> None:
    n_rows, pixels, stack, unit = observations.shape
    for r in range(n_rows):
        flat = observations[r].reshape(-1)
        if stack == 4 and unit == 1:
            a, b, c, d = frames[r, 0], frames[r, 1], frames[r, 2], frames[r, 3]
            for pixel in range(pixels):
                flat[4 * pixel] = a[pixel]
                flat[4 * pixel + 1] = b[pixel]
                flat[4 * pixel + 2] = c[pixel]
                flat[4 * pixel + 3] = d[pixel]
        else:
            for pixel in range(pixels):
                for j in range(stack):
                    for byte in range(unit):
                        flat[(pixel * stack + j) * unit + byte] = frames[r, j, pixel * unit + byte]
