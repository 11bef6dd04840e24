"""Selectors: which window `CompressedEmbodiedReplay` samples next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers._sb3.sum_tree import SumTree
from sb3_extra_buffers.errors import ArgumentError, EmptyBufferError, PriorityError

__all__ = ["Fifo", "Mixture", "Prioritized", "Recency", "Selector", "Uniform"]

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

# priorities above count as infinite: a sum of smaller ones is finite in float64
_MAX_FINITE = 1e290


class Selector(Protocol):
    """The methods that a selector must have; the selectors of DreamerV3's ``embodied`` package have them too.

    A replay numbers its windows, and adds and removes them in the order of these numbers.

    Examples:
        >>> class Newest:
        ...     def __setitem__(self, window, step_ids):
        ...         self.window = window
        ...     def __delitem__(self, window):
        ...         pass
        ...     def __call__(self):
        ...         return self.window
    """

    def __call__(self) -> int:
        """Draw a window."""

    def __setitem__(self, window: int, step_ids: Any) -> None:
        """Add a window with the ids of its steps, ``[length, 20]``."""

    def __delitem__(self, window: int) -> None:
        """Remove a window."""


class _Range:
    """Windows ``first`` to ``stop - 1``. Adding and removing a window are idempotent."""

    #: Whether ``step_ids`` are needed; None is passed otherwise.
    needs_step_ids = False

    def __init__(self, seed: int = 0) -> None:
        self.first = self.stop = 0
        self.rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return self.stop - self.first

    def __setitem__(self, window: int, step_ids: Any) -> None:
        first = self.first if len(self) else window
        # one call into C: an interrupt cannot separate the two
        self.__dict__.update(first=first, stop=max(self.stop, window + 1) if len(self) else window + 1)

    def __delitem__(self, window: int) -> None:
        self.first = min(max(self.first, window + 1), self.stop)

    def _check_not_empty(self) -> None:
        if not len(self):
            raise EmptyBufferError("there is no window to draw")


class Uniform(_Range):
    """Draws all windows with the same probability.

    Args:
        seed: Seed of the draws.

    Examples:
        >>> from sb3_extra_buffers.replay_buffers.selectors import Uniform
        >>> uniform = Uniform(seed=0)
        >>> uniform[7] = uniform[8] = None
        >>> uniform() in (7, 8)
        True
    """

    def __call__(self) -> int:
        return self.draw(1)[0]

    def draw(self, count: int) -> list[int]:
        """Draw several windows at once, which is faster.

        Args:
            count: Number of windows.
        """
        self._check_not_empty()
        drawn: list[int] = (self.first + self.rng.integers(len(self), size=count)).tolist()
        return drawn


class Fifo(_Range):
    """Draws the oldest window.

    Examples:
        >>> from sb3_extra_buffers.replay_buffers.selectors import Fifo
        >>> fifo = Fifo()
        >>> fifo[7] = fifo[8] = None
        >>> fifo()
        7
    """

    def __init__(self) -> None:
        super().__init__()

    def __call__(self) -> int:
        self._check_not_empty()
        return self.first


class Recency(_Range):
    """Draws windows by their age.

    Args:
        uprobs: Probability of the newest window, of the one before it and so on, up to a common factor; must not
            increase. Windows that are older are never drawn.
        seed: Seed of the draws.

    Examples:
        >>> import numpy as np
        >>> from sb3_extra_buffers.replay_buffers.selectors import Recency
        >>> recency = Recency(1.0 / np.arange(1, 1001))
        >>> recency[7] = recency[8] = None  # 8 is drawn twice as often
        >>> recency() in (7, 8)
        True
    """

    def __init__(self, uprobs: npt.ArrayLike, seed: int = 0) -> None:
        super().__init__(seed)
        self.uprobs: Floats = np.array(uprobs, np.float64)
        valid = self.uprobs.ndim == 1 and self.uprobs.size > 0 and np.isfinite(self.uprobs).all()
        if not valid or self.uprobs[0] <= 0 or self.uprobs[-1] < 0 or (np.diff(self.uprobs) > 0).any():
            raise ArgumentError("uprobs must be finite, start above 0 and never increase")
        self._ends: Floats = np.cumsum(self.uprobs)

    def __call__(self) -> int:
        self._check_not_empty()
        count = min(len(self), len(self.uprobs))
        drawn = self.rng.random() * self._ends[count - 1]
        age = int(np.searchsorted(self._ends[:count], drawn, side="right"))
        return self.stop - 1 - min(age, count - 1)


class Prioritized(_Range):
    """Draws windows in proportion to the priorities of their steps, which `prioritize` sets.

    A window's priority is the mean of its steps' priorities, mixed with their maximum. Windows with an infinite
    priority are drawn first. If all priorities are zero, windows are drawn uniformly.

    Args:
        exponent: Exponent of a step's priority.
        initial: Priority of a new step; may be infinite.
        zero_on_sample: Whether drawing a window sets the priorities of its steps to 0.
        maxfrac: Share of the maximum in a window's priority; the rest is the mean.
        branching: Ignored; accepted because ``embodied``'s selector takes it.
        seed: Seed of the draws.

    Examples:
        >>> from sb3_extra_buffers.replay_buffers import CompressedEmbodiedReplay
        >>> from sb3_extra_buffers.replay_buffers.selectors import Prioritized
        >>> replay = CompressedEmbodiedReplay(length=2, capacity=100, selector=Prioritized(maxfrac=0.5))
        >>> for step in range(10):
        ...     replay.add({"reward": step})
        >>> batch = replay.sample(4)
        >>> written = replay.update({"stepid": batch["stepid"], "priority": batch["reward"] ** 2})
        >>> written.all()
        np.True_
    """

    needs_step_ids = True

    def __init__(
        self,
        exponent: float = 1.0,
        initial: float = 1.0,
        zero_on_sample: bool = False,
        maxfrac: float = 0.0,
        branching: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        if not 0 <= maxfrac <= 1 or not exponent >= 0 or not initial >= 0:
            raise ArgumentError("exponent and initial must be at least 0, and maxfrac between 0 and 1")
        self.exponent, self.initial, self.maxfrac = float(exponent), float(initial), float(maxfrac)
        self.zero_on_sample = zero_on_sample
        # each step has a row, which is reused when no window contains the step any more
        self._row_of: dict[bytes, int] = {}
        self._ids: list[bytes] = []
        self._unused: list[int] = []
        self._priorities = np.zeros(64)
        self._n_windows = np.zeros(64, np.int64)
        # the step before each, and the window that begins with it; -1 for none
        self._before = np.full(64, -1, np.int64)
        self._begins = np.full(64, -1, np.int64)
        # rows of each window, in a ring; the priority of a window, and whether it is infinite
        self._rows: Rows = np.zeros((64, 0), np.int64)
        self._finite, self._infinite = SumTree(64), SumTree(64)
        # True from the beginning of a change to its end, so that an interrupted one can be repaired
        self._dirty = False

    # ---- windows ----

    def __setitem__(self, window: int, step_ids: Any) -> None:
        self._repair()
        if self.first <= window < self.stop:
            return
        self._dirty = True
        ids = [step_id.tobytes() for step_id in np.asarray(step_ids)]
        if not len(self):
            self._rows = np.zeros((len(self._rows), len(ids)), np.int64)
        elif len(self) == len(self._rows):
            self._grow()
        rows = np.array([self._row_of[each] if each in self._row_of else self._add_step(each) for each in ids])
        self._n_windows[rows] += 1
        self._before[rows[1:]] = rows[:-1]
        self._begins[rows[0]] = window
        self._rows[window % len(self._rows)] = rows
        super().__setitem__(window, None)
        self._refresh(np.array([window]))
        self._dirty = False

    def __delitem__(self, window: int) -> None:
        self._repair()
        if not self.first <= window < self.stop:
            return
        self._dirty = True
        super().__delitem__(window)
        leaf = np.array([window % len(self._rows)])
        self._finite.write(leaf, 0.0)
        self._infinite.write(leaf, 0.0)
        rows = self._rows[leaf[0]]
        self._begins[rows[0]] = -1
        self._n_windows[rows] -= 1
        following = rows[1:]
        self._before[following[self._n_windows[rows[:-1]] == 0]] = -1
        for row in rows[self._n_windows[rows] == 0].tolist():
            del self._row_of[self._ids[row]]
            self._unused.append(row)
        self._dirty = False

    def _repair(self) -> None:
        """After an interrupt, compute everything from the steps of the windows and their priorities."""
        if not self._dirty:
            return
        windows, n_rows = np.arange(self.first, self.stop), len(self._priorities)
        rows = self._rows[windows % len(self._rows)]
        used = np.bincount(rows.reshape(-1), minlength=n_rows)
        del self._ids[n_rows:]
        self._row_of = {self._ids[row]: row for row in np.flatnonzero(used).tolist()}
        self._unused = np.flatnonzero(used[: len(self._ids)] == 0).tolist()
        self._n_windows = used
        self._before, self._begins = np.full(n_rows, -1, np.int64), np.full(n_rows, -1, np.int64)
        self._before[rows[:, 1:]] = rows[:, :-1]
        self._finite, self._infinite = SumTree(len(self._rows)), SumTree(len(self._rows))
        if len(windows):
            self._begins[rows[:, 0]] = windows
            self._refresh(windows)
        self._dirty = False

    def _add_step(self, step_id: bytes) -> int:
        if self._unused:
            row = self._unused.pop()
            self._ids[row] = step_id
        else:
            row = len(self._ids)
            self._ids.append(step_id)
            if row == len(self._priorities):
                for name, fill in (("_priorities", 0), ("_n_windows", 0), ("_before", -1), ("_begins", -1)):
                    column = getattr(self, name)
                    setattr(self, name, np.concatenate([column, np.full_like(column, fill)]))
        self._row_of[step_id] = row
        self._priorities[row], self._n_windows[row] = self.initial, 0
        self._before[row] = self._begins[row] = -1
        return row

    def _grow(self) -> None:
        windows, n_rows = np.arange(self.first, self.stop), 2 * len(self._rows)
        rows: Rows = np.zeros((n_rows, self._rows.shape[1]), np.int64)
        rows[windows % n_rows] = self._rows[windows % len(self._rows)]
        self._rows, self._finite, self._infinite = rows, SumTree(n_rows), SumTree(n_rows)
        self._refresh(windows)

    # ---- priorities ----

    def prioritize(self, step_ids: Any, priorities: Any) -> None:
        """Set the priorities of steps; steps that no window contains are ignored.

        Args:
            step_ids: Ids of steps, ``[n, 20]``.
            priorities: Their priorities, ``[n]``.
        """
        values = np.asarray(priorities, np.float64).reshape(-1)
        if not (values >= 0).all():
            raise PriorityError("priorities must be at least 0, and not NaN")
        ids = [each if isinstance(each, bytes) else np.asarray(each).tobytes() for each in step_ids]
        if len(ids) != len(values):
            raise PriorityError(f"got {len(values)} priorities for {len(ids)} steps")
        self._repair()
        rows = np.array([self._row_of.get(each, -1) for each in ids], np.int64)
        self._set_priorities(rows[rows >= 0], values[rows >= 0])

    def _set_priorities(self, rows: Rows, values: Any) -> None:
        self._dirty = True
        self._priorities[rows] = values
        # windows that have one of these steps begin with it or with a step shortly before
        found, rows = [], np.unique(rows)
        for _ in range(self._rows.shape[1]):
            found.append(self._begins[rows])
            rows = self._before[rows]
            rows = rows[rows >= 0]
        windows = np.unique(np.concatenate([*found, np.array([-1])]))
        self._refresh(windows[windows >= 0])
        self._dirty = False

    def _refresh(self, windows: Rows) -> None:
        """Compute the priorities of ``windows`` from those of their steps."""
        leaves = windows % len(self._rows)
        with np.errstate(over="ignore"):
            steps = self._priorities[self._rows[leaves]] ** self.exponent
            values = (1 - self.maxfrac) * steps.mean(axis=1) if self.maxfrac < 1 else np.zeros(len(steps))
            if self.maxfrac:
                values = values + self.maxfrac * steps.max(axis=1)
        infinite = values > _MAX_FINITE
        self._finite.write(leaves, np.where(infinite, 0.0, values))
        self._infinite.write(leaves, infinite.astype(np.float64))

    def __call__(self) -> int:
        self._check_not_empty()
        self._repair()
        tree = self._infinite if self._infinite.total > 0 else self._finite
        if tree.total > 0:
            leaf = int(tree.find(self.rng.random(1) * tree.total)[0])
            window = self.first + (leaf - self.first) % len(self._rows)
        else:
            window = self.first + int(self.rng.integers(len(self)))
        if self.zero_on_sample:
            self._set_priorities(self._rows[window % len(self._rows)], 0.0)
        return window


class Mixture:
    """Draws each window with one of several selectors, which is chosen at random.

    Args:
        selectors: Selectors by name.
        fractions: Probability of each; they add up to 1.
        seed: Seed of the draws.

    Examples:
        >>> import numpy as np
        >>> from sb3_extra_buffers.replay_buffers.selectors import Mixture, Recency, Uniform
        >>> selectors = {"uniform": Uniform(), "recency": Recency(1.0 / np.arange(1, 1001))}
        >>> mixture = Mixture(selectors, {"uniform": 0.75, "recency": 0.25})
        >>> mixture[7] = None
        >>> mixture()
        7
    """

    def __init__(self, selectors: Mapping[str, Selector], fractions: Mapping[str, float], seed: int = 0) -> None:
        shares = np.array([fractions.get(name, -1.0) for name in selectors], np.float64)
        if selectors.keys() != fractions.keys() or (shares < 0).any() or not np.isclose(shares.sum(), 1):
            raise ArgumentError(
                f"fractions must be those of {sorted(selectors)} and add up to 1, got {dict(fractions)}"
            )
        # selectors that are never used need not know the windows
        self.selectors: Sequence[Any] = [part for part, share in zip(selectors.values(), shares, strict=True) if share]
        self.fractions: Floats = shares[shares > 0] / shares.sum()
        self.rng = np.random.default_rng(seed)

    @property
    def needs_step_ids(self) -> bool:
        """Whether one of the selectors needs ``step_ids``."""
        return any(getattr(selector, "needs_step_ids", True) for selector in self.selectors)

    def __call__(self) -> int:
        return int(self.selectors[self.rng.choice(len(self.selectors), p=self.fractions)]())

    def __setitem__(self, window: int, step_ids: Any) -> None:
        for selector in self.selectors:
            selector[window] = step_ids

    def __delitem__(self, window: int) -> None:
        for selector in self.selectors:
            del selector[window]

    def prioritize(self, step_ids: Any, priorities: Any) -> None:
        """Pass priorities to the selectors that use them.

        Args:
            step_ids: Ids of steps, ``[n, 20]``.
            priorities: Their priorities, ``[n]``.
        """
        for selector in self.selectors:
            if hasattr(selector, "prioritize"):
                selector.prioritize(step_ids, priorities)
