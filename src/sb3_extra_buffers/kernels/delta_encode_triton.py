"""Jitted helpers that encode the difference of two frames, in the format of `kernels.delta_tables`.

A block is ``C`` chunks of a frame, ``[C, 256]`` words of 8 bytes in registers. A frame of a single block is passed in
registers; one of several blocks is loaded block by block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sb3_extra_buffers.kernels import delta_tables as dt
from sb3_extra_buffers.kernels.bits_triton import popcount

__all__ = ["block_of", "bound", "copy_frame", "encode", "load_block"]

_CHUNK = tl.constexpr(dt.CHUNK)
_WORDS = tl.constexpr(dt.CHUNK // 8)
_LINES = tl.constexpr(dt.CHUNK // 64)
_GROUPS = tl.constexpr(dt.CHUNK // 512)
_STEP = tl.constexpr(256)  # values of a chunk that are handled at a time
_TAKE = tl.constexpr(32)  # changed words of a chunk that are handled at a time
_COPY = tl.constexpr(1024)  # bytes that are copied at a time
_SCRATCH = tl.constexpr(dt.SCRATCH)
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
def copy_frame(target_ptr, frame, frame_ptr, WORDS: tl.constexpr, C: tl.constexpr, N_BLOCKS: tl.constexpr):
    """Copy a frame to ``target_ptr``."""
    for block in range(N_BLOCKS):
        word = (block * C + tl.arange(0, C))[:, None] * 256 + tl.arange(0, 256)[None, :]
        words = block_of(frame, frame_ptr, block, WORDS, C, N_BLOCKS)
        tl.store(target_ptr + word, words, mask=word < WORDS)


@triton.jit
def _nonzero_bytes(half):
    """The mask of the nonzero bytes of 32 bits."""
    # the highest bit of each byte: adding 127 to the other bits carries into it if any of them is set
    highest = (((half & 0x7F7F7F7F) + 0x7F7F7F7F) | half) & 0x80808080
    # one product moves the four bits to the top
    return (highest * 0x00204081) >> 28


@triton.jit
def _sections(difference, C: tl.constexpr):
    """What changed, as bit masks: the bytes of each word, the words of each line, the lines of each group."""
    low = _nonzero_bytes(difference.to(tl.uint32))
    masks = (low | (_nonzero_bytes((difference >> 32).to(tl.uint32)) << 4)).to(tl.int32)
    weight = 1 << (tl.arange(0, 8)[None, None, :])
    lines = tl.sum(tl.reshape((masks != 0).to(tl.int32), [C, _LINES, 8]) * weight, axis=2)
    groups = tl.sum(tl.reshape((lines != 0).to(tl.int32), [C, _GROUPS, 8]) * weight, axis=2)
    return masks, lines, groups


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
        packed = tl.sum(popcount(masks) + ((masks != 0).to(tl.int32) << 16), axis=1)
        n_values = packed & 0xFFFF
        length = _count(groups) + _count(lines) + (packed >> 16) + (n_values + 7) // 8 + n_values
        total += tl.sum(tl.minimum(length, _raw_bytes(block, SIZE, C)), axis=0)
    return total


@triton.jit
def encode(
    heap_ptr, counters_ptr, scratch, packed_ptr, frame, frame_ptr, reference_ptr, reference_words, tail, capacity,
    SIZE: tl.constexpr, WORDS: tl.constexpr, C: tl.constexpr, N_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store the difference of two frames in the heap; return its entry and its length.

    A frame of several blocks is encoded in ``packed_ptr``, memory for ``SIZE`` bytes, and then copied.
    """
    N_CHUNKS: tl.constexpr = (SIZE + _CHUNK - 1) // _CHUNK
    total = tl.full([], 0, tl.int32)
    directory_ptr = scratch + C * _SCRATCH
    if N_BLOCKS == 1:
        masks, lines, groups = _sections(frame ^ load_block(reference_ptr, 0, reference_words, C), C)
        lengths, is_raw, n_words, n_values = _measure(frame, masks, lines, groups, scratch, 0, SIZE, C)
        total += tl.sum(lengths, axis=0)
    else:
        for block in range(N_BLOCKS):
            words = load_block(frame_ptr, block, WORDS, C)
            masks, lines, groups = _sections(words ^ load_block(reference_ptr, block, reference_words, C), C)
            lengths, is_raw, n_words, n_values = _measure(words, masks, lines, groups, scratch, block, SIZE, C)
            _store_block(
                packed_ptr + total, directory_ptr, words, lines, groups, scratch, lengths, is_raw, n_words, n_values,
                block, SIZE, C,
            )  # fmt: skip
            total += tl.sum(lengths, axis=0)
    entry = tl.full([], 0, tl.int64)
    length = tl.where(total > 0, total + 2 * N_CHUNKS, 0)
    if total > 0:
        offset = _allocate(counters_ptr, length, tail, capacity)
        if offset >= 0:
            entry = (offset << _LENGTH_BITS) | length
            target = heap_ptr + offset
            if N_BLOCKS == 1:
                _store_block(
                    target + 2 * N_CHUNKS, target, frame, lines, groups, scratch, lengths, is_raw, n_words, n_values,
                    0, SIZE, C,
                )  # fmt: skip
            else:
                tl.debug_barrier()
                _copy_bytes(target, directory_ptr, 2 * N_CHUNKS)
                _copy_bytes(target + 2 * N_CHUNKS, packed_ptr, total)
                tl.debug_barrier()
    return entry, length


