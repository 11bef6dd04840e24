"""Synthetic game transitions as TensorDicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

STACK = 4
SIDE = 24


def steps(n_steps: int, n_envs: int, seed: int = 0, episode: int = 17) -> Iterator[Any]:
    """Yield ``n_steps`` steps of stacked frames with a moving square; a new episode starts a new stack."""
    rng = np.random.default_rng(seed)
    backdrop = rng.integers(0, 255, (SIDE, SIDE), np.uint8)
    places = rng.integers(0, SIDE - 4, (n_envs, 2))

    def frames() -> Any:
        drawn = np.repeat(backdrop[None], n_envs, axis=0)
        for frame, (y, x) in zip(drawn, places, strict=True):
            frame[y : y + 4, x : x + 4] = 255
        return drawn

    obs = np.zeros((n_envs, STACK, SIDE, SIDE), np.uint8)
    obs[:, -1] = frames()
    for step in range(n_steps):
        places = np.clip(places + rng.integers(-1, 2, places.shape), 0, SIDE - 4)
        following = np.concatenate([obs[:, 1:], frames()[:, None]], axis=1)
        done = (np.arange(n_envs) * 5 + step) % episode == episode - 1
        yield TensorDict(
            {
                "observation": torch.from_numpy(obs.copy()),
                "action": torch.from_numpy(rng.integers(0, 6, n_envs)),
                "collector": {"traj_ids": torch.from_numpy((np.arange(n_envs) * 5 + step) // episode * n_envs)},
                "next": {
                    "observation": torch.from_numpy(following.copy()),
                    "reward": torch.from_numpy(rng.normal(size=(n_envs, 1)).astype(np.float32)),
                    "done": torch.from_numpy(done[:, None].copy()),
                },
            },
            batch_size=[n_envs],
        )
        following[done, :-1] = 0
        obs = following


def trajectory(n_steps: int, n_envs: int = 1, seed: int = 0) -> TensorDict:
    """Return these steps as one TensorDict of ``[n_steps * n_envs]`` items, step by step."""
    return torch.cat(list(steps(n_steps, n_envs, seed)))


def assert_same(one: TensorDict, other: TensorDict) -> None:
    """Assert that keys, shapes, dtypes and values are equal."""
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    assert one.shape == other.shape
    for key in one.keys(True, True):
        first, second = one.get(key), other.get(key)
        assert first.dtype == second.dtype
        assert torch.equal(first, second), key
