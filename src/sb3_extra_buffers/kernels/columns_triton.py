"""Kernels that write and gather columns, and compute returns, on a GPU: for the tables of `stores.device_columns`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sb3_extra_buffers.kernels.columns_torch import NStepReturns
from sb3_extra_buffers.kernels.launcher import (
    BYTES_AT,
    COLUMN_DTYPES,
    COLUMN_SOURCES,
    SOURCE_DTYPES,
    Columns,
    Launcher,
    StepColumns,
    TableLayout,
)

__all__ = ["ColumnKernels", "compute_gae", "gather_columns", "store_columns"]

# Triton reads global names only if they are constexpr
_BYTES_AT = tl.constexpr(BYTES_AT)
# rows of a program, and its warps
_ROWS, _WARPS = 32, 2
# environments of a program that computes advantages
_GAE_ROWS = 32


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


@triton.jit
def _load_number(from_ptr, row, is_row, given, NUMBER: tl.constexpr, N_NUMBERS: tl.constexpr):
    """The number ``NUMBER`` of each row: 0 if it is not given, or the table has no such column."""
    is_row = is_row & (NUMBER < N_NUMBERS)
    is_given = (given >> NUMBER) & 1
    is_byte = (given >> (NUMBER + _BYTES_AT)) & 1
    flag = tl.load(from_ptr + row, mask=is_row & (is_given + is_byte > 1), other=0).to(tl.float32)
    floats_ptr = from_ptr.to(tl.pointer_type(tl.float32))
    value = tl.load(floats_ptr + row, mask=is_row & (is_given > is_byte), other=0)
    return tl.where(is_byte > 0, flag, value)


@triton.jit
def store_columns(
    action_ptr,  # uint8 [row, ACTION]
    first_ptr, second_ptr, third_ptr, fourth_ptr,  # the numbers [row], see `StepColumns.given`
    numbers_ptr, actions_ptr,  # of the table
    step, n_rows,
    column,  # from a number to the next one of the same row
    given,
    block,  # which rows
    ROW: tl.constexpr,  # from a number to that of the next row
    ACTION_ROW: tl.constexpr, ACTION_AT: tl.constexpr, ACTION: tl.constexpr, ACTION2: tl.constexpr,
    N_NUMBERS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Store some rows of a step; what it reads may be in pinned host memory."""
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < n_rows
    at = step.to(tl.int64) * n_rows + row
    to, column = numbers_ptr + at * ROW, column.to(tl.int64)
    # for each row: the interpreter takes no scalars in masks
    given = tl.zeros_like(row) + given
    # all loads before the first store, past which the compiler moves none
    first = _load_number(first_ptr, row, is_row, given, 0, N_NUMBERS)
    second = _load_number(second_ptr, row, is_row, given, 1, N_NUMBERS)
    third = _load_number(third_ptr, row, is_row, given, 2, N_NUMBERS)
    fourth = _load_number(fourth_ptr, row, is_row, given, 3, N_NUMBERS)
    byte = tl.arange(0, ACTION2)
    inside = is_row[:, None] & (byte < ACTION)[None, :]
    action = tl.load(action_ptr + row[:, None] * ACTION + byte[None, :], mask=inside, other=0)
    tl.store(to, first, mask=is_row & (N_NUMBERS > 0))
    tl.store(to + column, second, mask=is_row & (N_NUMBERS > 1))
    tl.store(to + 2 * column, third, mask=is_row & (N_NUMBERS > 2))
    tl.store(to + 3 * column, fourth, mask=is_row & (N_NUMBERS > 3))
    tl.store(actions_ptr + (at * ACTION_ROW + ACTION_AT)[:, None] + byte[None, :], action, mask=inside)


@triton.jit(do_not_specialize=[*COLUMN_SOURCES, "step", "n_rows", "column", "given"])
def _write_kernel(
    action_ptr, first_ptr, second_ptr, third_ptr, fourth_ptr,
    numbers_ptr, actions_ptr,
    step, n_rows, column, given,
    ROW: tl.constexpr,
    ACTION_ROW: tl.constexpr, ACTION_AT: tl.constexpr, ACTION: tl.constexpr, ACTION2: tl.constexpr,
    N_NUMBERS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    store_columns(
        action_ptr, first_ptr, second_ptr, third_ptr, fourth_ptr, numbers_ptr, actions_ptr, step, n_rows, column,
        given, tl.program_id(0), ROW, ACTION_ROW, ACTION_AT, ACTION, ACTION2, N_NUMBERS, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "newest", "n_obs", "n_envs"])
