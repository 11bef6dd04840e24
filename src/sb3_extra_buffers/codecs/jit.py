"""`cached_njit`: numba's compiler, with a cache on disk if numba has a folder for one."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

__all__ = ["cached_njit"]

Function = TypeVar("Function", bound=Callable[..., Any])


def cached_njit(function: Function, **options: Any) -> Function:
    """Compile ``function`` with numba's ``options``, and cache it on disk where possible.

    Signals such as Ctrl-C wait until it is compiled, or loaded from the cache: after an exception in the middle, numba
    may refuse to compile anything else.
    """
    compiled: Any
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError:
        # neither the package nor the user's cache folder is writable, as in some containers
        compiled = njit(**options)(function)
    compile_now = compiled._compile_for_args
    compiled._compile_for_args = lambda *args, **kwargs: _without_signals(compile_now, args, kwargs)
    result: Function = compiled
    return result


def _without_signals(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``function``; Python's signal handlers run when it has returned."""
    if threading.current_thread() is not threading.main_thread():
        return function(*args, **kwargs)
    handlers: dict[int, Any] = {}
    received: list[int] = []
    try:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, lambda received_number, _: received.append(received_number))
        return function(*args, **kwargs)
    finally:
        for replaced, handler in handlers.items():
            signal.signal(replaced, handler)
        for arrived in received:
            handlers[arrived](arrived, sys._getframe())
