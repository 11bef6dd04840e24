"""One compressed buffer for many machines: TorchRL's Ray replay buffer, with compressed packets on the wire."""

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
from sb3_extra_buffers.arguments import check_count
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

    from sb3_extra_buffers._torchrl.memmaps import read_json, remove_saved, write_json
    from sb3_extra_buffers._torchrl.service_state import Clients, ServiceState
    from sb3_extra_buffers._torchrl.wire import decode_packet, encode_packet, packet_note
except ImportError as error:
    raise MissingExtraError(
        f"CompressedRayReplayBuffer needs 'ray' and 'torchrl': {MissingExtraError.hint('ray')}"
    ) from error

__all__ = ["CompressedRayClient", "CompressedRayReplayBuffer", "CompressedReplayService"]

_CURRENT = "current.json"
_FORMAT = "sb3-extra-buffers/ray-buffer"
# the other entries of a buffer's folder; anything else in it is never opened or deleted
_ENTRY = re.compile(r"(snapshot|journal)-[0-9a-f]{12}")
# a journal that is larger than this and than the last snapshot is replaced by a new snapshot
_MIN_JOURNAL_BYTES = 64 << 20


class CompressedReplayService(TensorDictReplayBuffer):  # type: ignore[misc]  # torchrl ships no types
    """The buffer inside the actor: receives and sends packets, and keeps a journal in ``folder`` if it is given one.

    A packet is checked, appended to the journal, stored and then acknowledged: all of that or nothing. A packet that
    is sent again, because its acknowledgement was lost, is not stored twice.
    """

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

    # ---- packets ----

    def extend(self, data: Any, **kwargs: Any) -> Any:
        """Store a packet of items and return their indices."""
        # TorchRL's own clients send TensorDicts
        packet = data if isinstance(data, bytes) else encode_packet(_as_items(data))
        with self._replay_lock:
            client, number = _sender(packet)
            newest, index = self._clients.get(client, (0, None))
            if client and number <= newest:
                return index
            index = self._store(packet, client, number, **kwargs)
            journal = self._journal
            if journal is not None and journal.n_bytes > self._journal_limit:
                try:
                    self.checkpoint()
                except FileWriteError as error:
                    # the packet is safe in the journal
                    self._journal_limit = 2 * journal.n_bytes
                    warnings.warn(f"the journal could not be replaced by a snapshot: {error}", stacklevel=2)
        return index

    def _store(self, packet: bytes, client: str, number: int, **kwargs: Any) -> Any:
        items = decode_packet(packet)
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
            if client:
                self._clients[client] = number, index
        except BaseException:
            if self._position() == before:
                if journal is not None:
                    # if this fails the journal is marked as broken, and the next packet starts a new one
                    with contextlib.suppress(ExtraBuffersError):
                        journal.truncate(n_bytes, n_records)
            elif client:
                # all items were stored: if the packet is sent again, they must not be stored twice
                n_steps = self._storage.table.lead[0]
                self._clients[client] = number, (torch.arange(len(items)) + before[0]) % n_steps
            raise
        return index

    def _position(self) -> tuple[int, int, int]:
        """Return what changes when items are stored; reading the cursor also recovers from an interrupted write."""
        return int(self._writer._cursor), int(self._writer._write_count), len(self._storage)

    def add(self, data: Any) -> Any:
        """Store a single item."""
        return self.extend(data if isinstance(data, bytes) else encode_packet(_as_items(data).unsqueeze(0)))

    def sample(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return a packet of sampled items; with ``return_info`` also the sampler's information."""
        if batch_size is not None:
            batch_size = check_count(batch_size, "batch_size")
        batch = super().sample(batch_size, *args, **kwargs)
        return (encode_packet(batch[0]), batch[1]) if isinstance(batch, tuple) else encode_packet(batch)

    def packed(self, index: Any) -> bytes:
        """Return the items at ``index`` as a packet."""
        if isinstance(index, str):
            raise IndexOutOfRangeError(f"items are indexed by position, got {index!r}")
        return encode_packet(super().__getitem__(index).contiguous())

    def memory_usage(self) -> dict[str, Any]:
        """Return the memory in use, by purpose."""
        usage: dict[str, Any] = self._storage.memory_usage().as_dict()
        return usage

    def process_id(self) -> int:
        """Return the ID of the actor's process."""
        return os.getpid()

    def __repr__(self) -> str:
        # Ray prefixes every line of the actor's log with it
        return type(self).__name__

    # ---- files ----

    def checkpoint(self) -> None:
        """Save a snapshot and start an empty journal; the file that names both is replaced last."""
        folder = self._folder
        if folder is None:
            raise FileFormatError("this buffer has no folder to save to; create it with folder=...")
        with self._replay_lock:
            if not len(self._storage):
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
        for _, arrays in read_journal(folder / journal):
            if len(arrays) != 1 or arrays[0].dtype != np.uint8:
                raise DamagedFileError(f"{folder / journal} holds a record that is not a packet")
            self.extend(arrays[0].tobytes())
        self._journal = Journal.reopen(folder / journal, self._sync)


def _sender(packet: bytes) -> tuple[str, int]:
    """Return the name of the client that sent a packet, and the packet's number."""
    note = packet_note(packet)
    client, number = note.get("writer", ""), note.get("number", 0)
    if not isinstance(client, str) or len(client) > 256 or type(number) is not int or not 0 <= number < 1 << 62:
        raise CorruptPayloadError(f"a packet cannot be number {number!r} of client {client!r}")
    return client, number


def _is_entry(name: Any, prefix: str) -> bool:
    return isinstance(name, str) and name.startswith(prefix) and _ENTRY.fullmatch(name) is not None


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(dict(content), sort_keys=True).encode())


