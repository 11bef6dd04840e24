"""Export and import of segments: what `SegmentStore` and `PackedStore` add to `portable`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.kernels.state import NONE, PACKED_CAMERA, Bytes
from sb3_extra_buffers.kernels.transfer import PROBLEMS, transfer_kernels
from sb3_extra_buffers.stores.base import Array
from sb3_extra_buffers.stores.checks import require
from sb3_extra_buffers.stores.frame_tables import FrameIds
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.portable import NO_OWNER, EncodedFrames, Numbers, PortableFrameStore, empty_data

Offsets = npt.NDArray[np.int64]


class PortableSegmentStore(PortableFrameStore):
    """Exports segments with their keyframes, and imports those of other stores; equal keyframes are stored once."""

    _length_dtype: np.dtype[Any]
    _zstd_level: int
    _packed_flags: tuple[int, ...]
    _n_packed: int
    _row_seconds: float

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # by row of the table of keyframes, computed on demand; `_add_row` drops those of rows that it replaces
        self._fingerprints: dict[int, bytes] = {}

    @abstractmethod
    def _follow_kernels(self) -> None: ...

    @abstractmethod
    def _add_row(self, row: Bytes, in_use: set[int]) -> int: ...

    @abstractmethod
    def _count_packed(self, segments: Array) -> int: ...

    @abstractmethod
    def _note_sealed(self, segments: Array) -> None: ...

    @abstractmethod
    def _check_limit(self, limit: int) -> None: ...

    @abstractmethod
    def _seal_streams(self, streams: list[int]) -> None: ...

    def seal_segments(self) -> None:
        """Seal every open segment, however few frames it has."""
        self._begin_change()
        self._free_listed()
        self._drop_view()
        try:
            self._seal_streams(np.flatnonzero(self.state.open_segments >= 0).tolist())
        finally:
            self._sync()
        self.dirty = False

    # ---- keyframes ----

    def _keyframe_row(self, number: int) -> Bytes:
        width = self.state.config.keyframe_bytes
        return self.state.keyframe_rows[number * width : (number + 1) * width]

    def keyframe_fingerprint(self, number: int) -> bytes:
        """Return a hash of a keyframe, by which receivers find out whether they have it already."""
        known = self._fingerprints.get(number)
        if known is None:
            known = self._fingerprints[number] = fingerprint(self._keyframe_row(number))
        return known

    def _import_keyframes(self, rows: Sequence[Bytes]) -> Numbers:
        """Return the numbers of these keyframes; those that the store does not have yet are added."""
        in_use = np.flatnonzero(self.state.keyframe_refs).tolist()
        by_fingerprint = {self.keyframe_fingerprint(number): number for number in in_use}
        taken = {*self.state.pool.tolist(), *self.state.stream_keyframes.tolist()}
        numbers = []
        for row in rows:
            mark = fingerprint(row)
            number = by_fingerprint.get(mark, NONE)
            if number == NONE or not np.array_equal(self._keyframe_row(number), row):
                number = self._add_row(row, taken)
                by_fingerprint[mark], self._fingerprints[number] = number, mark
            taken.add(number)
            numbers.append(number)
        return np.array([*numbers, NONE], np.int32)

    # ---- out ----

    def _encoded(self, frame_ids: FrameIds, segments: Offsets, needed: Offsets) -> tuple[EncodedFrames, list[int]]:
        state, tables = self.state, self._tables()
        kernels, lengths = transfer_kernels(self._kernels.compiled), np.empty(len(segments), np.int32)
        data = empty_data(kernels.measure_segments(tables, segments, needed, lengths))
        kernels.copy_segments(tables, segments, needed, lengths, data)
        keyframes = state.keyframes[segments]
        numbers, owners = np.unique(keyframes, return_inverse=True)
        n_none = int(np.count_nonzero(numbers < 0))
        shared = numbers[n_none:].tolist()
        local: Numbers = np.maximum(owners.reshape(-1) - n_none, NO_OWNER).astype(np.int32)
        rows = [self._keyframe_row(number).copy() for number in shared]
        return EncodedFrames(frame_ids, data, lengths, local, rows), shared

    # ---- reading what was exported ----

    def _use_shared(self, owners: Numbers, shared: Sequence[Bytes]) -> None:
        width = self.state.config.keyframe_bytes
        require(all(part.size == width for part in shared), f"a keyframe that does not take {width} bytes")
        rows = np.concatenate([np.zeros(0, np.uint8), *shared])
        self._replace(keyframes=np.where(owners < 0, NONE, owners).astype(np.int32), keyframe_rows=rows)
        kernels = transfer_kernels(self._kernels.compiled)
        problem = kernels.check_segments(self._tables(), self.frame_ids, len(shared))
        require(problem == 0, PROBLEMS[problem - 1])
        flags = self._packed_flags
        self._n_packed = int(np.isin(self.heap.data[self.heap.starts], flags).sum()) if flags else 0

    def _ids_to_verify(self) -> Offsets:
        flags = self.heap.data[self.heap.starts]
        if (flags == PACKED_CAMERA).any():
            return super()._ids_to_verify()
        # each frame refers to the one before, or all are decompressed together
        return np.arange(len(flags)) * self.per_segment + self.state.counts - 1

    def share_pace(self) -> None:
        if isinstance(self._template, PortableSegmentStore):
            self._template._row_seconds = self._row_seconds

    # ---- in ----

    def can_import(self, reader: FrameStore) -> bool:
        return (
            type(reader) is type(self)
            and isinstance(reader, PortableSegmentStore)
            and reader.layout == self.layout
            and reader.codec.codec_id == self.codec.codec_id
            and bool(reader._zstd_level) == bool(self._zstd_level)
            and reader.state.config.keyframe_bytes == self.state.config.keyframe_bytes
            and int(reader.state.counts.max(initial=0)) <= self.per_segment
        )

    def _import_segments(self, segments: Numbers, reader: PortableFrameStore, frames: EncodedFrames) -> None:
        numbers = self._import_keyframes(frames.shared)
        keyframes = numbers[frames.owners]  # NO_OWNER finds the last entry
        state = self.state
        state.keyframes[segments] = keyframes
        np.add.at(state.keyframe_refs, keyframes[keyframes >= 0], 1)
        state.counts[segments] = reader.state.counts
        self._put_payloads(segments, frames)
        if self._packed_flags:
            self._n_packed += self._count_packed(segments)

    def _end_import(self, segments: Numbers) -> None:
        if self.heap.limit is not None:
            self._check_limit(self.heap.limit)
        self._note_sealed(segments)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_fingerprints", None)
        return state

    def __setstate__(self, stored: dict[str, Any]) -> None:
        super().__setstate__(stored)
        self._fingerprints = {}


def fingerprint(part: Any) -> bytes:
    """A hash by which two processes recognise bytes that both have."""
    return blake2b(part, digest_size=16).digest()
