"""`Priorities` of the transitions of a replay buffer, and `PrioritizedMixin` for compressed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]  # it has no type hints
import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers._sb3.algorithm import calling_algorithm
from sb3_extra_buffers._sb3.replay import ReplayMixin
from sb3_extra_buffers._sb3.steps import position_assigned, step_numbers
from sb3_extra_buffers._sb3.sum_tree import SumTree
from sb3_extra_buffers.arguments import MAX_ERROR, as_array, check_alpha, check_beta, check_epsilon
from sb3_extra_buffers.errors import (
    AlgorithmMismatchError,
    ArgumentError,
    EmptyBufferError,
    PriorityError,
    SpecMismatchError,
    StaleIndexError,
)

# a pair becomes a list when SB3 loads a model
Beta = float | Sequence[float] | Callable[[float], float]


class PrioritizedReplayBufferSamples(NamedTuple):
    """The fields of SB3's `ReplayBufferSamples`, or `DictReplayBufferSamples`, and two more.

    Attributes:
        observations: Observations of shape (batch_size, ...); a dict of them for a Dict space.
        actions: Actions.
        next_observations: Observations after the actions.
        dones: Whether the episodes ended; time limits do not count.
        rewards: Rewards, or n-step returns.
        discounts: Discount factors of n-step returns; None without them.
        weights: Importance weights of shape (batch_size, 1), at most 1: what to multiply each sample's loss by.
        indices: Which transitions these are, for `update_priorities`.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from sb3_extra_buffers.compressed import prioritized
        >>> model = prioritized(DQN)("MlpPolicy", "CartPole-v1", device="cpu").learn(50)
        >>> samples = model.replay_buffer.sample(4)
        >>> samples.weights.shape, samples.indices.shape
        (torch.Size([4, 1]), (4,))
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
    """A function of ``progress_remaining`` that can be pickled even if it is a lambda."""

    def __init__(self, function: Callable[[float], float]) -> None:
        self.function = function

    def __call__(self, progress_remaining: float) -> float:
        return self.function(progress_remaining)

    def __reduce__(self) -> Any:
        return _load_schedule, (cloudpickle.dumps(self.function),)


def _load_schedule(pickled: bytes) -> Schedule:
    return Schedule(cloudpickle.loads(pickled))


def check_exponents(alpha: float, beta: Beta, epsilon: float) -> tuple[float, Beta, float]:
    """The arguments of a prioritised buffer; raises now rather than at the end of the training."""
    alpha, epsilon = check_alpha(alpha), check_epsilon(epsilon)
    if isinstance(beta, Sequence) and len(beta) != 2:
        raise ArgumentError(f"beta as a sequence must be its first and last value, got {len(beta)} values")
    beta = Schedule(beta) if callable(beta) else beta
    for progress_remaining in (0.0, 1.0):
        beta_at(beta, progress_remaining)
    return alpha, beta, epsilon


def beta_at(beta: Beta, progress_remaining: float) -> float:
    """The value of ``beta`` when this part of the training is left."""
    try:
        if callable(beta):
            value = float(beta(progress_remaining))
        elif isinstance(beta, Sequence):
            first, last = map(float, beta)
            value = last + (first - last) * progress_remaining
        else:
            value = float(beta)
    except (TypeError, ValueError) as problem:
        raise ArgumentError(
            f"beta must be a number, a pair of numbers or a function that returns one, got {beta!r}: {problem}"
        ) from problem
    return check_beta(value, f" at progress_remaining={progress_remaining}")


