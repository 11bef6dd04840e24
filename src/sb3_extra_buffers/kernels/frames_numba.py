"""The frame store's kernels, compiled. `kernels.frames` and `kernels.reading` define what each one does.

Everything that Python calls is defined in this file, so that `kernels.dispatch` can find its cache entries.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from sb3_extra_buffers.kernels import (
    frames,
    lz4_block,
    writing_numba,  # noqa: F401  # compiles the functions of `frames`
)
from sb3_extra_buffers.kernels.addresses_numba import (
    call_native,
    frames_at,
    int32_rows_at,
    int64_at,
    native_address,
    tables_from,
)
from sb3_extra_buffers.kernels.columns_numba import (
    as_column,
    bind_state,  # noqa: F401  # one of the kernels
    flat,
    keep,
    stack_int64,
    tables_at,
)
from sb3_extra_buffers.kernels.compiling import compiled, entry, slow_entry
from sb3_extra_buffers.kernels.intrinsics import address_of
from sb3_extra_buffers.kernels.reading_numba import join_frames, read_rows, split_frames, work_bytes
from sb3_extra_buffers.kernels.state import COMMITTED

_write_row, _release_rows = compiled(frames.write_row), compiled(frames.release_rows)
_pack_block, _flat_indices = compiled(lz4_block.pack_block), compiled(frames.flat_indices)

_NO_ROWS = np.zeros(0, np.int64)
_NO_FRAMES = np.zeros((0, 0, 0), np.uint8)


@slow_entry
def write_at(
    bound: int, frame_ids: int, stack: int, frames: int, n_frames: int, next_frames: int, n_next: int, streams: int,
    indices: int, index: int, next_index: int, first: int, logged: int,
) -> int:  # fmt: skip
    """`write_step`, or `write_frames` where ``index`` is negative, of arrays at these addresses.

    All code that writes frames is in this kernel; the kernels that Python calls get the `writer_address`, and call it.
    """
    state = tables_from(bound)
    size, n_rows = state.config.frame_bytes, n_frames + n_next
    # only the length of each row matters
    ids_of = int32_rows_at(frame_ids, (0, stack))
    batches = frames_at(frames, (n_frames, stack, size)), frames_at(next_frames, (n_next, stack, size))
    streams_, indices_ = int64_at(streams, (n_rows,)), int64_at(indices, (n_rows,))
    ids, positions = stack_int64(stack), stack_int64(stack)
    if logged and state.counters[COMMITTED]:
        _release_rows(state)
    for row in range(first, n_rows):
        batch, at, obs_index = batches[0], row, index + row
        if index < 0:
            stream, obs_index = streams_[row], indices_[row]
        else:
            if row >= n_frames:
                batch, at, obs_index = batches[1], row - n_frames, next_index + row - n_frames
            stream = at
        if not _write_row(state, ids_of, batch, at, stream, obs_index, logged != 0, ids, positions):
            return row
    return n_rows


@cache
def writer_address() -> int:
    """The address of `write_at`, which is compiled, or loaded from numba's cache, at the first call."""
    return native_address(write_at, 13)


@entry
def _write(
    writer: int, bound: Any, frame_ids: Any, frames: Any, next_frames: Any, streams: Any, indices: Any, index: int,
    next_index: int, first: int, logged: bool,
) -> int:  # fmt: skip
    return call_native(
        writer,
        (
            address_of(as_column(bound), 0), address_of(as_column(frame_ids), 0), frames.shape[1],
            address_of(as_column(frames), 0), frames.shape[0], address_of(as_column(next_frames), 0),
            next_frames.shape[0], address_of(as_column(streams), 0), address_of(as_column(indices), 0), index,
            next_index, first, 1 if logged else 0,
        ),
    )  # fmt: skip


def write_step(
    bound: Any, frame_ids: Any, frames: Any, next_frames: Any, index: int, next_index: int, first: int
) -> int:
    return _write(
        writer_address(), bound, frame_ids, frames, next_frames, _NO_ROWS, _NO_ROWS, index, next_index, first, True
    )


def write_frames(bound: Any, frame_ids: Any, frames: Any, streams: Any, indices: Any, first: int, logged: bool) -> int:
    return _write(writer_address(), bound, frame_ids, frames, _NO_FRAMES, streams, indices, -1, -1, first, logged)


@entry
def release_rows(bound: Any) -> None:
    _release_rows(tables_at(bound))


@slow_entry
def read_frames(bound: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int, zstd: Any, by_row: bool) -> int:
    state, ids, sets_, out_ = tables_at(bound), as_column(frame_ids), as_column(sets), as_column(out)
    space = np.empty(work_bytes(state, ids, sets_), np.uint8)
    damaged = read_rows(state, ids, sets_, out_, first, stop, as_column(space), as_column(zstd), by_row, None)
    return keep(space, damaged)


@entry
def flat_indices(steps: Any, streams: Any, n_steps: int, n_streams: int, bases: Any, out: Any) -> int:
    return _flat_indices(as_column(steps), as_column(streams), n_steps, n_streams, as_column(bases), as_column(out))


@entry
def pack_block(source: Any, size: int, target: Any) -> int:
    return _pack_block(as_column(source), size, as_column(target))


@entry
def split_stack(observations: Any, frames: Any) -> None:
    n_rows, stack, size = frames.shape
    unit, source, target = observations.shape[3], flat(as_column(observations)), flat(as_column(frames))
    for row in range(n_rows):
        at = row * stack * size
        split_frames(source, at, size, unit, stack, target, at)


@entry
def join_stack(frames: Any, observations: Any) -> None:
    n_rows, stack, size = frames.shape
    unit, source, target = observations.shape[3], flat(as_column(frames)), flat(as_column(observations))
    for row in range(n_rows):
        at = row * stack * size
        join_frames(source, at, size, unit, stack, target, at, False)
