"""Decoding segments, compiled; `kernels.reading` defines what it does."""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.delta import BLOCK
from sb3_extra_buffers.kernels import (
    frames,
    lz4_block,
    writing_numba,  # noqa: F401  # compiles the functions of `frames`
)
from sb3_extra_buffers.kernels import state as tables
from sb3_extra_buffers.kernels.columns_numba import int64_part, part
from sb3_extra_buffers.kernels.compiling import compiled, inner
from sb3_extra_buffers.kernels.delta_numba import apply
from sb3_extra_buffers.kernels.intrinsics import address_of, clear_bytes, copy_bytes, stream_bytes
from sb3_extra_buffers.kernels.lz4_block import OVERRUN
from sb3_extra_buffers.kernels.state import PACKED_LZ4, PACKED_ZSTD

keyframe_bytes, get_length = compiled(tables.keyframe_bytes), compiled(frames.get_length)
unpack_block = compiled(lz4_block.unpack_block)

# size from which on a batch is written past the caches, because they could not hold it anyway
_STREAMING_BYTES = 8 << 20


@inner
def _block_bytes(size: int) -> int:
    """A row's length, padded so that every position that a difference can encode is inside."""
    return (size + BLOCK - 1) // BLOCK * BLOCK


@inner
def work_bytes(state: Any, frame_ids: Any, sets: Any) -> int:
    """Bytes of work space that `read_rows` needs."""
    block, n_frames = _block_bytes(state.config.frame_bytes), sets.shape[0] * frame_ids.shape[1]
    return (
        2 * block + BLOCK + block // 2 + block // 16 + 64 + 16 * n_frames
        + state.config.per_segment * state.config.frame_bytes + OVERRUN
    )  # fmt: skip


@inner
def read_rows(state: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int, space: Any) -> Any:
    """Decode rows ``first`` to ``stop``, each segment of a row once; return -1, or a damaged segment.

    One function for the whole loop: a helper that takes the state would cost reads 3 to 5 %.
    """
    size, per_segment, width = state.config.frame_bytes, state.config.per_segment, state.config.length_bytes
    n_frames = sets.shape[0] * frame_ids.shape[1]
    block = _block_bytes(size)
    at = 0
    frame = part(space, at, block)  # the frame that is being decoded
    at += block
    values = part(space, at, block + BLOCK)
    at += block + BLOCK
    words = part(space, at, block // 2 + 32)  # int32
    at += block // 2 + 32
    lines = part(space, at, block // 16 + 32)  # int32
    at += block // 16 + 32
    ids = int64_part(space, at, n_frames)
    at += 8 * n_frames
    targets = int64_part(space, at, n_frames)  # offsets in out
    at += 8 * n_frames
    unpacked = part(space, at, per_segment * size + OVERRUN)  # differences of a compressed segment
    n_bytes = sets.shape[0] * sets.shape[1] * frame_ids.shape[1] * size
    streaming = n_bytes >= _STREAMING_BYTES and size % 16 == 0 and address_of(out, 0) % 16 == 0
    for row in range(first, stop):
        _sort_row(frame_ids, sets, row, size, ids, targets)
        i = 0
        while i < n_frames and ids[i] < 0:
            at = targets[i]
            clear_bytes(out, at, size)
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
                end = _unpack(source, start + 2, at, end, count, ids[last] % per_segment, width, unpacked)
                body, at = unpacked, 0
            if source[start] > PACKED_LZ4 or source[start] == PACKED_ZSTD or end < 0:
                return segment
            keyframe = state.keyframes[segment]
            if keyframe >= 0:
                copy_bytes(frame, 0, state.keyframe_rows, keyframe * keyframe_bytes(size), size)
            else:
                clear_bytes(frame, 0, size)
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
def _unpack(source: Any, table: int, at: int, end: int, count: Any, last: int, width: int, unpacked: Any) -> int:
    """Decompress the frames of a segment up to frame ``last``; return their total length, -1 if it is damaged."""
    total = needed = 0
    for i in range(count):
        total += get_length(source, table + i * width, width)
        if i <= last:
            needed = total
    if total + OVERRUN > len(unpacked) or not unpack_block(source, at, end, unpacked, total, needed):
        return -1
    return needed
