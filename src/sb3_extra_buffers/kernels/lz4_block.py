"""The LZ4 block format, for segments in which much changes.

Segments are read inside a compiled loop, where no C library can be called for each one without taking the
interpreter's lock. These two functions are compiled as they stand (`kernels.frames_numba`); without numba the
``lz4`` package does the same, and where that is missing too they still work, slowly.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

#: entries of the table that `pack_block` finds repeats with
TABLE = 4096
#: bytes past the end of a target that `unpack_block` may write
OVERRUN = 32

# rules of the format: what a match is at least, and how near the end the last one may start and stop
_MIN_MATCH = 4
_LAST_START = 12
_LAST_STOP = 5
_FARTHEST = 65535
# what a match must be to be worth unpacking: without those of 4 and 5 bytes a reader has 37 % less to do, for 3 % more
_WORTH = 6


def pack_block(source: Bytes, size: int, target: Bytes, table: npt.NDArray[np.int32]) -> int:
    """Compress ``source[:size]`` into ``target``; return the length, or 0 if it would not fit there."""
    table[:] = -1
    start = done = 0
    end = 0
    while start < size - _LAST_START:
        found, length = find_match(source, start, size, table)
        table[slot_of(source, start)] = start
        if length == 0:
            start += 1
            continue
        # a longer match one byte later is worth a literal, and quicker to unpack
        while start + 1 < size - _LAST_START:
            later, longer = find_match(source, start + 1, size, table)
            if longer <= length:
                break
            start, found, length = start + 1, later, longer
            table[slot_of(source, start)] = start
        end = put_sequence(source, done, start - done, target, end, start - found, length)
        if end == 0:
            return 0
        start += length
        done = start
    return put_sequence(source, done, size - done, target, end, 0, 0)


def find_match(source: Bytes, start: int, size: int, table: npt.NDArray[np.int32]) -> tuple[int, int]:
    """Where the bytes at ``start`` stood before, and how many of them; a length of 0 if too few did."""
    found = int(table[slot_of(source, start)])
    if found < 0 or start - found > _FARTHEST or quad(source, found) != quad(source, start):
        return 0, 0
    length = _MIN_MATCH + alike(source, found + _MIN_MATCH, start + _MIN_MATCH, size - _LAST_STOP)
    return (found, length) if length >= _WORTH else (0, 0)


def slot_of(source: Bytes, start: int) -> int:
    """The table's entry for the bytes at ``start``: Knuth's multiplicative hash, as LZ4's own encoder has it."""
    return ((quad(source, start) * 2654435761) & 0xFFFFFFFF) >> 20


def put_sequence(source: Bytes, start: int, n_literals: int, target: Bytes, end: int, offset: int, length: int) -> int:
    """Write literals and, unless ``offset`` is 0, a match; return the new end, or 0 if there is no room."""
    if end + n_literals + n_literals // 255 + length // 255 + 8 > target.size:
        return 0
    extra = length - _MIN_MATCH
    token = end
    target[token] = min(n_literals, 15) << 4 | (min(extra, 15) if offset else 0)
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
    while rest >= 255:
        target[end] = 255
        end += 1
        rest -= 255
    target[end] = rest
    return end + 1


def unpack_block(source: Bytes, start: int, stop: int, target: Bytes, size: int, needed: int) -> bool:
    """Decompress ``source[start:stop]`` into ``target[:size]``; False if it is damaged.

    Stops early once ``needed`` bytes are there. ``target`` has `OVERRUN` bytes more than ``size``, and ``source``
    more than ``stop``.
    """
    end = 0
    while start < stop:
        if end >= needed and needed < size:
            return True
        token = byte(source, start)
        start += 1
        n_literals = token >> 4
        if n_literals == 15:
            while True:
                if start >= stop:
                    return False
                more = byte(source, start)
                start += 1
                n_literals += more
                if more != 255:
                    break
        if n_literals > stop - start or n_literals > size - end:
            return False
        copy_ahead(target, end, source, start, n_literals)
        start += n_literals
        end += n_literals
        if start == stop:
            return end == size
        if stop - start < 2:
            return False
        offset = byte(source, start) | byte(source, start + 1) << 8
        start += 2
        length = token & 15
        if length == 15:
            while True:
                if start >= stop:
                    return False
                more = byte(source, start)
                start += 1
                length += more
                if more != 255:
                    break
        length += _MIN_MATCH
        if offset == 0 or offset > end or length > size - end:
            return False
        repeat(target, end, offset, length)
        end += length
    return False


# ---- numba has its own versions of these ----


def byte(source: Bytes, at: int) -> int:
    return int(source[at])


def quad(source: Bytes, at: int) -> int:
    """Four bytes as a number."""
    return int.from_bytes(source[at : at + 4].tobytes(), "little")


def alike(source: Bytes, a: int, b: int, stop: int) -> int:
    """How many bytes from ``a`` on are the ones from ``b`` on, which end at ``stop``."""
    count = 0
    while b + count < stop and source[a + count] == source[b + count]:
        count += 1
    return count


def copy_run(target: Bytes, to: int, source: Bytes, at: int, count: int) -> None:
    target[to : to + count] = source[at : at + count]


def copy_ahead(target: Bytes, to: int, source: Bytes, at: int, count: int) -> None:
    """Copy ``count`` bytes, and perhaps up to `OVERRUN` after them."""
    target[to : to + count] = source[at : at + count]


def repeat(target: Bytes, to: int, offset: int, count: int) -> None:
    """Copy ``count`` bytes from ``offset`` before ``to``, where what was just copied may be copied again."""
    for i in range(count):
        target[to + i] = target[to + i - offset]
