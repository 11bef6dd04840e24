"""``make torture``: the long forms of everything in this folder, two at a time."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

#: the longest first
MODULES: dict[str, list[str]] = {
    "interrupts": ["--count", "1000"],
    "starvation": [],
    "forgery": ["--count", "20000"],
    "power_cuts": ["--count", "4000"],
    "flips": ["--count", "10000"],
    "kills": ["--count", "500"],
    "copies": ["--count", "200"],
    "arguments": [],
}

_printing = threading.Lock()


def run(module: str, seed: int) -> int:
    """Run one of them, and print what it says as it says it."""
    begun = time.monotonic()
    options = MODULES[module] + ([] if module == "arguments" else ["--seed", str(seed)])
    command = [sys.executable, "-m", f"tests.torture.{module}", *options]
    # two processes share the cores already
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        for line in process.stdout or []:
            if "resource_tracker" not in line and "leaked semaphore" not in line:
                with _printing:
                    print(f"{module:11} {line}", end="", flush=True)
    with _printing:
        verdict = "clean" if process.returncode == 0 else "NOT CLEAN"
        print(f"{module:11} {verdict} after {time.monotonic() - begun:.0f} s", flush=True)
    return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)}; all without any")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with ThreadPoolExecutor(args.jobs) as pool:
        codes = list(pool.map(lambda module: run(module, args.seed), args.modules or MODULES))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
