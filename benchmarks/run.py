"""Measure methods on games, each in a fresh process, and append rows to ``benchmarks/data``.

``python -m benchmarks.run`` reproduces the memory table on MsPacman; ``--suite games`` measures the recommended
methods on many games; ``--suite million`` one million transitions; ``--suite plain`` what is left of the speed where
no optional package is installed. ``--help`` has the rest.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import feed

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"
OPTIONAL = ("numba", "zstandard", "lz4", "isal")

# every row of the documented table; lz4-block/16 there is outside the documented levels, 12 is the highest
TABLE = [
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
OURS = ["auto", "delta", "delta2", "delta3", "zstd3+dictionary"]
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


def machine() -> str:
    """Processor and cores, in words."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = f"{models[0]}, {len(models)} cores" if models else name
    return name


def versions(plain: bool = False) -> str:
    """Versions of what a figure depends on; ``plain``: without what is hidden then."""
    parts = [f"Python {platform.python_version()}"]
    for package in ("numpy", "torch", "stable-baselines3", *(() if plain else OPTIONAL)):
        try:
            parts.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(parts)


def child(plain: bool = False, **request: Any) -> dict[str, Any]:
    """Run one measurement in a fresh process; ``plain``: one that finds no optional package."""
    command = [sys.executable, "-m", "benchmarks.measure", json.dumps(request)]
    paths = [*([str(ROOT / "tests" / "no_extras")] if plain else []), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT, env=env)
    if done.returncode:
        raise SystemExit(f"measuring {request} failed with status {done.returncode}; its message is above")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def split_method(method: str) -> tuple[str, dict[str, Any]]:
    """``zstd3+dictionary`` as the method and its options."""
    name, _, option = method.partition("+")
    return name, {"dictionary": 16384} if option else {}


def measure(game: str, method: str, n_steps: int, suite: str) -> dict[str, Any]:
    """One row."""
    name, options = split_method(method)
    request = {"game": game, "n_steps": n_steps, "method": name, "options": options, "plain": suite == "plain"}
    if suite == "million":
        return child(what="million", **request)
    return child(what="memory", **request) | child(what="speed", **request)


def replace_rows(path: Path, rows: list[dict[str, Any]], key: tuple[str, ...]) -> None:
    """Write ``rows`` into the file, in the place of older ones that have the same ``key``."""
    fresh = {tuple(str(row[name]) for name in key) for row in rows}
    kept: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [old for old in csv.DictReader(file) if tuple(old[name] for name in key) not in fresh]
    columns = list(dict.fromkeys(name for row in kept + rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept + rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=["table", "games", "million", "plain"], default="table")
    parser.add_argument("--games", nargs="+", help="Atari names, vizdoom-rgb or vizdoom-labels")
    parser.add_argument("--methods", nargs="+", help="methods, such as auto zstd-5 zstd3+dictionary")
    parser.add_argument("--transitions", type=int, help="how many to store (40000; 1000000 for the million suite)")
    parser.add_argument("--output", type=Path, help="the CSV file to append to")
    options = parser.parse_args()
    million = options.suite == "million"
    games = options.games or {"games": GAMES, "million": ["ms_pacman"]}.get(options.suite, ["MsPacman"])
    methods = options.methods or {"table": ["sb3", *OURS, *TABLE], "games": ["auto", "delta3"]}.get(
        options.suite, ["auto"]
    )
    n_transitions = options.transitions or (1_000_000 if million else 40_000)
    n_steps = n_transitions // feed.N_ENVS
    output = options.output or DATA / f"{options.suite}.csv"
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(options.suite == "plain"),
    }
    cases = [(game, method) for game in games for method in methods]
    for game, method in (bar := tqdm(cases, file=sys.stderr)):
        bar.set_description(f"{game} {method}")
        if not million:
            feed.record(game, n_steps)
        row = measure(game, method, n_steps, options.suite)
        row |= about | {"game": game, "method": method, "n_transitions": n_transitions}
        replace_rows(output, [{column: row.get(column, "") for column in COLUMNS}], ("game", "method", "n_transitions"))


if __name__ == "__main__":
    main()
