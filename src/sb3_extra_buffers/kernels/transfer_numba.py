"""The kernels of `kernels.transfer`, compiled."""

from __future__ import annotations

from typing import Any

from sb3_extra_buffers.kernels import (
    transfer,
    writing_numba,  # noqa: F401  # compiles the functions of `frames`
)
from sb3_extra_buffers.kernels.columns_numba import as_column, tables_at
from sb3_extra_buffers.kernels.compiling import compiled, entry, use_reference

use_reference(transfer)
_measure_segments, _copy_segments = compiled(transfer.measure_segments), compiled(transfer.copy_segments)
_copy_payloads, _check_segments = compiled(transfer.copy_payloads), compiled(transfer.check_segments)
_refer_rows = compiled(transfer.refer_rows)


@entry
def measure_segments(bound: Any, segments: Any, needed: Any, lengths: Any) -> int:
    return _measure_segments(tables_at(bound), as_column(segments), as_column(needed), as_column(lengths))


@entry
def copy_segments(bound: Any, segments: Any, needed: Any, lengths: Any, out: Any) -> None:
    _copy_segments(tables_at(bound), as_column(segments), as_column(needed), as_column(lengths), as_column(out))


@entry
def copy_payloads(bound: Any, segments: Any, out: Any) -> None:
    _copy_payloads(tables_at(bound), as_column(segments), as_column(out))


@entry
def check_segments(bound: Any, frame_ids: Any, n_keyframes: int) -> int:
    return _check_segments(tables_at(bound), as_column(frame_ids), n_keyframes)


@entry
def refer_rows(
    bound: Any, frame_ids: Any, indices: Any, local_ids: Any, segments: Any, per_segment: int, ids: Any
) -> None:
    _refer_rows(
        tables_at(bound), as_column(frame_ids), as_column(indices), as_column(local_ids), as_column(segments),
        per_segment, as_column(ids),
    )  # fmt: skip
