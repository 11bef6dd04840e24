"""The Triton kernels for frames on a GPU, bound to the tables of a store.

Frames are handled as 64-bit words. Nothing is returned to the host; each write leaves a report in pinned memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from sb3_extra_buffers.kernels.delta_read_triton import read_kernel
from sb3_extra_buffers.kernels.delta_tables import SCRATCH, DeviceTables, FrameShape
from sb3_extra_buffers.kernels.delta_write_triton import write_kernel
from sb3_extra_buffers.kernels.launcher import (
    COLUMN_DTYPES,
    NO_COLUMNS,
    SOURCE_DTYPES,
    Columns,
    Launcher,
    StepColumns,
    TableLayout,
)

__all__ = ["ReadKernel", "WriteKernel"]

# tuned (see benchmarks/gpu_tuning.py): programs that share the segments of a row, and warps of each
_PARTS, _READ_WARPS = 2, 2
# the most registers of a thread that reads, so that more programs run at a time
_READ_REGISTERS = 80


class _Effort(NamedTuple):
    """How the work of a write is divided."""

    n_programs: int  # at most; each writes several streams if there are more of these
    n_warps: int
    n_chunks: int  # at most, of a frame that a program encodes together
    max_registers: int  # per thread


# Tuned on an H200: each is for up to as many streams as programs run at a time, the last one for any number. With 128
# registers, some variables are spilled to memory, but several programs can share a multiprocessor.
_FEW, _SOME, _MANY = _Effort(132, 8, 8, 255), _Effort(264, 8, 8, 128), _Effort(528, 4, 4, 128)
# constants of a kernel that writes no columns (`TableLayout.constants`)
_NO_TABLE = (0, 0, 0, 0, 1, 0)


class ReadKernel:
    """The reading kernel. It looks up the tables in ``addresses``, so that they may grow and move."""

    def __init__(self, shape: FrameShape, addresses: torch.Tensor, frame_ids: torch.Tensor, n_streams: int) -> None:
        per, n_chunks, words = shape.per_segment, shape.n_chunks, torch.int64
        self._stack, self._n_chunks, self._n_streams = shape.stack, n_chunks, n_streams
        self._sizes = (
            per, triton.next_power_of_2(per), -(-shape.frame_bytes // 8), shape.keyframe_bytes // 8, n_chunks,
            triton.next_power_of_2(n_chunks), _PARTS,
        )  # fmt: skip
        key = (shape.frame_bytes, shape.stack, per)
        self._launcher = Launcher(
            read_kernel,
            frame_ids.device,
            key,
            (addresses, frame_ids),
            ((words,), (words, *COLUMN_DTYPES)),
            _READ_WARPS,
            _READ_REGISTERS,
        )

    def read(
        self, indices: torch.Tensor, out: torch.Tensor, columns: Columns | None = None, newest_only: bool = False
    ) -> None:
        """`read_rows_reference`; ``out`` is ``[set, row, stack, words of 8 bytes]``. ``columns`` are gathered."""
        n_sets, n_rows = indices.shape
        stack = 1 if newest_only else self._stack
        others, sizes = ((indices,) * 4, NO_COLUMNS) if columns is None else columns.arguments()
        n_targets = 1 << (n_sets * stack - 1).bit_length()
        numbers = (n_rows, self._n_streams, n_sets, stack, self._stack, n_targets, *self._sizes)
        grid = (n_rows, _PARTS, self._n_chunks)
        self._launcher.start((n_sets, stack, sizes), grid, (out,), (indices, *others), (*numbers, *sizes))


class WriteKernel:
    """The writing kernel, bound to one set of tables, its scratch memory and the columns that it writes too."""

    def __init__(
        self, shape: FrameShape, tables: DeviceTables, scratch: torch.Tensor, columns: TableLayout | None = None
    ) -> None:
        self.tables, self.columns = tables, columns
        words, per, stack, recent = torch.int64, shape.per_segment, shape.stack, shape.n_recent
        effort = _effort(tables.tails.numel())
        block = _block_chunks(shape, effort)
        constants = _NO_TABLE if columns is None else columns.constants()
        self._sizes = (
            stack, triton.next_power_of_2(stack), recent, triton.next_power_of_2(recent), per,
            triton.next_power_of_2(per), shape.min_frames, shape.max_chain_bytes,
            shape.n_numbers, shape.frame_bytes, shape.keyframe_bytes // 8, block,
            -(-shape.n_chunks // block), shape.directory_bytes, *constants,
        )  # fmt: skip
        bound = tables._replace(recent=tables.recent.view(words), keyframe_rows=tables.keyframe_rows.view(words))
        is_far = columns is not None and columns.column >> 31 > 0
        key = (shape.frame_bytes, stack, per, block, effort, constants, is_far)
        dtypes = (words, words), (words, *SOURCE_DTYPES, torch.float32, torch.uint8)
        self._launcher = Launcher(
            write_kernel, tables.frame_ids.device, key, (*bound, scratch), dtypes, effort.n_warps, effort.max_registers
        )
        n_streams = tables.tails.numel()
        # one more than streams, for the columns
        self._grid = (min(n_streams + (columns is not None), effort.n_programs), 1, 1)
        self._lead = (n_streams, 0 if columns is None else columns.column)
        self._places = None if columns is None else (columns.numbers, columns.actions)

    def write(
        self,
        job: tuple[int, ...],
        obs: torch.Tensor,
        next_obs: torch.Tensor,
        n_sets: int,
        report: torch.Tensor,
        columns: StepColumns | None = None,
    ) -> None:
        """`write_rows_reference`; ``job`` is `WriteJob.arguments`, observations ``[stream, stack, words of 8 bytes]``.

        ``columns`` of the step are written to the table of columns in the same launch. Observations, columns and
        ``report`` may be in pinned host memory.
        """
        sources, given = ((report,) * 5, -1) if columns is None else columns.arguments()
        places = self._places or (report, report)
        numbers = (*self._lead, given, *job, n_sets, *self._sizes)
        self._launcher.start(n_sets, self._grid, (obs, next_obs), (report, *sources, *places), numbers)


def _effort(n_streams: int) -> _Effort:
    return next((effort for effort in (_FEW, _SOME) if n_streams <= effort.n_programs), _MANY)


def _block_chunks(shape: FrameShape, effort: _Effort) -> int:
    """Chunks of a frame that a program encodes together."""
    return min(triton.next_power_of_2(shape.n_chunks), effort.n_chunks)


def scratch_for(shape: FrameShape, n_streams: int, device: torch.device) -> torch.Tensor:
    """Scratch memory for the writing kernel."""
    effort = _effort(n_streams)
    per_program = _block_chunks(shape, effort) * SCRATCH + shape.directory_bytes
    return torch.empty(min(n_streams, effort.n_programs) * per_program, dtype=torch.uint8, device=device)
