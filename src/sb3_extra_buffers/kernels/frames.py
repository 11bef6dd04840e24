"""What the frame store's kernels mean, in plain Python and NumPy.

`write_frames` is bookkeeping: numba compiles it as it stands and swaps in fast versions of the
few functions below it that touch every byte of a frame (see `kernels.frames_numba`). Without numba
it runs as it is. `read_frames` works on the whole batch at once here and on one observation at a time
there; both read the same segments.

A segment payload is ``flags, count``, then ``count`` lengths (two bytes each, four where ``wide``),
then the differences, one after the other. The first one refers to the segment's scene (a whole frame; zeros
where there is none), each other one to the frame before it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.delta import encode_delta, padded, top_bytes
from sb3_extra_buffers.kernels.lz4_block import pack_block  # noqa: F401  # one of the kernels

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

#: a frame of zeros has this id: nothing is stored for it, and unwritten observations are made of it
ZERO = -1
#: a place in a table that holds nothing
NONE = -2
#: flags of a segment whose differences were compressed together
PACKED_ZSTD = 1
PACKED_LZ4 = 2


class FrameState(NamedTuple):
    """Tables of one frame store. A frame's id is ``segment * frames_per_segment + position``."""

    heap: Bytes  # sealed segments
    scene_rows: Bytes  # [scene * whole lines of a frame]: whole frames that segments start from
    scene_refs: npt.NDArray[np.int32]  # per scene: segments that start from it
    starts: Ints  # per segment: its place in heap, or -1 - its place in stage while it is open
    lengths: npt.NDArray[np.int32]  # per segment: bytes in heap, 0 while it is open
    counts: npt.NDArray[np.int32]  # per segment: frames in it
    live: npt.NDArray[np.int32]  # per segment: frames referred to
    scenes: npt.NDArray[np.int32]  # per segment: its scene, or NONE
    refs: npt.NDArray[np.int32]  # per frame: observations that contain it
    free: npt.NDArray[np.int32]  # ids of unused segments, a stack
    freed: npt.NDArray[np.int32]  # segments that lost their last reference in this call
    tallies: Ints  # unused segments, freed segments, new frames
    fresh: Ints  # new frames of this call, as row * stack + position
    fresh_ids: Ints  # their ids
    stage: Bytes  # open segments, one room per stream
    stage_ends: Ints  # per stream: where its open segment ends, counted from its room
    open_segments: npt.NDArray[np.int32]  # per stream
    recent: npt.NDArray[np.uint8]  # [stream, place, padded frame]: the frames a stream saw last
    recent_ids: npt.NDArray[np.int32]  # [stream, place]
    heads: Ints  # per stream: the place that is overwritten next
    last: Ints  # [stream, stack]: places of the frames of the stream's last observation
    scene_of: npt.NDArray[np.int32]  # per stream: its scene, or NONE
    scene_cost: Ints  # [stream, 2]: best size of a first frame against that scene; bytes lost to its age
    walks: Ints  # per stream: bytes of differences in its open segment
    pool: npt.NDArray[np.int32]  # the newest scenes
    scratch: Bytes


def bind_state(state: FrameState) -> FrameState:
    """What the kernels take for ``state``."""
    return state


