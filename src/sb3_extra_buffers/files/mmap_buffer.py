"""Buffers kept in a folder (``storage="mmap"``): every completed step survives the process, however it ends."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from pathlib import Path
from typing import Any

import numpy.typing as npt

from sb3_extra_buffers.errors import DamagedFileError, ExtraBuffersError, FileWriteError, LayoutError, SharingError
from sb3_extra_buffers.files import disk, locking, manifest, registry
from sb3_extra_buffers.files.journal import Journal
from sb3_extra_buffers.files.locking import FolderLock
from sb3_extra_buffers.files.saved_parts import SavedParts
from sb3_extra_buffers.files.saving import Save, SaveReport, locked_snapshot
from sb3_extra_buffers.files.step_records import pack_step
from sb3_extra_buffers.stores.file_heap import FileHeap
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]

# records and bytes of a journal after which a checkpoint is made
_MAX_RECORDS = 1000
_MAX_JOURNAL_BYTES = 1 << 24
# dead bytes of a heap file that do not justify moving the live ones
_SPARE = 1 << 22

_folders: weakref.WeakSet[MmapFolder] = weakref.WeakSet()


def create_folder(buffer: Any, folder: Path) -> MmapFolder:
    """Create and lock ``folder`` for ``buffer``; `MmapFolder.prepare_step` makes the first checkpoint."""
    _check_can_map(buffer)
    with disk.named_errors(folder, f"creating {folder}"):
        disk.make_folder(folder)
        return MmapFolder(buffer, folder, FolderLock(folder))


def keep_in_file(buffer: Any, folder: Path) -> MmapFolder:
    """Keep ``buffer`` in ``folder`` from now on, which must be new, empty or hold an earlier save."""
    mmap_folder = create_folder(buffer, folder)
    mmap_folder.start()
    return mmap_folder


def resume(folder: Path, target: type[Any] | None) -> Any:
    """Load the buffer that is kept in ``folder``, and continue there."""
    SavedParts.of_folder(folder)  # raises before a lock file is created where nothing was saved
    with disk.named_errors(folder, f"opening {folder}"):
        lock = FolderLock(folder)
    buffer = SavedParts.of_folder(folder).load(target, in_file=True)
    _check_can_map(buffer)
    MmapFolder(buffer, folder, lock).start()
    return buffer


def check_new(path: str | os.PathLike[str]) -> Path:
    """``path``, if a new buffer can be kept there."""
    folder = Path(path)
    # a process killed before its first checkpoint leaves files that nothing refers to
    names = {entry.name for entry in folder.iterdir()} - {locking.NAME} if folder.is_dir() else set()
    is_free = manifest.NAME not in names and all(manifest.FILE_NAMES.fullmatch(name) for name in names)
    if folder.exists() and not (folder.is_dir() and is_free):
        raise FileWriteError(17, f"{folder} is not empty; load or open the buffer that is there, or choose a new path")
    if names and _holds_steps(folder):
        raise DamagedFileError(
            f"{folder / manifest.NAME} is missing, but steps were saved in {folder}; repair() may be able to restore "
            "them. To start over, choose a new path"
        )
    return folder


def _holds_steps(folder: Path) -> bool:
    """Whether steps were saved in a folder without a manifest; before the first checkpoint there are none."""
    newest = manifest.newest_copy(folder)
    return newest is not None and (
        newest.get("number") != 1 or any(path.lstat().st_size for path in folder.glob("journal-*.bin"))
    )


def _check_can_map(buffer: Any) -> None:
    if not isinstance(buffer, StoreView) and not hasattr(buffer, "next_observations"):
        raise LayoutError(
            f"a {type(buffer).__name__} cannot be kept in its folder, only arrays and replay buffers on the CPU can; "
            "load() it, and save() it after changes"
        )


class MmapFolder:
    """Keeps a folder up to date with a buffer, and locks it against other writers.

    Heaps write payloads directly to files. Everything else is saved at checkpoints, as `save` does it, and a journal
    records each step since. Nothing that the last manifest refers to is overwritten, so that manifest and its journal
    always describe a valid state.

    A buffer calls `prepare_step` before it changes anything, `record_step` last, and `undo_step` if the step fails.
    An array's store calls `record_change`.
    """

    def __init__(self, buffer: Any, folder: Path, lock: FolderLock) -> None:
        self._buffer = weakref.ref(buffer)
        self.folder, self._lock = folder, lock
        self._journal: Journal | None = None
        # next observations of the last step
        self._predicted: dict[str, Array] = {}
        # n_bytes and n_records of the journal and `_predicted` before the last record
        self._undo: tuple[int, int, dict[str, Array]] | None = None
        # observations in the stores at the last checkpoint; records at which to retry one that failed
        self._n_obs = self._retry_at = 0
        _folders.add(self)

    @property
    def buffer(self) -> Any:
        return self._buffer()

    def is_at(self, folder: Path) -> bool:
        return os.path.realpath(folder) == os.path.realpath(self.folder)

    def start(self, recover: bool = True) -> None:
        """Make the first checkpoint, and record every step from now on."""
        self.checkpoint(recover=recover)
        buffer = self.buffer
        buffer.mmap_folder = self
        if isinstance(buffer, StoreView):
            buffer.store.on_change = self.record_change

    def close(self) -> None:
        """Release the folder; the buffer continues in memory."""
        buffer = self.buffer
        if buffer is not None:
            for store in self._stores():
                store.make_heap = store.on_change = None
            buffer.mmap_folder = None
        if self._journal is not None:
            self._journal.close()
        self._lock.close()

    def forbid_writes(self) -> None:
        """Make the buffer read-only."""
        for store in self._stores():
            store.read_only = True

    def _stores(self) -> list[ObservationStore]:
        return list(registry.to_parts(self.buffer).stores.values())

    def _check_owner(self) -> None:
        if not self._lock.is_ours:
            raise SharingError(
                f"{self.folder} belongs to the process that opened it; load() the folder here, or pickle the buffer "
                "there, to work on a copy"
            )

    # ---- checkpoints ----

    def checkpoint(self, sync: bool = True, recover: bool = True) -> SaveReport:
        """Save everything and begin a new journal. In the middle of ``add`` there is nothing to ``recover``."""
        self._check_owner()
        buffer = self.buffer
        with buffer.lock, disk.named_errors(self.folder, f"saving to {self.folder}"):
            if recover:
                buffer.recover()
            self._update_heaps()
            journal = Journal(manifest.next_file(self.folder, "journal"))
            if sync:
                journal.flush()
            save: Save | None = None
            try:
                with locked_snapshot(buffer, recover) as snapshot:
                    save = Save(self.folder, snapshot, sync, journal.path.name)
                    return save.run()
            finally:
                if save is not None and save.is_committed():
                    self._begin_journal(journal, sum(store.n_obs for store in save.parts.stores.values()))
                else:
                    journal.close()
                    with contextlib.suppress(OSError):
                        disk.unlink(journal.path)

    def _begin_journal(self, journal: Journal, n_obs: int) -> None:
        if self._journal is not None:
            self._journal.close()
        self._journal, self._n_obs = journal, n_obs
        self._predicted, self._undo, self._retry_at = {}, None, 0

    def _update_heaps(self) -> None:
        """Move heaps to files, and the live payloads of mostly dead files to new ones."""
        for number, store in enumerate(self._stores()):
            store.make_heap = functools.partial(self._new_heap, number, store.heap_bytes)
            store.run_exclusively(functools.partial(self._update_heap, number, store))

    def _update_heap(self, number: int, store: ObservationStore) -> None:
        frames = store.frames
        if frames is None:
            return
        frames.collect_segments()
        heap = frames.heap
        if not isinstance(heap, FileHeap):
            frames.move_payloads(self._new_heap(number, store.heap_bytes))
        elif heap.dead_bytes > heap.live_bytes + _SPARE:
            file = manifest.next_file(self.folder, f"heap-{number}")
            frames.compact_heap(functools.partial(heap.compact, file))

    def _new_heap(self, number: int, limit: int | None) -> FileHeap:
        return FileHeap(manifest.next_file(self.folder, f"heap-{number}"), limit)

    # ---- steps ----

    def prepare_step(self) -> None:
        """Make a checkpoint if the journal is long. If that fails, the journal grows on, unless it is broken."""
        self._check_owner()
        self._undo, journal = None, self._journal
        if journal is None:
            self.start(recover=False)
        elif journal.broken:
            self.checkpoint(recover=False)
        elif journal.n_records >= max(_MAX_RECORDS, self._retry_at) or journal.n_bytes > _MAX_JOURNAL_BYTES:
            try:
                self.checkpoint(recover=False)
            except ExtraBuffersError:
                self._retry_at = journal.n_records + _MAX_RECORDS // 10

    def record_step(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Append a step to the journal; when this returns, it survives the process."""
        if self._journal is not None:
            self._append(*pack_step(self.buffer, self._predicted, obs, next_obs, action, reward, done, infos))

    def _append(self, fields: dict[str, Any], arrays: list[Array], predicted: dict[str, Array]) -> None:
        journal: Any = self._journal
        self._undo = journal.n_bytes, journal.n_records, self._predicted
        journal.append(fields, arrays)
        self._predicted = predicted

    def prepare_reset(self) -> None:
        """End the journal, which holds only steps: the next one is preceded by a checkpoint, whatever happens."""
        self._check_owner()
        if self._journal is not None:
            self._journal.broken = True

    def record_reset(self) -> None:
        """Save the buffer, from which everything was removed."""
        if self._journal is not None:
            self.checkpoint()

    def undo_step(self) -> None:
        """Remove the step that was recorded since `prepare_step`, if any."""
        undo, self._undo = self._undo, None
        if undo is not None and self._journal is not None:
            n_bytes, n_records, self._predicted = undo
            with contextlib.suppress(ExtraBuffersError):
                self._journal.truncate(n_bytes, n_records)

    def record_change(self, kind: str, *arrays: Array) -> None:
        """Append a change of an array's store to the journal."""
        self._check_owner()
        if self._journal is not None:
            # an array that shares the store was made since: the journal's indices mean the smaller store
            if self._journal.broken or self.buffer.store.n_obs != self._n_obs:
                self.checkpoint()
            try:
                self._append({"kind": kind}, list(arrays), {})
            except BaseException:
                self.undo_step()
                raise


def _forbid_writes_in_child() -> None:
    """A forked child shares the pages of heap files: it may only read them."""
    for folder in list(_folders):
        with contextlib.suppress(Exception):
            folder.forbid_writes()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forbid_writes_in_child)
