"""Uncompressed observations on a device, on one time axis: the next observation is the one a step later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.kernels.gather_torch import FOLLOWS, UNWRITTEN, read_timeline_reference
from sb3_extra_buffers.stores.device_base import DeviceRing, IndexBatch
from sb3_extra_buffers.stores.device_pieces import Pieces, SlotChange, SlotPool, Slots, word_dtype
from sb3_extra_buffers.stores.device_uncompressed import StagedWrite, UncompressedDeviceStore
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.staging import Lease
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceTimelineStore"]

Array = npt.NDArray[Any]

_INT64 = np.dtype(np.int64)
_NOTHING: Slots = np.zeros(0, np.int32)
# entries of a job before the address and the id of a side row for each stream; `kernels.gather_triton` reads them
_N_NUMBERS = 6


class _TimelineWrite(StagedWrite):
    __slots__ = ("before", "moved", "parity")

    def __init__(
        self,
        store: DeviceTimelineStore,
        lease: Lease,
        step: int,
        before: int | None,
        moved: npt.NDArray[np.intp],
        change: SlotChange,
    ) -> None:
        self.parity = store.parity
        # the step before, unless it is overwritten, and which of its next observations go to which side rows
        self.before, self.moved = before, moved
        last = lease.arrays[1][1] if len(lease.arrays[1]) == 2 else None
        after = {"newest": step, "parity": 1 - self.parity, "_last": last}
        super().__init__(store, lease, step, change, after)

    def commit(self) -> None:
        store: DeviceTimelineStore = self.owner
        store.launch(self)
        store.slots.commit(self.change)
        store.side_of.pop(self.step, None)
        if len(self.moved) and self.before is not None:
            store.side_of[self.before] = self.change.taken
        super().commit()


class DeviceTimelineStore(UncompressedDeviceStore):
    """Uncompressed observations, each stored once; ``place.pinned`` keeps them in pinned host memory.

    ``obs`` of a step is a row of the time axis. The next observation is the row of the following step if the two are
    equal byte for byte, which the host checks when that step is written; else it is kept in a side row. Next
    observations of the newest step are always in side rows: two for each stream, used in turn, so that a write
    overwrites nothing that it may have to read again.
    """

    def __init__(
        self, ring: DeviceRing, layout: StackLayout | None = None, codec: Codec | None = None, *unused: Any,
        triton: bool | None = None,
    ) -> None:  # fmt: skip
        if ring.n_sets > 2:
            raise SpecMismatchError(f"a time axis holds observations and next observations, got {ring.n_sets} sets")
        self._use_ring(ring, triton)
        place, n_streams = ring.place, ring.n_streams
        dtype = word_dtype(ring.spec.nbytes)
        n_words = max(ring.spec.nbytes // dtype.itemsize, 1)
        self._rows = Pieces(ring.n_obs, ring.n_obs, n_streams, n_words, dtype, place, self._triton)
        n_side = (2 * n_streams + ring.n_obs + n_streams) * (ring.n_sets - 1)
        # side rows are few: small pieces
        self._side = Pieces(n_side, ring.n_obs // 4, n_streams, n_words, dtype, place, self._triton)
        self._side.reserve(0, min(2 * n_streams, n_side))
        #: int32 [obs]: where the next observation is, see `kernels.gather_torch`.
        self.side_ids = torch.full((ring.n_obs,), UNWRITTEN, dtype=torch.int32, device=self.device)
        # the first side rows are those of the newest step
        self.slots = SlotPool(2 * n_streams)
        self.side_of: dict[int, Slots] = {}  # side rows of each step that has some
        self.newest: int | None = None  # the step written last
        self.parity = 0  # which of the first side rows the next step uses
        self._start_staging()

    @staticmethod
    def accepts(codec: Codec, layout: StackLayout) -> bool:
        return codec.codec_id == "none"

    def _start_staging(self) -> None:
        """Set up what belongs to this process."""
        ring = self.ring
        self._word = word_dtype(ring.spec.nbytes)
        rows = (ring.n_sets, ring.n_streams, self._rows.n_words)
        parts = ((_N_NUMBERS + 2 * ring.n_streams,), _INT64), (rows, self._word)
        self._set_up_staging(math.prod(rows) * self._word.itemsize, *parts)

    def _bind_kernels(self) -> Any:
        from sb3_extra_buffers.kernels.gather_triton import TimelineGather  # optional: needs Triton

        ring, rows, side = self.ring, self._rows, self._side
        return TimelineGather(
            rows.addresses, side.addresses, self.side_ids, rows.dtype, rows.n_words, ring.n_streams, ring.n_sets,
            rows.per_piece, side.per_piece,
        )  # fmt: skip

    # ---- writing ----

    def _plan_rows(self, step: int, batches: Sequence[Array], last: Array | None, lease: Lease) -> _TimelineWrite:
        ring, n_streams = self.ring, self.ring.n_streams
        self._stage(batches, lease.arrays[1])
        self._rows.reserve(step * n_streams, (step + 1) * n_streams)
        before = self.newest if self.newest != step and ring.n_sets == 2 else None
        in_order = self.newest is not None and step == (self.newest + 1) % ring.n_steps
        if not in_order and self.newest is not None:
            self._detach((step - 1) % ring.n_steps)
        if before is None:
            moved = np.zeros(0, np.intp)
        elif last is None or not in_order:
            moved = np.arange(n_streams)
        else:
            moved = np.flatnonzero((last != lease.arrays[1][0]).any(axis=1))
        change = self.slots.plan(self.slots.peek(len(moved)), self.side_of.get(step, _NOTHING))
        if len(moved):
            self._side.reserve(int(change.taken.min()), int(change.taken.max()) + 1)
        return _TimelineWrite(self, lease, step, before, moved, change)

    def _pack_job(self, write: _TimelineWrite) -> None:
        job, address, n_streams = write.lease.arrays[0], self._side.address, self.ring.n_streams
        newest = write.parity * n_streams
        both = (address(newest), address(n_streams - newest)) if self.ring.n_sets == 2 else (0, 0)
        before = -1 if write.before is None else write.before * n_streams
        first = write.step * n_streams
        job[:_N_NUMBERS] = (self._rows.address(first), *both, first, before, newest)
        job[_N_NUMBERS:] = 0
        for stream, slot in zip(write.moved.tolist(), write.change.taken.tolist(), strict=True):
            job[_N_NUMBERS + 2 * stream : _N_NUMBERS + 2 * stream + 2] = address(slot), slot + 1

    def _stage(self, batches: Sequence[Array], rows: Array) -> None:
        """Copy ``batches`` to memory that the device can read."""
        spec = self.ring.spec
        if not spec.nbytes:
            rows[...] = 0
            return
        targets = rows.view(spec.dtype).reshape(-1, self.ring.n_streams, *spec.shape)
        for target, batch in zip(targets, batches, strict=True):
            target[...] = batch

    def _detach(self, step: int) -> None:
        """Keep the next observations of ``step`` in side rows: the step after it is about to be written out of order.

        What can be read stays the same, so this may be interrupted and run again.
        """
        ring, n_streams = self.ring, self.ring.n_streams
        first = step * n_streams
        streams = torch.nonzero(self.side_ids[first : first + n_streams] == FOLLOWS).flatten()
        if ring.n_sets == 1 or not len(streams):
            return
        kept = torch.empty((len(streams), self._rows.n_words), dtype=self._rows.dtype, device=self.device)
        self._gather(ring.n_obs + first + streams, kept)
        change = self.slots.plan(self.slots.peek(len(streams)), _NOTHING)
        self._side.reserve(int(change.taken.min()), int(change.taken.max()) + 1)
        for row, slot in zip(kept, change.taken.tolist(), strict=True):
            self._side.row(slot).copy_(row)
        self.slots.commit(change)
        self.side_of[step] = np.concatenate([self.side_of.get(step, _NOTHING), change.taken])
        ids = torch.from_numpy(change.taken + np.int32(1)).to(self.device)
        self.side_ids[first + streams] = ids

    def _launch_kernel(self, write: _TimelineWrite) -> None:
        self.kernels.write(*write.lease.tensors)

    def _write_reference(self, write: _TimelineWrite) -> None:
        rows, side, side_ids = self._rows.whole, self._side.whole, self.side_ids
        n_streams = self.ring.n_streams
        first, newest = write.step * n_streams, write.parity * n_streams
        # copied: the memory may be used again before the device has read it
        staged = torch.from_numpy(write.lease.arrays[1].copy()).to(rows.device)
        rows[first : first + n_streams] = staged[0]
        if self.ring.n_sets == 1:
            side_ids[first : first + n_streams] = FOLLOWS
            return
        if write.before is not None:
            following = torch.full((n_streams,), FOLLOWS, dtype=torch.int32)
            streams, slots = torch.from_numpy(write.moved), torch.from_numpy(write.change.taken.astype(np.int64))
            oldest = n_streams - newest
            side[slots.to(side.device)] = side[oldest : oldest + n_streams][streams.to(side.device)]
            following[streams] = slots.to(torch.int32) + 1
            side_ids[write.before * n_streams : (write.before + 1) * n_streams] = following.to(self.device)
        side[newest : newest + n_streams] = staged[1]
        ids = torch.arange(newest + 1, newest + n_streams + 1, dtype=torch.int32, device=self.device)
        side_ids[first : first + n_streams] = ids

    # ---- reading ----

    def read(self, indices: IndexBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        out = self._empty(indices.shape) if out is None else out
        if self.ring.spec.nbytes:
            rows = self._rows
            self._gather(indices.on(self.device), out.view(-1).view(rows.dtype).view(*indices.shape, rows.n_words))
        return out

    def _gather(self, wanted: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Copy observations to ``out``, words ``[*wanted.shape, word]`` on the device."""
        if not self._triton:
            rows = self._rows.whole
            # pinned rows are in host memory
            found = read_timeline_reference(
                rows, self._side.whole, self.side_ids.to(rows.device), wanted.to(rows.device), self.ring.n_streams
            )
            return out.copy_(found)
        if wanted.numel():
            self.kernels.read(wanted.contiguous(), out)
        return out

    # ---- the rest ----

    def clear(self) -> None:
        self._last = None
        self.side_ids.fill_(UNWRITTEN)
        self.slots.clear()
        self.side_of.clear()
        self.newest = None

    def memory_usage(self) -> MemoryUsage:
        index = self.side_ids.nbytes + self.slots.nbytes
        return MemoryUsage(self._rows.nbytes + self._side.nbytes, index, 0, self._staging.nbytes)

    def check(self) -> None:
        used = np.concatenate([_NOTHING, *self.side_of.values()])
        self.slots.check(used)
        if self.ring.n_sets == 1:
            return
        side_ids = self.side_ids.cpu().numpy().reshape(self.ring.n_steps, -1)
        is_kept = (side_ids > 0) & (np.arange(self.ring.n_steps) != self.newest)[:, None]
        if not np.array_equal(np.sort(side_ids[is_kept] - 1), np.sort(used)):
            raise AssertionError("side rows and the steps that refer to them disagree")

    def frozen(self) -> DeviceTimelineStore:
        copied = object.__new__(DeviceTimelineStore)
        copied.__dict__.update(
            self.__dict__, _rows=self._rows.frozen(), _side=self._side.frozen(), slots=self.slots.copy(),
            side_of=dict(self.side_of), side_ids=self.side_ids.to("cpu", copy=True),
        )  # fmt: skip
        return copied

    def __getstate__(self) -> dict[str, Any]:
        names = ("ring", "_triton", "_rows", "_side", "slots", "side_of", "newest", "parity")
        return {name: self.__dict__[name] for name in names} | {"side_ids": self.side_ids.cpu().numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        side_ids = state.pop("side_ids")
        self.__dict__.update(state)
        self.device = self.ring.place.device
        self._triton = self._rows.triton
        self.side_ids = torch.from_numpy(np.array(side_ids)).to(self.device)
        self._start_staging()
