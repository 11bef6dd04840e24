"""Triton's interpreter without work that has no effect: it takes half of the time of the tests that run under it."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any


def speed_up() -> None:
    """Change the interpreter of this process; raises AttributeError if this version of Triton has another one."""
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    # it looks for integer overflows and then drops what it found, because its asserts are only active when debugging
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # it replaces the functions of triton.language at each call of a function, rather than once per launch
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    languages = interpreter.tl, interpreter.tl.core
    visible: dict[Any, set[int]] = {}
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        found = visible.get(function)
        if found is None:
            modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
            found = visible[function] = {id(module) for module in modules if module in languages}
        if found and found <= patched:
            return None  # nobody restores what a function inside of a kernel patches
        patched.update(found)
        return patch(function)

    def launch_anew(*args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return launch(*args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew
