"""Observations cut into frames, each frame stored once: what all frame stores have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.delta import BLOCK, padded
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.kernels import as_contiguous, frame_kernels
from sb3_extra_buffers.kernels.fingerprints import PAGE
from sb3_extra_buffers.kernels.policy import POOL_SIZE
from sb3_extra_buffers.kernels.state import (
    COMMITTED,
    N_COUNTERS,
    N_FREED,
    N_NEW,
    N_SEALED,
    N_UNDO,
    N_UNUSED,
    NONE,
    FrameConfig,
    FrameState,
    keyframe_bytes,
)
from sb3_extra_buffers.stores.arena import lengthen, resident_bytes, zeros
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.usage import MemoryUsage

Indices = npt.NDArray[np.int64]
FrameIds = npt.NDArray[np.int32]
Frames = npt.NDArray[np.uint8]  # [row, stack, byte]

# segments that are freed or sealed together: each is a matter of microseconds, seeing to it is not
LATER = 128


class FrameStore(ABC):
    """``n_cells`` observations of one layout, written in ``n_streams`` streams.

    A cell is a list of frame ids. A frame lies in a segment of ``per_segment``; segments are the payloads of the
    heap. A frame that equals one its stream saw lately is not stored again. A segment is freed when the last cell
    that refers to one of its frames is overwritten.

    Every change is made of a few steps, and an exception may come between any two of them. So each change sets
    ``_dirty`` first and clears it last; while it is set, `recover` restores the cells that a write had replaced and
    derives all tables again from those that are never half changed: which frames a cell has, which bytes a segment has.
    What the last write replaced is kept until the next change, so that `undo_write` can take a whole write back.

    `SegmentStore` and `PayloadStore` say how frames are encoded.
    """

    #: Looks at cells before they are read, where their payloads lie in a file that nobody has looked through.
    validator: Callable[[Indices], None] | None = None
    #: Whether the kernel lists new frames for a byte codec.
    lists_fresh = False

    def __init__(
        self,
        layout: StackLayout,
        n_obs: int,
        n_streams: int,
        codec: Codec,
        heap_bytes: int | None = None,
        path: Path | None = None,
        compiled: bool | None = None,
        per_segment: int = 1,
        stage_bytes: int = 1,
    ) -> None:
        self.layout = layout
        self.codec = codec
        self.per_segment = per_segment
        self.n_streams = n_streams
        self.heap = Heap(limit=heap_bytes, path=path)
        self.frame_ids: npt.NDArray[np.int32] = zeros((n_obs, layout.stack), np.int32)
        # pages of `slots` and keyframes written since `saved`, so that a file need only be given those
        self.dirty_pages = np.ones(-(-self.frame_ids.nbytes // PAGE), np.bool_)
        self.new_keyframes: list[int] = []
        self._compiled = compiled
        self._kernels = frame_kernels(compiled)
        # the last stream is for frames that are moved out of mostly dead segments
        streams, size = n_streams + 1, layout.frame_bytes
        n_tops = padded(size) // BLOCK
        # those of the stream's observation, or the frame before where that is a single one
        places = max(layout.stack, 2)
        width = 4 if layout.frame_bytes > 0xFFFF else 2
        self._state = FrameState(
            config=FrameConfig(size, per_segment, width, stage_bytes, delta=not self.lists_fresh),
            heap=self.heap.data,
            keyframe_rows=np.zeros(0, np.uint8),
            keyframe_refs=np.zeros(0, np.int32),
            starts=self.heap.starts,
            lengths=self.heap.lengths,
            counts=np.zeros(0, np.int32),
            live=np.zeros(0, np.int32),
            keyframes=np.zeros(0, np.int32),
            refs=np.zeros(0, np.int32),
            unused=np.zeros(0, np.int32),
            freed=np.zeros(0, np.int32),
            sealed=np.zeros(LATER, np.int32),
            gap=np.zeros(2, np.int64),
            counters=np.zeros(N_COUNTERS, np.int64),
            new_frames=np.zeros(0, np.int64),
            new_ids=np.zeros(0, np.int64),
            undo_indices=np.zeros(0, np.int64),
            undo_ids=np.zeros((0, layout.stack), np.int32),
            stage=zeros(streams * stage_bytes, np.uint8),
            stage_ends=np.zeros(streams, np.int64),
            open_segments=np.full(streams, NONE, np.int32),
            recent=zeros((streams, places, keyframe_bytes(size)), np.uint8),
            recent_ids=np.full((streams, places), NONE, np.int32),
            recent_next=np.zeros(streams, np.int64),
            last_stack=np.full((streams, layout.stack), -1, np.int64),
            stream_keyframes=np.full(streams, NONE, np.int32),
            keyframe_cost=np.zeros((streams, 2), np.int64),
            chain_bytes=np.zeros(streams, np.int64),
            pool=np.full(POOL_SIZE, NONE, np.int32),
            scratch=np.zeros(n_tops * (BLOCK + BLOCK // 4) + 64, np.uint8),
        )
        self._bound: Any = None
        self._table_bytes: int | None = None
        self._dirty = False

    # ---- writing ----

    def write(self, indices: Indices, streams: Indices, rows: ByteRows) -> None:
        """Store one row per cell. ``streams`` names the stream that each row continues."""
        frames = self.layout.split(rows, self._kernels)
        indices, streams = as_contiguous(indices), as_contiguous(streams)
        self._begin_write(len(rows))
        self._mark_dirty(indices)
        self._write(self.frame_ids, indices, streams, frames)
        self._dirty = False
        self._tidy()

    def write_step(self, index: int, next_index: int, rows: ByteRows, next_rows: ByteRows) -> None:
        """Store a row of every stream from ``index`` on, and the rows that follow them from ``next_index`` on."""
        streams = np.arange(len(rows))
        self.write(streams + index, streams, rows)
        self.write(streams + next_index, streams, next_rows)

    @abstractmethod
    def _write(self, frame_ids: FrameIds, indices: Indices, streams: Indices, frames: Frames) -> None:
        """Store frames in cells of ``slots``."""

    @abstractmethod
    def _tidy(self) -> None:
        """Free what has become due, after a write."""

    def _begin_write(self, n_rows: int) -> None:
        """Have room for a write of ``n_rows``, which is taken back unless ``_dirty`` is cleared when it is done."""
        self.recover()
        self._state.counters[COMMITTED] = 1
        if len(self._state.undo_indices) < n_rows:
            self._lengthen_lists(n_rows)
        self._dirty = True

    def _begin(self) -> None:
        """Begin a change that is no write: the last write stands, and its frames are given up."""
        self.recover()
        self._state.counters[COMMITTED] = 1
        self._dirty = True
        self._kernels.release_rows(self._tables())

    def recover(self) -> None:
        """Be as before a change that was interrupted."""
        if self._dirty:
            self._rebuild()
            self._dirty = False

    def commit(self) -> None:
        """Let the last write stand."""
        self.recover()
        self._state.counters[COMMITTED] = 1

    def undo_write(self) -> bool:
        """Take back the last write since `commit`, if nothing was changed since; whether there was one."""
        self.recover()
        counters = self._state.counters
        if counters[COMMITTED] or not counters[N_UNDO]:
            return False
        self._dirty = True
        self.recover()
        return True

    def _rebuild(self) -> None:
        """Derive every table that follows from others."""
        counters = self._state.counters
        if not counters[COMMITTED]:
            for row in range(int(counters[N_UNDO]) - 1, -1, -1):
                self.frame_ids[self._state.undo_indices[row]] = self._state.undo_ids[row]
        counters[[N_UNDO, N_FREED, N_NEW, N_SEALED]] = 0
        self.dirty_pages = np.ones(-(-self.frame_ids.nbytes // PAGE), np.bool_)
        self._drop_freed()
        self.heap.rebuild()
        self._sync()
        self._rebuild_segments()
        self._count_references()
        self._free(np.flatnonzero((self._state.counts > 0) & (self._state.live == 0)))

    def _drop_freed(self) -> None:  # noqa: B027  # most stores have nothing to say
        """Take the payloads from segments that were being freed."""

    @abstractmethod
    def _rebuild_segments(self) -> None:
        """Find out which segments hold how many frames."""

    def _count_references(self) -> None:
        """Derive from ``slots`` and ``counts`` which frames are in use and which segments are not."""
        state, per = self._state, self.per_segment
        state.refs[:] = 0
        for part in np.array_split(self.frame_ids.reshape(-1), max(self.frame_ids.size >> 20, 1)):
            ids, n_refs = np.unique(part[part > 0] - 1, return_counts=True)
            state.refs[ids] += n_refs.astype(np.int32)
        state.live[:] = np.count_nonzero(state.refs.reshape(-1, per), axis=1)
        unused = np.flatnonzero(state.counts == 0)[::-1]
        state.unused[: len(unused)] = unused
        state.counters[N_UNUSED] = len(unused)
        known = np.flatnonzero(state.recent_ids >= 0)
        ids = state.recent_ids.reshape(-1)[known]
        state.recent_ids.reshape(-1)[known[ids % per >= state.counts[ids // per]]] = NONE

    def _mark_dirty(self, indices: Indices) -> None:
        width = 4 * self.layout.stack
        self.dirty_pages[indices * width // PAGE] = True
        self.dirty_pages[(indices * width + width - 1) // PAGE] = True

    def _mark_dirty_run(self, first: int, count: int) -> None:
        """`_touch` for cells in a row; cheap enough for every step."""
        width = 4 * self.layout.stack
        self.dirty_pages[first * width // PAGE : ((first + count) * width - 1) // PAGE + 1] = True

    def saved(self) -> None:
        """What there is now has been saved."""
        self.dirty_pages[:] = False
        self.new_keyframes.clear()
        self.heap.saved(but=self._opened())

    def changed_segments(self) -> npt.NDArray[np.int64]:
        """Segments of which anything may be other than it was when `saved` was called."""
        return np.concatenate([self.heap.changed(), self._opened()])

    def _opened(self) -> npt.NDArray[np.int32]:
        opened = self._state.open_segments
        return opened[opened >= 0]

    def _lengthen_lists(self, n_rows: int) -> None:
        """Have room to list ``n_rows`` as replaced, their frames as new and the segments of those as freed."""
        n_frames, stack = n_rows * self.layout.stack, self.layout.stack
        n_fresh = n_frames if self.lists_fresh else 0
        undo_ids = lengthen(self._state.undo_ids.reshape(-1), n_frames).reshape(n_rows, stack)
        self._replace(
            freed=lengthen(self._state.freed, n_frames + LATER),
            new_frames=np.zeros(n_fresh, np.int64),
            new_ids=np.zeros(n_fresh, np.int64),
            undo_indices=lengthen(self._state.undo_indices, n_rows),
            undo_ids=undo_ids,
        )

    def collect_segments(self) -> None:
        """Give up what the last write replaced, and free the segments that nothing refers to any more."""
        self._begin()
        self._free_listed()
        self._dirty = False

    def _free_listed(self) -> None:
        """Free the segments that writing has listed."""
        self._adopt()
        counters = self._state.counters
        if counters[N_FREED]:
            freed = np.unique(self._state.freed[: counters[N_FREED]])
            counters[N_FREED] = 0
            self._free(freed)

    def _grow(self) -> None:
        old = self._state.counts.size
        new = old + max(old // 4, 64)
        per = self.per_segment
        state = self._state
        self.heap.grow(new)
        free = lengthen(np.zeros(0, np.int32), new)
        unused = int(state.counters[N_UNUSED])
        # lowest ids last, so that they are taken first
        free[: new - old] = np.arange(new - 1, old - 1, -1)
        free[new - old : new - old + unused] = state.unused[:unused]
        state.counters[N_UNUSED] = unused + new - old
        self._replace(
            counts=lengthen(state.counts, new),
            live=lengthen(state.live, new),
            keyframes=lengthen(state.keyframes, new),
            refs=lengthen(state.refs, new * per),
            unused=free,
        )
        self._sync()

    def _free(self, segments: npt.NDArray[Any]) -> None:
        """Release segments that no cell refers to; open ones stay until they are sealed."""
        state = self._state
        dead = segments[(state.live[segments] == 0) & (state.counts[segments] > 0)]
        dead = dead[~np.isin(dead, state.open_segments)]
        if not len(dead):
            return
        self._forget(dead)
        state.counts[dead] = 0
        state.recent_ids[np.isin(state.recent_ids // self.per_segment, dead) & (state.recent_ids >= 0)] = NONE
        unused = int(state.counters[N_UNUSED])
        state.unused[unused : unused + len(dead)] = dead
        state.counters[N_UNUSED] += len(dead)
        self._drop_view()
        self.heap.free(dead.tolist())
        self._sync()

    def _forget(self, segments: npt.NDArray[Any]) -> None:  # noqa: B027  # most stores have nothing to say
        """Last words on segments that are about to be freed."""

    # ---- reading ----

    def read(self, indices: Indices) -> ByteRows:
        """Decode ``cells`` (``[n]``, or ``[set, n]`` to walk shared segments once) into fresh rows."""
        layout = self.layout
        if self._dirty:
            self.recover()
        if self.validator is not None:
            self.validator(indices)
        frames = self._decode(self.frame_ids, indices if indices.ndim == 2 else indices.reshape(1, -1))
        if layout.axis == "first":
            return frames.reshape(*indices.shape, layout.spec.nbytes)
        rows = layout.join(frames.reshape(indices.size, layout.stack, layout.frame_bytes), self._kernels)
        return rows.reshape(*indices.shape, layout.spec.nbytes)

    @abstractmethod
    def _decode(self, frame_ids: FrameIds, sets: Indices) -> npt.NDArray[np.uint8]:
        """The frames that ``slots`` names at ``sets`` (``[set, row]``), one after the other."""

    # ---- the rest ----

    def erase(self, indices: Indices) -> None:
        """Make ``cells`` unwritten; segments that lose their last reader are freed."""
        self._begin()
        state = self._state
        indices = np.unique(indices)
        self._mark_dirty(indices)
        ids = self.frame_ids[indices].ravel().astype(np.int64) - 1
        ids, counts = np.unique(ids[ids >= 0], return_counts=True)
        self.frame_ids[indices] = 0
        state.refs[ids] -= counts.astype(np.int32)
        segments = ids[state.refs[ids] == 0] // self.per_segment
        np.subtract.at(state.live, segments, 1)
        self._free(np.unique(segments))
        self._dirty = False

    def clear(self) -> None:
        """Forget every observation; keep keyframes, recent frames and what the codec has learnt."""
        self._begin()
        self._adopt()
        state = self._state
        self.frame_ids[...] = 0
        self.dirty_pages[:] = True
        state.open_segments[:] = NONE
        state.recent_ids[:] = NONE
        state.last_stack[:] = -1
        state.counts[:] = 0
        state.keyframe_refs[:] = 0
        state.counters[N_FREED] = 0
        self._drop_view()
        self.heap.clear()
        self._sync()
        self._count_references()
        self._dirty = False

    @property
    def held_bytes(self) -> int:
        """What is held, all tables counted in full."""
        if self._table_bytes is None:
            state = self._state
            columns = state.keyframe_rows.nbytes + state.recent.nbytes + state.stage.nbytes
            self._table_bytes = self._index_bytes() + self.frame_ids.nbytes + columns
        if self._state.counters[N_SEALED]:
            self._begin()
            self._adopt()
            self._dirty = False
        return self.heap.live_bytes + self._table_bytes

    def _index_bytes(self) -> int:
        state = self._state
        columns = (
            state.counts, state.live, state.keyframes, state.refs, state.unused, state.freed, state.new_frames,
            state.new_ids, state.undo_indices, state.undo_ids,
        )  # fmt: skip
        return self.heap.index_bytes + sum(column.nbytes for column in columns)

    def memory_usage(self) -> MemoryUsage:
        self.collect_segments()
        state = self._state
        tables = self._index_bytes() + resident_bytes(self.frame_ids)
        opened = int(state.stage_ends[state.open_segments >= 0].sum())
        return MemoryUsage(
            payload=self.heap.live_bytes + opened,
            index=int(tables),
            keyframes=resident_bytes(state.keyframe_rows) + resident_bytes(state.recent),
            # rooms of open segments, as far as they were ever used
            other=max(resident_bytes(state.stage) - opened, 0),
            dense=0,
        )

    def check(self) -> None:
        """Raise if the tables disagree with each other or with the heap."""
        self.collect_segments()
        self.heap.check()
        state, per = self._state, self.per_segment
        used = self.frame_ids[self.frame_ids > 0].astype(np.int64) - 1
        refs = np.bincount(used, minlength=state.refs.size)
        if not np.array_equal(refs, state.refs):
            raise AssertionError("references to frames are counted wrongly")
        live = (refs.reshape(-1, per) > 0).sum(axis=1)
        if not np.array_equal(live, state.live):
            raise AssertionError("live frames of segments are counted wrongly")
        free = state.unused[: state.counters[N_UNUSED]]
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
        keyframes = state.keyframes[np.flatnonzero(state.counts)]
        if not np.array_equal(
            np.bincount(keyframes[keyframes >= 0], minlength=len(state.keyframe_refs)), state.keyframe_refs
        ):
            raise AssertionError("segments that start from keyframes are counted wrongly")

    def allocate(self, n_obs: int) -> None:
        """Append ``n_cells`` unwritten cells."""
        self._begin()
        frame_ids: npt.NDArray[np.int32] = zeros((len(self.frame_ids) + n_obs, self.layout.stack), np.int32)
        frame_ids[: len(self.frame_ids)] = self.frame_ids
        self.frame_ids = frame_ids
        self.dirty_pages = np.ones(-(-frame_ids.nbytes // PAGE), np.bool_)
        self._dirty = False

    def use_heap(self, heap: Heap) -> None:
        """Put payloads into ``heap`` from now on; before anything is written."""
        self.heap = heap
        heap.grow(len(self._state.counts))
        self._sync()

    def switch_heap(self, heap: Heap) -> None:
        """Continue in ``heap``, which holds the same payloads as the present one."""
        # what `starts` says of open segments belongs to this store
        is_open = self.heap.lengths == 0
        heap.starts[is_open] = self.heap.starts[is_open]
        self.heap = heap
        self._sync()

    def move_payloads(self, heap: Heap) -> None:
        """Copy every payload to ``heap``, which is empty, and continue there."""
        self.collect_segments()
        heap.grow(len(self.heap.lengths))
        for payload_id in self.heap.unsaved(everything=True).tolist():
            heap.put(payload_id, np.frombuffer(self.heap.read(payload_id), np.uint8))
        self.switch_heap(heap)

    def compact_heap(self, compact: Callable[[], None]) -> None:
        """Call ``compact``, which moves the heap's payloads, while no array refers to them."""
        self.collect_segments()
        self._drop_view()
        try:
            compact()
        finally:
            self._sync()

    def _tables(self) -> Any:
        if self._bound is None:
            self._bound = self._kernels.bind_state(self._state)
        return self._bound

    def _replace(self, **columns: Any) -> None:
        self._state = self._state._replace(**columns)
        self._bound = self._table_bytes = None

    def _adopt(self) -> None:  # noqa: B027  # most stores put nothing into the heap by hand
        """Tell the heap what lies in its gap, before it is asked to do anything."""

    def _drop_view(self) -> None:
        self._adopt()
        # an arena with views on it could not be lengthened where it lies
        self._replace(heap=np.zeros(0, np.uint8))

    def _sync(self) -> None:
        self._adopt()
        self._state.gap[:] = self.heap.gap()
        self._replace(heap=self.heap.data, starts=self.heap.starts, lengths=self.heap.lengths)

    def __getstate__(self) -> dict[str, Any]:
        """A copy that later writes do not change."""
        self.collect_segments()
        state = self.__dict__.copy()
        for name in ("_kernels", "_bound", "_table_bytes", "_dirty", "dirty_pages", "validator"):
            state.pop(name, None)
        columns = self._state._replace(heap=np.zeros(0, np.uint8))._asdict()
        state["_state"] = {name: copy(column) for name, column in columns.items()}
        state["frame_ids"] = self.frame_ids.copy()
        state["heap"] = self.heap.__getstate__()
        return state

    def __setstate__(self, stored: dict[str, Any]) -> None:
        columns, heap = stored.pop("_state"), stored.pop("heap")
        self.__dict__.update(stored)
        self.heap = object.__new__(Heap)
        self.heap.__setstate__(heap)
        self.dirty_pages = np.ones(-(-self.frame_ids.nbytes // PAGE), np.bool_)
        self._kernels = frame_kernels(self._compiled)
        self._state = FrameState(**columns)
        self._bound = self._table_bytes = None
        self._dirty = False
        self._sync()
