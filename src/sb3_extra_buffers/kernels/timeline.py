"""Observations on one time axis: a next observation is stored only if it differs from the following observation.

These reference kernels define what the compiled ones do. `stores.timeline` owns the tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.kernels.state import Bytes, Ints, Ints32

__all__ = ["TimelineTables", "bind_tables", "read_pairs", "read_rows", "rebuild", "write_rows"]

# positions in `counters`
#: Rows of ``aside`` in use.
COUNT = 0
#: Number of observations, and of next observations; those of step t and stream s have number ``t * n_streams + s``.
N_OBS = 1
N_STREAMS = 2
#: One more than the last row of ``rows`` that was written.
N_TOUCHED = 3

# factor of a multiplicative hash: 2**32 divided by the golden ratio. Its product with 31 bits fits an int64
_GOLDEN = 0x9E3779B1
_LOW_BITS = 0x7FFFFFFF


class TimelineTables(NamedTuple):
    """Indices are those of observations, then of as many next observations, then of independent rows.

    Next observation ``i`` is observation ``i + n_streams``, in a ring, unless bit ``i`` of ``is_aside`` is set. Then it
    is the row of ``aside`` whose entry of ``keys`` is ``i``.
    """

    rows: Bytes
    """``[row, byte]``: observations, then independent rows."""
    is_aside: Bytes
    """One bit per next observation: whether it is a row of ``aside``."""
    slots: Ints32
    """Hash table with linear probing: a row of ``aside`` plus one, or 0. Longer than ``keys``; a power of two."""
    keys: Ints
    """Number of the next observation in each row of ``aside``."""
    aside: Bytes
    """``[row, byte]``: next observations that differ from the following observation; the first rows are in use."""
    counters: Ints


def bind_tables(tables: TimelineTables) -> Any:
    """Convert tables to what the kernels take."""
    return tables


# ---- bytes ----


def copy_row(target: Bytes, to: int, source: Bytes, row: int) -> None:
    target[to] = source[row]


def is_same_row(rows: Bytes, row: int, others: Bytes, other: int) -> bool:
    return bool((rows[row] == others[other]).all())


def is_set(bits: Bytes, i: int) -> int:
    return (int(bits[i >> 3]) >> (i & 7)) & 1


def flip(bits: Bytes, i: int) -> None:
    bits[i >> 3] = int(bits[i >> 3]) ^ (1 << (i & 7))


# ---- next observations aside ----


def home(slots: Ints32, key: int) -> int:
    """Where to look for ``key`` first."""
    return (((key & _LOW_BITS) * _GOLDEN) >> 16) & (len(slots) - 1)


def find(tables: TimelineTables, key: int) -> int:
    """The position in ``slots`` of ``key``, which must be aside."""
    at = home(tables.slots, key)
    while int(tables.keys[int(tables.slots[at]) - 1]) != key:
        at = (at + 1) & (len(tables.slots) - 1)
    return at


def row_aside(tables: TimelineTables, key: int) -> int:
    """The row of ``aside`` with ``key``, which must be aside."""
    return int(tables.slots[find(tables, key)]) - 1


def link(tables: TimelineTables, key: int, row: int) -> None:
    """Enter row ``row`` of ``aside`` into the hash table."""
    at = home(tables.slots, key)
    while int(tables.slots[at]) != 0:
        at = (at + 1) & (len(tables.slots) - 1)
    tables.slots[at] = row + 1


def unlink(tables: TimelineTables, at: int) -> None:
    """Remove an entry of the hash table, and move those behind it that it kept from their home."""
    slots = tables.slots
    mask = len(slots) - 1
    hole, at = at, (at + 1) & mask
    while int(slots[at]) != 0:
        distance = (at - home(slots, int(tables.keys[int(slots[at]) - 1]))) & mask
        if distance >= ((at - hole) & mask):
            slots[hole] = slots[at]
            hole = at
        at = (at + 1) & mask
    slots[hole] = 0


def put_aside(tables: TimelineTables, key: int, source: Bytes, row: int) -> None:
    """Keep ``source[row]`` as next observation ``key``; there must be space for it."""
    if is_set(tables.is_aside, key):
        copy_row(tables.aside, row_aside(tables, key), source, row)
        return
    count = int(tables.counters[COUNT])
    copy_row(tables.aside, count, source, row)
    tables.keys[count] = key
    tables.counters[COUNT] = count + 1
    link(tables, key, count)
    flip(tables.is_aside, key)


def drop_aside(tables: TimelineTables, key: int) -> None:
    """Let next observation ``key``, which is aside, be the observation that follows."""
    at, last = find(tables, key), int(tables.counters[COUNT]) - 1
    row = int(tables.slots[at]) - 1
    unlink(tables, at)
    flip(tables.is_aside, key)
    if row != last:
        # rows in use stay consecutive. This order loses no row but that of `key`, wherever it is interrupted
        at = find(tables, int(tables.keys[last]))
        copy_row(tables.aside, row, tables.aside, last)
        tables.keys[row] = tables.keys[last]
        tables.slots[at] = row + 1
    tables.counters[COUNT] = last


def following(tables: TimelineTables, i: int) -> int:
    """The observation that follows observation ``i`` in its stream: next observation ``i``, unless that is aside."""
    after = i + int(tables.counters[N_STREAMS])
    return after - int(tables.counters[N_OBS]) if after >= int(tables.counters[N_OBS]) else after


# ---- writing ----


def write_obs(tables: TimelineTables, i: int, source: Bytes, row: int) -> None:
    """Set observation ``i``; the next observation before it keeps its value."""
    counters = tables.counters
    before = i - int(counters[N_STREAMS])
    if before < 0:
        before += int(counters[N_OBS])
    if is_set(tables.is_aside, before):
        is_shared = is_same_row(tables.aside, row_aside(tables, before), source, row)
        copy_row(tables.rows, i, source, row)
        if is_shared:
            drop_aside(tables, before)
    elif not is_same_row(tables.rows, i, source, row):
        put_aside(tables, before, tables.rows, i)
        copy_row(tables.rows, i, source, row)
    if i >= int(counters[N_TOUCHED]):
        counters[N_TOUCHED] = i + 1


def write_next(tables: TimelineTables, i: int, source: Bytes, row: int) -> None:
    """Set next observation ``i``."""
    if not is_same_row(tables.rows, following(tables, i), source, row):
        put_aside(tables, i, source, row)
    elif is_set(tables.is_aside, i):
        drop_aside(tables, i)


def write_rows(tables: TimelineTables, indices: Ints, source: Bytes) -> None:
    """Store a row for each index, in order; ``aside`` must have space for as many."""
    n_obs = int(tables.counters[N_OBS])
    for row in range(len(indices)):
        index = int(indices[row])
        if index < n_obs:
            write_obs(tables, index, source, row)
        elif index < 2 * n_obs:
            write_next(tables, index - n_obs, source, row)
        else:
            copy_row(tables.rows, index - n_obs, source, row)
            if index - n_obs >= int(tables.counters[N_TOUCHED]):
                tables.counters[N_TOUCHED] = index - n_obs + 1


def rebuild(tables: TimelineTables) -> None:
    """Make ``slots`` and ``is_aside`` from ``keys``, also after a write that was interrupted anywhere."""
    count = int(tables.counters[COUNT])
    # a row that was being moved is there twice
    _, first = np.unique(tables.keys[:count], return_index=True)
    kept = np.sort(first)
    if len(kept) < count:
        tables.keys[: len(kept)] = tables.keys[kept]
        tables.aside[: len(kept)] = tables.aside[kept]
        tables.counters[COUNT] = count = len(kept)
    tables.slots[:] = 0
    keys = tables.keys[:count]
    bits = np.zeros(8 * len(tables.is_aside), np.bool_)
    bits[keys] = True
    tables.is_aside[:] = np.packbits(bits, bitorder="little")
    # `link` for all rows at a time: those that find their position taken try the next one
    rows, at = np.arange(count), (((keys & _LOW_BITS) * _GOLDEN) >> 16) & (len(tables.slots) - 1)
    while len(rows):
        is_free = tables.slots[at] == 0
        tables.slots[at[is_free]] = rows[is_free] + 1
        is_left = tables.slots[at] != rows + 1
        rows, at = rows[is_left], (at[is_left] + 1) & (len(tables.slots) - 1)


# ---- reading ----


def read_rows(tables: TimelineTables, indices: Ints, out: Bytes) -> int:
    """Copy the row of each index to ``out``; return the position of the first index out of range, or -1."""
    n_obs, n_streams = int(tables.counters[N_OBS]), int(tables.counters[N_STREAMS])
    bad: npt.NDArray[np.bool_] = (indices < 0) | (indices >= n_obs + len(tables.rows))
    if bad.any():
        return int(bad.argmax())
    is_next = (indices >= n_obs) & (indices < 2 * n_obs)
    at = np.where(indices < n_obs, indices, indices - n_obs)
    out[:] = tables.rows[np.where(is_next, (at + n_streams) % max(n_obs, 1), at)]
    numbers = np.flatnonzero(is_next)
    keys = at[numbers]
    is_aside = (tables.is_aside[keys >> 3] >> (keys & 7).astype(np.uint8)) & 1
    for number in numbers[is_aside != 0].tolist():
        out[number] = tables.aside[row_aside(tables, int(at[number]))]
    return -1


def read_pairs(tables: TimelineTables, steps: Ints, streams: Ints, base: int, out: Bytes) -> int:
    """`read_rows` of observations, or with ``base = N_OBS`` of next ones, by step and stream; both may be negative."""
    n_obs, n_streams = int(tables.counters[N_OBS]), int(tables.counters[N_STREAMS])
    n_steps = n_obs // n_streams
    bad: npt.NDArray[np.bool_] = (
        (steps < -n_steps) | (steps >= n_steps) | (streams < -n_streams) | (streams >= n_streams)
    )
    if bad.any():
        return int(bad.argmax())
    return read_rows(tables, base + steps % n_steps * n_streams + streams % n_streams, out)
