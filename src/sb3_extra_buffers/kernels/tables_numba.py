"""The kernels of tables, compiled; `kernels.tables` defines what each one does."""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.kernels.columns_numba import as_column, flat, keep, part
from sb3_extra_buffers.kernels.compiling import entry, inner
from sb3_extra_buffers.kernels.intrinsics import (
    HAS_MATRICES,
    HAS_TABLES,
    address_of,
    clear_bytes,
    copy_bytes,
    equal_bytes,
    load_byte,
    load_half,
    load_int,
    load_quad,
    load_word,
    look_up_fours,
    look_up_lines,
    look_up_pixels,
    look_up_threes,
    store_byte,
    store_half,
    store_quad,
    store_word,
    stream_look_up_lines,
)
from sb3_extra_buffers.kernels.tables import ENTRIES, ENTRY_BYTES, LINE_HASH_BYTES

_EIGHT = np.uint64(8)
_COLOUR = np.uint64(0xFFFFFF)
# number of units that are compared with a guess at a time
_BLOCK = 128


@inner
def _equal_units(row: Any, at: int, other: Any, other_at: int, count: int, unit: int, plane: int) -> bool:
    """Whether ``count`` units from byte ``at`` on are those from byte ``other_at`` of ``other`` on."""
    if plane == 0:
        return equal_bytes(row, at, other, other_at, count * unit)
    equal = True
    for byte in range(unit):
        equal = equal and equal_bytes(row, at + byte * plane, other, other_at + byte * plane, count)
    return equal


@inner
def _look_up(
    row: Any, at: int, count: int, found: Any, factor: Any, shift: Any, table: Any, unit: int, plane: int, out: Any,
    to: int,
) -> bool:  # fmt: skip
    """Map ``count`` units from byte ``at`` on; return whether all are known.

    With three adjacent bytes per unit, one byte past the last unit is read.
    """
    wrong = np.uint64(0)
    # a loop for each size: the compiler unrolls no other. No shortcut for pixels that repeat the one before: in
    # textures, that branch costs more than it saves
    if plane > 0:
        for i in range(count):
            code = load_byte(row, at + i) | load_byte(row, at + i + plane) << _EIGHT
            code |= load_byte(row, at + i + 2 * plane) << np.uint64(16)
            if unit == 4:
                code |= load_byte(row, at + i + 3 * plane) << np.uint64(24)
            index = found[np.int64((code * factor) >> shift)]
            wrong |= load_word(table, np.int64(index) * ENTRY_BYTES) ^ code
            out[to + i] = index
    elif unit == 4:
        for i in range(count):
            code = np.uint64(load_quad(row, at + 4 * i))
            index = found[np.int64((code * factor) >> shift)]
            wrong |= load_word(table, np.int64(index) * ENTRY_BYTES) ^ code
            out[to + i] = index
    elif unit == 3:
        for i in range(count):
            code = np.uint64(load_quad(row, at + 3 * i)) & _COLOUR
            index = found[np.int64((code * factor) >> shift)]
            wrong |= load_word(table, np.int64(index) * ENTRY_BYTES) ^ code
            out[to + i] = index
    elif unit == 2:
        for i in range(count):
            code = np.uint64(load_half(row, at + 2 * i))
            index = found[np.int64((code * factor) >> shift)]
            wrong |= load_word(table, np.int64(index) * ENTRY_BYTES) ^ code
            out[to + i] = index
    else:
        for i in range(count):
            code = load_word(row, at + 8 * i)
            index = found[np.int64((code * factor) >> shift)]
            wrong |= load_word(table, np.int64(index) * ENTRY_BYTES) ^ code
            out[to + i] = index
    return wrong == 0


@inner
def _is_guess(
    row: Any, at: int, count: int, guess: Any, guess_at: int, table: Any, shades: Any, unit: int, plane: int, space: Any
) -> bool:
    """Whether ``count`` units from byte ``at`` on are those that the indices at ``guess_at`` name."""
    if plane == 0:
        expand_row(guess, guess_at, count, table, shades, unit, 0, space, 0, False)
        return equal_bytes(row, at, space, 0, count * unit)
    equal = True
    for byte in range(unit):
        if equal:
            _expand_plane(guess, guess_at, count, shades, ENTRIES * byte, space, 0, False)
            equal = equal_bytes(row, at + byte * plane, space, 0, count)
    return equal


