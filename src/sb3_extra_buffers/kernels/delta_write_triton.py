"""The kernel that encodes frames: `kernels.delta_torch.write_rows_reference` on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from sb3_extra_buffers.kernels import delta_tables as dt
from sb3_extra_buffers.kernels import policy
from sb3_extra_buffers.kernels.bits_triton import jit_rule
from sb3_extra_buffers.kernels.delta_encode_triton import STEP, bound, copy, encode, store_whole
from sb3_extra_buffers.kernels.state import NONE, ZERO

__all__ = ["write_kernel"]

# Triton reads global names only if they are constexpr
_OPEN = tl.constexpr(dt.OPEN)
_OPENED = tl.constexpr(dt.OPENED)
_END = tl.constexpr(dt.END)
_COUNT = tl.constexpr(dt.COUNT)
_CHAIN_BYTES = tl.constexpr(dt.CHAIN_BYTES)
_NEXT_RECENT = tl.constexpr(dt.NEXT_RECENT)
_COST = tl.constexpr(dt.COST)
_EXCESS = tl.constexpr(dt.EXCESS)
_HELD = tl.constexpr(dt.HELD)
_FLOOR = tl.constexpr(dt.FLOOR)
_N_COLUMNS = tl.constexpr(dt.N_COLUMNS)
_N_PUBLISHED = tl.constexpr(dt.N_PUBLISHED)
_POOL_SIZE = tl.constexpr(policy.POOL_SIZE)
_HEAD = tl.constexpr(dt.HEAD)
_NEEDED = tl.constexpr(dt.NEEDED)
_SPARE = tl.constexpr(dt.SPARE)
_REPORT_HEAD = tl.constexpr(dt.REPORT_HEAD)
_REPORT_TAIL = tl.constexpr(dt.REPORT_TAIL)
_REPORT_SPARE = tl.constexpr(dt.REPORT_SPARE)
_REPORT_LAUNCH = tl.constexpr(dt.REPORT_LAUNCH)
_N_REPORT = tl.constexpr(dt.N_REPORT)
_NO_TAIL = tl.constexpr(dt.NO_TAIL)
_SAME = tl.constexpr(dt.SAME)
_SHIFTED = tl.constexpr(dt.SHIFTED)
_JOB_STEP = tl.constexpr(dt.JOB_STEP)
_JOB_OLDEST = tl.constexpr(dt.JOB_OLDEST)
_JOB_PARITY = tl.constexpr(dt.JOB_PARITY)
_JOB_TAIL = tl.constexpr(dt.JOB_TAIL)
_JOB_CAPACITY = tl.constexpr(dt.JOB_CAPACITY)
_JOB_KEYFRAMES = tl.constexpr(dt.JOB_KEYFRAMES)
_JOB_LAUNCH = tl.constexpr(dt.JOB_LAUNCH)
_JOB_LAST = tl.constexpr(dt.JOB_LAST)
_JOB_INDICES = tl.constexpr(dt.JOB_INDICES)
_NONE = tl.constexpr(NONE)
_ZERO = tl.constexpr(ZERO)
_NEW = tl.constexpr(ZERO - 1)  # stands for the id of a frame that has yet to be added
_FAR = tl.constexpr(1 << 30)  # larger than any keyframe

_initial_cost = jit_rule(policy.initial_cost)
_should_search = jit_rule(policy.should_search)
_should_switch = jit_rule(policy.should_switch)
_needs_keyframe = jit_rule(policy.needs_keyframe)


@triton.jit(do_not_specialize=["n_streams", "n_segments"])
def write_kernel(
    job_ptr,  # int64, packed as `WriteJob.pack` says
    frames_ptr,  # int64 [set, stream, stack, word]
    # `DeviceTables`, in its order
    heap_ptr, stage_ptr, starts_ptr, lengths_ptr, keyframes_ptr, frame_ids_ptr, oldest_segments_ptr, streams_ptr,
    recent_ptr,  # int64 [stream, recent, word]
    recent_ids_ptr, recent_segments_ptr,
    keyframe_rows_ptr,  # int64 [keyframe, word]
    keyframe_refs_ptr, published_ptr, counters_ptr, tails_ptr, scratch_ptr,
    report_ptr,  # int64 [stream, N_REPORT]
    n_streams,
    n_segments,  # of each stream
    N_SETS: tl.constexpr, STACK: tl.constexpr, RECENT: tl.constexpr,
    RECENT2: tl.constexpr,  # RECENT, and the next power of two
    PER: tl.constexpr, MIN_FRAMES: tl.constexpr, MAX_CHAIN: tl.constexpr, STAGE: tl.constexpr, SIZE: tl.constexpr,
    KEYFRAME_WORDS: tl.constexpr,
    WORDS: tl.constexpr,  # of a padded frame, and the next power of two
    SCRATCH: tl.constexpr,
):  # fmt: skip
    """Write one step of one stream; the grid is ``[stream]``."""
    FRAME_WORDS: tl.constexpr = (SIZE + 7) // 8
    stream = tl.program_id(0)
    # the job may be in pinned host memory: loads issued together take as long as one
    step = tl.load(job_ptr + _JOB_STEP)
    oldest_step = tl.load(job_ptr + _JOB_OLDEST)
    parity = tl.load(job_ptr + _JOB_PARITY).to(tl.int32)
    tail = tl.load(job_ptr + _JOB_TAIL)
    capacity = tl.load(job_ptr + _JOB_CAPACITY)
    n_keyframes = tl.load(job_ptr + _JOB_KEYFRAMES).to(tl.int32)
    launch = tl.load(job_ptr + _JOB_LAUNCH)
    published = published_ptr + parity * _N_PUBLISHED * n_streams
    stage = stage_ptr + stream.to(tl.int64) * STAGE
    scratch = scratch_ptr + stream.to(tl.int64) * SCRATCH
    row_ptr = streams_ptr + stream * _N_COLUMNS
    recent = recent_ptr + stream.to(tl.int64) * RECENT * KEYFRAME_WORDS
    recent_ids = recent_ids_ptr + stream * RECENT
    recent_segments = recent_segments_ptr + stream * RECENT
    word = tl.arange(0, WORDS)
    inside = word < FRAME_WORDS

    open_segment = tl.load(row_ptr + _OPEN).to(tl.int32)
    opened = tl.load(row_ptr + _OPENED).to(tl.int32)
    end = tl.load(row_ptr + _END).to(tl.int32)
    count = tl.load(row_ptr + _COUNT).to(tl.int32)
    chain_bytes = tl.load(row_ptr + _CHAIN_BYTES).to(tl.int32)
    next_recent = tl.load(row_ptr + _NEXT_RECENT).to(tl.int32)
    switched = tl.full([], 0, tl.int32)

    oldest = _oldest_needed(
        job_ptr, frame_ids_ptr, recent_ids, recent_segments, opened, stream, n_segments,
        N_SETS, STACK, RECENT, RECENT2, PER,
    )  # fmt: skip
    tl.store(oldest_segments_ptr + step * n_streams + stream, oldest)
    tl.debug_barrier()
    new_floor = tl.load(oldest_segments_ptr + oldest_step * n_streams + stream)
    floor = _release(keyframes_ptr + stream * n_segments, keyframe_refs_ptr, row_ptr, new_floor, n_segments)

    for k in range(N_SETS * STACK):
        which = k // STACK
        j = k % STACK
        relation = tl.load(job_ptr + _JOB_INDICES + N_SETS + which * n_streams + stream).to(tl.int32)
        is_known = (relation == _SAME) | ((relation == _SHIFTED) & (j < STACK - 1))
        at = ((which * n_streams + stream).to(tl.int64) * STACK + j) * FRAME_WORDS
        # frames of the previous row are not even read
        frame = tl.load(frames_ptr + at + word, mask=word < tl.where(is_known, 0, FRAME_WORDS), other=0)
        frame_id = tl.full([], _ZERO, tl.int32)
        if is_known:
            tl.debug_barrier()
            previous = tl.load(job_ptr + _JOB_LAST + which) + stream
            frame_id = tl.load(frame_ids_ptr + previous * STACK + j + tl.where(relation == _SHIFTED, 1, 0)) - 1
        if tl.max((frame != 0).to(tl.int32), axis=0) > 0:
            frame_id = _find_recent(frame, recent, recent_ids, RECENT, FRAME_WORDS, KEYFRAME_WORDS, WORDS)
        if frame_id == _NEW:
            if (open_segment >= 0) & ((count >= PER) | ((count >= MIN_FRAMES) & (chain_bytes > MAX_CHAIN))):
                _seal(
                    heap_ptr, stage, starts_ptr, lengths_ptr, counters_ptr, open_segment, count, end, tail, capacity,
                    PER,
                )  # fmt: skip
                open_segment = tl.full([], -1, tl.int32)
            if open_segment < 0:
                open_segment = (stream * n_segments + opened % n_segments).to(tl.int32)
                opened += 1
                count = tl.full([], 0, tl.int32)
                chain_bytes = tl.full([], 0, tl.int32)
                end = tl.full([], 2 + 2 * PER, tl.int32)
                tl.store(starts_ptr + open_segment, -1 - stream.to(tl.int64) * STAGE)
                tl.store(keyframes_ptr + open_segment, _NONE)
            length = tl.full([], 0, tl.int32)
            if count == 0:
                length, switched = _encode_first(
                    stage + end, scratch, frame, keyframes_ptr + open_segment, keyframe_rows_ptr, keyframe_refs_ptr,
                    published, row_ptr, switched, stream, n_streams, n_keyframes, SIZE, KEYFRAME_WORDS, WORDS,
                )  # fmt: skip
            else:
                before = (next_recent + RECENT - 1) % RECENT
                reference = tl.load(recent + before * KEYFRAME_WORDS + word, mask=inside, other=0)
                length = encode(stage + end, scratch, frame, reference, SIZE, WORDS)
            frame_id = open_segment * PER + count
            tl.debug_barrier()
            tl.store(recent + next_recent * KEYFRAME_WORDS + word, frame, mask=inside)
            tl.store(recent_ids + next_recent, frame_id)
            tl.store(recent_segments + next_recent, opened - 1)
            _note_length(stage, count, length)
            tl.debug_barrier()
            next_recent = (next_recent + 1) % RECENT
            end += length
            chain_bytes += tl.where(length < SIZE, length, 0)
            count += 1
        index = tl.load(job_ptr + _JOB_INDICES + which) + stream
        tl.store(frame_ids_ptr + index * STACK + j, frame_id + 1)

    tl.store(row_ptr + _OPEN, open_segment.to(tl.int64))
    tl.store(row_ptr + _OPENED, opened.to(tl.int64))
    tl.store(row_ptr + _END, end.to(tl.int64))
    tl.store(row_ptr + _COUNT, count.to(tl.int64))
    tl.store(row_ptr + _CHAIN_BYTES, chain_bytes.to(tl.int64))
    tl.store(row_ptr + _NEXT_RECENT, next_recent.to(tl.int64))
    tl.store(row_ptr + _FLOOR, floor.to(tl.int64))
    tl.debug_barrier()
    _finish(
        published_ptr + (1 - parity) * _N_PUBLISHED * n_streams, row_ptr, starts_ptr, tails_ptr, counters_ptr,
        keyframe_refs_ptr, report_ptr, launch, floor, opened, stream, n_segments, n_keyframes,
    )  # fmt: skip


# ---- segments ----


@triton.jit
def _oldest_needed(
    job_ptr, frame_ids_ptr, recent_ids, recent_segments, opened, stream, n_segments,
    N_SETS: tl.constexpr, STACK: tl.constexpr, RECENT: tl.constexpr, RECENT2: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """The oldest segment that this step may refer to."""
    i = tl.arange(0, RECENT2)
    ids = tl.load(recent_ids + i, mask=i < RECENT, other=-1)
    segments = tl.load(recent_segments + i, mask=i < RECENT, other=0)
    oldest = tl.min(tl.where(ids >= 0, segments, opened), axis=0)
    if tl.load(job_ptr + _JOB_INDICES + N_SETS + stream) > 0:
        # the previous row may contain frames that are no longer among the recent ones
        last = tl.load(job_ptr + _JOB_LAST) + stream
        ids = tl.load(frame_ids_ptr + last * STACK + i, mask=i < STACK, other=0) - 1
        age = (opened - 1 - ids // PER) % n_segments
        age = tl.where(age < 0, age + n_segments, age)
        oldest = tl.minimum(oldest, tl.min(tl.where(ids >= 0, opened - 1 - age, opened), axis=0))
    return oldest


@triton.jit
def _release(keyframes, keyframe_refs_ptr, row_ptr, new_floor, n_segments):
    """Free the segments before ``new_floor``; return the new floor, which is never lower than the old one."""
    floor = tl.load(row_ptr + _FLOOR).to(tl.int32)
    while floor < new_floor:
        keyframe = tl.load(keyframes + floor % n_segments)
        if keyframe >= 0:
            tl.atomic_add(keyframe_refs_ptr + keyframe, -1)
        floor += 1
    return floor


@triton.jit
def _find_recent(
    frame, recent, recent_ids,
    RECENT: tl.constexpr, FRAME_WORDS: tl.constexpr, KEYFRAME_WORDS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The id of a recent frame with the same bytes, or ``_NEW``."""
    word = tl.arange(0, WORDS)
    frame_id = tl.full([], _NEW, tl.int32)
    for i in tl.static_range(RECENT):
        other = tl.load(recent + i * KEYFRAME_WORDS + word, mask=word < FRAME_WORDS, other=0)
        other_id = tl.load(recent_ids + i)
        if (tl.max((frame != other).to(tl.int32), axis=0) == 0) & (other_id >= 0) & (frame_id == _NEW):
            frame_id = other_id
    return frame_id


