"""A store as a JSON-ready record and a few arrays, and back; what comes back is checked, not trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.codecs.registry import codec_from_config, get_codec, is_available, known_codecs
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import ExtraBuffersError, FileFormatError
from sb3_extra_buffers.kernels.prints import PAGE
from sb3_extra_buffers.kernels.state import NONE, PACKED_LZ4, PACKED_ZSTD, scene_bytes
from sb3_extra_buffers.stores.arena import SLACK, lengthen
from sb3_extra_buffers.stores.choice import Choice
from sb3_extra_buffers.stores.frames import LATER, FrameStore
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.making import make_frame_store
from sb3_extra_buffers.stores.observation import DenseStore, ObservationStore
from sb3_extra_buffers.stores.payloads import PayloadStore
from sb3_extra_buffers.stores.segments import SegmentStore

Array = npt.NDArray[Any]
#: fills a heap from payloads somewhere else: the heap, slots oldest first
FillHeap = Callable[[Heap, npt.NDArray[np.int32]], None]

#: columns of the state that are kept as they are; all are small, an entry or a few for each stream
STREAM_COLUMNS = (
    "stage_ends", "open_segments", "recent_ids", "heads", "last", "scene_of", "scene_cost", "walks", "pool",
)  # fmt: skip
_DTYPE_KINDS = "biufc"


class StoreParts(NamedTuple):
    """What a store is made of: settings as JSON, tables as arrays, payloads in a heap."""

    record: dict[str, Any]
    arrays: dict[str, Array]
    heap: Heap | None
    inner: FrameStore | None = None


# ---- taking apart ----


def take_apart(store: ObservationStore) -> StoreParts:
    """Everything `put_together` needs. The arrays are the store's own: use them before its next write."""
    record: dict[str, Any] = {
        "shape": list(store.spec.shape),
        "dtype": store.spec.dtype.str,
        "n_streams": store.n_streams,
        "n_cells": store.n_cells,
        "method": store.method,
        "options": dict(store.options),
        "heap_bytes": store._heap_bytes,
        "choice": None if store.choice is None else [store.choice.method, store.choice.why],
    }
    inner = store._inner
    if isinstance(inner, DenseStore):
        return StoreParts(record | {"kind": "dense"}, {"rows": inner.rows, "written": inner.written}, None)
    if inner is None:
        arrays = _join_pending(store)
        return StoreParts(record | {"kind": "pending"}, arrays, None)
    inner.settle()
    return _take_frames_apart(inner, record)


def _join_pending(store: ObservationStore) -> dict[str, Array]:
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, store.spec.nbytes), np.uint8))
    columns = [np.concatenate(parts) for parts in zip(empty, *store._pending, strict=True)]
    return dict(zip(("cells", "streams", "rows"), columns, strict=True))


def _take_frames_apart(inner: FrameStore, record: dict[str, Any]) -> StoreParts:
    state = inner._state
    opened = state.open_segments[state.open_segments >= 0]
    used = np.flatnonzero(state.open_segments >= 0)
    room = state.stage.size // state.open_segments.size
    stage = [state.stage[stream * room : stream * room + int(state.stage_ends[stream])] for stream in used]
    codecs = inner.codecs if isinstance(inner, PayloadStore) else [inner.codec]
    arrays: dict[str, Array] = {
        "slots": inner.slots,
        "lengths": state.lengths,
        "counts": state.counts,
        "scenes": state.scenes,
        "scene_rows": state.scene_rows.reshape(-1, scene_bytes(inner.layout.frame_bytes)),
        "stage": np.concatenate([np.zeros(0, np.uint8), *stage]),
        # one place for all of them: each is a few numbers
        "streams": join_streams(state._asdict()),
    }
    record = record | {
        "kind": "frames",
        "stack": inner.layout.stack,
        "axis": inner.layout.axis,
        "codecs": [[codec.name or codec.codec_id, codec.codec_id, codec.config()] for codec in codecs],
        "n_sealed": int(np.count_nonzero(state.lengths)),
        "n_open": len(opened),
        # a limit on memory counts these, and evicts at the same step only if they are as long as they were
        "room": [state.fresh.size, state.freed.size, len(inner.heap._order)],
    }
    if isinstance(inner, PayloadStore):
        arrays["generation"] = inner._generation
    if isinstance(inner, SegmentStore):
        record |= {"n_fresh": inner._n_fresh, "next_clean": inner._next_clean}
    return StoreParts(record, arrays, inner.heap, inner)


