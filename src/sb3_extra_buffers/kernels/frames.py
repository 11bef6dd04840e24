"""What the frame store's kernels mean, in plain Python and NumPy.

`write_frames` is bookkeeping: numba compiles it as it stands and swaps in fast versions of the
few functions below it that touch every byte of a frame (see `kernels.frames_numba`). Without numba
it runs as it is. `read_frames` (`kernels.reading`) works on the whole batch at once, the compiled one
on one observation at a time; both read the same segments.

A segment payload is ``flags, count``, then ``count`` lengths (two bytes each, four where ``wide``),
then the differences, one after the other. The first one refers to the segment's keyframe (a whole frame; zeros
where there is none), each other one to the frame before it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.delta import encode_delta
from sb3_extra_buffers.kernels.lz4_block import TABLE, copy_run, pack_block
from sb3_extra_buffers.kernels.reading import read_frames
from sb3_extra_buffers.kernels.state import (
    COMMITTED,
    N_FREED,
    N_FRESH,
    N_SEALED,
    N_UNDO,
    N_UNUSED,
    NONE,
    PACKED_LZ4,
    ZERO,
    Bytes,
    FrameState,
    Ints,
    keyframe_bytes,
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


#: packing a segment pays when no more than these tenths of it are left
PAYING_TENTHS = 9


def bind_state(state: FrameState) -> FrameState:
    """What the kernels take for ``state``."""
    return state


def write_frames(
    state: FrameState,
    frame_ids: npt.NDArray[np.int32],  # [cell, stack]: frame ids + 1, so that untouched memory is ZERO
    frames: npt.NDArray[np.uint8],  # [row, stack, byte]
    streams: Ints,  # [row]
    indices: Ints,  # [row]
    first: int,
    per_segment: int,
    max_chain_bytes: int,
    compress_above: int,
    delta: bool,
    wide: bool,
    logged: bool,
) -> int:
    """Store ``frames[first:]``; return the row where room ran out, or the number of rows.

    A frame that equals one of its stream's recent frames, byte for byte, is shared. Others get an
    id; with ``delta`` they are encoded into the stream's open segment, otherwise they are listed in
    ``state.fresh`` for a byte codec. An open segment is full when it has ``per_segment`` frames, or more than
    ``most_bytes`` of differences; it is then moved to the heap. Room runs out when that is left to the caller
    (`seal_segment`) or no segment is unused: the caller makes some and calls again from the row returned.

    With ``logged``, what ``slots`` held is kept in ``state.undo_ids`` and its frames stay in use until the write after
    this one, so that the caller can restore it.
    """
    if logged and state.counters[COMMITTED]:
        release_rows(state, per_segment)
    n_rows: int
    n_rows, stack, size = frames.shape
    ids = np.empty(stack, np.int64)
    places = np.empty(stack, np.int64)
    room = state.stage.size // state.open_segments.size
    last, recent_ids, refs = state.last, state.recent_ids, state.refs
    for row in range(first, n_rows):
        stream = streams[row]
        shift = 0
        for j in range(stack):
            place = NONE
            # the stack before, either unchanged (obs after next_obs) or moved by one (next_obs after obs)
            for attempt in range(2):
                moved = j + ((shift + attempt) & 1)
                if moved < stack:
                    guess = last[stream, moved]
                    if is_frame(state, frames, row, j, stream, guess):
                        place = guess
                        shift = moved - j
                        break
            if place == NONE and is_frame(state, frames, row, j, stream, ZERO):
                place = ZERO
            # a stack that moved on ends in a frame that is new, almost always: no need to look further
            if place == NONE and (shift == 0 or j + 1 < stack):
                for guess in range(recent_ids.shape[1]):
                    if is_frame(state, frames, row, j, stream, guess):
                        place = guess
                        break
            if place == NONE:
                segment = state.open_segments[stream]
                if segment >= 0 and is_full(state, stream, per_segment, max_chain_bytes):
                    if not seal_segment(state, stream, per_segment, size, compress_above, wide):
                        return row
                    segment = NONE
                if segment < 0 or not delta:
                    if state.counters[N_UNUSED] == 0:
                        return row
                    state.counters[N_UNUSED] -= 1
                    segment = state.free[state.counters[N_UNUSED]]
                    state.counts[segment] = 0
                    state.live[segment] = 0
                    state.keyframes[segment] = NONE
                    state.lengths[segment] = 0
                    if delta:
                        state.open_segments[stream] = segment
                        state.chain_bytes[stream] = 0
                        state.starts[segment] = -1 - stream * room
                        state.stage_ends[stream] = 2 + per_segment * (4 if wide else 2)
                place = state.heads[stream]
                before = (place - 1) % recent_ids.shape[1]
                state.heads[stream] = (place + 1) % recent_ids.shape[1]
                recent_ids[stream, place] = NONE  # an id always names the bytes beside it
                put_frame(state.recent, stream, place, frames, row, j)
                position = state.counts[segment]
                frame_id = segment * per_segment + position
                recent_ids[stream, place] = frame_id
                refs[frame_id] = 0
                if delta:
                    at = stream * room
                    end = at + state.stage_ends[stream]
                    if position == 0:
                        length = encode_first(state, stream, place, end, size)
                    else:
                        length = encode_frame(
                            state.stage, end, state.recent, stream, place,
                            state.recent, (stream * state.recent.shape[1] + before) * state.recent.shape[2],
                            size, state.scratch,
                        )  # fmt: skip
                    set_length(state.stage, at + 2, position, length, wide)
                    state.stage_ends[stream] += length
                    # a whole frame is copied, not walked
                    state.chain_bytes[stream] += length if length < size else 0
                    state.stage[at] = 0
                    state.stage[at + 1] = position + 1
                else:
                    fresh = state.counters[N_FRESH]
                    state.fresh[fresh] = row * stack + j
                    state.fresh_ids[fresh] = frame_id
                    state.counters[N_FRESH] += 1
                state.counts[segment] = position + 1
            places[j] = place
            if place == ZERO:
                ids[j] = ZERO
            else:
                ids[j] = recent_ids[stream, place]
        index = indices[row]
        for j in range(stack):
            held = ids[j]
            if held >= 0:
                if refs[held] == 0:
                    state.live[held // per_segment] += 1
                refs[held] += 1
        if logged:
            entry = state.counters[N_UNDO]
            state.undo_indices[entry] = index
            for j in range(stack):
                state.undo_ids[entry, j] = frame_ids[index, j]
            # from here on this row is restored if the write does not come to its end
            state.counters[N_UNDO] = entry + 1
        for j in range(stack):
            frame_ids[index, j] = ids[j] + 1
            last[stream, j] = places[j]
    return n_rows


def release_rows(state: FrameState, per_segment: int) -> None:
    """Give up the frames of the rows that the last write replaced."""
    for row in range(state.counters[N_UNDO]):
        for j in range(state.undo_ids.shape[1]):
            drop_frame(state, state.undo_ids[row, j] - 1, per_segment)
    state.counters[N_UNDO] = 0
    state.counters[COMMITTED] = 0


def write_step(
    state: FrameState,
    frame_ids: npt.NDArray[np.int32],
    frames: npt.NDArray[np.uint8],
    next_frames: npt.NDArray[np.uint8],
    index: int,
    next_index: int,
    first: int,
    per_segment: int,
    max_chain_bytes: int,
    compress_above: int,
    wide: bool,
) -> int:
    """`write_frames` with ``delta`` for two batches that hold a row of every stream, one after the other.

    Their indices are consecutive, from ``index`` and ``next_index`` on.
    """
    n_rows: int = frames.shape[0]
    streams = np.arange(n_rows)
    if first < n_rows:
        first = write_frames(
            state,
            frame_ids,
            frames,
            streams,
            streams + index,
            first,
            per_segment,
            max_chain_bytes,
            compress_above,
            True,
            wide,
            True,
        )
        if first < n_rows:
            return first
    more = write_frames(
        state, frame_ids, next_frames, streams, streams + next_index, first - n_rows, per_segment,
        max_chain_bytes, compress_above, True, wide, True,
    )  # fmt: skip
    return n_rows + more


def is_full(state: FrameState, stream: int, per_segment: int, max_chain_bytes: int) -> bool:
    """Whether the open segment of ``stream`` takes no more frames: a reader should not have to walk too far."""
    segment = state.open_segments[stream]
    return bool(state.counts[segment] >= per_segment or state.chain_bytes[stream] > max_chain_bytes)


def seal_segment(state: FrameState, stream: int, per_segment: int, size: int, compress_above: int, wide: bool) -> bool:
    """Move the open segment of ``stream`` to the gap in the heap, packed if a frame of it takes more than ``heavy``.

    False where that is left to the caller: ``heavy`` is negative, there is no room, or its first frame is whole
    and becomes a keyframe.
    """
    segment = state.open_segments[stream]
    count = int(state.counts[segment])
    width = 4 if wide else 2
    begin = stream * (state.stage.size // state.open_segments.size)
    body = begin + 2 + per_segment * width
    n_table = 2 + count * width
    length = begin + state.stage_ends[stream] - body
    start = state.gap[0]
    n_sealed = state.counters[N_SEALED]
    if compress_above < 0 or start + n_table + length > state.gap[1] or n_sealed == state.sealed.size:
        return False
    if get_length(state.stage, begin + 2, 0, wide) == size:
        return False
    copy_run(state.heap, start, state.stage, begin, n_table)
    packed = 0
    if length > compress_above * count:
        to = start + n_table
        most = length * PAYING_TENTHS // 10
        packed = pack_block(state.stage[body:], length, state.heap[to : to + most], np.empty(TABLE, np.int32))
    if packed:
        state.heap[start] = PACKED_LZ4
        length = packed
    else:
        copy_run(state.heap, start + n_table, state.stage, body, length)
    state.starts[segment] = start
    state.lengths[segment] = n_table + length
    state.gap[0] = start + n_table + length
    state.sealed[n_sealed] = segment
    state.counters[N_SEALED] = n_sealed + 1
    state.open_segments[stream] = NONE
    return True


def drop_frame(state: FrameState, frame_id: int, per_segment: int) -> None:
    """Take back one reference; a segment that lost its last one is listed in ``state.freed``."""
    if frame_id < 0:
        return
    state.refs[frame_id] -= 1
    if state.refs[frame_id] == 0:
        segment = frame_id // per_segment
        state.live[segment] -= 1
        if state.live[segment] == 0:
            state.freed[state.counters[N_FREED]] = segment
            state.counters[N_FREED] += 1


def is_frame(state: FrameState, frames: npt.NDArray[np.uint8], row: int, j: int, stream: int, place: int) -> bool:
    """Whether the frame is the one at ``place`` of its stream, by comparing every byte."""
    if place == ZERO:
        return is_zero(frames, row, j)
    if place < 0:
        return False
    if state.recent_ids[stream, place] < 0:
        return False
    return is_same(frames, row, j, state.recent, stream, place)


def encode_first(state: FrameState, stream: int, place: int, end: int, size: int) -> int:
    """Encode a segment's first frame against the cheapest keyframe at hand; return its length.

    The frame is stored whole, and thereby becomes a keyframe when its segment is sealed, if no
    keyframe halves it or if the current one has cost a frame's worth of bytes by ageing.
    """
    cost = state.keyframe_cost
    segment = state.open_segments[stream]
    keyframe = state.keyframe_of[stream]
    length = size
    if keyframe >= 0:
        length = encode_against(state, stream, place, keyframe, end, size)
    if keyframe < 0 or 4 * length > 5 * cost[stream, 0]:
        best = length
        for other in state.pool:
            if other >= 0 and other != keyframe:
                length = encode_against(state, stream, place, other, end, size)
                # a keyframe in hand is worth more than an equal one elsewhere
                if 8 * length < 7 * best:
                    best = length
                    state.keyframe_of[stream] = other
                    cost[stream, 0] = length
                    cost[stream, 1] = 0
        keyframe = state.keyframe_of[stream]
        if keyframe >= 0:
            length = encode_against(state, stream, place, keyframe, end, size)
    cost[stream, 0] = min(cost[stream, 0], length)
    cost[stream, 1] += length - cost[stream, 0]
    if keyframe < 0 or 2 * length > size or cost[stream, 1] > size:
        put_whole(state.stage, end, state.recent, stream, place, size)
        return size
    state.keyframes[segment] = keyframe
    state.keyframe_refs[keyframe] += 1
    return length


def encode_against(state: FrameState, stream: int, place: int, keyframe: int, end: int, size: int) -> int:
    """Encode a recent frame at ``end`` of the stage as its difference to a keyframe; return the length."""
    at = keyframe * keyframe_bytes(size)
    return encode_frame(state.stage, end, state.recent, stream, place, state.keyframe_rows, at, size, state.scratch)


def set_length(stage: Bytes, table: int, position: int, length: int, wide: bool) -> None:
    """Write one entry of a segment's table of lengths, little-endian."""
    width = 4 if wide else 2
    at = table + position * width
    for byte in range(width):
        stage[at + byte] = (length >> (8 * byte)) & 255


