"""`CompressedStorage` compared with TorchRL's storages, each in a fresh process; writes ``torchrl.csv``.

Use ``--threads 1`` on a busy machine, where torch's threads would wait for each other. Storages must return the same
samples before they are timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import feed, render
from benchmarks.results import DATA, KEEP_MEMORY, replace_rows, run_child, run_info

COLUMNS = [
    "date", "machine", "versions", "game", "threads", "what", "n_transitions", "resident_bytes", "plain_bytes",
    "extend_us", "plain_extend_us", "extend64_us", "plain_extend64_us", "sample256_us", "plain_sample256_us",
    "slices_us", "plain_slices_us",
]  # fmt: skip
# transitions for TorchRL's compressed list, which takes a millisecond or more per item
_LIST_SIZE = 4000
# slices of single frames: how many transitions they are drawn from, how many, and their length
_SLICED_SIZE, _N_SLICES, _SLICE = 100_000, 16, 65

_SLICE_SAMPLERS = "SliceSampler", "SliceSamplerWithoutReplacement"


def tensordicts(game: str, n_steps: int, stack: int = feed.STACK) -> Iterator[Any]:
    """The recorded game as a TorchRL collector would return it, one step of all environments at a time."""
    import torch
    from tensordict import TensorDict

    for step in feed.steps(game, n_steps, stack):
        count = len(step.obs)
        done = torch.from_numpy(step.dones.copy())[:, None]
        yield TensorDict(
            {
                "observation": torch.from_numpy(step.obs.copy()),
                "action": torch.zeros(count, dtype=torch.int64),
                "next": {
                    "observation": torch.from_numpy(step.next_obs.copy()),
                    "reward": torch.zeros(count, 1),
                    "done": done,
                    "terminated": done.clone(),
                },
            },
            batch_size=[count],
        )


def make(what: str, size: int) -> Any:
    from torchrl.data import CompressedListStorage, LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

    from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage

    storages = {
        "CompressedStorage": CompressedStorage,
        "LazyTensorStorage": LazyTensorStorage,
        "LazyMemmapStorage": LazyMemmapStorage,
        "CompressedListStorage": CompressedListStorage,
    }
    return TensorDictReplayBuffer(storage=storages[what](size), batch_size=256)


def flat(what: str, data: Any) -> Any:
    # CompressedListStorage does not support nested keys
    return data.flatten_keys(".") if what == "CompressedListStorage" else data


def memory(game: str, n_steps: int, what: str) -> dict[str, Any]:
    """Growth of the resident set while the storage is filled."""
    from benchmarks.measure import resident

    warm = make(what, 600)
    for _, data in zip(range(150), tensordicts(game, n_steps), strict=False):
        warm.extend(flat(what, data))
    warm.sample()
    del warm
    size = _LIST_SIZE if what == "CompressedListStorage" else n_steps * feed.N_ENVS
    buffer = make(what, size)
    before = resident()
    item = None
    for _, data in zip(range(size // feed.N_ENVS), tensordicts(game, n_steps), strict=False):
        item = sum(value.nbytes for value in data.values(True, True)) // len(data)
        buffer.extend(flat(what, data))
    return {"n_transitions": size, "resident_bytes": resident() - before, "plain_bytes": (item or 0) * size}


def median_us(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def speed(game: str, n_steps: int, what: str) -> dict[str, Any]:
    """Microseconds of `extend` by one step and by 64, and of ``sample(256)``, interleaved with `LazyTensorStorage`."""
    import torch

    size = _LIST_SIZE if what == "CompressedListStorage" else n_steps * feed.N_ENVS
    ours, plain = make(what, size), make("LazyTensorStorage", size)
    times: dict[str, list[float]] = {key: [] for key in ("ours", "plain", "ours64", "plain64")}
    waiting: list[Any] = []
    for number, data in enumerate(tensordicts(game, n_steps)):
        if number * feed.N_ENVS >= size:
            break
        waiting.append(data)
        # of every 512 steps, 448 are added one by one and 64 in one call
        batched = what != "CompressedListStorage" and (number // 64) % 8 == 7
        if batched and len(waiting) < 64:
            continue
        batch = torch.cat(waiting) if batched else waiting[0]
        waiting = []
        for name, buffer in (("ours", ours), ("plain", plain)):
            given = flat(what, batch.clone()) if name == "ours" else batch.clone()
            start = time.perf_counter()
            buffer.extend(given)
            times[name + ("64" if batched else "")].append(time.perf_counter() - start)
    for seed in range(3):
        batches = []
        for buffer in (ours, plain):
            torch.manual_seed(seed)
            batches.append(buffer.sample(256))
        if what != "CompressedListStorage" and not (batches[0] == batches[1]).all():
            raise AssertionError(f"{what} returns other samples than LazyTensorStorage; it is not timed")
    result = {
        "n_transitions": size,
        "extend_us": 1e6 * statistics.median(times["ours"]),
        "plain_extend_us": 1e6 * statistics.median(times["plain"]),
    }
    if times["ours64"]:
        result["extend64_us"] = 1e6 * statistics.median(times["ours64"])
        result["plain_extend64_us"] = 1e6 * statistics.median(times["plain64"])
    repeats = 5 if what == "CompressedListStorage" else 40
    samples: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(repeats):
        for name, buffer in (("ours", ours), ("plain", plain)):
            samples[name].append(median_us(lambda buffer=buffer: buffer.sample(256), 1))  # type: ignore[misc]
    result["sample256_us"] = statistics.median(samples["ours"])
    result["plain_sample256_us"] = statistics.median(samples["plain"])
    return result


def slices(game: str, n_steps: int, what: str) -> dict[str, Any]:
    """Memory of single frames, and microseconds of a sample of slices, interleaved with `LazyTensorStorage`."""
    import torch
    from torchrl import data as torchrl_data

    from benchmarks.measure import resident
    from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage

    def buffer_of(storage: Any) -> Any:
        sampler = getattr(torchrl_data, what)(slice_len=_SLICE, end_key=("next", "done"))
        return torchrl_data.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=_N_SLICES * _SLICE)

    def play() -> Iterator[Any]:
        """Yield 100 steps at a time as ``[environment, time]``, over and over again."""
        for _ in range(-(-_SLICED_SIZE // (n_steps * feed.N_ENVS))):
            steps = tensordicts(game, n_steps, stack=1)
            for _ in range(n_steps // 100):
                yield torch.stack([next(steps) for _ in range(100)], dim=1)

    warm = buffer_of(CompressedStorage(4000, ndim=2))
    for _, data in zip(range(10), play(), strict=False):
        warm.extend(data)
    warm.sample()
    ours = buffer_of(CompressedStorage(_SLICED_SIZE, ndim=2))
    before = resident()
    for data in play():
        ours.extend(data)
    held, dense = resident() - before, ours.storage.memory_usage().dense
    plain = buffer_of(torchrl_data.LazyTensorStorage(_SLICED_SIZE, ndim=2))
    for data in play():
        plain.extend(data)
    for seed in range(3):
        batches = []
        for buffer in (ours, plain):
            torch.manual_seed(seed)
            batches.append(buffer.sample())
        if not (batches[0] == batches[1]).all():
            raise AssertionError(f"{what} draws other slices than from LazyTensorStorage; it is not timed")
    times: dict[str, list[float]] = {"slices_us": [], "plain_slices_us": []}
    for _ in range(40):
        for name, buffer in (("slices_us", ours), ("plain_slices_us", plain)):
            times[name].append(median_us(buffer.sample, 1))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"n_transitions": len(ours), "resident_bytes": held, "plain_bytes": dense, **medians}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"memory": memory, "speed": speed, "slices": slices}


def store_row(row: dict[str, Any]) -> None:
    """Write a row to the CSV file, replacing an older one of the same game and subject."""
    rounded = {key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}
    replace_rows(DATA / "torchrl.csv", [{column: rounded.get(column, "") for column in COLUMNS}], ("game", "what"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="MsPacman")
    parser.add_argument("--transitions", type=int, default=40_000)
    parser.add_argument("--threads", type=int, default=0, help="threads of torch (default: torch decides)")
    parser.add_argument("--only", nargs="+", help="measure only these, such as CompressedStorage")
    parser.add_argument("--render", action="store_true", help="only render the pages from the CSV file")
    parser.add_argument("--child", nargs=4, metavar=("JOB", "GAME", "STEPS", "WHAT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        import torch

        torch.set_num_threads(options.threads or torch.get_num_threads())
        job, game, n_steps, what = options.child
        print(json.dumps(JOBS[job](game, int(n_steps), what)))
        return
    if not options.render:
        measure(options)
    for name, text in sections(options.game).items():
        render.insert(render.DOCS / f"{name}.md", name, text)


def measure(options: argparse.Namespace) -> None:
    """Run all jobs and write their rows."""
    n_steps = options.transitions // feed.N_ENVS
    feed.record(options.game, n_steps)
    jobs = [
        ("CompressedStorage", ["memory", "speed"]),
        ("LazyMemmapStorage", ["memory"]),
        ("LazyTensorStorage", ["memory"]),
        ("CompressedListStorage", ["memory", "speed"]),
        *((what, ["slices"]) for what in _SLICE_SAMPLERS),
    ]
    info = run_info("torchrl", "tensordict")
    for what, names in jobs:
        if options.only and what not in options.only:
            continue
        figures: dict[str, Any] = {}
        for name in names:
            arguments = ["--threads", str(options.threads), "--child", name, options.game, str(n_steps), what]
            figures |= run_child("benchmarks.torchrl", *arguments, settings=KEEP_MEMORY if name == "speed" else None)
        store_row(info | {"game": options.game, "threads": options.threads or "", "what": what} | figures)
        print(what, figures, file=sys.stderr)


def sections(game: str = "MsPacman") -> dict[str, str]:
    """The tables of ``docs/torchrl.md``."""
    rows = {row["what"]: row for row in render.rows("torchrl") if row["game"] == game}
    hosts: dict[tuple[str, ...], list[render.Row]] = {}
    for row in rows.values():
        hosts.setdefault((row["machine"], row["versions"], row["threads"]), []).append(row)
    stamp = f"{game}, 4 environments.\n"
    for (_, _, threads), measured in hosts.items():
        names = ", ".join(f"`{row['what']}`" for row in measured)
        stamp += f"\n{names}{f', torch on {threads} thread' if threads else ''}. {render.provenance(measured)}"
    tables = filter(None, (storage_table(rows), slice_table(rows)))
    return {"torchrl": "".join(f"\n{table}" for table in tables) + f"\n{stamp}\n"}


def number(row: render.Row, column: str) -> float | None:
    text = row.get(column, "")
    return float(text) if text else None


def storage_table(rows: dict[str, render.Row]) -> str:
    """Memory and times of the storages, relative to TorchRL's."""

    def ratio(row: render.Row, column: str) -> str:
        ours, theirs = number(row, column), number(row, f"plain_{column}")
        return "" if ours is None or not theirs else render.factor(ours / theirs)

    def resident_per_transition(row: render.Row) -> float:
        return float(row["resident_bytes"]) / float(row["n_transitions"])

    header = [
        "storage", "resident memory", "`extend` by one step of 4 environments", "`extend` by 64 steps", "`sample(256)`",
    ]  # fmt: skip
    dense = resident_per_transition(rows["LazyMemmapStorage"])
    lines = [
        [
            f"`{what}`",
            render.percent(resident_per_transition(rows[what]) / dense),
            *(ratio(rows[what], column) for column in ("extend_us", "extend64_us", "sample256_us")),
        ]
        for what in ("CompressedStorage", "CompressedListStorage")
        if what in rows
    ]
    note = (
        "Memory is relative to `LazyMemmapStorage`, times are relative to `LazyTensorStorage`; glibc keeps freed "
        "memory while they are measured.\n"
    )
    return f"{render.table(header, lines)}\n{note}"


def slice_table(rows: dict[str, render.Row]) -> str:
    """Memory and times of slices of single frames, relative to TorchRL's storage."""
    lines = []
    for what in _SLICE_SAMPLERS:
        held, dense, ours, theirs = (
            number(rows.get(what, {}), column)
            for column in ("resident_bytes", "plain_bytes", "slices_us", "plain_slices_us")
        )
        if held and dense and ours and theirs:
            lines.append([f"`{what}`", render.percent(held / dense), render.factor(ours / theirs)])
    if not lines:
        return ""
    note = f"{_N_SLICES} slices of {_SLICE} single frames; everything is relative to `LazyTensorStorage`.\n"
    return f"{render.table(['sampler', 'resident memory', '`sample()`'], lines)}\n{note}\n"


if __name__ == "__main__":
    main()