@triton.jit
def _seal(
    heap_ptr, stage, starts_ptr, lengths_ptr, counters_ptr, segment, count, end, tail, capacity, PER: tl.constexpr
):
    """Move the open segment to the heap, or count the bytes that do not fit."""
    tl.debug_barrier()
    header = 2 + 2 * count
    length = header + end - (2 + 2 * PER)
    start = tl.full([], 0, tl.int64)
    fits = length <= capacity
    if fits:
        start = tl.atomic_add(counters_ptr + _HEAD, length.to(tl.int64))
        # skip the seam: no segment is split in two
        while start % capacity + length > capacity:
            start = tl.atomic_add(counters_ptr + _HEAD, length.to(tl.int64))
        fits = start + length - tail <= capacity
    if fits:
        target = heap_ptr + start % capacity
        copy(target, stage, header, 64)
        copy(target + header, stage + 2 + 2 * PER, length - header, STEP)
        tl.store(starts_ptr + segment, start)
        tl.store(lengths_ptr + segment, length)
    else:
        tl.atomic_add(counters_ptr + _NEEDED, length.to(tl.int64))
    tl.debug_barrier()


@triton.jit
def _note_length(stage, count, length):
    """Write the header of an open segment: its number of frames, and the length of the newest."""
    zero = tl.full([], 0, tl.int32)
    tl.store(stage, zero.to(tl.uint8))
    tl.store(stage + 1, (count + 1).to(tl.uint8))
    tl.store(stage + 2 + 2 * count, (length & 255).to(tl.uint8))
    tl.store(stage + 3 + 2 * count, (length >> 8).to(tl.uint8))


