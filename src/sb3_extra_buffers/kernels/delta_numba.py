"""Encoding and applying differences, compiled: `codecs.delta` defines the format and has the reference functions.

Processors that move bytes under a mask (AVX-512 VBMI2) handle a line of 64 bytes at a time, others a word of eight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.delta import BLOCK
from sb3_extra_buffers.kernels.compiling import inner
from sb3_extra_buffers.kernels.intrinsics import (
    HAS_LINES,
    add_to_eight,
    byte_mask,
    copy_bytes,
    count_ones,
    cut_line,
    fill_line,
    gather_bytes,
    load_byte,
    load_int,
    load_quad,
    load_word,
    lowest_bits,
    merge_line,
    nonzero_bytes,
    spread_bytes,
    store_word,
    unequal_line,
)

_LINE = 64
_BYTE = np.uint64(255)
_LOW_BITS = np.uint64(0x0101010101010101)
# for each byte: the indices of its set bits
_SET_BITS = np.array([([i for i in range(8) if mask >> i & 1] + [0] * 8)[:8] for mask in range(256)], np.int32)


# ---- `unequal_line` and `cut_line` of `intrinsics`, word by word ----


@inner
def unequal_words(a: Any, at: int, b: Any, bt: int) -> Any:
    different = np.uint64(0)
    for i in range(0, _LINE, 8):
        different |= load_word(a, at + i) ^ load_word(b, bt + i)
    mask = np.uint64(0)
    if different:
        for i in range(0, _LINE, 8):
            mask |= nonzero_bytes(load_word(a, at + i) ^ load_word(b, bt + i)) << np.uint64(i)
    return mask


@inner
def cut_words(target: Any, to: int, source: Any, at: int, mask: Any) -> None:
    for i in range(0, _LINE, 8):
        part = mask >> np.uint64(i) & _BYTE
        store_word(target, to, gather_bytes(load_word(source, at + i), byte_mask(part)))
        to += np.int64(count_ones(part))


_unequal, _cut = (unequal_line, cut_line) if HAS_LINES else (unequal_words, cut_words)


# ---- whole differences ----


@inner
def encode(
    target: Any, at: int, rows: Any, row_at: int, reference: Any, reference_at: int, size: int, scratch: Any
) -> int:
    """Compiled `encode_delta`: write the difference at ``target[at:]``; return its length, 0 if nothing changed.

    Rows are padded with zeros to whole lines. All sections but ``top`` are built in ``scratch`` first, because the
    offset of each depends on the lengths of those before it. The result may be longer than the row.
    """
    n_lines = (size + _LINE - 1) // _LINE
    n_tops = (size + BLOCK - 1) // BLOCK
    # offsets in scratch: each section has the capacity for its maximum
    words = 0
    lines = words + n_tops * (BLOCK // 8)
    groups = lines + n_tops * (BLOCK // 64)
    values = groups + n_tops * (BLOCK // 512) + 8
    n_words = n_lines_changed = n_groups = n_values = 0
    group_mask = 0
    for i in range(n_tops):
        target[at + i] = 0
    for line in range(n_lines):
        begin = row_at + line * _LINE
        mask = _unequal(rows, begin, reference, reference_at + line * _LINE)
        if mask:
            line_mask = nonzero_bytes(mask)
            store_word(scratch, words + n_words, gather_bytes(mask, byte_mask(line_mask)))
            n_words += np.int64(count_ones(line_mask))
            _cut(scratch, values + n_values, rows, begin, mask)
            n_values += np.int64(count_ones(mask))
            scratch[lines + n_lines_changed] = line_mask
            n_lines_changed += 1
            group_mask |= 1 << (line & 7)
        if group_mask and ((line & 7) == 7 or line == n_lines - 1):
            scratch[groups + n_groups] = group_mask
            n_groups += 1
            group = line >> 3
            target[at + (group >> 3)] |= 1 << (group & 7)
            group_mask = 0
    if n_values == 0:
        return 0
    end = at + n_tops
    copy_bytes(target, end, scratch, groups, n_groups)
    end += n_groups
    copy_bytes(target, end, scratch, lines, n_lines_changed)
    end += n_lines_changed
    copy_bytes(target, end, scratch, words, n_words)
    end += n_words
    fresh, end = end, end + ((n_values + 7) >> 3)
    scratch[values - 1] = ~scratch[values]  # any other value, so that the first one counts as fresh
    for i in range(0, n_values, _LINE):
        mask = lowest_bits(_unequal(scratch, values + i, scratch, values + i - 1), n_values - i)
        # reuse the space of the words, which have been copied: in target, storing a whole word would overwrite values
        store_word(scratch, words + (i >> 3), mask)
        _cut(target, end, scratch, values + i, mask)
        end += np.int64(count_ones(mask))
    copy_bytes(target, fresh, scratch, words, (n_values + 7) >> 3)
    return end - at


@inner
def _ones_between(source: Any, begin: int, end: int) -> int:
    total = np.uint64(0)
    while begin + 8 <= end:
        total += count_ones(load_word(source, begin))
        begin += 8
    if begin < end:
        total += count_ones(lowest_bits(load_word(source, begin), 8 * (end - begin)))
    return np.int64(total)


@inner
def _list_children(source: Any, begin: int, end: int, parents: Any, children: Any) -> int:
    """List the numbers of the children that the masks ``source[begin:end]`` of ``parents`` select; return how many."""
    count = 0
    for i in range(begin, end):
        mask = load_int(source, i)
        base = load_quad(parents, 4 * (i - begin)) << 3
        # always all eight: cheaper than a branch that is hard to predict
        add_to_eight(children, 4 * count, _SET_BITS, 32 * mask, base)
        count += np.int64(count_ones(np.uint64(mask)))
    return count


@inner
def _sections(source: Any, at: int, end: int, size: int, a: Any, b: Any) -> Any:
    """Return the offsets of ``lines``, ``words``, ``fresh`` and ``values`` in a difference, and how many bytes it sets.

    All are -1 if the difference is damaged. Lists the lines that change in ``b``; ``a`` is work space.
    """
    damaged = (-1, -1, -1, -1, -1)
    n_tops = (size + BLOCK - 1) // BLOCK
    groups = at + n_tops
    if groups > end:
        return damaged
    for i in range(0, n_tops, 8):
        add_to_eight(b, 4 * i, _SET_BITS, 32 * 255, i)
    lines = groups + _list_children(source, at, groups, b, a)
    if lines > end:
        return damaged
    words = lines + _list_children(source, groups, lines, a, b)
    if words > end:
        return damaged
    fresh = words + _ones_between(source, lines, words)
    if fresh > end:
        return damaged
    n_values = _ones_between(source, words, fresh)
    values = fresh + ((n_values + 7) >> 3)
    if values > end or values + _ones_between(source, fresh, values) != end:
        return damaged
    return lines, words, fresh, values, n_values


@inner
def apply_words(source: Any, at: int, end: int, row: Any, size: int, a: Any, b: Any, values: Any) -> bool:
    """Compiled `apply_delta`: apply the difference ``source[at:end]`` to ``row``; return False if it is damaged.

    ``row`` has `padded` bytes, so every position that a mask can select is inside it; ``values`` has a line more.
    ``a`` and ``b`` can hold the numbers of all words and all lines, and eight more.
    """
    lines, words, fresh, value, n_values = _sections(source, at, end, size, a, b)
    if value < 0:
        return False
    n_words = _list_children(source, lines, words, b, a)
    value -= 1
    for i in range((n_values + 7) >> 3):
        # move the fresh values to their bits, then repeat each one up to the next
        mask = load_byte(source, fresh + i)
        before = load_byte(source, value) * _LOW_BITS
        if mask == 0:
            store_word(values, 8 * i, before)
            continue
        filled = byte_mask(mask)
        word = spread_bytes(load_word(source, value + 1), filled)
        for shift in (np.uint64(8), np.uint64(16), np.uint64(32)):
            word |= (word << shift) & ~filled
            filled |= filled << shift
        store_word(values, 8 * i, word | (before & ~filled))
        value += np.int64(count_ones(mask))
    done = 0
    for i in range(n_words):
        mask = load_byte(source, words + i)
        changed = byte_mask(mask)
        to = load_quad(a, 4 * i) << 3
        store_word(row, to, (load_word(row, to) & ~changed) | spread_bytes(load_word(values, done), changed))
        done += np.int64(count_ones(mask))
    return True


@inner
def apply_lines(source: Any, at: int, end: int, row: Any, size: int, a: Any, b: Any, values: Any) -> bool:
    """`apply_words`, 64 bytes at a time."""
    lines, words, fresh, value, n_values = _sections(source, at, end, size, a, b)
    if value < 0:
        return False
    value -= 1
    for i in range(0, n_values, _LINE):
        mask = lowest_bits(load_word(source, fresh + (i >> 3)), n_values - i)
        fill_line(values, i, source, value, mask)
        value += np.int64(count_ones(mask))
    done = 0
    for i in range(words - lines):
        line_mask = load_byte(source, lines + i)
        mask = spread_bytes(load_word(source, words), byte_mask(line_mask))
        words += np.int64(count_ones(line_mask))
        merge_line(row, load_quad(b, 4 * i) << 6, values, done, mask)
        done += np.int64(count_ones(mask))
    return True


apply = apply_lines if HAS_LINES else apply_words
