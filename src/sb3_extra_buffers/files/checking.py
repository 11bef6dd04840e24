"""Looking for damage in what was saved, and saving what is whole."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import CorruptPayloadError, DamagedFileError, ExtraBuffersError
from sb3_extra_buffers.files import disk, kinds, manifest
from sb3_extra_buffers.files.blocks import BLOCK, ArrayRecord
from sb3_extra_buffers.files.loading import SavedParts, make
from sb3_extra_buffers.files.mmap_buffer import replay
from sb3_extra_buffers.files.parts import LoadedParts
from sb3_extra_buffers.files.payloads import damaged_chunks, lost_indices
from sb3_extra_buffers.files.saving import OURS, save, save_file
from sb3_extra_buffers.stores.checks import only_named_errors
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]

# tables with one entry for each observation, in which a lost entry is that of a lost observation
_BY_OBS = ("slots", "rows", "written")
# states that a repair tries, newest first
_TRIES = 16


@dataclass
class Repair:
    """What a repair kept, and what it could not."""

    folder: Path
    n_steps: int = 0
    """Steps, or observations of an array, that are whole."""
    n_lost: int = 0
    findings: list[str] = field(default_factory=list)


class Cut(NamedTuple):
    """What a kind's ``cut(parts, bad_rows, bad_cells)`` says is left of damaged parts."""

    description: dict[str, Any]
    columns: dict[str, Array]
    indices: dict[str, list[Array]]
    """For each store, batches of cells to keep, in the order in which they were written."""
    n_kept: int
    n_lost: int


def verify(path: str | os.PathLike[str], deep: bool = False) -> Iterator[str]:
    """What is wrong with the saved folder or file ``path``, one finding at a time; nothing where all is well.

    ``deep`` also decodes every observation, where otherwise checksums and tables are looked at.
    """
    source, report = Path(path), Repair(Path(path))
    try:
        with only_named_errors(f"{path}"):
            saved = SavedParts.of_file(source) if source.is_file() else SavedParts.of_folder(source)
            _Salvage(saved, report)
            made = None if report.findings else saved.load()
            if deep and made is not None:
                yield from _read_all(made)
    except ExtraBuffersError as problem:
        report.findings.append(str(problem))
    yield from report.findings


def _read_all(made: Any) -> Iterator[str]:
    for name, store in kinds.parts_of(made).stores.items():
        for first in range(0, store.n_obs, store.n_streams):
            indices = np.arange(first, min(first + store.n_streams, store.n_obs))
            try:
                store.read(indices)
            except CorruptPayloadError as problem:
                yield f"{name}, observations {indices[0]} to {indices[-1]}: {problem}"


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


def repair(path: str | os.PathLike[str], target: str | os.PathLike[str], cls: type[Any] | None = None) -> Repair:
    """Save what is whole of ``path`` as ``target``: the longest run of steps without damage, or an array without the
    observations that are lost. ``path`` itself is left as it is.

    Where nothing of the last state can be kept, the one before it is tried, as far as the data file has it.
    """
    source, report = Path(path), Repair(Path(target))
    problems: list[ExtraBuffersError] = []
    for record in islice(_states(source, report), _TRIES):
        found = Repair(report.folder)
        try:
            with only_named_errors(f"{source}"):
                saved = SavedParts(source.parent, record, source) if source.is_file() else SavedParts.of_folder(
                    source, record
                )  # fmt: skip
                made = _Salvage(saved, found).run(cls)
                found.findings[:0] = report.findings
        except ExtraBuffersError as problem:
            problems.append(problem)
            report.findings.append(f"state {record.get('number')}: {problem}")
            continue
        (save_file if source.is_file() else save)(made, target)
        return found
    if not problems:
        raise DamagedFileError(f"{source} cannot be repaired: {'; '.join(report.findings) or 'nothing was found'}")
    raise DamagedFileError(f"{source} cannot be repaired: {problems[0]}") from problems[0]


def _states(source: Path, report: Repair) -> Iterator[dict[str, Any]]:
    """The manifests that can be found, newest first."""
    first = None
    try:
        first = manifest.read_tail(source) if source.is_file() else manifest.read(source)
        yield first
    except ExtraBuffersError as problem:
        if not source.exists():
            raise
        report.findings.append(str(problem))
    files = [source] if source.is_file() else sorted(source.glob("data-*.bin"), reverse=True)
    for path in files:
        if source.is_file() or OURS.fullmatch(path.name):
            try:
                yield from (record for record in manifest.copies(path) if record != first)
            except ExtraBuffersError as problem:
                report.findings.append(str(problem))


