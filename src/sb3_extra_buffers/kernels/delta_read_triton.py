"""The kernel that decodes frames: `kernels.delta_torch.read_rows_reference` on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from sb3_extra_buffers.kernels import delta_tables as dt
from sb3_extra_buffers.kernels.bits_triton import (
    load_word,
    low_bits,
    pick_bytes,
    popcount,
    popcount64,
    prefetch,
    spread_bits,
)
from sb3_extra_buffers.kernels.columns_triton import gather_columns

__all__ = ["read_kernel"]

_FAR = tl.constexpr((1 << 31) - 1)  # larger than any segment
_LINES = tl.constexpr(dt.CHUNK // 64)
_LENGTH_BITS = tl.constexpr(dt.LENGTH_BITS)
_LENGTH = tl.constexpr((1 << dt.LENGTH_BITS) - 1)
_HEAP = tl.constexpr(dt.ADDRESS_HEAP)
_ENTRIES = tl.constexpr(dt.ADDRESS_ENTRIES)
_KEYFRAMES = tl.constexpr(dt.ADDRESS_KEYFRAMES)
_KEYFRAME_ROWS = tl.constexpr(dt.ADDRESS_KEYFRAME_ROWS)
_MASK = tl.constexpr(dt.ADDRESS_MASK)


@triton.jit(do_not_specialize=["n_rows", "n_streams"])
def read_kernel(
    out_ptr,  # int64 [set, row, stack, word]
    addresses_ptr,  # int64 [N_ADDRESSES]: where the tables are now
    frame_ids_ptr,  # int32 [obs_index, WIDTH]
    # the batch
    indices_ptr,  # int64 [set, row]
    # `columns_triton.gather_columns`
    floats_ptr,
    actions_ptr,
    numbers_ptr,
    records_ptr,
    n_rows,
    n_streams,
    N_SETS: tl.constexpr,
    STACK: tl.constexpr,  # frames to read of each observation, the newest ones
    WIDTH: tl.constexpr,  # frames of an observation
    TARGETS: tl.constexpr,  # N_SETS * STACK, and the next power of two
    PER: tl.constexpr,
    PER2: tl.constexpr,
    WORDS: tl.constexpr,
    KEYFRAME_WORDS: tl.constexpr,
    N_CHUNKS: tl.constexpr,
    CHUNKS2: tl.constexpr,
    PARTS: tl.constexpr,
    ACTION: tl.constexpr,  # 0: no columns
    ACTION2: tl.constexpr,
    ACTION_AT: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Decode a chunk of a row's frames; the grid is ``[row, PARTS, chunk]``.

    The segments of a row are dealt to its ``PARTS`` programs, so that a row with frames in two segments is read in
    parallel. A program keeps its chunk in registers, decodes a segment from the front and stores each frame that the
    row needs. Indices may be in pinned host memory: reading them from here is faster than a copy.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    chunk = tl.program_id(2)
    target = tl.arange(0, TARGETS)
    is_target = target < N_SETS * STACK
    index = tl.load(indices_ptr + (target // STACK).to(tl.int64) * n_rows + row, mask=is_target, other=0)
    heap_ptr = tl.load(addresses_ptr + _HEAP).to(tl.pointer_type(tl.uint8))
    heap_words_ptr = tl.load(addresses_ptr + _HEAP).to(tl.pointer_type(tl.int64))
    entries_ptr = tl.load(addresses_ptr + _ENTRIES).to(tl.pointer_type(tl.int64))
    keyframes_ptr = tl.load(addresses_ptr + _KEYFRAMES).to(tl.pointer_type(tl.int32))
    keyframe_rows_ptr = tl.load(addresses_ptr + _KEYFRAME_ROWS).to(tl.pointer_type(tl.int64))
    slot_mask = tl.load(addresses_ptr + _MASK).to(tl.int32)
    nth_frame = WIDTH - STACK + target % STACK
    ids = tl.load(frame_ids_ptr + index * WIDTH + nth_frame, mask=is_target, other=0) - 1
    word = (chunk * _LINES + tl.arange(0, _LINES))[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = word < WORDS
    if part == 0:
        # nested, since ACTION is known at compile time
        if ACTION > 0:  # noqa: SIM102
            if chunk == 0:
                one = tl.arange(0, 1)
                gather_columns(
                    floats_ptr, actions_ptr, numbers_ptr, records_ptr,
                    tl.sum(tl.where(target == 0, index, 0), axis=0) + one, row + one, one == 0, n_rows,
                    ACTION, ACTION2, ACTION_AT, RECORD,
                )  # fmt: skip
        is_zero = _target_bits(ids < 0, N_SETS, STACK, TARGETS)
        zeros = tl.zeros([_LINES, 8], tl.uint64)
        _store_frame(out_ptr, zeros, is_zero, row, n_rows, word, inside, N_SETS, STACK, WORDS)
    # in 32 bits, where it takes a fraction of the time
    stream = (index.to(tl.int32) % n_streams).to(tl.int32)
    segments = tl.where(ids >= 0, stream * (slot_mask + 1) + ((ids // PER) & slot_mask), _FAR)
    segment = tl.min(segments, axis=0)
    turn = 0
    while segment < _FAR:
        if turn % PARTS == part:
            _read_segment(
                out_ptr, heap_ptr, heap_words_ptr, entries_ptr + segment.to(tl.int64) * PER,
                tl.load(keyframes_ptr + segment).to(tl.int64), keyframe_rows_ptr,
                tl.where(segments == segment, ids % PER, -1), row, n_rows, chunk, word, inside,
                N_SETS, STACK, TARGETS, PER2, WORDS, KEYFRAME_WORDS, N_CHUNKS, CHUNKS2,
            )  # fmt: skip
        turn += 1
        segment = tl.min(tl.where(segments > segment, segments, _FAR), axis=0)


@triton.jit
def _read_segment(
    out_ptr, heap_ptr, words_ptr, entries_ptr, keyframe, keyframe_rows_ptr,
    positions,  # [TARGETS]: of the row's frames in this segment, -1 for frames of other segments
    row, n_rows, chunk, word, inside,
    N_SETS: tl.constexpr, STACK: tl.constexpr, TARGETS: tl.constexpr, PER2: tl.constexpr, WORDS: tl.constexpr,
    KEYFRAME_WORDS: tl.constexpr, N_CHUNKS: tl.constexpr, CHUNKS2: tl.constexpr,
):  # fmt: skip
    """Decode a segment up to the last frame that the row needs, and store those it needs."""
    n_frames = tl.max(positions, axis=0) + 1
    in_keyframe = word < tl.where(keyframe >= 0, WORDS, 0)
    loaded = tl.load(keyframe_rows_ptr + keyframe * KEYFRAME_WORDS + word, mask=in_keyframe)
    # find the chunk in each of the frames by their directories
    nth = tl.arange(0, PER2)
    entries = tl.load(entries_ptr + nth, mask=nth < n_frames, other=0)
    at = entries >> _LENGTH_BITS
    other = tl.arange(0, CHUNKS2)[None, :]
    listed = ((entries & _LENGTH) > 0)[:, None] & (other <= chunk)
    directory = heap_ptr + at[:, None] + 2 * other
    listing = tl.load(directory, mask=listed, other=0).to(tl.int32)
    listing |= tl.load(directory + 1, mask=listed, other=0).to(tl.int32) << 8
    at += 2 * N_CHUNKS + tl.sum(tl.where(other < chunk, listing & 0xFFF, 0), axis=1)
    own = tl.sum(tl.where(other == chunk, listing, 0), axis=1)
    prefetch(heap_ptr + tl.where(own > 0, at, 0))
    prefetch(heap_ptr + tl.where(own > 0, at + 128, 0))
    # not before the directories: Triton rearranges the keyframe among threads, which waits for it
    frame = tl.where(in_keyframe, loaded, 0).to(tl.uint64, bitcast=True)
    for position in range(n_frames):
        is_this = nth == position
        entry = tl.sum(tl.where(is_this, own, 0), axis=0)
        if entry > 0:
            begin = tl.sum(tl.where(is_this, at, 0), axis=0)
            if entry < 0x1000:
                # uncompressed; what is read past the end of the frame is not stored
                frame = load_word(words_ptr, begin + 8 * (word - chunk * (_LINES * 8)), inside)
            else:
                frame = _apply_difference(heap_ptr, words_ptr, begin, frame, entry >> 12)
        is_wanted = _target_bits(positions == position, N_SETS, STACK, TARGETS)
        _store_frame(out_ptr, frame, is_wanted, row, n_rows, word, inside, N_SETS, STACK, WORDS)


@triton.jit
def _target_bits(is_set, N_SETS: tl.constexpr, STACK: tl.constexpr, TARGETS: tl.constexpr):
    """A word with a bit for each frame of a row; of 32 bits, which are faster, if that is enough."""
    target = tl.arange(0, TARGETS)
    if N_SETS * STACK > 32:  # noqa: SIM108  # Triton compiles one of two dtypes
        bits = tl.full([TARGETS], 1, tl.int64) << target.to(tl.int64)
    else:
        bits = 1 << target
    return tl.sum(tl.where(is_set & (target < N_SETS * STACK), bits, 0), axis=0)


@triton.jit
def _lowest_bit(bits):
    """The number of the lowest bit that is set."""
    return popcount64(((bits & -bits) - 1).to(tl.uint64))


@triton.jit
def _store_frame(
    out_ptr, frame, targets, row, n_rows, word, inside, N_SETS: tl.constexpr, STACK: tl.constexpr, WORDS: tl.constexpr
):
    """Store the chunk ``frame[line, 8]`` in every frame of the row whose bit is set in ``targets``."""
    if targets != 0:
        words = frame.to(tl.int64, bitcast=True)
        # not unrolled: Triton would rearrange the words among threads, through shared memory, for every target
        while targets != 0:
            i = _lowest_bit(targets)
            to = (((i // STACK) * n_rows + row) * STACK + i % STACK).to(tl.int64) * WORDS
            tl.store(out_ptr + to + word, words, mask=inside)
            targets &= targets - 1


@triton.jit
def _apply_difference(heap_ptr, words_ptr, at, frame, groups):
    """The words of ``frame[line, 8]`` after the difference at ``at``.

    Each section begins where the count of set bits of the one before it says.
    """
    line = tl.arange(0, _LINES)
    group_bit = (groups >> (line >> 3)) & 1
    nth = popcount(groups & ((1 << (line >> 3)) - 1))
    group_mask = tl.load(heap_ptr + at + nth, mask=group_bit > 0, other=0).to(tl.int32)
    line_bit = (group_mask >> (line & 7)) & 1
    rank = tl.cumsum(line_bit, axis=0)
    at += popcount(groups)
    line_masks = tl.load(heap_ptr + at + rank - 1, mask=line_bit > 0, other=0).to(tl.int32)
    at += tl.sum(line_bit, axis=0)
    count = popcount(line_masks)
    rank = tl.cumsum(count, axis=0) - count
    # up to eight masks of bytes per line
    masks = load_word(words_ptr, at + rank, count > 0) & low_bits(8 * count)
    at += tl.sum(count, axis=0)
    count = popcount64(masks)
    rank = tl.cumsum(count, axis=0) - count
    values_at = at + (tl.sum(count, axis=0) + 7) // 8
    fresh = load_word(words_ptr, at + (rank >> 3), count > 0) >> (rank & 7).to(tl.uint64)
    n_fresh = popcount64(fresh & low_bits(count))
    if (tl.max(count, axis=0) <= 56) & (tl.max(n_fresh, axis=0) <= 7):
        # the fresh values of every line, and the one before them, are in one word
        used = tl.cumsum(n_fresh, axis=0) - n_fresh
        values = load_word(words_ptr, values_at + used - 1, count > 0)
        frame = _insert_few(frame, line_masks, masks, fresh, values)
    else:
        frame = _insert_values(heap_ptr, words_ptr, frame, line_masks, masks, rank, at, values_at)
    return frame


@triton.jit
def _word_masks(line_masks, masks):
    """The mask of changed bytes of each word, and how many values of its line come before it."""
    bit = tl.arange(0, 8)[None, :]
    nth = popcount(line_masks[:, None] & ((1 << bit) - 1))
    mask = ((masks[:, None] >> (8 * nth).to(tl.uint64)) & 255).to(tl.int32) * ((line_masks[:, None] >> bit) & 1)
    return mask, popcount64(masks[:, None] & low_bits(8 * nth))


@triton.jit
def _pick(frame, values, mask, fresh, source):
    """``frame`` with the changed bytes replaced by bytes of ``values``, each fresh one from the next byte."""
    picks = tl.zeros([_LINES, 8], tl.int32)
    for byte in tl.static_range(8):
        has = (mask >> byte) & 1
        source += has & fresh
        fresh = fresh >> has
        # source may be -1 before a word's first value; that byte is masked out below
        picks |= (source & 7) << (4 * byte)
    changed = spread_bits(mask)
    return (frame & ~changed) | (pick_bytes(values, picks) & changed)


@triton.jit
def _insert_few(frame, line_masks, masks, fresh, values):
    """`_insert_values` where the values of a line are given, after the one before them."""
    mask, before = _word_masks(line_masks, masks)
    source = popcount64(fresh[:, None] & low_bits(before))
    of_word = (fresh[:, None] >> before.to(tl.uint64)).to(tl.int32) & ((1 << popcount(mask)) - 1)
    return _pick(frame, values[:, None], mask, of_word, source)


@triton.jit
def _insert_values(heap_ptr, words_ptr, frame, line_masks, masks, rank, fresh_at, values_at):
    """``frame[line, 8]`` with the changed bytes replaced; a value that is not fresh repeats the one before it."""
    mask, before = _word_masks(line_masks, masks)
    rank = rank[:, None] + before
    fresh = tl.load(heap_ptr + fresh_at + (rank >> 3), mask=mask > 0, other=0).to(tl.int32)
    # the bits of a word may continue in the next byte, which exists: values follow
    fresh |= tl.load(heap_ptr + fresh_at + (rank >> 3) + 1, mask=mask > 0, other=0).to(tl.int32) << 8
    fresh = (fresh >> (rank & 7)) & ((1 << popcount(mask)) - 1)
    n_fresh = popcount(fresh)
    fresh_of_line = tl.sum(n_fresh, axis=1)
    used = (tl.cumsum(fresh_of_line, axis=0) - fresh_of_line)[:, None]
    used += tl.cumsum(n_fresh, axis=1) - n_fresh
    # if the first value repeats the one before it, the loaded values begin with that one
    values = load_word(words_ptr, values_at + used - 1 + (fresh & 1), mask > 0)
    return _pick(frame, values, mask, fresh, -(fresh & 1))
