"""Evaluation and warm-up: the report, the transitions that buffers receive, and errors."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.errors import EnvironmentOptionError, SpecMismatchError
from sb3_extra_buffers.training_utils.buffer_warmup import warm_up
from sb3_extra_buffers.training_utils.eval_model import EvalResult, eval_model


class CountingEnv(gymnasium.Env[Any, Any]):
    """Episodes of 3, 4, 5, … steps; observations are the step number, rewards are 1."""

    def __init__(self, dictionary: bool = False) -> None:
        box = gymnasium.spaces.Box(0, 255, (1, 36, 36), np.uint8)
        self.observation_space = gymnasium.spaces.Dict({"a": box}) if dictionary else box
        self.action_space = gymnasium.spaces.Discrete(2)
        self.dictionary, self.length, self.step_number = dictionary, 2, 0

    def frame(self) -> Any:
        frame = np.full((1, 36, 36), self.step_number, np.uint8)
        return {"a": frame} if self.dictionary else frame

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.length, self.step_number = self.length + 1, 0
        return self.frame(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        return self.frame(), 1.0, self.step_number == self.length, False, {}


class ConstantModel:
    """Always takes action 0."""

    def predict(self, obs: Any, **_: Any) -> tuple[Any, None]:
        return np.zeros(len(obs["a"] if isinstance(obs, dict) else obs), np.int64), None


def make_counting_envs(n_envs: int = 2, dictionary: bool = False, monitored: bool = True) -> DummyVecEnv:
    def make() -> Any:
        env = CountingEnv(dictionary)
        return Monitor(env) if monitored else env

    return DummyVecEnv([make for _ in range(n_envs)])


# ---- the report ----


@pytest.mark.parametrize(
    ("rewards", "name", "report"),
    [
        (
            [21.0] * 9999 + [20.0],
            "Final",
            "(Final) Evaluated 10000 episodes, mean reward: 21.0 +/- 0.01\n"
            "Q1:   21 | Q2:   21 | Q3:   21 | Relative IQR: 0.00 | Min: 20 | Max: 21",
        ),
        (
            [2300.0, 2300, 2490, 3000, 3000],
            "Best",
            "(Best ) Evaluated 5 episodes, mean reward: 2618.0 +/- 319.52\n"
            "Q1: 2300 | Q2: 2490 | Q3: 3000 | Relative IQR: 0.28 | Min: 2300 | Max: 3000",
        ),
        (
            [-20.5, -21],
            None,
            "Evaluated 2 episodes, mean reward: -20.8 +/- 0.25\n"
            "Q1: -20.88 | Q2: -20.75 | Q3: -20.62 | Relative IQR: 0.01 | Min: -21 | Max: -20.50",
        ),
    ],
)
def test_report_reads_as_documented(rewards: list[float], name: str | None, report: str) -> None:
    result = EvalResult(np.array(rewards), np.zeros(len(rewards), np.int64), 0)

    assert result.report(name) == report


def test_relative_iqr_with_a_median_of_zero() -> None:
    def spread(*rewards: float) -> float:
        return EvalResult(np.array(rewards), np.zeros(len(rewards), np.int64), 0).relative_iqr

    assert spread(0, 0, 0) == 0
    assert spread(-4, 0, 4) == float("inf")


# ---- playing ----


@pytest.mark.parametrize("monitored", [True, False])
def test_every_environment_plays_an_equal_share(monitored: bool, capsys: pytest.CaptureFixture[str]) -> None:
    result = eval_model(ConstantModel(), make_counting_envs(2, monitored=monitored), 5, progress_bar=False)

    # shares of 2 and 3, episodes of 3, 4 and 5 steps
    assert sorted(result.rewards) == [3, 3, 4, 4, 5]
    assert sorted(result.lengths) == [3, 3, 4, 4, 5]
    assert result.n_steps == 2 * 12
    assert result.add_seconds == {}
    assert capsys.readouterr().out.startswith("Evaluated 5 episodes, mean reward: 3.8 +/- 0.75\nQ1:    3 |")


def test_progress_bar_and_report_can_be_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    eval_model(ConstantModel(), make_counting_envs(), 2, progress_bar=True, verbose=False)
    output = capsys.readouterr()
    eval_model(ConstantModel(), make_counting_envs(), 2, progress_bar=False, verbose=False)

    assert "2/2" in output.err
    assert output.out == ""
    assert capsys.readouterr() == ("", "")


def make_buffer(env: Any, cls: Any = ReplayBuffer, size: int = 40, **options: Any) -> Any:
    return cls(size, env.observation_space, env.action_space, device="cpu", n_envs=env.num_envs, **options)


def test_buffers_receive_the_same_transitions_and_are_timed() -> None:
    env = make_counting_envs(2)
    buffers = {"dense": make_buffer(env), "compressed": make_buffer(env, CompressedReplayBuffer)}
    result = eval_model(ConstantModel(), env, 4, buffer=buffers, progress_bar=False, verbose=False)

    assert result.n_steps == 14
    assert list(result.add_seconds) == ["dense", "compressed"]
    assert all(seconds > 0 for seconds in result.add_seconds.values())
    for buffer in buffers.values():
        assert buffer.pos == 7
        # episodes of three and four steps; the last next observation is the terminal one
        np.testing.assert_array_equal(buffer.observations[:7, 1, 0, 0, 0], [0, 1, 2, 0, 1, 2, 3])
        np.testing.assert_array_equal(buffer.next_observations[:7, 0, 0, 0, 0], [1, 2, 3, 1, 2, 3, 4])
        np.testing.assert_array_equal(buffer.dones[:7, 0], [0, 0, 1, 0, 0, 0, 1])


def test_buffers_without_names() -> None:
    env = make_counting_envs(1)
    one, two = make_buffer(env), make_buffer(env)
    assert list(eval_model(ConstantModel(), env, 1, one, progress_bar=False, verbose=False).add_seconds) == ["0"]
    eval_model(ConstantModel(), env, 1, [one, two], progress_bar=False, verbose=False)

    # the environment had begun an episode of 4 when it was reset
    assert (one.pos, two.pos) == (3 + 5, 5)


def test_terminal_observations_of_dict_spaces() -> None:
    env = make_counting_envs(1, dictionary=True)
    buffer = make_buffer(env, DictReplayBuffer)
    eval_model(ConstantModel(), env, 1, buffer, progress_bar=False, verbose=False)

    np.testing.assert_array_equal(buffer.next_observations["a"][:3, 0, 0, 0, 0], [1, 2, 3])


def test_transitions_match_those_that_sb3_stores() -> None:
    def pendulum() -> Any:
        return VecNormalize(make_vec_env("Pendulum-v1", 1, seed=0))

    sac = SAC(
        "MlpPolicy",
        pendulum(),
        seed=0,
        learning_starts=0,
        buffer_size=250,
        device="cpu",
        gradient_steps=0,
        policy_kwargs={"net_arch": [8]},
    )
    env = pendulum()
    buffer = make_buffer(env, size=250)
    warm_up(sac, env, buffer, n_steps=205, progress_bar=False)
    sac.learn(205)
    theirs = sac.replay_buffer

    assert theirs is not None
    # scaled actions; rewards and observations from before VecNormalize
    assert np.abs(buffer.actions[:205]).max() <= 1
    assert buffer.rewards[:205].min() < -2
    assert np.abs(buffer.observations[:205, 0, 2]).max() > 1.5
    assert buffer.dones[199, 0] == theirs.dones[199, 0] == 1
    assert buffer.timeouts[199, 0] == theirs.timeouts[199, 0] == 1
    gap = np.abs(buffer.next_observations[198, 0] - buffer.observations[199, 0]).max()
    assert gap == 0
    assert not np.array_equal(buffer.next_observations[199, 0], buffer.observations[200, 0])


# ---- warm-up ----


def test_warm_up_fills_the_buffer_of_the_model() -> None:
    env = make_counting_envs(2)
    model = DQN("CnnPolicy", env, buffer_size=20, device="cpu", replay_buffer_class=CompressedReplayBuffer, seed=0)
    seconds = warm_up(model, env, progress_bar=False)

    assert model.replay_buffer is not None
    assert model.replay_buffer.full
    assert list(seconds) == ["0"]
    assert model.replay_buffer.sample(4).observations.shape == (4, 1, 36, 36)


def test_warm_up_adds_as_many_transitions_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    env = make_counting_envs(2)
    buffers = [make_buffer(env), make_buffer(env)]
    warm_up(ConstantModel(), env, buffers, n_steps=12)

    assert [buffer.pos for buffer in buffers] == [6, 6]
    assert "12/12" in capsys.readouterr().err


# ---- errors ----


@pytest.mark.parametrize("n_steps", [7, 0, -2])
def test_steps_that_are_not_a_multiple_of_the_environments_raise(n_steps: int) -> None:
    env = make_counting_envs(2)
    buffer = make_buffer(env)

    with pytest.raises(EnvironmentOptionError, match=f"pass n_steps={8 if n_steps == 7 else 2}"):
        warm_up(ConstantModel(), env, buffer, n_steps=n_steps, progress_bar=False)
    assert buffer.pos == 0


def test_buffer_for_other_environments_raises() -> None:
    env = make_counting_envs(2)

    with pytest.raises(EnvironmentOptionError, match="create it with n_envs=2"):
        eval_model(ConstantModel(), env, 1, make_buffer(make_counting_envs(3)), progress_bar=False)
    with pytest.raises(SpecMismatchError, match=r"env\.observation_space"):
        eval_model(
            ConstantModel(), env, 1, {"mine": make_buffer(make_counting_envs(2, dictionary=True), DictReplayBuffer)}
        )


def test_invalid_arguments_raise() -> None:
    with pytest.raises(EnvironmentOptionError, match="DummyVecEnv"):
        eval_model(ConstantModel(), CountingEnv(), 1)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(EnvironmentOptionError, match="at least 1, got 0"):
        eval_model(ConstantModel(), make_counting_envs(), 0)
    with pytest.raises(EnvironmentOptionError, match="ConstantModel has no replay buffer"):
        warm_up(ConstantModel(), make_counting_envs())


def test_environments_that_sb3_wraps_are_those_of_the_model() -> None:
    env = make_vec_env(lambda: FakeImageEnv(screen_height=36, screen_width=36, n_channels=1))  # channels last
    model = DQN("CnnPolicy", env, buffer_size=20, device="cpu", replay_buffer_class=CompressedReplayBuffer, seed=0)

    with pytest.raises(SpecMismatchError, match=r"if it is the model's, pass model\.get_env\(\)"):
        warm_up(model, env, progress_bar=False)
    wrapped = model.get_env()
    assert wrapped is not None
    warm_up(model, wrapped, progress_bar=False)
    assert model.replay_buffer is not None
    assert model.replay_buffer.full
