"""One compressed buffer for many machines: TorchRL's Ray replay buffer, with compressed packets on the wire."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sb3_extra_buffers.errors import ArgumentError, MissingExtraError, ServiceLostError
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
from sb3_extra_buffers.stores.usage import MemoryUsage

try:
    import ray
    from ray.exceptions import RayActorError
    from tensordict import TensorDictBase
    from torchrl.data import RayReplayBuffer
    from torchrl.data.replay_buffers.ray_buffer import _RayReplayBufferClient

    from sb3_extra_buffers._torchrl.packet_group import decode_batch
    from sb3_extra_buffers._torchrl.service import GENERATION, CompressedReplayService, as_items
    from sb3_extra_buffers._torchrl.service_limiter import RateLimiter
    from sb3_extra_buffers._torchrl.service_requests import PacketSender, Prefetcher
    from sb3_extra_buffers._torchrl.wire import KeyframeCache, Lease, PacketEncoder, decode_packet
except ImportError as error:
    raise MissingExtraError(
        f"CompressedRayReplayBuffer needs 'ray' and 'torchrl': {MissingExtraError.hint('ray')}"
    ) from error

__all__ = ["CompressedRayClient", "CompressedRayReplayBuffer", "CompressedReplayService", "RateLimiter"]

# threads of the actor: collectors that wait for the rate limiter must not keep learners from being answered
THREADS = {"collectors": 4, "learners": 4}


class ActorService(CompressedReplayService):
    """The service as a Ray actor, which calls it from several threads."""

    # Ray finds the threads by the name of the function: wrappers that take over another name do not work

    @ray.method(concurrency_group="collectors")
    def extend(self, *args: Any, **kwargs: Any) -> Any:
        return super().extend(*args, **kwargs)

    @ray.method(concurrency_group="collectors")
    def extend_packets(self, *args: Any) -> Any:
        return super().extend_packets(*args)

    @ray.method(concurrency_group="learners")
    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return super().sample(*args, **kwargs)

    @ray.method(concurrency_group="learners")
    def draw(self, *args: Any) -> Any:
        return super().draw(*args)


class CompressedRayClient(_RayReplayBufferClient):  # type: ignore[misc]  # torchrl ships no types
    """The handle for collectors and learners, which encodes and decodes packets in their process.

    Args:
        actor: The Ray actor that holds the buffer.
        has_gpu: Whether the actor has a GPU.
        prefetch: How many batches `sample` requests ahead; a batch is drawn this many calls before it is returned.
        max_pending: The maximum number of unacknowledged packets of ``extend(wait=False)``.
        compression_method: How observations are encoded; a buffer with the same method stores them without decoding.
        n_envs: The number of environments that take turns in the items.
        limiter: An actor whose ``admit_items`` must return before items are stored, and which is told by
            ``finish_items`` how many of them were, for a limit over several buffers.
    """

    def __init__(
        self,
        actor: Any,
        *,
        has_gpu: bool = False,
        prefetch: int = 2,
        max_pending: int = 8,
        compression_method: str = "auto",
        n_envs: int | None = None,
        limiter: Any = None,
    ) -> None:
        super().__init__(actor, has_gpu=has_gpu)
        self._options = {"prefetch": prefetch, "max_pending": max_pending}
        self._encoding: dict[str, Any] = {"method": compression_method, "n_envs": n_envs}
        self._limiter = limiter
        self._start()

    def _start(self) -> None:
        # packets are numbered by client; a copy is another client, with another name
        self._writer = uuid.uuid4().hex
        self._number = 0
        self._writing = threading.Lock()
        self._encoder = PacketEncoder(**self._encoding)
        self._keyframes = KeyframeCache()
        self._batches = Prefetcher(self._options["prefetch"])
        self._sender = PacketSender(partial(_send, self._actor, self._limiter), self._options["max_pending"])
        self._priority_key: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("_actor", "has_gpu", "_options", "_encoding", "_limiter")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def actor(self) -> Any:
        """The Ray actor that holds the buffer."""
        return self._actor

    # ---- collectors ----

    def extend(self, data: TensorDictBase, *, wait: bool = True, **kwargs: Any) -> Any:
        """Store ``data`` and return its indices.

        With ``wait=False``, return None once the items are queued, and wait only while ``max_pending`` packets are
        unacknowledged. Call `flush` at the end; it raises if anything could not be stored. The items of a client are
        always stored in order.
        """
        items = as_items(data)
        with self._writing:
            self._number += 1
            packet = self._encoder.encode(items.exclude("index"), writer=self._writer, number=self._number)
            if not wait:
                if kwargs:
                    raise ArgumentError(f"extend(wait=False) does not take {', '.join(kwargs)}")
                self._sender.put(packet, len(items))
                return None
            self._sender.flush()
            return _store(self._limiter, len(items), partial(self._actor.extend.remote, packet, **kwargs))

    def add(self, data: TensorDictBase) -> Any:
        """Store a single item."""
        return self.extend(as_items(data).unsqueeze(0))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was passed to ``extend(wait=False)`` is stored.

        Raises `TimeoutError` after ``timeout`` seconds; sending goes on.
        """
        self._sender.flush(timeout)

    # ---- learners ----

    def sample(self, batch_size: int | None = None, return_info: bool = False, **kwargs: Any) -> Any:
        """Return a batch of the buffer's sampler, and request and decode the next batches in the background.

        If drawing fails or ``batch_size`` changes, batches that were requested ahead are dropped.
        """
        actor, keyframes = self._actor, self._keyframes

        def request() -> Callable[[], Any]:
            lease = keyframes.lease()
            reference = actor.sample.remote(batch_size, return_info, lease.known, **kwargs)
            return Answer([reference], lambda: _decode(fetch(reference), lease))

        return self._batches.next((batch_size, return_info, *kwargs.items()), request)

    def next(self) -> Any:
        """Return the next batch of an iteration."""
        return self.sample()

    def __getitem__(self, index: Any) -> Any:
        return decode_packet(self._ask("packed", index))

    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> int:
        """Set priorities, and return of how many items.

        With the ``"index_generation"`` of a sampled batch, items that were overwritten since are skipped.
        """
        count: int = self._ask("update_priority", index, priority, generation)
        return count

    def update_tensordict_priority(self, data: TensorDictBase) -> int:
        """Set the priorities in ``data``, a sampled batch; return of how many items.

        Items that were overwritten since are skipped.
        """
        if self._priority_key is None:
            self._priority_key = self._ask("_getattr", "priority_key")
        # the observations need not travel
        keys = [self._priority_key, "index", GENERATION, "anchor_index", "validity_mask"]
        count: int = self._ask("update_tensordict_priority", as_items(data).select(*keys, strict=False))
        return count

    def empty(self, *args: Any, **kwargs: Any) -> None:
        """Remove all items."""
        self._ask("empty", *args, **kwargs)
        self._batches.drop()

    # ---- everything else ----

    def __len__(self) -> int:
        length: int = self._ask("__len__")
        return length

    def stats(self) -> Any:
        """Return TorchRL's statistics of the buffer."""
        return self._ask("stats")

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the actor and return its answer."""
        return fetch(getattr(self._actor, method).remote(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        super().__getattr__(name)
        return partial(self._ask, name)


def _send(actor: Any, limiter: Any, packets: list[Any], counts: list[int]) -> tuple[int, BaseException | None]:
    """Send packets with these numbers of items, and return how many packets are stored and what stopped it."""
    call = partial(actor.extend_packets.remote, packets)
    answer: tuple[int, BaseException | None] = _store(limiter, sum(counts), call, lambda it: sum(counts[: it[0]]))
    return answer


def _store(limiter: Any, n_items: int, call: Any, count_stored: Callable[[Any], int] | None = None) -> Any:
    """Return the answer to ``call(admitted)``, which stores ``n_items`` once ``limiter`` has admitted them.

    ``count_stored`` takes the answer and returns how many items were stored, by default all of them.
    """
    if limiter is None:
        return fetch(call(None))
    # Ray waits for this answer before it runs the call that it is passed to
    admitted = limiter.admit_items.remote(n_items)
    try:
        answer = fetch(call(admitted))
    except Exception:
        if was_admitted(admitted):
            ignore_errors(limiter.finish_items.remote(n_items, 0, admitted))
        raise
    limiter.finish_items.remote(n_items, n_items if count_stored is None else count_stored(answer))
    return answer


def was_admitted(admitted: Any) -> bool:
    """Whether a limiter has admitted what was asked for, or may still do so."""
    is_known, _ = ray.wait([admitted], timeout=0)
    try:
        ray.get(is_known)
    except Exception:
        return False
    return True


def ignore_errors(reference: Any) -> None:
    """Receive a result when it arrives: Ray reports errors that nobody receives as unhandled."""
    reference.future()


def fetch(reference: Any) -> Any:
    """Return the answer of an actor, or raise an error that says what happened to it."""
    try:
        return ray.get(reference)
    except RayActorError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if "creation task" in lines[0]:
            # the last line is the error in the actor's constructor
            raise ServiceLostError(f"the process that holds the buffer could not start: {lines[-1]}") from error
        reason = lines[0]
        raise ServiceLostError(
            f"the process that holds the buffer has ended or cannot be reached ({reason}). If the buffer had a folder, "
            "create a CompressedRayReplayBuffer with the same folder to load what was saved; otherwise it is lost"
        ) from error


class Answer:
    """What a `Prefetcher` waits for: ``finish()``, which fetches the results of ``references``."""

    def __init__(self, references: list[Any], finish: Callable[[], Any]) -> None:
        self._references, self._finish = references, finish

    def __call__(self) -> Any:
        try:
            return self._finish()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Drop the results when they arrive."""
        for reference in self._references:
            ignore_errors(reference)


