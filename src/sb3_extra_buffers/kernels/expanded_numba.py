"""Reading observations stored as table indices: decodes a row and expands it while it is in the cache. Imports numba.

`kernels.reading` and `kernels.tables` define what decoding and expanding do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.kernels.columns_numba import as_column, flat, keep, part, tables_at
from sb3_extra_buffers.kernels.compiling import inner, slow_entry
from sb3_extra_buffers.kernels.packed_numba import packed_work_bytes, read_packed_rows
from sb3_extra_buffers.kernels.reading_numba import is_streaming, output_row, prefetch_segments, read_rows, rows_ahead, work_bytes
from sb3_extra_buffers.kernels.tables import ENTRIES
from sb3_extra_buffers.kernels.tables_numba import expand_row, split_table

# bytes of the tables that `split_table` makes: one for each of the first four bytes of a unit
_TABLES = 4 * ENTRIES


@inner
def _row_bytes(state: Any, frame_ids: Any, sets: Any) -> int:
    """Bytes of work space for the tables of `split_table` and the indices of a row, aligned."""
    return (_TABLES + sets.shape[0] * frame_ids.shape[1] * state.config.frame_bytes + 127) // 64 * 64


@inner
def _take_row(sets: Any, row: int, one: Any) -> None:
    for number in range(sets.shape[0]):
        one[number, 0] = sets[number, row]


@inner
def _expand(
    state: Any, frame_ids: Any, sets: Any, row: int, by_row: bool, space: Any, table: Any, unit: int, plane: int,
    streaming: bool, out: Any,
) -> None:  # fmt: skip
    """Expand the indices of a row's observations, which follow the tables of `split_table` in ``space``."""
    n_units = frame_ids.shape[1] * state.config.frame_bytes
    for number in range(sets.shape[0]):
        to = output_row(sets, number, row, by_row) * n_units * unit
        expand_row(space, _TABLES + number * n_units, n_units, table, space, unit, plane, out, to, streaming)


@slow_entry
def read_frames(
    bound: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int, zstd: Any, by_row: bool, table: Any,
    unit: int, plane: int,
) -> int:  # fmt: skip
    """`read_frames` of `kernels.reading`, with each byte of the frames replaced by its entry in ``table``."""
    state, ids, sets_, table_ = tables_at(bound), as_column(frame_ids), as_column(sets), as_column(table)
    single = np.empty((sets.shape[0], 1), np.int64)
    one, n_row = as_column(single), _row_bytes(state, ids, sets_)
    memory = np.empty(n_row + work_bytes(state, ids, one), np.uint8)
    space, indices, work = as_column(memory), part(as_column(memory), _TABLES, n_row), part(as_column(memory), n_row, 0)
    split_table(table_, unit, space)
    n_bytes = sets.shape[0] * sets.shape[1] * frame_ids.shape[1] * state.config.frame_bytes * unit
    streaming = is_streaming(n_bytes, 64, flat(as_column(out)))
    damaged, ahead = -1, rows_ahead(sets.shape[0] * frame_ids.shape[1])
    for row in range(first, stop):
        if (row - first) % ahead == 0:
            prefetch_segments(state, ids, sets_, row, min(row + ahead, stop))
        _take_row(sets_, row, one)
        damaged = read_rows(state, ids, one, indices, 0, 1, work, as_column(zstd), by_row)
        if damaged >= 0:
            break
        _expand(state, ids, sets_, row, by_row, space, table_, unit, plane, streaming, flat(as_column(out)))
    return keep(single, keep(memory, damaged))


@slow_entry
def read_packed(
    bound: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int, zstd: Any, by_row: bool, table: Any,
    unit: int, plane: int,
) -> int:  # fmt: skip
    """`read_frames` for segments of whole frames."""
    state, ids, sets_, table_ = tables_at(bound), as_column(frame_ids), as_column(sets), as_column(table)
    single = np.empty((sets.shape[0], 1), np.int64)
    one, n_row = as_column(single), _row_bytes(state, ids, sets_)
    memory = np.empty(n_row + packed_work_bytes(state, ids, one), np.uint8)
    space, indices, work = as_column(memory), part(as_column(memory), _TABLES, n_row), part(as_column(memory), n_row, 0)
    split_table(table_, unit, space)
    n_bytes = sets.shape[0] * sets.shape[1] * frame_ids.shape[1] * state.config.frame_bytes * unit
    streaming = is_streaming(n_bytes, 64, flat(as_column(out)))
    damaged, ahead = -1, rows_ahead(sets.shape[0] * frame_ids.shape[1])
    for row in range(first, stop):
        if (row - first) % ahead == 0:
            prefetch_segments(state, ids, sets_, row, min(row + ahead, stop))
        _take_row(sets_, row, one)
        damaged = read_packed_rows(state, ids, one, indices, 0, 1, work, as_column(zstd), by_row)
        if damaged >= 0:
            break
        _expand(state, ids, sets_, row, by_row, space, table_, unit, plane, streaming, flat(as_column(out)))
    return keep(single, keep(memory, damaged))