def _as_items(data: Any) -> TensorDictBase:
    if not isinstance(data, TensorDictBase):
        raise SpecMismatchError(f"expected a TensorDict, got a {type(data).__name__}")
    return data


class CompressedRayClient(_RayReplayBufferClient):  # type: ignore[misc]  # torchrl ships no types
    """The handle for collectors and learners: encodes and decodes packets in their own process."""

    def __init__(self, actor: Any, *, has_gpu: bool = False) -> None:
        super().__init__(actor, has_gpu=has_gpu)
        self._start_numbering()

    def _start_numbering(self) -> None:
        self._writer = uuid.uuid4().hex
        self._number = 0

    def extend(self, data: TensorDictBase, **kwargs: Any) -> Any:
        """Store ``data`` and wait until it is stored."""
        items = _as_items(data)
        self._number += 1
        packet = encode_packet(items.exclude("index"), writer=self._writer, number=self._number)
        return ray.get(self._actor.extend.remote(packet, **kwargs))

    def add(self, data: TensorDictBase) -> Any:
        """Store a single item."""
        return self.extend(data.unsqueeze(0))

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the buffer's sampler draws."""
        batch = ray.get(self._actor.sample.remote(*args, **kwargs))
        return (decode_packet(batch[0]), batch[1]) if isinstance(batch, tuple) else decode_packet(batch)

    def __getitem__(self, index: Any) -> Any:
        return decode_packet(ray.get(self._actor.packed.remote(index)))

    def __getstate__(self) -> dict[str, Any]:
        return {"_actor": self._actor, "has_gpu": self.has_gpu}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy numbers its packets under a name of its own
        self.__dict__.update(state)
        self._start_numbering()


class CompressedRayReplayBuffer(RayReplayBuffer):  # type: ignore[misc]  # torchrl ships no types
    """TorchRL's `RayReplayBuffer` with a `CompressedStorage` inside and packets on the wire.

    Pass `client()` to collectors and learners; it can be pickled. ``extend`` returns when the items are stored and,
    with ``folder``, written to a file. The actor can then be killed at any moment: Ray restarts it, it loads the
    folder, and pending calls are retried.

    Args:
        max_size: The maximum number of items.
        n_envs: The number of environments that take turns in each collector's items; detected from the data by default.
        batch_size: The default batch size of `sample`.
        sampler: A function that creates the sampler, such as ``partial(PrioritizedSampler, 1000, 0.7, 0.5)``.
        folder: The folder for a snapshot and a journal, on a disk of the machine that the actor runs on.
        sync: Flush every write to disk. Without it, a crash of the machine loses the last seconds; a crash of the
            process loses nothing.
        remote_config: Ray options of the actor, such as ``{"num_cpus": 1, "resources": {...}}``.
        ray_init_config: Options of ``ray.init``, which is called if Ray is not running yet.
        compression_method: As for `CompressedStorage`.

    Examples:
        >>> import ray
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from sb3_extra_buffers.replay_buffers import CompressedRayReplayBuffer
        >>> ray.init(num_cpus=1, include_dashboard=False)  # doctest: +ELLIPSIS
        RayContext(...)
        >>> buffer = CompressedRayReplayBuffer(10_000, batch_size=32)
        >>> indices = buffer.extend(TensorDict({"pixels": torch.zeros(64, 4, 84, 84, dtype=torch.uint8)}, [64]))
        >>> buffer.sample()["pixels"].shape
        torch.Size([32, 4, 84, 84])
        >>> buffer.close()
        >>> ray.shutdown()
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
        """Return a new handle for collectors and learners."""
        return CompressedRayClient(self._rb, has_gpu=self.has_gpu)

    def checkpoint(self) -> None:
        """Save a snapshot to ``folder`` now; the actor also does so whenever its journal has grown."""
        ray.get(self._rb.checkpoint.remote())

    def memory_usage(self) -> dict[str, Any]:
        """Return the memory in use, by purpose."""
        usage: dict[str, Any] = ray.get(self._rb.memory_usage.remote())
        return usage

    def process_id(self) -> int:
        """Return the ID of the process that holds the buffer."""
        number: int = ray.get(self._rb.process_id.remote())
        return number
