"""`cached_njit`: numba's compiler, with a cache on disk if numba has a folder for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

__all__ = ["cached_njit"]

Function = TypeVar("Function", bound=Callable[..., Any])


def cached_njit(function: Function, **options: Any) -> Function:
    """Compile ``function`` with numba's ``options``, and cache it on disk where possible."""
    compiled: Function
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError:
        # neither the package nor the user's cache folder is writable, as in some containers
        compiled = njit(**options)(function)
    return compiled
