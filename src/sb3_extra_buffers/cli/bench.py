"""Methods tried on observations: what each takes, and which one to use."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.cli.contents import Contents, need, open_any, progress
from sb3_extra_buffers.codecs.registry import is_available
from sb3_extra_buffers.errors import FileFormatError

Array = npt.NDArray[Any]

METHODS = (
    "none",
    "delta",
    "delta2",
    "delta3",
    "palette",
    "zstd1",
    "zstd-5",
    "lz4-frame/1",
    "igzip1",
    "gzip1",
    "rle-jit",
)
# an observation that is this much smaller may take this much longer to read: twice for half
_WORTH = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """What one method takes."""

    method: str
    percent: float
    write_us: float
    read_us: float

    @property
    def score(self) -> float:
        """Less is better: memory first, and time where memory is about equal."""
        return float(np.log(max(self.percent, 1e-3)) + 0.35 * np.log(max(self.read_us, 0.1)))


def available_methods() -> list[str]:
    names = {"delta2": "zstd", "delta3": "zstd", "lz4-frame/1": "lz4-frame", "rle-jit": "rle-jit"}
    return [method for method in METHODS if is_available(names.get(method, method.rstrip("0123456789-")))]


def observations_from(source: str, n_steps: int, key: str | None, seed: int = 0) -> Array:
    """``(steps, environments, ...)`` observations of a saved buffer or of an environment that is played at random."""
    if Path(source).exists():
        _, buffer = open_any(source)
        contents = Contents(buffer)
        leaf = contents.pictures(key)._leaf
        count = min(n_steps, contents.n_steps)
        return np.stack([leaf[step] for step in contents.order[:count].tolist()])
    return _play(source, n_steps, seed)


def _play(env_id: str, n_steps: int, seed: int) -> Array:
    from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecTransposeImage

    env: Any
    if "NoFrameskip" in env_id or env_id.startswith("ALE/"):
        need("ale_py", "extra")
        need("cv2", "extra")
        import ale_py
        import gymnasium
        from stable_baselines3.common.env_util import make_atari_env

        gymnasium.register_envs(ale_py)
        env = VecTransposeImage(VecFrameStack(make_atari_env(env_id, n_envs=2, seed=seed), 4))
    else:
        import gymnasium

        try:
            env = DummyVecEnv([lambda: gymnasium.make(env_id)])
        except gymnasium.error.Error as problem:
            raise FileFormatError(f"{env_id!r} is neither a saved buffer nor an environment: {problem}") from problem
        env.seed(seed)
    if isinstance(env.observation_space.sample(), dict):
        raise FileFormatError(f"{env_id} has Dict observations; save a buffer of it and name a key")
    rng = np.random.default_rng(seed)
    env.action_space.seed(seed)
    found = [np.array(env.reset())]
    for _ in progress(range(n_steps - 1), f"playing {env_id}"):
        actions = [env.action_space.sample() for _ in range(env.num_envs)]
        if hasattr(env.action_space, "n"):
            actions = list(rng.integers(0, env.action_space.n, env.num_envs))
        found.append(np.array(env.step(np.array(actions))[0]))
    env.close()
    return np.stack(found)


def bench(observations: Array, methods: list[str], batch: int = 32) -> list[Row]:
    """Write and read ``observations`` with each method; one that changes anything is an error, not a row."""
    from sb3_extra_buffers.compressed.array import CompressedArray
    from sb3_extra_buffers.compressed.dtypes import init_jit

    n_steps, n_envs, *shape = observations.shape
    rng = np.random.default_rng(0)
    picks = [(rng.integers(0, n_steps, batch), rng.integers(0, n_envs, batch)) for _ in range(40)]
    rows = []
    for method in progress(methods, "methods"):
        init_jit(method, tuple(shape), observations.dtype)
        array = CompressedArray((n_steps, n_envs), shape, observations.dtype, compression_method=method)
        start = time.perf_counter()
        for step in range(n_steps):
            array[step] = observations[step]
        array.store.choose_method()
        written = time.perf_counter() - start
        if not np.array_equal(array[: min(64, n_steps)], observations[:64]):
            raise AssertionError(f"{method} changed the observations; refusing to report on it")
        array[picks[0]]
        taken = []
        for pick in picks:
            start = time.perf_counter()
            found = array[pick]
            taken.append(time.perf_counter() - start)
        if not np.array_equal(found, observations[picks[-1]]):
            raise AssertionError(f"{method} changed the observations; refusing to report on it")
        usage = array.memory_usage()
        rows.append(
            Row(
                method,
                100 * usage.total / observations.nbytes,
                1e6 * written / (n_steps * n_envs),
                1e6 * float(np.median(taken)) / batch,
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    """Rows as text, one line to a method."""
    lines = [f"{'method':<14}{'% of dense':>12}{'write us':>12}{'read us':>12}"]
    lines += [f"{row.method:<14}{row.percent:>12.3f}{row.write_us:>12.2f}{row.read_us:>12.2f}" for row in rows]
    return "\n".join(lines)


def recommend(rows: list[Row]) -> Row:
    """The method that suits best: small, and quick to read."""
    return min(rows, key=lambda row: row.score)


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Memory against reading time, a dot for each method."""
    matplotlib = need("matplotlib", "extra")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    best = recommend(rows)
    for row in rows:
        axes.scatter(row.read_us, row.percent, color="tab:red" if row is best else "tab:blue")
        axes.annotate(row.method, (row.read_us, row.percent), textcoords="offset points", xytext=(5, 4))
    axes.set(xscale="log", yscale="log", xlabel="us to read an observation", ylabel="% of dense memory", title=title)
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
