"""Benchmark methods on games, each in a fresh process; writes ``benchmarks/data/SUITE.csv``.

Suites: ``table`` (all methods on MsPacman), ``games`` (`auto` and `delta3` on many games), ``million`` (`auto` on a
million transitions) and ``plain`` (`auto` with no optional package installed).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import feed
from benchmarks.results import DATA, KEEP_MEMORY, replace_rows, run_child, run_info

# the methods of the documented table, with the highest documented level, lz4-block/12, for its lz4-block/16
DOCUMENTED_METHODS = [
    "none",
    "zstd-100",
    "zstd-50",
    "lz4-frame/1",
    "gzip0",
    "zstd-5",
    "zstd-20",
    "zstd-3",
    "zstd-1",
    "zstd1",
    "zstd3",
    "igzip0",
    "rle",
    "rle-jit",
    "lz4-block/1",
    "igzip1",
    "zstd5",
    "lz4-block/5",
    "lz4-frame/5",
    "gzip1",
    "gzip3",
    "igzip3",
    "zstd10",
    "lz4-block/9",
    "lz4-frame/9",
    "lz4-block/12",
    "lz4-frame/12",
    "zstd15",
    "zstd22",
]
NEW_METHODS = ["auto", "delta", "delta2", "delta3", "zstd3+dictionary"]
GAMES = [
    "MsPacman",
    "Pong",
    "Breakout",
    "Qbert",
    "SpaceInvaders",
    "Seaquest",
    "Enduro",
    "Riverraid",
    "BeamRider",
    "Asteroids",
    "Alien",
    "MontezumaRevenge",
    "Kangaroo",
    "BattleZone",
    "Assault",
    "RoadRunner",
]

COLUMNS = [
    "date",
    "machine",
    "versions",
    "game",
    "method",
    "n_transitions",
    "resident_bytes",
    "reported_bytes",
    "dense_bytes",
    "chosen",
    "add_us",
    "sb3_add_us",
    "fill_s",
    "sb3_fill_s",
    "sample32_us",
    "sb3_sample32_us",
    "sample256_us",
    "sb3_sample256_us",
    "small_sample32_us",
    "small_sample256_us",
]


def split_method(method: str) -> tuple[str, dict[str, Any]]:
    """``zstd3+dictionary`` as the method and its options."""
    name, _, option = method.partition("+")
    return name, {"dictionary": 16384} if option else {}


def measure(game: str, method: str, n_steps: int, suite: str) -> dict[str, Any]:
    """The measured columns of one row."""
    name, options = split_method(method)
    request = {"game": game, "n_steps": n_steps, "method": name, "options": options}
    result: dict[str, Any] = {}
    for what in ("million",) if suite == "million" else ("memory", "speed"):
        settings = KEEP_MEMORY if what == "speed" else None
        arguments = json.dumps(request | {"what": what})
        result |= run_child("benchmarks.measure", arguments, extras=suite != "plain", settings=settings)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=["table", "games", "million", "plain"], default="table")
    parser.add_argument("--games", nargs="+", help="Atari games, vizdoom-rgb or vizdoom-labels")
    parser.add_argument(
        "--methods", nargs="+", help="methods, such as auto zstd-5 zstd3+dictionary; sb3 is SB3's buffer"
    )
    parser.add_argument("--transitions", type=int, help="transitions to store (default: 40000; suite million: 1000000)")
    parser.add_argument("--output", type=Path, help="CSV file to write to")
    options = parser.parse_args()
    million = options.suite == "million"
    games = options.games or {"games": GAMES, "million": ["ms_pacman"]}.get(options.suite, ["MsPacman"])
    suite_methods = {"table": ["sb3", *NEW_METHODS, *DOCUMENTED_METHODS], "games": ["auto", "delta3"]}
    methods = options.methods or suite_methods.get(options.suite, ["auto"])
    n_transitions = options.transitions or (1_000_000 if million else 40_000)
    n_steps = n_transitions // feed.N_ENVS
    output = options.output or DATA / f"{options.suite}.csv"
    info = run_info(extras=options.suite != "plain")
    cases = [(game, method) for game in games for method in methods]
    for game, method in (bar := tqdm(cases, file=sys.stderr)):
        bar.set_description(f"{game} {method}")
        if not million:
            feed.record(game, n_steps)
        row = measure(game, method, n_steps, options.suite)
        row |= info | {"game": game, "method": method, "n_transitions": n_transitions}
        tqdm.write(f"{game} {method}: {row['resident_bytes'] / row['dense_bytes']:.2%} of dense memory", sys.stderr)
        replace_rows(output, [{column: row.get(column, "") for column in COLUMNS}], ("game", "method", "n_transitions"))


if __name__ == "__main__":
    main()
