"""The parts of everything that can be saved: a tag, a JSON description, columns and stores of observations."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import FileFormatError, NotSaveableError
from sb3_extra_buffers.files.values import value_from_json, value_to_json
from sb3_extra_buffers.stores import checks
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.restore import fill_from, pack_payloads
from sb3_extra_buffers.stores.view import StoreView

__all__ = ["Cut", "LoadedParts", "Parts", "flatten", "make_view", "unflatten", "views_of"]

Array = npt.NDArray[Any]
View = TypeVar("View", bound=StoreView)


class Parts(NamedTuple):
    """Parts to save. The arrays are the object's own, not copies: use them before it changes."""

    kind: str
    """A tag of `files.registry`; never the name of a class."""
    description: dict[str, Any]
    """JSON: numbers, strings, lists, dicts and None."""
    columns: dict[str, Array]
    """Arrays of numbers and bools, by name."""
    stores: dict[str, ObservationStore]


@dataclass
class LoadedParts:
    """Parts from an untrusted source: stores were checked, arrays have the dtype and shape they claim.

    The builder of the kind checks what the numbers mean, with `column`, `entry` and `number`.
    """

    kind: str
    description: dict[str, Any]
    columns: dict[str, Array]
    stores: dict[str, ObservationStore]
    target: type[Any] | None = None
    """The requested class: that of the kind, or a subclass; None for that of the kind."""
    read_only: bool = False

    def column(self, name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> Array:
        """The column ``name``, which must have this dtype and shape; None is any length."""
        return checks.column(self.columns, name, dtype, shape)

    def entry(self, *names: str, kind: type[Any] | tuple[type[Any], ...] = object) -> Any:
        """An entry of the description, which must be of type ``kind``."""
        return checks.entry(self.description, *names, kind=kind)

    def number(self, *names: str, low: int = 0, stop: int = 1 << 48) -> int:
        """An integer of the description, from ``low`` to below ``stop``."""
        return checks.whole(self.entry(*names), ".".join(names), low, stop)


class Cut(NamedTuple):
    """What ``cut(parts, bad_rows, bad_indices)`` of a kind's module keeps of damaged parts.

    ``bad_rows`` flags the damaged rows of each damaged column, ``bad_indices`` the lost observations of each store.
    """

    description: dict[str, Any]
    columns: dict[str, Array]
    indices: dict[str, list[Array]]
    """For each store, batches of indices to keep, in the order they were written."""
    n_kept: int
    n_lost: int


def check_parts(parts: Parts) -> None:
    """Raise `NotSaveableError` if ``parts`` hold anything that a file cannot."""
    try:
        json.dumps(parts.description, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotSaveableError(f"the description of a {parts.kind!r} is not JSON: {error}") from error
    for name, column in parts.columns.items():
        try:
            checks.parse_dtype(column.dtype.str)
        except FileFormatError:
            raise NotSaveableError(f"{name} has dtype {column.dtype}; only numbers and bools can be saved") from None


# ---- views ----


def make_view(
    cls: type[View],
    store: ObservationStore,
    lead: tuple[int, ...],
    base: int = 0,
    indices: Array | None = None,
    dtype: np.dtype[Any] | None = None,
) -> View:
    """A view of a loaded store: of the observations from ``base`` on, or of ``indices``."""
    if indices is None:
        fits = 0 <= base <= store.n_obs - math.prod(lead)
        checks.require(fits, f"a view of {lead} observations does not fit a store of {store.n_obs}")
        fits = max(math.prod(lead[1:]), 1) == store.n_streams
        checks.require(fits, f"a view of {lead} observations does not fit {store.n_streams} streams")
    else:
        checks.column({"cells": indices}, "cells", np.int64, lead)
        checks.within(indices, 0, store.n_obs, "an index of a view")
    view = object.__new__(cls)
    StoreView.__init__(view, store, lead, indices, base if indices is None else None, dtype)
    return view


def views_of(buffer: Any) -> Iterator[tuple[str, StoreView]]:
    """The views that hold a buffer's observations, by name."""
    if isinstance(buffer, StoreView):
        yield "array", buffer
        return
    for name, value in vars(buffer).items():
        for key, leaf in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(leaf, StoreView):
                yield f"{name}.{key}" if key else name, leaf


# ---- in memory ----


def flatten(parts: Parts) -> tuple[dict[str, Any], dict[str, Array]]:
    """``parts`` as JSON and arrays only, the payloads of each store in one array; `unflatten` is the inverse."""
    check_parts(parts)
    arrays = {f"columns/{name}": column for name, column in parts.columns.items()}
    stores = {}
    for number, (name, store) in enumerate(parts.stores.items()):
        with store.lock:
            taken = store.to_parts()
            tables = {key: np.array(table) for key, table in taken.arrays.items()}
            if taken.heap is not None:
                tables |= pack_payloads(taken.heap)
        stores[name] = {"record": record_to_json(taken.record), "arrays": list(tables)}
        arrays |= {f"stores/{number}/{key}": table for key, table in tables.items()}
    described = {"kind": parts.kind, "description": parts.description, "columns": list(parts.columns), "stores": stores}
    return described, arrays


def unflatten(described: Any, arrays: Mapping[str, Array], target: type[Any] | None = None) -> LoadedParts:
    """The inverse of `flatten`; everything is checked, nothing trusted."""
    with checks.only_named_errors("the description of parts"):
        columns = {str(name): _plain(arrays[f"columns/{name}"]) for name in described["columns"]}
        stores = {}
        for number, (name, saved) in enumerate(checks.entry(described, "stores", kind=dict).items()):
            tables = {str(key): _plain(arrays[f"stores/{number}/{key}"]) for key in saved["arrays"]}
            record = record_from_json(saved["record"])
            stores[str(name)] = ObservationStore.from_parts(record, tables, fill_from(tables))
        description = checks.entry(described, "description", kind=dict)
        return LoadedParts(checks.entry(described, "kind", kind=str), description, columns, stores, target)


def record_to_json(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a store; its options are whatever the user passed."""
    return {**record, "options": value_to_json(record["options"], "compression_kwargs")}


def record_from_json(record: Any) -> dict[str, Any]:
    """The inverse of `record_to_json`."""
    checks.entry({"record": record}, "record", kind=dict)
    return {**record, "options": value_from_json(checks.entry(record, "options"))}


def _plain(array: Any) -> Array:
    checks.require(isinstance(array, np.ndarray), f"expected an array, got a {type(array).__name__}")
    checks.parse_dtype(array.dtype.str)
    return np.ascontiguousarray(array).reshape(array.shape)
