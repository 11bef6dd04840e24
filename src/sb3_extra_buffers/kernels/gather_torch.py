"""Uncompressed frames on a time axis: the tables on a device, and reference kernels in PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = [
    "NEW",
    "UNKNOWN",
    "ZEROS",
    "TimelineShape",
    "TimelineTables",
    "WriteNumbers",
    "match_frames_reference",
    "read_frames_reference",
    "usual_codes",
    "write_frames_reference",
]

# Codes that say what a frame of a new step equals. From 0 on: a frame of the stream's last row; from `stack` on:
# another frame of the step itself, counted over all sets.
NEW, ZEROS, UNKNOWN = -1, -2, -3
# entries of `TimelineTables.state`
NEWEST_ROW, NEWEST_STEP, N_WRITTEN = range(3)


class TimelineShape(NamedTuple):
    """Sizes of a timeline."""

    n_steps: int
    n_streams: int
    n_sets: int
    stack: int
    n_words: int  # of a frame
    unit: int  # consecutive words of a frame in an observation: those of a pixel if frames are interleaved, else all
    capacity: int  # positions of the ring of side rows

    @property
    def n_ids(self) -> int:
        """Frames of a transition except the newest, which is in the row of its step."""
        return self.n_sets * self.stack - 1

    @property
    def n_rows(self) -> int:
        """Rows of the time axis, each with a frame of every stream."""
        # a step refers to frames of up to `stack` writes ago; the step that is overwritten stays until it is replaced
        return self.n_steps + self.stack + 1


class TimelineTables(NamedTuple):
    """The tables on the device, none of which ever moves.

    A frame id is 0 for a frame of zeros, ``1 + row * n_streams + stream`` for a frame on the time axis, and 1 plus the
    number of these frames plus a position for a side row.
    """

    rows: torch.Tensor  # int64 [piece]: addresses, see `Pieces`
    side: torch.Tensor  # int64 [page]: addresses, or row numbers without Triton, see `SideRows`
    ids: torch.Tensor  # int32 [step, stream, n_ids]
    last_ids: torch.Tensor  # int32 [2, stream, stack]: frames of the last row; writes alternate between the two
    starts: torch.Tensor  # int32 [n_rows + 1]: the first side row of each of the last writes
    state: torch.Tensor  # int64 [3]


class WriteNumbers(NamedTuple):
    """The numbers of a write that are known on the host."""

    step: int
    n_written: int  # steps that the ring holds after it
    row: int  # of the time axis
    turn: int  # 0 or 1: which of `last_ids` it writes
    start: int  # its entry of `starts`; the next write's follows
    launch: int  # its number, for the report


def usual_codes(shape: TimelineShape) -> list[int]:
    """Codes in the middle of an episode: ``obs`` equals the last row, ``next_obs`` is shifted by one frame."""
    return [*range(shape.stack if shape.n_sets == 2 else 0), *range(1, shape.stack)]


def _split(batch: torch.Tensor, shape: TimelineShape) -> torch.Tensor:
    """Frames ``[stream, stack, word]`` of rows of words."""
    n_streams, stack, n_words, unit = shape.n_streams, shape.stack, shape.n_words, shape.unit
    return batch.view(n_streams, n_words // unit, stack, unit).transpose(1, 2).reshape(n_streams, stack, n_words)


def _gather(rows: torch.Tensor, side: torch.Tensor, ids: torch.Tensor, shape: TimelineShape) -> torch.Tensor:
    """Frames ``[*ids.shape, word]``; ids of side rows are already those of ``side``."""
    n_main, device = shape.n_rows * shape.n_streams, ids.device
    # pinned rows are in host memory
    ids = ids.to(rows.device)
    is_side = ids > n_main
    # rows that are not read need not exist
    found = rows[torch.where((ids > 0) & ~is_side, ids - 1, 0)]
    aside = side[torch.where(is_side, ids - 1 - n_main, 0)]
    return torch.where((ids > 0).unsqueeze(-1), torch.where(is_side.unsqueeze(-1), aside, found), 0).to(device)


def _to_memory(ids: torch.Tensor, tables: TimelineTables, shape: TimelineShape, per_page: int) -> torch.Tensor:
    """Frame ids whose side rows are numbers of rows in memory, instead of positions."""
    first = shape.n_rows * shape.n_streams + 1
    position = (ids.long() - first).clamp(min=0)
    page = torch.div(position, per_page, rounding_mode="floor")
    return torch.where(ids >= first, first + tables.side[page] + position % per_page, ids.long())


def read_frames_reference(
    rows: torch.Tensor,  # [row * stream, word]
    side: torch.Tensor,  # [side row, word]
    tables: TimelineTables,
    shape: TimelineShape,
    per_page: int,
    indices: torch.Tensor,  # int64, any shape
) -> torch.Tensor:
    """Frames ``[*indices.shape, stack, word]``; those of unwritten steps are zeros."""
    n_obs = shape.n_steps * shape.n_streams
    row, newest, n_written = tables.state.tolist()
    which, at = indices // n_obs, indices % n_obs
    age = (newest - at // shape.n_streams) % shape.n_steps
    frame = which.unsqueeze(-1) * shape.stack + torch.arange(shape.stack, device=indices.device)
    own = 1 + (row - age) % shape.n_rows * shape.n_streams + at % shape.n_streams
    ids = own.unsqueeze(-1).expand(frame.shape)
    if shape.n_ids:
        stored = tables.ids.view(n_obs, shape.n_ids)[at.unsqueeze(-1), frame.clamp(max=shape.n_ids - 1)]
        ids = torch.where(frame == shape.n_ids, ids, stored)
    ids = torch.where((age < n_written).unsqueeze(-1), ids, 0)
    return _gather(rows, side, _to_memory(ids, tables, shape, per_page), shape)


def match_frames_reference(
    rows: torch.Tensor,
    side: torch.Tensor,
    tables: TimelineTables,
    shape: TimelineShape,
    per_page: int,
    batches: list[torch.Tensor],  # words, one batch per set
    numbers: WriteNumbers,
) -> torch.Tensor:
    """The code of each frame of a new step, except the newest: int32 ``[stream, n_ids]``."""
    stack, n_ids = shape.stack, shape.n_ids
    frames = torch.cat([_split(batch, shape) for batch in batches], 1)  # [stream, set * stack, word]
    last_ids = tables.last_ids[1 - numbers.turn]
    last = _gather(rows, side, _to_memory(last_ids, tables, shape, per_page), shape)
    codes = torch.full((shape.n_streams, n_ids + 1), UNKNOWN, dtype=torch.int32, device=last_ids.device)
    codes[:, n_ids] = stack + n_ids
    for frame in range(n_ids):
        which, nth = divmod(frame, stack)
        # a frame may be shared only while it would still be part of a stack that moves on with every step
        limit = stack if which < shape.n_sets - 1 else stack - 1 - nth
        can_use = _is_recent(last_ids, tables, shape, numbers, limit)
        given = frames[:, frame]
        for shown, code in _candidates(frames, last, codes, frame, shape):
            of_last = (code >= 0) & (code < stack)
            usable = ~of_last | can_use.gather(1, code.clamp(0, stack - 1).long().unsqueeze(1)).squeeze(1)
            is_found = (codes[:, frame] == UNKNOWN) & usable & (given == shown).all(-1)
            codes[:, frame] = torch.where(is_found, code, codes[:, frame])
        codes[:, frame] = torch.where(codes[:, frame] == UNKNOWN, NEW, codes[:, frame])
    return codes[:, :n_ids]


def _candidates(
    frames: torch.Tensor, last: torch.Tensor, codes: torch.Tensor, frame: int, shape: TimelineShape
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Frames that ``frame`` may equal, and the code for each; the most likely first."""
    stack, n_ids = shape.stack, shape.n_ids
    which, nth = divmod(frame, stack)

    def own(other: int) -> tuple[torch.Tensor, torch.Tensor]:
        return frames[:, other], torch.where(codes[:, other] == NEW, stack + other, codes[:, other])

    # obs usually equals the last next_obs; every other row is usually shifted
    shift = 0 if which == 0 and shape.n_sets == 2 else 1
    order = [(nth + shift + i) % stack for i in range(stack)]
    found = [own(i) for i in order] if which else [(last[:, i], torch.full_like(codes[:, 0], i)) for i in order]
    found.append((torch.zeros_like(frames[:, 0]), torch.full_like(codes[:, 0], ZEROS)))
    if nth:
        found.append(own(frame - 1))
    if shape.n_sets == 1:
        found.append(own(n_ids))
    return found


