"""ViZDoom scenarios as a vectorised environment with RGB or label (segmentation) frames."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt


class DoomFrames(gymnasium.Env[npt.NDArray[np.uint8], np.int64]):
    """One scenario, four tics per step, frames of 160x120: RGB, or one label byte per pixel."""

    def __init__(self, scenario: str, labels: bool, seed: int) -> None:
        import vizdoom

        self.game = vizdoom.DoomGame()
        self.game.load_config(f"{vizdoom.scenarios_path}/{scenario}.cfg")
        self.game.set_window_visible(False)
        self.game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        self.game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        self.game.set_labels_buffer_enabled(True)
        self.game.set_seed(seed)
        self.game.init()
        self.labels = labels
        n_buttons = self.game.get_available_buttons_size()
        self.action_space = gymnasium.spaces.Discrete(n_buttons)
        self.observation_space = gymnasium.spaces.Box(0, 255, (120, 160, 1 if labels else 3), np.uint8)
        self._buttons = np.eye(n_buttons, dtype=int).tolist()

    def _frame(self) -> npt.NDArray[np.uint8]:
        state: Any = self.game.get_state()  # None after the last step of an episode, contrary to its type
        if state is None:
            return np.zeros(self.observation_space.shape or (), np.uint8)
        return np.array(state.labels_buffer[..., None] if self.labels else state.screen_buffer)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self.game.new_episode()
        return self._frame(), {}

    def step(self, action: Any) -> tuple[npt.NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        reward = self.game.make_action(self._buttons[int(action)], 4)
        done = self.game.is_episode_finished()
        return self._frame(), float(reward), done, False, {}

    def close(self) -> None:
        self.game.close()


def make_doom(name: str, n_envs: int, seed: int) -> Any:
    """``vizdoom-rgb`` or ``vizdoom-labels``, optionally followed by ``:scenario`` (default: ``defend_the_center``)."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    kind, _, scenario = name.partition(":")
    makers: list[Callable[[], gymnasium.Env[Any, Any]]] = [
        functools.partial(DoomFrames, scenario or "defend_the_center", kind == "vizdoom-labels", seed + index)
        for index in range(n_envs)
    ]
    return DummyVecEnv(makers)
