"""What everything that can be saved is made of: a tag, a description, columns and stores of observations."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import FileFormatError, NotSaveableError
from sb3_extra_buffers.files.values import decode, encode
from sb3_extra_buffers.stores import checks
from sb3_extra_buffers.stores.arena import SLACK
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.restore import place_payloads
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
    """Saved with `to_parts`; of their payloads, those that are new."""


@dataclass
class LoadedParts:
    """Parts that come from outside: every store was checked, and arrays are what their dtype and shape say.

    What numbers mean is for the maker to check, with `column` and `entry` and its own knowledge.
    """

    kind: str
    description: dict[str, Any]
    columns: dict[str, Array]
    stores: dict[str, ObservationStore]
    target: type[Any] | None = None
    """The class that was asked for, one of the kind's class or derived from it; None for the kind's own."""
    read_only: bool = False
    """Whether what is made may not be written to."""

    def column(self, name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> Array:
        """The column ``name``, or an error unless it has this dtype and shape; None is any length."""
        return checks.column(self.columns, name, dtype, shape)

    def entry(self, *names: str, kind: type[Any] | tuple[type[Any], ...] = object) -> Any:
        """An entry of the description, which must be of type ``kind``."""
        return checks.entry(self.description, *names, kind=kind)

    def number(self, *names: str, low: int = 0, stop: int = 1 << 48) -> int:
        """A whole number of the description, from ``low`` to below ``stop``."""
        return checks.whole(self.entry(*names), ".".join(names), low, stop)


def check_parts(parts: Parts) -> None:
    """Raise if ``parts`` hold anything that has no place in a file."""
    try:
        json.dumps(parts.description, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise NotSaveableError(f"the description of a {parts.kind!r} is no JSON: {problem}") from problem
    for name, column in parts.columns.items():
        try:
            checks.parse_dtype(column.dtype.str)
        except FileFormatError:
            raise NotSaveableError(f"{name} has dtype {column.dtype}, which cannot be saved; numbers can") from None


def make_view(
    cls: type[View], store: ObservationStore, lead: tuple[int, ...], base: int = 0, indices: Array | None = None
) -> View:
    """A view of a store that was loaded: of the cells from ``base`` on, or of ``cells``."""
    if indices is None:
        fits = 0 <= base <= store.n_obs - math.prod(lead)
        checks.require(fits, f"a view of {lead} observations does not fit a store of {store.n_obs}")
        fits = max(math.prod(lead[1:]), 1) == store.n_streams
        checks.require(fits, f"a view of {lead} observations does not fit {store.n_streams} streams")
    else:
        checks.column({"cells": indices}, "cells", np.int64, lead)
        checks.within(indices, 0, store.n_obs, "a cell of a view")
    view = object.__new__(cls)
    StoreView.__init__(view, store, lead, np.zeros(0, np.int64) if indices is None else indices)
    if indices is None:
        view._indices, view._base = None, base
        view._n_steps = lead[0] if lead and store.spec.nbytes else 0
    return view


# ---- in memory ----


def flatten(parts: Parts) -> tuple[dict[str, Any], dict[str, Array]]:
    """``parts`` as JSON and arrays alone, payloads as one array for each store; `unflatten` undoes it."""
    check_parts(parts)
    arrays = {f"columns/{name}": column for name, column in parts.columns.items()}
    stores = {}
    for place, (name, store) in enumerate(parts.stores.items()):
        with store.lock:
            taken = store.to_parts()
            tables = {key: np.array(table) for key, table in taken.arrays.items()}
            if taken.heap is not None:
                tables |= _pack_heap(taken.heap)
        stores[name] = {"record": record_to_json(taken.record), "arrays": list(tables)}
        arrays |= {f"stores/{place}/{key}": table for key, table in tables.items()}
    described = {"kind": parts.kind, "description": parts.description, "columns": list(parts.columns), "stores": stores}
    return described, arrays


def _pack_heap(heap: Heap) -> dict[str, Array]:
    payload_ids = heap.unsaved(everything=True)
    lengths = heap.lengths[payload_ids].astype(np.int64)
    starts = np.zeros(len(heap.lengths), np.int64)
    starts[payload_ids] = np.cumsum(lengths) - lengths
    payload = np.concatenate([*(np.frombuffer(heap.read(payload_id), np.uint8) for payload_id in payload_ids.tolist()),
                              np.zeros(SLACK, np.uint8)])  # fmt: skip
    return {"starts": starts, "payload": payload}


def unflatten(described: Any, arrays: Mapping[str, Array], target: type[Any] | None = None) -> LoadedParts:
    """What `flatten` was given; nothing of it is believed before it is checked."""
    with checks.only_named_errors("the description of parts"):
        columns = {str(name): _plain(arrays[f"columns/{name}"]) for name in described["columns"]}
        stores = {}
        for place, (name, about) in enumerate(checks.entry(described, "stores", kind=dict).items()):
            tables = {str(key): _plain(arrays[f"stores/{place}/{key}"]) for key in about["arrays"]}

            def fill(heap: Heap, payload_ids: npt.NDArray[np.int32], tables: dict[str, Array] = tables) -> None:
                starts = checks.column(tables, "starts", np.int64, heap.lengths.shape)
                place_payloads(heap, payload_ids, starts, checks.column(tables, "payload", np.uint8, (None,)))

            stores[str(name)] = ObservationStore.from_parts(record_from_json(about["record"]), tables, fill)
        kind, about = checks.entry(described, "kind", kind=str), checks.entry(described, "description", kind=dict)
        return LoadedParts(kind, about, columns, stores, target)


def record_to_json(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a store; its options are what a user passed."""
    return {**record, "options": encode(record["options"], "compression_kwargs")}


def record_from_json(record: Any) -> dict[str, Any]:
    """Undo `record_to_json`."""
    return {**checks.entry({"record": record}, "record", kind=dict), "options": decode(checks.entry(record, "options"))}


def _plain(array: Any) -> Array:
    checks.require(isinstance(array, np.ndarray), f"a {type(array).__name__} is no array")
    checks.parse_dtype(array.dtype.str)
    return np.ascontiguousarray(array).reshape(array.shape)
