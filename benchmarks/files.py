"""Size, time and memory of saving, loading and opening, compared with SB3's pickle; writes ``files.csv``.

The default is 100,000 MsPacman transitions; ``--transitions 1000000 --no-sb3`` measures a million without SB3. Each
part runs in a fresh process.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import feed
from benchmarks.results import DATA, replace_rows, run_child, run_info

GAME = "MsPacman"
RECORDED = 25_000
NEW = 1000
REPEATS = 9


def spaces() -> tuple[Any, Any]:
    from gymnasium import spaces

    return spaces.Box(0, 255, (feed.STACK, *feed.SIZE), np.uint8), spaces.Discrete(9)


def steps() -> Iterator[feed.Step]:
    """The recorded game, repeated forever."""
    for _ in itertools.count():
        yield from feed.steps(GAME, RECORDED)


def fill(buffer: Any, source: Iterator[feed.Step], n_steps: int, rng: np.random.Generator) -> None:
    infos = [{} for _ in range(feed.N_ENVS)]
    for step in itertools.islice(source, n_steps):
        actions = rng.integers(0, 9, (feed.N_ENVS, 1))
        buffer.add(step.obs, step.next_obs, actions, rng.random(feed.N_ENVS, np.float32), step.dones, infos)


class Peak:
    """Peak of the resident set inside the ``with`` block, relative to its start."""

    def __enter__(self) -> Peak:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = _status("VmHWM") - self._before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def timed(call: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def ours(folder: str, n_transitions: int) -> dict[str, Any]:
    """Full saves, incremental saves and a load, each with and without waiting for the disk."""
    from sb3_extra_buffers.compressed import CompressedReplayBuffer
    from sb3_extra_buffers.files import load, save

    # large enough for the transitions added later, so that nothing is overwritten
    capacity = n_transitions + 3 * REPEATS * NEW
    buffer = CompressedReplayBuffer(capacity, *spaces(), device="cpu", n_envs=feed.N_ENVS)
    source, rng = steps(), np.random.default_rng(0)
    fill(buffer, source, n_transitions // feed.N_ENVS, rng)
    result: dict[str, Any] = {"held_bytes": buffer.memory_usage().total}
    with Peak() as peak:
        save(buffer, Path(folder) / "peak")
    result["save_peak_bytes"] = peak.bytes
    for name, sync in (("", True), ("unsynced_", False)):
        full_seconds, incremental_seconds = [], []
        for repeat in range(REPEATS):
            target = Path(folder) / f"{name}{repeat}"
            seconds, report = timed(lambda: save(buffer, target, sync=sync))  # noqa: B023  # called immediately
            full_seconds.append(seconds)
            if repeat + 1 < REPEATS:
                shutil.rmtree(target)
        result[f"{name}save_s"] = statistics.median(full_seconds)
        result["bytes"] = report.n_bytes
        for _ in range(REPEATS):
            fill(buffer, source, NEW // feed.N_ENVS, rng)
            seconds, report = timed(lambda: save(buffer, target, sync=sync))  # noqa: B023  # called immediately
            if not report.incremental:
                raise AssertionError("a second save was not incremental; no result is reported")
            incremental_seconds.append(seconds)
        result |= {f"{name}incremental_s": statistics.median(incremental_seconds), "incremental_bytes": report.n_bytes}
    result["load_s"], loaded = timed(lambda: load(target))
    check(buffer, loaded)
    shutil.move(target, Path(folder) / "saved")
    return result


def check(buffer: Any, loaded: Any) -> None:
    """Refuse to report on files that do not load as what was saved."""
    for seed in range(3):
        batches = []
        for each in (buffer, loaded):
            np.random.seed(seed)  # noqa: NPY002  # SB3 draws from this generator
            batches.append(each.sample(64))
        for mine, other in zip(*batches, strict=True):
            if mine is not None and not (mine == other).all():
                raise AssertionError("the loaded buffer returns other samples; no result is reported")


def theirs(folder: str, n_transitions: int) -> dict[str, Any]:
    """SB3's buffer with ``optimize_memory_usage=True``, pickled as SB3 does it."""
    from stable_baselines3.common.buffers import ReplayBuffer
    from stable_baselines3.common.save_util import save_to_pkl

    buffer = ReplayBuffer(
        n_transitions, *spaces(), device="cpu", n_envs=feed.N_ENVS,
        optimize_memory_usage=True, handle_timeout_termination=False,
    )  # fmt: skip
    fill(buffer, steps(), n_transitions // feed.N_ENVS, np.random.default_rng(0))
    path = Path(folder) / "buffer.pkl"
    taken = []
    with Peak() as peak:
        save_to_pkl(path, buffer)
    for _ in range(3):
        taken.append(timed(lambda: save_to_pkl(path, buffer))[0])
    return {
        "sb3_save_s": statistics.median(taken),
        "sb3_bytes": path.stat().st_size,
        "sb3_save_peak_bytes": peak.bytes,
    }


def opening(folder: str, n_transitions: int) -> dict[str, Any]:
    """Open the saved buffer, after a warm-up that imports and compiles everything."""
    from sb3_extra_buffers.compressed import CompressedReplayBuffer

    warm = CompressedReplayBuffer(64, *spaces(), device="cpu", n_envs=feed.N_ENVS)
    fill(warm, steps(), 16, np.random.default_rng(0))
    warm.save(Path(folder) / "warm")
    CompressedReplayBuffer.open(Path(folder) / "warm").sample(32)
    gc.collect()
    before = _status("VmRSS")
    seconds, buffer = timed(lambda: CompressedReplayBuffer.open(Path(folder) / "saved"))
    grown = _status("VmRSS") - before
    if buffer.size() * feed.N_ENVS < n_transitions:
        raise AssertionError(f"opened {buffer.size() * feed.N_ENVS} transitions, but {n_transitions} were saved")
    sampled = [timed(lambda: buffer.sample(256))[0] for _ in range(50)]
    return {"open_s": seconds, "open_resident_bytes": grown, "opened_sample256_s": statistics.median(sampled)}


PARTS = {"ours": ours, "theirs": theirs, "opening": opening}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=100_000)
    parser.add_argument("--folder", help="where to write files, on the disk to be measured")
    parser.add_argument("--no-sb3", action="store_true", help="leave out SB3's pickle")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](options.folder, options.transitions)))
        return
    feed.record(GAME, RECORDED)
    row: dict[str, Any] = run_info() | {"game": GAME, "n_transitions": options.transitions}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for part in ("ours", "opening") if options.no_sb3 else ("ours", "opening", "theirs"):
            print(f"measuring {part}", file=sys.stderr)
            arguments = ["--part", part, "--folder", folder, "--transitions", str(options.transitions)]
            row |= run_child("benchmarks.files", *arguments)
    replace_rows(DATA / "files.csv", [row], ("n_transitions",))
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