def _n_step_kernel(
    indices_ptr,  # int64 [row]
    powers_ptr,  # float32 [N_STEPS + 1]
    out_ptr,  # int64 [2, row]
    dones_ptr, returns_ptr, discounts_ptr,  # float32 [row]
    numbers_ptr,  # float32 [obs, ROW], of the table
    n_rows, newest, n_obs, n_envs,
    ROW: tl.constexpr, N_STEPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`columns_torch.n_step_reference`; fewer than eight steps, which NumPy adds one after the other."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < n_rows
    first = tl.load(indices_ptr + row, mask=is_row, other=0)
    at, last, is_running = first, first, is_row
    total = tl.zeros([ROWS], tl.float32)
    ended = tl.zeros([ROWS], tl.float32)
    n_steps = tl.zeros([ROWS], tl.int32)
    for i in tl.static_range(N_STEPS):
        numbers = numbers_ptr + at * ROW
        reward = tl.load(numbers, mask=is_row, other=0)
        done = tl.load(numbers + 1, mask=is_row, other=0)
        timeout = tl.load(numbers + 2, mask=is_row, other=0)
        total += reward * tl.load(powers_ptr + i) * is_running.to(tl.float32)
        last = tl.where(is_running, at, last)
        ended = tl.where(is_running, done * (1 - timeout), ended)
        n_steps += is_running.to(tl.int32)
        is_running = is_running & (done == 0) & (timeout == 0) & (at // n_envs != newest)
        at += n_envs
        at = tl.where(at >= n_obs, at - n_obs, at)
    tl.store(out_ptr + row, first, mask=is_row)
    tl.store(out_ptr + n_rows.to(tl.int64) + row, last + n_obs, mask=is_row)
    tl.store(dones_ptr + row, ended, mask=is_row)
    tl.store(returns_ptr + row, total, mask=is_row)
    tl.store(discounts_ptr + row, tl.load(powers_ptr + n_steps, mask=is_row, other=0), mask=is_row)


class ColumnKernels:
    """The kernels bound to one table."""

    def __init__(self, table: TableLayout, n_rows: int) -> None:
        self._table, self._n_rows, self._device = table, n_rows, table.numbers.device
        self._gather = Launcher(_gather_kernel, self._device, (), (), ((torch.int64,), COLUMN_DTYPES), _WARPS)
        numbers = (torch.float32,) * 3
        self._n_step = Launcher(
            _n_step_kernel, self._device, (table.row, table.numbers.numel() >> 31 > 0), (table.numbers,),
            ((torch.int64, torch.float32, torch.int64, *numbers), ()), _WARPS,
        )  # fmt: skip
        self._write = Launcher(
            _write_kernel, self._device, (table.row, table.action, table.n_numbers, table.column >> 31 > 0),
            (table.numbers, table.actions), (SOURCE_DTYPES, ()), _WARPS,
        )  # fmt: skip
        self._grid = (-(-n_rows // _ROWS), 1, 1)

    def gather(self, indices: torch.Tensor, columns: Columns) -> None:
        """Fill ``columns`` with the records at the first ``len(columns.actions)`` of ``indices``."""
        pointers, sizes = columns.arguments()
        n_rows = len(columns.actions)
        self._gather.start(sizes, (-(-n_rows // _ROWS), 1, 1), (indices,), pointers, (n_rows, *sizes, _ROWS))

    def n_step(self, indices: torch.Tensor, powers: torch.Tensor, newest: int, n_obs: int, out: NStepReturns) -> None:
        """Fill ``out`` for the first ``len(out.dones)`` of ``indices``, which may be in pinned host memory."""
        n_rows, n_steps = len(out.dones), len(powers) - 1
        numbers = (n_rows, newest, n_obs, self._n_rows, self._table.row, n_steps, _ROWS)
        self._n_step.start(n_steps, (-(-n_rows // _ROWS), 1, 1), (indices, powers, *out), (), numbers)

    def write(self, step: int, columns: StepColumns) -> None:
        """Store the columns of all rows of a step."""
        sources, given = columns.arguments()
        sizes = self._table.constants()
        self._write.start(None, self._grid, sources, (), (step, self._n_rows, self._table.column, given, *sizes, _ROWS))


@triton.jit(do_not_specialize=["n_steps", "n_envs"])
def _gae_kernel(
    numbers_ptr,  # float32 [rewards, episode_starts, values, log_probs, advantages, returns][step, env]
    last_values_ptr,  # float32 [env]
    dones_ptr,  # float32 [env]
    n_steps,
    n_envs,
    gamma,
    decay,
    ROWS: tl.constexpr,
):
    """Advantages and returns of ``ROWS`` environments, from the last step to the first."""
    env = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = env < n_envs
    column = n_steps.to(tl.int64) * n_envs
    next_value = tl.load(last_values_ptr + env, mask=inside, other=0)
    continues = 1.0 - tl.load(dones_ptr + env, mask=inside, other=0)
    advantage = tl.zeros([ROWS], tl.float32)
    for i in range(n_steps):
        at = numbers_ptr + (n_steps - 1 - i).to(tl.int64) * n_envs + env
        reward, start = tl.load(at, mask=inside, other=0), tl.load(at + column, mask=inside, other=0)
        value = tl.load(at + 2 * column, mask=inside, other=0)
        # the order of SB3's operations
        delta = reward + gamma * next_value * continues - value
        advantage = delta + decay * continues * advantage
        tl.store(at + 4 * column, advantage, mask=inside)
        tl.store(at + 5 * column, advantage + value, mask=inside)
        next_value, continues = value, 1.0 - start


def compute_gae(
    numbers: torch.Tensor, last_values: torch.Tensor, dones: torch.Tensor, gamma: float, gae_lambda: float
) -> None:
    """Fill advantages and returns of ``numbers [6, step, env]``; bit-identical to SB3's loop."""
    n_steps, n_envs = numbers.shape[1:]
    grid: Any = (-(-n_envs // _GAE_ROWS),)
    # multiplying and adding in one instruction would round once, where SB3 rounds twice
    args = numbers, last_values, dones, n_steps, n_envs, float(gamma), float(gamma * gae_lambda), _GAE_ROWS
    if numbers.device.type == "cuda":
        with torch.cuda.device(numbers.device):
            _gae_kernel[grid](*args, num_warps=1, enable_fp_fusion=False)
    else:
        _gae_kernel[grid](*args)  # Triton's interpreter
