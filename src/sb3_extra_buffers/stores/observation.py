"""Observations of one shape and dtype: collected at first, then stored by the method that suits them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import ExtraBuffersError, ReadOnlyBufferError
from sb3_extra_buffers.stores.base import Array, FillHeap, FrozenStore, Indices, Store, StoreParts, put_rows
from sb3_extra_buffers.stores.checks import only_named_errors, parse_dtype, parse_shape, require, whole
from sb3_extra_buffers.stores.choice import Choice, MethodChoice, may_be_stacked
from sb3_extra_buffers.stores.collected import CollectedRows
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.locks import ReaderLocks, fork_safe_lock, this_thread
from sb3_extra_buffers.stores.method_change import (
    FIRST_COMPARISON,
    copy_observations,
    is_small_enough,
    next_comparison,
    sample_runs,
)
from sb3_extra_buffers.stores.raw import RawStore
from sb3_extra_buffers.stores.reentry import RawCopier, is_inside_method, reads, writes
from sb3_extra_buffers.stores.registry import make_store
from sb3_extra_buffers.stores.restore_inner import restore_inner
from sb3_extra_buffers.stores.segments import DirectWriter, SegmentStore
from sb3_extra_buffers.stores.timeline import TimelineStore
from sb3_extra_buffers.stores.usage import MemoryUsage

if TYPE_CHECKING:
    from typing_extensions import Self

_logger = logging.getLogger("sb3_extra_buffers")

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate["ObservationStore", _Arguments], _Result]
# older pickles refer to it by this name
_Frozen = FrozenStore


def _exclusive(method: _Method[_Arguments, _Result]) -> _Method[_Arguments, _Result]:
    """Run a method while no other thread reads or writes."""

    @functools.wraps(method)
    @writes
    def run(self: ObservationStore, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with self.lock:
            self.readers.exclude()
            try:
                return method(self, *args, **kwargs)
            finally:
                self.readers.writing = False

    return run


class ObservationStore:
    """Observations behind indices that count from 0.

    The first observations are held uncompressed, until it is clear how they are stacked and, with ``auto``, which
    method suits them. Then they move to a `Store` of the registry, which all later ones are written to. Reads return
    the same bytes before and after; indices that were never written read as zeros. Any number of threads may read while
    one writes.

    A write is stored as a whole or, after an exception of any kind at any moment, not at all. `undo_write` undoes the
    last one, for steps that consist of writes to several stores.
    """

    #: Whether ``auto`` may leave observations uncompressed, which reserves memory for all of them.
    may_stay_dense = True
    # defaults for stores that were pickled before these attributes existed
    _allocated: tuple[int, ...] = ()
    _n_written, _compare_at = 0, FIRST_COMPARISON
    #: Whether writing is an error, as for a file that was opened read-only.
    read_only = False
    #: Bytes that the store and its copy may take together when ``auto`` changes the method; None for no limit.
    copy_limit: int | None = None
    #: Creates the heap of a new frame store, if it is not to be in memory.
    make_heap: Callable[[], Heap] | None = None
    #: How far apart the indices of consecutive observations of a stream are; None for ``n_streams``.
    stride: int | None = None
    #: Called with every change, such as ``("write", indices, streams, rows)``. If it raises, a write is undone.
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
        self._chooser = MethodChoice(spec, method, options)
        self.method, self.options = method, self._chooser.options
        #: The method in use and why, once it is known.
        self.choice: Choice | None = self._chooser.choice
        self.n_obs = 0
        self.heap_bytes = heap_bytes
        self._path = None if path is None else Path(path)
        #: Whether to use compiled kernels; None for those that are available.
        self.compiled = compiled
        #: Held by every change. Hold it to keep the store unchanged over several calls.
        self.lock = fork_safe_lock()
        self.readers = ReaderLocks()
        #: The store of the observations, once a method is chosen.
        self.inner: Store | None = None
        self._collected = CollectedRows(spec.nbytes)
        # the size of each range that was allocated: usually observations, then next observations
        self._allocated = ()
        # observations written so far, and the number at which methods are compared again
        self._n_written, self._compare_at = 0, FIRST_COMPARISON
        # what the last write replaced, while no method is chosen
        self._before: tuple[CollectedRows, Choice | None] | None = None

    @_exclusive
    def allocate(self, n_obs: int, are_next: bool = False) -> int:
        """Append ``n_obs`` unwritten observations; return the index of the first.

        ``are_next`` says that they are the next observations of those that the store already has.
        """
        first = self.n_obs
        raw = self.inner
        if (
            are_next
            and n_obs == first
            and isinstance(raw, RawStore)
            and not raw.written.any()
            and _can_share(self.spec, n_obs, self.n_streams)
        ):
            layout = StackLayout(self.spec)
            self.inner = TimelineStore(layout, 2 * n_obs, self.n_streams, None, self.heap_bytes, None, self.compiled)
        elif self.inner is not None:
            self.inner.allocate(n_obs)
        elif self.choice is not None and self.choice.is_raw and not may_be_stacked(self.spec):
            self.inner = RawStore(StackLayout(self.spec), first + n_obs, heap_bytes=self.heap_bytes)
        self.n_obs, self._allocated = first + n_obs, (*self._allocated, n_obs)
        return first

    @_exclusive
    def share_next(self) -> None:
        """Store uncompressed next observations only where they differ from the following observation."""
        raw, n_each = self.inner, self.n_obs // 2
        if isinstance(raw, RawStore) and self.n_obs == 2 * n_each and _can_share(self.spec, n_each, self.n_streams):
            raw.commit()
            self._before = None
            self.inner = TimelineStore.from_rows(
                raw.rows[:n_each], raw.rows[n_each:], self.n_streams, self.heap_bytes, self.compiled
            )

    @_exclusive
    def adopt_pairs(self, rows: ByteRows, next_rows: ByteRows) -> None:
        """Hold uncompressed observations and their next observations; ``rows`` are not copied if possible."""
        self._before = None
        self.inner = TimelineStore.from_rows(rows, next_rows, self.n_streams, self.heap_bytes, self.compiled)

    @_exclusive
    def reserve_next(self) -> None:
        """Reserve memory for the next observations of the next `write_step`, if observations are on a time axis."""
        if isinstance(self.inner, TimelineStore):
            self.inner.commit()
            self.inner.reserve(2 * self.n_streams)

    # ---- writing ----

    @writes
    def write(self, indices: Indices, streams: Indices, rows: ByteRows) -> None:
        """Store one row per index; row ``i`` continues stream ``streams[i]``."""
        with self.lock:
            self._check_writable()
            self._before = None
            self.readers.exclude()
            try:
                self._n_written += len(indices)
                if self._n_written >= self._compare_at:
                    self._compare_again(int(indices[0]) if len(indices) else 0)
                inner = self.inner
                if inner is not None:
                    inner.write(indices, streams, rows)
                else:
                    self._collect(indices, streams, rows)
            except BaseException:
                self._undo_failed()
                raise
            else:
                if self.on_change is not None:
                    self._report_write(indices, streams, rows)
            finally:
                self.readers.writing = False

    @writes
    def write_step(self, index: int, next_index: int, rows: ByteRows, next_rows: ByteRows) -> None:
        """Store a row of every stream from ``index`` on, and their successors from ``next_index`` on, as one write."""
        with self.lock:
            inner = self.inner
            if inner is None or self.read_only or self.on_change is not None:
                streams = np.arange(len(rows))
                indices = np.concatenate([streams + index, streams + next_index])
                self.write(indices, np.concatenate([streams, streams]), np.concatenate([rows, next_rows]))
                return
            self._before = None
            self.readers.exclude()
            try:
                self._n_written += 2 * len(rows)
                if self._n_written >= self._compare_at:
                    self._compare_again(index)
                    inner = self.inner or inner
                inner.write_step(index, next_index, rows, next_rows)
            except BaseException:
                self._undo_failed()
                raise
            finally:
                self.readers.writing = False

    @writes
    def write_direct(self, writer: DirectWriter, inner: SegmentStore, arguments: tuple[Any, ...]) -> bool:
        """`write_step`, of `SegmentStore.write_direct`; the step is committed too.

        Returns False, and changes nothing, if the step does not fit or ``inner`` is not the store in use any more.
        """
        with self.lock:
            n_written = self._n_written + writer.n_rows
            if self.inner is not inner or self.read_only or self.on_change is not None or n_written >= self._compare_at:
                return False
            self._before = None
            readers = self.readers
            readers.writing = True
            try:
                if readers.stripes:
                    readers.wait()
                written = inner.write_direct(writer, arguments)
                if written:
                    self._n_written = n_written
                return written
            except BaseException:
                self._undo_failed()
                raise
            finally:
                readers.writing = False

    @writes
    def write_encoded(self, indices: Indices, write: Callable[[Store], bool]) -> bool:
        """Let ``write`` store encoded rows at ``indices``, as one write of the inner store; return what it returns.

        Returns False without calling ``write`` if rows must be decoded: before a method is chosen, or if changes are
        reported.
        """
        with self.lock:
            self._check_writable()
            if self.inner is None or self.on_change is not None:
                return False
            self._before = None
            self.readers.exclude()
            try:
                if self._n_written + len(indices) >= self._compare_at:
                    self._compare_again(int(indices[0]) if len(indices) else 0)
                written = write(self.inner)
                self._n_written += len(indices) * written
            except BaseException:
                self._undo_failed()
                raise
            finally:
                self.readers.writing = False
            return written

    def _report_write(self, *arguments: Array) -> None:
        if self.on_change is not None:
            try:
                self.on_change("write", *arguments)
            except BaseException:
                self.undo_write()
                raise

    def _undo_failed(self) -> None:
        """Undo what was written by a write that failed; if that fails too, the next use of the store does it."""
        with contextlib.suppress(Exception):
            if self._before is not None:
                self.undo_write()
            elif self.inner is not None:
                self.inner.recover()

    def commit(self) -> None:
        """Make the last write permanent; `undo_write` undoes what is written from now on."""
        with self.lock:
            self._before = None
            if self.inner is not None:
                self.inner.commit()

    @_exclusive
    def undo_write(self) -> bool:
        """Undo the last `write` or `write_step`; return False if it was committed or something else was changed since.

        For steps that consist of writes to several stores: `commit` all of them first.
        """
        if self._before is not None:
            self._collected, self.choice = self._before
            self.inner = self._before = None
            return True
        return self.inner is not None and self.inner.undo_write()

    def _check_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyBufferError("these observations were opened read-only; load() them to write to a copy")

    # ---- choosing a method ----

    def _collect(self, indices: Indices, streams: Indices, rows: ByteRows) -> None:
        """Hold rows as they are, and choose a method once there are enough of them."""
        collected = self._collected.add(indices, streams, rows)
        self._before = self._collected, self.choice
        self._collected = collected
        if len(collected) >= self._chooser.n_trial(self.n_obs, self.heap_bytes):
            self._choose_method()

    @_exclusive
    def choose_method(self) -> None:
        """Choose now, from what was written so far."""
        if self.inner is None:
            self._before = None
            self._choose_method()

    def _choose_method(self) -> None:
        indices, streams, rows = self._collected.join()
        may_stay_dense = self.may_stay_dense and self.heap_bytes is None
        layout, choice = self._chooser.decide(streams, rows, self.n_streams, may_stay_dense)
        if choice is None:
            return
        codec = self._chooser.make_codec(choice, layout)
        inner = self._make_inner(layout, codec)
        if self.make_heap is not None:
            inner.use_heap(self.make_heap)
        inner.train(rows)
        # only the newest row of each index
        newest = np.sort(len(indices) - 1 - np.unique(indices[::-1], return_index=True)[1])
        inner.write(indices[newest], streams[newest], rows[newest])
        inner.commit()  # otherwise, undoing one write would undo all of these
        # last, and the store first: after an exception before this line, the collected rows are still in use
        self.inner = inner
        self.choice, self._collected = choice, CollectedRows(self.spec.nbytes)

    # ---- choosing again ----

    def _make_inner(self, layout: StackLayout, codec: Codec) -> Store:
        """Create a store for all observations; uncompressed ones share rows, or frames, with their successors."""
        n_each = self.n_obs // 2
        shares = self._allocated == (n_each, n_each) and _can_share(self.spec, n_each, self.n_streams)
        how = self.n_obs, self.n_streams, codec, self.heap_bytes, self._path, self.compiled
        if codec.codec_id == "none" and layout.stack == 1 and shares:
            return TimelineStore(layout, *how)
        return make_store(layout, *how)

    def _compare_again(self, position: int) -> None:
        """Compare methods on a sample of everything that is stored, and change to one that is clearly better.

        ``position`` is the index that is written next. Called before a write, which makes the last one permanent
        anyway. An exception leaves everything as it was.
        """
        self._compare_at = next_comparison(self._compare_at)
        inner, now = self.inner, self.choice
        if inner is None or now is None or not self._may_change(inner):
            return
        n_held = min(self._n_written, self.n_obs)
        if is_small_enough(now, inner.held_bytes, n_held * self.spec.nbytes):
            return
        try:
            runs, rows = sample_runs(inner, self.spec.nbytes, self._allocated[0], self.stride or self.n_streams)
            if not len(rows):
                return
            layout = inner.layout or StackLayout(self.spec)
            decided = self._chooser.decide_again(runs, rows, now, layout, self.may_stay_dense)
            if decided is not None:
                self._change_method(inner, *decided, position)
        except (ExtraBuffersError, MemoryError) as problem:
            _logger.info("auto: keeping %s, because changing the method failed: %s", now.method, problem)

    @property
    def keeps_method(self) -> bool:
        """Whether the method was known before the first observation, and never changes."""
        return self.method != "auto" or self._chooser.choice is not None

    def _may_change(self, inner: Store) -> bool:
        """Whether ``auto`` may copy observations to another store."""
        if self.keeps_method or sum(self._allocated) != self.n_obs:
            return False
        # heap_bytes, a file and a journal are tied to the store that is in use
        if self.heap_bytes is not None or self._path is not None or self.make_heap is not None:
            return False
        return self.on_change is None and (self.copy_limit is None or 2 * inner.held_bytes <= self.copy_limit)

    def _change_method(self, inner: Store, layout: StackLayout, choice: Choice, position: int) -> None:
        """Copy everything to a store of another method, then use that one."""
        new = self._make_inner(layout, self._chooser.make_codec(choice, layout))
        copy_observations(inner, new, self.spec.nbytes, self._allocated, self.stride or self.n_streams, position)
        before = "none" if self.choice is None else self.choice.method
        message = "auto: changed from %s to %s after %d observations (%s)"
        _logger.info(message, before, choice.method, self._n_written, choice.why)
        # in one call: if the choice did not match the store, a saved copy could not be loaded
        self.__dict__.update(inner=new, choice=choice)

    # ---- reading ----

    @reads
    def read(self, indices: Indices) -> ByteRows:
        """Return new rows of shape ``[*indices.shape, nbytes]``; ``indices`` has one axis, or two: ``[set, n]``."""
        readers = self.readers
        with readers.stripes.get(this_thread.stripe) or readers.add_stripe():
            inner = self.inner
            if not (readers.writing or inner is None or inner.dirty):
                return inner.read(indices)
        with self.lock:
            inner = self._readable_inner()
            return self._collected.read(indices) if inner is None else inner.read(indices)

    @reads
    def read_windows(self, indices: Indices, newest_only: bool = False, out: ByteRows | None = None) -> ByteRows:
        """Read windows, consecutive observations of one stream in each row of ``indices [batch, length]``.

        Args:
            indices: Each row is a window; its last column may be a next observation.
            newest_only: Return the newest frame of each stack, ``[batch, length, frame_bytes]``. Observations that are
                not stacked, or whose `layout` is not known yet, are returned whole.
            out: C-contiguous memory for the result.

        Returns:
            The bytes that `read` returns, ``[batch, length, nbytes]``; each frame is decoded once.
        """
        readers = self.readers
        with readers.stripes.get(this_thread.stripe) or readers.add_stripe():
            inner = self.inner
            if not (readers.writing or inner is None or inner.dirty):
                return inner.read_windows(indices, newest_only, out)
        with self.lock:
            inner = self._readable_inner()
            if inner is not None:
                return inner.read_windows(indices, newest_only, out)
            return put_rows(out, self._collected.read(indices))

    @reads
    def read_pairs(self, steps: Indices, streams: Indices, are_next: bool) -> ByteRows | None:
        """`TimelineStore.read_pairs`; None if the inner store is of another kind."""
        readers = self.readers
        with readers.stripes.get(this_thread.stripe) or readers.add_stripe():
            inner = self.inner
            if isinstance(inner, TimelineStore) and not (readers.writing or inner.dirty):
                return inner.read_pairs(steps, streams, are_next)
        with self.lock:
            inner = self._readable_inner()
            return inner.read_pairs(steps, streams, are_next) if isinstance(inner, TimelineStore) else None

    def _readable_inner(self) -> Store | None:
        """`inner`; in a signal handler that interrupted a write to it, a copy without that write."""
        inner = self.inner
        if inner is None or not (inner.dirty and is_inside_method(inner)):
            return inner
        copied: Store = RawCopier().copy(inner)
        copied.recover()
        return copied

    # ---- erasing ----

    @_exclusive
    def erase(self, indices: Indices) -> None:
        """Make ``indices`` unwritten."""
        self._begin_change("erase", indices)
        if self.inner is not None:
            self.inner.erase(indices)
        else:
            self._collected = self._collected.erase(indices)

    @_exclusive
    def clear(self) -> None:
        """Make every index unwritten; the method stays."""
        self._begin_change("clear")
        self._collected = CollectedRows(self.spec.nbytes)
        if self.inner is not None:
            self.inner.clear()

    def _begin_change(self, *change: Any) -> None:
        self._check_writable()
        if self.on_change is not None:
            self.on_change(*change)
        self._before = None

    @_exclusive
    def run_exclusively(self, action: Callable[[], _Result]) -> _Result:
        """Call ``action``, which may change `inner`, while no other thread reads or writes."""
        return action()

    # ---- reports ----

    @property
    def frames(self) -> FrameStore | None:
        """The frame store with the payloads, once a method was chosen; None if there is none."""
        return None if self.inner is None else self.inner.frames

    @property
    def layout(self) -> StackLayout | None:
        """How observations are cut into frames, once that is known; None if they are not."""
        return None if self.inner is None else self.inner.layout

    def describe(self) -> str:
        """The method in use, and why it was chosen."""
        inner = self.inner
        if inner is None:
            n_trial = self._chooser.n_trial(self.n_obs, self.heap_bytes)
            return self._chooser.describe_pending(len(self._collected), n_trial)
        return self._chooser.describe(self.choice, inner.describe())

    @_exclusive
    def memory_usage(self) -> MemoryUsage:
        """The bytes in use, by purpose, and what an array of the observations that were written would take."""
        inner = self.inner
        usage = MemoryUsage(self._collected.nbytes) if inner is None else inner.memory_usage()
        n_written = (self._collected if inner is None else inner).count_written()
        dense = n_written * self.spec.nbytes
        return replace(
            usage, transitions=n_written, dense=dense, dense_observations=dense, codecs={"": self.describe()},
            decided=inner is not None,
        )  # fmt: skip

    @property
    def codec_options(self) -> dict[str, Any]:
        """The options of the codec in use; those of ``auto`` are not among them."""
        return self._chooser.codec_options

    @property
    @_exclusive
    def held_bytes(self) -> int:
        """An upper bound of the total of `memory_usage`, cheap enough for every step."""
        return self._collected.nbytes if self.inner is None else self.inner.held_bytes

    @_exclusive
    def check(self) -> None:
        """Raise `AssertionError` if the tables contradict each other."""
        if self.inner is not None:
            self.inner.check()

    # ---- saving ----

    @_exclusive
    def to_parts(self) -> StoreParts:
        """What a file holds of this store. The arrays are its own: hold `lock` as long as they are used."""
        record: dict[str, Any] = {
            "shape": list(self.spec.shape),
            "dtype": self.spec.dtype.str,
            "n_streams": self.n_streams,
            "n_cells": self.n_obs,
            "method": self.method,
            "options": dict(self.options),
            "heap_bytes": self.heap_bytes,
            "choice": None if self.choice is None else [self.choice.method, self.choice.why],
            "ranges": list(self._allocated),
            "n_written": self._n_written,
        }
        inner = self.inner
        if inner is None:
            indices, streams, rows = self._collected.join()
            arrays: dict[str, Array] = {"cells": indices, "streams": streams, "rows": rows}
            return StoreParts(record | {"kind": "pending"}, arrays, None, None)
        inner_record, arrays = inner.to_parts()
        frames = inner.frames
        return StoreParts(record | inner_record, arrays, None if frames is None else frames.heap, frames)

    @classmethod
    def from_parts(
        cls,
        record: Mapping[str, Any],
        arrays: Mapping[str, Array],
        fill_heap: FillHeap,
        read_only: bool = False,
        compiled: bool | None = None,
    ) -> Self:
        """Return the store that `to_parts` described; raise `FileFormatError` if anything about it is wrong.

        ``read_only`` leaves out the tables that only writing needs.
        """
        with only_named_errors("the saved store"):
            spec = ObsSpec(parse_shape(record["shape"]), parse_dtype(record["dtype"]))
            limit, method, options = record["heap_bytes"], record["method"], record["options"]
            if limit is not None:
                whole(limit, "heap_bytes", stop=1 << 64)
            require(isinstance(method, str) and isinstance(options, dict), f"invalid method {method!r}")
            store = cls(spec, whole(record["n_streams"], "n_streams", 1), method, options, limit, None, compiled)
            store.restore(record, arrays, fill_heap, read_only)
        return store

    def restore(
        self, record: Mapping[str, Any], arrays: Mapping[str, Array], fill_heap: FillHeap, read_only: bool
    ) -> None:
        """Hold what was saved; in a new store with the settings of ``record``."""
        if record["choice"] is not None:
            self.choice = self._check_choice(record["choice"])
        self.n_obs = whole(record["n_cells"], "n_cells")
        # files of earlier versions have neither of these: the method then never changes
        ranges = record.get("ranges", [])
        require(isinstance(ranges, list) and len(ranges) < 1 << 16, f"invalid ranges of observations: {ranges!r}")
        self._allocated = tuple(whole(n, "a range of observations", stop=self.n_obs + 1) for n in ranges)
        self._n_written = whole(record.get("n_written", 0), "n_written", stop=1 << 62)
        while self._compare_at <= self._n_written:
            self._compare_at = next_comparison(self._compare_at)
        restored = restore_inner(self, record, arrays, fill_heap, read_only)
        if isinstance(restored, CollectedRows):
            self._collected = restored
        else:
            self.inner = restored

    def _check_choice(self, saved: Any) -> Choice:
        require(isinstance(saved, list) and [*map(type, saved)] == [str, str], f"invalid choice of a method: {saved!r}")
        chosen = get_codec(saved[0], **self.codec_options).codec_id
        if self.choice is not None:
            allowed = get_codec(self.choice.method, **self.codec_options).codec_id, "none"
            require(chosen in allowed, f"{saved[0]!r} was chosen where {self.method!r} was asked for")
        return Choice(*saved)

    # ---- copies ----

    def frozen(self) -> ObservationStore:
        """A copy of the state between two writes, to be pickled or copied later; it cannot be used otherwise."""
        frozen = object.__new__(type(self))
        frozen.__dict__.update(self.__getstate__())
        return frozen

    def __getstate__(self) -> dict[str, Any]:
        # a frozen store has no lock
        return self._copy_state() if "lock" in vars(self) else vars(self)

    @_exclusive
    def _copy_state(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("lock", "readers", "make_heap", "on_change", "_before"):
            state.pop(name, None)
        if self.inner is not None:
            # now, because pickle reads it after the lock is released
            state["inner"] = FrozenStore.of(self.inner)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(state["inner"], FrozenStore):
            self.inner = state["inner"].thaw()
        self.lock = fork_safe_lock()
        self.readers = ReaderLocks()
        self._before = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ObservationStore:
        copied = object.__new__(type(self))
        copied.__setstate__(dict(self.__getstate__()))
        memo[id(self)] = copied
        return copied


def _can_share(spec: ObsSpec, n_each: int, n_streams: int) -> bool:
    """Whether ``n_each`` observations and as many next ones fit a `TimelineStore`."""
    return n_each > 0 and n_each % n_streams == 0 and spec.nbytes > 0