def write_frames(
    state: FrameState,
    slots: npt.NDArray[np.int32],  # [cell, stack]: frame ids + 1, so that untouched memory is ZERO
    frames: npt.NDArray[np.uint8],  # [row, stack, byte]
    streams: Ints,  # [row]
    cells: Ints,  # [row]
    first: int,
    per_segment: int,
    most_bytes: int,
    delta: bool,
    wide: bool,
) -> int:
    """Store ``frames[first:]``; return the row where room ran out, or the number of rows.

    A frame that equals one of its stream's recent frames, byte for byte, is shared. Others get an
    id; with ``delta`` they are encoded into the stream's open segment, otherwise they are listed in
    ``state.fresh`` for a byte codec. Room runs out when an open segment is full (it has ``per_segment`` frames, or
    more than ``most_bytes`` of differences) or no segment is unused:
    the caller seals or grows and calls again from the row returned.
    """
    n_rows: int
    n_rows, stack, size = frames.shape
    ids = np.empty(stack, np.int64)
    places = np.empty(stack, np.int64)
    room = state.stage.size // state.open_segments.size
    for row in range(first, n_rows):
        stream = streams[row]
        shift = 0
        for j in range(stack):
            place = NONE
            # the stack before, either unchanged (obs after next_obs) or moved by one (next_obs after obs)
            for attempt in range(2):
                moved = j + ((shift + attempt) & 1)
                if moved < stack and place == NONE:
                    guess = state.last[stream, moved]
                    if is_frame(state, frames, row, j, stream, guess):
                        place = guess
                        shift = moved - j
            if place == NONE and is_frame(state, frames, row, j, stream, ZERO):
                place = ZERO
            # a stack that moved on ends in a frame that is new, almost always: no need to look further
            if place == NONE and (shift == 0 or j + 1 < stack):
                for guess in range(state.recent_ids.shape[1]):
                    if place == NONE and is_frame(state, frames, row, j, stream, guess):
                        place = guess
            if place == NONE:
                segment = state.open_segments[stream]
                if segment >= 0 and is_full(state, stream, per_segment, most_bytes):
                    return row
                if segment < 0 or not delta:
                    if state.tallies[0] == 0:
                        return row
                    state.tallies[0] -= 1
                    segment = state.free[state.tallies[0]]
                    state.counts[segment] = 0
                    state.live[segment] = 0
                    state.scenes[segment] = NONE
                    state.lengths[segment] = 0
                    if delta:
                        state.open_segments[stream] = segment
                        state.walks[stream] = 0
                        state.starts[segment] = -1 - stream * room
                        state.stage_ends[stream] = 2 + per_segment * (4 if wide else 2)
                place = state.heads[stream]
                before = (place - 1) % state.recent_ids.shape[1]
                state.heads[stream] = (place + 1) % state.recent_ids.shape[1]
                put_frame(state.recent, stream, place, frames, row, j)
                position = state.counts[segment]
                frame_id = segment * per_segment + position
                state.recent_ids[stream, place] = frame_id
                state.refs[frame_id] = 0
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
                    state.walks[stream] += length if length < size else 0
                    state.stage[at] = 0
                    state.stage[at + 1] = position + 1
                else:
                    fresh = state.tallies[2]
                    state.fresh[fresh] = row * stack + j
                    state.fresh_ids[fresh] = frame_id
                    state.tallies[2] += 1
                state.counts[segment] = position + 1
            places[j] = place
            ids[j] = ZERO if place == ZERO else np.int64(state.recent_ids[stream, place])
        cell = cells[row]
        # take the new references before the old ones go: a frame may be in both
        for j in range(stack):
            if ids[j] >= 0:
                if state.refs[ids[j]] == 0:
                    state.live[ids[j] // per_segment] += 1
                state.refs[ids[j]] += 1
        for j in range(stack):
            drop_frame(state, slots[cell, j] - 1, per_segment)
            slots[cell, j] = ids[j] + 1
            state.last[stream, j] = places[j]
    return n_rows


def write_frames_twice(
    state: FrameState,
    slots: npt.NDArray[np.int32],
    frames: npt.NDArray[np.uint8],
    more_frames: npt.NDArray[np.uint8],
    streams: Ints,
    cells: Ints,
    more_cells: Ints,
    first: int,
    per_segment: int,
    most_bytes: int,
    wide: bool,
) -> int:
    """`write_frames` with ``delta`` for two batches, one after the other, in a single call."""
    n_rows: int = frames.shape[0]
    if first < n_rows:
        first = write_frames(state, slots, frames, streams, cells, first, per_segment, most_bytes, True, wide)
        if first < n_rows:
            return first
    first -= n_rows
    more = write_frames(state, slots, more_frames, streams, more_cells, first, per_segment, most_bytes, True, wide)
    return n_rows + more


def is_full(state: FrameState, stream: int, per_segment: int, most_bytes: int) -> bool:
    """Whether the open segment of ``stream`` takes no more frames: a reader should not have to walk too far."""
    segment = state.open_segments[stream]
    return bool(state.counts[segment] >= per_segment or state.walks[stream] > most_bytes)


def drop_frame(state: FrameState, frame_id: int, per_segment: int) -> None:
    """Take back one reference; a segment that lost its last one is listed in ``state.freed``."""
    if frame_id < 0:
        return
    state.refs[frame_id] -= 1
    if state.refs[frame_id] == 0:
        segment = frame_id // per_segment
        state.live[segment] -= 1
        if state.live[segment] == 0:
            state.freed[state.tallies[1]] = segment
            state.tallies[1] += 1


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
    """Encode a segment's first frame against the cheapest scene at hand; return its length.

    The frame is stored whole, and thereby becomes a scene when its segment is sealed, if no
    scene halves it or if the current one has cost a frame's worth of bytes by ageing.
    """
    cost = state.scene_cost
    segment = state.open_segments[stream]
    scene = state.scene_of[stream]
    length = size
    if scene >= 0:
        length = encode_against(state, stream, place, scene, end, size)
    if scene < 0 or 4 * length > 5 * cost[stream, 0]:
        best = length
        for other in state.pool:
            if other >= 0 and other != scene:
                length = encode_against(state, stream, place, other, end, size)
                # a scene in hand is worth more than an equal one elsewhere
                if 8 * length < 7 * best:
                    best = length
                    state.scene_of[stream] = other
                    cost[stream, 0] = length
                    cost[stream, 1] = 0
        scene = state.scene_of[stream]
        if scene >= 0:
            length = encode_against(state, stream, place, scene, end, size)
    cost[stream, 0] = min(cost[stream, 0], length)
    cost[stream, 1] += length - cost[stream, 0]
    if scene < 0 or 2 * length > size or cost[stream, 1] > size:
        put_whole(state.stage, end, state.recent, stream, place, size)
        return size
    state.scenes[segment] = scene
    state.scene_refs[scene] += 1
    return length


def encode_against(state: FrameState, stream: int, place: int, scene: int, end: int, size: int) -> int:
    """Encode a recent frame at ``end`` of the stage as its difference to a scene; return the length."""
    at = scene * scene_bytes(size)
    return encode_frame(state.stage, end, state.recent, stream, place, state.scene_rows, at, size, state.scratch)


def scene_bytes(size: int) -> int:
    """Bytes that a scene takes: whole lines, the last one padded with zeros."""
    return (size + 63) // 64 * 64


def set_length(stage: Bytes, table: int, position: int, length: int, wide: bool) -> None:
    """Write one entry of a segment's table of lengths, little-endian."""
    width = 4 if wide else 2
    for byte in range(width):
        stage[table + position * width + byte] = (length >> (8 * byte)) & 255


def locate_cells(
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
        cell = (step % n_steps) * n_streams + stream % n_streams
        for place in range(len(bases)):
            sets[place, row] = bases[place] + cell
    return -1


# ---- the functions that touch every byte; numba has its own versions of these ----


def is_same(
    frames: npt.NDArray[np.uint8], row: int, j: int, recent: npt.NDArray[np.uint8], stream: int, place: int
) -> bool:
    # two copies and a memcmp: half the time of np.array_equal on a frame
    same: bool = frames[row, j].tobytes() == recent[stream, place, : frames.shape[2]].tobytes()
    return same


def is_zero(frames: npt.NDArray[np.uint8], row: int, j: int) -> bool:
    return not frames[row, j].any()


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


def read_frames(
    state: FrameState,
    slots: npt.NDArray[np.int32],  # [cell, stack]: frame ids + 1
    sets: Ints,  # [set, row]: cells; those of one row have frames in common
    out: Bytes,  # [set, row, stack, byte]
    size: int,
    per_segment: int,
    wide: bool,
    first: int,
    stop: int,
) -> int:
    """Decode rows ``first`` to ``stop`` into ``out``; return -1, or a segment that is damaged."""
    n_sets, n_rows = sets.shape
    flat = slots[sets[:, first:stop]].astype(np.int64).ravel() - 1
    numbers = np.arange(n_sets * n_rows * slots.shape[1]).reshape(n_sets, n_rows, slots.shape[1])
    places = numbers[:, first:stop].ravel()
    frames = out.reshape(-1, size)
    zero = flat < 0
    frames[places[zero]] = 0
    segments, which = np.unique(flat // per_segment, return_inverse=True)
    starts = np.zeros(len(segments), np.int64)
    starts[segments >= 0] = state.starts[segments[segments >= 0]]
    room = state.stage.size // state.open_segments.size
    for opened in (False, True):
        mine = np.flatnonzero((segments >= 0) & ((starts < 0) == opened))
        wanted = np.flatnonzero(np.isin(which, mine))
        if not wanted.size:
            continue
        if opened:
            source, begins = state.stage, -1 - starts[mine]
            ends = begins + state.stage_ends[begins // room]
        else:
            source, begins = state.heap, starts[mine]
            ends = begins + state.lengths[segments[mine]]
        damaged = _read_segments(
            state, source, begins, ends, state.scenes[segments[mine]], np.searchsorted(mine, which[wanted]),
            flat[wanted] % per_segment, places[wanted], frames, per_segment, wide, opened,
        )  # fmt: skip
        if damaged >= 0:
            return int(segments[mine[damaged]])
    return -1


def _read_segments(
    state: FrameState,
    source: Bytes,
    starts: Ints,
    ends: Ints,
    scenes: npt.NDArray[np.int32],
    which: npt.NDArray[np.intp],  # of each frame wanted: its segment
    positions: Ints,  # its place in it
    places: Ints,  # where it goes
    frames: npt.NDArray[np.uint8],
    per_segment: int,
    wide: bool,
    opened: bool,
) -> int:
    """Decode frames of segments that lie in ``source``; the index of a damaged one, or -1."""
    size = frames.shape[1]
    width = 4 if wide else 2
    limit = source.size - 1
    deepest = np.zeros(len(starts), np.int64)
    np.maximum.at(deepest, which, positions)
    counts = source[np.minimum(starts + 1, limit)].astype(np.int64)
    bodies = starts + 2 + (per_segment if opened else counts) * width
    bad = (deepest >= counts) | (counts > per_segment) | (bodies > ends) | (source[np.minimum(starts, limit)] != 0)
    if bad.any():
        return int(np.argmax(bad))
    steps = np.arange(per_segment)
    table = np.minimum(starts[:, None] + 2 + steps * width, limit - width)
    lengths = np.zeros(table.shape, np.int64)
    for byte in range(width):
        lengths |= source[table + byte].astype(np.int64) << (8 * byte)
    lengths[steps > deepest[:, None]] = 0
    offsets = bodies[:, None] + np.cumsum(lengths, axis=1) - lengths
    bad = (lengths > size).any(axis=1) | (offsets[:, -1] + lengths[:, -1] > ends)
    if bad.any():
        return int(np.argmax(bad))

    # every difference that is needed, in the order in which the segments are walked
    step_of, segment_of = np.nonzero(lengths.T)
    at, length = offsets[segment_of, step_of], lengths[segment_of, step_of]
    sparse = np.flatnonzero(length < size)
    positions_of, values, owner, damaged = _unpack(source, at[sparse], length[sparse], size)
    if damaged >= 0:
        return int(segment_of[sparse[damaged]])
    rows = np.zeros((len(starts), padded(size)), np.uint8)
    known = np.flatnonzero(scenes >= 0)
    whole_scenes = state.scene_rows.reshape(-1, scene_bytes(size))
    rows[known, :size] = whole_scenes[scenes[known], :size]
    cuts = np.searchsorted(step_of[sparse][owner], np.arange(per_segment + 1))
    flat_rows = rows.reshape(-1)
    scatter = segment_of[sparse][owner] * rows.shape[1] + positions_of
    whole = np.flatnonzero(length == size)
    for step in range(int(deepest.max()) + 1):
        for index in whole[step_of[whole] == step]:
            rows[segment_of[index], :size] = source[at[index] : at[index] + size]
        here = slice(cuts[step], cuts[step + 1])
        flat_rows[scatter[here]] = values[here]
        now = np.flatnonzero(positions == step)
        frames[places[now]] = rows[which[now], :size]
    return -1


def _unpack(
    source: Bytes, at: Ints, length: Ints, size: int
) -> tuple[npt.NDArray[np.int64], Bytes, npt.NDArray[np.int64], int]:
    """Positions, values and owners of all differences; the index of a damaged one, or -1."""
    ends = at + length
    limit = source.size - 1
    owner = np.repeat(np.arange(at.size), top_bytes(size))
    index = np.tile(np.arange(top_bytes(size)), at.size)
    cursor = at
    for _ in range(4):
        count = np.bincount(owner, minlength=at.size)
        if (cursor + count > ends).any():
            empty = np.zeros(0, np.int64)
            return empty, np.zeros(0, np.uint8), empty, int(np.argmax(cursor + count > ends))
        rank = np.arange(owner.size) - np.repeat(np.cumsum(count) - count, count)
        masks = source[np.minimum(cursor[owner] + rank, limit)]
        bits = np.flatnonzero(np.unpackbits(masks, bitorder="little"))
        parent = bits >> 3
        cursor = cursor + count
        owner, index = owner[parent], index[parent] * 8 + (bits & 7)
    count = np.bincount(owner, minlength=at.size)
    before = np.repeat(np.cumsum(count) - count, count)
    rank = np.arange(owner.size) - before
    flags = source[np.minimum(cursor[owner] + (rank >> 3), limit)] >> (rank & 7) & 1
    total = np.cumsum(flags, dtype=np.int64)
    base = np.concatenate([[0], total])[np.cumsum(count) - count]
    n_fresh = np.concatenate([[0], total])[np.cumsum(count)] - base
    cursor = cursor + (count + 7) // 8
    wrong = cursor + n_fresh != ends
    if wrong.any():
        empty = np.zeros(0, np.int64)
        return empty, np.zeros(0, np.uint8), empty, int(np.argmax(wrong))
    values = source[np.minimum(cursor[owner] + total - base[owner] - 1, limit)]
    return index, values, owner, -1
