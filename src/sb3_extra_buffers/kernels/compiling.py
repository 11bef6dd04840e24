"""How the compiled kernels are built. Imports numba: only the compiled half of `kernels` may import this module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from numba import njit
from numba.extending import overload, register_jitable

Function = TypeVar("Function", bound=Callable[..., Any])

# no parallel=True: numba's default threading layer aborts when two threads enter it at the same time
_OPTIONS: dict[str, Any] = {"nogil": True}
_replaced: set[Callable[..., Any]] = set()


def inner(function: Function) -> Function:
    """Compile a helper into the kernels that call it. No cache entry: that would outlive changes to what it calls."""
    compiled: Function = njit(**_OPTIONS)(function)
    return compiled


def inlined(function: Function) -> Function:
    """`inner` that numba copies into its caller: a call counts references to every array of the state, some 30 ns."""
    compiled: Function = njit(inline="always", **_OPTIONS)(function)
    return compiled


def entry(function: Function) -> Function:
    """Compile a kernel that Python calls, and cache it on disk.

    Call it with one combination of array types only (`as_contiguous`): two processes that cache different signatures
    at the same time can store one under the name of the other. Name every argument: typing ``*args`` takes 200 us.
    """
    compiled: Function = njit(cache=True, **_OPTIONS)(function)
    return compiled


def replaces(reference: Callable[..., Any]) -> Callable[[Function], Function]:
    """Compile the decorated function where compiled code calls ``reference``."""

    def decorate(function: Function) -> Function:
        def choose(*args: Any) -> Function:
            return function

        choose.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # numba compares the two
        overload(reference, jit_options={"nogil": True})(choose)
        _replaced.add(reference)
        return function

    return decorate


def use_reference(module: ModuleType, inline: Callable[..., Any] | None = None) -> None:
    """Compile the functions of a module of reference kernels as they are, except those that were replaced before.

    ``inline`` names one that numba should copy into its caller: each call of the others counts references to the
    arrays of the state that they use, some 30 ns.
    """
    for function in vars(module).values():
        if inspect.isfunction(function) and function.__module__ == module.__name__ and function not in _replaced:
            register_jitable(inline="always" if function is inline else "never", **_OPTIONS)(function)
