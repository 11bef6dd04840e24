"""ale-py's vector environment, which steps games in C++ threads, as an SB3 `VecEnv`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers._extras import import_extra
from sb3_extra_buffers.errors import EnvironmentOptionError

__all__ = ["NativeAtariVecEnv"]

# arguments of a registered game that ale-py's vector environment supports
_GAME_OPTIONS = {"game", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode", "frameskip"}


class NativeAtariVecEnv(VecEnv):
    """Games stepped by ale-py's threads, with the preprocessing of SB3's ``AtariWrapper`` and ``VecFrameStack``.

    Observations, rewards, episode ends on lost lives, ``info["episode"]`` with unclipped rewards of whole games,
    ``terminal_observation`` and ``TimeLimit.truncated`` follow SB3. Differences:

    - Frames are converted to greyscale before the maximum of the last two is taken, not after, and ale-py resizes
      them: nearly all pixels are equal, the others differ by up to a few dozen grey levels.
    - The number of no-ops at the start of a game is drawn from ale-py's own generator.
    - ``FIRE`` is pressed for one frame when a game starts, but not after a lost life: the agent has to press it.
    - After a lost life the game continues from that frame; SB3 first takes one step without action.
    - The length ``info["episode"]["l"]`` counts whole steps of ``frame_skip`` frames.
    - Rendering, and access to the single environments, are not supported.

    Args:
        game: Arguments the game was registered with, from `game_options`.
        n_envs: Number of games.
        framestack: Frames per observation; None or 1 for single frames.
        seed: Seed of the first game; each of the others has the next integer.
        n_threads: Number of threads; 0 for one per core.
        noop_max: Maximum number of no-ops at the start of a game.
        frame_skip: Number of frames for which an action is repeated.
        screen_size: Height and width of a frame.
        terminal_on_life_loss: Whether a lost life ends an episode.
        clip_reward: Whether to clip rewards to their sign.
        action_repeat_probability: Probability of repeating the previous action.

    Examples:
        >>> from sb3_extra_buffers.training_utils.atari import make_env
        >>> env = make_env("PongNoFrameskip-v4", n_envs=2, framestack=4, native=True)
        >>> type(env).__name__, env.reset().shape
        ('NativeAtariVecEnv', (2, 4, 84, 84))
    """

    def __init__(
        self,
        game: Mapping[str, Any],
        n_envs: int = 1,
        framestack: int | None = 4,
        seed: int | None = None,
        n_threads: int = 0,
        noop_max: int = 30,
        frame_skip: int = 4,
        screen_size: int = 84,
        terminal_on_life_loss: bool = True,
        clip_reward: bool = True,
        action_repeat_probability: float = 0.0,
    ) -> None:
        vector_env = import_extra(
            "ale_py.vector_env", user="native=True", alternative="upgrade ale-py to 0.11 or newer"
        )
        unknown = game.keys() - _GAME_OPTIONS
        if unknown:
            raise EnvironmentOptionError(
                f"native=True does not support {', '.join(sorted(map(repr, unknown)))}; leave out native=True"
            )
        self._env = vector_env.AtariVectorEnv(
            game["game"],
            num_envs=n_envs,
            num_threads=n_threads,
            max_num_frames_per_episode=game.get("max_num_frames_per_episode", 108_000),
            repeat_action_probability=max(game.get("repeat_action_probability", 0.0), action_repeat_probability),
            full_action_space=game.get("full_action_space", False),
            autoreset_mode="SameStep",
            img_height=screen_size,
            img_width=screen_size,
            stack_num=framestack or 1,
            frameskip=frame_skip,
            maxpool=frame_skip > 1,
            noop_max=noop_max,
            # done in `step_wait`, which reports whole games and unclipped rewards
            episodic_life=False,
            reward_clipping=False,
        )
        self._n_actions = len(self._env.ale.get_action_set())
        self._frame_skip = frame_skip
        self._terminal_on_life_loss = terminal_on_life_loss
        self._clip_reward = clip_reward
        self._start = time.time()
        super().__init__(n_envs, self._env.single_observation_space, self._env.single_action_space)
        self._stack = framestack or 1
        self._lives = np.zeros(n_envs, np.int64)
        self._episode_frames = np.zeros(n_envs, np.int64)
        self._returns = np.zeros(n_envs, np.float64)
        # frames since the last lost life, at most `_stack`: earlier frames of a stack are blank
        self._frames_since_loss = np.full(n_envs, self._stack)
        self.seed(seed)

    def reset(self) -> npt.NDArray[np.uint8]:
        # ale-py takes signed 32-bit seeds; a negative one means unseeded
        seeds = np.array([-1 if seed is None else seed % 2**31 for seed in self._seeds])
        observations, info = self._env.reset(seed=seeds)
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = self._infos(info)
        self._lives[:], self._episode_frames[:] = info["lives"], info["episode_frame_number"]
        self._returns[:], self._frames_since_loss[:] = 0, self._stack
        return np.asarray(observations)

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or not np.issubdtype(actions.dtype, np.integer):
            raise EnvironmentOptionError(
                f"expected one integer for each of {self.num_envs} environments, "
                f"got {actions.dtype} of shape {actions.shape}"
            )
        if actions.min() < 0 or actions.max() >= self._n_actions:
            raise EnvironmentOptionError(f"actions must be 0 to {self._n_actions - 1}, got {actions.tolist()}")
        self._env.send(actions.astype(np.int64))

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        observations, scores, terminated, truncated, info = self._env.recv()
        over = terminated | truncated
        lost = ~over & (info["lives"] > 0) & (info["lives"] < self._lives) & self._terminal_on_life_loss
        self._returns += scores
        infos = self._infos(info)
        self._frames_since_loss = np.minimum(self._frames_since_loss + 1, self._stack)
        for env in np.flatnonzero(self._frames_since_loss < self._stack):
            observations[env, : -self._frames_since_loss[env]] = 0
        for env in np.flatnonzero(over):
            last = info["final_obs"][env].copy()
            last[: self._stack - self._frames_since_loss[env]] = 0
            infos[env]["terminal_observation"] = last
            infos[env]["episode"] = {
                "r": round(float(self._returns[env]), 6),
                "l": int(self._episode_frames[env]) + self._frame_skip,
                "t": round(time.time() - self._start, 6),
            }
            infos[env]["TimeLimit.truncated"] = bool(truncated[env] and not terminated[env])
            self._returns[env], self._frames_since_loss[env] = 0, self._stack
        for env in np.flatnonzero(lost):
            infos[env]["terminal_observation"] = observations[env].copy()
            infos[env]["TimeLimit.truncated"] = False
            observations[env, :-1] = 0
            self._frames_since_loss[env] = 1
        self._lives[:], self._episode_frames[:] = info["lives"], info["episode_frame_number"]
        rewards = (np.sign(scores) if self._clip_reward else scores).astype(np.float32)
        return observations, rewards, over | lost, infos

    def _infos(self, info: Mapping[str, Any]) -> list[dict[str, Any]]:
        keys = ("lives", "frame_number", "episode_frame_number")
        columns = [info[key].tolist() for key in keys]
        return [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]

    def close(self) -> None:
        self._env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        if attr_name == "render_mode":
            return [None for _ in self._get_indices(indices)]
        if attr_name in ("observation_space", "action_space"):
            return [getattr(self, attr_name) for _ in self._get_indices(indices)]
        raise self._no_access(attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise self._no_access(attr_name)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        raise self._no_access(method_name)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        # `step_wait` reports episodes like a Monitor, which is what evaluate_policy asks for
        return [issubclass(wrapper_class, Monitor) for _ in self._get_indices(indices)]

    def _no_access(self, name: str) -> AttributeError:
        return AttributeError(f"{type(self).__name__} has no access to {name!r} of its single environments")
