"""Replay buffers with device-resident observations."""

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

from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers._sb3.steps import fit_actions, fit_column
from sb3_extra_buffers.arguments import as_array, check_count
from sb3_extra_buffers.errors import EmptyBufferError, SpecMismatchError
from sb3_extra_buffers.gpu_buffers.base import (
    BaseGpuBuffer,
    Step,
    check_index,
    old_slot_bytes,
)
from sb3_extra_buffers.stores.device_observation import IndexBatch
from sb3_extra_buffers.stores.locks import fork_safe_lock
from sb3_extra_buffers.stores.staging import Layout, Staging

__all__ = ["GpuReplayBuffer"]

_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
_BOOL = frozenset({bool, np.bool_})
_NAMES = ("obs", "next_obs")
# of a batch; kernels count them in 32 bits
_MOST_ROWS = (1 << 31) - 1


class GpuReplayBuffer(ReplayBuffer, BaseGpuBuffer):
    """Replay buffer with observations stored on a Torch device.

    ``buffer_device`` is where they are kept (the ``device`` of the samples, if it is not given): a torch device, or
    ``"pinned"`` for memory of the host that the GPU reads over the bus. Next observations share their frames, so
    ``optimize_memory_usage`` has nothing left to save; it is accepted, and indices are then drawn as SB3 draws them.
    ``heap_bytes`` is the most that encoded observations of a key may take; without it they take what they need.
    """

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
    ) -> None:
        check_count(buffer_size, "buffer_size")
        check_count(n_envs, "n_envs")
        self._lock = fork_safe_lock(of_buffer=True)
        # not ReplayBuffer's: it would lay out dense observations
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        # only now: SB3's calls this one too, without arguments
        BaseGpuBuffer.__init__(self, compression_method, compression_kwargs, decompression_kwargs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        lead = (self.buffer_size, n_envs)
        self.actions = np.zeros((*lead, self.action_dim), dtype=self._maybe_cast_dtype(action_space.dtype))
        self.rewards = np.zeros(lead, np.float32)
        self.dones = np.zeros(lead, np.float32)
        self.timeouts = np.zeros(lead, np.float32)
        self._make_stores(
            2,
            StorageOptions(dtypes, normalize_images, compression_method, output_dtype=output_dtype),
            buffer_device,
            old_slot_bytes(max_slot_bytes, heap_bytes, 2 * self.buffer_size * n_envs),
        )
        self._lane = (n_envs,)
        self._staging = Staging(self.device)
        self._layouts: dict[int, Layout] = {}

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        done: npt.NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one step of every environment; whatever is raised, all of it is added or nothing is changed."""
        with self._lock:
            if self._unfinished is not None or self.read_only:
                self._check_writable()
            # fast path: skip validation when shape and dtype already match
            position, actions, lane = self.pos, self.actions, self._lane
            if type(action) is not np.ndarray or action.dtype != actions.dtype or action.shape != actions.shape[1:]:
                action = fit_actions(actions, action)
            if type(reward) is not np.ndarray or reward.dtype != _FLOAT32 or reward.shape != lane:
                reward = fit_column(reward, self.n_envs, "reward")
            if type(done) is not np.ndarray or done.dtype.char not in "?f" or done.shape != lane:
                done = fit_column(done, self.n_envs, "done")
            columns = [(actions, action), (self.rewards, reward), (self.dones, done)]
            if self.handle_timeout_termination:
                columns.append((self.timeouts, self._fit_infos(infos)))
            plans = self._plan(position, (obs, next_obs), _NAMES)
            if position + 1 == self.buffer_size:
                after = {"pos": 0, "full": True, "_unfinished": None}
            else:
                after = {"pos": position + 1, "_unfinished": None}
            self._commit(Step(position, plans, columns, after))

    def _fit_infos(self, infos: Any) -> Any:
        """Which steps were truncated, one for each environment."""
        try:
            truncated: Any = [info.get("TimeLimit.truncated", False) for info in infos]
        except (TypeError, AttributeError) as problem:
            raise SpecMismatchError(f"infos must be a dict for each environment, got {infos!r}") from problem
        if len(truncated) == self.n_envs and _BOOL.issuperset(map(type, truncated)):
            return truncated
        # some pass arrays of one
        found = [as_array(value, "TimeLimit.truncated") for value in truncated]
        if any(value.size != 1 for value in found) or len(found) not in (1, self.n_envs):
            raise SpecMismatchError(f"{len(found)} infos for {self.n_envs} environments; check n_envs")
        return fit_column(np.concatenate([value.reshape(1) for value in found]), self.n_envs, "TimeLimit.truncated")

    def reset(self) -> None:
        """Forget all steps."""
        with self._lock:
            if self.read_only or isinstance(self._unfinished, Step):
                self._check_writable()
            try:
                # may be run again wherever it is interrupted
                self._unfinished = "reset"
                for store in self._stores.values():
                    store.clear()
                self.__dict__.update(pos=0, full=False, _unfinished=None)
            except BaseException:
                self._recover()
                raise

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw ``batch_size`` transitions; random numbers are drawn in SB3's order."""
        if self._unfinished is not None:
            with self._lock:
                self._recover()
        if type(batch_size) is not int or not 0 < batch_size <= _MOST_ROWS:
            batch_size = check_count(batch_size, "batch_size", 0)
            if batch_size > _MOST_ROWS:
                raise SpecMismatchError(f"batch_size must be at most {_MOST_ROWS}, got {batch_size}")
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
            self._staging = Staging(self.device)  # SB3 sets another device on buffers that it loads
        lease = self._staging.acquire(self._layout(count))
        indices, (dones, rewards), actions = lease.arrays
        here = indices[0]
        np.multiply(batch_inds, self.n_envs, out=here)
        here += envs
        np.add(here, n_obs, out=indices[1])
        # indices are right: "clip" only spares NumPy a copy of what it writes
        self.actions.reshape(n_obs, -1).take(here, axis=0, out=actions, mode="clip")
        self.dones.reshape(n_obs, 1).take(here, axis=0, out=dones, mode="clip")
        # dones that are due to timeouts do not count
        dones *= 1 - self.timeouts.reshape(n_obs, 1).take(here, axis=0)
        self.rewards.reshape(n_obs, 1).take(here, axis=0, out=rewards, mode="clip")
        if env is not None:
            rewards[...] = self._normalize_reward(rewards, env)
        direct = self._stores[""].direct if "" in self._stores and count else None
        if direct is not None and direct.device.type == self.device.type:
            observations, numbers, taken = direct.read_batch(lease)
            self._staging.release(lease)
            found: Any = self._finish(observations)
        else:
            batch, numbers, taken = self._staging.send(lease)
            found = self._read(IndexBatch(indices, batch))
        if isinstance(found, dict):
            obs: Any = {key: part[0] for key, part in found.items()}
            next_obs: Any = {key: part[1] for key, part in found.items()}
        else:
            obs, next_obs = found.unbind(0)
        if env is not None:
            obs, next_obs = self._normalized(obs, env), self._normalized(next_obs, env)
        make = DictReplayBufferSamples if isinstance(found, dict) else ReplayBufferSamples
        return make(obs, taken, next_obs, *numbers.unbind(0))

    def _layout(self, count: int) -> Layout:
        """Cells, two columns of numbers and actions of ``count`` transitions."""
        found = self._layouts.get(count)
        if found is None:
            found = self._staging.layout(
                ((2, count), _INT64), ((2, count, 1), _FLOAT32), ((count, self.action_dim), self.actions.dtype)
            )
            self._layouts = {count: found}  # batches are of one size, as a rule
        return found

    def _normalized(self, obs: Any, env: VecNormalize) -> Any:
        """`VecNormalize` works on NumPy's arrays."""
        arrays: Any
        if isinstance(obs, dict):
            arrays = env.normalize_obs({key: part.cpu().numpy() for key, part in obs.items()})
            return {key: self.to_torch(part) for key, part in arrays.items()}
        arrays = env.normalize_obs(obs.cpu().numpy())
        return self.to_torch(arrays)

    def _at(self, place: int, idx: int, env_idx: int) -> th.Tensor:
        step, env = check_index(idx, self.buffer_size, "idx"), check_index(env_idx, self.n_envs, "env_idx")
        index = (place * self.buffer_size + step) * self.n_envs + env
        found = self._read(IndexBatch(np.array([[index]], np.int64)))
        parts = found.values() if isinstance(found, dict) else [found]
        return th.cat([part.reshape(-1) for part in parts])

    def reconstruct_obs(self, idx: int, env_idx: int) -> th.Tensor:
        """Return the flattened observation at ``(idx, env_idx)``."""
        return self._at(0, idx, env_idx)

    def reconstruct_nextobs(self, idx: int, env_idx: int) -> th.Tensor:
        """Return the flattened next observation at ``(idx, env_idx)``."""
        return self._at(1, idx, env_idx)
