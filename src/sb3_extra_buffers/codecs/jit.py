"""`cached_njit`: numba's compiler, with a cache on disk if numba has a folder for one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from numba import njit

__all__ = ["cached_njit", "without_signals"]

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
    compiled._compile_for_args = partial(without_signals, compile_now)
    result: Function = compiled
    return result


def without_signals(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``; Python's signal handlers run when it has returned, each once."""
    if threading.current_thread() is not threading.main_thread():
        return function(*args, **kwargs)
    process = os.getpid()
    handlers: dict[int, Any] = {}
    received: list[int] = []

    def wait(number: int, frame: Any) -> None:
        if os.getpid() != process:
            # forked by another thread meanwhile: this process does not return from here
            handlers[number](number, frame)
        elif number not in received:
            received.append(number)

    try:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, wait)
        return function(*args, **kwargs)
    finally:
        _run_handlers(handlers, wait, iter(received))


def _run_handlers(handlers: dict[int, Any], replacement: Callable[..., Any], received: Iterator[int]) -> None:
    """Put the ``handlers`` back, then run those of the signals ``received``; all of them, whichever raise."""
    try:
        for number, handler in handlers.items():
            if signal.getsignal(number) is replacement:
                signal.signal(number, handler)
        for number in received:
            handlers[number](number, sys._getframe())
    except BaseException:
        _run_handlers(handlers, replacement, received)
        raise
