"""The files of a served buffer: a snapshot, and a journal of the packets received since."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
import zlib
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torchrl.data import TensorDictReplayBuffer

from sb3_extra_buffers import files
from sb3_extra_buffers._torchrl.memmaps import read_json, remove_saved, write_json
from sb3_extra_buffers._torchrl.service_state import Clients, ServiceState
from sb3_extra_buffers.errors import DamagedFileError, FileFormatError
from sb3_extra_buffers.files import disk
from sb3_extra_buffers.files.journal import Journal, read_journal

__all__ = ["JournaledBuffer"]

_CURRENT = "current.json"
_FORMAT = "sb3-extra-buffers/ray-buffer"
# the other entries of a buffer's folder; anything else in it is never opened or deleted
_ENTRY = re.compile(r"(snapshot|journal)-[0-9a-f]{12}")
# a journal that is larger than this and than the last snapshot is replaced by a new snapshot
_MIN_JOURNAL_BYTES = 64 << 20


class JournaledBuffer(TensorDictReplayBuffer):  # type: ignore[misc]  # torchrl ships no types
    """A TorchRL buffer that keeps a snapshot and a journal in ``folder``, if it is given one."""

    def __init__(self, *args: Any, folder: str | None = None, sync: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder = None if folder is None else Path(folder)
        self._sync = sync
        self._journal: Journal | None = None
        # in bytes; a longer journal is replaced by a snapshot
        self._journal_limit = _MIN_JOURNAL_BYTES
        self._snapshot: str | None = None
        self._clients: Clients = {}
        self._state = ServiceState(self._storage, {}, {}, {})
        if self._folder is not None:
            self._recover(self._folder)

    @abstractmethod
    def replay(self, packet: bytes) -> None:
        """Store a packet from the journal."""

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all items; the journal has a record of it."""
        with self._replay_lock:
            if self._journal is not None:
                if self._journal.broken:
                    self.checkpoint()
                self._journal.append({"empty": empty_write_count})
            super().empty(empty_write_count)

    def checkpoint(self) -> None:
        """Save a snapshot and start an empty journal; the file that names both is replaced last."""
        folder = self._folder
        if folder is None:
            raise FileFormatError("this buffer has no folder to save to; create it with folder=...")
        with self._replay_lock:
            if not self._storage.initialized:
                if self._journal is not None and self._journal.broken:
                    self._switch(folder, None)
                return
            # always the same object: `files.save` writes only what changed since its last save
            state = self._state
            state.sampler, state.writer = self._sampler.state_dict(), self._writer.state_dict()
            state.clients = dict(self._clients)
            snapshot = f"snapshot-{uuid.uuid4().hex[:12]}"
            base = None if self._snapshot is None else folder / self._snapshot
            try:
                report = files.save(state, folder / snapshot, base)
                self._switch(folder, snapshot)
            except BaseException:
                with contextlib.suppress(OSError):
                    remove_saved(folder / snapshot)
                raise
            self._journal_limit = max(_MIN_JOURNAL_BYTES, report.n_bytes)

    def _switch(self, folder: Path, snapshot: str | None) -> None:
        """Start an empty journal on top of ``snapshot``, then delete the older files."""
        with disk.named_errors(folder, f"saving to {folder}"):
            disk.make_folder(folder)
            name = f"journal-{uuid.uuid4().hex[:12]}"
            journal = Journal(folder / name, self._sync)
            try:
                # also without `sync`: the files that are deleted below were safe
                disk.sync_folder(folder)
                current = {"format": _FORMAT, "version": 2, "snapshot": snapshot, "journal": name}
                write_json(folder / _CURRENT, current | {"crc32": _checksum(current)})
            except BaseException:
                journal.close()
                with contextlib.suppress(OSError):
                    disk.unlink(folder / name)
                raise
        old, self._journal, self._snapshot = self._journal, journal, snapshot
        if old is not None:
            old.close()
        for entry in os.scandir(folder):
            if entry.name in (name, snapshot) or not _ENTRY.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                if entry.name.startswith("snapshot-"):
                    remove_saved(Path(entry.path))
                else:
                    disk.unlink(Path(entry.path))

    def _recover(self, folder: Path) -> None:
        """Load the snapshot and the journal that an earlier actor left in ``folder``."""
        if not (folder / _CURRENT).exists():
            _check_is_new(folder)
            self._switch(folder, None)
            return
        current = read_json(folder / _CURRENT)
        snapshot: Any = current.get("snapshot")
        journal: Any = current.get("journal")
        if current.get("format") != _FORMAT or not _is_entry(journal, "journal-"):
            raise FileFormatError(f"{folder / _CURRENT} was not written by a CompressedRayReplayBuffer")
        if current.pop("crc32", None) != _checksum(current):
            raise DamagedFileError(f"{folder / _CURRENT} is damaged: its checksum differs")
        if snapshot is not None:
            if not _is_entry(snapshot, "snapshot-"):
                raise FileFormatError(f"{folder / _CURRENT}: {snapshot!r} cannot be the name of a snapshot")
            if not (folder / snapshot).exists():
                raise DamagedFileError(f"{folder / snapshot} is missing")
            state = files.load(folder / snapshot, ServiceState)
            state.apply_to(self._storage, self._sampler, self._writer)
            self._clients = state.clients
            self._snapshot = snapshot
            self._journal_limit = max(
                _MIN_JOURNAL_BYTES, sum(path.stat().st_size for path in (folder / snapshot).iterdir())
            )
        for fields, arrays in read_journal(folder / journal):
            if "empty" in fields:
                self.empty(fields["empty"] is True)  # not recorded again: there is no journal yet
                continue
            if len(arrays) != 1 or arrays[0].dtype != np.uint8:
                raise DamagedFileError(f"{folder / journal} holds a record that is not a packet")
            self.replay(arrays[0].tobytes())
        self._journal = Journal.reopen(folder / journal, self._sync)


def _check_is_new(folder: Path) -> None:
    """Raise if ``folder``, which has no file that names the rest, holds items, which `_switch` would delete."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        # an actor that is killed when it starts for the first time leaves an empty journal
        if _ENTRY.fullmatch(entry.name) and (entry.name.startswith("snapshot-") or entry.stat().st_size):
            raise DamagedFileError(
                f"{folder / _CURRENT} is missing, but {entry.name} is there; restore the file from a copy, or choose "
                "another folder to start over"
            )


def _is_entry(name: Any, prefix: str) -> bool:
    return isinstance(name, str) and name.startswith(prefix) and _ENTRY.fullmatch(name) is not None


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(dict(content), sort_keys=True).encode())
