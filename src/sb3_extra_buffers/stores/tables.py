"""Observations as indices into a table of colours or numbers, kept by another store: ``palette`` and ``table``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.errors import HeapFullError
from sb3_extra_buffers.kernels.policy import expand_ns, map_ns
from sb3_extra_buffers.stores.arena import resident_bytes, zeros
from sb3_extra_buffers.stores.base import Array, FillHeap, FrozenStore, Indices, Store, Trial, rows_for
from sb3_extra_buffers.stores.checks import column, entry, require, within
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.reentry import is_inside_method, refuse
from sb3_extra_buffers.stores.registry import find_store, make_store
from sb3_extra_buffers.stores.restore import fill_from, pack_payloads, read_layout
from sb3_extra_buffers.stores.segments import SegmentStore
from sb3_extra_buffers.stores.unit_table import Geometry, UnitTable, find_geometry
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.workers import run_split

if TYPE_CHECKING:
    from sb3_extra_buffers.stores.observation import ObservationStore

# where an observation is
_UNWRITTEN, _INSIDE, _OUTSIDE = 0, 1, 2
# the method for observations with other colours or numbers than the table's
_OUTSIDE_METHOD = "delta"
# the inner method of a palette, unless the user named one
_DEFAULT_INNER = "delta"
# bytes of pixels or numbers that a thread expands at a time, where the read kernel cannot
_CHUNK_BYTES = 1 << 20
# `auto` does not choose a table if more than this share of the first observations would be outside
_MAX_OUTSIDE = 0.05
# nor a palette if the first observations have more colours than this: later ones would add more than fit
_MAX_FIRST_COLOURS = 200
# the indices of the last step are kept only if the capacity is at least this many times the number of frames in a step:
# they then take little memory in comparison
_GUESS_SHARE = 1024
_OUTSIDE_PREFIX = "outside."


class TableStore(Store):
    """Observations as rows of indices, one byte per pixel or number, and the table that the indices refer to.

    The ``inner`` store holds the indices. Observations with a colour or number for which the table has no space are in
    the ``outside`` store, which is created for the first of them. ``places`` says which store holds an observation; the
    other one holds zeros.
    """

    layout: StackLayout

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
        self.layout, self.codec, self.n_streams = layout, codec, n_streams
        self.heap_bytes, self._compiled = heap_bytes, compiled
        self.inner_method = _inner_method(codec)
        geometry = _geometry(layout)
        inner_codec = get_codec(self.inner_method).bind(geometry.inner.frame_spec)
        self.table = UnitTable(layout.spec.dtype, geometry.unit, geometry.plane, compiled)
        # a frame store even if indices stay uncompressed, so that observations and next observations share rows
        make_inner = find_store(inner_codec, geometry.inner, of_frames=True)
        self.inner: Store = make_inner(geometry.inner, n_obs, n_streams, inner_codec, heap_bytes, path, compiled)
        self.outside: Store | None = None
        self.places: npt.NDArray[np.uint8] = zeros(n_obs, np.uint8)  # [observation]
        self._n_units = geometry.inner.spec.nbytes
        # indices of the last step's next observations, which the observations of the next step usually repeat
        self._guess: npt.NDArray[np.uint8] | None = None
        self._undo: list[tuple[Any, npt.NDArray[np.uint8]]] | None = None
        self.dirty = False

    @classmethod
    def accepts(cls, codec: Codec, layout: StackLayout) -> bool:
        of_bytes = layout.spec.dtype.itemsize == 1
        return codec.codec_id == ("palette" if of_bytes else "table") and find_geometry(layout) is not None

    @property
    def frames(self) -> FrameStore | None:
        return self.inner.frames

    def _stores(self) -> list[Store]:
        return [self.inner] if self.outside is None else [self.inner, self.outside]

    def allocate(self, n_obs: int) -> None:
        self.commit()
        places: npt.NDArray[np.uint8] = zeros(len(self.places) + n_obs, np.uint8)
        places[: len(self.places)] = self.places
        # after an interrupt, some stores may be longer than others, which does no harm
        self.dirty = True
        self.places = places
        for store in self._stores():
            store.allocate(n_obs)
        self.dirty = False

    # ---- writing ----

    def write(self, indices: Indices, streams: Indices, rows: ByteRows) -> None:
        self.recover()
        mapped, is_outside = self._map(rows)
        before = self.places[indices]
        after = np.full(len(rows), _INSIDE, np.uint8)
        moves = None
        if is_outside is not None:
            after[is_outside] = _OUTSIDE
        if is_outside is not None or (self.outside is not None and (before == _OUTSIDE).any()):
            moves = self._moves(indices, streams, rows, before, after)
        self._begin_write([(indices.copy(), before)])
        self.inner.write(indices, streams, mapped)
        if moves is not None and self.outside is not None:
            self.outside.write(*moves)
        self.places[indices] = after
        self._end_write()

    def write_step(self, index: int, next_index: int, rows: ByteRows, next_rows: ByteRows) -> None:
        if self.dirty:
            self.recover()
        n_rows, guess = len(rows), self._guess
        guessed = guess is not None and len(guess) == n_rows
        if guess is None or not guessed:
            is_kept = _GUESS_SHARE * n_rows * self.layout.stack <= len(self.places)
            guess = np.empty((n_rows if is_kept else 0, self._n_units), np.uint8)
        self._guess = None  # until this step has been mapped
        mapped = None if self.outside is not None else self.table.map_step(rows, next_rows, guess, guessed)
        if mapped is None:
            super().write_step(index, next_index, rows, next_rows)
            return
        self._guess = guess
        here, there = slice(index, index + n_rows), slice(next_index, next_index + n_rows)
        self._begin_write([(here, self.places[here].copy()), (there, self.places[there].copy())])
        self.inner.write_step(index, next_index, mapped[:n_rows], mapped[n_rows:])
        self.places[here] = _INSIDE
        self.places[there] = _INSIDE
        self._end_write()

    def _map(self, rows: ByteRows) -> tuple[ByteRows, npt.NDArray[np.bool_] | None]:
        """Return the table indices of ``rows``, and flags of the rows to store outside; None if there are none."""
        if self.table.is_empty and len(rows):
            self.table.learn(rows)
        mapped = np.empty((len(rows), self._n_units), np.uint8)
        return mapped, self.table.map(rows, mapped)

    def _moves(
        self, indices: Indices, streams: Indices, rows: ByteRows, before: Array, after: Array
    ) -> tuple[Indices, Indices, ByteRows]:
        """Return what to write to ``outside``: its new rows, and zeros for rows that it no longer holds."""
        if self.outside is None:
            codec = get_codec(_OUTSIDE_METHOD).bind(self.layout.frame_spec)
            self.outside = make_store(
                self.layout, len(self.places), self.n_streams, codec, self.heap_bytes, None, self._compiled
            )
        # the same index may occur twice in a write
        at = np.isin(indices, indices[(before == _OUTSIDE) | (after == _OUTSIDE)])
        moved = rows[at]
        moved[after[at] == _INSIDE] = 0
        return indices[at], streams[at], moved

    def _begin_write(self, undo: list[tuple[Any, npt.NDArray[np.uint8]]]) -> None:
        for store in self._stores():
            store.commit()  # so that undoing this write cannot undo the one before
        self._undo = undo
        self.dirty = True

    def _end_write(self) -> None:
        if self.heap_bytes is not None and self.outside is not None:
            held = sum(_payload_bytes(store) for store in self._stores())
            if held > self.heap_bytes:
                raise HeapFullError(held - self.heap_bytes, self.heap_bytes, self.heap_bytes)
        self.dirty = False

    def erase(self, indices: Indices) -> None:
        self.commit()
        self.dirty = True
        self.places[indices] = _UNWRITTEN
        for store in self._stores():
            store.erase(indices)
        self.dirty = False

    def clear(self) -> None:
        self.commit()
        self.dirty = True
        self.places = zeros(len(self.places), np.uint8)
        self.outside = None
        self.inner.clear()
        self.dirty = False

    # ---- transactions ----

    def recover(self) -> None:
        if self.dirty:
            if is_inside_method(self):
                raise refuse("this store")
            for store in self._stores():
                store.recover()
                store.undo_write()
            for indices, before in self._undo or []:
                self.places[indices] = before
            self._undo = None
            self.dirty = False

    def commit(self) -> None:
        self.recover()
        self._undo = None
        for store in self._stores():
            store.commit()

    def undo_write(self) -> bool:
        self.recover()
        if self._undo is None:
            return False
        self.dirty = True
        self.recover()
        return True

    # ---- reading ----

    def read(self, indices: Indices) -> ByteRows:
        if self.dirty:
            self.recover()
        nbytes = self.layout.spec.nbytes
        if isinstance(self.inner, SegmentStore) and self.inner.joins_frames:
            out = self.inner.read_units(indices, self.table.lookup)
        else:
            out = self._expand(self.inner.read(indices).reshape(-1, self._n_units))
        self._correct(indices, out)
        return out.reshape(*indices.shape, nbytes)

    def read_windows(self, indices: Indices, newest_only: bool = False, out: ByteRows | None = None) -> ByteRows:
        if not (isinstance(self.inner, SegmentStore) and self.inner.joins_frames):
            return super().read_windows(indices, newest_only, out)
        if self.dirty:
            self.recover()
        nbytes = self.layout.frame_bytes if newest_only else self.layout.spec.nbytes
        rows = rows_for(out, (*indices.shape, nbytes))
        self.inner.read_unit_windows(indices, newest_only, self.table.lookup, rows)
        self._correct(indices, rows.reshape(indices.size, nbytes), newest_only)
        return rows

    def _correct(self, indices: Indices, out: ByteRows, newest_only: bool = False) -> None:
        """Replace those rows of ``out`` that the inner store does not hold."""
        places = self.places[indices.reshape(-1)]
        if places.size and (places.min() == _UNWRITTEN or places.max() == _OUTSIDE):
            out[places == _UNWRITTEN] = 0
            is_outside = places == _OUTSIDE
            if self.outside is not None and is_outside.any():
                rows = self.outside.read(indices.reshape(-1)[is_outside])
                out[is_outside] = self.layout.newest(rows) if newest_only else rows

    def _expand(self, mapped: ByteRows) -> ByteRows:
        nbytes = self.layout.spec.nbytes
        out = np.empty((len(mapped), nbytes), np.uint8)

        def work(first: int, stop: int) -> None:
            self.table.expand(mapped, out, first, stop)

        run_split(work, len(out), max(_CHUNK_BYTES // nbytes, 1))
        return out

    def hold(self, places: npt.NDArray[np.uint8], inner: Store, outside: Store | None) -> None:
        """Use these stores in a new store; raise `FileFormatError` if ``places`` is invalid."""
        within(places, _UNWRITTEN, _OUTSIDE + 1, "where an observation is")
        require(not self.table.is_empty or places != _INSIDE, "an observation refers to a table that is still empty")
        require(outside is not None or places != _OUTSIDE, "an observation is outside the table, where nothing is")
        self.places, self.inner, self.outside = places, inner, outside

    # ---- reports ----

    @property
    def held_bytes(self) -> int:
        self.commit()  # the nested stores commit when they report; here and below
        own = self.places.nbytes + self.table.nbytes + (0 if self._guess is None else self._guess.nbytes)
        return sum(store.held_bytes for store in self._stores()) + own

    def memory_usage(self) -> MemoryUsage:
        self.commit()
        usage = self.inner.memory_usage()
        if self.outside is not None:
            usage += self.outside.memory_usage()
        guess_bytes = 0 if self._guess is None else self._guess.nbytes
        index_bytes = usage.index + resident_bytes(self.places) + self.table.nbytes
        return replace(usage, index=index_bytes, keyframes=usage.keyframes + guess_bytes)

    def count_written(self) -> int:
        return int(np.count_nonzero(self.places))

    def find_written(self) -> Indices:
        self.recover()
        return np.flatnonzero(self.places)

    def check(self) -> None:
        self.commit()
        self.table.check()
        for store in self._stores():
            store.check()
        if self.outside is None and (self.places == _OUTSIDE).any():
            raise AssertionError("an observation is outside the table, but there is no store for it")

    def describe(self) -> str:
        units = "colours" if self.table.is_palette else "numbers"
        text = f"{self.codec.codec_id} of {self.table.n_used} {units} over {self.inner.describe()}"
        n_outside = int(np.count_nonzero(self.places == _OUTSIDE))
        if n_outside and self.outside is not None:
            share = 100 * n_outside / max(self.count_written(), 1)
            text += f"; {share:.3g} % of the observations have other {units}, stored with {self.outside.describe()}"
        return text

    # ---- learning ----

    def train(self, rows: ByteRows) -> None:
        if len(rows):
            mapped, is_outside = self._map(rows)
            self.inner.train(mapped if is_outside is None else mapped[~is_outside])

    def use_heap(self, make_heap: Callable[[], Heap]) -> None:
        self.inner.use_heap(make_heap)

    @classmethod
    def trial(cls, layout: StackLayout, codec: Codec, streams: Indices, rows: ByteRows, n_streams: int) -> Trial:
        geometry = _geometry(layout)
        table = UnitTable(layout.spec.dtype, geometry.unit, geometry.plane)
        table.learn(rows)
        mapped = np.empty((len(rows), geometry.inner.spec.nbytes), np.uint8)
        is_outside = table.map(rows, mapped)
        rejected = Trial(float(layout.frame_bytes), np.inf, np.inf, np.inf)
        if is_outside is not None and is_outside.mean() > _MAX_OUTSIDE:
            return rejected
        if table.is_palette and table.n_used > _MAX_FIRST_COLOURS:
            return rejected
        inside = slice(None) if is_outside is None else ~is_outside
        inner_codec = get_codec(_inner_method(codec)).bind(geometry.inner.frame_spec)
        store = find_store(inner_codec, geometry.inner, of_frames=True)
        trial: Trial = store.trial(geometry.inner, inner_codec, streams[inside], mapped[inside], n_streams)
        # frames that are outside count as uncompressed
        share = 0.0 if is_outside is None else float(is_outside.mean())
        n_units = geometry.inner.frame_bytes
        return Trial(
            (1 - share) * trial.frame_bytes + share * layout.frame_bytes,
            trial.read_ns + expand_ns(2 * layout.spec.nbytes),
            trial.write_ns + map_ns(n_units),
            trial.step_ns + map_ns(n_units),
        )

    @classmethod
    def trial_bytes(cls, layout: StackLayout, codec: Codec, streams: Indices, rows: ByteRows, n_streams: int) -> float:
        return cls.trial(layout, codec, streams, rows, n_streams).frame_bytes

    # ---- saving ----

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Array]]:
        self.commit()
        table_record, arrays = self.table.to_parts()
        inner_record, inner_arrays = self._nested_parts(self.inner, self.inner_method)
        record = {
            "kind": "table",
            "stack": self.layout.stack,
            "axis": self.layout.axis,
            "table": table_record,
            "inner": inner_record,
            "outside": None,
        }
        arrays |= inner_arrays | {"places": self.places}
        if self.outside is not None:
            record["outside"], tables = self._nested_parts(self.outside, _OUTSIDE_METHOD)
            frames = self.outside.frames
            if frames is not None:
                # as arrays, because the payload file belongs to the inner store; there are few of these
                tables |= pack_payloads(frames.heap)
            arrays |= {f"{_OUTSIDE_PREFIX}{name}": array for name, array in tables.items()}
        return record, arrays

    def _nested_parts(self, store: Store, method: str) -> tuple[dict[str, Any], dict[str, Array]]:
        record, arrays = store.to_parts()
        return {"choice": [method, ""], "n_cells": len(self.places), **record}, arrays

    def __getstate__(self) -> dict[str, Any]:
        self.commit()
        state = self.__dict__.copy()
        del state["_undo"], state["_guess"], state["dirty"]
        state["places"] = np.array(self.places)
        state["table"] = self.table.copy()
        state["inner"] = FrozenStore.of(self.inner)
        state["outside"] = None if self.outside is None else FrozenStore.of(self.outside)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.inner = state["inner"].thaw()
        self.outside = None if state["outside"] is None else state["outside"].thaw()
        self.table = state["table"].copy()
        self._undo = self._guess = None
        self.dirty = False


def _geometry(layout: StackLayout) -> Geometry:
    geometry = find_geometry(layout)
    if geometry is None:
        raise LookupError(f"observations of {layout.spec} have neither pixels nor numbers that a table can hold")
    return geometry


def _inner_method(codec: Codec) -> str:
    method: str = codec.inner  # type: ignore[attr-defined]  # a PaletteCodec or TableCodec
    return method or _DEFAULT_INNER


def _payload_bytes(store: Store) -> int:
    """The bytes of a store that count towards ``heap_bytes``."""
    held: int | None = getattr(store, "payload_bytes", None)
    if held is None:
        held = store.memory_usage().payload if store.heap is None else store.heap.live_bytes
    return held


def restore_table(
    store: ObservationStore,
    record: Mapping[str, Any],
    arrays: Mapping[str, Array],
    fill_heap: FillHeap,
    read_only: bool,
) -> TableStore:
    """Return what ``TableStore.to_parts`` described, for ``store``, whose settings are known."""
    layout = read_layout(store.spec, record)
    inner_record, outside_record = entry(record, "inner", kind=dict), record["outside"]
    method = entry({"choice": entry(inner_record, "choice", kind=list)[0]}, "choice", kind=str)
    require(get_codec(method).codec_id not in ("palette", "table"), f"{method!r} cannot be an inner method")
    require(store.choice is not None, "a saved table has no method")
    codec: Any = get_codec(store.choice.method, **store.codec_options)  # type: ignore[union-attr]
    require(TableStore.accepts(codec, layout), f"a store of {codec.codec_id!r} does not fit {layout.spec}")
    codec = replace(codec, inner=method).bind(layout.frame_spec)
    # of length 0, so that nothing large is allocated before the nested stores are checked
    restored = TableStore(layout, 0, store.n_streams, codec, store.heap_bytes, None, store.compiled)
    geometry = _geometry(layout)
    places = column(arrays, "places", np.uint8, (store.n_obs,))
    within(places, _UNWRITTEN, _OUTSIDE + 1, "where an observation is")
    restored.table.restore(entry(record, "table", kind=dict), arrays)
    require(not restored.table.is_empty or places != _INSIDE, "an observation refers to a table that is still empty")
    restored.inner = _restore_nested(store, geometry.inner, method, inner_record, arrays, fill_heap, read_only)
    if outside_record is None:
        require(places != _OUTSIDE, "an observation is outside the table, but there is no store for it")
    else:
        tables = {
            name.removeprefix(_OUTSIDE_PREFIX): array
            for name, array in arrays.items()
            if name.startswith(_OUTSIDE_PREFIX)
        }
        outside_record = entry(record, "outside", kind=dict)
        restored.outside = _restore_nested(
            store, layout, _OUTSIDE_METHOD, outside_record, tables, fill_from(tables), read_only
        )
    restored.places = zeros(store.n_obs, np.uint8)
    restored.places[:] = places
    return restored


def _restore_nested(
    store: ObservationStore,
    layout: StackLayout,
    method: str,
    record: Mapping[str, Any],
    arrays: Mapping[str, Array],
    fill_heap: FillHeap,
    read_only: bool,
) -> Store:
    nested = type(store)(layout.spec, store.n_streams, method, None, store.heap_bytes, None, store.compiled)
    require(record["n_cells"] == store.n_obs, "a store inside a table has another length")
    nested.restore(record, arrays, fill_heap, read_only)
    restored = nested.inner
    require(restored is not None, "a store inside a table has no method")
    assert restored is not None
    require(restored.layout in (layout, None), "a store inside a table has another layout")
    return restored
