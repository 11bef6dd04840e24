"""`kernels.delta_torch` on a GPU: one program writes a stream's step, one reads a part of a row's frames.

Frames are handled as 64-bit words. Nothing comes back to the host: a heap that is full is noted in a counter.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sb3_extra_buffers.codecs.delta import BLOCK, padded, top_bytes
from sb3_extra_buffers.kernels import delta_torch as plain
from sb3_extra_buffers.kernels.delta_torch import DeviceTables, FrameShape, Write, capacity_of
from sb3_extra_buffers.kernels.launcher import Launcher

__all__ = ["Columns", "DeviceKernels", "make_job"]

# programs to a row and each of its chunks of lines, lines to a chunk, warps to a program; measured
_PARTS, _OWN, _READ_WARPS, _WRITE_WARPS = 2, 32, 2, 16

_OPEN = tl.constexpr(plain.OPEN)
_OPENED = tl.constexpr(plain.OPENED)
_END = tl.constexpr(plain.END)
_COUNT = tl.constexpr(plain.COUNT)
_WALK = tl.constexpr(plain.CHAIN_BYTES)
_PLACE = tl.constexpr(plain.PLACE)
_COST = tl.constexpr(plain.COST)
_LOST = tl.constexpr(plain.LOST)
_HELD = tl.constexpr(plain.HELD)
_FLOOR = tl.constexpr(plain.FLOOR)
_N_COLUMNS = tl.constexpr(plain.N_COLUMNS)
_N_TRIED = tl.constexpr(plain.N_TRIED)
_NEEDED = tl.constexpr(plain.NEEDED)
_SPARE = tl.constexpr(plain.SPARE)
_NOWHERE = tl.constexpr(plain.NOWHERE)
_NONE = tl.constexpr(plain.NONE)
_SAME = tl.constexpr(plain.SAME)
_MOVED = tl.constexpr(plain.MOVED)
_FAR = tl.constexpr(1 << 30)


# Triton has no word for some things that the GPU does in one instruction; its interpreter does them step by step
_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")


@triton.jit
def _ones(mask):
    """Set bits of a byte."""
    if _COMPILED:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [mask], tl.int32, is_pure=True, pack=1)
    mask = mask - ((mask >> 1) & 0x55)
    mask = (mask & 0x33) + ((mask >> 2) & 0x33)
    return (mask + (mask >> 4)) & 0x0F


@triton.jit
def _ones64(mask):
    """Set bits of an unsigned 64-bit word."""
    if _COMPILED:
        return tl.inline_asm_elementwise("popc.b64 $0, $1;", "=r,l", [mask], tl.int32, is_pure=True, pack=1)
    mask = mask - ((mask >> 1) & 0x5555555555555555)
    mask = (mask & 0x3333333333333333) + ((mask >> 2) & 0x3333333333333333)
    mask = (mask + (mask >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((mask * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _low64(count):
    """A word whose lowest ``count`` bits are set, none (or less) to all 64."""
    count = tl.minimum(tl.maximum(count, 0), 64)
    if _COMPILED:
        # a shift by all 64 bits leaves nothing in PTX
        return tl.inline_asm_elementwise(
            "{ .reg .b64 t; shl.b64 t, 0xFFFFFFFFFFFFFFFF, $1; not.b64 $0, t; }",
            "=l,r", [count], tl.uint64, is_pure=True, pack=1,
        )  # fmt: skip
    half = (count >> 1).to(tl.uint64)
    nothing = half ^ half
    return ~((~nothing << half) << (count.to(tl.uint64) - half))


@triton.jit
def _window(words_ptr, at, mask):
    """Eight bytes from ``at`` on, wherever that lies."""
    low = tl.load(words_ptr + (at >> 3), mask=mask, other=0).to(tl.uint64, bitcast=True)
    high = tl.load(words_ptr + (at >> 3) + 1, mask=mask, other=0).to(tl.uint64, bitcast=True)
    shift = (at & 7).to(tl.int32) * 8
    if _COMPILED:
        return tl.inline_asm_elementwise(
            """{ .reg .b64 a, b; .reg .u32 s; shr.b64 a, $1, $3; sub.u32 s, 64, $3; shl.b64 b, $2, s;
            or.b64 $0, a, b; }""",
            "=l,l,l,r", [low, high, shift], tl.uint64, is_pure=True, pack=1,
        )  # fmt: skip
    return (low >> shift.to(tl.uint64)) | ((high << 1) << (63 - shift).to(tl.uint64))


@triton.jit
def _pick(values, picks):
    """A word of four bytes of ``values`` in each half: nibble ``b`` of ``picks`` names the one for byte ``b``."""
    if _COMPILED:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 l, h, p, q; mov.b64 {l, h}, $1; shr.u32 q, $2, 16; prmt.b32 p, l, h, $2;
            prmt.b32 q, l, h, q; mov.b64 $0, {p, q}; }""",
            "=l,l,r", [values, picks], tl.uint64, is_pure=True, pack=1,
        )  # fmt: skip
    word = values ^ values
    for byte in tl.static_range(8):
        place = ((picks >> (4 * byte)) & 7).to(tl.uint64)
        word |= ((values >> (8 * place)) & 255) << (8 * byte)
    return word