class Priorities:
    """Draws transitions with probability proportional to ``(|TD error| + epsilon) ** alpha``.

    A new transition gets the highest priority seen so far, so that it is likely to be sampled soon. Evicted and
    overwritten transitions have priority zero and are never drawn. A replay buffer follows in the MRO; it calls
    `_step_added` for each step and counts the steps in ``n_added``.
    """

    _tree: SumTree

    if TYPE_CHECKING:
        # of the buffer
        buffer_size: int
        n_envs: int
        pos: int
        n_added: int
        full: bool
        _lock: Any

        def size(self) -> int: ...

    def __init__(
        self, *args: Any, alpha: float = 0.6, beta: Beta = (0.4, 1.0), epsilon: float = 1e-6, **kwargs: Any
    ) -> None:
        self.alpha, self.beta, self.epsilon = check_exponents(alpha, beta, epsilon)
        #: Part of the training that is left, from 1 to 0: the argument of the schedule of beta.
        self.progress_remaining = 1.0
        self.max_priority = 1.0
        super().__init__(*args, **kwargs)
        self._refuse_stock(calling_algorithm("_setup_model"))

    def _extra_bytes(self) -> int:
        return self._tree.nbytes + int(super()._extra_bytes())  # type: ignore[misc]  # a buffer follows

    def _refuse_stock(self, algorithm: Any) -> None:
        """Raise if ``algorithm`` would neither weight its loss nor update priorities."""
        if algorithm is None or self.alpha == 0:
            return
        if type(algorithm).train.__module__.partition(".")[0] in ("stable_baselines3", "sb3_contrib"):
            name = type(algorithm).__name__
            raise AlgorithmMismatchError(
                f"{name} ignores importance weights and never updates priorities; "
                f"create the model with sb3_extra_buffers.compressed.prioritized({name})"
            )

    def beta_now(self) -> float:
        """How far importance weights correct the sampling bias now: 0 not at all, 1 fully."""
        return beta_at(self.beta, self.progress_remaining)

    # ---- adding and removing ----

    def _step_added(self, position: int, extra: Any) -> None:
        first = position * self.n_envs
        self._tree.write(slice(first, first + self.n_envs), self.max_priority**self.alpha)

    def _clear_columns(self) -> None:
        """Forget all priorities. May be interrupted and run again."""
        super()._clear_columns()  # type: ignore[misc]  # a buffer follows
        self._tree.clear()
        # the next multiple of buffer_size: old indices stay stale, and n_added % buffer_size is still the position
        self.n_added = -(-self.n_added // self.buffer_size) * self.buffer_size

    # ---- sampling ----

    def _draw(self, batch_size: int) -> tuple[Any, ...]:
        """One transition from each of ``batch_size`` equal parts of the priorities, with its weight and index."""
        if self.n_added % self.buffer_size != self.pos:
            raise position_assigned(self)
        leaves, priorities, minimum = self._tree.draw_and_read(batch_size)
        if len(leaves) < batch_size or not (self.pos or self.full):
            raise EmptyBufferError("the buffer is empty; add transitions before sampling (see learning_starts)")
        steps, envs = np.divmod(leaves, self.n_envs)
        # (N p / total) ** -beta divided by its maximum: N and total cancel
        weights = (minimum / priorities) ** self.beta_now()
        indices = step_numbers(steps, self.n_added, self.pos, self.buffer_size) * self.n_envs + envs
        return steps, envs, weights.astype(np.float32).reshape(-1, 1), indices

    # ---- priorities ----

    @property
    def priorities(self) -> npt.NDArray[np.float64]:
        """The priority of each transition, of shape (n_steps, n_envs); zero where there is no transition."""
        return self._tree.read(slice(0, self._tree.n_leaves)).reshape(self.buffer_size, self.n_envs).copy()

    def restore_priorities(self, priorities: npt.NDArray[np.float64]) -> None:
        """Replace all `priorities`, for buffers that are loaded; they must fit the transitions."""
        self._tree.write(slice(0, self._tree.n_leaves), priorities.reshape(-1))
        Priorities.check(self)

    def holds(self, indices: Any) -> npt.NDArray[np.bool_]:
        """Return for each of ``indices``, from a sample, whether that transition is still in the buffer."""
        indices = _as_numbers(indices, "indices")
        end = self.n_added * self.n_envs
        is_held: npt.NDArray[np.bool_] = (indices < end) & (indices >= end - self.size() * self.n_envs)
        return is_held

    def update_priorities(self, indices: Any, td_errors: Any) -> None:
        """Set priorities from absolute TD errors; if any argument is wrong, no priority is changed.

        Args:
            indices: `PrioritizedReplayBufferSamples.indices`, or some of them. The last of repeated indices counts.
            td_errors: An absolute TD error for each index.
        """
        indices = _as_numbers(indices, "indices").reshape(-1)
        errors = as_errors(td_errors).reshape(-1)
        if indices.dtype.kind not in "iu" or len(indices) != len(errors):
            raise PriorityError(
                f"got {len(indices)} indices ({indices.dtype}) and {len(errors)} TD errors; pass the indices of a "
                "sample and one error for each"
            )
        check_errors(errors)
        with self._lock:
            gone = ~self.holds(indices)
            if gone.any():
                end = self.n_added * self.n_envs
                raise StaleIndexError(
                    f"{gone.sum()} of {len(indices)} indices (the first is {indices[gone][0]}) are not in the buffer, "
                    f"which holds {end - self.size() * self.n_envs} to {end - 1}; update before adding, or only "
                    "where holds(indices) is true"
                )
            priorities = errors + self.epsilon
            self.max_priority = max(self.max_priority, float(priorities.max(initial=0)))
            self._tree.write_each(indices, priorities**self.alpha)

    def check(self) -> None:
        """Raise if priorities and transitions disagree, for tests."""
        self._tree.check()
        numbers = step_numbers(np.arange(self.buffer_size), self.n_added, self.pos, self.buffer_size)
        is_held = self.holds(numbers[:, None] * self.n_envs + np.arange(self.n_envs))
        if self.n_added % self.buffer_size != self.pos or ((self.priorities > 0) != is_held).any():
            raise AssertionError("a transition has no priority, or a priority no transition")

    # ---- pickles ----

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.alpha = state["alpha"]
        self._refuse_stock(calling_algorithm("load_replay_buffer"))
        super().__setstate__(state)  # type: ignore[misc]  # a buffer follows


class PrioritizedMixin(Priorities, ReplayMixin):
    """A compressed replay buffer with `Priorities`."""

    def _lay_out(self, n_steps: int) -> None:
        # a column while steps are counted, so that max_bytes includes the priorities
        self._priorities = np.zeros((1, self.n_envs), np.float64)
        super()._lay_out(n_steps)
        self._tree = SumTree(self.buffer_size * self.n_envs)
        del self._priorities

    def _forget_step(self, step: int) -> None:
        super()._forget_step(step)
        self._tree.write(slice(step * self.n_envs, (step + 1) * self.n_envs), 0.0)

    def _read(self, drawn: tuple[Any, ...], env: VecNormalize | None) -> Any:
        steps, envs, weights, indices = drawn
        samples = tuple(self._samples_at(steps, envs, env))
        return PrioritizedReplayBufferSamples._make((*samples, self._to_torch(weights), indices))


def as_errors(td_errors: Any) -> npt.NDArray[np.float64]:
    """TD errors as an array, or raise `PriorityError`."""
    return _as_numbers(td_errors, "td_errors").astype(np.float64)


def check_errors(errors: npt.NDArray[np.float64]) -> None:
    """Raise unless all of ``errors`` are absolute TD errors."""
    bad = ~((errors >= 0) & (errors <= MAX_ERROR))
    if bad.any():
        raise PriorityError(
            f"{bad.sum()} of {errors.size} TD errors are negative, NaN or infinite (the first is "
            f"{errors[bad][0]}); pass absolute values, and check whether the training diverged"
        )


def _as_numbers(values: Any, name: str) -> npt.NDArray[Any]:
    try:
        array = as_array(values, name)
    except SpecMismatchError as problem:
        raise PriorityError(str(problem)) from problem
    if array.dtype.kind not in "biuf":
        raise PriorityError(f"{name} has dtype {array.dtype}; pass numbers")
    return array
