"""`RolloutMixin`: turns a rollout buffer of SB3's layout into a compressed one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.preprocessing import get_obs_shape

from sb3_extra_buffers._sb3.algorithm import check_space, own_space
from sb3_extra_buffers._sb3.base import CompressedBuffer, OptionsFirst
from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers._sb3.steps import fit_actions, fit_column, fit_flags
from sb3_extra_buffers._sb3.views import Array, ObsViews
from sb3_extra_buffers.arguments import as_array, check_count
from sb3_extra_buffers.errors import (
    ArgumentError,
    EmptyBufferError,
    ExtraBuffersError,
    IndexOutOfRangeError,
    SpecMismatchError,
)
from sb3_extra_buffers.stores.reentry import writes
from sb3_extra_buffers.stores.transactions import HELD, WRITING

T = TypeVar("T")

# ``_unfinished`` while a rollout is removed; sb3-contrib's `reset` removes more, and calls SB3's
_RESETTING, _RESETTING_CONTRIB = "resetting", "resetting with the columns of sb3-contrib"

# columns that sb3-contrib's buffers add to SB3's
_CONTRIB_COLUMNS = ("action_masks", "hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")

if TYPE_CHECKING:
    _Base = RolloutBuffer
else:
    _Base = object


class RolloutStep(NamedTuple):
    """What is left to do for a step whose observations are stored."""

    position: int
    obs: dict[str, Array]
    action: Array
    reward: Array
    episode_start: Array
    value: Array
    log_prob: Array


class RolloutMixin(CompressedBuffer, _Base):
    """Keeps the observations of a rollout buffer in stores; everything else stays as SB3 laid it out."""

    _obs_per_transition = 1

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: th.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
        dtypes: Mapping[str, Any] | None = None,
        normalize_images: bool = False,
        compression_method: str | Mapping[str, str] = "auto",
        compression_kwargs: Mapping[str, Any] | None = None,
        decompression_kwargs: Mapping[str, Any] | None = None,
        output_dtype: Literal["raw", "float"] = "raw",
        prefer: Literal["memory", "speed"] | None = None,
    ) -> None:
        how = dtypes, normalize_images, compression_method, compression_kwargs, decompression_kwargs, output_dtype
        self._take_options(StorageOptions(*how, prefer=prefer))
        if self._options.max_bytes is not None:
            raise ArgumentError("max_bytes is for replay buffers: no step of a rollout can be dropped")
        if self._options.storage != "memory":
            raise ArgumentError("storage='mmap' is for replay buffers: a rollout is discarded after training on it")
        buffer_size, n_envs = check_count(buffer_size, "buffer_size"), check_count(n_envs, "n_envs")
        check_space(self, observation_space)
        space = own_space(observation_space)
        super().__init__(buffer_size, space, action_space, device, gae_lambda, gamma, n_envs)

    @writes
    def reset(self) -> None:
        """Remove the rollout; the chosen compression methods stay."""
        self._check_writable()
        with self._lock:
            if self._unfinished is _RESETTING_CONTRIB:
                self._clear()
                return
            self._ensure_recovered()
            # from here on, the reset is completed after any exception
            self._unfinished = _RESETTING
            self._recover()

    def _recover(self) -> None:
        if self._unfinished is _RESETTING:
            self._clear()
            self._unfinished = None
        else:
            super()._recover()

    def _clear(self) -> None:
        """Remove the rollout; may be interrupted and run again."""
        shape: Any = get_obs_shape(self.observation_space)
        # SB3 lays out everything else; observations without elements cost nothing
        self.obs_shape = {} if isinstance(shape, dict) else (0,)  # type: ignore[assignment]  # Dict buffers have a dict
        try:
            super().reset()
        finally:
            self.obs_shape = shape
        if "_views" in vars(self):
            self._views.clear()
        else:
            lead_shape = (self.buffer_size, self.n_envs)
            self._views = ObsViews.make(self.observation_space, shape, lead_shape, self._options)
        # get() replaces the attribute, or the values of the dict, by flattened views
        self.observations = self._views.as_sb3()

    @writes
    def add(self, obs: Any, action: Any, reward: Any, episode_start: Any, value: Any, log_prob: Any) -> None:
        """Add one step of every environment; after any exception, all of it was added or nothing.

        Args:
            obs: Observations, of shape ``(n_envs, ...)``; a dict of them for a Dict space.
            action: Actions.
            reward: Rewards.
            episode_start: Whether an episode began with each observation.
            value: Values of the observations.
            log_prob: Log probabilities of the actions.
        """
        with self._lock:
            position = self.pos
            try:
                if self._unfinished is not None:
                    self._ensure_recovered()
                    position = self.pos
                self._unfinished = HELD
                step = self._fit_step(obs, action, reward, episode_start, value, log_prob)
                stored, obs = self._views.stored, step.obs
                # `_begin_step`, inlined: this runs at every step
                for view in stored.values():
                    view.store.commit()
                self._unfinished = WRITING
                for key, view in stored.items():
                    view[position] = obs[key]
                self._unfinished = step
                self._finish_step(step)
            except BaseException as problem:
                self._fail(problem, position)

    def _fit_step(
        self, obs: Any, action: Any, reward: Any, episode_start: Any, value: Any, log_prob: Any
    ) -> RolloutStep:
        """Check what `add` was given and return it as it will be written; nothing is changed."""
        if self.read_only:
            self._check_writable()
        n_envs, actions = self.n_envs, self.actions
        # fast path: skip validation where shape and dtype already match
        if type(action) is not np.ndarray or action.dtype != actions.dtype or action.size != n_envs * self.action_dim:
            action = fit_actions(actions, action)
        fitted_obs = self._views.fit(obs, "obs")
        columns = [fit_column(reward, n_envs, "reward"), fit_flags(episode_start, n_envs, "episode_start")]
        columns += [_fit_tensor(value, n_envs, "value"), _fit_tensor(log_prob, n_envs, "log_prob")]
        if self.pos >= self.buffer_size:
            raise IndexOutOfRangeError(f"the rollout is complete: {self.buffer_size} steps; call reset() first")
        return RolloutStep(self.pos, fitted_obs, action.reshape(n_envs, self.action_dim), *columns)

    def _finish_step(self, step: RolloutStep) -> None:
        position = step.position
        for key, array in self._views.dense.items():
            array[position] = step.obs[key]
        self.actions[position] = step.action
        self.rewards[position] = step.reward
        self.episode_starts[position] = step.episode_start
        self.values[position] = step.value
        self.log_probs[position] = step.log_prob
        if position + 1 == self.buffer_size:
            self.full = True
        self.pos = position + 1
        self._unfinished = None

    def _position(self) -> int:
        return self.pos

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: Any) -> None:
        """Compute returns and advantages (GAE) as SB3 does.

        Args:
            last_values: Values of the observations after the last step.
            dones: Whether each episode ended with the last step.
        """
        # in their own dtype, as SB3 computes with them
        values = _fit_tensor(last_values, self.n_envs, "last_values", None)
        super().compute_returns_and_advantage(th.from_numpy(np.array(values)), fit_flags(dones, self.n_envs, "dones"))

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw ``batch_size`` random steps, normalised by ``env`` if given; SB3's algorithms use `get` instead."""
        batch_size = check_count(batch_size, "batch_size", 0)
        with self._lock:
            buffer = self._undisturbed() if self._is_unfinished() else self
        return super().sample(batch_size, env) if buffer is self else buffer.sample(batch_size, env)

    def get(self, batch_size: int | None = None) -> Any:
        """Iterate over the rollout in random batches of ``batch_size``, in SB3's order; None for one batch of all."""
        if batch_size is not None:
            batch_size = check_count(batch_size, "batch_size")
        self._check_full()
        return self._prefetch(super().get(batch_size))

    def _check_full(self) -> None:
        if self._unfinished is not None:
            self.recover()
        if not self.full:
            raise EmptyBufferError(
                f"only {self.pos} of {self.buffer_size} steps were added; a rollout can be read once it is complete"
            )

    def _prefetch(self, batches: Iterator[T]) -> Iterator[T]:
        # a GPU trains while the next batch is decoded; on the CPU training needs all cores
        return prefetch(batches) if self.device.type == "cuda" else batches

    def _get_samples(self, *args: Any, **kwargs: Any) -> Any:
        return self._sb3_samples(super()._get_samples, *args, **kwargs)


