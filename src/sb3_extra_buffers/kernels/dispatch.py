"""Selects the kernels: compiled ones if numba is installed, otherwise the reference kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy.typing as npt

Array = TypeVar("Array", bound=npt.NDArray[Any])


class FrameKernels(NamedTuple):
    """The frame store's kernels; `kernels.frames` defines what each one does."""

    bind_state: Callable[..., Any]
    write_frames: Callable[..., int]
    write_step: Callable[..., int]
    release_rows: Callable[..., None]
    read_frames: Callable[..., int]
    flat_indices: Callable[..., int]
    pack_block: Callable[..., int]
    split_stack: Callable[..., None]
    join_stack: Callable[..., None]
    compiled: bool


class TimelineKernels(NamedTuple):
    """The kernels of `stores.timeline`; `kernels.timeline` defines what each one does."""

    bind_tables: Callable[..., Any]
    write_rows: Callable[..., None]
    read_rows: Callable[..., int]
    read_pairs: Callable[..., int]
    compiled: bool


def as_contiguous(array: Array) -> Array:
    """Return ``array`` as C-contiguous and writable: numba would compile the kernels again for any other kind."""
    return array if array.flags.carray else array.copy()


def has_numba() -> bool:
    """Return whether numba is installed.

    Examples:
        >>> from sb3_extra_buffers.compressed import has_numba
        >>> method = "rle-jit" if has_numba() else "rle"
    """
    return importlib.util.find_spec("numba") is not None


def is_refusal(problem: BaseException) -> bool:
    """Whether numba raised ``problem``, caught by the caller of a kernel, because it does not take the arguments.

    Otherwise a signal handler raised it: handlers run when the kernel returns, inside the caller's ``try``.
    """
    assert problem.__traceback__ is not None
    # None for an error from C; the frame that was called otherwise
    called = problem.__traceback__.tb_next
    return called is None or called.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "numba"


def _drop_outdated(module: Any) -> None:
    """Delete cached kernels older than any source compiled into them; numba only checks the file that defines them."""
    kernels = (value for value in vars(module).values() if hasattr(value, "stats"))
    cache = next((kernel.stats.cache_path for kernel in kernels if kernel.stats.cache_path is not None), None)
    if cache is None:
        return
    package = Path(module.__file__).parents[1]
    sources = [*(package / "kernels").glob("*.py"), *(package / "codecs").glob("*.py")]
    newest = max(source.stat().st_mtime for source in sources)
    for index in Path(cache).glob(f"{Path(module.__file__).stem}.*.nbi"):
        with suppress(OSError):
            if index.stat().st_mtime <= newest:
                index.unlink()


@cache
def compiled_kernels(name: str) -> Any:
    """Import the module ``kernels.{name}_numba``, whose kernels are compiled when they are first called."""
    module = importlib.import_module(f"sb3_extra_buffers.kernels.{name}_numba")
    _drop_outdated(module)
    return module


@cache
def frame_kernels(compiled: bool | None = None) -> FrameKernels:
    """Return the frame store's kernels: compiled, reference, or (``None``) compiled if numba is installed."""
    if compiled is None:
        return frame_kernels(has_numba())
    module: Any = compiled_kernels("frames") if compiled else importlib.import_module(f"{__package__}.frames")
    functions = {name: getattr(module, name) for name in FrameKernels._fields if name != "compiled"}
    return FrameKernels(compiled=compiled, **functions)


@cache
def timeline_kernels(compiled: bool | None = None) -> TimelineKernels:
    """Return the kernels of `stores.timeline`, chosen as by `frame_kernels`."""
    if compiled is None:
        return timeline_kernels(has_numba())
    module: Any = step_kernels() if compiled else importlib.import_module("sb3_extra_buffers.kernels.timeline")
    functions = {name: getattr(module, name) for name in TimelineKernels._fields if name != "compiled"}
    return TimelineKernels(compiled=compiled, **functions)


@cache
def step_kernels() -> Any:
    """Return the module with `write_step` and `read_batch`, which exist only compiled; None without numba."""
    if not has_numba():
        return None
    return compiled_kernels("timeline")


@cache
def sum_tree_kernels() -> Any:
    """Return the compiled kernels of `_sb3.sum_tree`; None without numba."""
    if not has_numba():
        return None
    return compiled_kernels("sum_tree")


@cache
def window_kernels() -> Any:
    """Return the compiled kernels that plan and read windows; None without numba."""
    if not has_numba():
        return None
    return compiled_kernels("windows")
