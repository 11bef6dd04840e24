"""One measurement, for `benchmarks.run`: ``python -m benchmarks.measure '{"what": "speed", …}'`` prints it as JSON.

``memory`` is the growth of the resident set, ``speed`` the times of add and sample compared with SB3's, and ``million``
both for a long run.
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import feed

BATCHES = (32, 256)


def resident() -> int:
    """Resident set of this process, after returning free memory to the system.

    Pages of program files are left out where the system reports them separately: how many are mapped is random.
    """
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return int(psutil.Process().memory_info().rss)


def spaces(shape: tuple[int, ...]) -> tuple[Any, Any]:
    from gymnasium import spaces

    return spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(4)


def sb3_buffer(shape: tuple[int, ...], n_transitions: int, optimize: bool) -> Any:
    from stable_baselines3.common.buffers import ReplayBuffer

    return ReplayBuffer(
        n_transitions,
        *spaces(shape),
        device="cpu",
        n_envs=feed.N_ENVS,
        optimize_memory_usage=optimize,
        handle_timeout_termination=not optimize,
    )


class Sb3Buffer:
    """SB3's replay buffer with the interface of `CompressedPair`."""

    def __init__(self, shape: tuple[int, ...], n_steps: int, optimize: bool) -> None:
        self.buffer = sb3_buffer(shape, n_steps * feed.N_ENVS, optimize)
        self._rest = (np.zeros((feed.N_ENVS, 1), np.int64), np.zeros(feed.N_ENVS, np.float32))
        self._infos = [{} for _ in range(feed.N_ENVS)]

    def add(self, position: int, step: feed.Step) -> None:
        self.buffer.add(step.obs, step.next_obs, *self._rest, step.dones, self._infos)

    def sample(self, batch: int) -> Any:
        return self.buffer.sample(batch)


class CompressedPair:
    """Observations and next observations in two arrays that share frames, used as a replay buffer uses them."""

    def __init__(self, shape: tuple[int, ...], n_steps: int, method: str, options: dict[str, Any]) -> None:
        from sb3_extra_buffers.compressed import CompressedArray

        self.n_steps = n_steps
        self.observations = CompressedArray(
            (n_steps, feed.N_ENVS), shape, np.uint8, compression_method=method, compression_kwargs=options
        )
        self.next_observations = self.observations.sibling()
        self._random = np.random.default_rng(0)

    def add(self, position: int, step: feed.Step) -> None:
        self.observations.write_with(self.next_observations, position, step.obs, step.next_obs)

    def read(self, steps: Any, envs: Any) -> list[Any]:
        return self.observations.read_with([self.next_observations], (steps, envs))

    def sample(self, batch: int) -> Any:
        import torch

        steps = self._random.integers(0, self.n_steps, batch)
        envs = self._random.integers(0, feed.N_ENVS, batch)
        return [torch.from_numpy(part) for part in self.read(steps, envs)]


def make_buffer(shape: tuple[int, ...], n_steps: int, method: str, options: dict[str, Any]) -> Any:
    """A buffer for ``method``; ``sb3`` is SB3's own with ``optimize_memory_usage=True``."""
    return (
        Sb3Buffer(shape, n_steps, optimize=True) if method == "sb3" else CompressedPair(shape, n_steps, method, options)
    )


def warm_up(method: str, options: dict[str, Any], source: Iterator[feed.Step]) -> None:
    """Compile, import and allocate everything that happens only once, so that it is not measured.

    Done three times, because Python's allocator keeps memory that the first buffers needed temporarily.
    """
    from sb3_extra_buffers.compressed import init_jit

    init_jit("auto")
    first = next(source)
    for _ in range(3):
        buffer = make_buffer(first.obs.shape[1:], 120, method, options)
        for position, step in zip(range(120), source, strict=False):
            buffer.add(position, step)
        buffer.sample(64)
        resident()


