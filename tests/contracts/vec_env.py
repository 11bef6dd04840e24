"""Small deterministic environments with any observation space, for tests of buffers."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from tests.contracts.buffer import Game


class GameEnv(gymnasium.Env[Any, Any]):
    """A `Game` as an environment: episodes have ``limit`` steps, every third one ends five steps earlier."""

    def __init__(self, space: spaces.Space[Any], actions: spaces.Space[Any], seed: int = 0, limit: int = 23) -> None:
        self.observation_space, self.action_space = space, actions
        self.seed, self.limit, self.n_episodes = seed, limit, -1
        self.game = Game(space, seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps, self.n_episodes = 0, self.n_episodes + 1
        return self.game.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, next_obs, _, _ = self.game.step()
        self.n_steps += 1
        terminated = self.n_episodes % 3 == 2 and self.n_steps == self.limit - 5
        reward = float(np.asarray(action).sum()) * 0.1 + self.n_steps % 5
        return next_obs, reward, terminated, self.n_steps >= self.limit, {}

    def action_masks(self) -> Any:
        """For `MaskablePPO`: masks out one action, another one at every step."""
        masks = np.full(int(self.action_space.n), True)  # type: ignore[attr-defined]  # it is Discrete
        masks[self.n_steps % len(masks)] = False
        return masks


def make_envs(space: spaces.Space[Any], actions: spaces.Space[Any], n_envs: int, seed: int = 0) -> DummyVecEnv:
    return DummyVecEnv([lambda env=env: GameEnv(space, actions, seed * 100 + env) for env in range(n_envs)])  # type: ignore[misc]


class SpacesOnlyVecEnv(DummyVecEnv):
    """Environments that are only used for their spaces."""

    def __init__(self, space: spaces.Space[Any], actions: spaces.Space[Any], n_envs: int) -> None:
        super().__init__([lambda: GameEnv(space, actions)] * n_envs)
