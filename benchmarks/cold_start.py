"""CPU time and memory of the first observations, with an empty and a filled cache; writes ``cold_start.csv``.

Each repetition is a fresh process that adds `N_STEPS` steps of a recorded game and samples 32 transitions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import feed
from benchmarks.results import DATA, quantity, replace_rows, run_child, run_info

N_STEPS = 200
CASES = [("MsPacman", "auto"), ("Pong", "auto"), ("MsPacman", "zstd-3")]


def resident() -> int:
    """Bytes of the resident set."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def first_use(game: str, method: str) -> dict[str, Any]:
    """Run in a fresh process: import, add and sample, with the CPU seconds and the bytes that each step takes."""
    began = time.process_time()
    from gymnasium import spaces

    from sb3_extra_buffers.compressed import CompressedReplayBuffer

    import_s = time.process_time() - began
    steps = list(feed.steps(game, N_STEPS))
    space = spaces.Box(0, 255, (feed.STACK, *feed.SIZE), np.uint8)
    buffer = CompressedReplayBuffer(
        len(steps) * feed.N_ENVS, space, spaces.Discrete(4), n_envs=feed.N_ENVS, compression_method=method
    )
    zeros = np.zeros(feed.N_ENVS)
    before, cpu, wall = resident(), time.process_time(), time.perf_counter()
    import numba  # noqa: F401  # the buffer would import it now

    numba_s, numba_bytes = time.process_time() - cpu, resident() - before
    for step in steps:
        buffer.add(step.obs, step.next_obs, zeros[:, None], zeros, step.dones, [{}] * feed.N_ENVS)
    batch = buffer.sample(32)
    first_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
    if batch.observations.shape != (32, *space.shape):
        raise AssertionError("the batch is wrong")
    return {
        "import_s": import_s,
        "numba_s": numba_s,
        "first_s": first_s,
        "wall_s": wall_s,
        "numba_bytes": numba_bytes,
        # numba, kernels, and what compiling leaves behind; without the observations
        "resident_bytes": resident() - before - buffer.memory_usage().total,
    }


def measure(game: str, method: str, repeats: int) -> list[dict[str, Any]]:
    """Medians with an empty cache, and with the one that this filled."""
    feed.record(game, N_STEPS)
    results: dict[str, list[dict[str, Any]]] = {"empty": [], "filled": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["NUMBA_CACHE_DIR"] = folder
            for cache in results:
                results[cache].append(run_child("benchmarks.cold_start", "--child", game, method))
    return [
        run_info()
        | {"game": game, "method": method, "cache": cache}
        | {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for cache, runs in results.items()
    ]


def summary() -> str:
    """What the FAQ says about the cost of the library itself."""
    from benchmarks.render import provenance, rows

    measured = rows("cold_start")
    delta = [row for row in measured if row["method"] == "auto"]

    def largest(column: str, cache: str) -> float:
        return max(float(row[column]) for row in delta if row["cache"] == cache)

    cached, numba = largest("resident_bytes", "filled"), largest("numba_bytes", "filled")
    sizes = (cached, numba, cached - numba, largest("resident_bytes", "empty"))
    everything, importing, kernels, compiling = (quantity(size, "B") for size in sizes)
    first, later = largest("first_s", "empty"), largest("first_s", "filled")
    return (
        f"About {everything} per process with numba, as much as {cached / SB3_TRANSITION:,.0f} transitions of stacked "
        f"Atari frames in SB3's buffer: {importing} for importing numba and {kernels} for the compiled kernels. The "
        f"process that compiles them takes {compiling}.\n\n"
        f"Compiling takes {first:.1f} s of one core, at the first `add` and `sample` or in `warmup()`. Later "
        f"processes load the kernels from the cache in {later:.1f} s.\n\n{provenance(delta)}"
    )


# bytes of a transition of 84x84x4 stacks
SB3_TRANSITION = 2 * 4 * 84 * 84


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=2, metavar=("GAME", "METHOD"), help="measure in this process, print JSON")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(first_use(*options.child)))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    for game, method in CASES:
        rows = measure(game, method, options.repeats)
        for row in rows:
            print(
                f"{game}, {method}, cache {row['cache']}: {row['first_s']:.2f} s, {row['resident_bytes'] / 1e6:.0f} MB"
            )
        replace_rows(DATA / "cold_start.csv", rows, ("game", "method", "cache"))


if __name__ == "__main__":
    main(sys.argv[1:])
