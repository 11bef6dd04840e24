"""GPU buffers, compared with SB3's buffer and an uncompressed one on the GPU; writes ``benchmarks/data/gpu.csv``.

Times are medians of 300 calls, up to the point where the device is done, with the candidates taking turns. A batch
that differs from SB3's ends the part. Hosts differ, so each row also has the ratio to the candidates that it was
measured with. Each part runs in a process of its own and replaces its rows; a part that fails, or that ``--seconds``
stops, has replaced the figures that it had measured by then. ``--merge`` copies the rows of another file. ``--device
cpu`` is a dry run that needs no GPU; it writes nothing unless ``--output`` is given.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# read by cuBLAS when it starts: makes its results deterministic
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from benchmarks.results import DATA, ROOT, read_rows, replace_rows, run_info

PARTS = ("sample", "add", "memory", "tree", "ppo", "dqn")
# not part of a full run
OTHER_PARTS = ("others",)
#: Candidates that others are compared with: each has a column ``of_...`` with the ratio of medians.
REFERENCES = ("none", "sb3", "torchrl", "dense")


class Report:
    """Collects the rows of one part, prints each, and writes them to ``output`` if it is given."""

    def __init__(self, part: str, device: str, setting: str = "", output: Path | None = None) -> None:
        self.part, self.device, self.setting, self._output = part, device, setting, output
        name = torch.cuda.get_device_name() if device == "cuda" else "main memory"
        self._info = run_info("triton", "torchrl", extras=False)
        self._info |= {"time": f"{datetime.datetime.now(datetime.timezone.utc):%H:%M}", "device": name}
        self.rows: list[dict[str, Any]] = []

    def add(self, figure: str, unit: str, values: Mapping[str, Sequence[float]]) -> None:
        """Add the measurements of one figure by candidate, all from the same run."""
        cuts = {name: quantiles(measured) for name, measured in values.items()}
        first = len(self.rows)
        for name, (low, median, high) in cuts.items():
            ratios = {f"of_{other}": median / cuts[other][1] if other in cuts else None for other in REFERENCES}
            row: dict[str, Any] = {"part": self.part, "figure": figure, "setting": self.setting, "buffer": name}
            row |= {"unit": unit, "repeats": len(values[name])}
            row |= {"p20": f"{low:.6g}", "p50": f"{median:.6g}", "p80": f"{high:.6g}"}
            row |= {column: "" if ratio is None else f"{ratio:.4g}" for column, ratio in ratios.items()}
            self.rows.append(row | self._info)
            beside = [f"{ratio:.2f} of {other[3:]}" for other, ratio in ratios.items() if ratio and other[3:] != name]
            print(f"{figure:44} {name:16} {median:12.2f} {unit:3} {', '.join(beside)}", flush=True)
        if self._output:
            # the rest of the part may fail
            replace_rows(self._output, self.rows[first:], ("part", "figure"))

    def finish(self) -> None:
        """Remove what earlier runs have measured and this one has not."""
        if self._output:
            replace_rows(self._output, self.rows, ("part",))


def quantiles(values: Sequence[float]) -> list[float]:
    """20, 50 and 80 percent."""
    if len(values) == 1:
        return [values[0]] * 3
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return [cuts[i] for i in (1, 4, 7)]


def merge(target: Path, sources: Sequence[Path]) -> None:
    """Copy all parts in ``sources`` to ``target``, replacing the rows that it has of these parts."""
    for source in sources:
        rows = read_rows(source)
        if not rows:
            raise SystemExit(f"{source}: no rows")
        replace_rows(target, list(rows), ("part",))


def run_part(part: str, options: argparse.Namespace) -> None:
    from benchmarks import gpu_memory, gpu_speed, gpu_training, gpu_tree

    measure = {
        "sample": gpu_speed.sample,
        "add": gpu_speed.add,
        "others": gpu_speed.others,
        "memory": gpu_memory.rollouts,
        "tree": gpu_tree.prioritized,
        "ppo": gpu_training.ppo,
        "dqn": gpu_training.dqn,
    }[part]
    report = Report(part, options.device, output=options.output)
    measure(report, options.quick)
    report.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join((*PARTS, *OTHER_PARTS))}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few repeats, to see that all parts run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time limit of all parts together")
    parser.add_argument("--output", type=Path, help="CSV file (default: benchmarks/data/gpu.csv)")
    parser.add_argument("--merge", type=Path, nargs="+", help="copy the rows of other CSV files; measures nothing")
    parser.add_argument("--child", choices=[*PARTS, *OTHER_PARTS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output is None and options.device == "cuda" and not options.quick:
        options.output = DATA / "gpu.csv"
    if options.merge:
        merge(options.output, options.merge)
        return
    if options.child:
        run_part(options.child, options)
        return
    parts = options.parts.split(",")
    unknown = set(parts) - {*PARTS, *OTHER_PARTS}
    if unknown:
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    failed, end = [], time.monotonic() + options.seconds
    for part in parts:
        arguments = ["--child", part, "--device", options.device]
        arguments += ["--quick"] if options.quick else []
        arguments += ["--output", str(options.output.absolute())] if options.output else []
        start = time.monotonic()
        succeeded = run_child([sys.executable, "-m", "benchmarks.gpu", *arguments], end - start)
        print(f"{part}: {time.monotonic() - start:.0f} s\n", flush=True)
        if not succeeded:
            failed.append(part)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; see the messages above")


def run_child(command: list[str], seconds: float) -> bool:
    """Run ``command`` for at most ``seconds``; return whether it succeeded."""
    try:
        return subprocess.run(command, check=False, cwd=ROOT, timeout=min(max(seconds, 0), 1e6)).returncode == 0
    except subprocess.TimeoutExpired:
        print("stopped: --seconds is over", flush=True)
        return False


if __name__ == "__main__":
    main()
