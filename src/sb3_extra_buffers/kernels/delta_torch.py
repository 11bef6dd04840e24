"""Reference kernels for frames on a device, on tensors in main memory.

`kernels.delta_triton` does the same on a GPU, one program per stream or row. Both use the segment format of
`kernels.frames` with simpler bookkeeping: each stream frees segments in the order it wrote them, so only keyframes
are reference-counted, and every decision is made on the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.delta import encode_delta, top_bytes
from sb3_extra_buffers.kernels import delta_tables as dt
from sb3_extra_buffers.kernels import policy
from sb3_extra_buffers.kernels.delta_tables import DeviceTables, FrameShape, WriteJob, capacity_of
from sb3_extra_buffers.kernels.dispatch import frame_kernels
from sb3_extra_buffers.kernels.state import NONE, ZERO, FrameConfig, FrameState

__all__ = ["read_rows_reference", "write_rows_reference"]


def write_rows_reference(
    tables: DeviceTables, shape: FrameShape, frames: torch.Tensor, job: WriteJob, report: torch.Tensor, launch: int
) -> None:
    """Store ``frames[set, stream, stack, byte]`` as one step, one set after the other.

    Frames of a row that equals its predecessor, or is it shifted by one frame, are taken from there. Any other frame is
    shared if it equals, byte for byte, one that its stream remembers; if not, it is encoded into the stream's open
    segment, which moves to the heap when it is full. Bytes that do not fit there are counted in ``counters[NEEDED]``,
    and the tables must then be discarded. ``report[stream, N_REPORT]`` is what the host learns.
    """
    views = DeviceTables(*(table.numpy() for table in tables))  # type: ignore[arg-type]  # the same fields as arrays
    rows = frames.numpy()
    for stream in range(rows.shape[1]):
        _StreamWriter(views, shape, stream, job).write(rows[:, stream, :, : shape.frame_bytes])
    report[:, dt.REPORT_HEAD], report[:, dt.REPORT_TAIL] = tables.counters[dt.HEAD], tables.tails
    report[:, dt.REPORT_SPARE], report[:, dt.REPORT_LAUNCH] = tables.counters[dt.SPARE], launch


class _StreamWriter:
    """One stream's part of a write: one program of the Triton kernel."""

    def __init__(self, tables: Any, shape: FrameShape, stream: int, job: WriteJob) -> None:
        self.tables, self.shape, self.stream, self.job = tables, shape, stream, job
        self.row = tables.streams[stream]
        self.switched = False  # whether this write has changed the keyframe that the stream holds

    def write(self, sets: npt.NDArray[np.uint8]) -> None:
        tables, row, stream, job = self.tables, self.row, self.stream, self.job
        relations = [dt.UNKNOWN] * len(sets)
        if job.relations:
            relations = list(job.relations[stream :: tables.streams.shape[0]])
        tables.oldest_segments[job.step, stream] = self._oldest_needed(relations[0] != dt.UNKNOWN)
        self._release(int(tables.oldest_segments[job.oldest, stream]))
        previous = job.last
        for first, stack, relation in zip(job.indices, sets, relations, strict=True):
            for j, frame in enumerate(stack):
                if relation == dt.SAME:
                    frame_id = tables.frame_ids[previous + stream, j]
                elif relation == dt.SHIFTED and j < len(stack) - 1:
                    frame_id = tables.frame_ids[previous + stream, j + 1]
                else:
                    frame_id = self._find_or_add(frame) + 1
                tables.frame_ids[first + stream, j] = frame_id
            previous = first
        tables.published[1 - job.parity, stream] = row[dt.HELD : dt.HELD + dt.N_PUBLISHED]
        oldest = self._segment(int(row[dt.FLOOR]))
        is_sealed = row[dt.FLOOR] < row[dt.OPENED] and tables.starts[oldest] >= 0
        tables.tails[stream] = tables.starts[oldest] if is_sealed else dt.NO_TAIL
        tables.counters[dt.SPARE] = np.count_nonzero(tables.keyframe_refs == 0)

    def _segment(self, number: int) -> int:
        """The index of the stream's ``number``-th segment."""
        per_stream = self.shape.segments_per_stream
        return self.stream * per_stream + number % per_stream

    def _oldest_needed(self, uses_last_row: bool) -> int:
        """The oldest segment that this step may refer to."""
        tables, opened = self.tables, self.row[dt.OPENED]
        known = tables.recent_ids[self.stream] >= 0
        oldest = int(tables.recent_segments[self.stream][known].min(initial=opened))
        if uses_last_row:
            # the previous row may contain frames that are no longer among the recent ones
            ids = tables.frame_ids[self.job.last + self.stream].astype(np.int64) - 1
            segments = ids[ids >= 0] // self.shape.per_segment
            age = (opened - 1 - segments) % self.shape.segments_per_stream
            oldest = int((opened - 1 - age).min(initial=oldest))
        return oldest

    def _release(self, floor: int) -> None:
        """Free segments that no step refers to any more."""
        for number in range(int(self.row[dt.FLOOR]), floor):
            keyframe = self.tables.keyframes[self._segment(number)]
            if keyframe >= 0:
                self.tables.keyframe_refs[keyframe] -= 1
        self.row[dt.FLOOR] = floor

    def _find_or_add(self, frame: npt.NDArray[np.uint8]) -> int:
        """The id of a recent frame with the same bytes, or of a new one."""
        tables, size = self.tables, self.shape.frame_bytes
        if not frame.any():
            return ZERO
        equal = (tables.recent[self.stream, :, :size] == frame).all(axis=1) & (tables.recent_ids[self.stream] >= 0)
        if equal.any():
            return int(tables.recent_ids[self.stream, int(np.argmax(equal))])
        return self._add(frame)

    def _add(self, frame: npt.NDArray[np.uint8]) -> int:
        tables, shape, row, stream = self.tables, self.shape, self.row, self.stream
        size, n_recent = shape.frame_bytes, shape.n_recent
        count = int(row[dt.COUNT])
        is_long = count >= shape.min_frames and row[dt.CHAIN_BYTES] > shape.max_chain_bytes
        if row[dt.OPEN] >= 0 and (count >= shape.per_segment or is_long):
            self._seal()
        if row[dt.OPEN] < 0:
            segment = self._segment(int(row[dt.OPENED]))
            row[[dt.OPEN, dt.COUNT, dt.CHAIN_BYTES, dt.END]] = segment, 0, 0, 2 + 2 * shape.per_segment
            row[dt.OPENED] += 1
            tables.starts[segment] = -1 - stream * shape.stage_bytes
            tables.keyframes[segment] = NONE
        next_recent, position, segment = int(row[dt.NEXT_RECENT]), int(row[dt.COUNT]), int(row[dt.OPEN])
        if position == 0:
            payload = self._encode_first(frame)
        else:
            previous = tables.recent[stream, (next_recent + n_recent - 1) % n_recent, :size]
            payload = np.frombuffer(encode_delta(frame, previous), np.uint8)
        frame_id = segment * shape.per_segment + position
        tables.recent[stream, next_recent, :size] = frame
        tables.recent_ids[stream, next_recent] = frame_id
        tables.recent_segments[stream, next_recent] = row[dt.OPENED] - 1
        stage = tables.stage[stream * shape.stage_bytes :]
        end, length = int(row[dt.END]), len(payload)
        stage[end : end + length] = payload
        stage[:2] = 0, position + 1
        stage[2 + 2 * position : 4 + 2 * position] = length & 255, length >> 8
        row[dt.NEXT_RECENT] = (next_recent + 1) % n_recent
        row[dt.END] += length
        row[dt.CHAIN_BYTES] += length if length < size else 0
        row[dt.COUNT] += 1
        return frame_id

    def _seal(self) -> None:
        """Move the open segment to the heap."""
        tables, shape, row = self.tables, self.shape, self.row
        stage = tables.stage[self.stream * shape.stage_bytes :]
        body = 2 + 2 * shape.per_segment
        header, end = 2 + 2 * int(row[dt.COUNT]), int(row[dt.END])
        length = header + end - body
        capacity = tables.heap.size - dt.SLACK
        segment = int(row[dt.OPEN])
        row[dt.OPEN] = -1
        start = int(tables.counters[dt.HEAD])
        if start % capacity + length > capacity:
            start += length  # skip the seam: no segment is split in two
        if start % capacity + length > capacity or start + length - self.job.tail > capacity:
            tables.counters[dt.NEEDED] += length
            return
        tables.counters[dt.HEAD] = start + length
        at = start % capacity
        tables.heap[at : at + header] = stage[:header]
        tables.heap[at + header : at + length] = stage[body:end]
        tables.starts[segment] = start
        tables.lengths[segment] = length

    def _encode_first(self, frame: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Encode a segment's first frame against the best keyframe, or make it a keyframe."""
        tables, row, size = self.tables, self.row, self.shape.frame_bytes
        segment, held = int(row[dt.OPEN]), int(row[dt.HELD])
        keyframe, least = self._choose_keyframe(frame, held)
        cost, excess = (int(row[dt.COST]), int(row[dt.EXCESS])) if keyframe == held else (least, 0)
        cost = min(cost, least)
        excess += least - cost
        if keyframe < 0 or policy.needs_keyframe(least, excess, size):
            keyframe = -1 if self.switched else self._claim()
            if keyframe < 0:
                return frame
            tables.keyframe_rows[keyframe, :size] = frame
            self._hold(keyframe)
            row[[dt.COST, dt.EXCESS]] = policy.initial_cost(size), 0
            tables.keyframes[segment] = keyframe
            return frame[:0]
        if keyframe != held and not self.switched:
            self._hold(keyframe)
            held = keyframe
        if keyframe == held:
            row[[dt.COST, dt.EXCESS]] = cost, excess
        tables.keyframes[segment] = keyframe
        tables.keyframe_refs[keyframe] += 1
        return np.frombuffer(encode_delta(frame, tables.keyframe_rows[keyframe, :size]), np.uint8)

    def _choose_keyframe(self, frame: npt.NDArray[np.uint8], held: int) -> tuple[int, int]:
        """The keyframe to encode ``frame`` against, -1 if there is none, and a bound on the length."""
        keyframe, least = held, self.shape.frame_bytes if held < 0 else self._bound(frame, held)
        if held >= 0 and not policy.should_search(least, int(self.row[dt.COST])):
            return keyframe, least
        published = self.tables.published[self.job.parity].reshape(-1)
        for i in range(min(policy.POOL_SIZE, published.size)):
            other = int(published[(self.stream * dt.N_PUBLISHED + i) % published.size])
            if other >= 0 and other != keyframe:
                bound = self._bound(frame, other)
                if policy.should_switch(bound, least):
                    keyframe, least = other, bound
        return keyframe, least

    def _hold(self, keyframe: int) -> None:
        """Make ``keyframe`` the stream's own; once per write, since other streams may be reading the one dropped."""
        refs, row = self.tables.keyframe_refs, self.row
        dropped = int(row[dt.HELD + dt.N_HELD - 1])
        if dropped >= 0:
            refs[dropped] -= 1
        row[dt.HELD + 1 : dt.HELD + dt.N_HELD] = row[dt.HELD : dt.HELD + dt.N_HELD - 1].copy()
        row[dt.HELD] = keyframe
        refs[keyframe] += 1
        self.switched = True

    def _claim(self) -> int:
        """An unused keyframe with a reference for the open segment, or -1."""
        refs = self.tables.keyframe_refs
        unused = np.flatnonzero(refs == 0)
        if not len(unused):
            return -1
        keyframe = int(unused[np.argmin((unused - self.stream) % refs.size)])
        refs[keyframe] = 1
        return keyframe

    def _bound(self, frame: npt.NDArray[np.uint8], keyframe: int) -> int:
        """The length of the difference to ``keyframe`` if no value repeated the previous one."""
        size = self.shape.frame_bytes
        changed = np.flatnonzero(frame != self.tables.keyframe_rows[keyframe, :size])
        masks = sum(len(np.unique(changed >> shift)) for shift in (3, 6, 9))
        return int(top_bytes(size) + masks + -(-len(changed) // 8) + len(changed))


def read_rows_reference(tables: DeviceTables, shape: FrameShape, indices: torch.Tensor, out: torch.Tensor) -> int:
    """Decode ``indices[set, row]`` into ``out[set, row, stack, byte]``; return -1, or a damaged segment.

    Padding bytes of ``out`` past the end of a frame are left alone.
    """
    size = shape.frame_bytes
    starts = tables.starts.numpy()
    unused: Any = dict.fromkeys(FrameState._fields, np.zeros(0, np.int64))
    state = FrameState(**unused)._replace(
        config=FrameConfig(
            size, shape.per_segment, 2, shape.stage_bytes, delta=True, keyframe_bytes=shape.keyframe_bytes
        ),
        heap=tables.heap.numpy(),
        stage=tables.stage.numpy(),
        keyframe_rows=tables.keyframe_rows.numpy().reshape(-1),
        starts=np.where(starts >= 0, starts % capacity_of(tables), starts),
        lengths=tables.lengths.numpy(),
        keyframes=tables.keyframes.numpy(),
        stage_ends=np.ascontiguousarray(tables.streams.numpy()[:, dt.END]),
    )
    sets = indices.numpy()
    rows = np.empty(sets.size * shape.stack * size, np.uint8)
    kernels = frame_kernels(compiled=False)
    frame_ids, zstd = tables.frame_ids.numpy(), np.zeros(0, np.int64)
    damaged = kernels.read_frames(kernels.bind_state(state, {}), frame_ids, sets, rows, 0, sets.shape[1], zstd)
    out.numpy()[..., :size] = rows.reshape(*sets.shape, shape.stack, size)
    return damaged
