"""Raise an exception at any bytecode of a call."""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

# folders of the code to interrupt; stores have interrupt tests of their own
_INSIDE = tuple(os.sep + part + os.sep for part in ("replay_buffers", "_torchrl", "torchrl"))


class _Interrupt:
    """A trace function that raises ``error`` at bytecode ``at``, or only counts if that is None."""

    def __init__(self, at: int | None, error: BaseException | None) -> None:
        self.at, self.error = at, error
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in _INSIDE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti not in _uninterruptible(frame.f_code):
            self.count += 1
            if self.at is not None and self.count >= self.at and self.error is not None:
                error, self.error = self.error, None
                raise error
        return self


@functools.cache
def _uninterruptible(code: CodeType) -> frozenset[int]:
    """Return the offsets where context managers are entered and left: Python handles no signals there."""
    instructions, offsets = list(dis.get_instructions(code)), set()
    for i, instruction in enumerate(instructions):
        if i and instructions[i - 1].opname in ("BEFORE_WITH", "LOAD_SPECIAL"):
            offsets.add(instruction.offset)
        is_none = [part.opname == "LOAD_CONST" and part.argval is None for part in instructions[i : i + 3]]
        if len(is_none) == 3 and all(is_none):
            # the arguments of __exit__
            offsets |= {part.offset for part in instructions[max(i - 1, 0) : i + 6]}
    return frozenset(offsets)


def count_bytecodes(call: Callable[[], Any]) -> int:
    """Return how many bytecodes ``call`` runs."""
    counter = _Interrupt(None, None)
    _run(counter, call)
    return counter.count


def interrupt(call: Callable[[], Any], at: int, error: BaseException) -> None:
    """Run ``call`` and raise ``error`` at bytecode ``at``; ignore what ``call`` raises."""
    with contextlib.suppress(Exception, KeyboardInterrupt):
        _run(_Interrupt(at, error), call)


def _run(tracer: _Interrupt, call: Callable[[], Any]) -> None:
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    finally:
        sys.settrace(before)


def points(total: int, n_points: int) -> Iterator[int]:
    """Return ``n_points`` of ``total`` bytecodes, evenly spaced, including the first and the last."""
    return iter(sorted({1 + i * (total - 1) // max(n_points - 1, 1) for i in range(n_points)}))
