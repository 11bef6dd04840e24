"""`SumTree`: priorities that are drawn from and updated in batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.kernels import as_contiguous, sum_tree_kernels

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

# children of a node, and the size up to which a level is searched as a whole; the fastest for a million leaves among
# 8 to 128 and 256 to 16384
FAN_OUT = 32
_TOP_SIZE = 1024


class SumTree:
    """``n_leaves`` priorities with their total, their minimum, and draws in proportion to them.

    A node is always the sum of its children and never adjusted by a difference, so the tree depends on its leaves
    alone and rounding errors do not add up. Writing marks nodes as stale; they are summed at the next query. A leaf of
    zero is empty: it is never drawn and does not count for the minimum.

    With numba, compiled kernels do the same additions in the same order. They are loaded when priorities are first
    drawn or updated; ``compiled=False`` leaves them out.
    """

    # the compiled kernels, and the levels in the form in which they take them
    _kernels: Any = None
    _bound: Any = None
    # of every level from the leaves up
    _sums: list[Floats]
    _mins: list[Floats]
    _stale: npt.NDArray[np.bool_]
    _ends: Floats
    _min: float

    def __init__(self, n_leaves: int, compiled: bool | None = None) -> None:
        self.n_leaves, self.compiled = n_leaves, compiled
        self._build(np.zeros(_padded(n_leaves), np.float64))

    def _build(self, leaves: Floats) -> None:
        """Build the tree over ``leaves``."""
        # from the leaves up; each level is padded to whole nodes. Leaves that are not zero are their own minima
        sums, mins = [leaves], [leaves]
        while len(sums[-1]) > _TOP_SIZE:
            n_nodes = _padded(len(sums[-1]) // FAN_OUT)
            sums.append(np.zeros(n_nodes))
            mins.append(np.full(n_nodes, np.inf))
        n_nodes = len(leaves) // FAN_OUT
        stale, ends = np.arange(_padded(n_nodes)) < n_nodes, np.zeros(len(sums[-1]))
        # in one call: an interrupt must not leave the addresses of levels that are freed
        self.__dict__.update(_sums=sums, _mins=mins, _stale=stale, _ends=ends, _min=np.inf, _bound=None)

    def _bind(self) -> Any:
        """What the compiled kernels take; None without them."""
        if self._bound is None and self.compiled is not False:
            self._kernels = sum_tree_kernels()
            if self._kernels is not None:
                self._bound = self._kernels.bind_tree(self._sums, self._mins, self._stale, self._ends)
        return self._bound

    # ---- writing and reading ----

    def write(self, leaves: Any, priorities: Any) -> None:
        """Set ``leaves`` (indices or a slice); the last priority of a repeated index counts."""
        # marked first: summing a node once too often does no harm
        if isinstance(leaves, slice):
            self._stale[leaves.start // FAN_OUT : (leaves.stop - 1) // FAN_OUT + 1] = True
        else:
            self._stale[leaves // FAN_OUT] = True
        self._sums[0][leaves] = priorities

    def write_each(self, numbers: Indices, priorities: Floats) -> None:
        """`write` to the leaves ``numbers % n_leaves``, a priority for each."""
        bound = self._bind()
        if bound is None:
            self.write(numbers % self.n_leaves, priorities)
        else:
            numbers, priorities = np.asarray(numbers, np.int64), np.asarray(priorities, np.float64)
            self._kernels.write(bound, as_contiguous(numbers), as_contiguous(priorities), self.n_leaves)

    def read(self, leaves: Any) -> Floats:
        """Return the priorities of ``leaves``."""
        priorities: Floats = self._sums[0][leaves]
        return priorities

    def clear(self) -> None:
        """Set every leaf to zero."""
        self._build(np.zeros_like(self._sums[0]))

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        self._update()
        return float(self._ends[-1])

    @property
    def minimum(self) -> float:
        """The smallest priority above zero, or infinity."""
        self._update()
        return self._min

    # ---- drawing ----

    def find(self, points: Floats) -> Indices:
        """Return the leaf at each of ``points``, from 0 to `total`, on the line of all priorities placed end to end."""
        if self._bind() is not None:
            return self._find_compiled(np.array(points, np.float64), is_draw=False)[0]
        self._update()
        # the first node that ends after the point, which cannot be empty
        ends = self._ends
        points = np.minimum(points, np.nextafter(ends[-1], 0))
        nodes = ends.searchsorted(points, side="right")
        points = points - np.where(nodes > 0, ends[nodes - 1], 0.0)
        rows = np.arange(len(points))
        for sums in self._sums[-2::-1]:
            ends = _children(sums, nodes).cumsum(axis=1)  # (n_points, FAN_OUT)
            # rounding may move a point past the end of its node
            np.minimum(points, np.nextafter(ends[:, -1], 0), out=points)
            children = (ends > points[:, None]).argmax(axis=1)
            points -= np.where(children > 0, ends[rows, children - 1], 0.0)
            nodes = nodes * FAN_OUT + children
        return nodes

    def draw(self, n_draws: int) -> Indices:
        """Draw one leaf from each of ``n_draws`` equal parts of the total, with NumPy's global generator."""
        return self.draw_and_read(n_draws)[0]

    def draw_and_read(self, n_draws: int) -> tuple[Indices, Floats, float]:
        """`draw`; returns the leaves, their priorities and `minimum`. If the total is zero, nothing is drawn."""
        random = np.random.random_sample(n_draws)
        if self._bind() is not None:
            leaves, priorities = self._find_compiled(random, is_draw=True)
            n_drawn = n_draws if self._ends[-1] else 0
            return leaves[:n_drawn], priorities[:n_drawn], self._min
        if not self.total:
            return np.zeros(0, np.int64), np.zeros(0), self._min
        leaves = self.find((np.arange(n_draws) + random) * (self.total / max(n_draws, 1)))
        return leaves, self.read(leaves), self._min

    def _find_compiled(self, points: Floats, is_draw: bool) -> tuple[Indices, Floats]:
        """`find`, or `draw` with these random numbers; the priorities of the leaves replace ``points``."""
        leaves = np.zeros(len(points), np.int64)
        self._min = self._kernels.find(self._bound, points, leaves, is_draw)
        return leaves, points

    # ---- sums ----

    def _update(self) -> None:
        """Sum all nodes with stale children."""
        if self._bind() is not None:
            self._find_compiled(np.zeros(0), is_draw=False)
            return
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
        self._sums[-1].cumsum(out=self._ends)
        minima = self._mins[-1]
        self._min = float(minima.min(where=minima > 0, initial=np.inf))
        self._stale[marked] = False

    def check(self) -> None:
        """Raise if a leaf is not a priority or a node is not the sum of its children, for tests."""
        leaves = self._sums[0]
        if not np.isfinite(leaves).all() or (leaves < 0).any() or leaves[self.n_leaves :].any():
            raise AssertionError("a leaf is negative or not finite, or padding is not zero")
        rebuilt = self.frozen()
        if (rebuilt.total, rebuilt.minimum) != (self.total, self.minimum):
            raise AssertionError(
                f"total and minimum are {self.total}, {self.minimum}; should be {rebuilt.total}, {rebuilt.minimum}"
            )
        for level, rebuilt_level in zip(self.levels, rebuilt.levels, strict=True):
            if not np.array_equal(level, rebuilt_level):
                raise AssertionError("a node is not the sum of its children")

    @property
    def levels(self) -> list[Floats]:
        """The sums of every level from the leaves up, then the minima."""
        return self._sums + self._mins

    # ---- memory and pickles ----

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self._sums, *self._mins[1:], self._stale, self._ends))

    def frozen(self) -> SumTree:
        """Return a copy, whose sums are computed again."""
        copied = object.__new__(SumTree)
        copied.__setstate__(self.__getstate__())
        return copied

    def after_raw_copy(self) -> None:
        """See `RawCopier`: the bound levels were the original's."""
        self._bound = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "n_leaves": self.n_leaves, "leaves": self._sums[0][: self.n_leaves].copy(), "compiled": self.compiled
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.n_leaves, self.compiled = state["n_leaves"], state.get("compiled")
        leaves = np.zeros(_padded(self.n_leaves), np.float64)
        leaves[: self.n_leaves] = state["leaves"]
        self._build(leaves)


def _padded(count: int) -> int:
    return -(-count // FAN_OUT) * FAN_OUT


def _children(level: Floats, nodes: Indices) -> Floats:
    """The children of ``nodes``, of shape (n_nodes, FAN_OUT)."""
    return level.reshape(-1, FAN_OUT).take(nodes, axis=0)
