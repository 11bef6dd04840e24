"""Export of encoded frames from one frame store, and import into another, without decoding them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.kernels import as_contiguous
from sb3_extra_buffers.kernels.state import N_UNUSED, NONE, Bytes
from sb3_extra_buffers.kernels.transfer import transfer_kernels
from sb3_extra_buffers.stores.arena import SLACK
from sb3_extra_buffers.stores.base import Indices
from sb3_extra_buffers.stores.checks import require, within
from sb3_extra_buffers.stores.frame_tables import FrameIds
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.heap import Heap

if TYPE_CHECKING:
    from typing_extensions import Self

Numbers = npt.NDArray[np.int32]

#: In `EncodedFrames.owners`: the segment needs none of the shared parts.
NO_OWNER = -1


class EncodedFrames(NamedTuple):
    """The encoded frames of some observations, and everything that is needed to decode them."""

    frame_ids: FrameIds  # [row, stack]: segment * per_segment + position + 1, or 0 for a frame of zeros
    data: Bytes  # the segments, one after the other, and `SLACK` more bytes
    lengths: Numbers  # [segment]: bytes in data
    owners: Numbers  # [segment]: which of `shared` it needs, or NO_OWNER
    shared: Sequence[Bytes]  # keyframes and dictionaries; for a byte codec, the codecs

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each segment starts in ``data``."""
        lengths = self.lengths.astype(np.int64)
        return np.cumsum(lengths) - lengths


class PortableFrameStore(FrameStore):
    """A frame store that exports the encoded frames of observations, and imports those of other stores.

    Nothing is decoded. Segments are exported up to the last frame that is needed, and open segments as if they were
    sealed.
    """

    # the store that made this reader
    _template: PortableFrameStore | None = None

    # ---- out ----

    def export_frames(self, indices: Indices) -> tuple[EncodedFrames, list[int]]:
        """Return the encoded frames of ``indices``, and the number of each of `EncodedFrames.shared` in this store."""
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
        """Return the first ``needed`` frames of each of ``segments``, which ``frame_ids`` refer to."""

    # ---- reading what was exported ----

    def reader_of(self, frames: EncodedFrames) -> Self:
        """Return a read-only store that reads ``frames``, with the settings of this store.

        Raises `FileFormatError` unless everything but the encoded bytes is valid. The bytes are checked when they are
        decoded, as in all stores.
        """
        lengths = frames.lengths
        within(lengths, 1, 1 << 31, "the length of a segment")
        total = int(lengths.sum(dtype=np.int64))
        require(total + SLACK == frames.data.size, f"{frames.data.size} bytes of segments that take {total}")
        reader = object.__new__(type(self))
        reader.__dict__.update(self.__dict__)
        reader.heap = Heap.of(frames.data, frames.starts, lengths)
        reader.frame_ids, reader.read_only, reader._template = frames.frame_ids, True, self
        self._tables()  # fills the entries of columns that readers share
        reader._known_columns = dict(self._known_columns)
        reader._replace(
            heap=frames.data, starts=reader.heap.starts, lengths=lengths, counts=np.ones(len(lengths), np.int32)
        )
        reader._use_shared(frames.owners, frames.shared)
        return reader

    @abstractmethod
    def _use_shared(self, owners: Numbers, shared: Sequence[Bytes]) -> None:
        """In a new reader, let segment ``i`` refer to ``shared[owners[i]]``, count its frames and check it."""

    def verify_frames(self) -> None:
        """Raise `CorruptPayloadError` unless every frame can be decoded; for readers."""
        ids = self._ids_to_verify()
        for part in np.array_split(ids, max(ids.size * self.layout.frame_bytes >> 22, 1)):
            if len(part):
                self._decode_ids(part)
        self.share_pace()

    def _ids_to_verify(self) -> npt.NDArray[np.int64]:
        """Return frames such that decoding these decodes all frames."""
        per, counts = self.per_segment, self.state.counts
        segments, positions = np.nonzero(np.arange(per) < counts[:, None])
        return segments * per + positions

    def share_pace(self) -> None:
        """Pass the measured time per row to the store that created this reader, for the next reader."""

    # ---- in ----

    @abstractmethod
    def can_import(self, reader: FrameStore) -> bool:
        """Whether segments of ``reader`` (`reader_of`) are segments of this store too."""

    def import_frames(self, indices: Indices, reader: PortableFrameStore, frames: EncodedFrames) -> None:
        """Store ``frames``, which ``reader`` reads, at ``indices``; a transaction, like any other write."""
        indices = as_contiguous(indices)
        self._begin_change()
        if len(self.state.undo_indices) < len(indices):
            self._lengthen_lists(len(indices))
        segments = self._take_segments(len(frames.lengths))
        self._mark_dirty(indices)
        self._import_segments(segments, reader, frames)
        transfer_kernels(self._kernels.compiled).refer_rows(
            self._tables(), self.frame_ids, indices, frames.frame_ids, segments, reader.per_segment,
            np.empty(self.layout.stack, np.int64),
        )  # fmt: skip
        self._end_import(segments)
        self.dirty = False
        self._tidy()

    def _take_segments(self, count: int) -> Numbers:
        """Take ``count`` unused segments; `recover` returns them."""
        if self.state.counters[N_UNUSED] < count:
            self._free_listed()
        while self.state.counters[N_UNUSED] < count:
            self._grow()
        state, stop = self.state, int(self.state.counters[N_UNUSED])
        segments = state.unused[stop - count : stop][::-1].copy()
        state.counters[N_UNUSED] = stop - count
        state.live[segments] = 0
        state.keyframes[segments] = NONE
        state.refs.reshape(-1, self.per_segment)[segments] = 0
        return segments

    @abstractmethod
    def _import_segments(self, segments: Numbers, reader: PortableFrameStore, frames: EncodedFrames) -> None:
        """Set the tables of new ``segments``, then put them into the heap with `_put_payloads`.

        The order matters: `recover` drops segments with frames but no payload, and payloads without frames.
        """

    def _put_payloads(self, segments: Numbers, frames: EncodedFrames) -> None:
        self._drop_view()
        if len(segments):
            self.heap.put_together(segments, frames.data, frames.lengths)
        self._sync()

    def _end_import(self, segments: Numbers) -> None:
        """Check limits, and free segments that no observation refers to."""
        self._free(segments[self.state.live[segments] == 0])


def empty_data(total: int) -> Bytes:
    """Return memory for ``total`` bytes of segments, and `SLACK` zeros after them."""
    data = np.empty(total + SLACK, np.uint8)
    data[total:] = 0
    return data
