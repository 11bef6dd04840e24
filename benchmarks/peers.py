"""Replay buffers of several libraries with the same transitions, and SB3's beside each; writes ``peers.csv``.

Every measurement runs in a fresh process of the environment that has the library: ``make peers`` creates them. Memory
is the growth of the resident set. Times are measured in turns with SB3's `ReplayBuffer` in the same process, after
checking that every batch consists of transitions as they were added; a wrong batch ends the process, and the reason
is shown in place of the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import feed
from benchmarks.peer_systems import SYSTEMS
from benchmarks.peer_systems.base import (
    BATCHES,
    PRIORITIES,
    STREAMS,
    UNIFORM,
    WINDOWS,
    Case,
    Ledger,
    Step,
    System,
    folder_bytes,
)  # fmt: skip
from benchmarks.results import DATA, KEEP_MEMORY, ROOT, machine, read_rows, replace_rows, versions, whole
from benchmarks.timing import interleave, quantiles

CSV = DATA / "peers.csv"
REFERENCE = "sb3"
MEMORY = "memory"
KINDS = (MEMORY, UNIFORM, WINDOWS, PRIORITIES)
FIGURES = ("add", *(f"sample{batch}" for batch in BATCHES), WINDOWS, PRIORITIES, "save", "load")
_CUTS = ("p20", "p50", "p80")
COLUMNS = [
    "date", "machine", "versions", "stream", "shape", "dtype", "n_transitions", "system", "version", "resident_bytes",
    "disk_bytes", "file_bytes", "sb3_file_bytes",
    *(f"{side}{figure}_us_{cut}" for figure in FIGURES for side in ("", "sb3_") for cut in _CUTS), "reasons",
]  # fmt: skip
# environments: the interpreter, and what its processes find first
ENVIRONMENTS: dict[str, tuple[Path, str]] = {
    ".venv-peers": (ROOT / ".venv-peers/bin/python", "src"),
    ".venv-reverb": (ROOT / ".venv-reverb/bin/python", ""),
    # the package on PyPI has the import name of this library
    "pypi": (ROOT / ".venv-peers/bin/python", ".venv-peers/pypi"),
}
# one thread for every library: several would wait for each other wherever the machine has anything else to do
_SETTINGS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
# what some of the libraries need
_PACKAGES = {"jax", "tensordict", "tensorflow"}
_WARM_UP_STEPS = 40
_CHECKS = 4
_FILE_ROUNDS = 3
# seconds after which a buffer is not saved again
_SLOW_FILE = 5


# ---- in the process of a measurement ----


class Timed:
    """A system and SB3's buffer, filled with the same transitions in turns, and checked."""

    def __init__(self, name: str, case: Case, kind: str) -> None:
        self.case, self.kind = case, kind
        self.system, self.reference = SYSTEMS[name](case, kind), SYSTEMS[REFERENCE](case)
        self.ledger = Ledger()
        self.overwriting: list[list[float]] = [[], []]
        steps = case.steps(self.system.order)
        for number in range(case.n_steps + case.n_overwritten):
            new = self._add(next(steps), number)
            if number >= case.n_steps:
                for times, more in zip(self.overwriting, new, strict=True):
                    times += more
        self.system.finish()
        calls = {UNIFORM: lambda: self.system.sample(128), WINDOWS: self.system.windows}
        for _ in range(_CHECKS):
            self.ledger.check(self.system, calls.get(kind, self.system.sample_and_update)(), name)
        if kind == UNIFORM and not self.system.outdated():  # with episodes that are still open, the newest are missing
            self.ledger.check_complete(self.system, name)

    def _add(self, step: Step, number: int) -> list[list[float]]:
        self.ledger.add(step)
        data, columns = self.system.prepare(step), self.reference.prepare(step)
        return interleave([lambda: self.system.add(data), lambda: self.reference.add(columns)], 1, number)

    def compare(self, ours: Callable[[], Any], theirs: Callable[[], Any], seconds: float) -> list[list[float]]:
        """Seconds of each call, in turns of as many calls as the system needs to be timed together."""
        block = self.system.block
        calls = [lambda call=call: [call() for _ in range(block)] for call in (ours, theirs)]
        interleave(calls, 2)
        taken: list[list[float]] = [[], []]
        end = time.perf_counter() + seconds
        while len(taken[0]) < 5 or (time.perf_counter() < end and len(taken[0]) < 1000):
            for times, new in zip(taken, interleave(calls, 1, len(taken[0])), strict=True):
                times += [each / block for each in new]
        return taken

    def sampling(self, seconds: float) -> dict[str, Any]:
        """What can be sampled, and `add` to a full buffer."""
        system, reference = self.system, self.reference
        if self.kind == WINDOWS:
            pairs = {WINDOWS: (system.windows, reference.gather_windows)}
        elif self.kind == PRIORITIES:
            pairs = {PRIORITIES: (system.sample_and_update, lambda: reference.sample(256))}
        else:
            pairs = {
                f"sample{batch}": (lambda n=batch: system.sample(n), lambda n=batch: reference.sample(n))
                for batch in BATCHES
            }
        result = {} if self.kind != UNIFORM else cuts("add", in_blocks(self.overwriting, system.block))
        for figure, pair in pairs.items():
            result |= cuts(figure, self.compare(*pair, seconds))
        return result

    def files(self) -> dict[str, Any]:
        """Time and size of a saved buffer; the loaded one is checked too."""
        taken: dict[str, list[list[float]]] = {"save": [[], []], "load": [[], []]}
        sizes = {}
        for number in range(_FILE_ROUNDS):
            if sum(taken["save"][0]) > _SLOW_FILE:
                break
            pair = list(enumerate((self.system, self.reference)))
            for side, system in pair if number % 2 else pair[::-1]:
                with tempfile.TemporaryDirectory(prefix="peers-") as folder:
                    taken["save"][side] += interleave([lambda s=system, f=folder: s.save(Path(f))], 1)[0]
                    sizes[side] = folder_bytes(Path(folder))
                    start = time.perf_counter()
                    loaded = system.load(Path(folder))
                    taken["load"][side].append(time.perf_counter() - start)
                    self.ledger.check(loaded, loaded.sample(128), f"{system.title}, loaded")
                    self.ledger.check_complete(loaded, f"{system.title}, loaded")
                    del loaded
        result = {"file_bytes": sizes[0], "sb3_file_bytes": sizes[1]}
        return result | cuts("save", taken["save"]) | cuts("load", taken["load"])


