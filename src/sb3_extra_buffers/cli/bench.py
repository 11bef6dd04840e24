"""Benchmark compression methods on observations and recommend one."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers._extras import import_extra
from sb3_extra_buffers.cli.convert import check_method
from sb3_extra_buffers.cli.reader import BufferReader, obs_shape, open_buffer, with_progress
from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import (
    ArgumentError,
    CorruptPayloadError,
    EmptyBufferError,
    ExtraBuffersError,
    UnknownEnvironmentError,
)
from sb3_extra_buffers.stores.choice import candidates, choose_unseen, compare

Array = npt.NDArray[Any]

# methods to compare besides those that `auto` considers
METHODS = ("zstd-5", "lz4-frame/1", "igzip1", "gzip1", "rle-jit")


@dataclass(frozen=True, slots=True)
class MethodResult:
    """Memory and time of one method."""

    method: str
    percent: float  # of dense memory
    write_us: float
    read_us: float
    score: float = math.inf
    """The score by which `auto` compares methods, lower is better; infinite if the method was not rated."""


def available_methods(observations: Array) -> list[str]:
    """Return the methods that fit ``observations`` and whose packages are installed."""
    spec, methods = ObsSpec(observations.shape[2:], observations.dtype), []
    for method in dict.fromkeys([*candidates(spec, "memory"), *METHODS]):
        with contextlib.suppress(ExtraBuffersError):
            get_codec(method).bind(spec)
            methods.append(method)
    return methods


def parse_methods(text: str) -> list[str]:
    """Return comma-separated methods; each must be known and installed."""
    methods = [method for part in text.split(",") if (method := part.strip())]
    if not methods:
        raise ArgumentError(f"--methods must name at least one method, got {text!r}")
    for method in methods:
        check_method(method)
    return methods


def load_observations(source: str, n_steps: int, key: str | None, seed: int = 0) -> Array:
    """Return observations ``(n_steps, n_envs, ...)`` of a saved buffer, or of random play in an environment."""
    if not Path(source).exists():
        return _play_randomly(source, n_steps, seed)
    reader = BufferReader(open_buffer(source)[1])
    n_steps, n_envs = min(n_steps, reader.n_steps), reader.n_envs
    if not n_steps:
        raise EmptyBufferError(f"{source} is empty: there is nothing to benchmark with")
    leaves = reader.leaves()
    # the largest observations are those to compress
    chosen = max(leaves, key=lambda name: math.prod(obs_shape(leaves[name])), default=None) if key is None else key
    if chosen not in leaves:
        raise ArgumentError(f"there are no observations under the key {chosen!r}; keys: {sorted(leaves)}")
    observations = reader.read(
        leaves[chosen], np.repeat(np.arange(n_steps), n_envs), np.tile(np.arange(n_envs), n_steps)
    )
    return observations.reshape(n_steps, n_envs, *observations.shape[1:])


def _play_randomly(env_id: str, n_steps: int, seed: int) -> Array:
    import gymnasium
    from stable_baselines3.common.vec_env import DummyVecEnv

    env: Any
    if "NoFrameskip" in env_id or env_id.startswith("ALE/"):
        from sb3_extra_buffers.training_utils.atari import make_env

        env = make_env(env_id, n_envs=2, framestack=4, seed=seed)
    else:
        try:
            env = DummyVecEnv([lambda: gymnasium.make(env_id)])
        except Exception as problem:  # an environment can raise anything
            raise UnknownEnvironmentError(
                f"{env_id!r} is neither a saved buffer nor an environment: {problem}"
            ) from problem
        env.seed(seed)
    if isinstance(env.observation_space, gymnasium.spaces.Dict):
        raise UnknownEnvironmentError(f"{env_id} has Dict observations; benchmark a saved buffer of it, with --key")
    env.action_space.seed(seed)
    observations = [np.array(env.reset())]
    for _ in with_progress(range(n_steps - 1), f"playing {env_id}"):
        actions = np.array([env.action_space.sample() for _ in range(env.num_envs)])
        observations.append(np.array(env.step(actions)[0]))
    env.close()
    return np.stack(observations)


def run_benchmark(
    observations: Array, methods: list[str], batch: int = 32, prefer: str | None = None
) -> list[MethodResult]:
    """Write and read ``observations`` with each method; raise if a method does not return them unchanged."""
    from sb3_extra_buffers.compressed.array import CompressedArray
    from sb3_extra_buffers.compressed.dtypes import init_jit

    n_steps, n_envs, *shape = observations.shape
    rng = np.random.default_rng(0)
    batches = [(rng.integers(0, n_steps, batch), rng.integers(0, n_envs, batch)) for _ in range(40)]
    spec = ObsSpec(tuple(shape), observations.dtype)
    rows = spec.to_rows(observations.reshape(-1, *shape))
    ranked = compare(spec, np.tile(np.arange(n_envs), n_steps), rows, n_envs, prefer, methods=methods)[1]
    # `rank` puts methods that save too little last, whatever their score: they must not get the best score here
    scores = {each.method: max(each.score, ranked[0].score) for each in ranked}
    unseen = choose_unseen(spec)
    if unseen is not None:
        scores = {unseen.method: 1.0}  # what `auto` does with vectors, without a trial
    results = []
    for method in with_progress(methods, "methods"):
        init_jit(method, tuple(shape), observations.dtype)
        array = CompressedArray((n_steps, n_envs), shape, observations.dtype, compression_method=method)
        start = time.perf_counter()
        for step in range(n_steps):
            array[step] = observations[step]
        array.store.choose_method()
        write_seconds = time.perf_counter() - start
        for index in (slice(64), batches[0]):
            # compare bytes, because NaN is not equal to itself
            if array[index].tobytes() != observations[index].tobytes():
                raise CorruptPayloadError(f"{method} changed the observations; please report this bug")
        read_seconds = []
        for index in batches:
            start = time.perf_counter()
            array[index]
            read_seconds.append(time.perf_counter() - start)
        percent = 100 * array.memory_usage().total / observations.nbytes
        write_us = 1e6 * write_seconds / (n_steps * n_envs)
        read_us = 1e6 * float(np.median(read_seconds)) / batch
        results.append(MethodResult(method, percent, write_us, read_us, scores.get(method, math.inf)))
    return results


def format_table(results: list[MethodResult]) -> str:
    """Format results as a table, one line per method."""
    best = min((each.score for each in results if 0 < each.score < math.inf), default=1.0)
    lines = [f"{'method':<14}{'memory':>10}{'write':>14}{'read':>14}{'score':>12}"]
    lines += [
        f"{each.method:<14}{each.percent:>8.2f} %{each.write_us:>11.1f} us{each.read_us:>11.1f} us"
        f"{f'{each.score / best:.2f}' if each.score < math.inf else '-':>12}"
        for each in results
    ]
    return "\n".join(lines)


def recommend(results: list[MethodResult]) -> MethodResult:
    """Return the method that `auto` would choose among these, by memory times modelled time."""
    return min(results, key=lambda result: result.score)


def plot(results: list[MethodResult], path: Path, title: str) -> None:
    """Plot memory against reading time, the recommended method in red."""
    import_extra("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    best = recommend(results)
    for result in results:
        axes.scatter(result.read_us, result.percent, color="tab:red" if result is best else "tab:blue")
        axes.annotate(result.method, (result.read_us, result.percent), textcoords="offset points", xytext=(5, 4))
    axes.set(xscale="log", yscale="log", xlabel="us to read an observation", ylabel="% of dense memory", title=title)
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
