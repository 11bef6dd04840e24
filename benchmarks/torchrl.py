"""Measure `CompressedStorage` beside TorchRL's storages, each in a fresh process, into ``benchmarks/data/torchrl.csv``.

``python -m benchmarks.torchrl`` does all of it; ``--transitions`` says how many to store, ``--ray`` adds a local
cluster, ``--threads 1`` keeps torch from using more of them (on a machine that others use, its threads wait for
each other). Storages must give the same samples before anything is timed.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import json
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import feed
from benchmarks.run import DATA, machine, versions

COLUMNS = [
    "date", "machine", "versions", "game", "threads", "what", "n_transitions", "resident_bytes", "plain_bytes",
    "extend_us", "plain_extend_us", "extend64_us", "plain_extend64_us", "sample256_us", "plain_sample256_us",
    "wire_bytes", "per_second",
]  # fmt: skip
# TorchRL's compressed list takes a millisecond an item and more
_FEW = 4000


def tensordicts(game: str, n_steps: int) -> Iterator[Any]:
    """The recorded game as TorchRL collectors would give it, a step of all environments at a time."""
    import torch
    from tensordict import TensorDict

    for step in feed.steps(game, n_steps):
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
    # the list compresses no nested key
    return data.flatten_keys(".") if what == "CompressedListStorage" else data


def memory(game: str, n_steps: int, what: str) -> dict[str, Any]:
    """Growth of the resident set while the storage is filled."""
    from benchmarks.measure import resident

    warm = make(what, 600)
    for _, data in zip(range(150), tensordicts(game, n_steps), strict=False):
        warm.extend(flat(what, data))
    warm.sample()
    del warm
    size = _FEW if what == "CompressedListStorage" else n_steps * feed.N_ENVS
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
    """Microseconds for `extend` by a step and by 64 of them, and for ``sample(256)``, in turn with tensors."""
    import torch

    size = _FEW if what == "CompressedListStorage" else n_steps * feed.N_ENVS
    ours, plain = make(what, size), make("LazyTensorStorage", size)
    times: dict[str, list[float]] = {key: [] for key in ("ours", "plain", "ours64", "plain64")}
    waiting: list[Any] = []
    for number, data in enumerate(tensordicts(game, n_steps)):
        if number * feed.N_ENVS >= size:
            break
        waiting.append(data)
        # mostly step by step; every few thousand 64 of them at once
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
            raise AssertionError(f"{what} gives other samples than LazyTensorStorage; refusing to time it")
    found = {
        "n_transitions": size,
        "extend_us": 1e6 * statistics.median(times["ours"]),
        "plain_extend_us": 1e6 * statistics.median(times["plain"]),
    }
    if times["ours64"]:
        found["extend64_us"] = 1e6 * statistics.median(times["ours64"])
        found["plain_extend64_us"] = 1e6 * statistics.median(times["plain64"])
    repeats = 5 if what == "CompressedListStorage" else 40
    samples: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(repeats):
        for name, buffer in (("ours", ours), ("plain", plain)):
            samples[name].append(median_us(lambda buffer=buffer: buffer.sample(256), 1))  # type: ignore[misc]
    found["sample256_us"] = statistics.median(samples["ours"])
    found["plain_sample256_us"] = statistics.median(samples["plain"])
    return found


def wire(game: str, n_steps: int, what: str) -> dict[str, Any]:
    """Bytes for a transition as a packet, and as the tensors that Ray would send."""
    import torch

    from sb3_extra_buffers._torchrl.wire import decode_packet, encode_packet

    sent = []
    if what == "sampled":
        buffer = make("CompressedStorage", n_steps * feed.N_ENVS)
        for data in tensordicts(game, n_steps):
            buffer.extend(data)
        sent = [buffer.sample(256) for _ in range(20)]
    else:
        steps = tensordicts(game, n_steps)
        for _ in range(20):
            sent.append(torch.cat([next(steps) for _ in range(64)]))
    packets = [encode_packet(data) for data in sent]
    if not all((decode_packet(packet) == data).all() for packet, data in zip(packets, sent, strict=True)):
        raise AssertionError("packets do not give back what was packed")
    count = sum(map(len, sent))
    return {
        "n_transitions": count,
        "wire_bytes": sum(map(len, packets)) / count,
        "plain_bytes": sum(len(pickle.dumps(data, 5)) for data in sent) / count,
    }


def cluster(game: str, n_steps: int, what: str) -> dict[str, Any]:
    """Transitions a second through a local Ray, one at a time in each direction."""
    import ray
    import torch

    from sb3_extra_buffers.replay_buffers.ray import CompressedRayReplayBuffer

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    buffer = CompressedRayReplayBuffer(100_000, batch_size=256, remote_config={"num_cpus": 0})
    steps = tensordicts(game, n_steps)
    batches = [torch.cat([next(steps) for _ in range(64)]) for _ in range(20)]
    for data in batches:
        buffer.extend(data)
    repeats = 60
    start = time.perf_counter()
    for number in range(repeats):
        if what == "Ray sample":
            buffer.sample()
        else:
            buffer.extend(batches[number % len(batches)])
    elapsed = time.perf_counter() - start
    buffer.close()
    ray.shutdown()
    return {"n_transitions": repeats * 256, "per_second": repeats * 256 / elapsed}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"memory": memory, "speed": speed, "wire": wire, "cluster": cluster}


def child(job: str, game: str, n_steps: int, what: str, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.torchrl", "--threads", str(threads)]
    command += ["--child", job, game, str(n_steps), what]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise SystemExit(f"measuring {job} of {what} failed with status {done.returncode}; its message is above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def all_versions() -> str:
    parts = [f"{name} {importlib.metadata.version(name)}" for name in ("torchrl", "tensordict")]
    return ", ".join([versions(), *parts])


def append(row: dict[str, Any]) -> None:
    """Add a row, replacing an older one of the same game and subject."""
    path = DATA / "torchrl.csv"
    rows = []
    if path.exists():
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    rows = [old for old in rows if (old["game"], old["what"]) != (row["game"], row["what"])]
    rounded = {key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}
    rows.append({column: rounded.get(column, "") for column in COLUMNS})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="MsPacman")
    parser.add_argument("--transitions", type=int, default=40_000)
    parser.add_argument("--threads", type=int, default=0, help="of torch; its own choice unless given")
    parser.add_argument("--ray", action="store_true", help="measure a local cluster as well")
    parser.add_argument("--only", nargs="+", help="these alone, such as CompressedStorage sampled 'Ray sample'")
    parser.add_argument("--render", action="store_true", help="only write the pages anew")
    parser.add_argument("--child", nargs=4, metavar=("JOB", "GAME", "STEPS", "WHAT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        import torch

        torch.set_num_threads(options.threads or torch.get_num_threads())
        job, game, n_steps, what = options.child
        print(json.dumps(JOBS[job](game, int(n_steps), what)))
        return
    if options.render:
        render(options.game)
        return
    n_steps = options.transitions // feed.N_ENVS
    feed.record(options.game, n_steps)
    jobs = [
        ("CompressedStorage", ["memory", "speed"]),
        ("LazyMemmapStorage", ["memory"]),
        ("LazyTensorStorage", ["memory"]),
        ("CompressedListStorage", ["memory", "speed"]),
        ("collected", ["wire"]),
        ("sampled", ["wire"]),
        *([("Ray extend", ["cluster"]), ("Ray sample", ["cluster"])] if options.ray else []),
    ]
    about = {"date": datetime.date.today().isoformat(), "machine": machine(), "versions": all_versions()}
    for what, names in jobs:
        if options.only and what not in options.only:
            continue
        row: dict[str, Any] = about | {"game": options.game, "threads": options.threads or "", "what": what}
        for name in names:
            row |= child(name, options.game, n_steps, what, options.threads)
        append(row)
        figures = {
            key: value for key, value in row.items() if key not in about and key not in ("game", "what", "threads")
        }
        print(what, figures, file=sys.stderr)
    render(options.game)


def render(game: str) -> None:
    """Write the tables of the two pages from what was measured."""
    with (DATA / "torchrl.csv").open(newline="") as file:
        rows = {row["what"]: row for row in csv.DictReader(file) if row["game"] == game}

    def number(what: str, column: str) -> float | None:
        text = rows.get(what, {}).get(column, "")
        return float(text) if text else None

    def part(what: str, column: str, of: str) -> str:
        one, other = number(what, column), number(what, of)
        return "" if one is None or not other else f"{one / other:.2f}x"

    memmap, memmap_count = number("LazyMemmapStorage", "resident_bytes"), number("LazyMemmapStorage", "n_transitions")
    table = [
        "| storage | resident, of `LazyMemmapStorage` | `extend` by a step of 4, of `LazyTensorStorage` | "
        "by 64 steps | `sample(256)` |",
        "|---|---|---|---|---|",
    ]
    for what in ("CompressedStorage", "CompressedListStorage"):
        resident, count = number(what, "resident_bytes"), number(what, "n_transitions")
        if resident is None or not memmap or not memmap_count or not count:
            continue
        share = 100 * (resident / count) / (memmap / memmap_count)
        times = " | ".join(part(what, f"{key}_us", f"plain_{key}_us") for key in ("extend", "extend64", "sample256"))
        table.append(f"| `{what}` | {share:.2f} % | {times} |")
    about = next(iter(rows.values()))
    threads = f", torch on {about['threads']} thread" if about["threads"] else ""
    stamp = f"{game}, 4 environments, measured {about['date']} on {about['machine']}{threads}; {about['versions']}."
    _fill("torchrl", [*table, "", stamp])
    lines = ["| what | bytes for a transition | of the tensors | transitions a second |", "|---|---|---|---|"]
    for name, sent, through in (
        ("collectors to buffer, 64 steps at a time", "collected", "Ray extend"),
        ("buffer to learner, 256 at random", "sampled", "Ray sample"),
    ):
        bytes_, plain = number(sent, "wire_bytes"), number(sent, "plain_bytes")
        if bytes_ is None or not plain:
            continue
        rate = number(through, "per_second")
        lines.append(
            f"| {name} | {bytes_:.0f} | {100 * bytes_ / plain:.2f} % | {'' if rate is None else f'{rate:.0f}'} |"
        )
    _fill("distributed", [*lines, "", "One process sends or asks at a time, all on one machine. " + stamp])


def _fill(name: str, lines: list[str]) -> None:
    path = Path(__file__).parents[1] / "docs" / f"{name}.md"
    before, begin, rest = path.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    path.write_text("".join([before, begin, "\n", "\n".join(lines), "\n\n", end, after]))


if __name__ == "__main__":
    main()
