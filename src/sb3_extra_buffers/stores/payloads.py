"""Frames encoded one by one with a byte codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.kernels import frame_kernels
from sb3_extra_buffers.kernels.state import N_FREED, N_NEW
from sb3_extra_buffers.kernels.transfer import transfer_kernels
from sb3_extra_buffers.stores.arena import lengthen
from sb3_extra_buffers.stores.base import Array, Indices
from sb3_extra_buffers.stores.checks import column, require, within
from sb3_extra_buffers.stores.codec_records import codec_to_bytes, codecs_from_bytes, same_codec
from sb3_extra_buffers.stores.frame_tables import FrameIds
from sb3_extra_buffers.stores.frames import FrameStore, SavedFrames
from sb3_extra_buffers.stores.layout import Frames, StackLayout
from sb3_extra_buffers.stores.portable import EncodedFrames, Numbers, PortableFrameStore, empty_data
from sb3_extra_buffers.stores.workers import run_split

# bytes of output that a thread decodes at a time
_CHUNK_BYTES = 1 << 19
# a payload names its codec in one byte
_MAX_CODECS = 250
# a codec with what it has learnt, as JSON
_MAX_CODEC_BYTES = 1 << 24


class PayloadStore(PortableFrameStore):
    """A frame store in which each frame is a segment and a payload of its own.

    A codec that learns is trained again when its payloads have grown; frames remember which codec encoded them.
    """

    lists_new = True

    def __init__(
        self,
        layout: StackLayout,
        n_obs: int,
        n_streams: int,
        codec: Codec,
        heap_bytes: int | None = None,
        path: Path | None = None,
        compiled: bool | None = None,
    ) -> None:
        codec = codec.resolved()
        super().__init__(layout, n_obs, n_streams, codec, heap_bytes, path, compiled)
        self.codecs = [codec]
        self._generation = np.zeros(0, np.uint8)  # [segment]: position in codecs
        self._average = _Average()

    @classmethod
    def accepts(cls, codec: Codec, layout: StackLayout) -> bool:
        return True

    def train(self, rows: ByteRows) -> None:
        frames = self.layout.split(rows, self._kernels).reshape(-1, self.layout.frame_bytes)
        self.codec = self.codec.train(frames)
        self.codecs = [self.codec]

    @classmethod
    def trial_bytes(cls, layout: StackLayout, codec: Codec, streams: Indices, rows: ByteRows, n_streams: int) -> float:
        frames = layout.split(rows, frame_kernels()).reshape(-1, layout.frame_bytes)
        distinct = dict.fromkeys(frame.tobytes() for frame in frames)
        frames = np.frombuffer(b"".join(distinct), np.uint8).reshape(-1, layout.frame_bytes)
        return sum(map(len, codec.encode_batch(frames))) / max(len(frames), 1)

    # ---- writing ----

    def _write(self, frame_ids: FrameIds, indices: Indices, streams: Indices, frames: Frames) -> None:
        done = 0
        while True:
            done = self._kernels.write_frames(self._tables(), frame_ids, frames, streams, indices, done, True)
            if self.state.counters[N_NEW]:
                self._encode_new(frames)
            if done == len(frames):
                return
            self._grow()

    def _tidy(self) -> None:
        if self.state.counters[N_FREED]:
            self.dirty = True
            self._free_listed()
            self.dirty = False

    def _grow(self) -> None:
        super()._grow()
        self._generation = lengthen(self._generation, len(self.state.counts))

    def _encode_new(self, frames: Frames) -> None:
        """Encode the frames that the kernel listed as new."""
        count = int(self.state.counters[N_NEW])
        rows = frames.reshape(-1, frames.shape[2])[self.state.new_frames[:count]]
        segments = self.state.new_ids[:count]
        payloads = self.codecs[-1].encode_batch(rows)
        self._generation[segments] = len(self.codecs) - 1
        self._drop_view()
        self.heap.write(segments.tolist(), payloads)
        self._sync()
        self.state.counters[N_NEW] = 0
        if self.codec.trainable:
            self._retrain(rows, sum(map(len, payloads)))

    def _retrain(self, rows: ByteRows, nbytes: int) -> None:
        """Train the codec again when its payloads have grown by half since the last time."""
        self._average.add(rows, nbytes)
        if not self._average.stale or len(self.codecs) > _MAX_CODECS:
            return
        samples = self._average.samples()
        new = self.codec.train(samples)
        old_bytes = sum(map(len, self.codec.encode_batch(samples[::4])))
        new_bytes = sum(map(len, new.encode_batch(samples[::4])))
        if new_bytes < 0.9 * old_bytes:
            self.codecs.append(new)
            self.codec = new
        self._average = _Average()

    def _rebuild_segments(self) -> None:
        state = self.state
        # a frame without a payload belongs to a write that was undone
        state.counts[:] = state.lengths[: len(state.counts)] > 0
        if len(self._generation) < len(state.counts):
            self._generation = lengthen(self._generation, len(state.counts))
        self.codec = self.codecs[-1]

    # ---- reading ----

    def _decode(self, frame_ids: FrameIds, sets: Indices) -> npt.NDArray[np.uint8]:
        frames, inverse = self._decode_distinct(frame_ids, sets, _new_rows)
        return frames.take(inverse, axis=0)

    def _decode_windows(self, frame_ids: FrameIds, windows: Indices, out: ByteRows) -> None:
        layout, size, n_frames = self.layout, self.layout.frame_bytes, frame_ids.shape[1]
        rows = out.reshape(windows.size, n_frames * size)
        ids = frame_ids[windows].ravel() - 1
        if n_frames == 1 and len(self.codecs) == 1 and ids.min(initial=0) >= 0 and len(np.unique(ids)) == ids.size:
            # nothing to share: decode directly into the result
            self._decode_payloads(self.codec, ids, rows)
            return
        frames, inverse = self._decode_distinct(frame_ids, windows, _new_rows)
        numbers = inverse.reshape(windows.size, n_frames)
        joins = n_frames > 1 and layout.axis == "last"

        def work(first: int, stop: int) -> None:
            if joins:
                self._kernels.join_stack(frames.take(numbers[first:stop], axis=0), layout.pixels(rows[first:stop]))
            else:
                # the default mode would copy twice; the numbers are in range
                target = rows[first:stop].reshape(-1, n_frames, size)
                frames.take(numbers[first:stop], axis=0, out=target, mode="clip")

        run_split(work, windows.size, max(_CHUNK_BYTES // (n_frames * size), 1))

    def read_distinct(
        self, indices: Indices, make_rows: Callable[[int, int], ByteRows]
    ) -> tuple[ByteRows, npt.NDArray[np.int64]]:
        """Decode the distinct frames of ``indices`` into ``make_rows(n_frames, frame_bytes)``.

        Returns these rows, and for each frame of each observation the number of its row.
        """
        self.recover()
        if self.validator is not None:
            self.validator(indices)
        return self._decode_distinct(self.frame_ids, indices, make_rows)

    def find(self, indices: Indices) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Where in the heap the payload of each frame of ``indices`` starts, and its length: 0 for a frame of zeros."""
        ids = self.frame_ids[indices] - 1
        if not len(self.heap.starts):
            return np.zeros(ids.shape, np.int64), np.zeros(ids.shape, np.int32)
        return self.heap.starts[ids], np.where(ids >= 0, self.heap.lengths[ids], np.int32(0))

    def _decode_distinct(
        self, frame_ids: FrameIds, sets: Indices, make_rows: Callable[[int, int], ByteRows]
    ) -> tuple[ByteRows, npt.NDArray[np.int64]]:
        ids = frame_ids[sets].ravel() - 1
        unique, inverse = np.unique(ids, return_inverse=True)
        stored = unique[unique >= 0]
        n_zero = len(unique) - len(stored)  # 0 or 1: the frame of zeros comes first
        frames = make_rows(len(unique), self.layout.frame_bytes)
        frames[:n_zero] = 0
        generations = self._generation[stored]
        for generation, codec in enumerate(self.codecs):
            mine = np.flatnonzero(generations == generation)
            if len(mine) == len(stored):
                self._decode_payloads(codec, stored, frames[n_zero:])
            elif len(mine):
                rows = np.empty((len(mine), self.layout.frame_bytes), np.uint8)
                self._decode_payloads(codec, stored[mine], rows)
                frames[n_zero + mine] = rows
        return frames, inverse

    def _decode_payloads(self, codec: Codec, segments: npt.NDArray[np.int32], rows: ByteRows) -> None:
        starts, lengths = self.heap.starts[segments], self.heap.lengths[segments].astype(np.int64)
        decode = codec.heap_decoder(self.heap.data, starts, lengths, rows)
        run_split(decode, len(segments), max(_CHUNK_BYTES // rows.shape[1], 1))

    # ---- packets ----

    def _encoded(
        self, frame_ids: FrameIds, segments: npt.NDArray[np.int64], needed: npt.NDArray[np.int64]
    ) -> tuple[EncodedFrames, list[int]]:
        lengths = self.heap.lengths[segments]
        data = empty_data(int(lengths.sum(dtype=np.int64)))
        transfer_kernels(self._kernels.compiled).copy_payloads(self._tables(), segments, data)
        used, owners = np.unique(self._generation[segments], return_inverse=True)
        shared = [codec_to_bytes(self.codecs[number]) for number in used.tolist()]
        local: Numbers = owners.reshape(-1).astype(np.int32)
        return EncodedFrames(frame_ids, data, lengths, local, shared), used.tolist()

    def _use_shared(self, owners: Numbers, shared: Sequence[npt.NDArray[np.uint8]]) -> None:
        require(len(shared) <= _MAX_CODECS, f"{len(shared)} codecs")
        require(all(part.size <= _MAX_CODEC_BYTES for part in shared), "a codec is too large")
        within(owners, 0, max(len(shared), 1), "the codec of a payload")
        within(self.frame_ids, 0, len(owners) + 1, "a frame id")
        self._generation = owners.astype(np.uint8)
        self.codecs = codecs_from_bytes(shared, self.layout.frame_spec) if shared else [self.codec]
        codec_id = self.codecs[0].codec_id
        require(codec_id == self.codec.codec_id, f"payloads of {codec_id!r} in a store of {self.codec.codec_id!r}")

    def can_import(self, reader: FrameStore) -> bool:
        if not isinstance(reader, PayloadStore) or reader.layout != self.layout:
            return False
        return all(any(same_codec(codec, own) for own in self.codecs) for codec in reader.codecs)

    def _import_segments(self, segments: Numbers, reader: PortableFrameStore, frames: EncodedFrames) -> None:
        assert isinstance(reader, PayloadStore)
        # `can_import` has found each of them
        numbers = [next(i for i, own in enumerate(self.codecs) if same_codec(codec, own)) for codec in reader.codecs]
        self._generation[segments] = np.array(numbers, np.uint8)[frames.owners]
        self.state.counts[segments] = 1
        self._put_payloads(segments, frames)

    # ---- saving and copies ----

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_average": deepcopy(self._average)}

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Array]]:
        record, arrays = super().to_parts()
        return record, arrays | {"generation": self._generation}

    def _all_codecs(self) -> list[Codec]:
        return self.codecs

    def _restore_segments(self, saved: SavedFrames, read_only: bool) -> None:
        require(self.state.open_segments < 0, "a byte codec has no open segments")
        self.codecs = saved.codecs
        generation = column(saved.arrays, "generation", np.uint8, saved.counts.shape)
        within(generation, 0, len(self.codecs), "the codec of a payload")
        self._generation = lengthen(generation, len(generation))


def _new_rows(n_frames: int, size: int) -> ByteRows:
    return np.empty((n_frames, size), np.uint8)


class _Average:
    """Whether payloads have grown since the codec was trained, and frames to train it on again."""

    def __init__(self) -> None:
        self.n_frames = 0
        self.first: float = 0.0
        self.now: float = 0.0
        self._samples: list[npt.NDArray[np.uint8]] = []

    def add(self, rows: ByteRows, nbytes: int) -> None:
        if not len(rows):
            return
        size = nbytes / len(rows)
        self.n_frames += len(rows)
        weight = min(len(rows) / 256, 1.0)
        self.now += weight * (size - self.now) if self.now else size
        if self.n_frames <= 1024:
            self.first = self.now
        if self.now > 1.25 * self.first and len(self._samples) < 256:
            self._samples.append(rows[-1].copy())

    @property
    def stale(self) -> bool:
        return self.now > 1.5 * self.first and len(self._samples) >= 128

    def samples(self) -> ByteRows:
        return np.stack(self._samples)