def in_blocks(taken: list[list[float]], block: int) -> list[list[float]]:
    """The mean of each ``block`` consecutive calls."""
    return [
        [sum(times[i : i + block]) / block for i in range(0, len(times) - block + 1, block)] for times in taken
    ]  # fmt: skip


def cuts(figure: str, taken: list[list[float]]) -> dict[str, float]:
    """The columns of one figure: the system's and SB3's quantiles in microseconds."""
    result = {}
    for side, times in zip(("", "sb3_"), taken, strict=True):
        result |= dict(zip((f"{side}{figure}_us_{cut}" for cut in _CUTS), quantiles(times), strict=True))
    return result


def memory(name: str, case: Case) -> dict[str, Any]:
    """Growth of this process by one buffer that is filled, partly overwritten and sampled."""
    from benchmarks.measure import resident

    kind = SYSTEMS[name]
    # imports, compilation, and what the allocators keep
    for _ in range(2):
        system, steps = kind(case), case.steps(kind.order)
        for _ in range(min(_WARM_UP_STEPS, case.n_steps)):
            system.add(system.prepare(next(steps)))
        system.finish()
        with contextlib.suppress(ValueError, RuntimeError):  # there is no whole episode yet
            system.sample(BATCHES[0])
        del system, steps
        gc.collect()
    steps = case.steps(kind.order)
    next(steps), next(steps)  # what the feed holds until the end
    before = resident()
    system = kind(case)
    for _ in range(case.n_steps + case.n_overwritten):
        system.add(system.prepare(next(steps)))
    system.finish()
    system.sample(BATCHES[-1])
    return {"resident_bytes": resident() - before, "disk_bytes": system.disk_bytes()}


