"""Uncompressed observations on a device, on one time axis; each frame is stored once."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.errors import IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.kernels.gather_torch import (
    NEW,
    UNKNOWN,
    TimelineShape,
    TimelineTables,
    WriteNumbers,
    match_frames_reference,
    read_frames_reference,
    usual_codes,
    write_frames_reference,
)
from sb3_extra_buffers.kernels.launcher import Columns
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_base import AttributeWrite, Batch, DeviceRing, DeviceStore, IndexBatch
from sb3_extra_buffers.stores.device_layout import join_frames
from sb3_extra_buffers.stores.device_pieces import Pieces, word_dtype
from sb3_extra_buffers.stores.device_side_rows import SideRows, SideUse
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.staging import Lease, Staging, StagingLayout, torch_dtype
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceTimelineStore"]

Array = npt.NDArray[Any]

_INT32 = np.dtype(np.int32)
# bytes of staged rows that the device may not have read yet; a single step may have more
_STAGED_BYTES = 8 << 20
# Side rows that may be mapped for writes in flight: this share of all rows, or the rows of this many steps up to this
# many bytes, whichever is more. If more writes are in flight, the host waits.
_AHEAD_SHARE, _AHEAD_STEPS, _AHEAD_BYTES = 64, 64, 64 << 20
# a page of side rows is this fraction of all rows
_N_PAGES = 256


class _Staged(NamedTuple):
    """A step as the kernels take it."""

    batches: tuple[torch.Tensor, ...]  # one per set
    # int32 [stream, n_ids]: codes of the frames that the host has determined; int32 [stream + 1]: new frames of the
    # previous streams. None if all codes are the usual ones, or the host has determined none
    given: tuple[torch.Tensor, ...] | None
    is_known: bool  # whether the host has determined all codes
    max_new: int  # maximum number of frames that go to side rows
    lease: Lease | None  # the staging memory of the batches, unless they are the caller's tensors


class _TimelineWrite(AttributeWrite):
    """A staged step; committing it is idempotent."""

    __slots__ = ("numbers", "staged", "use")

    def __init__(
        self, store: DeviceTimelineStore, staged: _Staged, numbers: WriteNumbers, use: SideUse, after: dict[str, Any]
    ) -> None:
        self.staged, self.numbers, self.use = staged, numbers, use
        super().__init__(store, after)

    def commit(self) -> None:
        self.owner.launch(self.staged, self.numbers, self.use)
        super().commit()


class DeviceTimelineStore(DeviceStore):
    """Uncompressed frames, each stored once; ``place.pinned`` keeps them in pinned host memory.

    The newest frame of the last set (``next_obs``, if there is one) of every step is a row of the time axis. All other
    frames of a step are usually frames of the previous one, and only their ids are stored. Those that are not, such as
    at the beginning of an episode, are stored in side rows.

    The device compares frames given as tensors. The host compares arrays with its copy of the last rows, so that only
    new frames are sent, and leaves rows that do not continue the last ones to the device. A frame is used by a few
    consecutive steps only, so both kinds of rows are rings.
    """

    layout: StackLayout

    def __init__(
        self, ring: DeviceRing, layout: StackLayout | None = None, codec: Codec | None = None, *unused: Any,
        triton: bool | None = None,
    ) -> None:  # fmt: skip
        if ring.n_sets > 2:
            raise SpecMismatchError(f"a time axis holds observations and next observations, got {ring.n_sets} sets")
        self.ring, self.device = ring, ring.place.device
        self.layout = StackLayout(ring.spec) if layout is None or not layout.frame_bytes else layout
        self._triton = device_base.runs_kernels(self.device) if triton is None else triton
        stack, n_streams, word = self.layout.stack, ring.n_streams, _frame_word(self.layout)
        n_words = max(self.layout.frame_bytes // word.itemsize, 1)
        unit = n_words
        if self.layout.axis == "last" and stack > 1:
            unit = ring.spec.shape[-1] // stack * ring.spec.dtype.itemsize // word.itemsize
        shape = TimelineShape(ring.n_steps, n_streams, ring.n_sets, stack, n_words, unit, 0)
        n_rows = shape.n_rows * n_streams
        self._rows = Pieces(n_rows, n_rows, 1, n_words, word, ring.place, self._triton)
        # frames of a step that may be new
        self._max_new = n_streams * shape.n_ids
        few = min(_AHEAD_STEPS * self._max_new, _AHEAD_BYTES // (n_words * word.itemsize))
        self._max_ahead = max(n_rows // _AHEAD_SHARE, few, self._max_new)
        per_page = -(-n_rows // _N_PAGES)
        n_pages = -(-(shape.n_rows * self._max_new + self._max_new + self._max_ahead) // per_page) + 2
        self._side = SideRows(per_page, n_pages, n_words, self._rows.dtype, ring.place, self._triton)
        self._shape = shape._replace(capacity=self._side.capacity)
        if n_rows + self._side.capacity >= 1 << 31:
            raise SpecMismatchError(f"a device holds at most 2**31 frames, got {n_rows + self._side.capacity}")

        def new(*size: int, dtype: type = np.int32) -> torch.Tensor:
            return _placed(np.zeros(size, dtype), self.device)

        self.tables = TimelineTables(
            rows=self._rows.addresses,
            side=self._side.table,
            ids=new(ring.n_steps, n_streams, shape.n_ids),
            last_ids=new(2, n_streams, stack),
            starts=new(shape.n_rows + 1),
            state=new(3, dtype=np.int64),
        )
        self._use = SideUse()
        self._writes = 0  # since the store was cleared
        self._newest = -1  # the step written last
        self._start_staging()

    @staticmethod
    def accepts(codec: Codec, layout: StackLayout) -> bool:
        return codec.codec_id == "none"

    def _start_staging(self) -> None:
        """Create everything that is not pickled: staging memory, and what depends on it."""
        ring, shape = self.ring, self._shape
        self._word = _frame_word(self.layout)
        self._unit_bytes = shape.unit * self._word.itemsize
        self._step_shape = (ring.n_sets, ring.n_streams, *ring.spec.shape)
        # the host compares whole rows, in the widest words
        row_word = word_dtype(ring.spec.nbytes)
        rows = (ring.n_sets, ring.n_streams, ring.spec.nbytes // row_word.itemsize)
        # the last rows must stay as they are while the next step is staged
        step_bytes = math.prod(rows) * row_word.itemsize
        self._staging = Staging(self.device, min(max(_STAGED_BYTES // max(step_bytes, 1), 3), 8))
        codes = (ring.n_streams, shape.n_ids)
        self._staging_layout = StagingLayout((codes, _INT32), ((ring.n_streams + 1,), _INT32), (rows, row_word))
        self._usual_codes = np.array(usual_codes(shape), np.int32)
        self._bound_kernels: Any = None
        # the last row of each stream, in staging memory; None if they are unknown
        self._last: Array | None = None

    @property
    def kernels(self) -> Any:
        """The Triton kernels, bound to the tables."""
        if self._bound_kernels is None:
            from sb3_extra_buffers.kernels.gather_triton import TimelineGather  # optional: needs Triton

            rows, side = self._rows, self._side
            self._bound_kernels = TimelineGather(self.tables, self._shape, rows.dtype, rows.per_piece, side.per_page)
        return self._bound_kernels

    # ---- writing ----

    def plan(self, step: int, batches: Sequence[Batch]) -> AttributeWrite:
        ring, shape = self.ring, self._shape
        self._check_step(step, batches)
        checked = [self._checked(batch) for batch in batches]
        if not ring.spec.nbytes:
            return AttributeWrite(self, {"_writes": self._writes + 1, "_newest": step})
        # unknown until this write is committed, since the staging memory of the last rows may be reused
        last, self._last = self._last, None
        row = self._writes % shape.n_rows
        self._rows.reserve(row * ring.n_streams, (row + 1) * ring.n_streams)
        staged = self._take(checked) if isinstance(checked[0], torch.Tensor) else self._stage(checked, last)
        use = SideUse(self._use.launch + 1, self._use.issued + staged.max_new)
        self._reserve_side_rows(staged.max_new)
        n_written = min(self._writes + 1, ring.n_steps)
        numbers = WriteNumbers(
            step, n_written, row, self._writes & 1, self._writes % (shape.n_rows + 1), use.launch & 0xFFFF
        )
        after: dict[str, Any] = {"_writes": self._writes + 1, "_newest": step, "_use": use}
        if staged.lease is not None:
            after["_last"] = staged.lease.arrays[2][-1]
        if self._triton:
            _ = self.kernels  # this can fail; the launch cannot
        return _TimelineWrite(self, staged, numbers, use, after)

    def _check_step(self, step: int, batches: Sequence[Batch]) -> None:
        ring = self.ring
        if len(batches) != ring.n_sets:
            raise SpecMismatchError(f"expected {ring.n_sets} batches, one per set, got {len(batches)}")
        expected = step if self._writes == 0 else (self._newest + 1) % ring.n_steps
        if not 0 <= step < ring.n_steps or step != expected:
            raise IndexOutOfRangeError(
                f"steps of a ring of {ring.n_steps} are written in order: expected step {expected}, got {step}"
            )

    def _checked(self, batch: Batch) -> Batch:
        """``batch`` in the dtype and shape of the ring, or an error."""
        spec, n_streams = self.ring.spec, self.ring.n_streams
        if isinstance(batch, torch.Tensor):
            if batch.shape != (n_streams, *spec.shape) or batch.dtype is not torch_dtype(spec.dtype):
                raise SpecMismatchError(
                    f"expected a tensor of {(n_streams, *spec.shape)} {spec.dtype}, got {tuple(batch.shape)} "
                    f"{batch.dtype}"
                )
        elif batch.shape != (n_streams, *spec.shape) or batch.dtype != spec.dtype:
            batch = spec.to_batch(batch)
            if len(batch) != n_streams:
                raise SpecMismatchError(f"expected an observation for each of {n_streams} streams, got {len(batch)}")
        return batch

    def _take(self, batches: Sequence[Any]) -> _Staged:
        """Tensors on the device, which the host does not compare."""
        size = self._word.itemsize
        batches = tuple(batch.contiguous() for batch in batches)
        # kernels read whole words
        aligned = tuple(batch.clone() if batch.data_ptr() % size else batch for batch in batches)
        return _Staged(aligned, None, self._max_new == 0, self._max_new, None)

    def _stage(self, batches: Sequence[Any], last: Array | None) -> _Staged:
        """Copy arrays to memory that the device can read, and compare them with the last rows."""
        shape = self._shape
        lease = self._staging.acquire(self._staging_layout)
        codes, firsts, rows = lease.arrays
        targets = rows.view(self.ring.spec.dtype).reshape(self._step_shape)
        targets[-1] = batches[-1]
        # which rows continue the last ones (obs equals the last next_obs, next_obs is shifted); None if all do
        are_usual: Any = None
        before = last
        if shape.n_sets == 2:
            obs = batches[0]
            before = _as_rows(obs, rows.dtype)
            if before is None:
                targets[0] = obs
                before = rows[0]
            if last is not None:
                equal = before == last
                if not equal.all():
                    are_usual = equal.all(axis=1)
        if last is not None and shape.stack > 1:
            equal = self._are_shifted(before, rows[-1])
            if not equal.all():
                are_shifted = equal.reshape(len(equal), -1).all(axis=1)
                are_usual = are_shifted if are_usual is None else are_usual & are_shifted
        if not shape.n_ids or (last is not None and are_usual is None):
            # fast path: obs is not staged, since nothing of it is new
            return _Staged(tuple(lease.tensors[2]), None, True, 0, lease)
        unusual = np.arange(shape.n_streams) if last is None else np.flatnonzero(~are_usual)
        if shape.n_sets == 2:
            targets[0][unusual] = batches[0][unusual]
        # the device finds the codes of stacked frames; a row without a stack that differs from the last one is new
        is_known = last is not None and shape.stack == 1
        codes[...] = self._usual_codes
        codes[unusual] = NEW if is_known else UNKNOWN
        if is_known:
            firsts[0] = 0
            np.cumsum(~are_usual, out=firsts[1:])
        max_new = len(unusual) * shape.n_ids
        return _Staged(tuple(lease.tensors[2]), lease.tensors[:2], is_known, max_new, lease)

    def _are_shifted(self, before: Any, after: Any) -> Any:
        """Where ``after`` equals ``before`` shifted by one frame: ``[stream, ...]``."""
        layout, size = self.layout, self.layout.frame_bytes
        if layout.axis == "first":
            before, after = before.view(self._word), after.view(self._word)
            n_words = size // self._word.itemsize
            return before[:, n_words:] == after[:, :-n_words]
        pixel = self.ring.spec.nbytes // size * self._unit_bytes
        if pixel in (2, 4, 8) and sys.byteorder == "little":
            # all frames of a pixel as one number
            dtype, bits = np.dtype(f"u{pixel}"), 8 * self._unit_bytes
            numbers = after.view(dtype) << dtype.type(bits) >> dtype.type(bits)
            return before.view(dtype) >> dtype.type(bits) == numbers
        pixels = (len(after), -1, layout.stack, self._unit_bytes)
        return before.view(np.uint8).reshape(pixels)[:, :, 1:] == after.view(np.uint8).reshape(pixels)[:, :, :-1]

    def _reserve_side_rows(self, max_new: int) -> None:
        """Map side rows for a write that takes at most ``max_new``; wait if writes in flight may take too many."""
        if not self._max_new:
            return
        count, n_rows = self._side.in_flight(self._use)
        if count and n_rows + max_new > self._max_ahead and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
            n_rows = self._side.in_flight(self._use)[1]
        self._side.reserve(n_rows + max_new)

    def launch(self, staged: _Staged, numbers: WriteNumbers, use: SideUse) -> None:
        """Write a step to the device; idempotent."""
        batches, given, is_known, _, lease = staged
        if self._triton:
            self.kernels.write((batches[0], batches[-1]), given, is_known, numbers, self._side.report)
            if lease is not None:
                self._staging.release(lease)
        else:
            self._write_reference(staged, numbers)
        self._side.remember(use)

    def _write_reference(self, staged: _Staged, numbers: WriteNumbers) -> None:
        """What the kernels do, with torch."""
        rows, side, tables, shape, per_page = self._memory()
        # copied: the memory may be used again before the device has read it
        batches = [batch.clone().view(-1).view(rows.dtype).to(self.device) for batch in staged.batches]
        codes = torch.from_numpy(self._usual_codes).expand(shape.n_streams, -1).contiguous().to(self.device)
        if staged.given is not None:
            codes = staged.given[0].clone().to(self.device)
        if not staged.is_known:
            found = match_frames_reference(rows, side, tables, shape, per_page, batches, numbers)
            codes = found if staged.given is None else torch.where(codes[:, :1] == UNKNOWN, found, codes)
        write_frames_reference(rows, side, tables, shape, per_page, batches, codes, numbers, self._side.report)

    def _memory(self) -> tuple[torch.Tensor, torch.Tensor, TimelineTables, TimelineShape, int]:
        return self._rows.whole, self._side.whole, self.tables, self._shape, self._side.per_page

    # ---- reading ----

    def _empty(self, lead: tuple[int, ...]) -> torch.Tensor:
        spec = self.ring.spec
        return torch.empty((*lead, *spec.shape), dtype=torch_dtype(spec.dtype), device=self.device)

    def read(self, indices: IndexBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        wanted = indices.on(self.device)
        if out is None:
            out = self._empty(indices.shape)
        if not out.numel():
            return out
        if not self._triton:
            frames = read_frames_reference(*self._memory(), wanted)
            return out.copy_(join_frames(frames.view(torch.uint8), self.layout))
        if out.data_ptr() % self._word.itemsize:
            return out.copy_(self.read(indices))
        self.kernels.read(wanted.contiguous(), out)
        return out

    @property
    def can_be_captured(self) -> bool:
        return self._triton

    @property
    def can_read_batch(self) -> bool:
        return self._triton and self.ring.spec.nbytes > 0

    def read_batch(
        self,
        indices: torch.Tensor,
        floats: torch.Tensor,
        actions: torch.Tensor,
        records: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Copy observations and gather the columns of a batch in one launch, see `DeviceFrameStore.read_batch`."""
        if out is None:
            out = self._empty(indices.shape)
        self.kernels.read(indices, out, Columns(floats, actions, records))
        return out

    # ---- the rest ----

    def clear(self) -> None:
        tables = self.tables
        self._last = None
        tables.state.zero_()
        tables.last_ids.zero_()
        # all side rows are free from here on
        tables.starts.copy_(tables.starts[self._writes % len(tables.starts)].clone())
        self.__dict__.update(_writes=0, _newest=-1)

    def memory_usage(self) -> MemoryUsage:
        tables = self.tables
        index = sum(table.nbytes for table in (tables.ids, tables.last_ids, tables.starts, tables.state))
        return MemoryUsage(self._rows.nbytes + self._side.nbytes, index, 0, self._staging.nbytes)

    def check(self) -> None:
        shape, tables = self._shape, self.tables
        if not self.ring.spec.nbytes:
            return
        row, newest, n_written = tables.state.tolist()
        if n_written != min(self._writes, shape.n_steps):
            raise AssertionError(f"{n_written} steps can be read after {self._writes} writes")
        if not n_written:
            return
        if newest != self._newest or row != (self._writes - 1) % shape.n_rows:
            raise AssertionError(f"the device was written up to step {newest}, the host expected {self._newest}")
        n_main, n_starts = shape.n_rows * shape.n_streams, shape.n_rows + 1
        # the oldest and the newest side row in use
        first, head = (int(tables.starts[at % n_starts]) for at in (self._writes + 1, self._writes))
        steps = (newest - torch.arange(n_written)) % shape.n_steps
        ids = tables.ids.cpu()[steps].long()
        distance = (head - (ids - 1 - n_main) - 1) % shape.capacity
        if bool(((ids > n_main) & (distance >= (head - first) % shape.capacity)).any()):
            raise AssertionError("an observation refers to a side row that is free")

    def frozen(self) -> DeviceTimelineStore:
        copied = object.__new__(DeviceTimelineStore)
        tables = TimelineTables(*(table.to("cpu", copy=True) for table in self.tables))
        copied.__dict__.update(self.__dict__, _rows=self._rows.frozen(), _side=self._side.frozen(), tables=tables)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        names = (
            "ring", "layout", "_rows", "_side", "_shape", "_max_new", "_max_ahead", "_use", "_writes", "_newest",
        )  # fmt: skip
        tables = {name: getattr(self.tables, name).cpu().numpy() for name in ("ids", "last_ids", "starts", "state")}
        return {name: self.__dict__[name] for name in names} | {"tables": tables}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = state.pop("tables")
        self.__dict__.update(state)
        self.device = self.ring.place.device
        self._triton = self._rows.triton
        placed = {name: _placed(array, self.device) for name, array in arrays.items()}
        self.tables = TimelineTables(rows=self._rows.addresses, side=self._side.table, **placed)
        self._side.remember(self._use)
        self._start_staging()


def _placed(array: Array, device: torch.device) -> torch.Tensor:
    """``array`` on the device, never without memory: kernels need an address."""
    placed = torch.zeros(max(array.size, 1), dtype=torch_dtype(array.dtype), device=device)[: array.size]
    return placed.copy_(torch.from_numpy(np.array(array)).view(-1)).view(array.shape)


def _frame_word(layout: StackLayout) -> np.dtype[Any]:
    """The word dtype of a frame, or of a pixel of it if frames are interleaved along the last axis."""
    if layout.axis == "last" and layout.stack > 1:
        return word_dtype(layout.spec.shape[-1] // layout.stack * layout.spec.dtype.itemsize)
    return word_dtype(layout.frame_bytes)


def _as_rows(batch: Array, dtype: np.dtype[Any]) -> Array | None:
    """A batch as rows of words, without a copy; None if it is not contiguous."""
    return batch.reshape(len(batch), -1).view(dtype) if batch.flags.c_contiguous else None