@triton.jit
def _spread(mask):
    """A word with all bits of byte ``b`` set where bit ``b`` of ``mask`` is."""
    word = (mask.to(tl.uint64) * 0x0101010101010101) & 0x8040201008040201
    word = ((word + 0x7F7F7F7F7F7F7F7F) >> 7) & 0x0101010101010101
    return word * 255


@triton.jit
def _both(total, before):
    """The sums of two counts, in one go."""
    packed = tl.sum(total.to(tl.uint32) + (before.to(tl.uint32) << 16), axis=0)
    return (packed & 0xFFFF).to(tl.int32), (packed >> 16).to(tl.int32)


# ---- reading ----


@triton.jit(do_not_specialize=["n_rows", "capacity"])
def _read_kernel(
    out_ptr,  # int64 [set, row, stack, word]
    heap_ptr,  # uint8 [capacity]
    heap_words_ptr,  # int64, the same memory
    stage_ptr,  # uint8 [stream * room]
    stage_words_ptr,  # int64, the same memory
    starts_ptr,  # int64 [segment]
    keyframes_ptr,  # int32 [segment]
    keyframe_rows_ptr,  # int64 [keyframe, word]
    frame_ids_ptr,  # int32 [cell, stack]
    indices_ptr,  # int64 [set, row]
    floats_ptr,  # float32 [2, row]: where numbers of the rows go, and where they come from
    floats_from_ptr,
    actions_ptr,  # uint8 [row, ACTION]
    actions_from_ptr,
    n_rows,
    capacity,
    N_SETS: tl.constexpr,
    STACK: tl.constexpr,
    TARGETS: tl.constexpr,
    PER: tl.constexpr,
    SIZE: tl.constexpr,
    N_TOPS: tl.constexpr,
    TOPS: tl.constexpr,
    WORDS: tl.constexpr,
    KEYFRAME_WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    OWN: tl.constexpr,
    ACTION: tl.constexpr,
    ACTION2: tl.constexpr,
):
    """Rebuild ``OWN`` lines of a row's frames: walk a segment, and store each frame that is wanted as it comes by.

    A segment of a row is one program's, so that a row whose frames lie in two of them is read by two at once. The lines
    stay in registers; with one warp to a program, nothing has to wait for anything but memory. Cells, and what else
    comes with a row, may lie in pinned memory of the host: reading that takes less than a copy would.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    chunk = tl.program_id(2)
    target = tl.arange(0, TARGETS)
    wanted = target < N_SETS * STACK
    index = tl.load(indices_ptr + (target // STACK).to(tl.int64) * n_rows + row, mask=wanted, other=0)
    ids = tl.load(frame_ids_ptr + index * STACK + target % STACK, mask=wanted, other=0) - 1
    line = tl.arange(0, OWN)
    word = (chunk * OWN + line)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = word < WORDS
    if part == 0:
        # a constant, so it is not for the other condition to see
        if ACTION > 0:  # noqa: SIM102
            if chunk == 0:
                byte = tl.arange(0, ACTION2)
                some = byte < ACTION
                action = tl.load(actions_from_ptr + row * ACTION + byte, mask=some, other=0)
                tl.store(actions_ptr + row * ACTION + byte, action, mask=some)
                for i in tl.static_range(2):
                    number = tl.load(floats_from_ptr + i * n_rows.to(tl.int64) + row)
                    tl.store(floats_ptr + i * n_rows.to(tl.int64) + row, number)
        blank = tl.sum(tl.where(ids < 0, 1 << target, 0), axis=0)
        for i in tl.static_range(N_SETS * STACK):
            if (blank >> i) & 1:
                to = (((i // STACK) * n_rows + row) * STACK + i % STACK).to(tl.int64) * WORDS
                tl.store(out_ptr + to + word, tl.zeros([OWN, 8], tl.int64), mask=inside)
    segments = tl.where(ids >= 0, ids // PER, _FAR)
    segment = tl.min(segments, axis=0)
    turn = 0
    while segment < _FAR:
        if turn % PARTS == part:
            depths = tl.where(segments == segment, ids % PER, -1)
            deepest = tl.max(depths, axis=0)
            start = tl.load(starts_ptr + segment)
            opened = start < 0
            at = tl.where(opened, -1 - start, start % capacity)
            payload = tl.where(opened, stage_ptr, heap_ptr)
            words = tl.where(opened, stage_words_ptr, heap_words_ptr)
            table = payload + at + 2
            at += 2 + 2 * tl.where(opened, PER, tl.load(payload + at + 1).to(tl.int32))
            keyframe = tl.load(keyframes_ptr + segment).to(tl.int64)
            known = word < tl.where(keyframe >= 0, WORDS, 0)
            frame = tl.load(keyframe_rows_ptr + keyframe * KEYFRAME_WORDS + word, mask=known, other=0).to(
                tl.uint64, bitcast=True
            )
            for position in range(deepest + 1):
                length = tl.load(table + 2 * position).to(tl.int32)
                length += tl.load(table + 2 * position + 1).to(tl.int32) << 8
                if length == SIZE:
                    frame = _window(words, at + 8 * word, inside)
                elif length > 0:
                    frame = _apply(payload, words, at, frame, chunk, N_TOPS, TOPS, OWN)
                at += length
                here = tl.sum(tl.where(depths == position, 1 << target, 0), axis=0)
                for i in tl.static_range(N_SETS * STACK):
                    if (here >> i) & 1:
                        to = (((i // STACK) * n_rows + row) * STACK + i % STACK).to(tl.int64) * WORDS
                        tl.store(out_ptr + to + word, frame.to(tl.int64, bitcast=True), mask=inside)
        turn += 1
        segment = tl.min(tl.where(segments > segment, segments, _FAR), axis=0)


@triton.jit
def _apply(payload, words_ptr, at, frame, chunk, N_TOPS: tl.constexpr, TOPS: tl.constexpr, OWN: tl.constexpr):
    """The words of ``frame[OWN, 8]`` after the difference at ``at``.

    Where each section begins follows from counting the set bits of the one before it, and what belongs to these lines
    from counting those before them. A line's eight masks of words, and a word's values, are read as one word each.
    """
    ALL: tl.constexpr = 64 * TOPS
    top = tl.arange(0, TOPS)
    tops = tl.load(payload + at + top, mask=top < N_TOPS, other=0).to(tl.int32)
    first_group = chunk * (OWN // 8)
    before_bits = (1 << tl.minimum(tl.maximum(first_group - 8 * top, 0), 8)) - 1
    n_groups, groups_before = _both(_ones(tops), _ones(tops & before_bits))
    mine = tl.load(payload + at + first_group // 8).to(tl.int32) >> (first_group % 8)
    mine &= (1 << (OWN // 8)) - 1
    if (mine > 0) & (first_group < 8 * N_TOPS):
        line = tl.arange(0, OWN)
        bit = tl.arange(0, 8)[None, :]
        group_bit = (mine >> (line >> 3)) & 1
        nth = _ones(mine & ((1 << (line >> 3)) - 1))
        groups_at = at + N_TOPS
        group_mask = tl.load(payload + groups_at + groups_before + nth, mask=group_bit > 0, other=0).to(tl.int32)
        i = tl.arange(0, 8 * TOPS)
        count = _ones(tl.load(payload + groups_at + i, mask=i < n_groups, other=0).to(tl.int32))
        n_lines, lines_before = _both(count, tl.where(i < groups_before, count, 0))
        lines_at = groups_at + n_groups
        line_bit = (group_mask >> (line & 7)) & 1
        rank = lines_before + tl.cumsum(line_bit, axis=0) - line_bit
        line_mask = tl.load(payload + lines_at + rank, mask=line_bit > 0, other=0).to(tl.int32)
        i = tl.arange(0, ALL)
        count = _ones(tl.load(payload + lines_at + i, mask=i < n_lines, other=0).to(tl.int32))
        n_words, words_before = _both(count, tl.where(i < lines_before, count, 0))
        words_at = lines_at + n_lines
        count = _ones(line_mask)
        rank = words_before + tl.cumsum(count, axis=0) - count
        masks = _window(words_ptr, words_at + rank, count > 0) & _low64(8 * count)
        some = _window(words_ptr, words_at + 8 * i, 8 * i < n_words)
        n_values, values_before = _both(
            _ones64(some & _low64(8 * (n_words - 8 * i))), _ones64(some & _low64(8 * (words_before - 8 * i)))
        )
        fresh_at = words_at + n_words
        values_at = fresh_at + (n_values + 7) // 8
        some = _window(words_ptr, fresh_at + 8 * i, 64 * i < values_before)
        fresh_before = tl.sum(_ones64(some & _low64(values_before - 64 * i)), axis=0)
        count = _ones64(masks)
        rank = values_before + tl.cumsum(count, axis=0) - count
        word_bit = (line_mask[:, None] >> bit) & 1
        nth = _ones(line_mask[:, None] & ((1 << bit) - 1))
        mask = ((masks[:, None] >> (8 * nth).to(tl.uint64)) & 255).to(tl.int32) * word_bit
        rank = rank[:, None] + _ones64(masks[:, None] & _low64(8 * nth))
        fresh = tl.load(payload + fresh_at + (rank >> 3), mask=mask > 0, other=0).to(tl.int32)
        # the bits of a word's values may go on in the next byte, which is there: values follow
        fresh |= tl.load(payload + fresh_at + (rank >> 3) + 1, mask=mask > 0, other=0).to(tl.int32) << 8
        fresh = (fresh >> (rank & 7)) & ((1 << _ones(mask)) - 1)
        n_fresh = _ones(fresh)
        of_line = tl.sum(n_fresh, axis=1)
        used = (fresh_before + tl.cumsum(of_line, axis=0) - of_line)[:, None] + tl.cumsum(n_fresh, axis=1) - n_fresh
        # where the first value repeats the one before, the window begins with that
        values = _window(words_ptr, values_at + used - 1 + (fresh & 1), mask > 0)
        place = -(fresh & 1)
        picks = tl.zeros([OWN, 8], tl.int32)
        for byte in tl.static_range(8):
            has = (mask >> byte) & 1
            place += has & fresh
            fresh = fresh >> has
            # before a word's first value the place may lie one short; that byte is not taken
            picks |= (place & 7) << (4 * byte)
        taken = _spread(mask)
        frame = (frame & ~taken) | (_pick(values, picks) & taken)
    return frame


# ---- writing ----


@triton.jit
def _sections(x, WORDS: tl.constexpr):
    """Masks of a difference: of bytes in a word, of words in a line, of lines in a group, of groups in a block."""
    masks = tl.zeros([WORDS], tl.int32)
    for byte in tl.static_range(8):
        masks |= (((x >> (8 * byte)) & 255) != 0).to(tl.int32) << byte
    weight = 1 << (tl.arange(0, 8)[None, :])
    lines = tl.sum(tl.reshape((masks != 0).to(tl.int32), [WORDS // 8, 8]) * weight, axis=1)
    groups = tl.sum(tl.reshape((lines != 0).to(tl.int32), [WORDS // 64, 8]) * weight, axis=1)
    tops = tl.sum(tl.reshape((groups != 0).to(tl.int32), [WORDS // 512, 8]) * weight, axis=1)
    return masks, lines, groups, tops


@triton.jit
def _bound(frame, keyframe_ptr, SIZE_WORDS: tl.constexpr, N_TOPS: tl.constexpr, WORDS: tl.constexpr):
    """The length of a difference if no value repeated the one before."""
    word = tl.arange(0, WORDS)
    x = frame ^ tl.load(keyframe_ptr + word, mask=word < SIZE_WORDS, other=0)
    masks, lines, groups, _tops = _sections(x, WORDS)
    n_values = tl.sum(_ones(masks), axis=0)
    n_masks = tl.sum((masks != 0).to(tl.int32), axis=0) + tl.sum((lines != 0).to(tl.int32), axis=0)
    n_masks += tl.sum((groups != 0).to(tl.int32), axis=0)
    return N_TOPS + n_masks + (n_values + 7) // 8 + n_values


@triton.jit
def _put_packed(target, masks):
    """Write the bytes that are not zero, one after the other; return how many."""
    some = (masks != 0).to(tl.int32)
    tl.store(target + tl.cumsum(some, axis=0) - some, masks.to(tl.uint8), mask=some > 0)
    return tl.sum(some, axis=0)


@triton.jit
def _encode(
    target, scratch, frame, reference, SIZE: tl.constexpr, N_TOPS: tl.constexpr, WORDS: tl.constexpr, STEP: tl.constexpr
):
    """Write the difference, or the frame itself where that is no longer; return the length."""
    masks, lines, groups, tops = _sections(frame ^ reference, WORDS)
    changed = _ones(masks)
    n_values = tl.sum(changed, axis=0)
    # what an earlier difference left there has been read by every thread
    tl.debug_barrier()
    rank = tl.cumsum(changed, axis=0) - changed
    for byte in tl.static_range(8):
        has = (masks >> byte) & 1
        tl.store(scratch + rank, ((frame >> (8 * byte)) & 255).to(tl.uint8), mask=has > 0)
        rank += has
    top = tl.arange(0, WORDS // 512)
    tl.store(target + top, tops.to(tl.uint8), mask=top < N_TOPS)
    at = N_TOPS + _put_packed(target + N_TOPS, groups)
    at += _put_packed(target + at, lines)
    at += _put_packed(target + at, masks)
    values_at = at + (n_values + 7) // 8
    tl.debug_barrier()
    n_fresh = 0
    for base in range(0, n_values, STEP):
        i = base + tl.arange(0, STEP)
        value = tl.load(scratch + i, mask=i < n_values, other=0)
        before = tl.load(scratch + i - 1, mask=(i > 0) & (i < n_values), other=0)
        fresh = (((value != before) | (i == 0)) & (i < n_values)).to(tl.int32)
        tl.store(target + values_at + n_fresh + tl.cumsum(fresh, axis=0) - fresh, value, mask=fresh > 0)
        packed = tl.sum(tl.reshape(fresh, [STEP // 8, 8]) * (1 << tl.arange(0, 8)[None, :]), axis=1)
        j = base // 8 + tl.arange(0, STEP // 8)
        tl.store(target + at + j, packed.to(tl.uint8), mask=8 * j < n_values)
        n_fresh += tl.sum(fresh, axis=0)
    length = tl.where(n_values > 0, values_at + n_fresh, 0)
    if length >= SIZE:
        tl.debug_barrier()
        _put_whole(target, frame, SIZE, WORDS)
        length = tl.full([], SIZE, tl.int32)
    return length


@triton.jit
def _put_whole(target, frame, SIZE: tl.constexpr, WORDS: tl.constexpr):
    word = tl.arange(0, WORDS)
    for byte in tl.static_range(8):
        position = 8 * word + byte
        tl.store(target + position, ((frame >> (8 * byte)) & 255).to(tl.uint8), mask=position < SIZE)


@triton.jit
def _copy(target, source, count, STEP: tl.constexpr):
    for base in range(0, count, STEP):
        i = base + tl.arange(0, STEP)
        tl.store(target + i, tl.load(source + i, mask=i < count, other=0), mask=i < count)


@triton.jit
def _hold(row_ptr, keyframe_refs_ptr, keyframe):
    """Make ``keyframe`` the stream's own; only once in a call, so that no one else loses what they may be using."""
    first = tl.load(row_ptr + _HELD)
    second = tl.load(row_ptr + _HELD + 1)
    dropped = tl.load(row_ptr + _HELD + 2)
    tl.debug_barrier()
    if dropped >= 0:
        tl.atomic_add(keyframe_refs_ptr + dropped, -1)
    tl.atomic_add(keyframe_refs_ptr + keyframe, 1)
    tl.store(row_ptr + _HELD + 2, second)
    tl.store(row_ptr + _HELD + 1, first)
    tl.store(row_ptr + _HELD, keyframe.to(tl.int64))
    tl.debug_barrier()


