"""Observations for the GPU benchmarks: many streams of one recorded game, and a scene drawn on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.feed import SEED, STACK, Step

Array = npt.NDArray[Any]

# games played at the same time while recording
N_GAMES = 4


class Recording(NamedTuple):
    """Single frames of several games, in main memory."""

    frames: Array  # [step + 1, game, height, width]
    dones: npt.NDArray[np.bool_]  # [step, game]
    terminal: dict[tuple[int, int], Array]  # (step, game) -> last frame of the episode that ended there

    def streams(self, n_envs: int, n_steps: int) -> Iterator[Step]:
        """``n_steps`` of ``n_envs`` environments with stacked frames, as ``VecFrameStack`` returns them.

        Each environment replays one of the games from another step on.
        """
        length, n_games = self.dones.shape
        if n_steps > length:
            raise ValueError(f"{length} steps were recorded, {n_steps} are needed")
        games = np.arange(n_envs) % n_games
        n_starts = -(-n_envs // n_games)
        starts = np.arange(n_envs) // n_games * ((length - n_steps) // max(n_starts - 1, 1))
        obs = np.zeros((n_envs, STACK, *self.frames.shape[2:]), np.uint8)
        obs[:, -1] = self.frames[starts, games]
        for step in range(n_steps):
            now = starts + step
            following = np.concatenate([obs[:, 1:], self.frames[now + 1, games][:, None]], axis=1)
            next_obs, dones = following, self.dones[now, games]
            if dones.any():
                next_obs = following.copy()
                for env in np.flatnonzero(dones):
                    next_obs[env, -1] = self.terminal[int(now[env]), int(games[env])]
                    following[env, :-1] = 0
            yield Step(obs, next_obs, dones)
            obs = following


def record(game: str, n_steps: int) -> Recording:
    """Play ``game`` with random actions, in ale-py's threads: seconds, so nothing is kept on disk."""
    from sb3_extra_buffers.training_utils.atari import make_env

    env: Any = make_env(f"{game}NoFrameskip-v4", n_envs=N_GAMES, framestack=1, native=True, seed=SEED)
    actions = np.random.default_rng(SEED)
    first = env.reset()
    frames = np.empty((n_steps + 1, N_GAMES, *first.shape[-2:]), np.uint8)
    frames[0] = first[:, 0]
    dones = np.zeros((n_steps, N_GAMES), bool)
    terminal = {}
    for step in range(n_steps):
        obs, _, dones[step], infos = env.step(actions.integers(0, env.action_space.n, N_GAMES))
        frames[step + 1] = obs[:, 0]
        for index in np.flatnonzero(dones[step]):
            terminal[step, int(index)] = np.array(infos[index]["terminal_observation"])[0]
    env.close()
    return Recording(frames, dones, terminal)


class TensorStep(NamedTuple):
    """One step of all environments, as a simulator on the device returns it."""

    obs: torch.Tensor
    next_obs: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    dones: torch.Tensor


class Scene:
    """Environments drawn on the device: a background for each episode, and sprites that move across it."""

    SHAPE = (64, 64, 3)
    _EPISODE, _N_BACKGROUNDS, _N_SPRITES, _SPRITE = 200, 64, 4, 8

    def __init__(self, n_envs: int, device: str) -> None:
        self._n_envs, self._device = n_envs, device
        draw = torch.Generator(device).manual_seed(SEED)
        options: dict[str, Any] = {"generator": draw, "device": device}
        height, width, channels = self.SHAPE
        # large patches of one colour with a little texture, as rendered scenes have
        coarse = torch.randint(0, 200, (self._N_BACKGROUNDS, channels, 8, 8), dtype=torch.float32, **options)
        smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
        texture = torch.randint(0, 8, smooth.shape, **options)
        self._backgrounds = (smooth + texture).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        self._envs = torch.arange(n_envs, device=device)
        free = height - self._SPRITE
        self._starts = torch.randint(0, free, (n_envs, self._N_SPRITES, 2), **options)
        self._speeds = torch.randint(-2, 3, (n_envs, self._N_SPRITES, 2), **options)
        self._colours = torch.randint(0, 256, (n_envs, self._N_SPRITES, 1, 1, channels), **options).to(torch.uint8)
        inside = torch.arange(self._SPRITE, device=device)
        self._inside = (inside[:, None] * width + inside)[:, :, None] * channels + torch.arange(channels, device=device)

    def _draw(self, episode: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        height, width, channels = self.SHAPE
        images = self._backgrounds[(31 * self._envs + 17 * episode) % self._N_BACKGROUNDS]
        corners = (self._starts + self._speeds * time[:, None, None]) % (height - self._SPRITE)
        first = (corners[..., 0] * width + corners[..., 1]) * channels
        where = first[:, :, None, None, None] + self._inside  # [env, sprite, row, column, channel]
        flat = images.reshape(self._n_envs, -1)
        for sprite in range(self._N_SPRITES):
            colours = self._colours[:, sprite].expand(where[:, sprite].shape)
            flat.scatter_(1, where[:, sprite].flatten(1), colours.flatten(1))
        return flat.view(self._n_envs, *self.SHAPE)

    def steps(self, n_steps: int) -> Iterator[TensorStep]:
        """``n_steps`` of all environments, whose episodes end at different times."""
        zeros = torch.zeros(self._n_envs, device=self._device)
        actions = zeros.to(torch.int64)
        for step in range(n_steps):
            clock = step + 7 * self._envs
            episode, time = clock // self._EPISODE, clock % self._EPISODE
            dones = (time == self._EPISODE - 1).to(torch.float32)
            yield TensorStep(self._draw(episode, time), self._draw(episode, time + 1), actions, zeros, dones)
