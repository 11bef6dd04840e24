"""Decoding segments, compiled; `kernels.reading` defines what it does."""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.delta import BLOCK
from sb3_extra_buffers.kernels.compiling import inlined, inner
from sb3_extra_buffers.kernels.delta_numba import apply
from sb3_extra_buffers.kernels.frames import get_length
from sb3_extra_buffers.kernels.intrinsics import address_of, copy_bytes, stream_bytes
from sb3_extra_buffers.kernels.lz4_block import OVERRUN, unpack_block
from sb3_extra_buffers.kernels.state import PACKED_LZ4, PACKED_ZSTD, keyframe_bytes

# size from which on a batch is written past the caches, because they could not hold it anyway
_STREAMING_BYTES = 8 << 20


@inner
def read_rows(state: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int) -> Any:
    """Decode rows ``first`` to ``stop``, each segment of a row once; return -1, or a damaged segment.

    One function for the whole loop: a helper that takes the state would cost reads 3 to 5 %.
    """
    size, per_segment, width = state.config.frame_bytes, state.config.per_segment, state.config.length_bytes
    n_tops = (size + BLOCK - 1) // BLOCK
    frame = np.zeros(n_tops * BLOCK, np.uint8)  # the frame that is being decoded
    values = np.empty((n_tops + 1) * BLOCK, np.uint8)
    words = np.empty(n_tops * (BLOCK // 8) + 8, np.int32)
    lines = np.empty(n_tops * (BLOCK // 64) + 8, np.int32)
    unpacked = np.empty(0, np.uint8)  # differences of a compressed segment, allocated for the first one
    n_frames = sets.shape[0] * frame_ids.shape[1]
    ids = np.empty(n_frames, np.int64)
    targets = np.empty(n_frames, np.int64)  # offsets in out
    streaming = out.size >= _STREAMING_BYTES and size % 16 == 0 and address_of(out, 0) % 16 == 0
    for row in range(first, stop):
        _sort_row(frame_ids, sets, row, size, ids, targets)
        i = 0
        while i < n_frames and ids[i] < 0:
            at = targets[i]
            for byte in range(size):
                out[at + byte] = 0
            i += 1
        while i < n_frames:
            segment = ids[i] // per_segment
            start = state.starts[segment]
            if start < 0:
                source, start = state.stage, -1 - start
                end = start + state.stage_ends[start // state.config.stage_bytes]
                at = start + 2 + per_segment * width
            else:
                source = state.heap
                end = start + state.lengths[segment]
                at = start + 2 + np.int64(source[start + 1]) * width
            count = np.int64(source[start + 1])
            if at > end:
                return segment
            body = source
            if source[start] == PACKED_LZ4:
                last = i
                while last + 1 < n_frames and ids[last + 1] // per_segment == segment:
                    last += 1
                if unpacked.size == 0:
                    unpacked = np.empty(per_segment * size + OVERRUN, np.uint8)
                end = _unpack(source, start + 2, at, end, count, ids[last] % per_segment, width, unpacked)
                body, at = unpacked, 0
            if source[start] > PACKED_LZ4 or source[start] == PACKED_ZSTD or end < 0:
                return segment
            keyframe = state.keyframes[segment]
            if keyframe >= 0:
                copy_bytes(frame, 0, state.keyframe_rows, keyframe * keyframe_bytes(size), size)
            else:
                for byte in range(size):
                    frame[byte] = 0
            position = 0
            while i < n_frames and ids[i] // per_segment == segment:
                wanted = ids[i] % per_segment
                if wanted >= count:
                    return segment
                while position <= wanted:
                    length = get_length(source, start + 2 + position * width, width)
                    if length > size or at + length > end:
                        return segment
                    if length == size:
                        copy_bytes(frame, 0, body, at, size)
                    elif length > 0 and not apply(body, at, at + length, frame, size, words, lines, values):
                        return segment
                    at += length
                    position += 1
                if streaming:
                    stream_bytes(out, targets[i], frame, 0, size)
                else:
                    copy_bytes(out, targets[i], frame, 0, size)
                i += 1
    return -1


@inlined
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
def _unpack(source: Any, table: int, at: int, end: int, count: Any, last: int, width: int, unpacked: Any) -> int:
    """Decompress the frames of a segment up to frame ``last``; return their total length, -1 if it is damaged."""
    total = needed = 0
    for i in range(count):
        total += get_length(source, table + i * width, width)
        if i <= last:
            needed = total
    if total + OVERRUN > unpacked.size or not unpack_block(source, at, end, unpacked, total, needed):
        return -1
    return needed