@triton.jit
def _finish(
    published, row_ptr, starts_ptr, tails_ptr, counters_ptr, keyframe_refs_ptr, report_ptr, launch,
    floor, opened, stream, n_segments, n_keyframes,
):  # fmt: skip
    """Publish the stream's keyframes for the next write, and report to the host; the launch's number comes last."""
    for i in tl.static_range(_N_PUBLISHED):
        tl.store(published + _N_PUBLISHED * stream + i, tl.load(row_ptr + _HELD + i).to(tl.int32))
    tail = tl.full([], _NO_TAIL, tl.int64)
    if floor < opened:
        start = tl.load(starts_ptr + stream * n_segments + floor % n_segments)
        if start >= 0:
            tail = start
    tl.store(tails_ptr + stream, tail)
    spare, _nearest = _spare_keyframes(keyframe_refs_ptr, n_keyframes, stream)
    tl.store(counters_ptr + _SPARE, spare.to(tl.int64))
    report = report_ptr + _N_REPORT * stream
    tl.store(report + _REPORT_HEAD, tl.atomic_add(counters_ptr + _HEAD, 0))
    tl.store(report + _REPORT_TAIL, tail)
    tl.store(report + _REPORT_SPARE, spare.to(tl.int64))
    tl.debug_barrier()
    tl.store(report + _REPORT_LAUNCH, launch)


