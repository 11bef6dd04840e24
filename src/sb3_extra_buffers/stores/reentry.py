"""Calls from inside a write of the same thread, such as those of a signal handler: their detection, and copies to read.

A signal handler runs between two bytecodes of whatever the main thread does, and reentrant locks do not keep it out. A
write that it interrupts goes on when the handler returns, with everything that it has in local variables. So a handler
must not recover anything in place: changing calls raise `ReentrantCallError`, and reading calls work on a copy.

After an exception, the flag of a write (``dirty``, ``_unfinished``) is set too, but the write is no longer on the call
stack. Searching the stack tells the two cases apart, so that writes need not record anything.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import numpy as np

from sb3_extra_buffers.errors import ReentrantCallError

__all__ = ["RawCopier", "is_inside", "is_inside_method", "reads", "refuse", "writes"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# modules whose frames, between two frames of this package, are not the user's code
_NEUTRAL = ("contextlib.py", "functools.py")
_LOCK = type(threading.RLock())
_writers: set[CodeType] = set()


def writes(method: _Function) -> _Function:
    """Mark a method that sets a flag while it changes its object, for `is_inside`."""
    _writers.add(method.__code__)
    return method


#: Mark a method that reads without the lock that writers hold.
reads = writes


def _is_inside(matches: Callable[[CodeType, Any], bool]) -> bool:
    """Whether a frame of this package on the call stack ``matches(code, self)`` and has called the user's code."""
    frame: FrameType | None = sys._getframe(2)
    is_called_back = False
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            is_called_back = is_called_back or not code.co_filename.endswith(_NEUTRAL)
        elif is_called_back and code.co_argcount and matches(code, frame.f_locals.get(code.co_varnames[0])):
            return True
        frame = frame.f_back
    return False


def is_inside(fits: Callable[[Any], bool]) -> bool:
    """Whether a signal handler or a callback makes this call, in a method that `writes` or `reads` what ``fits``."""
    return _is_inside(lambda code, owner: code in _writers and fits(owner))


def is_inside_method(owner: object) -> bool:
    """Whether this call comes from a signal handler or a callback in any method of ``owner``."""
    return _is_inside(lambda _, other: other is owner)


def refuse(what: str) -> ReentrantCallError:
    """The error for a call that comes from inside another one."""
    return ReentrantCallError(
        f"{what} is in use by a call that has not returned: this call comes from a signal handler or a callback inside "
        "it. Nothing was changed; set a flag in the handler, and act on it after the step"
    )


class RawCopier:
    """Copies objects of this package as they are, without recovering them; each object is copied once.

    Locks become new ones; objects of other packages are not copied, except plain arrays and containers. A class says
    how it differs with a method ``raw_copy(copier)``, or ``after_raw_copy()`` for what must be made again.
    """

    def __init__(self) -> None:
        # original and copy by the id of the original; keeping the original alive keeps its id unique
        self.known: dict[int, tuple[Any, Any]] = {}

    def put(self, original: Any, copied: Any) -> None:
        """Use ``copied`` as the copy of ``original``."""
        self.known[id(original)] = original, copied

    def copy(self, value: Any) -> Any:
        """Return the copy of ``value``."""
        found = self.known.get(id(value))
        if found is not None:
            return found[1]
        kind = type(value)
        if isinstance(value, np.ndarray):
            return self._keep(value, np.array(value))
        if kind is dict:
            copied = self._keep(value, {})
            copied.update((key, self.copy(part)) for key, part in value.items())
            return copied
        if kind is list:
            items: list[Any] = self._keep(value, [])
            items.extend(map(self.copy, value))
            return items
        if isinstance(value, tuple):
            parts = [self.copy(part) for part in value]
            return self._keep(value, kind(*parts) if hasattr(kind, "_fields") else kind(parts))
        if kind is set:
            return self._keep(value, set(value))
        if kind is _LOCK:
            return self._keep(value, threading.RLock())
        module = kind.__module__
        if not module.startswith("sb3_extra_buffers.") or module.startswith(_SHARED):
            return value
        if hasattr(kind, "raw_copy"):
            return value.raw_copy(self)
        if not hasattr(value, "__dict__"):  # options, which never change
            return value
        copied = self.shell(value)
        for name, part in vars(value).items():
            vars(copied)[name] = self.copy(part)
        if hasattr(kind, "after_raw_copy"):
            copied.after_raw_copy()
        return copied

    def shell(self, value: Any) -> Any:
        """An object without attributes that is the copy of ``value``."""
        return self._keep(value, object.__new__(type(value)))

    def _keep(self, original: Any, copied: Any) -> Any:
        self.put(original, copied)
        return copied


# objects that never change once they are in use
_SHARED = ("sb3_extra_buffers.kernels", "sb3_extra_buffers.codecs")
