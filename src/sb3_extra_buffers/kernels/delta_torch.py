"""Frames on a device: what writing and reading them means, on tensors that lie in main memory.

`kernels.delta_triton` does the same on a GPU, one program for each stream or row. Both read and write the segments
of `kernels.frames`; only the bookkeeping differs: streams free what they wrote in the order in which they wrote it, so
nothing counts references but keyframes, and every decision is taken on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.delta import BLOCK, encode_delta, top_bytes
from sb3_extra_buffers.kernels.dispatch import frame_kernels
from sb3_extra_buffers.kernels.state import NONE, ZERO, FrameConfig, FrameState, keyframe_bytes

__all__ = ["DeviceTables", "FrameShape", "read_rows_reference", "write_rows_reference"]

# columns of `DeviceTables.streams`
OPEN, OPENED, END, COUNT, CHAIN_BYTES, PLACE, COST, LOST, HELD, FLOOR = 0, 1, 2, 3, 4, 5, 6, 7, 8, 11
N_COLUMNS = 12
# keyframes that a stream holds: two that others may use, and one that they could have used a moment ago
N_HELD, N_PUBLISHED = 3, 2
# keyframes of other streams that are tried for a segment's first frame
N_TRIED = 8
# entries of `DeviceTables.counters`
HEAD, NEEDED, SPARE = 0, 1, 2
# bytes past the end of the heap that a reader of whole words may touch
SLACK = 64
# where a stream keeps nothing in the heap
NOWHERE = (1 << 62) - 1
# how a row relates to the row that its stream had before: not known, the same, or moved on by one frame
UNKNOWN, SAME, MOVED = 0, 1, 2


@dataclass(frozen=True)
class FrameShape:
    """Sizes that follow from how observations are cut; a kernel is compiled for each."""

    frame_bytes: int
    stack: int
    per_segment: int
    segments_per_stream: int

    @property
    def places(self) -> int:
        """Frames that a stream remembers, to find repeats."""
        return self.stack + 1

    @property
    def keyframe_bytes(self) -> int:
        return keyframe_bytes(self.frame_bytes)

    @property
    def room(self) -> int:
        """Bytes of a stream's open segment, and of the worst difference that may yet be written."""
        size = self.frame_bytes
        return -(-(2 + 2 * self.per_segment + (self.per_segment + 1) * size + size // 2 + BLOCK) // 64) * 64

    @property
    def max_chain_bytes(self) -> int:
        """Differences for which a segment ends early, once it has ``least_frames``."""
        return 3 * self.frame_bytes // 4

    @property
    def least_frames(self) -> int:
        return min(4, self.per_segment)


class DeviceTables(NamedTuple):
    """Tables of one device store.

    A frame's id is ``segment * per_segment + position``; a stream's segments are numbered in a ring of its own.
    Places in the heap count on for ever, and lie at what is left of them modulo its size.
    """

    heap: torch.Tensor  # uint8 [capacity]: sealed segments, a ring
    stage: torch.Tensor  # uint8 [stream * room]: open segments
    starts: torch.Tensor  # int64 [segment]: place in heap, or -1 - place in stage while it is open
    lengths: torch.Tensor  # int32 [segment]
    keyframes: torch.Tensor  # int32 [segment]: its keyframe, or NONE
    frame_ids: torch.Tensor  # int32 [cell, stack]: frame ids + 1
    floors: torch.Tensor  # int32 [step, stream]: no frame of the step lies in a segment before this one
    streams: torch.Tensor  # int64 [stream, column]
    recent: torch.Tensor  # uint8 [stream, place, keyframe_bytes]: the frames a stream saw last
    recent_ids: torch.Tensor  # int32 [stream, place]
    recent_segments: torch.Tensor  # int32 [stream, place]: the segments they lie in, counted on
    keyframe_rows: torch.Tensor  # uint8 [keyframe, keyframe_bytes]
    keyframe_refs: torch.Tensor  # int32 [keyframe]: segments that start from it, streams that hold it
    published: torch.Tensor  # int32 [2, stream, 2]: keyframes that other streams may use, now and next time
    counters: torch.Tensor  # int64: end of the heap, bytes that did not fit, unused keyframes
    tails: torch.Tensor  # int64 [stream]: oldest place in the heap that the stream needs
    scratch: torch.Tensor  # uint8 [stream, padded frame]


def capacity_of(tables: DeviceTables) -> int:
    """Bytes of the heap that may be used: the last few are there to be read in passing."""
    return tables.heap.numel() - SLACK


class Write(NamedTuple):
    """Where one step goes."""

    step: int
    oldest: int  # the oldest step that is kept once this one is written
    indices: tuple[int, ...]  # first cell of each set of rows
    parity: int
    tail: int  # nothing in the heap before this place is needed
    last: int = 0  # first cell of the rows that were written before
    relations: tuple[int, ...] = ()  # of each set's row of each stream to the one before it; empty where none is known


def write_rows_reference(tables: DeviceTables, shape: FrameShape, frames: torch.Tensor, write: Write) -> None:
    """Store ``frames[set, stream, stack, byte]`` as one step: every set of them one after the other.

    A frame of a row that is the one before, or that one moved on by a frame, is taken from it. Any other is shared if
    it equals one that its stream remembers, byte for byte, and else encoded into the stream's open segment; one that
    is full moves to the heap. What does not fit there is counted in ``counters[NEEDED]``; the tables are then to be
    thrown away.
    """
    views = DeviceTables(*(table.numpy() for table in tables))  # type: ignore[arg-type]  # the same fields as arrays
    rows = frames.numpy()
    for stream in range(rows.shape[1]):
        _Stream(views, shape, stream, write).write(rows[:, stream, :, : shape.frame_bytes])


class _Stream:
    """One stream's part of a write; a program of the kernel."""

    def __init__(self, tables: Any, shape: FrameShape, stream: int, write: Write) -> None:
        self.tables, self.shape, self.stream, self.write_ = tables, shape, stream, write
        self.row = tables.streams[stream]
        self.moved = False

    def write(self, sets: npt.NDArray[np.uint8]) -> None:
        tables, row, stream = self.tables, self.row, self.stream
        relations = [UNKNOWN] * len(sets)
        if self.write_.relations:
            relations = list(self.write_.relations[stream :: tables.streams.shape[0]])
        known = tables.recent_ids[stream] >= 0
        floor = int(tables.recent_segments[stream][known].min(initial=row[OPENED]))
        if relations[0] != UNKNOWN:
            # frames that nobody remembers may be among these
            ids = tables.frame_ids[self.write_.last + stream].astype(np.int64) - 1
            segments = ids[ids >= 0] // self.shape.per_segment
            age = (row[OPENED] - 1 - segments) % self.shape.segments_per_stream
            floor = int((row[OPENED] - 1 - age).min(initial=floor))
        tables.floors[self.write_.step, stream] = floor
        self._release(int(tables.floors[self.write_.oldest, stream]))
        before = self.write_.last
        for first, stack, relation in zip(self.write_.indices, sets, relations, strict=True):
            for j, frame in enumerate(stack):
                if relation == SAME:
                    frame_id = tables.frame_ids[before + stream, j]
                elif relation == MOVED and j < len(stack) - 1:
                    frame_id = tables.frame_ids[before + stream, j + 1]
                else:
                    frame_id = self._find(frame) + 1
                tables.frame_ids[first + stream, j] = frame_id
            before = first
        tables.published[1 - self.write_.parity, stream] = row[HELD : HELD + N_PUBLISHED]
        oldest = self._number(int(row[FLOOR]))
        sealed = row[FLOOR] < row[OPENED] and tables.starts[oldest] >= 0
        tables.tails[stream] = tables.starts[oldest] if sealed else NOWHERE
        tables.counters[SPARE] = np.count_nonzero(tables.keyframe_refs == 0)

    def _number(self, segment: int) -> int:
        per_stream = self.shape.segments_per_stream
        return self.stream * per_stream + segment % per_stream

    def _release(self, floor: int) -> None:
        """Give up segments that no step refers to any more."""
        for segment in range(int(self.row[FLOOR]), floor):
            keyframe = self.tables.keyframes[self._number(segment)]
            if keyframe >= 0:
                self.tables.keyframe_refs[keyframe] -= 1
        self.row[FLOOR] = floor

    def _find(self, frame: npt.NDArray[np.uint8]) -> int:
        """The id of ``frame``: of the same bytes seen lately, or a new one."""
        tables, size = self.tables, self.shape.frame_bytes
        if not frame.any():
            return ZERO
        same = (tables.recent[self.stream, :, :size] == frame).all(axis=1) & (tables.recent_ids[self.stream] >= 0)
        if same.any():
            return int(tables.recent_ids[self.stream, int(np.argmax(same))])
        return self._add(frame)

    def _add(self, frame: npt.NDArray[np.uint8]) -> int:
        tables, shape, row, stream = self.tables, self.shape, self.row, self.stream
        size, per, places = shape.frame_bytes, shape.per_segment, shape.places
        count = int(row[COUNT])
        if row[OPEN] >= 0 and (
            count >= per or (count >= shape.least_frames and row[CHAIN_BYTES] > shape.max_chain_bytes)
        ):
            self._seal()
        if row[OPEN] < 0:
            segment = self._number(int(row[OPENED]))
            row[[OPEN, COUNT, CHAIN_BYTES, END]] = segment, 0, 0, 2 + 2 * per
            row[OPENED] += 1
            tables.starts[segment] = -1 - stream * shape.room
            tables.keyframes[segment] = NONE
        place, position, segment = int(row[PLACE]), int(row[COUNT]), int(row[OPEN])
        before = (place + places - 1) % places
        begin = stream * shape.room
        end = begin + int(row[END])
        if position == 0:
            payload = self._first(frame)
        else:
            payload = np.frombuffer(encode_delta(frame, tables.recent[stream, before, :size]), np.uint8)
        tables.recent[stream, place, :size] = frame
        tables.recent_ids[stream, place] = segment * per + position
        tables.recent_segments[stream, place] = row[OPENED] - 1
        length = len(payload)
        tables.stage[end : end + length] = payload
        tables.stage[begin : begin + 2] = 0, position + 1
        tables.stage[begin + 2 + 2 * position : begin + 4 + 2 * position] = length & 255, length >> 8
        row[PLACE] = (place + 1) % places
        row[END] += length
        row[CHAIN_BYTES] += length if length < size else 0
        row[COUNT] += 1
        return segment * per + position

    def _seal(self) -> None:
        """Move the open segment to the heap."""
        tables, shape, row = self.tables, self.shape, self.row
        begin, count, end = self.stream * shape.room, int(row[COUNT]), int(row[END])
        body = 2 + 2 * shape.per_segment
        length = 2 + 2 * count + end - body
        capacity = tables.heap.size - SLACK
        segment = int(row[OPEN])
        row[OPEN] = -1
        start = int(tables.counters[HEAD])
        if start % capacity + length > capacity:
            start += length  # what would be cut in two is laid past the seam
        if start % capacity + length > capacity or start + length - self.write_.tail > capacity:
            tables.counters[NEEDED] += length
            return
        tables.counters[HEAD] = start + length
        at = start % capacity
        tables.heap[at : at + 2 + 2 * count] = tables.stage[begin : begin + 2 + 2 * count]
        tables.heap[at + 2 + 2 * count : at + length] = tables.stage[begin + body : begin + end]
        tables.starts[segment] = start
        tables.lengths[segment] = length

    def _first(self, frame: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Encode a segment's first frame against the cheapest keyframe at hand, or make a keyframe of it."""
        tables, row, size = self.tables, self.row, self.shape.frame_bytes
        segment = int(row[OPEN])
        keyframe = held = int(row[HELD])
        least = size if keyframe < 0 else self._bound(frame, keyframe)
        if keyframe < 0 or 4 * least > 5 * row[COST]:
            published = tables.published[self.write_.parity].reshape(-1)
            for i in range(min(N_TRIED, published.size)):
                other = int(published[(self.stream * N_PUBLISHED + i) % published.size])
                if other >= 0 and other != keyframe:
                    bound = self._bound(frame, other)
                    # a keyframe in hand is worth more than an equal one elsewhere
                    if 8 * bound < 7 * least:
                        least, keyframe = bound, other
        cost, lost = (int(row[COST]), int(row[LOST])) if keyframe == held else (least, 0)
        cost = min(cost, least)
        lost += least - cost
        if keyframe < 0 or 2 * least > size or lost > size:
            keyframe = -1 if self.moved else self._claim()
            if keyframe < 0:
                return frame
            tables.keyframe_rows[keyframe, :size] = frame
            self._hold(keyframe)
            # until a first frame has been encoded against it, a quarter of a frame is what it should cost
            row[[COST, LOST]] = size // 4, 0
            tables.keyframes[segment] = keyframe
            return frame[:0]
        if keyframe != held and not self.moved:
            self._hold(keyframe)
            held = keyframe
        if keyframe == held:
            row[[COST, LOST]] = cost, lost
        tables.keyframes[segment] = keyframe
        tables.keyframe_refs[keyframe] += 1
        return np.frombuffer(encode_delta(frame, tables.keyframe_rows[keyframe, :size]), np.uint8)

    def _hold(self, keyframe: int) -> None:
        """Make ``keyframe`` the stream's own; only once in a call, so that no one else loses what they may be using."""
        tables, row = self.tables, self.row
        dropped = int(row[HELD + N_HELD - 1])
        if dropped >= 0:
            tables.keyframe_refs[dropped] -= 1
        row[HELD + 1 : HELD + N_HELD] = row[HELD : HELD + N_HELD - 1].copy()
        row[HELD] = keyframe
        tables.keyframe_refs[keyframe] += 1
        self.moved = True

    def _claim(self) -> int:
        """An unused keyframe, which the open segment starts from; or -1."""
        refs = self.tables.keyframe_refs
        unused = np.flatnonzero(refs == 0)
        if not len(unused):
            return -1
        order = (unused - self.stream) % refs.size
        keyframe = int(unused[np.argmin(order)])
        refs[keyframe] = 1
        return keyframe

    def _bound(self, frame: npt.NDArray[np.uint8], keyframe: int) -> int:
        """The length of a difference if no value repeated the one before."""
        size = self.shape.frame_bytes
        changed = np.flatnonzero(frame != self.tables.keyframe_rows[keyframe, :size])
        masks = sum(len(np.unique(changed >> shift)) for shift in (3, 6, 9))
        return int(top_bytes(size) + masks + -(-len(changed) // 8) + len(changed))


def read_rows_reference(tables: DeviceTables, shape: FrameShape, indices: torch.Tensor, out: torch.Tensor) -> int:
    """Decode ``cells[set, row]`` into ``out[set, row, stack, byte]``; return -1, or a segment that is damaged.

    Bytes of ``out`` past a frame's end are left alone.
    """
    size = shape.frame_bytes
    starts = tables.starts.numpy()
    unused: Any = dict.fromkeys(FrameState._fields, np.zeros(0, np.int64))
    state = FrameState(**unused)._replace(
        config=FrameConfig(size, shape.per_segment, 2, shape.room, delta=True),
        heap=tables.heap.numpy(),
        stage=tables.stage.numpy(),
        keyframe_rows=tables.keyframe_rows.numpy().reshape(-1),
        starts=np.where(starts >= 0, starts % capacity_of(tables), starts),
        lengths=tables.lengths.numpy(),
        keyframes=tables.keyframes.numpy(),
        stage_ends=np.ascontiguousarray(tables.streams.numpy()[:, END]),
    )
    sets = indices.numpy()
    rows = np.empty(sets.size * shape.stack * size, np.uint8)
    kernels = frame_kernels(compiled=False)
    damaged = kernels.read_frames(kernels.bind_state(state), tables.frame_ids.numpy(), sets, rows, 0, sets.shape[1])
    out.numpy()[..., :size] = rows.reshape(*sets.shape, shape.stack, size)
    return damaged
