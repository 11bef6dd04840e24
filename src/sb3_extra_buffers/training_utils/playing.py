"""An agent plays in a vectorised environment; what happens comes out as transitions that replay buffers take."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from sb3_extra_buffers.errors import EnvironmentOptionError, MissingExtraError, SpecMismatchError

Array = npt.NDArray[Any]


class Transition(NamedTuple):
    """One step of all environments, in the order in which ``ReplayBuffer.add`` takes it."""

    obs: Any
    next_obs: Any
    actions: Array
    rewards: Array
    dones: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]


def play(model: Any, env: VecEnv, deterministic: bool = True) -> Iterator[Transition]:
    """Let ``model`` act in ``env`` for ever.

    As in SB3's off-policy algorithms, the last observation of an episode is its terminal one, observations and
    rewards are those from before `VecNormalize`, and continuous actions are scaled to the policy's range.
    """
    normalize = unwrap_vec_normalize(env)
    policy = getattr(model, "policy", None)
    scale = isinstance(env.action_space, spaces.Box) and getattr(policy, "squash_output", False)
    seen: Any = env.reset()
    obs = seen if normalize is None else normalize.get_original_obs()
    state, starts = None, np.ones(env.num_envs, bool)
    while True:
        actions, state = model.predict(seen, state=state, episode_start=starts, deterministic=deterministic)
        seen, rewards, starts, infos = env.step(actions)
        following = seen if normalize is None else normalize.get_original_obs()
        next_obs = following
        if starts.any():
            next_obs = copy.deepcopy(following)
            for index in np.flatnonzero(starts):
                last = infos[index]["terminal_observation"]
                _put(next_obs, index, last if normalize is None else normalize.unnormalize_obs(last))
        yield Transition(
            obs,
            next_obs,
            policy.scale_action(actions) if scale and policy is not None else actions,
            rewards if normalize is None else normalize.get_original_reward(),
            starts,
            infos,
        )
        obs = following


def _put(observations: Any, index: Any, last: Any) -> None:
    if isinstance(observations, dict):
        for key, part in observations.items():
            part[index] = last[key]
    else:
        observations[index] = last


class Feed:
    """Adds transitions to any number of buffers and measures how long each takes.

    Args:
        buffers: None, one buffer, several, or several by name.
        env: What is played; every buffer must have been made for it.
    """

    def __init__(self, buffers: Any, env: VecEnv) -> None:
        if not isinstance(env, VecEnv):
            raise EnvironmentOptionError(
                f"expected an SB3 VecEnv, got {type(env).__name__}; wrap it: DummyVecEnv([lambda: Monitor(env)])"
            )
        self.buffers = _named(buffers)
        self.seconds = dict.fromkeys(self.buffers, 0.0)
        for name, buffer in self.buffers.items():
            n_envs = getattr(buffer, "n_envs", env.num_envs)
            if n_envs != env.num_envs:
                raise EnvironmentOptionError(
                    f"buffer {name!r} is for {n_envs} environments, but {env.num_envs} are played; "
                    f"make it with n_envs={env.num_envs}"
                )
            space = getattr(buffer, "observation_space", env.observation_space)
            if space != env.observation_space:
                raise SpecMismatchError(
                    f"buffer {name!r} holds observations of {space}, the environments give {env.observation_space}; "
                    "make it with env.observation_space"
                )

    def add(self, transition: Transition) -> None:
        for name, buffer in self.buffers.items():
            start = time.perf_counter()
            buffer.add(*transition)
            self.seconds[name] += time.perf_counter() - start


def _named(buffers: Any) -> dict[str, Any]:
    if buffers is None:
        return {}
    if isinstance(buffers, Mapping):
        return {str(name): buffer for name, buffer in buffers.items()}
    if isinstance(buffers, Sequence):
        return {str(number): buffer for number, buffer in enumerate(buffers)}
    return {"0": buffers}


def progress(total: int, unit: str, wanted: bool) -> Any:
    """A bar with ``update`` and ``close``; silent unless ``wanted``."""
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        if wanted:
            raise MissingExtraError(
                "progress bars need 'tqdm': pip install 'sb3-extra-buffers[extra]', or pass progress_bar=False"
            ) from None
        return _NoBar()
    return tqdm(total=total, unit=unit, disable=not wanted)


class _NoBar:
    def update(self, n: int) -> None:
        """Nothing to show."""

    def close(self) -> None:
        """Nothing to close."""
