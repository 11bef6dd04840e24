"""Locks that a fork waits for, so that a child starts from the state between two writes."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

__all__ = ["fork_safe_lock"]

# seconds after which a fork goes ahead without a lock that is held for ever, as by a thread that was suspended
_PATIENCE = 10.0

# buffers are locked before their stores, and so by a fork
_levels: tuple[weakref.WeakSet[Any], ...] = (weakref.WeakSet(), weakref.WeakSet())
# locks that the fork under way has, and those that it could not get
_held: list[Any] = []
_missed: list[Any] = []


def fork_safe_lock(of_buffer: bool = False) -> Any:
    """A new reentrant lock; ``of_buffer`` if others are acquired while it is held."""
    lock = threading.RLock()
    _levels[0 if of_buffer else 1].add(lock)
    return lock


def _acquire_all() -> None:
    for level in _levels:
        for lock in list(level):
            (_held if lock.acquire(timeout=_PATIENCE) else _missed).append(lock)


def _release_all() -> None:
    _missed.clear()
    while _held:
        _held.pop().release()


def _release_in_child() -> None:
    # whoever holds these is not here
    for lock in _missed:
        lock._at_fork_reinit()
    # the child's only thread is the one that forked: it owns the locks here as well
    _release_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_acquire_all, after_in_parent=_release_all, after_in_child=_release_in_child)
