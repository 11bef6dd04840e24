"""Observations behind a device as JSON and arrays, and back; what comes back is checked before a kernel sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.delta import DeltaCodec, padded
from sb3_extra_buffers.codecs.registry import codec_from_config, is_available, known_codecs
from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.kernels import delta_torch as kernels
from sb3_extra_buffers.kernels.delta_torch import DeviceTables, FrameShape
from sb3_extra_buffers.kernels.state import NONE
from sb3_extra_buffers.stores.choice import Choice
from sb3_extra_buffers.stores.device import DeviceFrameStore, suits_device
from sb3_extra_buffers.stores.device_observation import DeviceObservations, _Dense, _OnHost
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.observation import ObservationStore

Array = npt.NDArray[Any]


def take_apart(of: DeviceObservations) -> tuple[dict[str, Any], dict[str, Array], ObservationStore | None]:
    """Observations behind a device as JSON, arrays and, where they are kept on the host, the store that has them."""
    inner = of._inner
    record: dict[str, Any] = {"choice": None if of.choice is None else [of.choice.method, of.choice.why]}
    if inner is None:
        steps = np.array([step for step, _ in of._pending], np.int64)
        rows = np.zeros((len(steps), of.n_sets, of.n_streams, of.spec.nbytes), np.uint8)
        for place, (_, sets) in enumerate(of._pending):
            rows[place] = sets
        return record | {"kind": "pending"}, {"steps": steps, "rows": rows}, None
    if isinstance(inner, _Dense):
        return record | {"kind": "dense"}, {"rows": inner.rows.cpu().numpy()}, None
    if isinstance(inner, _OnHost):
        return record | {"kind": "host"}, {}, inner.store
    inner._wait()
    tables = {name: table.cpu().numpy() for name, table in inner.tables._asdict().items() if name != "scratch"}
    tables["heap"] = _live_heap(inner, tables)
    record |= {
        "kind": "frames",
        "stack": inner.layout.stack,
        "axis": inner.layout.axis,
        "codec": [inner.codec.name or inner.codec.codec_id, inner.codec.codec_id, inner.codec.config()],
        "per_segment": inner.shape.per_segment,
        "segments_per_stream": inner.shape.segments_per_stream,
        "launches": inner._launches,
        "wrapped": inner._wrapped,
        "last_cell": inner._last_cell,
    }
    return record, tables | {"report": inner._report.numpy().copy()}, None


def _live_heap(inner: DeviceFrameStore, tables: Mapping[str, Array]) -> Array:
    """The heap with zeros where there is nothing: memory that was never written to may hold anything."""
    heap, live = np.zeros_like(tables["heap"]), inner._live_segments().cpu().numpy()
    starts = tables["starts"][live] % (heap.size - kernels.SLACK)
    for start, end in zip(starts.tolist(), (starts + tables["lengths"][live]).tolist(), strict=True):
        heap[start:end] = tables["heap"][start:end]
    return heap


def put_together(
    into: DeviceObservations, record: Mapping[str, Any], arrays: Mapping[str, Array], on_host: ObservationStore | None
) -> None:
    """Let ``into``, which was just made, hold what `take_apart` saw; everything is checked before a kernel sees it."""
    choice = record.get("choice")
    if choice is not None:
        fits = isinstance(choice, list) and len(choice) == 2 and all(isinstance(part, str) for part in choice)
        _require(fits, f"the choice {choice!r} is unreadable")
        choice = Choice(*choice)
    kind = record.get("kind")
    _require((kind == "host") == (on_host is not None), "observations have a store on the host, or none")
    inner: _Dense | _OnHost | DeviceFrameStore | None = None
    if kind == "pending":
        into._pending = _put_pending(into, arrays)
    elif kind == "dense":
        inner = _Dense(into) if not isinstance(into._inner, _Dense) else into._inner
        rows = _column(arrays, "rows", into.spec.dtype, (into.n_cells * into.n_sets, *into.spec.shape))
        inner.rows.copy_(torch.from_numpy(np.array(rows)))
    elif on_host is not None:
        _require(
            on_host.spec == into.spec
            and on_host.n_cells == into.n_cells * into.n_sets
            and on_host.n_streams == into.n_streams,
            f"a store of {on_host.n_cells} observations of {on_host.spec} is of another buffer",
        )
        inner = into._inner if isinstance(into._inner, _OnHost) else _OnHost(into, on_host.method)
        inner.store = on_host
    elif kind == "frames":
        inner = _put_frames(into, record, arrays)
    else:
        raise FileFormatError(f"observations of kind {kind!r} are unknown here; update sb3-extra-buffers")
    _require(inner is None or choice is not None or kind == "host", "observations are stored, but nothing was chosen")
    into.choice, into._inner = choice, inner


def _put_pending(into: DeviceObservations, arrays: Mapping[str, Array]) -> list[tuple[int, list[Array]]]:
    _require("steps" in arrays, "observations that wait are unreadable")
    count = len(arrays["steps"])
    steps = _column(arrays, "steps", np.int64, (count,))
    rows = _column(arrays, "rows", np.uint8, (count, into.n_sets, into.n_streams, into.spec.nbytes))
    _require(not count or 0 <= int(steps.min()) <= int(steps.max()) < into.n_steps, "a step that waits is none")
    return [(int(step), [np.array(part) for part in sets]) for step, sets in zip(steps, rows, strict=True)]


def _put_frames(into: DeviceObservations, record: Mapping[str, Any], arrays: Mapping[str, Array]) -> DeviceFrameStore:
    stack, axis, listed = record.get("stack"), record.get("axis"), record.get("codec")
    shape = into.spec.shape
    length = (shape[0] if axis == "first" else shape[-1]) if shape else 1
    fits = type(stack) is int and axis in ("first", "last") and 1 <= stack <= 64 and into.spec.nbytes > 0
    _require(fits and (stack == 1 or length % int(stack or 1) == 0), f"no stacks of {stack!r} along {axis!r}")
    if not isinstance(listed, list) or len(listed) != 3 or not isinstance(listed[2], dict):
        raise FileFormatError("the codec is unreadable")
    _require(isinstance(listed[0], str) and listed[1] in known_codecs(), "the codec is unreadable")
    codec = codec_from_config(listed[0] if is_available(listed[0]) else listed[1], listed[2])
    layout = StackLayout(into.spec, int(stack or 1), "first" if axis == "first" else "last")
    if not isinstance(codec, DeltaCodec) or not suits_device(layout, codec):
        raise FileFormatError("no codec of a device's store")
    counts = {name: record.get(name) for name in ("per_segment", "segments_per_stream", "launches", "last_cell")}
    _require(all(type(count) is int and 0 <= count < 1 << 60 for count in counts.values()), f"counts {counts}")
    _require(type(record.get("wrapped")) is bool, "a device's store is unreadable")
    per, per_stream = int(counts["per_segment"] or 0), int(counts["segments_per_stream"] or 0)
    n_segments = len(arrays["starts"]) if "starts" in arrays else 0
    _require(0 < per < 1 << 8 and per_stream > 0 and per_stream * into.n_streams == n_segments, "segments are missing")
    _require(int(counts["last_cell"] or 0) < into.n_cells * into.n_sets, "a cell is outside")
    place = into.place
    made = DeviceFrameStore(
        layout, into.n_steps, into.n_streams, codec, place.device, into.n_sets, into._heap_bytes, place.pinned
    )
    made.shape = FrameShape(layout.frame_bytes, layout.stack, per, per_stream)
    size = (into.n_streams, padded(made.shape.frame_bytes) + 64)
    tables = DeviceTables(
        *(np.zeros(size, np.uint8) if name == "scratch" else arrays.get(name) for name in DeviceTables._fields)  # type: ignore[arg-type]  # as arrays
    )
    report = _column(arrays, "report", np.int64, (into.n_streams, 4))
    _check_shapes(made, tables)
    _check_numbers(made, tables, report)
    placed = {name: torch.from_numpy(np.array(table)).to(place.device) for name, table in tables._asdict().items()}
    if place.pinned:
        placed["heap"] = placed["heap"].cpu().pin_memory()
    made.tables = DeviceTables(**placed)
    made._report.copy_(torch.from_numpy(np.array(report)))
    made._launches, made._wrapped = int(counts["launches"] or 0), bool(record["wrapped"])
    made._last_cell = int(counts["last_cell"] or 0)
    try:
        made.check()
    except (AssertionError, IndexError, RuntimeError) as problem:
        raise FileFormatError(f"a device's store makes no sense: {problem}") from problem
    return made


def _check_shapes(made: DeviceFrameStore, tables: Any) -> None:
    shape, streams = made.shape, made.n_streams
    n_cells, n_segments = made.n_steps * streams * made.n_sets, shape.segments_per_stream * streams
    n_scenes = 0 if tables.scene_refs is None else len(tables.scene_refs)
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
        _column(tables._asdict(), name, dtype, wanted)
    heap = tables.heap
    _require(
        isinstance(heap, np.ndarray) and heap.ndim == 1 and heap.dtype == np.uint8 and heap.size >= 8 + kernels.SLACK,
        "the heap is unreadable",
    )


def _check_numbers(made: DeviceFrameStore, tables: Any, report: Array) -> None:
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
        ("a report", report, 0, kernels.NOWHERE + 1),
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


def _column(arrays: Mapping[str, Any], name: str, dtype: Any, shape: tuple[int, ...]) -> Array:
    array = arrays.get(name)
    if array is None or array.dtype != np.dtype(dtype) or array.shape != shape:
        found = "nothing" if array is None else f"{array.shape} {array.dtype}"
        raise FileFormatError(f"{name} has {found} where {shape} {np.dtype(dtype)} is due")
    return np.asarray(array)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise FileFormatError(message)
