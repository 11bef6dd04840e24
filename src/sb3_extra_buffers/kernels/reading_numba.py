"""Decoding segments, compiled; `kernels.reading` defines what it does."""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.delta import BLOCK
from sb3_extra_buffers.kernels.compiling import inner
from sb3_extra_buffers.kernels.delta_numba import apply
from sb3_extra_buffers.kernels.frames import get_length
from sb3_extra_buffers.kernels.intrinsics import address_of, copy_bytes, stream_bytes
from sb3_extra_buffers.kernels.lz4_block import OVERRUN, unpack_block
from sb3_extra_buffers.kernels.state import PACKED_LZ4, keyframe_bytes

# size from which on a batch is written past the caches, because they could not hold it anyway
_STREAMING_BYTES = 8 << 20


@inner
def read_rows(state: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int) -> Any:
    """Decode rows ``first`` to ``stop``, each segment of a row once; return -1, or a damaged segment."""
    size, per_segment = state.config.frame_bytes, state.config.per_segment
    n_tops = (size + BLOCK - 1) // BLOCK
    work = (
        np.zeros(n_tops * BLOCK, np.uint8),  # the frame that is being decoded
        np.empty(n_tops * (BLOCK // 8) + 8, np.int32),
        np.empty(n_tops * (BLOCK // 64) + 8, np.int32),
        np.empty((n_tops + 1) * BLOCK, np.uint8),
        np.empty(per_segment * size + OVERRUN, np.uint8),  # differences of a compressed segment
    )
    n_frames = sets.shape[0] * frame_ids.shape[1]
    ids = np.empty(n_frames, np.int64)
    targets = np.empty(n_frames, np.int64)  # offsets in out
    streaming = out.size >= _STREAMING_BYTES and size % 16 == 0 and address_of(out, 0) % 16 == 0
    for row in range(first, stop):
        _sort_row(frame_ids, sets, row, size, ids, targets)
        begin = 0
        while begin < n_frames and ids[begin] < 0:
            at = targets[begin]
            for i in range(size):
                out[at + i] = 0
            begin += 1
        while begin < n_frames:
            segment = ids[begin] // per_segment
            end = begin + 1
            while end < n_frames and ids[end] < (segment + 1) * per_segment:
                end += 1
            if not _read_segment(state, segment, ids, targets, begin, end, out, streaming, work):
                return segment
            begin = end
    return -1


@inner
def _sort_row(frame_ids: Any, sets: Any, row: int, size: int, ids: Any, targets: Any) -> None:
    """List a row's frames and their targets, ordered by id: frames of a segment come together and in order."""
    n_rows, stack = sets.shape[1], frame_ids.shape[1]
    for i in range(len(ids)):
        frame_id = np.int64(frame_ids[sets[i // stack, row], i % stack]) - 1
        j = i
        while j > 0 and ids[j - 1] > frame_id:
            ids[j] = ids[j - 1]
            targets[j] = targets[j - 1]
            j -= 1
        ids[j] = frame_id
        targets[j] = (((i // stack) * n_rows + row) * stack + i % stack) * size


@inner
def _read_segment(
    state: Any, segment: int, ids: Any, targets: Any, begin: int, end: int, out: Any, streaming: bool, work: Any
) -> bool:
    """Decode the frames ``ids[begin:end]``, all of one segment, to their targets; False if the segment is damaged."""
    config = state.config
    size, per_segment, width = config.frame_bytes, config.per_segment, config.length_bytes
    frame, words, lines, values, unpacked = work
    start = state.starts[segment]
    if start < 0:
        source, start = state.stage, -1 - start
        stop = start + state.stage_ends[start // config.stage_bytes]
        count = np.int64(source[start + 1])
        at = start + 2 + per_segment * width
    else:
        source = state.heap
        stop = start + state.lengths[segment]
        count = np.int64(source[start + 1])
        at = start + 2 + count * width
    last = ids[end - 1] - segment * per_segment
    if at > stop or last >= count:
        return False
    table, body = start + 2, source
    if source[start] == PACKED_LZ4:
        total = needed = 0
        for i in range(count):
            total += get_length(source, table + i * width, width)
            if i <= last:
                needed = total
        if total > per_segment * size or not unpack_block(source, at, stop, unpacked, total, needed):
            return False
        body, at, stop = unpacked, 0, needed
    elif source[start] != 0:
        return False
    keyframe = state.keyframes[segment]
    if keyframe >= 0:
        copy_bytes(frame, 0, state.keyframe_rows, keyframe * keyframe_bytes(size), size)
    else:
        for i in range(size):
            frame[i] = 0
    position = 0
    for i in range(begin, end):
        while position <= ids[i] - segment * per_segment:
            length = get_length(source, table + position * width, width)
            if length > size or at + length > stop:
                return False
            if length == size:
                copy_bytes(frame, 0, body, at, size)
            elif length > 0 and not apply(body, at, at + length, frame, size, words, lines, values):
                return False
            at += length
            position += 1
        if streaming:
            stream_bytes(out, targets[i], frame, 0, size)
        else:
            copy_bytes(out, targets[i], frame, 0, size)
    return True
