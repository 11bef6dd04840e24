"""Timing of calls that take turns; needs no framework, so that any environment can use it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def interleave(calls: list[Callable[[], Any]], repeats: int, first: int = 0) -> list[list[float]]:
    """Seconds of each call, the calls interleaved in alternating order."""
    taken: list[list[float]] = [[] for _ in calls]
    for repeat in range(first, first + repeats):
        order = list(enumerate(calls))
        for i, call in order if repeat % 2 else order[::-1]:
            start = time.perf_counter()
            call()
            taken[i].append(time.perf_counter() - start)
    return taken


def quantiles(times: list[float]) -> list[float]:
    """Microseconds: p20, p50 and p80."""
    if len(times) == 1:
        return [1e6 * times[0]] * 3
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return [1e6 * cuts[i] for i in (1, 4, 7)]
