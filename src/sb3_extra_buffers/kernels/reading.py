"""Reading frames in plain NumPy: what `kernels.frames_numba.read_frames` does, a batch at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.delta import padded, top_bytes
from sb3_extra_buffers.kernels.state import Bytes, FrameState, Ints, scene_bytes


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