@triton.jit
def _copy_bytes(target_ptr, source_ptr, n_bytes):
    for first in range(0, n_bytes, _COPY):
        i = first + tl.arange(0, _COPY)
        tl.store(target_ptr + i, tl.load(source_ptr + i, mask=i < n_bytes, other=0), mask=i < n_bytes)


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
def _count(masks):
    """How many masks of each chunk are not zero."""
    return tl.sum((masks != 0).to(tl.int32), axis=1)


@triton.jit
def _kept_masks(scratch, first, n_words, C: tl.constexpr):
    """The next masks of changed words of each chunk, their numbers, and whether there are as many."""
    i = first + tl.arange(0, _TAKE)[None, :] + tl.zeros([C, _TAKE], tl.int32)
    exists = i < n_words[:, None]
    at = scratch + C * _CHUNK + tl.arange(0, C)[:, None] * _WORDS + i
    return tl.load(at, mask=exists, other=0), i, exists


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
def _measure(words, masks, lines, groups, scratch, block, SIZE: tl.constexpr, C: tl.constexpr):
    """The length of each chunk, whether it is stored uncompressed, and how many words and bytes of it changed.

    Scratch memory then has the values of the changed bytes and, after those, the masks of the changed words.
    """
    changed = (masks != 0).to(tl.int32)
    n_words = tl.sum(changed, axis=1)
    # few words change, so that they are moved together first
    chunk = tl.arange(0, C)[:, None]
    at = chunk * _WORDS + tl.cumsum(changed, axis=1) - changed
    words_ptr = scratch.to(tl.pointer_type(tl.int64), bitcast=True)
    # wait until every thread has read what the previous call left in scratch
    tl.debug_barrier()
    tl.store(words_ptr + at, words, mask=changed > 0)
    tl.store(scratch + C * _CHUNK + at, masks.to(tl.uint8), mask=changed > 0)
    tl.debug_barrier()
    n_values = tl.zeros([C], tl.int32)
    for first in range(0, tl.max(n_words, axis=0), _TAKE):
        mask, i, exists = _kept_masks(scratch, first, n_words, C)
        word = tl.load(words_ptr + chunk * _WORDS + i, mask=exists, other=0)
        has = mask.to(tl.int32)
        n_bytes = popcount(has)
        value_at = scratch + chunk * _CHUNK + n_values[:, None] + tl.cumsum(n_bytes, axis=1) - n_bytes
        # the values replace words that every thread has read
        tl.debug_barrier()
        for byte in tl.static_range(8):
            bit = (has >> byte) & 1
            tl.store(value_at, ((word >> (8 * byte)) & 255).to(tl.uint8), mask=bit > 0)
            value_at += bit
        n_values += tl.sum(n_bytes, axis=1)
    tl.debug_barrier()
    n_fresh = tl.zeros([C], tl.int32)
    for first in range(0, tl.max(n_values, axis=0), _STEP):
        _value, _i, fresh = _fresh_values(scratch, first, n_values, C)
        n_fresh += tl.sum(fresh, axis=1)
    length = _count(groups) + _count(lines) + n_words + (n_values + 7) // 8 + n_fresh
    raw = _raw_bytes(block, SIZE, C)
    is_raw = (length >= raw) & (n_values > 0)
    return tl.where(is_raw, raw, length), is_raw.to(tl.int32), n_words, n_values


