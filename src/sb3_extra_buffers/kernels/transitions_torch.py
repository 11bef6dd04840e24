"""Drawing transitions of a ring and gathering their columns on a torch device: reference kernels, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Endings", "TorchTransitions"]


class Endings(NamedTuple):
    """The columns that n-step returns are computed from, flat: ``[transition]``."""

    rewards: torch.Tensor  # float32
    dones: torch.Tensor
    truncations: torch.Tensor | None
    #: float32 ``[n_steps + 1]``: powers of gamma
    discounts: torch.Tensor


class TorchTransitions:
    """Columns of a ring of steps of ``n_envs`` environments each; transitions are drawn and gathered in batches.

    ``counts`` is a tensor: transitions added, and transitions held. ``columns`` are flat, ``[transition, value]``. With
    ``endings``, rewards are not among them, and the columns in ``at_end`` and the next observation are those of the
    last step of an n-step return.
    """

    def __init__(
        self,
        counts: torch.Tensor,
        n_envs: int,
        columns: Sequence[torch.Tensor],
        n_transitions: int,
        endings: Endings | None = None,
        at_end: Sequence[bool] = (),
    ) -> None:
        self.counts, self.n_envs, self.n_transitions = counts, n_envs, n_transitions
        self.columns, self.endings, self.at_end = list(columns), endings, list(at_end) or [False] * len(columns)
        #: The columns that are written: rewards are the last, if they are not gathered.
        self.written = self.columns if endings is None else [*self.columns, endings.rewards.view(-1, 1)]
        self._n_added, self._n_held = counts

    def write(self, first: int, values: Sequence[torch.Tensor], n_added: int, n_held: int) -> None:
        """Write a step: the values of each column from transition ``first`` on, and the counts.

        ``values`` are contiguous; with ``endings``, rewards come last.
        """
        for column, value in zip(self.written, values, strict=True):
            column[first : first + self.n_envs] = value.view(self.n_envs, -1)
        self._n_added.fill_(n_added)
        self._n_held.fill_(n_held)

    def gather(
        self,
        uniform: torch.Tensor | None,
        indices: torch.Tensor,
        outs: Sequence[torch.Tensor],
        returns: torch.Tensor | None = None,
        discounts: torch.Tensor | None = None,
    ) -> None:
        """Draw transitions, find the last step of each, and gather the columns.

        Args:
            uniform: Numbers from 0 to 1, float64 ``[n]``, to draw by; None if ``indices[0]`` holds what to gather.
            indices: Output, int64 ``[2, n]``: of observations, and of next observations in the second set.
            outs: Outputs, one for each column, contiguous.
            returns: Output with ``endings``, float32 ``[n]``: n-step returns.
            discounts: Output with ``endings``, float32 ``[n]``: powers of gamma for the value of the next observation.
        """
        first = indices[0]
        if uniform is not None:
            n_held = self.counts[1]
            first.copy_((uniform * n_held).long().clamp(max=n_held - 1))
        last = first
        if self.endings is not None:
            assert returns is not None
            assert discounts is not None
            last = self._sum_rewards(first, returns, discounts)
        torch.add(last, self.n_transitions, out=indices[1])
        for column, out, at_end in zip(self.columns, outs, self.at_end, strict=True):
            torch.index_select(column, 0, last if at_end else first, out=out.view(len(first), -1))

    def _sum_rewards(self, first: torch.Tensor, returns: torch.Tensor, discounts: torch.Tensor) -> torch.Tensor:
        """Sum discounted rewards up to the end of the episode, the newest step, or ``n_steps``."""
        endings = self.endings
        assert endings is not None
        is_running = torch.ones_like(first, dtype=torch.bool)
        last, total, count = first, torch.zeros_like(returns), torch.zeros_like(first)
        for nth in range(len(endings.discounts) - 1):
            at = (first + nth * self.n_envs) % self.n_transitions
            reward = endings.rewards[at] * endings.discounts[nth]
            total = torch.where(is_running, total + reward, total)
            last, count = torch.where(is_running, at, last), count + is_running
            is_end = (self.counts[0] - 1 - at) % self.n_transitions < self.n_envs
            is_end |= endings.dones[at] != 0
            if endings.truncations is not None:
                is_end |= endings.truncations[at] != 0
            is_running &= ~is_end
        returns.copy_(total)
        discounts.copy_(endings.discounts[count])
        return last