@inner
def _map_units(
    row: Any, start: int, count: int, found: Any, factor: Any, shift: Any, table: Any, unit: int, plane: int,
    known: Any, known_at: int, guess: Any, guess_at: int, shades: Any, space: Any, out: Any, to: int,
) -> bool:  # fmt: skip
    """Map ``count`` units from byte ``start`` on, in blocks; return whether all are known.

    ``guess`` has likely indices from ``guess_at`` on. A block takes them if it equals the block of ``known`` from
    ``known_at`` on, or, if ``known_at`` is negative, the units that these indices stand for. If ``guess_at`` is also
    negative, every unit is looked up.
    """
    width, done = 1 if plane > 0 else unit, 0
    hashed_at = np.int64(1) << np.int64(np.uint64(64) - shift)
    by_lines = HAS_MATRICES and unit == 3 and plane > 0 and found[hashed_at + LINE_HASH_BYTES - 1] == 1
    if unit == 3 and plane == 0:
        # the last pixel separately: reading four bytes there would exceed the row
        count -= 1
        code = load_byte(row, start + 3 * count) | load_byte(row, start + 3 * count + 1) << _EIGHT
        code |= load_byte(row, start + 3 * count + 2) << np.uint64(16)
        index = found[np.int64((code * factor) >> shift)]
        out[to + count] = index
        if load_word(table, np.int64(index) * ENTRY_BYTES) != code:
            return False
    while done < count:
        n, at = min(count - done, _BLOCK), start + done * width
        if HAS_MATRICES and by_lines and n == _BLOCK:
            # faster than a comparison with the guess
            unknown = np.uint64(0)
            for line in range(0, _BLOCK, 64):
                unknown |= look_up_pixels(out, to + done + line, row, at + line, plane, found, hashed_at, shades, 0)
            if unknown:
                return False
            done += n
            continue
        same = False
        if known_at >= 0:
            same = _equal_units(row, at, known, known_at + done * width, n, unit, plane)
        elif guess_at >= 0:
            same = _is_guess(row, at, n, guess, guess_at + done, table, shades, unit, plane, space)
        if same:
            copy_bytes(out, to + done, guess, guess_at + done, n)
        elif not _look_up(row, at, n, found, factor, shift, table, unit, plane, out, to + done):
            return False
        done += n
    return True


@inner
def _map_row(
    row: Any, start: int, n_units: int, found: Any, factor: Any, shift: Any, table: Any, unit: int, plane: int,
    known: Any, known_at: int, guess: Any, guess_at: int, shades: Any, space: Any, out: Any, to: int,
) -> bool:  # fmt: skip
    count = plane if plane > 0 else n_units
    for done in range(0, n_units, max(count, 1)):
        if not _map_units(
            row, start + done * unit, count, found, factor, shift, table, unit, plane,
            known, known_at + done * unit if known_at >= 0 else -1,
            guess, guess_at + done if guess_at >= 0 else -1, shades, space, out, to + done,
        ):  # fmt: skip
            return False
    return True


@entry
def map_rows(
    rows: Any, found: Any, factor: Any, shift: Any, table: Any, unit: int, plane: int, first: int, closed: bool,
    out: Any, outside: Any,
) -> int:  # fmt: skip
    n_rows, nbytes, n_units = rows.shape[0], rows.shape[1], out.shape[1]
    rows_, found_, table_ = flat(as_column(rows)), as_column(found), as_column(table)
    out_, outside_ = flat(as_column(out)), as_column(outside)
    memory = np.empty(4 * ENTRIES, np.uint8)
    shades = as_column(memory)
    split_table(table_, unit, shades)
    done = n_rows
    for row in range(first, n_rows):
        if not _map_row(
            rows_, row * nbytes, n_units, found_, factor, shift, table_, unit, plane, rows_, -1, out_, -1, shades, out_,
            out_, row * n_units,
        ):  # fmt: skip
            if not closed:
                done = row
                break
            clear_bytes(out_, row * n_units, n_units)
            outside_[row] = 1
    return keep(memory, done)


