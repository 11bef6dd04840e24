"""Files with other contents and right checksums, as an attacker could make them: a named error, or a sound buffer.

``python -m tests.torture.forgery`` does it at length. Nothing else in the file system may change, nothing may run, and
no more than 2 GB of memory may be taken.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sb3_extra_buffers.errors import ExtraBuffersError
from tests.torture.containers import Tree, containers_of, forge, read_tree, write_tree
from tests.torture.running import Outcome, Report, brief, exit_code, for_each_kind, parser, run_trials
from tests.torture.saveables import Saveable, look_at_folder, saveables
from tests.torture.subjects import make_steps

_MEMORY = 2 << 30
_CANARY = b"nobody may touch this" * 500
_ALLOWED = {"saved", "saved.rec", "live", "out", "out.rec", "repaired", "canary", "canaries"}


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def plant(path: Path, place: Path, rng: random.Random) -> str:
    """Hide a pickle or a link among the files."""
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    if not files:
        return "nothing"
    victim = rng.choice(files)
    if rng.random() < 0.5:
        names = ["pickle.pkl", "storage.pkl", "metadata.pkl", "other.pickle", "_td.pickle", "meta.pkl"]
        folder = victim.parent
        if rng.random() < 0.3 and folder != place:
            folder = folder / rng.choice(["sub", "storage", "_storage"])
            folder.mkdir(exist_ok=True)
        target = folder / rng.choice(names) if rng.random() < 0.8 and folder != place else victim
        target.write_bytes(pickle.dumps(Bomb(place / "ran")))
        return f"a pickle as {target.relative_to(place)}"
    victim.unlink()
    victim.symlink_to(rng.choice([place / "canary", place / "canaries" / "data-0001.bin", Path("/dev/zero")]))
    return f"a link as {victim.relative_to(place)}"


def disturbed(place: Path) -> str | None:
    """What happened outside the folder."""
    if (place / "ran").exists():
        return "code was run"
    for canary in (place / "canary", place / "canaries" / "data-0001.bin"):
        if not canary.is_file() or canary.read_bytes() != _CANARY:
            return f"{canary.name} was changed"
    found = {each.name for each in place.iterdir()} - _ALLOWED
    return f"{sorted(found)} appeared" if found else None


class Attempt:
    """One forged folder and what came of reading it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.outcomes: Counter[str] = Counter()
        self.lines: list[str] = []

    def tried(self, stage: str, do: Callable[[], Any]) -> Any:
        """Do something: what a check inside finds too late is inconsistent, other errors must have names."""
        try:
            return do()
        except ExtraBuffersError:
            self.outcomes[f"{stage} refused"] += 1
        except AssertionError as error:
            self.fault("inconsistent", f"{stage}: {brief(error)}")
        except BaseException as error:
            self.fault("unnamed", f"{stage}: {brief(error)}")
        return None

    def fault(self, kind: str, line: str) -> None:
        self.outcomes[kind] += 1
        self.lines.append(f"{line} [{self.what}]")


def attempt(saveable: Saveable, tree: Tree, rng: random.Random, steps: list[Any]) -> Outcome:
    """Forge, load and use."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        place = Path(name)
        (place / "canary").write_bytes(_CANARY)
        (place / "canaries").mkdir()
        (place / "canaries" / "data-0001.bin").write_bytes(_CANARY)
        path = saveable.path(place)
        if rng.random() < 0.9:
            forged, what = forge(tree, rng)
            write_tree(forged, path)
        else:
            write_tree(tree, path)
            what = plant(path, place, rng)
        run = Attempt(what)
        if saveable.in_folder and rng.random() < 0.6:
            run.tried("other ways", rng.choice(look_at_folder(saveable, place)))
        made = run.tried("load", lambda: saveable.load(place))
        if made is not None:
            run.outcomes["loaded"] += 1
            run.tried("use", lambda: saveable.use(made, place, steps))
            run.tried("close", lambda: saveable.close(made))
        made = None
        what_else = disturbed(place)
        if what_else is not None:
            run.fault("wrong", what_else)
    return run.outcomes, run.lines


def torture(name: str, count: int, seed: int = 0, only: int | None = None) -> Report:
    """Forge what is saved of a kind ``count`` times."""
    saveable, steps = saveables()[name], make_steps(seed, 33)
    with tempfile.TemporaryDirectory() as place:
        saveable.fill(Path(place), steps)
        tree = read_tree(saveable.path(Path(place)))

    def set_up() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

    def trial(number: int) -> Outcome:
        if only is not None and number != only:
            return Counter({"skipped": 1}), []
        outcomes, lines = attempt(saveable, tree, random.Random(f"{seed} {name} {number}"), steps)
        # one state a forgery, whatever came of it on the way
        faults = {kind: 1 for kind in outcomes if kind in ("wrong", "inconsistent", "unnamed")}
        return Counter(faults or {"loaded" if "loaded" in outcomes else "refused": 1}), lines

    label = f"forgery {name}" + ("" if containers_of(tree) else " (no container)")
    return run_trials(label, trial, count, set_up=set_up)


def main() -> int:
    args = parser(__doc__, 20_000, "forgeries, of all kinds together").parse_args()
    names = [args.only] if args.only else list(saveables())
    run = for_each_kind("forgery", names, lambda name, count: torture(name, count, args.seed, args.trial), args.count)
    return exit_code(run, args.examples)


if __name__ == "__main__":
    sys.exit(main())
