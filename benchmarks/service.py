"""A served buffer in a local Ray cluster, and Reverb beside it if ``make reverb`` was run; writes ``service.csv``.

Collectors send packets of 64 steps of 4 environments without waiting for each acknowledgement; a learner draws batches
of 256 transitions at random. Batches must be right before anything is timed. Figures are medians of several rounds,
which alternate between all ways of using the buffer. Reverb runs afterwards: compare the two on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import feed, render
from benchmarks.results import DATA, ROOT, replace_rows, run_child, run_info
from benchmarks.torchrl import tensordicts

COLUMNS = ["date", "machine", "versions", "game", "what", "per_second", "wire_bytes", "plain_bytes", "bytes_per_item"]
REVERB = ROOT / ".venv-reverb" / "bin" / "python"
#: a collector sends this many steps of all environments at a time
PACKET = 64
BATCH = 256
WINDOW = 16
NAMES = {
    "in 1": "one collector, 64 steps per packet",
    "in 4": "four collectors, 64 steps per packet each",
    "out": "one learner, 256 random transitions per batch",
    "both": "one learner while a collector is sending",
    "windows": "a learner's windows of 16 steps, 16 per batch",
}


class Collector:
    """A process that sends the same packets again and again."""

    def __init__(self, client: Any, game: str, n_steps: int, n_batches: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.client = client
        self.batches = packets(game, n_steps, n_batches)

    def send(self, n_packets: int) -> int:
        """Send packets and wait until all of them are stored; return the number of transitions."""
        for number in range(n_packets):
            self.client.extend(self.batches[number % len(self.batches)], wait=False)
        self.client.flush()
        return sum(len(self.batches[number % len(self.batches)]) for number in range(n_packets))


def packets(game: str, n_steps: int, count: int) -> list[Any]:
    """The first packets of the recorded game."""
    import torch

    steps = tensordicts(game, n_steps)
    return [torch.cat([next(steps) for _ in range(PACKET)]) for _ in range(count)]


def served(game: str, n_steps: int, quick: bool) -> dict[str, Any]:
    """Transitions per second into and out of a buffer in a local cluster."""
    import ray
    import torch

    from sb3_extra_buffers.replay_buffers.ray import CompressedRayReplayBuffer

    torch.set_num_threads(1)
    n_packets, n_batches, rounds, n_collectors = (4, 4, 1, 2) if quick else (40, 60, 5, 4)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    size = 2 * n_steps * feed.N_ENVS
    buffer = CompressedRayReplayBuffer(size, n_envs=feed.N_ENVS, batch_size=BATCH, remote_config={"num_cpus": 0})
    learner, filler = buffer.client(), buffer.client()
    filled = packets(game, n_steps, n_steps // PACKET)
    for data in filled:
        filler.extend(data, wait=False)
    filler.flush()
    check(learner, torch.cat(filled))
    del filled
    make: Any = ray.remote
    collectors = [
        make(num_cpus=0)(Collector).remote(buffer.client(), game, n_steps, 4 if quick else 12)
        for _ in range(n_collectors)
    ]
    for collector in collectors:
        ray.get(collector.send.remote(2))

    def send(users: list[Any], count: int) -> float:
        start = time.perf_counter()
        n_sent = sum(ray.get([collector.send.remote(count) for collector in users]))
        return n_sent / (time.perf_counter() - start)

    def draw(client: Any = learner) -> float:
        client.sample()
        start = time.perf_counter()
        for _ in range(n_batches):
            client.sample()
        return n_batches * BATCH / (time.perf_counter() - start)

    def both() -> float:
        sending = collectors[0].send.remote(n_packets)
        rate = draw()
        ray.get(sending)
        return rate

    rates: dict[str, list[float]] = {name: [] for name in ("in 1", "in 4", "out", "both")}
    for _ in range(rounds):
        rates["in 1"].append(send(collectors[:1], n_packets))
        rates["in 4"].append(send(collectors, n_packets // 2))
        rates["out"].append(draw())
        rates["both"].append(both())
    usage = buffer.memory_usage()
    buffer.close()
    ray.shutdown()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return medians | {"bytes_per_item": usage.total / usage.transitions}


def check(learner: Any, filled: Any) -> None:
    """Raise unless sampled batches are what was stored."""
    for _ in range(3):
        batch = learner.sample()
        index = batch["index"]
        for key in filled.keys(True, True):
            if not bool((batch.get(key) == filled.get(key)[index]).all()):
                raise AssertionError(f"{key} of a sampled batch is not what was stored; nothing is timed")


def wire(game: str, n_steps: int, quick: bool) -> dict[str, Any]:
    """Bytes per transition in packets, and as the tensors that they stand for."""
    from functools import partial

    import torch

    from sb3_extra_buffers._torchrl.service import CompressedReplayService
    from sb3_extra_buffers._torchrl.wire import KeyframeCache, PacketEncoder, decode_packet
    from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage

    storage = partial(CompressedStorage, n_steps * feed.N_ENVS, n_envs=feed.N_ENVS)
    service, encoder, cache = CompressedReplayService(storage=storage), PacketEncoder(), KeyframeCache()
    sizes: dict[str, list[float]] = {"in": [], "out": [], "windows": []}
    plain = 0.0
    for data in packets(game, n_steps, n_steps // PACKET):
        packet = encoder.encode(data)
        sizes["in"].append(len(packet) / len(data))
        plain = sum(value.nbytes for value in data.values(True, True)) / len(data)
        service.extend(packet)
    for _ in range(5 if quick else 40):
        lease = cache.lease()
        packet = service.sample(BATCH, known=lease.known)
        decode_packet(packet, lease)
        sizes["out"].append(len(packet) / BATCH)
        # windows of one environment each
        starts = torch.randint(0, len(service) - WINDOW * feed.N_ENVS, (BATCH // WINDOW,))
        index = (starts[:, None] + feed.N_ENVS * torch.arange(WINDOW)).reshape(-1)
        sizes["windows"].append(len(service.storage.gather(index, {}).pack(lease.known)) / BATCH)
    medians = {way: statistics.median(sizes[way]) for way in ("out", "windows")}
    return medians | {"in": statistics.mean(sizes["in"]), "plain": plain}


def reverb(game: str, n_steps: int, quick: bool) -> dict[str, Any] | None:
    """The same work by Reverb, or None if its environment does not exist."""
    if not REVERB.exists():
        return None
    counts = (n_steps, 2, 4, 1) if quick else (n_steps, 20, 60, 5)
    command = [str(REVERB), "-m", "benchmarks.service_reverb", game, *map(str, counts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


JOBS = {"served": served, "wire": wire}


def measure(game: str, n_steps: int, quick: bool) -> list[dict[str, Any]]:
    """Run everything and return rows."""
    feed.record(game, n_steps)
    info = run_info("torchrl", "tensordict", "ray") | {"game": game}
    flags = ["--quick"] if quick else []
    figures = {job: run_child("benchmarks.service", *flags, "--child", job, game, str(n_steps)) for job in JOBS}
    rates, sizes = figures["served"], figures["wire"]
    rows = []
    for what in ("in 1", "in 4", "out", "both"):
        way = "in" if what.startswith("in") else "out"
        rows.append(
            info
            | {"what": what, "per_second": round(rates[what]), "wire_bytes": round(sizes[way], 1)}
            | {"plain_bytes": round(sizes["plain"]), "bytes_per_item": round(rates["bytes_per_item"], 1)}
        )
    rows.append(
        info | {"what": "windows", "wire_bytes": round(sizes["windows"], 1), "plain_bytes": round(sizes["plain"])}
    )
    theirs = reverb(game, n_steps, quick)
    if theirs is not None:
        rows += [info | {"what": f"reverb {way}", "per_second": round(theirs[way])} for way in ("in", "out")]
    return [{column: row.get(column, "") for column in COLUMNS} for row in rows]


def table(measured: list[dict[str, Any]]) -> str:
    """The table of ``docs/distributed.md``."""
    rows = {row["what"]: row for row in measured}
    header = ["transfer", "transitions per second", "Reverb", "bytes per transition", "% of the tensors"]
    lines = []
    for what, name in NAMES.items():
        if what not in rows:
            continue
        row = rows[what]
        theirs = rows.get({"in 1": "reverb in", "out": "reverb out"}.get(what, ""), {}).get("per_second", "")
        sent, plain = float(row["wire_bytes"]), float(row["plain_bytes"])
        lines.append(
            [
                name,
                f"{float(row['per_second']):,.0f}" if row["per_second"] else "",
                f"{float(theirs):,.0f}" if theirs else "",
                f"{sent:,.0f}",
                render.percent(sent / plain),
            ]
        )
    return render.table(header, lines)


def section(game: str = "MsPacman") -> str:
    """The measurements as ``docs/distributed.md`` shows them."""
    rows = [row for row in render.rows("service") if row["game"] == game]
    note = (
        "Buffer, collectors and learner are processes of one machine. The learner requests two batches ahead, and the "
        "time includes decoding. Reverb runs afterwards, with server and client in one process."
    )
    stamp = f"{game}, 4 environments, measured {rows[0]['date']} on {rows[0]['machine']}; {rows[0]['versions']}."
    return f"\n{table(rows)}\n{note} {stamp}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="MsPacman")
    parser.add_argument("--transitions", type=int, default=20_000)
    parser.add_argument(
        "--quick", action="store_true", help="a few packets only, and print instead of writing the file"
    )
    parser.add_argument("--render", action="store_true", help="only render the page from the CSV file")
    parser.add_argument("--child", nargs=3, metavar=("JOB", "GAME", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        job, game, n_steps = options.child
        print(json.dumps(JOBS[job](game, int(n_steps), options.quick)))
        return
    if not options.render:
        rows = measure(options.game, options.transitions // feed.N_ENVS, options.quick)
        print(table(rows), file=sys.stderr)
        if options.quick:
            return
        replace_rows(DATA / "service.csv", rows, ("game", "what"))
    render.insert(render.DOCS / "distributed.md", "distributed", section(options.game))


if __name__ == "__main__":
    main()
