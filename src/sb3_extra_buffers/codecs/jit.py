"""`cached_njit`: numba's compiler, with a cache on disk if numba has a folder for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from numba import njit

__all__ = ["cached_njit"]

Function = TypeVar("Function", bound=Callable[..., Any])


def cached_njit(function: Function, **options: Any) -> Function:
    """Compile ``function`` with numba's ``options``, and cache it on disk where possible.

    Compiling, or loading from the cache, is not interrupted by signals: after an exception in its middle, numba may
    refuse to compile anything else. Ctrl-C takes effect at once; compiling goes on in its thread.
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
    """Call ``function`` where no signal handler runs: in a thread other than the main one."""
    if threading.current_thread() is not threading.main_thread():
        return function(*args, **kwargs)
    future: Future[Any] = Future()
    try:
        threading.Thread(target=_run, args=(future, function, args, kwargs), name="compile-kernel").start()
    except RuntimeError:
        # no thread can be started while the interpreter ends
        return function(*args, **kwargs)
    return future.result()


def _run(future: Future[Any], function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
