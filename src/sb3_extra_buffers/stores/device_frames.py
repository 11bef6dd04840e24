"""Frames as differences in the memory of a device, which encodes and decodes them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.errors import HeapFullError, IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.kernels import delta_tables as dt
from sb3_extra_buffers.kernels import policy
from sb3_extra_buffers.kernels.delta_tables import FrameShape, WriteJob, capacity_of
from sb3_extra_buffers.kernels.delta_torch import read_rows_reference, write_rows_reference
from sb3_extra_buffers.kernels.launcher import Columns, TableLayout
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_base import AttributeWrite, Batch, DeviceRing, DeviceStore, IndexBatch, put_in
from sb3_extra_buffers.stores.device_layout import join_frames, split_frames
from sb3_extra_buffers.stores.device_memory import DeviceMemory, DeviceState
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.staging import LaunchDone, Lease, Staging, StagingLayout, torch_dtype
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceFrameStore", "DeviceFrameWrite"]

Array = npt.NDArray[Any]

_BYTE = np.dtype(np.uint8)
# the most bytes of a step that the device reads in place, and how many such steps may be in flight; larger ones are
# copied in pieces, of which two are in flight
_IN_PLACE, _STEPS, _PIECES = 1 << 20, 4, 2
# seconds to poll for a report before synchronising with the device
_WATCH = 0.05
# kernels number observations in 32 bits
_MAX_OBS = (1 << 31) - 1


class DeviceFrameWrite(AttributeWrite):
    """A step that is sure to fit. To commit it, launch it, or use the tables to which it was already written."""

    __slots__ = ("columns", "job", "launch", "source", "written")

    def __init__(
        self,
        store: DeviceFrameStore,
        after: dict[str, Any],
        launch: int,
        job: WriteJob,
        source: _Source | None,
        written: DeviceState | None = None,
    ) -> None:
        self.owner, self.after = store, after
        self.launch, self.job, self.source, self.written = launch, job, source, written
        self.columns: Any = None

    def take_columns(self, columns: Any) -> bool:
        if self.source is None or self.owner.columns is None:
            return False
        self.columns = columns
        return True

    def commit(self) -> None:
        self.owner.unfinished = self
        if self.source is not None:
            self.owner.launch(self.owner.state, self.source, self.job, self.launch, self.columns)
        self._apply()

    def finish(self) -> None:
        if self.source is not None and not self.owner.was_launched(self.launch):
            self.owner.launch(self.owner.state, self.source, self.job, self.launch, self.columns)
        self._apply()

    def _apply(self) -> None:
        if self.written is not None:
            self.owner.use_state(self.written)
        # one call, which no signal can interrupt
        self.owner.__dict__.update(self.after)


class _Limits(NamedTuple):
    """The sizes of the tables, and how much of them a write may use at most."""

    capacity: int  # of the heap
    advance: int  # bytes of the heap that a write may take
    n_slots: int  # for the segments of a stream
    segments: int  # that a write may open in a stream
    spare: int  # keyframes that must be unused before a write


class _Source:
    """The frames of a step, ``[stream, stack, byte]`` per set, and the staging memory that they are in, if any."""

    __slots__ = ("frames", "lease")

    def __init__(self, frames: Sequence[torch.Tensor], lease: Lease | None = None) -> None:
        self.frames, self.lease = frames, lease


class DeviceFrameStore(DeviceStore):
    """Frames as differences, in the memory of a GPU; ``place.pinned`` keeps the heap in pinned host memory.

    Every stream frees its segments in the order in which it created them, so the heap is a ring. Writing and reading
    are one launch each and do not wait: the device decides which frames are new and what they are encoded against. The
    host learns how full the tables are from a report that each write leaves in pinned memory, and waits only if the
    writes since then could fill them.

    The heap grows up to ``heap_bytes``; a step that does not fit raises `HeapFullError`. With ``triton=False``,
    reference kernels run in main memory instead.
    """

    layout: StackLayout
    state: DeviceState = None  # type: ignore[assignment]  # until the tables are allocated
    _limits: _Limits
    #: The columns that are written in the same launch as a step.
    columns: TableLayout | None = None
    # a write, a change of tables or "clear" while it is under way; the next call completes it after an exception
    unfinished: DeviceFrameWrite | DeviceState | str | None = None

    def __init__(
        self,
        ring: DeviceRing,
        layout: StackLayout,
        codec: Codec,
        method: str = "delta",
        options: Mapping[str, Any] | None = None,
        triton: bool | None = None,
    ) -> None:
        assert isinstance(codec, DeltaCodec)
        if ring.n_sets > 2:
            raise SpecMismatchError(f"a step has observations and next observations, got {ring.n_sets} sets")
        if ring.n_sets * ring.n_obs > _MAX_OBS:
            raise SpecMismatchError(
                f"{ring.n_sets * ring.n_obs:,} observations are more than kernels can number, {_MAX_OBS:,}; "
                "use several buffers"
            )
        self.ring, self.layout = ring, layout
        self._triton = ring.place.device.type == "cuda" if triton is None else triton
        per_segment = policy.DEVICE_FRAMES_PER_SEGMENT if codec.frames == DeltaCodec().frames else codec.frames
        self.shape = FrameShape(layout.frame_bytes, layout.stack, per_segment)
        self._launches = 0
        self._wrapped = False
        self._set_up()
        self.use_state(self.memory.allocate(ring.heap_bytes))

    @staticmethod
    def accepts(codec: Codec, layout: StackLayout) -> bool:
        # the kernels cannot read packed segments, and the length of a frame must fit in LENGTH_BITS
        fits = isinstance(codec, DeltaCodec) and codec.pack_level == 0 and layout.frame_bytes > 0
        fits &= 2 * layout.stack <= dt.MAX_TARGETS
        return (
            fits and FrameShape(layout.frame_bytes, 1, 1).max_bytes >> dt.LENGTH_BITS == 0 and device_base.has_triton()
        )

    def _set_up(self) -> None:
        """Create everything that is not pickled: sizes, staging memory, kernels."""
        ring, layout = self.ring, self.layout
        self.n_steps, self.n_streams, self.n_sets = ring.n_steps, ring.n_streams, ring.n_sets
        self.device = ring.place.device
        self.memory = DeviceMemory(self.shape, ring.n_steps, ring.n_streams, ring.n_sets, ring.place)
        # whether frames are contiguous and consist of whole words, so that rows need no rearranging
        self._whole = (layout.axis == "first" or layout.stack == 1) and layout.frame_bytes % 8 == 0
        self._step_shape = (ring.n_streams, *ring.spec.shape)
        rows = (self._step_shape, ring.spec.dtype)
        # whether the kernel reads rows from staging memory: worthwhile only if it reads every byte once
        step_bytes = ring.n_sets * ring.n_streams * ring.spec.nbytes
        self._in_place = self._whole and self._triton and step_bytes <= _IN_PLACE and layout.frame_bytes <= 1 << 14
        self._row_layout = StagingLayout(*[rows] * ring.n_sets)
        self._row_staging = Staging(self.device, _STEPS if self._in_place or not self._triton else _PIECES)
        #: int64 [N_ADDRESSES], on the device: where the tables are. It never moves, because graphs refer to it.
        self._addresses = torch.zeros(dt.N_ADDRESSES, dtype=torch.int64, device=self.device)
        self._bound_writer: Any = None
        self._bound_reader: Any = None
        self._scratch: torch.Tensor | None = None
        self._grown = 0  # number of the first write after keyframes were added
        device_base.wait_before_freeing(self, self.device)

    def use_state(self, state: DeviceState) -> None:
        """Make ``state`` the store's own. May be interrupted and run again."""
        tables = state.tables
        if self.state is not None and tables.frame_ids is not self.state.tables.frame_ids:
            # the reading kernel, and graphs that contain it, refer to this table by its address
            frame_ids = self.state.tables.frame_ids.copy_(tables.frame_ids)
            state = state._replace(tables=tables._replace(frame_ids=frame_ids))
        # each number is an argument of a launch: nothing is copied from the host
        for address, number in zip(self._addresses.unbind(0), self.memory.addresses(tables), strict=True):
            address.fill_(number)
        memory = self.memory
        # the bytes skipped at the end of the ring are counted in every write, although they are skipped once per lap
        limits = _Limits(
            capacity_of(tables), memory.max_advance(1), tables.n_slots, memory.max_segments(1), self.n_streams // 16 + 4
        )
        self.__dict__.update(state=state, _limits=limits)

    def _change_tables(self, state: DeviceState) -> None:
        """Use ``state``, which holds the same observations in other tables."""
        self.unfinished = state
        self.use_state(state)
        self.unfinished = None

    @property
    def reader(self) -> Any:
        """The Triton kernel that reads, also after tables have grown."""
        if self._bound_reader is None:
            from sb3_extra_buffers.kernels.delta_triton import ReadKernel  # optional: needs Triton

            self._bound_reader = ReadKernel(self.shape, self._addresses, self.state.tables.frame_ids, self.n_streams)
        return self._bound_reader

    def writer(self, state: DeviceState) -> Any:
        """The Triton kernel that writes to the tables of ``state``."""
        writer = self._bound_writer
        if writer is None or writer.tables is not state.tables or writer.columns is not self.columns:
            from sb3_extra_buffers.kernels.delta_triton import WriteKernel, scratch_for  # optional: needs Triton

            if self._scratch is None:
                self._scratch = scratch_for(self.shape, self.n_streams, self.device)
            writer = self._bound_writer = WriteKernel(self.shape, state.tables, self._scratch, self.columns)
        return writer

    def use_columns(self, table: TableLayout | None) -> None:
        if self._triton:
            self.columns = table

    # ---- writing ----

    def plan(self, step: int, batches: Sequence[Batch]) -> DeviceFrameWrite:
        """Prepare to write ``step``, the one after the last: one batch of observations, or of their bytes, per set."""
        if self.unfinished is not None:
            self.recover()
        if not 0 <= step < self.n_steps:
            raise IndexOutOfRangeError(f"step {step} is outside of a ring of {self.n_steps} steps")
        source = self._stage(batches)
        first, launches = step * self.n_streams, self._launches
        indices = (first,) if self.n_sets == 1 else (first, first + self.n_steps * self.n_streams)
        oldest = (step + 1) % self.n_steps if self._wrapped else 0
        after: dict[str, Any] = {"_launches": launches + 1, "unfinished": None}
        if step == self.n_steps - 1:
            after["_wrapped"] = True
        # fast path: the last report shows that there is enough space, even if later writes used as much as they can.
        # Read the number of the report first, see `_heap_use`
        notes, limits = self.state.notes, self._limits
        n_writes = launches - int(notes[dt.REPORT_LAUNCH]) + 1
        head, tail, spare, n_segments, _ = notes.tolist()
        tail = min(tail, head)
        if (
            head - tail + n_writes * limits.advance <= limits.capacity
            and n_segments + n_writes * limits.segments <= limits.n_slots and spare >= limits.spare
        ):  # fmt: skip
            return self._plan_launch(source, WriteJob(step, oldest, indices, launches & 1, tail), after)
        if launches:
            self._reserve_tables()
        return self._plan_near_limit(source, WriteJob(step, oldest, indices, launches & 1, 0), after)

    def recover(self) -> None:
        """Complete what an exception interrupted."""
        if isinstance(self.unfinished, DeviceFrameWrite):
            self.unfinished.finish()
        elif isinstance(self.unfinished, DeviceState):
            self._change_tables(self.unfinished)
        elif self.unfinished is not None:
            self.clear()

    def _plan_launch(self, source: _Source, job: WriteJob, after: dict[str, Any]) -> DeviceFrameWrite:
        launch = self._launches + 1
        if self._triton:
            self.writer(self.state)  # this can fail; the launch cannot
            return DeviceFrameWrite(self, after, launch, job, source)
        # the reference kernel can be interrupted
        return DeviceFrameWrite(self, after, launch, job, None, self._write_to_copy(source, job, launch))

    def _plan_near_limit(self, source: _Source, job: WriteJob, after: dict[str, Any]) -> DeviceFrameWrite:
        """Wait for the exact sizes and reserve space; if the step may still not fit, try it on a copy of the tables."""
        memory, launch = self.memory, self._launches + 1
        if not self._has_space():
            self._wait_for_report()
            if self._launches and not self._has_space():
                self._reserve()
        tail = self._heap_use()[1]
        if self._has_space():
            return self._plan_launch(source, job._replace(tail=tail), after)
        written = self._write_to_copy(source, job._replace(tail=tail), launch)
        if written.tables.counters[dt.NEEDED] and self._launches:
            # it may fit after compaction
            self._repack(capacity_of(self.state.tables))
            written = self._write_to_copy(source, job._replace(tail=self._heap_use()[1]), launch)
        needed = int(written.tables.counters[dt.NEEDED])
        if needed:
            tables, limit = self.state.tables, self.ring.heap_bytes
            needed += int(written.tables.counters[dt.HEAD]) - int(tables.counters[dt.HEAD])
            raise HeapFullError(needed, memory.live_bytes(tables), capacity_of(tables) if limit is None else limit)
        return DeviceFrameWrite(self, after, launch, job, None, written)

    def _write_to_copy(self, source: _Source, job: WriteJob, launch: int) -> DeviceState:
        """A copy of the state after a write; the store's own state does not change."""
        state = self.memory.copy_for_write(self.state)
        self.launch(state, source, job, launch)
        self.memory.wait()
        return state

    def launch(self, state: DeviceState, source: _Source, job: WriteJob, launch: int, columns: Any = None) -> None:
        """Write to the tables of ``state``, and ``columns`` (`StagedColumns`) if given; with Triton, in one launch."""
        if not self._triton:
            frames = [f.view(-1).view(torch.uint8).view(self.n_streams, self.layout.stack, -1) for f in source.frames]
            write_rows_reference(state.tables, self.shape, frames, job, state.report, launch)
            return
        first, last = source.frames[0], source.frames[-1]
        given, arguments = None if columns is None else columns.columns, job.arguments(state.tables, launch)
        self.writer(state).write(arguments, first, last, self.n_sets, state.report, given)
        # the kernel writes its report last: once it has arrived, the staging memory has been read
        done = LaunchDone(launch, state.notes[dt.REPORT_LAUNCH :], self.memory.wait)
        if source.lease is not None:
            self._row_staging.release(source.lease, done)
        if columns is not None:
            columns.release(done)

    def was_launched(self, launch: int) -> bool:
        """Whether the write numbered ``launch`` reached the device."""
        if self._launches >= launch:
            return True
        self.memory.wait()
        return int(self.state.notes[dt.REPORT_LAUNCH]) >= launch

    # ---- staging ----

    def _stage(self, batches: Sequence[Batch]) -> _Source:
        """The frames of ``batches`` where the device can read them."""
        if len(batches) != self.n_sets:
            raise SpecMismatchError(f"expected {self.n_sets} batches, one per set, got {len(batches)}")
        if self._in_place:
            shape, dtype = self._step_shape, self.ring.spec.dtype
            for batch in batches:
                if type(batch) is not np.ndarray or batch.shape != shape or batch.dtype != dtype:
                    break
            else:
                # fast path: arrays that need no conversion
                lease = self._row_staging.acquire(self._row_layout)
                for target, batch in zip(lease.arrays, batches, strict=True):
                    target[...] = batch
                return _Source(lease.tensors, lease)
        for batch in batches:
            # not len(), for which torch takes several times as long
            if batch.shape[0] != self.n_streams:
                raise SpecMismatchError(
                    f"expected an observation for each of {self.n_streams} streams, got {len(batch)}"
                )
        if isinstance(batches[0], torch.Tensor):
            return _Source([self._split(batch) for batch in batches])  # type: ignore[arg-type]  # all are
        checked = [self._checked(batch) for batch in batches]  # type: ignore[arg-type]  # none is
        if self._triton and not self._in_place:
            upload = self._row_staging.upload_in_pieces
            return _Source([self._split(upload(np.ascontiguousarray(batch))) for batch in checked])
        lease = self._row_staging.acquire(self._row_layout)
        for target, array in zip(lease.arrays, checked, strict=True):
            target[...] = array
        return _Source([self._split(batch) for batch in lease.tensors], lease)

    def _checked(self, batch: Array) -> Array:
        spec = self.ring.spec
        if batch.shape[1:] != spec.shape and batch.dtype == _BYTE:
            return spec.from_rows(batch)
        return spec.to_batch(batch) if batch.dtype != spec.dtype or batch.shape[1:] != spec.shape else batch

    def _split(self, batch: torch.Tensor) -> torch.Tensor:
        """Frames ``[stream, stack, byte]`` of whole words."""
        if batch.numel() == 1:
            # a single byte is contiguous with any strides, but only strides of 1 can be viewed as bytes
            batch = batch.as_strided(batch.shape, (1,) * batch.ndim)
        if self._whole and batch.data_ptr() % 8 == 0:
            return batch
        rows = batch.contiguous().view(-1).view(torch.uint8).view(1, self.n_streams, self.ring.spec.nbytes)
        frames = split_frames(rows, self.layout)[0]
        return frames.clone() if frames.data_ptr() % 8 else frames

    # ---- the heap ----

    def _heap_use(self) -> tuple[int, int]:
        """An upper bound of the bytes between the two ends of the ring after all writes so far, and its older end."""
        if self._launches == 0:
            return 0, 0
        notes = self.state.notes
        # the number first: a report may arrive at any time, and then the rest is no older than the number
        under_way = self._launches - int(notes[dt.REPORT_LAUNCH])
        head, tail = notes[: dt.REPORT_TAIL + 1].tolist()
        tail = min(tail, head)
        return head - tail + (self.memory.max_advance(under_way) if under_way else 0), tail

    def _has_space(self) -> bool:
        """Whether one more write certainly fits into the heap."""
        return self._heap_use()[0] + self._limits.advance <= self._limits.capacity

    def _wait_for_report(self) -> None:
        """Wait until the last write is done."""
        notes, end = self.state.notes, time.monotonic() + _WATCH
        while notes[dt.REPORT_LAUNCH] < self._launches and time.monotonic() < end:
            pass
        if notes[dt.REPORT_LAUNCH] < self._launches:
            self.memory.wait()

    def _reserve_tables(self) -> None:
        """Add keyframes and slots for segments before they run out."""
        notes = self.state.notes
        # reports of writes that were under way when keyframes were added do not count those
        if notes[dt.REPORT_LAUNCH] >= self._grown and notes[dt.REPORT_SPARE] < self._limits.spare:
            self._grown = self._launches + 1
            self._change_tables(self.memory.add_keyframes(self.state))
        if self._segments_after() > self.state.tables.n_slots:
            self._wait_for_report()
            if self._segments_after() > self.state.tables.n_slots:
                self._change_tables(self.memory.add_slots(self.state))

    def _segments_after(self) -> int:
        """Slots that a stream may need for this write, if all writes in flight use as many as they can."""
        notes = self.state.notes
        under_way = self._launches - int(notes[dt.REPORT_LAUNCH])  # first, as in `_heap_use`
        return int(notes[dt.REPORT_SEGMENTS]) + self.memory.max_segments(under_way + 1)

    def _reserve(self) -> None:
        """Compact the heap if much of it is unused, else grow it, as far as ``heap_bytes`` allows."""
        use, limit = self._heap_use()[0], self.ring.heap_bytes
        capacity = capacity_of(self.state.tables)
        live = self.memory.live_bytes(self.state.tables)
        in_flight = self.memory.max_advance(self.memory.n_ahead)
        wanted = max(capacity, live + in_flight)
        if live > use // 2 or wanted > capacity:
            wanted = max(wanted, live + live // 2 + in_flight)
        if limit is not None:
            wanted = max(min(wanted, limit), capacity)
        if wanted > capacity or live < use:
            self._repack(wanted)

    def _repack(self, capacity: int) -> None:
        self._change_tables(self.memory.repack(self.state, capacity, self._launches))

    def compact(self) -> None:
        self.recover()
        self.memory.wait()
        if self._launches:
            self._repack(capacity_of(self.state.tables))

    # ---- reading ----

    def read(self, indices: IndexBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.unfinished is not None:
            self.recover()
        wanted = indices.on(self.device)
        layout, size = self.layout, self.layout.frame_bytes
        if self.can_read_batch and wanted.shape[1]:
            # nothing to rearrange: decode directly into the result
            if out is None:
                out = torch.empty((*wanted.shape, *layout.spec.shape), dtype=torch.uint8, device=self.device)
            self.reader.read(wanted.contiguous(), out)
            return out
        padded_size = -(-size // 8) * 8
        frames = torch.empty((*wanted.shape, layout.stack, padded_size), dtype=torch.uint8, device=self.device)
        if wanted.shape[1] == 0:
            pass
        elif self._triton:
            self.reader.read(wanted.contiguous(), frames)
        else:
            read_rows_reference(self.state.tables, self.shape, self.n_streams, wanted, frames)
        # contiguous: frames without their padding may be a view
        joined = join_frames(frames if padded_size == size else frames[..., :size], layout)
        return joined.contiguous() if out is None else out.copy_(joined)

    def read_windows(
        self, indices: IndexBatch, newest_only: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        layout, flat = self.layout, indices.as_one_set()
        if not newest_only or layout.stack == 1:
            return super().read_windows(indices, False, out)
        if self.unfinished is not None:
            self.recover()
        wanted, spec, size = flat.on(self.device), layout.frame_spec, layout.frame_bytes
        frames = torch.empty((*wanted.shape, 1, -(-size // 8) * 8), dtype=torch.uint8, device=self.device)
        if wanted.shape[1] == 0:
            pass
        elif self._triton:
            self.reader.read(wanted.contiguous(), frames, newest_only=True)
        else:
            read_rows_reference(self.state.tables, self.shape, self.n_streams, wanted, frames)
        rows = frames[..., :size].reshape(-1).view(torch_dtype(spec.dtype))
        return put_in(out, rows.view(*indices.shape, *spec.shape))

    @property
    def can_be_captured(self) -> bool:
        return self._triton

    @property
    def can_read_batch(self) -> bool:
        return self._triton and self._whole and self.ring.spec.dtype == np.uint8

    def read_batch(
        self,
        indices: torch.Tensor,
        floats: torch.Tensor,
        actions: torch.Tensor,
        records: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode observations and gather the columns that belong to them (`Columns`), in one launch.

        ``indices [set, n]``, of at least one row, are on the device or in pinned memory.
        """
        if self.unfinished is not None:
            self.recover()
        if out is None:
            out = torch.empty((*indices.shape, *self.ring.spec.shape), dtype=torch.uint8, device=self.device)
        self.reader.read(indices, out, Columns(floats, actions, records))
        return out

    # ---- clearing, checking, copying ----

    def clear(self) -> None:
        """Make every index unwritten; keyframes and memory stay."""
        if self.unfinished != "clear":
            self.recover()
        self.memory.wait()
        self.unfinished = "clear"
        self.memory.clear(self.state, self._launches)
        self.__dict__.update(_wrapped=False, unfinished=None)

    def memory_usage(self) -> MemoryUsage:
        """Bytes in use, on the device and in pinned memory."""
        tables = self.state.tables
        frames = tables.keyframe_rows.numel() + tables.recent.numel()
        total = sum(table.nbytes for table in tables)
        staged = self._row_staging.nbytes
        staged += 0 if self._scratch is None else self._scratch.nbytes
        return MemoryUsage(tables.heap.nbytes, total - tables.heap.nbytes - frames, frames, staged)

    def check(self) -> None:
        self.recover()
        self.memory.check(self.state)
        if self._addresses.tolist() != self.memory.addresses(self.state.tables):
            raise AssertionError("the reading kernel would look up other tables")

    def frozen(self) -> DeviceFrameStore:
        self.recover()
        copied = object.__new__(DeviceFrameStore)
        copied.__dict__.update(self.__dict__, state=self.memory.to_host(self.state))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        self.recover()
        self.memory.wait()
        tables = {name: table.cpu().numpy() for name, table in self.state.tables._asdict().items()}
        names = ("ring", "layout", "shape", "_triton", "_launches", "_wrapped")
        return {name: self.__dict__[name] for name in names} | {"tables": tables, "report": self.state.notes.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tables, report = state.pop("tables"), state.pop("report")
        self.__dict__.update(state)
        # a store from a machine with a GPU: reference kernels read the same frames
        self._triton &= self.ring.place.device.type == "cuda"
        self._set_up()
        self.use_state(self.memory.from_arrays(tables, report))
