"""Kernels that compare, store and read uncompressed frames on a GPU; `kernels.gather_torch` has the references.

Frames are words of any integer dtype. Rows are in pieces and pages, whose addresses the tables hold. Indices and rows
to write may be in pinned host memory: reading them from there is faster than a copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sb3_extra_buffers.kernels.columns_triton import gather_columns
from sb3_extra_buffers.kernels.gather_torch import TimelineShape, TimelineTables, WriteNumbers, usual_codes
from sb3_extra_buffers.kernels.launcher import COLUMN_DTYPES, NO_COLUMNS, Columns, Launcher

__all__ = ["TimelineGather"]

# words that a program copies, and its warps
_TILE, _WARPS = 2048, 4
# streams whose new frames are counted at a time
_SCANNED = 1024
_MATCH_NUMBERS = ["axis_row", "turn", "start_at", "n_streams", "n_axis_rows", "per_piece", "per_page", "capacity"]
# `gather_torch.NEW` and so on
_NEW, _ZEROS, _UNKNOWN = tl.constexpr(-1), tl.constexpr(-2), tl.constexpr(-3)


@triton.jit(do_not_specialize=["n_rows", "n_indices", "n_steps", "n_streams", "n_axis_rows", "per_piece", "per_page"])
def _read_kernel(
    out_ptr,  # word [index, ...]
    rows_ptr, side_ptr, ids_ptr, last_ids_ptr, starts_ptr, state_ptr,  # `TimelineTables`
    indices_ptr,  # int64 [index]
    floats_ptr, actions_ptr, numbers_ptr, records_ptr,  # `columns_triton.gather_columns`
    n_rows, n_indices, n_steps, n_streams, n_axis_rows, per_piece, per_page,
    N_SETS: tl.constexpr, STACK: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
    ACTION: tl.constexpr, ACTION2: tl.constexpr, ACTION_AT: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Copy ``CHUNK`` words of ``ROWS`` frames; the grid is ``[frames, chunk]``."""
    frame = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, nth = frame // STACK, frame % STACK
    is_row = row < n_indices
    index = tl.load(indices_ptr + row, mask=is_row, other=0)
    n_obs = n_steps.to(tl.int64) * n_streams
    is_next = index >= n_obs
    # there are fewer than 2**31 frames: 32 bits, in which division is fast
    at = tl.where(is_next, index - n_obs, index).to(tl.int32)
    step = at // n_streams
    newest_row, newest = tl.load(state_ptr).to(tl.int32), tl.load(state_ptr + 1).to(tl.int32)
    age = newest - step
    age = tl.where(age < 0, age + n_steps, age)
    own = newest_row - age
    own = tl.where(own < 0, own + n_axis_rows, own) * n_streams + (at - step * n_streams)
    number = tl.where(is_next, STACK, 0) + nth
    N_IDS: tl.constexpr = N_SETS * STACK - 1
    is_written = is_row & (age < tl.load(state_ptr + 2))
    is_own = number == N_IDS
    frame_id = tl.load(ids_ptr + at.to(tl.int64) * N_IDS + number, mask=is_written & ~is_own, other=0)
    position = tl.where(is_own, own, frame_id - 1)
    is_written = is_written & (position >= 0)
    n_main = n_axis_rows * n_streams
    is_side = position >= n_main
    position = tl.where(is_side, position - n_main, position)
    per = tl.where(is_side, per_page, per_piece)
    piece = position // per
    address = tl.load(tl.where(is_side, side_ptr + piece, rows_ptr + piece), mask=is_written, other=0)
    word = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    source = address.to(out_ptr.dtype) + (position - piece * per).to(tl.int64) * WORDS
    found = tl.load(source[:, None] + word[None, :], mask=is_written[:, None] & (word < WORDS)[None, :], other=0)
    to = (word // UNIT) * (STACK * UNIT) + word % UNIT
    inside = is_row[:, None] & (word < WORDS)[None, :]
    tl.store(out_ptr + (row * (STACK * WORDS) + nth * UNIT)[:, None] + to[None, :], found, mask=inside)
    # nested, since ACTION is known at compile time
    if ACTION > 0:  # noqa: SIM102
        if tl.program_id(1) == 0:
            gather_columns(
                floats_ptr, actions_ptr, numbers_ptr, records_ptr, index, row, (row < n_rows) & (nth == 0), n_rows,
                ACTION, ACTION2, ACTION_AT, RECORD,
            )  # fmt: skip


@triton.jit
def _words_of(batch_ptr, stream, nth, word, STACK: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr):
    """Pointers to words of the ``nth`` frame of a row."""
    return batch_ptr + stream * (STACK * WORDS) + nth * UNIT + (word // UNIT) * (STACK * UNIT) + word % UNIT


@triton.jit
def _equals_frame(
    batch_ptr, nth, other_ptr, other_nth, stream,
    STACK: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Whether two frames of a step are equal."""
    equal, base = 1, 0
    while (equal > 0) & (base < WORDS):
        word = base + tl.arange(0, CHUNK)
        inside = word < WORDS
        ours = tl.load(_words_of(batch_ptr, stream, nth, word, STACK, WORDS, UNIT), mask=inside, other=0)
        theirs = tl.load(_words_of(other_ptr, stream, other_nth, word, STACK, WORDS, UNIT), mask=inside, other=0)
        equal = tl.min((ours == theirs).to(tl.int32), 0)
        base += CHUNK
    return equal


@triton.jit
def _equals_stored(
    batch_ptr, nth, stream, address,
    STACK: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Whether a frame of a step equals the frame at ``address``; address 0 stands for a frame of zeros."""
    equal, base = 1, 0
    n_stored = tl.where(address != 0, WORDS, 0)
    while (equal > 0) & (base < WORDS):
        word = base + tl.arange(0, CHUNK)
        inside = word < WORDS
        ours = tl.load(_words_of(batch_ptr, stream, nth, word, STACK, WORDS, UNIT), mask=inside, other=0)
        theirs = tl.load(address.to(batch_ptr.dtype) + word, mask=word < n_stored, other=0)
        equal = tl.min((ours == theirs).to(tl.int32), 0)
        base += CHUNK
    return equal


@triton.jit
def _is_recent(frame_id, limit, starts_ptr, axis_row, start_at, n_streams, n_axis_rows, capacity):
    """Whether a frame was written at most ``limit`` writes before this one; one of zeros always is."""
    n_main = n_axis_rows.to(tl.int64) * n_streams
    age = (axis_row - (frame_id - 1) // n_streams + n_axis_rows) % n_axis_rows
    n_starts = n_axis_rows + 1
    start = tl.load(starts_ptr + start_at).to(tl.int64)
    before = tl.load(starts_ptr + (start_at - limit + n_starts) % n_starts).to(tl.int64)
    since = (start - before + capacity) % capacity
    distance = (start - (frame_id - 1 - n_main) - 1 + capacity) % capacity + 1
    is_recent = tl.where(frame_id <= n_main, age <= limit, distance <= since)
    return (is_recent | (frame_id == 0)).to(tl.int32)


@triton.jit
def _entry(values, at, F: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, F) == at, values, 0), 0)


@triton.jit(do_not_specialize=_MATCH_NUMBERS)
def _match_kernel(
    obs_ptr, next_ptr,  # word [stream, ...]
    rows_ptr, side_ptr, ids_ptr, last_ids_ptr, starts_ptr, state_ptr,  # `TimelineTables`
    given_ptr,  # int32 [stream, N_IDS]: what the host knows, if KNOWN
    codes_ptr,  # int32 [stream, N_IDS]
    counts_ptr,  # int32 [stream]
    axis_row, turn, start_at, n_streams, n_axis_rows, per_piece, per_page, capacity,
    N_SETS: tl.constexpr, STACK: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
    F: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """`match_frames_reference`, and the number of new frames of each stream; the grid is ``[stream]``."""
    N_IDS: tl.constexpr = N_SETS * STACK - 1
    stream = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, F)
    is_id = numbers < N_IDS
    codes = tl.full([F], _UNKNOWN, tl.int32)
    if KNOWN:
        codes = tl.load(given_ptr + stream * N_IDS + numbers, mask=is_id, other=0)
    n_main = n_axis_rows.to(tl.int64) * n_streams
    last_ptr = last_ids_ptr + ((1 - turn) * n_streams.to(tl.int64) + stream) * STACK
    if _entry(codes, 0, F) == _UNKNOWN:
        # the newest frame stands for itself
        codes = tl.where(numbers == N_IDS, STACK + N_IDS, _UNKNOWN)
        zero = tl.program_id(1)  # as a tensor, which Python's numbers are not under the interpreter
        for number in range(N_IDS):
            frame = zero + number
            which, nth = frame // STACK, frame % STACK
            batch_ptr = tl.where(which == 0, obs_ptr, next_ptr)
            limit = tl.where(which == N_SETS - 1, STACK - 1 - nth, STACK)
            # obs usually equals the last next_obs; every other row is usually shifted
            shift = tl.where(which == 0, 2 - N_SETS, 1)
            code = zero + _UNKNOWN
            candidate = zero
            while (code == _UNKNOWN) & (candidate < STACK + 4 - N_SETS):
                other = tl.where(candidate < STACK, (nth + shift + candidate) % STACK, 0)
                is_last = (candidate < STACK) & (which == 0)
                # frames of the step itself: those of the set before, the previous one, the newest one
                own = tl.where(candidate < STACK, other, tl.where(candidate == STACK + 1, frame - 1, N_IDS))
                of_own = _entry(codes, own, F)
                wanted = tl.where(is_last, other, tl.where(of_own == _NEW, STACK + own, of_own))
                wanted = tl.where(candidate == STACK, _ZEROS, wanted)
                exists = (candidate != STACK + 1) | (nth > 0)
                of_last = (wanted >= 0) & (wanted < STACK)
                frame_id = tl.load(last_ptr + wanted, mask=exists & of_last, other=0).to(tl.int64)
                recent = _is_recent(frame_id, limit, starts_ptr, axis_row, start_at, n_streams, n_axis_rows, capacity)
                if exists & (recent > 0):
                    equal = 0
                    if is_last | (candidate == STACK):
                        is_side = frame_id > n_main
                        position = tl.where(is_side, frame_id - 1 - n_main, frame_id - 1)
                        per = tl.where(is_side, per_page.to(tl.int64), per_piece.to(tl.int64))
                        piece = position // per
                        address = tl.load(
                            tl.where(is_side, side_ptr + piece, rows_ptr + piece), mask=frame_id > 0, other=0
                        )
                        size: tl.constexpr = WORDS * (obs_ptr.dtype.element_ty.primitive_bitwidth // 8)
                        address = tl.where(frame_id > 0, address + (position - piece * per) * size, 0)
                        equal = _equals_stored(batch_ptr, nth, stream, address, STACK, WORDS, UNIT, CHUNK)
                    else:
                        other_ptr = tl.where(own < STACK, obs_ptr, next_ptr)
                        equal = _equals_frame(batch_ptr, nth, other_ptr, own % STACK, stream, STACK, WORDS, UNIT, CHUNK)
                    code = tl.where(equal > 0, wanted, code)
                candidate += 1
            codes = tl.where(numbers == frame, tl.where(code == _UNKNOWN, _NEW, code), codes)
    tl.store(codes_ptr + stream * N_IDS + numbers, codes, mask=is_id)
    tl.store(counts_ptr + stream, tl.sum((is_id & (codes == _NEW)).to(tl.int32), 0))


@triton.jit(do_not_specialize=["n_streams"])
def _scan_kernel(
    counts_ptr,  # int32 [stream]
    firsts_ptr,  # int32 [stream + 1]
    n_streams,
    BLOCK: tl.constexpr,
):
    """Exclusive prefix sum of the counts, and their total; a single program."""
    total = 0
    for base in range(0, n_streams, BLOCK):
        stream = base + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + stream, mask=stream < n_streams, other=0)
        ends = total + tl.cumsum(counts, 0)
        tl.store(firsts_ptr + stream, ends - counts, mask=stream < n_streams)
        total += tl.sum(counts, 0)
    tl.store(firsts_ptr + n_streams, total)


@triton.jit(do_not_specialize=["step", "n_written", "launch", *_MATCH_NUMBERS])
def _write_kernel(
    obs_ptr, next_ptr,  # word [stream, ...]
    rows_ptr, side_ptr, ids_ptr, last_ids_ptr, starts_ptr, state_ptr,  # `TimelineTables`
    codes_ptr,  # int32 [stream, N_IDS]
    firsts_ptr,  # int32 [stream + 1]: new frames of the streams before
    report_ptr,  # int64 [2]
    step, n_written, axis_row, turn, start_at, launch, n_streams, n_axis_rows, per_piece, per_page, capacity,
    N_SETS: tl.constexpr, STACK: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
    F: tl.constexpr,
):  # fmt: skip
    """`write_frames_reference`; the grid is ``[stream, chunk]``."""
    N_IDS: tl.constexpr = N_SETS * STACK - 1
    stream, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    word = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = word < WORDS
    start = tl.load(starts_ptr + start_at).to(tl.int64)
    # the newest frame goes to the time axis
    own = axis_row.to(tl.int64) * n_streams + stream
    piece = own // per_piece
    target = tl.load(rows_ptr + piece).to(obs_ptr.dtype) + (own - piece * per_piece) * WORDS
    source = _words_of(next_ptr, stream, STACK - 1, word, STACK, WORDS, UNIT)
    tl.store(target + word, tl.load(source, mask=inside, other=0), mask=inside)
    first = tl.load(firsts_ptr + stream).to(tl.int64)
    n_new = 0
    for frame in range(N_IDS):
        if tl.load(codes_ptr + stream * N_IDS + frame) == _NEW:
            position = (start + first + n_new) % capacity
            page = position // per_page
            to = tl.load(side_ptr + page).to(obs_ptr.dtype) + (position - page * per_page) * WORDS
            batch_ptr = tl.where(frame < STACK, obs_ptr, next_ptr)
            moved = tl.load(_words_of(batch_ptr, stream, frame % STACK, word, STACK, WORDS, UNIT), mask=inside, other=0)
            tl.store(to + word, moved, mask=inside)
            n_new += 1
    if chunk == 0:
        n_main = n_axis_rows.to(tl.int64) * n_streams
        numbers = tl.arange(0, F)
        is_id = numbers < N_IDS
        codes = tl.load(codes_ptr + stream * N_IDS + numbers, mask=is_id, other=0)
        # frames of the step itself have the id of that frame
        base = tl.where(is_id & (codes >= STACK), codes - STACK, numbers)
        of_base = tl.load(codes_ptr + stream * N_IDS + base, mask=base < N_IDS, other=0)
        is_new = is_id & (codes == _NEW)
        before = tl.sum((is_new[None, :] & (numbers[None, :] < base[:, None])).to(tl.int32), 1)
        last_ptr = last_ids_ptr + ((1 - turn) * n_streams.to(tl.int64) + stream) * STACK
        of_last = tl.load(last_ptr + of_base, mask=(base < N_IDS) & (of_base >= 0), other=0).to(tl.int64)
        ids = tl.where(of_base == _NEW, 1 + n_main + (start + first + before) % capacity, of_last)
        ids = tl.where(base == N_IDS, own + 1, ids).to(tl.int32)
        at = (step.to(tl.int64) * n_streams + stream) * N_IDS
        tl.store(ids_ptr + at + numbers, ids, mask=is_id)
        nth = numbers - (N_SETS - 1) * STACK
        kept_ptr = last_ids_ptr + (turn * n_streams.to(tl.int64) + stream) * STACK
        tl.store(kept_ptr + nth, ids, mask=(nth >= 0) & (nth < STACK))
        if stream == 0:
            n_starts = n_axis_rows + 1
            head = (start + tl.load(firsts_ptr + n_streams)) % capacity
            tl.store(starts_ptr + (start_at + 1) % n_starts, head.to(tl.int32))
            tl.store(state_ptr, axis_row.to(tl.int64))
            tl.store(state_ptr + 1, step.to(tl.int64))
            tl.store(state_ptr + 2, n_written.to(tl.int64))
            tl.store(report_ptr, head * 65536 + launch)
            tl.store(report_ptr + 1, tl.load(starts_ptr + (start_at + 2) % n_starts).to(tl.int64))


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
        self, tables: TimelineTables, shape: TimelineShape, words: torch.dtype, per_piece: int, per_page: int
    ) -> None:
        device, ints, small = tables.ids.device, torch.int64, torch.int32
        n_streams, n_ids = shape.n_streams, max(shape.n_ids, 1)
        self._shape, self._tile = shape, _tile(shape.n_words)
        frame = (shape.n_sets, shape.stack, shape.n_words, shape.unit)
        width = triton.next_power_of_2(shape.n_ids + 1)
        ring = (n_streams, shape.n_rows, per_piece, per_page)
        self._read_sizes = (shape.n_steps, *ring, *frame, *self._tile[:2])
        self._write_sizes = (*ring, shape.capacity, *frame, self._tile.chunk, width)
        self._codes = torch.empty((n_streams, n_ids), dtype=small, device=device)
        self._counts = torch.empty(n_streams, dtype=small, device=device)
        self._firsts = torch.empty(n_streams + 1, dtype=small, device=device)
        # codes of a step in which no episode begins
        usual = torch.tensor(usual_codes(shape) or [0], dtype=small, device=device)
        self._usual = usual.expand(n_streams, -1).contiguous(), torch.zeros_like(self._firsts)
        key = (words, *frame)

        def bind(kernel: Any, before: tuple[torch.dtype, ...], after: tuple[torch.dtype, ...]) -> Launcher:
            return Launcher(kernel, device, key, tuple(tables), (before, after), _WARPS)

        self._read = bind(_read_kernel, (words,), (ints, *COLUMN_DTYPES))
        self._match = bind(_match_kernel, (words, words), (small, small, small))
        self._write = bind(_write_kernel, (words, words), (small, small, ints))
        self._scan = Launcher(_scan_kernel, device, (), (), ((small, small), ()), _WARPS)

    def read(self, indices: torch.Tensor, out: torch.Tensor, columns: Columns | None = None) -> None:
        """`read_frames_reference`, joined to observations; ``columns`` of the first rows are gathered."""
        others, action = _column_args(indices, columns)
        n_indices, tile = indices.numel(), self._tile
        grid = (-(-n_indices * self._shape.stack // tile.rows), tile.n_chunks, 1)
        self._read.start(
            action, grid, (out,), (indices, *others), (indices.shape[-1], n_indices, *self._read_sizes, *action)
        )

    def write(
        self,
        batches: tuple[torch.Tensor, torch.Tensor],  # the first and the last set
        given: tuple[torch.Tensor, torch.Tensor] | None,  # codes, and new frames of the streams before
        is_known: bool,
        numbers: WriteNumbers,
        report: torch.Tensor,
    ) -> None:
        """Store a step. Without ``given``, all codes are `usual_codes` if ``is_known``, else unknown."""
        shape = self._shape
        codes, firsts = self._usual if given is None else given
        if not is_known:
            known = (given is not None,)
            found = (codes, self._codes, self._counts)
            sizes = (*numbers[2:5], *self._write_sizes, *known)
            self._match.start(known, (shape.n_streams, 1, 1), batches, found, sizes)
            self._scan.start((), (1, 1, 1), (self._counts, self._firsts), (), (shape.n_streams, _SCANNED))
            codes, firsts = self._codes, self._firsts
        grid = (shape.n_streams, self._tile.n_chunks, 1)
        self._write.start((), grid, batches, (codes, firsts, report), (*numbers, *self._write_sizes))
