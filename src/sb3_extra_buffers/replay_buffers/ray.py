"""One compressed buffer for many machines: TorchRL's Ray replay buffer, with packets on the wire."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sb3_extra_buffers.errors import DamagedFileError, FileFormatError, MissingExtraError, SpecMismatchError
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
from sb3_extra_buffers.replay_buffers.journal import Journal
from sb3_extra_buffers.replay_buffers.packing import pack, read_note, unpack

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
# a journal is folded into a snapshot when it has grown beyond both
_LEAST_JOURNAL = 64 << 20


class CompressedReplayService(TensorDictReplayBuffer):  # type: ignore[misc]  # torchrl ships no types
    """The buffer inside the actor: takes packets, gives packets, and remembers them in ``folder`` if it has one.

    Every packet is stored, then written to a journal, then acknowledged. A packet that comes again, because its
    sender did not hear of it, is not stored twice.
    """

    def __init__(self, *args: Any, folder: str | None = None, sync: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder = None if folder is None else Path(folder)
        self._sync = sync
        self._journal: Journal | None = None
        self._snapshot_bytes = 0
        # newest packet of each writer and where it went
        self._writers: dict[str, tuple[int, Any]] = {}
        if self._folder is not None:
            self._recover(self._folder)

    # ---- packets ----

    def extend(self, data: Any, **kwargs: Any) -> Any:
        """Store a packet of items; return where they went."""
        if not isinstance(data, bytes):
            # from a client that does not pack
            data = pack(data)
        index = self._apply(data, **kwargs)
        if self._journal is not None:
            self._journal.append(data)
            if self._journal.nbytes > max(_LEAST_JOURNAL, self._snapshot_bytes):
                self.checkpoint()
        return index

    def add(self, data: Any) -> Any:
        return self.extend(pack(data.unsqueeze(0)) if not isinstance(data, bytes) else data)

    def _apply(self, packet: bytes, **kwargs: Any) -> Any:
        note = read_note(packet)
        writer, number = note.get("writer", ""), note.get("number", 0)
        newest, index = self._writers.get(writer, (0, None))
        if writer and number <= newest:
            return index
        index = super().extend(unpack(packet), **kwargs)
        if writer:
            self._writers[writer] = number, index
        return index

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """A packet of items; with ``return_info`` what the sampler says as well."""
        found = super().sample(*args, **kwargs)
        return (pack(found[0]), found[1]) if isinstance(found, tuple) else pack(found)

    def packed(self, index: Any) -> bytes:
        """The items at ``index`` as a packet."""
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
        if not len(self):
            return
        name = uuid.uuid4().hex[:12]
        snapshot = folder / f"snapshot-{name}"
        snapshot.mkdir(parents=True)
        for kind, part in self._parts().items():
            part.dumps(snapshot / kind)
        writers = {writer: [number, index.tolist()] for writer, (number, index) in self._writers.items()}
        self._switch(folder, name, f"snapshot-{name}", writers)
        self._snapshot_bytes = sum(path.stat().st_size for path in snapshot.rglob("*") if path.is_file())

    def _parts(self) -> dict[str, Any]:
        """What is saved, by name; TorchRL's own `dumps` would add a pickle."""
        return {"storage": self._storage, "sampler": self._sampler, "writer": self._writer}

    def _switch(self, folder: Path, name: str, snapshot: str | None, writers: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        journal = f"journal-{name}"
        if self._journal is not None:
            self._journal.close()
        self._journal = Journal(folder / journal, self._sync)
        note = {"format": _FORMAT, "version": 1, "snapshot": snapshot, "journal": journal, "writers": dict(writers)}
        staged = folder / f"{_CURRENT}.new"
        staged.write_text(json.dumps(note, indent=1))
        staged.replace(folder / _CURRENT)
        for old in folder.iterdir():
            if old.name.startswith("snapshot-") and old.name != snapshot:
                shutil.rmtree(old, ignore_errors=True)
            elif old.name.startswith("journal-") and old.name != journal:
                old.unlink(missing_ok=True)

    def _recover(self, folder: Path) -> None:
        """Be where the buffer was that wrote to ``folder`` before."""
        if not (folder / _CURRENT).exists():
            self._switch(folder, uuid.uuid4().hex[:12], None, {})
            return
        try:
            note = json.loads((folder / _CURRENT).read_text())
            if note["format"] != _FORMAT:
                raise KeyError("format")
            snapshot, journal, writers = note["snapshot"], note["journal"], note["writers"]
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"{folder / _CURRENT} was not written by a buffer: {error}") from error
        if snapshot is not None:
            if not (folder / snapshot).exists():
                raise DamagedFileError(f"{folder / snapshot} is gone")
            for kind, part in self._parts().items():
                part.loads(folder / snapshot / kind)
            self._snapshot_bytes = sum(path.stat().st_size for path in (folder / snapshot).rglob("*") if path.is_file())
        self._writers = {writer: (number, torch.tensor(index)) for writer, (number, index) in writers.items()}
        self._journal = Journal(folder / journal, self._sync)
        for packet in self._journal.replay():
            self._apply(packet)


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
        if not isinstance(data, TensorDictBase):
            raise SpecMismatchError(f"expected a TensorDict, got a {type(data).__name__}")
        self._number += 1
        packet = pack(data.exclude("index"), writer=self._writer, number=self._number)
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
