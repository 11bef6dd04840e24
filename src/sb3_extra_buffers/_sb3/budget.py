"""`BudgetMixin`: the memory of a replay buffer, and what ``max_bytes`` does to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sb3_extra_buffers._sb3.base import CompressedBuffer
from sb3_extra_buffers._sb3.views import ObsViews
from sb3_extra_buffers.errors import BudgetExceededError
from sb3_extra_buffers.stores.transactions import HELD

# the part of max_bytes that may go to tables, which do not shrink when observations are evicted
_TABLE_SHARE = 1 / 3
# the share of next observations for which memory is reserved, because they differ from the following observation:
# enough for episodes of eight steps
_ASIDE_SHARE = 1 / 8
# maximum bytes of the tables that locate one of them
_KEY_BYTES = 24
# bytes of such tables for a stack of four frames and the next one
_INDEX_BYTES = 32


class Eviction(NamedTuple):
    """What is left to do to drop the oldest step."""

    position: int
    n_evicted: int


class BudgetMixin(CompressedBuffer):
    """Measures a replay buffer, lays out what it can afford, and evicts its oldest steps or refuses new ones.

    Attributes:
        n_evicted: Oldest steps that were dropped to stay within ``max_bytes`` and are not overwritten yet.
    """

    _next_views: ObsViews
    # bytes of everything but observations, computed on first use
    _column_bytes: int | None
    n_evicted: int

    if TYPE_CHECKING:
        # of SB3's buffer, which follows in the MRO
        observation_space: Any
        obs_shape: Any
        buffer_size: int
        n_envs: int
        pos: int
        full: bool

    def size(self) -> int:
        """How many steps of every environment can be sampled."""
        return (self.buffer_size if self.full else self.pos) - self.n_evicted

    def held_bytes(self) -> int:
        """The total of `memory_usage`, slightly overestimated but cheap."""
        with self._lock:
            return self._undisturbed()._held_bytes()

    def _held_bytes(self) -> int:
        if self._column_bytes is None:
            self._column_bytes = sum(column.nbytes for column in self._columns().values()) + self._extra_bytes()
        return self._views.held_bytes() + self._next_views.dense_bytes + self._column_bytes

    def _check_budget(self, limit: int) -> None:
        if self._held_bytes() > limit:
            self._choose_methods()
            held = self._held_bytes()
            if held > limit:
                raise BudgetExceededError(
                    f"the buffer holds {held} bytes in {self.size() * self.n_envs} transitions, more than "
                    f"max_bytes={limit}; raise the limit, or pass on_max_bytes='evict' to drop the oldest ones"
                )

    def _choose_methods(self) -> None:
        """Compress observations that were only collected so far, before anything is evicted."""
        for view in self._views.stored.values():
            view.store.choose_method()

    def _evict_beyond(self, limit: int) -> None:
        self._unfinished = HELD
        if self._held_bytes() > limit:
            self._choose_methods()
            while self.size() > 1 and self._held_bytes() > limit:
                oldest = ((self.pos if self.full else 0) + self.n_evicted) % self.buffer_size
                self._unfinished = Eviction(oldest, self.n_evicted + 1)
                self._finish_eviction(self._unfinished)
                self._unfinished = HELD
        self._unfinished = None

    def _finish_eviction(self, eviction: Eviction) -> None:
        self._forget_step(eviction.position)
        self.n_evicted = eviction.n_evicted
        self._unfinished = None

    def _forget_step(self, step: int) -> None:
        """Free what the observations of ``step`` take; twice must have no further effect."""
        self._views.erase(step)
        self._next_views.erase(step)

    def _affordable_steps(self, n_steps: int, limit: int, column_bytes: int) -> int:
        """How many of ``n_steps`` to lay out: fewer only where even tiny observations would not fit ``limit``."""
        views = ObsViews.make(self.observation_space, self.obs_shape, (1, self.n_envs), self._options, with_next=True)
        n_compressed = len(views.stored) - len(views.raw)
        per_step = column_bytes + 2 * views.dense_bytes + n_compressed * self.n_envs * _INDEX_BYTES
        n_raw = len(views.raw) * self.n_envs
        per_step += views.raw_bytes + n_raw + int((views.raw_bytes + n_raw * _KEY_BYTES) * _ASIDE_SHARE)
        if self._options.on_max_bytes == "raise":
            # a shorter ring would overwrite steps that must be kept
            least, most = n_steps * per_step, n_steps
        else:
            share = int(limit * _TABLE_SHARE) if n_compressed else limit
            least, most = per_step * limit // max(share, 1), min(n_steps, share // per_step)
        if least > limit:
            noun = "environment" if self.n_envs == 1 else "environments"
            raise BudgetExceededError(
                f"max_bytes={limit} is too small for {n_steps} steps of {self.n_envs} {noun}: what cannot be "
                f"compressed takes {per_step} bytes a step; raise the limit to {least}, or lower buffer_size"
            )
        return most

    def _recover(self) -> None:
        if isinstance(self._unfinished, Eviction):
            self._finish_eviction(self._unfinished)
        else:
            super()._recover()
