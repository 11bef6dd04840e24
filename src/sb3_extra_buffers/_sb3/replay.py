"""What turns a replay buffer of SB3's layout into a compressed one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers._sb3.algorithm import check_n_steps
from sb3_extra_buffers._sb3.base import NO_MEMORY, WRITING, CompressedBuffer
from sb3_extra_buffers._sb3.leaves import (
    Array,
    Leaf,
    Leaves,
    check_count,
    each_leaf,
    fit,
    fit_actions,
    fit_column,
    fit_leaves,
    held_bytes,
    leaves_usage,
    make_leaves,
    next_leaves,
)
from sb3_extra_buffers._sb3.n_step import HAS_N_STEP, NStepReplayBuffer
from sb3_extra_buffers.errors import (
    BudgetExceededError,
    EmptyBufferError,
    ExtraBuffersError,
    OutOfMemoryError,
    SpecMismatchError,
)
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.view import StoreView

if TYPE_CHECKING:
    _Base = ReplayBuffer
else:
    _Base = object

# of a budget, the part that tables may take which do not shrink when observations are evicted
_TABLES = 1 / 3
# what a stack of four and the next one take in such tables
_CELL_BYTES = 32
_BOOL = frozenset({bool, np.bool_})
# dtypes that rewards and dones are stored from as they are; NumPy has one object for each
_FLOAT, _FLAG = np.dtype(np.float32), np.dtype(np.bool_)


# What is left to do for a step whose observations are stored: position, n_added, n_evicted, obs, next_obs, action,
# reward, done, truncated. A plain tuple, as it is made at every step; doing it twice changes nothing.
Step = tuple[int, int, int, Any, Any, Array, Array, Array, Any]


class Eviction(NamedTuple):
    """What is left to do to drop the oldest step."""

    position: int
    n_evicted: int


class ReplayMixin(CompressedBuffer, _Base):
    """Keeps the observations of a replay buffer in stores; everything else stays as SB3 laid it out.

    Next observations are held beside the observations and share their frames, so ``optimize_memory_usage`` has
    nothing left to save. It is accepted, with ``handle_timeout_termination`` too; indices are then drawn as SB3
    draws them.
    """

    observations: Any
    next_observations: Any
    n_steps: int
    gamma: float
    #: What else a step at a position changes; doing it twice must change nothing.
    _step_added: Callable[[int], None] | None = None

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        dtypes: Mapping[str, Any] | None = None,
        normalize_images: bool = False,
        compression_method: str | Mapping[str, str] = "auto",
        compression_kwargs: Mapping[str, Any] | None = None,
        decompression_kwargs: Mapping[str, Any] | None = None,
        output_dtype: Literal["raw", "float"] = "raw",
        max_bytes: int | None = None,
        on_max_bytes: Literal["evict", "raise"] = "evict",
        n_steps: int = 1,
        gamma: float = 0.99,
        storage: Literal["memory", "mmap"] = "memory",
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self._take_options(
            dtypes=dtypes,
            normalize_images=normalize_images,
            compression_method=compression_method,
            compression_kwargs=compression_kwargs,
            decompression_kwargs=decompression_kwargs,
            output_dtype=output_dtype,
            max_bytes=max_bytes,
            on_max_bytes=on_max_bytes,
            storage=storage,
            path=path,
        )
        if check_count(n_steps, "n_steps") > 1 and not HAS_N_STEP:
            raise ValueError(f"n_steps must be 1, or more with stable-baselines3>=2.7; got {n_steps}")
        # SB3 lays out a single step, so that dense observations are never asked for
        super().__init__(
            n_envs,
            observation_space,
            action_space,
            device=device,
            n_envs=n_envs,
            optimize_memory_usage=False,
            handle_timeout_termination=handle_timeout_termination,
        )
        self.n_steps, self.gamma = n_steps, gamma
        is_n_step = n_steps > 1 or isinstance(self, NStepReplayBuffer)
        self.optimize_memory_usage = optimize_memory_usage and not is_n_step
        self._n_evicted = 0
        self._n_added = 0
        self._lay_out(max(buffer_size // n_envs, 1))
        if not isinstance(self, NStepReplayBuffer):
            check_n_steps(self)
        self._settle_in_file()

    def _lay_out(self, n_steps: int) -> None:
        """Give every column that SB3 laid out for one step its length."""
        columns = {
            name: column
            for name, column in vars(self).items()
            if isinstance(column, np.ndarray) and column.shape[:2] == (1, self.n_envs)
            and name not in ("observations", "next_observations")
        }  # fmt: skip
        limit = self._options.max_bytes
        if limit is not None:
            n_steps = self._affordable_steps(n_steps, limit, columns)
        for name, column in columns.items():
            setattr(self, name, np.zeros((n_steps, *column.shape[1:]), column.dtype))
        self.buffer_size = n_steps
        self.observations = make_leaves(self.observation_space, self.obs_shape, (n_steps, self.n_envs), self._options)
        self.next_observations = next_leaves(self.observations)
        self._step_shape = None if isinstance(self.observations, Leaves) else self.observations.shape[1:]
        self._lane = (self.n_envs,)
        self._action_shape = (self.n_envs, self.action_dim)
        self._column_bytes = sum(np.asarray(getattr(self, name)).nbytes for name in columns)

    def _affordable_steps(self, n_steps: int, limit: int, columns: dict[str, Array]) -> int:
        """How many of ``n_steps`` there may be room for: less than would fit only if observations get very small."""
        leaves = make_leaves(self.observation_space, self.obs_shape, (1, self.n_envs), self._options)
        dense = [leaf for _, leaf in each_leaf(leaves) if isinstance(leaf, np.ndarray)]
        n_views = sum(isinstance(leaf, StoreView) for _, leaf in each_leaf(leaves))
        per_step = sum(column.nbytes for column in columns.values()) + 2 * sum(leaf.nbytes for leaf in dense)
        per_step += n_views * self.n_envs * _CELL_BYTES
        if self._options.on_max_bytes == "raise":
            # a shorter ring would overwrite what was to be kept
            least, most = n_steps * per_step, n_steps
        else:
            share = int(limit * _TABLES) if n_views else limit
            least, most = per_step * limit // max(share, 1), min(n_steps, share // per_step)
        if least > limit:
            raise BudgetExceededError(
                f"max_bytes={limit} is too little for {n_steps} steps of {self.n_envs} environments: what cannot be "
                f"compressed takes {per_step} bytes a step; raise the limit to {least}, or lower buffer_size"
            )
        return most

    # ---- adding ----

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        done: npt.NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one step of every environment: all of it, or after an exception of whatever kind nothing."""
        with self._lock:
            n_added = self._n_added
            try:
                if self._step is not None:
                    self._recover()
                step = self._fit_step(obs, next_obs, action, reward, done, infos)
                live = self._live
                if live is not None:
                    live.prepare_step()
                self._write_stores(step[0], step[3], step[4])
                if live is not None:
                    live.record_step(obs, next_obs, action, reward, done, infos)
                self._step = step
                self._finish_step(step)
                limit = self._options.evict_above
                if limit is not None:
                    self._evict_beyond(limit)
            except BaseException as problem:
                self._fail(problem, n_added)

    def _position(self) -> int:
        return self._n_added

    def _write_stores(self, position: int, obs: Any, next_obs: Any) -> None:
        """Write the observations that stores hold; they can take them back."""
        leaves, next_leaves = self.observations, self.next_observations
        if type(leaves) is Leaves:
            for key in self._begin_step(leaves):
                leaves[key].write_fitted(next_leaves[key], position, obs[key], next_obs[key])
        elif type(leaves) is not np.ndarray:
            # `_begin_step`, for the path that most steps take
            leaves.store.commit()
            self._step = WRITING
            leaves.write_fitted(next_leaves, position, obs, next_obs)

    def _finish_step(self, step: Step) -> None:
        position, n_added, n_evicted, obs, next_obs, action, reward, done, truncated = step
        leaves, next_leaves = self.observations, self.next_observations
        if type(leaves) is np.ndarray:
            leaves[position] = obs
            next_leaves[position] = next_obs
        elif type(leaves) is Leaves:
            for key, leaf in leaves.items():
                if type(leaf) is np.ndarray:
                    leaf[position] = obs[key]
                    next_leaves[key][position] = next_obs[key]
        self.actions[position] = action
        self.rewards[position] = reward
        self.dones[position] = done
        if truncated is not None:
            self.timeouts[position] = truncated
        self._n_evicted = n_evicted
        self._n_added = n_added
        if self._step_added is not None:
            self._step_added(position)
        position += 1
        if position == self.buffer_size:
            self.full = True
            position = 0
        self.pos = position
        self._step = None

    def _recover(self) -> None:
        step = self._step
        if isinstance(step, Eviction):
            self._finish_eviction(step)
        elif isinstance(step, tuple):
            self._finish_step(step)
        elif step is not None:
            self._undo_step(self.observations)

    def _fit_step(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> Step:
        """What `add` was given, as it will be written, or an error; nothing is changed."""
        if self._read_only:
            self._check_writable()
        # fast path: skip validation where shape and dtype already match
        leaves = self.observations
        if type(leaves) is Leaves:
            obs, next_obs = fit_leaves(leaves, obs, "obs"), fit_leaves(leaves, next_obs, "next_obs")
        else:
            shape, dtype = self._step_shape, leaves.dtype
            if type(obs) is not np.ndarray or obs.shape != shape or obs.dtype != dtype:
                obs = fit(leaves, obs, "obs")
            if type(next_obs) is not np.ndarray or next_obs.shape != shape or next_obs.dtype != dtype:
                next_obs = fit(leaves, next_obs, "next_obs")
        actions = self.actions
        if type(action) is not np.ndarray or action.shape != self._action_shape or action.dtype != actions.dtype:
            action = fit_actions(actions, action)
        lane = self._lane
        if type(reward) is not np.ndarray or reward.shape != lane or reward.dtype is not _FLOAT:
            reward = fit_column(reward, self.n_envs, "reward")
        if type(done) is not np.ndarray or done.shape != lane or done.dtype is not _FLAG:
            done = fit_column(done, self.n_envs, "done")
        # infos are nobody's business otherwise: some pass a dict
        truncated = self._fit_infos(infos) if self.handle_timeout_termination else None
        limit = self._options.raise_above
        if limit is not None:
            self._check_budget(limit)
        n_evicted = self._n_evicted
        if n_evicted and self.full:
            n_evicted -= 1  # the step whose place is taken was evicted already
        return self.pos, self._n_added + 1, n_evicted, obs, next_obs, action, reward, done, truncated

    def _fit_infos(self, infos: Any) -> Any:
        try:
            truncated: Any = [info.get("TimeLimit.truncated", False) for info in infos]
            if not _BOOL.issuperset(map(type, truncated)):
                truncated = np.array(truncated, self.timeouts.dtype).ravel()  # some pass arrays of one
        except (AttributeError, TypeError, ValueError) as problem:
            raise SpecMismatchError(
                f"infos must be a list of {self.n_envs} dicts, whose 'TimeLimit.truncated' is a bool: {problem}"
            ) from problem
        if len(truncated) != self.n_envs and len(truncated) != 1:
            raise SpecMismatchError(f"{len(infos)} infos for {self.n_envs} environments; check n_envs")
        return truncated

    def extend(self, *args: Any) -> None:
        """Add several steps, each argument with an axis more than `add` takes; if one does not fit, none is added."""
        try:
            steps = list(zip(*args, strict=True))
        except (TypeError, ValueError) as problem:
            raise SpecMismatchError(f"extend() takes arrays of as many steps each: {problem}") from problem
        if not args or len(args) != 6:
            raise SpecMismatchError(f"a step has six parts, as add() takes them; extend() got {len(args)}")
        for step in steps:
            self._fit_step(*step)
        for step in steps:
            self.add(*step)

    # ---- sampling ----

    def size(self) -> int:
        """How many steps of every environment can be sampled."""
        return (self.buffer_size if self.full else self.pos) - self._n_evicted

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw ``batch_size`` transitions; random numbers are drawn in SB3's order."""
        if self._step is not None:
            with self._lock:
                self._recover()
        count, batch_size = self.size(), check_count(batch_size, "batch_size", 0)
        if count == 0:
            raise EmptyBufferError("the buffer is empty; add transitions before sampling (see learning_starts)")
        if self._n_evicted:
            oldest = self.pos if self.full else 0
            steps = (np.random.randint(0, count, size=batch_size) + oldest + self._n_evicted) % self.buffer_size
        elif self.optimize_memory_usage and self.full and self.buffer_size > 1:
            steps = (np.random.randint(1, self.buffer_size, size=batch_size) + self.pos) % self.buffer_size
        else:
            steps = np.random.randint(0, count, size=batch_size)
        try:
            return self._get_samples(steps, env=env)
        except NO_MEMORY as problem:
            if isinstance(problem, ExtraBuffersError):
                raise
            raise OutOfMemoryError(f"there is no memory for a batch of {batch_size}: {problem}") from problem

    def _get_samples(self, batch_inds: npt.NDArray[Any], env: VecNormalize | None = None) -> Any:
        if self.n_steps > 1:
            with self._timeouts_kept():
                samples = NStepReplayBuffer._get_samples(self, batch_inds, env)  # type: ignore[arg-type]  # not one, but laid out like one
            samples = self._as_asked(samples)
            return DictReplayBufferSamples(*samples) if isinstance(self.observations, dict) else samples
        envs = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))
        return self._samples_at(batch_inds, envs, env)

    @contextlib.contextmanager
    def _timeouts_kept(self) -> Iterator[None]:
        """SB3's n-step code changes the newest timeouts for a while; whatever ends it, they are as they were."""
        newest = (self.pos - 1) % self.buffer_size
        kept = self.timeouts[newest].copy()
        try:
            yield
        finally:
            self.timeouts[newest] = kept

    def _samples_at(self, steps: npt.NDArray[Any], envs: npt.NDArray[Any], env: VecNormalize | None) -> Any:
        """The transitions at ``(steps[i], envs[i])`` as tensors."""
        obs, next_obs = self._read_pairs(steps, envs)
        if env is not None:
            obs, next_obs = env.normalize_obs(obs), env.normalize_obs(next_obs)
        # dones that are due to timeouts do not count
        dones = self.dones[steps, envs] * (1 - self.timeouts[steps, envs])
        rewards = self._normalize_reward(self.rewards[steps, envs].reshape(-1, 1), env)
        make = DictReplayBufferSamples if isinstance(obs, dict) else ReplayBufferSamples
        # all of these are fresh: no tensor needs a copy
        return make(
            self._obs_to_torch(obs),
            self._to_torch(self.actions[steps, envs]),
            self._obs_to_torch(next_obs),
            self._to_torch(dones.reshape(-1, 1)),
            self._to_torch(rewards),
        )

    def _read_pairs(self, steps: npt.NDArray[Any], envs: npt.NDArray[Any]) -> tuple[Any, Any]:
        """Observations and next observations, frames that they share decoded once."""
        leaves, next_leaves = self.observations, self.next_observations
        if not isinstance(leaves, dict):
            return _read_pair(leaves, next_leaves, steps, envs)
        pairs = {key: _read_pair(leaf, next_leaves[key], steps, envs) for key, leaf in leaves.items()}
        return {key: pair[0] for key, pair in pairs.items()}, {key: pair[1] for key, pair in pairs.items()}

    # ---- memory ----

    def memory_usage(self) -> MemoryUsage:
        """What the buffer holds, by purpose; ``dense`` is one dense copy of the observations."""
        written = 1.0 if self.full else self.pos / self.buffer_size
        observed = leaves_usage(self.observations, 2, written)
        return observed + MemoryUsage(0, 0, 0, int(self._column_bytes * written), 0)

    def held_bytes(self) -> int:
        """The total of `memory_usage`, a little larger but cheap to have."""
        dense_again = sum(leaf.nbytes for _, leaf in each_leaf(self.observations) if isinstance(leaf, np.ndarray))
        return held_bytes(self.observations) + dense_again + self._column_bytes

    def _check_budget(self, limit: int) -> None:
        held = self.held_bytes()
        if held > limit:
            self._settle()
            held = self.held_bytes()
        if held > limit:
            raise BudgetExceededError(
                f"the buffer holds {held} bytes in {self.size() * self.n_envs} transitions, beyond max_bytes={limit}; "
                "raise the limit, or pass on_max_bytes='evict' to drop the oldest ones"
            )

    def _settle(self) -> None:
        """Compress what is still being looked at, before anything has to go."""
        for _, leaf in each_leaf(self.observations):
            if isinstance(leaf, StoreView):
                leaf.store.choose_method()

    def _evict_beyond(self, limit: int) -> None:
        if self.held_bytes() <= limit:
            return
        self._settle()
        while self.size() > 1 and self.held_bytes() > limit:
            oldest = ((self.pos if self.full else 0) + self._n_evicted) % self.buffer_size
            self._step = Eviction(oldest, self._n_evicted + 1)
            self._finish_eviction(self._step)

    def _finish_eviction(self, eviction: Eviction) -> None:
        self._forget_step(eviction.position)
        self._n_evicted = eviction.n_evicted
        self._step = None

    def _forget_step(self, step: int) -> None:
        """Give back what the observations of ``step`` take."""
        for leaves in (self.observations, self.next_observations):
            for _, leaf in each_leaf(leaves):
                if isinstance(leaf, StoreView):
                    leaf.erase(step)

    def reset(self) -> None:
        """Forget all transitions."""
        self._check_writable()
        with self._lock:
            self._recover()
            self._n_evicted = 0
            super().reset()


def _read_pair(leaf: Leaf, next_leaf: Leaf, steps: npt.NDArray[Any], envs: npt.NDArray[Any]) -> tuple[Array, Array]:
    if isinstance(leaf, StoreView) and isinstance(next_leaf, StoreView):
        first, second = leaf.read_with([next_leaf], (steps, envs))
        return first, second
    return leaf[steps, envs], next_leaf[steps, envs]
