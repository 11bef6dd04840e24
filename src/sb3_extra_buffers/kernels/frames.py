"""Reference kernels of the frame store: what each kernel does, in plain Python and NumPy.

numba compiles the bookkeeping below as it stands and replaces only the few functions at the end of this file that
touch every byte of a frame (`kernels.frames_numba`). Without numba, this file runs as it is.

A segment is ``flags, count`` (a byte each), then ``count`` lengths of ``length_bytes`` each, then the differences, one
after the other. The first difference refers to the segment's keyframe (to zeros where it has none), each other one to
the frame before it. In an open segment the table of lengths has its full size, ``per_segment``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.delta import encode_delta
from sb3_extra_buffers.kernels.lz4_block import copy_run, pack_block
from sb3_extra_buffers.kernels.policy import PAYING_TENTHS, needs_keyframe, should_search, should_switch
from sb3_extra_buffers.kernels.reading import read_frames
from sb3_extra_buffers.kernels.state import (
    COMMITTED,
    N_FREED,
    N_NEW,
    N_SEALED,
    N_UNDO,
    N_UNUSED,
    NONE,
    PACKED_LZ4,
    ZERO,
    Bytes,
    FrameState,
    Ints,
    Ints32,
)

__all__ = [
    "bind_state",
    "flat_indices",
    "join_stack",
    "pack_block",
    "read_frames",
    "release_rows",
    "split_stack",
    "write_frames",
    "write_step",
]


def bind_state(state: FrameState, known: dict[str, Any]) -> FrameState:
    """Convert ``state`` to what the kernels take; the reference kernels take it as it is."""
    return state


# ---- writing ----


def write_step(
    state: FrameState,
    frame_ids: Ints32,  # [obs_index, stack]
    frames: Bytes,  # [stream, stack, byte]
    next_frames: Bytes,  # [stream, stack, byte]
    index: int,
    next_index: int,
    first: int,
) -> int:
    """Call `write_frames` for two batches that hold one row per stream: at ``index`` on, then at ``next_index`` on.

    Rows of both batches count on: returns the row where capacity ran out, or the number of rows of both.
    """
    n_rows: int = frames.shape[0]
    streams = np.arange(n_rows)
    if first < n_rows:
        first = write_frames(state, frame_ids, frames, streams, streams + index, first, True)
        if first < n_rows:
            return first
    return n_rows + write_frames(state, frame_ids, next_frames, streams, streams + next_index, first - n_rows, True)


def write_frames(
    state: FrameState,
    frame_ids: Ints32,  # [obs_index, stack]: frame ids + 1, so that untouched memory means ZERO
    frames: Bytes,  # [row, stack, byte]
    streams: Ints,  # [row]
    indices: Ints,  # [row]: obs_index
    first: int,
    logged: bool,
) -> int:
    """Store ``frames[first:]``; return the row where capacity ran out, or the number of rows.

    A frame that equals one of its stream's recent frames, byte for byte, is shared. Any other gets a new id. A store
    with ``config.delta`` encodes it into the stream's open segment; other stores list it in ``state.new_frames``.
    Capacity runs out when no segment is unused or the caller must seal one (`seal_segment`). The caller then makes
    space and calls again with the row returned.

    With ``logged``, replaced entries of ``frame_ids`` go to ``state.undo_ids`` and their frames stay referenced until
    the next logged write, so that the caller can restore them.
    """
    if logged and state.counters[COMMITTED]:
        release_rows(state)
    n_rows: int = frames.shape[0]
    ids = np.empty(frames.shape[1], np.int64)
    positions = np.empty(frames.shape[1], np.int64)
    for row in range(first, n_rows):
        if not write_row(state, frame_ids, frames, row, streams[row], indices[row], logged, ids, positions):
            return row
    return n_rows


def write_row(
    state: FrameState, frame_ids: Ints32, frames: Bytes, row: int, stream: int, index: int, logged: bool,
    ids: Ints,  # [stack]: work space
    positions: Ints,  # [stack]: work space; where each frame is in the stream's ring of recent frames
) -> bool:  # fmt: skip
    """Store a row of ``frames`` as observation ``index``; return False where capacity ran out."""
    stack = frames.shape[1]
    shift = 0
    for j in range(stack):
        position, shift = find_frame(state, frames, row, j, stream, shift)
        if position == NONE:
            position = add_frame(state, frames, row, j, stream)
            if position == NONE:
                return False
        positions[j] = position
        # now, because a later frame of this row may take over the position
        ids[j] = ZERO if position == ZERO else state.recent_ids[stream, position]
    set_row(state, frame_ids, index, ids, logged)
    for j in range(stack):
        state.last_stack[stream, j] = positions[j]
    return True


def find_frame(state: FrameState, frames: Bytes, row: int, j: int, stream: int, shift: int) -> tuple[int, int]:
    """Find a frame among its stream's recent ones; return its position there, ZERO or NONE, and the new ``shift``.

    ``shift`` is how far the stack has moved since the stream's last observation, as its earlier frames suggest: 0
    (obs after next_obs) or 1 (next_obs after obs).
    """
    stack = frames.shape[1]
    for attempt in range(2):
        k = j + ((shift + attempt) & 1)
        if k < stack:
            position = state.last_stack[stream, k]
            if is_frame(state, frames, row, j, stream, position):
                return position, k - j
    if is_zero(frames, row, j):
        return ZERO, shift
    # the last frame of a stack that moved on is almost always new: skip the search
    if shift == 0 or j + 1 < stack:
        for position in range(state.recent_ids.shape[1]):
            if is_frame(state, frames, row, j, stream, position):
                return position, shift
    return NONE, shift


def is_frame(state: FrameState, frames: Bytes, row: int, j: int, stream: int, position: int) -> bool:
    """Whether a frame equals the stream's recent one at ``position``, or is zero where that is ZERO."""
    if position == ZERO:
        return is_zero(frames, row, j)
    if position < 0 or state.recent_ids[stream, position] < 0:
        return False
    return is_same(frames, row, j, state.recent, stream, position)