def get_length(stage: Bytes, table: int, position: int, wide: bool) -> int:
    """Read what `set_length` wrote."""
    width = 4 if wide else 2
    length = 0
    for byte in range(width):
        length |= int(stage[table + position * width + byte]) << (8 * byte)
    return length


def flat_indices(
    steps: Ints,  # [row]
    streams: Ints,  # [row]
    n_steps: int,
    n_streams: int,
    bases: Ints,  # [set]: the first cell of each view
    sets: Ints,  # [set, row]: the cells, to be filled in
) -> int:
    """Cells of ``(step, stream)`` in each view, negative ones counted from the end; the row of a bad one, or -1."""
    for row in range(len(steps)):
        step, stream = steps[row], streams[row]
        if step < -n_steps or step >= n_steps or stream < -n_streams or stream >= n_streams:
            return row
        index = (step % n_steps) * n_streams + stream % n_streams
        for place in range(len(bases)):
            sets[place, row] = bases[place] + index
    return -1


# ---- the functions that touch every byte; numba has its own versions of these ----


def is_same(
    frames: npt.NDArray[np.uint8], row: int, j: int, recent: npt.NDArray[np.uint8], stream: int, place: int
) -> bool:
    # two copies and a memcmp: half the time of np.array_equal on a frame
    same: bool = frames[row, j].tobytes() == recent[stream, place, : frames.shape[2]].tobytes()
    return same


