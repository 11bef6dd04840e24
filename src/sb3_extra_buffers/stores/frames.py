"""Observations cut into frames, each frame stored once: what all frame stores share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.kernels import as_contiguous
from sb3_extra_buffers.kernels.fingerprints import PAGE
from sb3_extra_buffers.kernels.state import COMMITTED, N_FREED, N_SEALED, NONE
from sb3_extra_buffers.stores.arena import lengthen, resident_bytes
from sb3_extra_buffers.stores.base import Array, FillHeap, Indices, rows_for
from sb3_extra_buffers.stores.frame_tables import FrameIds, FrameTables, n_pages
from sb3_extra_buffers.stores.layout import Frames
from sb3_extra_buffers.stores.usage import MemoryUsage

#: Columns of `FrameState` that are saved as they are, in this order; a few entries per stream.
STREAM_COLUMNS = (
    "stage_ends", "open_segments", "recent_ids", "recent_next", "last_stack", "stream_keyframes", "keyframe_cost",
    "chain_bytes", "pool",
)  # fmt: skip


class SavedFrames(NamedTuple):
    """What `FrameStore.to_parts` saved, after every entry was checked."""

    frame_ids: FrameIds  # [observation, stack]
    counts: npt.NDArray[np.int32]  # [segment]
    lengths: npt.NDArray[np.int32]  # [segment]
    keyframes: npt.NDArray[np.int32]  # [segment]
    keyframe_rows: npt.NDArray[np.uint8]  # [keyframe, byte]
    streams: dict[str, Array]  # the `STREAM_COLUMNS`
    n_undo: int  # rows that the undo lists have space for
    n_order: int  # writes that the heap's order has space for
    codecs: list[Codec]
    record: Mapping[str, Any]  # not checked
    arrays: Mapping[str, Array]  # not checked


class FrameStore(FrameTables):
    """Stores each frame once: one that equals a frame that its stream saw lately is referred to, not stored again.

    `SegmentStore` and `PayloadStore` define how frames are encoded.
    """

    #: Called with the indices of every read, to check payloads in a file that was not verified when it was opened.
    validator: Callable[[Indices], None] | None = None

    @property
    def frames(self) -> FrameStore:
        return self

    # ---- writing ----

    def write(self, indices: Indices, streams: Indices, rows: ByteRows) -> None:
        frames = self.layout.split(rows, self._kernels)
        indices, streams = as_contiguous(indices), as_contiguous(streams)
        self.recover()
        self.state.counters[COMMITTED] = 1
        if len(self.state.undo_indices) < len(rows):
            self._lengthen_lists(len(rows))
        self.dirty = True
        self._mark_dirty(indices)
        self._write(self.frame_ids, indices, streams, frames)
        self.dirty = False
        self._tidy()

    @abstractmethod
    def _write(self, frame_ids: FrameIds, indices: Indices, streams: Indices, frames: Frames) -> None:
        """Store frames, and set ``frame_ids`` at ``indices`` to them."""

    @abstractmethod
    def _tidy(self) -> None:
        """Free what has become due, after a write."""

    def _mark_dirty(self, indices: Indices) -> None:
        width = 4 * self.layout.stack
        self.dirty_pages[indices * width // PAGE] = True
        self.dirty_pages[(indices * width + width - 1) // PAGE] = True

    def _mark_dirty_run(self, first: int, count: int) -> None:
        """`_mark_dirty` for consecutive indices; cheap enough for every step."""
        width = 4 * self.layout.stack
        self.dirty_pages[first * width // PAGE : ((first + count) * width - 1) // PAGE + 1] = True

    def erase(self, indices: Indices) -> None:
        self._begin_change()
        state = self.state
        indices = np.unique(indices)
        self._mark_dirty(indices)
        ids = self.frame_ids[indices].ravel().astype(np.int64) - 1
        ids, counts = np.unique(ids[ids >= 0], return_counts=True)
        self.frame_ids[indices] = 0
        state.refs[ids] -= counts.astype(np.int32)
        segments = ids[state.refs[ids] == 0] // self.per_segment
        np.subtract.at(state.live, segments, 1)
        self._free(np.unique(segments))
        self.dirty = False

    def clear(self) -> None:
        self._begin_change()
        self._adopt()
        state = self.state
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
        self.dirty = False

    # ---- reading ----

    def read(self, indices: Indices) -> ByteRows:
        layout = self.layout
        frames = self._decode(self.frame_ids, self._begin_read(indices))
        if layout.axis == "first" or self.joins_frames:
            return frames.reshape(*indices.shape, layout.spec.nbytes)
        rows = layout.join(frames.reshape(indices.size, layout.stack, layout.frame_bytes), self._kernels)
        return rows.reshape(*indices.shape, layout.spec.nbytes)

    def read_windows(self, indices: Indices, newest_only: bool = False, out: ByteRows | None = None) -> ByteRows:
        frame_ids, windows = self._locate_windows(indices, newest_only)
        rows = rows_for(out, (*windows.shape, frame_ids.shape[1] * self.layout.frame_bytes))
        self._decode_windows(frame_ids, windows, rows)
        return rows

    def _locate_windows(self, indices: Indices, newest_only: bool) -> tuple[FrameIds, Indices]:
        """Return a table of frame ids and the windows in it that hold the frames to read of ``indices``."""
        indices = self._begin_read(indices)
        if not newest_only or self.layout.stack == 1:
            return self.frame_ids, indices
        newest = self.frame_ids[indices.reshape(-1), -1].reshape(-1, 1)
        return newest, np.arange(indices.size, dtype=np.int64).reshape(indices.shape)

    def _decode_windows(self, frame_ids: FrameIds, windows: Indices, out: ByteRows) -> None:
        """Decode the observations of ``frame_ids`` at ``windows [batch, length]``; single frames stay single."""
        n_frames, layout = frame_ids.shape[1], self.layout
        frames = self._decode(frame_ids, windows.reshape(1, -1)).reshape(windows.size, n_frames, layout.frame_bytes)
        rows = frames if n_frames == 1 or self.joins_frames else layout.join(frames, self._kernels)
        out[...] = rows.reshape(out.shape)

    def _begin_read(self, indices: Indices) -> Indices:
        """Return ``indices`` as `_decode` takes them, once all that they refer to may be read."""
        if self.dirty:
            self.recover()
        if self.validator is not None:
            self.validator(indices)
        return as_contiguous(indices if indices.ndim == 2 else indices.reshape(1, -1))

    @property
    def joins_frames(self) -> bool:
        """Whether `_decode` interleaves frames that are stacked along the last axis."""
        return False

    @abstractmethod
    def _decode(self, frame_ids: FrameIds, sets: Indices) -> npt.NDArray[np.uint8]:
        """The frames of ``frame_ids`` at ``sets`` (``[set, row]``), one after the other."""

    def _decode_ids(self, ids: Array) -> npt.NDArray[np.uint8]:
        """The frames with these ids, ``[frame, byte]``."""
        frames = self._decode((ids[:, None] + 1).astype(np.int32), np.arange(len(ids))[None])
        return frames.reshape(len(ids), self.layout.frame_bytes)

    # ---- reports ----

    def describe(self) -> str:
        return self.codec.describe()

    @property
    def held_bytes(self) -> int:
        if self._table_bytes is None:
            state = self.state
            columns = state.keyframe_rows.nbytes + state.recent.nbytes + state.stage.nbytes
            self._table_bytes = self._index_bytes() + self.frame_ids.nbytes + columns
        if self.state.counters[N_SEALED]:
            self._begin_change()
            self._adopt()
            self.dirty = False
        return self.heap.live_bytes + self._table_bytes

    def _index_bytes(self) -> int:
        state = self.state
        columns = (
            state.counts, state.live, state.keyframes, state.refs, state.unused, state.freed, state.new_frames,
            state.new_ids, state.undo_indices, state.undo_ids,
        )  # fmt: skip
        return self.heap.index_bytes + sum(column.nbytes for column in columns)

    def memory_usage(self) -> MemoryUsage:
        self.collect_segments()
        state = self.state
        opened = int(state.stage_ends[state.open_segments >= 0].sum())
        return MemoryUsage(
            payload=self.heap.live_bytes + opened,
            index=self._index_bytes() + resident_bytes(self.frame_ids),
            keyframes=resident_bytes(state.keyframe_rows) + resident_bytes(state.recent),
            # space for open segments, as far as it was ever used
            other=max(resident_bytes(state.stage) - opened, 0),
        )

    def count_written(self) -> int:
        return int(np.count_nonzero(self.frame_ids.any(axis=1)))

    def find_written(self) -> Indices:
        return np.flatnonzero(self.frame_ids.any(axis=1))

    # ---- saving ----

    def saved(self) -> None:
        """Everything up to now has been saved."""
        self.dirty_pages[:] = False
        self.new_keyframes.clear()
        self.heap.saved(but=self._open_segments())

    def pages_to_save(self) -> dict[str, npt.NDArray[np.int64]]:
        """For each table of `to_parts`, the pages that may have changed since `saved` was called."""
        segments = np.concatenate([self.heap.changed(), self._open_segments()])
        pages = _pages_of(segments, 4)
        width = self.state.config.keyframe_bytes
        keyframe_pages = {
            page
            for keyframe in self.new_keyframes
            for page in range(keyframe * width // PAGE, ((keyframe + 1) * width - 1) // PAGE + 1)
        }
        return {
            "slots": np.flatnonzero(self.dirty_pages),
            "lengths": pages,
            "counts": pages,
            "scenes": pages,
            "starts": _pages_of(segments, 8),
            "generation": _pages_of(segments, 1),
            "scene_rows": np.array(sorted(keyframe_pages), np.int64),
        }

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Array]]:
        self.collect_segments()
        state, streams = self.state, np.flatnonzero(self.state.open_segments >= 0)
        starts = streams * self.state.config.stage_bytes
        stage = [state.stage[start : start + end] for start, end in zip(starts, state.stage_ends[streams], strict=True)]
        arrays: dict[str, Array] = {
            "slots": self.frame_ids,
            "lengths": state.lengths,
            "counts": state.counts,
            "scenes": state.keyframes,
            "scene_rows": state.keyframe_rows.reshape(-1, state.config.keyframe_bytes),
            "stage": np.concatenate([np.zeros(0, np.uint8), *stage]),
            "streams": np.concatenate([getattr(state, name).ravel().astype(np.int64) for name in STREAM_COLUMNS]),
        }
        record = {
            "kind": "frames",
            "stack": self.layout.stack,
            "axis": self.layout.axis,
            "codecs": [[codec.name or codec.codec_id, codec.codec_id, codec.config()] for codec in self._all_codecs()],
            "n_sealed": int(np.count_nonzero(state.lengths)),
            "n_open": len(streams),
            # lengths of lists: a limit on memory counts them, so that a loaded store must have the same ones
            "room": [state.undo_ids.size, state.freed.size, self.heap.order_capacity],
        }
        return record, arrays

    def _all_codecs(self) -> list[Codec]:
        """Every codec that a payload may need, oldest first."""
        return [self.codec]

    def restore(self, saved: SavedFrames, fill_heap: FillHeap, read_only: bool) -> None:
        """Hold what was saved; in a new store, whose ``state.stage`` has been filled. Raise if the result is wrong.

        ``read_only`` leaves out the tables that only writing needs.
        """
        n_segments, counts, keyframes = len(saved.counts), saved.counts, saved.keyframes
        n_counted = 0 if read_only else n_segments
        self.read_only = read_only
        self.frame_ids = saved.frame_ids
        self.dirty_pages = np.zeros(n_pages(saved.frame_ids), np.bool_)
        self.heap.grow(n_segments)
        self.heap.lengths[:] = saved.lengths
        n_started = np.bincount(keyframes[(counts > 0) & (keyframes >= 0)], minlength=len(saved.keyframe_rows))
        self._replace(
            counts=lengthen(counts, n_segments),
            keyframes=lengthen(keyframes, n_segments),
            live=lengthen(np.zeros(0, np.int32), n_counted),
            refs=lengthen(np.zeros(0, np.int32), n_counted * self.per_segment),
            unused=lengthen(np.zeros(0, np.int32), n_counted),
            keyframe_rows=saved.keyframe_rows.reshape(-1),
            keyframe_refs=n_started.astype(np.int32),
            **saved.streams,
        )
        if not read_only:
            self._count_references()
        fill_heap(self.heap, np.flatnonzero(saved.lengths).astype(np.int32))
        self._sync()
        self._restore_segments(saved, read_only)
        if not read_only:
            self._restore_recent()
            if saved.n_undo:
                self._lengthen_lists(saved.n_undo)
            self.heap.reserve_order(saved.n_order)
            self.check()

    @abstractmethod
    def _restore_segments(self, saved: SavedFrames, read_only: bool) -> None:
        """Check and restore what this kind of store has added to the parts; the heap has been filled."""

    def _restore_recent(self) -> None:
        """Decode the recent frames of each stream: they are not saved, since segments hold them too."""
        state = self.state
        streams, positions = np.nonzero(state.recent_ids >= 0)
        if len(streams):
            frames = self._decode_ids(state.recent_ids[streams, positions])
            state.recent[streams, positions, : self.layout.frame_bytes] = frames


def _pages_of(entries: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    """The pages of a table that hold ``entries``, each of ``width`` bytes."""
    pages = np.zeros(int(entries.max(initial=-1) + 1) * width // PAGE + 1, np.bool_)
    pages[entries * width // PAGE] = True
    return np.flatnonzero(pages)
