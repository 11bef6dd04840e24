"""Run the tests that need a GPU, each file in a process of its own, all at the same time.

Most of their time is spent compiling kernels, so this takes a fraction of the time of a single process. With
``--sanitize``, NVIDIA's compute-sanitizer checks `scripts/sanitize_gpu.py` at the same time. ``--seconds`` stops
everything that is not done by then, which counts as failed; all other arguments are passed to pytest.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTHING_RAN = 5  # exit code of pytest

SANITIZER_TOOLS = ("memcheck", "racecheck")
# those that take longest first
SANITIZED_PARTS = ("delta", "tensors", "tree", "others", "none", "rollout")


def run(name: str, command: list[str], end: float, shown: tuple[str, ...]) -> bool:
    """Run ``command`` until ``end`` at most; print how it went and, if it failed, the lines that begin with ``shown``.

    Return whether it succeeded.
    """
    begin, left = time.perf_counter(), max(end - time.monotonic(), 0)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=min(left, 1e6)
        )
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {left:.0f} s", flush=True)
        return False
    if done.returncode == NOTHING_RAN:
        return True  # no test of this file needs a GPU
    lines = done.stdout.splitlines()
    print(f"{name}: {lines[-1] if lines else done.stderr} [{time.perf_counter() - begin:.0f} s]", flush=True)
    if done.returncode:
        print("\n".join(line for line in lines if line.startswith(shown)), flush=True)
    return done.returncode == 0


def test(path: Path, arguments: list[str], end: float) -> bool:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", str(path), *arguments]
    return run(str(path.relative_to(ROOT)), command, end, ("E  ", "FAILED", "ERROR"))


def sanitize(part: str, end: float) -> bool:
    """Run one part with all tools, after a run that compiles its kernels."""
    script = [sys.executable, "scripts/sanitize_gpu.py", "--parts", part]
    succeeded = run(f"{part}, without sanitizer", script, end, ("",))
    for tool in SANITIZER_TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *script]
        succeeded &= run(f"{part}, {tool}", command, end, ("=",))
    return succeeded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=math.inf, help="time limit of everything together")
    parser.add_argument("--sanitize", action="store_true", help="run compute-sanitizer, too")
    options, arguments = parser.parse_known_args()
    if options.sanitize and shutil.which("compute-sanitizer") is None:
        parser.error("--sanitize needs compute-sanitizer, a part of the CUDA toolkit, on the PATH")
    end = time.monotonic() + options.seconds
    files = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "cuda" in path.read_text() or "triton" in path.name
    ]
    # those that take longest first
    files.sort(key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(sanitize, part, end) for part in SANITIZED_PARTS if options.sanitize]
        jobs += [pool.submit(test, path, arguments, end) for path in files]
        passed = [job.result() for job in jobs]
    raise SystemExit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
