"""Loading: every size, offset and id is checked against what is there before it is used."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import DamagedFileError, FileFormatError
from sb3_extra_buffers.files import disk, kinds, manifest
from sb3_extra_buffers.files.blocks import MAGIC, ArrayRecord, BlockReader, SavedArrays, read_index
from sb3_extra_buffers.files.last_save import LastSave, set_last_save
from sb3_extra_buffers.files.parts import LoadedParts, record_from_json
from sb3_extra_buffers.files.payloads import PayloadCheck, SavedPayloads, fill_heap
from sb3_extra_buffers.stores.arena import SLACK
from sb3_extra_buffers.stores.checks import entry, only_named_errors, whole
from sb3_extra_buffers.stores.file_heap import FileHeap
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.observation import ObservationStore

Array = npt.NDArray[Any]

# how often to look again where a writer was faster
_TRIES = 5


def load(path: str | os.PathLike[str], target: type[Any] | None = None) -> Any:
    """What was saved as the folder ``path``, in memory; the next save to ``path`` writes only what is new.

    Args:
        path: The folder.
        target: The class to load; ``None`` for whichever of this library's classes it is.
    """
    folder = Path(path)
    for _ in range(_TRIES):
        saved = SavedParts.of_folder(folder)
        try:
            return saved.load(target)
        except DamagedFileError:
            # a buffer that lives there may have moved on meanwhile
            if manifest.read(folder).get("save_id") == saved.record.get("save_id"):
                raise
    raise FileFormatError(f"{folder} changes faster than it can be read")


def load_file(path: str | os.PathLike[str], target: type[Any] | None = None) -> Any:
    """What was saved as the file ``path``."""
    return SavedParts.of_file(Path(path)).load(target)


def open_saved(path: str | os.PathLike[str], target: type[Any] | None = None, mode: Literal["r", "r+"] = "r") -> Any:
    """What was saved as the folder ``path``, where it lies: payloads stay there until they are asked for.

    Mode ``"r"`` is for reading: any number of processes may do that at once, and what is read is checked when it is
    first touched. Of a buffer that lives in its file they see the last checkpoint. Mode ``"r+"`` goes on in the file,
    as ``storage="mmap"`` does; only one process may do that.
    """
    if mode not in ("r", "r+"):
        raise ValueError(f"mode must be 'r' or 'r+', got {mode!r}")
    if mode == "r":
        return SavedParts.of_folder(Path(path)).load(target, read_only=True)
    from sb3_extra_buffers.files.mmap_buffer import resume

    return resume(Path(path), target)


class SavedParts:
    """A saved folder or file: its manifest read, its data mapped, nothing believed yet."""

    def __init__(self, folder: Path, record: dict[str, Any], data_path: Path) -> None:
        self.folder, self.record, self.data_path = folder, record, data_path
        size = whole(entry(record, "data", "size"), "the size of a data file", len(MAGIC), 1 << 60)
        # the copy of the manifest that follows is of no interest here
        self.data = disk.map_file(data_path, size)
        if self.data[: len(MAGIC)].tobytes() != MAGIC:
            raise DamagedFileError(f"{data_path} does not begin as a data file does")
        index = read_index(self.data, record.get("index"), data_path)
        # a block outside the file is found when it is read
        self.stores: dict[str, dict[str, Any]] = {}
        listed = {f"columns/{name}": array for name, array in entry(record, "columns", kind=dict).items()}
        for name, about in entry(record, "stores", kind=dict).items():
            self.stores[name] = about
            listed |= {f"stores/{name}/{key}": array for key, array in entry(about, "arrays", kind=dict).items()}
        records = {name: ArrayRecord.from_json(array, len(index)) for name, array in listed.items()}
        self.blocks = BlockReader(self.data, index, records, data_path)

    @classmethod
    def of_folder(cls, folder: Path, record: dict[str, Any] | None = None) -> SavedParts:
        """The state that a folder's manifest speaks of, or ``record``."""
        record = manifest.read(folder) if record is None else record
        return cls(folder, record, folder / file_name(entry(record, "data", "name"), "data"))

    @classmethod
    def of_file(cls, path: Path) -> SavedParts:
        """The state that a single file holds."""
        return cls(path.parent, manifest.read_tail(path), path)

    @property
    def kind(self) -> str:
        return str(self.record.get("kind"))

    @property
    def journal(self) -> Path | None:
        """What happened since this was saved, for a buffer that lives in its folder."""
        name = self.record.get("journal")
        return None if name is None else self.folder / file_name(name, "journal")

    @only_named_errors("what was saved")
    def load(
        self, target: type[Any] | None = None, read_only: bool = False, in_file: bool = False, replayed: bool = True
    ) -> Any:
        """What was saved: in memory with what its journal adds, ``read_only`` as of the last checkpoint, or with its
        payloads in the files that they are in.
        """
        kinds.check_target(self.record.get("kind"), target)
        description = entry(self.record, "description", kind=dict)
        columns = {name: self.blocks.read(f"columns/{name}", not read_only) for name in self.record["columns"]}
        payloads: dict[str, SavedPayloads] = {}
        stores = {name: self._load_store(name, payloads, read_only, in_file) for name in self.stores}
        made = make(LoadedParts(self.kind, description, columns, stores, target, read_only))
        if read_only:
            return made
        self._remember(made, payloads)
        if self.journal is not None and replayed:
            from sb3_extra_buffers.files.mmap_buffer import replay

            replay(made, self.journal)
        return made

    def payload_file(self, name: str) -> tuple[Path, int]:
        """Where the payloads of a store are, and how much of that file was written."""
        heap = self.stores[name].get("heap")
        if heap is None:
            return self.data_path, self.data.size
        size = whole(entry(heap, "size"), "the size of a heap", SLACK, 1 << 60)
        return self.folder / file_name(entry(heap, "name"), "heap"), size

    def _load_store(
        self, name: str, payloads: dict[str, SavedPayloads], read_only: bool, in_file: bool
    ) -> ObservationStore:
        tables = {key: self.blocks.read(f"stores/{name}/{key}", not read_only) for key in self.stores[name]["arrays"]}
        store, found = self.make_store(name, tables, read_only)
        if found is not None:
            payloads[name] = found
            path, size = self.payload_file(name)
            if in_file and isinstance(store.inner, FrameStore) and path != self.data_path:
                self._stay_in_file(store.inner, found, path, size)
        return store

    def make_store(
        self, name: str, tables: dict[str, Array], read_only: bool
    ) -> tuple[ObservationStore, SavedPayloads | None]:
        """A store from its tables; ``read_only`` ones look into the file, and check what they read there."""
        path, size = self.payload_file(name)
        found: list[SavedPayloads] = []

        def fill(heap: Heap, payload_ids: npt.NDArray[np.int32]) -> None:
            data = disk.map_file(path, size, private=read_only)
            found.append(fill_heap(heap, payload_ids, tables, data, path, copied=not read_only))

        store = ObservationStore.from_parts(record_from_json(self.stores[name].get("record")), tables, fill, read_only)
        store.read_only = read_only
        if read_only and isinstance(store.inner, FrameStore):
            store.inner.validator = PayloadCheck(store.inner, found[0].chunks, store.inner.heap.data, path)
        return store, found[0] if found else None

    def _stay_in_file(self, inner: FrameStore, saved: SavedPayloads, path: Path, size: int) -> None:
        """Let a store write on in the file that its payloads are in; it is a regular file of this folder."""
        if os.stat(path, follow_symlinks=False).st_nlink > 1:
            raise FileFormatError(f"{path} has a second name elsewhere, and is not written to; load() makes a copy")
        heap = FileHeap(path, inner.heap.limit)
        payload_ids = inner.heap.unsaved(everything=True)
        heap.attach(inner.heap, payload_ids, saved.starts[payload_ids], size - SLACK)
        heap.saved()
        inner.switch_heap(heap)
        saved.heap, saved.file = heap, path

    def _remember(self, made: Any, payloads: dict[str, SavedPayloads]) -> None:
        if self.data_path.name != self.record["data"].get("name") or self.data_path.suffix != ".bin":
            return  # a single file is written as a whole
        whole(entry(self.record, "data", "live_bytes"), "the size of what is saved", stop=1 << 60)
        whole(entry(self.record, "number"), "the number of a save", stop=1 << 60)
        arrays = SavedArrays(self.blocks.records, self.blocks.index.copy(), self.blocks.fingerprints)
        set_last_save(made, LastSave(self.folder, self.record, arrays, payloads))


def make(parts: LoadedParts) -> Any:
    """What ``parts`` were taken from; whatever is wrong with them is an error of ours."""
    with only_named_errors(f"this {parts.kind}"):
        return kinds.make(parts)


def file_name(name: Any, kind: str) -> str:
    """``name``, if it is that of a file of the folder and of this kind, and not somewhere else."""
    number = r"\d{1,9}-" if kind == "heap" else ""
    if not isinstance(name, str) or not re.fullmatch(rf"{kind}-{number}\d{{4,9}}\.bin", name, re.ASCII):
        raise FileFormatError(f"{name!r} is no {kind} file of a saved buffer")
    return name