def child(request: dict[str, Any]) -> dict[str, Any]:
    """One measurement in this process, with the versions that it was made with."""
    name, what, quick = request["system"], request["what"], request["quick"]
    kind = SYSTEMS[name]
    limits = filter(None, (request["limit"], kind.most and kind.most // feed.N_ENVS))
    case = Case(request["stream"], min(limits, default=None), kind.channels_last)
    seconds = 0.05 if quick else 1.0
    if what == MEMORY:
        figures = memory(name, case)
    else:
        timed = Timed(name, case, what)
        figures = timed.sampling(seconds)
        if what == UNIFORM and "files" not in kind.lacks:
            try:
                figures |= timed.files()
            except SystemExit as wrong:  # it samples what was added, but does not load it
                figures["files"] = str(wrong)
    about = {
        "shape": "x".join(map(str, case.shape)),
        "dtype": case.dtype.name,
        "n_transitions": case.size,
        "version": importlib.metadata.version(kind.package) if kind.package else own_version(),
        "versions": versions(*sorted(_PACKAGES | {kind.package} - {"", "numpy", "stable-baselines3"})),
    }
    return about | figures


def own_version() -> str:
    import sb3_extra_buffers

    return str(sb3_extra_buffers.__version__)


# ---- all measurements ----


def measure(stream: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one system and stream; where something fails, the reason."""
    kind = SYSTEMS[name]
    row: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    if set(options.only) != set(KINDS):  # keep the rest of the row
        row = next((row for row in read_rows(options.output) if (row["stream"], row["system"]) == (stream, name)), {})
        before = json.loads(row.get("reasons") or "{}")
        measured = {*options.only, *(["files"] if UNIFORM in options.only else [])}
        reasons = {what: reason for what, reason in before.items() if what not in measured}
    row |= {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "stream": stream, "system": name}
    reasons |= kind.lacks
    for what in options.only:
        if what in kind.lacks:
            continue
        request = {"system": name, "stream": stream, "what": what, "quick": options.quick, "limit": options.limit}
        try:
            found = run(kind, request)
            if "files" in found:
                reasons["files"] = found.pop("files")
            row |= found
        except ChildError as problem:
            reasons[what] = str(problem)
    row["reasons"] = json.dumps(reasons) if reasons else ""
    return {column: _rounded(row.get(column, "")) for column in COLUMNS}


def _rounded(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value


class ChildError(Exception):
    """A measurement that could not be made."""


def run(kind: type[System], request: dict[str, Any]) -> dict[str, Any]:
    """One measurement in a fresh process."""
    python, first = ENVIRONMENTS[kind.environment]
    if not python.exists():
        raise ChildError("not installed; run `make peers`")
    paths = os.pathsep.join(filter(None, (str(ROOT / first) if first else "", str(ROOT))))
    # batches of some streams exceed 32 MB
    settings = _SETTINGS if request["what"] == MEMORY else _SETTINGS | KEEP_MEMORY | {"MALLOC_MMAP_MAX_": "0"}
    env = os.environ | settings | {"PYTHONPATH": paths}
    command = [str(python), "-m", "benchmarks.peers", "--child", json.dumps(request)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        raise ChildError(f"the process ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line[:1] == "{"))
    if "failed" in found:
        print(done.stderr[-2000:], file=sys.stderr)
        raise ChildError(found["failed"].splitlines()[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="measure only these, keep the others")
    parser.add_argument("--quick", action="store_true", help="short streams and few calls; prints, writes no file")
    parser.add_argument("--limit", type=whole, help="store only so many steps of every environment")
    parser.add_argument("--render", action="store_true", help="only render the page from the CSV file")
    parser.add_argument(
        "--output", type=Path, default=CSV, help="CSV file to write; another than the default is not rendered"
    )
    parser.add_argument("--no-render", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        try:
            found = child(json.loads(options.child))
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            found = {"failed": str(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"}
        print(f"\n{json.dumps(found)}", flush=True)
        return
    if not options.render:
        if options.quick:
            options.limit = options.limit or 400
        for stream in options.streams:
            if STREAMS[stream].recording:
                feed.record(STREAMS[stream].recording, STREAMS[stream].recorded)
            for name in options.systems:
                row = measure(stream, name, options)
                print(report(row), file=sys.stderr, flush=True)
                if not (options.quick or options.limit):
                    replace_rows(options.output, [row], ("stream", "system"))
    if not (options.quick or options.no_render) and options.output == CSV:
        from benchmarks import peer_tables

        peer_tables.write()


def report(row: dict[str, Any]) -> str:
    """One line for the console."""
    figures = [f"{int(row['resident_bytes'] or 0):>12,} B"]
    for figure in FIGURES:
        ours, theirs = row[f"{figure}_us_p50"], row[f"sb3_{figure}_us_p50"]
        figures.append(f"{figure} {float(ours):.0f} us ({float(ours) / float(theirs):.2f}x)" if ours else f"{figure} -")
    return f"{row['stream']:12} {row['system']:15} {'  '.join(figures)} {row['reasons']}"


if __name__ == "__main__":
    main()