@triton.jit
def _spare(keyframe_refs_ptr, n_keyframes, stream, STEP: tl.constexpr):
    """How many keyframes are unused, and how far from the stream's number on the nearest is."""
    nearest = tl.full([], _FAR, tl.int32)
    spare = tl.full([], 0, tl.int32)
    for base in range(0, n_keyframes, STEP):
        keyframe = base + tl.arange(0, STEP)
        refs = tl.load(keyframe_refs_ptr + keyframe, mask=keyframe < n_keyframes, other=1, volatile=True)
        order = tl.where(refs == 0, (keyframe - stream % n_keyframes + n_keyframes) % n_keyframes, _FAR)
        nearest = tl.minimum(nearest, tl.min(order, axis=0))
        spare += tl.sum((refs == 0).to(tl.int32), axis=0)
    return spare, nearest


@triton.jit
def _claim(keyframe_refs_ptr, n_keyframes, stream, STEP: tl.constexpr):
    """An unused keyframe, with a reference taken; or -1."""
    found = tl.full([], -1, tl.int32)
    _n, nearest = _spare(keyframe_refs_ptr, n_keyframes, stream, STEP)
    while (nearest < _FAR) & (found < 0):
        candidate = (nearest + stream) % n_keyframes
        # someone else may have been faster
        if tl.atomic_cas(keyframe_refs_ptr + candidate, 0, 1) == 0:
            found = candidate.to(tl.int32)
        else:
            _n, nearest = _spare(keyframe_refs_ptr, n_keyframes, stream, STEP)
    return found


