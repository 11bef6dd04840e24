"""Saves to a folder or file: append what is new, then replace the manifest."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sb3_extra_buffers import __version__
from sb3_extra_buffers.errors import ExtraBuffersError, FileWriteError, UnsupportedVersionError
from sb3_extra_buffers.files import disk, manifest, registry
from sb3_extra_buffers.files.blocks import Appender, NamedArray, put_arrays
from sb3_extra_buffers.files.last_save import LastSave, get_last_save, set_last_save
from sb3_extra_buffers.files.locking import SaveLock, lock_if_used
from sb3_extra_buffers.files.parts import Parts, check_parts, record_to_json
from sb3_extra_buffers.files.payloads import SavedPayloads, checksum_heap, put_payloads
from sb3_extra_buffers.stores.arena import SLACK
from sb3_extra_buffers.stores.base import StoreParts
from sb3_extra_buffers.stores.file_heap import FileHeap
from sb3_extra_buffers.stores.reentry import writes

# dead bytes of a data file that do not justify writing a new one
_SPARE = 1 << 22


class SaveReport(NamedTuple):
    """What a save did.

    Examples:
        >>> from sb3_extra_buffers.compressed import CompressedArray
        >>> from sb3_extra_buffers.files import save
        >>> array = CompressedArray(1000, (84, 84))
        >>> first, second = save(array, "frames"), save(array, "frames")
        >>> first.incremental, second.incremental
        (False, True)
    """

    folder: Path
    """The folder."""
    n_bytes: int
    """Bytes written."""
    incremental: bool
    """Whether it appended to the last save."""


@writes
def save(
    saved: Any, path: str | os.PathLike[str], base: str | os.PathLike[str] | None = None, sync: bool = True
) -> SaveReport:
    """Save a buffer or array as the folder ``path``; the previous save stays intact until this one is complete.

    A second save to the same folder writes only what is new. So does a save to a new folder with ``base``, the folder
    of the last save: the two share files by hard links, and either may be deleted.

    Args:
        saved: A compressed buffer or array, or anything else in `files.registry`.
        path: The folder, created if needed.
        base: The folder of the last save, to share files with.
        sync: Whether to wait until everything is on the disk. Without it, a save survives the end of the process but
            not a power cut.

    Examples:
        >>> from sb3_extra_buffers.compressed import CompressedArray
        >>> from sb3_extra_buffers.files import load, save
        >>> report = save(CompressedArray(1000, (84, 84)), "frames")
        >>> load("frames").shape
        (1000, 84, 84)
    """
    folder = Path(path)
    mmap_folder = getattr(saved, "mmap_folder", None)
    if mmap_folder is not None and mmap_folder.is_at(folder):
        report: SaveReport = mmap_folder.checkpoint(sync)
        return report
    with locked_snapshot(saved) as snapshot, disk.named_errors(folder, f"saving to {folder}"):
        return Save(folder, snapshot, sync).run(None if base is None else Path(base))


@writes
def save_file(saved: Any, path: str | os.PathLike[str], sync: bool = True) -> Path:
    """Save a buffer, array or recording as the single file ``path``, replaced when everything is written.

    Args:
        saved: What to save.
        path: The file.
        sync: Whether to wait until everything is on the disk.

    Examples:
        >>> from sb3_extra_buffers.compressed import CompressedArray
        >>> from sb3_extra_buffers.files import load_file, save_file
        >>> path = save_file(CompressedArray(1000, (84, 84)), "frames.seb")
        >>> load_file(path).shape
        (1000, 84, 84)
    """
    target = Path(path)
    staged = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    with locked_snapshot(saved) as snapshot, disk.named_errors(target, f"saving to {target}"):
        disk.make_folder(target.parent)
        out = Appender(staged, new=True)
        try:
            Save(target.parent, snapshot, sync).write(out, None)
            out.flush(sync)
            out.close()
            disk.replace(staged, target)
        except BaseException:
            out.undo()
            raise
        if sync:
            disk.sync_folder(target.parent)
    return target


class Snapshot(NamedTuple):
    """The parts of an object, and those of its stores."""

    saved: Any
    """The object; in a signal handler that interrupted a step, a copy without that step."""
    parts: Parts
    stores: dict[str, StoreParts]


@contextlib.contextmanager
def locked_snapshot(saved: Any, recover: bool = True) -> Iterator[Snapshot]:
    """The parts of ``saved``, locked against changes by other threads; ``recover`` from an interrupted step first."""
    with contextlib.ExitStack() as locks:
        locks.enter_context(getattr(saved, "lock", contextlib.nullcontext()))
        if recover and hasattr(saved, "_unchanging"):
            # in a signal handler, perhaps a copy
            saved = locks.enter_context(saved._unchanging())
        elif recover and hasattr(saved, "recover"):
            saved.recover()
        parts = registry.to_parts(saved)
        check_parts(parts)
        for store in parts.stores.values():
            locks.enter_context(store.lock)
        yield Snapshot(saved, parts, {name: store.to_parts() for name, store in parts.stores.items()})


class Save:
    """One save of a snapshot to a folder or file; ``journal`` names that of a buffer that is kept in the folder."""

    def __init__(self, folder: Path, snapshot: Snapshot, sync: bool, journal: str | None = None) -> None:
        self.folder, self.sync, self.journal = folder, sync, journal
        self.saved, self.parts, self.stores = snapshot
        self.save_id = secrets.token_hex(8)
        self.number = 1

    def run(self, base: Path | None = None) -> SaveReport:
        """Save to the folder."""
        if not self.folder.exists():
            disk.make_folder(self.folder)
        # a buffer that is kept in the folder holds its lock already
        folder_lock = contextlib.nullcontext() if self.journal else lock_if_used(self.folder)
        with folder_lock, SaveLock(self.folder):
            current = _current_manifest(self.folder)
            last = self._reusable(current.get("save_id"), base)
            numbers = [record.get("number") for record in (current, {} if last is None else last.record)]
            self.number = 1 + max(number if type(number) is int else 0 for number in numbers)
            is_shared = last is not None and last.folder != self.folder
            out = None if last is None else self._append_to(last)
            if out is None:
                last, out = None, Appender(manifest.next_file(self.folder, "data"), new=True)
            try:
                record, this = self.write(out, last)
                out.flush(self.sync)
                if self.sync and (last is None or is_shared or self.journal):
                    # the names of the files must be on the disk before a manifest that refers to them
                    disk.sync_folder(self.folder)
                manifest.write(self.folder, manifest.dump(record), self.sync)
            except BaseException:
                if not self.is_committed():
                    out.undo()
                raise
            # committed: the folder holds this state, even if something below fails
            out.close()
            for part in self.stores.values():
                if part.inner is not None:
                    part.inner.saved()
            set_last_save(self.saved, this)
            if self.sync:
                disk.sync_folder(self.folder)
            self._delete_unused(record)
        return SaveReport(self.folder, out.n_bytes, last is not None)

    def _append_to(self, last: LastSave) -> Appender | None:
        """The data file of the last save, to append to; None if that is impossible, and a new one must be written."""
        path = self.folder / last.data_name
        if last.folder != self.folder:
            try:
                disk.link(last.folder / last.data_name, path)
            except OSError:
                return None
        return Appender.reopen(path, last.record["data"]["size"])

    def is_committed(self) -> bool:
        """Whether the folder holds this save. After an interrupt, only the disk can tell."""
        with contextlib.suppress(ExtraBuffersError):
            return manifest.read(self.folder).get("save_id") == self.save_id
        return False

    def _reusable(self, current_id: Any, base: Path | None) -> LastSave | None:
        """The last save, if this one can append to it."""
        last = get_last_save(self.saved)
        if last is None or last.record["data"]["size"] > 2 * last.record["data"]["live_bytes"] + _SPARE:
            return None
        if last.folder != self.folder:
            if base is None or last.folder != base:
                return None
            current_id = None
            with contextlib.suppress(ExtraBuffersError):
                current_id = manifest.read(base).get("save_id")
        return last if current_id == last.record["save_id"] else None

    def write(self, out: Appender, last: LastSave | None) -> tuple[dict[str, Any], LastSave]:
        """Append everything that is new, the index and a copy of the manifest; return the manifest and this save."""
        payloads: dict[str, SavedPayloads] = {}
        stores: dict[str, Any] = {}
        arrays = [NamedArray(f"columns/{name}", column) for name, column in self.parts.columns.items()]
        for name, part in self.stores.items():
            stores[name], tables = self._put_store(out, name, part, last, payloads)
            arrays += tables
        written, index = put_arrays(out, arrays, None if last is None else last.arrays)
        array_json = {name: array.to_json() for name, array in written.records.items()}
        for name, store in stores.items():
            store["arrays"] = {key: array_json[f"stores/{name}/{key}"] for key in store["arrays"]}
        payload_bytes = sum(saved.heap.live_bytes for saved in payloads.values() if saved.file is None)
        record: dict[str, Any] = {
            "format": manifest.FORMAT,
            "version": manifest.VERSION,
            "library": __version__,
            "saved": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "save_id": self.save_id,
            "number": self.number,
            "kind": self.parts.kind,
            "description": self.parts.description,
            "data": {"name": out.path.name, "size": out.end, "live_bytes": written.live_bytes + payload_bytes},
            "columns": {name: array_json[f"columns/{name}"] for name in self.parts.columns},
            "stores": stores,
            "index": index,
        } | ({} if self.journal is None else {"journal": self.journal})
        text = manifest.dump(record)
        out.put(manifest.tail(text, out.put(text)))
        # the next save appends behind this copy
        extended = record | {"data": {**record["data"], "size": out.end}}
        return record, LastSave(self.folder, extended, written, payloads)

    def _put_store(
        self, out: Appender, name: str, part: StoreParts, last: LastSave | None, payloads: dict[str, SavedPayloads]
    ) -> tuple[dict[str, Any], list[NamedArray]]:
        """Write the payloads of a store; return its entry of the manifest and its tables."""
        entry: dict[str, Any] = {"record": record_to_json(part.record)}
        tables, dirty_pages = dict(part.arrays), {}
        if part.heap is not None and part.inner is not None:
            known = None if last is None else last.stores.get(name)
            if self.journal is not None and isinstance(part.heap, FileHeap):
                if self.sync:
                    disk.flush(part.heap)
                saved = checksum_heap(part.heap, known)
                entry["heap"] = {"name": part.heap.file.name, "size": part.heap.end + SLACK}
            else:
                saved = put_payloads(out, part.heap, known)
            payloads[name] = saved
            tables |= saved.tables
            if known is not None and known.heap is part.heap and known.file == saved.file:
                # chunks are only ever appended
                dirty_pages = part.inner.pages_to_save() | {"chunks": np.zeros(0, np.int64)}
        entry["arrays"] = list(tables)
        arrays = [NamedArray(f"stores/{name}/{key}", table, dirty_pages.get(key)) for key, table in tables.items()]
        return entry, arrays

    def _delete_unused(self, record: dict[str, Any]) -> None:
        """Delete the files of earlier saves, now that no manifest on the disk refers to them."""
        used = {record["data"]["name"], record.get("journal"), manifest.NAME, "lock"}
        used |= {store["heap"]["name"] for store in record["stores"].values() if "heap" in store}
        for name in os.listdir(self.folder):
            if name not in used and manifest.FILE_NAMES.fullmatch(name):
                with contextlib.suppress(OSError):
                    disk.unlink(self.folder / name)


def _current_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in ``folder``, empty if there is none; an error if the folder holds other files."""
    if not folder.exists():
        return {}
    if not folder.is_dir():
        raise FileWriteError(17, f"{folder} is a file; a buffer is saved as a folder: choose another path")
    others = [name for name in os.listdir(folder) if not manifest.FILE_NAMES.fullmatch(name)]
    if others:
        raise FileWriteError(17, f"{folder} holds other files, such as {others[0]!r}; save to a folder of its own")
    try:
        return manifest.read(folder)
    except UnsupportedVersionError:
        raise
    except ExtraBuffersError:
        return {}
