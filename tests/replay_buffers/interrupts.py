"""Exceptions raised inside a call, at every bytecode in turn."""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

# where a call spends its bytecodes; what stores do is theirs to get right, and is tested there
_INSIDE = tuple(os.sep + part + os.sep for part in ("replay_buffers", "_torchrl", "torchrl"))


class _Interrupt:
    """Raises ``error`` at bytecode ``at``; counts them if that is None."""

    def __init__(self, at: int | None, error: BaseException | None) -> None:
        self.at, self.error = at, error
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in _INSIDE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti not in _sheltered(frame.f_code):
            self.count += 1
            if self.at is not None and self.count >= self.at and self.error is not None:
                error, self.error = self.error, None
                raise error
        return self


@functools.cache
def _sheltered(code: CodeType) -> frozenset[int]:
    """Offsets between two calls where context managers are entered and left: Python takes no signals there."""
    found, sheltered = list(dis.get_instructions(code)), set()
    for place, instruction in enumerate(found):
        if place and found[place - 1].opname in ("BEFORE_WITH", "LOAD_SPECIAL"):
            sheltered.add(instruction.offset)
        nothing = [part.opname == "LOAD_CONST" and part.argval is None for part in found[place : place + 3]]
        if len(nothing) == 3 and all(nothing):
            # three times None is what __exit__ is called with
            sheltered |= {part.offset for part in found[max(place - 1, 0) : place + 6]}
    return frozenset(sheltered)


def count_bytecodes(call: Callable[[], Any]) -> int:
    """How many bytecodes ``call`` runs."""
    counter = _Interrupt(None, None)
    _run(counter, call)
    return counter.count


def interrupt(call: Callable[[], Any], at: int, error: BaseException) -> None:
    """Run ``call`` and raise ``error`` at bytecode ``at``, whatever those on the way make of it."""
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
    """``n_points`` bytecodes of ``total``, evenly spread, the first and the last among them."""
    return iter(sorted({1 + place * (total - 1) // max(n_points - 1, 1) for place in range(n_points)}))
