"""The kernel that decodes frames: `kernels.delta_torch.read_rows_reference` on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from sb3_extra_buffers.kernels.bits_triton import (
    load_word,
    low_bits,
    pick_bytes,
    popcount,
    popcount64,
    spread_bits,
    sum_pair,
)
from sb3_extra_buffers.kernels.columns_triton import gather_columns

__all__ = ["read_kernel"]

_FAR = tl.constexpr(1 << 30)  # larger than any segment


@triton.jit(do_not_specialize=["n_rows", "capacity"])
def read_kernel(
    out_ptr,  # int64 [set, row, stack, word]
    # tables of `DeviceTables`
    heap_ptr,  # uint8 [capacity]
    heap_words_ptr,  # int64, the same memory
    stage_ptr,  # uint8 [stream * stage_bytes]
    stage_words_ptr,  # int64, the same memory
    starts_ptr,  # int64 [segment]
    keyframes_ptr,  # int32 [segment]
    keyframe_rows_ptr,  # int64 [keyframe, word]
    frame_ids_ptr,  # int32 [obs_index, stack]
    # the batch
    indices_ptr,  # int64 [set, row]
    # `columns_triton.gather_columns`
    floats_ptr,
    actions_ptr,
    numbers_ptr,
    records_ptr,
    n_rows,
    capacity,
    N_SETS: tl.constexpr,
    STACK: tl.constexpr,
    TARGETS: tl.constexpr,  # N_SETS * STACK, and the next power of two
    PER: tl.constexpr,
    SIZE: tl.constexpr,
    N_TOPS: tl.constexpr,
    TOPS: tl.constexpr,  # N_TOPS, and the next power of two
    WORDS: tl.constexpr,
    KEYFRAME_WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    OWN: tl.constexpr,
    ACTION: tl.constexpr,  # 0: no columns
    ACTION2: tl.constexpr,
    ACTION_AT: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Decode ``OWN`` lines (of 64 bytes) of a row's frames; the grid is ``[row, PARTS, chunk of lines]``.

    The segments of a row are dealt to its ``PARTS`` programs, so that a row with frames in two segments is read in
    parallel. A program keeps its lines in registers, decodes a segment from the front and stores each frame that the
    row needs. Indices may be in pinned host memory: reading them from here is faster than a copy.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    chunk = tl.program_id(2)
    target = tl.arange(0, TARGETS)
    is_target = target < N_SETS * STACK
    index = tl.load(indices_ptr + (target // STACK).to(tl.int64) * n_rows + row, mask=is_target, other=0)
    ids = tl.load(frame_ids_ptr + index * STACK + target % STACK, mask=is_target, other=0) - 1
    word = (chunk * OWN + tl.arange(0, OWN))[:, None] * 8 + tl.arange(0, 8)[None, :]
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
        is_zero = tl.sum(tl.where(ids < 0, 1 << target, 0), axis=0)
        zeros = tl.zeros([OWN, 8], tl.uint64)
        _store_frame(out_ptr, zeros, is_zero, row, n_rows, word, inside, N_SETS, STACK, WORDS)
    segments = tl.where(ids >= 0, ids // PER, _FAR)
    segment = tl.min(segments, axis=0)
    turn = 0
    while segment < _FAR:
        if turn % PARTS == part:
            _read_segment(
                out_ptr, heap_ptr, heap_words_ptr, stage_ptr, stage_words_ptr, tl.load(starts_ptr + segment),
                tl.load(keyframes_ptr + segment).to(tl.int64), keyframe_rows_ptr,
                tl.where(segments == segment, ids % PER, -1), row, n_rows, chunk, capacity, word, inside,
                N_SETS, STACK, TARGETS, PER, SIZE, N_TOPS, TOPS, WORDS, KEYFRAME_WORDS, OWN,
            )  # fmt: skip
        turn += 1
        segment = tl.min(tl.where(segments > segment, segments, _FAR), axis=0)


@triton.jit
def _read_segment(
    out_ptr, heap_ptr, heap_words_ptr, stage_ptr, stage_words_ptr, start, keyframe, keyframe_rows_ptr,
    positions,  # [TARGETS]: of the row's frames in this segment, -1 for frames of other segments
    row, n_rows, chunk, capacity, word, inside,
    N_SETS: tl.constexpr, STACK: tl.constexpr, TARGETS: tl.constexpr, PER: tl.constexpr, SIZE: tl.constexpr,
    N_TOPS: tl.constexpr, TOPS: tl.constexpr, WORDS: tl.constexpr, KEYFRAME_WORDS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Decode a segment up to the last frame that the row needs, and store those it needs."""
    target = tl.arange(0, TARGETS)
    is_open = start < 0
    at = tl.where(is_open, -1 - start, start % capacity)
    payload = tl.where(is_open, stage_ptr, heap_ptr)
    words_ptr = tl.where(is_open, stage_words_ptr, heap_words_ptr)
    lengths = payload + at + 2
    at += 2 + 2 * tl.where(is_open, PER, tl.load(payload + at + 1).to(tl.int32))
    in_keyframe = word < tl.where(keyframe >= 0, WORDS, 0)
    frame = tl.load(keyframe_rows_ptr + keyframe * KEYFRAME_WORDS + word, mask=in_keyframe, other=0)
    frame = frame.to(tl.uint64, bitcast=True)
    for position in range(tl.max(positions, axis=0) + 1):
        length = tl.load(lengths + 2 * position).to(tl.int32)
        length += tl.load(lengths + 2 * position + 1).to(tl.int32) << 8
        if length == SIZE:
            frame = load_word(words_ptr, at + 8 * word, inside)
        elif length > 0:
            frame = _apply_difference(payload, words_ptr, at, frame, chunk, N_TOPS, TOPS, OWN)
        at += length
        is_wanted = tl.sum(tl.where(positions == position, 1 << target, 0), axis=0)
        _store_frame(out_ptr, frame, is_wanted, row, n_rows, word, inside, N_SETS, STACK, WORDS)


