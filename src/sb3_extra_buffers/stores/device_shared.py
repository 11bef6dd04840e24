"""Uncompressed frames on a device; observations that contain the same frame share it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.kernels.gather_torch import read_frames_reference
from sb3_extra_buffers.stores.device_base import DeviceRing, IndexBatch, put_in
from sb3_extra_buffers.stores.device_layout import join_frames
from sb3_extra_buffers.stores.device_pieces import Pieces, SlotChange, SlotPool, Slots, word_dtype
from sb3_extra_buffers.stores.device_uncompressed import StagedWrite, UncompressedDeviceStore
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.staging import Lease
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceSharedStore"]

Array = npt.NDArray[Any]

_INT64, _INT32 = np.dtype(np.int64), np.dtype(np.int32)
# the slot of the frame of zeros, and a marker for frames without a slot
_ZEROS, _NEW = 0, -(1 << 31)


class _SharedWrite(StagedWrite):
    __slots__ = ("counts", "new", "touched")

    def __init__(
        self,
        store: DeviceSharedStore,
        lease: Lease,
        step: int,
        new: Slots,
        change: SlotChange,
        touched: Slots,
        counts: Slots,
    ) -> None:
        self.new = new
        # slots whose reference counts change, and their new counts
        self.touched, self.counts = touched, counts
        _, ids, frames = lease.arrays
        super().__init__(store, lease, step, change, {"_last": frames[-1], "_last_ids": ids[-1].copy()})

    def commit(self) -> None:
        store: DeviceSharedStore = self.owner
        store.launch(self)
        store.ids[:, self.step] = self.lease.arrays[1]
        store.refs[self.touched] = self.counts
        store.slots.commit(self.change)
        super().commit()


class DeviceSharedStore(UncompressedDeviceStore):
    """Uncompressed frames, each stored once; ``place.pinned`` keeps them in pinned host memory.

    An observation is ``stack`` slot numbers. The host compares each row with the previous one of its stream and sends
    only new frames to the device. It also counts the references to each slot; a slot without references is reused.
    """

    layout: StackLayout

    def __init__(
        self, ring: DeviceRing, layout: StackLayout, codec: Codec | None = None, *unused: Any,
        triton: bool | None = None,
    ) -> None:  # fmt: skip
        self._use_ring(ring, triton)
        self.layout = layout
        n_streams, stack = ring.n_streams, layout.stack
        dtype = _frame_word(layout)
        # the worst case: every frame is new, and those of the overwritten step are still in use
        max_slots = 1 + (ring.n_steps + 1) * n_streams * ring.n_sets * stack
        expected = (ring.n_steps + stack) * n_streams
        n_words = layout.frame_bytes // dtype.itemsize
        self._frames = Pieces(max_slots, expected, 1, n_words, dtype, ring.place, self._triton)
        self._frames.reserve(0, 1)
        self._frames.row(_ZEROS).zero_()
        lead = (ring.n_sets, ring.n_steps, n_streams)
        #: int32 [obs_index, stack]: slots, on the device and on the host.
        self.frame_ids = torch.zeros((math.prod(lead), stack), dtype=torch.int32, device=self.device)
        self.ids = np.zeros((*lead, stack), np.int32)
        #: int32 [slot]: how often it occurs in ``ids``. Pages take memory once they are written.
        self.refs = np.zeros(max_slots, np.int32)
        self.slots = SlotPool(1)
        self._start_staging()

    @staticmethod
    def accepts(codec: Codec, layout: StackLayout) -> bool:
        return codec.codec_id == "none" and layout.stack > 1 and layout.frame_bytes > 0

    def _start_staging(self) -> None:
        """Set up what belongs to this process."""
        ring, stack = self.ring, self.layout.stack
        self._word = _frame_word(self.layout)
        lead = (ring.n_sets, ring.n_streams, stack)
        n_frames = math.prod(lead)
        parts = ((1 + 2 * n_frames,), _INT64), (lead, _INT32), ((*lead, self._frames.n_words), self._word)
        self._set_up_staging(ring.n_sets * ring.n_streams * ring.spec.nbytes, *parts)
        # [set, stream, stack]: ids of frames that have no slot yet, by their number in the staging memory
        self._numbers = -1 - np.arange(n_frames, dtype=np.int32).reshape(lead)
        # counts references to some slots at a time
        self._tally = np.zeros(self._frames.max_rows, np.int32)
        # the slots of the frames of the last rows
        self._last_ids: Slots | None = None

    def _bind_kernels(self) -> Any:
        from sb3_extra_buffers.kernels.gather_triton import FrameGather  # optional: needs Triton

        ring, frames, layout = self.ring, self._frames, self.layout
        unit = frames.n_words
        if layout.axis == "last":
            unit = layout.spec.nbytes // math.prod(layout.spec.shape[:-1]) // layout.stack // frames.itemsize
        return FrameGather(
            frames.addresses, self.frame_ids, frames.dtype, frames.n_words, unit, ring.n_steps, ring.n_streams,
            ring.n_sets, frames.per_piece,
        )  # fmt: skip

    # ---- writing ----

    def _plan_rows(self, step: int, batches: Sequence[Array], last: Array | None, lease: Lease) -> _SharedWrite:
        _, ids, frames = lease.arrays
        last_ids = self._last_ids
        for which, batch in enumerate(batches):
            is_last = which == len(batches) - 1
            # fast path: obs usually equals the last next_obs, and need not be staged then
            if not is_last and last is not None and self._equals(batch, last):
                ids[which] = last_ids
                continue
            rows = frames[which]
            self._stage(batch, rows)
            ids[which] = _find_frames(rows, self._numbers[which], last, last_ids, likely_shifted=is_last)
            last, last_ids = rows, ids[which]
        return self._plan_slots(lease, step)

    def _equals(self, batch: Array, last: Array) -> bool:
        """Whether ``batch`` equals the last rows; False if comparing would be slow."""
        if self.layout.axis == "last" or not batch.flags.c_contiguous or not batch.flags.aligned:
            return False
        return bool((batch.reshape(-1).view(self._word) == last.reshape(-1)).all())

    def _stage(self, batch: Array, rows: Array) -> None:
        """Copy ``batch``, cut into frames, to memory that the device can read."""
        layout, n_streams = self.layout, self.ring.n_streams
        frames = rows.view(layout.spec.dtype)
        if layout.axis == "first":
            frames.reshape(batch.shape)[...] = batch
        else:
            depth = layout.spec.shape[-1] // layout.stack
            pixels = batch.reshape(n_streams, -1, layout.stack, depth)
            frames.reshape(n_streams, layout.stack, -1, depth)[...] = pixels.swapaxes(1, 2)

    def _plan_slots(self, lease: Lease, step: int) -> _SharedWrite:
        """Give new frames slots, and free those that are not needed any more."""
        flat = lease.arrays[1].reshape(-1)
        where = np.flatnonzero(flat < 0)
        new = -1 - flat[where]
        # a new frame may occur several times
        distinct = new if len(set(new.tolist())) == len(new) else np.unique(new)
        taken = self.slots.peek(len(distinct))
        if len(new):
            flat[where] = taken if distinct is new else taken[np.searchsorted(distinct, new)]
            self._frames.reserve(int(taken.min()), int(taken.max()) + 1)
        old = self.ids[:, step].reshape(-1)
        touched, tally = np.concatenate([flat, old]), self._tally
        tally[touched] = self.refs[touched]
        np.add.at(tally, flat, 1)
        np.subtract.at(tally, old, 1)
        freed = old[(tally[old] == 0) & (old != _ZEROS)]
        change = self.slots.plan(taken, np.unique(freed) if len(freed) > 1 else freed)
        return _SharedWrite(self, lease, step, distinct, change, touched, tally[touched])

    def _pack_job(self, write: _SharedWrite) -> None:
        job, n_new = write.lease.arrays[0], len(write.new)
        job[0] = write.step
        if n_new:
            job[1 : 1 + 2 * n_new : 2] = write.new
            job[2 : 2 + 2 * n_new : 2] = [self._frames.address(slot) for slot in write.change.taken.tolist()]

    def _launch_kernel(self, write: _SharedWrite) -> None:
        self.kernels.write(*write.lease.tensors, len(write.new))

    def _write_reference(self, write: _SharedWrite) -> None:
        frames = self._frames.whole
        _, ids, staged = write.lease.arrays
        if len(write.new):
            # indexing copies: the memory may be used again before the device has read it
            new = torch.from_numpy(staged.reshape(-1, staged.shape[-1])[write.new])
            frames[torch.from_numpy(write.change.taken.astype(np.int64)).to(frames.device)] = new.to(frames.device)
        by_step = self.frame_ids.view(*self.ids.shape)
        by_step[:, write.step] = torch.from_numpy(ids.copy()).to(self.device)

    # ---- reading ----

    def read(self, indices: IndexBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        wanted, layout = indices.on(self.device), self.layout
        if self._triton:
            out = self._empty(wanted.shape) if out is None else out
            if wanted.numel():
                self.kernels.read(wanted.contiguous(), out)
            return out
        frames = self._frames.whole
        # pinned frames are in host memory
        found = read_frames_reference(frames, self.frame_ids.to(frames.device), wanted.to(frames.device))
        return put_in(out, join_frames(found.view(torch.uint8).to(self.device), layout))

    # ---- the rest ----

    def clear(self) -> None:
        self._last = None
        self.frame_ids.zero_()
        self.ids[:] = _ZEROS
        self.refs[: self.slots.end] = 0
        self.slots.clear()

    def memory_usage(self) -> MemoryUsage:
        index = self.frame_ids.nbytes + self.ids.nbytes + self.slots.nbytes + self.slots.end * self.refs.itemsize
        return MemoryUsage(self._frames.nbytes, index, 0, self._staging.nbytes)

    def check(self) -> None:
        if not np.array_equal(self.frame_ids.cpu().numpy(), self.ids.reshape(self.frame_ids.shape)):
            raise AssertionError("the frame ids of the device and of the host differ")
        counts = np.bincount(self.ids.ravel(), minlength=self.slots.end)
        counts[_ZEROS] = self.refs[_ZEROS]  # never freed, so not counted from the start
        if len(counts) > self.slots.end or not np.array_equal(counts, self.refs[: self.slots.end]):
            raise AssertionError("the reference counts of the frames are wrong")
        self.slots.check(np.flatnonzero(self.refs[1 : self.slots.end]) + 1)

    def frozen(self) -> DeviceSharedStore:
        copied = object.__new__(DeviceSharedStore)
        copied.__dict__.update(
            self.__dict__, _frames=self._frames.frozen(), slots=self.slots.copy(), ids=self.ids.copy(),
            refs=self.refs.copy(),
        )  # fmt: skip
        return copied

    def __getstate__(self) -> dict[str, Any]:
        names = ("ring", "layout", "_frames", "slots", "ids")
        return {name: self.__dict__[name] for name in names} | {"refs": self.refs[: self.slots.end].copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        refs = state.pop("refs")
        self.__dict__.update(state)
        self.device = self.ring.place.device
        self._triton = self._frames.triton
        self.refs = np.zeros(self._frames.max_rows, np.int32)
        self.refs[: len(refs)] = refs
        self.frame_ids = torch.from_numpy(self.ids.reshape(-1, self.layout.stack).copy()).to(self.device)
        self._start_staging()


def _frame_word(layout: StackLayout) -> np.dtype[Any]:
    """The word dtype of a frame, or of a pixel of it if frames are interleaved along the last axis."""
    if layout.axis == "last" and layout.stack > 1:
        return word_dtype(layout.spec.shape[-1] // layout.stack * layout.spec.dtype.itemsize)
    return word_dtype(layout.frame_bytes)


def _find_frames(
    rows: Array,  # [stream, stack, word]
    numbers: Slots,  # [stream, stack]: the ids of frames that are new
    last: Array | None,  # the previous row of each stream
    last_ids: Slots | None,  # and the ids of its frames
    likely_shifted: bool,
) -> Slots:
    """The ids of the frames of ``rows``: those of equal frames in ``last``, or new ones."""
    if last is None or last_ids is None:
        unknown = list(range(len(rows)))
        ids = numbers.copy()
    else:
        ids, found = _match_rows(rows, numbers, last, last_ids, likely_shifted)
        if found is None:
            return ids
        unknown = np.flatnonzero(~found).tolist()
    for stream in unknown:
        known: list[tuple[int, Array]] = []
        if last is not None and last_ids is not None:
            known += zip(last_ids[stream].tolist(), last[stream], strict=True)
        for nth, frame in enumerate(rows[stream]):
            number = _ZEROS
            if frame.any():
                number = next((other for other, shown in known if np.array_equal(frame, shown)), _NEW)
            if number == _NEW:
                known.append((int(numbers[stream, nth]), frame))
            else:
                ids[stream, nth] = number
    return ids


def _match_rows(
    rows: Array, numbers: Slots, last: Array, last_ids: Slots, likely_shifted: bool
) -> tuple[Slots, npt.NDArray[np.bool_] | None]:
    """Ids of rows that equal the last row or are shifted by one frame; and flags of those rows, None if all are."""
    flat, flat_last, size = rows.reshape(len(rows), -1), last.reshape(len(rows), -1), rows.shape[2]
    ids, found = numbers.copy(), np.zeros(len(rows), np.bool_)
    for shifted in (likely_shifted, not likely_shifted):
        equal = flat[:, :-size] == flat_last[:, size:] if shifted else flat == flat_last
        is_all = bool(equal.all())
        where: Any = slice(None) if is_all and not found.any() else equal.all(axis=1) & ~found
        if shifted:
            ids[where, :-1] = last_ids[where, 1:]
            newest = rows[where, -1]
            # a frame of zeros, or one that repeats the last one, is not new
            newest_ids = np.where(newest.any(axis=1), numbers[where, -1], _ZEROS)
            is_repeated = (newest == last[where, -1]).all(axis=1)
            ids[where, -1] = np.where(is_repeated, last_ids[where, -1], newest_ids)
        else:
            ids[where] = last_ids[where]
        found[where] = True
        if is_all or found.all():
            return ids, None
    return ids, found
