"""The replay buffer with observations on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers._sb3 import opening  # noqa: F401  # load_replay_buffer loads folders from here on
from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers._sb3.steps import fit_actions, fit_column, fit_truncations
from sb3_extra_buffers.arguments import check_count, check_index
from sb3_extra_buffers.errors import EmptyBufferError, SpecMismatchError
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer, ColumnOf, Step, heap_limit
from sb3_extra_buffers.stores.choice import add_preference
from sb3_extra_buffers.stores.device_base import IndexBatch, usable_device
from sb3_extra_buffers.stores.device_columns import COLUMN_NAMES, DeviceColumns
from sb3_extra_buffers.stores.staging import Staging, StagingLayout

__all__ = ["GpuReplayBuffer"]

_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
_NAMES = ("obs", "next_obs")
# kernels count the rows of a batch in 32 bits
_MAX_ROWS = (1 << 31) - 1


class GpuReplayBuffer(ReplayBuffer, BaseGpuBuffer):
    """SB3's `ReplayBuffer` and `DictReplayBuffer` with observations stored on a Torch device.

    Samples the same batches as SB3's buffer at the same seed.

    Args:
        buffer_size: Maximum number of transitions, in all environments together.
        observation_space: Space of the observations.
        action_space: Space of the actions.
        device: Device of the sampled batches.
        n_envs: Number of parallel environments.
        optimize_memory_usage: Draw the same indices as SB3's buffer with this option; it saves no memory here, since
            next observations already share the frames of observations.
        handle_timeout_termination: Do not count time limits as ends of episodes.
        dtypes: What `find_gpu_buffer_dtypes` returned, or one for each key of a Dict. Observations are stored as
            ``elem_type`` if that is smaller than the dtype of the space; a value that would not survive exactly raises
            `SpecMismatchError`.
        normalize_images: Return image observations as float32 from 0 to 1.
        compression_method: ``"delta"`` for images, or another method.
        compression_kwargs: Options of that method.
        decompression_kwargs: Options for decoding; no method has any.
        output_dtype: ``"raw"`` to sample observations in the dtype of the space, ``"float"`` for float32.
        buffer_device: Where observations are kept: a torch device, by default ``device``, or ``"pinned"`` for host
            memory that the GPU reads over the bus.
        heap_bytes: Upper limit for the encoded observations, for each key of a Dict: a step that does not fit raises
            `HeapFullError`, and nothing is changed. `estimate_total_heap_bytes` returns a limit that even noise stays
            within, except with ``"delta"``, which frees several frames at a time. By default there is no limit: the
            heap grows with what it holds.
        max_slot_bytes: Deprecated: the same limit, divided by the number of observations.
        prefer: ``"memory"`` or ``"speed"``: lets ``"auto"`` choose a smaller or a faster method than by default.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer
        >>> from sb3_extra_buffers.training_utils.atari import make_env
        >>> env = make_env("PongNoFrameskip-v4", n_envs=2, framestack=4)
        >>> model = DQN(
        ...     "CnnPolicy", env, buffer_size=10_000, replay_buffer_class=GpuReplayBuffer,
        ...     replay_buffer_kwargs={"compression_method": "delta"},
        ... )
        >>> model.learn(100).replay_buffer.sample(32).observations.shape
        torch.Size([32, 4, 84, 84])
    """

    actions: Any = ColumnOf("_table")
    rewards: Any = ColumnOf("_table")
    dones: Any = ColumnOf("_table")
    timeouts: Any = ColumnOf("_table")

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        dtypes: Mapping[str, Any] | None = None,
        normalize_images: bool = False,
        compression_method: str = "none",
        compression_kwargs: Mapping[str, Any] | None = None,
        decompression_kwargs: Mapping[str, Any] | None = None,
        output_dtype: Literal["raw", "float"] = "raw",
        buffer_device: th.device | str | None = None,
        heap_bytes: int | None = None,
        max_slot_bytes: int | None = None,
        prefer: Literal["memory", "speed"] | None = None,
    ) -> None:
        if prefer is not None:
            compression_kwargs = add_preference(prefer, compression_kwargs, compression_method)
        check_count(buffer_size, "buffer_size")
        check_count(n_envs, "n_envs")
        self._make_lock()
        # skips ReplayBuffer.__init__, which would allocate dense observations
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        # after BaseBuffer.__init__, which calls this too, without arguments
        BaseGpuBuffer.__init__(self, compression_method, compression_kwargs, decompression_kwargs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        action_dtype = np.dtype(self._maybe_cast_dtype(action_space.dtype))
        self._table = DeviceColumns(self.buffer_size, n_envs, self.action_dim, action_dtype, self.device)
        self._make_stores(
            2,
            StorageOptions(dtypes, normalize_images, compression_method, output_dtype=output_dtype),
            buffer_device,
            heap_limit(max_slot_bytes, heap_bytes, 2 * self.buffer_size * n_envs),
        )
        self._column_shape, self._action_shape = (n_envs,), (n_envs, self.action_dim)
        self._staging = Staging(self.device)
        self._layouts: dict[int, StagingLayout] = {}

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        done: npt.NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one step of every environment; after an exception, all of it is added or nothing is changed.

        Args:
            obs: Observations, of shape ``(n_envs, ...)``; a dict of them for a Dict space.
            next_obs: Observations after the actions.
            action: Actions.
            reward: Rewards.
            done: Whether each episode ended.
            infos: The environments' dicts; only ``"TimeLimit.truncated"`` is read.
        """
        with self._lock:
            if self._unfinished is not None or self.read_only:
                self._prepare_write()
            # fast path: skip validation when shape and dtype already match
            if self._table.device != self.device:
                self._table = self._table.to(self.device)  # SB3 changes the device of buffers that it loads
            position, table, shape = self.pos, self._table, self._column_shape
            if (
                type(action) is not np.ndarray
                or action.dtype != table.action_dtype
                or action.shape != self._action_shape
            ):
                action = fit_actions(np.empty((0, *self._action_shape), table.action_dtype), action)
            if type(reward) is not np.ndarray or reward.dtype != _FLOAT32 or reward.shape != shape:
                reward = fit_column(reward, self.n_envs, "reward")
            if type(done) is not np.ndarray or done.dtype.char not in "?f" or done.shape != shape:
                done = fit_column(done, self.n_envs, "done")
            values: tuple[Any, ...] = (action, reward, done)
            if self.handle_timeout_termination:
                values = (*values, fit_truncations(infos, self.n_envs))
            columns = table.plan(values)
            plans = self._plan(position, (obs, next_obs), _NAMES)
            if position + 1 == self.buffer_size:
                after = {"pos": 0, "full": True, "_unfinished": None}
            else:
                after = {"pos": position + 1, "_unfinished": None}
            self._commit(Step(position, plans, columns, after))

    def _write_columns(self, position: int, columns: Any) -> None:
        self._table.commit(position, columns)

    def reset(self) -> None:
        """Remove all transitions."""
        with self._lock:
            self._clear({"pos": 0, "full": False})

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw ``batch_size`` transitions, normalised by ``env`` if given; random numbers are drawn in SB3's order."""
        if self._unfinished is not None:
            with self._lock:
                self._recover()
        if type(batch_size) is not int or not 0 < batch_size <= _MAX_ROWS:
            batch_size = check_count(batch_size, "batch_size", 0)
            if batch_size > _MAX_ROWS:
                raise SpecMismatchError(f"batch_size must be at most {_MAX_ROWS}, got {batch_size}")
        count = self.size()
        if count == 0:
            raise EmptyBufferError("the buffer is empty; add transitions before sampling (see learning_starts)")
        if self.optimize_memory_usage and self.full and self.buffer_size > 1:
            steps = (np.random.randint(1, self.buffer_size, size=batch_size) + self.pos) % self.buffer_size
        else:
            steps = np.random.randint(0, count, size=batch_size)
        return self._get_samples(steps, env=env)

    def _get_samples(self, batch_inds: npt.NDArray[Any], env: VecNormalize | None = None) -> Any:
        envs = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))
        n_obs, count = self.buffer_size * self.n_envs, len(envs)
        if self._staging.device != self.device:
            self._staging = Staging(self.device)  # SB3 changes the device of buffers that it loads
        lease = self._staging.acquire(self._layouts.get(count) or self._make_layout(count))
        (indices,) = lease.arrays
        obs_indices = indices[0]
        np.multiply(batch_inds, self.n_envs, out=obs_indices)
        obs_indices += envs
        np.add(obs_indices, n_obs, out=indices[1])
        if self._table.device != self.device:
            self._table = self._table.to(self.device)
        table = self._table
        floats, actions = table.empty(count)
        reader = self.obs_stores[""].batch_reader if count and not self._is_dict else None
        if reader is not None and reader.device.type == self.device.type:
            observations = reader.read_batch(lease.tensors[0], floats, actions, table.records)
            self._staging.release(lease)
            by_key = {"": self._convert(observations)}
        else:
            (device_indices,) = self._staging.send(lease)
            table.gather(device_indices[0], floats, actions)
            by_key = self._read(IndexBatch(indices, device_indices))
        if env is not None:
            floats[1] = self.to_torch(self._normalize_reward(floats[1].cpu().numpy(), env))
        columns = floats.unbind(0)
        if self._is_dict:
            obs, next_obs = ({key: part[i] for key, part in by_key.items()} for i in (0, 1))
            if env is not None:
                obs, next_obs = self._normalized(obs, env), self._normalized(next_obs, env)
            return DictReplayBufferSamples(obs, actions, next_obs, *columns)
        observation, next_observation = by_key[""].unbind(0)
        if env is not None:
            observation = self._normalized({"": observation}, env)[""]
            next_observation = self._normalized({"": next_observation}, env)[""]
        return ReplayBufferSamples(observation, actions, next_observation, *columns)

    def _make_layout(self, count: int) -> StagingLayout:
        """Indices of ``count`` observations and next observations."""
        layout = self._staging.layout(((2, count), _INT64))
        self._layouts = {count: layout}  # batches usually have one size
        return layout

    def _normalized(self, obs: dict[str, th.Tensor], env: VecNormalize) -> dict[str, th.Tensor]:
        """`VecNormalize` works on NumPy arrays."""
        arrays: Any = env.normalize_obs(self._as_sb3({key: part.cpu().numpy() for key, part in obs.items()}))
        by_key = arrays if self._is_dict else {"": arrays}
        return {key: self.to_torch(part) for key, part in by_key.items()}

    def _columns(self) -> dict[str, Any]:
        return super()._columns() | self._table.views

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = super().__getstate__()
            columns: dict[str, Any] = state.pop("_table").arrays()
            return state | columns

    def __setstate__(self, state: dict[str, Any]) -> None:
        columns = {name: state.pop(name) for name in COLUMN_NAMES}
        n_steps, n_envs, action_dim = columns["actions"].shape
        table = DeviceColumns(n_steps, n_envs, action_dim, columns["actions"].dtype, usable_device(state["device"]))
        for name, column in columns.items():
            table.assign(name, column)
        super().__setstate__(state | {"_table": table})

    def reconstruct_obs(self, idx: int, env_idx: int) -> th.Tensor:
        """Return the flattened observation of step ``idx`` of environment ``env_idx``."""
        step, env = check_index(idx, self.buffer_size, "idx"), check_index(env_idx, self.n_envs, "env_idx")
        return self._read_flat(step * self.n_envs + env)

    def reconstruct_nextobs(self, idx: int, env_idx: int) -> th.Tensor:
        """Return the flattened next observation of step ``idx`` of environment ``env_idx``."""
        step, env = check_index(idx, self.buffer_size, "idx"), check_index(env_idx, self.n_envs, "env_idx")
        return self._read_flat((self.buffer_size + step) * self.n_envs + env)
