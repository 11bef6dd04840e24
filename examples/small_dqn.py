"""Shared by the examples: a DQN with a small network, and the weights that `scripts/train_mspacman.py` trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

WEIGHTS = Path(__file__).with_name("dqn_mspacman.npz")


class SmallCnn(BaseFeaturesExtractor):
    """A fortieth of the weights of SB3's ``NatureCNN``: a file of 100 kB, and quick on a CPU."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, features_dim=32)
        self.layers = nn.Sequential(
            nn.Conv2d(observation_space.shape[0], 8, 8, stride=4), nn.ReLU(),
            nn.Conv2d(8, 16, 4, stride=2), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * 9 * 9, 32), nn.ReLU(),
        )  # fmt: skip

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layers(observations)


def make_small_dqn(env: Any, **options: Any) -> DQN:
    """Create an untrained DQN with the small network."""
    policy = {"features_extractor_class": SmallCnn, "net_arch": []}
    return DQN("CnnPolicy", env, policy_kwargs=policy, **options)


def save_weights(model: DQN, path: Path = WEIGHTS) -> None:
    """Save the Q-network in half precision, without pickle."""
    weights = {name: value.cpu().numpy().astype(np.float16) for name, value in model.q_net.state_dict().items()}
    np.savez_compressed(path, **weights)


def load_small_dqn(env: Any, device: str = "auto", path: Path = WEIGHTS) -> DQN:
    """Create a DQN with the trained weights; it only plays, so its replay buffer is tiny."""
    model = make_small_dqn(env, buffer_size=1, device=device)
    with np.load(path) as weights:
        model.q_net.load_state_dict({name: torch.from_numpy(weights[name].astype(np.float32)) for name in weights})
    return model
