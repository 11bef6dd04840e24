"""Jitted helpers that encode the difference of two frames, in the format of `kernels.delta_tables`.

A block is ``C`` chunks of a frame, ``[C, 256]`` words of 8 bytes in registers. A frame of a single block is passed in
registers; one of several blocks is loaded block by block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sb3_extra_buffers.kernels import delta_tables as dt
from sb3_extra_buffers.kernels.bits_triton import popcount

__all__ = ["block_of", "bound", "encode", "load_block"]

_CHUNK = tl.constexpr(dt.CHUNK)
_WORDS = tl.constexpr(dt.CHUNK // 8)
_LINES = tl.constexpr(dt.CHUNK // 64)
_GROUPS = tl.constexpr(dt.CHUNK // 512)
_STEP = tl.constexpr(256)  # values of a chunk that are handled at a time
_HEAD = tl.constexpr(dt.HEAD)
_NEEDED = tl.constexpr(dt.NEEDED)
_LENGTH_BITS = tl.constexpr(dt.LENGTH_BITS)


@triton.jit
def load_block(words_ptr, block, n_words, C: tl.constexpr):
    """Block number ``block`` of a frame of ``n_words``; zeros beyond its end."""
    word = (block * C + tl.arange(0, C))[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    return tl.load(words_ptr + word, mask=word < n_words, other=0)


@triton.jit
def block_of(frame, frame_ptr, block, WORDS: tl.constexpr, C: tl.constexpr, N_BLOCKS: tl.constexpr):
    """Block number ``block`` of a frame: ``frame`` itself if that is the only one."""
    if N_BLOCKS == 1:
        return frame
    return load_block(frame_ptr, block, WORDS, C)


@triton.jit
def _sections(difference, C: tl.constexpr):
    """What changed, as bit masks: the bytes of each word, the words of each line, the lines of each group."""
    masks = tl.zeros([C, _WORDS], tl.int32)
    for byte in tl.static_range(8):
        masks |= (((difference >> (8 * byte)) & 255) != 0).to(tl.int32) << byte
    weight = 1 << (tl.arange(0, 8)[None, None, :])
    lines = tl.sum(tl.reshape((masks != 0).to(tl.int32), [C, _LINES, 8]) * weight, axis=2)
    groups = tl.sum(tl.reshape((lines != 0).to(tl.int32), [C, _GROUPS, 8]) * weight, axis=2)
    return masks, lines, groups


@triton.jit
def _counts(masks, lines, groups):
    """How many groups, lines, words and bytes of each chunk changed."""
    packed = tl.sum(popcount(masks) + ((masks != 0).to(tl.int32) << 16), axis=1)
    n_lines = tl.sum((lines != 0).to(tl.int32), axis=1)
    n_groups = tl.sum((groups != 0).to(tl.int32), axis=1)
    return n_groups, n_lines, packed >> 16, packed & 0xFFFF


@triton.jit
def _raw_bytes(block, SIZE: tl.constexpr, C: tl.constexpr):
    """Bytes of each chunk of a block, uncompressed."""
    first = (block * C + tl.arange(0, C)) * _CHUNK
    return tl.minimum(tl.maximum(SIZE - first, 0), _CHUNK)


@triton.jit
def bound(
    frame, frame_ptr, reference_ptr, reference_words,
    SIZE: tl.constexpr, WORDS: tl.constexpr, C: tl.constexpr, N_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The length of the difference if no value repeated the previous one; a reference of 0 words is zeros."""
    total = tl.full([], 2 * ((SIZE + _CHUNK - 1) // _CHUNK), tl.int32)
    for block in range(N_BLOCKS):
        words = block_of(frame, frame_ptr, block, WORDS, C, N_BLOCKS)
        masks, lines, groups = _sections(words ^ load_block(reference_ptr, block, reference_words, C), C)
        n_groups, n_lines, n_words, n_values = _counts(masks, lines, groups)
        length = n_groups + n_lines + n_words + (n_values + 7) // 8 + n_values
        total += tl.sum(tl.minimum(length, _raw_bytes(block, SIZE, C)), axis=0)
    return total


@triton.jit
def encode(
    heap_ptr, counters_ptr, scratch, frame, frame_ptr, reference_ptr, reference_words, tail, capacity,
    SIZE: tl.constexpr, WORDS: tl.constexpr, C: tl.constexpr, N_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store the difference of two frames in the heap; return its entry and its length."""
    N_CHUNKS: tl.constexpr = (SIZE + _CHUNK - 1) // _CHUNK
    total = tl.full([], 0, tl.int32)
    if N_BLOCKS == 1:
        masks, lines, groups = _sections(frame ^ load_block(reference_ptr, 0, reference_words, C), C)
        lengths, is_raw, n_fresh = _measure(frame, masks, lines, groups, scratch, 0, SIZE, C)
        total += tl.sum(lengths, axis=0)
    else:
        for block in range(N_BLOCKS):
            words = load_block(frame_ptr, block, WORDS, C)
            masks, lines, groups = _sections(words ^ load_block(reference_ptr, block, reference_words, C), C)
            lengths, _is_raw, _n_fresh = _measure(words, masks, lines, groups, scratch, block, SIZE, C)
            total += tl.sum(lengths, axis=0)
    entry = tl.full([], 0, tl.int64)
    length = tl.where(total > 0, total + 2 * N_CHUNKS, 0)
    if total > 0:
        offset = _allocate(counters_ptr, length, tail, capacity)
        if offset >= 0:
            entry = (offset << _LENGTH_BITS) | length
            at = offset + 2 * N_CHUNKS
            if N_BLOCKS == 1:
                _store_block(
                    heap_ptr, offset, at, frame, masks, lines, groups, scratch, lengths, is_raw, n_fresh, 0, SIZE, C
                )
            else:
                for block in range(N_BLOCKS):
                    words = load_block(frame_ptr, block, WORDS, C)
                    masks, lines, groups = _sections(words ^ load_block(reference_ptr, block, reference_words, C), C)
                    lengths, is_raw, n_fresh = _measure(words, masks, lines, groups, scratch, block, SIZE, C)
                    _store_block(
                        heap_ptr, offset, at, words, masks, lines, groups, scratch, lengths, is_raw, n_fresh, block,
                        SIZE, C,
                    )  # fmt: skip
                    at += tl.sum(lengths, axis=0)
    return entry, length


@triton.jit
def _allocate(counters_ptr, length, tail, capacity):
    """An offset in the heap for ``length`` bytes, or -1 after counting the bytes that do not fit."""
    start = tl.full([], 0, tl.int64)
    fits = length <= capacity
    if fits:
        start = tl.atomic_add(counters_ptr + _HEAD, length.to(tl.int64), sem="relaxed")
        # skip the seam: no frame is split in two
        while start % capacity + length > capacity:
            start = tl.atomic_add(counters_ptr + _HEAD, length.to(tl.int64), sem="relaxed")
        fits = start + length - tail <= capacity
    if not fits:
        tl.atomic_add(counters_ptr + _NEEDED, length.to(tl.int64), sem="relaxed")
    return tl.where(fits, start % capacity, -1)


@triton.jit
def _fresh_values(scratch, first, n_values, C: tl.constexpr):
    """The next values of each chunk, their numbers, and which of them differ from the one before."""
    i = first + tl.arange(0, _STEP)[None, :] + tl.zeros([C, _STEP], tl.int32)
    at = scratch + tl.arange(0, C)[:, None] * _CHUNK + i
    exists = i < n_values[:, None]
    value = tl.load(at, mask=exists, other=0)
    before = tl.load(at - 1, mask=exists & (i > 0), other=0)
    return value, i, (exists & ((value != before) | (i == 0))).to(tl.int32)


@triton.jit
def _measure(frame, masks, lines, groups, scratch, block, SIZE: tl.constexpr, C: tl.constexpr):
    """The length of each chunk, whether it is stored uncompressed, and how many of its values are fresh.

    The values of the changed bytes are left in scratch.
    """
    n_groups, n_lines, n_words, n_values = _counts(masks, lines, groups)
    changed = popcount(masks)
    # wait until every thread has read what the previous call left in scratch
    tl.debug_barrier()
    at = scratch + tl.arange(0, C)[:, None] * _CHUNK + tl.cumsum(changed, axis=1) - changed
    for byte in tl.static_range(8):
        has = (masks >> byte) & 1
        tl.store(at, ((frame >> (8 * byte)) & 255).to(tl.uint8), mask=has > 0)
        at += has
    tl.debug_barrier()
    n_fresh = tl.zeros([C], tl.int32)
    for first in range(0, tl.max(n_values, axis=0), _STEP):
        _value, _i, fresh = _fresh_values(scratch, first, n_values, C)
        n_fresh += tl.sum(fresh, axis=1)
    length = n_groups + n_lines + n_words + (n_values + 7) // 8 + n_fresh
    raw = _raw_bytes(block, SIZE, C)
    is_raw = (length >= raw) & (n_values > 0)
    return tl.where(is_raw, raw, length), is_raw.to(tl.int32), n_fresh


@triton.jit
def _store_block(
    heap_ptr, directory_at, at, frame, masks, lines, groups, scratch, lengths, is_raw, n_fresh, block,
    SIZE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store the chunks of a block from ``at`` on, and their entries in the frame's directory."""
    chunk = block * C + tl.arange(0, C)
    n_groups, n_lines, n_words, n_values = _counts(masks, lines, groups)
    top = tl.sum((groups != 0).to(tl.int32) << tl.arange(0, _GROUPS)[None, :], axis=1) * (1 - is_raw)
    directory = heap_ptr + directory_at + 2 * chunk
    exists = chunk * _CHUNK < SIZE
    tl.store(directory, (lengths & 255).to(tl.uint8), mask=exists)
    tl.store(directory + 1, ((lengths >> 8) | (top << 4)).to(tl.uint8), mask=exists)
    target = heap_ptr + at + tl.cumsum(lengths, axis=0) - lengths
    is_coded = (is_raw == 0) & (n_values > 0)
    _store_nonzero(target, groups, is_coded)
    _store_nonzero(target + n_groups, lines, is_coded)
    _store_nonzero(target + n_groups + n_lines, masks, is_coded)
    bits = target + n_groups + n_lines + n_words
    values = bits + (n_values + 7) // 8
    n_coded = tl.where(is_coded, n_values, 0)
    for first in range(0, tl.max(n_coded, axis=0), _STEP):
        value, _i, fresh = _fresh_values(scratch, first, n_coded, C)
        to = values[:, None] + tl.cumsum(fresh, axis=1) - fresh
        tl.store(to, value, mask=fresh > 0)
        packed = tl.sum(tl.reshape(fresh, [C, _STEP // 8, 8]) * (1 << tl.arange(0, 8)[None, None, :]), axis=2)
        j = first // 8 + tl.arange(0, _STEP // 8)[None, :]
        tl.store(bits[:, None] + j, packed.to(tl.uint8), mask=8 * j < n_coded[:, None])
        values += tl.sum(fresh, axis=1)
    if tl.max(is_raw, axis=0) > 0:
        raw = _raw_bytes(block, SIZE, C)
        for byte in tl.static_range(8):
            position = 8 * tl.arange(0, _WORDS)[None, :] + byte
            value = ((frame >> (8 * byte)) & 255).to(tl.uint8)
            tl.store(target[:, None] + position, value, mask=(position < raw[:, None]) & (is_raw > 0)[:, None])


@triton.jit
def _store_nonzero(target, masks, is_coded):
    """Write the nonzero masks of each chunk one after the other."""
    nonzero = (masks != 0).to(tl.int32)
    to = target[:, None] + tl.cumsum(nonzero, axis=1) - nonzero
    tl.store(to, masks.to(tl.uint8), mask=(nonzero > 0) & is_coded[:, None])
