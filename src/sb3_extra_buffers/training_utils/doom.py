"""ViZDoom scenarios as vectorised environments, with RGB or segmentation frames."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt

from sb3_extra_buffers._extras import import_extra
from sb3_extra_buffers.errors import EnvironmentOptionError, UnknownEnvironmentError

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

__all__ = ["CLASSES", "DoomEnv", "make_env"]

Frame = npt.NDArray[np.uint8]
Observation = Literal["rgb", "labels", "classes"]

CLASSES = (
    "Background", "Unknown", "Self", "Player", "Monster", "Weapon", "Ammo", "Health", "Armor", "Powerup", "Key",
    "Decoration",
)  # fmt: skip
"""Meaning of the values in ``"classes"`` frames."""

_CLASS_IDS = {name: index for index, name in enumerate(CLASSES)}


def make_env(
    scenario: str = "defend_the_center",
    n_envs: int = 1,
    framestack: int | None = None,
    *,
    observation: Observation = "rgb",
    res: tuple[int, int] = (120, 160),
    frame_skip: int = 4,
    seed: int | None = None,
    vec_env_cls: type[Any] | None = None,
    vec_env_kwargs: Mapping[str, Any] | None = None,
) -> VecEnv:
    """Create ``n_envs`` games of a scenario; observations are ``(channels, *res)`` bytes.

    Args:
        scenario: A scenario that comes with ViZDoom, such as ``"deathmatch"``, or the path of a configuration file.
        n_envs: Number of environments.
        framestack: Frames per observation; None or 1 for single frames.
        observation: ``"rgb"``; ``"labels"`` for one byte per pixel that identifies the object; ``"classes"`` for one
            byte per pixel that identifies the class of the object (`CLASSES`).
        res: Height and width, one of ViZDoom's resolutions.
        frame_skip: Number of tics for which an action is repeated.
        seed: Seed of the first environment; each of the others has the next integer.
        vec_env_cls: SB3's ``DummyVecEnv`` (the default) or ``SubprocVecEnv``.
        vec_env_kwargs: Arguments of that class.

    Examples:
        >>> from sb3_extra_buffers.training_utils.doom import make_env
        >>> env = make_env("defend_the_center", n_envs=2, observation="labels")
        >>> env.reset().shape
        (2, 1, 120, 160)
        >>> env.close()
    """
    from stable_baselines3.common.vec_env import DummyVecEnv

    from sb3_extra_buffers.training_utils.atari import check_counts, stack_frames

    check_counts(n_envs, framestack)
    find_scenario(scenario)
    seeds = [None if seed is None else seed + index for index in range(n_envs)]
    makers: list[Any] = [
        functools.partial(_make_game, scenario, observation, res, frame_skip, env_seed) for env_seed in seeds
    ]
    env: VecEnv = (vec_env_cls or DummyVecEnv)(makers, **(vec_env_kwargs or {}))
    env.seed(seed)
    return stack_frames(env, framestack)


def _make_game(*arguments: Any) -> Any:
    from stable_baselines3.common.monitor import Monitor

    return Monitor(DoomEnv(*arguments))


def find_scenario(scenario: str) -> Path:
    """Return the path of the configuration file of ``scenario``."""
    folder = Path(import_extra("vizdoom", "vizdoom", "DoomEnv").scenarios_path)
    for path in (folder / f"{scenario}.cfg", Path(scenario)):
        if path.suffix == ".cfg" and path.exists():
            return path
    known = ", ".join(sorted(path.stem for path in folder.glob("*.cfg")))
    raise UnknownEnvironmentError(
        f"there is no scenario {scenario!r}; choose one of {known}, or pass the path of a .cfg file"
    )


class DoomEnv(gymnasium.Env[Frame, np.int64]):
    """One game of a scenario. Each action presses one button; buttons that take an amount are not available.

    ViZDoom renders no frame at the end of an episode: the last frame is repeated.

    Args:
        scenario: A scenario that comes with ViZDoom, or the path of a configuration file.
        observation: ``"rgb"``, ``"labels"`` or ``"classes"``, as for `make_env`.
        res: Height and width, one of ViZDoom's resolutions.
        frame_skip: Number of tics for which an action is repeated.
        seed: Seed of the game.

    Examples:
        >>> from sb3_extra_buffers.training_utils.doom import DoomEnv
        >>> env = DoomEnv("basic", observation="classes", seed=0)
        >>> obs, info = env.reset()
        >>> env.close()
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # Gymnasium's attribute, never modified
    render_mode = "rgb_array"

    def __init__(
        self,
        scenario: str = "defend_the_center",
        observation: Observation = "rgb",
        res: tuple[int, int] = (120, 160),
        frame_skip: int = 4,
        seed: int | None = None,
    ) -> None:
        if observation not in ("rgb", "labels", "classes"):
            raise EnvironmentOptionError(f"observation must be 'rgb', 'labels' or 'classes', got {observation!r}")
        path = find_scenario(scenario)
        import vizdoom

        height, width = res
        resolution = getattr(vizdoom.ScreenResolution, f"RES_{width}X{height}", None)
        if resolution is None:
            known = sorted(name for name in dir(vizdoom.ScreenResolution) if name.startswith("RES_"))
            raise EnvironmentOptionError(
                f"ViZDoom has no resolution {width}x{height} (width x height); choose one of {', '.join(known)}"
            )
        self._folder = tempfile.TemporaryDirectory()
        self._game = vizdoom.DoomGame()
        self._game.load_config(str(path))
        # the engine writes its settings to this file, by default in the working directory
        self._game.set_doom_config_path(f"{self._folder.name}/_vizdoom.ini")
        self._game.set_window_visible(False)
        self._game.set_screen_resolution(resolution)
        self._game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        self._game.set_labels_buffer_enabled(observation != "rgb")
        if seed is not None:
            self._game.set_seed(seed % 2**31)
        self._game.init()
        self._observation = observation
        self._frame_skip = frame_skip
        buttons = self._game.get_available_buttons()
        binary = [index for index, button in enumerate(buttons) if not button.name.endswith("_DELTA")]
        self._actions = np.eye(len(buttons), dtype=int)[binary].tolist()
        self.action_space = gymnasium.spaces.Discrete(len(binary))
        shape = (*res, 3 if observation == "rgb" else 1)
        # SB3 recognises images by the bounds 0 and 255, also for labels
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self._frame: Frame = np.zeros(shape, np.uint8)
        self._screen: Frame = np.zeros((*res, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Frame, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._game.set_seed(seed % 2**31)
        self._game.new_episode()
        self._update_frames()
        return self._frame.copy(), {}

    def step(self, action: Any) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        reward = float(self._game.make_action(self._actions[int(action)], self._frame_skip))
        over = self._game.is_episode_finished()
        timeout = self._game.get_episode_timeout()
        truncated = over and 0 < timeout <= self._game.get_episode_time() and not self._game.is_player_dead()
        self._update_frames()
        return self._frame.copy(), reward, over and not truncated, truncated, {}

    def _update_frames(self) -> None:
        state: Any = self._game.get_state()
        if state is None:
            return
        self._screen = state.screen_buffer
        if self._observation == "rgb":
            self._frame = state.screen_buffer
        elif self._observation == "labels":
            self._frame = state.labels_buffer[..., None]
        else:
            class_ids = np.zeros(256, np.uint8)
            for label in state.labels:
                class_ids[label.value] = _CLASS_IDS.get(label.object_category, _CLASS_IDS["Unknown"])
            self._frame = class_ids[state.labels_buffer][..., None]

    def render(self) -> Any:
        return self._screen.copy()

    def close(self) -> None:
        self._game.close()
        self._folder.cleanup()
