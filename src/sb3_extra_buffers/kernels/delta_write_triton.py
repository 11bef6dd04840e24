"""The kernel that encodes frames: `kernels.delta_torch.write_rows_reference` on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from sb3_extra_buffers.kernels import delta_tables as dt
from sb3_extra_buffers.kernels.bits_triton import after_stores
from sb3_extra_buffers.kernels.columns_triton import store_columns
from sb3_extra_buffers.kernels.delta_encode_triton import block_of, copy_frame, encode, load_block
from sb3_extra_buffers.kernels.delta_keyframes_triton import spare_keyframes, start_segment
from sb3_extra_buffers.kernels.launcher import COLUMN_SOURCES
from sb3_extra_buffers.kernels.state import NONE, ZERO

__all__ = ["write_kernel"]

# Triton reads global names only if they are constexpr
_OPENED = tl.constexpr(dt.OPENED)
_COUNT = tl.constexpr(dt.COUNT)
_CHAIN_BYTES = tl.constexpr(dt.CHAIN_BYTES)
_NEXT_RECENT = tl.constexpr(dt.NEXT_RECENT)
_FLOOR = tl.constexpr(dt.FLOOR)
_HELD = tl.constexpr(dt.HELD)
_N_COLUMNS = tl.constexpr(dt.N_COLUMNS)
_N_PUBLISHED = tl.constexpr(dt.N_PUBLISHED)
_HEAD = tl.constexpr(dt.HEAD)
_DONE = tl.constexpr(dt.DONE)
_REPORT_HEAD = tl.constexpr(dt.REPORT_HEAD)
_REPORT_TAIL = tl.constexpr(dt.REPORT_TAIL)
_REPORT_SPARE = tl.constexpr(dt.REPORT_SPARE)
_REPORT_SEGMENTS = tl.constexpr(dt.REPORT_SEGMENTS)
_REPORT_LAUNCH = tl.constexpr(dt.REPORT_LAUNCH)
_NO_TAIL = tl.constexpr(dt.NO_TAIL)
_HALF_BITS = tl.constexpr(dt.HALF_BITS)
_SCRATCH = tl.constexpr(dt.SCRATCH)
_NONE = tl.constexpr(NONE)
_ZERO = tl.constexpr(ZERO)
_NEW = tl.constexpr(ZERO - 1)  # in place of the id of a frame that has yet to be added
_KNOWN = tl.constexpr(ZERO - 2)  # in place of the id of a frame whose id is already stored
_LOOK = tl.constexpr(256)  # table entries that are read at a time
_ROWS = tl.constexpr(32)  # rows of columns that a program stores at a time


# `WriteJob.arguments`
_JOB = (
    "step", "oldest_step", "parity", "tail_high", "tail_low", "capacity_high", "capacity_low", "launch_high",
    "launch_low", "n_keyframes", "n_slots", "first_index", "last_index",
)  # fmt: skip


@triton.jit(do_not_specialize=[*COLUMN_SOURCES, "n_streams", "column", "given", *_JOB])
def write_kernel(
    obs_ptr,  # int64 [stream, STACK, word]: the frames of the first set
    next_ptr,  # of the second
    # `DeviceTables`, in its order
    heap_ptr, entries_ptr, starts_ptr, keyframes_ptr, frame_ids_ptr, oldest_segments_ptr, streams_ptr,
    recent_ptr,  # int64 [stream, recent, word]
    recent_ids_ptr, last_ptr,
    keyframe_rows_ptr,  # int64 [keyframe, word]
    keyframe_refs_ptr, published_ptr, tails_ptr, counters_ptr,
    scratch_ptr,  # uint8 [program, C * SCRATCH + DIRECTORY]
    report_ptr,  # int64 [N_REPORT]
    action_ptr, first_ptr, second_ptr, third_ptr, fourth_ptr, numbers_ptr, actions_ptr,  # see `store_columns`
    n_streams,
    column,
    given,  # negative: no columns
    step, oldest_step, parity, tail_high, tail_low, capacity_high, capacity_low, launch_high, launch_low,
    n_keyframes, n_slots, first_index, last_index,
    N_SETS: tl.constexpr, STACK: tl.constexpr, STACK2: tl.constexpr, RECENT: tl.constexpr,
    RECENT2: tl.constexpr,  # RECENT, and the next power of two
    PER: tl.constexpr, PER2: tl.constexpr, MIN_FRAMES: tl.constexpr, MAX_CHAIN: tl.constexpr,
    NUMBERS: tl.constexpr,  # of segments
    SIZE: tl.constexpr, KEYFRAME_WORDS: tl.constexpr,
    C: tl.constexpr,  # chunks of a block
    N_BLOCKS: tl.constexpr,
    DIRECTORY: tl.constexpr,
    ROW: tl.constexpr, ACTION_ROW: tl.constexpr, ACTION_AT: tl.constexpr, ACTION: tl.constexpr, ACTION2: tl.constexpr,
    N_NUMBERS: tl.constexpr,  # columns of the table; 0: there is none
):  # fmt: skip
    """Write one step; each program takes every ``num_programs``-th stream, and some rows of the columns."""
    scratch = scratch_ptr + tl.program_id(0).to(tl.int64) * (C * _SCRATCH + DIRECTORY)
    tail = (tail_high.to(tl.int64) << _HALF_BITS) | tail_low
    capacity = (capacity_high.to(tl.int64) << _HALF_BITS) | capacity_low
    # indices of table entries exceed 32 bits
    step = step.to(tl.int64)
    oldest_step = oldest_step.to(tl.int64)
    n_slots = n_slots.to(tl.int64)
    first_index = first_index.to(tl.int64)
    last_index = last_index.to(tl.int64)
    if N_NUMBERS > 0:  # noqa: SIM102  # decided when the kernel is compiled
        if given >= 0:
            # from the last program on, which may have no stream: the first one would begin later than the others
            first = tl.num_programs(0) - 1 - tl.program_id(0)
            for block in range(first, tl.cdiv(n_streams, _ROWS), tl.num_programs(0)):
                store_columns(
                    action_ptr, first_ptr, second_ptr, third_ptr, fourth_ptr, numbers_ptr, actions_ptr, step, n_streams,
                    column, given, block + tl.full([], 0, tl.int32), ROW, ACTION_ROW, ACTION_AT, ACTION, ACTION2,
                    N_NUMBERS, _ROWS,
                )  # fmt: skip
    for number in range(tl.program_id(0), n_streams, tl.num_programs(0)):
        stream = number + tl.full([], 0, tl.int32)
        _write_stream(
            step, oldest_step, parity, tail, capacity, n_keyframes, n_slots, first_index, last_index,
            obs_ptr, next_ptr, heap_ptr, entries_ptr, starts_ptr, keyframes_ptr, frame_ids_ptr,
            oldest_segments_ptr, streams_ptr, recent_ptr, recent_ids_ptr, last_ptr, keyframe_rows_ptr,
            keyframe_refs_ptr, published_ptr, tails_ptr, counters_ptr, scratch, stream, n_streams,
            N_SETS, STACK, STACK2, RECENT, RECENT2, PER, PER2, MIN_FRAMES, MAX_CHAIN, NUMBERS, SIZE, KEYFRAME_WORDS, C,
            N_BLOCKS,
        )  # fmt: skip
    tl.debug_barrier()
    # the last program to finish reports
    if tl.atomic_add(counters_ptr + _DONE, 1) == tl.num_programs(0) - 1:
        tl.debug_barrier()
        tl.store(counters_ptr + _DONE, 0)
        launch = (launch_high.to(tl.int64) << _HALF_BITS) | launch_low
        _report(
            report_ptr, tails_ptr, streams_ptr, counters_ptr, keyframe_refs_ptr, launch, n_keyframes, n_streams,
            NUMBERS,
        )  # fmt: skip


@triton.jit
def _write_stream(
    step, oldest_step, parity, tail, capacity, n_keyframes, n_slots, first_index, last_index,
    obs_ptr, next_ptr, heap_ptr, entries_ptr, starts_ptr, keyframes_ptr, frame_ids_ptr, oldest_segments_ptr,
    streams_ptr, recent_ptr, recent_ids_ptr, last_ptr, keyframe_rows_ptr, keyframe_refs_ptr, published_ptr, tails_ptr,
    counters_ptr, scratch, stream, n_streams,
    N_SETS: tl.constexpr, STACK: tl.constexpr, STACK2: tl.constexpr, RECENT: tl.constexpr, RECENT2: tl.constexpr,
    PER: tl.constexpr, PER2: tl.constexpr, MIN_FRAMES: tl.constexpr, MAX_CHAIN: tl.constexpr, NUMBERS: tl.constexpr,
    SIZE: tl.constexpr,
    KEYFRAME_WORDS: tl.constexpr, C: tl.constexpr, N_BLOCKS: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = (SIZE + 7) // 8
    published = published_ptr + parity * _N_PUBLISHED * n_streams
    row_ptr = streams_ptr + stream * _N_COLUMNS
    recent = recent_ptr + stream.to(tl.int64) * (RECENT * KEYFRAME_WORDS)
    recent_ids = recent_ids_ptr + stream * RECENT
    last = last_ptr + stream * STACK
    first_slot = stream.to(tl.int64) * n_slots

    # usually the only new frame: asked for now, since it may be in host memory
    newest = tl.zeros([C, 256], tl.int64)
    if N_BLOCKS == 1:
        last_row = next_ptr if N_SETS == 2 else obs_ptr
        newest = load_block(last_row + (stream.to(tl.int64) * STACK + STACK - 1) * WORDS, 0, WORDS, C)
    opened = tl.load(row_ptr + _OPENED).to(tl.int32)
    count = tl.load(row_ptr + _COUNT).to(tl.int32)
    chain_bytes = tl.load(row_ptr + _CHAIN_BYTES).to(tl.int32)
    next_recent = tl.load(row_ptr + _NEXT_RECENT).to(tl.int32)
    switched = tl.full([], 0, tl.int32)
    n_known = tl.full([], 0, tl.int32)

    # a step refers to recent and new frames only: note the oldest segment of these
    i = tl.arange(0, RECENT2)
    ids = tl.load(recent_ids + i, mask=i < RECENT, other=-1)
    since = tl.max(tl.where(ids >= 0, (opened - ids // PER) & (NUMBERS - 1), 0), axis=0)
    tl.store(oldest_segments_ptr + step * n_streams + stream, (opened - since) & (NUMBERS - 1))
    tl.debug_barrier()
    new_floor = tl.load(oldest_segments_ptr + oldest_step * n_streams + stream)
    floor = tl.load(row_ptr + _FLOOR).to(tl.int32)
    floor = _release(keyframes_ptr + first_slot, keyframe_refs_ptr, floor, new_floor, opened, n_slots, NUMBERS)

    for k in range(N_SETS * STACK):
        which = k // STACK
        j = k % STACK
        tl.debug_barrier()
        row = tl.where(which == 0, obs_ptr, next_ptr) + stream.to(tl.int64) * (STACK * WORDS)
        index = tl.where(which == 0, first_index, last_index) + stream
        # the first of two rows usually equals the stream's last row; the other is usually shifted by one frame
        shift = tl.where(which == N_SETS - 1, 1, 0)
        if j == 0:
            n_known = tl.full([], 0, tl.int32)
            # an observation that is a single new frame shares none with the last row
            if shift < STACK:
                n_known = _continue_row(
                    row, recent, recent_ids, last, frame_ids_ptr + index * STACK, shift,
                    STACK, STACK2, WORDS, KEYFRAME_WORDS, C, N_BLOCKS,
                )  # fmt: skip
                tl.debug_barrier()
        frame_ptr = row + j * WORDS
        is_loaded = (N_BLOCKS == 1) & (k == N_SETS * STACK - 1)
        frame = load_block(frame_ptr, 0, tl.where((j < n_known) | is_loaded, 0, WORDS), C)
        frame = tl.where(is_loaded, newest, frame)
        position = tl.full([], 0, tl.int32)
        frame_id = tl.full([], _KNOWN, tl.int32)
        if j >= n_known:
            hint = tl.maximum(tl.load(last + tl.minimum(j + shift, STACK - 1)), 0)
            position, frame_id = _find(
                frame, frame_ptr, recent, recent_ids, hint, RECENT, WORDS, KEYFRAME_WORDS, C, N_BLOCKS
            )
        if frame_id == _NEW:
            frame_id, opened, count, chain_bytes, switched = _add_frame(
                frame, frame_ptr, opened, count, chain_bytes, next_recent, floor, switched, tail, capacity,
                n_keyframes, n_slots, first_slot, heap_ptr, entries_ptr, starts_ptr, keyframes_ptr, recent, recent_ids,
                keyframe_rows_ptr, keyframe_refs_ptr, published, row_ptr, counters_ptr, scratch, stream, n_streams,
                RECENT, PER, PER2, MIN_FRAMES, MAX_CHAIN, NUMBERS, SIZE, KEYFRAME_WORDS, C, N_BLOCKS,
            )  # fmt: skip
            position = next_recent
            next_recent = (next_recent + 1) % RECENT
        if frame_id != _KNOWN:
            tl.store(last + j, position)
            tl.store(frame_ids_ptr + index * STACK + j, frame_id + 1)

    tl.store(row_ptr + _OPENED, opened.to(tl.int64))
    tl.store(row_ptr + _COUNT, count.to(tl.int64))
    tl.store(row_ptr + _CHAIN_BYTES, chain_bytes.to(tl.int64))
    tl.store(row_ptr + _NEXT_RECENT, next_recent.to(tl.int64))
    tl.store(row_ptr + _FLOOR, floor.to(tl.int64))
    tl.debug_barrier()
    following = published_ptr + ((1 - parity) * n_streams + stream) * _N_PUBLISHED
    for nth in tl.static_range(_N_PUBLISHED):
        tl.store(following + nth, tl.load(row_ptr + _HELD + nth).to(tl.int32))
    oldest_start = tl.load(starts_ptr + first_slot + (floor & (n_slots - 1)))
    tl.store(tails_ptr + stream, tl.where(floor == opened, _NO_TAIL, oldest_start))


# ---- frames ----


@triton.jit
def _continue_row(
    row, recent, recent_ids, last, frame_ids, shift,
    STACK: tl.constexpr, STACK2: tl.constexpr, WORDS: tl.constexpr, KEYFRAME_WORDS: tl.constexpr, C: tl.constexpr,
    N_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compare a row with the stream's last row, shifted by ``shift`` frames; return how many frames they share.

    That is all frames but the last ``shift``, whose ids are then stored, or 0 if any of them differs.
    """
    j = tl.arange(0, STACK2)
    is_known = j < STACK - shift
    positions = tl.load(last + j + shift, mask=is_known, other=-1)
    ids = tl.load(recent_ids + positions, mask=positions >= 0, other=_ZERO)
    n_known = STACK - shift
    if tl.max(tl.where(ids == _NONE, 1, 0), axis=0) > 0:
        n_known = tl.full([], 0, tl.int32)
    found = tl.zeros([C, 256], tl.int64)
    for block in range(N_BLOCKS):
        word = (block * C + tl.arange(0, C))[:, None] * 256 + tl.arange(0, 256)[None, :]
        # unrolled, so that the frames are loaded together: they may be in host memory. Therefore masks are the same for
        # all frames, have no default value, and differences that do not count are dropped at the end; otherwise the
        # compiler would wait for every load
        different = tl.zeros([C, 256], tl.int64)
        for k in tl.static_range(STACK):
            position = tl.sum(tl.where(j == k, positions, 0), axis=0)
            is_loaded = word < (WORDS if k < STACK - 1 else tl.where(shift == 0, WORDS, 0))
            other = tl.load(recent + tl.maximum(position, 0) * KEYFRAME_WORDS + word, mask=is_loaded)
            own = tl.load(row + k * WORDS + word, mask=is_loaded)
            other &= tl.where(position >= 0, -1, 0).to(tl.int64)
            different |= (own ^ other) & tl.where(k < n_known, -1, 0).to(tl.int64)
        found |= tl.where(word < WORDS, different, 0)
    if tl.max(tl.max((found != 0).to(tl.int32), axis=1), axis=0) > 0:
        n_known = tl.full([], 0, tl.int32)
    tl.debug_barrier()
    tl.store(last + j, positions, mask=j < n_known)
    tl.store(frame_ids + j, ids + 1, mask=j < n_known)
    return n_known


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _find(
    frame, frame_ptr, recent, recent_ids, hint,
    RECENT: tl.constexpr, WORDS: tl.constexpr, KEYFRAME_WORDS: tl.constexpr, C: tl.constexpr, N_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The position of a frame in ``recent``, and its id: `_ZERO` for a frame of zeros, `_NEW` if it is not there."""
    position = tl.full([], -1, tl.int32)
    frame_id = tl.full([], _NEW, tl.int32)
    i = tl.full([], 0, tl.int32)
    while (frame_id == _NEW) & (i < RECENT):
        # compare with three frames and with zeros at a time: a bit for each that differs
        different = tl.zeros([C, 256], tl.int32)
        for block in range(N_BLOCKS):
            words = block_of(frame, frame_ptr, block, WORDS, C, N_BLOCKS)
            different |= (words != 0).to(tl.int32)
            for k in tl.static_range(3):
                other = load_block(recent + (hint + i + k) % RECENT * KEYFRAME_WORDS, block, WORDS, C)
                different |= (words != other).to(tl.int32) << (k + 1)
        bits = tl.reduce(tl.reduce(different, 1, _either), 0, _either)
        if (bits & 1) == 0:
            frame_id = tl.full([], _ZERO, tl.int32)
        for k in tl.static_range(3):
            at = (hint + i + k) % RECENT
            other_id = tl.load(recent_ids + at)
            is_equal = ((bits >> (k + 1)) & 1) == 0
            if (frame_id == _NEW) & (i + k < RECENT) & is_equal & (other_id >= 0):
                frame_id = other_id
                position = at
        i += 3
    return position, frame_id


@triton.jit
def _add_frame(
    frame, frame_ptr, opened, count, chain_bytes, next_recent, floor, switched, tail, capacity, n_keyframes, n_slots,
    first_slot, heap_ptr, entries_ptr, starts_ptr, keyframes_ptr, recent, recent_ids, keyframe_rows_ptr,
    keyframe_refs_ptr, published, row_ptr, counters_ptr, scratch, stream, n_streams,
    RECENT: tl.constexpr, PER: tl.constexpr, PER2: tl.constexpr, MIN_FRAMES: tl.constexpr, MAX_CHAIN: tl.constexpr,
    NUMBERS: tl.constexpr, SIZE: tl.constexpr, KEYFRAME_WORDS: tl.constexpr, C: tl.constexpr, N_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Add a frame to the newest segment, or to a new one if that is full, and to the recent frames.

    Return the frame's id and what it changed: ``opened``, ``count``, ``chain_bytes`` and ``switched``.
    """
    WORDS: tl.constexpr = (SIZE + 7) // 8
    is_full = (count >= PER) | ((count >= MIN_FRAMES) & (chain_bytes > MAX_CHAIN))
    if is_full | (opened == floor):
        slot = first_slot + (opened & (n_slots - 1))
        entry = tl.arange(0, PER2)
        tl.store(entries_ptr + slot * PER + entry, tl.zeros([PER2], tl.int64), mask=entry < PER)
        tl.store(starts_ptr + slot, tl.atomic_add(counters_ptr + _HEAD, 0, sem="relaxed"))
        opened = (opened + 1) & (NUMBERS - 1)
        count = tl.full([], 0, tl.int32)
        chain_bytes = tl.full([], 0, tl.int32)
        tl.debug_barrier()
    number = (opened - 1) & (NUMBERS - 1)
    slot = first_slot + (number & (n_slots - 1))
    keyframe = tl.full([], 0, tl.int32)
    is_keyframe = tl.full([], 0, tl.int32)
    if count == 0:
        keyframe, is_keyframe, switched = start_segment(
            frame, frame_ptr, keyframes_ptr + slot, keyframe_rows_ptr, keyframe_refs_ptr, published, row_ptr,
            switched, stream, n_streams, n_keyframes, SIZE, WORDS, KEYFRAME_WORDS, C, N_BLOCKS,
        )  # fmt: skip
    entry = tl.full([], 0, tl.int64)
    length = tl.full([], 0, tl.int32)
    if is_keyframe == 0:
        before = (next_recent + RECENT - 1) % RECENT
        keyframe_ptr = keyframe_rows_ptr + tl.maximum(keyframe, 0).to(tl.int64) * KEYFRAME_WORDS
        reference_ptr = tl.where(count == 0, keyframe_ptr, recent + before * KEYFRAME_WORDS)
        reference_words = tl.where((count == 0) & (keyframe < 0), 0, WORDS)
        # where this frame is copied to afterwards
        packed_ptr = (recent + next_recent * KEYFRAME_WORDS).to(tl.pointer_type(tl.uint8), bitcast=True)
        entry, length = encode(
            heap_ptr, counters_ptr, scratch, packed_ptr, frame, frame_ptr, reference_ptr, reference_words, tail,
            capacity, SIZE, WORDS, C, N_BLOCKS,
        )  # fmt: skip
    tl.store(entries_ptr + slot * PER + count, entry)
    frame_id = number * PER + count
    tl.debug_barrier()
    copy_frame(recent + next_recent * KEYFRAME_WORDS, frame, frame_ptr, WORDS, C, N_BLOCKS)
    tl.store(recent_ids + next_recent, frame_id)
    return frame_id, opened, count + 1, chain_bytes + tl.where(length < SIZE, length, 0), switched


@triton.jit
def _release(keyframes, keyframe_refs_ptr, floor, new_floor, opened, n_slots, NUMBERS: tl.constexpr):
    """Free the segments before ``new_floor`` and return the floor, which stays if that is out of the range in use."""
    n_freed = (new_floor - floor) & (NUMBERS - 1)
    n_freed = tl.where(n_freed <= ((opened - floor) & (NUMBERS - 1)), n_freed, 0)
    for i in range(n_freed):
        keyframe = tl.load(keyframes + ((floor + i) & (n_slots - 1)))
        if keyframe >= 0:
            tl.atomic_add(keyframe_refs_ptr + keyframe, -1, sem="relaxed")
    return (floor + n_freed) & (NUMBERS - 1)


@triton.jit
def _report(
    report_ptr, tails_ptr, streams_ptr, counters_ptr, keyframe_refs_ptr, launch, n_keyframes, n_streams,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """Report how full the tables are; the number of the write is stored last, when the rest is complete."""
    tail = tl.full([], _NO_TAIL, tl.int64)
    n_segments = tl.full([], 0, tl.int64)
    for base in range(0, n_streams, _LOOK):
        stream = base + tl.arange(0, _LOOK)
        exists = stream < n_streams
        tails = tl.load(tails_ptr + stream, mask=exists, other=_NO_TAIL, volatile=True)
        tail = tl.minimum(tail, tl.min(tails, axis=0))
        row_ptr = streams_ptr + stream * _N_COLUMNS
        opened = tl.load(row_ptr + _OPENED, mask=exists, other=0, volatile=True)
        floor = tl.load(row_ptr + _FLOOR, mask=exists, other=0, volatile=True)
        n_segments = tl.maximum(n_segments, tl.max((opened - floor) & (NUMBERS - 1), axis=0))
    spare, _nearest = spare_keyframes(keyframe_refs_ptr, n_keyframes, 0)
    tl.store(report_ptr + _REPORT_HEAD, tl.atomic_add(counters_ptr + _HEAD, 0, sem="relaxed"))
    tl.store(report_ptr + _REPORT_TAIL, tail)
    tl.store(report_ptr + _REPORT_SPARE, spare.to(tl.int64))
    tl.store(report_ptr + _REPORT_SEGMENTS, n_segments)
    tl.store(report_ptr + _REPORT_LAUNCH, after_stores(launch))
