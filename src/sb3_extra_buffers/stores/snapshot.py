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
from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.kernels.fingerprints import PAGE
from sb3_extra_buffers.kernels.state import NONE, PACKED_LZ4, PACKED_ZSTD, keyframe_bytes
from sb3_extra_buffers.stores.arena import SLACK, lengthen
from sb3_extra_buffers.stores.checks import column, only_named_errors, parse_dtype, parse_shape, require, whole, within
from sb3_extra_buffers.stores.choice import Choice
from sb3_extra_buffers.stores.factory import make_frame_store
from sb3_extra_buffers.stores.frames import LATER, FrameStore
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.observation import DenseStore, ObservationStore
from sb3_extra_buffers.stores.payloads import PayloadStore
from sb3_extra_buffers.stores.segments import SegmentStore

Array = npt.NDArray[Any]
#: fills a heap from payloads somewhere else: the heap, slots oldest first
FillHeap = Callable[[Heap, npt.NDArray[np.int32]], None]

# columns of the state that are kept as they are; all are small, an entry or a few for each stream
_STREAM_COLUMNS = (
    "stage_ends", "open_segments", "recent_ids", "recent_next", "last_stack", "stream_keyframes", "keyframe_cost",
    "chain_bytes", "pool",
)  # fmt: skip

# what a codec is told by what it encodes
_FROM_SPEC = frozenset({"elem", "run", "channels", "planar"})


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
        "n_cells": store.n_obs,
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
    inner.collect_segments()
    return _take_frames_apart(inner, record)


def _join_pending(store: ObservationStore) -> dict[str, Array]:
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, store.spec.nbytes), np.uint8))
    columns = [np.concatenate(parts) for parts in zip(empty, *store._pending, strict=True)]
    return dict(zip(("cells", "streams", "rows"), columns, strict=True))


def _take_frames_apart(inner: FrameStore, record: dict[str, Any]) -> StoreParts:
    state = inner._state
    opened = state.open_segments[state.open_segments >= 0]
    used = np.flatnonzero(state.open_segments >= 0)
    room = state.config.stage_bytes
    stage = [state.stage[stream * room : stream * room + int(state.stage_ends[stream])] for stream in used]
    codecs = inner.codecs if isinstance(inner, PayloadStore) else [inner.codec]
    arrays: dict[str, Array] = {
        "slots": inner.frame_ids,
        "lengths": state.lengths,
        "counts": state.counts,
        "scenes": state.keyframes,
        "scene_rows": state.keyframe_rows.reshape(-1, keyframe_bytes(inner.layout.frame_bytes)),
        "stage": np.concatenate([np.zeros(0, np.uint8), *stage]),
        # one place for all of them: each is a few numbers
        "streams": np.concatenate([getattr(state, name).ravel().astype(np.int64) for name in _STREAM_COLUMNS]),
    }
    record = record | {
        "kind": "frames",
        "stack": inner.layout.stack,
        "axis": inner.layout.axis,
        "codecs": [[codec.name or codec.codec_id, codec.codec_id, codec.config()] for codec in codecs],
        "n_sealed": int(np.count_nonzero(state.lengths)),
        "n_open": len(opened),
        # a limit on memory counts these, and evicts at the same step only if they are as long as they were
        "room": [state.undo_ids.size, state.freed.size, len(inner.heap._order)],
    }
    if isinstance(inner, PayloadStore):
        arrays["generation"] = inner._generation
    if isinstance(inner, SegmentStore):
        record |= {"n_fresh": inner._n_fresh, "next_clean": inner._next_clean}
    return StoreParts(record, arrays, inner.heap, inner)


