"""Recordings of observation streams: what is replayed is what a vectorised environment of SB3 would have returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

from benchmarks import feed, stream_sources, streams

Array = npt.NDArray[Any]
N_STEPS = 40


class Source:
    """Random frames; every episode has 1 to 9 steps."""

    def __init__(self, seed: int, shape: tuple[int, ...] = (6, 5, 3), dtype: Any = np.uint8) -> None:
        self.rng = np.random.default_rng(seed)
        self.shape = shape
        self.dtype = dtype

    def _frame(self) -> Array:
        return (self.rng.random(self.shape) * 200).astype(self.dtype)

    def reset(self) -> Array:
        self.left = int(self.rng.integers(1, 10))
        return self._frame()

    def step(self) -> tuple[Array, bool]:
        self.left -= 1
        return self._frame(), self.left == 0

    def close(self) -> None:
        pass


class Env(gymnasium.Env[Array, np.int64]):
    """A source as a Gymnasium environment."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.observation_space = gymnasium.spaces.Box(0, 255, source.shape, source.dtype)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        return self.source.reset(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        frame, done = self.source.step()
        return frame, 0.0, done, False, {}


def expected(make: Callable[[int], Source], stack: int) -> Iterator[feed.Step]:
    """The same transitions from SB3's own vectorised environment."""
    env = VecFrameStack(
        DummyVecEnv([lambda index=index: Env(make(feed.SEED + index)) for index in range(feed.N_ENVS)]),  # type: ignore[misc]
        stack,
        channels_order="last",
    )
    obs = np.array(env.reset())
    for _ in range(N_STEPS):
        following, _, dones, infos = env.step(np.zeros(feed.N_ENVS, int))
        next_obs = np.array(following)
        for e in np.flatnonzero(dones):
            next_obs[e] = infos[e]["terminal_observation"]
        yield feed.Step(obs, next_obs, np.array(dones))
        obs = np.array(following)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SB3_EXTRA_BUFFERS_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((6, 5, 3), np.uint8), ((6, 5, 1), np.uint16), ((6, 5, 3), np.float32), ((17,), np.float64), ((5, 5), np.float32)],
)
def test_replays_what_a_vectorised_environment_returns(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: Any, channels_last: bool, stack: int
) -> None:
    def make(seed: int) -> Source:
        return Source(seed, shape, dtype)

    monkeypatch.setitem(streams.STREAMS, "random", streams.Stream(make))
    n_dones = 0
    replayed = feed.steps("random", N_STEPS, stack, channels_last)
    for got, want in zip(replayed, expected(make, stack), strict=True):
        for array, other in zip(got, want, strict=True):
            moved = np.moveaxis(other, -1, 1) if other.ndim == 4 and not channels_last else other
            assert array.dtype == other.dtype
            assert array.flags.c_contiguous
            np.testing.assert_array_equal(array, moved)
        n_dones += int(got.dones.sum())
    assert n_dones > 0


def test_an_interrupted_recording_is_recorded_again(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    class Broken(Source):
        def step(self) -> tuple[Array, bool]:
            raise KeyboardInterrupt

    monkeypatch.setitem(streams.STREAMS, "random", streams.Stream(Broken))
    with pytest.raises(KeyboardInterrupt):
        feed.record("random", N_STEPS)
    monkeypatch.setitem(streams.STREAMS, "random", streams.Stream(Source))
    assert len(list(feed.steps("random", N_STEPS))) == N_STEPS


@pytest.mark.parametrize("make", [stream_sources.Scroller, stream_sources.Noise])
def test_synthetic_streams_repeat_with_their_seed(make: Callable[[int], streams.Source]) -> None:
    sources = [make(seed) for seed in (0, 0, 1)]
    frames = [[source.reset()] + [source.step()[0] for _ in range(50)] for source in sources]
    np.testing.assert_array_equal(frames[0], frames[1])
    assert not np.array_equal(frames[0], frames[2])
    assert frames[0][0].dtype == np.uint8
