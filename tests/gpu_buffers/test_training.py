"""Agents trained with GPU buffers end with the weights that SB3's buffers give, and the examples run."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer
from sb3_extra_buffers.stores import device_base

EXAMPLES = Path(__file__).parents[2] / "examples"


class Moving(gym.Env[Any, Any]):
    """A dot on a stack of four frames that goes where it is told; episodes are cut off after a while."""

    observation_space = gym.spaces.Box(0, 255, (4, 36, 36), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = np.array([18, 18]), 0
        self.stack = np.zeros((4, 36, 36), np.uint8)
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place = (self.place + ((0, 1), (1, 0), (0, -1), (-1, 0))[int(action)]) % 36
        self.steps += 1
        return self._look(), float(self.place[0] > 18), bool(self.place[1] == 0), self.steps >= 23, {}

    def _look(self) -> Any:
        frame = np.zeros((36, 36), np.uint8)
        frame[self.place[0], self.place[1]] = 200
        self.stack = np.concatenate([self.stack[1:], frame[None]])
        return self.stack.copy()


def weights(model: Any) -> list[th.Tensor]:
    model.learn(300)
    return [parameter.detach().cpu().clone() for parameter in model.policy.parameters()]


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("as_on_gpus", [False, True])
@pytest.mark.parametrize("algorithm", [DQN, PPO])
def test_weights_equal_those_of_sb3(
    device: str, as_on_gpus: bool, algorithm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_on_gpus:
        monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
        monkeypatch.setattr(device_base, "has_triton", lambda: True)
    kwargs = {"compression_method": "delta"}
    if algorithm is DQN:
        common: dict[str, Any] = {"buffer_size": 200, "learning_starts": 50, "train_freq": 4}
        ours: dict[str, Any] = {"replay_buffer_class": GpuReplayBuffer, "replay_buffer_kwargs": kwargs}
    else:
        common = {"n_steps": 32, "batch_size": 32, "n_epochs": 2}
        ours = {"rollout_buffer_class": GpuRolloutBuffer, "rollout_buffer_kwargs": kwargs}
    trained = []
    for buffer in ({}, ours):
        env = DummyVecEnv([Moving, Moving])
        model = algorithm("CnnPolicy", env, seed=3, device=device, **common, **buffer)
        trained.append(weights(model))
    for a, b in zip(*trained, strict=True):
        assert th.equal(a, b)


@pytest.mark.parametrize(
    ("name", "needed", "said"),
    [
        ("train_gpu_replay", "ale_py", r"transitions: .* in SB3's ReplayBuffer.*saved .*dqn_pong\.zip"),
        ("train_gpu_rollout", "ale_py", r"transitions: .* in SB3's RolloutBuffer.*saved .*ppo_pong\.zip"),
        ("watch_gpu_replay", "cv2", r"20 steps, rewards .*agent\.gif"),
        ("watch_gpu_rollout", "cv2", r"20 steps, rewards .*agent\.gif"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # what the libraries around us warn of is theirs
def test_examples_run(
    name: str,
    needed: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(needed)
    path = EXAMPLES / f"example_{name}.py"
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(path), "--quick", "--output", str(tmp_path)])

    runpy.run_path(str(path), run_name="__main__")

    assert re.search(said, capsys.readouterr().out, re.DOTALL)