def pages_to_save(inner: FrameStore) -> dict[str, npt.NDArray[np.int64]]:
    """For tables that `take_apart` names, the pages that may differ from what they were when `saved` was called."""
    segments = inner.changed_segments()
    pages = _pages_of(segments, 4)
    width = keyframe_bytes(inner.layout.frame_bytes)
    keyframes = {
        page
        for keyframe in inner.new_keyframes
        for page in range(keyframe * width // PAGE, ((keyframe + 1) * width - 1) // PAGE + 1)
    }
    return {
        "slots": np.flatnonzero(inner.dirty_pages),
        "lengths": pages,
        "counts": pages,
        "scenes": pages,
        "starts": _pages_of(segments, 8),
        "generation": _pages_of(segments, 1),
        "scene_rows": np.array(sorted(keyframes), np.int64),
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
    with only_named_errors("the saved store"):
        store = _make_store(record)
        kind = record["kind"]
        if kind == "dense":
            rows = column(arrays, "rows", np.uint8, (store.n_obs, store.spec.nbytes))
            written = column(arrays, "written", np.bool_, (store.n_obs,))
            store._inner = dense = object.__new__(DenseStore)
            dense.__setstate__({"rows": rows, "written": written, "limit": store._heap_bytes})
        elif kind == "pending":
            store._pending = _put_pending(store, arrays)
        elif kind == "frames":
            store._inner = _put_frames(store, record, arrays, fill_heap, read_only)
        else:
            raise FileFormatError(f"a store of kind {kind!r} is unknown here; update sb3-extra-buffers")
    none = store.choice is not None and store.choice.method == "none"
    fits = store._inner is None or (store.choice is not None and none == isinstance(store._inner, DenseStore))
    require(fits and not (none and store._inner is None and store.n_obs), "observations are not kept as was chosen")
    store._dense = store._dense or isinstance(store._inner, DenseStore)
    return store


def _make_store(record: Mapping[str, Any]) -> ObservationStore:
    spec = ObsSpec(parse_shape(record["shape"]), parse_dtype(record["dtype"]))
    n_streams, limit, choice = whole(record["n_streams"], "n_streams", 1), record["heap_bytes"], record["choice"]
    if limit is not None:
        whole(limit, "heap_bytes", stop=1 << 64)
    require(isinstance(record["method"], str) and isinstance(record["options"], dict), "the method is unreadable")
    store = ObservationStore(spec, n_streams, record["method"], record["options"], limit)
    if choice is not None:
        require(isinstance(choice, list) and [*map(type, choice)] == [str, str], f"{choice!r} is no choice")
        chosen = get_codec(choice[0], **store.options).codec_id
        require(
            store.choice is None or chosen in (get_codec(store.choice.method, **store.options).codec_id, "none"),
            f"{choice[0]!r} was chosen where {record['method']!r} was asked for",
        )
        store.choice = Choice(*choice)
    store.n_obs = whole(record["n_cells"], "n_cells")
    return store


def _put_pending(store: ObservationStore, arrays: Mapping[str, Array]) -> list[tuple[Array, Array, Array]]:
    indices = column(arrays, "cells", np.int64, (None,))
    streams = column(arrays, "streams", np.int64, indices.shape)
    rows = column(arrays, "rows", np.uint8, (len(indices), store.spec.nbytes))
    within(indices, 0, store.n_obs, "a cell")
    within(streams, 0, store.n_streams, "a stream")
    return [(indices, streams, rows)] if len(indices) else []


def _put_frames(
    store: ObservationStore, record: Mapping[str, Any], arrays: Mapping[str, Array], fill: FillHeap, read_only: bool
) -> FrameStore:
    layout = _layout(store.spec, record)
    codecs = _codecs(record, layout.frame_spec)
    # before rooms for them are made: there are more numbers than streams
    require(len(arrays["streams"]) > store.n_streams, f"{store.n_streams} streams are not what there is")
    inner = make_frame_store(layout, 0, store.n_streams, codecs[-1], store._heap_bytes, None, store._compiled)
    per = inner.per_segment
    counts = column(arrays, "counts", np.int32, (None,))
    n_segments = len(counts)
    lengths = column(arrays, "lengths", np.int32, (n_segments,))
    keyframes = column(arrays, "scenes", np.int32, (n_segments,))
    keyframe_rows = column(arrays, "scene_rows", np.uint8, (None, keyframe_bytes(layout.frame_bytes)))
    frame_ids = column(arrays, "slots", np.int32, (store.n_obs, layout.stack))
    stage = column(arrays, "stage", np.uint8, (None,))
    within(counts, 0, per + 1, "a segment's number of frames")
    within(lengths, 0, 1 << 31, "a segment's length")
    _are_keyframes(keyframes[counts > 0], len(keyframe_rows), "a segment's keyframe")
    within(frame_ids, 0, n_segments * per + 1, "a frame's id")
    for part in np.array_split(frame_ids.reshape(-1), max(frame_ids.size >> 20, 1)):
        ids = part[part > 0] - 1
        require(ids % per < counts[ids // per], "an observation names a frame that is not there")
    columns = _split_streams(inner, arrays["streams"])
    opened = columns["open_segments"][columns["open_segments"] != NONE]
    within(opened, 0, n_segments, "an open segment")
    # which also says that none is open twice
    due = np.flatnonzero((counts > 0) & (lengths == 0))
    require(np.array_equal(due, np.sort(opened)), "a segment is neither open nor in the heap")
    require(counts[lengths > 0] > 0, "a segment without frames is in the heap")
    require(isinstance(inner, SegmentStore) or not len(opened), "a byte codec has no open segments")
    found = [int(np.count_nonzero(lengths)), len(opened)]
    require([record["n_sealed"], record["n_open"]] == found, "there are more segments, or fewer, than were saved")
    held = int(lengths.sum(dtype=np.int64))
    require(inner.heap.limit is None or held <= inner.heap.limit, f"{held} bytes are more than heap_bytes")
    chosen = None if store.choice is None else get_codec(store.choice.method, **store.options).codec_id
    require(chosen == codecs[-1].codec_id, f"payloads of {codecs[-1].codec_id!r} are not what was chosen")

    inner.frame_ids = frame_ids
    inner.dirty_pages = np.zeros(-(-frame_ids.nbytes // PAGE), np.bool_)
    inner.heap.grow(n_segments)
    inner.heap.lengths[:] = lengths
    _check_streams(columns, counts, per, len(keyframe_rows))
    _put_stage(inner, columns, counts, keyframes, stage)
    n_counted = 0 if read_only else n_segments
    inner._replace(
        counts=lengthen(counts, n_segments),
        keyframes=lengthen(keyframes, n_segments),
        live=lengthen(np.zeros(0, np.int32), n_counted),
        refs=lengthen(np.zeros(0, np.int32), n_counted * per),
        unused=lengthen(np.zeros(0, np.int32), n_counted),
        keyframe_rows=keyframe_rows.reshape(-1),
        keyframe_refs=np.bincount(keyframes[(counts > 0) & (keyframes >= 0)], minlength=len(keyframe_rows)).astype(
            np.int32
        ),
        **columns,
    )
    if not read_only:
        inner._count_references()
    fill(inner.heap, np.flatnonzero(lengths).astype(np.int32))
    inner._sync()
    if isinstance(inner, PayloadStore):
        inner.codecs = codecs
        inner._generation = lengthen(column(arrays, "generation", np.uint8, (n_segments,)), n_segments)
        within(inner._generation, 0, len(codecs), "the codec of a payload")
    if isinstance(inner, SegmentStore):
        _finish_segments(inner, record, read_only)
    if not read_only:
        _remember_frames(inner)
        _reserve(inner, record["room"])
        inner.check()
    return inner


def _split_streams(inner: FrameStore, numbers: Array) -> dict[str, Array]:
    """The columns of streams, which were saved as one."""
    empty = {name: getattr(inner._state, name) for name in _STREAM_COLUMNS}
    column({"streams": numbers}, "streams", np.int64, (sum(part.size for part in empty.values()),))
    columns, at = {}, 0
    for name, like in empty.items():
        part, limits = numbers[at : at + like.size], np.iinfo(like.dtype)
        at += like.size
        within(part, int(limits.min), int(limits.max) + 1, name)
        columns[name] = part.astype(like.dtype).reshape(like.shape)
    return columns


def _check_streams(columns: dict[str, Array], counts: Array, per: int, n_keyframes: int) -> None:
    frames = columns["recent_ids"]
    within(frames, NONE, len(counts) * per, "a recent frame")
    known = frames[frames >= 0]
    require(known % per < counts[known // per], "a recent frame is not there")
    within(columns["recent_next"], 0, frames.shape[1], "a place among the recent frames")
    within(columns["last_stack"], NONE, frames.shape[1], "a place among the recent frames")
    _are_keyframes(columns["stream_keyframes"], n_keyframes, "a stream's keyframe")
    _are_keyframes(columns["pool"], n_keyframes, "a keyframe at hand")
    within(columns["keyframe_cost"], 0, 1 << 60, "the cost of a keyframe")


def _are_keyframes(keyframes: Array, n_keyframes: int, what: str) -> None:
    within(keyframes, NONE, n_keyframes, what)
    require(keyframes != -1, f"{what} is -1")


def _put_stage(inner: FrameStore, columns: dict[str, Array], counts: Array, keyframes: Array, stage: Array) -> None:
    """Give open segments their rooms back, each where its stream expects it."""
    state, per, size = inner._state, inner.per_segment, inner.layout.frame_bytes
    opened, ends = columns["open_segments"], columns["stage_ends"]
    room, width = state.config.stage_bytes, state.config.length_bytes
    body, at = 2 + per * width, 0
    for stream in np.flatnonzero(opened >= 0).tolist():
        end, segment = int(ends[stream]), int(opened[stream])
        require(body <= end <= room and at + end <= stage.size, "an open segment is cut short")
        part, count = state.stage[stream * room : stream * room + end], int(counts[segment])
        part[:] = stage[at : at + end]
        at += end
        lengths = part[2 : 2 + count * width].view(f"<u{width}").astype(np.int64)
        fits = part[0] == 0 and part[1] == count and (lengths <= size).all() and body + int(lengths.sum()) == end
        walk = int(lengths[lengths < size].sum())
        require(fits and int(columns["chain_bytes"][stream]) == walk, "an open segment does not hold what it says")
        begins_whole = count and int(lengths[0]) == size
        require(
            not begins_whole or keyframes[segment] == NONE, "a segment that begins with a whole frame has a keyframe"
        )
        newest = int(
            columns["recent_ids"][stream, (int(columns["recent_next"][stream]) - 1) % state.recent_ids.shape[1]]
        )
        require(newest == segment * per + count - 1, "a stream does not remember its newest frame")
    require(at == stage.size, "the open segments are longer than they say")


def _finish_segments(inner: SegmentStore, record: Mapping[str, Any], read_only: bool) -> None:
    state, opened = inner._state, inner._state.open_segments
    streams = np.flatnonzero(opened >= 0)
    state.starts[opened[streams]] = -1 - streams * state.config.stage_bytes
    inner._n_fresh, inner._next_clean = (whole(record[name], name, stop=1 << 60) for name in ("n_fresh", "next_clean"))
    if read_only:
        # looking at the flags of every segment would read all of the file
        inner._n_packed = int(bool(inner._pack_level) or not inner._kernels.compiled)
    else:
        _check_payloads(inner)
        inner._follow_kernels()


def _check_payloads(inner: SegmentStore) -> None:
    """Raise unless every sealed segment begins as the tables say."""
    width, size = inner._state.config.length_bytes, inner.layout.frame_bytes
    heap, steps = inner.heap, np.arange(inner.per_segment)
    sealed = np.flatnonzero(heap.lengths)
    for segments in np.array_split(sealed, max(len(sealed) >> 14, 1)):
        starts, lengths = heap.starts[segments], heap.lengths[segments].astype(np.int64)
        counts = inner._state.counts[segments].astype(np.int64)
        tables = 2 + counts * width
        require(lengths >= tables, "a segment is too short for its frames")
        flags = heap.data[starts]
        require(np.isin(flags, (0, PACKED_LZ4, PACKED_ZSTD)), "a segment is packed in an unknown way")
        require(heap.data[starts + 1] == counts, "a segment does not hold the frames that it should")
        # [segment, frame, byte], frames that are not there read as the first one
        here = steps < counts[:, None]
        at = (starts[:, None] + 2 + np.where(here, steps, 0) * width)[..., None] + np.arange(width)
        frames = heap.data[at].reshape(-1, width).view(f"<u{width}").reshape(here.shape)
        frames = np.where(here, frames, 0).astype(np.int64)
        require(frames <= size, f"a frame of {size} bytes takes more than that")
        fits = (tables + frames.sum(axis=1) == lengths) | (flags != 0)
        require(fits, "the frames of a segment are not as long as it is")


def _reserve(inner: FrameStore, room: Any) -> None:
    """Give lists the length that they had."""
    require(isinstance(room, list) and len(room) == 3, f"lists of {room!r} entries make no sense")
    most = 4 * (inner.frame_ids.size + 4096)
    n_fresh, n_freed, n_order = (whole(n, "the length of a list", stop=most + 1) for n in room)
    fits = n_fresh % inner.layout.stack == 0 and n_freed == (n_fresh + LATER if n_fresh else 0)
    require(fits, f"{n_freed} entries are not enough for {n_fresh} frames")
    if n_fresh:
        inner._lengthen_lists(n_fresh // inner.layout.stack)
    inner.heap.reserve_order(n_order)


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
    require(type(stack) is int and axis in ("first", "last"), f"stacks of {stack!r} along {axis!r} are unreadable")
    length = (spec.shape[0] if axis == "first" else spec.shape[-1]) if spec.shape else 1
    require(1 <= stack <= 64 and 0 < spec.nbytes < 1 << 31, f"observations of {spec} are no stacks of {stack}")
    require(stack == 1 or length % stack == 0, f"observations of {spec} are no stacks of {stack} along the {axis} axis")
    return StackLayout(spec, stack, axis)


def _codecs(record: Mapping[str, Any], spec: ObsSpec) -> list[Codec]:
    listed = record["codecs"]
    require(isinstance(listed, list) and 1 <= len(listed) <= 256, "the codecs are unreadable")
    codecs = []
    for name, codec_id, config in listed:
        require(
            isinstance(name, str) and codec_id in known_codecs() and isinstance(config, dict), f"{name!r} is no codec"
        )
        # a codec of the same id reads the same payloads
        codec = codec_from_config(name if is_available(name) else codec_id, config)
        bound = codec.bind(spec).config()
        fits = all(bound[key] == value for key, value in codec.config().items() if key in _FROM_SPEC)
        require(fits, f"{name!r} with {config!r} is not for frames of {spec}")
        codecs.append(codec)
    require(len(codecs) == 1 or not any(isinstance(codec, DeltaCodec) for codec in codecs), "too many codecs")
    return codecs


def place_payloads(
    heap: Heap, frame_ids: npt.NDArray[np.int32], starts: Array, data: Array, copied: bool = True
) -> None:
    """Let ``heap`` hold payloads that lie in ``data``, inside of it and apart from each other: ``copied``, or there."""
    places, ends = starts[frame_ids], starts[frame_ids] + heap.lengths[frame_ids].astype(np.int64)
    within(places, 0, max(data.size, 1), "the place of a segment")
    # kernels may read a little beyond a payload
    require(ends <= data.size - SLACK, "a segment reaches past the end")
    order = np.argsort(places, kind="stable")
    require(ends[order][:-1] <= places[order][1:], "two segments overlap")
    (heap.adopt_all if copied else heap.look_into)(frame_ids[order], data, places[order])
