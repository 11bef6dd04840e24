"""The threads that decode large batches, shared by every store of a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

_pools: dict[int, ThreadPoolExecutor] = {}


def n_workers() -> int:
    """Threads that a batch may be split over."""
    if hasattr(os, "sched_getaffinity"):
        return max(min(len(os.sched_getaffinity(0)), 8), 1)
    return max(min(os.cpu_count() or 1, 8), 1)


def run_split(work: Callable[[int, int], Result], n_rows: int, n_parts: int) -> list[Result]:
    """Call ``work(first, stop)`` on ``n_parts`` even pieces of ``range(n_rows)``, the last one in this thread."""
    n_parts = min(n_parts, n_rows)
    if n_parts <= 1:
        return [work(0, n_rows)]
    # threads do not survive a fork: a child starts its own
    pool = _pools.get(os.getpid())
    if pool is None:
        _pools.clear()
        pool = _pools[os.getpid()] = ThreadPoolExecutor(n_workers(), "sb3-extra-buffers")
    cuts = [n_rows * part // n_parts for part in range(n_parts + 1)]
    others = [pool.submit(work, cuts[part], cuts[part + 1]) for part in range(n_parts - 1)]
    try:
        last = work(cuts[-2], cuts[-1])
    finally:
        # nobody may still be writing into the caller's arrays when this returns
        results = [other.result() for other in others]
    return [*results, last]
