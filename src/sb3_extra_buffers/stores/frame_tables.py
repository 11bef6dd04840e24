"""The tables of a frame store: which frames are in use, where segments are, and how one follows from another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.delta import BLOCK, padded
from sb3_extra_buffers.kernels import frame_kernels
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
    padded_bytes,
)
from sb3_extra_buffers.stores.arena import lengthen, zeros
from sb3_extra_buffers.stores.base import Array, Store
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.reentry import is_inside_method, refuse

FrameIds = npt.NDArray[np.int32]

#: Segments are freed and registered in batches of this many: the fixed cost of a batch exceeds that of a segment.
FREE_BATCH = 128


class FrameTables(Store):
    """Frames, segments and the heap behind observations, each of which is a list of frame ids.

    A frame belongs to a segment of ``per_segment`` frames; segments are the payloads of the heap. Frames count the
    observations that refer to them; a segment is freed once nothing refers to any of its frames.

    Every change consists of several steps, and an exception may come between any two of them. Each change sets
    ``dirty`` first and clears it last. While it is set, `recover` restores the frame ids that a write replaced, and
    derives all other tables from those that are never half changed: which frames an observation has, where a segment's
    bytes are. What the last write replaced is kept until the next change, so that `undo_write` can undo a whole write.
    """

    layout: StackLayout
    heap: Heap
    #: Whether the kernel lists new frames, for a byte codec to encode.
    lists_new = False
    #: Whether the tables that only writing needs were left out.
    read_only = False

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
        self.frame_ids: FrameIds = zeros((n_obs, layout.stack), np.int32)
        # pages of frame_ids, and keyframes, that were written since the last save
        self.dirty_pages = np.ones(n_pages(self.frame_ids), np.bool_)
        self.new_keyframes: list[int] = []
        self._compiled = compiled
        self._kernels = frame_kernels(compiled)
        # the last stream is for frames that are moved out of mostly dead segments
        length_bytes = 4 if layout.frame_bytes > 0xFFFF else 2
        config = FrameConfig(
            layout.frame_bytes,
            per_segment,
            length_bytes,
            stage_bytes,
            delta=not self.lists_new,
            keyframe_bytes=padded_bytes(layout.frame_bytes),
            pixel_bytes=layout.pixel_bytes,
        )
        self.state = _new_state(config, layout.stack, n_streams + 1, self.heap)
        #: The tables as kernels take them; None, until the next call of a kernel, after any of them was replaced.
        self.bound: Any = None
        self._known_columns: dict[str, Any] = {}  # see `bind_state`
        self._table_bytes: int | None = None
        self.dirty = False

    def _begin_change(self) -> None:
        """Begin a change other than a write: the last write is committed, and the frames it replaced are released."""
        if self.read_only:  # there was no write, and without all tables none could be recovered
            return
        self.recover()
        self.state.counters[COMMITTED] = 1
        self.dirty = True
        self._kernels.release_rows(self._tables())

    # ---- transactions ----

    def recover(self) -> None:
        if self.dirty:
            if is_inside_method(self):
                raise refuse("this store")
            self._rebuild()
            self.dirty = False

    def commit(self) -> None:
        self.recover()
        self.state.counters[COMMITTED] = 1

    def undo_write(self) -> bool:
        self.recover()
        counters = self.state.counters
        if counters[COMMITTED] or not counters[N_UNDO]:
            return False
        self.dirty = True
        self.recover()
        return True

    def _rebuild(self) -> None:
        """Undo the last write unless it was committed; derive every table that follows from others."""
        state, counters = self.state, self.state.counters
        if not counters[COMMITTED]:
            for row in range(int(counters[N_UNDO]) - 1, -1, -1):
                self.frame_ids[state.undo_indices[row]] = state.undo_ids[row]
        counters[[N_UNDO, N_FREED, N_NEW, N_SEALED]] = 0
        self.dirty_pages = np.ones(n_pages(self.frame_ids), np.bool_)
        self._drop_freed()
        self.heap.rebuild()
        self._sync()
        self._rebuild_segments()
        self._count_references()
        self._free(np.flatnonzero((self.state.counts > 0) & (self.state.live == 0)))

    def _drop_freed(self) -> None:  # only some stores override this
        """Remove the payloads of segments that were being freed."""

    @abstractmethod
    def _rebuild_segments(self) -> None:
        """Derive how many frames each segment holds."""

    def _count_references(self) -> None:
        """Derive from ``frame_ids`` and ``counts`` which frames are in use and which segments are not."""
        state, per = self.state, self.per_segment
        state.refs[:] = 0
        for part in np.array_split(self.frame_ids.reshape(-1), max(self.frame_ids.size >> 20, 1)):
            ids, n_refs = np.unique(part[part > 0] - 1, return_counts=True)
            state.refs[ids] += n_refs.astype(np.int32)
        state.live[:] = np.count_nonzero(state.refs.reshape(-1, per), axis=1)
        unused = np.flatnonzero(state.counts == 0)[::-1]
        state.unused[: len(unused)] = unused
        state.counters[N_UNUSED] = len(unused)
        recent_ids = state.recent_ids.reshape(-1)
        known = np.flatnonzero(recent_ids >= 0)
        ids = recent_ids[known]
        recent_ids[known[ids % per >= state.counts[ids // per]]] = NONE

    def _replace_ids(self, ids: Array, new_ids: Array) -> None:
        """Let observations refer to ``new_ids``, which have one reference each so far, instead of ``ids``."""
        state = self.state
        np.add.at(state.refs, new_ids, state.refs[ids] - 1)
        table = np.arange(state.refs.size + 1, dtype=np.int32)
        table[ids + 1] = new_ids + 1
        for begin in range(0, len(self.frame_ids), 1 << 16):
            part = self.frame_ids[begin : begin + (1 << 16)]
            part[...] = table[part]
        state.undo_ids[...] = table[state.undo_ids]
        self.dirty_pages[:] = True
        state.refs[ids] = 0

    # ---- freeing ----

    def collect_segments(self) -> None:
        """Release what the last write replaced, and free the segments that nothing refers to any more."""
        self._begin_change()
        self._free_listed()
        self.dirty = False

    def _free_listed(self) -> None:
        """Free the segments that writes have listed."""
        self._adopt()
        counters = self.state.counters
        if counters[N_FREED]:
            freed = np.unique(self.state.freed[: counters[N_FREED]])
            counters[N_FREED] = 0
            self._free(freed)

    def _free(self, segments: Array) -> None:
        """Free those of ``segments`` that no observation refers to; open ones stay until they are sealed."""
        state = self.state
        dead = segments[(state.live[segments] == 0) & (state.counts[segments] > 0)]
        dead = dead[~np.isin(dead, state.open_segments)]
        if not len(dead):
            return
        self._release_segments(dead)
        state.counts[dead] = 0
        state.recent_ids[np.isin(state.recent_ids // self.per_segment, dead) & (state.recent_ids >= 0)] = NONE
        unused = int(state.counters[N_UNUSED])
        state.unused[unused : unused + len(dead)] = dead
        state.counters[N_UNUSED] += len(dead)
        self._drop_view()
        self.heap.free(dead.tolist())
        self._sync()

    def _release_segments(self, segments: Array) -> None:  # payloads refer to nothing else
        """Release what ``segments`` refer to, before they are freed."""

    # ---- tables ----

    def allocate(self, n_obs: int) -> None:
        self._begin_change()
        frame_ids: FrameIds = zeros((len(self.frame_ids) + n_obs, self.layout.stack), np.int32)
        frame_ids[: len(self.frame_ids)] = self.frame_ids
        self.frame_ids = frame_ids
        self.dirty_pages = np.ones(n_pages(frame_ids), np.bool_)
        self.dirty = False

    def _tables(self) -> Any:
        if self.bound is None:
            self.bound = self._kernels.bind_state(self.state, self._known_columns)
        return self.bound

    def bind(self, n_rows: int) -> Any:
        """Return the tables as kernels take them, with space to list ``n_rows`` as replaced."""
        if len(self.state.undo_indices) < n_rows:
            self._lengthen_lists(n_rows)
        return self._tables()

    @property
    def is_compiled(self) -> bool:
        """Whether the kernels are compiled."""
        return self._kernels.compiled

    def _replace(self, **columns: Any) -> None:
        self.bound = self._table_bytes = None
        for name in columns:
            self._known_columns.pop(name, None)
        self.state = self.state._replace(**columns)
        if self.bound is not None:
            # a signal handler has just read, which bound the old columns
            self.bound = None
            for name in columns:
                self._known_columns.pop(name, None)

    def _adopt(self) -> None:  # payloads are put into the heap by the heap itself
        """Let the heap take over what kernels wrote into its gap; before any other use of the heap."""

    def _drop_view(self) -> None:
        """Drop the reference to the heap's bytes: memory that an array refers to cannot be extended in place."""
        self._adopt()
        self._replace(heap=np.zeros(0, np.uint8))

    def _sync(self) -> None:
        """Show the heap's present bytes and tables to the kernels."""
        self._adopt()
        self.state.gap[:] = self.heap.gap()
        self._replace(heap=self.heap.data, starts=self.heap.starts, lengths=self.heap.lengths)

    def _open_segments(self) -> npt.NDArray[np.int32]:
        opened = self.state.open_segments
        return opened[opened >= 0]

    def _lengthen_lists(self, n_rows: int) -> None:
        """Reserve entries to list ``n_rows`` as replaced, their frames as new and the segments of those as freed."""
        n_frames, stack = n_rows * self.layout.stack, self.layout.stack
        n_new = n_frames if self.lists_new else 0
        self._replace(
            freed=lengthen(self.state.freed, n_frames + FREE_BATCH),
            new_frames=np.zeros(n_new, np.int64),
            new_ids=np.zeros(n_new, np.int64),
            undo_indices=lengthen(self.state.undo_indices, n_rows),
            undo_ids=lengthen(self.state.undo_ids.reshape(-1), n_frames).reshape(n_rows, stack),
        )

    def _grow(self) -> None:
        """Add segments."""
        state = self.state
        old, unused = state.counts.size, int(state.counters[N_UNUSED])
        new = old + max(old // 4, 64)
        self.heap.grow(new)
        free = lengthen(np.zeros(0, np.int32), new)
        # lowest ids last, so that they are taken first
        free[: new - old] = np.arange(new - 1, old - 1, -1)
        free[new - old : new - old + unused] = state.unused[:unused]
        state.counters[N_UNUSED] = unused + new - old
        self._replace(
            counts=lengthen(state.counts, new),
            live=lengthen(state.live, new),
            keyframes=lengthen(state.keyframes, new),
            refs=lengthen(state.refs, new * self.per_segment),
            unused=free,
        )
        self._sync()

    # ---- other heaps ----

    def use_heap(self, make_heap: Callable[[], Heap]) -> None:
        self.switch_heap(make_heap())

    def switch_heap(self, heap: Heap) -> None:
        """Continue in ``heap``, which holds the same payloads as the present one."""
        heap.grow(len(self.state.counts))
        opened = self.heap.lengths == 0
        heap.starts[: len(opened)][opened] = self.heap.starts[opened]
        self.dirty = True
        self.heap = heap
        self._sync()
        self.dirty = False

    def move_payloads(self, heap: Heap) -> None:
        """Copy every payload to ``heap``, which is empty, and continue there."""
        self.collect_segments()
        heap.grow(len(self.heap.lengths))
        for payload_id in self.heap.unsaved(everything=True).tolist():
            heap.put(payload_id, np.frombuffer(self.heap.read(payload_id), np.uint8))
        self.switch_heap(heap)

    def compact_heap(self, compact: Callable[[], None]) -> None:
        """Call ``compact``, which moves the heap's payloads, while no kernel refers to them."""
        self.collect_segments()
        self.dirty = True
        self._drop_view()
        compact()
        self._sync()
        self.dirty = False

    def check(self) -> None:
        self.collect_segments()
        self.heap.check()
        state, per = self.state, self.per_segment
        used = self.frame_ids[self.frame_ids > 0].astype(np.int64) - 1
        refs = np.bincount(used, minlength=state.refs.size)
        _agree(np.array_equal(refs, state.refs), "the reference count of a frame is wrong")
        live = (refs.reshape(-1, per) > 0).sum(axis=1)
        _agree(np.array_equal(live, state.live), "the number of live frames of a segment is wrong")
        free = state.unused[: state.counters[N_UNUSED]]
        _agree(len(np.unique(free)) == len(free) and not state.counts[free].any(), "a segment in use is listed as free")
        _agree(len(free) + int((state.counts > 0).sum()) == len(state.counts), "a segment is neither in use nor free")
        sealed = np.setdiff1d(np.flatnonzero(state.counts), self._open_segments())
        whole = bool((state.lengths[sealed] > 0).all() and (state.live[sealed] > 0).all())
        _agree(whole, "a sealed segment has no payload or nothing refers to it")
        _agree(np.array_equal(np.flatnonzero(state.lengths), sealed), "the heap holds a payload of no segment")
        keyframes = state.keyframes[np.flatnonzero(state.counts)]
        n_started = np.bincount(keyframes[keyframes >= 0], minlength=len(state.keyframe_refs))
        _agree(np.array_equal(n_started, state.keyframe_refs), "the reference count of a keyframe is wrong")

    def after_raw_copy(self) -> None:
        """See `RawCopier`: the bound tables were the original's."""
        self.bound, self._known_columns = None, {}

    def __getstate__(self) -> dict[str, Any]:
        self.collect_segments()
        state = self.__dict__.copy()
        for name in ("_kernels", "bound", "_known_columns", "_table_bytes", "dirty", "dirty_pages", "validator"):
            state.pop(name, None)
        # what changes in place: a copy that shared it would change this store
        state |= {name: copy(value) for name, value in state.items() if isinstance(value, (list, np.ndarray))}
        columns = self.state._replace(heap=np.zeros(0, np.uint8))._asdict()
        state["state"] = {name: copy(column) for name, column in columns.items()}
        state["heap"] = self.heap.__getstate__()
        return state

    def __setstate__(self, stored: dict[str, Any]) -> None:
        columns, heap = stored.pop("state"), stored.pop("heap")
        self.__dict__.update(stored)
        self.heap = object.__new__(Heap)
        self.heap.__setstate__(heap)
        self.dirty_pages = np.ones(n_pages(self.frame_ids), np.bool_)
        self._kernels = frame_kernels(self._compiled)
        self.state = FrameState(**columns)
        self.bound = self._table_bytes = None
        self._known_columns = {}
        self.dirty = False
        self._sync()


def _new_state(config: FrameConfig, stack: int, n_streams: int, heap: Heap) -> FrameState:
    """The tables of an empty store."""
    size = config.frame_bytes
    # the frames of an observation, or of the previous one too if it has a single frame
    n_recent = max(stack, 2)
    return FrameState(
        config=config,
        heap=heap.data,
        keyframe_rows=np.zeros(0, np.uint8),
        keyframe_refs=np.zeros(0, np.int32),
        starts=heap.starts,
        lengths=heap.lengths,
        counts=np.zeros(0, np.int32),
        live=np.zeros(0, np.int32),
        keyframes=np.zeros(0, np.int32),
        refs=np.zeros(0, np.int32),
        unused=np.zeros(0, np.int32),
        freed=np.zeros(0, np.int32),
        sealed=np.zeros(FREE_BATCH, np.int32),
        gap=np.zeros(2, np.int64),
        counters=np.zeros(N_COUNTERS, np.int64),
        new_frames=np.zeros(0, np.int64),
        new_ids=np.zeros(0, np.int64),
        undo_indices=np.zeros(0, np.int64),
        undo_ids=np.zeros((0, stack), np.int32),
        stage=zeros(n_streams * config.stage_bytes, np.uint8),
        stage_ends=np.zeros(n_streams, np.int64),
        open_segments=np.full(n_streams, NONE, np.int32),
        recent=zeros((n_streams, n_recent, padded_bytes(size)), np.uint8),
        recent_ids=np.full((n_streams, n_recent), NONE, np.int32),
        recent_next=np.zeros(n_streams, np.int64),
        last_stack=np.full((n_streams, stack), -1, np.int64),
        stream_keyframes=np.full(n_streams, NONE, np.int32),
        keyframe_cost=np.zeros((n_streams, 2), np.int64),
        chain_bytes=np.zeros(n_streams, np.int64),
        pool=np.full(POOL_SIZE, NONE, np.int32),
        scratch=np.zeros(padded(size) // BLOCK * (BLOCK + BLOCK // 4) + 64, np.uint8),
        geometry=np.zeros(0, np.int64),
    )


def n_pages(array: Array) -> int:
    return -(-array.nbytes // PAGE)


def _agree(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
