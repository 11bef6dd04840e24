"""Writes that take effect completely or not at all: the lock and the recovery that every kind of buffer shares."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sb3_extra_buffers.errors import ExtraBuffersError, OutOfMemoryError, ReadOnlyBufferError
from sb3_extra_buffers.stores.locks import fork_safe_lock
from sb3_extra_buffers.stores.reentry import is_inside, refuse, writes

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["HELD", "WRITING", "Transactional"]

#: ``_unfinished`` while nothing is changed, but a signal handler must not change anything: while a step is checked, or
#: while the buffer is copied or saved.
HELD = "held"

#: ``_unfinished`` while stores are being written, which can still be undone.
WRITING = "writing"


class Transactional:
    """A buffer whose writes take effect completely or not at all, whatever exception interrupts them.

    A write holds the lock and has three phases:

    1. Check all arguments. Nothing has changed yet.
    2. Call `_begin_step`, then write to the stores. If that is interrupted, `_recover` undoes it.
    3. Set ``_unfinished`` to everything that is left to do, then do it. If that is interrupted, `_recover` does all of
       it again, so all of it must be idempotent. Setting ``_unfinished`` to None ends the write.

    An interrupted recovery runs again when the buffer is next used.

    The lock is reentrant, so it does not keep out a signal handler that uses the buffer in the middle of a write. Every
    change calls `_ensure_recovered` before anything else, which raises `ReentrantCallError` there.
    """

    #: Whether writing raises `ReadOnlyBufferError`.
    read_only = False
    _lock: Any
    _unfinished: Any = None

    def __copy__(self) -> Any:
        # two buffers cannot write to the same stores
        return copy.deepcopy(self)

    def _make_lock(self) -> None:
        self._lock = fork_safe_lock(of_buffer=True)

    @property
    def lock(self) -> Any:
        """Held while a step is added and while a copy is taken; reentrant."""
        return self._lock

    def _changing(self) -> contextlib.AbstractContextManager[None]:
        """Enter this, with the lock held, to change anything that readers in other processes see."""
        return contextlib.nullcontext()

    def recover(self) -> None:
        """Complete or undo a write that was interrupted."""
        with self._lock:
            self._ensure_recovered()

    def _is_unfinished(self) -> bool:
        """Whether a write was interrupted, or is under way."""
        return self._unfinished is not None

    @writes
    def _ensure_recovered(self) -> None:
        """Complete or undo a write that was interrupted; raise if a signal handler calls this during the write."""
        self._check_outside()
        self._recover()

    def _is_inside(self) -> bool:
        """Whether this call comes from a signal handler or a callback inside a write that is still running."""
        return self._is_unfinished() and is_inside(lambda owner: owner is self)

    def _check_outside(self) -> None:
        if self._is_inside():
            raise refuse(f"this {type(self).__name__}")

    def _undisturbed(self) -> Self:
        """The buffer once no write is left unfinished, to be read; some kinds return a copy in a signal handler."""
        self._ensure_recovered()
        return self

    def _recover(self) -> None:
        unfinished = self._unfinished
        if unfinished is WRITING:
            self._undo_step()
        elif unfinished is HELD:
            self._unfinished = None
        elif unfinished is not None:
            self._finish_step(unfinished)

    def _written_stores(self) -> Iterable[Any]:
        """The stores that a step is written to."""
        raise NotImplementedError

    def _finish_step(self, unfinished: Any) -> None:
        """Complete a step whose observations are stored; must be idempotent."""
        raise NotImplementedError

    def _position(self) -> Any:
        """A value that every completed step changes."""
        raise NotImplementedError

    def _check_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyBufferError(f"this {type(self).__name__} was opened read-only; load() it to change a copy")

    def _begin_step(self) -> None:
        """Begin a write that the stores can undo until the next one begins."""
        for store in self._written_stores():
            store.commit()
        self._unfinished = WRITING

    def _undo_step(self) -> None:
        for store in self._written_stores():
            store.undo_write()
        self._unfinished = None

    @writes
    def _fail(self, problem: BaseException, position: Any) -> None:
        """Recover from ``problem`` in a step that began at ``position``, and raise it.

        A plain `MemoryError` becomes `OutOfMemoryError`. If memory ran out when the step was nearly done and recovery
        has completed the step, there is nothing to raise.
        """
        if self._is_inside():
            raise problem  # the write that the signal handler interrupted goes on
        with contextlib.suppress(Exception):
            self._recover()  # if this fails too, the next use of the buffer tries again
        if not isinstance(problem, MemoryError) or isinstance(problem, ExtraBuffersError):
            raise problem
        if self._unfinished is not None or self._position() == position:
            raise OutOfMemoryError(f"not enough memory to add a step: {problem}; the buffer is unchanged") from problem
