"""Atari environments with SB3's wrappers and with ale-py's threads, and their errors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.errors import (
    EnvironmentOptionError,
    MissingExtraError,
    MissingRomError,
    UnknownEnvironmentError,
)
from sb3_extra_buffers.training_utils import atari

needs_ale = pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="needs ale-py")
needs_cv2 = pytest.mark.skipif(importlib.util.find_spec("cv2") is None, reason="needs OpenCV")
# SB3's wrapper uses deprecated NumPy functions
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:stable_baselines3")


def make_env(*args: Any, **kwargs: Any) -> Any:
    """`atari.make_env`, typed as Any: SB3's annotations do not say that observations are arrays."""
    return atari.make_env(*args, **kwargs)


def play(env: Any, n_steps: int, seed: int = 0) -> list[tuple[Any, ...]]:
    random = np.random.default_rng(seed)
    return [env.step(random.integers(0, env.action_space.n, env.num_envs)) for _ in range(n_steps)]


@needs_ale
@needs_cv2
@pytest.mark.parametrize(("framestack", "planes"), [(4, 4), (None, 1), (1, 1)])
def test_observations_are_stacked_and_channel_first(
    framestack: int | None, planes: int, save_observations: Callable[[Any], Path | None]
) -> None:
    env = make_env(env_id="PongNoFrameskip-v4", n_envs=2, framestack=framestack, seed=3)
    obs = env.reset()

    assert env.observation_space.shape == obs.shape[1:] == (planes, 84, 84)
    assert env.observation_space.contains(obs[0])
    next_obs = env.step(np.zeros(2, np.int64))[0]
    np.testing.assert_array_equal(next_obs[:, :-1], np.asarray(obs)[:, 1:])
    save_observations(np.concatenate([obs, next_obs]))
    env.close()


@needs_ale
@needs_cv2
@pytest.mark.parametrize("disabled", [False, True])
def test_observations_are_saved_for_inspection_unless_disabled(
    disabled: bool, save_observations: Callable[[Any], Path | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cv2 = pytest.importorskip("cv2")
    monkeypatch.setenv("DISABLE_TEST_OBSERVATIONS_SAVE", str(disabled).lower())
    env = make_env(env_id="PongNoFrameskip-v4", n_envs=2, framestack=4, seed=3)
    env.reset()
    obs = play(env, 30)[-1][0]
    env.close()
    path = save_observations(obs)
    assert (path is None) == disabled
    if path is not None:
        assert path.parent.name == "debug_obs"
        image = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        assert image.shape == (2 * 86 + 2, 4 * 86 + 2)
        np.testing.assert_array_equal(image[2:86, -86:-2], obs[0, 3])
        path.unlink()


@needs_ale
@needs_cv2
def test_make_env_matches_sb3() -> None:
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecTransposeImage

    ours = make_env("MsPacmanNoFrameskip-v4", 2, seed=5, wrapper_kwargs={"clip_reward": False})
    theirs = VecTransposeImage(
        VecFrameStack(
            make_atari_env("MsPacmanNoFrameskip-v4", 2, seed=5, wrapper_kwargs={"clip_reward": False}), n_stack=4
        )
    )
    np.testing.assert_array_equal(ours.reset(), theirs.reset())
    for mine, other in zip(play(ours, 60), play(theirs, 60), strict=True):
        for part, other_part in zip(mine[:3], other[:3], strict=True):
            np.testing.assert_array_equal(part, other_part)


@needs_ale
@needs_cv2
def test_frames_are_skipped_once_for_ids_with_frame_skipping() -> None:
    env = make_env("ALE/Pong-v5", 1, seed=0)
    env.reset()
    frames = [env.step([0])[3][0]["episode_frame_number"] for _ in range(2)]

    assert frames[1] - frames[0] == 4


@needs_ale
@needs_cv2
def test_subprocesses() -> None:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = make_env("PongNoFrameskip-v4", 1, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "spawn"})
    try:
        assert isinstance(env.unwrapped, SubprocVecEnv)
        assert env.reset().shape == (1, 4, 84, 84)
    finally:
        env.close()


@needs_ale
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("PnogNoFrameskip-v4", "Did you mean"),
        ("PongNoFrameskip-v9", "v0.*v4"),
        ("not an id", "Malformed"),
        ("CartPole-v1", "not an Atari game"),
    ],
)
def test_unknown_games_raise(name: str, message: str) -> None:
    with pytest.raises(UnknownEnvironmentError, match=message):
        make_env(name, n_envs=1)


@needs_ale
def test_missing_roms_raise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))

    with pytest.raises(MissingRomError, match=r"pong\.bin.*ALE_ROMS_DIR"):
        make_env("PongNoFrameskip-v4", n_envs=1)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_envs": 0}, "n_envs.*got 0"),
        ({"n_envs": 1.5}, "n_envs.*got 1.5"),
        ({"n_envs": True}, "n_envs"),
        ({"n_envs": "2"}, "n_envs"),
        ({"framestack": 0}, "framestack.*got 0"),
        ({"framestack": -1}, "framestack"),
    ],
)
def test_invalid_counts_raise(options: dict[str, Any], message: str, native: bool) -> None:
    with pytest.raises(EnvironmentOptionError, match=message):
        make_env("PongNoFrameskip-v4", native=native, **options)


@pytest.mark.skipif(importlib.util.find_spec("ale_py") is not None, reason="ale-py is installed")
def test_missing_ale_py_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[extra\]'"):
        make_env("PongNoFrameskip-v4", n_envs=1)


# ---- native ----