def add_frame(state: FrameState, frames: Bytes, row: int, j: int, stream: int) -> int:
    """Store a new frame; return its position among the recent ones, or NONE where capacity ran out."""
    segment = open_segment(state, stream)
    if segment < 0:
        return NONE
    n_recent = state.recent_ids.shape[1]
    position: int = state.recent_next[stream]
    index = state.counts[segment]  # in the segment
    frame_id = segment * state.config.per_segment + index
    state.recent_next[stream] = (position + 1) % n_recent
    state.recent_ids[stream, position] = NONE  # an id must never be paired with the bytes of another frame
    put_frame(state.recent, stream, position, frames, row, j)
    state.recent_ids[stream, position] = frame_id
    state.refs[frame_id] = 0
    if state.config.delta:
        stage_frame(state, stream, position, (position - 1) % n_recent, index)
    else:
        n_new = state.counters[N_NEW]
        state.new_frames[n_new] = row * frames.shape[1] + j
        state.new_ids[n_new] = frame_id
        state.counters[N_NEW] = n_new + 1
    state.counts[segment] = index + 1
    return position


def open_segment(state: FrameState, stream: int) -> int:
    """Return the segment that takes the stream's next frame, or NONE where capacity ran out."""
    config = state.config
    segment: int = state.open_segments[stream]
    if segment >= 0:
        if not is_full(state, stream):
            return segment
        if not seal_segment(state, stream):
            return NONE
    if state.counters[N_UNUSED] == 0:
        return NONE
    state.counters[N_UNUSED] -= 1
    segment = state.unused[state.counters[N_UNUSED]]
    state.counts[segment] = 0
    state.live[segment] = 0
    state.keyframes[segment] = NONE
    state.lengths[segment] = 0
    if config.delta:
        state.open_segments[stream] = segment
        state.chain_bytes[stream] = 0
        state.starts[segment] = -1 - stream * config.stage_bytes
        state.stage_ends[stream] = 2 + config.per_segment * config.length_bytes
    return segment


def is_full(state: FrameState, stream: int) -> bool:
    """Whether the open segment of ``stream`` takes no more frames."""
    count = state.counts[state.open_segments[stream]]
    return bool(count >= state.config.per_segment or state.chain_bytes[stream] > state.config.max_chain_bytes)


def stage_frame(state: FrameState, stream: int, position: int, previous: int, index: int) -> None:
    """Encode a recent frame as number ``index`` of the stream's open segment, against the one at ``previous``."""
    size = state.config.frame_bytes
    begin = stream * state.config.stage_bytes
    end = begin + state.stage_ends[stream]
    if state.config.whole:
        put_whole(state.stage, end, state.recent, stream, position, size)
        length = size
    elif index == 0:
        length = encode_first(state, stream, position, end)
    else:
        reference_at = (stream * state.recent.shape[1] + previous) * state.recent.shape[2]
        length = encode_frame(
            state.stage, end, state.recent, stream, position, state.recent, reference_at, size, state.scratch
        )
    set_length(state.stage, begin + 2 + index * state.config.length_bytes, length, state.config.length_bytes)
    state.stage_ends[stream] += length
    if length < size:  # a whole frame is copied, which costs a reader next to nothing
        state.chain_bytes[stream] += length
    state.stage[begin] = 0
    state.stage[begin + 1] = index + 1


