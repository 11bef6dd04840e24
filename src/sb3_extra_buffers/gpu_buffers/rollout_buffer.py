"""The rollout buffer with observations on a device."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples

from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers._sb3.steps import fit_actions, fit_column
from sb3_extra_buffers.arguments import as_array, check_count, check_index
from sb3_extra_buffers.errors import AlgorithmMismatchError, EmptyBufferError, IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer, Step, heap_limit
from sb3_extra_buffers.stores.choice import add_preference
from sb3_extra_buffers.stores.device_base import IndexBatch
from sb3_extra_buffers.stores.staging import Staging

__all__ = ["GpuRolloutBuffer"]

_COLUMNS = ("values", "log_probs", "advantages", "returns")
_NAMES = ("obs",)
_FLOAT32 = np.dtype(np.float32)


class GpuRolloutBuffer(RolloutBuffer, BaseGpuBuffer):
    """SB3's `RolloutBuffer` and `DictRolloutBuffer` with observations stored on a Torch device.

    Yields the same batches as SB3's buffer at the same seed. Takes the arguments of `GpuReplayBuffer` from ``dtypes``
    on, except ``output_dtype``, and:

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
        >>> from sb3_extra_buffers.gpu_buffers import GpuRolloutBuffer
        >>> from sb3_extra_buffers.training_utils.atari import make_env
        >>> env = make_env("PongNoFrameskip-v4", n_envs=2, framestack=4)
        >>> model = PPO(
        ...     "CnnPolicy", env, n_steps=64, n_epochs=1, rollout_buffer_class=GpuRolloutBuffer,
        ...     rollout_buffer_kwargs={"compression_method": "delta"},
        ... )
        >>> next(model.learn(128).rollout_buffer.get(32)).observations.shape
        torch.Size([32, 4, 84, 84])
    """

    _obs_per_transition = 1

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
        dtypes: Mapping[str, Any] | None = None,
        normalize_images: bool = False,
        compression_method: str = "none",
        compression_kwargs: Mapping[str, Any] | None = None,
        decompression_kwargs: Mapping[str, Any] | None = None,
        buffer_device: th.device | str | None = None,
        heap_bytes: int | None = None,
        max_slot_bytes: int | None = None,
        prefer: Literal["memory", "speed"] | None = None,
    ) -> None:
        if prefer is not None:
            compression_kwargs = add_preference(prefer, compression_kwargs, compression_method)
        check_count(buffer_size, "buffer_size")
        check_count(n_envs, "n_envs")
        self.obs_stores = {}  # RolloutBuffer.__init__ calls reset()
        self._make_lock()
        options = StorageOptions(dtypes, normalize_images, compression_method)
        heap_bytes = heap_limit(max_slot_bytes, heap_bytes, buffer_size * n_envs)
        super().__init__(buffer_size, observation_space, action_space, device, gae_lambda, gamma, n_envs)
        # after RolloutBuffer.__init__, which calls this too, without arguments
        BaseGpuBuffer.__init__(self, compression_method, compression_kwargs, decompression_kwargs)
        self._make_stores(1, options, buffer_device, heap_bytes)
        self._staging = Staging(self.device)

    def reset(self) -> None:
        """Clear rollout storage and reset the write position."""
        with self._lock:
            lead = (self.buffer_size, self.n_envs)
            after: dict[str, Any] = {"pos": 0, "full": False, "generator_ready": False}
            after |= {name: np.zeros(lead, np.float32) for name in ("rewards", "episode_starts", *_COLUMNS)}
            after["actions"] = np.zeros((*lead, self.action_dim), self.action_space.dtype)
            # SB3's array of observations, empty: the stores hold them
            after["observations"] = np.zeros((*lead, 0), self.observation_space.dtype)
            self._clear(after)

    def add(
        self,
        obs: Any,
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        episode_start: npt.NDArray[Any],
        value: th.Tensor,
        log_prob: th.Tensor,
    ) -> None:
        """Add one step of every environment; after an exception, all of it is added or nothing is changed.

        Args:
            obs: Observations, of shape ``(n_envs, ...)``; a dict of them for a Dict space.
            action: Actions.
            reward: Rewards.
            episode_start: Whether an episode began with each observation.
            value: Values of the observations.
            log_prob: Log probabilities of the actions.
        """
        with self._lock:
            if self._unfinished is not None or self.read_only:
                self._prepare_write()
            position = self.pos
            if position >= self.buffer_size:
                raise IndexOutOfRangeError(f"the rollout is complete: {self.buffer_size} steps; call reset() first")
            # download first, in one copy if possible, so as not to wait for what is uploaded
            values, log_probs = self._fit_tensors(value, log_prob)
            # fast path: skip validation when shape and dtype already match
            actions, shape = self.actions, (self.n_envs,)
            if type(action) is not np.ndarray or action.dtype != actions.dtype or action.shape != actions.shape[1:]:
                action = fit_actions(actions, action)
            if type(reward) is not np.ndarray or reward.dtype != _FLOAT32 or reward.shape != shape:
                reward = fit_column(reward, self.n_envs, "reward")
            starts = episode_start
            if type(starts) is not np.ndarray or starts.dtype.char not in "?f" or starts.shape != shape:
                starts = fit_column(starts, self.n_envs, "episode_start")
            columns = (
                (self.values, values), (self.log_probs, log_probs), (actions, action), (self.rewards, reward),
                (self.episode_starts, starts),
            )  # fmt: skip
            plans = self._plan(position, (obs,), _NAMES)
            after = {"pos": position + 1, "full": position + 1 == self.buffer_size, "_unfinished": None}
            self._commit(Step(position, plans, columns, after))

    def _write_columns(self, position: int, columns: Any) -> None:
        for column, values in columns:
            column[position] = values

    def _fit_tensors(self, value: Any, log_prob: Any) -> Any:
        """Values and log probabilities on the host, one of each per environment."""
        n_envs = self.n_envs
        if (
            isinstance(value, th.Tensor) and isinstance(log_prob, th.Tensor)
            and value.numel() == log_prob.numel() == n_envs and value.device == log_prob.device
            and value.dtype == log_prob.dtype == th.float32
        ):  # fmt: skip
            return th.stack((value.detach().flatten(), log_prob.detach().flatten())).cpu().numpy()
        return [
            fit_column(as_array(given, name).reshape(-1), self.n_envs, name)
            for given, name in ((value, "value"), (log_prob, "log_prob"))
        ]

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: npt.NDArray[Any]) -> None:
        """Compute returns and advantages (GAE) as SB3 does.

        Args:
            last_values: Values of the observations after the last step.
            dones: Whether each episode ended with the last step.
        """
        if self.generator_ready:
            raise SpecMismatchError("the rollout was already read; call compute_returns_and_advantage() before get()")
        last = fit_column(as_array(last_values, "last_values").reshape(-1), self.n_envs, "last_values")
        ended = fit_column(dones, self.n_envs, "dones")
        super().compute_returns_and_advantage(th.from_numpy(np.array(last)), ended)

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Iterate over the rollout in random batches of ``batch_size``, in SB3's order; None for one batch of all."""
        if batch_size is not None:
            batch_size = check_count(batch_size, "batch_size")
        if self._unfinished is not None:
            with self._lock:
                self._recover()
        if not self.full:
            raise EmptyBufferError(
                f"the rollout is not complete: {self.pos} of {self.buffer_size} steps were added; get() needs all"
            )
        n_obs = self.buffer_size * self.n_envs
        order = np.random.permutation(n_obs)
        if not self.generator_ready:
            flat = {name: self.swap_and_flatten(self.__dict__[name]) for name in ("actions", *_COLUMNS)}
            # one call, which no signal can interrupt: flattening twice would shuffle the columns
            self.__dict__.update(flat, generator_ready=True)
        if batch_size is None:
            batch_size = n_obs
        if self._staging.device != self.device:
            self._staging = Staging(self.device)
        indices = (order % self.buffer_size * self.n_envs + order // self.buffer_size)[None]
        actions = self.actions.astype(np.float32, copy=False)
        columns = [self.__dict__[name].reshape(-1) for name in _COLUMNS]
        uploaded = self._staging.upload([order, indices, actions, columns])
        for first in range(0, n_obs, batch_size):
            yield self._batch(slice(first, first + batch_size), indices, *uploaded)

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Raise `AlgorithmMismatchError`, whatever ``batch_size`` and ``env`` are: a rollout is read with `get`."""
        raise AlgorithmMismatchError("a rollout buffer has no sample(); use get()")

    def _batch(
        self,
        part: slice,
        indices: npt.NDArray[np.int64],
        order: th.Tensor,
        device_indices: th.Tensor,
        actions: th.Tensor,
        columns: th.Tensor,
    ) -> Any:
        by_key = self._read(IndexBatch(indices[:, part], device_indices[:, part]))
        obs = self._as_sb3({key: _with_axis(observations[0]) for key, observations in by_key.items()})
        here = order[part]
        # gathered along the rows, so that each column is contiguous
        gathered = columns.index_select(1, here)
        make = DictRolloutBufferSamples if self._is_dict else RolloutBufferSamples
        return make(obs, actions[here], *gathered)

    def reconstruct_obs(self, idx: int) -> th.Tensor:
        """Return the flattened observation at flattened index ``idx``."""
        idx = check_index(idx, self.buffer_size * self.n_envs, "idx")
        return self._read_flat(idx % self.buffer_size * self.n_envs + idx // self.buffer_size)


def _with_axis(observations: th.Tensor) -> th.Tensor:
    """A batch in the shape of SB3's ``swap_and_flatten``, which gives numbers an axis of one."""
    return observations[:, None] if observations.ndim == 1 else observations
