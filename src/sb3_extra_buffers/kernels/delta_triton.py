"""The Triton kernels for frames on a GPU, bound to the tables of a store.

Frames are handled as 64-bit words. Nothing is returned to the host: what it must know is left in a report.
"""

from __future__ import annotations

import torch
import triton

from sb3_extra_buffers.codecs.delta import padded, top_bytes
from sb3_extra_buffers.kernels.delta_read_triton import read_kernel
from sb3_extra_buffers.kernels.delta_tables import DeviceTables, FrameShape, capacity_of
from sb3_extra_buffers.kernels.delta_write_triton import write_kernel
from sb3_extra_buffers.kernels.launcher import COLUMN_DTYPES, NO_COLUMNS, Columns, Launcher

__all__ = ["DeviceKernels"]

# measured: programs per row and chunk of lines, lines per chunk, warps per program
_PARTS, _OWN, _READ_WARPS, _WRITE_WARPS = 2, 32, 2, 16


class DeviceKernels:
    """The kernels bound to one set of tables, which makes a call cheap."""

    def __init__(self, tables: DeviceTables, shape: FrameShape) -> None:
        self.tables, self.shape = tables, shape
        words = torch.int64
        keyframe_rows = tables.keyframe_rows.view(words)
        size = shape.frame_bytes
        n_tops, frame_words, keyframe_words = top_bytes(size), -(-size // 8), shape.keyframe_bytes // 8
        self._capacity = capacity_of(tables)
        self._n_chunks = -(-frame_words // (8 * _OWN))
        self._read_sizes = (
            shape.per_segment, size, n_tops, triton.next_power_of_2(n_tops), frame_words, keyframe_words, _PARTS, _OWN,
        )  # fmt: skip
        self._write_sizes = (
            shape.stack, shape.n_recent, triton.next_power_of_2(shape.n_recent), shape.per_segment, shape.min_frames,
            shape.max_chain_bytes, shape.stage_bytes, size, keyframe_words, triton.next_power_of_2(padded(size) // 8),
            tables.scratch.shape[1],
        )  # fmt: skip
        read_tables = (
            tables.heap, tables.heap.view(words), tables.stage, tables.stage.view(words), tables.starts,
            tables.keyframes, keyframe_rows, tables.frame_ids,
        )  # fmt: skip
        write_tables = tables._replace(recent=tables.recent.view(words), keyframe_rows=keyframe_rows)
        device, key = tables.frame_ids.device, (size, shape.stack, shape.per_segment, self._capacity >> 31 > 0)
        self._read = Launcher(read_kernel, device, key, read_tables, ((words,), (words, *COLUMN_DTYPES)), _READ_WARPS)
        self._write = Launcher(write_kernel, device, key, tuple(write_tables), ((words, words), (words,)), _WRITE_WARPS)

    def read(self, indices: torch.Tensor, out: torch.Tensor, columns: Columns | None = None) -> None:
        """`read_rows_reference`; ``out`` is ``[set, row, stack, words of 8 bytes]``. ``columns`` are gathered."""
        n_sets, n_rows = indices.shape
        stack = self.shape.stack
        others, sizes = ((indices,) * 4, NO_COLUMNS) if columns is None else columns.arguments()
        numbers = (n_rows, self._capacity, n_sets, stack, 1 << (n_sets * stack - 1).bit_length(), *self._read_sizes)
        grid = (n_rows, _PARTS, self._n_chunks)
        self._read.start((n_sets, sizes), grid, (out,), (indices, *others), (*numbers, *sizes))

    def write(self, job: torch.Tensor, frames: torch.Tensor, report: torch.Tensor) -> None:
        """`write_rows_reference`; ``job`` is packed, ``frames`` are ``[set, stream, stack, words of 8 bytes]``.

        ``report`` may be in pinned host memory.
        """
        n_sets, n_streams = frames.shape[:2]
        numbers = (n_streams, self.shape.segments_per_stream, n_sets, *self._write_sizes)
        self._write.start(n_sets, (n_streams, 1, 1), (job, frames), (report,), numbers)
