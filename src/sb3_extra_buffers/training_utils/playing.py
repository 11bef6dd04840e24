"""Let a model play in vectorised environments and add the transitions to replay buffers."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from sb3_extra_buffers._extras import import_extra
from sb3_extra_buffers.errors import EnvironmentOptionError, SpecMismatchError

Array = npt.NDArray[Any]


class Transition(NamedTuple):
    """One step of all environments; the fields are the arguments of ``ReplayBuffer.add``."""

    obs: Any
    next_obs: Any
    actions: Array
    rewards: Array
    dones: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]


def play(model: Any, env: VecEnv, deterministic: bool = True) -> Iterator[Transition]:
    """Yield transitions of ``model`` in ``env``, without end.

    They are what SB3's off-policy algorithms store: terminal observations at the end of episodes, observations and
    rewards before `VecNormalize`, continuous actions scaled to the policy's range.
    """
    normalize = unwrap_vec_normalize(env)
    policy = getattr(model, "policy", None)
    scale = isinstance(env.action_space, spaces.Box) and getattr(policy, "squash_output", False)
    policy_obs: Any = env.reset()
    obs = policy_obs if normalize is None else normalize.get_original_obs()
    state, dones = None, np.ones(env.num_envs, bool)
    while True:
        actions, state = model.predict(policy_obs, state=state, episode_start=dones, deterministic=deterministic)
        policy_obs, rewards, dones, infos = env.step(actions)
        reset_obs = policy_obs if normalize is None else normalize.get_original_obs()
        next_obs = reset_obs
        if dones.any():
            next_obs = copy.deepcopy(reset_obs)
            for index in np.flatnonzero(dones):
                last = infos[index]["terminal_observation"]
                _put(next_obs, index, last if normalize is None else normalize.unnormalize_obs(last))
        yield Transition(
            obs,
            next_obs,
            policy.scale_action(actions) if scale and policy is not None else actions,
            rewards if normalize is None else normalize.get_original_reward(),
            dones,
            infos,
        )
        obs = reset_obs


def _put(observations: Any, index: Any, last: Any) -> None:
    if isinstance(observations, dict):
        for key, part in observations.items():
            part[index] = last[key]
    else:
        observations[index] = last


class TimedBuffers:
    """Adds transitions to several buffers and measures how long each one takes.

    Args:
        buffers: None, one buffer, a sequence, or a dict by name.
        env: The environments; every buffer must have been created for them.
    """

    def __init__(self, buffers: Any, env: VecEnv) -> None:
        if not isinstance(env, VecEnv):
            raise EnvironmentOptionError(
                f"expected an SB3 VecEnv, got {type(env).__name__}; wrap it: DummyVecEnv([lambda: Monitor(env)])"
            )
        if buffers is None:
            buffers = []
        elif not isinstance(buffers, Mapping | Sequence):
            buffers = [buffers]
        named = buffers.items() if isinstance(buffers, Mapping) else enumerate(buffers)
        self.buffers: dict[str, Any] = {str(name): buffer for name, buffer in named}
        self.seconds = dict.fromkeys(self.buffers, 0.0)
        for name, buffer in self.buffers.items():
            n_envs = getattr(buffer, "n_envs", env.num_envs)
            if n_envs != env.num_envs:
                raise EnvironmentOptionError(
                    f"buffer {name!r} is for {n_envs} environments, but there are {env.num_envs}; "
                    f"create it with n_envs={env.num_envs}"
                )
            space = getattr(buffer, "observation_space", env.observation_space)
            if space != env.observation_space:
                raise SpecMismatchError(
                    f"buffer {name!r} is for observations of {space}, but the environments have "
                    f"{env.observation_space}; create it with env.observation_space or, if it is the model's, pass "
                    "model.get_env(), which SB3 has wrapped"
                )

    def add(self, transition: Transition) -> None:
        for name, buffer in self.buffers.items():
            start = time.perf_counter()
            buffer.add(*transition)
            self.seconds[name] += time.perf_counter() - start


def make_progress_bar(total: int, unit: str, enabled: bool) -> Any:
    """Return an object with ``update`` and ``close``, which shows nothing unless ``enabled``."""
    if not enabled:
        return _NoProgressBar()
    tqdm = import_extra("tqdm.auto", user="progress_bar=True", alternative="pass progress_bar=False")
    return tqdm.tqdm(total=total, unit=unit)


class _NoProgressBar:
    def update(self, n: int) -> None: ...

    def close(self) -> None: ...
