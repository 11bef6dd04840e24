"""Kernels for the columns of a transition on a GPU: gathered with a batch, or by themselves; `launcher.Columns`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sb3_extra_buffers.kernels.launcher import COLUMN_DTYPES, Columns, Launcher

__all__ = ["ColumnGather", "gather_columns"]

# rows of a program, and its warps
_ROWS, _WARPS = 32, 2


@triton.jit
def gather_columns(
    floats_ptr,  # float32 [2, row]
    actions_ptr,  # uint8 [row, ACTION]
    numbers_ptr,  # float32 [obs, RECORD // 4]
    records_ptr,  # uint8 [obs, RECORD], the same memory
    index, row, is_row,  # [ROWS]: which record belongs to which row
    n_rows,
    ACTION: tl.constexpr,  # bytes of an action
    ACTION2: tl.constexpr,  # the next power of two
    ACTION_AT: tl.constexpr,  # where in a record it begins
    RECORD: tl.constexpr,
):  # fmt: skip
    """Gather ``done * (1 - timeout)``, reward and action of some rows of a batch."""
    byte = tl.arange(0, ACTION2)
    inside = is_row[:, None] & (byte < ACTION)[None, :]
    action = tl.load(records_ptr + (index * RECORD + ACTION_AT)[:, None] + byte[None, :], mask=inside, other=0)
    tl.store(actions_ptr + row[:, None] * ACTION + byte[None, :], action, mask=inside)
    numbers = numbers_ptr + index * (RECORD // 4)
    reward = tl.load(numbers, mask=is_row, other=0)
    done = tl.load(numbers + 1, mask=is_row, other=0)
    timeout = tl.load(numbers + 2, mask=is_row, other=0)
    tl.store(floats_ptr + row, done * (1 - timeout), mask=is_row)
    tl.store(floats_ptr + row + n_rows.to(tl.int64), reward, mask=is_row)


@triton.jit(do_not_specialize=["n_rows"])
def _gather_kernel(
    indices_ptr,  # int64 [row]
    floats_ptr, actions_ptr, numbers_ptr, records_ptr,
    n_rows,
    ACTION: tl.constexpr, ACTION2: tl.constexpr, ACTION_AT: tl.constexpr, RECORD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = tl.load(indices_ptr + row, mask=row < n_rows, other=0)
    gather_columns(
        floats_ptr, actions_ptr, numbers_ptr, records_ptr, index, row, row < n_rows, n_rows,
        ACTION, ACTION2, ACTION_AT, RECORD,
    )  # fmt: skip


class ColumnGather:
    """Gathers columns in one launch; ``indices`` may be in pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self._launcher = Launcher(_gather_kernel, device, (), (), ((torch.int64,), COLUMN_DTYPES), _WARPS)

    def gather(self, indices: torch.Tensor, columns: Columns) -> None:
        """Fill ``columns`` with the records at the first ``len(columns.actions)`` of ``indices``."""
        pointers, sizes = columns.arguments()
        n_rows = len(columns.actions)
        self._launcher.start(sizes, (-(-n_rows // _ROWS), 1, 1), (indices,), pointers, (n_rows, *sizes, _ROWS))
