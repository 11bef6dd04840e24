"""The Triton kernels for frames on a GPU, bound to the tables of a store.

Frames are handled as 64-bit words. Nothing is returned to the host; each write leaves a report in pinned memory.
"""

from __future__ import annotations

import torch
import triton

from sb3_extra_buffers.kernels.delta_read_triton import read_kernel
from sb3_extra_buffers.kernels.delta_tables import CHUNK, DeviceTables, FrameShape
from sb3_extra_buffers.kernels.delta_write_triton import write_kernel
from sb3_extra_buffers.kernels.launcher import COLUMN_DTYPES, NO_COLUMNS, Columns, Launcher

__all__ = ["ReadKernel", "WriteKernel"]

# tuned: programs that share the segments of a row, and warps of each
_PARTS, _READ_WARPS = 2, 2
# the most registers of a thread that reads, so that more programs run at a time
_READ_REGISTERS = 88
# chunks that a program encodes together, and the most programs of a write: as many as an H200 runs at a time
_BLOCK_CHUNKS, _WRITE_PROGRAMS = 8, 264
# warps of a program that writes, and registers of a thread: with a program per stream, and with several streams each
_FEW, _MANY = (8, 128), (16, 64)


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
    """The writing kernel, bound to one set of tables and its scratch memory."""

    def __init__(self, shape: FrameShape, tables: DeviceTables, scratch: torch.Tensor) -> None:
        self.tables = tables
        words, per, stack, recent = torch.int64, shape.per_segment, shape.stack, shape.n_recent
        block = block_chunks(shape)
        self._sizes = (
            stack, triton.next_power_of_2(stack), recent, triton.next_power_of_2(recent), per,
            triton.next_power_of_2(per), shape.min_frames, shape.max_chain_bytes,
            shape.n_numbers, shape.frame_bytes, shape.keyframe_bytes // 8, block,
            -(-shape.n_chunks // block),
        )  # fmt: skip
        bound = tables._replace(recent=tables.recent.view(words), keyframe_rows=tables.keyframe_rows.view(words))
        effort = _MANY if tables.tails.numel() > _WRITE_PROGRAMS else _FEW
        self._launcher = Launcher(
            write_kernel, tables.frame_ids.device, (shape.frame_bytes, stack, per, block, effort), (*bound, scratch),
            ((words, words, words), (words,)), *effort,
        )  # fmt: skip

    def write(
        self, job: torch.Tensor, obs: torch.Tensor, next_obs: torch.Tensor, n_sets: int, report: torch.Tensor
    ) -> None:
        """`write_rows_reference`; ``job`` is packed, observations are ``[stream, stack, words of 8 bytes]``.

        Any of them and ``report`` may be in pinned host memory.
        """
        n_streams = self.tables.tails.numel()
        grid = (min(n_streams, _WRITE_PROGRAMS), 1, 1)
        self._launcher.start(n_sets, grid, (job, obs, next_obs), (report,), (n_streams, n_sets, *self._sizes))


def block_chunks(shape: FrameShape) -> int:
    """Chunks of a frame that a program encodes together."""
    return min(triton.next_power_of_2(shape.n_chunks), _BLOCK_CHUNKS)


def scratch_for(shape: FrameShape, n_streams: int, device: torch.device) -> torch.Tensor:
    """Scratch memory for the writing kernel."""
    n_bytes = min(n_streams, _WRITE_PROGRAMS) * block_chunks(shape) * CHUNK
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)
