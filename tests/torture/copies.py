"""Pickles, deep copies and forks beside a thread that writes: each is the state between two steps."""

from __future__ import annotations

import copy
import faulthandler
import os
import pickle
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sb3_extra_buffers import files
from sb3_extra_buffers.errors import ExtraBuffersError
from tests.torture.running import Outcome, Report, brief, exit_code, parser, run_trials
from tests.torture.subjects import Contents, Step, Subject, difference, make_steps, subjects

KINDS = ("auto", "delta", "zstd", "none", "mmap", "evict", "prioritized", "sequence", "dict", "her", "rollout",
         "gpu-delta", "gpu-none", "array-delta", "record", "torchrl-delta")  # fmt: skip

_N_STEPS = 300
_EACH = 8  # copies of one trial
_PATIENCE = 5.0  # seconds that a child may take


class Writer:
    """Adds steps in a thread and counts them."""

    def __init__(self, subject: Subject, place: Path, steps: list[Step]) -> None:
        self.subject, self.steps = subject, steps
        self.buffer = subject.make(place)
        self.done = 0
        self.error: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> Writer:
        for _ in range(5):
            self._step()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()

    def _step(self) -> None:
        self.subject.prepare(self.buffer)
        self.subject.add(self.buffer, self.steps[self.done])
        self.done += 1

    def _write(self) -> None:
        try:
            while not self._stopping and self.done < len(self.steps):
                self._step()
        except BaseException as error:
            self.error = error


def model_states(subject: Subject, steps: list[Step], first: int, last: int) -> list[Contents]:
    """What a buffer holds after ``first`` to ``last`` steps, and after it was prepared for one more."""
    model, found = subject.make_model(), []
    for number in range(min(last, len(steps)) + 1):
        if number >= first:
            found.append({name: value.copy() for name, value in subject.contents(model).items()})
        if number < len(steps):
            subject.prepare(model)
            if number >= first:
                # a rollout that was reset is between two steps as well
                found.append({name: value.copy() for name, value in subject.contents(model).items()})
            subject.add(model, steps[number])
    return found


def judge(subject: Subject, steps: list[Step], copied: Any, first: int, last: int) -> str | None:
    """What is wrong with a copy that was made between these two counts of steps."""
    subject.check(copied)
    found = subject.contents(copied)
    states = model_states(subject, steps, first, last)
    found_out = [difference(found, expected) for expected in states]
    if None in found_out:
        return None
    # those with the same position say most
    position = int(found.get("pos", np.array(-1)))
    same = [what for what, state in zip(found_out, states, strict=True) if int(state.get("pos", -2)) == position]
    return f"none of the states after {first} to {last} steps: {[*same, *found_out][0]}"


def _pickled(buffer: Any) -> Any:
    return pickle.loads(pickle.dumps(buffer))


COPIES: dict[str, Callable[[Any], Any]] = {"pickle": _pickled, "deepcopy": copy.deepcopy}


def torture(name: str, how: str, count: int, seed: int = 0) -> Report:
    """Copy a buffer ``count`` times while it is written to."""
    subject, steps = subjects()[name], make_steps(seed, _N_STEPS)

    def set_up() -> None:
        sys.setswitchinterval(1e-5)

    def trial(number: int) -> Outcome:
        rng = random.Random(f"{seed} {name} {number}")
        outcomes, lines = Counter[str](), list[str]()
        with tempfile.TemporaryDirectory() as place, Writer(subject, Path(place), steps) as writer:
            for _ in range(_EACH):
                time.sleep(rng.random() * 0.002)
                first = writer.done
                if first >= len(steps):
                    break
                outcome, line = _fork_once(writer) if how == "fork" else _copy_once(writer, COPIES[how])
                outcomes[outcome] += 1
                lines += [line] if line else []
        if writer.error is not None:
            outcomes["inconsistent"] += 1
            lines.append(f"the writer: {brief(writer.error)}")
        return outcomes, lines

    return run_trials(f"{how} of {name}", trial, -(-count // 2), set_up=set_up, wanted=count, timeout=60)


def _copy_once(writer: Writer, make_copy: Callable[[Any], Any]) -> tuple[str, str]:
    first = writer.done
    try:
        copied = make_copy(writer.buffer)
    except Exception as error:
        return "unnamed", f"copying: {brief(error)}"
    # a step that is done may not be counted yet
    last = writer.done + 1
    try:
        what = judge(writer.subject, writer.steps, copied, first, last)
    except Exception as error:
        return "inconsistent", brief(error)
    return ("wrong", what) if what else ("whole", "")


def _fork_once(writer: Writer) -> tuple[str, str]:
    first = writer.done
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"whole"
        # says where it waits, should it wait for ever
        faulthandler.dump_traceback_later(_PATIENCE, file=writing, exit=True)
        try:
            what = judge(writer.subject, writer.steps, writer.buffer, first, writer.done + 1)
            if what is not None:
                said = f"wrong {what}".encode()
        except BaseException as error:
            said = f"inconsistent {brief(error)} {traceback.format_exc()[-80:]!r}".encode()
        os.write(writing, said)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        heard = pipe.read().decode()
    outcome, _, line = heard.partition(" ")
    _, status = os.waitpid(child, 0)
    if heard.startswith("Timeout"):
        return "hangs", "the child waits " + " | ".join(line.split("\n")[1:4])
    if status:
        return "crashes", f"the child ended with {status}"
    return outcome, line


def second_writer(name: str = "mmap", seed: int = 0) -> str | None:
    """Open a folder that is being written to once more; what went wrong."""
    subject, steps = subjects()[name], make_steps(seed, 30)
    with tempfile.TemporaryDirectory() as place:
        first, model = subject.make(Path(place)), subject.make_model()
        for step in steps[:10]:
            subject.add(first, step)
        child = os.fork()
        if child == 0:
            status = 3
            try:
                second = files.open_saved(Path(place) / "live", mode="r+")
                for step in steps[10:20]:
                    subject.add(second, step)
            except ExtraBuffersError:
                status = 0
            except BaseException:
                status = 2
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        try:
            files.open_saved(Path(place) / "live", mode="r+")
            here = False
        except ExtraBuffersError:
            here = True
        for step in steps[10:]:
            subject.add(first, step)
        for step in steps:
            subject.add(model, step)
        what = difference(subject.contents(files.load(Path(place) / "live")), subject.contents(model))
    if os.waitstatus_to_exitcode(status):
        return f"a second process was not refused by name: {os.waitstatus_to_exitcode(status)}"
    if not here:
        return "a second writer in the same process was not refused"
    return what


def main() -> int:
    args = parser(__doc__, 200, "copies of every kind, in every way").parse_args()
    names = [args.only] if args.only else [name for name in KINDS if name in subjects()]
    code = exit_code(torture(name, how, args.count, args.seed) for name in names for how in (*COPIES, "fork"))
    what = second_writer()
    print("a second writer of a folder: " + (what or "refused"), flush=True)
    return 1 if code or what else 0


if __name__ == "__main__":
    sys.exit(main())