# ---- keyframes ----


@triton.jit
def _encode_first(
    target, scratch, frame, segment_keyframe_ptr, keyframe_rows_ptr, keyframe_refs_ptr, published, row_ptr, switched,
    stream, n_streams, n_keyframes, SIZE: tl.constexpr, KEYFRAME_WORDS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Encode a segment's first frame against the best keyframe, or make it a keyframe.

    Return the length, and whether the stream has switched keyframes in this write.
    """
    word = tl.arange(0, WORDS)
    inside = word < (SIZE + 7) // 8
    length = tl.full([], 0, tl.int32)
    held = tl.load(row_ptr + _HELD).to(tl.int32)
    cost = tl.load(row_ptr + _COST).to(tl.int32)
    excess = tl.load(row_ptr + _EXCESS).to(tl.int32)
    keyframe, least = _choose_keyframe(
        frame, held, cost, keyframe_rows_ptr, published, stream, n_streams, SIZE, KEYFRAME_WORDS, WORDS
    )
    if keyframe != held:
        cost = least
        excess = tl.full([], 0, tl.int32)
    cost = tl.minimum(cost, least)
    excess += least - cost
    if (keyframe < 0) | _needs_keyframe(least, excess, SIZE):
        keyframe = tl.full([], -1, tl.int32)
        if switched == 0:
            keyframe = _claim(keyframe_refs_ptr, n_keyframes, stream)
        if keyframe >= 0:
            tl.store(keyframe_rows_ptr + keyframe.to(tl.int64) * KEYFRAME_WORDS + word, frame, mask=inside)
            _hold(row_ptr, keyframe_refs_ptr, keyframe)
            switched = tl.full([], 1, tl.int32)
            tl.store(row_ptr + _COST, _initial_cost(SIZE))
            tl.store(row_ptr + _EXCESS, 0)
            tl.store(segment_keyframe_ptr, keyframe)
        else:
            store_whole(target, frame, SIZE, WORDS)
            length = tl.full([], SIZE, tl.int32)
    else:
        if (keyframe != held) & (switched == 0):
            _hold(row_ptr, keyframe_refs_ptr, keyframe)
            switched = tl.full([], 1, tl.int32)
            held = keyframe
        if keyframe == held:
            tl.store(row_ptr + _COST, cost.to(tl.int64))
            tl.store(row_ptr + _EXCESS, excess.to(tl.int64))
        tl.store(segment_keyframe_ptr, keyframe)
        tl.atomic_add(keyframe_refs_ptr + keyframe, 1)
        reference = tl.load(keyframe_rows_ptr + keyframe.to(tl.int64) * KEYFRAME_WORDS + word, mask=inside, other=0)
        length = encode(target, scratch, frame, reference, SIZE, WORDS)
    return length, switched


@triton.jit
def _choose_keyframe(
    frame, held, cost, keyframe_rows_ptr, published, stream, n_streams,
    SIZE: tl.constexpr, KEYFRAME_WORDS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The keyframe to encode ``frame`` against, -1 if there is none, and a bound on the length."""
    keyframe = held
    least = tl.full([], SIZE, tl.int32)
    if keyframe >= 0:
        least = bound(frame, keyframe_rows_ptr + keyframe.to(tl.int64) * KEYFRAME_WORDS, SIZE, WORDS)
    if (keyframe < 0) | _should_search(least, cost):
        n_published = _N_PUBLISHED * n_streams
        for i in range(tl.minimum(_POOL_SIZE, n_published)):
            other = tl.load(published + (_N_PUBLISHED * stream + i) % n_published)
            if (other >= 0) & (other != keyframe):
                other_bound = bound(frame, keyframe_rows_ptr + other.to(tl.int64) * KEYFRAME_WORDS, SIZE, WORDS)
                if _should_switch(other_bound, least):
                    least = other_bound
                    keyframe = other
    return keyframe, least


@triton.jit
def _hold(row_ptr, keyframe_refs_ptr, keyframe):
    """Make ``keyframe`` the stream's own; once per write, since other streams may be reading the one dropped."""
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
def _spare_keyframes(keyframe_refs_ptr, n_keyframes, stream):
    """How many keyframes are unused, and the distance from the stream's number to the next one that is."""
    nearest = tl.full([], _FAR, tl.int32)
    spare = tl.full([], 0, tl.int32)
    for base in range(0, n_keyframes, 256):
        keyframe = base + tl.arange(0, 256)
        refs = tl.load(keyframe_refs_ptr + keyframe, mask=keyframe < n_keyframes, other=1, volatile=True)
        order = tl.where(refs == 0, (keyframe - stream % n_keyframes + n_keyframes) % n_keyframes, _FAR)
        nearest = tl.minimum(nearest, tl.min(order, axis=0))
        spare += tl.sum((refs == 0).to(tl.int32), axis=0)
    return spare, nearest


@triton.jit
def _claim(keyframe_refs_ptr, n_keyframes, stream):
    """An unused keyframe with a reference for the open segment, or -1."""
    claimed = tl.full([], -1, tl.int32)
    _spare, nearest = _spare_keyframes(keyframe_refs_ptr, n_keyframes, stream)
    while (nearest < _FAR) & (claimed < 0):
        candidate = (nearest + stream) % n_keyframes
        # another program may have claimed it first
        if tl.atomic_cas(keyframe_refs_ptr + candidate, 0, 1) == 0:
            claimed = candidate.to(tl.int32)
        else:
            _spare, nearest = _spare_keyframes(keyframe_refs_ptr, n_keyframes, stream)
    return claimed
