"""`transfer.copy_each`, compiled."""

from __future__ import annotations

from typing import Any

from sb3_extra_buffers.kernels.columns_numba import as_column
from sb3_extra_buffers.kernels.compiling import entry
from sb3_extra_buffers.kernels.intrinsics import copy_bytes


@entry
def copy_ranges(source: Any, starts: Any, target: Any, targets: Any, lengths: Any) -> None:
    source_, starts_, target_ = as_column(source), as_column(starts), as_column(target)
    targets_, lengths_ = as_column(targets), as_column(lengths)
    for i in range(len(starts)):
        copy_bytes(target_, targets_[i], source_, starts_[i], lengths_[i])
