"""The rollout buffer with observations on a device."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples

from sb3_extra_buffers._sb3.algorithm import own_space
from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers._sb3.steps import fit_column, fit_flags
from sb3_extra_buffers.arguments import as_array, check_count, check_index
from sb3_extra_buffers.errors import AlgorithmMismatchError, EmptyBufferError, IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer, Step, TableColumn, heap_limit
from sb3_extra_buffers.stores.choice import add_preference
from sb3_extra_buffers.stores.device_base import IndexBatch
from sb3_extra_buffers.stores.device_columns import DeviceRollout
from sb3_extra_buffers.stores.staging import Staging

__all__ = ["GpuRolloutBuffer"]

# columns that SB3 flattens when a rollout is read
_FLATTENED = ("actions", "values", "log_probs", "advantages", "returns")
_NUMBERS = (int, float)
_NAMES = ("obs",)
_FLOAT32, _BOOL = np.dtype(np.float32), np.dtype(np.bool_)


class GpuRolloutBuffer(RolloutBuffer, BaseGpuBuffer):
    """SB3's `RolloutBuffer` and `DictRolloutBuffer` with observations stored on a torch device.

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
    _table_type = DeviceRollout
    actions: Any = TableColumn()
    rewards: Any = TableColumn()
    episode_starts: Any = TableColumn()
    values: Any = TableColumn()
    log_probs: Any = TableColumn()
    advantages: Any = TableColumn()
    returns: Any = TableColumn()

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
        sampling: Literal["numpy", "device"] = "numpy",
    ) -> None:
        if prefer is not None:
            compression_kwargs = add_preference(prefer, compression_kwargs, compression_method)
        buffer_size, n_envs = check_count(buffer_size, "buffer_size"), check_count(n_envs, "n_envs")
        self.obs_stores = {}  # RolloutBuffer.__init__ calls reset()
        self._make_lock()
        options = StorageOptions(dtypes, normalize_images, compression_method)
        heap_bytes = heap_limit(max_slot_bytes, heap_bytes, buffer_size * n_envs)
        space = own_space(observation_space)
        super().__init__(buffer_size, space, action_space, device, gae_lambda, gamma, n_envs)
        # after RolloutBuffer.__init__, which calls this too, without arguments
        BaseGpuBuffer.__init__(self, compression_method, compression_kwargs, decompression_kwargs)
        self._set_sampling(sampling)
        self._make_stores(1, options, buffer_device, heap_bytes)
        self._staging = Staging(self.device)
        self._compile_kernels()

    def reset(self) -> None:
        """Remove the rollout and reset the position."""
        with self._lock:
            if "_table" not in vars(self):
                dtype = np.dtype(self.action_space.dtype)
                self._table = DeviceRollout(self.buffer_size, self.n_envs, self.action_dim, dtype, self.device)
            # SB3's array of observations, empty: the stores hold them
            observations = np.zeros((self.buffer_size, self.n_envs, 0), self.observation_space.dtype)
            self._clear({"pos": 0, "full": False, "generator_ready": False, "observations": observations})

    def _clear_columns(self) -> None:
        self._table.clear()

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        episode_start: Any,
        value: Any,
        log_prob: Any,
    ) -> None:
        """Add one step of every environment; after an exception, either the whole step was added or nothing.

        Everything may be given as NumPy arrays or as tensors. Tensors on the buffer's GPU are stored without copying
        anything to the host or waiting for the GPU.

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
            # fast path: skip validation when shape and dtype already match
            table, shape = self._current_table(), (self.n_envs,)
            if (
                type(action) is not np.ndarray
                or action.dtype != table.action_dtype
                or action.shape != table.action_shape
            ):
                action = self._fit_action(action)
            if type(reward) is not np.ndarray or reward.dtype != _FLOAT32 or reward.shape != shape:
                reward = self._fit_numbers(reward, "reward")
            starts = episode_start
            if type(starts) is not np.ndarray or starts.dtype is not _BOOL or starts.shape != shape:
                starts = self._fit_flags(starts, "episode_start")
            columns = table.plan((action, reward, starts, self._flat(value, "value"), self._flat(log_prob, "log_prob")))
            plans = self._plan(position, (obs,), _NAMES)
            after = {"pos": position + 1, "full": position + 1 == self.buffer_size, "_unfinished": None}
            self._commit(Step(position, plans, columns, after))

    def _flat(self, values: Any, name: str) -> Any:
        """A number for each environment, in any shape."""
        if not isinstance(values, th.Tensor):
            flat: Any = as_array(values, name)
        elif self._table.takes_tensors or values.dtype != th.float32:
            flat = values
        else:
            flat = values.detach().cpu().numpy()
        return self._fit_numbers(flat.reshape(-1), name)

    def compute_returns_and_advantage(self, last_values: Any, dones: Any) -> None:
        """Compute returns and advantages (GAE) as SB3 does, on the device if the buffer is on a GPU.

        Args:
            last_values: Values of the observations after the last step.
            dones: Whether each episode ended with the last step.
        """
        if self.generator_ready:
            raise SpecMismatchError("the rollout was already read; call compute_returns_and_advantage() before get()")
        table = self._current_table()
        # SB3 computes in double precision if one of them is one of NumPy's
        if table.computes_returns and type(self.gamma) in _NUMBERS and type(self.gae_lambda) in _NUMBERS:
            last, ended = self._flat(last_values, "last_values"), self._fit_flags(dones, "dones")
            table.compute_returns(last, ended, self.gamma, self.gae_lambda)
            return
        last = fit_column(as_array(last_values, "last_values").reshape(-1), self.n_envs, "last_values")
        ended = fit_flags(dones, self.n_envs, "dones")
        host = SimpleNamespace(buffer_size=self.buffer_size, gamma=self.gamma, gae_lambda=self.gae_lambda)
        vars(host).update(table.arrays() if table.device.type != "cpu" else table.views)
        RolloutBuffer.compute_returns_and_advantage(host, th.from_numpy(np.array(last)), ended)  # type: ignore[arg-type]
        for name in ("advantages", "returns"):
            table.assign(name, getattr(host, name))

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Iterate over the rollout in random batches of ``batch_size``, in SB3's order; None for one batch of all."""
        if batch_size is not None:
            batch_size = check_count(batch_size, "batch_size")
        if self._unfinished is not None:
            with self._lock:
                self._ensure_recovered()
        if not self.full:
            raise EmptyBufferError(
                f"the rollout is not complete: {self.pos} of {self.buffer_size} steps were added; get() needs all"
            )
        n_obs, table = self.buffer_size * self.n_envs, self._current_table()
        if self._staging.device != self.device:
            self._staging = Staging(self.device)
        if self._sampling == "device":
            indices = None
            device_indices = th.randperm(n_obs, device=self.device)[None]
        else:
            order = np.random.permutation(n_obs)
            indices = (order % self.buffer_size * self.n_envs + order // self.buffer_size)[None]
            (device_indices,) = self._staging.upload([indices])
        self.generator_ready = True
        if batch_size is None:
            batch_size = n_obs
        actions = table.actions.view(n_obs, -1).to(th.float32)
        for first in range(0, n_obs, batch_size):
            part = slice(first, first + batch_size)
            yield self._batch(None if indices is None else indices[:, part], device_indices[:, part], actions)

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Raise `AlgorithmMismatchError`, whatever ``batch_size`` and ``env`` are: read a rollout with `get`."""
        raise AlgorithmMismatchError("a rollout buffer has no sample(); use get()")

    def _batch(self, indices: npt.NDArray[np.int64] | None, device_indices: th.Tensor, actions: th.Tensor) -> Any:
        by_key = self._read(IndexBatch(indices, device_indices))
        obs = self._as_sb3({key: _with_axis(observations[0]) for key, observations in by_key.items()})
        taken, columns = self._table.gather(device_indices[0], actions)
        make = DictRolloutBufferSamples if self._is_dict else RolloutBufferSamples
        return make(obs, taken, *columns.unbind(0))

    # ---- columns ----

    def _column(self, name: str) -> Any:
        """The column ``name`` as a NumPy array, which SB3 expects; on a GPU, it is a copy that cannot be written to.

        Once `get` was called, columns of batches are flattened, as SB3's are.
        """
        column = self._table.views[name]
        if isinstance(column, th.Tensor):
            column = column.cpu().numpy()
            column.flags.writeable = False
        return self.swap_and_flatten(column) if self.generator_ready and name in _FLATTENED else column

    def _saved_columns(self) -> dict[str, npt.NDArray[Any]]:
        return {name: np.array(self._column(name)) for name in self._table.names}

    def _columns_by_step(self, columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        if not self.generator_ready:
            return columns
        n_steps, n_envs = self.buffer_size, self.n_envs
        by_step = dict(columns)
        for name in _FLATTENED:
            shape = (n_envs, n_steps, -1) if name == "actions" else (n_envs, n_steps)
            by_step[name] = columns[name].reshape(shape).swapaxes(0, 1)
        return by_step

    def reconstruct_obs(self, idx: int) -> th.Tensor:
        """Return the flattened observation at flattened index ``idx``."""
        idx = check_index(idx, self.buffer_size * self.n_envs, "idx")
        return self._read_flat(idx % self.buffer_size * self.n_envs + idx // self.buffer_size)


def _with_axis(observations: th.Tensor) -> th.Tensor:
    """A batch in the shape of SB3's ``swap_and_flatten``, which gives numbers an axis of one."""
    return observations[:, None] if observations.ndim == 1 else observations
