"""Differences between rows, compiled: `codecs.delta` says what they consist of.

Processors that move bytes by a mask (AVX-512 VBMI2) take a line of 64 bytes at once, others a word of eight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from sb3_extra_buffers.codecs.delta import BLOCK
from sb3_extra_buffers.kernels.intrinsics import (
    HAS_LINES,
    copy_bytes,
    count_ones,
    cut_line,
    fill_line,
    gather_bytes,
    list_children,
    load_byte,
    load_word,
    merge_line,
    spread_bytes,
    store_word,
    unequal_line,
)

# compiled into what calls them, without a cache of their own
_INNER: dict[str, Any] = {"nogil": True}

_LINE = 64
_ONE = np.uint64(1)
_BYTE = np.uint64(255)
_LOW_BITS = np.uint64(0x0101010101010101)
_GATHER_BITS = np.uint64(0x0102040810204080)
# for each byte: its bits widened to bytes, and the indices of its set bits
_WIDENED = np.array([sum(0xFF << 8 * i for i in range(8) if mask >> i & 1) for mask in range(256)], np.uint64)
_BITS = np.array([([i for i in range(8) if mask >> i & 1] + [0] * 8)[:8] for mask in range(256)], np.int32)


@njit(**_INNER)
def _widened(mask: Any) -> Any:
    """The bits of a byte widened to bytes."""
    return load_word(_WIDENED, np.int64(mask << np.uint64(3)))


@njit(**_INNER)
def _changed_bytes(word: Any) -> Any:
    """One bit for each byte of a word that is not zero."""
    word |= word >> np.uint64(4)
    word |= word >> np.uint64(2)
    word |= word >> np.uint64(1)
    return ((word & _LOW_BITS) * _GATHER_BITS) >> np.uint64(56)


@njit(**_INNER)
def _lowest_bits(word: Any, count: int) -> Any:
    return word & ((_ONE << np.uint64(count)) - _ONE) if count < 64 else word


# ---- a line, word by word; `intrinsics` says what each means ----


@njit(**_INNER)
def unequal_words(a: Any, at: int, b: Any, bt: int) -> Any:
    different = np.uint64(0)
    for i in range(0, _LINE, 8):
        different |= load_word(a, at + i) ^ load_word(b, bt + i)
    mask = np.uint64(0)
    if different:
        for i in range(0, _LINE, 8):
            mask |= _changed_bytes(load_word(a, at + i) ^ load_word(b, bt + i)) << np.uint64(i)
    return mask


@njit(**_INNER)
def cut_words(target: Any, to: int, source: Any, at: int, mask: Any) -> None:
    for i in range(0, _LINE, 8):
        part = mask >> np.uint64(i) & _BYTE
        store_word(target, to, gather_bytes(load_word(source, at + i), _widened(part)))
        to += np.int64(count_ones(part))


_unequal, _cut = (unequal_line, cut_line) if HAS_LINES else (unequal_words, cut_words)


# ---- whole differences ----


@njit(**_INNER)
def encode(
    target: Any, at: int, rows: Any, row_at: int, reference: Any, reference_at: int, size: int, scratch: Any
) -> int:
    """Write the difference at ``target[at:]``; 0 if there is none.

    Rows are padded with zeros to whole lines. The four lower sections are gathered in ``scratch``
    first, because each one's place depends on the length of those before it.
    """
    n_lines = (size + _LINE - 1) // _LINE
    n_tops = (size + BLOCK - 1) // BLOCK
    # rooms for the most that each section can hold
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
            line_mask = _changed_bytes(mask)
            store_word(scratch, words + n_words, gather_bytes(mask, _widened(line_mask)))
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
    scratch[values - 1] = ~scratch[values]  # anything but the first value
    for i in range(0, n_values, _LINE):
        mask = _lowest_bits(_unequal(scratch, values + i, scratch, values + i - 1), n_values - i)
        # the words have been copied: their room takes the bits, for the end of a line may lie among the values
        store_word(scratch, words + (i >> 3), mask)
        _cut(target, end, scratch, values + i, mask)
        end += np.int64(count_ones(mask))
    copy_bytes(target, fresh, scratch, words, (n_values + 7) >> 3)
    return end - at


@njit(**_INNER)
def _ones_between(source: Any, begin: int, end: int) -> int:
    total = np.uint64(0)
    while begin + 8 <= end:
        total += count_ones(load_word(source, begin))
        begin += 8
    if begin < end:
        total += count_ones(_lowest_bits(load_word(source, begin), 8 * (end - begin)))
    return np.int64(total)


@njit(**_INNER)
def _entry(entries: Any, place: int) -> int:
    """``entries[place]`` of an int32 array that has a word's bytes to spare."""
    return np.int64(np.uint32(load_word(entries, 4 * place)))


