"""Memory of a ViZDoom rollout of 4096 steps and 4 environments, dense and compressed; writes ``doom_memory.csv``.

Each case runs in a fresh process and measures the growth of its resident set while the game is played and stored.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np

from benchmarks import render
from benchmarks.measure import checksums, resident
from benchmarks.results import DATA, run_child, run_info, write_rows

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


def measure(observation: Any, method: str, scenario: str, n_steps: int) -> dict[str, Any]:
    """Memory that a rollout of ``observation`` takes with ``method``."""
    import torch
    from stable_baselines3.common.buffers import RolloutBuffer

    from sb3_extra_buffers.compressed import CompressedRolloutBuffer, init_jit
    from sb3_extra_buffers.training_utils.doom import make_env

    env: Any = make_env(scenario, N_ENVS, observation=observation, res=RES, seed=0)
    random = np.random.default_rng(0)

    def make_buffer(size: int) -> Any:
        common: Any = (size, env.observation_space, env.action_space, "cpu")
        if method == "sb3":
            return RolloutBuffer(*common, n_envs=N_ENVS)
        return CompressedRolloutBuffer(*common, n_envs=N_ENVS, compression_method=method)

    def fill(buffer: Any, size: int, obs: Any) -> dict[int, tuple[int, ...]]:
        expected_checksums = {}
        zeros = torch.zeros(N_ENVS)
        for step in range(size):
            actions = random.integers(0, env.action_space.n, N_ENVS)
            next_obs, rewards, dones, _ = env.step(actions)
            buffer.add(obs, actions[:, None], rewards, dones, zeros, zeros)
            if step % max(size // 8, 1) == 0:
                expected_checksums[step] = checksums(obs)
            obs = next_obs
        return expected_checksums

    # warm up, so that one-time compilation and allocation are not measured
    if method != "sb3":
        init_jit(method)
    first = env.reset()
    for _ in range(2):
        fill(make_buffer(80), 80, first)
    first = env.reset()
    before = resident()
    buffer = make_buffer(n_steps)
    expected_checksums = fill(buffer, n_steps, first)
    growth = resident() - before
    for step, expected in expected_checksums.items():
        if checksums(buffer.observations[step]) != expected:
            raise AssertionError(f"step {step} was not returned as it was added; no result is reported")
    shape = env.observation_space.shape
    env.close()
    chosen = "" if method == "sb3" else buffer.memory_usage().codecs[""]
    return {
        "resident_bytes": growth,
        "dense_bytes": n_steps * N_ENVS * int(np.prod(shape)),
        "chosen": chosen,
    }


def table() -> str:
    """The table on the training page."""
    measured = render.rows("doom_memory")
    if not measured:
        return ""
    dense_rgb = float(measured[0]["resident_bytes"])
    lines = [
        [
            row["observation"],
            "SB3's `RolloutBuffer`" if row["method"] == "sb3" else f"`{row['method']}`",
            render.resident(row),
            render.percent(float(row["resident_bytes"]) / dense_rgb),
        ]
        for row in measured
    ]
    scenario, n_steps = measured[0]["scenario"], int(measured[0]["n_steps"])
    head = (
        f"\nGrowth of the resident set for a rollout of {scenario}: {n_steps:,} steps of {N_ENVS} environments at "
        f"{RES[0]}x{RES[1]}, random actions.\n\n"
    )
    names = ["observations", "buffer or method", "resident", "% of SB3's with RGB"]
    return f"{head}{render.table(names, lines)}\n{render.provenance(measured)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="deathmatch")
    parser.add_argument("--steps", type=int, default=4096)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--render", action="store_true", help="only render the page from the CSV file")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(*options.case.split(","), options.scenario, options.steps)))
        return
    if not options.render:
        info, rows = run_info("vizdoom"), []
        for observation, method in CASES:
            arguments = [
                "--case",
                f"{observation},{method}",
                "--scenario",
                options.scenario,
                "--steps",
                str(options.steps),
            ]
            result = run_child("benchmarks.doom_memory", *arguments)
            case = {
                "scenario": options.scenario,
                "n_steps": options.steps,
                "observation": observation,
                "method": method,
            }
            rows.append(info | case | result)
            print(f"{observation}, {method}: {result['resident_bytes'] / 1e6:.1f} MB", file=sys.stderr)
        write_rows(DATA / "doom_memory.csv", rows)
    render.insert(render.DOCS / "training.md", "doom memory", table())


if __name__ == "__main__":
    main()
