"""Readers in other processes, compared with readers of a buffer of their own: writes ``shared_memory.csv``.

Two processes, each on a core of its own, sample 256 MsPacman stacks in a loop. Each of them alternates between the
owner's buffer, through shared memory, and a private copy of it, so that both meet the same load. A batch that differs
ends the run. ``add`` is measured in the owner, for a private buffer and a shared one in turn: without readers, and
while two readers sample in a loop. Those then compete with the owner for two cores.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import time
from typing import Any

import numpy as np

from benchmarks import feed, render
from benchmarks.results import DATA, factor, quantity, replace_rows, run_info

GAME = "MsPacman"
BATCH = 256
N_READERS = 2


def make_buffer(n_steps: int) -> Any:
    from gymnasium import spaces

    from sb3_extra_buffers.compressed import CompressedReplayBuffer

    space = spaces.Box(0, 255, (feed.STACK, *feed.SIZE), np.uint8)
    return CompressedReplayBuffer(n_steps * feed.N_ENVS, space, spaces.Discrete(9), "cpu", feed.N_ENVS)


def transitions(n_steps: int) -> list[tuple[Any, ...]]:
    rng, infos = np.random.default_rng(0), [{} for _ in range(feed.N_ENVS)]
    return [
        (step.obs, step.next_obs, rng.integers(0, 9, (feed.N_ENVS, 1)), rng.random(feed.N_ENVS, np.float32), step.dones,
         infos)
        for step in feed.steps(GAME, n_steps)
    ]  # fmt: skip


def read(buffer: Any, number: int, name: Any, go: Any, seconds: float, answers: Any) -> None:
    """Sample from a private copy and from shared memory in turn, and answer with the times of both."""
    from sb3_extra_buffers.compressed import SharedReader

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number % os.cpu_count()]})
    reader, rng = SharedReader.open(name.get()), np.random.default_rng(number)
    for _ in range(5):
        steps, envs = rng.integers(0, buffer.size(), BATCH), rng.integers(0, feed.N_ENVS, BATCH)
        for one, other in zip(buffer._samples_at(steps, envs, None), reader.read(steps, envs), strict=True):
            if one is not None and not one.equal(other):
                raise SystemExit("the batches differ")
    go.wait()
    own: list[float] = []
    shared: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pair = [(own, buffer), (shared, reader)]
        for times, source in pair if len(own) % 2 else reversed(pair):
            began = time.perf_counter()
            source.sample(BATCH)
            times.append(time.perf_counter() - began)
    answers.put((own, shared))


def only_read(number: int, name: str, stop: Any) -> None:
    from sb3_extra_buffers.compressed import SharedReader

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number % os.cpu_count()]})
    reader = SharedReader.open(name)
    while not stop.is_set():
        reader.sample(BATCH)


def time_adds(buffers: list[Any], steps: list[tuple[Any, ...]], pause: float = 0.0) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in buffers]
    for number, step in enumerate(steps):
        # the second of two adds finds the step in the caches
        pairs = list(zip(times, buffers, strict=True))
        for each, buffer in pairs if number % 2 else reversed(pairs):
            if pause:
                time.sleep(pause)
            began = time.perf_counter()
            buffer.add(*step)
            each.append(time.perf_counter() - began)
    return times


def row(figure: str, unit: str, shared: list[float], own: list[float]) -> dict[str, Any]:
    """The times through shared memory and those of a private buffer, in ``unit``."""
    scale = {"us": 1e6, "ms": 1e3}[unit]
    result: dict[str, Any] = {"figure": figure, "unit": unit}
    for name, times in (("shared", shared), ("own", own)):
        p20, p50, p80 = (scale * value for value in np.quantile(times, [0.2, 0.5, 0.8]))
        result |= {f"{name}_p20": f"{p20:.6g}", f"{name}_p50": f"{p50:.6g}", f"{name}_p80": f"{p80:.6g}"}
    ratio = statistics.median(shared) / statistics.median(own)
    print(f"{figure}: {quantity(scale * statistics.median(shared), unit)}, {factor(ratio)}")
    return result


def section() -> str:
    """The measurements as ``docs/shared_memory.md`` shows them."""
    rows = [row for row in render.rows("shared_memory") if row["game"] == GAME]
    lines = []
    for each in rows:
        shared, own = float(each["shared_p50"]), float(each["own_p50"])
        figures = [quantity(value, each["unit"]) for value in (shared, own)]
        lines.append([each["figure"], *figures, factor(shared / own)])
    text = render.table(["median", "shared", "a buffer of its own", "relative"], lines)
    stamp = f"{GAME}, measured {rows[0]['date']} on {rows[0]['machine']}; {rows[0]['versions']}."
    return f"\n{text}\n{stamp}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2500, help="steps of each of four environments")
    parser.add_argument("--seconds", type=float, default=5, help="how long the readers run")
    parser.add_argument("--render", action="store_true", help="only render the page from the CSV file")
    arguments = parser.parse_args()
    if not arguments.render:
        measure(arguments)
    render.insert(render.DOCS / "shared_memory.md", "shared memory", section())


def measure(arguments: argparse.Namespace) -> None:
    """Measure everything and write the CSV file."""
    context: Any = mp.get_context("fork")
    steps = transitions(arguments.steps)
    private, shared = make_buffer(arguments.steps), make_buffer(arguments.steps)
    # while it is still private: forked readers then have copies of their own
    time_adds([private, shared], steps)
    name, go, answers = context.Queue(), context.Event(), context.Queue()
    work = [(shared, number, name, go, arguments.seconds, answers) for number in range(N_READERS)]
    readers = [context.Process(target=read, args=each, daemon=True) for each in work]
    for reader in readers:
        reader.start()
    handle = shared.share()
    for _ in readers:
        name.put(handle.name)
    time.sleep(2)
    go.set()
    rows = []
    for number in range(N_READERS):
        own, through = answers.get(timeout=120)
        rows.append(row(f"sample {BATCH}, reader {number + 1} of {N_READERS}", "ms", through, own))
    for reader in readers:
        reader.join()
    own, through = time_adds([private, shared], steps)
    rows.append(row("add, no readers", "us", through, own))
    stop = context.Event()
    readers = [context.Process(target=only_read, args=(i, handle.name, stop), daemon=True) for i in range(N_READERS)]
    for reader in readers:
        reader.start()
    time.sleep(1)
    own, through = time_adds([private, shared], steps[: len(steps) // 5], pause=0.002)
    stop.set()
    rows.append(row(f"add, {N_READERS} readers in a loop", "us", through, own))
    rows = [{**run_info(), "game": GAME, "transitions": len(shared), **each} for each in rows]
    replace_rows(DATA / "shared_memory.csv", rows, ("machine", "game", "figure"))


if __name__ == "__main__":
    main()
