"""Compares replay buffers with SB3's on many kinds of observations; writes ``benchmarks/data/observations.csv``.

Replays recorded streams of four environments into SB3's `ReplayBuffer`, with and without ``optimize_memory_usage``,
and into a `CompressedReplayBuffer` with ``auto`` and with every method that applies. The growth of the resident set is
measured in a separate process for each buffer. Times are measured in one process: ``add`` of all buffers interleaved,
and ``sample`` of each buffer interleaved with SB3's. If a batch differs from SB3's, nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks import feed, headline, streams
from benchmarks.measure import resident
from benchmarks.results import DATA, replace_rows, run_child, run_info
from benchmarks.timing import interleave, quantiles

SB3, OPTIMIZED = "sb3", "sb3 optimized"
# methods that do not apply to a stream, and names that the registry does not have, are left out
METHODS = ("none", "delta", "scroll", "camera", "palette", "table", "zstd1")
BATCHES = (32, 256)
# smaller observations are vectors, which no method but none is meant for
SMALL_BYTES = 512
N_VECTORS = 100_000  # transitions
# the first calls with each buffer are not timed
WARM_UP_STEPS = 60
WARM_UP_ROUNDS, MAX_ROUNDS = 2, 300

Row = dict[str, str]


class Stream(NamedTuple):
    """A recording and how its frames are put together as observations."""

    recording: str
    kind: str
    stack: int = 1
    channels_last: bool = False
    n_steps: int | None = None  # of every environment; None for all that were recorded

    @property
    def name(self) -> str:
        if self.kind == "Atari":
            return self.recording
        stacked = f"{self.recording}-x{self.stack}" if self.stack > 1 else self.recording
        return f"{stacked}-last" if self.channels_last else stacked


def _catalogue() -> dict[str, Stream]:
    """All streams by name; images have their channels first, as SB3 transposes them, unless the name ends in -last."""
    last = {"channels_last": True}
    entries = [
        *(Stream(game, "Atari", 4, n_steps=3000) for game in headline.GAMES),
        Stream("carracing", "games"),
        Stream("carracing", "games", **last),
        Stream("carracing", "games", 4),
        Stream("carracing", "games", 4, **last),
        Stream("crafter", "games"),
        Stream("crafter", "games", **last),
        Stream("minigrid", "games"),
        Stream("minigrid-full", "games", **last),
        Stream("scroller", "games"),
        Stream("scroller", "games", **last),
        Stream("vizdoom-rgb", "games"),
        Stream("vizdoom-rgb", "games", 4, n_steps=500),
        Stream("miniworld", "games"),
        Stream("highway", "games", 4),
        Stream("dmc-cheetah", "robots", **last),
        Stream("dmc-cheetah", "robots", 3),
        Stream("dmc-walker", "robots", 3, **last),
        Stream("metaworld", "robots"),
        Stream("video", "video"),
        Stream("video", "video", **last),
        Stream("video-fixed", "video", **last),
        Stream("video-noise", "video with noise", **last),
        Stream("depth", "depth"),
        Stream("depth-uint16", "depth"),
        Stream("dmc-cheetah-float", "float images", 3),
        Stream("video-float", "float images", **last),
        Stream("halfcheetah", "vectors"),
        Stream("halfcheetah-float32", "vectors"),
        Stream("highway-vector", "vectors"),
        Stream("17 floats", "vectors"),
        Stream("noise", "noise", **last),
    ]
    return {stream.name: stream for stream in entries}


STREAMS = _catalogue()
#: Streams of float pixels, and the same images as uint8.
FLOAT_PAIRS = {"dmc-cheetah-float-x3": "dmc-cheetah-x3", "video-float-last": "video-last"}


def recorded_steps(stream: Stream) -> int:
    """Steps of every environment in the recording."""
    if stream.recording == "17 floats":
        return N_VECTORS // feed.N_ENVS
    if stream.recording in streams.STREAMS:
        return streams.STREAMS[stream.recording].n_steps
    return headline.n_steps_of(stream.recording)


def can_replay(stream: Stream) -> bool:
    """Whether the stream is recorded, or a game that `feed.record` can play with the packages of the benchmarks."""
    if stream.recording not in streams.STREAMS:
        return True
    return (feed.cache_dir() / f"{stream.recording}-{recorded_steps(stream)}" / "ends.npz").exists()


def replay(stream: Stream) -> Iterator[feed.Step]:
    """The recording from its start, once."""
    if stream.recording == "17 floats":
        return headline.stream(stream.recording, recorded_steps(stream))
    return feed.steps(stream.recording, recorded_steps(stream), stream.stack, stream.channels_last)


def repeat(stream: Stream) -> Iterator[feed.Step]:
    """The recording again and again."""
    while True:
        yield from replay(stream)


class Case:
    """What all buffers of one stream have in common."""

    def __init__(self, stream: Stream, limit: int | None = None) -> None:
        from gymnasium import spaces

        first = next(replay(stream)).obs
        self.stream, self.shape, self.dtype = stream, first.shape[1:], first.dtype
        self.obs_bytes = first.nbytes // feed.N_ENVS
        self.is_vector = self.obs_bytes < SMALL_BYTES
        # recordings of vectors are repeated: a short one would take less memory than the resident set varies by
        n_steps = N_VECTORS // feed.N_ENVS if self.is_vector else stream.n_steps or recorded_steps(stream)
        self.n_steps = min(n_steps, limit or n_steps)
        self.n_overwritten = self.n_steps // 4
        is_float = self.dtype.kind == "f"
        low, high = (-np.inf, np.inf) if is_float else (0, np.iinfo(self.dtype).max)
        self.obs_space = spaces.Box(low, high, self.shape, self.dtype.type)
        self.action_space = spaces.Box(-1, 1, (6,), np.float32) if self.is_vector else spaces.Discrete(4)
        self._random = np.random.default_rng(0)

    def make(self, method: str, n_steps: int | None = None, optimize: bool = False) -> Any:
        """An empty buffer; ``optimize`` for the arguments of SB3's smallest buffer."""
        from stable_baselines3.common.buffers import ReplayBuffer

        from sb3_extra_buffers.compressed import CompressedReplayBuffer

        optimize = optimize or method == OPTIMIZED
        arguments: dict[str, Any] = {
            "device": "cpu",
            "n_envs": feed.N_ENVS,
            "optimize_memory_usage": optimize,
            "handle_timeout_termination": not optimize,
        }
        size = (n_steps or self.n_steps) * feed.N_ENVS
        if method in (SB3, OPTIMIZED):
            return ReplayBuffer(size, self.obs_space, self.action_space, **arguments)
        return CompressedReplayBuffer(size, self.obs_space, self.action_space, compression_method=method, **arguments)

    def transition(self, step: feed.Step) -> tuple[Any, ...]:
        """The arguments of ``add``, with random actions and rewards."""
        shape = (feed.N_ENVS, *(self.action_space.shape or (1,)))
        actions = self._random.integers(0, 4, shape).astype(self.action_space.dtype)
        rewards = self._random.random(feed.N_ENVS, np.float32)
        return step.obs, step.next_obs, actions, rewards, step.dones, [{} for _ in range(feed.N_ENVS)]

    def applicable(self, methods: list[str]) -> list[str]:
        """Those of ``methods`` that can store these observations, ``auto`` first."""
        return sorted(filter(self._applies, methods), key=lambda method: method != "auto")

    def _applies(self, method: str) -> bool:
        from sb3_extra_buffers.codecs.registry import get_codec
        from sb3_extra_buffers.codecs.spec import ObsSpec
        from sb3_extra_buffers.errors import ExtraBuffersError

        if method == "auto":
            return True
        if self.is_vector and method != "none":
            return False
        if method.startswith("palette") and (self.dtype != np.uint8 or self._frame_channels() not in (3, 4)):
            return False
        if method.startswith("table") and self.dtype == np.uint8:
            return False
        try:
            get_codec(method).bind(ObsSpec(self.shape, self.dtype))
        except ExtraBuffersError:
            return False
        return True

    def _frame_channels(self) -> int:
        """Channels of one frame of the stack."""
        return self.shape[-1 if self.stream.channels_last else 0] // self.stream.stack

    def warm_up(self, methods: list[str]) -> None:
        """Import, compile and allocate everything that happens only once."""
        for method in methods:
            buffer = self.make(method, WARM_UP_STEPS)
            for _, step in zip(range(WARM_UP_STEPS + 10), repeat(self.stream), strict=False):
                buffer.add(*self.transition(step))
            for batch in BATCHES:
                buffer.sample(batch)
            resident()


