"""The kernels of `kernels.transfer`, compiled."""

from __future__ import annotations

from typing import Any

from sb3_extra_buffers.kernels import (
    transfer,
    writing_numba,  # noqa: F401  # compiles the functions of `frames`
)
from sb3_extra_buffers.kernels.columns_numba import as_column, tables_at
from sb3_extra_buffers.kernels.compiling import compiled, entry, use_reference
from sb3_extra_buffers.kernels.intrinsics import copy_bytes

use_reference(transfer)
_check_segments, _refer_rows = compiled(transfer.check_segments), compiled(transfer.refer_rows)


@entry
def copy_ranges(source: Any, starts: Any, target: Any, targets: Any, lengths: Any) -> None:
    source_, starts_, target_ = as_column(source), as_column(starts), as_column(target)
    targets_, lengths_ = as_column(targets), as_column(lengths)
    for i in range(len(starts)):
        copy_bytes(target_, targets_[i], source_, starts_[i], lengths_[i])


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
