"""Timing work on a device: wall clock up to the point where the device is done, and kernels alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Run = Callable[[], Any]

# calls in a row of one candidate, so that each is timed with warm caches; the first ones of a block do not count
_BLOCK, _UNCOUNTED = 20, 2
# runs in one CUDA graph
_PER_GRAPH = 10


def wait(device: str) -> None:
    """Wait until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_us(run: Run, device: str) -> float:
    """Microseconds of one call, until the device is done."""
    wait(device)
    start = time.perf_counter()
    run()
    wait(device)
    return 1e6 * (time.perf_counter() - start)


def wall_us(runs: Mapping[str, Run], device: str, repeats: int = 300, seconds: float = 10.0) -> dict[str, list[float]]:
    """Microseconds of each call of each candidate, in alternating blocks.

    A candidate that takes more than ``seconds`` for all calls gets fewer of them.
    """
    block = min(_BLOCK, repeats)
    for run in runs.values():
        for _ in range(block):
            run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(0, repeats, block):
        for name, run in runs.items():
            if sum(taken[name]) < 1e6 * seconds:
                taken[name] += [time_us(run, device) for _ in range(block + _UNCOUNTED)][_UNCOUNTED:]
    return {name: times[:repeats] for name, times in taken.items()}


def capture(run: Run, times: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``times`` runs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph


def kernel_us(run: Run, device: str, repeats: int = 300) -> list[float]:
    """Microseconds of the kernels alone: replays of a CUDA graph. Without a GPU, of the calls."""
    if device != "cuda":
        return wall_us({"": run}, device, repeats)[""]
    graph = capture(run, _PER_GRAPH)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    taken = []
    for _ in range(repeats):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(1e3 * begin.elapsed_time(end) / _PER_GRAPH)
    return taken