def array_bytes(buffer: Any) -> int:
    """Bytes of the arrays of SB3's buffer."""
    arrays: list[feed.Array] = [column for column in vars(buffer).values() if isinstance(column, np.ndarray)]
    return sum(array.nbytes for array in arrays)


def memory(case: Case, methods: list[str]) -> dict[str, Any]:
    """Bytes of buffers that were filled and partly overwritten: by the resident set, and as they report themselves."""
    case.warm_up(methods)
    result: dict[str, Any] = {name: {"reported_bytes": array_bytes(case.make(name))} for name in (SB3, OPTIMIZED)}
    for method in methods:
        # forked, to begin with the same memory for each method, everything imported and compiled
        with multiprocessing.get_context("fork").Pool(1) as pool:
            result[method] = pool.apply(grow, (case, method))
    return result


def grow(case: Case, method: str) -> dict[str, Any]:
    """Growth of this process by one buffer. It has the arguments of SB3's smallest one, so that it has its columns."""
    # the allocators keep some of the memory that the first buffers needed temporarily
    case.warm_up([method] * 2)
    source = repeat(case.stream)
    # the feed allocates what it needs with the first steps
    next(source), next(source)
    before = resident()
    buffer = case.make(method, optimize=True)
    for _ in range(case.n_steps + case.n_overwritten):
        buffer.add(*case.transition(next(source)))
    buffer.sample(BATCHES[-1])
    grown = resident() - before
    usage = buffer.memory_usage()
    chosen, _, why = usage.codecs[""].partition(" (")
    return {
        "resident_bytes": grown,
        "reported_bytes": usage.total,
        "chosen": chosen,
        "why": why.removesuffix(")"),
    }


