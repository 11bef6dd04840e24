"""Finds damage in what was saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import CorruptPayloadError, DamagedFileError, ExtraBuffersError
from sb3_extra_buffers.files import disk, manifest, registry
from sb3_extra_buffers.files.blocks import BLOCK, ArrayRecord
from sb3_extra_buffers.files.payloads import damaged_chunks, lost_indices
from sb3_extra_buffers.files.saved_parts import SavedParts, errors_about
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.timeline import TimelineStore

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]

# tables with a row per observation: a damaged row loses one observation, not all
_BY_OBS = ("slots", "rows", "written", "places")


def verify(path: str | os.PathLike[str], deep: bool = False) -> Iterator[str]:
    """Yield everything that is wrong with the saved folder or file ``path``; nothing if it is intact.

    Raises `FileFormatError` if ``path`` is not a saved folder or file.

    Args:
        path: The folder or file.
        deep: Whether to decode every observation too, not only check checksums and tables.

    Examples:
        >>> from sb3_extra_buffers.compressed import CompressedArray
        >>> from sb3_extra_buffers.files import save, verify
        >>> report = save(CompressedArray(1000, (84, 84)), "frames")
        >>> list(verify("frames"))
        []
    """
    source = Path(path)
    manifest.check_is_saved(source)
    findings: list[str] = []
    try:
        with errors_about(source):
            saved = SavedParts.of_file(source) if source.is_file() else SavedParts.of_folder(source)
            findings += DamageScan(saved).findings
            loaded = None if findings else saved.load()
            if deep and loaded is not None:
                yield from _decode_all(loaded)
    except ExtraBuffersError as error:
        findings.append(str(error))
    yield from findings


def _decode_all(loaded: Any) -> Iterator[str]:
    for name, store in registry.to_parts(loaded).stores.items():
        if store.inner is None:
            # nothing is encoded yet
            continue
        # only what was written: a small file may have space for any number of observations
        written = store.inner.find_written()
        written = np.arange(store.n_obs) if written is None else written
        for indices in np.split(written, np.flatnonzero(np.diff(written // store.n_streams)) + 1):
            try:
                store.read(indices)
            except CorruptPayloadError as error:
                yield f"{name}, observations {indices[0]} to {indices[-1]}: {error}"


class DamageScan:
    """Reads everything that is readable in a save, and lists the damage as `findings`."""

    def __init__(self, saved: SavedParts) -> None:
        self.saved = saved
        self.findings: list[str] = []
        #: Columns with flags of their damaged rows, and read-only stores with flags for `lost`.
        self.columns = {name: self._read(f"columns/{name}") for name in saved.record["columns"]}
        self.stores = {name: self._read_store(name) for name in saved.stores}

    def _read(self, name: str) -> tuple[Array, Flags]:
        record = self.saved.blocks.records[name]
        array, bad = self.saved.blocks.read_valid(record)
        if bad:
            self.findings.append(f"{name!r}: {len(bad)} of {record.n_blocks} blocks are damaged")
        return array, _bad_rows(record, bad)

    def lost(self, name: str) -> Flags:
        """Flags of the observations of a store that are lost."""
        store, parts = self.stores[name]
        lost = np.zeros(store.n_obs, np.bool_)
        for part in parts:
            lost |= part
        return lost

    def _read_store(self, name: str) -> tuple[ObservationStore, list[Flags]]:
        entry = self.saved.stores[name]
        record, tables, bad_of = entry["record"], {}, {}
        for key in entry["arrays"]:
            tables[key], bad_of[key] = self._read(f"stores/{name}/{key}")
        apart = ("rows", "aside") if record.get("kind") == "timeline" else ()
        damaged = {key: bad for key, bad in bad_of.items() if bad.any() and key not in apart}
        for key, bad in damaged.items():
            if key not in _BY_OBS or len(bad) != record["n_cells"]:
                raise DamagedFileError(f"the table {key!r} of {name} is damaged, and every observation depends on it")
        store, payloads = self.saved.make_store(name, tables, read_only=True)
        lost = [*damaged.values()]
        if isinstance(store.inner, TimelineStore):
            lost.append(store.inner.lost_indices(bad_of["rows"], bad_of["aside"]))
        path, size = self.saved.payload_file(name)
        frames = store.frames
        if payloads is not None and frames is not None:
            bad_chunks = damaged_chunks(disk.map_file(path, size), payloads.chunks)
            if bad_chunks:
                self.findings.append(
                    f"{path}: {len(bad_chunks)} of {len(payloads.chunks)} chunks of {name} are damaged"
                )
                lost.append(lost_indices(frames, payloads.chunks, bad_chunks))
        return store, lost


def _bad_rows(record: ArrayRecord, bad_blocks: list[int]) -> Flags:
    """Flags of the entries along the first axis that are in damaged blocks."""
    n_rows = record.shape[0] if record.shape else 1
    rows = np.zeros(n_rows, np.bool_)
    per_row = record.nbytes // max(n_rows, 1)
    for block in bad_blocks if per_row else []:
        rows[block * BLOCK // per_row : -(-(block + 1) * BLOCK // per_row)] = True
    return rows
