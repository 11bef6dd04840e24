"""Saving: append what is new, then put the new manifest in the old one's place."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sb3_extra_buffers import __version__
from sb3_extra_buffers.errors import ExtraBuffersError, FileWriteError, UnsupportedVersionError
from sb3_extra_buffers.files import disk, manifest
from sb3_extra_buffers.files.blocks import Appender, NamedArray, put_arrays
from sb3_extra_buffers.files.kinds import parts_of
from sb3_extra_buffers.files.last_save import LastSave, get_last_save, set_last_save
from sb3_extra_buffers.files.locking import hold_if_locked
from sb3_extra_buffers.files.parts import Parts, check_parts, record_to_json
from sb3_extra_buffers.files.payloads import SavedPayloads, count_payloads, put_payloads
from sb3_extra_buffers.stores.arena import SLACK
from sb3_extra_buffers.stores.base import StoreParts
from sb3_extra_buffers.stores.file_heap import FileHeap

#: names that files in a saved folder can have; nothing else in it is ever opened or deleted
OURS = re.compile(r"data-\d{4,9}\.bin|heap-\d{1,9}-\d{4,9}\.bin|journal-\d{4,9}\.bin|manifest\.json(\.tmp)?|lock")
# dead bytes that are not worth writing everything anew for
_SPARE = 1 << 22


class SaveReport(NamedTuple):
    """What a save did."""

    folder: Path
    n_bytes: int
    """Bytes written."""
    incremental: bool
    """Whether most of it was there already."""


def save(
    saved: Any, path: str | os.PathLike[str], base: str | os.PathLike[str] | None = None, sync: bool = True
) -> SaveReport:
    """Save a buffer or array as the folder ``path``; what was saved there before stays whole until the new state is.

    A second save to the same folder writes what is new. So does one to a new folder with ``base``, the folder of
    the last save: the two then share their files as far as these agree, by links, and either may be deleted.

    Args:
        saved: A compressed buffer or array, or anything else that `files.kinds` knows.
        path: The folder; it is made if it is not there.
        base: The folder of the last save, to share files with.
        sync: Whether to wait until everything is on the disk. Without it, a save survives the end of the process but
            not the end of the power.
    """
    folder = Path(path)
    live = getattr(saved, "_live", None)
    if live is not None and live.lives_in(folder):
        report: SaveReport = live.checkpoint(sync)
        return report
    with state_of(saved) as (parts, taken), disk.named_errors(folder, f"saving to {folder}"):
        return Save(saved, folder, parts, taken, sync).run(None if base is None else Path(base))


def save_file(saved: Any, path: str | os.PathLike[str], sync: bool = True) -> Path:
    """Save a buffer, array or recording as the single file ``path``, which is replaced when all is written."""
    target = Path(path)
    staged = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    with state_of(saved) as (parts, taken), disk.named_errors(target, f"saving to {target}"):
        disk.make_folder(target.parent)
        writing = Save(saved, target.parent, parts, taken, sync)
        out = Appender(staged, new=True)
        try:
            writing.write(out, None)
            out.flush(sync)
            out.close()
            disk.replace(staged, target)
        except BaseException:
            out.undo()
            raise
        if sync:
            disk.sync_folder(target.parent)
    return target


@contextlib.contextmanager
def state_of(saved: Any, recover: bool = True) -> Iterator[tuple[Parts, dict[str, StoreParts]]]:
    """What ``saved`` is made of, which nobody changes meanwhile; ``recover`` it from a step that was interrupted."""
    with getattr(saved, "_lock", None) or contextlib.nullcontext(), contextlib.ExitStack() as locks:
        if recover and hasattr(saved, "_recover"):
            saved._recover()
        parts = parts_of(saved)
        check_parts(parts)
        for store in parts.stores.values():
            locks.enter_context(store.lock)
        yield parts, {name: store.to_parts() for name, store in parts.stores.items()}


class Save:
    """One save of parts to a folder, or to a file."""

    def __init__(
        self,
        saved: Any,
        folder: Path,
        parts: Parts,
        taken: dict[str, StoreParts],
        sync: bool,
        journal: str | None = None,
    ) -> None:
        self.saved, self.folder, self.parts, self.taken = saved, folder, parts, taken
        self.sync, self.journal = sync, journal
        self.save_id = secrets.token_hex(8)
        self.number = 1

    def run(self, base: Path | None = None) -> SaveReport:
        """Save to the folder; the caller has its lock if it lives there."""
        with contextlib.nullcontext() if self.journal else hold_if_locked(self.folder):
            there = _look_at(self.folder)
            last = self._usable(there.get("save_id"), base)
            numbers = [about.get("number") for about in (there, {} if last is None else last.record)]
            self.number = 1 + max(number if type(number) is int else 0 for number in numbers)
            if not self.folder.exists():
                disk.make_folder(self.folder)
            shared = last is not None and last.folder != self.folder
            if last is not None and shared:
                try:
                    # a second name for what is there
                    disk.link(last.folder / last.data_name, self.folder / last.data_name)
                except OSError:
                    last = None
            path = next_file(self.folder, "data") if last is None else self.folder / last.data_name
            out = Appender(path, new=last is None)
            try:
                record, new = self.write(out, last)
                out.flush(self.sync)
                if self.sync and (last is None or shared or self.journal):
                    # no manifest may be on the disk before the names of the files that it speaks of
                    disk.sync_folder(self.folder)
                manifest.replace(self.folder, manifest.dump(record), self.sync)
            except BaseException:
                if not self.counts():
                    out.undo()
                raise
            # from here on this is the state, whatever becomes of the rest
            out.close()
            for part in self.taken.values():
                if part.inner is not None:
                    part.inner.saved()
            set_last_save(self.saved, new)
            if self.sync:
                disk.sync_folder(self.folder)
            self._remove_others(record)
        return SaveReport(self.folder, out.n_bytes, last is not None)

    def counts(self) -> bool:
        """Whether the folder holds this save; only the disk knows, if something interrupted the renaming."""
        with contextlib.suppress(ExtraBuffersError):
            return manifest.read(self.folder).get("save_id") == self.save_id
        return False

    def _usable(self, there: Any, base: Path | None) -> LastSave | None:
        """The last save, if what it wrote can be built upon."""
        last = get_last_save(self.saved)
        if last is None or last.record["data"]["size"] > 2 * last.record["data"]["live_bytes"] + _SPARE:
            return None
        if last.folder != self.folder:
            if base is None or last.folder != base:
                return None
            there = None
            with contextlib.suppress(ExtraBuffersError):
                there = manifest.read(base).get("save_id")
        return last if there == last.record["save_id"] else None

    def write(self, out: Appender, last: LastSave | None) -> tuple[dict[str, Any], LastSave]:
        """Append everything that is new, the index, and a copy of the manifest."""
        payload_bytes = 0
        made: dict[str, SavedPayloads] = {}
        stores: dict[str, Any] = {}
        arrays = [NamedArray(f"columns/{name}", column) for name, column in self.parts.columns.items()]
        for name, part in self.taken.items():
            about: dict[str, Any] = {"record": record_to_json(part.record)}
            tables, dirty_pages = dict(part.arrays), {}
            if part.heap is not None and part.inner is not None:
                known = None if last is None else last.stores.get(name)
                if self.journal is not None and isinstance(part.heap, FileHeap):
                    if self.sync:
                        disk.flush(part.heap)
                    made[name] = count_payloads(part.heap, known)
                    about["heap"] = {"name": part.heap.file.name, "size": part.heap.end + SLACK}
                else:
                    made[name] = put_payloads(out, part.heap, known)
                    payload_bytes += part.heap.live_bytes
                tables |= made[name].tables
                if known is not None and known.heap is part.heap and known.file == made[name].file:
                    # stretches are only ever added
                    dirty_pages = part.inner.pages_to_save() | {"chunks": np.zeros(0, np.int64)}
            about["arrays"] = list(tables)
            arrays += [NamedArray(f"stores/{name}/{key}", table, dirty_pages.get(key)) for key, table in tables.items()]
            stores[name] = about
        written, index = put_arrays(out, arrays, None if last is None else last.arrays)
        described = {name: array.to_json() for name, array in written.records.items()}
        for name, about in stores.items():
            about["arrays"] = {key: described[f"stores/{name}/{key}"] for key in about["arrays"]}
        live_bytes = written.live_bytes + payload_bytes
        record: dict[str, Any] = {
            "format": manifest.FORMAT,
            "version": manifest.VERSION,
            "library": __version__,
            "saved": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "save_id": self.save_id,
            "number": self.number,
            "kind": self.parts.kind,
            "description": self.parts.description,
            "data": {"name": out.path.name, "size": out.end, "live_bytes": live_bytes},
            "columns": {name: described[f"columns/{name}"] for name in self.parts.columns},
            "stores": stores,
            "index": index,
        } | ({} if self.journal is None else {"journal": self.journal})
        text = manifest.dump(record)
        out.put(manifest.tail(text, out.put(text)))
        # the next save goes on behind this copy
        kept = record | {"data": {**record["data"], "size": out.end}}
        return record, LastSave(self.folder, kept, written, made)

    def _remove_others(self, record: dict[str, Any]) -> None:
        """Delete files of ours that the manifest does not speak of; only now, that it is on the disk."""
        used = {record["data"]["name"], record.get("journal"), manifest.NAME, "lock"}
        used |= {store["heap"]["name"] for store in record["stores"].values() if "heap" in store}
        for name in os.listdir(self.folder):
            if name not in used and OURS.fullmatch(name):
                with contextlib.suppress(OSError):
                    disk.unlink(self.folder / name)


def _look_at(folder: Path) -> dict[str, Any]:
    """The manifest that is in ``folder``, if there is one; an error if the folder is somebody else's."""
    if not folder.exists():
        return {}
    if not folder.is_dir():
        raise FileWriteError(17, f"{folder} is a file; a buffer is saved as a folder: choose another path")
    strangers = [name for name in os.listdir(folder) if not OURS.fullmatch(name)]
    if strangers:
        raise FileWriteError(
            17, f"{folder} holds other things, such as {strangers[0]!r}; choose a folder of its own for the buffer"
        )
    try:
        return manifest.read(folder)
    except UnsupportedVersionError:
        raise
    except ExtraBuffersError:
        return {}


def next_file(folder: Path, stem: str) -> Path:
    """A file of ours with a number that none of its kind has yet."""
    names = [path.stem.rsplit("-", 1)[1] for path in folder.glob(f"{stem}-*.bin")]
    return folder / f"{stem}-{1 + max((int(name) for name in names if name.isdigit()), default=0):04}.bin"
