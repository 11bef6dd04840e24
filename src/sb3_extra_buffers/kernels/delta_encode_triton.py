"""Jitted helpers that encode the difference of two frames, held in registers as 64-bit words."""

from __future__ import annotations

import triton
import triton.language as tl

from sb3_extra_buffers.codecs import delta
from sb3_extra_buffers.kernels.bits_triton import popcount

__all__ = ["STEP", "bound", "copy", "encode", "store_whole"]

_BLOCK = tl.constexpr(delta.BLOCK)
STEP = tl.constexpr(delta.BLOCK // 4)  # bytes that a program encodes or copies at a time


@triton.jit
def _sections(difference, WORDS: tl.constexpr):
    """Masks of a difference: of bytes in a word, of words in a line, of lines in a group, of groups in a block."""
    masks = tl.zeros([WORDS], tl.int32)
    for byte in tl.static_range(8):
        masks |= (((difference >> (8 * byte)) & 255) != 0).to(tl.int32) << byte
    weight = 1 << (tl.arange(0, 8)[None, :])
    lines = tl.sum(tl.reshape((masks != 0).to(tl.int32), [WORDS // 8, 8]) * weight, axis=1)
    groups = tl.sum(tl.reshape((lines != 0).to(tl.int32), [WORDS // 64, 8]) * weight, axis=1)
    tops = tl.sum(tl.reshape((groups != 0).to(tl.int32), [WORDS // 512, 8]) * weight, axis=1)
    return masks, lines, groups, tops


@triton.jit
def bound(frame, keyframe_ptr, SIZE: tl.constexpr, WORDS: tl.constexpr):
    """The length of the difference to a keyframe if no value repeated the previous one."""
    word = tl.arange(0, WORDS)
    keyframe = tl.load(keyframe_ptr + word, mask=word < (SIZE + 7) // 8, other=0)
    masks, lines, groups, _tops = _sections(frame ^ keyframe, WORDS)
    n_values = tl.sum(popcount(masks), axis=0)
    n_masks = tl.sum((masks != 0).to(tl.int32), axis=0) + tl.sum((lines != 0).to(tl.int32), axis=0)
    n_masks += tl.sum((groups != 0).to(tl.int32), axis=0)
    return (SIZE + _BLOCK - 1) // _BLOCK + n_masks + (n_values + 7) // 8 + n_values


@triton.jit
def encode(target, scratch, frame, reference, SIZE: tl.constexpr, WORDS: tl.constexpr):
    """Write the difference of two frames, or the frame itself if that is not longer; return the length."""
    N_TOPS: tl.constexpr = (SIZE + _BLOCK - 1) // _BLOCK
    masks, lines, groups, tops = _sections(frame ^ reference, WORDS)
    changed = popcount(masks)
    n_values = tl.sum(changed, axis=0)
    # every thread has read what an earlier difference left in scratch
    tl.debug_barrier()
    rank = tl.cumsum(changed, axis=0) - changed
    for byte in tl.static_range(8):
        has = (masks >> byte) & 1
        tl.store(scratch + rank, ((frame >> (8 * byte)) & 255).to(tl.uint8), mask=has > 0)
        rank += has
    top = tl.arange(0, WORDS // 512)
    tl.store(target + top, tops.to(tl.uint8), mask=top < N_TOPS)
    at = N_TOPS + _store_nonzero(target + N_TOPS, groups)
    at += _store_nonzero(target + at, lines)
    at += _store_nonzero(target + at, masks)
    values_at = at + (n_values + 7) // 8
    tl.debug_barrier()
    n_fresh = _store_values(target + at, target + values_at, scratch, n_values)
    length = tl.where(n_values > 0, values_at + n_fresh, 0)
    if length >= SIZE:
        tl.debug_barrier()
        store_whole(target, frame, SIZE, WORDS)
        length = tl.full([], SIZE, tl.int32)
    return length


@triton.jit
def _store_nonzero(target, masks):
    """Write the nonzero masks one after the other; return how many."""
    nonzero = (masks != 0).to(tl.int32)
    tl.store(target + tl.cumsum(nonzero, axis=0) - nonzero, masks.to(tl.uint8), mask=nonzero > 0)
    return tl.sum(nonzero, axis=0)


@triton.jit
def _store_values(bits, target, values, n_values):
    """Write the values that differ from the one before, and a bit per value that tells which; return how many."""
    n_fresh = 0
    for base in range(0, n_values, STEP):
        i = base + tl.arange(0, STEP)
        value = tl.load(values + i, mask=i < n_values, other=0)
        before = tl.load(values + i - 1, mask=(i > 0) & (i < n_values), other=0)
        fresh = (((value != before) | (i == 0)) & (i < n_values)).to(tl.int32)
        tl.store(target + n_fresh + tl.cumsum(fresh, axis=0) - fresh, value, mask=fresh > 0)
        packed = tl.sum(tl.reshape(fresh, [STEP // 8, 8]) * (1 << tl.arange(0, 8)[None, :]), axis=1)
        j = base // 8 + tl.arange(0, STEP // 8)
        tl.store(bits + j, packed.to(tl.uint8), mask=8 * j < n_values)
        n_fresh += tl.sum(fresh, axis=0)
    return n_fresh


@triton.jit
def store_whole(target, frame, SIZE: tl.constexpr, WORDS: tl.constexpr):
    """Write a frame as it is."""
    word = tl.arange(0, WORDS)
    for byte in tl.static_range(8):
        position = 8 * word + byte
        tl.store(target + position, ((frame >> (8 * byte)) & 255).to(tl.uint8), mask=position < SIZE)


@triton.jit
def copy(target, source, count, AT_ONCE: tl.constexpr):
    """Copy ``count`` bytes, ``AT_ONCE`` at a time."""
    for base in range(0, count, AT_ONCE):
        i = base + tl.arange(0, AT_ONCE)
        tl.store(target + i, tl.load(source + i, mask=i < count, other=0), mask=i < count)
