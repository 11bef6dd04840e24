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
from sb3_extra_buffers.kernels.launcher import Columns
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_base import AttributeWrite, DeviceRing, DeviceStore, IndexBatch
from sb3_extra_buffers.stores.device_pieces import Pieces, SlotChange, SlotPool, Slots, word_dtype
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.staging import Lease, Staging, StagingLayout, torch_dtype
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceTimelineStore"]

Array = npt.NDArray[Any]

_INT64 = np.dtype(np.int64)
_NOTHING: Slots = np.zeros(0, np.int32)
# bytes of staged rows that the device may not have read yet; a single step may have more
_STAGED_BYTES = 8 << 20
# entries of a job before the address and the id of a side row for each stream; `kernels.gather_triton` reads them
_N_NUMBERS = 6


class _TimelineWrite(AttributeWrite):
    """A staged step; committing it is idempotent."""

    __slots__ = ("before", "change", "lease", "moved", "parity", "step")

    def __init__(
        self,
        store: DeviceTimelineStore,
        lease: Lease,
        step: int,
        before: int | None,
        moved: npt.NDArray[np.intp],
        change: SlotChange,
    ) -> None:
        self.lease, self.step, self.parity = lease, step, store.parity
        # the step before, unless it is overwritten, and which of its next observations go to which side rows
        self.before, self.moved, self.change = before, moved, change
        last = lease.arrays[1][1] if len(lease.arrays[1]) == 2 else None
        super().__init__(store, {"newest": step, "parity": 1 - self.parity, "_last": last})

    def commit(self) -> None:
        store: DeviceTimelineStore = self.owner
        store.launch(self)
        store.slots.commit(self.change)
        store.side_of.pop(self.step, None)
        if len(self.moved) and self.before is not None:
            store.side_of[self.before] = self.change.taken
        super().commit()


