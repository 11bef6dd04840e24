"""``kill -9`` at any moment: what was saved, and every step of what lives in a file, is there."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sb3_extra_buffers import files
from tests.torture.running import Report, brief, exit_code, for_each_kind, parser
from tests.torture.saveables import Filed, Saveable, saveables, set_up
from tests.torture.subjects import Step, make_steps

#: kinds that are saved again and again, and kinds that live in a file
SAVED = ("delta", "gzip", "dict", "gpu-delta", "array-delta", "recording", "embodied", "torchrl-delta", "experience")
LIVE = ("mmap", "evict-mmap", "sequence-mmap", "service")

_N_STEPS = 400

Say = Callable[..., Any]


def digest(saveable: Saveable, made: Any) -> str:
    """A checksum of all that can be read."""
    total = 0
    for name, value in sorted(saveable.contents(made).items()):
        array = np.ascontiguousarray(value)
        data = repr(array.tolist()).encode() if array.dtype.kind in "OU" else array.tobytes()
        total = zlib.crc32(data, zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def save_for_ever(saveable: Saveable, place: Path, steps: list[Step], begin: int, seed: int, say: Say) -> None:
    """Add and save, and say so each time, until somebody ends it."""
    rng = random.Random(seed)
    made = saveable.load(place) if begin else saveable.make(place)
    number = begin
    say("ready")
    while number < len(steps) - 12:
        for _ in range(rng.choice([1, 1, 3, 10])):
            saveable.add(made, steps[number])
            number += 1
        say("begin", number, digest(saveable, made))
        saveable.save(made, place)
        say("saved", number)
    time.sleep(60)


def live_for_ever(saveable: Saveable, place: Path, steps: list[Step], begin: int, scratch: Path, say: Say) -> None:
    """Add to what lives in a file, and say what it will hold, and when it does."""
    twin = saveable.make(scratch)
    for step in steps[:begin]:
        saveable.add(twin, step)
    say("ready")
    made = _resume(saveable, place) if begin else saveable.make(place)
    for number in range(begin, len(steps)):
        saveable.add(twin, steps[number])
        say("begin", number + 1, digest(saveable, twin))
        saveable.add(made, steps[number])
        say("saved", number + 1)
    time.sleep(60)


def _resume(saveable: Saveable, place: Path) -> Any:
    if isinstance(saveable, Filed):
        return set_up(files.open_saved(saveable.path(place), mode="r+"))
    return saveable.load(place)


def torture(name: str, count: int, seed: int = 0) -> Report:
    """End a writer ``count`` times; each time the last whole state must be there."""
    saveable, rng = saveables()[name], random.Random(f"{seed} {name}")
    steps, report, begun = make_steps(seed, _N_STEPS), Report(f"kills {name}"), time.monotonic()
    with tempfile.TemporaryDirectory() as top, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # children shall find everything compiled
        warm = Path(top) / "warm"
        warm.mkdir()
        saveable.fill(warm, steps[:30])
        digest(saveable, saveable.load(warm))
        place, state = Path(top) / "0", (0, "")
        place.mkdir()
        for turn in range(count):
            outcome, line, state = _kill_once(saveable, place, Path(top), steps, state, rng)
            report.outcomes[outcome] += 1
            if line:
                report.examples.append(f"turn {turn}: {line}")
            if line or state[0] > _N_STEPS // 2:
                # a fresh start, after a defect or a long run
                shutil.rmtree(place)
                place, state = Path(top) / str(turn + 1), (0, "")
                place.mkdir()
    report.seconds = time.monotonic() - begun
    return report


def _kill_once(
    saveable: Saveable, place: Path, top: Path, steps: list[Step], state: tuple[int, str], rng: random.Random
) -> tuple[str, str, tuple[int, str]]:
    """What came of it, a line if that is a defect, and the state that is there: how many steps, and their digest."""
    scratch = top / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    if saveable.live:
        lines = run_and_kill(lambda say: live_for_ever(saveable, place, steps, state[0], scratch, say), rng)
    else:
        seed = rng.randrange(1 << 30)
        lines = run_and_kill(lambda say: save_for_ever(saveable, place, steps, state[0], seed, say), rng)
    failed = [line for line in lines if line.startswith("failed")]
    if failed:
        return "unnamed", failed[0][-400:], (0, "")
    announced = {line.split()[2]: int(line.split()[1]) for line in lines if line.startswith("begin")}
    saved = [int(line.split()[1]) for line in lines if line.startswith("saved")]
    least = saved[-1] if saved else state[0]
    try:
        found = digest(saveable, saveable.load(place))
    except Exception as error:
        if least == 0:
            return "nothing was saved yet", "", (0, "")
        return "inconsistent", f"state {least} was saved, but {brief(error)}", (0, "")
    if found == state[1] and not saved:
        return "as it was found", "", state
    if found not in announced:
        if least == 0:
            shutil.rmtree(place)  # an empty buffer, saved when it was created: the next turn creates one again
            return "nothing was saved yet", "", (0, "")
        return "wrong", f"state {least} was saved, something else is there", (0, "")
    number = announced[found]
    if number < least:
        return "wrong", f"state {least} was saved, {number} is there", (0, "")
    return ("the newest" if number == max(announced.values()) else "the one before"), "", (number, found)


def run_and_kill(write: Callable[[Say], None], rng: random.Random) -> list[str]:
    """What ``write`` said, in a process of its own, before that was ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # a copy of this process: nothing has to be imported or compiled again
        os.close(reading)
        try:
            write(lambda *words: os.write(writing, (" ".join(map(str, words)) + "\n").encode()))
        except BaseException:
            # it should never end by itself
            os.write(writing, ("failed " + traceback.format_exc().replace("\n", " | ") + "\n").encode())
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        first = said.readline()
        time.sleep(rng.random() ** 2 * 0.15)
        os.kill(child, signal.SIGKILL)
        rest = said.read()
    os.waitpid(child, 0)
    # the last line may have been cut as well
    return [line.decode() for line in (first + rest).splitlines(keepends=True) if line.endswith(b"\n")]


def main() -> int:
    args = parser(__doc__, 500, "kills, of all kinds together").parse_args()
    names = [args.only] if args.only else [name for name in (*SAVED, *LIVE) if name in saveables()]
    reports = for_each_kind("kills", names, lambda name, count: torture(name, count, args.seed), args.count)
    return exit_code(reports, args.examples)


if __name__ == "__main__":
    sys.exit(main())
