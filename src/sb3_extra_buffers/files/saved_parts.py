"""Reads a saved folder or file; every size, offset and id is checked before it is used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import DamagedFileError, FileFormatError
from sb3_extra_buffers.files import disk, manifest, registry
from sb3_extra_buffers.files.blocks import MAGIC, ArrayRecord, BlockReader, SavedArrays, read_index
from sb3_extra_buffers.files.last_save import LastSave, set_last_save
from sb3_extra_buffers.files.parts import LoadedParts, record_from_json
from sb3_extra_buffers.files.payloads import PayloadCheck, SavedPayloads, fill_heap
from sb3_extra_buffers.files.step_records import replay
from sb3_extra_buffers.stores.arena import SLACK
from sb3_extra_buffers.stores.checks import entry, only_named_errors, whole
from sb3_extra_buffers.stores.file_heap import FileHeap
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.observation import ObservationStore

Array = npt.NDArray[Any]


@contextlib.contextmanager
def errors_about(path: Path) -> Iterator[None]:
    """Turn any error that the contents of ``path`` lead to into one that names ``path``."""
    try:
        with only_named_errors(str(path)):
            yield
    except FileFormatError as error:
        if str(path) in str(error):
            raise
        raise FileFormatError(f"{path}: {error}") from error


class SavedParts:
    """A saved folder or file: its manifest is read and its data mapped, but nothing is trusted yet."""

    def __init__(self, folder: Path, record: dict[str, Any], data_path: Path) -> None:
        self.folder, self.record, self.data_path = folder, record, data_path
        size = whole(entry(record, "data", "size"), "the size of a data file", len(MAGIC), 1 << 60)
        self.data = disk.map_file(data_path, size)
        if self.data[: len(MAGIC)].tobytes() != MAGIC:
            raise DamagedFileError(f"{data_path} is not a data file: it does not start with {MAGIC!r}")
        index = read_index(self.data, record.get("index"), data_path)
        self.stores: dict[str, dict[str, Any]] = entry(record, "stores", kind=dict)
        arrays = {f"columns/{name}": array for name, array in entry(record, "columns", kind=dict).items()}
        for name, store in self.stores.items():
            arrays |= {f"stores/{name}/{key}": array for key, array in entry(store, "arrays", kind=dict).items()}
        records = {name: ArrayRecord.from_json(array, len(index)) for name, array in arrays.items()}
        self.blocks = BlockReader(self.data, index, records, data_path)

    @classmethod
    def of_folder(cls, folder: Path, record: dict[str, Any] | None = None) -> SavedParts:
        """The state described by a folder's manifest, or by ``record``."""
        record = manifest.read(folder) if record is None else record
        with errors_about(folder):
            return cls(folder, record, folder / manifest.check_file_name(entry(record, "data", "name"), "data"))

    @classmethod
    def of_file(cls, path: Path) -> SavedParts:
        """The state in a single file."""
        with errors_about(path):
            return cls(path.parent, manifest.read_tail(path), path)

    @property
    def is_file(self) -> bool:
        """Whether this is a single file, whose manifest still has the name that it was written under."""
        return self.data_path.name != self.record["data"].get("name") or self.data_path.suffix != ".bin"

    @property
    def path(self) -> Path:
        """The folder, or the single file."""
        return self.data_path if self.is_file else self.folder

    @property
    def kind(self) -> str:
        return str(self.record.get("kind"))

    @property
    def journal(self) -> Path | None:
        """The journal of steps since this save, if the buffer is kept in the folder."""
        name = self.record.get("journal")
        return None if name is None else self.folder / manifest.check_file_name(name, "journal")

    def load(
        self, target: type[Any] | None = None, read_only: bool = False, in_file: bool = False, replayed: bool = True
    ) -> Any:
        """Rebuild what was saved, in memory, and replay its journal unless ``replayed`` is False.

        ``read_only`` leaves payloads in their file and ignores the journal. ``in_file`` continues in the heap files.
        """
        with errors_about(self.path):
            registry.check_target(self.record.get("kind"), target)
            payloads: dict[str, SavedPayloads] = {}
            stores = {name: self._load_store(name, payloads, read_only, in_file) for name in self.stores}
            loaded = registry.from_parts(self._parts(stores, target, read_only))
            if not read_only:
                self._remember(loaded, payloads)
                if self.journal is not None and replayed:
                    replay(loaded, self.journal)
            return loaded

    def read_parts(self, measured: bool = False) -> LoadedParts:
        """What was saved, read-only and without the class it was saved from.

        With ``measured``, `memory_usage` of the stores counts what they take when they are loaded.
        """
        with errors_about(self.path):
            registry.check_target(self.record.get("kind"), None)
            stores = {name: self.make_store(name, self._tables(name, True), True, measured)[0] for name in self.stores}
            return self._parts(stores, None, read_only=True)

    def _parts(self, stores: dict[str, ObservationStore], target: type[Any] | None, read_only: bool) -> LoadedParts:
        description = entry(self.record, "description", kind=dict)
        columns = {name: self.blocks.read(f"columns/{name}", not read_only) for name in self.record["columns"]}
        return LoadedParts(self.kind, description, columns, stores, target, read_only)

    def _tables(self, name: str, read_only: bool) -> dict[str, Array]:
        return {key: self.blocks.read(f"stores/{name}/{key}", not read_only) for key in self.stores[name]["arrays"]}

    def payload_file(self, name: str) -> tuple[Path, int]:
        """The file with the payloads of a store, and how many bytes of it were written."""
        heap = self.stores[name].get("heap")
        if heap is None:
            return self.data_path, self.data.size
        size = whole(entry(heap, "size"), "the size of a heap", SLACK, 1 << 60)
        return self.folder / manifest.check_file_name(entry(heap, "name"), "heap"), size

    def _load_store(
        self, name: str, payloads: dict[str, SavedPayloads], read_only: bool, in_file: bool
    ) -> ObservationStore:
        store, saved = self.make_store(name, self._tables(name, read_only), read_only)
        if saved is not None:
            payloads[name] = saved
            path, size = self.payload_file(name)
            frames = store.frames
            if in_file and frames is not None and path != self.data_path:
                _continue_in_file(frames, saved, path, size)
        return store

    def make_store(
        self, name: str, tables: dict[str, Array], read_only: bool, measured: bool = False
    ) -> tuple[ObservationStore, SavedPayloads | None]:
        """A store from its tables; if ``read_only``, payloads stay in the file and are checked when they are read.

        With ``measured``, it has the tables that writing needs, and no compiled kernels, which take longer to load.
        """
        path, size = self.payload_file(name)
        saved: list[SavedPayloads] = []

        def fill(heap: Heap, payload_ids: npt.NDArray[np.int32]) -> None:
            data = disk.map_file(path, size, private=read_only)
            saved.append(fill_heap(heap, payload_ids, tables, data, path, copied=not read_only))

        record = record_from_json(self.stores[name].get("record"))
        compiled = False if measured else None
        store = ObservationStore.from_parts(record, tables, fill, read_only and not measured, compiled)
        store.read_only = read_only
        frames = store.frames
        if read_only and frames is not None:
            frames.validator = PayloadCheck(frames, saved[0].chunks, frames.heap.data, path)
        return store, saved[0] if saved else None

    def _remember(self, loaded: Any, payloads: dict[str, SavedPayloads]) -> None:
        """Let the next save to the folder write only what is new; a single file is always written entirely."""
        if self.is_file:
            return
        whole(entry(self.record, "data", "live_bytes"), "the live bytes of a data file", stop=1 << 60)
        whole(entry(self.record, "number"), "the number of a save", stop=1 << 60)
        arrays = SavedArrays(self.blocks.records, self.blocks.index.copy(), self.blocks.fingerprints)
        set_last_save(loaded, LastSave(self.folder, self.record, arrays, payloads))


def _continue_in_file(frames: FrameStore, saved: SavedPayloads, path: Path, size: int) -> None:
    """Let a store append to the heap file that holds its payloads."""
    if os.stat(path, follow_symlinks=False).st_nlink > 1:
        raise FileFormatError(f"{path} is hard-linked from elsewhere and will not be written to; load() makes a copy")
    heap = FileHeap(path, frames.heap.limit)
    payload_ids = frames.heap.unsaved(everything=True)
    heap.attach(frames.heap, payload_ids, saved.starts[payload_ids], size - SLACK)
    heap.saved()
    frames.switch_heap(heap)
    saved.heap, saved.file = heap, path
