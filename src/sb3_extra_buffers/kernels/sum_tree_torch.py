"""Priorities of the transitions of a ring, on a torch device: reference kernels, in PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from sb3_extra_buffers.arguments import MAX_ERROR

__all__ = ["FAN_OUT", "MAX_ERROR", "TorchSumTree"]

#: Children of a node.
FAN_OUT = 32


class TorchSumTree:
    """``n_leaves`` priorities, drawn in proportion to them. Drawing and writing never wait for the device.

    A transition is identified by its number: how many transitions were added before it. Its leaf is the number modulo
    ``n_leaves``. ``counts`` is a tensor that the caller updates: transitions added, and transitions held.

    A node is always the sum of its children and never adjusted by a difference, so that rounding errors do not add up.
    A leaf of zero is empty: it is never drawn and does not count for the minimum.
    """

    def __init__(self, n_leaves: int, counts: torch.Tensor, alpha: float, beta: float, epsilon: float) -> None:
        self.n_leaves, self.counts = n_leaves, counts
        device = counts.device
        # sizes of the levels from the leaves up, in whole nodes; the last one is the children of the root
        sizes = [_padded(n_leaves)]
        while sizes[-1] > FAN_OUT:
            sizes.append(_padded(sizes[-1] // FAN_OUT))
        self.sizes = sizes
        self.starts = [sum(sizes[:level]) for level in range(len(sizes))]
        n_nodes = sum(sizes)
        #: Sums of all levels, from the leaves up; writes that should have no effect go to one more entry.
        self.sums = torch.zeros(n_nodes + 1, dtype=torch.float64, device=device)
        #: Smallest priorities above zero, of all levels above the leaves.
        self.mins = torch.full((max(n_nodes - sizes[0], 1),), torch.inf, dtype=torch.float64, device=device)
        self.offsets = torch.tensor(self.starts, device=device)
        # which entry of which update wrote a leaf last: epoch << 32 | position
        self.claims = torch.zeros(n_leaves + 1, dtype=torch.int64, device=device)
        self.epoch = torch.ones(1, dtype=torch.int64, device=device)
        #: The largest ``abs(TD error) + epsilon`` so far.
        self.max_priority = torch.ones(1, dtype=torch.float64, device=device)
        #: Updates that were ignored: of transitions that are gone, or with a TD error that is not finite.
        self.n_skipped = torch.zeros(1, dtype=torch.int64, device=device)
        #: alpha, beta, epsilon
        self.options = torch.tensor([alpha, beta, epsilon], dtype=torch.float64, device=device)
        self._children = torch.arange(FAN_OUT, device=device)
        # whether an exception may have left nodes that are not the sums of their children
        self._is_dirty = False

    # ---- writing ----

    def fill(self, first: int, count: int) -> None:
        """Give ``count`` new transitions, whose leaves start at ``first``, the highest priority seen so far."""
        self._repair()
        self._is_dirty = True
        self._fill(first, count)
        self._is_dirty = False

    def update(self, numbers: torch.Tensor, errors: torch.Tensor) -> None:
        """Set the priorities of the transitions ``numbers`` from their TD errors, both of shape ``[n]``.

        The last of repeated numbers counts. Transitions that are not held and errors that are not finite are skipped.
        """
        if not len(numbers):
            return
        self._repair()
        self._is_dirty = True
        self._update(numbers, errors)
        self._is_dirty = False

    def clear(self) -> None:
        """Make every leaf empty."""
        self._is_dirty = True
        self.sums.zero_()
        self.mins.fill_(torch.inf)
        self._is_dirty = False

    def write_leaves(self, leaves: torch.Tensor) -> None:
        """Replace all leaves."""
        self._is_dirty = True
        self.sums[: self.n_leaves] = leaves
        self._repair()

    def _repair(self) -> None:
        if self._is_dirty:
            self.epoch.add_(1)
            self._sum_levels([None] * len(self.sizes))
            self._is_dirty = False

    def _fill(self, first: int, count: int) -> None:
        self.sums[first : first + count] = self.max_priority ** self.options[0]
        nodes: list[Any] = [None]
        low, high = first, first + count - 1
        for _ in self.sizes[1:]:
            low, high = low // FAN_OUT, high // FAN_OUT
            nodes.append(torch.arange(low, high + 1, device=self.sums.device))
        self._sum_levels(nodes)

    def _update(self, numbers: torch.Tensor, errors: torch.Tensor) -> None:
        alpha, _, epsilon = self.options
        n_added, n_held = self.counts
        errors = errors.double().abs()
        is_valid = (numbers < n_added) & (numbers >= n_added - n_held) & (errors <= MAX_ERROR)
        self.n_skipped += (~is_valid).sum()
        priorities = torch.where(is_valid, errors, 0.0) + epsilon
        self.max_priority.copy_(torch.maximum(self.max_priority, torch.where(is_valid, priorities, 0.0).max()))
        leaves = torch.where(is_valid, numbers % self.n_leaves, self.n_leaves)
        # of repeated leaves, the last position wins
        stamps = (self.epoch << 32) + torch.arange(len(numbers), device=numbers.device)
        self.claims.scatter_reduce_(0, leaves, stamps, "amax")
        is_last = is_valid & (self.claims[leaves] == stamps)
        self.sums[torch.where(is_last, leaves, len(self.sums) - 1)] = priorities**alpha
        self.epoch.add_(1)
        nodes, nth = [None], torch.where(is_valid, leaves, 0)
        for size in self.sizes[1:]:
            nth = nth // FAN_OUT
            nodes.append(nth if len(nth) < size else None)  # type: ignore[arg-type]  # None is all of them
        self._sum_levels(nodes)

    def _sum_levels(self, nodes: list[Any]) -> None:
        """Sum the children of ``nodes[level]`` (None: of all) of each level above the leaves."""
        n_padded = self.sizes[0]
        for level in range(1, len(self.sizes)):
            start, below = self.starts[level], self.starts[level - 1]
            which = slice(None) if nodes[level] is None else nodes[level]
            n_nodes = (start - below) // FAN_OUT
            values = self.sums[below:start].view(-1, FAN_OUT)[which]
            if level == 1:
                minima = torch.where(values > 0, values, torch.inf)
            else:
                minima = self.mins[below - n_padded : start - n_padded].view(-1, FAN_OUT)[which]
            self.sums[start : start + n_nodes][which] = values.sum(1)
            self.mins[start - n_padded : start - n_padded + n_nodes][which] = minima.amin(1)

    # ---- drawing ----

    def draw(self, uniform: torch.Tensor, leaves: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> None:
        """Draw one transition from each of ``n`` equal parts of the priorities.

        Args:
            uniform: Where in each part, float64 ``[n]`` from 0 to 1.
            leaves: Output, int64 ``[n]``.
            numbers: Output, int64 ``[n]``.
            weights: Output, float32 ``[n]``: importance weights, at most 1.
        """
        self._repair()
        self._draw(uniform, leaves, numbers, weights)

    def _draw(self, uniform: torch.Tensor, leaves: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> None:
        n_draws = len(uniform)
        top = self.sums[self.starts[-1] : self.starts[-1] + FAN_OUT]
        parts = torch.arange(n_draws, device=uniform.device) + uniform
        points = parts * (top.sum() / n_draws)
        nodes = torch.zeros_like(leaves)
        for start, size in zip(reversed(self.starts), reversed(self.sizes), strict=True):
            values = self.sums[start : start + size].view(-1, FAN_OUT).index_select(0, nodes)  # [n, FAN_OUT]
            chosen, before = self._find_children(values, points)
            points = (points - before).clamp(min=0)
            nodes = nodes * FAN_OUT + chosen
        leaves.copy_(nodes)
        n_added = self.counts[0]
        numbers.copy_(n_added - 1 - (n_added - 1 - nodes) % self.n_leaves)
        priorities = self.sums[nodes]
        # (N p / total) ** -beta divided by its maximum: N and total cancel
        weights.copy_((self._minimum() / priorities) ** self.options[1])

    def _find_children(self, values: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The child at each point on the line of ``values [n, FAN_OUT]``, never an empty one, and where it begins."""
        ends = values.cumsum(1)
        if values.device.type == "cpu":
            # summed in order, so that an empty child ends where the one before it does
            first = torch.searchsorted(ends, points[:, None], right=True)
            # rounding may move a point past the end of its node
            chosen = torch.minimum(first, torch.searchsorted(ends, ends[:, -1:].contiguous()))
            before = torch.where(chosen > 0, ends.gather(1, (chosen - 1).clamp(min=0)), 0.0)
            return chosen[:, 0], before[:, 0]
        is_taken = values > 0
        first = torch.where((ends > points[:, None]) & is_taken, self._children, FAN_OUT).amin(1)
        last = torch.where(is_taken, self._children, 0).amax(1)
        chosen = torch.where(first < FAN_OUT, first, last)
        return chosen, torch.where(self._children < chosen[:, None], values, 0.0).sum(1)

    def _minimum(self) -> torch.Tensor:
        """The smallest priority above zero."""
        top = slice(self.starts[-1], self.starts[-1] + FAN_OUT)
        if len(self.sizes) == 1:
            return torch.where(self.sums[top] > 0, self.sums[top], torch.inf).amin()
        return self.mins[-FAN_OUT:].amin()

    def compile_kernels(
        self, uniform: torch.Tensor, leaves: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Use every kernel once, while the tree is empty; the arguments are those of `draw`."""
        self.fill(0, 1)
        self.draw(uniform, leaves, numbers, weights)
        for count in {1, *(size // FAN_OUT for size in self.sizes)}:
            # nothing is held, so that all updates are skipped
            unheld = torch.full((count,), -1, dtype=torch.int64, device=leaves.device)
            self.update(unheld, torch.zeros(count, device=leaves.device))
        self.n_skipped.zero_()
        self.clear()
        leaves.zero_()

    # ---- reports; these wait for the device ----

    @property
    def leaves(self) -> torch.Tensor:
        """The priorities ``[n_leaves]``; changes with the tree."""
        return self.sums[: self.n_leaves]

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * 8 for part in (self.sums, self.mins, self.claims))

    def check(self) -> None:
        """Raise if a leaf is not a priority or a node is not the sum of its children."""
        self._repair()
        leaves = self.sums[: self.sizes[0]]
        if not bool(torch.isfinite(leaves).all()) or bool((leaves < 0).any()) or bool(leaves[self.n_leaves :].any()):
            raise AssertionError("a leaf is negative or not finite, or padding is not zero")
        other = TorchSumTree(self.n_leaves, self.counts, *self.options.tolist())
        other.write_leaves(self.leaves)
        n_nodes, n_leaves = sum(self.sizes), self.sizes[0]
        if not torch.allclose(other.sums[n_leaves:n_nodes], self.sums[n_leaves:n_nodes], rtol=1e-12, atol=0):
            raise AssertionError("a node is not the sum of its children")
        if not torch.equal(other.mins, self.mins):
            raise AssertionError("a node is not the minimum of its children")


def _padded(count: int) -> int:
    return -(-count // FAN_OUT) * FAN_OUT
