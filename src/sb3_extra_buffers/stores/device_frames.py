"""Frames as differences in a device's memory: encoded and decoded there, freed in the order of a ring."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.errors import CorruptPayloadError, HeapFullError, IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.kernels import delta_tables as dt
from sb3_extra_buffers.kernels import policy
from sb3_extra_buffers.kernels.delta_tables import FrameShape, WriteJob, capacity_of
from sb3_extra_buffers.kernels.delta_torch import read_rows_reference, write_rows_reference
from sb3_extra_buffers.kernels.launcher import Columns
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_base import (
    AttributeWrite,
    Batch,
    DeviceRing,
    DeviceStore,
    IndexBatch,
    on_host,
    put_in,
)
from sb3_extra_buffers.stores.device_layout import join_frames, split_frames
from sb3_extra_buffers.stores.device_memory import DeviceMemory, DeviceState
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.staging import Lease, Staging, StagingLayout
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceFrameStore", "DeviceFrameWrite"]

Array = npt.NDArray[Any]

_INT64 = np.dtype(np.int64)
_BYTE = np.dtype(np.uint8)
# writes that may be under way before one has to wait and see how full the heap is
_AHEAD = 16
# bytes of rows that wait to be read by the device, unless a step has more
_STAGED_BYTES = 8 << 20


class DeviceFrameWrite(AttributeWrite):
    """A step that is sure to fit: one launch, or a state that was written aside; then new attributes of the store."""

    __slots__ = ("job", "launch", "lease")

    def __init__(
        self, store: DeviceFrameStore, after: dict[str, Any], launch: int, job: WriteJob, lease: Lease | None
    ) -> None:
        super().__init__(store, after)
        self.launch, self.job, self.lease = launch, job, lease

    def commit(self) -> None:
        store = self.owner
        store.unfinished = self
        if self.lease is not None:
            store.launch(store.state, self.lease, self.job, self.launch)
        super().commit()

    def finish(self) -> None:
        if self.lease is not None and not self.owner.was_launched(self.launch):
            self.owner.launch(self.owner.state, self.lease, self.job, self.launch)
        super().commit()


class DeviceFrameStore(DeviceStore):
    """Frames as differences, in the memory of a GPU; ``place.pinned`` keeps the heap in pinned host memory.

    Every stream frees its segments in the order it made them, so the heap is a ring. Writing and reading launch
    kernels and wait for nothing. The host learns how full the heap is from a report that each write leaves in pinned
    memory, and waits only when the writes since then could fill it.

    The heap grows to ``heap_bytes`` at most; a step that does not fit raises `HeapFullError`. With ``triton=False``
    reference kernels run instead, in main memory.
    """

    layout: StackLayout
    # a write or "clear" while it is under way; the next call completes it after an exception
    unfinished: DeviceFrameWrite | str | None = None

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
        self.ring, self.layout = ring, layout
        self.n_steps, self.n_streams, self.n_sets = ring.n_steps, ring.n_streams, ring.n_sets
        self.device = ring.place.device
        self._triton = self.device.type == "cuda" if triton is None else triton
        per_segment = policy.DEVICE_FRAMES_PER_SEGMENT if codec.frames == DeltaCodec().frames else codec.frames
        # every frame of every step new, and segments no longer than they must be
        n_frames = ring.n_steps * ring.n_sets * layout.stack
        n_segments = math.ceil(n_frames / min(policy.DEVICE_MIN_FRAMES, per_segment)) + 2 * layout.stack + 8
        self.shape = FrameShape(layout.frame_bytes, layout.stack, per_segment, n_segments)
        self.memory = DeviceMemory(self.shape, ring.n_steps, ring.n_streams, ring.n_sets, ring.place)
        self.state = self.memory.allocate(ring.heap_bytes)
        self._launches = 0
        self._wrapped = False
        # frames are contiguous and whole words: rows are written and read without rearranging anything
        self._whole = (layout.axis == "first" or layout.stack == 1) and layout.frame_bytes % 8 == 0
        self._start_staging()

    @staticmethod
    def accepts(codec: Codec, layout: StackLayout) -> bool:
        # the kernels read no packed segments, and lengths of two bytes
        fits = isinstance(codec, DeltaCodec) and codec.pack_level == 0 and 0 < layout.frame_bytes <= 0xFFFF
        return fits and device_base.has_triton()

    def _start_staging(self) -> None:
        """Set up what belongs to this process: staging memory, kernels, and the rows written last."""
        ring = self.ring
        rows = (ring.n_sets, ring.n_streams, ring.spec.nbytes)
        depth = min(max(_STAGED_BYTES // max(math.prod(rows), 1), 3), _AHEAD // 2)
        self._staging = Staging(self.device, depth)
        words = ((*rows[:2], rows[2] // 8), _INT64) if self._whole else (rows, _BYTE)
        n_numbers = dt.JOB_INDICES + ring.n_sets * (1 + ring.n_streams)
        self._staging_layout = StagingLayout(((n_numbers,), _INT64), words)
        self._bound_kernels: Any = None
        # the last row of each stream, in staging memory, and the index of the first
        self._last: npt.NDArray[np.int64] | None = None
        self._last_index = 0

    def kernels(self, state: DeviceState) -> Any:
        """The Triton kernels, bound to the tables of ``state``."""
        if self._bound_kernels is None or self._bound_kernels.tables is not state.tables:
            from sb3_extra_buffers.kernels.delta_triton import DeviceKernels  # optional: needs Triton

            self._bound_kernels = DeviceKernels(state.tables, self.shape)
        return self._bound_kernels

    # ---- writing ----

    def plan(self, step: int, batches: Sequence[Batch]) -> DeviceFrameWrite:
        """Prepare to write ``step``, the one after the last: one batch of observations, or of their bytes, per set."""
        if self.unfinished is not None:
            self.recover()
        if not 0 <= step < self.n_steps:
            raise IndexOutOfRangeError(f"step {step} is outside of a ring of {self.n_steps} steps")
        # unknown until this write is committed: the staging memory of the last rows may be used again
        last, self._last = self._last, None
        if self._launches and self.state.notes[0, dt.REPORT_SPARE] < self.n_streams:
            self.state = self.memory.add_keyframes(self.state)
        lease = self._stage([on_host(batch) for batch in batches])
        rows = lease.arrays[1]
        first, n_obs = step * self.n_streams, self.n_steps * self.n_streams
        indices = tuple(range(first, first + self.n_sets * n_obs, n_obs))
        oldest = (step + 1) % self.n_steps if self._wrapped else 0
        job = WriteJob(step, oldest, indices, self._launches & 1, 0, self._last_index, self._relations(last, rows))
        after: dict[str, Any] = {"_launches": self._launches + 1, "unfinished": None}
        if step == self.n_steps - 1:
            after["_wrapped"] = True
        if self._whole:
            after["_last"], after["_last_index"] = rows[-1], indices[-1]
        use, tail = self._heap_use()
        if use + self.memory.max_advance(1) <= capacity_of(self.state.tables):
            return self._plan_launch(lease, job._replace(tail=tail), after)
        return self._plan_near_limit(lease, job, after)

    def recover(self) -> None:
        """Complete what an exception interrupted."""
        if isinstance(self.unfinished, DeviceFrameWrite):
            self.unfinished.finish()
        elif self.unfinished is not None:
            self.clear()

    def _plan_launch(self, lease: Lease, job: WriteJob, after: dict[str, Any]) -> DeviceFrameWrite:
        launch = self._launches + 1
        if self._triton:
            self.kernels(self.state)  # this can fail; the launch cannot
            return DeviceFrameWrite(self, after, launch, job, lease)
        # the reference kernel can be interrupted
        after["state"] = self._write_aside(lease, job, launch)
        return DeviceFrameWrite(self, after, launch, job, None)

    def _plan_near_limit(self, lease: Lease, job: WriteJob, after: dict[str, Any]) -> DeviceFrameWrite:
        """Wait, look, and reserve; if the step may still not fit, write it aside and see."""
        memory, launch = self.memory, self._launches + 1
        memory.wait()
        if self._launches and self._heap_use()[0] + memory.max_advance(_AHEAD) > capacity_of(self.state.tables):
            self._reserve()
        use, tail = self._heap_use()
        if use + memory.max_advance(1) <= capacity_of(self.state.tables):
            return self._plan_launch(lease, job._replace(tail=tail), after)
        written = self._write_aside(lease, job._replace(tail=tail), launch)
        if written.tables.counters[dt.NEEDED] and self._launches:
            # it may fit once the heap is packed
            self._repack(capacity_of(self.state.tables))
            written = self._write_aside(lease, job._replace(tail=self._heap_use()[1]), launch)
        needed = int(written.tables.counters[dt.NEEDED])
        if needed:
            tables, limit = self.state.tables, self.ring.heap_bytes
            needed += int(written.tables.counters[dt.HEAD]) - int(tables.counters[dt.HEAD])
            raise HeapFullError(needed, memory.live_bytes(tables), capacity_of(tables) if limit is None else limit)
        after["state"] = written
        return DeviceFrameWrite(self, after, launch, job, None)

    def _write_aside(self, lease: Lease, job: WriteJob, launch: int) -> DeviceState:
        """The state after a write; the store's own stays as it is."""
        state = self.memory.copy_for_write(self.state)
        self.launch(state, lease, job, launch)
        self.memory.wait()
        return state

    def launch(self, state: DeviceState, lease: Lease, job: WriteJob, launch: int) -> None:
        """Write to the tables of ``state``; with Triton, by a single launch."""
        if not self._triton:
            rows = torch.from_numpy(lease.arrays[1].view(np.uint8))
            write_rows_reference(state.tables, self.shape, split_frames(rows, self.layout), job, state.report, launch)
            return
        lease.arrays[0][:] = job.pack(state.tables, launch, self.n_streams)
        if self._whole:
            # read in place: so few bytes are not worth a copy
            self.kernels(state).write(*lease.tensors, state.report)
            self._staging.release(lease)
        else:
            numbers, rows = self._staging.send(lease)
            self.kernels(state).write(numbers, split_frames(rows, self.layout), state.report)

    def was_launched(self, launch: int) -> bool:
        """Whether the write numbered ``launch`` reached the device."""
        if self._launches >= launch:
            return True
        self.memory.wait()
        return int(self.state.notes[:, dt.REPORT_LAUNCH].min()) >= launch

    def _stage(self, batches: Sequence[Array]) -> Lease:
        """Copy ``batches`` to memory that the device can read."""
        spec = self.ring.spec
        if len(batches) != self.n_sets:
            raise SpecMismatchError(f"expected {self.n_sets} batches, one per set, got {len(batches)}")
        lease = self._staging.acquire(self._staging_layout)
        targets = lease.arrays[1].view(spec.dtype).reshape(-1, self.n_streams, *spec.shape)
        for target, batch in zip(targets, batches, strict=True):
            if len(batch) != self.n_streams:
                raise SpecMismatchError(
                    f"expected an observation for each of {self.n_streams} streams, got {len(batch)}"
                )
            if batch.shape[1:] != spec.shape and batch.dtype == _BYTE:
                batch = spec.from_rows(batch)
            elif batch.dtype != spec.dtype or batch.shape[1:] != spec.shape:
                batch = spec.to_batch(batch)
            target[...] = batch
        return lease

    def _relations(self, last: npt.NDArray[np.int64] | None, rows: npt.NDArray[np.int64]) -> tuple[int, ...]:
        """The relation of each row to the previous one of its stream, so that known frames need not be sent."""
        if not self._whole:
            return ()
        relations: list[int] = []
        for number, words in enumerate(rows):
            if last is None:
                relations += [dt.UNKNOWN] * self.n_streams
            else:
                # obs usually equals the last next_obs; every other row is usually shifted
                likely_shifted = number > 0 or self.n_sets == 1
                relations += _relate(last, words, self.layout.stack, likely_shifted)
            last = words
        return tuple(relations)

    # ---- the heap ----

    def _heap_use(self) -> tuple[int, int]:
        """An upper bound of the bytes between the two ends of the ring after all writes so far, and its older end."""
        if self._launches == 0:
            return 0, 0
        heads, tails, _, launches = zip(*self.state.notes.tolist(), strict=True)
        head, tail = max(heads), min(*tails, *heads)
        under_way = self._launches - min(launches)
        # the entries of one launch may become visible one by one
        return head - tail + (self.memory.max_advance(under_way + 1) if under_way else 0), tail

    def _reserve(self) -> None:
        """Pack the heap if much of it is dead, else grow it, as far as ``heap_bytes`` allows."""
        use, limit = self._heap_use()[0], self.ring.heap_bytes
        capacity = capacity_of(self.state.tables)
        live = self.memory.live_bytes(self.state.tables)
        wanted = max(capacity, live + self.memory.max_advance(_AHEAD))
        if live > use // 2 or wanted > capacity:
            wanted = max(capacity + capacity // 2, wanted)
        if limit is not None:
            wanted = max(min(wanted, limit), capacity)
        if wanted > capacity or live < use:
            self._repack(wanted)

    def _repack(self, capacity: int) -> None:
        self.state = self.memory.repack(self.state, capacity, self._launches)

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
            # nothing to rearrange: decode straight into the result
            if out is None:
                out = torch.empty((*wanted.shape, *layout.spec.shape), dtype=torch.uint8, device=self.device)
            self.kernels(self.state).read(wanted.contiguous(), out)
            return out
        padded_size = -(-size // 8) * 8
        frames = torch.empty((*wanted.shape, layout.stack, padded_size), dtype=torch.uint8, device=self.device)
        if wanted.shape[1] == 0:
            pass
        elif self._triton:
            self.kernels(self.state).read(wanted.contiguous(), frames)
        else:
            damaged = read_rows_reference(self.state.tables, self.shape, wanted, frames)
            if damaged >= 0:
                raise CorruptPayloadError(f"segment {damaged} of the heap is damaged and cannot be decoded")
        return put_in(out, join_frames(frames if padded_size == size else frames[..., :size], layout))

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
        self.kernels(self.state).read(indices, out, Columns(floats, actions, records))
        return out

    # ---- clearing, checking, copying ----

    def clear(self) -> None:
        """Make every index unwritten; keyframes and memory stay."""
        if isinstance(self.unfinished, DeviceFrameWrite):
            self.unfinished.finish()
        self.memory.wait()
        self.unfinished = "clear"
        self.memory.clear(self.state, self._launches)
        self.__dict__.update(_wrapped=False, _last=None, unfinished=None)

    def memory_usage(self) -> MemoryUsage:
        """Bytes in use, on the device and in pinned memory."""
        tables = self.state.tables
        frames = tables.keyframe_rows.numel() + tables.recent.numel()
        payload = tables.heap.numel() + tables.stage.numel()
        total = sum(table.numel() * table.element_size() for table in tables)
        return MemoryUsage(payload, total - payload - frames, frames, self._staging.nbytes)

    def check(self) -> None:
        self.recover()
        self.memory.check(self.state)

    def frozen(self) -> DeviceFrameStore:
        self.recover()
        copied = object.__new__(DeviceFrameStore)
        copied.__dict__.update(self.__dict__, state=self.memory.to_host(self.state))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        self.recover()
        self.memory.wait()
        tables = {name: table.cpu().numpy() for name, table in self.state.tables._asdict().items()}
        names = ("ring", "layout", "shape", "_triton", "_launches", "_wrapped", "_whole")
        return {name: self.__dict__[name] for name in names} | {"tables": tables, "report": self.state.notes.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tables, report = state.pop("tables"), state.pop("report")
        self.__dict__.update(state)
        ring = self.ring
        self.n_steps, self.n_streams, self.n_sets = ring.n_steps, ring.n_streams, ring.n_sets
        self.device = ring.place.device
        # a store from a machine with a GPU: reference kernels read the same segments
        self._triton &= self.device.type == "cuda"
        self.memory = DeviceMemory(self.shape, ring.n_steps, ring.n_streams, ring.n_sets, ring.place)
        self.state = self.memory.from_arrays(tables, report)
        self._start_staging()


def _relate(last: npt.NDArray[np.int64], words: npt.NDArray[np.int64], stack: int, likely_shifted: bool) -> list[int]:
    """The relation of each row of ``words[stream]`` to ``last[stream]``; the likely one is tried first."""
    frame_words = words.shape[1] // stack
    relations: npt.NDArray[np.int64] | None = None
    for relation in (dt.SHIFTED, dt.SAME) if likely_shifted else (dt.SAME, dt.SHIFTED):
        if relation == dt.SAME:
            equal = last == words
        elif stack > 1:
            equal = last[:, frame_words:] == words[:, :-frame_words]
        else:
            continue
        if relations is None:
            if equal.all():
                return [relation] * len(words)
            relations = np.zeros(len(words), np.int64)
        relations[equal.all(axis=1) & (relations == dt.UNKNOWN)] = relation
    return [dt.UNKNOWN] * len(words) if relations is None else relations.tolist()
