"""Reference kernels for packets of segments: copying them, checking them and letting observations refer to them."""

from __future__ import annotations

import sys
from typing import Any

from sb3_extra_buffers.kernels.dispatch import compiled_kernels
from sb3_extra_buffers.kernels.frames import get_length, set_row
from sb3_extra_buffers.kernels.lz4_block import copy_run
from sb3_extra_buffers.kernels.state import (
    PACKED_CAMERA,
    PACKED_LZ4,
    PACKED_ZSTD,
    ZERO,
    Bytes,
    FrameState,
    Ints,
    Ints32,
)

#: What `check_segments` returns, from 1 on.
PROBLEMS = (
    "a segment is too short for its frames",
    "a segment has unknown flags",
    "a segment has no frames, or too many",
    "a segment refers to a keyframe that does not exist",
    "an encoded frame takes more bytes than a raw one",
    "the frames of a segment are not as long as the segment",
    "an observation refers to a frame that does not exist",
)
(_SHORT, _FLAGS, _COUNT, _KEYFRAME, _LENGTH, _TOTAL, _ID) = range(1, 8)


def transfer_kernels(compiled: bool) -> Any:
    """Return the module with the kernels below, compiled or as they are."""
    return compiled_kernels("transfer") if compiled else sys.modules[__name__]


def measure_segments(
    state: FrameState,
    segments: Ints,
    needed: Ints,  # [segment]: frames that are needed, from the first one on
    lengths: Ints32,  # [segment]: set to the bytes that these take
) -> int:
    """Find out how long segments are up to the last frame that is needed; return the total.

    Those that are compressed as a whole are needed as a whole: ``needed`` is then set to their number of frames.
    """
    width = state.config.length_bytes
    total = 0
    for i in range(len(segments)):
        source, start, _, end = find_segment(state, segments[i])
        flags = source[start]
        if flags != 0 and flags != PACKED_CAMERA:
            needed[i] = source[start + 1]
            length = end - start
        else:
            length = 2 + needed[i] * width
            for position in range(needed[i]):
                length += get_length(source, start + 2 + position * width, width)
        lengths[i] = length
        total += length
    return total


def copy_segments(
    state: FrameState,
    segments: Ints,
    needed: Ints,  # as `measure_segments` has left it
    lengths: Ints32,
    out: Bytes,
) -> None:
    """Copy segments up to the last frame that is needed to ``out``, one after the other, in the form of sealed ones."""
    to = 0
    for i in range(len(segments)):
        source, start, body, _ = find_segment(state, segments[i])
        header = 2 + needed[i] * state.config.length_bytes
        copy_run(out, to, source, start, header)
        out[to + 1] = needed[i]
        copy_run(out, to + header, source, body, lengths[i] - header)
        to += lengths[i]


def find_segment(state: FrameState, segment: int) -> tuple[Bytes, int, int, int]:
    """Return the memory that holds a segment, and where it, its frames and its end are in there."""
    config = state.config
    start = state.starts[segment]
    if start < 0:
        source, start = state.stage, -1 - start
        end = start + state.stage_ends[start // config.stage_bytes]
        return source, start, start + 2 + config.per_segment * config.length_bytes, end
    source = state.heap
    body = start + 2 + int(source[start + 1]) * config.length_bytes
    return source, start, body, start + state.lengths[segment]


def copy_payloads(state: FrameState, segments: Ints, out: Bytes) -> None:
    """Copy whole payloads to ``out``, one after the other."""
    to = 0
    for i in range(len(segments)):
        length = state.lengths[segments[i]]
        copy_run(out, to, state.heap, state.starts[segments[i]], length)
        to += length


def check_segments(state: FrameState, frame_ids: Ints32, n_keyframes: int) -> int:
    """Check the headers of all segments in the heap, and what ``frame_ids`` refer to; set ``state.counts``.

    Return 0, or 1 more than the position of a problem in `PROBLEMS`. ``starts`` and ``lengths`` are valid.
    """
    config = state.config
    n_segments = len(state.lengths)
    for segment in range(n_segments):
        start, length = state.starts[segment], int(state.lengths[segment])
        if length < 2:
            return _SHORT
        flags, count = state.heap[start], int(state.heap[start + 1])
        if flags != 0 and flags != PACKED_LZ4 and flags != PACKED_ZSTD and flags != PACKED_CAMERA:
            return _FLAGS
        if count < 1 or count > config.per_segment:
            return _COUNT
        total = 2 + count * config.length_bytes
        if total > length:
            return _SHORT
        if state.keyframes[segment] >= n_keyframes:
            return _KEYFRAME
        for position in range(count):
            frame = get_length(state.heap, start + 2 + position * config.length_bytes, config.length_bytes)
            if frame > config.frame_bytes:
                return _LENGTH
            total += frame
        if total != length and flags != PACKED_LZ4 and flags != PACKED_ZSTD:
            return _TOTAL
        state.counts[segment] = count
    for row in range(frame_ids.shape[0]):
        for j in range(frame_ids.shape[1]):
            frame_id = int(frame_ids[row, j]) - 1
            if frame_id < -1 or frame_id >= n_segments * config.per_segment:
                return _ID
            if frame_id >= 0 and frame_id % config.per_segment >= state.counts[frame_id // config.per_segment]:
                return _ID
    return 0


def refer_rows(
    state: FrameState,
    frame_ids: Ints32,  # [obs_index, stack]
    indices: Ints,  # [row]: obs_index
    local_ids: Ints32,  # [row, stack]: 1 + position + per_segment * index in ``segments``, or 0
    segments: Ints32,
    per_segment: int,
    ids: Ints,  # [stack]: work space
) -> None:
    """Let observations consist of frames of ``segments``; log what they consisted of, as a write does."""
    for row in range(len(indices)):
        for j in range(local_ids.shape[1]):
            local = int(local_ids[row, j]) - 1
            if local < 0:
                ids[j] = ZERO
            else:
                ids[j] = segments[local // per_segment] * state.config.per_segment + local % per_segment
        set_row(state, frame_ids, indices[row], ids, True)
