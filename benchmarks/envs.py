"""Frames per second of Atari environments on this machine: ``python -m benchmarks.envs``.

ale-py's own threads beside SB3's wrappers, in processes and in one; all play in turns, so that whatever else the
machine does meets them alike.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from benchmarks import render
from benchmarks.run import DATA, machine, versions
from sb3_extra_buffers.training_utils.atari import make_env

KINDS: dict[str, dict[str, Any]] = {
    "native": {"native": True},
    "SubprocVecEnv": {"vec_env_cls": SubprocVecEnv},
    "DummyVecEnv": {"vec_env_cls": DummyVecEnv},
}
FRAME_SKIP = 4


def play(env: Any, seconds: float, random: np.random.Generator) -> float:
    """Steps of all environments together in a second."""
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        env.step(random.integers(0, env.action_space.n, env.num_envs))
        steps += env.num_envs
    return steps / (time.perf_counter() - start)


def measure(game: str, n_envs: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each kind."""
    envs = {kind: make_env(f"{game}NoFrameskip-v4", n_envs, seed=0, **options) for kind, options in KINDS.items()}
    random = np.random.default_rng(0)
    speeds: dict[str, list[float]] = {kind: [] for kind in envs}
    for env in envs.values():
        env.reset()
        play(env, 1.0, random)
    for _ in range(rounds):
        for kind, env in envs.items():
            speeds[kind].append(play(env, seconds, random))
    for env in envs.values():
        env.close()
    return [
        {
            "game": game,
            "kind": kind,
            "n_envs": n_envs,
            "steps_per_s": f"{statistics.median(taken):.0f}",
            "frames_per_s": f"{FRAME_SKIP * statistics.median(taken):.0f}",
            "slowest_round": f"{min(taken):.0f}",
            "fastest_round": f"{max(taken):.0f}",
        }
        for kind, taken in speeds.items()
    ]


def write_rows(path: Path, measured: list[dict[str, Any]]) -> None:
    """Replace what ``path`` held."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(measured[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(measured)


def table() -> str:
    """The measurements as the page on training shows them."""
    measured = render.rows("envs")
    if not measured:
        return ""
    games = list(dict.fromkeys(row["game"] for row in measured))
    speed = {(row["kind"], row["game"]): float(row["frames_per_s"]) for row in measured}
    lines = [
        [
            f"`{kind}`" if kind != "native" else "native",
            *(f"{speed[kind, game]:,.0f} ({speed[kind, game] / speed['SubprocVecEnv', game]:.1f}x)" for game in games),
        ]
        for kind in KINDS
    ]
    busy = max(float(row["load_before"]) for row in measured)
    rounds = [float(row["fastest_round"]) / float(row["slowest_round"]) for row in measured]
    note = (
        f"The load average of the machine was {busy:.1f} when it began, and the fastest round of a kind was up to "
        f"{max(rounds):.1f} times as fast as its slowest: "
        + ("it was busy with other work, so take these for a rough guide only.\n" if busy > 1 else "it was idle.\n")
    )
    header = [f"frames per second, {measured[0]['n_envs']} games", *games]
    return f"\n{render.table(header, lines)}\n{note}\n{render.about(measured)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", default=["Pong", "MsPacman"])
    parser.add_argument("--n-envs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a round")
    parser.add_argument("--render", action="store_true", help="only write the page anew")
    options = parser.parse_args()
    if not options.render:
        ale = f"{versions()}, ale-py {importlib.metadata.version('ale-py')}"
        about = {"date": datetime.date.today().isoformat(), "machine": machine(), "versions": ale}
        # a machine that has other things to do tells little of speed; whoever reads the figures should know
        about["load_before"] = f"{os.getloadavg()[0]:.1f}"
        found = [
            about | row
            for game in options.games
            for row in measure(game, options.n_envs, options.rounds, options.seconds)
        ]
        write_rows(DATA / "envs.csv", found)
    render.insert(render.DOCS / "training.md", "environments", table())


if __name__ == "__main__":
    main()
