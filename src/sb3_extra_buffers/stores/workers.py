"""Threads that decode large batches, shared by all stores of a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

Result = TypeVar("Result")

_pools: dict[int, ThreadPoolExecutor] = {}


def n_workers() -> int:
    """How many threads may share a batch."""
    if hasattr(os, "sched_getaffinity"):
        return max(min(len(os.sched_getaffinity(0)), 8), 1)
    return max(min(os.cpu_count() or 1, 8), 1)


def run_split(work: Callable[[int, int], Result], n_rows: int, chunk: int) -> list[Result]:
    """Call ``work(first, stop)`` for every ``chunk`` of ``range(n_rows)``, in this thread and in others.

    Each thread takes the next chunk when it has finished one. If the other cores are busy, as they are while torch's
    threads spin, this thread does nearly everything itself and loses nothing.
    """
    starts = iter(range(0, n_rows, chunk))  # next() is atomic

    def drain() -> list[Result]:
        return [work(first, min(first + chunk, n_rows)) for first in starts]

    n_others = min(n_workers(), -(-n_rows // chunk)) - 1
    if n_others <= 0:
        return drain()
    # threads do not survive a fork: a child process starts its own
    pool = _pools.get(os.getpid())
    if pool is None:
        _pools.clear()
        pool = _pools.setdefault(os.getpid(), ThreadPoolExecutor(n_workers(), "sb3-extra-buffers"))
    others = [pool.submit(drain) for _ in range(n_others)]
    try:
        results = drain()
    finally:
        for _ in starts:  # none are left, unless this thread was interrupted
            pass
        # cancel those that have not started; the others use the caller's arrays, until their last chunk is done
        running = [other for other in others if not other.cancel()]
        try:
            wait(running)
        except BaseException:
            wait(running)
            raise
    for other in others:
        if not other.cancelled():
            results += other.result()
    return results
