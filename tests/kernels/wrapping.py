"""Functions that only kernels call, as functions that Python can call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


# compiled once per process: compiling takes longer than the tests that call it
@functools.cache
def callable_from_python(function: Any, arguments: str = "") -> Callable[..., Any]:
    """Wrap a helper of the compiled kernels; ``arguments`` are the names of an intrinsic's, which has no signature."""
    from numba import njit

    names = arguments or ", ".join(inspect.signature(function.py_func).parameters)
    space = {"function": function}
    exec(f"def run({names}): return function({names})", space)
    run: Callable[..., Any] = njit(space["run"])
    return run
