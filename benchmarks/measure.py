"""One measurement in a process of its own: ``python -m benchmarks.measure '{"what": …}'`` prints a JSON object."""

from __future__ import annotations

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
    """Resident set of this process, after giving back what is free.

    Without pages of program files, where the system tells them apart: which of those are mapped is chance.
    """
    gc.collect()
    _trim()
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return int(psutil.Process().memory_info().rss)


def _trim() -> None:
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


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


class Sb3:
    """SB3's replay buffer behind the verbs measured here."""

    def __init__(self, shape: tuple[int, ...], n_steps: int, optimize: bool) -> None:
        self.buffer = sb3_buffer(shape, n_steps * feed.N_ENVS, optimize)
        self._rest = (np.zeros((feed.N_ENVS, 1), np.int64), np.zeros(feed.N_ENVS, np.float32))
        self._infos = [{} for _ in range(feed.N_ENVS)]

    def add(self, position: int, step: feed.Step) -> None:
        self.buffer.add(step.obs, step.next_obs, *self._rest, step.dones, self._infos)

    def sample(self, batch: int) -> Any:
        return self.buffer.sample(batch)


class Ours:
    """Two arrays that share frames, written and read as SB3's buffers would."""

    def __init__(self, shape: tuple[int, ...], n_steps: int, method: str, options: dict[str, Any]) -> None:
        from sb3_extra_buffers.compressed import CompressedArray

        self.n_steps = n_steps
        self.observations = CompressedArray(
            (n_steps, feed.N_ENVS), shape, np.uint8, compression_method=method, compression_kwargs=options
        )
        self.next_observations = self.observations.next_view()
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


def make(shape: tuple[int, ...], n_steps: int, method: str, options: dict[str, Any]) -> Any:
    """A store for ``method``; ``sb3`` is SB3's own buffer at its thriftiest."""
    return Sb3(shape, n_steps, optimize=True) if method == "sb3" else Ours(shape, n_steps, method, options)


def warm_up(method: str, options: dict[str, Any], source: Iterator[feed.Step]) -> None:
    """Compile, load and allocate whatever is made once, so that it counts for neither memory nor time.

    Three times over: Python's own allocator keeps what the first stores needed in passing.
    """
    from sb3_extra_buffers.compressed import init_jit

    init_jit("auto")
    first = next(source)
    for _ in range(3):
        store = make(first.obs.shape[1:], 120, method, options)
        for position, step in zip(range(120), source, strict=False):
            store.add(position, step)
        store.sample(64)
        resident()