class ContribRollout(OptionsFirst):
    """`OptionsFirst` for sb3-contrib's rollout buffers, which have their own `get` and columns.

    Their `add` writes to those columns before the step is checked.
    """

    #: Position of the step that is being added, and what the columns held there.
    _replaced: tuple[int, dict[str, Any]] | None = None

    @writes
    def add(self: Any, *args: Any, **kwargs: Any) -> None:
        """Add one step of every environment; after any exception, all of it was added or nothing."""
        self._check_writable()
        with self._lock:
            self._ensure_recovered()
            position = min(self.pos, self.buffer_size - 1)
            columns = {name: getattr(self, name) for name in _CONTRIB_COLUMNS if hasattr(self, name)}
            self._replaced = self.pos, {name: column[position].copy() for name, column in columns.items()}
            try:
                super().add(*args, **kwargs)  # type: ignore[misc]  # a buffer follows
                self._replaced = None
            except BaseException as problem:
                with contextlib.suppress(Exception):
                    self._recover()
                if isinstance(problem, Exception) and not isinstance(problem, ExtraBuffersError):
                    raise SpecMismatchError(f"{' and '.join(columns)} do not fit: {problem}") from problem
                raise

    @writes
    def reset(self: Any) -> None:
        """Remove the rollout; the chosen compression methods stay."""
        self._check_writable()
        with self._lock:
            self._ensure_recovered()
            self._unfinished = _RESETTING_CONTRIB
            self._recover()

    def _is_unfinished(self: Any) -> bool:
        return self._replaced is not None or super()._is_unfinished()  # type: ignore[misc]  # a buffer follows

    def _recover(self: Any) -> None:
        if self._unfinished is _RESETTING_CONTRIB:
            super().reset()  # type: ignore[misc]  # a buffer follows
            self.__dict__.update(_replaced=None, _unfinished=None)
            return
        super()._recover()  # type: ignore[misc]  # a buffer follows
        if self._replaced is not None:
            position, rows = self._replaced
            if self.pos == position < self.buffer_size:
                for name, row in rows.items():
                    getattr(self, name)[position] = row
            self._replaced = None

    def get(self: Any, batch_size: int | None = None) -> Any:
        """Iterate over the rollout in random batches of ``batch_size``, in sb3-contrib's order."""
        self._check_full()
        return self._prefetch(super().get(batch_size))  # type: ignore[misc]  # a buffer follows

    def _get_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._sb3_samples(super()._get_samples, *args, **kwargs)


def _fit_tensor(values: Any, n_envs: int, name: str, dtype: Any = np.float32) -> Array:
    # numpy() is several times faster than np.asarray() of a tensor
    array = values.detach().cpu().numpy() if isinstance(values, th.Tensor) else as_array(values, name)
    return fit_column(array.reshape(-1), n_envs, name, array.dtype if dtype is None else dtype)


def prefetch(batches: Iterator[T]) -> Iterator[T]:
    """Yield ``batches``; each one is made in another thread while the one before it is in use."""
    end: Any = object()
    with ThreadPoolExecutor(1, "sb3-extra-buffers-rollout") as worker:
        next_batch = worker.submit(next, batches, end)
        while (batch := next_batch.result()) is not end:
            next_batch = worker.submit(next, batches, end)
            yield batch
