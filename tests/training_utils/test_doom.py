"""ViZDoom environments: types of observations, episode ends and errors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.errors import EnvironmentOptionError, MissingExtraError, UnknownEnvironmentError
from sb3_extra_buffers.training_utils import doom

needs_vizdoom = pytest.mark.skipif(importlib.util.find_spec("vizdoom") is None, reason="needs ViZDoom")


def play(env: Any, n_steps: int) -> list[tuple[Any, ...]]:
    random = np.random.default_rng(0)
    return [env.step(random.integers(0, env.action_space.n, env.num_envs)) for _ in range(n_steps)]


@needs_vizdoom
@pytest.mark.parametrize(
    ("observation", "framestack", "channels"), [("rgb", None, 3), ("labels", 1, 1), ("classes", 2, 2)]
)
def test_observations(
    observation: Any,
    framestack: int | None,
    channels: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save_observations: Callable[[Any], Path | None],
) -> None:
    monkeypatch.chdir(tmp_path)
    env: Any = doom.make_env("defend_the_center", 1, framestack, observation=observation, seed=1)
    try:
        obs = env.reset()
        frames = np.array([step[0][0] for step in play(env, 12)])
    finally:
        env.close()

    save_observations(frames)
    assert env.observation_space.shape == obs.shape[1:] == (channels, 120, 160)
    assert len(np.unique(frames.reshape(12, -1), axis=0)) > 6
    if observation == "classes":
        assert set(np.unique(frames)) <= set(range(len(doom.CLASSES)))
        assert doom.CLASSES.index("Monster") in frames
    # the engine leaves an empty folder in the working directory, but no settings file
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@needs_vizdoom
def test_time_limit_is_reported_as_truncation() -> None:
    env: Any = doom.make_env("basic", 1, res=(120, 160), frame_skip=10, seed=0)
    try:
        env.reset()
        ends = [step[3][0] for step in play(env, 40) if step[2][0]]
    finally:
        env.close()

    assert ends
    for info in ends:
        assert info["terminal_observation"].any()
        # the time limit of this scenario is 300 tics
        assert info["TimeLimit.truncated"] == (info["episode"]["l"] == 30)
        assert info["episode"]["r"] != 0


@needs_vizdoom
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scenario": "no_such_scenario"}, UnknownEnvironmentError, "defend_the_center"),
        ({"res": (84, 84)}, EnvironmentOptionError, "RES_160X120"),
        ({"observation": "depth"}, EnvironmentOptionError, "'labels'"),
        ({"n_envs": 0}, EnvironmentOptionError, "n_envs.*got 0"),
    ],
)
def test_invalid_arguments_raise(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        doom.make_env(**options)


@pytest.mark.skipif(importlib.util.find_spec("vizdoom") is not None, reason="ViZDoom is installed")
def test_missing_vizdoom_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[vizdoom\]'"):
        doom.make_env()
