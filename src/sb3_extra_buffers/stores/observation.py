"""Observations of one key: first collected, then stored as suits them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import CodecOptionError, HeapFullError, ReadOnlyBufferError
from sb3_extra_buffers.stores.arena import zeros
from sb3_extra_buffers.stores.choice import Choice, choose, choose_unseen
from sb3_extra_buffers.stores.factory import make_frame_store
from sb3_extra_buffers.stores.frames import FrameStore, Indices
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.layout import StackLayout, find_layout
from sb3_extra_buffers.stores.locks import fork_safe_lock
from sb3_extra_buffers.stores.payloads import PayloadStore
from sb3_extra_buffers.stores.segments import SegmentStore
from sb3_extra_buffers.stores.usage import MemoryUsage

# observations looked at before anything is decided: enough to see a stack move, little enough to hold
_TRIAL_BYTES = 4 << 20
_TRIAL_ROWS = (16, 256)


class DenseStore:
    """Rows as they are, one after the other; pages appear as they are written."""

    def __init__(self, nbytes: int, n_obs: int, limit: int | None = None) -> None:
        self.rows: ByteRows = zeros((n_obs, nbytes), np.uint8)
        self.written: npt.NDArray[np.bool_] = zeros(n_obs, bool)
        self.limit = limit
        # cells that are being written, what they held, and whether that counts no longer
        self._undo: tuple[Indices, ByteRows, npt.NDArray[np.bool_]] | None = None
        self._dirty = False

    def write(self, indices: Indices, streams: Indices, rows: ByteRows) -> None:
        self.recover()
        if self.limit is not None:
            self._check_limit(self.limit, indices)
        before = self.written[indices]
        # most cells are written for the first time, until a ring is full
        self._undo = indices.copy(), self.rows[indices] if before.any() else np.zeros((0, 0), np.uint8), before
        self._dirty = True
        self.rows[indices] = rows
        self.written[indices] = True
        self._dirty = False

    def _check_limit(self, limit: int, indices: Indices) -> None:
        per_row: int = self.rows.shape[1]
        held = int(np.count_nonzero(self.written)) * per_row
        more = int(np.count_nonzero(~self.written[np.unique(indices)])) * per_row
        if held + more > limit:
            raise HeapFullError(more, held, limit)

    def recover(self) -> None:
        """Be as before a write that was interrupted."""
        if self._dirty:
            self._restore()
            self._dirty = False

    def commit(self) -> None:
        """Let the last write stand."""
        self.recover()
        self._undo = None

    def undo_write(self) -> bool:
        """Take back the last write since `commit`, if nothing was changed since; whether there was one."""
        self.recover()
        if self._undo is None:
            return False
        self._dirty = True
        self.recover()
        return True

    def _restore(self) -> None:
        if self._undo is not None:
            indices, rows, written = self._undo
            self.rows[indices] = rows if len(rows) else 0
            self.written[indices] = written
            self._undo = None

    @property
    def held_bytes(self) -> int:
        return self.rows.nbytes + self.written.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes in use: pages that were never written take none."""
        per_row: int = self.rows.shape[1]
        return int(np.count_nonzero(self.written)) * per_row + self.written.nbytes

    def read(self, indices: Indices) -> ByteRows:
        self.recover()
        return self.rows[indices]

    def allocate(self, n_obs: int) -> None:
        self.recover()
        rows: ByteRows = zeros((len(self.rows) + n_obs, self.rows.shape[1]), np.uint8)
        rows[: len(self.rows)] = self.rows
        written: npt.NDArray[np.bool_] = zeros(len(rows), bool)
        written[: len(self.rows)] = self.written
        # longer than rows for a moment, never shorter
        self.written = written
        self.rows = rows

    def erase(self, indices: Indices) -> None:
        self.recover()
        self._undo = None
        self.rows[indices] = 0
        self.written[indices] = False

    def clear(self) -> None:
        self.recover()
        self._undo = None
        self.rows, self.written = zeros(self.rows.shape, np.uint8), zeros(len(self.rows), bool)

    def check(self) -> None:
        """Nothing can disagree here."""
        self.recover()

    def __getstate__(self) -> dict[str, Any]:
        self.recover()
        return {"rows": np.array(self.rows), "written": np.array(self.written), "limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.rows, self.written, self.limit = state["rows"], state["written"], state["limit"]
        self._undo, self._dirty = None, False


class ObservationStore:
    """Observations of one shape and dtype behind cells numbered from 0.

    The first few are held as they come, until it is clear how they are stacked and, with ``auto``, which method
    suits them; then they move to a `FrameStore` or stay dense, and all others follow. Reading gives the same bytes
    at every moment. Unwritten cells read as zeros. One writer and many readers may use it at once.

    A write is stored as a whole or, after an exception of any kind at any moment, not at all. `undo_write` takes the
    last one back, for whoever writes to several stores in one go.
    """

    #: Whether ``auto`` may leave observations as they are; room for all of them is then taken at once.
    may_stay_dense = True
    #: Whether writing is an error, as in a file that was opened to be read.
    read_only = False
    #: Makes the heap of the frame store, where that is not to be memory.
    make_heap: Callable[[], Heap] | None = None
    #: Is told of every change, ``("write", cells, streams, rows)`` and the like. If it raises, a write is taken back.
    on_change: Callable[..., None] | None = None

    def __init__(
        self,
        spec: ObsSpec,
        n_streams: int = 1,
        method: str = "auto",
        options: Mapping[str, Any] | None = None,
        heap_bytes: int | None = None,
        path: str | os.PathLike[str] | None = None,
        compiled: bool | None = None,
    ) -> None:
        self.spec = spec
        self.n_streams = n_streams
        self.method = method
        self.options = dict(options or {})
        self.n_obs = 0
        self._heap_bytes = heap_bytes
        self._path = None if path is None else Path(path)
        self._compiled = compiled
        self._lock = fork_safe_lock()
        # what there was before the last write, while nothing is decided
        self._before: tuple[Any, ...] | None = None
        self._pending: list[tuple[Indices, Indices, ByteRows]] = []
        self._inner: FrameStore | DenseStore | None = None
        self.choice: Choice | None = None
        if method == "auto":
            if self.options:
                raise CodecOptionError(
                    f"compression_method='auto' takes no options, got {', '.join(map(repr, self.options))}; "
                    "name a method to use them"
                )
            self.choice = choose_unseen(spec)
        else:
            codec = get_codec(method, **self.options).bind(spec)  # bad input is an error now, not at step 3,000,000
            self.choice = Choice("none" if codec.codec_id == "none" else method, "")
        if spec.nbytes == 0:
            self.choice = Choice("none", "observations of no bytes")
        self._dense = self.choice is not None and self.choice.method == "none"

    def allocate(self, n_obs: int) -> int:
        """Append ``n_cells`` unwritten cells; return the number of the first."""
        with self._lock:
            first = self.n_obs
            if self._inner is not None:
                self._inner.allocate(n_obs)
            elif self._dense:
                self._inner = DenseStore(self.spec.nbytes, first + n_obs, self._heap_bytes)
            self.n_obs = first + n_obs
            return first

    def write(self, indices: Indices, streams: Indices, rows: ByteRows) -> None:
        """Store one row per cell; row ``i`` continues stream ``streams[i]``."""
        with self._lock:
            self._check_writable()
            inner, self._before = self._inner, None
            try:
                if inner is not None:
                    inner.write(indices, streams, rows)
                else:
                    self._collect(indices, streams, rows)
            except BaseException:
                self._take_back()
                raise
            if self.on_change is not None:
                try:
                    self.on_change("write", indices, streams, rows)
                except BaseException:
                    self.undo_write()
                    raise

    def write_step(self, index: int, next_index: int, rows: ByteRows, next_rows: ByteRows) -> None:
        """Store a row of every stream from ``index`` on, and the rows that follow them from ``next_index`` on."""
        with self._lock:
            inner = self._inner
            if type(inner) is SegmentStore and not self.read_only and self.on_change is None:
                self._before = None
                try:
                    inner.write_step(index, next_index, rows, next_rows)
                except BaseException:
                    self._take_back()
                    raise
                return
            streams = np.arange(len(rows))
            indices = np.concatenate([streams + index, streams + next_index])
            self.write(indices, np.concatenate([streams, streams]), np.concatenate([rows, next_rows]))

    def _take_back(self) -> None:
        """Take back what was written of a write that failed; if that fails too, the next use of the store does it."""
        with contextlib.suppress(Exception):
            if self._before is not None:
                self.undo_write()
            elif self._inner is not None:
                self._inner.recover()

    def commit(self) -> None:
        """Let the last write stand: `undo_write` is about those from now on."""
        self._before = None
        if self._inner is not None:
            self._inner.commit()

    def undo_write(self) -> bool:
        """Take back the last `write` or `write_step` since `commit`; whether there was one that nothing followed.

        For writers to several stores, who `commit` all of them before they begin.
        """
        with self._lock:
            before = self._before
            if before is not None:
                self._pending, self.choice, self._inner = before
                self._before = None
                return True
            return self._inner is not None and self._inner.undo_write()

    def _collect(self, indices: Indices, streams: Indices, rows: ByteRows) -> None:
        """Hold rows as they are, and decide once there are enough of them."""
        pending = [*self._pending, (indices.copy(), streams.copy(), rows.copy())]
        held = sum(len(part) for part, _, _ in pending)
        least, most = _TRIAL_ROWS
        enough = min(max(_TRIAL_BYTES // self.spec.nbytes, least), most, max(self.n_obs // 2, 1))
        full = self._heap_bytes is not None and held * self.spec.nbytes > self._heap_bytes
        self._before = self._pending, self.choice, None
        self._pending = pending
        if held >= enough or full:
            self._choose_method()

    def read(self, indices: Indices) -> ByteRows:
        """Decode ``cells``, of any shape ``[n]`` or ``[set, n]``, into fresh rows."""
        with self._lock:
            if self._inner is not None:
                return self._inner.read(indices)
            # the last row written to a cell is the one that counts
            newest = {
                index: row
                for written, _, rows in self._pending
                for index, row in zip(written.tolist(), rows, strict=True)
            }
            out = np.zeros((indices.size, self.spec.nbytes), np.uint8)
            for place, index in enumerate(indices.ravel().tolist()):
                if index in newest:
                    out[place] = newest[index]
            return out.reshape(*indices.shape, self.spec.nbytes)

    def choose_method(self) -> None:
        """Decide now, on what there is."""
        with self._lock:
            if self._inner is None:
                self._before = None
                self._choose_method()

    def _choose_method(self) -> None:
        empty = np.zeros(0, np.int64)
        indices = np.concatenate([empty, *(pending[0] for pending in self._pending)])
        streams = np.concatenate([empty, *(pending[1] for pending in self._pending)])
        rows = np.concatenate([np.zeros((0, self.spec.nbytes), np.uint8), *(pending[2] for pending in self._pending)])
        layout = find_layout(self.spec, [rows[streams == stream] for stream in np.unique(streams)])
        choice = self.choice
        if choice is None and len(rows):
            may_stay_dense = self.may_stay_dense and self._heap_bytes is None
            choice = choose(layout, indices, streams, rows, self.n_streams, may_stay_dense)
        if choice is None:
            return
        inner: FrameStore | DenseStore
        if choice.method == "none":
            inner = DenseStore(self.spec.nbytes, self.n_obs, self._heap_bytes)
        else:
            codec = get_codec(choice.method, **self.options).bind(layout.frame_spec)
            kept = make_frame_store(
                layout, self.n_obs, self.n_streams, codec, self._heap_bytes, self._path, self._compiled
            )
            if self.make_heap is not None:
                kept.use_heap(self.make_heap())
            if isinstance(kept, PayloadStore):
                kept.train(rows)
            inner = kept
        # rows that were overwritten since take no room
        last = np.sort(len(indices) - 1 - np.unique(indices[::-1], return_index=True)[1])
        inner.write(indices[last], streams[last], rows[last])
        # only now, the store first: an error on the way leaves the rows where they were
        self._inner = inner
        self.choice, self._pending = choice, []

    def erase(self, indices: Indices) -> None:
        """Make ``cells`` unwritten."""
        with self._lock:
            self._check_writable()
            if self.on_change is not None:
                self.on_change("erase", indices)
            self._before = None
            if self._inner is not None:
                self._inner.erase(indices)
                return
            kept = [(part, ~np.isin(part[0], indices)) for part in self._pending]
            self._pending = [(written[keep], streams[keep], rows[keep]) for (written, streams, rows), keep in kept]

    def clear(self) -> None:
        """Make every cell unwritten; what was decided stays."""
        with self._lock:
            self._check_writable()
            if self.on_change is not None:
                self.on_change("clear")
            self._pending, self._before = [], None
            if self._inner is not None:
                self._inner.clear()

    def _check_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyBufferError("these observations were opened to be read; load() them to write to a copy")

    @property
    def lock(self) -> Any:
        """The lock that every read and write holds; hold it to keep the store unchanged over several calls."""
        return self._lock

    @property
    def heap_bytes(self) -> int | None:
        """The limit on the bytes of payloads, if there is one."""
        return self._heap_bytes

    @property
    def inner(self) -> FrameStore | DenseStore | None:
        """The store that holds the observations, once a method is chosen."""
        return self._inner

    @property
    def layout(self) -> StackLayout | None:
        """How observations are cut into frames, once that is known."""
        return self._inner.layout if isinstance(self._inner, FrameStore) else None

    def describe(self) -> str:
        """The method in use and why."""
        if self._inner is None or self.choice is None:
            held = sum(len(pending) for pending, _, _ in self._pending)
            return f"{self.method} (undecided after {held} observations)"
        method = self._inner.codec.describe() if isinstance(self._inner, FrameStore) else "none"
        return f"{method} ({self.choice.why})" if self.choice.why else method

    def memory_usage(self) -> MemoryUsage:
        """What is held, and what ``n_cells`` dense observations would take."""
        with self._lock:
            if isinstance(self._inner, FrameStore):
                usage = self._inner.memory_usage()
            elif self._inner is not None:
                usage = MemoryUsage(payload=self._inner.nbytes, index=0, keyframes=0, other=0, dense=0)
            else:
                pending = sum(rows.nbytes + indices.nbytes + streams.nbytes for indices, streams, rows in self._pending)
                usage = MemoryUsage(payload=pending, index=0, keyframes=0, other=0, dense=0)
            return replace(usage, dense=self.n_obs * self.spec.nbytes, codecs={"": self.describe()})

    @property
    def held_bytes(self) -> int:
        """About the total of `memory_usage`, never less; cheap enough to ask after every write."""
        with self._lock:
            if self._inner is not None:
                return self._inner.held_bytes
            return sum(rows.nbytes + indices.nbytes + streams.nbytes for indices, streams, rows in self._pending)

    def check(self) -> None:
        """Raise if anything inside disagrees."""
        with self._lock:
            if self._inner is not None:
                self._inner.check()

    def frozen(self) -> ObservationStore:
        """What this store is between two writes, to be pickled or copied later; of no other use."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__getstate__())
        return made

    def __getstate__(self) -> dict[str, Any]:
        if "_lock" not in vars(self):
            return vars(self)  # frozen already
        with self._lock:
            state = self.__dict__.copy()
            for name in ("_lock", "make_heap", "on_change", "_before"):
                state.pop(name, None)
            if self._inner is not None:
                # now: pickle would get to it when the lock is open again
                state["_inner"] = _Frozen(type(self._inner), self._inner.__getstate__())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(state["_inner"], _Frozen):
            self._inner = state["_inner"].thaw()
        self._lock = fork_safe_lock()
        self._before = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ObservationStore:
        made = object.__new__(type(self))
        made.__setstate__(dict(self.__getstate__()))
        memo[id(self)] = made
        return made


class _Frozen:
    """The state of an inner store, copied already."""

    def __init__(self, kind: type[Any], state: dict[str, Any]) -> None:
        self.kind, self.state = kind, state

    def thaw(self) -> Any:
        inner = object.__new__(self.kind)
        inner.__setstate__(dict(self.state))
        return inner
