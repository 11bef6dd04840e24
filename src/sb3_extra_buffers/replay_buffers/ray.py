"""One compressed buffer for many machines: TorchRL's Ray replay buffer, with packets on the wire."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
import warnings
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sb3_extra_buffers import files
from sb3_extra_buffers._torchrl.memmaps import read_json, remove_saved, write_json
from sb3_extra_buffers._torchrl.schema import at_least
from sb3_extra_buffers._torchrl.service_state import ServiceState
from sb3_extra_buffers._torchrl.wire import pack, read_note, unpack
from sb3_extra_buffers.errors import (
    CorruptPayloadError,
    DamagedFileError,
    ExtraBuffersError,
    FileFormatError,
    FileWriteError,
    IndexOutOfRangeError,
    MissingExtraError,
    SpecMismatchError,
)
from sb3_extra_buffers.files import disk
from sb3_extra_buffers.files.journal import Journal, read_journal
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage

try:
    import ray
    from tensordict import TensorDictBase
    from torchrl.data import RayReplayBuffer, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.ray_buffer import _RayReplayBufferClient
except ImportError as error:
    raise MissingExtraError(
        "CompressedRayReplayBuffer needs 'ray' and 'torchrl': pip install 'sb3-extra-buffers[ray]'"
    ) from error

__all__ = ["CompressedRayClient", "CompressedRayReplayBuffer", "CompressedReplayService"]

_CURRENT = "current.json"
_FORMAT = "sb3-extra-buffers/ray-buffer"
#: what a buffer's folder holds beside that file; nothing else in it is ever opened or deleted
_OURS = re.compile(r"(snapshot|journal)-[0-9a-f]{12}")
# a journal becomes a snapshot when it is longer than this and than the snapshot before
_LEAST_JOURNAL = 64 << 20


class CompressedReplayService(TensorDictReplayBuffer):  # type: ignore[misc]  # torchrl ships no types
    """The buffer inside the actor: takes packets, gives packets, and remembers them in ``folder`` if it has one.

    Every packet is checked, written to a journal, stored, then acknowledged: all of that or nothing. A packet that
    comes again, because its sender did not hear of it, is not stored twice.
    """

    def __init__(self, *args: Any, folder: str | None = None, sync: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder = None if folder is None else Path(folder)
        self._sync = sync
        self._journal: Journal | None = None
        # the journal becomes a snapshot when it is longer than this
        self._journal_limit = _LEAST_JOURNAL
        self._snapshot: str | None = None
        # newest packet of each writer and where it went
        self._writers: dict[str, tuple[int, Any]] = {}
        self._state = ServiceState(self._storage, {}, {}, {})
        if self._folder is not None:
            self._recover(self._folder)

    # ---- packets ----

    def extend(self, data: Any, **kwargs: Any) -> Any:
        """Store a packet of items; return where they went."""
        # one that is no packet is from a client that does not pack
        packet = data if isinstance(data, bytes) else pack(_as_items(data))
        with self._replay_lock:
            writer, number = _sender(packet)
            newest, index = self._writers.get(writer, (0, None))
            if writer and number <= newest:
                return index
            index = self._store(packet, writer, number, **kwargs)
            journal = self._journal
            if journal is not None and journal.n_bytes > self._journal_limit:
                try:
                    self.checkpoint()
                except FileWriteError as error:
                    # the packet is safe in the journal
                    self._journal_limit = 2 * journal.n_bytes
                    warnings.warn(f"the journal could not become a snapshot: {error}", stacklevel=2)
        return index

    def _store(self, packet: bytes, writer: str, number: int, **kwargs: Any) -> Any:
        items = unpack(packet)
        if self._storage.initialized:
            self._storage.check_data(items, 1)
        if self._journal is not None and self._journal.broken:
            self.checkpoint()
        journal, before = self._journal, self._position()
        n_bytes, n_records = (0, 0) if journal is None else (journal.n_bytes, journal.n_records)
        try:
            if journal is not None:
                journal.append({}, [np.frombuffer(packet, np.uint8)])
            index = super().extend(items, **kwargs)
            if writer:
                self._writers[writer] = number, index
        except BaseException:
            if self._position() == before:
                if journal is not None:
                    # where that fails, the journal says that it is broken, and the next packet begins another
                    with contextlib.suppress(ExtraBuffersError):
                        journal.truncate(n_bytes, n_records)
            elif writer:
                # stored as a whole: sending it again must not store it twice
                max_size = self._storage._max_size_along_dim0()
                self._writers[writer] = number, (torch.arange(len(items)) + before[0]) % max_size
            raise
        return index

    def _position(self) -> tuple[int, int, int]:
        """Tells whether anything was stored; reading the cursor sees to a write that was interrupted."""
        return int(self._writer._cursor), int(self._writer._write_count), len(self._storage)

    def add(self, data: Any) -> Any:
        """`extend` by a single item."""
        return self.extend(pack(_as_items(data).unsqueeze(0)) if not isinstance(data, bytes) else data)

    def sample(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """A packet of items; with ``return_info`` what the sampler says as well."""
        if batch_size is not None:
            batch_size = at_least("batch_size", batch_size, 1)
        args = (batch_size, *args)
        found = super().sample(*args, **kwargs)
        return (pack(found[0]), found[1]) if isinstance(found, tuple) else pack(found)

    def packed(self, index: Any) -> bytes:
        """The items at ``index`` as a packet."""
        if isinstance(index, str):
            raise IndexOutOfRangeError(f"items are found by number, not by {index!r}")
        return pack(super().__getitem__(index).contiguous())

    def memory_usage(self) -> dict[str, Any]:
        """What the storage holds, by purpose."""
        usage: dict[str, Any] = self._storage.memory_usage().as_dict()
        return usage

    def process_id(self) -> int:
        """Of the process this runs in."""
        return os.getpid()

    def __repr__(self) -> str:
        # Ray puts it before every line of the actor's log
        return type(self).__name__

    # ---- files ----

    def checkpoint(self) -> None:
        """Save everything, and start an empty journal. The one file that names both is replaced last."""
        folder = self._folder
        if folder is None:
            raise FileFormatError("this buffer has no folder to save to; pass folder=... when it is made")
        with self._replay_lock:
            if not len(self._storage):
                return
            # the same one every time: what it saved before need not be written again
            state = self._state
            state.sampler, state.writer = self._sampler.state_dict(), self._writer.state_dict()
            state.writers = dict(self._writers)
            snapshot = f"snapshot-{uuid.uuid4().hex[:12]}"
            base = None if self._snapshot is None else folder / self._snapshot
            try:
                report = files.save(state, folder / snapshot, base)
                self._switch(folder, snapshot)
            except BaseException:
                with contextlib.suppress(OSError):
                    remove_saved(folder / snapshot)
                raise
            self._journal_limit = max(_LEAST_JOURNAL, report.n_bytes)

    def _switch(self, folder: Path, snapshot: str | None) -> None:
        """Begin an empty journal after ``snapshot``, then delete those before."""
        with disk.named_errors(folder, f"saving to {folder}"):
            disk.make_folder(folder)
            name = f"journal-{uuid.uuid4().hex[:12]}"
            journal = Journal(folder / name, self._sync)
            try:
                # also without `sync`: what is deleted below was safe
                disk.sync_folder(folder)
                note = {"format": _FORMAT, "version": 2, "snapshot": snapshot, "journal": name}
                write_json(folder / _CURRENT, note | {"crc32": _checksum(note)})
            except BaseException:
                journal.close()
                with contextlib.suppress(OSError):
                    disk.unlink(folder / name)
                raise
        old, self._journal, self._snapshot = self._journal, journal, snapshot
        if old is not None:
            old.close()
        for entry in os.scandir(folder):
            if entry.name in (name, snapshot) or not _OURS.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                if entry.name.startswith("snapshot-"):
                    remove_saved(Path(entry.path))
                else:
                    disk.unlink(Path(entry.path))

    def _recover(self, folder: Path) -> None:
        """Be where the buffer was that wrote to ``folder`` before."""
        if not (folder / _CURRENT).exists():
            self._switch(folder, None)
            return
        note = read_json(folder / _CURRENT)
        snapshot: Any = note.get("snapshot")
        journal: Any = note.get("journal")
        if note.get("format") != _FORMAT or not _is_ours(journal, "journal-"):
            raise FileFormatError(f"{folder / _CURRENT} was not written by a buffer")
        if note.pop("crc32", None) != _checksum(note):
            raise DamagedFileError(f"{folder / _CURRENT} is not what was written: its checksum differs")
        if snapshot is not None:
            if not _is_ours(snapshot, "snapshot-"):
                raise FileFormatError(f"{folder / _CURRENT}: {snapshot!r} is no snapshot of a buffer")
            if not (folder / snapshot).exists():
                raise DamagedFileError(f"{folder / snapshot} is gone")
            state = files.load(folder / snapshot, ServiceState)
            state.give_to(self._storage, self._sampler, self._writer)
            self._writers = state.writers
            self._snapshot = snapshot
            self._journal_limit = max(
                _LEAST_JOURNAL, sum(path.stat().st_size for path in (folder / snapshot).iterdir())
            )
        for _, arrays in read_journal(folder / journal):
            if len(arrays) != 1 or arrays[0].dtype != np.uint8:
                raise DamagedFileError(f"{folder / journal} holds a record that is no packet")
            self.extend(arrays[0].tobytes())
        self._journal = Journal.reopen(folder / journal, self._sync)


def _sender(packet: bytes) -> tuple[str, int]:
    """Who sent a packet, and which of theirs it is."""
    note = read_note(packet)
    writer, number = note.get("writer", ""), note.get("number", 0)
    if not isinstance(writer, str) or len(writer) > 256 or type(number) is not int or not 0 <= number < 1 << 62:
        raise CorruptPayloadError(f"a packet is said to be number {number!r} of {writer!r}")
    return writer, number


def _is_ours(name: Any, begin: str) -> bool:
    return isinstance(name, str) and name.startswith(begin) and _OURS.fullmatch(name) is not None


def _checksum(note: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(dict(note), sort_keys=True).encode())


def _as_items(data: Any) -> TensorDictBase:
    if not isinstance(data, TensorDictBase):
        raise SpecMismatchError(f"expected a TensorDict, got a {type(data).__name__}")
    return data


class CompressedRayClient(_RayReplayBufferClient):  # type: ignore[misc]  # torchrl ships no types
    """What collectors and learners hold: packs in the process that sends, unpacks in the one that receives."""

    def __init__(self, actor: Any, *, has_gpu: bool = False) -> None:
        super().__init__(actor, has_gpu=has_gpu)
        self._begin()

    def _begin(self) -> None:
        self._writer = uuid.uuid4().hex
        self._number = 0

    def extend(self, data: TensorDictBase, **kwargs: Any) -> Any:
        """Store ``data``; when this returns, it is there."""
        items = _as_items(data)
        self._number += 1
        packet = pack(items.exclude("index"), writer=self._writer, number=self._number)
        return ray.get(self._actor.extend.remote(packet, **kwargs))

    def add(self, data: TensorDictBase) -> Any:
        """`extend` by a single item."""
        return self.extend(data.unsqueeze(0))

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """What the buffer's sampler draws."""
        found = ray.get(self._actor.sample.remote(*args, **kwargs))
        return (unpack(found[0]), found[1]) if isinstance(found, tuple) else unpack(found)

    def __getitem__(self, index: Any) -> Any:
        return unpack(ray.get(self._actor.packed.remote(index)))

    def __getstate__(self) -> dict[str, Any]:
        return {"_actor": self._actor, "has_gpu": self.has_gpu}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # whoever receives a client writes in a name of its own
        self.__dict__.update(state)
        self._begin()


