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
from sb3_extra_buffers._sb3.algorithm import own_space
from sb3_extra_buffers._sb3.drawing import IndexDraws
from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers.arguments import check_count, check_index
from sb3_extra_buffers.errors import EmptyBufferError, SpecMismatchError
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer, Step, TableColumn, heap_limit
from sb3_extra_buffers.gpu_buffers.tensors import fit_timeouts
from sb3_extra_buffers.stores.choice import add_preference
from sb3_extra_buffers.stores.device_base import IndexBatch
from sb3_extra_buffers.stores.device_columns import DeviceColumns
from sb3_extra_buffers.stores.staging import Lease, Staging, StagingLayout

__all__ = ["GpuReplayBuffer"]

_INT64, _FLOAT32, _BOOL = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.bool_)
_NAMES = ("obs", "next_obs")
# kernels count the rows of a batch in 32 bits
_MAX_ROWS = (1 << 31) - 1


class GpuReplayBuffer(ReplayBuffer, BaseGpuBuffer):
    """SB3's `ReplayBuffer` and `DictReplayBuffer` with observations stored on a torch device.

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
            ``elem_type`` if that is smaller than the dtype of the space; a value that it cannot represent exactly
            raises `SpecMismatchError`.
        normalize_images: Return image observations as float32 from 0 to 1.
        compression_method: ``"delta"`` for images, or another method.
        compression_kwargs: Options of that method.
        decompression_kwargs: Options for decoding; no method has any.
        output_dtype: ``"raw"`` to sample observations in the dtype of the space, ``"float"`` for float32.
        buffer_device: Where observations are kept: a torch device, by default ``device``, or ``"pinned"`` for host
            memory that the GPU reads over the bus.
        heap_bytes: Upper limit for the encoded observations, for each key of a Dict: a step that does not fit raises
            `HeapFullError` and changes nothing. `estimate_total_heap_bytes` returns a limit that even noise does not
            exceed, except with ``"delta"``, which frees several frames at a time. By default there is no limit: the
            heap grows with its contents.
        max_slot_bytes: Deprecated: the same limit, divided by the number of observations.
        prefer: ``"memory"`` or ``"speed"``: lets ``"auto"`` choose a smaller or a faster method than by default.
        sampling: ``"numpy"`` to draw the same batches as SB3's buffer at the same seed, ``"device"`` to draw indices on
            ``device``, with torch's generator for it, without work on the host. Not saved with the buffer.

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

    _table_type = DeviceColumns
    _draws_indices = True
    actions: Any = TableColumn()
    rewards: Any = TableColumn()
    dones: Any = TableColumn()
    timeouts: Any = TableColumn()

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
        sampling: Literal["numpy", "device"] = "numpy",
    ) -> None:
        if prefer is not None:
            compression_kwargs = add_preference(prefer, compression_kwargs, compression_method)
        buffer_size, n_envs = check_count(buffer_size, "buffer_size"), check_count(n_envs, "n_envs")
        self._make_lock()
        # skips ReplayBuffer.__init__, which would allocate dense observations
        BaseBuffer.__init__(self, buffer_size, own_space(observation_space), action_space, device, n_envs=n_envs)
        # after BaseBuffer.__init__, which calls this too, without arguments
        BaseGpuBuffer.__init__(self, compression_method, compression_kwargs, decompression_kwargs)
        self._set_sampling(sampling)
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
        self._column_shape = (n_envs,)
        self._staging = Staging(self.device)
        self._layouts: dict[int, StagingLayout] = {}
        self._draws = IndexDraws()
        self._compile_kernels((*self._table.empty(1), self._table.records))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `sample` bypasses these methods, unless a subclass overrides them
        names = ("_get_samples", "_samples_at")
        cls._draws_indices = all(getattr(cls, name) is getattr(GpuReplayBuffer, name) for name in names)

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: Any,
        reward: Any,
        done: Any,
        infos: Any,
    ) -> None:
        """Add one step of every environment; after an exception, either the whole step was added or nothing.

        Everything may be given as NumPy arrays or as tensors. Tensors on the buffer's GPU are stored without copying
        anything to the host or waiting for the GPU.

        Args:
            obs: Observations, of shape ``(n_envs, ...)``; a dict of them for a Dict space.
            next_obs: Observations after the actions.
            action: Actions.
            reward: Rewards.
            done: Whether each episode ended.
            infos: The environments' dicts; only ``"TimeLimit.truncated"`` is read. Alternatively, a dict with this key
                for all environments together, a bool for each; None or an empty list if no episode was truncated.
        """
        with self._lock:
            if self._unfinished is not None or self.read_only:
                self._prepare_write()
            # fast path: skip validation when shape and dtype already match
            position, table, shape = self.pos, self._table, self._column_shape
            if table.device != self.device:
                table = self._current_table()
            if (
                type(action) is not np.ndarray
                or action.dtype != table.action_dtype
                or action.shape != table.action_shape
            ):
                action = self._fit_action(action)
            if type(reward) is not np.ndarray or reward.dtype != _FLOAT32 or reward.shape != shape:
                reward = self._fit_numbers(reward, "reward")
            if type(done) is not np.ndarray or done.dtype is not _BOOL or done.shape != shape:
                done = self._fit_flags(done, "done")
            values: tuple[Any, ...] = (action, reward, done)
            # infos are not looked at otherwise: some callers pass a dict
            if self.handle_timeout_termination:
                timeouts = fit_timeouts(infos, self.n_envs, table.device if table.takes_tensors else None)
                values = values if timeouts is None else (*values, timeouts)
            columns = table.plan(values)
            plans = self._plan(position, (obs, next_obs), _NAMES)
            extra = None if self._step_added is None else self._extra(position, done, infos)
            self._commit(Step(position, plans, columns, self._after(position), extra))

    def _after(self, position: int) -> dict[str, Any]:
        """Attributes once the step at ``position`` is written."""
        if position + 1 == self.buffer_size:
            return {"pos": 0, "full": True, "_unfinished": None}
        return {"pos": position + 1, "_unfinished": None}

    def _extra(self, position: int, done: Any, infos: Any) -> Any:
        """Return what `_step_added` needs; changes nothing."""

    def reset(self) -> None:
        """Remove all transitions."""
        with self._lock:
            self._clear({"pos": 0, "full": False})

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw ``batch_size`` transitions, normalised by ``env`` if given; random numbers are drawn in SB3's order."""
        if self._unfinished is not None:
            with self._lock:
                self._ensure_recovered()
        if type(batch_size) is not int or not 0 < batch_size <= _MAX_ROWS:
            batch_size = check_count(batch_size, "batch_size", 0)
            if batch_size > _MAX_ROWS:
                raise SpecMismatchError(f"batch_size must be at most {_MAX_ROWS}, got {batch_size}")
        count = self.size()
        if count == 0:
            raise EmptyBufferError("the buffer is empty; add transitions before sampling (see learning_starts)")
        is_shifted = self.optimize_memory_usage and self.full and self.buffer_size > 1
        if self._sampling == "device" and self._draws_indices:
            return self._make_batch(self._draw_on_device(batch_size, count, is_shifted), None, env)
        low, high, shift = (1, self.buffer_size, self.pos) if is_shifted else (0, count, 0)
        if self._draws_indices:
            lease = self._lease_indices(batch_size)
            self._draws.fill(lease.arrays[0], self.buffer_size, self.n_envs, low, high, shift)
            return self._make_batch(lease.tensors[0], lease, env)
        steps = np.random.randint(low, high, size=batch_size)
        return self._get_samples((steps + shift) % self.buffer_size if shift else steps, env=env)

    def _draw_on_device(self, batch_size: int, count: int, is_shifted: bool) -> th.Tensor:
        """Indices of observations and next observations, drawn by torch's generator of the device."""
        n_envs, n_obs = self.n_envs, self.buffer_size * self.n_envs
        indices = th.empty((2, batch_size), dtype=th.int64, device=self.device)
        obs_indices, next_indices = indices.unbind(0)
        if is_shifted:
            th.randint(n_envs, n_obs, (batch_size,), out=obs_indices)
            obs_indices.add_(self.pos * n_envs).remainder_(n_obs)
        else:
            th.randint(0, count * n_envs, (batch_size,), out=obs_indices)
        th.add(obs_indices, n_obs, out=next_indices)
        return indices

    def _get_samples(self, batch_inds: npt.NDArray[Any], env: VecNormalize | None = None) -> Any:
        return self._samples_at(batch_inds, np.random.randint(0, high=self.n_envs, size=(len(batch_inds),)), env)

    def _samples_at(self, steps: npt.NDArray[Any], envs: npt.NDArray[Any], env: VecNormalize | None) -> Any:
        """The transitions at ``(steps[i], envs[i])``."""
        lease = self._lease_indices(len(envs))
        (indices,) = lease.arrays
        obs_indices = indices[0]
        np.multiply(steps, self.n_envs, out=obs_indices)
        obs_indices += envs
        np.add(obs_indices, self.buffer_size * self.n_envs, out=indices[1])
        return self._make_batch(lease.tensors[0], lease, env)

    def _batch_reader(self, key: str) -> Any:
        """The store of ``key``, if it can read observations and columns in one launch; else None."""
        reader = self.obs_stores[key].batch_reader
        return reader if reader is not None and reader.device.type == self.device.type else None

    def _make_batch(self, indices: th.Tensor, lease: Lease | None, env: VecNormalize | None) -> Any:
        """Observations and columns at ``indices [2, n]``, on the device or, with a ``lease``, in staging memory."""
        table, is_dict, count = self._current_table(), self._is_dict, indices.shape[1]
        floats, actions = table.empty(count)
        reader = None if is_dict or not count else self._batch_reader("")
        if reader is not None:
            by_key = {"": self._convert(reader.read_batch(indices, floats, actions, table.records))}
            if lease is not None:
                self._staging.release(lease)
        else:
            batch = IndexBatch(None, indices)
            if lease is not None:
                (indices,) = self._staging.send(lease)
                batch = IndexBatch(lease.arrays[0], indices)
            by_key, is_gathered = {}, False
            for key, store in self.obs_stores.items():
                # the first store that can gathers the columns too, in the same launch
                reader = None if is_gathered or not count else self._batch_reader(key)
                if reader is not None:
                    observations, is_gathered = reader.read_batch(indices, floats, actions, table.records), True
                else:
                    observations = store.read(batch)
                by_key[key] = self._convert(observations, key)
            if not is_gathered:
                table.gather(indices[0], floats, actions)
        if env is not None:
            floats[1] = self.to_torch(self._normalize_reward(floats[1].cpu().numpy(), env))
        dones, rewards = floats.unbind(0)
        if is_dict:
            obs, next_obs = ({key: part[i] for key, part in by_key.items()} for i in (0, 1))
            if env is not None:
                obs, next_obs = self._normalized(obs, env), self._normalized(next_obs, env)
            return DictReplayBufferSamples(obs, actions, next_obs, dones, rewards)
        observation, next_observation = by_key[""].unbind(0)
        if env is not None:
            observation = self._normalized({"": observation}, env)[""]
            next_observation = self._normalized({"": next_observation}, env)[""]
        return ReplayBufferSamples(observation, actions, next_observation, dones, rewards)

    def _lease_indices(self, count: int) -> Lease:
        """Memory for the indices of ``count`` observations and next observations."""
        if self._staging.device != self.device:
            self._staging = Staging(self.device)  # SB3 changes the device of buffers that it loads
        layout = self._layouts.get(count)
        if layout is None:
            layout = self._staging.layout(((2, count), _INT64))
            self._layouts = {count: layout}  # batches usually have one size
        return self._staging.acquire(layout)

    def _normalized(self, obs: dict[str, th.Tensor], env: VecNormalize) -> dict[str, th.Tensor]:
        """`VecNormalize` works on NumPy arrays."""
        arrays: Any = env.normalize_obs(self._as_sb3({key: part.cpu().numpy() for key, part in obs.items()}))
        by_key = arrays if self._is_dict else {"": arrays}
        return {key: self.to_torch(part) for key, part in by_key.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # pickles of earlier versions have other layouts, and no draws
        self._layouts, self._draws = {}, IndexDraws()

    def reconstruct_obs(self, idx: int, env_idx: int) -> th.Tensor:
        """Return the flattened observation of step ``idx`` of environment ``env_idx``."""
        step, env = check_index(idx, self.buffer_size, "idx"), check_index(env_idx, self.n_envs, "env_idx")
        return self._read_flat(step * self.n_envs + env)

    def reconstruct_nextobs(self, idx: int, env_idx: int) -> th.Tensor:
        """Return the flattened next observation of step ``idx`` of environment ``env_idx``."""
        step, env = check_index(idx, self.buffer_size, "idx"), check_index(env_idx, self.n_envs, "env_idx")
        return self._read_flat((self.buffer_size + step) * self.n_envs + env)
