"""Run trials in a forked child, so that a crash of compiled code is counted and not fatal."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

#: What a trial reports: how many states it looked at, by outcome, and a line for each defect.
Outcome = tuple[Counter[str], list[str]]

# in the order in which a summary names them
DEFECTS = ("wrong", "inconsistent", "unnamed", "crashes", "hangs")


@dataclass
class Report:
    """Counts of one kind of subject; `defects` must be 0."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def defects(self) -> int:
        """How many states were not as they must be."""
        return sum(self.outcomes[name] for name in DEFECTS)

    @property
    def states(self) -> int:
        """How many states were looked at."""
        return self.outcomes.total()

    def summary(self) -> str:
        """``N states, 0 wrong, 0 inconsistent, 0 crashes`` and the rest."""
        named = [name for name in DEFECTS if name in ("wrong", "inconsistent", "crashes") or self.outcomes[name]]
        counts = ", ".join(f"{self.outcomes[name]} {name}" for name in named)
        rest = ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()) if name not in DEFECTS)
        return f"{self.name}: {self.states} states, {counts} ({rest}) in {self.seconds:.1f} s"

    def print(self, n_examples: int = 3) -> None:
        """The summary, and a few defects."""
        print(self.summary(), flush=True)
        for line in self.distinct()[:n_examples]:
            print("    " + line, flush=True)

    def distinct(self) -> list[str]:
        """Examples of defects, one for each place in the code; the most frequent first."""
        found: dict[str, list[str]] = {}
        for line in self.examples:
            # what was changed to get there is in brackets; a trial has a number
            place = re.sub(r"\d+", "", line.partition(": ")[2].partition(" [")[0].rpartition(" at ")[2])
            found.setdefault(place, []).append(line)
        return [f"{len(lines)}x {lines[0]}" for lines in sorted(found.values(), key=len, reverse=True)]

    def check(self) -> None:
        """Raise if there was any defect, or nothing was looked at."""
        if self.defects or not self.states:
            raise AssertionError("\n  ".join([self.summary(), *self.distinct()[:5]]))


def parser(description: str | None, count: int, counted: str) -> argparse.ArgumentParser:
    """The options that every one of these programs has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--count", type=int, default=count, help=counted)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--only", help="one kind")
    made.add_argument("--trial", type=int, help="one trial of it, where trials are numbered")
    made.add_argument("--examples", type=int, default=3, help="defects to print for each kind")
    return made


def exit_code(reports: Iterable[Report], n_examples: int = 3) -> int:
    """Print reports as they come; 1 if any of them has a defect."""
    defects = 0
    for report in reports:
        report.print(n_examples)
        defects += report.defects
    return 1 if defects else 0


def for_each_kind(what: str, names: list[str], torture: Callable[[str, int], Report], count: int) -> Iterator[Report]:
    """``torture(name, count / len(names))`` for all names; one that cannot be set up is a defect, not the end."""
    for name in names:
        try:
            yield torture(name, -(-count // len(names)))
        except Exception as error:
            lines = traceback.format_exception_only(type(error), error)
            yield Report(f"{what} {name}", Counter({"unnamed": 1}), [f"set up: {''.join(lines).strip()}"])


def run_trials(
    name: str,
    trial: Callable[[int], Outcome],
    count: int,
    *,
    set_up: Callable[[], Any] | None = None,
    wanted: int | None = None,
    timeout: float = 20.0,
    quiet: bool = False,
) -> Report:
    """Call ``trial(0)`` to ``trial(count - 1)`` in a child; go on behind a trial that ended or stopped it.

    Args:
        name: What the report is called.
        trial: Must depend on its number alone.
        count: How many.
        set_up: Is called in every new child first.
        wanted: Stop as soon as this many states were looked at.
        timeout: Seconds that one trial may take.
        quiet: Print no progress.
    """
    from tests.torture.subjects import warm_up

    warm_up()
    report, begun, first = Report(name), time.monotonic(), 0
    while first < count and (wanted is None or report.states < wanted):
        first = _run_child(report, trial, first, count, set_up, wanted, timeout, quiet)
    report.seconds = time.monotonic() - begun
    _progress(quiet, "")
    return report


def _run_child(
    report: Report,
    trial: Callable[[int], Outcome],
    first: int,
    count: int,
    set_up: Callable[[], Any] | None,
    wanted: int | None,
    timeout: float,
    quiet: bool,
) -> int:
    """The number of the trial to go on with."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_child(writing, trial, first, count, set_up)
    os.close(writing)
    number, rest, patience = first, b"", timeout + 60.0
    hung = stopped = False
    while not (hung or stopped):
        ready, _, _ = select.select([reading], [], [], patience)
        if not ready:
            hung = True
            break
        data = os.read(reading, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            patience = timeout
            if "ready" in said:
                continue
            report.outcomes.update(said["outcomes"])
            report.examples += [f"trial {number}: {each}" for each in said["lines"]]
            number += 1
            _progress(
                quiet, f"{report.name}: {number}/{count} trials, {report.states} states, {report.defects} defects"
            )
            stopped = stopped or (wanted is not None and report.states >= wanted)
    os.close(reading)
    if hung or stopped:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if stopped or (not hung and os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0):
        return count
    if hung:
        report.outcomes["hangs"] += 1
        report.examples.append(f"trial {number}: nothing was heard for {patience:.0f} s")
    elif os.WIFSIGNALED(status):
        report.outcomes["crashes"] += 1
        report.examples.append(f"trial {number}: the process ended by {signal.Signals(os.WTERMSIG(status)).name}")
    else:
        raise RuntimeError(f"{report.name}: trial {number} failed: {rest.decode()}")
    return number + 1


def _be_child(
    writing: int, trial: Callable[[int], Outcome], first: int, count: int, set_up: Callable[[], Any] | None
) -> None:
    status = 1
    # collect only what the trial creates, not what other tests left in this process
    gc.freeze()
    try:
        # only what a trial reports is of interest
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        if set_up is not None:
            set_up()
        _say(writing, {"ready": True})
        for number in range(first, count):
            outcomes, lines = trial(number)
            _say(writing, {"outcomes": dict(outcomes), "lines": [line[:600] for line in lines]})
        status = 0
    except BaseException:
        # a fault of the harness itself, which the parent raises
        os.write(writing, traceback.format_exc().replace("\n", " | ").encode())
    finally:
        os._exit(status)


def _say(writing: int, words: dict[str, Any]) -> None:
    data = json.dumps(words).encode() + b"\n"
    while data:
        data = data[os.write(writing, data) :]


def _progress(quiet: bool, line: str) -> None:
    if not quiet and sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def brief(error: BaseException) -> str:
    """An error and the last line of our code that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "sb3_extra_buffers" in frame.filename] or frames
    at = f" at {ours[-1].filename.rpartition('sb3_extra_buffers/')[2]}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}: {str(error)[-400:] if isinstance(error, RuntimeError) else str(error)[:160]}{at}"
