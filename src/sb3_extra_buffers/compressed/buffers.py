"""SB3's replay and rollout buffers with compressed observations, and their n-step and HER variants."""

from __future__ import annotations

from typing import Any

import numpy as np
from stable_baselines3.common.buffers import (
    DictReplayBuffer,
    DictRolloutBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
)
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_extra_buffers._sb3.algorithm import check_n_steps
from sb3_extra_buffers._sb3.base import OptionsFirst
from sb3_extra_buffers._sb3.her import HerEpisodes
from sb3_extra_buffers._sb3.replay import ReplayMixin, Step
from sb3_extra_buffers._sb3.rollout import RolloutMixin
from sb3_extra_buffers.arguments import check_count, check_number

__all__ = [
    "CompressedDictNStepReplayBuffer",
    "CompressedDictReplayBuffer",
    "CompressedDictRolloutBuffer",
    "CompressedHerReplayBuffer",
    "CompressedNStepReplayBuffer",
    "CompressedReplayBuffer",
    "CompressedRolloutBuffer",
]


class CompressedReplayBuffer(ReplayMixin, ReplayBuffer):
    """SB3's `ReplayBuffer` that stores image observations losslessly in about a hundredth of the memory.

    Samples the same batches as SB3's buffer at the same seed. Takes the arguments of `StorageOptions`, and:

    Args:
        buffer_size: Maximum number of transitions, in all environments together.
        observation_space: Space of the observations.
        action_space: Space of the actions.
        device: Device of the sampled batches.
        n_envs: Number of parallel environments.
        optimize_memory_usage: Draw the same indices as SB3's buffer with this option; it saves no memory here, since
            next observations already share the frames of observations.
        handle_timeout_termination: Do not count time limits as ends of episodes.
        n_steps: Number of steps of an n-step return; 1 for ordinary transitions.
        gamma: Discount factor of n-step returns.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from sb3_extra_buffers.compressed import CompressedReplayBuffer
        >>> from sb3_extra_buffers.training_utils.atari import make_env
        >>> env = make_env("PongNoFrameskip-v4", n_envs=2, framestack=4)
        >>> model = DQN("CnnPolicy", env, buffer_size=10_000, replay_buffer_class=CompressedReplayBuffer)
        >>> model.learn(100).replay_buffer.sample(32).observations.shape
        torch.Size([32, 4, 84, 84])
    """


class CompressedDictReplayBuffer(ReplayMixin, DictReplayBuffer):
    """SB3's `DictReplayBuffer` with compressed observations; each key is stored in its own way.

    Takes the arguments of `CompressedReplayBuffer`. ``compression_method`` may be a mapping with a method for each key.
    A single method applies to the images; vectors are not compressed.

    Examples:
        >>> from gymnasium import spaces
        >>> from sb3_extra_buffers.compressed import CompressedDictReplayBuffer
        >>> space = spaces.Dict({"image": spaces.Box(0, 255, (4, 84, 84), "uint8"), "speed": spaces.Box(0, 1, (3,))})
        >>> buffer = CompressedDictReplayBuffer(
        ...     100_000, space, spaces.Discrete(6), compression_method={"image": "delta"}
        ... )
    """


class CompressedRolloutBuffer(RolloutMixin, RolloutBuffer):
    """SB3's `RolloutBuffer` that stores image observations losslessly in about a hundredth of the memory.

    Yields the same batches as SB3's buffer at the same seed. Takes the arguments of `StorageOptions` up to
    ``output_dtype``, and:

    Args:
        buffer_size: Number of steps of a rollout, in each environment.
        observation_space: Space of the observations.
        action_space: Space of the actions.
        device: Device of the batches.
        gae_lambda: Trade-off between bias and variance of generalised advantage estimates.
        gamma: Discount factor.
        n_envs: Number of parallel environments.

    Examples:
        >>> from stable_baselines3 import PPO
        >>> from sb3_extra_buffers.compressed import CompressedRolloutBuffer
        >>> from sb3_extra_buffers.training_utils.atari import make_env
        >>> env = make_env("PongNoFrameskip-v4", n_envs=2, framestack=4)
        >>> model = PPO("CnnPolicy", env, n_steps=64, n_epochs=1, rollout_buffer_class=CompressedRolloutBuffer)
        >>> next(model.learn(128).rollout_buffer.get(32)).observations.shape
        torch.Size([32, 4, 84, 84])
    """


class CompressedDictRolloutBuffer(RolloutMixin, DictRolloutBuffer):
    """SB3's `DictRolloutBuffer` with compressed observations; each key is stored in its own way.

    Takes the arguments of `CompressedRolloutBuffer`; ``compression_method`` may map keys to methods.

    Examples:
        >>> from gymnasium import spaces
        >>> from sb3_extra_buffers.compressed import CompressedDictRolloutBuffer
        >>> space = spaces.Dict({"image": spaces.Box(0, 255, (4, 84, 84), "uint8"), "speed": spaces.Box(0, 1, (3,))})
        >>> buffer = CompressedDictRolloutBuffer(128, space, spaces.Discrete(6), n_envs=8)
    """


