"""Frames as differences to the frames before them, some to a segment."""

from __future__ import annotations

import contextlib
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.delta import BLOCK, DeltaCodec
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.errors import CorruptPayloadError, HeapFullError
from sb3_extra_buffers.kernels.frames import is_full
from sb3_extra_buffers.kernels.lz4_block import OVERRUN, TABLE, unpack_block
from sb3_extra_buffers.kernels.policy import (
    COMPRESS_ABOVE,
    MAX_CHAIN_FRAMES,
    MAX_CHAIN_FRAMES_REFERENCE,
    PAYING_TENTHS,
    initial_cost,
)
from sb3_extra_buffers.kernels.state import (
    COMMITTED,
    N_FREED,
    N_SEALED,
    N_UNUSED,
    NONE,
    PACKED_LZ4,
    PACKED_ZSTD,
    FrameState,
    keyframe_bytes,
)
from sb3_extra_buffers.stores.arena import SLACK, lengthen
from sb3_extra_buffers.stores.frames import LATER, FrameStore, Indices
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.workers import run_split

# seconds of decoding for which another thread pays, and what each one takes at a time
_SPLIT_SECONDS = 1e-3
_CHUNK_SECONDS = 300e-6


class SegmentStore(FrameStore):
    """A frame store whose segments hold successive frames of a stream as differences.

    A stream's open segment lies in a room of its own and moves to the heap when it is full. The first frame of a
    segment refers to a keyframe, a whole frame that many segments share. Segments that are mostly dead are written
    anew, so no more than about twice the live frames are held.
    """

    def __init__(
        self,
        layout: StackLayout,
        n_obs: int,
        n_streams: int,
        codec: DeltaCodec,
        heap_bytes: int | None = None,
        path: Path | None = None,
        compiled: bool | None = None,
    ) -> None:
        # a new stack must fit into a new segment, or writing it would start over for ever
        per_segment = max(codec.frames, layout.stack)
        size = layout.frame_bytes
        stage_bytes = 2 + per_segment * 4 + per_segment * size + size // 2 + BLOCK
        super().__init__(layout, n_obs, n_streams, codec, heap_bytes, path, compiled, per_segment, stage_bytes)
        self._pack_level = codec.pack_level
        self._follow_kernels()
        self._unread: list[int] = []
        self._n_fresh = 0
        self._next_clean = 4096
        self._row_seconds = 20e-6

    def _follow_kernels(self) -> None:
        """What depends on the kind of kernels at hand."""
        compiled = self._kernels.compiled
        # bytes from which on a frame is heavy: none is to plain kernels, which cannot pack. They do not call zstd, so
        # with that they leave sealing to us
        compress_above = int(COMPRESS_ABOVE * self.layout.spec.nbytes) if compiled else self.layout.frame_bytes
        # what is packed by zstd is unpacked as a whole anyway; else a segment ends when walking it gets long, which for
        # plain kernels is sooner
        max_frames = MAX_CHAIN_FRAMES if compiled else MAX_CHAIN_FRAMES_REFERENCE
        config = self._state.config._replace(
            max_chain_bytes=int((self.per_segment if self._pack_level else max_frames) * self.layout.frame_bytes),
            compress_above=-1 if self._pack_level else compress_above,
        )
        self._replace(config=config)
        # segments that the read kernel cannot unpack by itself, and how they are marked
        self._packed_flags = (PACKED_ZSTD,) if compiled else (PACKED_ZSTD, PACKED_LZ4)
        sealed = np.flatnonzero(self._state.lengths)
        self._n_packed = int(np.isin(self.heap.data[self.heap.starts[sealed]], self._packed_flags).sum())

    # ---- writing ----

    def write_step(self, index: int, next_index: int, rows: ByteRows, next_rows: ByteRows) -> None:
        layout, kernels = self.layout, self._kernels
        frames, more = layout.split(rows, kernels), layout.split(next_rows, kernels)
        n_rows = len(frames)
        # `_begin_write`, for the path that every step takes
        if self._dirty:
            self.recover()
        self._state.counters[COMMITTED] = 1
        if len(self._state.undo_indices) < 2 * n_rows:
            self._lengthen_lists(2 * n_rows)
        self._dirty = True
        self._mark_dirty_run(index, n_rows)
        self._mark_dirty_run(next_index, n_rows)
        done = 0
        while True:
            done = kernels.write_step(
                self._bound or self._tables(), self.frame_ids, frames, more, index, next_index, done
            )
            if done == 2 * n_rows:
                break
            self._reserve(layout.stack)
        if self.heap.limit is not None:
            self._check_limit(self.heap.limit)
        self._dirty = False
        if self._unread or self._state.counters[N_FREED] > LATER or self._n_fresh > self._next_clean:
            self._tidy()

    def _write(
        self, frame_ids: npt.NDArray[np.int32], indices: Indices, streams: Indices, frames: npt.NDArray[np.uint8]
    ) -> None:
        done = 0
        while True:
            done = self._kernels.write_frames(
                self._tables(), frame_ids, frames, streams, indices, done, frame_ids is self.frame_ids
            )
            if done == len(frames):
                break
            self._reserve(frames.shape[1])
        if self.heap.limit is not None and frame_ids is self.frame_ids:
            self._check_limit(self.heap.limit)

    def _check_limit(self, limit: int) -> None:
        """Raise if observations take more than ``limit`` bytes."""
        self._adopt()
        held = self.payload_bytes
        if held > limit:
            raise HeapFullError(held - limit, limit, limit)

    @property
    def payload_bytes(self) -> int:
        """What a limit counts: segments, sealed and open, and the keyframes that they refer to."""
        state = self._state
        header = 2 + self.per_segment * self._state.config.length_bytes
        opened = int((state.stage_ends[state.open_segments >= 0] - header).sum())
        keyframes = int(np.count_nonzero(state.keyframe_refs)) * self.layout.frame_bytes
        return self.heap.live_bytes + opened + keyframes

    def _tidy(self) -> None:
        if self._unread or self._state.counters[N_FREED] > LATER:
            self._dirty = True
            self._free_listed()
        if self._n_fresh > self._next_clean:
            self._dirty = True
            self._clean()
        self._dirty = False

    def _free_listed(self) -> None:
        super()._free_listed()
        if self._unread:
            unread, self._unread = np.unique(self._unread), []
            self._free(unread)

    def _adopt(self) -> None:
        """Tell the heap which segments the kernel has put into its gap."""
        count = int(self._state.counters[N_SEALED])
        if count:
            sealed = self._state.sealed[:count].copy()
            self._state.counters[N_SEALED] = 0
            self.heap.adopt(sealed)
            self._sealed(sealed)

    def _sealed(self, segments: npt.NDArray[Any]) -> None:
        self._n_fresh += int(self._state.counts[segments].sum())
        # their frames may belong to a row that is being written: too early to free one without a reader
        self._unread += segments[self._state.live[segments] == 0].tolist()

    def _reserve(self, stack: int) -> None:
        """Seal the segments that are full; have unused segments for a stack."""
        super()._free_listed()
        full = [
            stream for stream in np.flatnonzero(self._state.open_segments >= 0).tolist() if is_full(self._state, stream)
        ]
        # an arena with views on it could not be lengthened where it lies
        self._drop_view()
        try:
            for stream in full:
                self._seal(stream)
        finally:
            self._sync()
        if self._state.counters[N_UNUSED] < stack:
            self._grow()

    def _seal(self, stream: int) -> None:
        """Move a stream's open segment to the heap; a first frame stored whole becomes a keyframe.

        Where much changes, few segments will start from it: this one then keeps its own, packed copy, and the
        keyframe goes again if no other needs it.
        """
        state = self._state  # without a view of the heap
        segment = int(state.open_segments[stream])
        room = state.config.stage_bytes
        width = self._state.config.length_bytes
        size = self.layout.frame_bytes
        count = int(state.counts[segment])
        begin = stream * room
        end, body_at = begin + int(state.stage_ends[stream]), begin + 2 + self.per_segment * width
        table = state.stage[begin : begin + 2 + count * width].copy()  # flags, count and lengths
        whole = int(table[2 : 2 + width].view(f"<u{width}")[0]) == size
        body = state.stage[body_at:end]
        flags, packed = 0, body
        if whole and not self._pack_level and body.size - size > self._state.config.compress_above * (count - 1):
            flags, packed = self._pack(body, count)
        shared = whole and not flags
        if shared:
            table[2 : 2 + width] = 0
            body = body[size:]
        if not flags:
            flags, packed = self._pack(body, count)
        table[0], table[1] = flags, count
        payload = np.concatenate([table, packed])
        self.heap.check_limit(segment, payload.size)
        if whole:
            keyframe = self._add_keyframe(stream, state.stage[body_at : body_at + size])
            if shared:
                # before the payload is there that needs it; a first frame that is whole does not care
                self._state.keyframe_refs[keyframe] = 1
                self._state.keyframes[segment] = keyframe
        self.heap.put(segment, payload)
        self._n_packed += flags in self._packed_flags
        state.open_segments[stream] = NONE
        self._sealed(np.array([segment]))

    def _pack(self, body: npt.NDArray[np.uint8], count: int) -> tuple[int, npt.NDArray[np.uint8]]:
        """The differences of a segment, compressed together where that is wanted and pays, and which way."""
        flags, packed, tenths = 0, body, PAYING_TENTHS
        if self._pack_level:
            from sb3_extra_buffers.codecs.packing import pack  # needs zstandard, as nothing else here does

            flags, packed, tenths = PACKED_ZSTD, np.frombuffer(pack(body, self._pack_level), np.uint8), 10
        elif body.size > self._state.config.compress_above * count:
            target = np.empty(body.size, np.uint8)
            source = np.concatenate([body, np.zeros(SLACK, np.uint8)])
            length = self._kernels.pack_block(source, body.size, target, np.empty(TABLE, np.int32))
            flags, packed = PACKED_LZ4, target[: length or body.size]
        return (flags, packed) if 10 * packed.size < tenths * body.size else (0, body)

    def _add_keyframe(self, stream: int, frame: npt.NDArray[np.uint8]) -> int:
        """Let ``stream`` start its segments from ``frame``; return the keyframe's number."""
        state = self._state
        size = keyframe_bytes(self.layout.frame_bytes)
        held = {*state.pool.tolist(), *state.stream_keyframes.tolist()}
        unused = (number for number in np.flatnonzero(state.keyframe_refs == 0).tolist() if number not in held)
        keyframe: int = next(unused, NONE)
        if keyframe == NONE:
            keyframe = len(state.keyframe_refs)
            n_keyframes = keyframe + max(keyframe // 4, 4)
            self._replace(
                keyframe_rows=lengthen(state.keyframe_rows, n_keyframes * size),
                keyframe_refs=lengthen(state.keyframe_refs, n_keyframes),
            )
            state = self._state
        row = state.keyframe_rows[keyframe * size : (keyframe + 1) * size]
        row[: frame.size] = frame
        self.new_keyframes.append(keyframe)
        state.stream_keyframes[stream] = keyframe
        # until a first frame has been encoded against it, a quarter of a frame is what it should cost
        state.keyframe_cost[stream] = initial_cost(self.layout.frame_bytes), 0
        state.pool[:] = np.roll(state.pool, 1)
        state.pool[0] = keyframe
        return keyframe

    def _drop_freed(self) -> None:
        counts = self._state.counts
        self.heap.lengths[: len(counts)][counts == 0] = 0

    def _rebuild_segments(self) -> None:
        state, per = self._state, self.per_segment
        room = state.config.stage_bytes
        width, size = state.config.length_bytes, self.layout.frame_bytes
        opened = state.open_segments
        streams = np.flatnonzero(opened >= 0)
        # sealed already, or opened for a frame that did not come
        over = (state.lengths[opened[streams]] > 0) | (state.counts[opened[streams]] == 0)
        opened[streams[over]] = NONE
        streams = streams[~over]
        here = np.zeros(len(state.counts), np.bool_)
        here[opened[streams]] = True
        here |= state.lengths[: len(here)] > 0
        state.counts[~here] = 0
        for stream in streams.tolist():
            segment, begin = int(opened[stream]), stream * room
            count = int(state.counts[segment])
            table = state.stage[begin + 2 : begin + 2 + count * width].view(f"<u{width}")
            lengths = table.astype(np.int64)
            if lengths[0] == size:
                state.keyframes[segment] = NONE  # a whole frame refers to none until it is sealed
            state.starts[segment] = -1 - begin
            state.stage[begin : begin + 2] = 0, count
            state.stage_ends[stream] = 2 + per * width + lengths.sum()
            state.chain_bytes[stream] = lengths[lengths < size].sum()
        used = state.keyframes[here & (state.keyframes >= 0)]
        state.keyframe_refs[:] = np.bincount(used, minlength=len(state.keyframe_refs))
        self._unread = []
        self._follow_kernels()
        self._remember_newest(streams)

    def _remember_newest(self, streams: npt.NDArray[np.int64]) -> None:
        """Give each of ``streams`` the newest frame of its open segment back, to which the next one refers."""
        state, size = self._state, self.layout.frame_bytes
        segments = state.open_segments[streams]
        ids = segments * self.per_segment + state.counts[segments] - 1
        places = (state.recent_next[streams] - 1) % state.recent_ids.shape[1]
        lost = np.flatnonzero(state.recent_ids[streams, places] != ids)
        if not len(lost):
            return
        ids, streams, places = ids[lost], streams[lost], places[lost]
        frames = self._decode((ids[:, None] + 1).astype(np.int32), np.arange(len(ids))[None])
        state.recent_ids[streams, places] = NONE
        state.recent[streams, places, :size] = frames.reshape(len(ids), size)
        state.recent_ids[streams, places] = ids

    def _forget(self, segments: npt.NDArray[np.int64]) -> None:
        state = self._state
        keyframes = state.keyframes[segments]
        np.subtract.at(state.keyframe_refs, keyframes[keyframes >= 0], 1)
        if self._n_packed:
            self._n_packed -= int(np.isin(state.heap[state.starts[segments]], self._packed_flags).sum())

    def _clean(self) -> None:
        """Write the frames of mostly dead segments anew and free these."""
        self._free_listed()
        state, per = self._state, self.per_segment
        self._n_fresh = 0
        n_live = int(np.count_nonzero(state.refs))
        self._next_clean = max(n_live // 4, 4096)
        if int(state.counts.sum()) > 2 * n_live + per * (self.n_streams + 1):
            sealed = (state.lengths > 0) & (2 * state.live <= state.counts) & (state.live > 0)
            for some in np.array_split(np.flatnonzero(sealed), max(int(sealed.sum()) // 256, 1)):
                self._move(some)

    def _move(self, segments: npt.NDArray[np.int64]) -> None:
        per = self.per_segment
        ids = (segments[:, None] * per + np.arange(per)).ravel()
        ids = ids[self._state.refs[ids] > 0]
        if not len(ids):
            return
        frames = self._decode((ids[:, None] + 1).astype(np.int32), np.arange(len(ids))[None])
        frames = frames.reshape(len(ids), 1, self.layout.frame_bytes)
        moved: npt.NDArray[np.int32] = np.zeros((len(ids), 1), np.int32)
        # what this stream remembers may lie in the very segments that go
        self._state.recent_ids[self.n_streams] = NONE
        # where the heap has no room for all of them, the rest stays where it is
        with contextlib.suppress(HeapFullError):
            self._write(moved, np.arange(len(ids)), np.full(len(ids), self.n_streams), frames)
        state = self._state
        ids, renamed = ids[moved[:, 0] > 0], moved[moved > 0] - 1
        # each new frame has one reference from `moved`; it takes over those of the old one
        np.add.at(state.refs, renamed, state.refs[ids] - 1)
        table = np.arange(state.refs.size + 1, dtype=np.int32)
        table[ids + 1] = renamed + 1
        # old and new ids name the same frames as long as the old segments are there: those go last
        for begin in range(0, len(self.frame_ids), 1 << 16):
            part = self.frame_ids[begin : begin + (1 << 16)]
            part[...] = table[part]
        state.undo_ids[...] = table[state.undo_ids]
        self.dirty_pages[:] = True
        state.refs[ids] = 0
        state.live[segments] = np.count_nonzero(state.refs.reshape(-1, per)[segments], axis=1)
        self._free(segments)

    # ---- reading ----

    def _decode(self, frame_ids: npt.NDArray[np.int32], sets: Indices) -> npt.NDArray[np.uint8]:
        """The frames that ``slots`` names at ``sets`` (``[set, row]``), one after the other."""
        size = self.layout.frame_bytes
        out = np.empty(sets.size * frame_ids.shape[1] * size, np.uint8)
        tables = self._bound or self._tables()
        if self._n_packed:
            local, frame_ids, sets = self._unpacked(frame_ids, sets)
            tables = self._kernels.bind_state(local)
        read = self._kernels.read_frames
        n_rows = sets.shape[1]

        def work(first: int, stop: int) -> int:
            began = perf_counter()
            damaged: int = read(tables, frame_ids, sets, out, first, stop)
            self._row_seconds = min(1.05 * self._row_seconds, (perf_counter() - began) / (stop - first))
            return damaged

        # how long a row takes depends on the machine and on what is stored: the last ones tell
        if n_rows * self._row_seconds < _SPLIT_SECONDS or not self._kernels.compiled:
            damaged = work(0, n_rows) if n_rows else -1
        else:
            damaged = max(run_split(work, n_rows, max(int(_CHUNK_SECONDS / self._row_seconds), 1)))
        if damaged >= 0:
            raise CorruptPayloadError(f"segment {damaged} of the heap is damaged and cannot be decoded")
        return out

    def _unpacked(
        self, frame_ids: npt.NDArray[np.int32], sets: Indices
    ) -> tuple[FrameState, npt.NDArray[np.int32], Indices]:
        """Tables, slots and cells for the same frames in which every segment is plain."""
        state, per = self._state, self.per_segment
        ids = frame_ids[sets] - 1
        segments, inverse = np.unique(ids // per, return_inverse=True)
        sealed = np.flatnonzero((segments >= 0) & (state.lengths[segments] > 0))
        flags = state.heap[state.starts[segments[sealed]]]
        width = self._state.config.length_bytes
        bodies = [np.zeros(0, np.uint8)] * len(segments)

        def work(first: int, stop: int) -> None:
            for index, packed in zip(sealed[first:stop], flags[first:stop], strict=True):
                payload = np.frombuffer(self.heap.read(int(segments[index])), np.uint8)
                bodies[index] = _inflate(payload, width, per, self.layout.frame_bytes) if packed else payload

        run_split(work, len(sealed), 16)
        lengths = np.array([body.size for body in bodies], np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        # open segments stay where they are
        opened = (segments >= 0) & (lengths == 0)
        starts[opened] = state.starts[segments[opened]]
        local = state._replace(
            heap=np.concatenate([*bodies, np.zeros(SLACK, np.uint8)]),
            starts=starts,
            lengths=lengths,
            keyframes=state.keyframes[segments],
        )
        renamed = np.where(ids < 0, 0, inverse.reshape(ids.shape) * per + ids % per + 1).astype(np.int32)
        return local, renamed.reshape(sets.size, frame_ids.shape[1]), np.arange(sets.size).reshape(sets.shape)

    def difference_bytes(self) -> tuple[int, int]:
        """Bytes of all segments, and of keyframes beyond one for each stream; the number of frames."""
        self.collect_segments()
        state, size = self._state, self.layout.frame_bytes
        opened = np.flatnonzero(state.open_segments >= 0)
        room = state.config.stage_bytes
        width = self._state.config.length_bytes
        nbytes, n_frames = self.heap.live_bytes, int(state.counts.sum())
        n_keyframes = int(np.count_nonzero(state.keyframe_refs))
        for stream in opened:
            begin = stream * room + 2
            count = int(state.counts[state.open_segments[stream]])
            lengths = state.stage[begin : begin + count * width].view(f"<u{width}")
            starts_keyframe = int(lengths[0]) == size
            nbytes += int(lengths[starts_keyframe:].sum(dtype=np.int64))
            n_keyframes += starts_keyframe
        nbytes += max(n_keyframes - self.n_streams, 0) * size
        return nbytes, n_frames

    def __setstate__(self, stored: dict[str, Any]) -> None:
        super().__setstate__(stored)
        # the reader may be of the other kind than the writer
        self._follow_kernels()


def _inflate(payload: npt.NDArray[np.uint8], width: int, per_segment: int, frame_bytes: int) -> npt.NDArray[np.uint8]:
    """A packed segment as it was before it was packed."""
    count = int(payload[1]) if len(payload) > 2 else 0
    at = 2 + count * width
    if count > per_segment or at > len(payload):
        raise CorruptPayloadError(f"a segment of {len(payload)} bytes cannot hold {count} frames")
    lengths = payload[2:at].view("<u4" if width == 4 else "<u2")
    if count and int(lengths.max()) > frame_bytes:
        raise CorruptPayloadError(f"a segment holds a frame of {lengths.max()} bytes where {frame_bytes} is the most")
    size = int(lengths.sum(dtype=np.int64))
    plain = np.empty(at + size, np.uint8)
    plain[:at] = payload[:at]
    plain[0] = 0
    if payload[0] == PACKED_ZSTD:
        from sb3_extra_buffers.codecs.packing import unpack  # needs zstandard, as nothing else here does

        plain[at:] = np.frombuffer(unpack(payload[at:], size), np.uint8)
    else:
        body = np.empty(size + OVERRUN, np.uint8)
        if not unpack_block(payload, at, len(payload), body, size, size):
            raise CorruptPayloadError(f"a segment of {len(payload)} bytes is not an LZ4 block of {size}")
        plain[at:] = body[:size]
    return plain
