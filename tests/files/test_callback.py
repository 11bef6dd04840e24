"""Checkpoints during training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.errors import ArgumentError, LayoutError
from sb3_extra_buffers.files import BufferCheckpointCallback, load
from tests.files.filing import assert_same


class Pixels(gym.Env[Any, Any]):
    """A dot that moves; four frames are stacked."""

    observation_space = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at, self.stack = 0, np.zeros((4, 36, 36), np.uint8)
        return self.stack.copy(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        self.stack[:-1] = self.stack[1:]
        self.stack[-1] = 0
        self.stack[-1, self.at % 36, (3 * self.at + int(action)) % 36] = 255
        return self.stack.copy(), 1.0, self.at % 11 == 0, False, {}


def make_model(buffer_class: Any = CompressedReplayBuffer) -> Any:
    env = DummyVecEnv([Pixels])
    return DQN(
        "MlpPolicy", env, buffer_size=200, learning_starts=20, batch_size=8, replay_buffer_class=buffer_class,
        policy_kwargs={"net_arch": [4]}, device="cpu", seed=0,
    )  # fmt: skip


def test_keeps_the_last_checkpoints_and_each_can_be_loaded(tmp_path: Path) -> None:
    model = make_model()
    model.learn(100, callback=BufferCheckpointCallback(20, tmp_path, keep_last=2))

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rl_model_100_steps.zip",
        "rl_model_80_steps.zip",
        "rl_model_buffer_100_steps",
        "rl_model_buffer_80_steps",
    ]
    # SB3 calls back before it adds the step
    for steps in (80, 100):
        found = CompressedReplayBuffer.load(tmp_path / f"rl_model_buffer_{steps}_steps")
        assert found.pos == steps - 1
        np.testing.assert_array_equal(found.observations[: steps - 1], model.replay_buffer.observations[: steps - 1])
    shared = [next((tmp_path / f"rl_model_buffer_{steps}_steps").glob("data-*")) for steps in (80, 100)]
    assert shared[0].samefile(shared[1])


def test_the_end_of_training_is_saved_once(tmp_path: Path) -> None:
    model = make_model()
    model.learn(30, callback=BufferCheckpointCallback(10**6, tmp_path / "short"))
    model.learn(30, callback=BufferCheckpointCallback(20, tmp_path / "long"), reset_num_timesteps=False)

    # 4 is train_freq
    assert sorted(path.name for path in (tmp_path / "short").iterdir()) == [
        "rl_model_32_steps.zip",
        "rl_model_buffer_32_steps",
    ]
    assert load(tmp_path / "short" / "rl_model_buffer_32_steps").size() == 32
    found = sorted(path.name for path in (tmp_path / "long").glob("*buffer*"))
    assert found == ["rl_model_buffer_52_steps", "rl_model_buffer_64_steps"]
    assert load(tmp_path / "long" / found[1]).size() == model.num_timesteps == 64


def test_save_freq_counts_calls_of_env_step(tmp_path: Path) -> None:
    """As in SB3's `CheckpointCallback`, whose checkpoints have the same names."""
    for name, callback in (("ours", BufferCheckpointCallback), ("theirs", CheckpointCallback)):
        model = DQN(
            "MlpPolicy", DummyVecEnv([Pixels] * 3), buffer_size=99, learning_starts=99, device="cpu",
            policy_kwargs={"net_arch": [4]}, replay_buffer_class=CompressedReplayBuffer,
        )  # fmt: skip
        model.learn(72, callback=callback(8, str(tmp_path / name)))
    ours, theirs = (sorted(path.name for path in (tmp_path / name).glob("*.zip")) for name in ("ours", "theirs"))
    assert ours == theirs == ["rl_model_24_steps.zip", "rl_model_48_steps.zip", "rl_model_72_steps.zip"]


def test_training_resumed_from_a_checkpoint_is_identical(tmp_path: Path) -> None:
    model = make_model()
    model.learn(60, callback=BufferCheckpointCallback(30, tmp_path, keep_last=None))
    straight, resumed = (DQN.load(tmp_path / "rl_model_60_steps.zip", env=DummyVecEnv([Pixels])) for _ in range(2))
    model.replay_buffer.save(tmp_path / "buffer")
    straight.replay_buffer = model.replay_buffer
    resumed.replay_buffer = load(tmp_path / "buffer")

    for each in (straight, resumed):
        each.set_random_seed(3)
        each.learn(20, reset_num_timesteps=False)

    assert resumed.replay_buffer.size() == 80
    assert_same(straight.replay_buffer, resumed.replay_buffer)
    for name, weights in straight.policy.state_dict().items():
        assert (weights == resumed.policy.state_dict()[name]).all()


def test_save_replay_buffer_of_sb3_still_works(tmp_path: Path) -> None:
    model = make_model()
    model.learn(40)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    other = make_model()
    other.load_replay_buffer(tmp_path / "buffer.pkl")

    assert_same(model.replay_buffer, other.replay_buffer)


def test_the_newest_checkpoints_are_kept_where_an_earlier_training_made_more_steps(tmp_path: Path) -> None:
    make_model().learn(60, callback=BufferCheckpointCallback(20, tmp_path))
    make_model().learn(20, callback=BufferCheckpointCallback(8, tmp_path, keep_last=2))

    found = sorted(path.name for path in tmp_path.glob("*buffer*"))
    assert found == ["rl_model_buffer_16_steps", "rl_model_buffer_20_steps"]


@pytest.mark.parametrize("name", ["save_freq", "keep_last"])
@pytest.mark.parametrize("count", [0, 1.5, "10"])
def test_counts_that_are_not_counts_are_named(name: str, count: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"{name} must be an integer of at least 1, got {count!r}"):
        BufferCheckpointCallback(**{"save_freq": 10, "save_path": tmp_path, name: count})


def test_a_dense_buffer_is_refused_before_training(tmp_path: Path) -> None:
    model = make_model(None)

    with pytest.raises(LayoutError, match="DQN has no compressed buffer to save"):
        model.learn(10, callback=BufferCheckpointCallback(5, tmp_path))
