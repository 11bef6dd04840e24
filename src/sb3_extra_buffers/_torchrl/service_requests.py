"""Latency hiding for clients of a served buffer: batches are requested ahead, packets are acknowledged later."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

from sb3_extra_buffers.errors import ArgumentError

__all__ = ["PacketSender", "Prefetcher"]

Result = Callable[[], Any]
Send = Callable[[list[Any], list[int]], tuple[int, BaseException | None]]

# packets that are sent in one call
_MAX_PER_CALL = 16


class Prefetcher:
    """Keeps ``depth`` requests in flight, and fetches their results in a thread of its own, in order.

    A request is a function that sends something and returns a function, which waits for the answer and decodes it. If
    the answer is dropped, that function's method ``discard`` is called instead, if it has one.
    """

    def __init__(self, depth: int) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ArgumentError(f"prefetch must be an integer of at least 0, got {depth!r}")
        self.depth = depth
        self._lock = threading.Lock()
        self._key: Hashable = None
        self._futures: deque[Future[Any]] = deque()
        self._jobs: queue.SimpleQueue[Any] | None = None

    def next(self, key: Hashable, request: Callable[[], Result]) -> Any:
        """Return the answer to the oldest request; requests with another ``key`` are dropped."""
        if not self.depth:
            return request()()
        with self._lock:
            if key != self._key:
                self._drop()
                self._key = key
            while len(self._futures) <= self.depth:
                self._futures.append(self._submit(request()))
            future = self._futures.popleft()
        try:
            return future.result()
        except BaseException:
            # what was requested later failed too, or was requested from a buffer in another state
            self.drop()
            raise

    def drop(self) -> None:
        """Drop all requests in flight."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        for future in self._futures:
            future.cancel()
        self._futures.clear()

    def _submit(self, result: Result) -> Future[Any]:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            # the thread must not keep this object alive; a daemon, because it may wait forever
            threading.Thread(target=_work, args=(self._jobs,), name="replay-prefetch", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        future: Future[Any] = Future()
        self._jobs.put((future, result))
        return future


def _work(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        future, result = job
        if future.set_running_or_notify_cancel():
            try:
                answer = result()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(answer)
                del answer
        elif hasattr(result, "discard"):
            with contextlib.suppress(Exception):
                result.discard()
        # a dropped result must not stay in memory until the next one arrives
        del job, future, result


class PacketSender:
    """Sends packets in a thread of its own: in order, one call at a time, several packets in one call.

    ``send`` takes a list of packets and the number of items of each, and returns how many of the packets are stored,
    and the error that stopped it, if any. Packets are stored without gaps: after an error, all later packets are
    dropped, and the next call of `put` or `flush` raises the error.
    """

    def __init__(self, send: Send, max_pending: int) -> None:
        if isinstance(max_pending, bool) or not isinstance(max_pending, int) or max_pending < 1:
            raise ArgumentError(f"max_pending must be a positive integer, got {max_pending!r}")
        self._outbox = _Outbox(max_pending)
        self._send: Any = send

    def put(self, packet: Any, n_items: int) -> None:
        """Send ``packet`` later; waits while `max_pending` packets are not acknowledged yet."""
        outbox = self._outbox
        with outbox.changed:
            if not outbox.started:
                outbox.started = True
                threading.Thread(target=outbox.run, args=(self._send,), name="replay-sender", daemon=True).start()
                weakref.finalize(self, outbox.close)
                self._send = None
            outbox.changed.wait_for(lambda: outbox.error is not None or len(outbox.packets) < outbox.max_pending)
            outbox.raise_error()
            outbox.packets.append((packet, n_items))
            outbox.changed.notify_all()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all packets are acknowledged."""
        outbox = self._outbox
        with outbox.changed:
            if not outbox.changed.wait_for(lambda: outbox.error is not None or not outbox.packets, timeout):
                n_items = sum(count for _, count in outbox.packets)
                raise TimeoutError(f"{n_items} items are not acknowledged after {timeout} s; they are still being sent")
            outbox.raise_error()


class _Outbox:
    """What a `PacketSender` shares with its thread."""

    def __init__(self, max_pending: int) -> None:
        self.max_pending = max_pending
        self.changed = threading.Condition()
        # packets that are not acknowledged, oldest first, with their numbers of items
        self.packets: deque[tuple[Any, int]] = deque()
        self.error: BaseException | None = None
        self.started = self.closed = False

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def run(self, send: Send) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.packets or self.closed)
                if not self.packets:
                    return
                batch = list(self.packets)[:_MAX_PER_CALL]
            try:
                n_stored, error = send([packet for packet, _ in batch], [count for _, count in batch])
            except BaseException as raised:
                n_stored, error = 0, raised
            with self.changed:
                for _ in range(n_stored):
                    self.packets.popleft()
                if error is not None:
                    n_items = sum(count for _, count in self.packets)
                    # Python 3.10 has no notes
                    with contextlib.suppress(AttributeError):
                        error.add_note(f"{n_items} items that were passed to extend(wait=False) are not acknowledged")
                    self.packets.clear()
                    self.error = error
                self.changed.notify_all()
