"""Observation stores in shared memory: written by their owner, read by other processes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import is_
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.registry import codec_from_config
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import SharingError
from sb3_extra_buffers.kernels.timeline import TimelineTables
from sb3_extra_buffers.stores.base import Array, Indices, Store
from sb3_extra_buffers.stores.checks import entry, parse_dtype, parse_shape, require, whole
from sb3_extra_buffers.stores.choice import Choice
from sb3_extra_buffers.stores.codec_records import codec_to_record, read_codecs
from sb3_extra_buffers.stores.collected import CollectedRows
from sb3_extra_buffers.stores.file_heap import FileHeap
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.locks import ReaderLocks
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.packed import PackedStore
from sb3_extra_buffers.stores.payloads import PayloadStore
from sb3_extra_buffers.stores.raw import RawStore
from sb3_extra_buffers.stores.registry import find_store
from sb3_extra_buffers.stores.restore import read_layout
from sb3_extra_buffers.stores.segments import SegmentStore
from sb3_extra_buffers.stores.shared_memory import SharedArea, SharedPlace, copy_sparsely
from sb3_extra_buffers.stores.tables import TableStore
from sb3_extra_buffers.stores.timeline import TimelineStore

#: Maps an array that was described by `SharedArrays`.
MapArray = Callable[[Any], Array]

# columns of `FrameState` that reading needs, apart from those of the heap
_COLUMNS = ("keyframes", "keyframe_rows", "stage", "stage_ends")
# seconds of decoding after which a reader lets the owner continue
_PART_SECONDS = 200e-6


class SharedArrays:
    """Arrays in shared memory by name. If the owner replaces an array, the new one is copied to shared memory too."""

    def __init__(self, place: SharedPlace) -> None:
        self.place = place
        self._known: dict[str, tuple[Any, Array, SharedArea]] = {}
        self._kept: dict[str, tuple[Any, Array, SharedArea]] = {}

    def begin(self) -> None:
        """Begin a description: arrays that it does not name are freed by `end`."""
        self._kept = {}

    def end(self) -> None:
        """See `begin`."""
        self._known = self._kept

    def share(self, name: str, array: Array) -> tuple[Array, list[Any]]:
        """Return ``array`` in shared memory, which the owner must use from now on, and its description."""
        known = self._known.get(name)
        if known is None or known[1] is not array:
            known = None, *self._copy(array)
        self._kept[name] = known
        return known[1], known[2].describe(known[1])

    def share_copy(self, name: str, array: Array) -> list[Any]:
        """Copy ``array``, which is never changed in place, to shared memory; return the description of the copy."""
        known = self._known.get(name)
        if known is None or known[0] is not array:
            known = array, *self._copy(array)
        self._kept[name] = known
        return known[2].describe(known[1])

    def _copy(self, array: Array) -> tuple[Array, SharedArea]:
        area = self.place.new_area(array.nbytes)
        shared: Array = np.frombuffer(area, array.dtype, array.size).reshape(array.shape)
        copy_sparsely(np.ascontiguousarray(array), shared)
        return shared, area


class SharedReaders(ReaderLocks):
    """`ReaderLocks` of a store that other processes read, which also wait while the owner changes it."""

    __slots__ = ("_abandon", "_begin", "_end", "_writing")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None], abandon: Callable[[], None]) -> None:
        self._begin, self._end, self._abandon = begin, end, abandon
        self.stripes: dict[int, Any] = {}
        self._writing = False

    @property
    def writing(self) -> bool:
        return self._writing

    @writing.setter
    def writing(self, writing: bool) -> None:
        if writing:
            self._writing = True
            self._begin()
        else:
            try:
                self._end()
            except BaseException:
                self._abandon()
                raise
            finally:
                self._writing = False

    def exclude_threads(self) -> None:
        """Keep only the other threads of this process out, until `admit_threads`."""
        self._writing = True
        self.wait()

    def admit_threads(self) -> None:
        """See `exclude_threads`."""
        self._writing = False


class StoreSharing:
    """Keeps an `ObservationStore` in shared memory."""

    def __init__(self, store: ObservationStore, place: SharedPlace) -> None:
        # weak: the store indirectly refers to this object, and must be freed together with its buffer
        self._store = weakref.ref(store)
        self._arrays = SharedArrays(place)
        self._seen: tuple[Any, ...] = ()
        #: What readers need to know, as JSON.
        self.description: dict[str, Any] = {}

    @property
    def store(self) -> ObservationStore | None:
        """The store, or None if it does not exist any more."""
        return self._store()

    def is_current(self) -> bool:
        """Whether everything is shared, or the store does not exist any more."""
        store = self._store()
        if store is None:
            return True
        seen = _parts_of(store)
        return len(seen) == len(self._seen) and all(map(is_, seen, self._seen))

    def update(self) -> None:
        """Share what is not shared yet, and update the description. Call it while readers wait."""
        store = self._store()
        if store is None:
            return
        self._seen = ()
        readers = store.readers
        if isinstance(readers, SharedReaders):
            readers.exclude_threads()
        try:
            self._arrays.begin()
            self.description = self._describe(store)
            self._arrays.end()
        finally:
            if isinstance(readers, SharedReaders):
                readers.admit_threads()
        self._seen = _parts_of(store)

    def _describe(self, store: ObservationStore) -> dict[str, Any]:
        described: dict[str, Any] = {
            "shape": list(store.spec.shape),
            "dtype": store.spec.dtype.str,
            "n_streams": store.n_streams,
            "n_obs": store.n_obs,
            "method": store.method,
            "choice": None if store.choice is None else [store.choice.method, store.choice.why],
        }
        if store.inner is None:
            indices, _, rows = store._collected.join()
            arrays = {
                "indices": self._arrays.share_copy("indices", indices),
                "rows": self._arrays.share_copy("rows", rows),
            }
            return described | {"inner": {"kind": "pending", "arrays": arrays}}
        return described | {"inner": self._describe_inner(store.inner, "")}

    def _describe_inner(self, inner: Store, prefix: str) -> dict[str, Any]:
        # also commits the last write, which would be undone if this is interrupted
        inner.commit()
        if isinstance(inner, FrameStore):
            return self._describe_frames(inner, prefix)
        if isinstance(inner, TimelineStore):
            return self._describe_timeline(inner, prefix)
        if isinstance(inner, RawStore):
            inner.rows, rows = self._arrays.share(f"{prefix}rows", inner.rows)
            return {"kind": "raw", "arrays": {"rows": rows}}
        if isinstance(inner, TableStore):
            return self._describe_table(inner, prefix)
        raise SharingError(f"a {type(inner).__name__} cannot be shared")

    def _describe_timeline(self, inner: TimelineStore, prefix: str) -> dict[str, Any]:
        tables, described = {}, {}
        for name, table in inner.tables._asdict().items():
            tables[name], described[name] = self._arrays.share(f"{prefix}{name}", table)
        if any(tables[name] is not table for name, table in inner.tables._asdict().items()):
            inner._set_tables(TimelineTables(**tables))
        return {"kind": "timeline", "arrays": described}

    def _describe_frames(self, inner: FrameStore, prefix: str) -> dict[str, Any]:
        heap, place = inner.heap, self._arrays.place
        if isinstance(heap, FileHeap):
            raise SharingError("a buffer in a folder cannot be shared through memory; open the folder to read it")
        if not isinstance(heap.area, SharedArea) or heap.area.place is not place:
            inner.compact_heap(lambda: heap.move_to_area(place.new_area))
        described = {}
        columns = {}
        for name in _COLUMNS:
            columns[name], described[name] = self._arrays.share(f"{prefix}{name}", getattr(inner.state, name))
        starts, described["starts"] = self._arrays.share(f"{prefix}starts", heap.starts)
        lengths, described["lengths"] = self._arrays.share(f"{prefix}lengths", heap.lengths)
        frame_ids, described["frame_ids"] = self._arrays.share(f"{prefix}frame_ids", inner.frame_ids)
        if isinstance(inner, PayloadStore):
            generation, described["generation"] = self._arrays.share(f"{prefix}generation", inner._generation)
        inner.dirty = True
        inner.frame_ids = frame_ids
        if isinstance(inner, PayloadStore):
            inner._generation = generation
        inner._adopt()
        heap.use_tables(starts, lengths)
        inner._replace(**columns)
        inner._sync()
        inner.dirty = False
        described["heap"] = heap.area.describe(heap.data[: heap.capacity])
        layout = inner.layout
        codecs = [codec_to_record(codec) for codec in inner._all_codecs()]
        return {"kind": "frames", "stack": layout.stack, "axis": layout.axis, "codecs": codecs, "arrays": described}

    def _describe_table(self, inner: TableStore, prefix: str) -> dict[str, Any]:
        record, arrays = inner.table.to_parts()
        described = {name: self._arrays.share_copy(f"{prefix}{name}", array) for name, array in arrays.items()}
        inner.places, described["places"] = self._arrays.share(f"{prefix}places", inner.places)
        outside = inner.outside
        return {
            "kind": "table",
            "stack": inner.layout.stack,
            "axis": inner.layout.axis,
            "codec": codec_to_record(inner.codec),
            "table": record,
            "arrays": described,
            "inner": self._describe_inner(inner.inner, f"{prefix}inner."),
            "outside": None if outside is None else self._describe_inner(outside, f"{prefix}outside."),
        }


def _parts_of(store: ObservationStore) -> tuple[Any, ...]:
    """All objects that a change of the store replaces instead of changing them in place."""
    return (store._collected,) if store.inner is None else _parts_of_inner(store.inner)


def _parts_of_inner(inner: Store | None) -> tuple[Any, ...]:
    if isinstance(inner, FrameStore):
        # without the bytes of the heap: they could not be enlarged while something refers to them
        state, heap = inner.state, inner.heap
        return (
            inner, inner.codec, inner.frame_ids, heap.area, getattr(heap.area, "version", None), state.starts,
            state.lengths, state.keyframes, state.keyframe_rows, state.stage, state.stage_ends,
            getattr(inner, "_generation", None),
        )  # fmt: skip
    if isinstance(inner, TimelineStore):
        return inner, inner.state
    if isinstance(inner, RawStore):
        return inner, inner.rows
    if isinstance(inner, TableStore):
        nested = _parts_of_inner(inner.inner), _parts_of_inner(inner.outside)
        return (inner, inner.table._entries, inner.places, inner.outside, *nested[0], *nested[1])
    return (inner,)


# ---- readers ----


class _PartLock(threading.local):
    #: A lock that keeps the owner out while a part of a batch is read; None if the owner waits for whole batches.
    lock: Callable[[], AbstractContextManager[None]] | None = None


#: Whether this thread reads batches in parts.
part_lock = _PartLock()


class _ReadInParts(SegmentStore):
    """A store whose batches may be decoded in parts; the owner may change the store between two parts."""

    def _read_kernel(self, expands: bool) -> Callable[..., int]:
        read, lock = super()._read_kernel(expands), part_lock.lock
        if lock is None:
            return read
        n_rows = max(int(_PART_SECONDS / self._row_seconds), 4)

        def read_in_parts(tables: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int, *rest: Any) -> int:
            for begin in range(first, stop, n_rows):
                with lock():
                    damaged = read(tables, frame_ids, sets, out, begin, min(begin + n_rows, stop), *rest)
                if damaged >= 0:
                    return damaged
            return -1

        return read_in_parts


class _SegmentsInParts(_ReadInParts):
    """See `_ReadInParts`."""


class _PackedInParts(_ReadInParts, PackedStore):
    """See `_ReadInParts`."""


_IN_PARTS: dict[type[Any], type[Any]] = {SegmentStore: _SegmentsInParts, PackedStore: _PackedInParts}


class SharedStore(ObservationStore):
    """An `ObservationStore` that another process owns, which must be kept out during each read."""

    read_only = True

    def __init__(self, described: Any, map_array: MapArray) -> None:
        spec = ObsSpec(parse_shape(described["shape"]), parse_dtype(described["dtype"]))
        super().__init__(spec, whole(described["n_streams"], "n_streams", 1), entry(described, "method", kind=str))
        self._described: Any = None
        self.attach(described, map_array)

    def attach(self, described: Any, map_array: MapArray) -> None:
        """Read from the arrays in ``described`` from now on."""
        if described == self._described:
            return
        before = None if self._described is None else self._described["inner"]
        self.n_obs = whole(described["n_obs"], "n_obs")
        self.choice = None if described["choice"] is None else Choice(*described["choice"])
        inner = described["inner"]
        if inner["kind"] == "pending":
            indices, rows = (map_array(inner["arrays"][name]) for name in ("indices", "rows"))
            self._collected = CollectedRows(self.spec.nbytes, ((indices, indices, rows),))
            self.inner = None
        else:
            self.inner = self._make_inner_of(inner, before, self.inner, self.spec, map_array)
        self._described = described

    def _make_inner_of(
        self, described: Any, before: Any, present: Store | None, spec: ObsSpec, map_array: MapArray
    ) -> Store:
        """Return the store that is described: ``present``, whose description was ``before``, if it can be reused."""
        kind = described["kind"]
        if before is None or before["kind"] != kind or present is None:
            before, present = {"arrays": {}}, None
        if kind == "raw":
            rows = map_array(described["arrays"]["rows"])
            return RawStore.from_arrays(rows, np.ones(len(rows), np.bool_), None)
        if kind == "timeline":
            tables = TimelineTables(**{name: map_array(array) for name, array in described["arrays"].items()})
            store = object.__new__(_ReadTimeline)
            store._use(tables, None, self.compiled)
            return store
        if kind == "frames":
            return self._attach_frames(described, before, present, spec, map_array)
        require(kind == "table", f"unknown kind of store {kind!r}")
        return self._attach_table(described, before, present, spec, map_array)

    def _attach_frames(
        self, described: Any, before: Any, present: Any, spec: ObsSpec, map_array: MapArray
    ) -> FrameStore:
        frames: FrameStore
        same = all(before.get(name) == described[name] for name in ("stack", "axis", "codecs"))
        if same and present is not None:
            frames, known = present, before["arrays"]
        else:
            layout = read_layout(spec, described)
            codecs = read_codecs(described["codecs"], layout.frame_spec)
            make = find_store(codecs[-1], layout, of_frames=True)
            make = _IN_PARTS.get(make, make)
            frames, known = make(layout, 0, self.n_streams, codecs[-1], None, None, self.compiled), {}
            frames.read_only = True
            if isinstance(frames, PayloadStore):
                frames.codecs = codecs
            if isinstance(frames, SegmentStore):
                # assume that there are segments that no kernel can decompress: the owner may add one at any time
                frames._n_packed = int(bool(frames._packed_flags))
        arrays = {name: map_array(array) for name, array in described["arrays"].items() if known.get(name) != array}
        frames.frame_ids = arrays.pop("frame_ids", frames.frame_ids)
        if isinstance(frames, PayloadStore):
            frames._generation = arrays.pop("generation", frames._generation)
        frames._replace(**arrays)
        state = frames.state
        frames.heap.map_payloads(state.heap, state.starts, state.lengths)
        fits = len(state.starts) == len(state.lengths) and len(frames.frame_ids) == self.n_obs
        require(fits, "tables of different lengths")
        return frames

    def _attach_table(
        self, described: Any, before: Any, present: Any, spec: ObsSpec, map_array: MapArray
    ) -> TableStore:
        layout = read_layout(spec, described)
        name, _, config = described["codec"]
        store = TableStore(layout, 0, self.n_streams, codec_from_config(name, config), None, None, self.compiled)
        arrays = {name: map_array(array) for name, array in described["arrays"].items()}
        store.places = arrays.pop("places")
        store.table.restore(described["table"], arrays)
        inner_layout = store.inner.layout
        assert inner_layout is not None
        old, old_outside = (None, None) if present is None else (present.inner, present.outside)
        store.inner = self._make_inner_of(described["inner"], before.get("inner"), old, inner_layout.spec, map_array)
        if described["outside"] is not None:
            store.outside = self._make_inner_of(
                described["outside"], before.get("outside"), old_outside, spec, map_array
            )
        return store

    def read(self, indices: Indices) -> ByteRows:
        inner, lock = self.inner, part_lock.lock
        if lock is None:
            return (self._collected if inner is None else inner).read(indices)
        if isinstance(inner, _ReadInParts) and not inner._n_packed:
            return inner.read(indices)
        with lock():
            part_lock.lock = None
            try:
                return self.read(indices)
            finally:
                part_lock.lock = lock

    def read_pairs(self, steps: Indices, streams: Indices, are_next: bool) -> ByteRows | None:
        return None if part_lock.lock is not None else super().read_pairs(steps, streams, are_next)

    def share_next(self) -> None:
        """Left to the owner."""

    def reserve_next(self) -> None:
        """Nothing is written here."""


class _ReadTimeline(TimelineStore):
    """A `TimelineStore` that another process owns."""

    def reserve(self, n_rows: int) -> None:
        """Nothing is written here."""