class _Salvage:
    """Reads what can be read, and says what cannot."""

    def __init__(self, saved: SavedParts, report: Repair) -> None:
        self.saved, self.report = saved, report
        names = saved.record["columns"]
        self.columns = {name: self._read(f"columns/{name}") for name in names}
        self.stores = {name: self._store(name) for name in saved.stores}

    def run(self, cls: type[Any] | None) -> Any:
        """What is left."""
        saved = self.saved
        kinds.check_target(saved.record.get("kind"), cls)
        if not self.report.findings:
            return self._with_journal(saved.load(cls, replayed=False))
        module = importlib.import_module(kinds.KINDS[saved.kind].maker.partition(":")[0])
        if not hasattr(module, "cut"):
            raise DamagedFileError(f"a damaged {saved.kind!r} cannot be cut to what is whole")
        columns = {name: column for name, (column, _) in self.columns.items()}
        stores = {name: store for name, (store, _) in self.stores.items()}
        bad_rows = {name: bad for name, (_, bad) in self.columns.items() if bad.any()}
        bad_indices = {name: lost for name, (_, lost) in self.stores.items()}
        parts = LoadedParts(saved.kind, saved.record["description"], columns, stores, cls)
        kept: Cut = module.cut(parts, bad_rows, bad_indices)
        self.report.n_steps, self.report.n_lost = kept.n_kept, kept.n_lost
        fresh = {name: _copy_indices(store, kept.indices[name]) for name, store in stores.items()}
        return make(LoadedParts(saved.kind, kept.description, kept.columns, fresh, cls))

    def _with_journal(self, made: Any) -> Any:
        """Do again what the journal tells of, as far as it is whole."""
        if self.saved.journal is not None:
            try:
                replay(made, self.saved.journal)
            except DamagedFileError as problem:
                self.report.findings.append(f"{problem}; the steps before it are kept")
        if not isinstance(made, StoreView) and hasattr(made, "n_envs"):
            self.report.n_steps = made.size() * made.n_envs
        return made

    def _read(self, name: str) -> tuple[Array, Flags]:
        """An array as far as it is whole, and which rows of it are not."""
        blocks = self.saved.blocks
        record = blocks.records[name]
        out = blocks.room(record)
        bad = blocks.copy_blocks(record, out.reshape(-1).view(np.uint8))
        if bad:
            self.report.findings.append(f"{name!r}: {len(bad)} of {record.n_blocks} blocks are damaged")
        return out, _bad_rows(record, bad)

    def _store(self, name: str) -> tuple[ObservationStore, Flags]:
        """A store to read from, and the cells that are lost: their entry in a table, or their payloads."""
        about = self.saved.stores[name]
        tables, lost = {}, np.zeros(int(about["record"]["n_cells"]), np.bool_)
        for key in about["arrays"]:
            tables[key], bad = self._read(f"stores/{name}/{key}")
            if bad.any() and (key not in _BY_OBS or len(bad) != len(lost)):
                raise DamagedFileError(f"{key!r} of {name} is damaged, and all of them depend on it")
            lost |= bad if bad.any() else False
        store, payloads = self.saved.make_store(name, tables, read_only=True)
        path, size = self.saved.payload_file(name)
        bad_chunks = [] if payloads is None else damaged_chunks(disk.map_file(path, size), payloads.chunks)
        if bad_chunks and payloads is not None and isinstance(store.inner, FrameStore):
            self.report.findings.append(f"{path}: {len(bad_chunks)} stretches of observations are damaged ({name})")
            lost |= lost_indices(store.inner, payloads.chunks, bad_chunks)
        return store, lost


def _bad_rows(record: ArrayRecord, bad: list[int]) -> Flags:
    """Which entries along the first axis lie in damaged blocks."""
    n_rows = record.shape[0] if record.shape else 1
    rows = np.zeros(n_rows, np.bool_)
    per_row = record.nbytes // max(n_rows, 1)
    for block in bad if per_row else []:
        rows[block * BLOCK // per_row : -(-(block + 1) * BLOCK // per_row)] = True
    return rows


def _copy_indices(store: ObservationStore, batches: list[Array]) -> ObservationStore:
    """A store like ``store`` with these cells alone."""
    fresh = ObservationStore(store.spec, store.n_streams, store.method, store.options, store.heap_bytes)
    fresh.allocate(store.n_obs)
    for indices in batches:
        indices = np.ascontiguousarray(indices, np.int64).reshape(-1)
        fresh.write(indices, indices % store.n_streams, store.read(indices))
    return fresh


def longest_run(whole: Flags, from_start: bool = False) -> tuple[int, int]:
    """Begin and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], whole, [False]]).astype(np.int8)))
    runs = [(int(begin), int(end - begin)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    if from_start:
        runs = [run for run in runs if run[0] == 0]
    return max(runs, key=lambda run: run[1], default=(0, 0))