def _is_recent(
    ids: torch.Tensor, tables: TimelineTables, shape: TimelineShape, numbers: WriteNumbers, limit: int
) -> torch.Tensor:
    """Whether frames of the last rows were written at most ``limit`` writes before this one."""
    n_main, n_starts, capacity = shape.n_rows * shape.n_streams, shape.n_rows + 1, shape.capacity
    age = (numbers.row - (ids - 1) // shape.n_streams) % shape.n_rows
    start = tables.starts[numbers.start]
    since = (start - tables.starts[(numbers.start - limit) % n_starts]) % capacity
    distance = (start - (ids - 1 - n_main) - 1) % capacity + 1
    return (ids == 0) | torch.where(ids <= n_main, age <= limit, distance <= since)


def write_frames_reference(
    rows: torch.Tensor,
    side: torch.Tensor,
    tables: TimelineTables,
    shape: TimelineShape,
    per_page: int,
    batches: list[torch.Tensor],  # words, one batch per set
    codes: torch.Tensor,  # int32 [stream, n_ids]
    numbers: WriteNumbers,
    report: torch.Tensor,  # int64 [2]
) -> None:
    """Store a step. It overwrites nothing that it reads, so the same step may be written twice."""
    n_streams, stack, n_ids = shape.n_streams, shape.stack, shape.n_ids
    n_main, n_starts = shape.n_rows * n_streams, shape.n_rows + 1
    frames = torch.cat([_split(batch, shape) for batch in batches], 1)
    first = numbers.row * n_streams
    rows[first : first + n_streams] = frames[:, n_ids].to(rows.device)
    newest = 1 + torch.arange(first, first + n_streams, device=codes.device)
    is_new = codes == NEW
    start = int(tables.starts[numbers.start])
    position = (start + is_new.flatten().cumsum(0).view(is_new.shape) - 1) % shape.capacity
    memory = tables.side[torch.div(position, per_page, rounding_mode="floor")] + position % per_page
    where = memory[is_new].to(side.device)
    side[where] = frames[:, :n_ids][is_new].to(side.device)
    # frames of the step itself have the id of that frame
    base = torch.where(codes >= stack, codes - stack, torch.arange(n_ids, device=codes.device)).long()
    of_base = codes.gather(1, base.clamp(max=max(n_ids - 1, 0))) if n_ids else codes
    of_last = tables.last_ids[1 - numbers.turn].gather(1, of_base.clamp(0, stack - 1).long())
    of_side = 1 + n_main + (position.gather(1, base.clamp(max=max(n_ids - 1, 0))) if n_ids else position)
    ids = torch.where(of_base == NEW, of_side, torch.where(of_base == ZEROS, 0, of_last))
    ids = torch.where(base == n_ids, newest.unsqueeze(1), ids).to(torch.int32)
    tables.ids[numbers.step] = ids
    tables.last_ids[numbers.turn] = torch.cat([ids, newest.unsqueeze(1).to(torch.int32)], 1)[:, -stack:]
    head = (start + int(is_new.sum())) % shape.capacity
    tables.starts[(numbers.start + 1) % n_starts] = head
    tables.state[NEWEST_ROW], tables.state[NEWEST_STEP] = numbers.row, numbers.step
    tables.state[N_WRITTEN] = numbers.n_written
    report[0] = head * 65536 + numbers.launch
    report[1] = int(tables.starts[(numbers.start + 2) % n_starts])
