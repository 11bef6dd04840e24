"""Kernels that copy uncompressed observations to and from a GPU's tables, in one launch each: `kernels.gather_torch`.

Rows are words of any integer dtype; tables hold the addresses of their pieces. Indices and rows to write may be in
pinned host memory: reading them from here is faster than a copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sb3_extra_buffers.kernels.columns_triton import gather_columns
from sb3_extra_buffers.kernels.launcher import COLUMN_DTYPES, NO_COLUMNS, Columns, Launcher

__all__ = ["FrameGather", "TimelineGather"]

# words that a program copies, and its warps
_TILE, _WARPS = 2048, 4
# entries of a job before those of each stream: addresses of the step's rows, of its next observations and of the
# previous step's, then the indices of this step and the previous one (-1: none), and the number of the side row that
# this step's next observation of the first stream takes
JOB_ROWS, JOB_NEXT, JOB_LAST, JOB_AT, JOB_BEFORE, JOB_SIDE = range(6)
JOB_STREAMS = 6


@triton.jit(do_not_specialize=["n_rows", "n_indices", "n_obs", "n_streams", "per_piece", "per_side_piece"])
def _read_timeline_kernel(
    out_ptr,  # word [index, WORDS]
    addresses_ptr,  # int64 [piece]
    side_addresses_ptr,  # int64 [piece]
    side_ids_ptr,  # int32 [obs]
    indices_ptr,  # int64 [index]
    floats_ptr, actions_ptr, numbers_ptr, records_ptr,  # `columns_triton.gather_columns`
    n_rows, n_indices, n_obs, n_streams, per_piece, per_side_piece,
    WORDS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    ACTION: tl.constexpr, ACTION2: tl.constexpr, ACTION_AT: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Copy ``CHUNK`` words of ``ROWS`` observations; the grid is ``[rows, chunk]``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < n_indices
    index = tl.load(indices_ptr + row, mask=is_row, other=0)
    is_next = index >= n_obs
    at = index % n_obs
    side_id = tl.load(side_ids_ptr + at, mask=is_row, other=-1)
    is_side = is_next & (side_id > 0)
    follower = at + n_streams
    follower = tl.where(follower >= n_obs, follower - n_obs, follower)
    position = tl.where(is_side, side_id.to(tl.int64) - 1, tl.where(is_next, follower, at))
    per = tl.where(is_side, per_side_piece.to(tl.int64), per_piece.to(tl.int64))
    is_written = is_row & (side_id >= 0)
    piece = position // per
    address = tl.load(tl.where(is_side, side_addresses_ptr + piece, addresses_ptr + piece), mask=is_written, other=0)
    word = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    source = address.to(out_ptr.dtype) + (position - piece * per) * WORDS
    found = tl.load(source[:, None] + word[None, :], mask=is_written[:, None] & (word < WORDS)[None, :], other=0)
    tl.store(out_ptr + row[:, None] * WORDS + word[None, :], found, mask=is_row[:, None] & (word < WORDS)[None, :])
    # nested, since ACTION is known at compile time
    if ACTION > 0:  # noqa: SIM102
        if tl.program_id(1) == 0:
            gather_columns(
                floats_ptr, actions_ptr, numbers_ptr, records_ptr, index, row, row < n_rows, n_rows,
                ACTION, ACTION2, ACTION_AT, RECORD,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n_streams"])
def _write_timeline_kernel(
    job_ptr,  # int64 [JOB_STREAMS + 2 * stream]: then for each stream the address and the id of a side row, or 0
    rows_ptr,  # word [N_SETS, stream, WORDS]
    side_ids_ptr,  # int32 [obs]
    n_streams,
    WORDS: tl.constexpr,
    N_SETS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store a step; where it does not continue the previous one, keep that one's next observation in a side row.

    Nothing that is read here is overwritten, so that the same step may be written twice.
    """
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = i < n_streams.to(tl.int64) * WORDS
    target = tl.load(job_ptr).to(rows_ptr.dtype)
    tl.store(target + i, tl.load(rows_ptr + i, mask=inside, other=0), mask=inside)
    stream, word = i // WORDS, i % WORDS
    is_first = inside & (word == 0)
    at, before = tl.load(job_ptr + 3), tl.load(job_ptr + 4)
    side_id = tl.full([TILE], 0, tl.int32)
    if N_SETS == 2:
        moved = tl.load(job_ptr + 6 + 2 * stream, mask=inside, other=0)
        last = tl.load(job_ptr + 2).to(rows_ptr.dtype)
        kept = tl.load(last + i, mask=inside & (moved != 0), other=0)
        tl.store(moved.to(rows_ptr.dtype) + word, kept, mask=inside & (moved != 0))
        moved_id = tl.load(job_ptr + 7 + 2 * stream, mask=is_first, other=0).to(tl.int32)
        before += stream
        tl.store(side_ids_ptr + before, moved_id, mask=is_first & (before >= stream))
        following = tl.load(rows_ptr + n_streams.to(tl.int64) * WORDS + i, mask=inside, other=0)
        tl.store(tl.load(job_ptr + 1).to(rows_ptr.dtype) + i, following, mask=inside)
        side_id = (tl.load(job_ptr + 5) + 1 + stream).to(tl.int32)
    tl.store(side_ids_ptr + at + stream, side_id, mask=is_first)