@entry
def map_step(
    rows: Any, next_rows: Any, found: Any, factor: Any, shift: Any, table: Any, unit: int, plane: int, guess: Any,
    guessed: bool, out: Any,
) -> bool:  # fmt: skip
    n_rows, nbytes, n_units = rows.shape[0], rows.shape[1], out.shape[1]
    rows_, next_rows_, guess_ = flat(as_column(rows)), flat(as_column(next_rows)), flat(as_column(guess))
    found_, table_, out_ = as_column(found), as_column(table), flat(as_column(out))
    memory = np.empty(4 * ENTRIES + _BLOCK * ENTRY_BYTES, np.uint8)
    shades, space = part(as_column(memory), 0, 4 * ENTRIES), part(as_column(memory), 4 * ENTRIES, _BLOCK * ENTRY_BYTES)
    split_table(table_, unit, shades)
    known = True
    for row in range(n_rows):
        start, at, next_at = row * nbytes, row * n_units, (n_rows + row) * n_units
        known = known and _map_row(
            rows_, start, n_units, found_, factor, shift, table_, unit, plane, rows_, -1,
            guess_, at if guessed else -1, shades, space, out_, at,
        )  # fmt: skip
        known = known and _map_row(
            next_rows_, start, n_units, found_, factor, shift, table_, unit, plane, rows_, start,
            out_, at, shades, space, out_, next_at,
        )  # fmt: skip
        if known and guess.shape[0] > 0:
            copy_bytes(guess_, at, out_, next_at, n_units)
    return keep(memory, known)


@inner
def expand_row(
    indices: Any, at: int, n_units: int, table: Any, shades: Any, unit: int, plane: int, out: Any, to: int,
    streaming: bool,
) -> None:  # fmt: skip
    """Write the units of the ``n_units`` indices from byte ``at`` on to byte ``to`` of ``out``.

    ``shades`` are the tables of each byte of a unit, as `split_table` makes them. With ``streaming``, planes are
    written past the caches.
    """
    if plane > 0:
        for block in range(n_units // plane):
            for byte in range(unit):
                start, target = at + block * plane, to + (block * unit + byte) * plane
                _expand_plane(indices, start, plane, shades, ENTRIES * byte, out, target, streaming)
        return
    done = 0
    if HAS_TABLES and 3 <= unit <= 4:
        done = n_units >> 6 << 6
        if unit == 3:
            look_up_threes(out, to, shades, 0, indices, at, n_units >> 6)
        else:
            look_up_fours(out, to, shades, 0, indices, at, n_units >> 6)
    if unit == 8:
        for i in range(done, n_units):
            store_word(out, to + 8 * i, load_word(table, load_int(indices, at + i) * ENTRY_BYTES))
    elif unit == 4:
        for i in range(done, n_units):
            store_quad(out, to + 4 * i, load_word(table, load_int(indices, at + i) * ENTRY_BYTES))
    elif unit == 2:
        for i in range(done, n_units):
            store_half(out, to + 2 * i, load_word(table, load_int(indices, at + i) * ENTRY_BYTES))
    else:
        for i in range(done, n_units - 1):
            # the fourth byte is overwritten by the next pixel
            store_quad(out, to + 3 * i, load_word(table, load_int(indices, at + i) * ENTRY_BYTES))
        if done < n_units:
            last = load_word(table, load_int(indices, at + n_units - 1) * ENTRY_BYTES)
            store_half(out, to + 3 * n_units - 3, last)
            store_byte(out, to + 3 * n_units - 1, last >> np.uint64(16))


@inner
def _expand_plane(
    indices: Any, at: int, count: int, shades: Any, table_at: int, out: Any, to: int, streaming: bool
) -> None:
    """Look ``count`` indices up in the table of 256 bytes at ``table_at``; with ``streaming``, past the caches."""
    done = 0
    if HAS_TABLES:
        if streaming and count >= 128:
            look_up_lines(out, to, shades, table_at, indices, at, 1)
            done = 64 - address_of(out, to) % 64
            stream_look_up_lines(out, to + done, shades, table_at, indices, at + done, (count - done) >> 6)
        else:
            look_up_lines(out, to, shades, table_at, indices, at, count >> 6)
        done += (count - done) >> 6 << 6
    for i in range(done, count):
        store_byte(out, to + i, load_byte(shades, table_at + load_int(indices, at + i)))


@inner
def split_table(table: Any, unit: int, shades: Any) -> None:
    """Set ``shades`` to the table of each byte of a unit, for `expand_row`."""
    for byte in range(min(unit, 4)):
        for i in range(ENTRIES):
            store_byte(shades, ENTRIES * byte + i, load_byte(table, i * ENTRY_BYTES + byte))


@entry
def expand_rows(indices: Any, table: Any, unit: int, plane: int, first: int, stop: int, out: Any) -> int:
    n_units, nbytes = indices.shape[1], out.shape[1]
    indices_, table_, out_ = flat(as_column(indices)), as_column(table), flat(as_column(out))
    space = np.empty(4 * ENTRIES, np.uint8)
    shades = as_column(space)
    split_table(table_, unit, shades)
    for row in range(first, stop):
        expand_row(indices_, row * n_units, n_units, table_, shades, unit, plane, out_, row * nbytes, False)
    return keep(space, 0)
