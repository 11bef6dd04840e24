"""Observations cut into frames, each frame stored once."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.delta import BLOCK, DeltaCodec, padded
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.errors import CorruptPayloadError, HeapFullError
from sb3_extra_buffers.kernels import frame_kernels
from sb3_extra_buffers.kernels.frames import NONE, PACKED_LZ4, PACKED_ZSTD, FrameState, scene_bytes
from sb3_extra_buffers.kernels.lz4_block import OVERRUN, TABLE, unpack_block
from sb3_extra_buffers.stores.arena import SLACK, lengthen, touched_bytes, zeros
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.workers import n_workers, run_split

Cells = npt.NDArray[np.int64]

_POOL = 8
# a segment is heavy when its differences would fill this many frames; packing pays when this much is left
_HEAVY = 0.5
_PAYS = 0.75
# bytes of output below which another thread costs more than it saves
_SPLIT_BYTES = 2 << 20


class FrameStore:
    """``n_cells`` observations of one layout, written in ``n_streams`` streams.

    A cell is a list of frame ids. A frame lies in a segment; segments are the payloads of the heap. Successive
    frames of a stream go to its open segment, which lies in a room of its own and moves to the heap when it is
    full. A segment is freed when the last cell that refers to one of its frames is overwritten; segments that
    are mostly dead otherwise are written anew, so no more than twice the live frames are held.

    A codec that is not `DeltaCodec` encodes each frame by itself: then every segment has one frame.
    """

    def __init__(
        self,
        layout: StackLayout,
        n_cells: int,
        n_streams: int,
        codec: Codec,
        heap_bytes: int | None = None,
        path: Path | None = None,
        compiled: bool | None = None,
    ) -> None:
        self.layout = layout
        self._compiled = compiled
        self._kernels = frame_kernels(compiled)
        self.delta = isinstance(codec, DeltaCodec)
        self.codecs = [codec]
        # a new stack must fit into a new segment, or writing it would start over for ever
        self.per_segment = max(codec.frames, layout.stack) if isinstance(codec, DeltaCodec) else 1
        self._pack_level = codec.pack_level if isinstance(codec, DeltaCodec) else 0
        # segments that the read kernel cannot unpack by itself, and how they are marked
        self._packed_flags = (PACKED_ZSTD,) if self._kernels.compiled else (PACKED_ZSTD, PACKED_LZ4)
        self._n_packed = 0
        self.heap = Heap(limit=heap_bytes, path=path)
        self.slots: npt.NDArray[np.int32] = zeros((n_cells, layout.stack), np.int32)
        self.n_streams = n_streams
        self._wide = layout.frame_bytes > 0xFFFF
        self._n_fresh = 0
        self._next_clean = 4096
        self._average = _Average()
        # the last stream is for frames that are moved out of mostly dead segments
        streams, size = n_streams + 1, layout.frame_bytes
        table = 2 + self.per_segment * 4
        room = table + self.per_segment * size + size // 2 + BLOCK if self.delta else 1
        n_tops = padded(size) // BLOCK
        places = layout.stack + 1
        self._state = FrameState(
            heap=self.heap.data,
            scene_rows=np.zeros(0, np.uint8),
            scene_refs=np.zeros(0, np.int32),
            starts=self.heap.starts,
            lengths=self.heap.lengths,
            counts=np.zeros(0, np.int32),
            live=np.zeros(0, np.int32),
            scenes=np.zeros(0, np.int32),
            refs=np.zeros(0, np.int32),
            free=np.zeros(0, np.int32),
            freed=np.zeros(0, np.int32),
            tallies=np.zeros(3, np.int64),
            fresh=np.zeros(0, np.int64),
            fresh_ids=np.zeros(0, np.int64),
            stage=zeros(streams * room, np.uint8),
            stage_ends=np.zeros(streams, np.int64),
            open_segments=np.full(streams, NONE, np.int32),
            recent=zeros((streams, places, scene_bytes(size)), np.uint8),
            recent_ids=np.full((streams, places), NONE, np.int32),
            heads=np.zeros(streams, np.int64),
            last=np.full((streams, layout.stack), -1, np.int64),
            scene_of=np.full(streams, NONE, np.int32),
            scene_cost=np.zeros((streams, 2), np.int64),
            pool=np.full(_POOL, NONE, np.int32),
            scratch=np.zeros(n_tops * (BLOCK + BLOCK // 4) if self.delta else 1, np.uint8),
        )
        self._bound: Any = None
        self._generation = np.zeros(0, np.uint8)

    @property
    def codec(self) -> Codec:
        return self.codecs[-1]

    # ---- writing ----

    def write(self, cells: Cells, streams: Cells, rows: ByteRows) -> None:
        """Store one row per cell. ``streams`` names the stream that each row continues."""
        self._write(self.slots, cells, streams, self.layout.split(rows, self._kernels))

    def write_twice(self, cells: Cells, more_cells: Cells, streams: Cells, rows: ByteRows, more_rows: ByteRows) -> None:
        """`write` for ``cells``, then for ``more_cells``, such as the observations and the ones that follow."""
        layout, kernels = self.layout, self._kernels
        if not self.delta:
            self.write(cells, streams, rows)
            self.write(more_cells, streams, more_rows)
            return
        frames, more = layout.split(rows, kernels), layout.split(more_rows, kernels)
        if self._state.freed.size < 2 * len(frames) * layout.stack:
            self._lists(2 * len(frames) * layout.stack)
        done = 0
        while True:
            done = kernels.write_frames_twice(
                self._bound or self._tables(), self.slots, frames, more, streams, cells, more_cells, done,
                self.per_segment, self._wide,
            )  # fmt: skip
            if self._state.tallies[1]:
                self._settle_freed()
            if done == 2 * len(frames):
                break
            self._make_room(frames.shape[1])
        if self._n_fresh > self._next_clean:
            self._clean()

    def _write(self, slots: npt.NDArray[np.int32], cells: Cells, streams: Cells, frames: npt.NDArray[np.uint8]) -> None:
        self._lists(frames.shape[0] * frames.shape[1])
        before = None if self.delta else slots[cells]
        done = 0
        while True:
            first = done
            done = self._kernels.write_frames(
                self._tables(), slots, frames, streams, cells, first, self.per_segment, self.delta, self._wide
            )
            if before is not None and self._state.tallies[2]:
                self._encode_fresh(slots, cells, frames, first, done, before)
            if self._state.tallies[1]:
                self._settle_freed()
            if done == len(frames):
                break
            self._make_room(frames.shape[1])
        if self._n_fresh > self._next_clean and slots is self.slots:
            self._clean()

    def _lists(self, n_frames: int) -> None:
        """Have room to list ``n_frames`` frames as new and their segments as freed."""
        if self._state.freed.size < n_frames:
            self._replace(
                freed=np.zeros(n_frames, np.int32),
                fresh=np.zeros(n_frames, np.int64),
                fresh_ids=np.zeros(n_frames, np.int64),
            )

    def _settle_freed(self) -> None:
        tallies = self._state.tallies
        freed, tallies[1] = self._state.freed[: tallies[1]], 0
        self._free(np.unique(freed))

    def _encode_fresh(
        self,
        slots: npt.NDArray[np.int32],
        cells: Cells,
        frames: npt.NDArray[np.uint8],
        first: int,
        done: int,
        before: npt.NDArray[np.int32],
    ) -> None:
        """Give the frames that the kernel found new their payloads."""
        state = self._state
        count = int(state.tallies[2])
        rows = frames.reshape(-1, frames.shape[2])[state.fresh[:count]]
        segments = state.fresh_ids[:count]
        try:
            payloads = self.codec.encode_batch(rows)
            self._drop_view()
            self.heap.write(segments.tolist(), payloads)
        except BaseException:
            # the old frames are still there: nothing is freed before the new ones are stored
            self._restore(slots, cells, first, done, before, segments)
            raise
        finally:
            self._sync()
        self._state.tallies[2] = 0
        self._n_fresh += count
        self._generation[segments] = len(self.codecs) - 1
        if self.codec.trainable:
            self._retrain(rows, sum(map(len, payloads)))

    def _restore(
        self,
        slots: npt.NDArray[np.int32],
        cells: Cells,
        first: int,
        done: int,
        before: npt.NDArray[np.int32],
        segments: npt.NDArray[np.int64],
    ) -> None:
        state = self._state
        for row in range(done - 1, first - 1, -1):
            slots[cells[row]] = before[row]
        # rows of this call that were written before it count from what the tables say now
        used = slots[slots > 0] - 1
        state.refs[:] = np.bincount(used, minlength=state.refs.size)
        alive = (state.refs.reshape(-1, self.per_segment) > 0).sum(axis=1)
        state.live[:] = alive
        state.counts[segments] = 0
        state.recent_ids[np.isin(state.recent_ids, segments)] = NONE
        unused = int(state.tallies[0])
        state.free[unused : unused + len(segments)] = segments
        state.tallies[0] += len(segments)
        state.tallies[1:] = 0

    def _retrain(self, rows: ByteRows, nbytes: int) -> None:
        """Train the codec again when its payloads have grown by half since the last time."""
        self._average.add(rows, nbytes)
        if not self._average.stale or len(self.codecs) > 250:
            return
        samples = self._average.samples()
        new = self.codec.train(samples)
        old_bytes = sum(map(len, self.codec.encode_batch(samples[::4])))
        new_bytes = sum(map(len, new.encode_batch(samples[::4])))
        if new_bytes < 0.9 * old_bytes:
            self.codecs.append(new)
        self._average = _Average()

    def _make_room(self, stack: int) -> None:
        """Seal the segments that are full; have unused segments for a stack and a scene per stream."""
        state = self._state
        for stream in np.flatnonzero(state.open_segments >= 0):
            if state.counts[state.open_segments[stream]] == self.per_segment:
                self._seal(int(stream))
        if self._state.tallies[0] < stack + 1:
            self._grow()

    def _grow(self) -> None:
        old = self._state.counts.size
        new = old + max(old // 4, 64)
        per = self.per_segment
        state = self._state
        self.heap.grow(new)
        free = lengthen(np.zeros(0, np.int32), new)
        unused = int(state.tallies[0])
        # lowest ids last, so that they are taken first
        free[: new - old] = np.arange(new - 1, old - 1, -1)
        free[new - old : new - old + unused] = state.free[:unused]
        state.tallies[0] = unused + new - old
        self._generation = lengthen(self._generation, new)
        self._replace(
            counts=lengthen(state.counts, new),
            live=lengthen(state.live, new),
            scenes=lengthen(state.scenes, new),
            refs=lengthen(state.refs, new * per),
            free=free,
        )
        self._sync()

    def _seal(self, stream: int) -> None:
        """Move a stream's open segment to the heap; a first frame stored whole becomes a scene."""
        state = self._state
        segment = int(state.open_segments[stream])
        room = state.stage.size // state.open_segments.size
        count = int(state.counts[segment])
        width = 4 if self._wide else 2
        held = state.stage[stream * room : stream * room + int(state.stage_ends[stream])]
        lengths = held[2 : 2 + count * width].copy()
        body = held[2 + self.per_segment * width :]
        whole = int(lengths.view("<u4" if self._wide else "<u2")[0]) == self.layout.frame_bytes
        if whole:
            lengths[:width] = 0
            frame, body = body[: self.layout.frame_bytes], body[self.layout.frame_bytes :]
        flags, body = self._pack(body)
        self._n_packed += flags in self._packed_flags
        payload = np.concatenate([np.array([flags, count], np.uint8), lengths, body])
        self._drop_view()
        try:
            self.heap.write([segment], [payload])
        finally:
            self._sync()
        state = self._state
        if whole:
            self._add_scene(stream, segment, frame)
        state = self._state
        state.open_segments[stream] = NONE
        self._n_fresh += count
        if state.live[segment] == 0:
            self._free(np.array([segment]))

    def _pack(self, body: npt.NDArray[np.uint8]) -> tuple[int, npt.NDArray[np.uint8]]:
        """The differences of a segment, compressed together where that is wanted and pays, and which way."""
        flags, packed = 0, body
        if self._pack_level:
            from sb3_extra_buffers.codecs.packing import pack  # needs zstandard, as nothing else here does

            flags, packed = PACKED_ZSTD, np.frombuffer(pack(body, self._pack_level), np.uint8)
        elif body.size > _HEAVY * self.layout.frame_bytes and self._kernels.compiled:
            target = np.empty(body.size, np.uint8)
            source = np.concatenate([body, np.zeros(SLACK, np.uint8)])
            length = self._kernels.pack_block(source, body.size, target, np.empty(TABLE, np.int32))
            flags, packed = PACKED_LZ4, target[: length or body.size]
        return (flags, packed) if packed.size < _PAYS * body.size else (0, body)

    def _add_scene(self, stream: int, segment: int, frame: npt.NDArray[np.uint8]) -> None:
        state = self._state
        size = scene_bytes(self.layout.frame_bytes)
        unused = [scene for scene in np.flatnonzero(state.scene_refs == 0) if not self._scene_held(scene)]
        if unused:
            scene = int(unused[0])
        else:
            scene = len(state.scene_refs)
            n_scenes = scene + max(scene // 4, 4)
            self._replace(
                scene_rows=lengthen(state.scene_rows, n_scenes * size),
                scene_refs=lengthen(state.scene_refs, n_scenes),
            )
            state = self._state
        row = state.scene_rows[scene * size : (scene + 1) * size]
        row[: frame.size] = frame
        state.scene_refs[scene] = 1
        state.scenes[segment] = scene
        state.scene_of[stream] = scene
        # until a first frame has been encoded against it, a quarter of a frame is what it should cost
        state.scene_cost[stream] = self.layout.frame_bytes // 4, 0
        state.pool[:] = np.roll(state.pool, 1)
        state.pool[0] = scene

    def _scene_held(self, scene: int) -> bool:
        return bool((self._state.pool == scene).any() or (self._state.scene_of == scene).any())

    def _free(self, segments: npt.NDArray[Any]) -> None:
        """Release segments that no cell refers to; open ones stay until they are sealed."""
        state = self._state
        dead = segments[(state.live[segments] == 0) & (state.counts[segments] > 0)]
        dead = dead[~np.isin(dead, state.open_segments)]
        if not len(dead):
            return
        scenes = state.scenes[dead]
        np.subtract.at(state.scene_refs, scenes[scenes >= 0], 1)
        if self._n_packed:
            self._n_packed -= int(np.isin(state.heap[state.starts[dead]], self._packed_flags).sum())
        state.counts[dead] = 0
        state.recent_ids[np.isin(state.recent_ids // self.per_segment, dead) & (state.recent_ids >= 0)] = NONE
        unused = int(state.tallies[0])
        state.free[unused : unused + len(dead)] = dead
        state.tallies[0] += len(dead)
        self._drop_view()
        self.heap.free(dead.tolist())
        self._sync()

    def _clean(self) -> None:
        """Write the frames of mostly dead segments anew and free these."""
        state, per = self._state, self.per_segment
        self._n_fresh = 0
        n_live = int(np.count_nonzero(state.refs))
        self._next_clean = max(n_live // 4, 4096)
        if self.delta and int(state.counts.sum()) > 2 * n_live + per * (self.n_streams + 1):
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
        for begin in range(0, len(self.slots), 1 << 16):
            part = self.slots[begin : begin + (1 << 16)]
            part[...] = table[part]
        state.refs[ids] = 0
        state.live[segments] = np.count_nonzero(state.refs.reshape(-1, per)[segments], axis=1)
        self._free(segments)

    # ---- reading ----

    def read(self, cells: Cells) -> ByteRows:
        """Decode ``cells`` (``[n]``, or ``[set, n]`` to walk shared segments once) into fresh rows."""
        layout = self.layout
        frames = self._decode(self.slots, cells if cells.ndim == 2 else cells.reshape(1, -1))
        rows = layout.join(frames.reshape(cells.size, layout.stack, layout.frame_bytes), self._kernels)
        return rows.reshape(*cells.shape, layout.spec.nbytes)

    def _decode(self, slots: npt.NDArray[np.int32], sets: Cells) -> npt.NDArray[np.uint8]:
        """The frames that ``slots`` names at ``sets`` (``[set, row]``), one after the other."""
        size = self.layout.frame_bytes
        if not self.delta:
            return self._decode_bytes(slots[sets].ravel() - 1)
        out = np.empty(sets.size * slots.shape[1] * size, np.uint8)
        tables = self._bound or self._tables()
        if self._n_packed:
            local, slots, sets = self._unpacked(slots, sets)
            tables = self._kernels.bind_state(local)
        read, per, wide = self._kernels.read_frames, self.per_segment, self._wide
        n_rows = sets.shape[1]
        if out.size < 2 * _SPLIT_BYTES or not self._kernels.compiled:
            damaged = read(tables, slots, sets, out, size, per, wide, 0, n_rows)
        else:
            found = run_split(
                lambda first, stop: read(tables, slots, sets, out, size, per, wide, first, stop),
                n_rows,
                min(n_workers(), out.size // _SPLIT_BYTES),
            )
            damaged = max(found)
        if damaged >= 0:
            raise CorruptPayloadError(f"segment {damaged} of the heap is damaged and cannot be decoded")
        return out

    def _decode_bytes(self, ids: npt.NDArray[np.int32]) -> ByteRows:
        unique, inverse = np.unique(ids, return_inverse=True)
        known = unique[unique >= 0]
        zero = len(unique) - len(known)
        frames = np.empty((len(unique), self.layout.frame_bytes), np.uint8)
        frames[:zero] = 0
        generations = self._generation[known]
        for generation, codec in enumerate(self.codecs):
            mine = np.flatnonzero(generations == generation)
            if len(mine) == len(known):
                self._decode_payloads(codec, known, frames[zero:])
            elif len(mine):
                rows = np.empty((len(mine), self.layout.frame_bytes), np.uint8)
                self._decode_payloads(codec, known[mine], rows)
                frames[zero + mine] = rows
        return frames.take(inverse, axis=0)

    def _decode_payloads(self, codec: Codec, segments: npt.NDArray[np.int32], rows: ByteRows) -> None:
        starts, lengths = self.heap.starts[segments], self.heap.lengths[segments].astype(np.int64)

        def work(first: int, stop: int) -> None:
            part = slice(first, stop)
            codec.decode_heap(self.heap.data, starts[part], lengths[part], rows[part])

        run_split(work, len(segments), n_workers() if rows.nbytes > _SPLIT_BYTES else 1)

    def _unpacked(self, slots: npt.NDArray[np.int32], sets: Cells) -> tuple[FrameState, npt.NDArray[np.int32], Cells]:
        """Tables, slots and cells for the same frames in which every segment is plain."""
        state, per = self._state, self.per_segment
        ids = slots[sets] - 1
        segments, inverse = np.unique(ids // per, return_inverse=True)
        sealed = np.flatnonzero((segments >= 0) & (state.lengths[segments] > 0))
        flags = state.heap[state.starts[segments[sealed]]]
        width = 4 if self._wide else 2
        bodies = [np.zeros(0, np.uint8)] * len(segments)

        def work(first: int, stop: int) -> None:
            for index, packed in zip(sealed[first:stop], flags[first:stop], strict=True):
                payload = np.frombuffer(self.heap.read(int(segments[index])), np.uint8)
                bodies[index] = _inflate(payload, width, per, self.layout.frame_bytes) if packed else payload

        run_split(work, len(sealed), n_workers() if len(sealed) >= 16 else 1)
        lengths = np.array([body.size for body in bodies], np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        # open segments stay where they are
        opened = (segments >= 0) & (lengths == 0)
        starts[opened] = state.starts[segments[opened]]
        local = state._replace(
            heap=np.concatenate([*bodies, np.zeros(SLACK, np.uint8)]),
            starts=starts,
            lengths=lengths,
            scenes=state.scenes[segments],
        )
        renamed = np.where(ids < 0, 0, inverse.reshape(ids.shape) * per + ids % per + 1).astype(np.int32)
        return local, renamed.reshape(sets.size, slots.shape[1]), np.arange(sets.size).reshape(sets.shape)

    # ---- the rest ----

    def train(self, rows: ByteRows) -> None:
        """Let the codec learn from ``rows``; before anything is written."""
        frames = self.layout.split(rows, self._kernels).reshape(-1, self.layout.frame_bytes)
        self.codecs = [self.codec.train(frames)]

    def difference_bytes(self) -> tuple[int, int]:
        """Bytes of all segments without frames that are whole, and the number of frames."""
        state = self._state
        opened = np.flatnonzero(state.open_segments >= 0)
        room = state.stage.size // state.open_segments.size
        width = 4 if self._wide else 2
        nbytes, n_frames = self.heap.live_bytes, int(state.counts.sum())
        for stream in opened:
            begin = stream * room + 2
            count = int(state.counts[state.open_segments[stream]])
            lengths = state.stage[begin : begin + count * width].view("<u4" if self._wide else "<u2")
            nbytes += int(lengths[lengths < self.layout.frame_bytes].sum(dtype=np.int64))
        return nbytes, n_frames

    def clear(self) -> None:
        """Forget every observation; keep scenes, recent frames and what the codec has learnt."""
        state = self._state
        for stream in np.flatnonzero(state.open_segments >= 0):
            state.open_segments[stream] = NONE
        used = np.flatnonzero(state.counts)
        state.recent_ids[:] = NONE
        state.last[:] = -1
        self.slots[...] = 0
        state.refs[:] = 0
        state.live[:] = 0
        state.counts[:] = 0
        state.scene_refs[:] = 0
        unused = int(state.tallies[0])
        state.free[unused : unused + len(used)] = used
        state.tallies[0] += len(used)
        self._drop_view()
        self.heap.clear()
        self._sync()

    def memory_usage(self) -> MemoryUsage:
        state = self._state
        tables = (
            self.heap.index_bytes + self._generation.nbytes + touched_bytes(self.slots)
            + sum(column.nbytes for column in (
                state.counts, state.live, state.scenes, state.refs, state.free, state.freed, state.fresh, state.fresh_ids
            ))
        )  # fmt: skip
        opened = int(state.stage_ends[state.open_segments >= 0].sum())
        return MemoryUsage(
            payload=self.heap.live_bytes + opened,
            index=int(tables),
            keyframes=int(state.scene_rows.nbytes + state.recent.nbytes),
            other=0,
            dense=0,
        )

    def check(self) -> None:
        """Raise if the tables disagree with each other or with the heap."""
        self.heap.check()
        state, per = self._state, self.per_segment
        used = self.slots[self.slots > 0].astype(np.int64) - 1
        refs = np.bincount(used, minlength=state.refs.size)
        if not np.array_equal(refs, state.refs):
            raise AssertionError("references to frames are counted wrongly")
        live = (refs.reshape(-1, per) > 0).sum(axis=1)
        if not np.array_equal(live, state.live):
            raise AssertionError("live frames of segments are counted wrongly")
        free = state.free[: state.tallies[0]]
        if len(np.unique(free)) != len(free) or state.counts[free].any():
            raise AssertionError("a segment in use is listed as unused")
        if len(free) + int((state.counts > 0).sum()) != len(state.counts):
            raise AssertionError("a segment is neither in use nor unused")
        opened = state.open_segments[state.open_segments >= 0]
        sealed = np.setdiff1d(np.flatnonzero(state.counts), opened)
        if not (state.lengths[sealed] > 0).all() or not (state.live[sealed] > 0).all():
            raise AssertionError("a sealed segment has no payload or no reader")
        if not np.array_equal(np.flatnonzero(state.lengths), sealed):
            raise AssertionError("the heap holds a payload of no segment")
        scenes = state.scenes[np.flatnonzero(state.counts)]
        if not np.array_equal(np.bincount(scenes[scenes >= 0], minlength=len(state.scene_refs)), state.scene_refs):
            raise AssertionError("segments that start from scenes are counted wrongly")

    def add_cells(self, n_cells: int) -> None:
        """Append ``n_cells`` unwritten cells."""
        slots: npt.NDArray[np.int32] = zeros((len(self.slots) + n_cells, self.layout.stack), np.int32)
        slots[: len(self.slots)] = self.slots
        self.slots = slots

    def _tables(self) -> Any:
        if self._bound is None:
            self._bound = self._kernels.bind_state(self._state)
        return self._bound

    def _replace(self, **columns: Any) -> None:
        self._state = self._state._replace(**columns)
        self._bound = None

    def _drop_view(self) -> None:
        # an arena with views on it could not be lengthened where it lies
        self._replace(heap=np.zeros(0, np.uint8))

    def _sync(self) -> None:
        self._replace(heap=self.heap.data, starts=self.heap.starts, lengths=self.heap.lengths)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_kernels"], state["_bound"]
        state["_state"] = self._state._replace(heap=np.zeros(0, np.uint8))._asdict()
        return state

    def __setstate__(self, stored: dict[str, Any]) -> None:
        columns = stored.pop("_state")
        self.__dict__.update(stored)
        self._kernels = frame_kernels(self._compiled)
        self._state = FrameState(**columns)
        self._bound = None
        self._sync()
        self._packed_flags = (PACKED_ZSTD,) if self._kernels.compiled else (PACKED_ZSTD, PACKED_LZ4)
        sealed = np.flatnonzero(self._state.lengths) if self.delta else []
        self._n_packed = int(np.isin(self.heap.data[self.heap.starts[sealed]], self._packed_flags).sum())


class _Average:
    """Whether payloads have grown since the codec was trained, and frames to train it on again."""

    def __init__(self) -> None:
        self.n_frames = 0
        self.first: float = 0.0
        self.now: float = 0.0
        self._kept: list[npt.NDArray[np.uint8]] = []

    def add(self, rows: ByteRows, nbytes: int) -> None:
        if not len(rows):
            return
        size = nbytes / len(rows)
        self.n_frames += len(rows)
        weight = min(len(rows) / 256, 1.0)
        self.now += weight * (size - self.now) if self.now else size
        if self.n_frames <= 1024:
            self.first = self.now
        if self.now > 1.25 * self.first and len(self._kept) < 256:
            self._kept.append(rows[-1].copy())

    @property
    def stale(self) -> bool:
        return self.now > 1.5 * self.first and len(self._kept) >= 128

    def samples(self) -> ByteRows:
        return np.stack(self._kept)


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
        if not unpack_block(payload, at, len(payload), body, size):
            raise CorruptPayloadError(f"a segment of {len(payload)} bytes is not an LZ4 block of {size}")
        plain[at:] = body[:size]
    return plain
