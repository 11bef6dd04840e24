"""Reference kernel that reads frames, in NumPy. It decodes many segments at a time, one frame of each in each step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.delta import padded, top_bytes
from sb3_extra_buffers.kernels.state import Bytes, FrameState, Ints, Ints32

# bytes of frames to decode at a time, so that the intermediate arrays stay in the caches
_CHUNK_BYTES = 2 << 20
_BIT_COUNTS = np.array([mask.bit_count() for mask in range(256)], np.uint8)


class _DamagedError(Exception):
    """A segment cannot be decoded; carries its index."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def _check(bad: npt.NDArray[np.bool_]) -> None:
    if bad.any():
        raise _DamagedError(int(np.argmax(bad)))


def read_frames(
    state: FrameState,
    frame_ids: Ints32,  # [obs_index, stack]: frame ids + 1
    sets: Ints,  # [set, row]: obs_index; the observations of one row share frames
    out: Bytes,  # [set, row, stack, byte], flat; with by_row [row, set, stack, byte]
    first: int,
    stop: int,
    zstd: Ints,  # unused: segments compressed with zstd are decompressed by the caller
    by_row: bool,  # a row is a window, and its observations are contiguous
) -> int:
    """Decode rows ``first`` to ``stop`` into ``out``; return -1, or a damaged segment."""
    size, stack = state.config.frame_bytes, frame_ids.shape[1]
    frames = out.reshape(-1, size)
    if by_row:
        targets = np.arange(len(frames)).reshape(*sets.T.shape, stack).swapaxes(0, 1)
    else:
        targets = np.arange(len(frames)).reshape(*sets.shape, stack)
    n_rows = max(_CHUNK_BYTES // (sets.shape[0] * stack * size), 1)
    for begin in range(first, stop, n_rows):
        rows = slice(begin, min(begin + n_rows, stop))
        ids = frame_ids[sets[:, rows]].astype(np.int64).ravel() - 1
        try:
            _read_ids(state, ids, targets[:, rows].ravel(), frames)
        except _DamagedError as damaged:
            return damaged.index
    return -1


class _Segments(NamedTuple):
    """Segments to decode, all in the heap or all in the stage, and the frames wanted of them."""

    source: Bytes  # heap or stage
    starts: Ints  # [segment]: offset in source
    bodies: Ints  # [segment]: offset of its differences
    ends: Ints  # [segment]
    keyframes: Ints32  # [segment]
    owners: Ints  # [frame]: its segment
    positions: Ints  # [frame]: its position in the segment
    targets: Ints  # [frame]: its row in the output


def _read_ids(state: FrameState, ids: Ints, targets: Ints, frames: Bytes) -> None:
    """Decode the frames ``ids`` into ``frames[targets]``."""
    config = state.config
    frames[targets[ids < 0]] = 0
    ids, targets = ids[ids >= 0], targets[ids >= 0]
    numbers, owners = np.unique(ids // config.per_segment, return_inverse=True)
    is_open = state.starts[numbers] < 0
    for selected in (np.flatnonzero(~is_open), np.flatnonzero(is_open)):
        wanted = np.flatnonzero(np.isin(owners, selected))
        if not wanted.size:
            continue
        segments = numbers[selected]
        starts = state.starts[segments]
        if is_open[selected[0]]:
            source, starts = state.stage, -1 - starts
            ends = starts + state.stage_ends[starts // config.stage_bytes]
            bodies = starts + 2 + config.per_segment * config.length_bytes
        else:
            source = state.heap
            ends = starts + state.lengths[segments]
            counts = source[np.minimum(starts + 1, source.size - 1)].astype(np.int64)
            bodies = starts + 2 + counts * config.length_bytes
        local = np.searchsorted(selected, owners[wanted])
        try:
            _read_segments(
                state,
                _Segments(
                    source, starts, bodies, ends, state.keyframes[segments],
                    local, ids[wanted] % config.per_segment, targets[wanted],
                ),
                frames,
            )  # fmt: skip
        except _DamagedError as damaged:
            raise _DamagedError(int(segments[damaged.index])) from None


def _read_segments(state: FrameState, segments: _Segments, frames: Bytes) -> None:
    """Decode the frames wanted of ``segments`` into ``frames``."""
    size = state.config.frame_bytes
    lengths = _lengths(state, segments)
    offsets = segments.bodies[:, None] + np.cumsum(lengths, axis=1) - lengths
    _check((lengths > size).any(axis=1) | (offsets[:, -1] + lengths[:, -1] > segments.ends))

    # every difference that is needed, ordered by its position in its segment
    position_of, segment_of = np.nonzero(lengths.T)
    at, length = offsets[segment_of, position_of], lengths[segment_of, position_of]
    sparse = np.flatnonzero(length < size)
    try:
        words = _decode(segments.source, at[sparse], length[sparse], size)
    except _DamagedError as damaged:
        raise _DamagedError(int(segment_of[sparse[damaged.index]])) from None
    rows = np.zeros((len(segments.starts), padded(size)), np.uint8)
    known = np.flatnonzero(segments.keyframes >= 0)
    keyframe_rows = state.keyframe_rows.reshape(-1, state.config.keyframe_bytes)
    rows[known, :size] = keyframe_rows[segments.keyframes[known], :size]
    row_words = rows.reshape(-1).view(np.uint64)
    word_targets = segment_of[sparse][words.owners] * (rows.shape[1] // 8) + words.numbers
    # where the differences, words and values of each position begin
    cuts = np.searchsorted(position_of[sparse], np.arange(lengths.shape[1] + 1))
    word_cuts = np.searchsorted(words.owners, cuts)
    value_cuts = np.append(0, np.cumsum(words.n_values))[cuts]
    whole = np.flatnonzero(length == size)
    for position in range(int(segments.positions.max()) + 1):
        for i in whole[position_of[whole] == position]:
            rows[segment_of[i], :size] = segments.source[at[i] : at[i] + size]
        part = slice(word_cuts[position], word_cuts[position + 1])
        changed = row_words[word_targets[part]]
        changed_bytes = changed.view(np.uint8).reshape(-1, 8)
        changed_bytes[words.changes[part]] = words.values[value_cuts[position] : value_cuts[position + 1]]
        row_words[word_targets[part]] = changed
        wanted = np.flatnonzero(segments.positions == position)
        frames[segments.targets[wanted]] = rows[segments.owners[wanted], :size]


def _lengths(state: FrameState, segments: _Segments) -> Ints:
    """Return the lengths of all differences that are needed, as ``[segment, position]``; 0 for the others."""
    source, starts, width = segments.source, segments.starts, state.config.length_bytes
    limit = source.size - 1
    deepest = np.zeros(len(starts), np.int64)
    np.maximum.at(deepest, segments.owners, segments.positions)
    counts = source[np.minimum(starts + 1, limit)].astype(np.int64)
    _check(
        (deepest >= counts)
        | (counts > state.config.per_segment)
        | (segments.bodies > segments.ends)
        | (source[np.minimum(starts, limit)] != 0)
    )
    positions = np.arange(state.config.per_segment)
    table = np.minimum(starts[:, None] + 2 + positions * width, limit - width)
    lengths = np.zeros(table.shape, np.int64)
    for byte in range(width):
        lengths |= source[table + byte].astype(np.int64) << (8 * byte)
    lengths[positions > deepest[:, None]] = 0
    return lengths


class _Words(NamedTuple):
    """What some differences change, word by word."""

    owners: Ints  # [word]: the difference it belongs to, ascending
    numbers: Ints  # [word]: its number in the row
    changes: npt.NDArray[np.bool_]  # [word, 8]: which of its bytes change
    values: Bytes  # the new values of all bytes that change
    n_values: Ints  # [difference]: how many values are its own


def _decode(source: Bytes, at: Ints, length: Ints, size: int) -> _Words:
    """Decode the differences at ``at``; see `codecs.delta` for their sections."""
    ends, cursor = at + length, at
    counts = np.full(at.size, top_bytes(size))
    owners = np.repeat(np.arange(at.size), counts)
    numbers = np.tile(np.arange(top_bytes(size)), at.size)
    for level in range(4):
        _check(cursor + counts > ends)
        masks = _gather(source, cursor, counts)
        cursor = cursor + counts
        bits = np.unpackbits(masks, bitorder="little").view(np.bool_)
        if level < 3:
            set_bits = np.flatnonzero(bits)
            parents = set_bits >> 3
            owners, numbers = owners[parents], numbers[parents] * 8 + (set_bits & 7)
            counts = np.bincount(owners, minlength=at.size)
    total = np.append(0, np.cumsum(_BIT_COUNTS[masks], dtype=np.int64))
    n_values = np.diff(total[np.searchsorted(owners, np.arange(at.size + 1))])
    n_bytes = (n_values + 7) // 8  # each difference's ``fresh`` bits are padded to whole bytes
    fresh = np.unpackbits(_gather(source, cursor, n_bytes), bitorder="little").view(np.bool_)
    firsts = 8 * (np.cumsum(n_bytes) - n_bytes)
    cursor = cursor + n_bytes
    begins = np.flatnonzero(fresh)
    n_fresh = np.diff(np.searchsorted(begins, np.append(firsts, fresh.size)))
    bad = (cursor + n_fresh != ends) | (n_values == 0)
    bad[~bad] = ~fresh[firsts[~bad]]
    _check(bad)
    values = np.repeat(_gather(source, cursor, n_fresh), np.diff(np.append(begins, fresh.size)))
    values = np.delete(values, _ranges(firsts + n_values, 8 * n_bytes - n_values))
    return _Words(owners, numbers, bits.reshape(-1, 8), values, n_values)


def _gather(source: Bytes, begins: Ints, counts: Ints) -> Bytes:
    """Concatenate ``source[begins[i] : begins[i] + counts[i]]`` for all i."""
    offsets = _ranges(begins, counts)
    return source[np.minimum(offsets, source.size - 1, out=offsets)]


def _ranges(begins: Ints, counts: Ints) -> Ints:
    """Concatenate ``range(begins[i], begins[i] + counts[i])`` for all i."""
    numbers = np.arange(int(counts.sum()))
    numbers += np.repeat(begins - (np.cumsum(counts) - counts), counts)
    return numbers
