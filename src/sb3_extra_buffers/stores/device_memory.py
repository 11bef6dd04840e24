"""The tables of a `DeviceFrameStore`: allocating, growing, packing, clearing and checking them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.delta import padded
from sb3_extra_buffers.kernels import delta_tables as dt
from sb3_extra_buffers.kernels.delta_tables import DeviceTables, FrameShape, capacity_of
from sb3_extra_buffers.kernels.state import NONE
from sb3_extra_buffers.stores.device_base import DevicePlace

__all__ = ["DeviceMemory", "DeviceState"]

Array = npt.NDArray[Any]

# tables that a write changes only where nothing is stored
_SHARED = ("heap", "scratch")
# segments that are copied to another heap at a time
_REPACK_CHUNK = 4096


class DeviceState(NamedTuple):
    """The tables, and the report on them that each write leaves for the host. Always replaced together."""

    tables: DeviceTables
    report: torch.Tensor  # int64 [stream, N_REPORT], pinned where the device is a GPU
    notes: npt.NDArray[np.int64]  # the same memory


@dataclass(frozen=True)
class DeviceMemory:
    """Sizes and place of the tables. Methods that return a `DeviceState` leave the one they are given untouched."""

    shape: FrameShape
    n_steps: int
    n_streams: int
    n_sets: int
    place: DevicePlace

    @property
    def device(self) -> torch.device:
        return self.place.device

    def wait(self) -> None:
        """Wait until the device has done everything that was started."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- allocating ----

    def allocate(self, heap_bytes: int | None) -> DeviceState:
        """Empty tables, and a heap of at most ``heap_bytes``."""
        shape, streams = self.shape, self.n_streams
        n_segments = shape.segments_per_stream * streams
        n_keyframes = 4 * streams + 8
        capacity = max(1 << 20, self.max_advance(2))
        if heap_bytes is not None:
            capacity = max(min(capacity, heap_bytes), 1)

        def new(size: Any, dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
            return torch.full(size, fill, dtype=dtype, device=self.device)

        rows = new((streams, dt.N_COLUMNS), torch.int64)
        rows[:, dt.OPEN] = -1
        rows[:, dt.HELD : dt.HELD + dt.N_HELD] = NONE
        tables = DeviceTables(
            heap=self._new_heap(capacity),
            stage=new((streams * shape.stage_bytes,), torch.uint8),
            starts=new((n_segments,), torch.int64),
            lengths=new((n_segments,), torch.int32),
            keyframes=new((n_segments,), torch.int32, NONE),
            frame_ids=new((self.n_steps * streams * self.n_sets, shape.stack), torch.int32),
            oldest_segments=new((self.n_steps, streams), torch.int32),
            streams=rows,
            recent=new((streams, shape.n_recent, shape.keyframe_bytes), torch.uint8),
            recent_ids=new((streams, shape.n_recent), torch.int32, NONE),
            recent_segments=new((streams, shape.n_recent), torch.int32),
            keyframe_rows=new((n_keyframes, shape.keyframe_bytes), torch.uint8),
            keyframe_refs=new((n_keyframes,), torch.int32),
            published=new((2, streams, dt.N_PUBLISHED), torch.int32, NONE),
            counters=new((4,), torch.int64),
            tails=new((streams,), torch.int64, dt.NO_TAIL),
            scratch=new((streams, padded(shape.frame_bytes) + 64), torch.uint8),
        )
        state = self._with_report(tables)
        state.report[:, dt.REPORT_SPARE] = n_keyframes
        return state

    def _new_heap(self, capacity: int) -> torch.Tensor:
        nbytes = max(capacity // 8, 1) * 8 + dt.SLACK
        if self.place.pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _with_report(self, tables: DeviceTables, report: torch.Tensor | None = None) -> DeviceState:
        """``tables`` with a new report, a copy of ``report``."""
        new = torch.zeros((self.n_streams, dt.N_REPORT), dtype=torch.int64) if report is None else report.clone()
        if self.device.type == "cuda":
            new = new.pin_memory()
        return DeviceState(tables, new, new.numpy())

    def copy_for_write(self, state: DeviceState) -> DeviceState:
        """Tables to write a step to, of which nothing is kept if it does not fit."""
        tables = {name: table if name in _SHARED else table.clone() for name, table in state.tables._asdict().items()}
        return self._with_report(DeviceTables(**tables))

    def to_host(self, state: DeviceState) -> DeviceState:
        """A copy in host memory."""
        self.wait()
        report = state.report.clone()
        tables = DeviceTables(*(table.to("cpu", copy=True) for table in state.tables))
        return DeviceState(tables, report, report.numpy())

    def from_arrays(self, tables: dict[str, Array], report: Array) -> DeviceState:
        """The state on the device, from arrays of the tables and the report."""
        placed = {name: torch.from_numpy(np.array(table)).to(self.device) for name, table in tables.items()}
        if self.place.pinned:
            placed["heap"] = placed["heap"].cpu().pin_memory()
        return self._with_report(DeviceTables(**placed), torch.from_numpy(np.array(report)))

    # ---- the heap ----

    def max_advance(self, n_launches: int) -> int:
        """Bytes by which ``n_launches`` writes can move the end of the heap at most."""
        shape = self.shape
        per_launch = self.n_sets * shape.stack * (shape.frame_bytes + 4)
        # plus the open segments, and what is skipped at the seam
        return self.n_streams * (n_launches * per_launch + 3 * shape.stage_bytes)

    def _segments_in_use(self, tables: DeviceTables) -> torch.Tensor:
        """Indices of the segments that a step refers to, the open ones included."""
        per_stream = self.shape.segments_per_stream
        rows = tables.streams.cpu().numpy()
        segments = [
            stream * per_stream + np.arange(row[dt.FLOOR], row[dt.OPENED]) % per_stream
            for stream, row in enumerate(rows)
        ]
        return torch.from_numpy(np.concatenate(segments)).to(tables.starts.device)

    def _sealed_segments(self, tables: DeviceTables) -> torch.Tensor:
        """Indices of the segments that a step refers to in the heap, in the order of their positions."""
        segments = self._segments_in_use(tables)
        segments = segments[tables.starts[segments] >= 0]
        return segments[torch.argsort(tables.starts[segments])]

    def live_bytes(self, tables: DeviceTables) -> int:
        """Bytes of the heap that a step refers to."""
        return int(tables.lengths[self._sealed_segments(tables)].sum())

    def repack(self, state: DeviceState, capacity: int, launch: int) -> DeviceState:
        """The state with all live segments in a row, in a new heap; ``launch`` is the number of the last write."""
        tables = state.tables
        segments = self._sealed_segments(tables)
        lengths = tables.lengths[segments].to(torch.int64)
        ends = torch.cumsum(lengths, 0)
        begins = ends - lengths
        old = tables.starts[segments] % capacity_of(tables)
        heap = self._new_heap(capacity)
        for first in range(0, len(segments), _REPACK_CHUNK):
            part = slice(first, first + _REPACK_CHUNK)
            shift = torch.repeat_interleave(old[part] - begins[part], lengths[part])
            low, high = int(begins[first]), int(ends[part][-1])
            source = torch.arange(low, high, device=self.device) + shift
            heap[low:high] = tables.heap[source.to(tables.heap.device)]
        head = int(ends[-1]) if len(ends) else 0
        starts, counters = tables.starts.clone(), tables.counters.clone()
        starts[segments] = begins
        counters[dt.HEAD] = head
        tails = self._tails(tables.streams, starts)
        packed = tables._replace(heap=heap, starts=starts, counters=counters, tails=tails.to(self.device))
        new = self._with_report(packed, state.report)
        new.report[:, dt.REPORT_HEAD], new.report[:, dt.REPORT_TAIL] = head, tails
        new.report[:, dt.REPORT_LAUNCH] = launch
        return new

    def _tails(self, streams: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """The oldest heap position that each stream needs."""
        per_stream = self.shape.segments_per_stream
        rows = streams.cpu()
        oldest = torch.arange(self.n_streams) * per_stream + rows[:, dt.FLOOR] % per_stream
        first_starts = starts.cpu()[oldest]
        is_sealed = (rows[:, dt.FLOOR] < rows[:, dt.OPENED]) & (first_starts >= 0)
        return torch.where(is_sealed, first_starts, dt.NO_TAIL)

    def add_keyframes(self, state: DeviceState) -> DeviceState:
        """The state with half as many keyframes again; they are copied on the device, without waiting.

        The report, which both states share, says so until the next write.
        """
        tables = state.tables
        n_added = max(tables.keyframe_refs.numel() // 2, 2 * self.n_streams)
        state.report[:, dt.REPORT_SPARE] = n_added
        pad = torch.nn.functional.pad
        return state._replace(
            tables=tables._replace(
                keyframe_rows=pad(tables.keyframe_rows, (0, 0, 0, n_added)),
                keyframe_refs=pad(tables.keyframe_refs, (0, n_added)),
            )
        )

    def clear(self, state: DeviceState, launch: int) -> None:
        """Forget every observation in place; keyframes and memory stay. May be interrupted and run again."""
        tables, report = state.tables, state.report
        rows, n_keyframes = tables.streams, tables.keyframe_refs.numel()
        held = rows[:, dt.HELD : dt.HELD + dt.N_HELD].flatten()
        # the entry past the end counts what is not held
        refs = torch.zeros(n_keyframes + 1, dtype=torch.int32, device=self.device)
        refs.index_add_(0, torch.where(held >= 0, held, n_keyframes), torch.ones_like(held).int())
        rows[:, dt.OPEN] = -1
        rows[:, dt.FLOOR] = rows[:, dt.OPENED]
        tables.frame_ids.zero_()
        tables.recent_ids.fill_(NONE)
        tables.tails.fill_(dt.NO_TAIL)
        tables.counters.zero_()
        tables.keyframe_refs.copy_(refs[:-1])
        report[:, dt.REPORT_HEAD], report[:, dt.REPORT_TAIL], report[:, dt.REPORT_LAUNCH] = 0, dt.NO_TAIL, launch

    # ---- checking ----

    def check(self, state: DeviceState) -> None:
        """Raise if the tables contradict each other or the heap."""
        self.wait()
        tables = DeviceTables(*(table.cpu() for table in state.tables))
        self._check_heap(tables)
        shape, rows = self.shape, tables.streams
        ids = tables.frame_ids[tables.frame_ids > 0] - 1
        segments = torch.div(ids, shape.per_segment, rounding_mode="floor")
        stream = torch.div(segments, shape.segments_per_stream, rounding_mode="floor")
        age = (rows[stream, dt.OPENED] - 1 - segments % shape.segments_per_stream) % shape.segments_per_stream
        if bool((age >= (rows[:, dt.OPENED] - rows[:, dt.FLOOR])[stream]).any()):
            raise AssertionError("an observation refers to a frame in a freed segment")
        used = tables.keyframes[self._segments_in_use(tables)]
        held = rows[:, dt.HELD : dt.HELD + dt.N_HELD].flatten().int()
        references = torch.cat([used, held])
        counts = torch.bincount(references[references >= 0], minlength=tables.keyframe_refs.numel())
        if not torch.equal(counts.int(), tables.keyframe_refs):
            raise AssertionError("the reference counts of the keyframes are wrong")

    def _check_heap(self, tables: DeviceTables) -> None:
        segments = self._sealed_segments(tables)
        if not len(segments):
            return
        starts, lengths = tables.starts[segments], tables.lengths[segments]
        ends = starts + lengths
        head, capacity = int(tables.counters[dt.HEAD]), capacity_of(tables)
        if bool((ends[:-1] > starts[1:]).any()) or int(ends[-1]) > head:
            raise AssertionError("segments overlap, or exceed the end of the heap")
        if head - int(starts[0]) > capacity:
            raise AssertionError("the end of the heap has overwritten its beginning")
        if bool((starts % capacity + lengths > capacity).any()):
            raise AssertionError("a segment crosses the end of the ring")