def encode_first(state: FrameState, stream: int, position: int, end: int) -> int:
    """Encode a segment's first frame at ``stage[end:]`` against the best keyframe; return its length.

    A frame that `needs_keyframe` is stored whole and becomes a keyframe when its segment is sealed.
    """
    size = state.config.frame_bytes
    cost = state.keyframe_cost
    keyframe = state.stream_keyframes[stream]
    length = size
    if keyframe >= 0:
        length = encode_against(state, stream, position, keyframe, end)
    if keyframe < 0 or should_search(length, cost[stream, 0]):
        best = length
        for i in range(len(state.pool)):
            other = state.pool[i]
            if other >= 0 and other != keyframe:
                length = encode_against(state, stream, position, other, end)
                if should_switch(length, best):
                    best = length
                    state.stream_keyframes[stream] = other
                    cost[stream, 0] = length
                    cost[stream, 1] = 0
        keyframe = state.stream_keyframes[stream]
        if keyframe >= 0:
            length = encode_against(state, stream, position, keyframe, end)
    cost[stream, 0] = min(cost[stream, 0], length)
    cost[stream, 1] += length - cost[stream, 0]
    if keyframe < 0 or needs_keyframe(length, cost[stream, 1], size):
        put_whole(state.stage, end, state.recent, stream, position, size)
        return size
    state.keyframes[state.open_segments[stream]] = keyframe
    state.keyframe_refs[keyframe] += 1
    return length


def encode_against(state: FrameState, stream: int, position: int, keyframe: int, end: int) -> int:
    """Encode a recent frame at ``stage[end:]`` as its difference to a keyframe; return the length."""
    size = state.config.frame_bytes
    reference_at = keyframe * state.config.keyframe_bytes
    return encode_frame(
        state.stage, end, state.recent, stream, position, state.keyframe_rows, reference_at, size, state.scratch
    )


