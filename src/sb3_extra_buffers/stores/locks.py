"""Locks for buffers and stores: a fork waits for them, so that a child process starts between two writes."""

from __future__ import annotations

import importlib
import itertools
import os
import threading
import weakref
from typing import Any

from sb3_extra_buffers.stores.reentry import is_inside, refuse

__all__ = ["ReaderLocks", "fork_safe_lock", "this_thread"]

# readers of at most this many threads hold locks of their own
_N_STRIPES = 8

# seconds until a fork goes ahead without a lock that is not released, such as one of a suspended thread
_PATIENCE = 10.0

# locks by the order in which they are acquired: of buffers, of their stores, of readers
_BUFFER, _STORE, _READER = range(3)
_levels: tuple[set[weakref.ref[Any]], ...] = (set(), set(), set())
# locks that the current fork has acquired, and those that it gave up on
_acquired: list[Any] = []
_missed: list[Any] = []


def fork_safe_lock(of_buffer: bool = False) -> Any:
    """Return a new reentrant lock; ``of_buffer`` if locks of stores are acquired while it is held."""
    return _make_lock(_BUFFER if of_buffer else _STORE)


def _make_lock(level: int) -> Any:
    lock = threading.RLock()
    # plain sets: adding, discarding and listing are atomic
    _levels[level].add(weakref.ref(lock, _levels[level].discard))
    return lock


_adding_stripe = _make_lock(_READER)
_numbers = itertools.count()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stripe = next(_numbers) % _N_STRIPES


#: ``this_thread.stripe`` is the key of this thread in `ReaderLocks.stripes`.
this_thread = _Thread()


class ReaderLocks:
    """Lets many threads read what one thread at a time changes; together with a lock that writers hold.

    Locks are only ever held by a plain ``with``, so that no signal can leave one held. A reader holds the lock of its
    thread (`stripe`), and falls back to the writers' lock while a write is under way::

        with readers.stripes.get(this_thread.stripe) or readers.add_stripe():
            if not readers.writing:
                return read()
        with writer_lock:
            return read()

    A writer waits until all readers have left, and new ones wait for it::

        with writer_lock:
            readers.exclude()
            try:
                write()
            finally:
                readers.writing = False

    If an interrupt leaves ``writing`` set, readers take turns until the next writer resets it.
    """

    __slots__ = ("stripes", "writing")

    def __init__(self) -> None:
        #: One lock for each group of threads that has read so far. Replaced, never changed: writers iterate over it.
        self.stripes: dict[int, Any] = {}
        self.writing = False

    def add_stripe(self) -> Any:
        """Return the lock of this thread, which is created when the thread first reads."""
        with _adding_stripe:
            stripes, key = self.stripes, this_thread.stripe
            if key not in stripes:
                self.stripes = stripes = {**stripes, key: _make_lock(_READER)}
            return stripes[key]

    def raw_copy(self, copier: Any) -> ReaderLocks:
        """See `RawCopier`."""
        copied = ReaderLocks()
        copier.put(self, copied)
        return copied

    @property
    def is_reading(self) -> bool:
        """Whether this call comes from a signal handler or a callback inside a read of this thread."""
        return any(stripe._is_owned() for stripe in self.stripes.values()) and self._is_inside()

    def _is_inside(self) -> bool:
        return is_inside(lambda owner: getattr(owner, "readers", None) is self)

    def exclude(self) -> None:
        """Send new readers to the writers' lock, which the caller holds, and wait for those that are reading.

        Raises `ReentrantCallError` if this thread reads, or writes, and a signal handler has interrupted that.
        """
        if self.writing and self._is_inside():
            raise refuse("this store")
        self.writing = True
        self.wait()

    def wait(self) -> None:
        """Wait for those that are reading; ``writing`` is set."""
        for stripe in self.stripes.values():
            if stripe._is_owned() and self._is_inside():
                self.writing = False
                raise refuse("this store")
            with stripe:
                pass


def _acquire_all() -> None:
    for level in _levels:
        for reference in list(level):
            lock = reference()
            if lock is not None:
                (_acquired if lock.acquire(timeout=_PATIENCE) else _missed).append(lock)


def _release_all() -> None:
    _missed.clear()
    while _acquired:
        _acquired.pop().release()


def _release_in_child() -> None:
    for lock in _missed:
        # the thread that holds it does not exist here; there is no public way to reset a lock
        lock._at_fork_reinit()
    # the child's only thread is the one that forked: it owns the acquired locks here as well
    _release_all()


if hasattr(os, "register_at_fork"):
    # Hooks run before a fork in reverse order. That of concurrent.futures, registered at its import, takes a lock that
    # readers need in order to finish: it must come first here, so that it runs last.
    importlib.import_module("concurrent.futures.thread")
    os.register_at_fork(before=_acquire_all, after_in_parent=_release_all, after_in_child=_release_in_child)
