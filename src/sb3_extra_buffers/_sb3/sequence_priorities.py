"""`WindowPriorities`: draws windows of a replay buffer by priority, as in R2D2."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers._sb3.prioritized import Beta, beta_at
from sb3_extra_buffers._sb3.sequence_index import EpisodeIndex, Held, WindowRules
from sb3_extra_buffers._sb3.sum_tree import SumTree
from sb3_extra_buffers.errors import EmptyBufferError

__all__ = ["WindowPriorities", "mix_errors"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# attempts to replace first steps at which no window can begin, before all possible windows are listed
_TRIES = 4


def mix_errors(errors: Floats, mask: Flags, eta: float) -> Floats:
    """R2D2's priority of each window: ``eta * max + (1 - eta) * mean`` of its TD errors ``[batch, length]``."""
    errors = np.where(mask, errors, 0.0)
    mean = errors.sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    mixed: Floats = eta * errors.max(axis=1, initial=0.0) + (1 - eta) * mean
    return mixed


class WindowPriorities:
    """The priority of each step, which is that of the windows that begin there; 0 for steps that are not held.

    A new step has the highest priority so far.
    """

    def __init__(self, index: EpisodeIndex) -> None:
        self.n_envs, self.n_steps = index.n_envs, index.n_steps
        self.tree = SumTree(index.n_steps * index.n_envs)

    def write_step(self, position: int, priority: float) -> None:
        """Set the priority of a step of all environments; idempotent."""
        first = position * self.n_envs
        self.tree.write(slice(first, first + self.n_envs), priority)

    def update(self, numbers: Indices, envs: Indices, priorities: Floats) -> None:
        """Set the priorities of windows that begin at these steps."""
        self.tree.write_each(numbers * self.n_envs + envs, priorities)

    def draw(self, count: int, rules: WindowRules, held: Held, index: EpisodeIndex) -> tuple[Indices, Indices]:
        """Draw ``count`` windows by priority; return the numbers of their first steps, and their environments."""
        if self.tree.total == 0:
            raise EmptyBufferError("the buffer is empty; add transitions before sampling (see learning_starts)")
        numbers, envs = self._draw(count, held)
        bad = np.flatnonzero(~index.may_start(numbers, envs, rules, held))
        for _ in range(_TRIES):
            if not len(bad):
                return numbers, envs
            numbers[bad], envs[bad] = self._draw(len(bad), held)
            bad = bad[~index.may_start(numbers[bad], envs[bad], rules, held)]
        if len(bad):
            all_numbers, all_envs = index.every(rules, held)
            ends = self.tree.read(all_numbers % self.n_steps * self.n_envs + all_envs).cumsum()
            chosen = ends.searchsorted(np.random.random_sample(len(bad)) * ends[-1], side="right")
            chosen = np.minimum(chosen, len(ends) - 1)
            numbers[bad], envs[bad] = all_numbers[chosen], all_envs[chosen]
        return numbers, envs

    def _draw(self, count: int, held: Held) -> tuple[Indices, Indices]:
        positions, envs = np.divmod(self.tree.draw(count), self.n_envs)
        return held.n_added - 1 - (held.n_added - 1 - positions) % self.n_steps, envs

    def weights(
        self, numbers: Indices, envs: Indices, beta: Beta, progress_remaining: float
    ) -> npt.NDArray[np.float32]:
        """Importance weights of windows that begin at these steps, at most 1."""
        drawn = self.tree.read(numbers % self.n_steps * self.n_envs + envs)
        # (N p / total) ** -beta divided by its maximum: N and total cancel
        weights = (self.tree.minimum / drawn) ** beta_at(beta, progress_remaining)
        return weights.astype(np.float32)

    def check(self, held: Held) -> None:
        """Raise if priorities and steps contradict each other; for tests."""
        self.tree.check()
        positions = np.arange(self.n_steps)
        numbers = held.n_added - 1 - (held.n_added - 1 - positions) % self.n_steps
        priorities = self.tree.read(slice(0, self.tree.n_leaves)).reshape(self.n_steps, self.n_envs)
        if ((priorities > 0) != (numbers >= held.oldest)[:, None]).any():
            raise AssertionError("a step has no priority, or a priority no step")

    def frozen(self) -> WindowPriorities:
        """Return a copy."""
        copied = object.__new__(WindowPriorities)
        copied.__dict__.update(vars(self), tree=self.tree.frozen())
        return copied
