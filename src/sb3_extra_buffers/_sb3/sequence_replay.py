"""`SequenceMixin`: compressed replay buffers that sample windows of consecutive steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers._sb3.replay import ReplayMixin, Step
from sb3_extra_buffers._sb3.sequence_index import Held
from sb3_extra_buffers._sb3.sequence_reader import WindowReader
from sb3_extra_buffers._sb3.sequence_states import StateColumns
from sb3_extra_buffers._sb3.sequence_windows import Request, Windows
from sb3_extra_buffers._sb3.sequences import Sequences
from sb3_extra_buffers._sb3.sum_tree import SumTree
from sb3_extra_buffers._sb3.views import Array, BufferView
from sb3_extra_buffers.codecs.spec import ObsSpec

__all__ = ["SequenceMixin"]

Indices = npt.NDArray[np.int64]

# per transition: its priority and its share of the nodes above
_PRIORITY_BYTES = 9


class SequenceMixin(Sequences, ReplayMixin):
    """A compressed replay buffer with `Sequences`."""

    _window_reader: WindowReader | None = None

    def _lay_out(self, n_steps: int) -> None:
        # a temporary column, so that max_bytes accounts for everything that is stored per step
        per_row = 1 + StateColumns.row_bytes(self.recurrent_states, self.recurrent_dtype)
        self._per_step = np.zeros((1, self.n_envs), f"V{per_row + _PRIORITY_BYTES * self.prioritized}")
        super()._lay_out(n_steps)
        del self._per_step
        self._make_sequence_columns()

    def _affordable_steps(self, n_steps: int, limit: int, column_bytes: int) -> int:
        found = super()._affordable_steps(n_steps, limit, column_bytes)
        if self.prioritized and found < n_steps:
            # the upper nodes of the tree, and the padding of its levels
            n_leaves = found * self.n_envs
            excess = max(SumTree(n_leaves).nbytes - _PRIORITY_BYTES * n_leaves, 0)
            found = super()._affordable_steps(n_steps, limit - excess, column_bytes)
        return found

    def _fit_step(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> Step:
        *step, done, truncated, _ = super()._fit_step(obs, next_obs, action, reward, done, infos)
        (is_first, next_is_first), states = self._plan_sequence(done, infos)
        # SB3's `learn` and HER mark the newest step as the last of its episode before they reset the environments
        is_first |= self.dones[self.pos - 1] != 0
        return (*step, done, truncated, ((is_first, next_is_first), states))

    def _forget_step(self, step: int) -> None:
        super()._forget_step(step)
        if self._priorities is not None:
            self._priorities.write_step(step, 0.0)

    def _clear_columns(self) -> None:
        self._clear_sequences()

    def check(self) -> None:
        """Raise `AssertionError` if episodes, priorities and steps contradict each other; for tests."""
        with self._lock:
            self._ensure_recovered()
            self.check_sequences()

    def _recover(self) -> None:
        if self._unfinished is not None:
            super()._recover()

    def _cache_views(self) -> None:
        super()._cache_views()
        self._window_reader = None

    def _plan_windows(self, request: Request, numbers: Indices, envs: Indices, held: Held) -> Windows:
        reader = self._window_reader
        if reader is None or not reader.is_current(self):
            self._window_reader = reader = WindowReader.of(self)
        if reader is None:
            return super()._plan_windows(request, numbers, envs, held)
        return reader.read(request, numbers, envs, held.n_added)

    def _upload(self, arrays: list[Array]) -> list[th.Tensor]:
        if self.device.type == "cpu":
            return [th.from_numpy(array) for array in arrays]
        return [self._to_torch(array) for array in arrays]

    def _observations_as_sb3(self, by_key: dict[str, Any]) -> Any:
        return self._views.as_sb3(by_key)

    def _read_window_observations(self, windows: Windows, env: VecNormalize | None) -> dict[str, th.Tensor]:
        gathered, newest_only = windows.gathered, windows.request.newest_only
        known = {} if gathered is None else gathered.observations
        if len(known) == len(self._views.by_key) and not (self._converts or newest_only or env is not None):
            # fast path: the same result with fewer calls
            return dict(zip(known, self._upload(list(known.values())), strict=True))
        return self._read_observations(windows.rows, newest_only, env, known)

    def _read_observations(
        self, rows: Indices, newest_only: bool, env: VecNormalize | None, known: Mapping[str, Array] | None = None
    ) -> dict[str, th.Tensor]:
        """See `Sequences`; ``known`` are those that have been read."""
        by_key = {}
        for key, view in self._views.by_key.items():
            array = known[key] if known and key in known else self._read_key(key, rows, newest_only)
            if newest_only:
                spec = ObsSpec(view.shape[2:], view.dtype)
                array = self._newest.take(array, key, spec, partial(self._newest_images, key))
            lead = array.shape[:2]
            # one leading axis, because normalisation and conversion expect plain batches of observations
            by_key[key] = array.reshape(math.prod(lead), *array.shape[2:])
        observations: Any = self._views.as_sb3(by_key)
        if env is not None:
            observations = env.normalize_obs(observations)
        tensors = self._obs_to_torch(observations)
        tensors = tensors if self._views.is_dict else {"": tensors}
        return {key: tensor.view(*lead, *tensor.shape[1:]) for key, tensor in tensors.items()}

    def _newest_images(self, key: str) -> Array:
        images: Array = self._read_key(key, self._newest_rows(), newest_only=False)[0]
        return images

    def _read_key(self, key: str, rows: Indices, newest_only: bool) -> Array:
        """Observations of ``key`` at ``rows [batch, n]``."""
        view, n_obs = self._views.by_key[key], self.buffer_size * self.n_envs
        if isinstance(view, BufferView):
            return view.read_windows_at(rows, newest_only and self._newest.may_cut(view.store.layout))
        array: Array = view.reshape(n_obs, *view.shape[2:])[rows % n_obs]
        is_next, following = rows >= n_obs, self._next_views.dense[key]
        array[is_next] = following.reshape(n_obs, *view.shape[2:])[rows[is_next] - n_obs]
        return array

    def _read_window_columns(
        self, windows: Windows, env: VecNormalize | None
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        gathered = windows.gathered
        if gathered is None:
            return super()._read_window_columns(windows, env)
        rewards = gathered.rewards
        if env is not None:
            rewards = np.asarray(self._normalize_reward(rewards, env), np.float32)
        uploaded = self._upload([gathered.actions, rewards, gathered.dones])
        return uploaded[0], uploaded[1], uploaded[2]

    def _read_columns(self, indices: Indices, env: VecNormalize | None) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        n_obs = self.buffer_size * self.n_envs
        dones = self.dones.take(indices) * (1 - self.timeouts.take(indices))
        rewards = np.asarray(self._normalize_reward(self.rewards.take(indices), env), np.float32)
        uploaded = self._upload([self.actions.reshape(n_obs, -1)[indices], rewards, dones])
        return uploaded[0], uploaded[1], uploaded[2]
