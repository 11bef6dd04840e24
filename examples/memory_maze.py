"""Parts of `example_recurrent_dqn.py`: a maze that needs memory, and a recurrent Q-network."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

# steps to the end of the corridor, and steps that the light is on
CORRIDOR, SHOWN = 20, 8


class MemoryMaze(gym.Env[npt.NDArray[np.uint8], int]):
    """A T-maze, as images: the agent walks down a corridor, and at its end turns up (0) or down (1).

    For the first steps, a light shows which turn is right: reward 1, otherwise -1. At the end, the images of all
    episodes are the same, so that an agent without memory is right half of the time.
    """

    observation_space = gym.spaces.Box(0, 255, (1, 32, 32), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self.position, self.side = 0, int(self.np_random.integers(2))
        return self.image(), {}

    def step(self, action: int) -> tuple[npt.NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        if self.position < CORRIDOR:
            self.position += 1
            return self.image(), 0.0, False, False, {}
        return self.image(), 1.0 if int(action) == self.side else -1.0, True, False, {}

    def image(self) -> npt.NDArray[np.uint8]:
        image = np.full((1, 32, 32), 60, np.uint8)
        image[0, 12:20, 2:28] = image[0, 4:28, 24:28] = 120
        image[0, 14:18, 2 + self.position : 6 + self.position] = 200
        if self.position < SHOWN:
            image[0, 24 * self.side : 24 * self.side + 8, :16] = 255
        return image


class RecurrentQ(nn.Module):
    """Q-values of each step of a window, from images and the state before the first of them."""

    def __init__(self, n_actions: int, hidden: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(392, 64), nn.LayerNorm(64)
        )
        self.memory = nn.GRU(64, hidden, batch_first=True)
        self.values = nn.Linear(hidden, n_actions)
        with torch.no_grad():  # begin with a long memory: the update gate keeps most of the state
            self.memory.bias_ih_l0[hidden : 2 * hidden] += 2.0

    def forward(self, images: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values ``[batch, n, n_actions]`` and the states after each of the ``n`` steps."""
        encoded = self.encoder(images.flatten(0, 1) / 255).unflatten(0, images.shape[:2])
        states, _ = self.memory(encoded, state[None])
        return self.values(states), states
