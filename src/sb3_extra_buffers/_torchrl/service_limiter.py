"""`RateLimiter`: keeps learners and collectors of a served buffer at a fixed ratio."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

from sb3_extra_buffers.arguments import check_count
from sb3_extra_buffers.errors import ArgumentError, RateLimitError

__all__ = ["RateLimiter"]


class Admission:
    """What `RateLimiter.inserting` has admitted; ``counts`` is set to False if nothing had to be stored."""

    counts = True


class RateLimiter:
    """Makes collectors or learners of a served buffer wait, so that each item is sampled a fixed number of times.

    Learners wait until ``min_size`` items are stored. From then on, the *balance* is the number of samples that
    the items stored since would allow, less the samples that were drawn. Learners wait while it is below
    ``-tolerance``, collectors while it is above ``tolerance``. Both are checked before a batch is drawn or a packet is
    stored: the balance exceeds the tolerance by one batch or packet at most, and one side can always continue.
    Batches that a learner requests ahead count when they are drawn. After a restart, the balance begins at zero.

    Args:
        samples_per_insert: How often each item is sampled on average.
        min_size: The number of items to store before the first sample.
        tolerance: The largest balance, in samples; ``samples_per_insert * min_size / 10`` by default, as in Acme.
        timeout: Seconds to wait before `RateLimitError` is raised; by default there is no limit.

    Examples:
        >>> from sb3_extra_buffers.replay_buffers import RateLimiter
        >>> limiter = RateLimiter(samples_per_insert=8, min_size=1000, timeout=60)
        >>> limiter.tolerance
        800.0
    """

    def __init__(
        self,
        samples_per_insert: float,
        min_size: int = 1,
        tolerance: float | None = None,
        timeout: float | None = None,
    ) -> None:
        self.samples_per_insert = _positive(samples_per_insert, "samples_per_insert")
        self.min_size = check_count(min_size, "min_size")
        if tolerance is None:
            tolerance = self.samples_per_insert * self.min_size / 10
        self.tolerance = _positive(tolerance, "tolerance", zero=True)
        self.timeout = None if timeout is None else _positive(timeout, "timeout", zero=True)
        self._start()

    def _start(self) -> None:
        self._changed = threading.Condition()
        # items that were admitted, items that are stored, samples that were admitted
        self._inserts = self._stored = self._samples = 0
        self._balance = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy belongs to another buffer, so it starts with new counters
        self.__dict__.update(state)
        self._start()

    def reset(self, n_items: int = 0) -> None:
        """Begin with a balance of zero and ``n_items`` that are stored already."""
        with self._changed:
            self._inserts = self._stored = n_items
            self._samples, self._balance = 0, 0.0
            self._changed.notify_all()

    def admit_items(self, n_items: int) -> None:
        """Wait until ``n_items`` may be stored; `finish_items` must follow."""
        with self._changed:
            self._wait("store", n_items, lambda: self._inserts < self.min_size or self._balance <= self.tolerance)
            self._count_inserts(n_items)

    def finish_items(self, n_admitted: int, n_stored: int) -> None:
        """Count ``n_stored`` of ``n_admitted`` items as stored; the others are no longer admitted."""
        with self._changed:
            self._stored += n_stored
            self._count_inserts(n_stored - n_admitted)
            self._changed.notify_all()

    def _count_inserts(self, n_items: int) -> None:
        before = self._inserts
        self._inserts += n_items
        # the first `min_size` items allow no samples
        n_allowing = max(self._inserts, self.min_size) - max(before, self.min_size)
        self._balance += self.samples_per_insert * n_allowing

    def admit_samples(self, n_samples: int) -> None:
        """Wait until ``n_samples`` may be drawn."""
        with self._changed:
            self._wait("draw", n_samples, lambda: self._stored >= self.min_size and self._balance >= -self.tolerance)
            self._samples += n_samples
            self._balance -= n_samples
            self._changed.notify_all()

    def withdraw_samples(self, n_samples: int) -> None:
        """Do not count ``n_samples`` that were admitted, but not drawn."""
        with self._changed:
            self._samples -= n_samples
            self._balance += n_samples
            self._changed.notify_all()

    @contextlib.contextmanager
    def inserting(self, n_items: int) -> Iterator[Admission]:
        """Wait until ``n_items`` may be stored; they are not counted if storing them raises, or is not necessary."""
        self.admit_items(n_items)
        admission = Admission()
        try:
            yield admission
        except BaseException:
            admission.counts = False
            raise
        finally:
            self.finish_items(n_items, n_items if admission.counts else 0)

    @contextlib.contextmanager
    def sampling(self, n_samples: int) -> Iterator[None]:
        """Wait until ``n_samples`` may be drawn; they are not counted if drawing them raises."""
        self.admit_samples(n_samples)
        try:
            yield
        except BaseException:
            self.withdraw_samples(n_samples)
            raise

    def _wait(self, action: str, count: int, may_go_on: Callable[[], bool]) -> None:
        if self._changed.wait_for(may_go_on, self.timeout):
            return
        raise RateLimitError(
            f"waited {self.timeout:g} s to {action} {count} items: {self._stored} items are stored "
            f"(min_size={self.min_size}), {self._samples} samples were drawn, and the balance is {self._balance:g} "
            f"(samples_per_insert={self.samples_per_insert:g}, tolerance={self.tolerance:g}); "
            + ("are any learners sampling?" if action == "store" else "are any collectors storing items?")
        )

    def state(self) -> dict[str, float]:
        """Return the counters: items that were stored, samples that were drawn, and the balance."""
        with self._changed:
            return {"inserts": self._stored, "samples": self._samples, "balance": self._balance}

    def __repr__(self) -> str:
        return (
            f"RateLimiter(samples_per_insert={self.samples_per_insert:g}, min_size={self.min_size}, "
            f"tolerance={self.tolerance:g}, timeout={self.timeout})"
        )


def _positive(value: float, name: str, zero: bool = False) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, (bool, str)) or not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ArgumentError(f"{name} must be a {'non-negative' if zero else 'positive'} number, got {value!r}")
    return number
