"""What turns a rollout buffer of SB3's layout into a compressed one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_extra_buffers._sb3.base import CompressedBuffer, OptionsFirst
from sb3_extra_buffers._sb3.leaves import (
    Leaves,
    as_array,
    check_count,
    each_leaf,
    fit,
    fit_actions,
    fit_column,
    fit_leaves,
    leaves_usage,
    make_leaves,
)
from sb3_extra_buffers.errors import EmptyBufferError, ExtraBuffersError, IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.view import StoreView

T = TypeVar("T")

# what sb3-contrib's buffers have beyond SB3's
_CONTRIB_COLUMNS = ("action_masks", "hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")

if TYPE_CHECKING:
    _Base = RolloutBuffer
else:
    _Base = object


class RolloutStep(NamedTuple):
    """What is left to do for a step whose observations are stored; doing it twice changes nothing."""

    position: int
    obs: Any
    action: Any
    reward: Any
    episode_start: Any
    value: Any
    log_prob: Any


class RolloutMixin(CompressedBuffer, _Base):
    """Keeps the observations of a rollout buffer in stores; everything else stays as SB3 laid it out."""

    observations: Any
    _leaves: Any = None

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
    ) -> None:
        self._take_options(
            dtypes=dtypes,
            normalize_images=normalize_images,
            compression_method=compression_method,
            compression_kwargs=compression_kwargs,
            decompression_kwargs=decompression_kwargs,
            output_dtype=output_dtype,
        )
        if self._options.max_bytes is not None:
            raise ValueError("max_bytes is for replay buffers: a rollout must be held as a whole")
        if self._options.storage != "memory":
            raise ValueError("storage='mmap' is for replay buffers: a rollout is forgotten after it was learnt from")
        super().__init__(buffer_size, observation_space, action_space, device, gae_lambda, gamma, n_envs)

    def reset(self) -> None:
        """Forget the rollout; what was learnt about the observations stays."""
        self._check_writable()
        with self._lock:
            self._recover()
            shape: Any = self.obs_shape
            # SB3 lays out everything else; observations of no elements cost it nothing
            self.obs_shape = {} if isinstance(shape, dict) else (0,)  # type: ignore[assignment]  # Dict buffers have a dict
            try:
                super().reset()
            finally:
                self.obs_shape = shape
            if self._leaves is None:
                lead = (self.buffer_size, self.n_envs)
                self._leaves = make_leaves(self.observation_space, shape, lead, self._options)
            else:
                for _, leaf in each_leaf(self._leaves):
                    if isinstance(leaf, StoreView):
                        leaf.store.clear()
                    else:
                        leaf[...] = 0
            # get() replaces these by flattened views
            self.observations = Leaves(self._leaves) if isinstance(self._leaves, dict) else self._leaves

    def add(self, obs: Any, action: Any, reward: Any, episode_start: Any, value: Any, log_prob: Any) -> None:
        """Add one step of every environment: all of it, or after an exception of whatever kind nothing."""
        with self._lock:
            position = self.pos
            try:
                if self._step is not None:
                    self._recover()
                    position = self.pos
                step = self._fit_step(obs, action, reward, episode_start, value, log_prob)
                leaves = self.observations
                for key in self._begin_step(leaves):
                    if key is None:
                        leaves[position] = step.obs
                    else:
                        leaves[key][position] = step.obs[key]
                self._step = step
                self._finish_step(step)
            except BaseException as problem:
                self._fail(problem, position)

    def _fit_step(
        self, obs: Any, action: Any, reward: Any, episode_start: Any, value: Any, log_prob: Any
    ) -> RolloutStep:
        """What `add` was given, as it will be written, or an error; nothing is changed."""
        self._check_writable()
        n_envs, leaves, actions = self.n_envs, self.observations, self.actions
        # fast path: skip validation where shape and dtype already match
        if isinstance(leaves, Leaves):
            obs = fit_leaves(leaves, obs, "obs")
        elif type(obs) is not np.ndarray or obs.dtype != leaves.dtype or obs.shape != leaves.shape[1:]:
            obs = fit(leaves, obs, "obs")
        if type(action) is not np.ndarray or action.dtype != actions.dtype or action.size != n_envs * self.action_dim:
            action = fit_actions(actions, action)
        numbers = [fit_column(reward, n_envs, "reward"), fit_column(episode_start, n_envs, "episode_start")]
        for name, tensor in (("value", value), ("log_prob", log_prob)):
            array = tensor.detach().cpu().numpy() if isinstance(tensor, th.Tensor) else tensor
            numbers.append(fit_column(as_array(array, name).reshape(-1), n_envs, name))
        if self.pos >= self.buffer_size:
            raise IndexOutOfRangeError(f"the rollout has all of its {self.buffer_size} steps; reset() it first")
        return RolloutStep(self.pos, obs, action.reshape(n_envs, self.action_dim), *numbers)

    def _finish_step(self, step: RolloutStep) -> None:
        position, leaves = step.position, self.observations
        for key, leaf in each_leaf(leaves):
            if type(leaf) is np.ndarray:
                leaf[position] = step.obs if key is None else step.obs[key]
        self.actions[position] = step.action
        self.rewards[position] = step.reward
        self.episode_starts[position] = step.episode_start
        self.values[position] = step.value
        self.log_probs[position] = step.log_prob
        if position + 1 == self.buffer_size:
            self.full = True
        self.pos = position + 1
        self._step = None

    def _recover(self) -> None:
        if isinstance(self._step, RolloutStep):
            self._finish_step(self._step)
        elif self._step is not None:
            self._undo_step(self.observations)

    def _position(self) -> int:
        return self.pos

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: Any) -> None:
        """Compute returns and advantages (GAE), as SB3 does."""
        values = fit_column(as_array(last_values, "last_values").reshape(-1), self.n_envs, "last_values")
        super().compute_returns_and_advantage(th.from_numpy(np.array(values)), fit_column(dones, self.n_envs, "dones"))

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw ``batch_size`` steps at random; SB3's algorithms use `get` instead."""
        return super().sample(check_count(batch_size, "batch_size", 0), env)

    def get(self, batch_size: int | None = None) -> Any:
        """The rollout in random batches, in SB3's order."""
        if batch_size is not None:
            batch_size = check_count(batch_size, "batch_size")
        self._check_full()
        return self._ahead(super().get(batch_size))

    def _check_full(self) -> None:
        if self._step is not None:
            with self._lock:
                self._recover()
        if not self.full:
            raise EmptyBufferError(
                f"{self.pos} of {self.buffer_size} steps were added; a rollout is read when it is complete"
            )

    def _ahead(self, batches: Iterator[T]) -> Iterator[T]:
        # a GPU computes while the next batch is decoded; on the CPU the learner wants all cores for itself
        return made_ahead(batches) if self.device.type == "cuda" else batches

    def _get_samples(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_asked(super()._get_samples(*args, **kwargs))

    def memory_usage(self) -> MemoryUsage:
        """What the buffer holds, by purpose; ``dense`` is one dense copy of the observations."""
        columns = (
            column.nbytes for name, column in vars(self).items() if isinstance(column, np.ndarray) and name != "_leaves"
            and name != "observations"
        )  # fmt: skip
        return leaves_usage(self._leaves, 1, 1.0) + MemoryUsage(0, 0, 0, sum(columns), 0)


class RolloutFirst(OptionsFirst):
    """`OptionsFirst` for sb3-contrib's rollout buffers, which have a `get` and columns of their own.

    They write to those before the step gets to where it is checked.
    """

    #: Position of the step that is being added, and what their columns held there.
    _replaced: tuple[int, dict[str, Any]] | None = None

    def add(self: Any, *args: Any, **kwargs: Any) -> None:
        """Add one step of every environment: all of it, or after an exception of whatever kind nothing."""
        self._check_writable()
        with self._lock:
            self._recover()
            position = min(self.pos, self.buffer_size - 1)
            columns = {name: getattr(self, name) for name in _CONTRIB_COLUMNS if hasattr(self, name)}
            self._replaced = self.pos, {name: column[position].copy() for name, column in columns.items()}
            try:
                super().add(*args, **kwargs)  # type: ignore[misc]  # this stands before a buffer
                self._replaced = None
            except BaseException as problem:
                with contextlib.suppress(Exception):
                    self._recover()
                if isinstance(problem, Exception) and not isinstance(problem, ExtraBuffersError):
                    raise SpecMismatchError(f"{' and '.join(columns)} do not fit: {problem}") from problem
                raise

    def _recover(self: Any) -> None:
        super()._recover()  # type: ignore[misc]  # this stands before a buffer
        if self._replaced is not None:
            position, rows = self._replaced
            if self.pos == position < self.buffer_size:
                for name, row in rows.items():
                    getattr(self, name)[position] = row
            self._replaced = None

    def get(self: Any, batch_size: int | None = None) -> Any:
        """The rollout in random batches, in the order of the buffer behind this."""
        self._check_full()
        return self._ahead(super().get(batch_size))  # type: ignore[misc]  # this stands before a buffer


def made_ahead(batches: Iterator[T]) -> Iterator[T]:
    """What ``batches`` yields, each one made in another thread while the one before is in use."""
    end: Any = object()
    with ThreadPoolExecutor(1, "sb3-extra-buffers-rollout") as worker:
        coming = worker.submit(next, batches, end)
        while (batch := coming.result()) is not end:
            coming = worker.submit(next, batches, end)
            yield batch
