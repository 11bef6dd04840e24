"""The kernels of tables, compiled; `kernels.tables` defines what each one does."""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.kernels.columns_numba import as_column, flat
from sb3_extra_buffers.kernels.compiling import entry, inner
from sb3_extra_buffers.kernels.intrinsics import (
    clear_bytes,
    load_byte,
    load_half,
    load_int,
    load_quad,
    load_word,
    store_byte,
    store_half,
    store_quad,
    store_word,
)
from sb3_extra_buffers.kernels.tables import ENTRY_BYTES

_EIGHT = np.uint64(8)
_COLOUR = np.uint64(0xFFFFFF)
# units between two looks at whether all were known
_BLOCK = 2048


@inner
def _code(row: Any, at: int, unit: int) -> Any:
    """The code of the unit at byte ``at``."""
    code = np.uint64(0)
    for byte in range(unit):
        code |= load_byte(row, at + byte) << np.uint64(8 * byte)
    return code


@inner
def _map_colours(row: Any, at: int, count: int, slots: Any, factor: Any, shift: Any, out: Any, to: int) -> bool:
    """`_map_quads` for units of three bytes; there must be a byte after the last."""
    wrong, last, entry = np.uint64(0), ~np.uint64(0), np.uint64(0)
    for i in range(count):
        code = np.uint64(load_quad(row, at + 3 * i)) & _COLOUR
        if code != last:  # most pixels have the colour of the one before
            entry = slots[np.int64((code * factor) >> shift)]
            wrong |= (entry >> _EIGHT) ^ code
            last = code
        store_byte(out, to + i, entry)
    return wrong == 0


@inner
def _map_quads(row: Any, at: int, count: int, slots: Any, factor: Any, shift: Any, out: Any, to: int) -> bool:
    """Map ``count`` units from byte ``at`` on; return whether all are known."""
    wrong = np.uint64(0)
    for i in range(count):
        code = np.uint64(load_quad(row, at + 4 * i))
        entry = slots[np.int64((code * factor) >> shift)]
        wrong |= (entry >> _EIGHT) ^ code
        store_byte(out, to + i, entry)
    return wrong == 0


@inner
def _map_halves(row: Any, at: int, count: int, slots: Any, factor: Any, shift: Any, out: Any, to: int) -> bool:
    wrong = np.uint64(0)
    for i in range(count):
        code = np.uint64(load_half(row, at + 2 * i))
        entry = slots[np.int64((code * factor) >> shift)]
        wrong |= (entry >> _EIGHT) ^ code
        store_byte(out, to + i, entry)
    return wrong == 0


@inner
def _map_words(
    row: Any, at: int, count: int, slots: Any, indices: Any, factor: Any, shift: Any, out: Any, to: int
) -> bool:
    wrong = np.uint64(0)
    for i in range(count):
        code = load_word(row, at + 8 * i)
        slot = np.int64((code * factor) >> shift)
        wrong |= slots[slot] ^ code
        out[to + i] = indices[slot]
    return wrong == 0


@inner
def _map_planes(
    row: Any, at: int, count: int, unit: int, plane: int, slots: Any, factor: Any, shift: Any, out: Any, to: int
) -> bool:
    """`_map_quads` for three or four bytes of a unit that are ``plane`` apart."""
    wrong, last, entry = np.uint64(0), ~np.uint64(0), np.uint64(0)
    for i in range(at, at + count):
        code = load_byte(row, i) | load_byte(row, i + plane) << _EIGHT | load_byte(row, i + 2 * plane) << np.uint64(16)
        if unit == 4:
            code |= load_byte(row, i + 3 * plane) << np.uint64(24)
        if code != last:
            entry = slots[np.int64((code * factor) >> shift)]
            wrong |= (entry >> _EIGHT) ^ code
            last = code
        store_byte(out, to, entry)
        to += 1
    return wrong == 0


