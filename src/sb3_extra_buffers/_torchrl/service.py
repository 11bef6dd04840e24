"""`CompressedReplayService`: the buffer that a Ray actor holds, and that answers its clients."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers.samplers import (
    PrioritizedSampler,
    RandomSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

from sb3_extra_buffers._torchrl import service_files
from sb3_extra_buffers._torchrl.packet_group import packet_items
from sb3_extra_buffers._torchrl.service_limiter import RateLimiter
from sb3_extra_buffers._torchrl.service_priorities import as_tensor, check_priorities, check_weights
from sb3_extra_buffers._torchrl.wire import encode_packet, parse_packet
from sb3_extra_buffers.arguments import check_count
from sb3_extra_buffers.errors import (
    ArgumentError,
    CorruptPayloadError,
    ExtraBuffersError,
    FileWriteError,
    IndexOutOfRangeError,
    PriorityError,
    SpecMismatchError,
)
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["CompressedReplayService", "Contents", "as_items"]

#: makes a packet, given the keyframes that its receiver has
Pack = Callable[[bytes], bytes]
#: the key of a number that changes whenever another item is stored at the same index; TorchRL's name
GENERATION = "index_generation"


class Contents(NamedTuple):
    """The information about a buffer by which a client draws from several buffers.

    ``mass`` is the sum of the priorities and ``lowest`` the smallest of them, as the sampler weighs them; without
    priorities the mass is the number of items. ``unit`` is the number of items that are drawn together, such as the
    length of a slice, or 0 if batches cannot be split.
    """

    n_items: int
    mass: float
    lowest: float
    beta: float
    unit: int


class CompressedReplayService(service_files.JournaledBuffer):
    """The buffer inside the actor: receives and sends packets, and keeps a journal if it has a ``folder``.

    A packet is checked, appended to the journal, stored and then acknowledged; if any of this fails, nothing is
    stored. A packet that is sent again, because its acknowledgement was lost, is not stored twice. Any number of
    threads may call the methods.
    """

    def __init__(self, *args: Any, rate_limiter: RateLimiter | None = None, **kwargs: Any) -> None:
        self._limiter = rate_limiter
        # items that `empty` has removed from TorchRL's count
        self._n_emptied = 0
        super().__init__(*args, **kwargs)
        if rate_limiter is not None:
            capacity = self._storage.capacity
            if rate_limiter.min_size > capacity:
                raise ArgumentError(f"the rate limiter's min_size={rate_limiter.min_size} exceeds max_size={capacity}")
            rate_limiter.reset(len(self._storage))

    # ---- packets that arrive ----

    def extend(self, data: Any, admitted: Any = None, **kwargs: Any) -> Any:
        """Store a packet of items and return their indices.

        ``admitted`` is ignored. Ray only runs a task once all arguments are available, so a client passes the result of
        another call that must succeed first.
        """
        # TorchRL's own clients send TensorDicts
        packet = data if isinstance(data, bytes) else encode_packet(as_items(data))
        parsed = parse_packet(packet)
        if not parsed.lead:
            raise SpecMismatchError("expected a batch of items, got a single one; use add()")
        client, number = _sender(parsed.note)
        known = self._index_of(client, number)
        if known is not None:
            return known
        items = packet_items(parsed)
        if self._limiter is None:
            return self._store_once(packet, items, client, number, **kwargs)[0]
        with self._limiter.inserting(len(items)) as admission:
            index, admission.counts = self._store_once(packet, items, client, number, **kwargs)
        return index

    def replay(self, packet: bytes) -> None:
        """Store a packet from the journal."""
        parsed = parse_packet(packet)
        client, number = _sender(parsed.note)
        if self._index_of(client, number) is None:
            self._store_once(packet, packet_items(parsed), client, number)

    def extend_packets(self, packets: Sequence[Any], admitted: Any = None) -> tuple[int, Exception | None]:
        """Store packets in order, and return how many are stored and the error that stopped it, if any."""
        if not isinstance(packets, (list, tuple)):
            raise SpecMismatchError(f"expected a list of packets, got a {type(packets).__name__}")
        for n_stored, packet in enumerate(packets):
            try:
                self.extend(packet)
            except Exception as error:
                return n_stored, error
        return len(packets), None

    def _index_of(self, client: str, number: int) -> Any:
        """Return the indices of a packet that is stored already, or None."""
        newest, index = self._clients.get(client, (0, None))
        return index if client and number <= newest else None

    def _store_once(self, packet: bytes, items: Any, client: str, number: int, **kwargs: Any) -> tuple[Any, bool]:
        """Store a packet; return its indices, and whether it was not stored already."""
        with self._replay_lock:
            # another thread may have stored the same packet
            index = self._index_of(client, number)
            if index is not None:
                return index, False
            index = self._store(packet, items, client, number, **kwargs)
            journal = self._journal
            if journal is not None and journal.n_bytes > self._journal_limit:
                try:
                    self.checkpoint()
                except FileWriteError as error:
                    # the packet is safe in the journal
                    self._journal_limit = 2 * journal.n_bytes
                    warnings.warn(f"the journal could not be replaced by a snapshot: {error}", stacklevel=2)
        return index, True

    def _store(self, packet: bytes, items: Any, client: str, number: int, **kwargs: Any) -> Any:
        if self._storage.initialized:
            self._storage.check_data(items, 1)
        priority = items.get(self.priority_key, None)
        has_priorities = isinstance(self._sampler, PrioritizedSampler) and kwargs.get("update_priority") is not False
        if has_priorities and priority is not None:
            # otherwise TorchRL would raise only after the items are stored
            check_weights(check_priorities(priority, len(items)), self._sampler, self._storage.capacity)
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
        return self.extend(data if isinstance(data, bytes) else encode_packet(as_items(data).unsqueeze(0)))

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all items."""
        with self._replay_lock:
            count = self._position()[1]
            super().empty(bool(empty_write_count))
            self._n_emptied += count - self._position()[1]
            if self._limiter is not None:
                self._limiter.reset()

    # ---- packets that leave ----

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, known: bytes = b"", **kwargs: Any
    ) -> Any:
        """Return a packet of sampled items; with ``return_info`` also the sampler's information.

        ``known`` are the keyframes that the receiver has, which are left out.
        """
        with self._drawing(batch_size):
            if kwargs or not self._sends_encoded:
                pack, info = self._sample_items(batch_size, **kwargs)
            else:
                pack, info = self._draw(batch_size, None)
        # not while the lock is held: this compresses
        packet = pack(known)
        return (packet, info) if return_info else packet

    def draw(
        self,
        batch_size: int | None = None,
        among: int | None = None,
        admitted: Any = None,
        known: bytes = b"",
    ) -> tuple[bytes, Contents]:
        """Return a packet of sampled items, and the contents that they were drawn from; ``admitted`` as in `extend`.

        ``among`` limits a uniform draw to the first ``among`` indices: a client of several buffers decides how many
        items to draw from each by the number of items that each held a moment ago, and must draw from these items only.
        If ``batch_size`` is 0, the packet is empty.
        """
        if batch_size == 0:
            return b"", self.contents()
        with self._drawing(batch_size):
            among = None if among is None else check_count(among, "among")
            pack, _ = self._draw(batch_size, among) if self._sends_encoded else self._sample_items(batch_size)
            contents = self.contents()
        return pack(known), contents

    @property
    def _sends_encoded(self) -> bool:
        """Whether items are sent as they are stored: if they are in host memory and nothing transforms them."""
        on_host = getattr(self._storage.device, "type", "cpu") == "cpu"
        return on_host and not self._transform and self._sample_unit is None and not self._prefetch

    @contextlib.contextmanager
    def _drawing(self, batch_size: int | None) -> Iterator[None]:
        """Wait until a batch may be drawn, then hold the lock."""
        count = self._batch_size or 0 if batch_size is None else check_count(batch_size, "batch_size")
        # not while the lock is held: collectors need it to store what a learner waits for
        with contextlib.nullcontext() if self._limiter is None else self._limiter.sampling(count), self._replay_lock:
            yield

    def _draw(self, batch_size: int | None, among: int | None) -> tuple[Pack, dict[Any, Any]]:
        """Draw a batch, and return a function that packs it as it is stored, and the sampler's information."""
        count = self._batch_size if batch_size is None else batch_size
        if count is None:
            raise ArgumentError("pass a batch_size to sample() or to the constructor")
        index: Any
        info: dict[Any, Any]
        if among is not None and type(self._sampler) is RandomSampler and len(self._storage):
            index, info = torch.randint(0, min(among, len(self._storage)), (count,)), {}
        else:
            index, info = self._sampler.sample(self._storage, count)
        info = dict(info)
        info["index"] = torch.stack(index, -1) if isinstance(index, tuple) else index
        if isinstance(self._sampler, PrioritizedSampler):
            info[GENERATION] = self._generations(info["index"])
        extra = {key: _per_item(value, info["index"]) for key, value in info.items()}
        # the receiver decodes each frame of a window once
        note = {"window": self._unit} if self._unit > 1 else {}
        return partial(self._storage.gather(index, extra).pack, **note), info

    def _sample_items(self, batch_size: int | None, **kwargs: Any) -> tuple[Pack, dict[Any, Any]]:
        """Like `_draw`, but decode the batch, for transforms and the like."""
        items, info = super().sample(batch_size, return_info=True, **kwargs)
        if isinstance(self._sampler, PrioritizedSampler):
            items.set(GENERATION, self._generations(items.get("index")))
        return lambda known: encode_packet(items), info

    def contents(self) -> Contents:
        """Return the number of items and the sums over their priorities."""
        with self._replay_lock:
            n_items, sampler = len(self._storage), self._sampler
            unit = self._unit
            if not isinstance(sampler, PrioritizedSampler) or not n_items:
                return Contents(n_items, float(n_items), 1.0, 0.0, unit)
            mass, lowest = sampler._sum_tree.query(0, n_items), sampler._min_tree.query(0, n_items)
            return Contents(n_items, float(mass), float(lowest), float(sampler.beta), unit)

    @property
    def _unit(self) -> int:
        """Number of items that are drawn together; 0 if it depends on the batch."""
        sampler = self._sampler
        if isinstance(sampler, SliceSampler) and not isinstance(sampler, SliceSamplerWithoutReplacement):
            return sampler.slice_len or 0
        return 1 if type(sampler) in (RandomSampler, PrioritizedSampler) else 0

    def packed(self, index: Any) -> bytes:
        """Return the items at ``index`` as a packet."""
        if isinstance(index, str):
            raise IndexOutOfRangeError(f"items are indexed by position, got {index!r}")
        if (
            isinstance(index, torch.Tensor)
            and index.ndim == 1
            and index.numel()
            and not index.is_floating_point()
            and index.dtype != torch.bool
        ):
            with self._replay_lock:
                parts = self._storage.gather(index, {})
            packet: bytes = parts.pack()
            return packet
        return encode_packet(super().__getitem__(index).contiguous())

    # ---- priorities ----

    def _generations(self, index: torch.Tensor) -> torch.Tensor:
        """Return a number for the item at each index that no other item ever had there: how many were stored before."""
        cursor, count, _ = self._position()
        n_steps: int = self._storage.table.lead[0]
        return torch.as_tensor(self._n_emptied + count - 1 - (cursor - 1 - index) % n_steps)

    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> int:
        """Set priorities, and return of how many items.

        With the ``generation`` that was sampled along with an ``index``, items that were overwritten since are skipped.
        """
        index = as_tensor(index, "indices", False).reshape(-1)
        priority = check_priorities(priority, index.numel())
        with self._replay_lock:
            length = len(self._storage)
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < length:
                raise IndexOutOfRangeError(f"an index is not among the {length} items that are stored")
            if generation is not None:
                numbers = as_tensor(generation, "generations", False).reshape(-1)
                if numbers.shape != index.shape:
                    raise PriorityError(f"{len(numbers)} generations for {len(index)} indices")
                current = numbers == self._generations(index)
                index, priority = index[current], priority[current]
            if not isinstance(self._sampler, PrioritizedSampler) or not len(index):
                return 0
            super().update_priority(index, check_weights(priority, self._sampler, self._storage.capacity))
        return len(index)

    def update_tensordict_priority(self, data: TensorDictBase) -> int:
        """Set the priorities in ``data``, which was sampled before; see `update_priority`."""
        data = as_items(data)
        if data.get("index", None) is None:
            raise SpecMismatchError('priorities need the "index" of the items, as they were sampled')
        if not isinstance(self._sampler, PrioritizedSampler):
            return 0
        generation = data.get(GENERATION, None)
        if not data.ndim or generation is None or self._sample_unit is not None:
            super().update_tensordict_priority(data)
            return int(data.numel())
        # samplers of slices give each index an axis of its own
        index = data.get("index").reshape(-1)
        return self.update_priority(index, self._get_priority_vector(data), generation.reshape(-1))

    # ---- information ----

    def rate(self) -> dict[str, float]:
        """Return the counters of the rate limiter."""
        return {} if self._limiter is None else self._limiter.state()

    def memory_usage(self) -> MemoryUsage:
        """Return the memory in use, compared with that of uncompressed tensors."""
        usage: MemoryUsage = self._storage.memory_usage()
        return usage

    def process_id(self) -> int:
        """Return the ID of the actor's process."""
        return os.getpid()

    def __repr__(self) -> str:
        # Ray prefixes every line of the actor's log with it
        return type(self).__name__


def _sender(note: Mapping[str, Any]) -> tuple[str, int]:
    """Return the name of the client that sent a packet, and the packet's number."""
    client, number = note.get("writer", ""), note.get("number", 0)
    if not isinstance(client, str) or len(client) > 256 or type(number) is not int or not 0 <= number < 1 << 62:
        raise CorruptPayloadError(f"a packet cannot be number {number!r} of client {client!r}")
    return client, number


def _per_item(value: Any, index: torch.Tensor) -> torch.Tensor:
    """Return a sampler's information as a tensor with a value for each item."""
    tensor = torch.as_tensor(value)
    return tensor if tensor.ndim else tensor.expand(len(index))


def as_items(data: Any) -> TensorDictBase:
    """Return ``data`` if it is a TensorDict."""
    if not isinstance(data, TensorDictBase):
        raise SpecMismatchError(f"expected a TensorDict, got a {type(data).__name__}")
    return data
