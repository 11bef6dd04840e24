"""Which kernels run: compiled where numba is installed, the plain ones where it is not."""

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
    """The frame store's kernels; `sb3_extra_buffers.kernels.frames` says what each one means."""

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


def as_contiguous(array: Array) -> Array:
    """``array`` in one piece that can be written: for other kinds numba would compile the kernels anew."""
    return array if array.flags.carray else array.copy()


def has_numba() -> bool:
    """Return whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def _forget_outdated(module: Any) -> None:
    """Drop cached kernels that are older than any source compiled into them: numba looks at one file of them only."""
    package = Path(module.__file__).parents[1]
    sources = [*(package / "kernels").glob("*.py"), *(package / "codecs").glob("*.py")]
    newest = max(source.stat().st_mtime for source in sources)
    for index in Path(module.read_frames.stats.cache_path).glob("frames_numba.*.nbi"):
        with suppress(OSError):
            if index.stat().st_mtime <= newest:
                index.unlink()


@cache
def _load(compiled: bool) -> FrameKernels:
    if compiled:
        module: Any = importlib.import_module("sb3_extra_buffers.kernels.frames_numba")
        _forget_outdated(module)
    else:
        module = importlib.import_module("sb3_extra_buffers.kernels.frames")
    functions = {name: getattr(module, name) for name in FrameKernels._fields if name != "compiled"}
    return FrameKernels(compiled=compiled, **functions)


@cache
def frame_kernels(compiled: bool | None = None) -> FrameKernels:
    """Kernels of the frame store; ``None`` means compiled if numba is there."""
    return _load(has_numba() if compiled is None else compiled)