@needs_ale
class TestNative:
    def test_observations(self, save_observations: Callable[[Any], Path | None]) -> None:
        env = make_env("PongNoFrameskip-v4", 3, framestack=4, native=True, seed=1)
        obs = env.reset().copy()
        last_obs = obs.copy()

        assert env.observation_space.shape == obs.shape[1:] == (4, 84, 84)
        assert (obs[:, :3] == 0).all()
        assert obs[:, 3].any()
        for next_obs, rewards, dones, infos in play(env, 5):
            np.testing.assert_array_equal(next_obs[:, :-1], last_obs[:, 1:])
            assert rewards.dtype == np.float32
            assert dones.dtype == bool
            assert len(infos) == 3
            last_obs = next_obs
        save_observations(last_obs)
        env.close()

    def test_same_seed_gives_the_same_game(self) -> None:
        games = [make_env("BreakoutNoFrameskip-v4", 2, native=True, seed=seed) for seed in (4, 4, 5)]
        first = [env.reset() for env in games]
        runs = [[step[0] for step in play(env, 30)] for env in games]

        np.testing.assert_array_equal(first[0], first[1])
        np.testing.assert_array_equal(runs[0], runs[1])
        assert not np.array_equal(runs[0], runs[2])

    def test_episode_infos_have_unclipped_scores(self) -> None:
        env = make_env("MsPacmanNoFrameskip-v4", 1, native=True, seed=2)
        plain = make_env("MsPacmanNoFrameskip-v4", 1, native=True, seed=2, wrapper_kwargs={"clip_reward": False})
        env.reset()
        plain.reset()
        random = np.random.default_rng(0)
        score, episode = 0.0, None
        while episode is None:
            actions = random.integers(0, env.action_space.n, 1)
            obs, rewards, dones, (info,) = env.step(actions)
            raw = plain.step(actions)[1]
            score += raw[0]
            np.testing.assert_array_equal(rewards, np.sign(raw))
            assert ("terminal_observation" in info) == dones[0]
            episode = info.get("episode")

        assert dones[0]
        assert episode["r"] == score > 100
        assert episode["l"] > 4 * 50
        assert not info["TimeLimit.truncated"]
        assert (obs[0, :3] == 0).all()

    def test_a_lost_life_ends_an_episode_but_not_the_game(self) -> None:
        env = make_env("MsPacmanNoFrameskip-v4", 1, native=True, seed=2)
        whole = make_env(
            "MsPacmanNoFrameskip-v4", 1, native=True, seed=2, wrapper_kwargs={"terminal_on_life_loss": False}
        )
        np.testing.assert_array_equal(env.reset(), whole.reset())
        lost = None
        steps = zip(play(env, 400), play(whole, 400), strict=True)
        for number, ((obs, _, dones, infos), (seen, _, over, _)) in enumerate(steps):
            # the newest frame is the same in both: the game continues
            np.testing.assert_array_equal(obs[0, -1], seen[0, -1])
            if over[0]:
                break
            if dones[0]:
                lost = number
                assert "episode" not in infos[0]
                np.testing.assert_array_equal(infos[0]["terminal_observation"][-1], seen[0, -1])
            # frames of the previous life are blank
            since = 4 if lost is None else min(number - lost + 1, 4)
            np.testing.assert_array_equal(obs[0, -since:], seen[0, -since:])
            assert not obs[0, : 4 - since].any()
        assert lost is not None

    def test_time_limit_is_reported_as_truncation(self) -> None:
        env = make_env("PongNoFrameskip-v4", 1, native=True, seed=0, env_kwargs={"max_num_frames_per_episode": 120})
        env.reset()
        infos = [step[3][0] for step in play(env, 60) if step[2][0]]

        assert infos
        assert all(info["TimeLimit.truncated"] for info in infos)
        assert all(info["terminal_observation"].shape == (4, 84, 84) for info in infos)

    def test_sb3_trains_and_evaluates(self) -> None:
        from stable_baselines3 import PPO
        from stable_baselines3.common.evaluation import evaluate_policy

        env = make_env("PongNoFrameskip-v4", 2, native=True, seed=0, env_kwargs={"max_num_frames_per_episode": 100})
        model = PPO("CnnPolicy", env, n_steps=8, batch_size=16, n_epochs=1, seed=0, device="cpu")
        model.learn(16)
        lengths: Any = evaluate_policy(model, env, n_eval_episodes=2, return_episode_rewards=True)[1]

        assert model.num_timesteps == 16
        assert len(lengths) == 2
        assert min(lengths) >= 50

    @needs_cv2
    def test_frames_resemble_those_of_sb3(self) -> None:
        options = {"noop_max": 0, "clip_reward": False}
        native = make_env("MsPacmanNoFrameskip-v4", 1, native=True, seed=0, wrapper_kwargs=options)
        wrapped = make_env("MsPacmanNoFrameskip-v4", 1, seed=0, wrapper_kwargs=options)
        native.reset()
        wrapped.reset()
        for mine, other in zip(play(native, 80), play(wrapped, 80), strict=True):
            near = np.abs(mine[0].astype(int) - np.asarray(other[0]).astype(int)) <= 8
            assert near.mean() > 0.97
            np.testing.assert_array_equal(mine[1], other[1])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"vec_env_cls": object}, "vec_env_cls"),
            ({"monitor_dir": "logs"}, "monitor"),
            ({"env_kwargs": {"render_mode": "rgb_array"}}, "render_mode.*native"),
        ],
    )
    def test_unsupported_options_raise(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(EnvironmentOptionError, match=message):
            make_env("PongNoFrameskip-v4", 1, native=True, **options)

    def test_invalid_actions_raise(self) -> None:
        env = make_env("PongNoFrameskip-v4", 2, native=True)
        env.reset()

        for actions in ([0], [0.5, 0.5], [0, 6], [-1, 0], [[0, 0]]):
            with pytest.raises(EnvironmentOptionError, match="got"):
                env.step(np.array(actions))
        env.step(np.array([0, 5]))