class CompressedRayReplayBuffer(RayReplayBuffer):  # type: ignore[misc]  # torchrl ships no types
    """TorchRL's `RayReplayBuffer` with a `CompressedStorage` inside and packets on the wire.

    Hand `client()` to collectors and learners; it may be pickled. ``extend`` returns when the items are stored, and
    with ``folder`` when they are in a file too: the actor may then be killed at any moment, is started again by Ray
    and reads that folder, and callers that were waiting never notice.

    Args:
        max_size: The most items it holds.
        n_envs: How many environments take turns in what each collector sends; found from the data if not given.
        batch_size: What `sample` draws unless told otherwise.
        sampler: A function that makes the sampler, such as ``partial(PrioritizedSampler, 1000, 0.7, 0.5)``.
        folder: Where the buffer keeps a snapshot and a journal, on a disk of the machine that it runs on.
        sync: Wait for the disk with every write; else what was written in the last seconds is lost if the machine,
            not only the process, dies.
        remote_config: Options of the actor, such as ``{"num_cpus": 1, "resources": {...}}``.
        ray_init_config: Options of ``ray.init``, which is called if nobody did yet.
    """

    def __init__(
        self,
        max_size: int,
        *,
        n_envs: int | None = None,
        batch_size: int | None = None,
        sampler: Callable[[], Any] | None = None,
        folder: str | os.PathLike[str] | None = None,
        sync: bool = False,
        compression_method: str = "auto",
        remote_config: Mapping[str, Any] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        config: dict[str, Any] = {"num_cpus": 1}
        if folder is not None:
            config |= {"max_restarts": -1, "max_task_retries": -1}
        super().__init__(
            replay_buffer_cls=CompressedReplayService,
            storage=partial(CompressedStorage, max_size, n_envs=n_envs, compression_method=compression_method),
            sampler=sampler,
            batch_size=batch_size,
            folder=None if folder is None else os.path.abspath(folder),
            sync=sync,
            remote_config=config | dict(remote_config or {}),
            ray_init_config=None if ray_init_config is None else dict(ray_init_config),
            transport="ray",
            **kwargs,
        )
        self._client = CompressedRayClient(self._rb, has_gpu=self.has_gpu)

    def client(self) -> CompressedRayClient:
        """What collectors and learners use."""
        return CompressedRayClient(self._rb, has_gpu=self.has_gpu)

    def checkpoint(self) -> None:
        """Save everything to ``folder``; the buffer does it by itself whenever its journal has grown."""
        ray.get(self._rb.checkpoint.remote())

    def memory_usage(self) -> dict[str, Any]:
        """What the storage holds, by purpose."""
        usage: dict[str, Any] = ray.get(self._rb.memory_usage.remote())
        return usage

    def process_id(self) -> int:
        """Of the process that holds the buffer."""
        number: int = ray.get(self._rb.process_id.remote())
        return number
