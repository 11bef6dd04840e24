"""One Ctrl-C, or one failed allocation, at any point inside `add`: the buffer holds what it held, or the whole step.

``python -m tests.torture.interrupts`` does it at length. Every interrupt is named by its kind, seed and trial, so that
``--only KIND --trial N`` does it again.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import random
import signal
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.torture.running import Outcome, Report, brief, exit_code, parser, run_trials
from tests.torture.subjects import Contents, Step, Subject, difference, make_steps, subjects, use_reference_kernels

#: frames that an interrupt may land in: ours, and what we call to add. TorchRL's own are not ours to mend
_TRACED = ("sb3_extra_buffers", "stable_baselines3", "sb3_contrib", "numpy/")
#: interrupts of one trial, in consecutive steps
_EACH = 3
#: kinds that are run with the reference kernels as well
REFERENCE = ("delta", "zstd", "mmap", "array-delta")


@functools.cache
def _exits(code: types.CodeType) -> frozenset[int]:
    """Offsets of the bytecodes that call ``__exit__`` at the end of a ``with``."""
    # Python handles no signals there: an exception would leave a lock acquired, and threads of later tests would wait
    # for it for ever
    found: set[int] = set()
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("PRECALL", "CACHE", "NOP")]
    for i, each in enumerate(steps):
        names = [step.opname for step in steps[i - 3 : i]]
        is_exit = (
            names and steps[i - 3].argval is None and names in (["LOAD_CONST"] * 3, ["LOAD_CONST", *["DUP_TOP"] * 2])
        )
        if is_exit and each.opname.startswith("CALL") and each.arg in (2, 3):
            first = i - 4 if i > 3 and steps[i - 4].opname in ("SWAP", "ROT_TWO", "POP_BLOCK") else i - 3
            found.update(range(steps[first].offset, each.offset + 1))
    return frozenset(found)


class Injector:
    """Raises ``error`` at the ``at``-th bytecode that runs in files with one of ``inside`` in their paths.

    Counts these bytecodes if ``at`` is 0.
    """

    def __init__(self, at: int = 0, error: BaseException | None = None, inside: tuple[str, ...] = _TRACED) -> None:
        self.at, self.error, self.count = at, error, 0
        self.where, self._inside = "", inside
        self._numpy_errors = np.errstate()

    def __enter__(self) -> Injector:
        # NumPy itself changes how it handles errors for a while; interrupted there, it would do so in later tests too
        self._numpy_errors.__enter__()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._numpy_errors.__exit__(None, None, None)

    def _enter_frame(self, frame: Any, event: str, arg: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in self._inside):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "opcode":
            self.count += 1
            is_due = 0 < self.at <= self.count and self.where == ""
            if is_due and self.error is not None and frame.f_lasti not in _exits(frame.f_code):
                name = frame.f_code.co_filename.rpartition("sb3_extra_buffers/")[2].rpartition("site-packages/")[2]
                self.where = f"{name}:{frame.f_lineno}"
                raise self.error
        return self._step


def interrupt_at(position: int, action: Callable[[], Any], inside: str = "sb3_extra_buffers/") -> Injector:
    """Run ``action`` with a Ctrl-C at the ``position``-th bytecode of the package, or of ``inside`` it."""
    with contextlib.suppress(KeyboardInterrupt), Injector(position, KeyboardInterrupt(), (inside,)) as injector:
        action()
    return injector


class Costs:
    """What `add` takes for each of some steps, found in a run that is not interrupted."""

    def __init__(self, subject: Subject, steps: list[Step]) -> None:
        self.opcodes: list[int] = []
        self.seconds: list[float] = []
        with tempfile.TemporaryDirectory() as place:
            for traced in (False, True):
                buffer = subject.make(Path(place) / str(traced))
                for step in steps:
                    subject.prepare(buffer)
                    if traced:
                        with Injector() as counter:
                            subject.add(buffer, step)
                        self.opcodes.append(counter.count)
                    else:
                        begun = time.perf_counter()
                        subject.add(buffer, step)
                        self.seconds.append(time.perf_counter() - begun)


class Trial:
    """A buffer and its model, driven to some step, interrupted there and compared."""

    def __init__(self, subject: Subject, steps: list[Step], place: Path) -> None:
        self.subject, self.steps, self.place = subject, steps, place
        self.buffer, self.model = subject.make(place), subject.make_model()
        self.at = 0
        self.outcomes: Counter[str] = Counter()
        self.lines: list[str] = []

    def go_to(self, at: int) -> None:
        while self.at < at:
            self.add_clean()

    def add_clean(self) -> None:
        step = self.steps[self.at]
        for each in (self.buffer, self.model):
            self.subject.prepare(each)
            self.subject.add(each, step)
        self.at += 1

    def interrupted(self, where: str) -> bool:
        """Compare after an interrupt in the step that is next; whether all is well."""
        before = self.subject.contents(self.model)
        after_model = self.model
        try:
            found = self.subject.contents(self.buffer)
            self.subject.check(self.buffer)
        except Exception as error:
            return self._fault("inconsistent", f"{where}: then {brief(error)}")
        why_not_before = difference(found, before)
        if why_not_before is None and self.subject.evicts and int(found["size"]) != self.size_before:
            why_not_before = f"size is {found['size']}, was {self.size_before}"
        if why_not_before is None:
            self.outcomes["before"] += 1
            return True
        self.subject.add(after_model, self.steps[self.at])
        self.at += 1
        why_not_after = difference(found, self.subject.contents(after_model))
        if why_not_after is None:
            self.outcomes["after"] += 1
            return True
        return self._fault("wrong", f"{where}: not as before ({why_not_before}), not as after ({why_not_after})")

    def interrupt(self, injector: Injector) -> bool:
        """Interrupt the next step by bytecode; False if something is wrong."""
        self._prepare()
        try:
            with injector:
                self.subject.add(self.buffer, self.steps[self.at])
        except BaseException as error:
            if injector.where == "":
                return self._fault("inconsistent", f"add failed by itself: {brief(error)}")
        else:
            if injector.where == "":
                self.subject.add(self.model, self.steps[self.at])
                self.at += 1
                return True
        return self.interrupted(f"step {self.at}, {type(injector.error).__name__} at {injector.where}")

    def interrupt_later(self, seconds: float) -> bool:
        """Interrupt the next step by a signal; False if something is wrong."""
        self._prepare()
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            self.subject.add(self.buffer, self.steps[self.at])
            signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:  # SystemError, where it came while compiled code called back
            signal.setitimer(signal.ITIMER_REAL, 0)
            return self.interrupted(f"step {self.at}, signal, {brief(error)}") and self._others_can_read()
        self.subject.add(self.model, self.steps[self.at])
        self.at += 1
        return True

    def _prepare(self) -> None:
        for each in (self.buffer, self.model):
            self.subject.prepare(each)
        self.size_before = int(self.buffer.size()) if self.subject.evicts else 0

    def _others_can_read(self) -> bool:
        """Whether no lock was left behind: another thread must be able to read."""
        found: list[Contents] = []
        reader = threading.Thread(target=lambda: found.append(self.subject.contents(self.buffer)), daemon=True)
        reader.start()
        reader.join(5)
        if reader.is_alive() or not found:
            return self._fault("inconsistent", f"step {self.at}: another thread cannot read")
        return True

    def finish(self) -> None:
        """Two more steps and a batch, as if nothing had happened."""
        try:
            for _ in range(2):
                if self.at < len(self.steps):
                    self.add_clean()
            self.subject.check(self.buffer)
            found, expected = self.subject.contents(self.buffer), self.subject.contents(self.model)
            what = difference(found, expected)
            ours, theirs = (self.subject.batch(each, 5) for each in (self.buffer, self.model))
        except Exception as error:
            self._fault("inconsistent", f"steps after an interrupt: {brief(error)}")
            return
        if what is None and any((a != b).any() for a, b in zip(ours, theirs, strict=True)):
            what = "samples differ"
        if what is not None:
            self._fault("wrong", f"steps after an interrupt: {what}")
        elif self.subject.in_file:
            self._look_at_file(found)

    def _look_at_file(self, found: Contents) -> None:
        from sb3_extra_buffers.files import load

        try:
            what = difference(self.subject.contents(load(self.place / "live")), found)
        except Exception as error:
            self._fault("inconsistent", f"the file after an interrupt: {brief(error)}")
            return
        if what is not None:
            self._fault("wrong", f"the file after an interrupt: {what}")

    def _fault(self, outcome: str, line: str) -> bool:
        self.outcomes[outcome] += 1
        self.lines.append(line)
        return False


def start_of(rng: random.Random, costs: Costs) -> int:
    """A step to begin with; those that do much are more likely."""
    last = len(costs.opcodes) - 2 - _EACH
    if rng.random() < 0.5:
        return rng.choices(range(last), costs.opcodes[:last])[0]
    if rng.random() < 0.3:
        longest = max(range(last), key=costs.opcodes.__getitem__)
        return max(longest - rng.randrange(_EACH), 0)
    return rng.randrange(last)


def torture(
    name: str, count: int, seed: int = 0, signals: float = 0.25, reference: bool = False, only: int | None = None
) -> Report:
    """Interrupt `add` ``count`` times, ``signals`` of them by real ones."""
    subject, steps = subjects()[name], make_steps(seed, 64)
    costs: list[Costs] = []

    def set_up() -> None:
        if reference:
            use_reference_kernels()
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        costs[:] = [Costs(subject, steps)]

    def trial(number: int) -> Outcome:
        if only is not None and number != only:
            return Counter(), []
        rng = random.Random(f"{seed} {name} {number}")
        with tempfile.TemporaryDirectory() as place:
            run = Trial(subject, steps, Path(place))
            try:
                run.go_to(start_of(rng, costs[0]))
            except Exception as error:
                return Counter({"inconsistent": 1}), [f"add without an interrupt: {brief(error)}"]
            by_signal = rng.random() < signals
            for _ in range(_EACH * (3 if by_signal else 1)):
                if run.at >= len(steps) - 2:
                    break
                if by_signal:
                    well = run.interrupt_later(max(rng.random() * costs[0].seconds[run.at] * 1.2, 1e-6))
                else:
                    raised = MemoryError("injected") if rng.random() < 0.25 else KeyboardInterrupt()
                    well = run.interrupt(Injector(rng.randint(1, max(costs[0].opcodes[run.at], 1)), raised))
                if not well:
                    break
            else:
                run.finish()
                return run.outcomes, run.lines
        return run.outcomes, run.lines

    label = f"interrupts {name}" + (" (reference kernels)" if reference else "")
    # more trials than needed: signals may miss
    return run_trials(label, trial, count * 2, set_up=set_up, wanted=count, timeout=60)


def reports(names: list[str], count: int, seed: int, only: int | None) -> Iterator[Report]:
    for name in names:
        yield torture(name, count, seed, only=only)
        if name in REFERENCE:
            yield torture(name, max(count // 10, 1), seed, reference=True, only=only)


def main() -> int:
    args = parser(__doc__, 1000, "interrupts of every kind").parse_args()
    names = [args.only] if args.only else list(subjects())
    return exit_code(reports(names, args.count, args.seed, args.trial), args.examples)


if __name__ == "__main__":
    sys.exit(main())
