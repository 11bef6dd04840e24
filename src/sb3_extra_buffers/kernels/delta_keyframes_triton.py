"""Jitted helpers that choose and make keyframes: parts of `delta_write_triton.write_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

from sb3_extra_buffers.kernels import delta_tables as dt
from sb3_extra_buffers.kernels import policy
from sb3_extra_buffers.kernels.bits_triton import jit_rule
from sb3_extra_buffers.kernels.delta_encode_triton import bound, copy_frame
from sb3_extra_buffers.kernels.state import NONE

__all__ = ["spare_keyframes", "start_segment"]

# Triton reads global names only if they are constexpr
_COST = tl.constexpr(dt.COST)
_EXCESS = tl.constexpr(dt.EXCESS)
_HELD = tl.constexpr(dt.HELD)
_N_PUBLISHED = tl.constexpr(dt.N_PUBLISHED)
_POOL_SIZE = tl.constexpr(policy.POOL_SIZE)
_LEADERS = tl.constexpr(dt.LEADERS)
_NONE = tl.constexpr(NONE)
_FAR = tl.constexpr(1 << 30)  # larger than any keyframe

_initial_cost = jit_rule(policy.initial_cost)
_should_search = jit_rule(policy.should_search)
_should_switch = jit_rule(policy.should_switch)
_needs_keyframe = jit_rule(policy.needs_keyframe)


@triton.jit
def start_segment(
    frame, frame_ptr, segment_keyframe_ptr, keyframe_rows_ptr, keyframe_refs_ptr, published, row_ptr, switched,
    stream, n_streams, n_keyframes,
    SIZE: tl.constexpr, WORDS: tl.constexpr, KEYFRAME_WORDS: tl.constexpr, C: tl.constexpr, N_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Choose the keyframe of a new segment, or make its first frame a keyframe.

    Return the keyframe (negative if there is none), whether it is the frame itself, and whether the stream has changed
    the keyframes it holds in this write.
    """
    held = tl.load(row_ptr + _HELD).to(tl.int32)
    cost = tl.load(row_ptr + _COST).to(tl.int32)
    excess = tl.load(row_ptr + _EXCESS).to(tl.int32)
    keyframe, least = _choose_keyframe(
        frame, frame_ptr, held, cost, keyframe_rows_ptr, published, stream, n_streams,
        SIZE, WORDS, KEYFRAME_WORDS, C, N_BLOCKS,
    )  # fmt: skip
    if keyframe != held:
        cost = least
        excess = tl.full([], 0, tl.int32)
    cost = tl.minimum(cost, least)
    excess += least - cost
    is_leader = (keyframe < 0) & (stream % _LEADERS == 0)
    is_frame = tl.full([], 0, tl.int32)
    if (is_leader | _needs_keyframe(least, excess, SIZE)) & (switched == 0):
        claimed = _claim(keyframe_refs_ptr, n_keyframes, stream)
        if claimed >= 0:
            keyframe = claimed
            is_frame = tl.full([], 1, tl.int32)
            copy_frame(keyframe_rows_ptr + claimed.to(tl.int64) * KEYFRAME_WORDS, frame, frame_ptr, WORDS, C, N_BLOCKS)
            _hold(row_ptr, keyframe_refs_ptr, claimed)
            switched = tl.full([], 1, tl.int32)
            tl.store(row_ptr + _COST, _initial_cost(SIZE))
            tl.store(row_ptr + _EXCESS, 0)
    if is_frame == 0:
        if (keyframe != held) & (switched == 0):
            _hold(row_ptr, keyframe_refs_ptr, keyframe)
            switched = tl.full([], 1, tl.int32)
            held = keyframe
        if keyframe == held:
            tl.store(row_ptr + _COST, cost.to(tl.int64))
            tl.store(row_ptr + _EXCESS, excess.to(tl.int64))
        if keyframe >= 0:
            tl.atomic_add(keyframe_refs_ptr + keyframe, 1, sem="relaxed")
    tl.store(segment_keyframe_ptr, tl.where(keyframe >= 0, keyframe, _NONE))
    return keyframe, is_frame, switched


@triton.jit
def _choose_keyframe(
    frame, frame_ptr, held, cost, keyframe_rows_ptr, published, stream, n_streams,
    SIZE: tl.constexpr, WORDS: tl.constexpr, KEYFRAME_WORDS: tl.constexpr, C: tl.constexpr, N_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The keyframe to encode ``frame`` against, negative if there is none, and a bound on the length."""
    keyframe = held
    held_ptr = keyframe_rows_ptr + tl.maximum(held, 0).to(tl.int64) * KEYFRAME_WORDS
    least = bound(frame, frame_ptr, held_ptr, tl.where(held >= 0, WORDS, 0), SIZE, WORDS, C, N_BLOCKS)
    if (held < 0) | _should_search(least, cost):
        n_published = _N_PUBLISHED * n_streams
        leader = stream - stream % _LEADERS
        for i in range(tl.minimum(_POOL_SIZE, n_published)):
            # the leader's keyframes, then those of the following streams
            first = tl.where(i < _N_PUBLISHED, leader, stream)
            other = tl.load(published + (_N_PUBLISHED * first + i) % n_published)
            if (other >= 0) & (other != keyframe):
                other_ptr = keyframe_rows_ptr + other.to(tl.int64) * KEYFRAME_WORDS
                other_bound = bound(frame, frame_ptr, other_ptr, WORDS, SIZE, WORDS, C, N_BLOCKS)
                if _should_switch(other_bound, least):
                    least = other_bound
                    keyframe = other
    return keyframe, least


@triton.jit
def _hold(row_ptr, keyframe_refs_ptr, keyframe):
    """Hold ``keyframe`` and drop the oldest one held; once per write, as other streams may read the first two."""
    first = tl.load(row_ptr + _HELD)
    second = tl.load(row_ptr + _HELD + 1)
    dropped = tl.load(row_ptr + _HELD + 2)
    tl.debug_barrier()
    if dropped >= 0:
        tl.atomic_add(keyframe_refs_ptr + dropped, -1, sem="relaxed")
    tl.atomic_add(keyframe_refs_ptr + keyframe, 1, sem="relaxed")
    tl.store(row_ptr + _HELD + 2, second)
    tl.store(row_ptr + _HELD + 1, first)
    tl.store(row_ptr + _HELD, keyframe.to(tl.int64))
    tl.debug_barrier()


@triton.jit
def spare_keyframes(keyframe_refs_ptr, n_keyframes, stream):
    """How many keyframes are unused, and how far the first of them is from the keyframe with the stream's number."""
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
    """Take an unused keyframe, with one reference for the segment; -1 if there is none."""
    claimed = tl.full([], -1, tl.int32)
    _spare, nearest = spare_keyframes(keyframe_refs_ptr, n_keyframes, stream)
    while (nearest < _FAR) & (claimed < 0):
        candidate = (nearest + stream) % n_keyframes
        # another program may have claimed it first
        if tl.atomic_cas(keyframe_refs_ptr + candidate, 0, 1, sem="relaxed") == 0:
            claimed = candidate.to(tl.int32)
        else:
            _spare, nearest = spare_keyframes(keyframe_refs_ptr, n_keyframes, stream)
    return claimed
