"""What everything that can be saved is made of: a tag, a description, columns and stores of observations."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import ExtraBuffersError, FileFormatError, NotSaveableError
from sb3_extra_buffers.files.values import decode, encode
from sb3_extra_buffers.stores.arena import SLACK
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.snapshot import check_extents, parse_dtype, put_together, take_apart
from sb3_extra_buffers.stores.view import StoreView

__all__ = ["LoadedParts", "Parts", "flatten", "make_view", "unflatten"]

Array = npt.NDArray[Any]
View = TypeVar("View", bound=StoreView)


class Parts(NamedTuple):
    """What `to_parts` gives and a maker is given back. The arrays are the object's own: use them before it changes."""

    kind: str
    """A stable tag that `files.kinds` knows; never the name of a class."""
    description: dict[str, Any]
    """JSON: numbers, strings, lists, dicts and None."""
    columns: dict[str, Array]
    """Arrays of numbers and bools, by name."""
    stores: dict[str, ObservationStore]
    """Saved with `take_apart`; of their payloads, those that are new."""


class LoadedParts:
    """Parts that come from outside: every store was checked, and arrays are what their dtype and shape say.

    What numbers mean is for the maker to check, with `column` and `entry` and its own knowledge.
    """

    def __init__(
        self,
        kind: str,
        description: dict[str, Any],
        columns: dict[str, Array],
        stores: dict[str, ObservationStore],
        target: type[Any] | None = None,
        read_only: bool = False,
    ) -> None:
        self.kind, self.description, self.columns, self.stores = kind, description, columns, stores
        #: the class that was asked for, one of the kind's class or derived from it; None for the kind's own
        self.target = target
        #: whether what is made may be written to
        self.read_only = read_only

    def column(self, name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> Array:
        """The column ``name``, or an error unless it has this dtype and shape; None is any length."""
        array = self.columns.get(name)
        if array is None:
            raise FileFormatError(f"the column {name!r} is missing")
        fits = len(shape) == array.ndim and all(
            due is None or due == n for due, n in zip(shape, array.shape, strict=True)
        )
        if array.dtype != np.dtype(dtype) or not fits:
            raise FileFormatError(
                f"the column {name!r} has {array.shape} {array.dtype} where {shape} {np.dtype(dtype)} is due"
            )
        return array

    def entry(self, *names: str, kind: type[Any] | tuple[type[Any], ...] = object) -> Any:
        """An entry of the description, which must be of type ``kind``."""
        value: Any = self.description
        for name in names:
            if not isinstance(value, dict) or name not in value:
                raise FileFormatError(f"the description has no {'.'.join(names)}")
            value = value[name]
        if kind is not object and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise FileFormatError(f"{'.'.join(names)} is {value!r}, which it cannot be")
        return value

    def number(self, *names: str, low: int = 0, stop: int = 1 << 48) -> int:
        """A whole number of the description, from ``low`` to below ``stop``."""
        value: int = self.entry(*names, kind=int)
        if not low <= value < stop:
            raise FileFormatError(f"{'.'.join(names)} is {value}, outside {low}..{stop - 1}")
        return value


def check_parts(parts: Parts) -> None:
    """Raise if ``parts`` hold anything that has no place in a file."""
    try:
        json.dumps(parts.description, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise NotSaveableError(f"the description of a {parts.kind!r} is no JSON: {problem}") from problem
    for name, column in parts.columns.items():
        try:
            parse_dtype(column.dtype.str)
        except FileFormatError:
            raise NotSaveableError(f"{name} has dtype {column.dtype}, which cannot be saved; numbers can") from None


def make_view(
    cls: type[View], store: ObservationStore, lead: tuple[int, ...], base: int = 0, cells: Array | None = None
) -> View:
    """A view of a store that was loaded: of the cells from ``base`` on, or of ``cells``."""
    if cells is None and (base < 0 or base + math.prod(lead) > store.n_cells):
        raise FileFormatError(f"a view of {lead} observations does not fit a store of {store.n_cells}")
    if cells is not None:
        fits = cells.dtype == np.int64 and cells.shape == lead
        if not fits or (cells.size and not 0 <= int(cells.min()) <= int(cells.max()) < store.n_cells):
            raise FileFormatError(f"a view of {lead} observations names others than a store's {store.n_cells}")
    view = object.__new__(cls)
    StoreView.__init__(view, store, lead, np.zeros(0, np.int64) if cells is None else cells)
    if cells is None:
        view._cells, view._base = None, base
        view._n_steps = lead[0] if lead and store.spec.nbytes else 0
    return view


# ---- in memory ----


def flatten(parts: Parts) -> tuple[dict[str, Any], dict[str, Array]]:
    """``parts`` as JSON and arrays alone, payloads as one array for each store; `unflatten` undoes it."""
    check_parts(parts)
    arrays = {f"columns/{name}": column for name, column in parts.columns.items()}
    stores = {}
    for place, (name, store) in enumerate(parts.stores.items()):
        with store._lock:
            taken = take_apart(store)
            tables = {key: np.array(table) for key, table in taken.arrays.items()}
            if taken.heap is not None:
                tables |= _pack_heap(taken.heap)
        stores[name] = {"record": record_to_json(taken.record), "arrays": list(tables)}
        arrays |= {f"stores/{place}/{key}": table for key, table in tables.items()}
    described = {
        "kind": parts.kind,
        "description": parts.description,
        "columns": list(parts.columns),
        "stores": stores,
    }
    return described, arrays


def _pack_heap(heap: Heap) -> dict[str, Array]:
    slots = heap.unsaved(everything=True)
    lengths = heap.lengths[slots].astype(np.int64)
    starts = np.zeros(len(heap.lengths), np.int64)
    starts[slots] = np.cumsum(lengths) - lengths
    payload = np.concatenate([*(np.frombuffer(heap.read(slot), np.uint8) for slot in slots.tolist()),
                              np.zeros(SLACK, np.uint8)])  # fmt: skip
    return {"starts": starts, "payload": payload}


def unflatten(described: Any, arrays: Mapping[str, Array], target: type[Any] | None = None) -> LoadedParts:
    """What `flatten` was given; nothing of it is believed before it is checked."""
    try:
        kind, description = described["kind"], described["description"]
        columns = {str(name): _plain(arrays[f"columns/{name}"]) for name in described["columns"]}
        stores = {}
        for place, (name, about) in enumerate(described["stores"].items()):
            tables = {str(key): _plain(arrays[f"stores/{place}/{key}"]) for key in about["arrays"]}
            stores[str(name)] = _store(about["record"], tables)
        if not isinstance(kind, str) or not isinstance(description, dict):
            raise FileFormatError("parts have no kind or no description")
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        if isinstance(problem, ExtraBuffersError):
            raise
        raise FileFormatError(f"these are no parts of anything: {type(problem).__name__}: {problem}") from problem
    return LoadedParts(kind, description, columns, stores, target)


def _store(record: Any, tables: dict[str, Array]) -> ObservationStore:
    payload, starts = tables.pop("payload", None), tables.pop("starts", None)

    def fill(heap: Heap, slots: npt.NDArray[np.int32]) -> None:
        if payload is None or payload.dtype != np.uint8 or payload.ndim != 1:
            raise FileFormatError("a store has no payloads")
        if starts is None or starts.dtype != np.int64 or starts.shape != heap.lengths.shape:
            raise FileFormatError("the payloads of a store have no places")
        check_extents(starts[slots], heap.lengths[slots], payload.size)
        order = slots[np.argsort(starts[slots], kind="stable")]
        check_apart(starts[order], heap.lengths[order])
        heap.adopt_all(order, payload, starts[order])

    return put_together(record_from_json(record), tables, fill)


def record_to_json(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a store; its options are what a user passed."""
    return {**record, "options": encode(record["options"], "compression_kwargs")}


def record_from_json(record: Any) -> dict[str, Any]:
    """Undo `record_to_json`."""
    if not isinstance(record, dict):
        raise FileFormatError("the record of a store is unreadable")
    return {**record, "options": decode(record.get("options"))}


def check_apart(starts: Array, lengths: Array) -> None:
    """Raise if two payloads, in the order in which they lie, share a byte."""
    if (starts[:-1] + lengths[:-1].astype(np.int64) > starts[1:]).any():
        raise FileFormatError("two segments overlap")


def _plain(array: Any) -> Array:
    if not isinstance(array, np.ndarray):
        raise FileFormatError(f"a {type(array).__name__} is no array")
    parse_dtype(array.dtype.str)
    return np.ascontiguousarray(array).reshape(array.shape)
