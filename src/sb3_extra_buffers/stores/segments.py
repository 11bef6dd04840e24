"""Frames as differences to their predecessors, several to a segment: the store of ``delta``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.delta import BLOCK
from sb3_extra_buffers.codecs.registry import get_codec, is_available
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.errors import CorruptPayloadError, HeapFullError
from sb3_extra_buffers.kernels import as_contiguous, policy
from sb3_extra_buffers.kernels.dispatch import compiled_kernels, is_refusal
from sb3_extra_buffers.kernels.frames import is_full
from sb3_extra_buffers.kernels.policy import ReadWork, read_ns, write_ns
from sb3_extra_buffers.kernels.state import (
    COMMITTED,
    N_FREED,
    N_SEALED,
    N_UNUSED,
    NONE,
    PACKED_CAMERA,
    PACKED_LZ4,
    PACKED_ZSTD,
    Bytes,
    FrameState,
)
from sb3_extra_buffers.kernels.tables import Lookup
from sb3_extra_buffers.stores.arena import SLACK, lengthen
from sb3_extra_buffers.stores.base import Array, Indices, Trial
from sb3_extra_buffers.stores.checks import require, whole
from sb3_extra_buffers.stores.frame_tables import FREE_BATCH, FrameIds
from sb3_extra_buffers.stores.frames import SavedFrames
from sb3_extra_buffers.stores.layout import Frames, StackLayout
from sb3_extra_buffers.stores.portable_segments import PortableSegmentStore
from sb3_extra_buffers.stores.segment_format import check_headers, header_bytes, inflate, length_dtype, pack_frames
from sb3_extra_buffers.stores.workers import n_workers, run_split, split_seconds

_NO_ADDRESSES = np.zeros(0, np.int64)
# Windows are cut into pieces, several for each thread. Their number of steps is limited, and the bytes of their frames
# if these are interleaved after the whole piece was decoded: they should still be in the cache
_N_PIECES = 4
_MIN_STEPS, _MAX_STEPS = 16, 128
_PIECE_BYTES = 1 << 19
# segments in which `SegmentStore.sequences_per_frame` counts
_N_COUNTED = 32


def _zstd_addresses() -> npt.NDArray[np.int64]:
    """Return the addresses that compiled code needs to call zstd in this thread; empty if it cannot."""
    if not is_available("zstd"):
        return _NO_ADDRESSES
    from sb3_extra_buffers.codecs.zstd import direct_addresses  # needs zstandard

    return direct_addresses()


class DirectWriter(Protocol):
    """A kernel that writes steps to the tables of a store, whose addresses it was given."""

    n_rows: int
    write: Callable[..., int]

    def is_bound_to(self, inner: SegmentStore) -> bool: ...

    def bind(self, inner: SegmentStore, first: int = 0) -> None: ...

    def skip_steps(self) -> None: ...


class SegmentStore(PortableSegmentStore):
    """A frame store whose segments hold consecutive frames of a stream as differences.

    The open segment of a stream is kept in ``state.stage``, and moves to the heap when it is full (it is *sealed*). The
    first frame of a segment refers to a keyframe, a whole frame that many segments share. The frames of mostly dead
    segments are moved to new ones, so that at most about twice the live frames are held.
    """

    # how long decoding a step of a window takes
    _window_seconds = 2e-6

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
        # a stack must fit into an empty segment, or writing it would never end
        per_segment = max(self.frames_per_segment(codec), layout.stack)
        size = layout.frame_bytes
        stage_bytes = 2 + per_segment * 4 + per_segment * size + size // 2 + BLOCK
        super().__init__(layout, n_obs, n_streams, codec, heap_bytes, path, compiled, per_segment, stage_bytes)
        self._zstd_level: int = getattr(codec, "pack_level", 0)
        self._length_dtype = length_dtype(self.state.config)
        self._follow_kernels()
        # sealed segments that nothing refers to, to be freed after the write
        self._unread: list[int] = []
        # frames sealed since segments were last cleaned, and how many it takes until the next cleaning
        self._n_fresh = 0
        self._next_clean = 4096
        self._row_seconds = 20e-6

    @classmethod
    def accepts(cls, codec: Codec, layout: StackLayout) -> bool:
        return codec.codec_id == "delta"

    @staticmethod
    def frames_per_segment(codec: Codec) -> int:
        """How many frames a segment has at most."""
        n_frames: int = codec.frames  # type: ignore[attr-defined]  # a DeltaCodec
        return n_frames

    @property
    def _keyframe_size(self) -> int:
        return self.layout.frame_bytes

    def _follow_kernels(self) -> None:
        """Set what depends on whether the kernels are compiled."""
        compiled, layout = self._kernels.compiled, self.layout
        # bytes per frame from which on a segment is compressed. Reference kernels cannot compress. No kernel calls
        # zstd, so that with zstd all sealing is left to this class
        compress_above = int(policy.COMPRESS_ABOVE * layout.spec.nbytes) if compiled else layout.frame_bytes
        max_chain = policy.MAX_CHAIN_FRAMES if compiled else policy.MAX_CHAIN_FRAMES_REFERENCE
        # a segment that is compressed with zstd is decompressed as a whole, however much of it is read
        config = self.state.config._replace(
            max_chain_bytes=int((self.per_segment if self._zstd_level else max_chain) * layout.frame_bytes),
            compress_above=-1 if self._zstd_level else compress_above,
        )
        self._replace(config=config)
        # flags of segments that the read kernel cannot decompress, and how many of those there are
        self._packed_flags = self._unreadable_flags()
        self._n_packed = self._count_packed(np.flatnonzero(self.state.lengths))

    def _unreadable_flags(self) -> tuple[int, ...]:
        if not self._kernels.compiled:
            return PACKED_ZSTD, PACKED_LZ4, PACKED_CAMERA
        return () if _zstd_addresses().size else (PACKED_ZSTD,)

    def _count_packed(self, segments: Array) -> int:
        return int(np.isin(self.heap.data[self.heap.starts[segments]], self._packed_flags).sum())

    # ---- writing ----

    def write_step(self, index: int, next_index: int, rows: ByteRows, next_rows: ByteRows) -> None:
        layout, kernels = self.layout, self._kernels
        frames, next_frames = layout.split(rows, kernels), layout.split(next_rows, kernels)
        n_rows = len(frames)
        # as in `write`, inlined: every step takes this path
        if self.dirty:
            self.recover()
        self.state.counters[COMMITTED] = 1
        if len(self.state.undo_indices) < 2 * n_rows:
            self._lengthen_lists(2 * n_rows)
        self.dirty = True
        self._mark_dirty_run(index, n_rows)
        self._mark_dirty_run(next_index, n_rows)
        done = 0
        while True:
            done = kernels.write_step(
                self._tables() if self.bound is None else self.bound,
                self.frame_ids,
                frames,
                next_frames,
                index,
                next_index,
                done,
            )
            if done == 2 * n_rows:
                break
            self._reserve(layout.stack)
        if self.heap.limit is not None:
            self._check_limit(self.heap.limit)
        self.dirty = False
        self._tidy_if_due()

    def write_direct(self, writer: DirectWriter, arguments: tuple[Any, ...]) -> bool:
        """Let ``writer.write(*arguments)`` write a step to the tables, which also commits it.

        Returns False, and changes nothing, if the step does not fit. Any exception undoes what was not committed.
        """
        if self.dirty:
            self.recover()
        self.state.counters[COMMITTED] = 1
        # before addresses are compared, so that no signal handler replaces a table in between
        self.dirty = True
        if not writer.is_bound_to(self):
            writer.bind(self)
        try:
            written: int = writer.write(*arguments)
        except (TypeError, ValueError) as problem:
            if not is_refusal(problem):
                raise
            # an argument is not an array, or not of the stored dtype, or not contiguous
            self.dirty = False
            writer.skip_steps()
            return False
        if written == writer.n_rows:
            self.dirty = False
            return True
        if written < 0:
            self.dirty = False
            return False
        while written < writer.n_rows:
            self._reserve(self.layout.stack)
            writer.bind(self, written)
            written = writer.write(*arguments)
        writer.bind(self)
        self.dirty = False
        self._tidy_if_due()
        return True

    def _tidy_if_due(self) -> None:
        if self._unread or self.state.counters[N_FREED] > FREE_BATCH or self._n_fresh > self._next_clean:
            self._tidy()

    def _write(self, frame_ids: FrameIds, indices: Indices, streams: Indices, frames: Frames) -> None:
        is_user_write = frame_ids is self.frame_ids  # not one that moves frames
        done = 0
        while True:
            done = self._kernels.write_frames(self._tables(), frame_ids, frames, streams, indices, done, is_user_write)
            if done == len(frames):
                break
            self._reserve(frames.shape[1])
        if self.heap.limit is not None and is_user_write:
            self._check_limit(self.heap.limit)

    def _check_limit(self, limit: int) -> None:
        """Raise if observations take more than ``limit`` bytes."""
        self._adopt()
        held = self.payload_bytes
        if held > limit:
            raise HeapFullError(held - limit, limit, limit)

    @property
    def payload_bytes(self) -> int:
        """The bytes that a limit counts: segments, sealed and open, and the keyframes that they refer to."""
        state = self.state
        header = header_bytes(self.per_segment, self._length_dtype)
        opened = int((state.stage_ends[state.open_segments >= 0] - header).sum())
        keyframes = int(np.count_nonzero(state.keyframe_refs)) * self._keyframe_size
        return self.heap.live_bytes + opened + keyframes

    def _reserve(self, stack: int) -> None:
        """Seal full segments, and make sure that there are enough unused ones for a stack."""
        super()._free_listed()
        opened = np.flatnonzero(self.state.open_segments >= 0).tolist()
        full = [stream for stream in opened if is_full(self.state, stream)]
        if full:
            # also those that are nearly full, so that most writes seal none; `PackedStore` packs them in threads
            full = [stream for stream in opened if self._is_nearly_full(stream)]
        self._drop_view()
        try:
            self._seal_streams(full)
        finally:
            self._sync()
        if self.state.counters[N_UNUSED] < stack:
            self._grow()

    def _is_nearly_full(self, stream: int) -> bool:
        state = self.state
        count, chain = int(state.counts[state.open_segments[stream]]), int(state.chain_bytes[stream])
        return 4 * count >= 3 * self.per_segment or 4 * chain >= 3 * state.config.max_chain_bytes

    def _seal_streams(self, streams: list[int]) -> None:
        for stream in streams:
            self._seal(stream)

    def _adopt(self) -> None:
        count = int(self.state.counters[N_SEALED])
        if count:
            sealed = self.state.sealed[:count].copy()
            self.state.counters[N_SEALED] = 0
            self.heap.adopt(sealed)
            self._note_sealed(sealed)

    def _note_sealed(self, segments: Array) -> None:
        self._n_fresh += int(self.state.counts[segments].sum())
        # too early to free one that nothing refers to: its frames may belong to a row that is being written
        self._unread += segments[self.state.live[segments] == 0].tolist()

    def _seal(self, stream: int) -> None:
        """Move a stream's open segment to the heap; a first frame that is stored whole becomes a keyframe.

        Where much changes, few other segments will start from that keyframe. The segment then keeps its first frame,
        compressed with the others, and the keyframe is dropped again if no other segment needs it.
        """
        state = self.state  # `_drop_view` was called: the heap may grow
        segment, size, dtype = int(state.open_segments[stream]), self.layout.frame_bytes, self._length_dtype
        count, begin = int(state.counts[segment]), stream * self.state.config.stage_bytes
        end, body_at = begin + int(state.stage_ends[stream]), begin + header_bytes(self.per_segment, dtype)
        header = state.stage[begin : begin + header_bytes(count, dtype)].copy()
        lengths = header[2:].view(dtype)
        body = state.stage[body_at:end]
        starts_whole = int(lengths[0]) == size
        flags, packed = 0, body
        if starts_whole and not self._zstd_level and body.size - size > state.config.compress_above * (count - 1):
            flags, packed = pack_frames(body, count, self._kernels, state.config.compress_above, self._zstd_level)
        shares_keyframe = starts_whole and not flags
        if shares_keyframe:
            lengths[0] = 0
            body = body[size:]
        if not flags:
            flags, packed = pack_frames(body, count, self._kernels, state.config.compress_above, self._zstd_level)
        header[:2] = flags, count
        payload = np.concatenate([header, packed])
        self.heap.check_limit(segment, payload.size)
        if starts_whole:
            keyframe = self._add_keyframe(stream, state.stage[body_at : body_at + size])
            if shares_keyframe:
                # set before the payload that needs it exists: until then, the open segment starts with a whole frame
                self.state.keyframe_refs[keyframe] = 1
                self.state.keyframes[segment] = keyframe
        self.heap.put(segment, payload)
        self._n_packed += flags in self._packed_flags
        state.open_segments[stream] = NONE
        self._note_sealed(np.array([segment]))

    def _add_keyframe(self, stream: int, frame: Bytes) -> int:
        """Let ``stream`` start its segments from ``frame``; return the keyframe's number."""
        state = self.state
        keyframe = self._add_row(frame, {*state.pool.tolist(), *state.stream_keyframes.tolist()})
        state = self.state
        state.stream_keyframes[stream] = keyframe
        state.keyframe_cost[stream] = policy.initial_cost(self.layout.frame_bytes), 0
        state.pool[:] = np.roll(state.pool, 1)
        state.pool[0] = keyframe
        return keyframe

    def _add_row(self, row: Bytes, in_use: set[int]) -> int:
        """Add a row to the table of keyframes, at a number that is not ``in_use``; return that number."""
        state, size = self.state, self.state.config.keyframe_bytes
        unused = (number for number in np.flatnonzero(state.keyframe_refs == 0).tolist() if number not in in_use)
        keyframe: int = next(unused, NONE)
        if keyframe == NONE:
            keyframe = len(state.keyframe_refs)
            n_keyframes = keyframe + max(keyframe // 4, 4)
            self._replace(
                keyframe_rows=lengthen(state.keyframe_rows, n_keyframes * size),
                keyframe_refs=lengthen(state.keyframe_refs, n_keyframes),
            )
            state = self.state
        self._fingerprints.pop(keyframe, None)
        state.keyframe_rows[keyframe * size :][: row.size] = row
        self.new_keyframes.append(keyframe)
        return keyframe

    # ---- freeing ----

    def _tidy(self) -> None:
        if self._unread or self.state.counters[N_FREED] > FREE_BATCH:
            self.dirty = True
            self._free_listed()
        if self._n_fresh > self._next_clean:
            self.dirty = True
            self._clean()
        self.dirty = False

    def _free_listed(self) -> None:
        super()._free_listed()
        if self._unread:
            unread, self._unread = np.unique(self._unread), []
            self._free(unread)

    def _release_segments(self, segments: Array) -> None:
        keyframes = self.state.keyframes[segments]
        np.subtract.at(self.state.keyframe_refs, keyframes[keyframes >= 0], 1)
        if self._n_packed:
            self._n_packed -= self._count_packed(segments)

    def _clean(self) -> None:
        """Move the frames of mostly dead segments to new ones."""
        self._free_listed()
        state, per = self.state, self.per_segment
        self._n_fresh = 0
        n_live = int(np.count_nonzero(state.refs))
        self._next_clean = max(n_live // 4, 4096)
        if int(state.counts.sum()) > 2 * n_live + per * (self.n_streams + 1):
            sparse = np.flatnonzero((state.lengths > 0) & (2 * state.live <= state.counts) & (state.live > 0))
            for segments in np.array_split(sparse, max(len(sparse) // 256, 1)):
                self._move(segments)

    def _move(self, segments: Array) -> None:
        """Move the live frames of ``segments``, and free these."""
        per = self.per_segment
        ids = (segments[:, None] * per + np.arange(per)).ravel()
        ids = ids[self.state.refs[ids] > 0]
        if not len(ids):
            return
        frames = self._decode_ids(ids)[:, None]
        moved: FrameIds = np.zeros((len(ids), 1), np.int32)
        # the recent frames of this stream may be in the very segments that are freed
        self.state.recent_ids[self.n_streams] = NONE
        # where the heap has no space for all of them, the rest stays where it is
        with contextlib.suppress(HeapFullError):
            self._write(moved, np.arange(len(ids)), np.full(len(ids), self.n_streams), frames)
        # old and new ids name the same frames as long as the old segments exist: those are freed last
        self._replace_ids(ids[moved[:, 0] > 0], moved[moved > 0] - 1)
        state = self.state
        state.live[segments] = np.count_nonzero(state.refs.reshape(-1, per)[segments], axis=1)
        self._free(segments)

    # ---- recovery ----

    def _drop_freed(self) -> None:
        counts = self.state.counts
        self.heap.lengths[: len(counts)][counts == 0] = 0

    def _rebuild_segments(self) -> None:
        state, opened, size = self.state, self.state.open_segments, self.layout.frame_bytes
        streams = np.flatnonzero(opened >= 0)
        # sealed already, or opened for a frame that was never written
        over = (state.lengths[opened[streams]] > 0) | (state.counts[opened[streams]] == 0)
        opened[streams[over]] = NONE
        streams = streams[~over]
        in_use = np.zeros(len(state.counts), np.bool_)
        in_use[opened[streams]] = True
        in_use |= state.lengths[: len(in_use)] > 0
        state.counts[~in_use] = 0
        self._link_stage()
        for stream in streams.tolist():
            segment, begin = int(opened[stream]), stream * self.state.config.stage_bytes
            lengths = self._staged_lengths(stream)
            if lengths[0] == size:
                state.keyframes[segment] = NONE  # a whole frame refers to none until it is sealed
            state.stage[begin : begin + 2] = 0, len(lengths)
            state.stage_ends[stream] = header_bytes(self.per_segment, self._length_dtype) + lengths.sum()
            state.chain_bytes[stream] = lengths[lengths < size].sum()
        used = state.keyframes[in_use & (state.keyframes >= 0)]
        state.keyframe_refs[:] = np.bincount(used, minlength=len(state.keyframe_refs))
        self._unread = []
        self._follow_kernels()
        self._restore_newest(streams)

    def _link_stage(self) -> None:
        """Point the ``starts`` of open segments to the stage."""
        streams = np.flatnonzero(self.state.open_segments >= 0)
        self.state.starts[self.state.open_segments[streams]] = -1 - streams * self.state.config.stage_bytes

    def _staged_lengths(self, stream: int) -> npt.NDArray[np.int64]:
        """Bytes of each frame of a stream's open segment."""
        begin = stream * self.state.config.stage_bytes
        end = begin + header_bytes(int(self.state.counts[self.state.open_segments[stream]]), self._length_dtype)
        return self.state.stage[begin + 2 : end].view(self._length_dtype).astype(np.int64)

    def _restore_newest(self, streams: npt.NDArray[np.int64]) -> None:
        """Make the newest frame of each open segment the most recent one of its stream: the next frame refers to it."""
        state = self.state
        segments = state.open_segments[streams]
        ids = segments * self.per_segment + state.counts[segments] - 1
        positions = (state.recent_next[streams] - 1) % state.recent_ids.shape[1]
        lost = np.flatnonzero(state.recent_ids[streams, positions] != ids)
        if len(lost):
            ids, streams, positions = ids[lost], streams[lost], positions[lost]
            frames = self._decode_ids(ids)
            state.recent_ids[streams, positions] = NONE
            state.recent[streams, positions, : self.layout.frame_bytes] = frames
            state.recent_ids[streams, positions] = ids

    # ---- reading ----

    def read_units(self, indices: Indices, lookup: Lookup) -> ByteRows:
        """`read`, with each byte replaced by the entry of a table. Needs compiled kernels."""
        units = self._decode(self.frame_ids, self._begin_read(indices), lookup)
        return units.reshape(indices.size, self.layout.spec.nbytes * lookup.unit)

    def read_unit_windows(self, indices: Indices, newest_only: bool, lookup: Lookup, out: ByteRows) -> None:
        """`read_windows` into ``out``, with each byte replaced by the entry of a table. Needs compiled kernels."""
        self._decode_windows(*self._locate_windows(indices, newest_only), out, lookup)

    def _decode_windows(
        self, frame_ids: FrameIds, windows: Indices, out: ByteRows, lookup: Lookup | None = None
    ) -> None:
        if not self._kernels.compiled and frame_ids.shape[1] > 1 and self.layout.axis == "last":
            super()._decode_windows(frame_ids, windows, out)
            return
        flat, target = windows.reshape(-1), out.reshape(-1)
        n_pieces = _N_PIECES * n_workers()
        length = windows.shape[1] if len(windows) >= n_pieces else -(-flat.size // n_pieces)
        is_direct = frame_ids.shape[1] == 1 or self.layout.axis == "first"
        most = _MAX_STEPS if is_direct else max(min(_PIECE_BYTES // max(self.layout.frame_bytes, 1), _MAX_STEPS), 1)
        length = min(max(length, _MIN_STEPS), most)
        n_whole = flat.size // length * length
        n_bytes = n_whole * (target.size // max(flat.size, 1))
        for part, to in ((flat[:n_whole], target[:n_bytes]), (flat[n_whole:], target[n_bytes:])):
            if part.size:
                sets = as_contiguous(part.reshape(-1, min(length, part.size)).T)
                self._decode_into(to, frame_ids, sets, lookup, by_row=True)

    def _decode(self, frame_ids: FrameIds, sets: Indices, lookup: Lookup | None = None) -> Bytes:
        n_bytes = sets.size * frame_ids.shape[1] * self.layout.frame_bytes
        out = np.empty(n_bytes if lookup is None else n_bytes * lookup.unit, np.uint8)
        self._decode_into(out, frame_ids, sets, lookup)
        return out

    def _decode_into(
        self, out: Bytes, frame_ids: FrameIds, sets: Indices, lookup: Lookup | None = None, by_row: bool = False
    ) -> None:
        """Decode ``sets`` into ``out``, which is flat; with ``by_row``, each column of ``sets`` is a window."""
        tables = self._tables() if self.bound is None else self.bound
        if self._n_packed:
            local, frame_ids, sets = self._unpacked(frame_ids, sets)
            tables = self._kernels.bind_state(local, {})
        read, zstd = self._read_kernel(lookup is not None), self._zstd_level
        n_rows, options, seconds = sets.shape[1], () if lookup is None else lookup, self._row_seconds
        if by_row:
            seconds = self._window_seconds * len(sets)

        def work(first: int, stop: int) -> int:
            began = perf_counter()
            addresses = _zstd_addresses() if zstd else _NO_ADDRESSES
            damaged: int = read(tables, frame_ids, sets, out, first, stop, addresses, by_row, *options)
            took = (perf_counter() - began) / (stop - first)
            if by_row:
                self._window_seconds = min(1.05 * self._window_seconds, took / len(sets))
            else:
                self._row_seconds = min(1.05 * self._row_seconds, took)
            return damaged

        # the time per row depends on the machine and the contents; it is estimated from previous reads
        least, chunk = split_seconds()
        if n_rows * seconds < least or not self._kernels.compiled:
            damaged = work(0, n_rows) if n_rows else -1
        else:
            damaged = max(run_split(work, n_rows, max(int(chunk / seconds), 1)))
        if damaged >= 0:
            raise CorruptPayloadError(f"segment {damaged} of the heap is damaged and cannot be decoded")

    @property
    def joins_frames(self) -> bool:
        return self._kernels.compiled

    def _read_kernel(self, expands: bool) -> Callable[..., int]:
        """The kernel that reads frames, and looks up their bytes in a table if it ``expands`` them."""
        read: Callable[..., int] = compiled_kernels("expanded").read_frames if expands else self._kernels.read_frames
        return read

    def _unpacked(self, frame_ids: FrameIds, sets: Indices) -> tuple[FrameState, FrameIds, Indices]:
        """Tables, frame ids and indices of the same frames, in which every segment is decompressed."""
        state, per = self.state, self.per_segment
        ids = frame_ids[sets].reshape(sets.size, frame_ids.shape[1])
        # frames of zeros are in no segment
        is_held = ids > 0
        segments, inverse = np.unique((ids[is_held] - 1) // per, return_inverse=True)
        sealed = np.flatnonzero(state.lengths[segments] > 0)
        payloads = [np.zeros(0, np.uint8)] * len(segments)

        def work(first: int, stop: int) -> None:
            for i in sealed[first:stop]:
                payload = np.frombuffer(self.heap.read(int(segments[i])), np.uint8)
                payloads[i] = self._inflate(payload, int(segments[i]))

        run_split(work, len(sealed), 16)
        lengths = np.array([payload.size for payload in payloads], np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        # open segments stay where they are
        opened = lengths == 0
        starts[opened] = state.starts[segments[opened]]
        local = state._replace(
            heap=np.concatenate([*payloads, np.zeros(SLACK, np.uint8)]),
            starts=starts,
            lengths=lengths,
            keyframes=state.keyframes[segments],
        )
        local_ids = np.zeros_like(ids)
        local_ids[is_held] = inverse * per + (ids[is_held] - 1) % per + 1
        return local, local_ids, np.arange(sets.size).reshape(sets.shape)

    def _inflate(self, payload: Bytes, segment: int) -> Bytes:
        return inflate(payload, self._length_dtype, self.per_segment, self.layout.frame_bytes)

    @classmethod
    def trial(cls, layout: StackLayout, codec: Codec, streams: Indices, rows: ByteRows, n_streams: int) -> Trial:
        store = cls(layout, len(rows), n_streams, codec)
        # only the second half counts: the first frames of a stream need keyframes that later ones share
        nbytes = n_frames = 0
        for part in np.array_split(np.arange(len(rows)), 2):
            before = nbytes, n_frames
            store.write(part, streams[part], rows[part])
            nbytes, n_frames = store.trial_size(), int(store.state.counts.sum())
        if n_frames == before[1]:
            before = 0, 0
        frame_bytes = max(nbytes - before[0], 0) / max(n_frames - before[1], 1)
        kind, size = store.cost_kind, layout.frame_bytes
        return Trial(frame_bytes, read_ns(kind, store.read_work()), *write_ns(kind, size, frame_bytes))

    @classmethod
    def trial_bytes(cls, layout: StackLayout, codec: Codec, streams: Indices, rows: ByteRows, n_streams: int) -> float:
        return cls.trial(layout, codec, streams, rows, n_streams).frame_bytes

    @property
    def cost_kind(self) -> str:
        """The entry of `policy.READ_COSTS` for this store."""
        return "delta-zstd" if self._zstd_level else "delta"

    def trial_size(self) -> int:
        """The bytes that everything written will take once it is stored."""
        return self.difference_bytes()

    def difference_bytes(self) -> int:
        """Bytes of all segments, and of all keyframes but one per stream, whose share is negligible in a long run."""
        self.collect_segments()
        state, size = self.state, self.layout.frame_bytes
        nbytes, n_keyframes = self.heap.live_bytes, int(np.count_nonzero(state.keyframe_refs))
        for stream in np.flatnonzero(state.open_segments >= 0).tolist():
            lengths = self._staged_lengths(stream)
            starts_whole = bool(lengths[0] == size)
            n_keyframes += starts_whole
            staged = int(lengths[starts_whole:].sum())
            if self._zstd_level and staged:
                end = stream * state.config.stage_bytes + int(state.stage_ends[stream])
                body = state.stage[end - staged : end]
                staged = pack_frames(body, len(lengths), self._kernels, 0, self._zstd_level)[1].size
            nbytes += staged
        return nbytes + max(n_keyframes - self.n_streams, 0) * size

    def read_work(self) -> ReadWork:
        """The average work of reading an observation and its successor."""
        layout, state, size = self.layout, self.state, self.layout.frame_bytes
        in_use = np.flatnonzero(state.counts)
        lengths, unpacked = [], []
        for segment in in_use.tolist():
            start = int(state.starts[segment])
            source, start = (state.stage, -1 - start) if start < 0 else (state.heap, start)
            header = source[start : start + header_bytes(int(state.counts[segment]), self._length_dtype)]
            lengths.append(int(header[2:].view(self._length_dtype).astype(np.int64).sum()))
            unpacked.append(lengths[-1] if header[0] or self._zstd_level else 0)
        n_frames = max(int(state.counts.sum()), 1)
        per_segment = n_frames / max(len(in_use), 1)
        # consecutive frames, one more than in a stack: segments are decoded from the front to the last frame needed
        n_parts = 1 + layout.stack / per_segment
        n_decoded = (per_segment + 1) / 2 + layout.stack
        if self._zstd_level:
            n_decoded = n_parts * per_segment  # decompressed as a whole
        parsed, packed = (n_decoded * sum(part) / n_frames for part in (lengths, unpacked))
        sequences = n_decoded * self.sequences_per_frame()
        return ReadWork(2 * layout.spec.nbytes, n_parts, n_parts * size, parsed, packed, sequences)

    def sequences_per_frame(self) -> float:
        """Sequences of LZ4 that a frame takes, in the first segments; 0 without compiled kernels, which count them."""
        self.collect_segments()
        heap, counts = self.heap, self.state.counts
        sealed = np.flatnonzero(heap.lengths[: len(counts)])[:_N_COUNTED]
        if not sealed.size or not self._kernels.compiled:
            return 0.0
        n_frames = int(counts[sealed].sum())
        sealed = sealed[heap.data[heap.starts[sealed]] == PACKED_LZ4]
        begins = heap.starts[sealed] + 2 + counts[sealed] * self._length_dtype.itemsize
        n_sequences: int = compiled_kernels("packed").count_sequences(
            heap.data, begins.astype(np.int64), (heap.starts[sealed] + heap.lengths[sealed]).astype(np.int64)
        )
        return n_sequences / n_frames

    # ---- saving ----

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Array]]:
        record, arrays = super().to_parts()
        return record | {"n_fresh": self._n_fresh, "next_clean": self._next_clean}, arrays

    def _restore_segments(self, saved: SavedFrames, read_only: bool) -> None:
        require(len(saved.codecs) == 1, f"{len(saved.codecs)} codecs where one is possible")
        self._link_stage()
        self._n_fresh, self._next_clean = (
            whole(saved.record[name], name, stop=1 << 60) for name in ("n_fresh", "next_clean")
        )
        if read_only:
            # counting flags would read the whole file
            self._n_packed = int(bool(self._zstd_level) or not self._kernels.compiled)
        else:
            check_headers(self.heap, self.state.counts, self._length_dtype, self.per_segment, self.layout.frame_bytes)
            self._follow_kernels()

    def __setstate__(self, stored: dict[str, Any]) -> None:
        super().__setstate__(stored)
        if self._zstd_level:
            get_codec("zstd")  # if zstd is missing, raises an error that says what to install
        # the kernels may be of the other kind than when the store was pickled
        self._follow_kernels()
