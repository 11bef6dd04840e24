"""Drawing transitions of a ring and gathering their columns: `kernels.transitions_torch` in one launch on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sb3_extra_buffers.kernels.launcher import Launcher
from sb3_extra_buffers.kernels.transitions_torch import Endings, TorchTransitions

__all__ = ["TritonTransitions"]

#: Columns of one launch.
_COLUMNS = 6
_ROWS, _WARPS = 128, 4
_CHUNK = tl.constexpr(16)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@triton.jit
def _copy(from_ptr, to_ptr, source, target, is_row, WORDS: tl.constexpr):
    """Copy ``WORDS`` words of each transition from the rows ``source`` to the rows ``target``."""
    if WORDS == 1:
        tl.store(to_ptr + target, tl.load(from_ptr + source, mask=is_row, other=0), mask=is_row)
    elif WORDS > 1:
        for base in range(0, WORDS, _CHUNK):
            word = base + tl.arange(0, _CHUNK)
            inside = is_row[:, None] & (word < WORDS)[None, :]
            found = tl.load(from_ptr + source[:, None] * WORDS + word[None, :], mask=inside, other=0)
            tl.store(to_ptr + target[:, None] * WORDS + word[None, :], found, mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_envs", "n_transitions"])
def _gather_kernel(
    uniform_ptr,  # float64 [row]
    indices_ptr,  # int64 [2, row]
    returns_ptr,  # float32 [row]
    discounts_ptr,  # float32 [row]
    out0_ptr, out1_ptr, out2_ptr, out3_ptr, out4_ptr, out5_ptr,  # word [row, WORDS]
    counts_ptr,
    rewards_ptr,  # float32 [transition]
    dones_ptr, truncations_ptr,  # [transition]
    powers_ptr,  # float32 [N_STEPS + 1]
    column0_ptr, column1_ptr, column2_ptr, column3_ptr, column4_ptr, column5_ptr,  # word [transition, WORDS]
    n_rows, n_envs, n_transitions,
    IS_UNIFORM: tl.constexpr,  # draw by uniform_ptr, rather than gather indices_ptr
    IS_FIRST: tl.constexpr,  # whether this launch writes everything other than columns
    N_STEPS: tl.constexpr, AT_END: tl.constexpr,  # a bit for each column
    WORDS0: tl.constexpr, WORDS1: tl.constexpr, WORDS2: tl.constexpr,
    WORDS3: tl.constexpr, WORDS4: tl.constexpr, WORDS5: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Draw ``ROWS`` transitions, sum their rewards, and gather columns; the grid is ``[rows]``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < n_rows
    n_added, n_held = tl.load(counts_ptr), tl.load(counts_ptr + 1)
    if IS_UNIFORM:
        uniform = tl.load(uniform_ptr + row, mask=is_row, other=0)
        first = (uniform * n_held.to(tl.float64)).to(tl.int64)
        first = tl.maximum(tl.minimum(first, n_held - 1), 0)
    else:
        first = tl.load(indices_ptr + row, mask=is_row, other=0)
    last = first
    if N_STEPS > 0:
        is_running = is_row
        total = tl.zeros([ROWS], tl.float32)
        count = tl.zeros([ROWS], tl.int32)
        for nth in tl.static_range(N_STEPS):
            at = (first + nth * n_envs.to(tl.int64)) % n_transitions
            reward = tl.load(rewards_ptr + at, mask=is_running, other=0).to(tl.float64)
            # exact, then rounded once: as float32 numbers multiply, and not contracted to a multiply-add
            reward = (reward * tl.load(powers_ptr + nth).to(tl.float64)).to(tl.float32)
            total = tl.where(is_running, total + reward, total)
            last = tl.where(is_running, at, last)
            count += is_running.to(tl.int32)
            # % is negative for negative numbers
            age = (n_added % n_transitions + n_transitions - 1 - at) % n_transitions
            is_done = tl.load(dones_ptr + at, mask=is_running, other=0) != 0
            is_truncated = tl.load(truncations_ptr + at, mask=is_running, other=0) != 0
            is_running = is_running & (age >= n_envs) & (is_done == 0) & (is_truncated == 0)
        if IS_FIRST:
            tl.store(returns_ptr + row, total, mask=is_row)
            tl.store(discounts_ptr + row, tl.load(powers_ptr + count, mask=is_row, other=0), mask=is_row)
    if IS_FIRST:
        if IS_UNIFORM:
            tl.store(indices_ptr + row, first, mask=is_row)
        tl.store(indices_ptr + n_rows.to(tl.int64) + row, last + n_transitions, mask=is_row)
    _copy(column0_ptr, out0_ptr, last if AT_END & 1 else first, row, is_row, WORDS0)
    _copy(column1_ptr, out1_ptr, last if AT_END & 2 else first, row, is_row, WORDS1)
    _copy(column2_ptr, out2_ptr, last if AT_END & 4 else first, row, is_row, WORDS2)
    _copy(column3_ptr, out3_ptr, last if AT_END & 8 else first, row, is_row, WORDS3)
    _copy(column4_ptr, out4_ptr, last if AT_END & 16 else first, row, is_row, WORDS4)
    _copy(column5_ptr, out5_ptr, last if AT_END & 32 else first, row, is_row, WORDS5)


@triton.jit(do_not_specialize=["first", "n_envs", "n_added", "n_held"])
def _write_kernel(
    value0_ptr, value1_ptr, value2_ptr, value3_ptr, value4_ptr, value5_ptr,  # word [env, WORDS]
    counts_ptr,
    column0_ptr, column1_ptr, column2_ptr, column3_ptr, column4_ptr, column5_ptr,  # word [transition, WORDS]
    first, n_envs,
    n_added,  # divided by n_envs
    n_held,
    WORDS0: tl.constexpr, WORDS1: tl.constexpr, WORDS2: tl.constexpr,
    WORDS3: tl.constexpr, WORDS4: tl.constexpr, WORDS5: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write a step of ``ROWS`` environments; the grid is ``[rows]``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row, target = row < n_envs, first.to(tl.int64) + row
    _copy(value0_ptr, column0_ptr, row, target, is_row, WORDS0)
    _copy(value1_ptr, column1_ptr, row, target, is_row, WORDS1)
    _copy(value2_ptr, column2_ptr, row, target, is_row, WORDS2)
    _copy(value3_ptr, column3_ptr, row, target, is_row, WORDS3)
    _copy(value4_ptr, column4_ptr, row, target, is_row, WORDS4)
    _copy(value5_ptr, column5_ptr, row, target, is_row, WORDS5)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr, n_added.to(tl.int64) * n_envs)
        tl.store(counts_ptr + 1, n_held.to(tl.int64))


class TritonTransitions(TorchTransitions):
    """`TorchTransitions` in one launch for every six columns."""

    def __init__(
        self,
        counts: torch.Tensor,
        n_envs: int,
        columns: Sequence[torch.Tensor],
        n_transitions: int,
        endings: Endings | None = None,
        at_end: Sequence[bool] = (),
    ) -> None:
        super().__init__(counts, n_envs, columns, n_transitions, endings, at_end)
        ends = (counts, counts, counts, counts)
        self._n_steps = 0
        if endings is not None:
            truncations = endings.dones if endings.truncations is None else endings.truncations
            ends = (endings.rewards, _flags(endings.dones), _flags(truncations), endings.discounts)
            self._n_steps = len(endings.discounts) - 1
        # a launch for each group of columns: the launcher, and its compile-time constants
        self._launches = []
        for start in range(0, max(len(self.columns), 1), _COLUMNS):
            group = [_words(column) for column in self.columns[start : start + _COLUMNS]]
            n_unused = _COLUMNS - len(group)
            words = [part[0].numel() for part in group] + [0] * n_unused
            ends_bits = sum(is_end << i for i, is_end in enumerate(self.at_end[start : start + _COLUMNS]))
            dtypes = [part.dtype for part in group] + [torch.int64] * n_unused
            launcher = Launcher(
                _gather_kernel, counts.device,
                (tuple(dtypes), tuple(words), ends_bits, self._n_steps, tuple(table.dtype for table in ends)),
                (counts, *ends, *group, *[counts] * n_unused),
                ((torch.float64, torch.int64, torch.float32, torch.float32, *dtypes), ()), _WARPS,
            )  # fmt: skip
            self._launches.append((launcher, start, (self._n_steps, ends_bits, *words, _ROWS)))
        self._writes = []
        for start in range(0, max(len(self.written), 1), _COLUMNS):
            group = [_words(column) for column in self.written[start : start + _COLUMNS]]
            n_unused = _COLUMNS - len(group)
            words = (*(part[0].numel() for part in group), *[0] * n_unused)
            dtypes = [part.dtype for part in group] + [torch.int64] * n_unused
            launcher = Launcher(
                _write_kernel, counts.device, (tuple(dtypes), words), (counts, *group, *[counts] * n_unused),
                (tuple(dtypes), ()), _WARPS,
            )  # fmt: skip
            self._writes.append((launcher, start, words))

    def write(self, first: int, values: Sequence[torch.Tensor], n_added: int, n_held: int) -> None:
        grid = (-(-self.n_envs // _ROWS), 1, 1)
        for launcher, start, words in self._writes:
            group = tuple(values[start : start + _COLUMNS])
            group += (self.counts,) * (_COLUMNS - len(group))
            # a count of steps fits in 32 bits
            numbers = (first, self.n_envs, n_added // self.n_envs, n_held, *words, _ROWS)
            launcher.start((), grid, group, (), numbers)

    def gather(
        self,
        uniform: torch.Tensor | None,
        indices: torch.Tensor,
        outs: Sequence[torch.Tensor],
        returns: torch.Tensor | None = None,
        discounts: torch.Tensor | None = None,
    ) -> None:
        n_rows = indices.shape[1]
        if not n_rows:
            return
        grid = (-(-n_rows // _ROWS), 1, 1)
        unused = indices
        numbers = (unused if part is None else part for part in (uniform, indices, returns, discounts))
        before = tuple(numbers)
        for launcher, start, constants in self._launches:
            group = tuple(outs[start : start + _COLUMNS])
            group += (unused,) * (_COLUMNS - len(group))
            # later launches gather what the first has drawn
            variant = (uniform is not None and start == 0, start == 0)
            sizes = (n_rows, self.n_envs, self.n_transitions, *variant, *constants)
            launcher.start(variant, grid, (*before, *group), (), sizes)


def _words(column: torch.Tensor) -> torch.Tensor:
    """The bits of ``column`` as integers, ``[transition, word]``."""
    return column.view(len(column), -1).view(_BITS[column.element_size()])


def _flags(column: torch.Tensor) -> torch.Tensor:
    """``column`` as a kernel compares it with zero: the bits of a negative zero are not all zero."""
    return column if column.dtype.is_floating_point else _words(column)
