"""Reading frames in plain NumPy: what `kernels.frames_numba.read_frames` does, a batch at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.delta import padded, top_bytes
from sb3_extra_buffers.kernels.state import Bytes, FrameState, Ints, keyframe_bytes

# bytes of frames to decode at once, so that all that is made on the way stays in the caches
_AT_ONCE = 2 << 20
_ONES = np.array([mask.bit_count() for mask in range(256)], np.uint8)


def read_frames(
    state: FrameState,
    frame_ids: npt.NDArray[np.int32],  # [cell, stack]: frame ids + 1
    sets: Ints,  # [set, row]: cells; those of one row have frames in common
    out: Bytes,  # [set, row, stack, byte]
    size: int,
    per_segment: int,
    wide: bool,
    first: int,
    stop: int,
) -> int:
    """Decode rows ``first`` to ``stop`` into ``out``; return -1, or a segment that is damaged."""
    frames = out.reshape(-1, size)
    numbers = np.arange(len(frames)).reshape(*sets.shape, frame_ids.shape[1])
    at_once = max(_AT_ONCE // (sets.shape[0] * frame_ids.shape[1] * size), 1)
    for begin in range(first, stop, at_once):
        rows = slice(begin, min(begin + at_once, stop))
        ids = frame_ids[sets[:, rows]].astype(np.int64).ravel() - 1
        damaged = _read_ids(state, ids, numbers[:, rows].ravel(), frames, per_segment, wide)
        if damaged >= 0:
            return damaged
    return -1


def _read_ids(
    state: FrameState, ids: Ints, places: Ints, frames: npt.NDArray[np.uint8], per_segment: int, wide: bool
) -> int:
    """Decode the frames that ``ids`` names into ``frames[places]``; return -1, or a segment that is damaged."""
    zero = ids < 0
    frames[places[zero]] = 0
    segments, which = np.unique(ids // per_segment, return_inverse=True)
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
            state, source, begins, ends, state.keyframes[segments[mine]], np.searchsorted(mine, which[wanted]),
            ids[wanted] % per_segment, places[wanted], frames, per_segment, wide, opened,
        )  # fmt: skip
        if damaged >= 0:
            return int(segments[mine[damaged]])
    return -1


def _read_segments(
    state: FrameState,
    source: Bytes,
    starts: Ints,
    ends: Ints,
    keyframes: npt.NDArray[np.int32],
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
    words, damaged = _unpack(source, at[sparse], length[sparse], size)
    if damaged >= 0:
        return int(segment_of[sparse[damaged]])
    rows = np.zeros((len(starts), padded(size)), np.uint8)
    known = np.flatnonzero(keyframes >= 0)
    whole_keyframes = state.keyframe_rows.reshape(-1, keyframe_bytes(size))
    rows[known, :size] = whole_keyframes[keyframes[known], :size]
    row_words = rows.reshape(-1).view(np.uint64)
    targets = segment_of[sparse][words.owners] * (rows.shape[1] // 8) + words.places
    # where each step of the walk begins
    cuts = np.searchsorted(step_of[sparse], np.arange(per_segment + 1))
    word_cuts = np.searchsorted(words.owners, cuts)
    value_cuts = np.append(0, np.cumsum(words.n_values))[cuts]
    whole = np.flatnonzero(length == size)
    for step in range(int(deepest.max()) + 1):
        for index in whole[step_of[whole] == step]:
            rows[segment_of[index], :size] = source[at[index] : at[index] + size]
        here = slice(word_cuts[step], word_cuts[step + 1])
        changed = row_words[targets[here]]
        bytes_of = changed.view(np.uint8).reshape(-1, 8)
        bytes_of[words.changes[here]] = words.values[value_cuts[step] : value_cuts[step + 1]]
        row_words[targets[here]] = changed
        now = np.flatnonzero(positions == step)
        frames[places[now]] = rows[which[now], :size]
    return -1


class _Words(NamedTuple):
    """What some differences change, word by word."""

    owners: Ints  # [word]: the difference it belongs to, ascending
    places: Ints  # [word]: its number in the row
    changes: npt.NDArray[np.bool_]  # [word, 8]: which of its bytes change
    values: Bytes  # the bytes that they change to
    n_values: Ints  # [difference]: how many of them are its own


def _unpack(source: Bytes, at: Ints, length: Ints, size: int) -> tuple[_Words, int]:
    """What the differences at ``at`` change, and the index of one that is damaged, or -1."""
    none = np.zeros(0, np.int64)
    nothing = _Words(none, none, np.zeros((0, 8), np.bool_), np.zeros(0, np.uint8), none)
    ends, cursor = at + length, at
    counts = np.full(at.size, top_bytes(size))
    owners = np.repeat(np.arange(at.size), counts)
    places = np.tile(np.arange(top_bytes(size)), at.size)
    for level in range(4):
        if (cursor + counts > ends).any():
            return nothing, int(np.argmax(cursor + counts > ends))
        masks = _runs(source, cursor, counts)
        cursor = cursor + counts
        bits = np.unpackbits(masks, bitorder="little").view(np.bool_)
        if level < 3:
            found = np.flatnonzero(bits)
            parents = found >> 3
            owners, places = owners[parents], places[parents] * 8 + (found & 7)
            counts = np.bincount(owners, minlength=at.size)
    so_far = np.append(0, np.cumsum(_ONES[masks], dtype=np.int64))
    n_values = np.diff(so_far[np.searchsorted(owners, np.arange(at.size + 1))])
    # a bit for each value, those of a difference rounded up to bytes: is it another than the one before?
    n_bytes = (n_values + 7) // 8
    fresh = np.unpackbits(_runs(source, cursor, n_bytes), bitorder="little").view(np.bool_)
    firsts = 8 * (np.cumsum(n_bytes) - n_bytes)
    cursor = cursor + n_bytes
    begins = np.flatnonzero(fresh)
    n_fresh = np.diff(np.searchsorted(begins, np.append(firsts, fresh.size)))
    wrong = (cursor + n_fresh != ends) | (n_values == 0)
    wrong[~wrong] = ~fresh[firsts[~wrong]]
    if wrong.any():
        return nothing, int(np.argmax(wrong))
    values = np.repeat(_runs(source, cursor, n_fresh), np.diff(np.append(begins, fresh.size)))
    values = np.delete(values, _spread(firsts + n_values, 8 * n_bytes - n_values))
    return _Words(owners, places, bits.reshape(-1, 8), values, n_values), -1


def _runs(source: Bytes, begins: Ints, counts: Ints) -> Bytes:
    """``counts[i]`` bytes from ``begins[i]`` on, for all i, one after the other."""
    places = _spread(begins, counts)
    return source[np.minimum(places, source.size - 1, out=places)]


def _spread(begins: Ints, counts: Ints) -> Ints:
    """``begins[i]`` and the ``counts[i] - 1`` numbers after it, for all i, one after the other."""
    numbers = np.arange(int(counts.sum()))
    numbers += np.repeat(begins - (np.cumsum(counts) - counts), counts)
    return numbers
