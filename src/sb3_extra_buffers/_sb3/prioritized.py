"""What makes a compressed replay buffer a prioritised one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]  # it ships none
import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers._sb3.algorithm import calling_algorithm
from sb3_extra_buffers._sb3.leaves import as_array, check_count
from sb3_extra_buffers._sb3.replay import ReplayMixin
from sb3_extra_buffers._sb3.sum_tree import SumTree
from sb3_extra_buffers.errors import (
    AlgorithmMismatchError,
    EmptyBufferError,
    PriorityError,
    SpecMismatchError,
    StaleIndexError,
)

# a pair is a list again in a model that SB3 has loaded
Beta = float | Sequence[float] | Callable[[float], float]

# sums of a million of these are far from infinity
_MAX_ERROR = float(np.finfo(np.float32).max)


class PrioritizedReplayBufferSamples(NamedTuple):
    """SB3's `ReplayBufferSamples`, or with Dict observations `DictReplayBufferSamples`, and two fields more.

    Attributes:
        weights: Importance weights, (batch_size, 1): the part that each sample should have in the loss; at most 1.
        indices: Which transitions these are, as `update_priorities` wants to know.
    """

    observations: Any
    actions: th.Tensor
    next_observations: Any
    dones: th.Tensor
    rewards: th.Tensor
    discounts: th.Tensor | None
    weights: th.Tensor
    indices: npt.NDArray[np.int64]


class Schedule:
    """A function of ``progress_remaining`` that can be pickled: they are often lambdas."""

    def __init__(self, function: Callable[[float], float]) -> None:
        self.function = function

    def __call__(self, progress_remaining: float) -> float:
        return self.function(progress_remaining)

    def __reduce__(self) -> Any:
        return _load_schedule, (cloudpickle.dumps(self.function),)


def _load_schedule(pickled: bytes) -> Schedule:
    return Schedule(cloudpickle.loads(pickled))


class PrioritizedMixin(ReplayMixin):
    """Draws transitions in proportion to ``(|TD error| + epsilon) ** alpha``.

    New transitions get the greatest priority there has been, so that each is likely to be seen soon. A transition that
    was evicted or overwritten has none and is never drawn.
    """

    _tree: SumTree

    def __init__(
        self, *args: Any, alpha: float = 0.6, beta: Beta = (0.4, 1.0), epsilon: float = 1e-6, **kwargs: Any
    ) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha must be 0 (uniform) to 1 (proportional), got {alpha}")
        if not 0 < epsilon <= _MAX_ERROR:
            raise ValueError(f"epsilon must be above 0, or transitions without an error are never seen; got {epsilon}")
        self.alpha, self.epsilon = float(alpha), float(epsilon)
        self.beta = Schedule(beta) if callable(beta) else beta
        if isinstance(beta, Sequence) and len(beta) != 2:
            raise ValueError(f"beta as a pair is its first and its last value, got {len(beta)} values")
        #: how much of the training is left, from 1 to 0: what a schedule of beta goes by
        self.progress_remaining = 0.0
        self.beta_now()  # raises now rather than late
        self.progress_remaining = 1.0
        self.beta_now()
        self.max_priority = 1.0
        super().__init__(*args, **kwargs)
        self._refuse_stock(calling_algorithm("_setup_model"))

    def _lay_out(self, n_steps: int) -> None:
        # a column while steps are counted, so that max_bytes counts it
        self._priorities = np.zeros((1, self.n_envs), np.float64)
        super()._lay_out(n_steps)
        self._tree = SumTree(self.buffer_size * self.n_envs)
        self._column_bytes += self._tree.nbytes - self._priorities.nbytes
        del self._priorities

    def _refuse_stock(self, algorithm: Any) -> None:
        """Refuse an algorithm that would neither weigh its loss nor update a priority."""
        if algorithm is None or self.alpha == 0:
            return
        if type(algorithm).train.__module__.partition(".")[0] in ("stable_baselines3", "sb3_contrib"):
            name = type(algorithm).__name__
            raise AlgorithmMismatchError(
                f"{name} as it is ignores importance weights and never updates priorities; "
                f"make the model with sb3_extra_buffers.compressed.prioritized({name})"
            )

    # ---- schedule ----

    def beta_now(self) -> float:
        """How far the importance weights correct the draws: 0 not at all, 1 in full."""
        beta = self.beta
        if callable(beta):
            value = float(beta(self.progress_remaining))
        elif isinstance(beta, Sequence):
            first, last = beta
            value = last + (first - last) * self.progress_remaining
        else:
            value = float(beta)
        if not 0 <= value < np.inf:
            raise ValueError(f"beta must be 0 or more, got {value} at progress_remaining={self.progress_remaining}")
        return value

    # ---- adding and forgetting ----

    def _step_added(self, position: int) -> None:
        first = position * self.n_envs
        self._tree.write(slice(first, first + self.n_envs), self.max_priority**self.alpha)

    def _forget_step(self, step: int) -> None:
        super()._forget_step(step)
        self._tree.write(slice(step * self.n_envs, (step + 1) * self.n_envs), 0.0)

    def reset(self) -> None:
        super().reset()
        if "_tree" in vars(self):
            self._tree.clear()
            # numbers go on from a multiple, so that old indices stay stale and places still follow from numbers
            self._n_added = -(-self._n_added // self.buffer_size) * self.buffer_size

    # ---- sampling ----

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw ``batch_size`` transitions, one from each of as many equal parts of the priorities."""
        if self._step is not None:
            with self._lock:
                self._recover()
        batch_size = check_count(batch_size, "batch_size", 0)
        if self._tree.total == 0:
            raise EmptyBufferError("the buffer is empty; add transitions before sampling (see learning_starts)")
        leaves = self._tree.draw(batch_size)
        steps, envs = np.divmod(leaves, self.n_envs)
        read = self._n_step_samples_at if self.n_steps > 1 else self._samples_at
        samples: tuple[Any, ...] = tuple(read(steps, envs, env))
        # (N p / total) ** -beta over its greatest value: N and total cancel
        weights = (self._tree.minimum / self._tree.read(leaves)) ** self.beta_now()
        # the newest step has the number n_added - 1
        numbers = self._n_added - 1 - (self.pos - 1 - steps) % self.buffer_size
        tensor = self._to_torch(weights.astype(np.float32).reshape(-1, 1))
        # SB3 before 2.7 has no discounts
        discounts = samples[5] if len(samples) > 5 else None
        fields = (*samples[:5], discounts, tensor, numbers * self.n_envs + envs)
        return PrioritizedReplayBufferSamples._make(fields)

    def _n_step_samples_at(
        self, steps: npt.NDArray[Any], envs: npt.NDArray[Any], env: VecNormalize | None
    ) -> tuple[Any, ...]:
        """n-step transitions from ``(steps[i], envs[i])`` on, as SB3's `NStepReplayBuffer` makes them."""
        offsets = np.arange(self.n_steps)
        ahead = (steps[:, None] + offsets) % self.buffer_size, envs[:, None]  # (batch_size, n_steps)
        is_last = (self.dones[ahead] != 0) | (self.timeouts[ahead] != 0)
        # what comes after the newest step is older
        is_last |= ahead[0] == (self.pos - 1) % self.buffer_size
        is_last[:, -1] = True
        n_more = is_last.argmax(axis=1)
        rewards = self._normalize_reward(self.rewards[ahead], env)
        rewards = rewards * self.gamma ** offsets.astype(np.float32) * (offsets <= n_more[:, None])
        ends = (steps + n_more) % self.buffer_size, envs
        obs, next_obs = self.observations[steps, envs], self.next_observations[ends]
        if env is not None:
            obs, next_obs = env.normalize_obs(obs), env.normalize_obs(next_obs)
        return (
            self._obs_to_torch(obs),
            self._to_torch(self.actions[steps, envs]),
            self._obs_to_torch(next_obs),
            self._to_torch((self.dones[ends] * (1 - self.timeouts[ends])).reshape(-1, 1)),
            self._to_torch(rewards.sum(axis=1, keepdims=True)),
            self._to_torch(self.gamma ** (n_more + 1).astype(np.float32).reshape(-1, 1)),
        )

    # ---- priorities ----

    @property
    def priorities(self) -> npt.NDArray[np.float64]:
        """What each transition is drawn in proportion to, (n_steps, n_envs); zero where there is none."""
        return self._tree.read(slice(0, self._tree.n_leaves)).reshape(self.buffer_size, self.n_envs).copy()

    def holds(self, indices: Any) -> npt.NDArray[np.bool_]:
        """Whether the transitions that a sample named ``indices`` are still in the buffer."""
        indices = _numbers(indices, "indices")
        newest = self._n_added * self.n_envs
        found: npt.NDArray[np.bool_] = (indices < newest) & (indices >= newest - self.size() * self.n_envs)
        return found

    def update_priorities(self, indices: Any, td_errors: Any) -> None:
        """Set priorities from absolute TD errors; where anything is wrong, none is changed.

        Args:
            indices: `PrioritizedReplayBufferSamples.indices`, or some of them. Where one is repeated, the last counts.
            td_errors: As many absolute TD errors.
        """
        numbers = _numbers(indices, "indices").reshape(-1)
        errors = _numbers(td_errors, "td_errors").reshape(-1).astype(np.float64)
        if numbers.dtype.kind not in "iu" or len(numbers) != len(errors):
            raise PriorityError(
                f"{len(numbers)} indices ({numbers.dtype}) and {len(errors)} TD errors; pass the sample's indices and "
                "one error for each"
            )
        bad = ~((errors >= 0) & (errors <= _MAX_ERROR))
        if bad.any():
            raise PriorityError(
                f"{bad.sum()} of {len(errors)} TD errors are negative, NaN or infinite (the first is "
                f"{errors[bad][0]}); pass absolute values, and look for what made the training diverge"
            )
        gone = ~self.holds(numbers)
        if gone.any():
            newest = self._n_added * self.n_envs
            raise StaleIndexError(
                f"{gone.sum()} of {len(numbers)} indices (the first is {numbers[gone][0]}) are not in the buffer, "
                f"which holds {newest - self.size() * self.n_envs} to {newest - 1}; update before adding, or only "
                "those that holds(indices) names"
            )
        priorities = errors + self.epsilon
        # the maximum first: a step that is added in between may rank too high, never too low
        self.max_priority = max(self.max_priority, float(priorities.max(initial=0)))
        self._tree.write(numbers % self._tree.n_leaves, priorities**self.alpha)

    def check(self) -> None:
        """Raise if the priorities are not those of the transitions that are here. Tests call this."""
        self._tree.check()
        steps = np.arange(self.buffer_size)
        numbers = self._n_added - 1 - (self.pos - 1 - steps) % self.buffer_size
        is_here = self.holds(numbers[:, None] * self.n_envs + np.arange(self.n_envs))
        if self._n_added % self.buffer_size != self.pos or ((self.priorities > 0) != is_here).any():
            raise AssertionError("a transition without a priority, or the other way round")

    # ---- pickles ----

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.alpha = state["alpha"]
        self._refuse_stock(calling_algorithm("load_replay_buffer"))
        super().__setstate__(state)


def _numbers(values: Any, name: str) -> npt.NDArray[Any]:
    try:
        array = as_array(values, name)
    except SpecMismatchError as problem:
        raise PriorityError(str(problem)) from problem
    if array.dtype.kind not in "biuf":
        raise PriorityError(f"{name} are of dtype {array.dtype}; pass numbers")
    return array