@triton.jit(do_not_specialize=["n_rows", "n_indices", "per_piece"])
def _read_frames_kernel(
    out_ptr,  # word [index, ...]
    addresses_ptr,  # int64 [piece]
    frame_ids_ptr,  # int32 [obs_index, STACK]
    indices_ptr,  # int64 [index]
    floats_ptr, actions_ptr, numbers_ptr, records_ptr,  # `columns_triton.gather_columns`
    n_rows, n_indices, per_piece,
    STACK: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
    ACTION: tl.constexpr, ACTION2: tl.constexpr, ACTION_AT: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Copy ``CHUNK`` words of ``ROWS`` frames; the grid is ``[frames, chunk]``.

    In an observation, ``UNIT`` words of each frame take turns; all words of a frame, if frames are contiguous.
    """
    frame = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, nth = frame // STACK, frame % STACK
    is_row = row < n_indices
    index = tl.load(indices_ptr + row, mask=is_row, other=0)
    slot = tl.load(frame_ids_ptr + index * STACK + nth, mask=is_row, other=0).to(tl.int64)
    piece = slot // per_piece
    address = tl.load(addresses_ptr + piece, mask=is_row, other=0)
    word = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = is_row[:, None] & (word < WORDS)[None, :]
    source = address.to(out_ptr.dtype) + (slot - piece * per_piece) * WORDS
    found = tl.load(source[:, None] + word[None, :], mask=inside, other=0)
    to = (word // UNIT) * (STACK * UNIT) + word % UNIT
    tl.store(out_ptr + (row * (STACK * WORDS) + nth * UNIT)[:, None] + to[None, :], found, mask=inside)
    # nested, since ACTION is known at compile time
    if ACTION > 0:  # noqa: SIM102
        if tl.program_id(1) == 0:
            gather_columns(
                floats_ptr, actions_ptr, numbers_ptr, records_ptr, index, row, (row < n_rows) & (nth == 0), n_rows,
                ACTION, ACTION2, ACTION_AT, RECORD,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n_new", "n_streams", "n_steps"])
def _write_frames_kernel(
    job_ptr,  # int64 [1 + 2 * n_new]: the step; then for each new frame its number and the address of its slot
    ids_ptr,  # int32 [N_SETS, stream, STACK]
    frames_ptr,  # word [frame, WORDS]
    frame_ids_ptr,  # int32 [obs_index, STACK]
    n_new, n_streams, n_steps,
    STACK: tl.constexpr, WORDS: tl.constexpr, N_SETS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the new frames of a step and the ids of all; the grid is ``[max(n_new, 1), chunk]``.

    Slots of new frames are not in use yet, so that the same step may be written twice.
    """
    new = tl.program_id(0)
    if new < n_new:
        number = tl.load(job_ptr + 1 + 2 * new)
        target = tl.load(job_ptr + 2 + 2 * new).to(frames_ptr.dtype)
        word = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        found = tl.load(frames_ptr + number * WORDS + word, mask=word < WORDS, other=0)
        tl.store(target + word, found, mask=word < WORDS)
    if (new == 0) & (tl.program_id(1) == 0):
        step = tl.load(job_ptr)
        n_ids = n_streams * STACK
        for base in range(0, n_ids, CHUNK):
            i = base + tl.arange(0, CHUNK)
            for which in tl.static_range(N_SETS):
                ids = tl.load(ids_ptr + which * n_ids + i, mask=i < n_ids, other=0)
                at = (which * n_steps.to(tl.int64) + step) * n_ids
                tl.store(frame_ids_ptr + at + i, ids, mask=i < n_ids)


class _Tile(NamedTuple):
    """How rows are divided among programs."""

    rows: int
    chunk: int
    n_chunks: int


def _tile(n_words: int) -> _Tile:
    chunk = min(triton.next_power_of_2(n_words), _TILE)
    return _Tile(max(_TILE // chunk // 8, 1), chunk, -(-n_words // chunk))


def _column_args(indices: torch.Tensor, columns: Columns | None) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    if columns is None:
        return (indices, indices, indices, indices), NO_COLUMNS
    return columns.arguments()


class TimelineGather:
    """The kernels of a timeline, bound to its tables."""

    def __init__(
        self, addresses: torch.Tensor, side_addresses: torch.Tensor, side_ids: torch.Tensor, words: torch.dtype,
        n_words: int, n_streams: int, n_sets: int, per_piece: int, per_side_piece: int,
    ) -> None:  # fmt: skip
        device, ints = side_ids.device, torch.int64
        self._tile = _tile(n_words)
        self._n_words, self._n_streams, self._n_sets = n_words, n_streams, n_sets
        self._sizes = (len(side_ids), n_streams, per_piece, per_side_piece, n_words, *self._tile[:2])
        key = (words, n_words, n_sets, len(side_ids) >> 31 > 0)
        self._read = Launcher(
            _read_timeline_kernel, device, key, (addresses, side_addresses, side_ids),
            ((words,), (ints, *COLUMN_DTYPES)), _WARPS,
        )  # fmt: skip
        self._write = Launcher(_write_timeline_kernel, device, key, (side_ids,), ((ints, words), ()), _WARPS)

    def read(self, indices: torch.Tensor, out: torch.Tensor, columns: Columns | None = None) -> None:
        """`read_timeline_reference`; ``columns`` of the first ``indices.shape[-1]`` rows are gathered."""
        others, action = _column_args(indices, columns)
        n_indices, tile = indices.numel(), self._tile
        grid = (-(-n_indices // tile.rows), tile.n_chunks, 1)
        numbers = (indices.shape[-1], n_indices, *self._sizes, *action)
        self._read.start(action, grid, (out,), (indices, *others), numbers)

    def write(self, job: torch.Tensor, rows: torch.Tensor) -> None:
        """Store the rows ``[set, stream, word]`` of a step, as ``job`` says."""
        grid = (-(-self._n_streams * self._n_words // _TILE), 1, 1)
        self._write.start((), grid, (job, rows), (), (self._n_streams, self._n_words, self._n_sets, _TILE))


class FrameGather:
    """The kernels of shared frames, bound to their tables."""

    def __init__(
        self, addresses: torch.Tensor, frame_ids: torch.Tensor, words: torch.dtype, n_words: int, unit: int,
        n_steps: int, n_streams: int, n_sets: int, per_piece: int,
    ) -> None:  # fmt: skip
        device, ints, ids = frame_ids.device, torch.int64, torch.int32
        self._tile, self._stack = _tile(n_words), frame_ids.shape[1]
        self._write_sizes = (n_streams, n_steps, self._stack, n_words, n_sets, self._tile.chunk)
        self._read_sizes = (per_piece, self._stack, n_words, unit, *self._tile[:2])
        key = (words, n_words, unit, self._stack, n_sets)
        self._read = Launcher(
            _read_frames_kernel, device, key, (addresses, frame_ids), ((words,), (ints, *COLUMN_DTYPES)), _WARPS
        )
        self._write = Launcher(_write_frames_kernel, device, key, (frame_ids,), ((ints, ids, words), ()), _WARPS)

    def read(self, indices: torch.Tensor, out: torch.Tensor, columns: Columns | None = None) -> None:
        """`read_frames_reference`, joined to observations; ``columns`` of the first rows are gathered."""
        others, action = _column_args(indices, columns)
        n_indices, tile = indices.numel(), self._tile
        grid = (-(-n_indices * self._stack // tile.rows), tile.n_chunks, 1)
        self._read.start(
            action, grid, (out,), (indices, *others), (indices.shape[-1], n_indices, *self._read_sizes, *action)
        )

    def write(self, job: torch.Tensor, ids: torch.Tensor, frames: torch.Tensor, n_new: int) -> None:
        """Store the ``n_new`` frames that ``job`` names, and the ids of a step."""
        grid: Any = (max(n_new, 1), self._tile.n_chunks, 1)
        self._write.start((), grid, (job, ids, frames), (), (n_new, *self._write_sizes))
