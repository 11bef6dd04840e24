"""Priorities that can be drawn from in proportion to their size, and changed, in whole batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

# children of a node, and how many nodes may be searched at once: fastest of 8 to 128 and 256 to 16384 for a million
FAN_OUT = 32
_TOP = 1024


class SumTree:
    """``n_leaves`` priorities, their total, their minimum, and draws in proportion to them.

    A node is always the sum of its children as they are, never corrected by a difference: the tree follows from its
    leaves alone, and nothing drifts. Writing marks nodes as stale; they are summed up when somebody next asks. A leaf
    of zero is not there: it is never drawn, and no minimum.
    """

    def __init__(self, n_leaves: int) -> None:
        self.n_leaves = n_leaves
        self._grow(np.zeros(_padded(n_leaves), np.float64))

    def _grow(self, leaves: Floats) -> None:
        """Build the tree anew over ``leaves``."""
        # leaves first; each level is padded to whole nodes. Leaves are their own minima, zeros apart
        self._sums, self._mins = [leaves], [leaves]
        while len(self._sums[-1]) > _TOP:
            n_nodes = _padded(len(self._sums[-1]) // FAN_OUT)
            self._sums.append(np.zeros(n_nodes))
            self._mins.append(np.full(n_nodes, np.inf))
        self._stale = np.ones(len(leaves) // FAN_OUT, np.bool_)
        self._ends = np.zeros(len(self._sums[-1]))
        self._min = np.inf

    # ---- writing and reading ----

    def write(self, leaves: Any, priorities: Any) -> None:
        """Set ``leaves`` (indices or a slice); where one is repeated, the last of its priorities counts."""
        # marked first: a node that is summed up once too often does no harm
        if isinstance(leaves, slice):
            self._stale[leaves.start // FAN_OUT : (leaves.stop - 1) // FAN_OUT + 1] = True
        else:
            self._stale[leaves // FAN_OUT] = True
        self._sums[0][leaves] = priorities

    def read(self, leaves: Any) -> Floats:
        """The priorities of ``leaves``."""
        priorities: Floats = self._sums[0][leaves]
        return priorities

    def clear(self) -> None:
        """Set every leaf to zero."""
        self._grow(np.zeros_like(self._sums[0]))

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        self._apply_pending()
        return float(self._ends[-1])

    @property
    def minimum(self) -> float:
        """The least priority above zero; infinite where there is none."""
        self._apply_pending()
        return self._min

    # ---- drawing ----

    def find(self, points: Floats) -> Indices:
        """The leaf that each of ``points`` falls on, where all priorities are laid end to end from 0 to `total`."""
        self._apply_pending()
        # the first node that ends beyond the point: it cannot be an empty one
        ends = self._ends
        points = np.minimum(points, np.nextafter(ends[-1], 0))
        nodes = ends.searchsorted(points, side="right")
        points = points - np.where(nodes > 0, ends[nodes - 1], 0.0)
        rows = np.arange(len(points))
        for sums in self._sums[-2::-1]:
            ends = _children(sums, nodes).cumsum(axis=1)  # (n_points, FAN_OUT)
            # rounding may put a point past the end of its node
            np.minimum(points, np.nextafter(ends[:, -1], 0), out=points)
            children = (ends > points[:, None]).argmax(axis=1)
            points -= np.where(children > 0, ends[rows, children - 1], 0.0)
            nodes = nodes * FAN_OUT + children
        return nodes

    def draw(self, n_draws: int) -> Indices:
        """``n_draws`` leaves, one from each of as many equal parts of the total, from NumPy's global generator."""
        parts = np.arange(n_draws) + np.random.random_sample(n_draws)
        return self.find(parts * (self.total / n_draws))

    # ---- keeping the sums ----

    def _apply_pending(self) -> None:
        """Sum up again what has stale children."""
        stale = marked = np.flatnonzero(self._stale)
        if not len(stale):
            return
        for level in range(1, len(self._sums)):
            if level > 1:
                parents = stale // FAN_OUT
                stale = parents[np.append(True, parents[1:] != parents[:-1])]
            self._sums[level][stale] = _children(self._sums[level - 1], stale).sum(axis=1)
            minima = _children(self._mins[level - 1], stale)
            if level == 1:
                minima = np.where(minima > 0, minima, np.inf)
            self._mins[level][stale] = minima.min(axis=1)
        self._ends = self._sums[-1].cumsum()
        minima = self._mins[-1]
        self._min = float(minima.min(where=minima > 0, initial=np.inf))
        self._stale[marked] = False

    def check(self) -> None:
        """Raise if the tree is not exactly what its leaves make it, or a leaf is no priority."""
        leaves = self._sums[0]
        if not np.isfinite(leaves).all() or (leaves < 0).any() or leaves[self.n_leaves :].any():
            raise AssertionError("a leaf is negative, not finite, or beyond the last one")
        again = SumTree(self.n_leaves)
        again.write(slice(0, self.n_leaves), leaves[: self.n_leaves])
        if (again.total, again.minimum) != (self.total, self.minimum):
            raise AssertionError(f"total and minimum are {self.total}, {self.minimum}, not {again.total}, {again._min}")
        for ours, fresh in zip(self._sums + self._mins, again._sums + again._mins, strict=True):
            if not np.array_equal(ours, fresh):
                raise AssertionError("a node is not the sum of its children")

    # ---- memory and pickles ----

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self._sums, *self._mins[1:], self._stale, self._ends))

    def frozen(self) -> SumTree:
        """A copy."""
        made = object.__new__(SumTree)
        made.__setstate__(self.__getstate__())
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"n_leaves": self.n_leaves, "leaves": self._sums[0][: self.n_leaves].copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.n_leaves = state["n_leaves"]
        leaves = np.zeros(_padded(self.n_leaves), np.float64)
        leaves[: self.n_leaves] = state["leaves"]
        self._grow(leaves)


def _padded(count: int) -> int:
    return -(-count // FAN_OUT) * FAN_OUT


def _children(level: Floats, nodes: Indices) -> Floats:
    """What lies below ``nodes``, (n_nodes, FAN_OUT)."""
    return level.reshape(-1, FAN_OUT).take(nodes, axis=0)
