"""Groups: a key and the ``("next", key)`` that repeats it, in one store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sb3_extra_buffers._torchrl.indexing import Positions, are_slices
from sb3_extra_buffers._torchrl.tensors import as_rows, as_tensor
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.stores.device_observation import DeviceObservationStore
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.transfer import RowPacket, import_rows
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["Group", "GroupConfig", "HostGroup", "StoredGroup", "split_steps"]

# rows copied from group to group at a time
_CHUNK = 256
# packets are imported without decoding them if they have this many steps of each stream: the first frames of a packet
# share nothing, so packets of one step would take 20 times the memory, and packets of 16 steps take a fifth more
_MIN_IMPORTED_STEPS = 16

Key = Any  # a nested key of a TensorDict: a string or a tuple of strings


class GroupConfig(NamedTuple):
    """The keys of a group, their tensors and how these are compressed."""

    keys: list[Key]
    spec: ObsSpec
    dtype: torch.dtype
    n_rows: int
    method: str
    options: dict[str, Any]


class Group(ABC):
    """The large tensors of one key, or of a key and its ``("next", key)``; equal frames are stored once.

    A row is one tensor of one item, found by the item's position over all leading axes. ``which`` selects keys by
    their number in ``keys``.
    """

    #: Whether `read` takes positions as a tensor on the device.
    reads_tensors = False

    def __init__(self, config: GroupConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.keys, self.spec, self.dtype, self.n_rows = config[:4]

    def read(self, positions: Positions, which: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Decode the rows at ``positions`` of each key; frames that they share are decoded once."""
        shape = (len(positions), *self.spec.shape)
        return [
            as_tensor(rows.view(self.spec.dtype).reshape(shape), self.dtype, self.device)
            for rows in self.read_rows(positions, which)
        ]

    @abstractmethod
    def read_rows(self, positions: Positions, which: Sequence[int] | None = None) -> list[ByteRows]:
        """Like `read`, as rows of bytes on the host."""

    @abstractmethod
    def write(self, positions: Positions, batches: Sequence[ByteRows]) -> None:
        """Store one batch of rows per key, step by step."""

    @abstractmethod
    def write_key(self, which: int, positions: Positions, rows: ByteRows) -> None:
        """Store rows of a single key."""

    @abstractmethod
    def clear(self) -> None:
        """Make every row unwritten."""

    @abstractmethod
    def memory_usage(self) -> MemoryUsage:
        """Return the memory in use, by purpose."""

    @abstractmethod
    def describe(self) -> str:
        """Return the method in use and why it was chosen."""

    @abstractmethod
    def check(self) -> None:
        """Raise if the group is inconsistent."""

    def as_rows(self, tensor: torch.Tensor) -> ByteRows:
        """Return a tensor of shape ``(*lead, *spec.shape)`` as rows."""
        return as_rows(self.spec, tensor)

    def stage(self, tensor: torch.Tensor) -> Any:
        """Return a tensor of shape ``(n, *spec.shape)`` as `write` takes it."""
        return self.as_rows(tensor)


class StoredGroup(Group):
    """A group whose store is in this process. The row at a position continues the stream ``position % n_streams``."""

    store: ObservationStore | DeviceObservationStore

    def __init__(self, config: GroupConfig, n_streams: int, device: torch.device) -> None:
        super().__init__(config, device)
        self._create_store(n_streams)

    @abstractmethod
    def _create_store(self, n_streams: int) -> None:
        """Create an empty store."""

    @property
    def n_streams(self) -> int:
        return self.store.n_streams

    def with_streams(self, n_streams: int, count: int) -> StoredGroup:
        """Return a group with another number of streams that holds the first ``count`` rows of this one."""
        group = type(self)(self.config, n_streams, self.device)
        group.copy_from(self, count)
        return group

    def copy_from(self, source: Group, count: int, oldest: int = 0) -> None:
        """Store the first ``count`` rows of ``source``, starting with the step of the row ``oldest``."""
        first = oldest - oldest % self.n_streams
        order = np.concatenate([np.arange(first, count), np.arange(first)])
        for begin in range(0, count, _CHUNK):
            positions = order[begin : begin + _CHUNK]
            self.write(positions, source.read_rows(positions))

    def clear(self) -> None:
        self.store.clear()

    def memory_usage(self) -> MemoryUsage:
        return self.store.memory_usage()

    def describe(self) -> str:
        return self.store.describe()

    def check(self) -> None:
        self.store.check()