@triton.jit(do_not_specialize=["n_streams", "n_segments"])
def _write_kernel(
    job_ptr,  # int64: what `make_job` says
    frames_ptr,  # int64 [set, stream, stack, word]
    heap_ptr, stage_ptr, starts_ptr, lengths_ptr, keyframes_ptr, frame_ids_ptr, floors_ptr, streams_ptr,
    recent_ptr,  # int64 [stream, place, word]
    recent_ids_ptr, recent_segments_ptr,
    keyframe_rows_ptr,  # int64 [keyframe, word]
    keyframe_refs_ptr, published_ptr, counters_ptr, tails_ptr, scratch_ptr, report_ptr,
    n_streams,
    n_segments,  # of each stream
    N_SETS: tl.constexpr, STACK: tl.constexpr, PLACES: tl.constexpr, PLACES2: tl.constexpr,
    PER: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, ROOM: tl.constexpr,
    SIZE: tl.constexpr, N_TOPS: tl.constexpr, FRAME_WORDS: tl.constexpr, KEYFRAME_WORDS: tl.constexpr,
    WORDS: tl.constexpr, SCRATCH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    stream = tl.program_id(0)
    step = tl.load(job_ptr)
    oldest = tl.load(job_ptr + 1)
    parity = tl.load(job_ptr + 2).to(tl.int32)
    tail = tl.load(job_ptr + 3)
    capacity = tl.load(job_ptr + 4)
    n_keyframes = tl.load(job_ptr + 5).to(tl.int32)
    launch = tl.load(job_ptr + 6)
    stage = stage_ptr + stream.to(tl.int64) * ROOM
    row_ptr = streams_ptr + stream * _N_COLUMNS
    scratch = scratch_ptr + stream.to(tl.int64) * SCRATCH
    my_recent = recent_ptr + stream.to(tl.int64) * PLACES * KEYFRAME_WORDS
    word = tl.arange(0, WORDS)
    inside = word < FRAME_WORDS

    open_segment = tl.load(row_ptr + _OPEN).to(tl.int32)
    opened = tl.load(row_ptr + _OPENED).to(tl.int32)
    end = tl.load(row_ptr + _END).to(tl.int32)
    count = tl.load(row_ptr + _COUNT).to(tl.int32)
    walk = tl.load(row_ptr + _WALK).to(tl.int32)
    place = tl.load(row_ptr + _PLACE).to(tl.int32)
    floor = tl.load(row_ptr + _FLOOR).to(tl.int32)
    moved = tl.full([], 0, tl.int32)

    # what this step may refer to, and what may go now that its oldest one does
    places = tl.arange(0, PLACES2)
    ids = tl.load(recent_ids_ptr + stream * PLACES + places, mask=places < PLACES, other=-1)
    oldest_recent = tl.load(recent_segments_ptr + stream * PLACES + places, mask=places < PLACES, other=0)
    least = tl.min(tl.where(ids >= 0, oldest_recent, opened), axis=0)
    if tl.load(job_ptr + 8 + N_SETS + stream) > 0:
        # frames that nobody remembers may be among those of the row before
        last = tl.load(job_ptr + 7) + stream
        shown = tl.load(frame_ids_ptr + last * STACK + places, mask=places < STACK, other=0) - 1
        age = (opened - 1 - shown // PER) % n_segments
        age = tl.where(age < 0, age + n_segments, age)
        least = tl.minimum(least, tl.min(tl.where(shown >= 0, opened - 1 - age, opened), axis=0))
    tl.store(floors_ptr + step * n_streams + stream, least)
    tl.debug_barrier()
    new_floor = tl.load(floors_ptr + oldest * n_streams + stream)
    while floor < new_floor:
        dead = tl.load(keyframes_ptr + stream * n_segments + floor % n_segments)
        if dead >= 0:
            tl.atomic_add(keyframe_refs_ptr + dead, -1)
        floor += 1

    for k in range(N_SETS * STACK):
        which = k // STACK
        j = k % STACK
        relation = tl.load(job_ptr + 8 + N_SETS + which * n_streams + stream).to(tl.int32)
        given = (relation == _SAME) | ((relation == _MOVED) & (j < STACK - 1))
        at = ((which * n_streams + stream).to(tl.int64) * STACK + j) * FRAME_WORDS
        # frames that are given were not even sent
        frame = tl.load(frames_ptr + at + word, mask=word < tl.where(given, 0, FRAME_WORDS), other=0)
        frame_id = tl.full([], -1, tl.int32)
        if given:
            tl.debug_barrier()
            row_before = tl.load(job_ptr + 7 + which) + stream
            frame_id = tl.load(frame_ids_ptr + row_before * STACK + j + tl.where(relation == _MOVED, 1, 0)) - 1
        if tl.max((frame != 0).to(tl.int32), axis=0) > 0:
            frame_id = tl.full([], -2, tl.int32)
            for p in tl.static_range(PLACES):
                other = tl.load(my_recent + p * KEYFRAME_WORDS + word, mask=inside, other=0)
                known = tl.load(recent_ids_ptr + stream * PLACES + p)
                if (tl.max((frame != other).to(tl.int32), axis=0) == 0) & (known >= 0) & (frame_id == -2):
                    frame_id = known
        if frame_id == -2:
            if (open_segment >= 0) & ((count >= PER) | ((count >= LEAST) & (walk > MOST))):
                # move the open segment to the heap
                tl.debug_barrier()
                head = 2 + 2 * count
                length = head + end - (2 + 2 * PER)
                start = tl.full([], 0, tl.int64)
                fits = length <= capacity
                if fits:
                    start = tl.atomic_add(counters_ptr, length.to(tl.int64))
                    # what would be cut in two is laid past the seam
                    while start % capacity + length > capacity:
                        start = tl.atomic_add(counters_ptr, length.to(tl.int64))
                    fits = start + length - tail <= capacity
                if fits:
                    to = heap_ptr + start % capacity
                    _copy(to, stage, head, 64)
                    _copy(to + head, stage + 2 + 2 * PER, length - head, STEP)
                    tl.store(starts_ptr + open_segment, start)
                    tl.store(lengths_ptr + open_segment, length)
                else:
                    tl.atomic_add(counters_ptr + _NEEDED, length.to(tl.int64))
                open_segment = tl.full([], -1, tl.int32)
                tl.debug_barrier()
            if open_segment < 0:
                open_segment = (stream * n_segments + opened % n_segments).to(tl.int32)
                opened += 1
                count = tl.full([], 0, tl.int32)
                walk = tl.full([], 0, tl.int32)
                end = tl.full([], 2 + 2 * PER, tl.int32)
                tl.store(starts_ptr + open_segment, -1 - stream.to(tl.int64) * ROOM)
                tl.store(keyframes_ptr + open_segment, _NONE)
            length = tl.full([], 0, tl.int32)
            if count == 0:
                # the cheapest keyframe at hand, or a new one
                held = tl.load(row_ptr + _HELD).to(tl.int32)
                keyframe = held
                best = tl.full([], SIZE, tl.int32)
                cost = tl.load(row_ptr + _COST).to(tl.int32)
                lost = tl.load(row_ptr + _LOST).to(tl.int32)
                if keyframe >= 0:
                    best = _bound(
                        frame, keyframe_rows_ptr + keyframe.to(tl.int64) * KEYFRAME_WORDS, FRAME_WORDS, N_TOPS, WORDS
                    )
                if (keyframe < 0) | (4 * best > 5 * cost):
                    for i in range(tl.minimum(_N_TRIED, 2 * n_streams)):
                        other = tl.load(published_ptr + parity * 2 * n_streams + (2 * stream + i) % (2 * n_streams))
                        if (other >= 0) & (other != keyframe):
                            other_ptr = keyframe_rows_ptr + other.to(tl.int64) * KEYFRAME_WORDS
                            bound = _bound(frame, other_ptr, FRAME_WORDS, N_TOPS, WORDS)
                            # a keyframe in hand is worth more than an equal one elsewhere
                            if 8 * bound < 7 * best:
                                best = bound
                                keyframe = other
                if keyframe != held:
                    cost = best
                    lost = tl.full([], 0, tl.int32)
                cost = tl.minimum(cost, best)
                lost += best - cost
                if (keyframe < 0) | (2 * best > SIZE) | (lost > SIZE):
                    keyframe = tl.full([], -1, tl.int32)
                    if moved == 0:
                        keyframe = _claim(keyframe_refs_ptr, n_keyframes, stream, 256)
                    if keyframe >= 0:
                        new_ptr = keyframe_rows_ptr + keyframe.to(tl.int64) * KEYFRAME_WORDS
                        tl.store(new_ptr + word, frame, mask=inside)
                        _hold(row_ptr, keyframe_refs_ptr, keyframe)
                        moved = tl.full([], 1, tl.int32)
                        # until a first frame has been encoded against it, a quarter of a frame is what it should cost
                        tl.store(row_ptr + _COST, SIZE // 4)
                        tl.store(row_ptr + _LOST, 0)
                        tl.store(keyframes_ptr + open_segment, keyframe)
                    else:
                        _put_whole(stage + end, frame, SIZE, WORDS)
                        length = tl.full([], SIZE, tl.int32)
                else:
                    if (keyframe != held) & (moved == 0):
                        _hold(row_ptr, keyframe_refs_ptr, keyframe)
                        moved = tl.full([], 1, tl.int32)
                        held = keyframe
                    if keyframe == held:
                        tl.store(row_ptr + _COST, cost.to(tl.int64))
                        tl.store(row_ptr + _LOST, lost.to(tl.int64))
                    tl.store(keyframes_ptr + open_segment, keyframe)
                    tl.atomic_add(keyframe_refs_ptr + keyframe, 1)
                    keyframe_ptr = keyframe_rows_ptr + keyframe.to(tl.int64) * KEYFRAME_WORDS
                    reference = tl.load(keyframe_ptr + word, mask=inside, other=0)
                    length = _encode(stage + end, scratch, frame, reference, SIZE, N_TOPS, WORDS, STEP)
            else:
                before = (place + PLACES - 1) % PLACES
                reference = tl.load(my_recent + before * KEYFRAME_WORDS + word, mask=inside, other=0)
                length = _encode(stage + end, scratch, frame, reference, SIZE, N_TOPS, WORDS, STEP)
            frame_id = open_segment * PER + count
            tl.debug_barrier()
            tl.store(my_recent + place * KEYFRAME_WORDS + word, frame, mask=inside)
            tl.store(recent_ids_ptr + stream * PLACES + place, frame_id)
            tl.store(recent_segments_ptr + stream * PLACES + place, opened - 1)
            zero = tl.full([], 0, tl.int32)
            tl.store(stage, zero.to(tl.uint8))
            tl.store(stage + 1, (count + 1).to(tl.uint8))
            tl.store(stage + 2 + 2 * count, (length & 255).to(tl.uint8))
            tl.store(stage + 3 + 2 * count, (length >> 8).to(tl.uint8))
            tl.debug_barrier()
            place = (place + 1) % PLACES
            end += length
            walk += tl.where(length < SIZE, length, 0)
            count += 1
        index = tl.load(job_ptr + 8 + which) + stream
        tl.store(frame_ids_ptr + index * STACK + j, frame_id + 1)

    tl.store(row_ptr + _OPEN, open_segment.to(tl.int64))
    tl.store(row_ptr + _OPENED, opened.to(tl.int64))
    tl.store(row_ptr + _END, end.to(tl.int64))
    tl.store(row_ptr + _COUNT, count.to(tl.int64))
    tl.store(row_ptr + _WALK, walk.to(tl.int64))
    tl.store(row_ptr + _PLACE, place.to(tl.int64))
    tl.store(row_ptr + _FLOOR, floor.to(tl.int64))
    tl.debug_barrier()
    published = published_ptr + (1 - parity) * 2 * n_streams + 2 * stream
    tl.store(published, tl.load(row_ptr + _HELD).to(tl.int32))
    tl.store(published + 1, tl.load(row_ptr + _HELD + 1).to(tl.int32))
    needed_from = tl.full([], _NOWHERE, tl.int64)
    if floor < opened:
        start = tl.load(starts_ptr + stream * n_segments + floor % n_segments)
        if start >= 0:
            needed_from = start
    tl.store(tails_ptr + stream, needed_from)
    spare, _nearest = _spare(keyframe_refs_ptr, n_keyframes, stream, 256)
    tl.store(counters_ptr + _SPARE, spare.to(tl.int64))
    # what the host may look at without waiting: this launch's number comes last
    tl.store(report_ptr + 4 * stream, tl.atomic_add(counters_ptr, 0))
    tl.store(report_ptr + 4 * stream + 1, needed_from)
    tl.store(report_ptr + 4 * stream + 2, spare.to(tl.int64))
    tl.debug_barrier()
    tl.store(report_ptr + 4 * stream + 3, launch)


def make_job(tables: DeviceTables, write: Write, launch: int, n_streams: int) -> list[int]:
    """What a write is told."""
    return [
        write.step, write.oldest, write.parity, write.tail, capacity_of(tables), tables.keyframe_refs.numel(), launch,
        write.last, *write.indices, *(write.relations or [0] * (len(write.indices) * n_streams)),
    ]  # fmt: skip


class Columns(NamedTuple):
    """What else comes with the rows of a batch, and where it goes."""

    floats: torch.Tensor  # float32 [2, row, ...]
    floats_from: torch.Tensor
    actions: torch.Tensor  # [row, ...]
    actions_from: torch.Tensor


class DeviceKernels:
    """The kernels bound to one set of tables, so that a call has little to do but start them."""

    def __init__(self, tables: DeviceTables, shape: FrameShape) -> None:
        self.tables, self.shape = tables, shape
        words = torch.int64
        heap, stage, keyframe_rows = tables.heap.view(words), tables.stage.view(words), tables.keyframe_rows.view(words)
        size, stack = shape.frame_bytes, shape.stack
        n_tops, frame_words = top_bytes(size), -(-size // 8)
        keyframe_words = shape.keyframe_bytes // 8
        self._capacity = capacity_of(tables)
        read_tables = (
            tables.heap, heap, tables.stage, stage, tables.starts, tables.keyframes, keyframe_rows, tables.frame_ids,
        )  # fmt: skip
        tops = triton.next_power_of_2(n_tops)
        self._read_sizes = (shape.per_segment, size, n_tops, tops, frame_words, keyframe_words, _PARTS, _OWN)
        self._n_chunks = -(-frame_words // (8 * _OWN))
        write_tables = (
            tables.heap, tables.stage, tables.starts, tables.lengths, tables.keyframes, tables.frame_ids, tables.floors,
            tables.streams, tables.recent.view(words), tables.recent_ids, tables.recent_segments, keyframe_rows,
            tables.keyframe_refs, tables.published, tables.counters, tables.tails, tables.scratch,
        )  # fmt: skip
        self._write_sizes = (
            stack, shape.places, triton.next_power_of_2(shape.places), shape.per_segment, shape.least_frames,
            shape.max_chain_bytes, shape.room, size, n_tops, frame_words, keyframe_words,
            triton.next_power_of_2(padded(size) // 8), tables.scratch.shape[1], BLOCK // 4,
        )  # fmt: skip
        device, key = tables.frame_ids.device, (size, stack, shape.per_segment, self._capacity >> 31 > 0)
        number, byte = torch.float32, torch.uint8
        self._read = Launcher(
            _read_kernel, device, key, read_tables, ((words,), (words, number, number, byte, byte)), _READ_WARPS
        )
        self._write = Launcher(_write_kernel, device, key, write_tables, ((words, words), (words,)), _WRITE_WARPS)

    def read(self, indices: torch.Tensor, out: torch.Tensor, columns: Columns | None = None) -> None:
        """`read_rows_reference`; ``out`` is ``[set, row, stack, words of 8 bytes]``. ``columns`` are copied."""
        n_sets, n_rows = indices.shape
        stack = self.shape.stack
        if columns is None:
            others, action = (indices, indices, indices, indices), 0
        else:
            others, action = columns, columns.actions[0].numel() * columns.actions.element_size()
        numbers = (n_rows, self._capacity, n_sets, stack, 1 << (n_sets * stack - 1).bit_length(), *self._read_sizes)
        grid = (n_rows, _PARTS, self._n_chunks)
        wide = 1 << max(action - 1, 0).bit_length()
        self._read.start((n_sets, action), grid, (out,), (indices, *others), (*numbers, action, wide))

    def write(self, job: torch.Tensor, frames: torch.Tensor, report: torch.Tensor) -> None:
        """`write_rows_reference`; ``frames`` is ``[set, stream, stack, words of 8 bytes]``.

        ``report`` (int64 ``[stream, 4]``, which may lie in pinned memory) gets the end of the heap, the oldest place
        that the stream needs, how many keyframes are unused, and the launch's number.
        """
        n_sets, n_streams = frames.shape[:2]
        numbers = (n_streams, self.shape.segments_per_stream, n_sets, *self._write_sizes)
        self._write.start(n_sets, (n_streams, 1, 1), (job, frames), (report,), numbers)
