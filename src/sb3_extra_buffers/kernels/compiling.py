"""How the compiled kernels are built. Imports numba: only the compiled half of `kernels` may import this module."""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np
from numba import njit, types
from numba.core import event
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from sb3_extra_buffers.codecs.jit import cached_njit

Function = TypeVar("Function", bound=Callable[..., Any])

# no parallel=True: numba's default threading layer aborts when two threads enter it at the same time.
# error_model: kernels never divide by zero, and code that raises takes long to compile
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_compiled: dict[Callable[..., Any], Any] = {}
_slow: list[Any] = []
_logger = logging.getLogger("sb3_extra_buffers")


class _LinkedLibrary(JITCodeLibrary):
    """LLVM code that only exists to be linked into kernels.

    numba optimises every function and emits machine code for it, and again for each function above it that calls it.
    For helpers that only kernels call, that is three quarters of the time.
    """

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """The environment is for code that calls Python, which kernels do not."""


class _LinkedCompiler(Compiler):
    def __init__(self, typing_context: Any, target_context: Any, library: Any, *options: Any) -> None:
        library = _LinkedLibrary(target_context.codegen(), "inner")
        super().__init__(typing_context, target_context, library, *options)


def inner(function: Function) -> Function:
    """Compile a helper into the kernels that call it; Python cannot call it.

    No cache entry: that would outlive changes to what it calls.
    """
    options = {"no_cfunc_wrapper": True, "no_cpython_wrapper": True, "pipeline_class": _LinkedCompiler, **_OPTIONS}
    compiled: Any = njit(**options)(function)
    find_template = compiled.get_call_template
    # numba would compile it again for each literal argument
    compiled.get_call_template = lambda args, kws: find_template(tuple(map(types.unliteral, args)), kws)
    return compiled


def entry(function: Function, **options: Any) -> Function:
    """Compile a kernel that Python calls, and cache it on disk.

    Call it with one combination of array types only (`as_contiguous`): two processes that cache different signatures
    at the same time can store one under the name of the other. Name every argument: typing ``*args`` takes 200 us.
    """
    return cached_njit(function, no_cfunc_wrapper=True, **(_OPTIONS | options))


def slow_entry(function: Function) -> Function:
    """`entry` for a kernel that takes seconds to compile: `_Listener` announces it."""
    compiled: Any = entry(function)
    _slow.append(compiled)
    return compiled


class _Listener(event.Listener):
    """Logs once that slow kernels are being compiled, and pauses Python's garbage collector, a tenth of that time."""

    def __init__(self) -> None:
        self._announced = self._collects = False

    def on_start(self, started: Any) -> None:
        kernel = started.data["dispatcher"]
        if not any(kernel is each for each in _slow):
            return
        if not self._announced:
            self._announced = True
            # a warning, because nothing less is shown by default
            cache = kernel.stats.cache_path
            _logger.warning(
                "sb3-extra-buffers is compiling its kernels: about 5 seconds, %s. "
                "Call sb3_extra_buffers.compressed.warmup() to do this ahead of time.",
                f"once per installation (cached in {cache})"
                if cache
                else "in every process, because no cache folder is writable (set NUMBA_CACHE_DIR to one that is)",
            )
        self._collects = gc.isenabled()
        gc.disable()

    def on_end(self, ended: Any) -> None:
        if self._collects and any(ended.data["dispatcher"] is each for each in _slow):
            gc.enable()


event.register("numba:compile", _Listener())


def replaces(reference: Callable[..., Any]) -> Callable[[Function], Function]:
    """Let compiled code call the decorated function in place of ``reference``."""

    def decorate(function: Function) -> Function:
        _compiled[reference] = function
        return function

    return decorate


def use_reference(module: ModuleType) -> None:
    """Compile the functions of a module of reference kernels as they are, except those that were replaced before."""
    # as numba's own ``int`` does, for integers; that one is another function to compile
    namespace = dict(vars(module)) | {"int": np.int64}
    functions = [value for value in namespace.values() if inspect.isfunction(value)]
    for function in functions:
        if function.__module__ == module.__name__ and function not in _compiled:
            copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)
            copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
            _compiled[function] = inner(copy)
    for name, value in vars(module).items():
        if inspect.isfunction(value):
            namespace[name] = _compiled.get(value, value)


def compiled(reference: Function) -> Function:
    """The compiled version of a reference function."""
    function: Function = _compiled[reference]
    return function