def memory(game: str, n_steps: int, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Growth of the resident set while ``n_steps`` of every environment are stored."""
    warm_up(method, options, feed.steps(game, n_steps))
    source = feed.steps(game, n_steps)
    # two steps in hand and a third being made: by now the feed holds what it will hold at the end
    step, _ = next(source), next(source)
    shape = step.obs.shape[1:]
    step = next(source)
    before = resident()
    store = make(shape, n_steps, method, options)
    kept: dict[int, tuple[int, ...]] = {}
    # one step at a time: a generator that has ended gives back what it holds
    for position in range(n_steps - 3):
        step = next(source)
        store.add(position, step)
        if position % (n_steps // 8) == 0:
            kept[position] = checksums(step.obs, step.next_obs)
    growth = resident() - before
    result: dict[str, Any] = {
        "resident_bytes": growth,
        "dense_bytes": (n_steps - 3) * feed.N_ENVS * int(np.prod(shape)),
    }
    if method != "sb3":
        check(store, kept)
        usage = store.observations.memory_usage()
        result |= {"reported_bytes": usage.total, "chosen": usage.codecs[""]}
    return result


def checksums(*arrays: Any) -> tuple[int, ...]:
    return tuple(zlib.crc32(np.ascontiguousarray(array)) for array in arrays)


def check(store: Ours, kept: dict[int, tuple[int, ...]]) -> None:
    """Refuse to report on a store that does not give back what went in."""
    for position, expected in kept.items():
        found = checksums(*store.read(np.full(feed.N_ENVS, position), np.arange(feed.N_ENVS)))
        if found != expected:
            raise AssertionError(f"step {position} came back changed; refusing to report on it")


def speed(game: str, n_steps: int, method: str, options: dict[str, Any], repeats: int = 1000) -> dict[str, Any]:
    """Add and sample times beside SB3's, step by step and batch by batch in turn."""
    warm_up(method, options, feed.steps(game, n_steps))
    first = next(feed.steps(game, n_steps))
    shape = first.obs.shape[1:]
    theirs = Sb3(shape, n_steps, optimize=True)
    ours = make(shape, n_steps, method, options)
    times: tuple[list[float], list[float]] = ([], [])
    kept: dict[int, tuple[int, ...]] = {}
    for position, step in enumerate(feed.steps(game, n_steps)):
        # whoever goes second finds the step in the cache: take turns
        pair = ((ours, times[0]), (theirs, times[1]))
        for store, taken in pair if position % 2 else pair[::-1]:
            start = time.perf_counter()
            store.add(position, step)
            taken.append(time.perf_counter() - start)
        if position % (n_steps // 8) == 0:
            kept[position] = checksums(step.obs, step.next_obs)
    result = {
        "add_us": 1e6 * statistics.median(times[0]),
        "sb3_add_us": 1e6 * statistics.median(times[1]),
        "fill_s": sum(times[0]),
        "sb3_fill_s": sum(times[1]),
    }
    # sampling is measured against SB3's default, which keeps next observations beside the observations
    del theirs
    dense = Sb3(shape, n_steps, optimize=False)
    for position, step in enumerate(feed.steps(game, n_steps)):
        dense.add(position, step)
    if method != "sb3":
        check(ours, kept)
    for batch in BATCHES:
        mine, others = in_turn([ours.sample, dense.sample], batch, repeats if batch < 256 else repeats // 5)
        result |= {f"sample{batch}_us": mine, f"sb3_sample{batch}_us": others}
    return result


def in_turn(calls: list[Callable[[int], Any]], batch: int, repeats: int) -> list[float]:
    """Median microseconds of each call with ``batch``, the calls interleaved."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(5):
        for call in calls:
            call(batch)
    for _ in range(repeats):
        for call, times in zip(calls, taken, strict=True):
            start = time.perf_counter()
            call(batch)
            times.append(time.perf_counter() - start)
    return [1e6 * statistics.median(times) for times in taken]


def million(game: str, n_steps: int, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """One long run with every column of a replay buffer, and the read times against a small one."""
    source = feed.native_steps(game, 1000)
    warm_up(method, options, source)
    source.close()  # type: ignore[attr-defined]  # a generator
    shape = (feed.STACK, *feed.SIZE)
    small = Ours(shape, 2500, method, options)
    kept: dict[int, tuple[int, ...]] = {}
    before = resident()
    large = Ours(shape, n_steps, method, options)
    indices = (n_steps, feed.N_ENVS)
    columns = [np.zeros((*indices, 1), np.int64), *(np.zeros(indices, np.float32) for _ in range(3))]
    for position, step in enumerate(feed.native_steps(game, n_steps)):
        large.add(position, step)
        for column in columns:
            column[position] = 1
        if position < small.n_steps:
            small.add(position, step)
        if position % (n_steps // 8) == 0:
            kept[position] = checksums(step.obs, step.next_obs)
        if position % 10_000 == 0:
            print(f"{position} of {n_steps} steps, {resident() / 1e6:.0f} MB", file=sys.stderr, flush=True)
    growth = resident() - before - small.observations.memory_usage().total
    check(large, kept)
    result: dict[str, Any] = {
        "resident_bytes": growth,
        "reported_bytes": large.observations.memory_usage().total + sum(column.nbytes for column in columns),
        "dense_bytes": n_steps * feed.N_ENVS * int(np.prod(shape)),
        "chosen": large.observations.memory_usage().codecs[""],
    }
    for batch in BATCHES:
        at_large, at_small = in_turn([large.sample, small.sample], batch, 200)
        result |= {f"sample{batch}_us": at_large, f"small_sample{batch}_us": at_small}
    return result


def main() -> None:
    request = json.loads(sys.argv[1])
    what = {"memory": memory, "speed": speed, "million": million}[request.pop("what")]
    print(json.dumps(what(**request)))


if __name__ == "__main__":
    main()
