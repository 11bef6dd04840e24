"""What was saved of a device's stores, checked before a kernel may walk through it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.delta import padded
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.kernels import delta_torch as kernels
from sb3_extra_buffers.kernels.delta_torch import DeviceTables, FrameShape
from sb3_extra_buffers.kernels.state import NONE
from sb3_extra_buffers.stores.choice import Choice
from sb3_extra_buffers.stores.device import DeviceFrameStore, suits_device
from sb3_extra_buffers.stores.device_observation import DeviceObservations, _Dense, _OnHost
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.staging import Staging, torch_dtype

Array = npt.NDArray[Any]


def check_loaded(made: Any) -> None:
    """Raise unless ``made`` is what it would be had nobody changed the file."""
    if isinstance(made, DeviceObservations):
        _check_observations(made)
    elif isinstance(made, DeviceFrameStore):
        _check_frames(made)


def _check_observations(made: DeviceObservations) -> None:
    _require(isinstance(made.spec, ObsSpec), "observations have no spec")
    counts = (made.n_steps, made.n_streams, made.n_sets)
    _require(all(type(n) is int and 0 < n < 1 << 40 for n in counts), f"{counts} steps, streams and sets")
    _require(isinstance(made.method, str) and isinstance(made.options, dict), "the method is unreadable")
    _require(made.choice is None or isinstance(made.choice, Choice), "the choice is unreadable")
    n_rows, inner = made.n_cells * made.n_sets, made._inner
    if isinstance(inner, _Dense):
        rows = inner.rows
        fits = rows.shape == (n_rows, *made.spec.shape) and rows.dtype == torch_dtype(made.spec.dtype)
        _require(fits, f"rows of {tuple(rows.shape)} {rows.dtype} for {n_rows} observations of {made.spec}")
        _require(
            (inner._spec, inner._n_cells, inner._n_streams) == (made.spec, made.n_cells, made.n_streams),
            "dense observations are of another buffer",
        )
    elif isinstance(inner, _OnHost):
        store = inner.store
        _require(isinstance(store, ObservationStore) and isinstance(inner._staging, Staging), "there is no store")
        fits = store.spec == made.spec and store.n_cells == n_rows and store.n_streams == made.n_streams
        _require(fits, f"a store of {store.n_cells} cells for {n_rows} observations of {made.spec}")
        _require(
            (inner._n_cells, inner._n_streams) == (made.n_cells, made.n_streams)
            and np.array_equal(inner._streams, np.arange(made.n_streams)),
            "a store is of another buffer",
        )
    elif isinstance(inner, DeviceFrameStore):
        _require(
            inner.layout.spec == made.spec and (inner.n_steps, inner.n_streams, inner.n_sets) == counts,
            "a device's store is of another buffer",
        )
    else:
        _require(inner is None, "observations are in no store that is known here")
    shape = (made.n_streams, made.spec.nbytes)
    for step, sets in made._pending:
        fits = len(sets) == made.n_sets and all(rows.shape == shape and rows.dtype == np.uint8 for rows in sets)
        _require(fits and type(step) is int and 0 <= step < made.n_steps, "observations that wait are unreadable")


def _check_frames(made: DeviceFrameStore) -> None:
    layout, shape = made.layout, made.shape
    _require(isinstance(layout, StackLayout) and isinstance(shape, FrameShape), "a device's store has no layout")
    _require(isinstance(made.codec, Codec) and suits_device(layout, made.codec), "no codec of a device's store")
    sizes = (shape.per_segment, shape.segments_per_stream, made.n_steps, made.n_streams, made.n_sets)
    _require(all(type(n) is int and 0 < n < 1 << 31 for n in sizes) and shape.per_segment < 1 << 8, f"sizes {sizes}")
    _require((shape.frame_bytes, shape.stack) == (layout.frame_bytes, layout.stack), "frames of another layout")
    _require(type(made._launches) is int and 0 <= made._launches < 1 << 60, "launches are unreadable")
    _require(type(made._wrapped) is bool and made._whole == _is_whole(layout), "a device's store is unreadable")
    _require(
        type(made._last_cell) is int and 0 <= made._last_cell < made.n_steps * made.n_streams * made.n_sets, "cell"
    )
    tables = DeviceTables(*(table.cpu().numpy() for table in made.tables))  # type: ignore[arg-type]  # as arrays
    _check_shapes(made, tables)
    _check_numbers(made, tables)
    try:
        made.check()
    except AssertionError as problem:
        raise FileFormatError(f"a device's store makes no sense: {problem}") from problem


def _is_whole(layout: StackLayout) -> bool:
    return (layout.axis == "first" or layout.stack == 1) and layout.frame_bytes % 8 == 0


def _check_shapes(made: DeviceFrameStore, tables: Any) -> None:
    shape, streams = made.shape, made.n_streams
    n_cells, n_segments = made.n_steps * streams * made.n_sets, shape.segments_per_stream * streams
    n_scenes = len(tables.scene_refs)
    due: dict[str, tuple[tuple[int, ...], Any]] = {
        "stage": ((streams * shape.room,), np.uint8),
        "starts": ((n_segments,), np.int64),
        "lengths": ((n_segments,), np.int32),
        "scenes": ((n_segments,), np.int32),
        "slots": ((n_cells, shape.stack), np.int32),
        "floors": ((made.n_steps, streams), np.int32),
        "streams": ((streams, kernels.N_COLUMNS), np.int64),
        "recent": ((streams, shape.places, shape.scene_bytes), np.uint8),
        "recent_ids": ((streams, shape.places), np.int32),
        "recent_segments": ((streams, shape.places), np.int32),
        "scene_rows": ((n_scenes, shape.scene_bytes), np.uint8),
        "scene_refs": ((n_scenes,), np.int32),
        "published": ((2, streams, kernels.N_PUBLISHED), np.int32),
        "counters": ((4,), np.int64),
        "tails": ((streams,), np.int64),
        "scratch": ((streams, padded(shape.frame_bytes) + 64), np.uint8),
    }
    for name, (wanted, dtype) in due.items():
        found = getattr(tables, name)
        _require(found.shape == wanted and found.dtype == dtype, f"{name} has {found.shape}, not {wanted}")
    heap = tables.heap
    _require(heap.ndim == 1 and heap.dtype == np.uint8 and heap.size >= 8 + kernels.SLACK, "the heap is unreadable")
    _require(made._report.shape == (streams, 4), "the report is unreadable")


def _check_numbers(made: DeviceFrameStore, tables: Any) -> None:
    shape, rows = made.shape, tables.streams
    n_segments, n_scenes = len(tables.starts), len(tables.scene_refs)
    capacity, n_ids = tables.heap.size - kernels.SLACK, n_segments * shape.per_segment
    opened = rows[:, kernels.OPEN]
    ranges: list[tuple[str, Array, int, int]] = [
        ("a frame's id", tables.slots, 0, n_ids + 1),
        ("a recent frame", tables.recent_ids, NONE, n_ids),
        ("a recent segment", tables.recent_segments, 0, 1 << 31),
        ("a floor", tables.floors, 0, 1 << 31),
        ("a segment's length", tables.lengths, 0, capacity + 1),
        ("a segment's scene", tables.scenes, NONE, n_scenes),
        ("a published scene", tables.published, NONE, n_scenes),
        ("a scene in use", rows[:, kernels.HELD : kernels.HELD + kernels.N_HELD], NONE, n_scenes),
        ("references to a scene", tables.scene_refs, 0, n_segments + 4 * len(rows) + 1),
        ("an open segment", opened, NONE, n_segments),
        ("the end of an open segment", rows[:, kernels.END], 0, shape.room + 1),
        ("frames of an open segment", rows[:, kernels.COUNT], 0, shape.per_segment + 1),
        ("a place among recent frames", rows[:, kernels.PLACE], 0, shape.places),
        ("a cost", rows[:, [kernels.WALK, kernels.COST, kernels.LOST]], 0, 1 << 60),
        ("segments made", rows[:, kernels.OPENED], 0, 1 << 31),
        ("the oldest segment", rows[:, kernels.FLOOR], 0, 1 << 31),
        ("a counter", tables.counters, 0, 1 << 60),
        ("a tail", tables.tails, 0, kernels.NOWHERE + 1),
        ("a report", made._report.numpy(), 0, kernels.NOWHERE + 1),
    ]
    for what, values, low, stop in ranges:
        if values.size and (int(values.min()) < low or int(values.max()) >= stop):
            raise FileFormatError(f"{what} is {values.min()} or {values.max()}, outside {low}..{stop - 1}")
    count = rows[:, kernels.OPENED] - rows[:, kernels.FLOOR]
    _require(bool(((count >= 0) & (count <= shape.segments_per_stream)).all()), "a stream has too many segments")
    sealed = tables.starts >= 0
    ends = tables.starts % capacity + tables.lengths
    _require(bool((ends[sealed] <= capacity).all()), "a segment reaches past the end")
    staged = np.flatnonzero(~sealed)
    streams = (-1 - tables.starts[staged]) // shape.room
    _require(bool((streams < len(rows)).all()), "a segment is open in no stream")
    _require(bool((-1 - tables.starts[staged] == streams * shape.room).all()), "a segment is open nowhere")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise FileFormatError(message)
