"""Several served buffers that are used through one client, as if they were one buffer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDictBase

from sb3_extra_buffers._torchrl.packet_group import decode_batch
from sb3_extra_buffers._torchrl.service import GENERATION, Contents, as_items
from sb3_extra_buffers._torchrl.service_limiter import RateLimiter
from sb3_extra_buffers._torchrl.service_requests import Prefetcher
from sb3_extra_buffers._torchrl.service_shards import merge_parts, split_batch
from sb3_extra_buffers._torchrl.wire import KeyframeCache, Lease
from sb3_extra_buffers.arguments import check_count
from sb3_extra_buffers.errors import ArgumentError, IndexOutOfRangeError, ServiceLostError
from sb3_extra_buffers.replay_buffers.ray import (
    THREADS,
    Answer,
    CompressedRayClient,
    CompressedRayReplayBuffer,
    fetch,
    ignore_errors,
    was_admitted,
)
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["ShardedRayClient", "ShardedRayReplayBuffer"]


class Coordinator:
    """An actor that assigns shards to clients, and holds the rate limiter of all shards."""

    def __init__(self, limiter: RateLimiter | None, shards: list[Any]) -> None:
        self._limiter = limiter
        self._tickets = 0
        if limiter is not None:
            # Ray may start this actor again, when the shards hold more than at first
            limiter.reset(sum(map(_count_items, shards)))

    def next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets - 1

    @ray.method(concurrency_group="collectors")
    def admit_items(self, n_items: int) -> None:
        if self._limiter is not None:
            self._limiter.admit_items(n_items)

    def finish_items(self, n_admitted: int, n_stored: int, admitted: Any = None) -> None:
        """Count items; ``admitted`` is the result of `admit_items`, if that may not have returned yet."""
        if self._limiter is not None:
            self._limiter.finish_items(n_admitted, n_stored)

    @ray.method(concurrency_group="learners")
    def admit_samples(self, n_samples: int) -> None:
        if self._limiter is not None:
            self._limiter.admit_samples(n_samples)

    def withdraw_samples(self, n_samples: int, admitted: Any) -> None:
        """Do not count samples that were not drawn; ``admitted`` as in `finish_items`."""
        if self._limiter is not None:
            self._limiter.withdraw_samples(n_samples)

    def rate(self) -> dict[str, float]:
        return {} if self._limiter is None else self._limiter.state()


def _count_items(shard: Any) -> int:
    """Number of items in a shard; 0 if it is lost."""
    try:
        return int(fetch(shard.__len__.remote()))
    except ServiceLostError:
        return 0


class ShardedRayClient:
    """The handle for collectors and learners of a `ShardedRayReplayBuffer`; it can be pickled.

    All items of one client go to the same shard; clients are assigned to the shards in turn. An ``index`` numbers the
    items of all shards: ``index // shard_size`` is the number of the shard.
    """

    def __init__(
        self,
        shards: list[CompressedRayClient],
        coordinator: Any,
        shard_size: int,
        batch_size: int | None,
        prefetch: int,
    ) -> None:
        self._shards, self._coordinator = shards, coordinator
        self.shard_size, self.batch_size, self._prefetch = shard_size, batch_size, prefetch
        self._start()

    def _start(self) -> None:
        self._home: CompressedRayClient | None = None
        self._batches = Prefetcher(self._prefetch)
        self._rng = np.random.default_rng()
        self._keyframes = KeyframeCache()
        # what each shard held when it last answered
        self._known: list[Contents] | None = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("_shards", "_coordinator", "shard_size", "batch_size", "_prefetch")
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # ---- collectors ----

    def _own_shard(self) -> CompressedRayClient:
        if self._home is None:
            self._home = self._shards[fetch(self._coordinator.next_ticket.remote()) % len(self._shards)]
        return self._home

    def extend(self, data: TensorDictBase, *, wait: bool = True, **kwargs: Any) -> Any:
        """Store ``data`` and return its indices, or None with ``wait=False``; see `CompressedRayClient.extend`."""
        shard = self._own_shard()
        index = shard.extend(data, wait=wait, **kwargs)
        return None if index is None else index + self._shards.index(shard) * self.shard_size

    def add(self, data: TensorDictBase) -> Any:
        """Store a single item."""
        return self.extend(as_items(data).unsqueeze(0))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was passed to ``extend(wait=False)`` is stored.

        Raises `TimeoutError` after ``timeout`` seconds; sending goes on.
        """
        self._own_shard().flush(timeout)

    # ---- learners ----

    def sample(self, batch_size: int | None = None) -> Any:
        """Return a batch from all shards, and request and decode the next batches in the background.

        Items that were stored when the shards last answered are drawn with the same probability, however full their
        shards are, or in proportion to their priorities.
        """
        size = self.batch_size if batch_size is None else check_count(batch_size, "batch_size")
        if size is None:
            raise ArgumentError("pass a batch_size to sample() or to the constructor")
        return self._batches.next(size, lambda: self._request(size))

    def _request(self, batch_size: int) -> Callable[[], Any]:
        admitted = self._coordinator.admit_samples.remote(batch_size)
        try:
            references, planned, lease, seed = self._draw(batch_size, admitted)
        except Exception:
            self._withdraw(batch_size, admitted)
            raise

        def result() -> Any:
            try:
                answers = [self._fetch(number, reference) for number, reference in enumerate(references)]
            except Exception:
                self._withdraw(batch_size, admitted)
                raise
            drawn = [Contents(*contents) for _, contents in answers]
            self._known = drawn
            parts = [decode_batch(packet, lease) if packet else None for packet, _ in answers]
            return merge_parts(parts, planned, drawn, self.shard_size, np.random.default_rng(seed))

        return Answer(references, result)

    def _draw(self, batch_size: int, admitted: Any) -> tuple[list[Any], list[Contents], Lease, int]:
        """Ask all shards for their parts of a batch, once ``admitted`` is available."""
        if self._known is None or not any(shard.n_items for shard in self._known):
            # the first batch: wait until there is something to draw from
            fetch(admitted)
            self._known = self._contents()
        planned = self._known
        counts = split_batch(planned, batch_size, self._rng)
        seed = int(self._rng.integers(1 << 62))
        # one lease for all shards, whose keyframes are often the same
        lease = self._keyframes.lease()
        # ask all shards: those without a part in the batch report their contents too
        references = [
            shard.actor.draw.remote(count, max(1, contents.n_items), admitted, lease.known)
            for shard, count, contents in zip(self._shards, counts, planned, strict=True)
        ]
        return references, planned, lease, seed

    def _withdraw(self, batch_size: int, admitted: Any) -> None:
        if was_admitted(admitted):
            ignore_errors(self._coordinator.withdraw_samples.remote(batch_size, admitted))

    def _fetch(self, number: int, reference: Any) -> Any:
        try:
            return fetch(reference)
        except ServiceLostError as error:
            raise ServiceLostError(f"shard {number} of {len(self._shards)}: {error}") from error

    def _contents(self) -> list[Contents]:
        references = [shard.actor.contents.remote() for shard in self._shards]
        return [Contents(*self._fetch(number, reference)) for number, reference in enumerate(references)]

    def __getitem__(self, index: Any) -> Any:
        """Return the items at ``index``, which is as in sampled batches."""
        index = torch.as_tensor(index)
        if index.is_floating_point() or index.dtype == torch.bool:
            raise IndexOutOfRangeError(f"items are indexed by integers, got {index.dtype}")
        flat = index.reshape(-1)
        if not flat.numel():
            raise IndexOutOfRangeError("the index is empty; pass at least one integer")
        parts, places = [], []
        for number, place in self._split(flat):
            parts.append(self._shards[number][flat[place] - number * self.shard_size])
            places.append(place)
        items = torch.cat(parts)[torch.cat(places).argsort()]
        return items.reshape(index.shape) if index.ndim else items[0]

    def _split(self, index: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Return the shards that ``index`` refers to, each with the positions of its entries."""
        shard = index // self.shard_size
        if not 0 <= int(shard.min()) <= int(shard.max()) < len(self._shards):
            raise IndexOutOfRangeError(
                f"an index is out of range: there are {len(self._shards)} shards of {self.shard_size} items"
            )
        return [(number, torch.nonzero(shard == number).squeeze(-1)) for number in sorted(set(shard.tolist()))]

    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> int:
        """Set priorities, and return of how many items; see `CompressedRayClient.update_priority`."""
        index = torch.as_tensor(index).reshape(-1)
        priority = torch.as_tensor(priority).reshape(-1).expand(index.shape)
        numbers = None if generation is None else torch.as_tensor(generation).reshape(-1)
        if not len(index):
            return 0
        references = [
            self._shards[number].actor.update_priority.remote(
                index[place] - number * self.shard_size,
                priority[place],
                None if numbers is None else numbers[place],
            )
            for number, place in self._split(index)
        ]
        return sum(fetch(reference) for reference in references)

    def update_tensordict_priority(self, data: TensorDictBase, priority_key: str = "td_error") -> int:
        """Set the priorities in ``data``, a sampled batch, from its ``priority_key``; return of how many items.

        Items that were overwritten since are skipped.
        """
        priority = as_items(data).get(priority_key)
        return self.update_priority(data.get("index"), priority.reshape(len(data)), data.get(GENERATION, None))

    def __len__(self) -> int:
        return sum(contents.n_items for contents in self._contents())

    def rate(self) -> dict[str, float]:
        """Return the counters of the rate limiter: items stored, samples drawn and the balance."""
        state: dict[str, float] = fetch(self._coordinator.rate.remote())
        return state


class ShardedRayReplayBuffer:
    """Several `CompressedRayReplayBuffer`, used as one, for more data than one process can store or send.

    Each collector writes to one of these shards, and learners draw from all of them, however full each shard is.

    Args:
        max_size: The maximum number of items in all shards together.
        n_shards: The number of shards, each of which is an actor.
        batch_size: The default batch size of `sample`.
        folder: The folder for the files of all shards; each has a folder of its own in it.
        rate_limiter: A `RateLimiter` for all shards together.
        prefetch: How many batches `sample` requests ahead.
        max_pending: The maximum number of unacknowledged packets of ``extend(wait=False)``, per client.
        remote_config: Ray options of each shard; ``{"scheduling_strategy": "SPREAD"}`` places them on many machines.
        kwargs: As for `CompressedRayReplayBuffer`.

    Examples:
        >>> import ray
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from sb3_extra_buffers.replay_buffers import ShardedRayReplayBuffer
        >>> ray.init(num_cpus=1, include_dashboard=False)  # doctest: +ELLIPSIS
        RayContext(...)
        >>> buffer = ShardedRayReplayBuffer(10_000, n_shards=2, batch_size=32, remote_config={"num_cpus": 0})
        >>> for _ in range(2):  # two collectors
        ...     indices = buffer.client().extend(TensorDict({"observation": torch.zeros(64, 4)}, [64]))
        >>> len(buffer), buffer.sample()["observation"].shape
        (128, torch.Size([32, 4]))
        >>> buffer.close()
        >>> ray.shutdown()
    """

    def __init__(
        self,
        max_size: int,
        *,
        n_shards: int,
        batch_size: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        rate_limiter: RateLimiter | None = None,
        prefetch: int = 2,
        max_pending: int = 8,
        remote_config: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        max_size, n_shards = check_count(max_size, "max_size"), check_count(n_shards, "n_shards")
        self.batch_size = None if batch_size is None else check_count(batch_size, "batch_size")
        if rate_limiter is not None and rate_limiter.min_size > max_size:
            raise ArgumentError(f"the rate limiter's min_size={rate_limiter.min_size} exceeds max_size={max_size}")
        self.shard_size = -(-max_size // n_shards)
        self._prefetch, self._max_pending, self._is_limited = prefetch, max_pending, rate_limiter is not None
        self._buffers: list[CompressedRayReplayBuffer] = []
        self._coordinator: Any = None
        try:
            for number in range(n_shards):
                self._buffers.append(
                    CompressedRayReplayBuffer(
                        self.shard_size,
                        folder=None if folder is None else Path(folder) / f"shard-{number}",
                        remote_config=remote_config,
                        **kwargs,
                    )
                )
            options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "concurrency_groups": THREADS}
            make: Any = ray.remote
            self._coordinator = make(**options)(Coordinator).remote(
                rate_limiter, [buffer.actor for buffer in self._buffers]
            )
            self._client = self.client()
        except BaseException:
            self.close()
            raise

    def client(self) -> ShardedRayClient:
        """Return a new handle for collectors and learners."""
        limiter = self._coordinator if self._is_limited else None
        shards = [buffer.client(prefetch=0, max_pending=self._max_pending, limiter=limiter) for buffer in self._buffers]
        return ShardedRayClient(
            shards, self._coordinator, shard_size=self.shard_size, batch_size=self.batch_size, prefetch=self._prefetch
        )

    def __getattr__(self, name: str) -> Any:
        # methods for collectors and learners
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._client, name)

    def __getitem__(self, index: Any) -> Any:
        return self._client[index]

    def __len__(self) -> int:
        return len(self._client)

    def checkpoint(self) -> None:
        """Save a snapshot of every shard now."""
        for buffer in self._buffers:
            buffer.checkpoint()

    def memory_usage(self) -> list[MemoryUsage]:
        """Return the memory in use by each shard."""
        return [buffer.memory_usage() for buffer in self._buffers]

    def close(self) -> None:
        """Stop all actors."""
        if self._coordinator is not None:
            ray.kill(self._coordinator)
            self._coordinator = None
        while self._buffers:
            self._buffers.pop().close()
