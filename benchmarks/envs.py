"""Frames per second of Atari environments; writes ``benchmarks/data/envs.csv``.

Compares ale-py's own threads with SB3's wrappers in subprocesses and in one process. Rounds alternate between them, so
that other load on the machine affects all alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from benchmarks import render
from benchmarks.results import DATA, run_info, write_rows
from sb3_extra_buffers.training_utils.atari import make_env

KINDS: dict[str, dict[str, Any]] = {
    "native": {"native": True},
    "SubprocVecEnv": {"vec_env_cls": SubprocVecEnv},
    "DummyVecEnv": {"vec_env_cls": DummyVecEnv},
}
FRAME_SKIP = 4


def play(env: Any, seconds: float, random: np.random.Generator) -> float:
    """Steps per second, summed over all environments."""
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        env.step(random.integers(0, env.action_space.n, env.num_envs))
        steps += env.num_envs
    return steps / (time.perf_counter() - start)


def measure(game: str, n_envs: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """One row for each kind of environment."""
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


def table() -> str:
    """The table on the training page."""
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
        f"The load average was {busy:.1f} at the start, and the fastest round of an environment was up to "
        f"{max(rounds):.1f} times as fast as its slowest: "
        + (
            "the machine was busy, so these figures are only a rough guide.\n"
            if busy > 1
            else "the machine was idle.\n"
        )
    )
    header = [f"frames per second, {measured[0]['n_envs']} games", *games]
    return f"\n{render.table(header, lines)}\n{note}\n{render.provenance(measured)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", default=["Pong", "MsPacman"])
    parser.add_argument("--n-envs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of a round")
    parser.add_argument("--render", action="store_true", help="only render the page from the CSV file")
    options = parser.parse_args()
    if not options.render:
        # speeds mean little on a busy machine, so the load is recorded
        info = run_info("ale-py") | {"load_before": f"{os.getloadavg()[0]:.1f}"}
        rows = []
        for game in options.games:
            for row in measure(game, options.n_envs, options.rounds, options.seconds):
                print(f"{game}, {row['kind']}: {row['frames_per_s']} frames per second")
                rows.append(info | row)
        write_rows(DATA / "envs.csv", rows)
    render.insert(render.DOCS / "training.md", "environments", table())


if __name__ == "__main__":
    main()
