"""Reading segments of whole frames, compiled. Imports numba.

These segments are packed as a whole when they are sealed, each by the method that its first byte names. Without numba,
the store unpacks segments in Python and reads them with the reference kernel of `kernels.reading`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.kernels.columns_numba import as_column, flat, int64_part, keep, part, tables_at
from sb3_extra_buffers.kernels.compiling import inner, slow_entry
from sb3_extra_buffers.kernels.intrinsics import clear_bytes, copy_bytes, stream_bytes
from sb3_extra_buffers.kernels.reading_numba import inflate_zstd, is_streaming, join_row, joined_bytes, sort_row
from sb3_extra_buffers.kernels.state import PACKED_ZSTD


@slow_entry
def read_packed(bound: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int, zstd: Any) -> int:
    """`read_frames` for a store of whole frames."""
    state, ids, sets_, out_ = tables_at(bound), as_column(frame_ids), as_column(sets), as_column(out)
    space = np.empty(_work_bytes(state, ids, sets_), np.uint8)
    damaged = _read_rows(state, ids, sets_, out_, first, stop, as_column(space), as_column(zstd))
    return keep(space, damaged)


@inner
def _work_bytes(state: Any, frame_ids: Any, sets: Any) -> int:
    n_frames = sets.shape[0] * frame_ids.shape[1]
    unpacked = state.config.per_segment * state.config.frame_bytes + 64
    return 16 * n_frames + unpacked + joined_bytes(state, frame_ids, sets)


@inner
def _read_rows(state: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int, space: Any, zstd: Any) -> Any:
    """Decode rows ``first`` to ``stop``, each segment of a row once; return -1, or a damaged segment."""
    size, per_segment = state.config.frame_bytes, state.config.per_segment
    n_frames = sets.shape[0] * frame_ids.shape[1]
    ids, targets = int64_part(space, 0, n_frames), int64_part(space, 8 * n_frames, n_frames)
    at = 16 * n_frames
    unpacked = part(space, at, per_segment * size + 64)
    at += per_segment * size + 64
    n_joined = joined_bytes(state, frame_ids, sets)
    target = part(space, at, n_joined) if n_joined else flat(out)
    streaming = n_joined == 0 and is_streaming(sets.shape[0] * sets.shape[1] * frame_ids.shape[1] * size, size, out)
    for row in range(first, stop):
        sort_row(frame_ids, sets, row, size, n_joined > 0, ids, targets)
        i = 0
        while i < n_frames and ids[i] < 0:
            clear_bytes(target, targets[i], size)
            i += 1
        while i < n_frames:
            segment = ids[i] // per_segment
            last = i + 1
            while last < n_frames and ids[last] // per_segment == segment:
                last += 1
            if not _read_segment(state, segment, ids, targets, i, last, target, streaming, unpacked, zstd):
                return segment
            i = last
        if n_joined:
            join_row(state, frame_ids, sets, row, target, out)
    return -1


@inner
def _read_segment(
    state: Any, segment: int, ids: Any, targets: Any, i: int, last: int, target: Any, streaming: bool, unpacked: Any,
    zstd: Any,
) -> bool:  # fmt: skip
    """Write the frames ``ids[i:last]`` of a segment to their targets; return False if it is damaged."""
    size, per_segment, width = state.config.frame_bytes, state.config.per_segment, state.config.length_bytes
    start = state.starts[segment]
    if start < 0:
        source, start = state.stage, -1 - start
        end = start + state.stage_ends[start // state.config.stage_bytes]
        at = start + 2 + per_segment * width
    else:
        source = state.heap
        end = start + state.lengths[segment]
        at = start + 2 + np.int64(source[start + 1]) * width
    count, flags = np.int64(source[start + 1]), source[start]
    if at > end or count > per_segment or ids[last - 1] % per_segment >= count:
        return False
    if flags == PACKED_ZSTD:
        keyframe, stride = state.keyframes[segment], state.config.keyframe_bytes
        n_dictionary = stride if keyframe >= 0 else 0
        if not inflate_zstd(
            source, at, end, unpacked, count * size, zstd, state.keyframe_rows, max(keyframe, 0) * stride, n_dictionary
        ):
            return False
        source, at, end = unpacked, 0, count * size
    elif flags != 0:
        return False
    if at + count * size > end:
        return False
    while i < last:
        frame_at = at + ids[i] % per_segment * size
        if streaming:
            stream_bytes(target, targets[i], source, frame_at, size)
        else:
            copy_bytes(target, targets[i], source, frame_at, size)
        i += 1
    return True
