"""The tables of a `DeviceFrameStore`: allocating, growing, packing, clearing and checking them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.kernels import delta_tables as dt
from sb3_extra_buffers.kernels.delta_tables import DeviceTables, FrameShape, capacity_of
from sb3_extra_buffers.kernels.state import NONE
from sb3_extra_buffers.stores.device_base import DevicePlace

__all__ = ["DeviceMemory", "DeviceState"]

Array = npt.NDArray[Any]

_LENGTH = (1 << dt.LENGTH_BITS) - 1
# frames that are copied to a new heap at a time
_REPACK_CHUNK = 1 << 14
# limits for writes in flight, before the host waits for a report: their number, and the space reserved for them in
# the heap, as a share of uncompressed observations
_MAX_AHEAD, _AHEAD_SHARE = 16, 0.02


class DeviceState(NamedTuple):
    """The tables, and the report on them that each write leaves for the host. Always replaced together."""

    tables: DeviceTables
    report: torch.Tensor  # int64 [N_REPORT], pinned where the device is a GPU
    notes: npt.NDArray[np.int64]  # the report as an array, which shares its memory


class _Frames(NamedTuple):
    """The frames that steps refer to, in the order of their positions in the heap."""

    indices: torch.Tensor  # in `DeviceTables.entries`, flattened
    starts: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class DeviceMemory:
    """Allocates and changes tables of these sizes. Methods that return a `DeviceState` do not change the one given."""

    shape: FrameShape
    n_steps: int
    n_streams: int
    n_sets: int
    place: DevicePlace

    @property
    def device(self) -> torch.device:
        return self.place.device

    def wait(self) -> None:
        """Wait until the device has finished everything that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- sizes ----

    @property
    def n_ahead(self) -> int:
        """Writes that may be in flight before the host waits for a report."""
        return min(max(int(_AHEAD_SHARE * self.n_steps), 1), _MAX_AHEAD)

    def max_advance(self, n_launches: int) -> int:
        """The most bytes by which ``n_launches`` writes can move the end of the heap."""
        per_stream = self.n_sets * self.shape.stack * self.shape.max_bytes
        # plus the bytes skipped where the ring starts again
        return n_launches * self.n_streams * per_stream + self.shape.max_bytes

    def max_segments(self, n_launches: int) -> int:
        """The most segments that a stream can open in ``n_launches`` writes."""
        return n_launches * (self.n_sets * self.shape.stack // self.shape.min_frames + 1)

    @property
    def _first_slots(self) -> int:
        """Slots for the segments of a stream: enough if a step has little more than one new frame on average."""
        shape, n_frames = self.shape, self.n_steps * self.n_sets * self.shape.stack
        likely = min(n_frames, self.n_steps + self.n_steps // 4 + 2 * shape.stack)
        n_segments = -(-likely // shape.min_frames) + self.max_segments(2 * _MAX_AHEAD)
        return int(min(1 << (n_segments - 1).bit_length(), shape.n_numbers // 2))

    # ---- allocating ----

    def allocate(self, heap_bytes: int | None) -> DeviceState:
        """Empty tables, and a heap of at most ``heap_bytes``."""
        shape, streams, n_slots = self.shape, self.n_streams, self._first_slots
        n_keyframes = streams // 8 + 16
        capacity = self.max_advance(self.n_ahead) + (1 << 16)
        if heap_bytes is not None:
            capacity = max(min(capacity, heap_bytes), 1)

        def new(size: Any, dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
            return torch.full(size, fill, dtype=dtype, device=self.device)

        rows = new((streams, dt.N_COLUMNS), torch.int64)
        rows[:, dt.HELD : dt.HELD + dt.N_HELD] = NONE
        tables = DeviceTables(
            heap=self._new_heap(capacity),
            entries=new((streams, n_slots, shape.per_segment), torch.int64),
            starts=new((streams, n_slots), torch.int64),
            keyframes=new((streams, n_slots), torch.int32, NONE),
            frame_ids=new((self.n_steps * streams * self.n_sets, shape.stack), torch.int32),
            oldest_segments=new((self.n_steps, streams), torch.int32),
            streams=rows,
            recent=new((streams, shape.n_recent, shape.keyframe_bytes), torch.uint8),
            recent_ids=new((streams, shape.n_recent), torch.int32, NONE),
            last=new((streams, shape.stack), torch.int32),
            keyframe_rows=new((n_keyframes, shape.keyframe_bytes), torch.uint8),
            keyframe_refs=new((n_keyframes,), torch.int32),
            published=new((2, streams, dt.N_PUBLISHED), torch.int32, NONE),
            tails=new((streams,), torch.int64, dt.NO_TAIL),
            counters=new((4,), torch.int64),
        )
        report = torch.tensor([0, dt.NO_TAIL, n_keyframes, 0, 0])
        return self._with_report(tables, report)

    def _new_heap(self, capacity: int) -> torch.Tensor:
        return self.place.empty((max(capacity // 8, 1) * 8 + dt.SLACK,), torch.uint8)

    def _with_report(self, tables: DeviceTables, report: torch.Tensor) -> DeviceState:
        """``tables`` with a copy of ``report``."""
        new = report.clone()
        if self.device.type == "cuda":
            new = new.pin_memory()
        return DeviceState(tables, new, new.numpy())

    def addresses(self, tables: DeviceTables) -> list[int]:
        """What the reading kernel looks up, in the order of the constants ``ADDRESS_…``."""
        found = [t.data_ptr() for t in (tables.heap, tables.entries, tables.keyframes, tables.keyframe_rows)]
        return [*found, tables.n_slots - 1]

    def copy_for_write(self, state: DeviceState) -> DeviceState:
        """A copy to write a step to, which is discarded if the step does not fit."""
        # the heap is shared: a write changes it only where nothing is stored
        tables = {name: table if name == "heap" else table.clone() for name, table in state.tables._asdict().items()}
        return self._with_report(DeviceTables(**tables), state.report)

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

    # ---- growing ----

    def add_keyframes(self, state: DeviceState) -> DeviceState:
        """The state with space for half as many keyframes again; tables are copied on the device, without waiting.

        Both states share the report, in which the new keyframes are counted until the next write replaces it.
        """
        tables = state.tables
        n_added = max(tables.keyframe_refs.numel() // 2, self.n_streams // 8 + 16)
        state.report[dt.REPORT_SPARE] = n_added
        pad = torch.nn.functional.pad
        return state._replace(
            tables=tables._replace(
                keyframe_rows=pad(tables.keyframe_rows, (0, 0, 0, n_added)),
                keyframe_refs=pad(tables.keyframe_refs, (0, n_added)),
            )
        )

    def add_slots(self, state: DeviceState) -> DeviceState:
        """The state with twice as many slots for segments; tables are copied on the device, without waiting."""
        tables, numbers = state.tables, self.shape.n_numbers
        n_slots = 2 * tables.n_slots
        # the slot that the newest segment of each new slot is in; it does not matter for segments not in use
        slot = torch.arange(n_slots, device=self.device)
        newest = tables.streams[:, dt.OPENED, None] - 1
        source = (newest - (newest - slot) % n_slots) % numbers % tables.n_slots
        return state._replace(
            tables=tables._replace(
                entries=tables.entries.gather(1, source[..., None].expand(-1, -1, self.shape.per_segment)),
                starts=tables.starts.gather(1, source),
                keyframes=tables.keyframes.gather(1, source),
            )
        )

    # ---- the heap ----

    @staticmethod
    def _slots(tables: DeviceTables) -> torch.Tensor:
        return torch.arange(tables.n_slots, device=tables.streams.device)

    def _segments_in_use(self, tables: DeviceTables) -> torch.Tensor:
        """Which slots hold segments that a step refers to: ``[stream, slot]``."""
        opened, floor = tables.streams[:, dt.OPENED, None], tables.streams[:, dt.FLOOR, None]
        age = (opened - 1 - self._slots(tables)) % tables.n_slots
        return age < (opened - floor) % self.shape.n_numbers

    def _frames_in_use(self, tables: DeviceTables) -> _Frames:
        entries = torch.where(self._segments_in_use(tables)[..., None], tables.entries, 0).flatten()
        indices = torch.nonzero(entries & _LENGTH).flatten()
        found = entries[indices]
        # from an offset to a position: all positions in use are less than the capacity before the end
        before = tables.counters[dt.HEAD] - 1
        starts = before - (before - (found >> dt.LENGTH_BITS)) % capacity_of(tables)
        order = torch.argsort(starts)
        return _Frames(indices[order], starts[order], found[order] & _LENGTH)

    def live_bytes(self, tables: DeviceTables) -> int:
        """Bytes of the heap that steps refer to."""
        return int(self._frames_in_use(tables).lengths.sum())

    def repack(self, state: DeviceState, capacity: int, launch: int) -> DeviceState:
        """The state with all live frames packed in a new heap; ``launch`` is the number of the last write."""
        tables = state.tables
        frames = self._frames_in_use(tables)
        ends = torch.cumsum(frames.lengths, 0)
        begins = ends - frames.lengths
        heap = self._new_heap(capacity)
        old = frames.starts % capacity_of(tables)
        for first in range(0, len(ends), _REPACK_CHUNK):
            part = slice(first, first + _REPACK_CHUNK)
            shift = torch.repeat_interleave(old[part] - begins[part], frames.lengths[part])
            low, high = int(begins[first]), int(ends[part][-1])
            source = torch.arange(low, high, device=self.device) + shift
            heap[low:high] = tables.heap[source.to(tables.heap.device)]
        head = int(ends[-1]) if len(ends) else 0
        entries, counters = tables.entries.clone(), tables.counters.clone()
        entries.view(-1)[frames.indices] = begins << dt.LENGTH_BITS | frames.lengths
        counters[dt.HEAD] = head
        starts = torch.full_like(tables.starts, head)
        starts.view(-1).scatter_reduce_(0, frames.indices // self.shape.per_segment, begins, "amin")
        # a segment without bytes of its own, such as a lone keyframe, begins no later than newer ones
        newest_first = (tables.streams[:, dt.OPENED, None] - 1 - self._slots(tables)) % tables.n_slots
        starts = starts.gather(1, newest_first).cummin(1).values.gather(1, newest_first)
        tails = self._tails(tables, starts)
        packed = tables._replace(heap=heap, entries=entries, starts=starts, tails=tails, counters=counters)
        new = self._with_report(packed, state.report)
        new.notes[[dt.REPORT_HEAD, dt.REPORT_TAIL, dt.REPORT_LAUNCH]] = head, int(tails.min()), launch
        return new

    def _tails(self, tables: DeviceTables, starts: torch.Tensor) -> torch.Tensor:
        """The oldest heap position that each stream uses."""
        floor = tables.streams[:, dt.FLOOR]
        oldest = starts.gather(1, (floor % tables.n_slots)[:, None])[:, 0]
        return torch.where(floor == tables.streams[:, dt.OPENED], dt.NO_TAIL, oldest)

    def clear(self, state: DeviceState, launch: int) -> None:
        """Forget every observation in place; keyframes and memory stay. May be interrupted and run again."""
        tables = state.tables
        rows, n_keyframes = tables.streams, tables.keyframe_refs.numel()
        held = rows[:, dt.HELD : dt.HELD + dt.N_HELD].flatten()
        # one more entry counts empty entries of `held`
        refs = torch.zeros(n_keyframes + 1, dtype=torch.int32, device=self.device)
        refs.index_add_(0, torch.where(held >= 0, held, n_keyframes), torch.ones_like(held).int())
        rows[:, dt.FLOOR] = rows[:, dt.OPENED]
        tables.frame_ids.zero_()
        tables.recent_ids.fill_(NONE)
        tables.tails.fill_(dt.NO_TAIL)
        tables.counters.zero_()
        tables.keyframe_refs.copy_(refs[:-1])
        spare = state.notes[dt.REPORT_SPARE]
        state.notes[:] = 0, dt.NO_TAIL, spare, 0, launch

    # ---- checking ----

    def check(self, state: DeviceState) -> None:
        """Raise if the tables contradict each other or the heap."""
        self.wait()
        tables = DeviceTables(*(table.cpu() for table in state.tables))
        self._check_heap(tables)
        shape, rows = self.shape, tables.streams
        ids = tables.frame_ids.view(-1, self.n_streams, shape.stack).long() - 1
        age = (rows[:, dt.OPENED, None] - 1 - ids // shape.per_segment) % shape.n_numbers
        n_segments = (rows[:, dt.OPENED] - rows[:, dt.FLOOR]) % shape.n_numbers
        if bool(((ids >= 0) & (age >= n_segments[:, None])).any()):
            raise AssertionError("an observation refers to a frame in a freed segment")
        if int(n_segments.max()) > tables.n_slots:
            raise AssertionError("a stream uses more segments than there are slots")
        used = tables.keyframes[self._segments_in_use(tables)]
        held = rows[:, dt.HELD : dt.HELD + dt.N_HELD].flatten().int()
        references = torch.cat([used, held])
        counts = torch.bincount(references[references >= 0], minlength=tables.keyframe_refs.numel())
        if not torch.equal(counts.int(), tables.keyframe_refs):
            raise AssertionError("the reference counts of the keyframes are wrong")

    def _check_heap(self, tables: DeviceTables) -> None:
        _, starts, lengths = self._frames_in_use(tables)
        if not len(starts):
            return
        ends = starts + lengths
        head, capacity = int(tables.counters[dt.HEAD]), capacity_of(tables)
        if bool((ends[:-1] > starts[1:]).any()) or int(ends[-1]) > head:
            raise AssertionError("frames overlap, or exceed the end of the heap")
        if bool((starts % capacity + lengths > capacity).any()):
            raise AssertionError("a frame crosses the end of the ring")
        tails = self._tails(tables, tables.starts)
        if not torch.equal(tails, tables.tails) or int(tails.min()) > int(starts[0]):
            raise AssertionError("the oldest positions that streams use are wrong")
