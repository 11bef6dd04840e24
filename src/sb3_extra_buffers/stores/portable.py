"""Encoded frames taken out of one frame store and filed in another, as they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.kernels.state import N_UNDO, N_UNUSED, NONE, Bytes
from sb3_extra_buffers.kernels.transfer import copy_ranges
from sb3_extra_buffers.stores.arena import SLACK
from sb3_extra_buffers.stores.base import Indices
from sb3_extra_buffers.stores.frame_tables import FrameIds
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.heap import Heap

if TYPE_CHECKING:
    from typing_extensions import Self

Numbers = npt.NDArray[np.int32]

#: In `EncodedFrames.owners`: the segment needs nothing that segments share.
NO_OWNER = -1


class EncodedFrames(NamedTuple):
    """Frames of some observations, encoded, and all that is needed to decode them."""

    frame_ids: FrameIds  # [row, stack]: segment * per_segment + position + 1, or 0 for a frame of zeros
    per_segment: int
    data: Bytes  # the segments, one after the other, and `SLACK` more bytes
    lengths: Numbers  # [segment]: bytes in data
    counts: Numbers  # [segment]: number of frames
    owners: Numbers  # [segment]: which of `shared` it needs, or NO_OWNER
    shared: Sequence[Bytes]  # keyframes and dictionaries; for a byte codec, the codecs

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each segment starts in ``data``."""
        lengths = self.lengths.astype(np.int64)
        return np.cumsum(lengths) - lengths


