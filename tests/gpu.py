"""What tests on a GPU share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def never_waits() -> Iterator[None]:
    """Make every operation that torch knows to wait for the GPU raise."""
    _set_sync_debug_mode("error")
    try:
        yield
    finally:
        _set_sync_debug_mode("default")


def _set_sync_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def noting(seen: list[str]) -> Iterator[None]:
    """Append what the GPU and its driver do to ``seen``, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it keeps the events of one cycle, which is all there is
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiled:
            yield
        # the profiler itself waits for the device at the end
        seen += [event.key for event in profiled.key_averages() if event.key != "cudaDeviceSynchronize"]