class DeviceTimelineStore(DeviceStore):
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
        self.ring = ring
        place, n_streams = ring.place, ring.n_streams
        self.device = place.device
        self._triton = self.device.type == "cuda" and device_base.has_triton() if triton is None else triton
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
        # the last rows must stay as they are while the next step is staged
        depth = min(max(_STAGED_BYTES // max(math.prod(rows) * self._word.itemsize, 1), 3), 8)
        self._staging = Staging(self.device, depth)
        self._staging_layout = StagingLayout(((_N_NUMBERS + 2 * ring.n_streams,), _INT64), (rows, self._word))
        self._bound_kernels: Any = None
        # next observations of the newest step, in staging memory; None if they are unknown
        self._last: Array | None = None

    @property
    def kernels(self) -> Any:
        """The Triton kernels, bound to the tables."""
        if self._bound_kernels is None:
            from sb3_extra_buffers.kernels.gather_triton import TimelineGather  # optional: needs Triton

            ring, rows, side = self.ring, self._rows, self._side
            self._bound_kernels = TimelineGather(
                rows.addresses, side.addresses, self.side_ids, rows.dtype, rows.n_words, ring.n_streams, ring.n_sets,
                rows.per_piece, side.per_piece,
            )  # fmt: skip
        return self._bound_kernels

    # ---- writing ----

    def plan(self, step: int, batches: Sequence[Array]) -> _TimelineWrite:
        ring, n_streams = self.ring, self.ring.n_streams
        # unknown until this write is committed: the staging memory of the last rows may be used again
        last, self._last = self._last, None
        lease = self._stage(batches)
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
        write = _TimelineWrite(self, lease, step, before, moved, change)
        if self._triton:
            self._pack_job(write)
            _ = self.kernels  # this can fail; the launch cannot
        return write

    def _pack_job(self, write: _TimelineWrite) -> None:
        """Tell the kernel where everything goes."""
        job, address, n_streams = write.lease.arrays[0], self._side.address, self.ring.n_streams
        newest = write.parity * n_streams
        both = (address(newest), address(n_streams - newest)) if self.ring.n_sets == 2 else (0, 0)
        before = -1 if write.before is None else write.before * n_streams
        first = write.step * n_streams
        job[:_N_NUMBERS] = (self._rows.address(first), *both, first, before, newest)
        job[_N_NUMBERS:] = 0
        for stream, slot in zip(write.moved.tolist(), write.change.taken.tolist(), strict=True):
            job[_N_NUMBERS + 2 * stream : _N_NUMBERS + 2 * stream + 2] = address(slot), slot + 1

    def _stage(self, batches: Sequence[Array]) -> Lease:
        """Copy ``batches`` to memory that the device can read."""
        spec, ring = self.ring.spec, self.ring
        if len(batches) != ring.n_sets:
            raise SpecMismatchError(f"expected {ring.n_sets} batches, one per set, got {len(batches)}")
        lease = self._staging.acquire(self._staging_layout)
        if not spec.nbytes:
            lease.arrays[1][...] = 0
            return lease
        targets = lease.arrays[1].view(spec.dtype).reshape(-1, ring.n_streams, *spec.shape)
        for target, batch in zip(targets, batches, strict=True):
            if batch.shape != target.shape or batch.dtype != spec.dtype:
                batch = spec.to_batch(batch)
                if len(batch) != ring.n_streams:
                    raise SpecMismatchError(
                        f"expected an observation for each of {ring.n_streams} streams, got {len(batch)}"
                    )
            target[...] = batch
        return lease

    def _detach(self, step: int) -> None:
        """Keep the next observations of ``step`` in side rows: the step after it is about to be written out of order.

        What can be read stays the same, so this may be interrupted and run again.
        """
        ring, n_streams = self.ring, self.ring.n_streams
        first = step * n_streams
        streams = torch.nonzero(self.side_ids[first : first + n_streams] == FOLLOWS).flatten()
        if ring.n_sets == 1 or not len(streams):
            return
        indices = IndexBatch((ring.n_obs + first + streams.cpu().numpy())[None])
        kept = self._gather(indices)[0]
        change = self.slots.plan(self.slots.peek(len(streams)), _NOTHING)
        self._side.reserve(int(change.taken.min()), int(change.taken.max()) + 1)
        for row, slot in zip(kept, change.taken.tolist(), strict=True):
            self._side.row(slot).copy_(row)
        self.slots.commit(change)
        self.side_of[step] = np.concatenate([self.side_of.get(step, _NOTHING), change.taken])
        ids = torch.from_numpy(change.taken + np.int32(1)).to(self.device)
        self.side_ids[first + streams] = ids

    def launch(self, write: _TimelineWrite) -> None:
        """Write a step to the device; with Triton, by a single launch."""
        if self._triton:
            self.kernels.write(*write.lease.tensors)
            self._staging.release(write.lease)
        else:
            self._write_reference(write)

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

    def read(self, indices: IndexBatch) -> torch.Tensor:
        spec = self.ring.spec
        found = self._gather(indices)
        shape = (*indices.host.shape, *spec.shape)
        return found.view(torch_dtype(spec.dtype)).reshape(shape) if spec.nbytes else self._empty(indices.host.shape)

    def _empty(self, lead: tuple[int, ...]) -> torch.Tensor:
        spec = self.ring.spec
        return torch.empty((*lead, *spec.shape), dtype=torch_dtype(spec.dtype), device=self.device)

    def _gather(self, indices: IndexBatch) -> torch.Tensor:
        """Words ``[*indices.shape, word]`` on the device."""
        wanted = indices.on(self.device)
        if not self._triton:
            rows = self._rows.whole
            # pinned rows are in host memory
            found = read_timeline_reference(
                rows, self._side.whole, self.side_ids.to(rows.device), wanted.to(rows.device), self.ring.n_streams
            )
            return found.to(self.device)
        out = torch.empty((*wanted.shape, self._rows.n_words), dtype=self._rows.dtype, device=self.device)
        if wanted.numel():
            self.kernels.read(wanted.contiguous(), out)
        return out

    @property
    def can_read_batch(self) -> bool:
        return self._triton and self.ring.spec.nbytes > 0

    def read_batch(self, lease: Lease) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copy observations and the columns that belong to them in one launch, see `DeviceFrameStore.read_batch`."""
        indices, floats_from, actions_from = lease.tensors
        observations = self._empty(indices.shape)
        floats = torch.empty(floats_from.shape, dtype=torch.float32, device=self.device)
        actions = torch.empty(actions_from.shape, dtype=actions_from.dtype, device=self.device)
        self.kernels.read(indices, observations, Columns(floats, floats_from, actions, actions_from))
        return observations, floats, actions

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
