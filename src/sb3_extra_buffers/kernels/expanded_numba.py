"""Reading observations stored as table indices: expands each frame when it is decoded. Imports numba.

`kernels.reading` and `kernels.tables` define what decoding and expanding do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.kernels.columns_numba import as_column, int64_part, keep, part, tables_at
from sb3_extra_buffers.kernels.compiling import inner, slow_entry
from sb3_extra_buffers.kernels.packed_numba import packed_work_bytes, read_packed_rows
from sb3_extra_buffers.kernels.reading_numba import Expansion, read_rows, work_bytes
from sb3_extra_buffers.kernels.tables import ENTRIES
from sb3_extra_buffers.kernels.tables_numba import split_table

# bytes of the tables that `split_table` makes: one for each of the first four bytes of a unit
_TABLES = 4 * ENTRIES


@inner
def _expansion_bytes(state: Any, frame_ids: Any, sets: Any) -> int:
    """Bytes of memory for `_make_expansion`, aligned."""
    return (_TABLES + sets.shape[0] * frame_ids.shape[1] * (state.config.frame_bytes + 8) + 127) // 64 * 64


@inner
def _make_expansion(state: Any, frame_ids: Any, sets: Any, space: Any, table: Any, unit: int, plane: int) -> Any:
    """Return the `Expansion`, and the work space that follows its memory in ``space``."""
    n_frames, size = sets.shape[0] * frame_ids.shape[1], state.config.frame_bytes
    offsets = int64_part(space, _TABLES, n_frames)
    for i in range(n_frames):
        offsets[i] = i * size
    split_table(table, unit, space)
    indices = part(space, _TABLES + 8 * n_frames, n_frames * size)
    work = part(space, _expansion_bytes(state, frame_ids, sets), 0)
    return Expansion(table, space, unit, plane, indices, offsets), work


@slow_entry
def read_frames(
    bound: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int, zstd: Any, by_row: bool, table: Any,
    unit: int, plane: int,
) -> int:  # fmt: skip
    """`read_frames` of `kernels.reading`, with each byte of the frames replaced by its entry in ``table``."""
    state, ids, sets_ = tables_at(bound), as_column(frame_ids), as_column(sets)
    memory = np.empty(_expansion_bytes(state, ids, sets_) + work_bytes(state, ids, sets_), np.uint8)
    expansion, work = _make_expansion(state, ids, sets_, as_column(memory), as_column(table), unit, plane)
    damaged = read_rows(state, ids, sets_, as_column(out), first, stop, work, as_column(zstd), by_row, expansion)
    return keep(memory, damaged)


@slow_entry
def read_packed(
    bound: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int, zstd: Any, by_row: bool, table: Any,
    unit: int, plane: int,
) -> int:  # fmt: skip
    """`read_frames` for segments of whole frames."""
    state, ids, sets_ = tables_at(bound), as_column(frame_ids), as_column(sets)
    memory = np.empty(_expansion_bytes(state, ids, sets_) + packed_work_bytes(state, ids, sets_), np.uint8)
    expansion, work = _make_expansion(state, ids, sets_, as_column(memory), as_column(table), unit, plane)
    damaged = read_packed_rows(state, ids, sets_, as_column(out), first, stop, work, as_column(zstd), by_row, expansion)
    return keep(memory, damaged)