@njit(**_INNER)
def _widen(source: Any, begin: int, end: int, parents: Any, found: Any) -> int:
    """List the children that the masks between ``begin`` and ``end`` name; return how many."""
    count = 0
    for i in range(begin, end):
        mask = np.int64(load_byte(source, i))
        base = _entry(parents, i - begin) << 3
        # all eight every time: cheaper than a branch that is hard to foresee
        list_children(found, count, _BITS, mask, base)
        count += np.int64(count_ones(np.uint64(mask)))
    return count


@njit(**_INNER)
def _sections(source: Any, at: int, end: int, size: int, a: Any, b: Any) -> Any:
    """Where the ``lines``, ``words``, ``fresh`` and ``values`` of a difference begin, and how many values it sets.

    Lists the lines that change in ``b``, with the help of ``a``. The places are -1 where it is damaged.
    """
    damaged = (-1, -1, -1, -1, -1)
    n_tops = (size + BLOCK - 1) // BLOCK
    groups = at + n_tops
    if groups > end:
        return damaged
    for i in range(n_tops):
        b[i] = i
    lines = groups + _widen(source, at, groups, b, a)
    if lines > end:
        return damaged
    words = lines + _widen(source, groups, lines, a, b)
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


@njit(**_INNER)
def apply_words(source: Any, at: int, end: int, row: Any, size: int, a: Any, b: Any, values: Any) -> bool:
    """Apply the difference ``source[at:end]`` to ``row``; False if it is damaged.

    ``row`` has `padded` bytes, so no position a mask can name lies outside it; ``values`` has a line more. ``a`` and
    ``b`` have room for all words and all lines, and one more of these.
    """
    lines, words, fresh, value, n_values = _sections(source, at, end, size, a, b)
    if value < 0:
        return False
    n_words = _widen(source, lines, words, b, a)
    value -= 1
    for i in range((n_values + 7) >> 3):
        # lay the fresh values where their bits are, then let each fill the places after it
        mask = load_byte(source, fresh + i)
        before = load_byte(source, value) * _LOW_BITS
        if mask == 0:
            store_word(values, 8 * i, before)
            continue
        filled = _widened(mask)
        word = spread_bytes(load_word(source, value + 1), filled)
        for shift in (np.uint64(8), np.uint64(16), np.uint64(32)):
            word |= (word << shift) & ~filled
            filled |= filled << shift
        store_word(values, 8 * i, word | (before & ~filled))
        value += np.int64(count_ones(mask))
    done = 0
    for i in range(n_words):
        mask = load_byte(source, words + i)
        places = _widened(mask)
        to = _entry(a, i) << 3
        store_word(row, to, (load_word(row, to) & ~places) | spread_bytes(load_word(values, done), places))
        done += np.int64(count_ones(mask))
    return True


@njit(**_INNER)
def apply_lines(source: Any, at: int, end: int, row: Any, size: int, a: Any, b: Any, values: Any) -> bool:
    """`apply_words`, 64 bytes at a time."""
    lines, words, fresh, value, n_values = _sections(source, at, end, size, a, b)
    if value < 0:
        return False
    value -= 1
    for i in range(0, n_values, _LINE):
        mask = _lowest_bits(load_word(source, fresh + (i >> 3)), n_values - i)
        fill_line(values, i, source, value + 1, mask, load_byte(source, value))
        value += np.int64(count_ones(mask))
    done = 0
    for i in range(words - lines):
        line_mask = load_byte(source, lines + i)
        mask = spread_bytes(load_word(source, words), _widened(line_mask))
        words += np.int64(count_ones(line_mask))
        merge_line(row, _entry(b, i) << 6, values, done, mask)
        done += np.int64(count_ones(mask))
    return True


apply = apply_lines if HAS_LINES else apply_words