def is_zero(frames: npt.NDArray[np.uint8], row: int, j: int) -> bool:
    # most frames show in their first bytes that they are not
    return not frames[row, j, :64].any() and not frames[row, j].any()


def put_frame(
    recent: npt.NDArray[np.uint8], stream: int, place: int, frames: npt.NDArray[np.uint8], row: int, j: int
) -> None:
    recent[stream, place, : frames.shape[2]] = frames[row, j]


def put_whole(target: Bytes, at: int, recent: npt.NDArray[np.uint8], stream: int, place: int, size: int) -> None:
    target[at : at + size] = recent[stream, place, :size]


def encode_frame(
    target: Bytes,
    at: int,
    recent: npt.NDArray[np.uint8],
    stream: int,
    place: int,
    reference: npt.NDArray[np.uint8],
    reference_at: int,
    size: int,
    scratch: Bytes,
) -> int:
    """Encode a recent frame against the bytes at ``reference_at``; return the length."""
    row = recent[stream, place, :size]
    payload = encode_delta(row, reference.reshape(-1)[reference_at : reference_at + size])
    target[at : at + len(payload)] = np.frombuffer(payload, np.uint8)
    return len(payload)


def split_stack(observations: npt.NDArray[np.uint8], frames: npt.NDArray[np.uint8]) -> None:
    """Cut ``[row, pixel, stack, unit]`` into ``[row, stack, pixel * unit]``."""
    n_rows, pixels, stack, unit = observations.shape
    frames.reshape(n_rows, stack, pixels, unit)[...] = observations.transpose(0, 2, 1, 3)


def join_stack(frames: npt.NDArray[np.uint8], observations: npt.NDArray[np.uint8]) -> None:
    """Undo `split_stack`."""
    n_rows, pixels, stack, unit = observations.shape
    observations[...] = frames.reshape(n_rows, stack, pixels, unit).transpose(0, 2, 1, 3)