class CompressedNStepReplayBuffer(NStepReplayBuffer, CompressedReplayBuffer):
    """SB3's `NStepReplayBuffer` with compressed observations.

    Takes the arguments of `CompressedReplayBuffer`; ``n_steps`` and ``gamma`` must be those of the algorithm.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from sb3_extra_buffers.compressed import CompressedNStepReplayBuffer
        >>> model = DQN("MlpPolicy", "CartPole-v1", n_steps=3, replay_buffer_class=CompressedNStepReplayBuffer)
        >>> model.replay_buffer.n_steps
        3
    """

    _is_n_step_class = True

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        # SB3's class keeps both itself
        check_number(gamma, "gamma")
        super().__init__(*args, n_steps=check_count(n_steps, "n_steps"), gamma=gamma, **kwargs)
        check_n_steps(self)

    def _get_samples(self, *args: Any, **kwargs: Any) -> Any:
        # not NStepReplayBuffer's, which changes timeouts while it reads
        return CompressedReplayBuffer._get_samples(self, *args, **kwargs)


class CompressedDictNStepReplayBuffer(CompressedDictReplayBuffer):
    """n-step returns for Dict observations, which SB3 itself does not offer.

    Takes the arguments of `CompressedReplayBuffer`; ``n_steps`` and ``gamma`` must be those of the algorithm.

    Examples:
        >>> from gymnasium import spaces
        >>> from sb3_extra_buffers.compressed import CompressedDictNStepReplayBuffer
        >>> space = spaces.Dict({"image": spaces.Box(0, 255, (4, 84, 84), "uint8"), "speed": spaces.Box(0, 1, (3,))})
        >>> buffer = CompressedDictNStepReplayBuffer(100_000, space, spaces.Discrete(6), n_steps=3, gamma=0.99)
    """

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"n_steps": n_steps, "gamma": gamma})


class CompressedHerReplayBuffer(OptionsFirst, HerEpisodes, HerReplayBuffer, CompressedDictReplayBuffer):
    """SB3's `HerReplayBuffer` with compressed observations.

    Takes the arguments of `HerReplayBuffer` and of `CompressedReplayBuffer`.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from stable_baselines3.common.envs import BitFlippingEnv
        >>> from sb3_extra_buffers.compressed import CompressedHerReplayBuffer
        >>> env = BitFlippingEnv(n_bits=4, continuous=False)
        >>> model = DQN("MultiInputPolicy", env, replay_buffer_class=CompressedHerReplayBuffer, learning_starts=20)
        >>> model.learn(30).replay_buffer.sample(8).observations["desired_goal"].shape
        torch.Size([8, 4])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # SB3 makes a dict for each transition of the capacity, 64 bytes each
        self.infos = np.full(self.infos.shape, {}, dtype=object)

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Add one step of every environment; after any exception, all of it was added or nothing."""
        # not HerReplayBuffer's, which changes episodes before the step is checked: `_step_added` does the same
        CompressedDictReplayBuffer.add(self, *args, **kwargs)

    def _fit_step(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> Step:
        *step, done, truncated, _ = super()._fit_step(obs, next_obs, action, reward, done, infos)
        position: Any = step[0]
        return (*step, done, truncated, self._plan_episodes(position, done, infos))

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw ``batch_size`` transitions of complete episodes, some of them with goals that were reached later.

        ``env`` normalises the batch if it is a `VecNormalize`.
        """
        batch_size = check_count(batch_size, "batch_size", 0)
        # goals come from whole episodes: the lock keeps other threads from overwriting them meanwhile
        with self._lock:
            if self._unfinished is not None:
                buffer = self._undisturbed()
                if buffer is not self:
                    return buffer.sample(batch_size, env)
            self._check_episodes()
            return super().sample(batch_size, env)

    def _get_real_samples(self, batch_indices: Any, env_indices: Any, env: Any = None) -> Any:
        # faster than SB3's method, which reads each key and column separately
        return self._samples_at(batch_indices, env_indices, env)

    def _get_virtual_samples(self, *args: Any, **kwargs: Any) -> Any:
        return self._sb3_samples(super()._get_virtual_samples, *args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._check_state(state)
        super().__setstate__(state)
        self._after_setstate()

    def __getstate__(self) -> dict[str, Any]:
        return self._frozen_state(HerReplayBuffer.__getstate__)

    def _forget_step(self, step: int) -> None:
        for env in range(self.n_envs):
            length = self.ep_length[step, env]
            if length > 0:
                # no goal may come from an episode that has lost its first step
                steps = (self.ep_start[step, env] + np.arange(length)) % self.buffer_size
                self.ep_length[steps, env] = 0
            elif step == self._current_ep_start[env]:
                # the episode is not complete: what is left of it starts one step later
                start = (step + 1) % self.buffer_size
                steps = (start + np.arange((self.pos - start) % self.buffer_size)) % self.buffer_size
                self.ep_start[steps, env] = self._current_ep_start[env] = start
        super()._forget_step(step)