@inner
def _map_row(
    row: Any,
    start: int,
    n_units: int,
    slots: Any,
    indices: Any,
    factor: Any,
    shift: Any,
    unit: int,
    plane: int,
    out: Any,
    to: int,
) -> bool:
    if plane > 0:
        for block in range(n_units // plane):
            at = start + block * unit * plane
            if not _map_planes(row, at, plane, unit, plane, slots, factor, shift, out, to + block * plane):
                return False
        return True
    done = 0
    while done < n_units:
        count, at = min(n_units - done, _BLOCK), start + done * unit
        if unit == 4:
            known = _map_quads(row, at, count, slots, factor, shift, out, to + done)
        elif unit == 3:
            if done + count == n_units:
                count -= 1  # its four bytes would end beyond the row
                code = _code(row, start + 3 * (n_units - 1), 3)
                entry = slots[np.int64((code * factor) >> shift)]
                store_byte(out, to + n_units - 1, entry)
                done += 1
                if entry >> _EIGHT != code:
                    return False
            known = _map_colours(row, at, count, slots, factor, shift, out, to + (at - start) // 3)
        elif unit == 2:
            known = _map_halves(row, at, count, slots, factor, shift, out, to + done)
        else:
            known = _map_words(row, at, count, slots, indices, factor, shift, out, to + done)
        if not known:
            return False
        done += count
    return True


@entry
def map_rows(
    rows: Any, slots: Any, indices: Any, factor: Any, shift: Any, unit: int, plane: int, first: int, closed: bool, out: Any,
    outside: Any,
) -> int:  # fmt: skip
    n_rows, nbytes, n_units = rows.shape[0], rows.shape[1], out.shape[1]
    rows_, slots_, indices_ = flat(as_column(rows)), as_column(slots), as_column(indices)
    out_, outside_ = flat(as_column(out)), as_column(outside)
    for row in range(first, n_rows):
        if not _map_row(
            rows_, row * nbytes, n_units, slots_, indices_, factor, shift, unit, plane, out_, row * n_units
        ):  # fmt: skip
            if not closed:
                return row
            clear_bytes(out_, row * n_units, n_units)
            outside_[row] = 1
    return n_rows


@inner
def expand_row(indices: Any, at: int, n_units: int, table: Any, unit: int, plane: int, out: Any, to: int) -> None:
    """Write the units of the ``n_units`` indices from byte ``at`` on to byte ``to`` of ``out``."""
    if plane > 0:
        for block in range(n_units // plane):
            for byte in range(unit):
                target = to + (block * unit + byte) * plane
                for i in range(plane):
                    index = load_int(indices, at + block * plane + i)
                    store_byte(out, target + i, load_byte(table, index * ENTRY_BYTES + byte))
    elif unit == 4:
        for i in range(n_units):
            value = load_quad(table, load_int(indices, at + i) * ENTRY_BYTES)
            store_quad(out, to + 4 * i, np.uint64(value))
    elif unit == 3:
        for i in range(n_units - 1):
            # the fourth byte is overwritten by the next pixel
            value = load_quad(table, load_int(indices, at + i) * ENTRY_BYTES)
            store_quad(out, to + 3 * i, np.uint64(value))
        value = np.uint64(load_quad(table, load_int(indices, at + n_units - 1) * ENTRY_BYTES))
        store_half(out, to + 3 * n_units - 3, value)
        store_byte(out, to + 3 * n_units - 1, value >> np.uint64(16))
    elif unit == 2:
        for i in range(n_units):
            value = load_half(table, load_int(indices, at + i) * ENTRY_BYTES)
            store_half(out, to + 2 * i, np.uint64(value))
    else:
        for i in range(n_units):
            store_word(out, to + 8 * i, load_word(table, load_int(indices, at + i) * ENTRY_BYTES))


@entry
def expand_rows(indices: Any, table: Any, unit: int, plane: int, first: int, stop: int, out: Any) -> None:
    n_units, nbytes = indices.shape[1], out.shape[1]
    if n_units == 0:
        return
    indices_, table_, out_ = flat(as_column(indices)), as_column(table), flat(as_column(out))
    for row in range(first, stop):
        expand_row(indices_, row * n_units, n_units, table_, unit, plane, out_, row * nbytes)
