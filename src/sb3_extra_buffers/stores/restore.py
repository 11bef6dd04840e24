"""Frame stores from saved tables. Files are not trusted: every entry is checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.kernels.state import NONE
from sb3_extra_buffers.stores.arena import SLACK
from sb3_extra_buffers.stores.base import Array, FillHeap
from sb3_extra_buffers.stores.checks import column, require, whole, within
from sb3_extra_buffers.stores.codec_records import read_codecs
from sb3_extra_buffers.stores.frame_tables import FREE_BATCH
from sb3_extra_buffers.stores.frames import STREAM_COLUMNS, FrameStore, SavedFrames
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.registry import find_store
from sb3_extra_buffers.stores.segment_format import header_bytes, length_dtype

if TYPE_CHECKING:
    from sb3_extra_buffers.stores.observation import ObservationStore


def restore_frames(
    store: ObservationStore,
    record: Mapping[str, Any],
    arrays: Mapping[str, Array],
    fill_heap: FillHeap,
    read_only: bool,
) -> FrameStore:
    """Return the frame store that ``FrameStore.to_parts`` described, for ``store``, whose settings are known."""
    layout = read_layout(store.spec, record)
    codecs = read_codecs(record["codecs"], layout.frame_spec)
    chosen = None if store.choice is None else get_codec(store.choice.method, **store.codec_options).codec_id
    require(
        chosen == codecs[-1].codec_id, f"payloads of {codecs[-1].codec_id!r} do not match the method that was chosen"
    )
    # before memory is reserved for streams: each has several numbers
    n_numbers = len(arrays["streams"])
    require(n_numbers > store.n_streams, f"{n_numbers} numbers cannot describe {store.n_streams} streams")
    frames: FrameStore = find_store(codecs[-1], layout, of_frames=True)(
        layout, 0, store.n_streams, codecs[-1], store.heap_bytes, None, store.compiled
    )
    saved = _read_tables(frames, store.n_obs, record, arrays, codecs)
    frames.restore(saved, fill_heap, read_only)
    return frames


def _read_tables(
    frames: FrameStore, n_obs: int, record: Mapping[str, Any], arrays: Mapping[str, Array], codecs: list[Codec]
) -> SavedFrames:
    per, layout = frames.per_segment, frames.layout
    counts = column(arrays, "counts", np.int32, (None,))
    n_segments = len(counts)
    lengths = column(arrays, "lengths", np.int32, (n_segments,))
    keyframes = column(arrays, "scenes", np.int32, (n_segments,))
    keyframe_rows = column(arrays, "scene_rows", np.uint8, (None, frames.state.config.keyframe_bytes))
    frame_ids = column(arrays, "slots", np.int32, (n_obs, layout.stack))
    within(counts, 0, per + 1, "a segment's number of frames")
    within(lengths, 0, 1 << 31, "a segment's length")
    _check_keyframes(keyframes[counts > 0], len(keyframe_rows), "a segment's keyframe")
    within(frame_ids, 0, n_segments * per + 1, "a frame id")
    for part in np.array_split(frame_ids.reshape(-1), max(frame_ids.size >> 20, 1)):
        ids = part[part > 0] - 1
        require(ids % per < counts[ids // per], "an observation refers to a frame that does not exist")
    streams = _split_streams(frames, arrays["streams"])
    _check_segments(record, counts, lengths, streams["open_segments"], frames.heap.limit)
    _check_streams(streams, counts, per, len(keyframe_rows))
    _read_stage(frames, streams, counts, keyframes, column(arrays, "stage", np.uint8, (None,)))
    n_undo, n_order = _read_list_lengths(n_obs, layout.stack, record["room"])
    return SavedFrames(
        frame_ids, counts, lengths, keyframes, keyframe_rows, streams, n_undo, n_order, codecs, record, arrays
    )


def read_layout(spec: ObsSpec, record: Mapping[str, Any]) -> StackLayout:
    """The layout of a saved store for observations of ``spec``."""
    stack, axis = record["stack"], record["axis"]
    require(type(stack) is int and axis in ("first", "last"), f"invalid layout: stacks of {stack!r} along {axis!r}")
    length = (spec.shape[0] if axis == "first" else spec.shape[-1]) if spec.shape else 1
    fits = 1 <= stack <= 64 and 0 < spec.nbytes < 1 << 31 and (stack == 1 or length % stack == 0)
    require(fits, f"observations of {spec} cannot be stacks of {stack} along the {axis} axis")
    return StackLayout(spec, stack, axis)


def _split_streams(frames: FrameStore, numbers: Array) -> dict[str, Array]:
    """The columns of streams, which are saved as one array."""
    empty = {name: getattr(frames.state, name) for name in STREAM_COLUMNS}
    column({"streams": numbers}, "streams", np.int64, (sum(part.size for part in empty.values()),))
    columns, begin = {}, 0
    for name, like in empty.items():
        part, limits = numbers[begin : begin + like.size], np.iinfo(like.dtype)
        begin += like.size
        within(part, int(limits.min), int(limits.max) + 1, name)
        columns[name] = part.astype(like.dtype).reshape(like.shape)
    return columns


def _check_segments(
    record: Mapping[str, Any], counts: Array, lengths: Array, open_segments: Array, limit: int | None
) -> None:
    opened = open_segments[open_segments != NONE]
    within(opened, 0, len(counts), "an open segment")
    # this also rules out that one is open twice
    unsealed = np.flatnonzero((counts > 0) & (lengths == 0))
    require(np.array_equal(unsealed, np.sort(opened)), "a segment is neither open nor in the heap")
    require(counts[lengths > 0] > 0, "a segment without frames is in the heap")
    n_segments = [int(np.count_nonzero(lengths)), len(opened)]
    expected = [record["n_sealed"], record["n_open"]]
    require(expected == n_segments, f"{n_segments} segments (sealed, open) where {expected} were saved")
    nbytes = int(lengths.sum(dtype=np.int64))
    require(limit is None or nbytes <= limit, f"{nbytes} bytes of segments exceed heap_bytes={limit}")


def _check_streams(columns: dict[str, Array], counts: Array, per: int, n_keyframes: int) -> None:
    ids = columns["recent_ids"]
    within(ids, NONE, len(counts) * per, "a recent frame")
    known = ids[ids >= 0]
    require(known % per < counts[known // per], "a recent frame does not exist")
    within(columns["recent_next"], 0, ids.shape[1], "a position among the recent frames")
    within(columns["last_stack"], NONE, ids.shape[1], "a position among the recent frames")
    _check_keyframes(columns["stream_keyframes"], n_keyframes, "a stream's keyframe")
    _check_keyframes(columns["pool"], n_keyframes, "a keyframe of the pool")
    within(columns["keyframe_cost"], 0, 1 << 60, "the cost of a keyframe")


def _check_keyframes(keyframes: Array, n_keyframes: int, what: str) -> None:
    within(keyframes, NONE, n_keyframes, what)
    require(keyframes != -1, f"{what} is -1")


def _read_stage(frames: FrameStore, columns: dict[str, Array], counts: Array, keyframes: Array, stage: Array) -> None:
    """Copy each open segment to the part of ``frames.state.stage`` where its stream expects it."""
    state, per, size = frames.state, frames.per_segment, frames.layout.frame_bytes
    opened, dtype = columns["open_segments"], length_dtype(state.config)
    newest_at = (columns["recent_next"] - 1) % state.recent_ids.shape[1]
    body_at, begin = header_bytes(per, dtype), 0
    for stream in np.flatnonzero(opened >= 0).tolist():
        end, segment = int(columns["stage_ends"][stream]), int(opened[stream])
        fits = body_at <= end <= state.config.stage_bytes and begin + end <= stage.size
        require(fits, f"an open segment of {end} bytes is cut short")
        part, count = state.stage[stream * state.config.stage_bytes :][:end], int(counts[segment])
        part[:] = stage[begin : begin + end]
        begin += end
        lengths = part[2 : header_bytes(count, dtype)].view(dtype).astype(np.int64)
        fits = part[0] == 0 and part[1] == count and (lengths <= size).all() and body_at + int(lengths.sum()) == end
        chain_bytes = int(lengths[lengths < size].sum())
        fits = fits and int(columns["chain_bytes"][stream]) == chain_bytes
        require(bool(fits), "the header of an open segment is wrong")
        starts_whole = count and int(lengths[0]) == size
        message = "an open segment that starts with a whole frame refers to a keyframe"
        require(not starts_whole or keyframes[segment] == NONE, message)
        newest = int(columns["recent_ids"][stream, newest_at[stream]])
        require(newest == segment * per + count - 1, "the newest frame of a stream is not among its recent frames")
    require(begin == stage.size, f"{stage.size - begin} bytes follow the open segments")


def _read_list_lengths(n_obs: int, stack: int, lengths: Any) -> tuple[int, int]:
    """How many rows the undo lists had space for, and how many writes the heap's order."""
    require(isinstance(lengths, list) and len(lengths) == 3, f"invalid lengths of lists: {lengths!r}")
    stop = 4 * (n_obs * stack + 4096) + 1
    n_fresh, n_freed, n_order = (whole(n, "the length of a list", stop=stop) for n in lengths)
    fits = n_fresh % stack == 0 and n_freed == (n_fresh + FREE_BATCH if n_fresh else 0)
    require(fits, f"a list of {n_freed} freed segments does not fit {n_fresh} frames")
    return n_fresh // stack, n_order