def touched_pages(inner: FrameStore) -> dict[str, npt.NDArray[np.int64]]:
    """For tables that `take_apart` names, the pages that may differ from what they were when `saved` was called."""
    segments = inner.changed_segments()
    pages = _pages_of(segments, 4)
    width = scene_bytes(inner.layout.frame_bytes)
    scenes = {
        page
        for scene in inner.new_scenes
        for page in range(scene * width // PAGE, ((scene + 1) * width - 1) // PAGE + 1)
    }
    return {
        "slots": np.flatnonzero(inner.touched),
        "lengths": pages,
        "counts": pages,
        "scenes": pages,
        "starts": _pages_of(segments, 8),
        "generation": _pages_of(segments, 1),
        "scene_rows": np.array(sorted(scenes), np.int64),
    }


def _pages_of(entries: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    """The pages that ``entries`` of a table lie in, each of them ``width`` bytes."""
    found = np.zeros(int(entries.max(initial=-1) + 1) * width // PAGE + 1, np.bool_)
    found[entries * width // PAGE] = True
    return np.flatnonzero(found)


# ---- putting together ----


def put_together(
    record: Mapping[str, Any], arrays: Mapping[str, Array], fill_heap: FillHeap, read_only: bool = False
) -> ObservationStore:
    """The store that `take_apart` saw. ``read_only`` leaves out what only writing needs."""
    try:
        store = _make_store(record)
        kind = record["kind"]
        if kind == "dense":
            store._inner = _put_dense(store, arrays)
        elif kind == "pending":
            store._pending = _put_pending(store, arrays)
        elif kind == "frames":
            store._inner = _put_frames(store, record, arrays, fill_heap, read_only)
        else:
            raise FileFormatError(f"a store of kind {kind!r} is unknown here; update sb3-extra-buffers")
    except (KeyError, TypeError, ValueError, OverflowError, IndexError, OSError, MemoryError) as problem:
        if isinstance(problem, ExtraBuffersError):
            raise
        raise FileFormatError(f"the saved store makes no sense: {type(problem).__name__}: {problem}") from problem
    dense = store.choice is not None and store.choice.method == "none"
    fits = store._inner is None or (store.choice is not None and dense == isinstance(store._inner, DenseStore))
    _require(fits and not (dense and store._inner is None and store.n_cells), "observations are not kept as was chosen")
    store._dense = store._dense or isinstance(store._inner, DenseStore)
    return store


def parse_dtype(text: Any) -> np.dtype[Any]:
    """The plain dtype that ``text`` names; nothing that holds objects, fields or nothing at all."""
    _require(isinstance(text, str) and len(text) <= 16, f"{text!r} names no dtype")
    try:
        dtype: np.dtype[Any] = np.dtype(text)
    except (TypeError, ValueError) as problem:
        raise FileFormatError(f"{text!r} names no dtype") from problem
    _require(dtype.kind in _DTYPE_KINDS and dtype.itemsize > 0, f"arrays of dtype {text!r} are not kept in files")
    return dtype


def _make_store(record: Mapping[str, Any]) -> ObservationStore:
    shape = record["shape"]
    _require(
        isinstance(shape, list) and len(shape) <= 32 and all(type(n) is int and 0 <= n < 1 << 40 for n in shape),
        f"{shape!r} is no shape of observations",
    )
    for name, least in (("n_streams", 1), ("n_cells", 0)):
        _require(type(record[name]) is int and least <= record[name] < 1 << 48, f"{name} is {record[name]!r}")
    limit = record["heap_bytes"]
    _require(limit is None or (type(limit) is int and limit >= 0), f"heap_bytes is {limit!r}")
    _require(isinstance(record["method"], str) and isinstance(record["options"], dict), "the method is unreadable")
    spec = ObsSpec(tuple(shape), parse_dtype(record["dtype"]))
    store = ObservationStore(spec, record["n_streams"], record["method"], record["options"], limit)
    choice = record["choice"]
    if choice is not None:
        _require(
            isinstance(choice, list) and len(choice) == 2 and all(isinstance(part, str) for part in choice),
            f"the choice {choice!r} is unreadable",
        )
        chosen = get_codec(choice[0], **store.options).codec_id
        _require(
            store.choice is None or chosen in (get_codec(store.choice.method, **store.options).codec_id, "none"),
            f"{choice[0]!r} was chosen where {record['method']!r} was asked for",
        )
        store.choice = Choice(*choice)
    store.n_cells = record["n_cells"]
    return store


def _put_dense(store: ObservationStore, arrays: Mapping[str, Array]) -> DenseStore:
    dense = object.__new__(DenseStore)
    rows = _column(arrays, "rows", np.uint8, (store.n_cells, store.spec.nbytes))
    written = _column(arrays, "written", np.bool_, (store.n_cells,))
    dense.__setstate__({"rows": rows, "written": written, "limit": store._heap_bytes})
    return dense


def _put_pending(store: ObservationStore, arrays: Mapping[str, Array]) -> list[tuple[Array, Array, Array]]:
    count = len(arrays["cells"])
    cells = _column(arrays, "cells", np.int64, (count,))
    streams = _column(arrays, "streams", np.int64, (count,))
    rows = _column(arrays, "rows", np.uint8, (count, store.spec.nbytes))
    _within(cells, 0, store.n_cells, "a cell")
    _within(streams, 0, store.n_streams, "a stream")
    return [(cells, streams, rows)] if count else []


def _put_frames(
    store: ObservationStore,
    record: Mapping[str, Any],
    arrays: Mapping[str, Array],
    fill_heap: FillHeap,
    read_only: bool,
) -> FrameStore:
    layout = _layout(store.spec, record)
    codecs = _codecs(record)
    # before rooms for them are made: there are more numbers than streams
    _require(len(arrays["streams"]) > store.n_streams, f"{store.n_streams} streams are not what there is")
    inner = make_frame_store(layout, 0, store.n_streams, codecs[-1], store._heap_bytes, None, store._compiled)
    per = inner.per_segment
    counts = _column(arrays, "counts", np.int32, (len(arrays["counts"]),))
    n_segments = len(counts)
    lengths = _column(arrays, "lengths", np.int32, (n_segments,))
    scenes = _column(arrays, "scenes", np.int32, (n_segments,))
    scene_rows = _column(arrays, "scene_rows", np.uint8, (len(arrays["scene_rows"]), scene_bytes(layout.frame_bytes)))
    slots = _column(arrays, "slots", np.int32, (store.n_cells, layout.stack))
    _within(counts, 0, per + 1, "a segment's number of frames")
    _within(lengths, 0, 1 << 31, "a segment's length")
    used = np.flatnonzero(counts)
    _within(scenes[used], NONE, len(scene_rows), "a segment's scene")
    _require(bool((scenes[used] != -1).all()), "a segment's scene is -1")
    _within(slots, 0, n_segments * per + 1, "a frame's id")
    for part in np.array_split(slots.reshape(-1), max(slots.size >> 20, 1)):
        ids = part[part > 0] - 1
        _require(bool((ids % per < counts[ids // per]).all()), "an observation names a frame that is not there")

    columns = split_streams(inner, arrays["streams"])
    opened = columns["open_segments"]
    streams = np.flatnonzero(opened != NONE)
    _within(opened[streams], 0, n_segments, "an open segment")
    _require(len(np.unique(opened[streams])) == len(streams), "a segment is open twice")
    _require(
        np.array_equal(np.flatnonzero((counts > 0) & (lengths == 0)), np.sort(opened[streams]))
        and bool((counts[lengths > 0] > 0).all()),
        "a segment is neither open nor in the heap",
    )
    _require(isinstance(inner, SegmentStore) or not len(streams), "a byte codec has no open segments")
    _require(
        (record["n_sealed"], record["n_open"]) == (int(np.count_nonzero(lengths)), len(streams)),
        "there are more segments, or fewer, than were saved",
    )
    held = int(lengths.sum(dtype=np.int64))
    _require(inner.heap.limit is None or held <= inner.heap.limit, f"{held} bytes are more than heap_bytes")
    _require(
        store.choice is not None and get_codec(store.choice.method, **store.options).codec_id == codecs[-1].codec_id,
        f"payloads of {codecs[-1].codec_id!r} are not what was chosen",
    )
    inner.slots = slots
    inner.touched = np.zeros(-(-slots.nbytes // PAGE), np.bool_)
    inner.heap.grow(n_segments)
    inner.heap.lengths[:] = lengths
    _put_state(inner, columns, counts, scenes, scene_rows, arrays["stage"], read_only)
    fill_heap(inner.heap, np.flatnonzero(lengths).astype(np.int32))
    inner._sync()
    if isinstance(inner, PayloadStore):
        inner.codecs = codecs
        inner._generation = lengthen(_column(arrays, "generation", np.uint8, (n_segments,)), n_segments)
        _within(inner._generation, 0, len(codecs), "the codec of a payload")
    if isinstance(inner, SegmentStore):
        _finish_segments(inner, record, read_only)
    if not read_only:
        _remember_frames(inner)
        _make_room(inner, record["room"])
        try:
            inner.check()
        except AssertionError as problem:
            raise FileFormatError(f"the saved store contradicts itself: {problem}") from problem
    return inner


def _put_state(
    inner: FrameStore,
    columns: dict[str, Array],
    counts: Array,
    scenes: Array,
    scene_rows: Array,
    stage: Array,
    read_only: bool,
) -> None:
    """Set the tables, those that follow from others computed anew."""
    state, per, n_segments = inner._state, inner.per_segment, len(counts)
    n_scenes, places = len(scene_rows), state.recent_ids.shape[1]
    frames = columns["recent_ids"]
    _within(frames, NONE, n_segments * per, "a recent frame")
    known = frames[frames >= 0]
    _require(bool((known % per < counts[known // per]).all()), "a recent frame is not there")
    _within(columns["heads"], 0, places, "a place among the recent frames")
    _within(columns["last"], NONE, places, "a place among the recent frames")
    _within(columns["scene_of"], NONE, n_scenes, "a stream's scene")
    _within(columns["pool"], NONE, n_scenes, "a scene at hand")
    _require(not (columns["scene_of"] == -1).any() and not (columns["pool"] == -1).any(), "a scene is -1")
    _within(columns["scene_cost"], 0, 1 << 60, "the cost of a scene")
    _put_stage(inner, columns, counts, scenes, stage)
    used = scenes[(counts > 0) & (scenes >= 0)]
    n_counted = 0 if read_only else n_segments
    inner._replace(
        counts=lengthen(counts, n_segments),
        scenes=lengthen(scenes, n_segments),
        live=lengthen(np.zeros(0, np.int32), n_counted),
        refs=lengthen(np.zeros(0, np.int32), n_counted * per),
        free=lengthen(np.zeros(0, np.int32), n_counted),
        scene_rows=scene_rows.reshape(-1),
        scene_refs=np.bincount(used, minlength=n_scenes).astype(np.int32),
        **columns,
    )
    if not read_only:
        inner._count_references()


def _put_stage(inner: FrameStore, columns: dict[str, Array], counts: Array, scenes: Array, stage: Array) -> None:
    """Give open segments their rooms back, each where its stream expects it."""
    state, per = inner._state, inner.per_segment
    opened, ends = columns["open_segments"], columns["stage_ends"]
    streams = np.flatnonzero(opened >= 0)
    room = state.stage.size // len(opened)
    width = 4 if inner._wide else 2
    body = 2 + per * width
    at = 0
    _require(stage.dtype == np.uint8 and stage.ndim == 1, "the open segments are unreadable")
    for stream in streams.tolist():
        end, segment = int(ends[stream]), int(opened[stream])
        _require(body <= end <= room and at + end <= stage.size, "an open segment is cut short")
        part = state.stage[stream * room : stream * room + end]
        part[:] = stage[at : at + end]
        at += end
        count = int(counts[segment])
        lengths = part[2 : 2 + count * width].view("<u4" if inner._wide else "<u2").astype(np.int64)
        _require(
            part[0] == 0
            and part[1] == count
            and bool((lengths <= inner.layout.frame_bytes).all())
            and body + int(lengths.sum()) == end
            and int(columns["walks"][stream]) == int(lengths[lengths < inner.layout.frame_bytes].sum()),
            "an open segment does not hold what it says",
        )
        _require(
            int(lengths[0]) != inner.layout.frame_bytes or scenes[segment] == NONE,
            "a segment that begins with a whole frame refers to a scene",
        )
        newest = int(columns["recent_ids"][stream, (int(columns["heads"][stream]) - 1) % state.recent_ids.shape[1]])
        _require(newest == segment * per + count - 1, "a stream does not remember its newest frame")
    _require(at == stage.size, "the open segments are longer than they say")


def _finish_segments(inner: SegmentStore, record: Mapping[str, Any], read_only: bool) -> None:
    state, opened = inner._state, inner._state.open_segments
    room = state.stage.size // len(opened)
    streams = np.flatnonzero(opened >= 0)
    state.starts[opened[streams]] = -1 - streams * room
    for name in ("n_fresh", "next_clean"):
        _require(type(record[name]) is int and 0 <= record[name] < 1 << 60, f"{name} is {record[name]!r}")
    inner._n_fresh, inner._next_clean = record["n_fresh"], record["next_clean"]
    if not read_only:
        _check_payloads(inner)
    if read_only:
        # looking at the flags of every segment would read all of the file
        inner._n_packed = int(bool(inner._pack_level) or not inner._kernels.compiled)
    else:
        inner._follow_kernels()


def _check_payloads(inner: SegmentStore) -> None:
    """Raise unless every sealed segment begins as the tables say."""
    width, size = 4 if inner._wide else 2, inner.layout.frame_bytes
    heap, steps = inner.heap, np.arange(inner.per_segment)
    sealed = np.flatnonzero(heap.lengths)
    for segments in np.array_split(sealed, max(len(sealed) >> 14, 1)):
        starts, lengths = heap.starts[segments], heap.lengths[segments].astype(np.int64)
        counts = inner._state.counts[segments].astype(np.int64)
        tables = 2 + counts * width
        _require(bool((lengths >= tables).all()), "a segment is too short for its frames")
        flags = heap.data[starts]
        _require(bool(np.isin(flags, (0, PACKED_LZ4, PACKED_ZSTD)).all()), "a segment is packed in an unknown way")
        _require(bool((heap.data[starts + 1] == counts).all()), "a segment does not hold the frames that it should")
        # [segment, frame, byte], frames that are not there read as the first one
        here = steps < counts[:, None]
        at = (starts[:, None] + 2 + np.where(here, steps, 0) * width)[..., None] + np.arange(width)
        frames = heap.data[at].reshape(-1, width).view("<u4" if width == 4 else "<u2").reshape(here.shape)
        frames = np.where(here, frames, 0).astype(np.int64)
        _require(bool((frames <= size).all()), f"a frame of {size} bytes takes more than that")
        fits = (tables + frames.sum(axis=1) == lengths) | (flags != 0)
        _require(bool(fits.all()), "the frames of a segment are not as long as it is")


def _make_room(inner: FrameStore, room: Any) -> None:
    """Give lists the length that they had."""
    most = 4 * (inner.slots.size + 4096)
    _require(
        isinstance(room, list) and len(room) == 3 and all(type(n) is int and 0 <= n <= most for n in room),
        f"lists of {room!r} entries make no sense",
    )
    n_fresh, n_freed, n_order = room
    _require(
        n_fresh % inner.layout.stack == 0 and n_freed == (n_fresh + LATER if n_fresh else 0),
        f"{n_freed} entries are not enough for {n_fresh} frames",
    )
    if n_fresh:
        inner._lengthen_lists(n_fresh // inner.layout.stack)
    inner.heap.make_room(n_order)


def _remember_frames(inner: FrameStore) -> None:
    """Decode the frames that streams saw last: they are not saved, as the store has them anyway."""
    state = inner._state
    where = np.argwhere(state.recent_ids >= 0)
    if not len(where):
        return
    ids = state.recent_ids[where[:, 0], where[:, 1]]
    frames = inner._decode((ids[:, None] + 1).astype(np.int32), np.arange(len(ids))[None])
    frames = frames.reshape(len(ids), inner.layout.frame_bytes)
    state.recent[where[:, 0], where[:, 1], : inner.layout.frame_bytes] = frames


def _layout(spec: ObsSpec, record: Mapping[str, Any]) -> StackLayout:
    stack, axis = record["stack"], record["axis"]
    _require(type(stack) is int and axis in ("first", "last"), f"stacks of {stack!r} along {axis!r} are unreadable")
    length = (spec.shape[0] if axis == "first" else spec.shape[-1]) if spec.shape else 1
    _require(1 <= stack <= 64 and 0 < spec.nbytes < 1 << 31, f"observations of {spec} are no stacks of {stack}")
    _require(
        stack == 1 or length % stack == 0, f"observations of {spec} are no stacks of {stack} along the {axis} axis"
    )
    return StackLayout(spec, stack, axis)


def _codecs(record: Mapping[str, Any]) -> list[Codec]:
    listed = record["codecs"]
    _require(isinstance(listed, list) and 1 <= len(listed) <= 256, "the codecs are unreadable")
    codecs = []
    for name, codec_id, config in listed:
        _require(
            isinstance(name, str) and codec_id in known_codecs() and isinstance(config, dict), f"{name!r} is no codec"
        )
        # a codec of the same id reads the same payloads
        codecs.append(codec_from_config(name if is_available(name) else codec_id, config))
    _require(len(codecs) == 1 or not any(isinstance(codec, DeltaCodec) for codec in codecs), "too many codecs")
    return codecs


def check_extents(starts: Array, lengths: Array, size: int) -> None:
    """Raise unless every payload lies inside ``size`` bytes, with what kernels may read beyond it."""
    _within(starts, 0, max(size, 1), "the place of a segment")
    _require(bool((starts <= size - SLACK - lengths.astype(np.int64)).all()), "a segment reaches past the end")


def _column(arrays: Mapping[str, Array], name: str, dtype: Any, shape: tuple[int, ...]) -> Array:
    array = arrays[name]
    _require(
        array.dtype == np.dtype(dtype) and array.shape == shape,
        f"{name} has {array.shape} {array.dtype} where {shape} {np.dtype(dtype)} is due",
    )
    return array


def join_streams(columns: Mapping[str, Array]) -> Array:
    """The columns of streams as one."""
    return np.concatenate([columns[name].ravel().astype(np.int64) for name in STREAM_COLUMNS])


def split_streams(inner: FrameStore, numbers: Array) -> dict[str, Array]:
    """Undo `join_streams`, for a store like ``inner``."""
    empty = {name: getattr(inner._state, name) for name in STREAM_COLUMNS}
    total = sum(column.size for column in empty.values())
    _column({"streams": numbers}, "streams", np.int64, (total,))
    columns, at = {}, 0
    for name, column in empty.items():
        part = numbers[at : at + column.size]
        at += column.size
        limits = np.iinfo(column.dtype)
        _within(part, int(limits.min), int(limits.max) + 1, name)
        columns[name] = part.astype(column.dtype).reshape(column.shape)
    return columns


def _within(values: Array, low: int, stop: int, what: str) -> None:
    if values.size and (int(values.min()) < low or int(values.max()) >= stop):
        raise FileFormatError(f"{what} is {values.min()} or {values.max()}, outside {low}..{stop - 1}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise FileFormatError(message)
