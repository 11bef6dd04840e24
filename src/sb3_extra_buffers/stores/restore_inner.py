"""Restoring the store inside an `ObservationStore` from a file, with one branch for each kind of store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.stores.base import Array, FillHeap, Store
from sb3_extra_buffers.stores.checks import column, require, within
from sb3_extra_buffers.stores.choice import may_be_stacked
from sb3_extra_buffers.stores.collected import CollectedRows
from sb3_extra_buffers.stores.raw import RawStore
from sb3_extra_buffers.stores.restore import restore_frames
from sb3_extra_buffers.stores.tables import restore_table
from sb3_extra_buffers.stores.timeline import TimelineStore

if TYPE_CHECKING:
    from sb3_extra_buffers.stores.observation import ObservationStore


def restore_inner(
    store: ObservationStore,
    record: Mapping[str, Any],
    arrays: Mapping[str, Array],
    fill_heap: FillHeap,
    read_only: bool,
) -> Store | CollectedRows:
    """Return what ``store``, whose settings are known, held when it was saved: an inner store or collected rows."""
    kind, n_obs, row_bytes = record["kind"], store.n_obs, store.spec.nbytes
    restored: Store | CollectedRows
    if kind == "dense":
        rows = column(arrays, "rows", np.uint8, (n_obs, row_bytes))
        written = column(arrays, "written", np.bool_, (n_obs,))
        restored = RawStore.from_arrays(rows, written, store.heap_bytes)
    elif kind == "timeline":
        sizes = n_obs, store.n_streams, row_bytes
        restored = TimelineStore.from_parts(record, arrays, *sizes, store.heap_bytes, store.compiled)
    elif kind == "pending":
        indices = column(arrays, "cells", np.int64, (None,))
        streams = column(arrays, "streams", np.int64, indices.shape)
        rows = column(arrays, "rows", np.uint8, (len(indices), row_bytes))
        within(indices, 0, n_obs, "an index")
        within(streams, 0, store.n_streams, "a stream")
        restored = CollectedRows(row_bytes).add(indices, streams, rows)
    elif kind == "frames":
        restored = restore_frames(store, record, arrays, fill_heap, read_only)
    elif kind == "table":
        restored = restore_table(store, record, arrays, fill_heap, read_only)
    else:
        raise FileFormatError(f"unknown kind of store {kind!r}; update sb3-extra-buffers")
    require(_fits_choice(store, kind), f"a store of kind {kind!r} does not match the method that was chosen")
    return restored


def _fits_choice(store: ObservationStore, kind: str) -> bool:
    """Whether the method that ``store`` has chosen can be stored by this kind of inner store."""
    is_raw = store.choice is not None and store.choice.is_raw
    if kind == "pending":
        return not (is_raw and store.n_obs) or may_be_stacked(store.spec)
    raw_kinds, other_kinds = ("dense", "timeline", "frames"), ("frames", "table")
    return store.choice is not None and kind in (raw_kinds if is_raw else other_kinds)
