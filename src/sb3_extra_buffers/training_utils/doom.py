"""ViZDoom scenarios as vectorised environments: RGB frames, or label (segmentation) frames."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import EnvironmentOptionError, MissingExtraError, UnknownEnvironmentError

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

__all__ = ["CLASSES", "DoomEnv", "make_env"]

Frame = npt.NDArray[np.uint8]
Observation = Literal["rgb", "labels", "classes"]

#: what the values of ``"classes"`` frames mean
CLASSES = (
    "Background",
    "Unknown",
    "Self",
    "Player",
    "Monster",
    "Weapon",
    "Ammo",
    "Health",
    "Armor",
    "Powerup",
    "Key",
    "Decoration",
)
_PLACES = {name: place for place, name in enumerate(CLASSES)}


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
    """``n_envs`` games of a scenario; observations are ``(channels, *res)`` bytes.

    Args:
        scenario: One that comes with ViZDoom, such as ``"deathmatch"``, or the path of a configuration file.
        n_envs: How many games are played at once.
        framestack: Frames in an observation; None or 1 for single frames.
        observation: ``"rgb"``; ``"labels"`` for a byte per pixel that tells objects apart; ``"classes"`` for one that
            tells what kind of object it is (`CLASSES`).
        res: Height and width, one of ViZDoom's resolutions.
        frame_skip: Tics for which an action is repeated.
        seed: Of the first environment; the others count on from it.
        vec_env_cls: SB3's ``DummyVecEnv`` (the default) or ``SubprocVecEnv``.
        vec_env_kwargs: Arguments of that class.
    """
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecTransposeImage

    from sb3_extra_buffers.training_utils.atari import check_counts

    check_counts(n_envs, framestack)
    scenario_file(scenario)
    make = functools.partial(DoomEnv, scenario, observation=observation, res=res, frame_skip=frame_skip)
    makers: list[Any] = [
        functools.partial(_monitored, Monitor, make, None if seed is None else seed + index) for index in range(n_envs)
    ]
    env: VecEnv = (vec_env_cls or DummyVecEnv)(makers, **(vec_env_kwargs or {}))
    env.seed(seed)
    if framestack is not None and framestack > 1:
        env = VecFrameStack(env, framestack, channels_order="last")
    return VecTransposeImage(env)


def _monitored(monitor: Any, make: Any, seed: int | None) -> Any:
    return monitor(make(seed=seed))


def scenario_file(scenario: str) -> Path:
    """Where the configuration of ``scenario`` lies."""
    if importlib.util.find_spec("vizdoom") is None:
        raise MissingExtraError("ViZDoom needs 'vizdoom': pip install 'sb3-extra-buffers[vizdoom]'")
    import vizdoom

    folder = Path(vizdoom.scenarios_path)
    for path in (folder / f"{scenario}.cfg", Path(scenario)):
        if path.suffix == ".cfg" and path.exists():
            return path
    known = ", ".join(sorted(path.stem for path in folder.glob("*.cfg")))
    raise UnknownEnvironmentError(f"no scenario {scenario!r}; there are {known}, or pass the path of a .cfg file")


class DoomEnv(gymnasium.Env[Frame, np.int64]):
    """One scenario. Actions press one button each; buttons that take an amount are left out.

    ViZDoom has no picture of the end of an episode: the last one before it takes its place.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # Gymnasium's name, and it is read only
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
        path = scenario_file(scenario)
        import vizdoom

        height, width = res
        resolution = getattr(vizdoom.ScreenResolution, f"RES_{width}X{height}", None)
        if resolution is None:
            known = sorted(name for name in dir(vizdoom.ScreenResolution) if name.startswith("RES_"))
            raise EnvironmentOptionError(
                f"ViZDoom has no resolution of {height} rows of {width}; it has (width by height) {', '.join(known)}"
            )
        self._folder = tempfile.TemporaryDirectory()
        self._game = vizdoom.DoomGame()
        self._game.load_config(str(path))
        # the engine writes its settings there, by default wherever it is started
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
        binary = [place for place, button in enumerate(buttons) if not button.name.endswith("_DELTA")]
        self._actions = np.eye(len(buttons), dtype=int)[binary].tolist()
        self.action_space = gymnasium.spaces.Discrete(len(binary))
        shape = (*res, 3 if observation == "rgb" else 1)
        # SB3 takes bytes from 0 to 255 for an image, and so must labels be
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self._frame: Frame = np.zeros(shape, np.uint8)
        self._screen: Frame = np.zeros((*res, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Frame, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._game.set_seed(seed % 2**31)
        self._game.new_episode()
        self._look()
        return self._frame.copy(), {}

    def step(self, action: Any) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        reward = float(self._game.make_action(self._actions[int(action)], self._frame_skip))
        over = self._game.is_episode_finished()
        timeout = self._game.get_episode_timeout()
        truncated = over and 0 < timeout <= self._game.get_episode_time() and not self._game.is_player_dead()
        self._look()
        return self._frame.copy(), reward, over and not truncated, truncated, {}

    def _look(self) -> None:
        state: Any = self._game.get_state()
        if state is None:
            return
        self._screen = state.screen_buffer
        if self._observation == "rgb":
            self._frame = state.screen_buffer
        elif self._observation == "labels":
            self._frame = state.labels_buffer[..., None]
        else:
            kinds = np.zeros(256, np.uint8)
            for label in state.labels:
                kinds[label.value] = _PLACES.get(label.object_category, _PLACES["Unknown"])
            self._frame = kinds[state.labels_buffer][..., None]

    def render(self) -> Any:
        return self._screen.copy()

    def close(self) -> None:
        self._game.close()
        self._folder.cleanup()