def set_row(state: FrameState, frame_ids: Ints32, index: int, ids: Ints, logged: bool) -> None:
    """Let observation ``index`` consist of the frames ``ids``, and log what it consisted of."""
    for j in range(len(ids)):
        frame_id = ids[j]
        if frame_id >= 0:
            if state.refs[frame_id] == 0:
                state.live[frame_id // state.config.per_segment] += 1
            state.refs[frame_id] += 1
    if logged:
        n_undo = state.counters[N_UNDO]
        state.undo_indices[n_undo] = index
        for j in range(len(ids)):
            state.undo_ids[n_undo, j] = frame_ids[index, j]
        # from here on an interrupted write restores this row
        state.counters[N_UNDO] = n_undo + 1
    for j in range(len(ids)):
        frame_ids[index, j] = ids[j] + 1


def release_rows(state: FrameState) -> None:
    """Drop the references of the rows that the last write replaced; list segments without references in ``freed``."""
    for row in range(state.counters[N_UNDO]):
        for j in range(state.undo_ids.shape[1]):
            frame_id = state.undo_ids[row, j] - 1
            if frame_id < 0:
                continue
            state.refs[frame_id] -= 1
            if state.refs[frame_id] == 0:
                segment = frame_id // state.config.per_segment
                state.live[segment] -= 1
                if state.live[segment] == 0:
                    state.freed[state.counters[N_FREED]] = segment
                    state.counters[N_FREED] += 1
    state.counters[N_UNDO] = 0
    state.counters[COMMITTED] = 0


def seal_segment(state: FrameState, stream: int) -> bool:
    """Move the open segment of ``stream`` to the gap in the heap, compressed where that pays.

    Return False where the caller has to do it: the store compresses by other means, the segment may not fit, or its
    first frame is whole and becomes a keyframe.
    """
    config = state.config
    segment = state.open_segments[stream]
    count = int(state.counts[segment])
    begin = stream * config.stage_bytes
    body = begin + 2 + config.per_segment * config.length_bytes
    header_bytes = 2 + count * config.length_bytes
    length = begin + state.stage_ends[stream] - body
    start = state.gap[0]
    n_sealed = state.counters[N_SEALED]
    if config.compress_above < 0 or start + header_bytes + length > state.gap[1] or n_sealed == len(state.sealed):
        return False
    if not config.whole and get_length(state.stage, begin + 2, config.length_bytes) == config.frame_bytes:
        return False
    copy_run(state.heap, start, state.stage, begin, header_bytes)
    packed = 0
    if length > config.compress_above * count:
        target = start + header_bytes
        limit = length * PAYING_TENTHS // 10
        packed = pack_block(part(state.stage, body, length), length, part(state.heap, target, limit))
    if packed:
        state.heap[start] = PACKED_LZ4
        length = packed
    else:
        copy_run(state.heap, start + header_bytes, state.stage, body, length)
    state.starts[segment] = start
    state.lengths[segment] = header_bytes + length
    state.gap[0] = start + header_bytes + length
    state.sealed[n_sealed] = segment
    state.counters[N_SEALED] = n_sealed + 1
    state.open_segments[stream] = NONE
    return True


def set_length(stage: Bytes, at: int, length: int, length_bytes: int) -> None:
    """Write a frame's length to a segment's header, little-endian."""
    stage[at] = length & 255
    stage[at + 1] = length >> 8 & 255
    if length_bytes == 4:
        stage[at + 2] = length >> 16 & 255
        stage[at + 3] = length >> 24


def get_length(source: Bytes, at: int, length_bytes: int) -> int:
    """Read what `set_length` wrote."""
    length = int(source[at]) | int(source[at + 1]) << 8
    if length_bytes == 4:
        length |= int(source[at + 2]) << 16 | int(source[at + 3]) << 24
    return length


# ---- indexing ----


def flat_indices(
    steps: Ints,  # [row]
    streams: Ints,  # [row]
    n_steps: int,
    n_streams: int,
    bases: Ints,  # [view]: obs_index at which each view begins
    out: Ints,  # [view, row]
) -> int:
    """Set ``out`` to the obs_index of each ``(step, stream)`` in each view; return the first bad row, or -1.

    Negative steps and streams count from the end.
    """
    for row in range(len(steps)):
        step, stream = steps[row], streams[row]
        if step < -n_steps or step >= n_steps or stream < -n_streams or stream >= n_streams:
            return row
        index = (step % n_steps) * n_streams + stream % n_streams
        for view in range(len(bases)):
            out[view, row] = bases[view] + index
    return -1


# ---- functions that touch every byte; `frames_numba` replaces these ----


def part(column: Bytes, start: int, count: int) -> Bytes:
    return column[start : start + count]


def is_same(frames: Bytes, row: int, j: int, recent: Bytes, stream: int, position: int) -> bool:
    # two copies and a memcmp: half the time of np.array_equal on a frame
    same: bool = frames[row, j].tobytes() == recent[stream, position, : frames.shape[2]].tobytes()
    return same


def is_zero(frames: Bytes, row: int, j: int) -> bool:
    # the first bytes of most frames show that they are not zero
    return not frames[row, j, :64].any() and not frames[row, j].any()


def put_frame(recent: Bytes, stream: int, position: int, frames: Bytes, row: int, j: int) -> None:
    recent[stream, position, : frames.shape[2]] = frames[row, j]


def put_whole(target: Bytes, at: int, recent: Bytes, stream: int, position: int, size: int) -> None:
    target[at : at + size] = recent[stream, position, :size]


def encode_frame(
    target: Bytes, at: int, recent: Bytes, stream: int, position: int, reference: Bytes, reference_at: int, size: int,
    scratch: Bytes,
) -> int:  # fmt: skip
    """Encode a recent frame at ``target[at:]``, against the bytes at ``reference_at``; return the length."""
    payload = encode_delta(recent[stream, position, :size], reference.reshape(-1)[reference_at : reference_at + size])
    target[at : at + len(payload)] = np.frombuffer(payload, np.uint8)
    return len(payload)


def split_stack(observations: Bytes, frames: Bytes) -> None:
    """Cut ``[row, pixel, stack, unit]`` into ``[row, stack, pixel * unit]``."""
    n_rows, pixels, stack, unit = observations.shape
    frames.reshape(n_rows, stack, pixels, unit)[...] = observations.transpose(0, 2, 1, 3)


def join_stack(frames: Bytes, observations: Bytes) -> None:
    """Undo `split_stack`."""
    n_rows, pixels, stack, unit = observations.shape
    observations[...] = frames.reshape(n_rows, stack, pixels, unit).transpose(0, 2, 1, 3)