class PortableFrameStore(FrameStore):
    """A frame store that exports the encoded frames of observations, and imports those of others.

    Nothing is decoded. A segment is exported up to the last frame that is needed; an open one as if it were sealed.
    """

    # ---- out ----

    def export_frames(self, indices: Indices) -> tuple[EncodedFrames, list[int]]:
        """Return the encoded frames of ``indices``, and which number each of `EncodedFrames.shared` has here."""
        self._begin_read(indices)
        per = self.per_segment
        ids = self.frame_ids[indices.reshape(-1)]
        used, inverse = np.unique(ids, return_inverse=True)
        n_zero = int(len(used) > 0 and used[0] == 0)
        stored = used[n_zero:].astype(np.int64) - 1
        segment_of, positions = stored // per, stored % per
        is_last = np.ones(len(stored), np.bool_)
        is_last[:-1] = segment_of[1:] != segment_of[:-1]
        numbers = np.zeros(len(used), np.int32)
        numbers[n_zero:] = (np.cumsum(is_last) - is_last) * per + positions + 1
        local_ids = numbers[inverse].reshape(ids.shape)
        return self._encoded(local_ids, segment_of[is_last], positions[is_last] + 1)

    @abstractmethod
    def _encoded(
        self, frame_ids: FrameIds, segments: npt.NDArray[np.int64], needed: npt.NDArray[np.int64]
    ) -> tuple[EncodedFrames, list[int]]:
        """The first ``needed`` frames of each of ``segments``, which ``frame_ids`` refer to."""

    # ---- reading what was exported ----

    def reader_of(self, frames: EncodedFrames) -> Self:
        """Return a store that reads ``frames``, whose tables were checked; it cannot be written to.

        This store lends its settings and is not changed.
        """
        reader = object.__new__(type(self))
        reader.__dict__.update(self.__dict__)
        n_segments = len(frames.lengths)
        heap = Heap(n_segments)
        heap.lengths[:] = frames.lengths
        heap.refer_to(np.arange(n_segments, dtype=np.int32), frames.data, frames.starts)
        reader.heap, reader.frame_ids, reader.read_only = heap, frames.frame_ids, True
        reader._known_columns = {}
        reader._replace(counts=frames.counts, gap=np.zeros(2, np.int64))
        reader._sync()
        reader._use_shared(frames.owners, frames.shared)
        return reader

    @abstractmethod
    def count_frames(self, data: Bytes, lengths: Numbers) -> Numbers:
        """How many frames each segment of ``data`` says it has; raises if one cannot have as many."""

    @abstractmethod
    def check_shared(self, owners: Numbers, shared: Sequence[Bytes]) -> None:
        """Raise unless ``shared`` is what segments of this store can refer to."""

    def verify_frames(self) -> None:
        """Raise `CorruptPayloadError` unless every frame can be decoded."""
        per, counts = self.per_segment, self.state.counts
        segments, positions = np.nonzero(np.arange(per) < counts[:, None])
        ids = segments * per + positions
        for part in np.array_split(ids, max(ids.size * self.layout.frame_bytes >> 22, 1)):
            if len(part):
                self._decode_ids(part)

    @abstractmethod
    def _use_shared(self, owners: Numbers, shared: Sequence[Bytes]) -> None:
        """Let segment i refer to ``shared[owners[i]]``."""

    # ---- in ----

    @abstractmethod
    def can_import(self, reader: FrameStore) -> bool:
        """Whether segments of ``reader`` (`reader_of`) are segments of this store too."""

    def import_frames(self, indices: Indices, frames: EncodedFrames) -> None:
        """Let ``indices`` refer to ``frames``, which were checked; a write like any other.

        If an index occurs twice, its last row counts.
        """
        newest = np.sort(len(indices) - 1 - np.unique(indices[::-1], return_index=True)[1])
        indices, local = indices[newest], frames.frame_ids[newest].astype(np.int64) - 1
        self._begin_change()
        if len(self.state.undo_indices) < len(indices):
            self._lengthen_lists(len(indices))
        segments = self._take_segments(len(frames.lengths))
        self._mark_dirty(indices)
        self._file_segments(segments, frames)
        # the last entry is for frames of zeros
        firsts = np.append(segments.astype(np.int64) * self.per_segment, 0)
        ids = np.where(local < 0, 0, firsts[local // frames.per_segment] + local % frames.per_segment + 1)
        self._refer_to(indices, ids.astype(np.int32))
        self._end_import(segments)
        self.dirty = False
        self._tidy()

    def _take_segments(self, count: int) -> Numbers:
        """Take ``count`` unused segments; `recover` puts them back."""
        if self.state.counters[N_UNUSED] < count:
            self._free_listed()
        while self.state.counters[N_UNUSED] < count:
            self._grow()
        state, stop = self.state, int(self.state.counters[N_UNUSED])
        segments = state.unused[stop - count : stop][::-1].copy()
        state.counters[N_UNUSED] = stop - count
        state.live[segments] = 0
        state.keyframes[segments] = NONE
        state.refs[(segments[:, None].astype(np.int64) * self.per_segment + np.arange(self.per_segment)).ravel()] = 0
        return segments

    @abstractmethod
    def _file_segments(self, segments: Numbers, frames: EncodedFrames) -> None:
        """Set the tables of new ``segments``, then put them into the heap with `_put_payloads`.

        In this order: `recover` drops a segment that has frames but no payload, and the other way round.
        """

    def _put_payloads(self, segments: Numbers, frames: EncodedFrames) -> None:
        starts, total = frames.starts, int(frames.lengths.sum(dtype=np.int64))
        self._drop_view()
        heap = self.heap
        begin, end = heap.gap()
        if total <= end - begin and total:
            heap.data[begin : begin + total] = frames.data[:total]
            heap.starts[segments] = begin + starts
            heap.lengths[segments] = frames.lengths
            heap.adopt(segments)
        else:
            ends = starts + frames.lengths
            payloads = [frames.data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
            heap.write(segments.tolist(), payloads)
        self._sync()

    def _refer_to(self, indices: Indices, ids: FrameIds) -> None:
        """Let ``indices`` consist of the frames ``ids``, to which nothing refers yet; log what they consisted of."""
        state, n_rows = self.state, len(indices)
        used, n_refs = np.unique(ids[ids > 0] - 1, return_counts=True)
        state.undo_indices[:n_rows] = indices
        state.undo_ids[:n_rows] = self.frame_ids[indices]
        # from here on an interrupted write restores these rows
        state.counters[N_UNDO] = n_rows
        self.frame_ids[indices] = ids
        state.refs[used] = n_refs
        np.add.at(state.live, used // self.per_segment, 1)

    def _end_import(self, segments: Numbers) -> None:
        """Check limits, and free segments that no observation refers to."""
        self._free(segments[self.state.live[segments] == 0])


def gather(source: Bytes, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Bytes:
    """Return the ranges of ``source``, one after the other, and `SLACK` bytes of zeros."""
    total = int(lengths.sum())
    data = np.empty(total + SLACK, np.uint8)
    data[total:] = 0
    copy_ranges(source, starts, data, np.cumsum(lengths) - lengths, lengths)
    return data