def _decode(batch: Any, lease: Lease) -> Any:
    return (decode_batch(batch[0], lease), batch[1]) if isinstance(batch, tuple) else decode_batch(batch, lease)


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
        rate_limiter: A `RateLimiter`, which makes collectors or learners wait.
        prefetch: How many batches `sample` requests ahead.
        max_pending: The maximum number of unacknowledged packets of ``extend(wait=False)``, per client.
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
        rate_limiter: RateLimiter | None = None,
        prefetch: int = 2,
        max_pending: int = 8,
        compression_method: str = "auto",
        remote_config: Mapping[str, Any] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        config: dict[str, Any] = {"num_cpus": 1, "concurrency_groups": THREADS}
        if folder is not None:
            config |= {"max_restarts": -1, "max_task_retries": -1}
        make_storage = partial(CompressedStorage, max_size, n_envs=n_envs, compression_method=compression_method)
        make_storage()  # wrong arguments raise here rather than in the actor
        super().__init__(
            replay_buffer_cls=ActorService,
            storage=make_storage,
            sampler=sampler,
            batch_size=batch_size,
            folder=None if folder is None else os.path.abspath(folder),
            sync=sync,
            rate_limiter=rate_limiter,
            remote_config=config | dict(remote_config or {}),
            ray_init_config=None if ray_init_config is None else dict(ray_init_config),
            transport="ray",
            **kwargs,
        )
        self._max_size = max_size
        self._client_options: dict[str, Any] = {
            "prefetch": prefetch,
            "max_pending": max_pending,
            "compression_method": compression_method,
            "n_envs": n_envs,
        }
        self._client = self.client()

    def __repr__(self) -> str:
        # TorchRL's shows the parts of the buffer, which are in the actor
        return f"{type(self).__name__}({self._max_size:,} items at most, held by another process)"

    @property
    def actor(self) -> Any:
        """The Ray actor that holds the buffer."""
        return self._rb

    def client(self, **options: Any) -> CompressedRayClient:
        """Return a new handle for collectors and learners; ``options`` replace those of the buffer."""
        return CompressedRayClient(self._rb, has_gpu=self.has_gpu, **self._client_options | options)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was passed to ``extend(wait=False)`` of this object is stored.

        Raises `TimeoutError` after ``timeout`` seconds; sending goes on.
        """
        self._client.flush(timeout)

    def update_tensordict_priority(self, data: TensorDictBase) -> int:
        """Set the priorities in ``data``, a sampled batch; return of how many items.

        Items that were overwritten since are skipped.
        """
        count: int = self._client.update_tensordict_priority(data)
        return count

    def empty(self, *args: Any, **kwargs: Any) -> None:
        """Remove all items."""
        self._client.empty(*args, **kwargs)

    def checkpoint(self) -> None:
        """Save a snapshot to ``folder`` now; the actor also does so whenever its journal has grown."""
        fetch(self._rb.checkpoint.remote())

    def rate(self) -> dict[str, float]:
        """Return the counters of the rate limiter: items stored, samples drawn and the balance."""
        state: dict[str, float] = fetch(self._rb.rate.remote())
        return state

    def memory_usage(self) -> MemoryUsage:
        """Return the memory in use, compared with that of uncompressed tensors."""
        usage: MemoryUsage = fetch(self._rb.memory_usage.remote())
        return usage

    def process_id(self) -> int:
        """Return the ID of the process that holds the buffer."""
        number: int = fetch(self._rb.process_id.remote())
        return number
