"""The LZ4 block format, for segments in which much changes.

Segments are decoded inside a compiled loop, where a C library could not be called without taking the interpreter lock.
So numba compiles these functions (`kernels.lz4_numba`); without numba they run as they are, slowly.
"""

from __future__ import annotations

import numpy as np

from sb3_extra_buffers.kernels.state import Bytes, Ints32

#: entries of the hash table that `pack_block` finds matches with
TABLE = 4096
#: bytes past the end of a target that `unpack_block` may write, and that reading a difference there may load
OVERRUN = 64

# rules of the format: the shortest match, and how close to the end the last match may start and stop
_MIN_MATCH = 4
_LAST_START = 12
_LAST_STOP = 5
_MAX_OFFSET = 65535
# shorter matches are not used: without those of 4 and 5 bytes decoding has 37 % fewer steps, for 3 % more bytes
_WORTHWHILE_MATCH = 6


def pack_block(source: Bytes, size: int, target: Bytes) -> int:
    """Compress ``source[:size]`` into ``target``; return the length, or 0 if it does not fit."""
    table = new_table()
    start = done = 0
    end = 0
    while start < size - _LAST_START:
        match, length = find_match(source, start, size, table)
        table[hash_of(source, start)] = start
        if length == 0:
            start += 1
            continue
        # lazy matching: a longer match one byte later is worth a literal, and decodes faster
        while start + 1 < size - _LAST_START:
            next_match, next_length = find_match(source, start + 1, size, table)
            if next_length <= length:
                break
            start, match, length = start + 1, next_match, next_length
            table[hash_of(source, start)] = start
        end = put_sequence(source, done, start - done, target, end, start - match, length)
        if end == 0:
            return 0
        start += length
        done = start
    return put_sequence(source, done, size - done, target, end, 0, 0)


def find_match(source: Bytes, start: int, size: int, table: Ints32) -> tuple[int, int]:
    """Return where the bytes at ``start`` occurred before and how many of them; a length of 0 if too few did."""
    match = int(table[hash_of(source, start)])
    if match < 0 or start - match > _MAX_OFFSET or load_quad(source, match) != load_quad(source, start):
        return 0, 0
    length = _MIN_MATCH + common_length(source, match + _MIN_MATCH, start + _MIN_MATCH, size - _LAST_STOP)
    return (match, length) if length >= _WORTHWHILE_MATCH else (0, 0)


def hash_of(source: Bytes, start: int) -> int:
    """Index in the hash table: Knuth's multiplicative hash of four bytes, as in LZ4's own encoder."""
    return ((load_quad(source, start) * 2654435761) & 0xFFFFFFFF) >> 20


def put_sequence(source: Bytes, start: int, n_literals: int, target: Bytes, end: int, offset: int, length: int) -> int:
    """Write literals and, unless ``offset`` is 0, a match; return the new end, or 0 if they do not fit."""
    if end + n_literals + n_literals // 255 + length // 255 + 8 > len(target):
        return 0
    extra = length - _MIN_MATCH
    target[end] = min(n_literals, 15) << 4 | (min(extra, 15) if offset else 0)
    end += 1
    if n_literals >= 15:
        end = put_length(target, end, n_literals - 15)
    copy_run(target, end, source, start, n_literals)
    end += n_literals
    if offset:
        target[end] = offset & 255
        target[end + 1] = offset >> 8
        end += 2
        if extra >= 15:
            end = put_length(target, end, extra - 15)
    return end


def put_length(target: Bytes, end: int, rest: int) -> int:
    """Write what a token's four bits cannot hold of a length; return the new end."""
    while rest >= 255:
        target[end] = 255
        end += 1
        rest -= 255
    target[end] = rest
    return end + 1


def unpack_block(source: Bytes, start: int, stop: int, target: Bytes, size: int, needed: int) -> bool:
    """Decompress ``source[start:stop]`` into ``target[:size]``; return False if it is damaged.

    Stops early once ``needed`` bytes are decoded. ``target`` must extend `OVERRUN` bytes past ``size``, and ``source``
    as far past ``stop``.
    """
    end = 0
    while start < stop:
        if end >= needed and needed < size:
            return True
        token = load(source, start)
        start += 1
        start, n_literals = extend_length(source, start, stop, token >> 4)
        if n_literals > stop - start or n_literals > size - end:
            return False
        copy_ahead(target, end, source, start, n_literals)
        start += n_literals
        end += n_literals
        if start == stop:
            return end == size
        if stop - start < 2:
            return False
        offset = load(source, start) | load(source, start + 1) << 8
        start += 2
        length = token & 15
        if length == 15:
            start, length = get_length(source, start, stop)
        length += _MIN_MATCH
        if offset == 0 or offset > end or length > size - end:
            return False
        repeat(target, end, offset, length)
        end += length
    return False


def count_sequences(source: Bytes, start: int, stop: int) -> int:
    """The number of literals and matches in a block: decoding takes a step for each pair of them."""
    count = 0
    while start < stop:
        token = load(source, start)
        start += 1
        n_literals = token >> 4
        if n_literals == 15:
            start, n_literals = get_length(source, start, stop)
        start += n_literals + 2
        if token & 15 == 15:
            start, _ = get_length(source, start, stop)
        count += 1
    return count


def get_length(source: Bytes, start: int, stop: int) -> tuple[int, int]:
    """Undo `put_length`: return the new start and the whole length; one that is cut off becomes too large to fit."""
    length = 15
    while start < stop:
        part = load(source, start)
        start += 1
        length += part
        if part != 255:
            return start, length
    return start, 1 << 62


# ---- functions that touch every byte; `lz4_numba` replaces these ----


def extend_length(source: Bytes, start: int, stop: int, length: int) -> tuple[int, int]:
    """`get_length` if the four bits of a token that hold ``length`` say that there is more, otherwise nothing."""
    return get_length(source, start, stop) if length == 15 else (start, length)


def new_table() -> Ints32:
    """Return an empty hash table."""
    return np.full(TABLE, -1, np.int32)


def load(source: Bytes, at: int) -> int:
    """Return a byte as an integer."""
    return int(source[at])


def load_quad(source: Bytes, at: int) -> int:
    """Return four bytes as a little-endian integer."""
    return int.from_bytes(source[at : at + 4].tobytes(), "little")


def common_length(source: Bytes, a: int, b: int, stop: int) -> int:
    """Count the equal bytes from ``a`` and from ``b`` on, up to ``b + count == stop``."""
    count = 0
    while b + count < stop and source[a + count] == source[b + count]:
        count += 1
    return count


def copy_run(target: Bytes, to: int, source: Bytes, at: int, count: int) -> None:
    target[to : to + count] = source[at : at + count]


def copy_ahead(target: Bytes, to: int, source: Bytes, at: int, count: int) -> None:
    """Copy ``count`` bytes, and possibly up to `OVERRUN` bytes after them."""
    target[to : to + count] = source[at : at + count]


def repeat(target: Bytes, to: int, offset: int, count: int) -> None:
    """Copy ``count`` bytes from ``offset`` before ``to``; the ranges may overlap, which repeats the bytes."""
    for i in range(count):
        target[to + i] = target[to + i - offset]
