"""Flipped bits, missing ends and overwritten stretches in everything that is saved: named, or read as it was."""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from sb3_extra_buffers import files
from sb3_extra_buffers.errors import ExtraBuffersError
from tests.torture.containers import Tree, journals_of, read_tree, write_tree
from tests.torture.mutations import damage
from tests.torture.running import Outcome, Report, brief, exit_code, for_each_kind, parser, run_trials
from tests.torture.saveables import Saveable, read_all, saveables, set_up
from tests.torture.subjects import SIZE, Contents, difference, make_steps


def history(saveable: Saveable, place: Path, seed: int) -> list[Contents]:
    """Save something several times over; return what it held after every step."""
    made, states = saveable.make(place), []
    for number, step in enumerate(make_steps(seed, 33)):
        saveable.add(made, step)
        states.append({name: np.copy(value) for name, value in saveable.contents(made).items()})
        # what lives in a file has steps in its journal as well
        if number in (8, 24) or (number in (0, 16, 32) and not saveable.live):
            saveable.save(made, place)
    saveable.close(made)
    return states


def whole_steps(truth: Contents, found: Contents, count: int) -> bool:
    """Whether the ``count`` newest steps, which a repair kept, are part of what there was, in its order."""
    if "array" in truth:
        return all(
            np.array_equal(ours, theirs) or not ours.any()
            for ours, theirs in zip(found["array"].reshape(-1, *found["array"].shape[2:]),
                                    truth["array"].reshape(-1, *truth["array"].shape[2:]), strict=True)
        )  # fmt: skip
    names = [name for name in truth if "observations" in name or name == "rewards"]
    newest = (int(found["pos"]) - count + np.arange(count)) % SIZE
    return not count or any(
        all(np.array_equal(truth[name][(oldest + np.arange(count)) % SIZE], found[name][newest]) for name in names)
        for oldest in range(SIZE)
    )


def torture(name: str, count: int, seed: int = 0) -> Report:
    """Damage what was saved ``count`` times."""
    saveable = saveables()[name]
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = history(saveable, Path(place), seed)
        tree = read_tree(saveable.path(Path(place)))

    def trial(number: int) -> Outcome:
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory() as place:
            return _damage_once(saveable, tree, states, Path(place), random.Random(f"{seed} {name} {number}"))

    return run_trials(f"flips {name}", trial, count)


def _damage_once(saveable: Saveable, tree: Tree, states: list[Contents], place: Path, rng: random.Random) -> Outcome:
    names = [each for each in tree if tree[each]]
    # small files are as important as large ones
    which = rng.choice(names) if rng.random() < 0.5 else max(names, key=lambda each: len(tree[each]))
    changed, how = damage(tree[which], rng)
    write_tree({**tree, which: changed}, saveable.path(place))
    where = f"{how} in {which or 'the file'}"
    # an end that is missing is that of a record that was being written
    torn = which in journals_of(tree) and how in ("cut", "zeros")
    allowed = states if torn else states[-1:]
    in_place = saveable.in_folder and not saveable.live and rng.random() < 0.3
    try:
        if in_place:
            opened = set_up(files.open_saved(saveable.path(place)))
            found = saveable.contents(opened)
        else:
            found = saveable.contents(saveable.load(place))
    except ExtraBuffersError as error:
        outcomes, lines = Counter([type(error).__name__]), list[str]()
    except Exception as error:
        return Counter({"unnamed": 1}), [f"{where}: {brief(error)}"]
    else:
        what = [difference(found, state) for state in allowed]
        if None not in what:
            return Counter({"wrong": 1}), [f"{where} was not noticed: {what[-1]}"]
        outcomes, lines = Counter(["as it was"]), []
    if saveable.in_folder and rng.random() < 0.15:
        outcome, line = _repair(saveable, place, states)
        outcomes[outcome] += 1
        lines += [f"{where}: {line}"] if line else []
    return outcomes, lines


def _repair(saveable: Saveable, place: Path, states: list[Contents]) -> tuple[str, str]:
    try:
        files.repair(saveable.path(place), place / "repaired")
        made: Any = set_up(files.load(place / "repaired"))
        found = saveable.contents(made)
        read_all(made)
    except ExtraBuffersError:
        return "beyond repair", ""
    except Exception as error:
        return "unnamed", f"repair: {brief(error)}"
    count = made.size() if hasattr(made, "size") and callable(made.size) else 0
    if any(difference(found, state) is None or whole_steps(state, found, count) for state in states):
        return "repaired", ""
    return "wrong", "a repair made something up"


def main() -> int:
    args = parser(__doc__, 10_000, "flips and cuts, of all kinds together").parse_args()
    names = [args.only] if args.only else list(saveables())
    reports = for_each_kind("flips", names, lambda name, count: torture(name, count, args.seed), args.count)
    return exit_code(reports, args.examples)


if __name__ == "__main__":
    sys.exit(main())