@triton.jit
def _store_block(
    target_ptr, directory_ptr, words, lines, groups, scratch, lengths, is_raw, n_words, n_values, block,
    SIZE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store the chunks of a block one after the other, and their entries in the frame's directory."""
    chunk = block * C + tl.arange(0, C)
    top = tl.sum((groups != 0).to(tl.int32) << tl.arange(0, _GROUPS)[None, :], axis=1) * (1 - is_raw)
    directory = directory_ptr + 2 * chunk
    exists = chunk * _CHUNK < SIZE
    tl.store(directory, (lengths & 255).to(tl.uint8), mask=exists)
    tl.store(directory + 1, ((lengths >> 8) | (top << 4)).to(tl.uint8), mask=exists)
    target = target_ptr + tl.cumsum(lengths, axis=0) - lengths
    is_coded = (is_raw == 0) & (n_values > 0)
    _store_nonzero(target, groups, is_coded)
    to = target + _count(groups)
    _store_nonzero(to, lines, is_coded)
    to += _count(lines)
    n_coded = tl.where(is_coded, n_words, 0)
    for first in range(0, tl.max(n_coded, axis=0), _TAKE):
        mask, i, has = _kept_masks(scratch, first, n_coded, C)
        tl.store(to[:, None] + i, mask, mask=has)
    bits = to + n_words
    values = bits + (n_values + 7) // 8
    n_coded = tl.where(is_coded, n_values, 0)
    for first in range(0, tl.max(n_coded, axis=0), _STEP):
        value, _i, fresh = _fresh_values(scratch, first, n_coded, C)
        value_at = values[:, None] + tl.cumsum(fresh, axis=1) - fresh
        tl.store(value_at, value, mask=fresh > 0)
        packed = tl.sum(tl.reshape(fresh, [C, _STEP // 8, 8]) * (1 << tl.arange(0, 8)[None, None, :]), axis=2)
        j = first // 8 + tl.arange(0, _STEP // 8)[None, :]
        tl.store(bits[:, None] + j, packed.to(tl.uint8), mask=8 * j < n_coded[:, None])
        values += tl.sum(fresh, axis=1)
    if tl.max(is_raw, axis=0) > 0:
        raw = _raw_bytes(block, SIZE, C)
        for byte in tl.static_range(8):
            position = 8 * tl.arange(0, _WORDS)[None, :] + byte
            value = ((words >> (8 * byte)) & 255).to(tl.uint8)
            tl.store(target[:, None] + position, value, mask=(position < raw[:, None]) & (is_raw > 0)[:, None])


@triton.jit
def _store_nonzero(target, masks, is_coded):
    """Write the nonzero masks of each chunk one after the other."""
    nonzero = (masks != 0).to(tl.int32)
    to = target[:, None] + tl.cumsum(nonzero, axis=1) - nonzero
    tl.store(to, masks.to(tl.uint8), mask=(nonzero > 0) & is_coded[:, None])