def pack_payloads(heap: Heap) -> dict[str, Array]:
    """The payloads of a heap as two arrays, for `place_payloads`: where each starts, and their bytes."""
    payload_ids = heap.unsaved(everything=True)
    lengths = heap.lengths[payload_ids].astype(np.int64)
    starts = np.zeros(len(heap.lengths), np.int64)
    starts[payload_ids] = np.cumsum(lengths) - lengths
    payloads = [np.frombuffer(heap.read(payload_id), np.uint8) for payload_id in payload_ids.tolist()]
    return {"starts": starts, "payload": np.concatenate([*payloads, np.zeros(SLACK, np.uint8)])}


def fill_from(arrays: Mapping[str, Array]) -> FillHeap:
    """Return a function that fills a heap from what `pack_payloads` returned."""

    def fill(heap: Heap, payload_ids: npt.NDArray[np.int32]) -> None:
        starts = column(arrays, "starts", np.int64, heap.lengths.shape)
        place_payloads(heap, payload_ids, starts, column(arrays, "payload", np.uint8, (None,)))

    return fill


def place_payloads(
    heap: Heap, payload_ids: npt.NDArray[np.int32], starts: Array, data: Array, copied: bool = True
) -> None:
    """Fill an empty heap with payloads of ``data``: ``copied``, or read from there.

    Raises `FileFormatError` unless payloads are inside ``data`` and do not overlap.
    """
    begins, ends = starts[payload_ids], starts[payload_ids] + heap.lengths[payload_ids].astype(np.int64)
    within(begins, 0, max(data.size, 1), "the start of a segment")
    # kernels may read a little beyond a payload
    require(ends <= data.size - SLACK, "a segment extends past the end of its file")
    order = np.argsort(begins, kind="stable")
    require(ends[order][:-1] <= begins[order][1:], "two segments overlap")
    (heap.copy_payloads if copied else heap.refer_to)(payload_ids[order], data, begins[order])
