"""Rollout buffers with device-resident observations."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples

from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers.errors import EmptyBufferError
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer, old_slot_bytes
from sb3_extra_buffers.stores.device_observation import CellBatch
from sb3_extra_buffers.stores.staging import Staging

__all__ = ["GpuRolloutBuffer"]

_COLUMNS = ("values", "log_probs", "advantages", "returns")


class GpuRolloutBuffer(RolloutBuffer, BaseGpuBuffer):
    """Rollout buffer with observations stored on a Torch device; the arguments are `GpuReplayBuffer`'s."""

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
    ) -> None:
        self._stores = {}
        options = StorageOptions(dtypes, normalize_images, compression_method)
        heap_bytes = old_slot_bytes(max_slot_bytes, heap_bytes, buffer_size * n_envs)
        super().__init__(buffer_size, observation_space, action_space, device, gae_lambda, gamma, n_envs)
        # only now: SB3's calls this one too, without arguments
        BaseGpuBuffer.__init__(self, compression_method, compression_kwargs, decompression_kwargs)
        self._make_stores(1, options, buffer_device, heap_bytes)
        self._staging = Staging(self.device)

    def reset(self) -> None:
        """Clear rollout storage and reset the write position."""
        shape = self.obs_shape
        # SB3 lays out everything else; observations of no elements cost it nothing
        self.obs_shape = (0,)
        try:
            super().reset()
        finally:
            self.obs_shape = shape
        for store in self._stores.values():
            store.clear()

    def add(
        self,
        obs: Any,
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        episode_start: npt.NDArray[Any],
        value: th.Tensor,
        log_prob: th.Tensor,
    ) -> None:
        """Add a rollout step of every environment."""
        fitted = self._fit(obs, "obs")
        # first what has to come from the device, in one copy if it can, so that it need not wait for what is sent there
        if value.numel() == log_prob.numel() and value.device == log_prob.device:
            value, log_prob = th.stack((value.flatten(), log_prob.flatten())).cpu()
        self.values[self.pos] = value.cpu().numpy().flatten()
        self.log_probs[self.pos] = log_prob.cpu().numpy().flatten()
        for key, store in self._stores.items():
            store.write(self.pos, (fitted[key],))
        self.actions[self.pos] = np.asarray(action).reshape((self.n_envs, self.action_dim))
        self.rewards[self.pos] = reward
        self.episode_starts[self.pos] = episode_start
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full = True

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Yield shuffled rollout minibatches after the buffer is full; random numbers are drawn as SB3 draws them."""
        if not self.full:
            raise EmptyBufferError(
                f"{self.pos} of {self.buffer_size} steps were added; a rollout is read when it is complete"
            )
        n_cells = self.buffer_size * self.n_envs
        order = np.random.permutation(n_cells)
        if not self.generator_ready:
            for name in ("actions", *_COLUMNS):
                self.__dict__[name] = self.swap_and_flatten(self.__dict__[name])
            self.generator_ready = True
        if batch_size is None:
            batch_size = n_cells
        if self._staging.device != self.device:
            self._staging = Staging(self.device)
        cells = (order % self.buffer_size * self.n_envs + order // self.buffer_size)[None]
        actions = self.actions.astype(np.float32, copy=False)
        columns = [self.__dict__[name].reshape(-1) for name in _COLUMNS]
        uploaded = self._staging.upload([order, cells, actions, columns])
        for first in range(0, n_cells, batch_size):
            yield self._batch(slice(first, first + batch_size), cells, *uploaded)

    def _batch(
        self,
        part: slice,
        cells: npt.NDArray[np.int64],
        order: th.Tensor,
        device_cells: th.Tensor,
        actions: th.Tensor,
        columns: th.Tensor,
    ) -> Any:
        found = self._read(CellBatch(cells[:, part], device_cells[:, part]))
        here = order[part]
        # gathered along the columns, so that each one of them is contiguous
        values, log_probs, advantages, returns = columns.index_select(1, here)
        if isinstance(found, dict):
            obs: Any = {key: found_part[0] for key, found_part in found.items()}
            return DictRolloutBufferSamples(obs, actions[here], values, log_probs, advantages, returns)
        return RolloutBufferSamples(found[0], actions[here], values, log_probs, advantages, returns)

    def reconstruct_obs(self, idx: int) -> th.Tensor:
        """Return the flattened observation at flattened index ``idx``."""
        cell = idx % self.buffer_size * self.n_envs + idx // self.buffer_size
        found = self._read(CellBatch(np.array([[cell]], np.int64)))
        parts = found.values() if isinstance(found, dict) else [found]
        return th.cat([part.reshape(-1) for part in parts])