@triton.jit
def _store_frame(
    out_ptr, frame, targets, row, n_rows, word, inside, N_SETS: tl.constexpr, STACK: tl.constexpr, WORDS: tl.constexpr
):
    """Store ``frame[OWN, 8]`` as every frame of the row whose bit is set in ``targets``."""
    for i in tl.static_range(N_SETS * STACK):
        if (targets >> i) & 1:
            to = (((i // STACK) * n_rows + row) * STACK + i % STACK).to(tl.int64) * WORDS
            # cast here and not once for all: Triton 3.6 fails to compile that
            tl.store(out_ptr + to + word, frame.to(tl.int64, bitcast=True), mask=inside)


@triton.jit
def _apply_difference(
    payload, words_ptr, at, frame, chunk, N_TOPS: tl.constexpr, TOPS: tl.constexpr, OWN: tl.constexpr
):
    """The words of ``frame[OWN, 8]`` after the difference at ``at``.

    Each section of a difference begins where the count of set bits of the one before it says, and what belongs to these
    lines begins where the count of set bits before them says.
    """
    top = tl.arange(0, TOPS)
    tops = tl.load(payload + at + top, mask=top < N_TOPS, other=0).to(tl.int32)
    first_group = chunk * (OWN // 8)
    before_bits = (1 << tl.minimum(tl.maximum(first_group - 8 * top, 0), 8)) - 1
    n_groups, groups_before = sum_pair(popcount(tops), popcount(tops & before_bits))
    groups = tl.load(payload + at + first_group // 8).to(tl.int32) >> (first_group % 8)
    groups &= (1 << (OWN // 8)) - 1
    if (groups > 0) & (first_group < 8 * N_TOPS):
        line_masks, lines_at, n_lines, lines_before = _line_masks(
            payload, at + N_TOPS, groups, n_groups, groups_before, TOPS, OWN
        )
        masks, words_at, n_words, words_before = _byte_masks(
            payload, words_ptr, lines_at, n_lines, lines_before, line_masks, TOPS
        )
        fresh_at, n_values, values_before, fresh_before = _count_values(
            words_ptr, words_at, n_words, words_before, TOPS
        )
        values_at = fresh_at + (n_values + 7) // 8
        frame = _insert_values(
            payload, words_ptr, frame, line_masks, masks, fresh_at, values_at, values_before, fresh_before, OWN
        )
    return frame


@triton.jit
def _line_masks(payload, groups_at, groups, n_groups, groups_before, TOPS: tl.constexpr, OWN: tl.constexpr):
    """Which words change, as a mask per line; where that section begins, its length, and the masks before ours."""
    line = tl.arange(0, OWN)
    group_bit = (groups >> (line >> 3)) & 1
    nth = popcount(groups & ((1 << (line >> 3)) - 1))
    group_mask = tl.load(payload + groups_at + groups_before + nth, mask=group_bit > 0, other=0).to(tl.int32)
    i = tl.arange(0, 8 * TOPS)
    count = popcount(tl.load(payload + groups_at + i, mask=i < n_groups, other=0).to(tl.int32))
    n_lines, lines_before = sum_pair(count, tl.where(i < groups_before, count, 0))
    lines_at = groups_at + n_groups
    line_bit = (group_mask >> (line & 7)) & 1
    rank = lines_before + tl.cumsum(line_bit, axis=0) - line_bit
    line_masks = tl.load(payload + lines_at + rank, mask=line_bit > 0, other=0).to(tl.int32)
    return line_masks, lines_at, n_lines, lines_before


@triton.jit
def _byte_masks(payload, words_ptr, lines_at, n_lines, lines_before, line_masks, TOPS: tl.constexpr):
    """Which bytes change, as up to eight packed masks per line; then as `_line_masks` returns."""
    i = tl.arange(0, 64 * TOPS)
    count = popcount(tl.load(payload + lines_at + i, mask=i < n_lines, other=0).to(tl.int32))
    n_words, words_before = sum_pair(count, tl.where(i < lines_before, count, 0))
    words_at = lines_at + n_lines
    count = popcount(line_masks)
    rank = words_before + tl.cumsum(count, axis=0) - count
    masks = load_word(words_ptr, words_at + rank, count > 0) & low_bits(8 * count)
    return masks, words_at, n_words, words_before


@triton.jit
def _count_values(words_ptr, words_at, n_words, words_before, TOPS: tl.constexpr):
    """Where the fresh bits begin, how many values change, and how many values and fresh ones come before ours."""
    i = tl.arange(0, 64 * TOPS)
    masks = load_word(words_ptr, words_at + 8 * i, 8 * i < n_words)
    n_values, values_before = sum_pair(
        popcount64(masks & low_bits(8 * (n_words - 8 * i))), popcount64(masks & low_bits(8 * (words_before - 8 * i)))
    )
    fresh_at = words_at + n_words
    fresh = load_word(words_ptr, fresh_at + 8 * i, 64 * i < values_before)
    fresh_before = tl.sum(popcount64(fresh & low_bits(values_before - 64 * i)), axis=0)
    return fresh_at, n_values, values_before, fresh_before


@triton.jit
def _insert_values(
    payload, words_ptr, frame, line_masks, masks, fresh_at, values_at, values_before, fresh_before, OWN: tl.constexpr
):
    """``frame[OWN, 8]`` with the changed bytes replaced; a value that is not fresh repeats the one before it."""
    bit = tl.arange(0, 8)[None, :]
    count = popcount64(masks)
    rank = values_before + tl.cumsum(count, axis=0) - count
    word_bit = (line_masks[:, None] >> bit) & 1
    nth = popcount(line_masks[:, None] & ((1 << bit) - 1))
    mask = ((masks[:, None] >> (8 * nth).to(tl.uint64)) & 255).to(tl.int32) * word_bit
    rank = rank[:, None] + popcount64(masks[:, None] & low_bits(8 * nth))
    fresh = tl.load(payload + fresh_at + (rank >> 3), mask=mask > 0, other=0).to(tl.int32)
    # the bits of a word may continue in the next byte, which exists: values follow
    fresh |= tl.load(payload + fresh_at + (rank >> 3) + 1, mask=mask > 0, other=0).to(tl.int32) << 8
    fresh = (fresh >> (rank & 7)) & ((1 << popcount(mask)) - 1)
    n_fresh = popcount(fresh)
    fresh_of_line = tl.sum(n_fresh, axis=1)
    used = (fresh_before + tl.cumsum(fresh_of_line, axis=0) - fresh_of_line)[:, None]
    used += tl.cumsum(n_fresh, axis=1) - n_fresh
    # if the first value repeats the one before it, the loaded values begin with that one
    values = load_word(words_ptr, values_at + used - 1 + (fresh & 1), mask > 0)
    source = -(fresh & 1)
    picks = tl.zeros([OWN, 8], tl.int32)
    for byte in tl.static_range(8):
        has = (mask >> byte) & 1
        source += has & fresh
        fresh = fresh >> has
        # source may be -1 before a word's first value; that byte is masked out below
        picks |= (source & 7) << (4 * byte)
    changed = spread_bits(mask)
    return (frame & ~changed) | (pick_bytes(values, picks) & changed)
