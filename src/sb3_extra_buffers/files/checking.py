"""Looking for damage in a saved buffer, and saving what is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.registry import codec_from_config, is_available
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import CorruptPayloadError, DamagedFileError, ExtraBuffersError, FileFormatError
from sb3_extra_buffers.files import manifest
from sb3_extra_buffers.files.blocks import BLOCK, ArrayRecord, map_file
from sb3_extra_buffers.files.loading import (
    SavedBuffer,
    chunks_of,
    damaged_chunks,
    make_buffer,
    payload_tables,
)
from sb3_extra_buffers.files.saving import save
from sb3_extra_buffers.kernels.state import NONE
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.making import make_frame_store
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.snapshot import check_extents, join_streams, put_together, split_streams
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]

# tables with one entry for each segment, and those that only open segments need
_OF_SEGMENTS = ("lengths", "counts", "scenes", "starts", "generation")
_OF_STREAMS = ("stage", "streams")


@dataclass
class Repair:
    """What a repair kept, and what it could not."""

    folder: Path
    n_steps: int = 0
    """Steps, or observations of an array, that are whole."""
    n_lost: int = 0
    findings: list[str] = field(default_factory=list)


def verify(path: str | os.PathLike[str], deep: bool = False) -> Iterator[str]:
    """What is wrong with the saved buffer ``path``, one finding at a time; nothing where all is well.

    ``deep`` also decodes every observation, where otherwise checksums and tables are looked at.
    """
    folder = Path(path)
    try:
        saved = SavedBuffer(folder)
    except ExtraBuffersError as problem:
        yield str(problem)
        return
    n_found = 0
    for name, record in saved.blocks.records.items():
        bad = saved.blocks.copy_blocks(record, np.zeros(record.nbytes, np.uint8))
        if bad:
            n_found += 1
            yield f"{saved.data_path}: {len(bad)} of {record.n_blocks} blocks of {name!r} are damaged"
    if n_found:
        return
    for place in range(saved.n_stores):
        if saved.store_record(place).get("kind") == "frames":
            arrays = {name: saved.blocks.read(f"store{place}.{name}") for name in ("starts", "chunks", "lengths")}
            path, size = saved.payload_file(place)
            _, chunks = payload_tables(arrays, len(arrays["lengths"]), size)
            for chunk in damaged_chunks(map_file(path, size), chunks):
                offset = chunks["offset"][chunk]
                n_found += 1
                yield f"{path}: observations at byte {offset} are damaged (store {place})"
    if n_found:
        return
    try:
        if saved.record.get("module", "").startswith("sb3_extra_buffers."):
            buffer = saved.load()
            if deep:
                yield from _read_all(buffer)
    except ExtraBuffersError as problem:
        yield str(problem)


def _read_all(buffer: Any) -> Iterator[str]:
    for name, view in views_of(buffer):
        for step in range(view.lead_shape[0] if view.lead_shape else 0):
            try:
                view[step]
            except CorruptPayloadError as problem:
                yield f"{name}[{step}]: {problem}"
    for key, store in vars(buffer).get("_stores", {}).items():
        yield from _read_device(store, key)


def _read_device(store: Any, key: str) -> Iterator[str]:
    from sb3_extra_buffers.stores.device_observation import CellBatch

    n_cells = store.n_cells * store.n_sets
    for first in range(0, n_cells, store.n_streams):
        try:
            store.read(CellBatch(np.arange(first, first + store.n_streams)[None]))
        except CorruptPayloadError as problem:
            yield f"observations.{key}, cell {first}: {problem}"


def views_of(buffer: Any) -> Iterator[tuple[str, StoreView]]:
    """The views that a buffer keeps its observations in, by name."""
    if isinstance(buffer, StoreView):
        yield "array", buffer
        return
    for name, value in vars(buffer).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for key, part in parts:
            if isinstance(part, StoreView):
                yield f"{name}.{key}" if key else name, part


# ---- repair ----


def repair(path: str | os.PathLike[str], target: str | os.PathLike[str], kind: type[Any] | None = None) -> Repair:
    """Save what is whole of ``path`` as ``target``: the longest run of steps without damage, or an array without the
    observations that are lost. ``path`` itself is left as it is.
    """
    source, report = Path(path), Repair(Path(target))
    problems: list[ExtraBuffersError] = []
    for name in (manifest.NAME, manifest.PREVIOUS):
        try:
            record = manifest.newest(source) if name == manifest.NAME else manifest.read(source, name)
            buffer = _Salvage(SavedBuffer(source, record), report).run(kind)
        except ExtraBuffersError as problem:
            problems.append(problem)
            report.findings.append(f"{name}: {problem}")
            continue
        save(buffer, target)
        return report
    raise DamagedFileError(f"{source} cannot be repaired: {problems[0]}") from problems[0]


class _Salvage:
    """Reads what can be read."""

    def __init__(self, saved: SavedBuffer, report: Repair) -> None:
        self.saved, self.report = saved, report
        self.bad_rows: dict[str, Flags] = {}

    def run(self, kind: type[Any] | None) -> Any:
        kind = self.saved.find_class(kind)
        pairs = [self._store(place) for place in range(self.saved.n_stores)]
        decoder = self.saved.decoder([store for store, _ in pairs])
        decoder._read_array = lambda name: self._read(f"state.{name}")[0]
        buffer = make_buffer(kind, self.saved.record.get("state"), decoder)
        bad = {id(store): cells for store, cells in pairs}
        if not self.report.findings:
            return self._with_journal(self.saved.load(kind, replayed=False))
        if isinstance(buffer, StoreView):
            return self._without_lost(buffer, bad[id(buffer.store)])
        return self._longest_run(buffer, bad)

    def _with_journal(self, buffer: Any) -> Any:
        """Do again what the journal tells of, as far as it is whole."""
        if self.saved.journal is not None:
            from sb3_extra_buffers.files.live import replay

            try:
                replay(buffer, self.saved.journal)
            except DamagedFileError as problem:
                self.report.findings.append(f"{problem}; the steps before it are kept")
        if not isinstance(buffer, StoreView):
            self.report.n_steps = buffer.size() * buffer.n_envs
        return buffer

    def _read(self, name: str) -> tuple[Array, Flags]:
        """An array as far as it is whole, and which bytes of it are not."""
        blocks = self.saved.blocks
        record = blocks.records.get(name)
        if record is None:
            raise FileFormatError(f"there is no array {name!r}")
        out = blocks._room(record)
        bad = blocks.copy_blocks(record, out.reshape(-1).view(np.uint8))
        rows = _bad_rows(record, bad)
        if bad:
            self.report.findings.append(f"{name!r}: {len(bad)} of {record.n_blocks} blocks are damaged")
            self.bad_rows[name] = rows
        return out, rows

    def _store(self, place: int) -> tuple[ObservationStore, Flags]:
        """A store to read from, and the cells that are lost."""
        record = dict(self.saved.store_record(place))
        pairs = {str(name): self._read(f"store{place}.{name}") for name in record.get("arrays", [])}
        arrays = {name: array for name, (array, _) in pairs.items()}
        bad = {name: rows for name, (_, rows) in pairs.items()}
        record["options"] = self.saved.decoder([]).decode(record.get("options"))
        n_cells = int(record["n_cells"])
        if record.get("kind") == "frames":
            lost = self._mend_frames(record, arrays, bad, place)
        elif record.get("kind") == "dense":
            lost = bad["rows"] | bad["written"]
        else:
            if any(rows.any() for rows in bad.values()):
                raise DamagedFileError(f"the observations of store {place} are damaged, and too few to keep some")
            lost = np.zeros(n_cells, np.bool_)

        def fill(heap: Heap, slots: npt.NDArray[np.int32]) -> None:
            data = map_file(*self.saved.payload_file(place), private=True)
            heap.look_into(slots, data, arrays["starts"][slots])

        return put_together(record, arrays, fill, read_only=True), lost

    def _mend_frames(
        self, record: dict[str, Any], arrays: dict[str, Array], bad: dict[str, Flags], place: int
    ) -> Flags:
        """Drop segments that are damaged or that nobody can find; the cells that lose something by it."""
        lengths, counts, slots = arrays["lengths"], arrays["counts"], arrays["slots"]
        dead = np.zeros(len(lengths), np.bool_)
        for name in _OF_SEGMENTS:
            if name in bad:
                dead |= bad[name]
        empty = self._empty_store(record)
        streams = empty._state._asdict()
        if any(bad[name].any() for name in _OF_STREAMS):
            # what is open is lost, and streams begin anew
            dead |= (counts > 0) & (lengths == 0)
            arrays["stage"] = np.zeros(0, np.uint8)
        else:
            streams = split_streams(empty, arrays["streams"])
        scenes = arrays["scenes"]
        used = (scenes >= 0) & (scenes < len(arrays["scene_rows"]))
        dead[used] |= bad["scene_rows"][scenes[used]]
        dead |= self._unreadable(arrays, bad, dead, place)
        if dead.any():
            self.report.findings.append(f"store {place}: {int(dead.sum())} of {len(dead)} segments are lost")
        per = empty.per_segment
        ids = slots.astype(np.int64) - 1
        ids[bad["slots"]] = -1
        outside = ids >= len(dead) * per
        ids[outside] = -1
        lost: Flags = bad["slots"] | outside.any(axis=1) | ((ids >= 0) & dead[np.maximum(ids, 0) // per]).any(axis=1)
        slots[lost] = 0
        counts[dead] = 0
        lengths[dead] = 0
        opened = streams["open_segments"]
        if dead[opened[opened >= 0]].any():
            # their rooms lie one after the other: with one of them gone, so are all
            gone = (counts > 0) & (lengths == 0)
            counts[gone] = 0
            more = ((ids >= 0) & gone[np.maximum(ids, 0) // per]).any(axis=1)
            slots[more] = 0
            lost |= more
            arrays["stage"], streams = np.zeros(0, np.uint8), empty._state._asdict()
        frames = streams["recent_ids"]
        frames[(frames >= 0) & (counts[np.maximum(frames, 0) // per] == 0)] = NONE
        arrays["streams"] = join_streams(streams)
        return lost

    def _unreadable(self, arrays: dict[str, Array], bad: dict[str, Flags], dead: Flags, place: int) -> Flags:
        """Segments whose bytes are damaged, or have no checksum that could say so."""
        path, size = self.saved.payload_file(place)
        data, lengths = map_file(path, size), arrays["lengths"]
        out = dead.copy()
        sealed = np.flatnonzero((lengths > 0) & ~dead)
        table = arrays["chunks"]
        if bad["chunks"].any():
            arrays["chunks"] = table = table[~bad["chunks"]]
        _, chunks = payload_tables(arrays, len(lengths), size)
        broken = np.zeros(len(chunks), np.bool_)
        broken[damaged_chunks(data, chunks)] = True
        ends = chunks["offset"] + chunks["length"]
        for segment in sealed.tolist():
            start, length = arrays["starts"][segment : segment + 1], lengths[segment : segment + 1]
            try:
                check_extents(start, length, size)
            except FileFormatError:
                out[segment] = True
                continue
            places = chunks_of(start, length, chunks)
            places = places[places >= 0]
            inside = np.minimum(ends[places], start + length) - np.maximum(chunks["offset"][places], start)
            out[segment] = broken[places].any() or int(np.maximum(inside, 0).sum()) != int(length[0])
        return out

    def _empty_store(self, record: dict[str, Any]) -> FrameStore:
        """A store like the one that was saved, before anything was written to it."""
        spec = ObsSpec(tuple(record["shape"]), np.dtype(record["dtype"]))
        layout = StackLayout(spec, record["stack"], record["axis"])
        name, codec_id, config = record["codecs"][-1]
        codec = codec_from_config(name if is_available(name) else codec_id, config)
        return make_frame_store(layout, 0, record["n_streams"], codec)

    # ---- putting it together again ----

    def _without_lost(self, view: StoreView, lost: Flags) -> StoreView:
        cells = lost[view._table()]
        self.report.n_lost = int(cells.sum())
        self.report.n_steps = cells.size - self.report.n_lost
        fresh = _fresh_store(view.store)
        made = _like(view, fresh)
        for step in range(view.lead_shape[0] if view.lead_shape else 0):
            kept = ~cells[step]
            if kept.ndim == 0:
                if kept:
                    made[step] = view[step]
            elif kept.any():
                made[step, kept] = view[step, kept]
        return made

    def _longest_run(self, buffer: Any, bad: dict[int, Flags]) -> Any:
        """``buffer`` with the longest run of whole steps, oldest first, and nothing else."""
        if {id(view.store) for _, view in views_of(buffer)} != bad.keys() or hasattr(buffer, "_stores"):
            raise DamagedFileError("a buffer of a device is damaged, and cannot be cut")
        size, n_envs = buffer.buffer_size, buffer.n_envs
        lost = np.zeros(size, np.bool_)
        for _, view in views_of(buffer):
            if view.lead_shape == (size, n_envs):
                lost |= bad[id(view.store)][view._table()].any(axis=1)
            elif bad[id(view.store)].any():
                raise DamagedFileError("a rollout that was being read is damaged; save it before it is read")
        for name, rows in self.bad_rows.items():
            if name.startswith("state."):
                if len(rows) != size:
                    raise DamagedFileError(f"{name.removeprefix('state.')!r} is damaged, and belongs to every step")
                lost |= rows
        held = buffer.size() if hasattr(buffer, "next_observations") else buffer.pos or size * buffer.full
        oldest = (buffer.pos if buffer.full and hasattr(buffer, "next_observations") else 0) + getattr(
            buffer, "_n_evicted", 0
        )
        order = (oldest + np.arange(held)) % size
        first, count = _longest(~lost[order], from_start=not hasattr(buffer, "next_observations"))
        self.report.n_steps, self.report.n_lost = count * n_envs, (held - count) * n_envs
        return _cut(buffer, order[first : first + count])


def _bad_rows(record: ArrayRecord, bad: list[int]) -> Flags:
    """Which entries along the first axis lie in damaged blocks."""
    n_rows = record.shape[0] if record.shape else 1
    rows = np.zeros(n_rows, np.bool_)
    per_row = record.nbytes // max(n_rows, 1)
    for block in bad if per_row else []:
        rows[block * BLOCK // per_row : -(-(block + 1) * BLOCK // per_row)] = True
    return rows


def _longest(whole: Flags, from_start: bool) -> tuple[int, int]:
    """Begin and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], whole, [False]]).astype(np.int8)))
    runs = [(int(begin), int(end - begin)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    if from_start:
        runs = [run for run in runs if run[0] == 0]
    return max(runs, key=lambda run: run[1], default=(0, 0))


def _fresh_store(store: ObservationStore) -> ObservationStore:
    fresh = ObservationStore(store.spec, store.n_streams, store.method, store.options, store._heap_bytes)
    fresh.add_cells(store.n_cells)
    return fresh


def _like(view: StoreView, store: ObservationStore) -> StoreView:
    made = object.__new__(type(view))
    made.__dict__.update(vars(view))
    made.store = store
    return made


def _cut(buffer: Any, order: npt.NDArray[np.int64]) -> Any:
    """``buffer`` with the steps ``order``, from its beginning on."""
    size = buffer.buffer_size
    if any(type(value).__module__.startswith("sb3_extra_buffers._sb3.") and hasattr(value, "n_leaves")
           for value in vars(buffer).values()):  # fmt: skip
        raise DamagedFileError("steps are lost from a buffer with priorities, which cannot be cut")
    _move(buffer, order)
    for value in vars(buffer).values():
        for column in value.values() if isinstance(value, dict) else [value]:
            if isinstance(column, np.ndarray) and column.shape[:1] == (size,):
                kept = column[order]
                column[...] = 0
                column[: len(order)] = kept
    buffer.full = len(order) == size
    buffer.pos = 0 if buffer.full and hasattr(buffer, "next_observations") else len(order)
    if hasattr(buffer, "_n_evicted"):
        buffer._n_evicted = 0
    if hasattr(buffer, "ep_length"):
        _cut_episodes(buffer, int(order[0]) if len(order) else 0, len(order))
    return buffer


def _cut_episodes(buffer: Any, oldest: int, count: int) -> None:
    """HER: no goal may be taken from an episode that is not there as a whole."""
    size = buffer.buffer_size
    starts = (buffer.ep_start - oldest) % size
    whole = starts + buffer.ep_length <= count
    buffer.ep_length[~whole] = 0
    buffer.ep_start[:] = np.where(buffer.ep_length > 0, starts, buffer.ep_start)
    current = (buffer._current_ep_start - oldest) % size
    buffer._current_ep_start[:] = np.where(current < count, current, count % size)


def _move(buffer: Any, order: npt.NDArray[np.int64]) -> None:
    """Move the observations of the steps ``order`` to new stores, from the beginning on."""
    fresh: dict[int, ObservationStore] = {}
    moved: dict[str, list[tuple[StoreView, StoreView]]] = {}
    for name, view in list(views_of(buffer)):
        store = fresh.setdefault(id(view.store), _fresh_store(view.store))
        moved.setdefault(name.partition(".")[2], []).append((view, _like(view, store)))
    for pairs in moved.values():
        for to, step in enumerate(order.tolist()):
            # one after the other: next observations share the frames of the observations
            for view, made in pairs:
                made[to] = view[step]
    for name, value in list(vars(buffer).items()):
        if isinstance(value, StoreView):
            vars(buffer)[name] = _like(value, fresh[id(value.store)])
        elif isinstance(value, dict):
            for key, part in list(value.items()):
                if isinstance(part, StoreView):
                    dict.__setitem__(value, key, _like(part, fresh[id(part.store)]))
