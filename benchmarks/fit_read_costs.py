"""Fits the costs of reading and writing in ``kernels/policy.py``, by which ``auto`` compares methods.

Stores of recorded streams are written and read with each method. ``--save`` keeps the measurements in a file,
``--load`` fits those of a file again. The result is printed as the tables of ``kernels/policy.py``. Costs are those of
one thread: run it with ``OMP_NUM_THREADS=1 taskset -c 0``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from benchmarks import feed
from sb3_extra_buffers.codecs.registry import get_codec, is_available, parse_method
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import ExtraBuffersError
from sb3_extra_buffers.kernels import policy
from sb3_extra_buffers.stores import base, packed, raw, segments
from sb3_extra_buffers.stores.layout import find_layout
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.registry import find_store

METHODS = (
    "none",
    "delta",
    "delta2",
    "delta3",
    "scroll",
    "scroll2",
    "camera",
    "zstd1",
    "zstd3",
    "gzip1",
    "igzip1",
    "lz4-frame/1",
    "rle-jit",
    "palette",
)
BATCH, REPEATS = 256, 40
TRIAL = 256

Array = npt.NDArray[Any]


class Stream(NamedTuple):
    """A recording, and how it is stacked."""

    name: str
    n_steps: int
    stack: int = 1
    channels_last: bool = True


STREAMS = (
    *(Stream(name, 5000, 4, False) for name in ("Pong", "MsPacman", "BeamRider", "Enduro")),
    Stream("MsPacman", 5000),
    Stream("carracing", 500),
    Stream("crafter", 1000),
    Stream("minigrid", 1000),
    Stream("minigrid-full", 1000),
    Stream("scroller", 1000),
    Stream("vizdoom-rgb", 1000),
    Stream("video", 500),
    Stream("video-noise", 500),
    Stream("noise", 500),
    Stream("dmc-cheetah", 1000),
    Stream("metaworld", 500),
    Stream("miniworld", 1000),
    Stream("depth", 500),
)  # fmt: skip


class Measured(NamedTuple):
    """One method on one stream: what was predicted from its first observations, and what was measured."""

    stream: str
    method: str
    kind: str
    work: list[float]
    frame_bytes: int
    encoded: float
    read_ns: float
    write_ns: float
    total: float  # bytes per observation and its successor
    trial_bytes: float


def measure(stream: Stream, methods: tuple[str, ...], limit: int) -> Iterator[Measured]:
    """Write and read ``stream`` with each of ``methods``."""
    steps = []
    for step in feed.steps(stream.name, stream.n_steps, stream.stack, stream.channels_last):
        steps.append(step)
        if len(steps) == limit:
            break
    obs = steps[0].obs
    spec, n_envs = ObsSpec(obs.shape[1:], obs.dtype), len(obs)
    rows = [(spec.to_rows(np.ascontiguousarray(s.obs)), spec.to_rows(np.ascontiguousarray(s.next_obs))) for s in steps]
    n_steps, draw = len(rows), np.random.default_rng(0)
    batches = []
    for _ in range(REPEATS):
        chosen = draw.integers(0, n_steps * n_envs, BATCH)
        batches.append(np.stack([chosen, chosen + n_steps * n_envs]))
    first = np.concatenate([part for pair in rows[: max(TRIAL // (2 * n_envs), 4)] for part in pair])
    first_streams = np.tile(np.arange(n_envs), len(first) // n_envs)
    layout = find_layout(spec, [first[first_streams == e] for e in range(n_envs)])
    for method in methods:
        try:
            codec = get_codec(method).bind(layout.frame_spec)
        except ExtraBuffersError:
            continue
        caught: list[tuple[str, policy.ReadWork]] = []

        def catch(kind: str, work: policy.ReadWork, caught: list[Any] = caught) -> float:
            caught.append((kind, work))
            return 0.0

        kind_of = find_store(codec, layout)
        for module in (base, packed, raw, segments):
            module.read_ns = catch  # type: ignore[attr-defined]  # what the trial asks for is what is fitted
        trial = kind_of.trial(layout, codec, first_streams, first, n_envs)
        for module in (base, packed, raw, segments):
            module.read_ns = policy.read_ns  # type: ignore[attr-defined]
        store = ObservationStore(spec, n_envs, method)
        store.allocate(n_steps * n_envs)
        store.allocate(n_steps * n_envs)
        seconds = []
        for index, (now, then) in enumerate(rows):
            start = time.process_time()
            store.write_step(index * n_envs, (n_steps + index) * n_envs, now, then)
            seconds.append(time.process_time() - start)
        if not np.array_equal(store.read(np.arange(n_envs)), rows[0][0]):
            raise SystemExit(f"{method} changed {stream.name}; nothing is fitted")
        reads = []
        for batch in batches:
            start = time.process_time()
            store.read(batch)
            reads.append(time.process_time() - start)
        name = f"{stream.name}/{stream.stack}" + ("" if stream.channels_last else "f")
        usage = store.memory_usage().total / (n_steps * n_envs)
        yield Measured(
            name, method, caught[-1][0], list(caught[-1][1]), layout.frame_bytes, trial.frame_bytes,
            1e9 * statistics.median(reads) / BATCH, 1e9 * statistics.mean(seconds[len(seconds) // 4 :]) / n_envs, usage,
            trial.frame_bytes,
        )  # fmt: skip


def fit(features: Array, values: Array) -> Array:
    """Non-negative coefficients that minimise the squared logarithms of the ratios, by reweighted least squares."""
    solution = _solve(features / values[:, None], np.ones(len(values)))
    for _ in range(30):
        # (p - v) / sqrt(p v) is nearly log(p / v)
        weights = 1 / np.sqrt(values * np.maximum(features @ solution, 0.05 * values))
        solution = _solve(features * weights[:, None], values * weights)
    return solution


def _solve(features: Array, values: Array) -> Array:
    """Least squares, negative coefficients dropped one after the other."""
    active = [i for i in range(features.shape[1]) if features[:, i].any()]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-30)
    result = np.zeros(features.shape[1])
    while active:
        # a weak pull to zero decides between features that are nearly proportional
        matrix = np.concatenate([features[:, active] / scale[active], 1e-3 * np.eye(len(active))])
        target = np.concatenate([values, np.zeros(len(active))])
        solution = np.linalg.lstsq(matrix, target, rcond=None)[0]
        if (solution >= 0).all():
            result[active] = solution / scale[active]
            break
        active.pop(int(np.argmin(solution)))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--streams", nargs="+", help="names of recordings, all by default")
    parser.add_argument("--limit", type=int, default=1000, help="steps of each stream")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    args = parser.parse_args()
    if args.load:
        measured = [Measured(*row) for row in json.loads(args.load.read_text())]
        measured = [row for row in measured if not args.streams or row.stream.split("/")[0] in args.streams]
    else:
        methods = tuple(m for m in args.methods if is_available(parse_method(m)[0]))
        streams = [s for s in STREAMS if not args.streams or s.name in args.streams]
        measured = [row for stream in tqdm(streams) for row in measure(stream, methods, args.limit)]
        if args.save:
            args.save.write_text(json.dumps(measured))
    for kind in sorted({row.kind for row in measured}):
        rows = [row for row in measured if row.kind == kind]
        # what a method does not compress is stored as it is, and never chosen
        rows = [row for row in rows if kind == "none" or row.encoded < 0.95 * row.frame_bytes]
        work = np.array([[1.0, *row.work] for row in rows])
        reads = np.array([row.read_ns for row in rows])
        sizes = np.array([[1.0, row.frame_bytes, row.encoded] for row in rows])
        writes = np.array([row.write_ns for row in rows])
        read_costs, write_costs = fit(work, reads), fit(sizes, writes)
        print(f'    "{kind}": ReadCosts({", ".join(f"{c:.3g}" for c in read_costs)}),')
        print(f'    "{kind}": WriteCosts({", ".join(f"{c:.3g}" for c in write_costs)}),')
        for row, read, write in zip(rows, work @ read_costs, sizes @ write_costs, strict=True):
            print(
                f"        # {row.stream:<16}{row.method:<12} bytes {row.total:9.0f} (trial {row.trial_bytes:9.0f})  "
                f"read {row.read_ns / 1e3:8.1f} us, fitted {read / row.read_ns:5.2f}x   "
                f"write {row.write_ns / 1e3:8.1f} us, fitted {write / row.write_ns:5.2f}x"
            )


if __name__ == "__main__":
    main()
