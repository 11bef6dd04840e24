"""`GpuReplayBuffer` that also samples windows of consecutive steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers._sb3.sequences import Sequences
from sb3_extra_buffers.arguments import as_array
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer
from sb3_extra_buffers.gpu_buffers.replay_buffer import GpuReplayBuffer
from sb3_extra_buffers.stores.device_base import IndexBatch
from sb3_extra_buffers.stores.device_observation import DeviceObservationStore
from sb3_extra_buffers.stores.staging import Staging

__all__ = ["GpuSequenceReplayBuffer"]

Indices = npt.NDArray[np.int64]


class GpuSequenceReplayBuffer(Sequences, GpuReplayBuffer):
    """`GpuReplayBuffer` that also samples windows of consecutive steps, and stores recurrent states.

    For Box and Dict spaces. Takes the arguments of `GpuReplayBuffer`, and those that `CompressedSequenceReplayBuffer`
    adds to `CompressedReplayBuffer`. Recurrent states and priorities are kept on the host. If ``done`` is a tensor on
    the GPU, `add` waits for the GPU.

    Args:
        gamma: Discount factor of n-step returns.

    Examples:
        >>> import numpy as np
        >>> from gymnasium import spaces
        >>> from sb3_extra_buffers.gpu_buffers import GpuSequenceReplayBuffer
        >>> buffer = GpuSequenceReplayBuffer(
        ...     1000, spaces.Box(0, 255, (1, 84, 84), np.uint8), spaces.Discrete(4), device="cpu",
        ...     compression_method="delta",
        ... )
        >>> obs = np.zeros((1, 1, 84, 84), np.uint8)
        >>> for step in range(100):
        ...     buffer.add(obs, obs, np.array([0]), np.ones(1), np.array([step % 30 == 29]), [{}])
        >>> buffer.sample_sequences(16, length=20, n_steps=3).observations.shape
        torch.Size([16, 20, 1, 84, 84])
    """

    # while a batch is read, another thread must not overwrite its steps
    _locks_reads = True

    def __init__(self, *args: Any, gamma: float = 0.99, **kwargs: Any) -> None:
        self.n_added, self.gamma = 0, gamma
        super().__init__(*args, **kwargs)
        self._make_sequence_columns()

    def _extra(self, position: int, done: Any, infos: Any) -> Any:
        return self._plan_sequence(as_array(done, "done"), infos)

    def _after(self, position: int) -> dict[str, Any]:
        return {**super()._after(position), "n_added": self.n_added + 1}

    def _clear_columns(self) -> None:
        self._clear_sequences()

    # ---- reading ----

    def _upload(self, arrays: list[npt.NDArray[Any]]) -> list[th.Tensor]:
        if self.device.type == "cpu":
            return [th.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        if self._staging.device != self.device:
            self._staging = Staging(self.device)  # SB3 changes the device of buffers that it loads
        return self._staging.upload(arrays)

    def _observations_as_sb3(self, by_key: dict[str, Any]) -> Any:
        return self._as_sb3(by_key)

    def _read_observations(self, rows: Indices, newest_only: bool, env: VecNormalize | None) -> dict[str, th.Tensor]:
        # uploaded here, from pinned memory: the store would wait for the copy
        indices, by_key = IndexBatch(rows, self._upload([rows])[0]), {}
        for key, store in self.obs_stores.items():
            layout = None if store.inner is None else store.inner.layout
            tensor = store.read_windows(indices, newest_only and self._newest.may_cut(layout))
            if newest_only:
                tensor = self._newest.take(tensor, key, store.spec, partial(self._newest_images, store))
            by_key[key] = self._convert(tensor, key)
        if env is None:
            return by_key
        flat = self._normalized({key: tensor.flatten(0, 1) for key, tensor in by_key.items()}, env)
        return {key: tensor.view(*rows.shape, *tensor.shape[1:]) for key, tensor in flat.items()}

    def _newest_images(self, store: DeviceObservationStore) -> npt.NDArray[Any]:
        images: npt.NDArray[Any] = store.read_windows(IndexBatch(self._newest_rows()))[0].cpu().numpy()
        return images

    def _read_columns(self, indices: Indices, env: VecNormalize | None) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        table, shape = self._current_table(), indices.shape
        floats, actions = table.empty(indices.size)
        (uploaded,) = self._upload([indices.reshape(-1)])
        table.gather(uploaded, floats, actions)
        dones, rewards = floats.view(2, *shape).unbind(0)
        if env is not None:
            rewards = self.to_torch(np.asarray(self._normalize_reward(rewards.cpu().numpy(), env), np.float32))
        return actions.view(*shape, -1), rewards, dones

    # ---- the rest ----

    def check(self) -> None:
        """Raise `AssertionError` if the tables of a store, or episodes, priorities and steps, contradict each other."""
        with self._lock:
            BaseGpuBuffer.check(self)
            self.check_sequences()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = super().__getstate__()
            state |= {"_index": self._index.frozen(), "_states": self._states.frozen()}
            if self._priorities is not None:
                state["_priorities"] = self._priorities.frozen()
        return state
