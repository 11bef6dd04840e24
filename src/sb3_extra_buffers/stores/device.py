"""Frames as differences in a device's memory: written and read there, in the order of a ring."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.delta import DeltaCodec, padded
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import CorruptPayloadError, HeapFullError, IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.kernels import delta_torch as kernels
from sb3_extra_buffers.kernels.delta_torch import SLACK, DeviceTables, FrameShape, Write, capacity_of
from sb3_extra_buffers.kernels.state import NONE
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.staging import Layout, Lease, Staging, torch_dtype
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceFrameStore", "DeviceWrite", "has_triton", "suits_device"]

# the lengths of a segment's differences take two bytes
_LARGEST_FRAME = 0xFFFF
# frames to a segment, unless the codec asks for another number than its usual: a row is read by as many programs as it
# has segments, each walking its own, so that short ones are read sooner
_SHORT = 4
_INT64 = np.dtype(np.int64)
_BYTE = np.dtype(np.uint8)
# steps that may be under way before a write has to wait and see how full the heap is
_AHEAD = 16
# tables of which a write changes nothing but free places
_SHARED = ("heap", "scratch")
# rows that wait to be read by the device, unless a step has more
_STAGED_BYTES = 8 << 20


def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def suits_device(layout: StackLayout, codec: object) -> bool:
    """Whether a `DeviceFrameStore` can hold these observations."""
    return isinstance(codec, DeltaCodec) and codec.pack_level == 0 and 0 < layout.frame_bytes <= _LARGEST_FRAME


class DeviceWrite:
    """A step of a `DeviceFrameStore` that is sure to fit: one launch, or tables that were written aside."""

    __slots__ = ("after", "number", "staged", "store", "write")
    may_fail = False

    def __init__(
        self, store: DeviceFrameStore, number: int, after: dict[str, Any], staged: Lease | None, write: Write
    ) -> None:
        self.store, self.number, self.staged, self.write = store, number, staged, write
        # the store's attributes once the step is written
        self.after = after

    def commit(self) -> None:
        """Write the step."""
        store = self.store
        store._unfinished = self
        if self.staged is not None:
            store._launch(store.tables, store._report, self.staged, self.write, self.number)
        # one call, which no signal can interrupt
        store.__dict__.update(self.after)

    def finish(self) -> None:
        """`commit`, where an exception may have interrupted it anywhere."""
        store = self.store
        if self.staged is not None and store._launches < self.number:
            store._wait()
            if int(store._notes[:, 3].min()) < self.number:
                store._launch(store.tables, store._report, self.staged, self.write, self.number)
        store.__dict__.update(self.after)


class DeviceFrameStore:
    """``n_steps`` steps of ``n_streams`` streams, each step one observation a stream and set (``obs``, ``next_obs``).

    Steps are written in turn and overwrite the oldest, so every stream frees its segments in the order in which it made
    them, and the heap is a ring. Tables, frames and heap lie on ``device``, the heap on the host with ``pinned``;
    writing and reading start kernels there and wait for nothing. The host knows the heap's fill from a note that each
    write leaves in pinned memory, and waits only when what may have been written since could fill it.

    The heap grows to ``heap_bytes`` at most. A write that does not fit raises `HeapFullError` and changes nothing.
    Writing is a transaction: `plan` does all that can fail, aside; a launch or one assignment then makes the step
    visible. An exception in between is made good by `DeviceWrite.finish`, at the latest when the store is used next.
    """

    # a write or "clear", while it is under way
    _unfinished: DeviceWrite | str | None = None

    def __init__(
        self,
        layout: StackLayout,
        n_steps: int,
        n_streams: int,
        codec: DeltaCodec,
        device: torch.device | str,
        n_sets: int = 1,
        heap_bytes: int | None = None,
        pinned: bool = False,
        triton: bool | None = None,
    ) -> None:
        self.layout, self.codec = layout, codec
        self.n_steps, self.n_streams, self.n_sets = n_steps, n_streams, n_sets
        self.device = torch.device(device)
        self.pinned = pinned
        self.limit = heap_bytes
        self._triton = self.device.type == "cuda" if triton is None else triton
        per_segment = _SHORT if codec.frames == DeltaCodec().frames else codec.frames
        least = min(4, per_segment)
        # every frame of every step new, no more of them to a segment than must be
        segments = math.ceil(n_steps * n_sets * layout.stack / least) + 2 * layout.stack + 8
        self.shape = FrameShape(layout.frame_bytes, layout.stack, per_segment, segments)
        self.tables = self._allocate()
        self._launches = 0
        # whole words, one frame after the other: rows can be written and read without rearranging anything
        self._whole = (layout.axis == "first" or layout.stack == 1) and layout.frame_bytes % 8 == 0
        self._report = self._make_report()
        self._notes = self._report.numpy()
        # no kernel has said yet how many are unused
        self._notes[:, 2] = self.tables.keyframe_refs.numel()
        self._wrapped = False
        self._last_index = 0  # the first of those written last
        self._bound: Any = None
        self._start_staging()

    def _start_staging(self) -> None:
        """Where rows wait to be read by the device; those of many streams take so much room that fewer must do."""
        step_bytes = self.n_sets * self.n_streams * self.layout.spec.nbytes
        self._staging = Staging(self.device, min(max(_STAGED_BYTES // max(step_bytes, 1), 3), _AHEAD // 2))
        rows = (self.n_sets, self.n_streams, self.layout.spec.nbytes)
        words = ((*rows[:2], rows[2] // 8), _INT64) if self._whole else (rows, _BYTE)
        # as many numbers as `make_job` makes, then the rows
        self._job = Layout(((8 + self.n_sets * (1 + self.n_streams),), _INT64), words)
        # the rows written last, where the device read them
        self._last: npt.NDArray[np.int64] | None = None

    def _allocate(self) -> DeviceTables:
        shape, streams, device = self.shape, self.n_streams, self.device
        n_obs = self.n_steps * streams * self.n_sets
        n_segments = shape.segments_per_stream * streams
        n_keyframes = 4 * streams + 8

        def new(size: Any, dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
            return torch.full(size, fill, dtype=dtype, device=device)

        rows = new((streams, kernels.N_COLUMNS), torch.int64)
        rows[:, kernels.OPEN] = -1
        rows[:, kernels.HELD : kernels.HELD + kernels.N_HELD] = NONE
        return DeviceTables(
            heap=self._new_heap(self._first_capacity()),
            stage=new((streams * shape.room,), torch.uint8),
            starts=new((n_segments,), torch.int64),
            lengths=new((n_segments,), torch.int32),
            keyframes=new((n_segments,), torch.int32, NONE),
            frame_ids=new((n_obs, shape.stack), torch.int32),
            floors=new((self.n_steps, streams), torch.int32),
            streams=rows,
            recent=new((streams, shape.places, shape.keyframe_bytes), torch.uint8),
            recent_ids=new((streams, shape.places), torch.int32, NONE),
            recent_segments=new((streams, shape.places), torch.int32),
            keyframe_rows=new((n_keyframes, shape.keyframe_bytes), torch.uint8),
            keyframe_refs=new((n_keyframes,), torch.int32),
            published=new((2, streams, kernels.N_PUBLISHED), torch.int32, NONE),
            counters=new((4,), torch.int64),
            tails=new((streams,), torch.int64, kernels.NOWHERE),
            scratch=new((streams, padded(shape.frame_bytes) + 64), torch.uint8),
        )

    def _first_capacity(self) -> int:
        wanted = max(1 << 20, self._advance(2))
        return wanted if self.limit is None else max(min(wanted, self.limit), 1)

    def _new_heap(self, capacity: int) -> torch.Tensor:
        # not zeroed: nothing that was not written counts
        capacity = max(capacity // 8, 1) * 8 + SLACK
        if self.pinned:
            return torch.empty(capacity, dtype=torch.uint8, pin_memory=True)
        return torch.empty(capacity, dtype=torch.uint8, device=self.device)

    def _make_report(self) -> torch.Tensor:
        report = torch.zeros((self.n_streams, 4), dtype=torch.int64)
        return report.pin_memory() if self.device.type == "cuda" else report

    def _kernels(self, tables: DeviceTables) -> Any:
        """The kernels, bound to ``tables``."""
        if self._bound is None or self._bound.tables is not tables:
            from sb3_extra_buffers.kernels.delta_triton import DeviceKernels  # needs Triton, as nothing else here does

            self._bound = DeviceKernels(tables, self.shape)
        return self._bound

    # ---- writing ----

    def write(self, step: int, batches: Sequence[np.ndarray[Any, Any]]) -> None:
        """Store one observation per stream and set, or its bytes, as step ``step``, the one after the last written."""
        plan = self.plan(step, batches)
        try:
            plan.commit()
        except BaseException:
            plan.finish()
            raise

    def plan(self, step: int, batches: Sequence[np.ndarray[Any, Any]]) -> DeviceWrite:
        """A step that is checked, staged and sure to fit; nothing that can be read changes."""
        if self._unfinished is not None:
            self._recover()
        if not 0 <= step < self.n_steps:
            raise IndexOutOfRangeError(f"step {step} is outside of a ring of {self.n_steps} steps")
        # until this is written nothing is known of what comes next: others may get the memory of the last rows
        before, self._last = self._last, None
        self._grow_keyframes()
        staged = self._stage(batches)
        rows = staged.arrays[1]
        first, n_obs = step * self.n_streams, self.n_steps * self.n_streams
        indices = tuple(range(first, first + self.n_sets * n_obs, n_obs))
        write = Write(
            step, (step + 1) % self.n_steps if self._wrapped else 0, indices, self._launches & 1, 0,
            self._last_index, self._relate(before, rows),
        )  # fmt: skip
        number = self._launches + 1
        after: dict[str, Any] = {"_launches": number, "_unfinished": None}
        if step == self.n_steps - 1:
            after["_wrapped"] = True
        if self._whole:
            after["_last"], after["_last_index"] = rows[-1], indices[-1]
        use, tail = self._known()
        if use + self._advance(1) <= capacity_of(self.tables):
            return self._plan_launch(staged, write._replace(tail=tail), number, after)
        return self._plan_near_limit(staged, write, number, after)

    def _recover(self) -> None:
        """Finish what an exception interrupted."""
        if isinstance(self._unfinished, DeviceWrite):
            self._unfinished.finish()
        elif self._unfinished is not None:
            self.clear()

    def _plan_launch(self, staged: Lease, write: Write, number: int, after: dict[str, Any]) -> DeviceWrite:
        if self._triton:
            self._kernels(self.tables)  # what could fail, now
            return DeviceWrite(self, number, after, staged, write)
        # the reference is no single launch
        aside = self._write_aside(staged, write, number)
        return DeviceWrite(self, number, after | aside, None, write)

    def _write_aside(self, staged: Lease, write: Write, number: int) -> dict[str, Any]:
        """The attributes that a write changes, made beside those of now."""
        tables = DeviceTables(*(
            table if name in _SHARED else table.clone() for name, table in self.tables._asdict().items()
        ))  # fmt: skip
        report = self._make_report()
        self._launch(tables, report, staged, write, number)
        self._wait()
        return {"tables": tables, "_report": report, "_notes": report.numpy()}

    def _stage(self, batches: Sequence[np.ndarray[Any, Any]]) -> Lease:
        """Copy what is to be written to where the device can read it, with room for what the kernel is told."""
        spec = self.layout.spec
        if len(batches) != self.n_sets:
            raise SpecMismatchError(f"expected {self.n_sets} batches, one of each set, got {len(batches)}")
        staged = self._staging.acquire(self._job)
        places = staged.arrays[1].view(spec.dtype).reshape(-1, self.n_streams, *spec.shape)
        for place, batch in zip(places, batches, strict=True):
            if len(batch) != self.n_streams:
                raise SpecMismatchError(
                    f"expected an observation for each of {self.n_streams} streams, got {len(batch)}"
                )
            if batch.shape[1:] != spec.shape and batch.dtype == _BYTE:
                batch = spec.from_rows(batch)
            elif batch.dtype != spec.dtype or batch.shape[1:] != spec.shape:
                batch = spec.to_batch(batch)
            place[...] = batch
        return staged

    def _relate(self, before: npt.NDArray[np.int64] | None, rows: npt.NDArray[np.int64]) -> tuple[int, ...]:
        """How each row relates to its stream's row ``before`` it: what is known already need not be sent."""
        if not self._whole:
            return ()
        relations: list[int] = []
        for place, words in enumerate(rows):
            if before is None:
                relations += [kernels.UNKNOWN] * self.n_streams
            else:
                # the first set goes on where the last step ended, as a rule; the others move on
                moves = place > 0 or self.n_sets == 1
                relations += _relations(before, words, self.layout.stack, moves)
            before = words
        return tuple(relations)

    def _frames(self, flat: torch.Tensor) -> torch.Tensor:
        """``[set, stream, stack, whole words]`` of rows ``[set, stream, byte]``."""
        layout, size = self.layout, self.layout.frame_bytes
        n_sets, n_streams = flat.shape[:2]
        words = -(-size // 8) * 8
        if layout.axis == "last" and layout.stack > 1:
            unit = layout.spec.shape[-1] // layout.stack * layout.spec.dtype.itemsize
            frames = flat.view(n_sets, n_streams, size // unit, layout.stack, unit).transpose(2, 3)
            frames = frames.reshape(n_sets, n_streams, layout.stack, size).contiguous()
        else:
            frames = flat.view(n_sets, n_streams, layout.stack, size)
        return frames if words == size else torch.nn.functional.pad(frames, (0, words - size))

    def _launch(self, tables: DeviceTables, report: torch.Tensor, staged: Lease, write: Write, number: int) -> None:
        """Write to ``tables``; with Triton, by a single launch that notes its ``number`` in ``report``."""
        if not self._triton:
            rows = torch.from_numpy(staged.arrays[1].view(np.uint8))
            kernels.write_rows_reference(tables, self.shape, self._frames(rows), write)
            report[:, 0], report[:, 1] = tables.counters[kernels.HEAD], tables.tails
            report[:, 2], report[:, 3] = tables.counters[kernels.SPARE], number
            return
        from sb3_extra_buffers.kernels.delta_triton import make_job

        staged.arrays[0][:] = make_job(tables, write, number, self.n_streams)
        if self._whole:
            # read where it lies: there is less of it than a copy is worth
            self._kernels(tables).write(*staged.tensors, report)
            self._staging.release(staged)
        else:
            job, rows = self._staging.send(staged)
            self._kernels(tables).write(job, self._frames(rows), report)

    def _advance(self, n_launches: int) -> int:
        """Bytes by which ``n_launches`` writes can move the end of the heap on."""
        shape = self.shape
        per_launch = self.n_sets * shape.stack * (shape.frame_bytes + 4)
        # open segments, and what is skipped where the ring closes
        return self.n_streams * (n_launches * per_launch + 3 * shape.room)

    def _known(self) -> tuple[int, int]:
        """Bytes between the ends of the ring, at most, after every write so far; and where its older end is."""
        if self._launches == 0:
            return 0, 0
        report: list[list[int]] = self._notes.tolist()
        heads, tails, _, launches = zip(*report, strict=True)
        head, tail = max(heads), min(*tails, *heads)
        under_way = self._launches - min(launches)
        # the notes of one launch may become visible one by one
        return head - tail + (self._advance(under_way + 1) if under_way else 0), tail

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _plan_near_limit(self, staged: Lease, write: Write, number: int, after: dict[str, Any]) -> DeviceWrite:
        """Wait, look, and make room; where there is none, write aside, and see whether it fits."""
        self._wait()
        if self._launches and self._known()[0] + self._advance(_AHEAD) > capacity_of(self.tables):
            self._reserve()
        use, tail = self._known()
        if use + self._advance(1) <= capacity_of(self.tables):
            return self._plan_launch(staged, write._replace(tail=tail), number, after)
        aside, needed = self._try(staged, write, number)
        if needed and self._launches:
            # packed, it may yet fit
            self._repack(capacity_of(self.tables))
            aside, needed = self._try(staged, write, number)
        if needed:
            capacity = capacity_of(self.tables)
            raise HeapFullError(needed, self._live_bytes(), capacity if self.limit is None else self.limit)
        return DeviceWrite(self, number, after | aside, None, write)

    def _try(self, staged: Lease, write: Write, number: int) -> tuple[dict[str, Any], int]:
        """What a write makes of the attributes, and 0; or how many bytes would be needed."""
        aside = self._write_aside(staged, write._replace(tail=self._known()[1]), number)
        counters, before = aside["tables"].counters, self.tables.counters
        missing = int(counters[kernels.NEEDED])
        return aside, missing and missing + int(counters[kernels.HEAD]) - int(before[kernels.HEAD])

    def _reserve(self) -> None:
        """Pack the heap if much of it is dead, lengthen it if not, as far as ``heap_bytes`` allows."""
        use = self._known()[0]
        capacity = capacity_of(self.tables)
        live = self._live_bytes()
        wanted = max(capacity, live + self._advance(_AHEAD))
        if live > use // 2 or live + self._advance(_AHEAD) > capacity:
            wanted = max(capacity + capacity // 2, wanted)
        if self.limit is not None:
            wanted = max(min(wanted, self.limit), capacity)
        if wanted > capacity or live < use:
            self._repack(wanted)

    def compact(self) -> None:
        """Lay what is live one after the other."""
        self._recover()
        self._wait()
        if self._launches:
            self._repack(capacity_of(self.tables))

    def _live_segments(self) -> torch.Tensor:
        """Numbers of the sealed segments that a step refers to."""
        per_stream = self.shape.segments_per_stream
        rows = self.tables.streams.cpu().numpy()
        numbers = [
            stream * per_stream + np.arange(row[kernels.FLOOR], row[kernels.OPENED]) % per_stream
            for stream, row in enumerate(rows)
        ]
        segments = torch.from_numpy(np.concatenate(numbers)).to(self.device)
        return segments[self.tables.starts[segments] >= 0]

    def _live_bytes(self) -> int:
        return int(self.tables.lengths[self._live_segments()].sum())

    def _repack(self, capacity: int) -> None:
        """Copy live segments to a new heap. The old one stays whole until the tables name the new."""
        tables = self.tables
        segments = self._live_segments()
        segments = segments[torch.argsort(tables.starts[segments])]
        lengths = tables.lengths[segments].to(torch.int64)
        ends = torch.cumsum(lengths, 0)
        begins = ends - lengths
        old = tables.starts[segments] % capacity_of(tables)
        heap = self._new_heap(capacity)
        for first in range(0, len(segments), 4096):
            part = slice(first, first + 4096)
            shift = torch.repeat_interleave(old[part] - begins[part], lengths[part])
            low, high = (int(begins[first]), int(ends[part][-1])) if len(ends[part]) else (0, 0)
            source = torch.arange(low, high, device=self.device) + shift
            heap[low:high] = tables.heap[source.to(tables.heap.device)]
        head = int(ends[-1]) if len(ends) else 0
        starts, counters = tables.starts.clone(), tables.counters.clone()
        starts[segments] = begins
        counters[kernels.HEAD] = head
        rows = tables.streams.cpu().numpy()
        per_stream = self.shape.segments_per_stream
        oldest = np.arange(self.n_streams) * per_stream + rows[:, kernels.FLOOR] % per_stream
        first_starts = starts.cpu().numpy()[oldest]
        known = (rows[:, kernels.FLOOR] < rows[:, kernels.OPENED]) & (first_starts >= 0)
        tails = torch.from_numpy(np.where(known, first_starts, kernels.NOWHERE))
        report = self._make_report()
        report.copy_(self._report)
        report[:, 0], report[:, 1], report[:, 3] = head, tails, self._launches
        packed = tables._replace(heap=heap, starts=starts, counters=counters, tails=tails.to(self.device))
        # one call, which no signal can interrupt: the report counts places of this heap
        self.__dict__.update(tables=packed, _report=report, _notes=report.numpy())

    def _grow_keyframes(self) -> None:
        """Have unused keyframes for every stream; what was there is copied on the device, in its turn."""
        if self._launches and self._notes[0, 2] < self.n_streams:
            tables = self.tables
            n_keyframes = tables.keyframe_refs.numel()
            more = max(n_keyframes // 2, 2 * self.n_streams)
            self.tables = tables._replace(
                keyframe_rows=torch.nn.functional.pad(tables.keyframe_rows, (0, 0, 0, more)),
                keyframe_refs=torch.nn.functional.pad(tables.keyframe_refs, (0, more)),
            )
            self._report[:, 2] = more

    # ---- reading ----

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        """Decode ``cells`` (int64 ``[set, n]`` on the device) into fresh observations ``[set, n, *shape]``."""
        if self._unfinished is not None:
            self._recover()
        layout, size = self.layout, self.layout.frame_bytes
        words = -(-size // 8) * 8
        if self.direct and indices.shape[1]:
            # nothing to rearrange: decode straight into what is returned
            fresh = torch.empty((*indices.shape, *layout.spec.shape), dtype=torch.uint8, device=self.device)
            self._kernels(self.tables).read(indices.contiguous(), fresh)
            return fresh
        out = torch.empty((*indices.shape, layout.stack, words), dtype=torch.uint8, device=self.device)
        if indices.shape[1] == 0:
            pass
        elif self._triton:
            self._kernels(self.tables).read(indices.contiguous(), out)
        else:
            damaged = kernels.read_rows_reference(self.tables, self.shape, indices, out)
            if damaged >= 0:
                raise CorruptPayloadError(f"segment {damaged} of the heap is damaged and cannot be decoded")
        return join_frames(out if words == size else out[..., :size], layout)

    @property
    def direct(self) -> bool:
        """Whether `read_batch` can be used: a GPU decodes straight into what is returned."""
        return self._triton and self._whole and self.layout.spec.dtype == np.uint8

    def read_batch(self, lease: Lease) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`read` with what else belongs to the rows: fresh observations, numbers and actions, in one launch.

        ``lent`` holds cells ``[set, n]``, float32 ``[2, n, ...]`` and actions ``[n, ...]``, at least one row of each.
        """
        from sb3_extra_buffers.kernels.delta_triton import Columns

        indices, floats_from, actions_from = lease.tensors
        device = self.device
        fresh = torch.empty((*indices.shape, *self.layout.spec.shape), dtype=torch.uint8, device=device)
        floats = torch.empty(floats_from.shape, dtype=torch.float32, device=device)
        actions = torch.empty(actions_from.shape, dtype=actions_from.dtype, device=device)
        self._kernels(self.tables).read(indices, fresh, Columns(floats, floats_from, actions, actions_from))
        return fresh, floats, actions

    # ---- the rest ----

    def clear(self) -> None:
        """Forget every observation; keep keyframes and the memory."""
        if isinstance(self._unfinished, DeviceWrite):
            self._unfinished.finish()
        self._wait()
        tables = self.tables
        rows = tables.streams
        refs = torch.zeros(tables.keyframe_refs.numel() + 1, dtype=torch.int32, device=self.device)
        # may be run again from the start wherever it was interrupted
        self._unfinished = "clear"
        rows[:, kernels.OPEN] = -1
        rows[:, kernels.FLOOR] = rows[:, kernels.OPENED]
        tables.frame_ids.zero_()
        tables.recent_ids.fill_(NONE)
        tables.tails.fill_(kernels.NOWHERE)
        tables.counters.zero_()
        held = rows[:, kernels.HELD : kernels.HELD + kernels.N_HELD].flatten()
        refs.index_add_(0, torch.where(held >= 0, held, tables.keyframe_refs.numel()), torch.ones_like(held).int())
        tables.keyframe_refs.copy_(refs[:-1])
        self._report[:, 0], self._report[:, 1], self._report[:, 3] = 0, kernels.NOWHERE, self._launches
        self.__dict__.update(_wrapped=False, _last=None, _unfinished=None)

    def memory_usage(self) -> MemoryUsage:
        """What is held on the device (and, with ``pinned``, beside it)."""
        tables = self.tables
        frames = tables.keyframe_rows.numel() + tables.recent.numel()
        payload = tables.heap.numel() + tables.stage.numel()
        total = sum(table.numel() * table.element_size() for table in tables)
        dense = tables.frame_ids.shape[0] * self.layout.spec.nbytes
        return MemoryUsage(payload, total - payload - frames, frames, self._staging.nbytes, dense)

    def check(self) -> None:
        """Raise if the tables disagree with each other or with the heap."""
        self._recover()
        self._wait()
        tables = DeviceTables(*(table.cpu() for table in self.tables))
        segments = self._live_segments().cpu()
        starts, lengths = tables.starts[segments], tables.lengths[segments]
        order = torch.argsort(starts)
        starts, ends = starts[order], (starts + lengths)[order]
        if len(starts):
            head = int(tables.counters[kernels.HEAD])
            if bool((ends[:-1] > starts[1:]).any()) or int(ends[-1]) > head:
                raise AssertionError("segments overlap or leave the heap")
            if head - int(starts[0]) > capacity_of(tables):
                raise AssertionError("the ring has run into its own tail")
            if bool((starts % capacity_of(tables) + lengths[order] > capacity_of(tables)).any()):
                raise AssertionError("a segment is cut in two")
        per_stream, per = self.shape.segments_per_stream, self.shape.per_segment
        rows = tables.streams
        ids = tables.frame_ids[tables.frame_ids > 0] - 1
        stream = torch.div(ids, per * per_stream, rounding_mode="floor")
        age = (rows[stream, kernels.OPENED] - 1 - torch.div(ids, per, rounding_mode="floor") % per_stream) % per_stream
        if bool((age >= (rows[:, kernels.OPENED] - rows[:, kernels.FLOOR])[stream]).any()):
            raise AssertionError("a frame that is referred to lies in a segment that was given up")
        refs = torch.zeros_like(tables.keyframe_refs)
        all_live = [
            s * per_stream + np.arange(int(row[kernels.FLOOR]), int(row[kernels.OPENED])) % per_stream
            for s, row in enumerate(rows)
        ]
        used = tables.keyframes[torch.from_numpy(np.concatenate(all_live))]
        held = rows[:, kernels.HELD : kernels.HELD + kernels.N_HELD].flatten().int()
        for keyframe in torch.cat([used, held]).tolist():
            if keyframe >= 0:
                refs[keyframe] += 1
        if not torch.equal(refs, tables.keyframe_refs):
            raise AssertionError("references to keyframes are counted wrongly")

    def frozen(self) -> DeviceFrameStore:
        """A copy in the host's memory to be pickled, which later writes do not change."""
        self._recover()
        self._wait()
        copied = object.__new__(DeviceFrameStore)
        copied.__dict__.update(self.__dict__)
        copied.tables = DeviceTables(*(table.to("cpu", copy=True) for table in self.tables))
        copied._report = self._report.clone()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        self._recover()
        self._wait()
        state = self.__dict__.copy()
        state.pop("_unfinished", None)
        state["_bound"] = state["_notes"] = state["_last"] = state["_job"] = state["_staging"] = None
        state["_report"] = self._report.numpy().copy()
        tables = {name: table.cpu() for name, table in self.tables._asdict().items()}
        state["tables"] = {name: table.numpy() for name, table in tables.items()}
        state["device"] = str(self.device)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        tables, report = state.pop("tables"), state.pop("_report")
        self.__dict__.update(state)
        self.device = torch.device(state["device"])
        if self.device.type == "cuda" and not torch.cuda.is_available():
            # written on another machine: the same segments are read here
            self.device, self._triton, self.pinned = torch.device("cpu"), False, False
        placed = {name: torch.from_numpy(np.array(table)).to(self.device) for name, table in tables.items()}
        if self.pinned:
            placed["heap"] = placed["heap"].cpu().pin_memory()
        self.tables = DeviceTables(**placed)
        self._report = self._make_report()
        self._report.copy_(torch.from_numpy(report))
        self._notes = self._report.numpy()
        self._bound = None
        self._start_staging()


def _relations(before: npt.NDArray[np.int64], words: npt.NDArray[np.int64], stack: int, moves: bool) -> list[int]:
    """How each of ``words[stream]`` relates to ``before[stream]``; looks first whether they moved, if ``moves``."""
    step = words.shape[1] // stack
    found: npt.NDArray[np.int64] | None = None
    for relation in (kernels.MOVED, kernels.SAME) if moves else (kernels.SAME, kernels.MOVED):
        if relation == kernels.SAME:
            equal = before == words
        elif stack > 1:
            equal = before[:, step:] == words[:, :-step]
        else:
            continue
        if found is None:
            if equal.all():
                return [relation] * len(words)
            found = np.zeros(len(words), np.int64)
        found[equal.all(axis=1) & (found == kernels.UNKNOWN)] = relation
    return [kernels.UNKNOWN] * len(words) if found is None else found.tolist()


def join_frames(frames: torch.Tensor, layout: StackLayout) -> torch.Tensor:
    """Observations ``[set, n, *shape]`` of frames ``[set, n, stack, byte]``."""
    lead = frames.shape[:2]
    if layout.axis == "last" and layout.stack > 1:
        unit = layout.spec.shape[-1] // layout.stack * layout.spec.dtype.itemsize
        frames = frames.reshape(*lead, layout.stack, layout.frame_bytes // unit, unit).transpose(2, 3)
    return as_dtype(frames.reshape(*lead, layout.spec.nbytes), layout.spec)


def as_dtype(rows: torch.Tensor, spec: ObsSpec) -> torch.Tensor:
    """Rows of bytes ``[..., nbytes]`` as observations."""
    dtype = torch_dtype(spec.dtype)
    if dtype is not torch.uint8:
        # one byte or none needs no reading
        rows = rows.contiguous().view(dtype) if rows.numel() else rows.new_empty(0, dtype=dtype)
    return rows.reshape(*rows.shape[:-1], *spec.shape) if rows.numel() else rows.reshape(-1, *spec.shape)
