"""A ViZDoom rollout of 4096 steps and 4 environments, dense and compressed: ``python -m benchmarks.doom_memory``.

Memory is the growth of the resident set of a fresh process while the game is played and stored.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import render
from benchmarks.envs import write_rows
from benchmarks.measure import checksums, resident
from benchmarks.run import DATA, machine, versions

CASES = [
    ("rgb", "sb3"),
    ("labels", "sb3"),
    ("rgb", "auto"),
    ("labels", "auto"),
    ("labels", "rle"),
    ("labels", "zstd3"),
    ("labels", "delta3"),
    ("classes", "auto"),
]
N_ENVS = 4
RES = (144, 256)


def one(observation: Any, method: str, scenario: str, n_steps: int) -> dict[str, Any]:
    """Play, store, and see what that took."""
    import torch
    from stable_baselines3.common.buffers import RolloutBuffer

    from sb3_extra_buffers.compressed import CompressedRolloutBuffer, init_jit
    from sb3_extra_buffers.training_utils.doom import make_env

    env: Any = make_env(scenario, N_ENVS, observation=observation, res=RES, seed=0)
    random = np.random.default_rng(0)

    def make(size: int) -> Any:
        common: Any = (size, env.observation_space, env.action_space, "cpu")
        if method == "sb3":
            return RolloutBuffer(*common, n_envs=N_ENVS)
        return CompressedRolloutBuffer(*common, n_envs=N_ENVS, compression_method=method)

    def fill(buffer: Any, size: int, obs: Any) -> dict[int, tuple[int, ...]]:
        kept = {}
        zeros = torch.zeros(N_ENVS)
        for step in range(size):
            actions = random.integers(0, env.action_space.n, N_ENVS)
            following, rewards, dones, _ = env.step(actions)
            buffer.add(obs, actions[:, None], rewards, dones, zeros, zeros)
            if step % max(size // 8, 1) == 0:
                kept[step] = checksums(obs)
            obs = following
        return kept

    # compile and allocate whatever is made once
    if method != "sb3":
        init_jit(method)
    first = env.reset()
    for _ in range(2):
        fill(make(80), 80, first)
    first = env.reset()
    before = resident()
    buffer = make(n_steps)
    kept = fill(buffer, n_steps, first)
    growth = resident() - before
    for step, expected in kept.items():
        if checksums(buffer.observations[step]) != expected:
            raise AssertionError(f"step {step} came back changed; refusing to report on it")
    shape = env.observation_space.shape
    env.close()
    chosen = "" if method == "sb3" else buffer.memory_usage().codecs[""]
    return {
        "resident_bytes": growth,
        "dense_bytes": n_steps * N_ENVS * int(np.prod(shape)),
        "chosen": chosen,
    }


def table() -> str:
    """The measurements as the page on training shows them."""
    measured = render.rows("doom_memory")
    if not measured:
        return ""
    whole = float(measured[0]["resident_bytes"])
    lines = [
        [
            row["observation"],
            "SB3's `RolloutBuffer`" if row["method"] == "sb3" else f"`{row['method']}`",
            render.megabytes(row),
            f"{float(row['resident_bytes']) / whole:.2%}",
        ]
        for row in measured
    ]
    head = (
        f"\nA rollout of {measured[0]['scenario']}, {int(measured[0]['n_steps']):,} steps of {N_ENVS} environments at "
        f"{RES[0]}x{RES[1]}, random actions, growth of the resident set:\n\n"
    )
    names = ["observations", "kept by", "resident", "% of dense RGB"]
    return f"{head}{render.table(names, lines)}\n{render.about(measured)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="deathmatch")
    parser.add_argument("--steps", type=int, default=4096)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--render", action="store_true", help="only write the page anew")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one.split(","), options.scenario, options.steps)))
        return
    if not options.render:
        doom = f"{versions()}, vizdoom {importlib.metadata.version('vizdoom')}"
        about = {"date": datetime.date.today().isoformat(), "machine": machine(), "versions": doom}
        found = []
        for observation, method in CASES:
            command = [sys.executable, "-m", "benchmarks.doom_memory", "--one", f"{observation},{method}"]
            command += ["--scenario", options.scenario, "--steps", str(options.steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[1])
            row = {"scenario": options.scenario, "n_steps": options.steps, "observation": observation, "method": method}
            found.append(about | row | json.loads(done.stdout.splitlines()[-1]))
            print(found[-1], file=sys.stderr)
        write_rows(DATA / "doom_memory.csv", found)
    render.insert(render.DOCS / "training.md", "doom memory", table())


if __name__ == "__main__":
    main()
