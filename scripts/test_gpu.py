"""Run the tests that need a GPU, each file in a process of its own, all at the same time.

Most of their time is spent compiling kernels, so this takes a fraction of the time of a single process. ``--seconds``
stops everything that is not done by then, which counts as failed; all other arguments are passed to pytest.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(path: Path, arguments: list[str], end: float) -> bool:
    """Run one file until ``end`` at most; print how it went, and what failed. Return whether everything passed."""
    begin, left = time.perf_counter(), max(end - time.monotonic(), 0)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", str(path), *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=min(left, 1e6)
        )
    except subprocess.TimeoutExpired:
        print(f"{path.relative_to(ROOT)}: stopped after {left:.0f} s", flush=True)
        return False
    if done.returncode == 5:
        return True  # no test of this file needs a GPU
    lines = done.stdout.splitlines()
    print(
        f"{path.relative_to(ROOT)}: {lines[-1] if lines else done.stderr} [{time.perf_counter() - begin:.0f} s]",
        flush=True,
    )
    if done.returncode:
        print("\n".join(line for line in lines if line.startswith(("E  ", "FAILED", "ERROR"))), flush=True)
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=math.inf, help="time limit of all files together")
    options, arguments = parser.parse_known_args()
    end = time.monotonic() + options.seconds
    files = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "cuda" in path.read_text() or "triton" in path.name
    ]
    # those that take longest first
    files.sort(key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = list(pool.map(lambda path: run(path, arguments, end), files))
    raise SystemExit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