class HostGroup(StoredGroup):
    """A group in an `ObservationStore`; decoded tensors are moved to ``device``."""

    store: ObservationStore

    def _create_store(self, n_streams: int) -> None:
        store = ObservationStore(self.spec, n_streams, self.config.method, self.config.options)
        # the stream follows from the position, so each key begins with the first stream
        per_key = -(-self.n_rows // n_streams) * n_streams
        self._use(store, [store.allocate(per_key) for _ in self.keys])

    def _use(self, store: ObservationStore, bases: Sequence[int]) -> None:
        self.bases = list(bases)
        self._offsets = np.array(bases, np.int64)[:, None]
        self.store = store

    def adopt(self, store: ObservationStore | None, bases: Any, any_streams: bool) -> None:
        """Use a ``store`` from a file that is not trusted, with the first row of each key at ``bases``."""
        if store is None or store.spec != self.spec:
            raise FileFormatError(f"the store of {self.keys} is missing or holds other observations")
        if store.n_streams != self.n_streams and not any_streams:
            raise FileFormatError(f"the store of {self.keys} has {store.n_streams} streams, expected {self.n_streams}")
        per_key = -(-self.n_rows // store.n_streams) * store.n_streams
        if bases != [which * per_key for which in range(len(self.keys))] or store.n_obs != per_key * len(self.keys):
            raise FileFormatError(f"{self.n_rows} items at {bases!r} do not match a store of {store.n_obs}")
        self._use(store, bases)

    def read_rows(self, positions: Positions, which: Sequence[int] | None = None) -> list[ByteRows]:
        indices = positions + (self._offsets if which is None else self._offsets[list(which)])
        # slices decode each segment once; random positions decode a key and its next together
        read = self.store.read_windows if are_slices(positions, self.n_streams) else self.store.read
        return list(read(indices))

    def can_import(self, packet: RowPacket | None) -> bool:
        """Whether ``packet`` is long enough to be stored without decoding it."""
        return packet is not None and packet.shape[-1] >= _MIN_IMPORTED_STEPS * self.n_streams

    def import_packet(self, positions: Positions, packet: RowPacket) -> None:
        """Store the rows of ``packet``, ``[key, position]``, without decoding them."""
        indices = positions + self._offsets
        import_rows(self.store, indices, np.broadcast_to(positions % self.n_streams, indices.shape), packet)

    def write_key(self, which: int, positions: Positions, rows: ByteRows) -> None:
        self.store.write(positions + self.bases[which], positions % self.store.n_streams, rows)

    def write(self, positions: Positions, batches: Sequence[ByteRows]) -> None:
        store = self.store
        n_streams = store.n_streams
        if len(self.keys) == 1:
            store.write(positions + self.bases[0], positions % n_streams, batches[0])
            return
        base, next_base = self.bases
        rows, next_rows = batches
        for first, stop in split_steps(positions, n_streams):
            position = int(positions[first])
            if stop - first == n_streams:
                store.write_step(position + base, position + next_base, rows[first:stop], next_rows[first:stop])
                continue
            indices = positions[first:stop]
            streams = indices % n_streams
            store.write(indices + base, streams, rows[first:stop])
            store.write(indices + next_base, streams, next_rows[first:stop])


def split_steps(positions: Positions, n_streams: int) -> Iterator[tuple[int, int]]:
    """Split ``positions`` into runs of consecutive ones that do not cross from one step of all streams to the next."""
    if n_streams == 1:
        return ((row, row + 1) for row in range(len(positions)))
    breaks = (positions[1:] != positions[:-1] + 1) | (positions[1:] % n_streams == 0)
    ends = [*(np.flatnonzero(breaks) + 1).tolist(), len(positions)] if len(positions) else []
    return zip([0, *ends[:-1]][: len(ends)], ends, strict=True)