def speed(case: Case, methods: list[str], seconds: float) -> dict[str, Any]:
    """Times of all buffers and of SB3's next to each: p20, p50 and p80 in microseconds, and seconds for filling.

    Samples each batch size for about ``seconds`` with ``auto``, less with the other methods.
    """
    names = [SB3, OPTIMIZED, *methods]
    case.warm_up(names)
    buffers = {name: case.make(name) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    source, order = repeat(case.stream), np.random.default_rng(0)
    for _ in range(case.n_steps + case.n_overwritten):
        columns = case.transition(next(source))
        # shuffled: what a call finds in the caches depends on the one before it
        shuffled = [names[i] for i in order.permutation(len(names))]
        new = interleave([_add(buffers[name], columns) for name in shuffled], 1)
        for name, times in zip(shuffled, new, strict=True):
            taken[name] += times
    check(case.stream, buffers)
    result: dict[str, Any] = {}
    for name, times in taken.items():
        filling, overwriting = times[: case.n_steps], times[case.n_steps :]
        result[name] = {"fill_s": sum(filling), **_cuts("add", filling), **_cuts("overwrite", overwriting)}
    sb3 = result.pop(SB3)
    for name in names[1:]:
        result[name] |= _of_sb3(sb3)
        for batch in BATCHES:
            effort = (seconds, 12) if name == "auto" else (seconds / 4, 5)
            pair = sample_times(buffers[name], buffers[SB3], batch, *effort)
            ours, theirs = (_cuts(f"sample{batch}", times) for times in pair)
            result[name] |= ours | _of_sb3(theirs)
    return result


def sample_times(ours: Any, theirs: Any, batch: int, seconds: float, min_rounds: int) -> headline.Times:
    """Seconds of each call of ``sample``, for about ``seconds`` in all, but at least ``min_rounds`` calls of each.

    Two buffers at a time, so that every method is followed by the same call.
    """
    calls = [_sample(ours, batch), _sample(theirs, batch)]
    interleave(calls, WARM_UP_ROUNDS)
    taken: headline.Times = [[], []]
    end = time.perf_counter() + seconds
    for number in range(MAX_ROUNDS):
        for times, new in zip(taken, interleave(calls, 1, number), strict=True):
            times += new
        if number + 1 >= min_rounds and time.perf_counter() > end:
            break
    return taken


def _add(buffer: Any, columns: tuple[Any, ...]) -> Callable[[], None]:
    return lambda: buffer.add(*columns)


def _sample(buffer: Any, batch: int) -> Callable[[], Any]:
    return lambda: buffer.sample(batch)


def _of_sb3(figures: dict[str, float]) -> dict[str, float]:
    return {f"sb3_{name}": value for name, value in figures.items()}


def _cuts(figure: str, times: list[float]) -> dict[str, float]:
    return dict(zip((f"{figure}_us_{cut}" for cut in ("p20", "p50", "p80")), quantiles(times), strict=True))


def check(stream: Stream, buffers: dict[str, Any]) -> None:
    """End the process unless every compressed buffer returns the batches of SB3's at the same seeds, bit for bit."""
    for seed in range(4):
        expected = _batch(buffers[SB3], seed)
        for name, buffer in buffers.items():
            # SB3 draws other steps with optimize_memory_usage, and returns the next episode's first observations
            if name != OPTIMIZED and not all(map(_identical, _batch(buffer, seed), expected)):
                raise SystemExit(f"{stream.name}, {name}: the batches differ from SB3's; nothing is reported")


def _batch(buffer: Any, seed: int) -> list[Any]:
    np.random.seed(seed)  # noqa: NPY002  # SB3's
    return [part.numpy() for part in buffer.sample(128)[:5]]


def _identical(ours: Any, theirs: Any) -> bool:
    return bool(ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes())


def make_rows(about: dict[str, Any], measured: dict[str, Any]) -> list[Row]:
    """Rows of one stream, each with the figures of SB3's buffers in the same run; SB3's default has none of its own."""
    start = run_info() | about
    sizes = {
        f"{name}_bytes": measured[kind]["reported_bytes"] for name, kind in (("sb3", SB3), ("optimized", OPTIMIZED))
    }
    rows = []
    for method in [name for name in measured if name != SB3]:
        values = {"resident_bytes": "", "chosen": "", "why": ""} | measured[method] | sizes
        rows.append(
            {
                name: f"{value:.5g}" if isinstance(value, float) else str(value)
                for name, value in (start | {"method": method} | values).items()
            }
        )
    return rows


def child(request: dict[str, Any]) -> dict[str, Any]:
    """One measurement in this process, and what was measured."""
    case = Case(STREAMS[request["stream"]], 250 if request["quick"] else None)
    methods = case.applicable(request["methods"])
    if request["what"] == "memory":
        figures = memory(case, methods)
    else:
        figures = speed(case, methods, 0.5 if request["quick"] else 1.6)
    about = {
        "stream": case.stream.name,
        "kind": case.stream.kind,
        "shape": "x".join(map(str, case.shape)),
        "dtype": case.dtype.name,
        "n_transitions": case.n_steps * feed.N_ENVS,
        "obs_bytes": case.obs_bytes,
    }
    return {"about": about, "figures": figures}


def selected(names: list[str] | None) -> list[Stream]:
    """Streams by their names, by those of recordings or by kinds; all without ``names``."""
    if names is None:
        return list(STREAMS.values())
    known = {word for stream in STREAMS.values() for word in (stream.name, stream.recording, stream.kind)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown streams: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return [s for s in STREAMS.values() if {s.name, s.recording, s.kind} & set(names)]


def run(chosen: list[Stream], options: argparse.Namespace) -> None:
    """Measure streams one after another; a stream that fails does not stop the others."""
    from benchmarks import observation_tables

    missing = [stream.name for stream in chosen if not can_replay(stream)]
    if missing:
        print(f"not recorded, left out: {', '.join(missing)}; see benchmarks/streams.py", file=sys.stderr)
    chosen = [stream for stream in chosen if stream.name not in missing]
    failed, rows = [], []
    with tqdm(total=2 * len(chosen), file=sys.stderr) as bar:
        for stream in chosen:
            try:
                new = measure(stream, options, bar)
            except SystemExit as problem:
                failed.append(f"{stream.name}: {problem}")
                continue
            if not options.quick:
                replace_rows(options.output, new, ("stream", "method"))
            rows += new
            bar.write(observation_tables.report(new))
    if rows:
        print(observation_tables.targets(rows))
    if failed:
        raise SystemExit("\n".join(failed))


def measure(stream: Stream, options: argparse.Namespace, bar: Any) -> list[Row]:
    """The rows of one stream, measured in fresh processes."""
    about: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    for what in ("memory", "speed"):
        bar.set_description(f"{stream.name}, {what}")
        request = {"what": what, "stream": stream.name, "methods": options.methods, "quick": options.quick}
        result = run_child("benchmarks.observations", "--child", json.dumps(request))
        about = result["about"]
        for method, figures in result["figures"].items():
            measured.setdefault(method, {}).update(figures)
        bar.update()
    return make_rows(about, measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", help="names of streams or recordings, or kinds (default: all)")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="methods to compare auto with")
    parser.add_argument("--quick", action="store_true", help="short streams, few calls; prints and writes no file")
    parser.add_argument("--output", type=Path, default=DATA / "observations.csv", help="CSV file to write to")
    parser.add_argument("--list", action="store_true", help="list the streams and whether they can be replayed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
        return
    if options.list:
        for stream in STREAMS.values():
            print(f"{stream.name}: {stream.kind}{'' if can_replay(stream) else ', not recorded'}")
        return
    options.methods = ["auto", *(method for method in options.methods if method != "auto")]
    run(selected(options.streams), options)


if __name__ == "__main__":
    main()
