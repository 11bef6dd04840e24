"""Reading segments of whole frames, compiled. Imports numba.

Such a segment is packed as a whole when it is sealed; its first byte names the packing. Without numba, the store
unpacks segments in Python and reads them with the reference kernel of `kernels.reading`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.kernels import (
    camera,
    camera_numba,  # noqa: F401  # compiles the functions of `camera`
    lz4_block,
)
from sb3_extra_buffers.kernels.columns_numba import as_column, flat, int64_part, keep, part, tables_at
from sb3_extra_buffers.kernels.compiling import compiled, entry, inner, slow_entry
from sb3_extra_buffers.kernels.intrinsics import address_of, clear_bytes
from sb3_extra_buffers.kernels.lz4_block import OVERRUN
from sb3_extra_buffers.kernels.reading_numba import (
    batch_bytes,
    inflate_zstd,
    is_streaming,
    join_row,
    joined_bytes,
    list_row,
    prefetch_segments,
    put_frame,
    rows_ahead,
    unpack_block,
)
from sb3_extra_buffers.kernels.state import PACKED_CAMERA, PACKED_LZ4, PACKED_ZSTD

unpack_camera, camera_work_bytes = compiled(camera.unpack_camera), compiled(camera.camera_work_bytes)
_count_sequences = compiled(lz4_block.count_sequences)


@entry
def count_sequences(heap: Any, starts: Any, stops: Any) -> int:
    """The sequences of all LZ4 blocks from ``starts`` to ``stops``."""
    count = 0
    for i in range(len(starts)):
        count += _count_sequences(as_column(heap), starts[i], stops[i])
    return count


@slow_entry
def read_packed(bound: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int, zstd: Any, by_row: bool) -> int:
    """`read_frames` for a store of whole frames."""
    state, ids, sets_, out_ = tables_at(bound), as_column(frame_ids), as_column(sets), as_column(out)
    space = np.empty(packed_work_bytes(state, ids, sets_), np.uint8)
    damaged = read_packed_rows(state, ids, sets_, out_, first, stop, as_column(space), as_column(zstd), by_row, None)
    return keep(space, damaged)


@inner
def packed_work_bytes(state: Any, frame_ids: Any, sets: Any) -> int:
    n_frames = sets.shape[0] * frame_ids.shape[1]
    unpacked = state.config.per_segment * state.config.frame_bytes + OVERRUN
    return (
        24 * n_frames
        + 8 * sets.shape[0]
        + 64
        + max(unpacked, _camera_bytes(state))
        + joined_bytes(state, frame_ids, sets)
    )


@inner
def _camera_bytes(state: Any) -> int:
    return camera_work_bytes(state.config.frame_bytes, state.geometry) if len(state.geometry) else 0


@inner
def read_packed_rows(
    state: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int, space: Any, zstd: Any, by_row: bool,
    expansion: Any,
) -> Any:  # fmt: skip
    """Decode rows ``first`` to ``stop``, each segment of a row once; return -1, or a damaged segment.

    ``expansion`` is as for `read_rows`.
    """
    size, per_segment = state.config.frame_bytes, state.config.per_segment
    n_frames = sets.shape[0] * frame_ids.shape[1]
    ids, targets = int64_part(space, 0, n_frames), int64_part(space, 8 * n_frames, n_frames)
    positions = int64_part(space, 16 * n_frames, n_frames)
    at = 24 * n_frames
    joined = int64_part(space, at, sets.shape[0])  # where the frames of each observation are in target
    at += 8 * sets.shape[0]
    at += -address_of(space, at) % 64
    work_bytes = max(per_segment * size + OVERRUN, _camera_bytes(state))
    work = part(space, at, work_bytes)
    at += work_bytes
    n_joined = joined_bytes(state, frame_ids, sets)
    target = part(space, at, n_joined) if n_joined else flat(out)
    streaming = n_joined == 0 and is_streaming(batch_bytes(state, frame_ids, sets, expansion), size, out)
    ahead = rows_ahead(n_frames)
    for row in range(first, stop):
        if (row - first) % ahead == 0:
            prefetch_segments(state, frame_ids, sets, row, min(row + ahead, stop))
        n_frames = list_row(frame_ids, sets, row, size, n_joined > 0, by_row, ids, targets, joined)
        i = 0
        if ids[0] < 0:
            clear_bytes(work, 0, size)
        while i < n_frames and ids[i] < 0:
            put_frame(target, targets[i], work, 0, size, streaming, n_joined > 0, expansion)
            i += 1
        while i < n_frames:
            segment = ids[i] // per_segment
            last = i + 1
            while last < n_frames and ids[last] // per_segment == segment:
                last += 1
            for k in range(i, last):
                positions[k] = ids[k] - segment * per_segment
            chosen, to = int64_part(positions, 8 * i, last - i), int64_part(targets, 8 * i, last - i)
            if not _read_segment(state, segment, chosen, to, target, streaming, n_joined > 0, work, zstd, expansion):
                return segment
            i = last
        if n_joined:
            join_row(state, frame_ids, sets, row, by_row, joined, target, out, expansion)
    return -1


@inner
def _read_segment(
    state: Any, segment: int, positions: Any, targets: Any, target: Any, streaming: bool, is_work: bool, work: Any,
    zstd: Any, expansion: Any,
) -> bool:  # fmt: skip
    """Write the frames at ``positions`` of a segment, in ascending order, to ``targets``; False if it is damaged."""
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
    if at > end or count > per_segment or positions[len(positions) - 1] >= count:
        return False
    if flags == PACKED_CAMERA and len(state.geometry):
        return _read_camera(
            state, source, at, end, start + 2, count, positions, targets, target, streaming, is_work, work, expansion
        )
    if flags == PACKED_ZSTD:
        keyframe, stride = state.keyframes[segment], state.config.keyframe_bytes
        n_dictionary = stride if keyframe >= 0 else 0
        if not inflate_zstd(
            source, at, end, work, count * size, zstd, state.keyframe_rows, max(keyframe, 0) * stride, n_dictionary
        ):
            return False
        source, at, end = work, 0, count * size
    elif flags == PACKED_LZ4:
        needed = (positions[len(positions) - 1] + 1) * size
        if not unpack_block(source, at, end, work, count * size, needed):
            return False
        source, at, end = work, 0, count * size
    elif flags != 0:
        return False
    if at + count * size > end:
        return False
    for i in range(len(positions)):
        put_frame(target, targets[i], source, at + positions[i] * size, size, streaming, is_work, expansion)
    return True


@inner
def _read_camera(
    state: Any, source: Any, at: int, end: int, table_at: int, count: int, positions: Any, targets: Any, target: Any,
    streaming: bool, is_work: bool, work: Any, expansion: Any,
) -> bool:  # fmt: skip
    """`_read_segment` for a segment of coded frames."""
    size, width, n_wanted = state.config.frame_bytes, state.config.length_bytes, len(positions)
    if expansion is None:
        return unpack_camera(
            source, at, end, table_at, width, count, positions, targets, n_wanted, target, state.geometry, work,
            streaming,
        )  # fmt: skip
    if not unpack_camera(
        source, at, end, table_at, width, count, positions, expansion.offsets, n_wanted, expansion.indices,
        state.geometry, work, False,
    ):  # fmt: skip
        return False
    for i in range(n_wanted):
        put_frame(target, targets[i], expansion.indices, expansion.offsets[i], size, streaming, is_work, expansion)
    return True
