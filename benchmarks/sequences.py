"""Windows of consecutive steps: the stores against slices of a dense array, and `CompressedStorage` against TorchRL's.

Every measurement runs in a fresh process; the two sides take turns, and must return the same windows before they are
timed. Writes ``sequences.csv`` and the table of ``docs/sequences.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import feed, render
from benchmarks.results import DATA, replace_rows, run_child, run_info

Array = npt.NDArray[Any]

BATCH, LENGTH = 16, 65
COLUMNS = [
    "date", "machine", "versions", "game", "what", "n_frames", "threads", "p20_us", "p50_us", "p80_us", "plain_p20_us",
    "plain_p50_us", "plain_p80_us", "ratio", "resident_bytes", "plain_bytes",
]  # fmt: skip
# what is stored, and how it is called in the table
STORES = {
    "frames": "single frames, against slices of a NumPy array",
    "stacks": "stacks of 4 along the first axis, against slices of a NumPy array",
    "stacks, last axis": "stacks of 4 along the last axis, against slices of a NumPy array",
    "newest frames": "newest frames of these stacks, against slices of an array of frames",
}
SLICES, MEMORY = "SliceSampler", "memory"
TITLES = STORES | {SLICES: "single frames, `SliceSampler` over `CompressedStorage` against `LazyTensorStorage`"}


def compare(
    ours: Callable[[int], Any], theirs: Callable[[int], Any], equal: Callable[[Any, Any], bool], repeats: int
) -> dict[str, Any]:
    """Times of two calls that take turns, each called with a seed; raises unless they return the same."""
    for seed in range(5):
        if not equal(ours(seed), theirs(seed)):
            raise AssertionError("the two sides return different windows; they are not timed")
    times: tuple[list[float], list[float]] = ([], [])
    for seed in range(repeats):
        for call, seconds in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            result = call(seed)
            seconds.append(1e6 * (time.perf_counter() - start))
            del result
    figures: dict[str, Any] = {"ratio": float(np.median(np.divide(*times)))}
    for prefix, seconds in zip(("", "plain_"), times, strict=True):
        figures |= {f"{prefix}p{p}_us": float(np.percentile(seconds, p)) for p in (20, 50, 80)}
    return figures


def windows(game: str, n_steps: int, what: str, repeats: int) -> dict[str, Any]:
    """`StoreView.read_windows` of ``BATCH`` windows, and copies of the same slices of a dense array."""
    from sb3_extra_buffers.codecs.spec import ObsSpec
    from sb3_extra_buffers.stores.observation import ObservationStore
    from sb3_extra_buffers.stores.view import StoreView
    from sb3_extra_buffers.stores.windows import window_steps

    stack, newest_only = 1 if what == "frames" else feed.STACK, what == "newest frames"
    last_axis = what in ("stacks, last axis", "newest frames")
    store, view, dense = None, None, np.zeros(0, np.uint8)
    for step, given in enumerate(feed.steps(game, n_steps, stack, last_axis)):
        if store is None or view is None:
            store = ObservationStore(ObsSpec(given.obs.shape[1:], given.obs.dtype), feed.N_ENVS, "auto")
            view = StoreView(store, (n_steps, feed.N_ENVS))
            # a window is contiguous in memory, which is best for slices
            shape = given.obs.shape[1:-1] if newest_only else given.obs.shape[1:]
            dense = np.zeros((feed.N_ENVS, n_steps, *shape), given.obs.dtype)
        view[step] = given.obs
        dense[:, step] = given.obs[..., -1] if newest_only else given.obs

    def draw(seed: int) -> tuple[Array, Array]:
        rng = np.random.default_rng(seed)
        return rng.integers(0, n_steps - LENGTH, BATCH), rng.integers(0, feed.N_ENVS, BATCH)

    def ours(seed: int) -> Array:
        starts, envs = draw(seed)
        found: Array = view.read_windows(window_steps(starts, LENGTH, n_steps), envs, newest_only)
        return found

    def theirs(seed: int) -> Array:
        starts, envs = draw(seed)
        return np.stack([dense[env, start : start + LENGTH] for start, env in zip(starts, envs, strict=True)])

    return compare(ours, theirs, lambda a, b: bool(np.array_equal(a, b)), repeats)


def trajectories(game: str, n_steps: int) -> Iterator[Any]:
    """The recording as TensorDicts of 64 steps, one environment after the other, as `SliceSampler` needs them."""
    import torch
    from tensordict import TensorDict

    folder = feed.record(game, n_steps)
    ends = dict(np.load(folder / "ends.npz"))
    terminal = dict(zip(map(tuple, ends["where"].tolist()), ends["frames"], strict=True))
    # mapped, so that the recording does not count as memory of the process
    shape = (n_steps + 1, *(int(length) for length in ends["shape"]))
    frames = np.memmap(folder / "frames.bin", ends["frames"].dtype, "r", shape=shape)
    for env in range(feed.N_ENVS):
        for first in range(0, n_steps, 64):
            stop = min(first + 64, n_steps)
            obs, next_obs = (np.array(frames[first + i : stop + i, env, ..., 0]) for i in (0, 1))
            dones = ends["dones"][first:stop, env].copy()
            for number in np.flatnonzero(dones):
                next_obs[number] = terminal[first + int(number), env][..., 0]
            dones[-1] |= stop == n_steps
            done = torch.from_numpy(dones)[:, None]
            yield TensorDict(
                {
                    "observation": torch.from_numpy(obs),
                    "action": torch.zeros(len(obs), dtype=torch.int64),
                    "next": {
                        "observation": torch.from_numpy(next_obs),
                        "reward": torch.zeros(len(obs), 1),
                        "done": done,
                        "terminated": done.clone(),
                    },
                },
                batch_size=[len(obs)],
            )


def make_replay(what: str, size: int) -> Any:
    from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

    from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage

    storage = {"CompressedStorage": CompressedStorage, "LazyTensorStorage": LazyTensorStorage}[what](size)
    sampler = SliceSampler(slice_len=LENGTH, end_key=("next", "done"), cache_values=True)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH * LENGTH)


def slices(game: str, n_steps: int, what: str, repeats: int) -> dict[str, Any]:
    """``sample()`` of a TorchRL replay buffer with a `SliceSampler`."""
    import torch

    replays = [make_replay(name, n_steps * feed.N_ENVS) for name in ("CompressedStorage", "LazyTensorStorage")]
    for data in trajectories(game, n_steps):
        for replay in replays:
            replay.extend(data.clone())

    def sample(number: int) -> Callable[[int], Any]:
        def call(seed: int) -> Any:
            torch.manual_seed(seed)
            return replays[number].sample()

        return call

    return compare(sample(0), sample(1), lambda a, b: bool((a == b).all()), repeats)


def memory(game: str, n_steps: int, what: str, repeats: int) -> dict[str, Any]:
    """Growth of the resident set while a replay buffer is filled."""
    from benchmarks.measure import resident

    warm = make_replay(what, 2000)
    for _, data in zip(range(30), trajectories(game, n_steps), strict=False):
        warm.extend(data)
    warm.sample()
    del warm
    replay = make_replay(what, n_steps * feed.N_ENVS)
    before = resident()
    for data in trajectories(game, n_steps):
        replay.extend(data)
    return {"resident_bytes": resident() - before}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"windows": windows, "slices": slices, "memory": memory}


def measure(options: argparse.Namespace) -> None:
    """Run all jobs and write their rows."""
    n_steps = options.frames // feed.N_ENVS
    feed.record(options.game, n_steps)

    def run(job: str, what: str) -> dict[str, Any]:
        arguments = [job, options.game, str(n_steps), what, str(options.repeats)]
        return run_child("benchmarks.sequences", "--threads", str(options.threads), "--child", *arguments)

    for what in (*STORES, SLICES, MEMORY):
        if options.only and what not in options.only:
            continue
        if what == MEMORY:
            dense = run("memory", "LazyTensorStorage")["resident_bytes"]
            figures = run("memory", "CompressedStorage") | {"plain_bytes": dense}
            figures["ratio"] = figures["resident_bytes"] / dense
        else:
            figures = run("slices" if what == SLICES else "windows", what)
        print(what, figures, file=sys.stderr)
        info = {"game": options.game, "what": what, "n_frames": n_steps * feed.N_ENVS}
        row = run_info("torchrl", "tensordict") | info | {"threads": options.threads or ""} | figures
        if not options.quick:
            rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            row = {column: rounded.get(column, "") for column in COLUMNS}
            replace_rows(DATA / "sequences.csv", [row], ("game", "what"))


def section(game: str = "MsPacman") -> str:
    """The table of ``docs/sequences.md``."""
    rows = {row["what"]: row for row in render.rows("sequences") if row["game"] == game}
    lines = [
        [title, render.quantity(float(row["p50_us"]), "us"), render.factor(float(row["ratio"]))]
        for title, row in ((title, rows.get(what)) for what, title in TITLES.items())
        if row is not None
    ]
    text = render.table([f"{BATCH} windows of {LENGTH} steps, 84x84", "time", "relative"], lines)
    info = next(iter(rows.values()))
    if MEMORY in rows:
        held = rows[MEMORY]
        text += (
            f"\nA TorchRL replay buffer of {int(held['n_frames']):,} such transitions takes "
            f"{render.quantity(float(held['resident_bytes']), 'B')}, {render.percent(float(held['ratio']))} of the "
            "memory that `LazyTensorStorage` takes.\n"
        )
    stamp = f"{game}, {int(info['n_frames']):,} frames, measured {info['date']} on {info['machine']}"
    return f"\n{text}\n{stamp}; {info['versions']}.\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="MsPacman")
    parser.add_argument("--frames", type=int, default=100_000, help="of all environments together")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--threads", type=int, default=0, help="threads of torch (default: torch decides)")
    parser.add_argument("--only", nargs="+", help="measure only these, such as frames SliceSampler memory")
    parser.add_argument("--quick", action="store_true", help="20,000 frames and 20 repeats; nothing is written")
    parser.add_argument("--render", action="store_true", help="only render the page from the CSV file")
    parser.add_argument("--child", nargs=5, metavar=("JOB", "GAME", "STEPS", "WHAT", "REPEATS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        import torch

        torch.set_num_threads(options.threads or torch.get_num_threads())
        job, game, n_steps, what, repeats = options.child
        print(json.dumps(JOBS[job](game, int(n_steps), what, int(repeats))))
        return
    if options.quick:
        options.frames, options.repeats = 20_000, 20
    if not options.render:
        measure(options)
    page = render.DOCS / "sequences.md"
    if not options.quick and page.exists():
        render.insert(page, "sequences", section(options.game))


if __name__ == "__main__":
    main()