def memory(game: str, n_steps: int, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Growth of the resident set while ``n_steps`` of every environment are stored."""
    warm_up(method, options, feed.steps(game, n_steps))
    source = feed.steps(game, n_steps)
    # after three steps, the feed has allocated everything that it will hold until the end
    step, _ = next(source), next(source)
    shape = step.obs.shape[1:]
    step = next(source)
    before = resident()
    buffer = make_buffer(shape, n_steps, method, options)
    expected_checksums: dict[int, tuple[int, ...]] = {}
    # next() rather than a loop: a generator that ends would free its memory before it is measured
    for position in range(n_steps - 3):
        step = next(source)
        buffer.add(position, step)
        if position % (n_steps // 8) == 0:
            expected_checksums[position] = checksums(step.obs, step.next_obs)
    growth = resident() - before
    result: dict[str, Any] = {
        "resident_bytes": growth,
        "dense_bytes": (n_steps - 3) * feed.N_ENVS * int(np.prod(shape)),
    }
    if method != "sb3":
        check(buffer, expected_checksums)
        usage = buffer.observations.memory_usage()
        result |= {"reported_bytes": usage.total, "chosen": usage.codecs[""]}
    return result


def checksums(*arrays: Any) -> tuple[int, ...]:
    return tuple(zlib.crc32(np.ascontiguousarray(array)) for array in arrays)


def check(buffer: CompressedPair, expected_checksums: dict[int, tuple[int, ...]]) -> None:
    """Refuse to report on a buffer that does not return what was added."""
    for position, expected in expected_checksums.items():
        actual = checksums(*buffer.read(np.full(feed.N_ENVS, position), np.arange(feed.N_ENVS)))
        if actual != expected:
            raise AssertionError(f"step {position} was not returned as it was added; no result is reported")


def speed(game: str, n_steps: int, method: str, options: dict[str, Any], repeats: int = 1000) -> dict[str, Any]:
    """Times of add and sample compared with SB3's, calls interleaved."""
    warm_up(method, options, feed.steps(game, n_steps))
    first = next(feed.steps(game, n_steps))
    shape = first.obs.shape[1:]
    theirs = Sb3Buffer(shape, n_steps, optimize=True)
    ours = make_buffer(shape, n_steps, method, options)
    times: tuple[list[float], list[float]] = ([], [])
    expected_checksums: dict[int, tuple[int, ...]] = {}
    for position, step in enumerate(feed.steps(game, n_steps)):
        # alternate the order: the second one finds the step in the cache
        pair = ((ours, times[0]), (theirs, times[1]))
        for buffer, seconds in pair if position % 2 else pair[::-1]:
            start = time.perf_counter()
            buffer.add(position, step)
            seconds.append(time.perf_counter() - start)
        if position % (n_steps // 8) == 0:
            expected_checksums[position] = checksums(step.obs, step.next_obs)
    result = {
        "add_us": 1e6 * statistics.median(times[0]),
        "sb3_add_us": 1e6 * statistics.median(times[1]),
        "fill_s": sum(times[0]),
        "sb3_fill_s": sum(times[1]),
    }
    # sampling is compared with SB3's default, which stores next observations separately
    del theirs
    dense = Sb3Buffer(shape, n_steps, optimize=False)
    for position, step in enumerate(feed.steps(game, n_steps)):
        dense.add(position, step)
    if method != "sb3":
        check(ours, expected_checksums)
    for batch in BATCHES:
        ours_us, sb3_us = interleave([ours.sample, dense.sample], batch, repeats if batch < 256 else repeats // 5)
        result |= {f"sample{batch}_us": ours_us, f"sb3_sample{batch}_us": sb3_us}
    return result


def interleave(calls: list[Callable[[int], Any]], batch: int, repeats: int) -> list[float]:
    """Median microseconds of each call with ``batch``, the calls interleaved."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(5):
        for call in calls:
            call(batch)
    for _ in range(repeats):
        for call, times in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call(batch)
            times.append(time.perf_counter() - start)
    return [1e6 * statistics.median(times) for times in seconds]


def million(game: str, n_steps: int, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Memory of a long run with all columns of a replay buffer, and sample times compared with a small buffer."""
    source = feed.native_steps(game, 1000)
    warm_up(method, options, source)
    source.close()  # type: ignore[attr-defined]  # a generator
    shape = (feed.STACK, *feed.SIZE)
    small = CompressedPair(shape, 2500, method, options)
    expected_checksums: dict[int, tuple[int, ...]] = {}
    before = resident()
    large = CompressedPair(shape, n_steps, method, options)
    indices = (n_steps, feed.N_ENVS)
    columns = [np.zeros((*indices, 1), np.int64), *(np.zeros(indices, np.float32) for _ in range(3))]
    for position, step in enumerate(feed.native_steps(game, n_steps)):
        large.add(position, step)
        for column in columns:
            column[position] = 1
        if position < small.n_steps:
            small.add(position, step)
        if position % (n_steps // 8) == 0:
            expected_checksums[position] = checksums(step.obs, step.next_obs)
        if position % 10_000 == 0:
            print(f"{position} of {n_steps} steps, {resident() / 1e6:.0f} MB", file=sys.stderr, flush=True)
    growth = resident() - before - small.observations.memory_usage().total
    check(large, expected_checksums)
    result: dict[str, Any] = {
        "resident_bytes": growth,
        "reported_bytes": large.observations.memory_usage().total + sum(column.nbytes for column in columns),
        "dense_bytes": n_steps * feed.N_ENVS * int(np.prod(shape)),
        "chosen": large.observations.memory_usage().codecs[""],
    }
    for batch in BATCHES:
        at_large, at_small = interleave([large.sample, small.sample], batch, 200)
        result |= {f"sample{batch}_us": at_large, f"small_sample{batch}_us": at_small}
    return result


def main() -> None:
    request = json.loads(sys.argv[1])
    measure = {"memory": memory, "speed": speed, "million": million}[request.pop("what")]
    print(json.dumps(measure(**request)))


if __name__ == "__main__":
    main()
