"""A buffer in a Ray actor: no acknowledged item is lost, whichever process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")
pytest.importorskip("ray")

import ray
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from sb3_extra_buffers._torchrl.wire import decode_packet, encode_packet
from sb3_extra_buffers.errors import (
    ArgumentError,
    CorruptPayloadError,
    DamagedFileError,
    FileFormatError,
    FileWriteError,
    ServiceLostError,
    SpecMismatchError,
    UnknownCodecError,
)
from sb3_extra_buffers.files import disk
from sb3_extra_buffers.files.journal import read_journal
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
from sb3_extra_buffers.replay_buffers.ray import CompressedRayReplayBuffer, CompressedReplayService, RateLimiter
from sb3_extra_buffers.replay_buffers.served_shards import ShardedRayReplayBuffer
from tests.replay_buffers.interrupts import count_bytecodes, interrupt, points
from tests.replay_buffers.trajectories import assert_same, trajectory

ROOT = Path(__file__).parents[2]


def service(folder: Path | None = None, size: int = 100) -> Any:
    """Return the buffer that runs inside the actor."""
    return CompressedReplayService(
        storage=partial(CompressedStorage, size), batch_size=8, folder=None if folder is None else str(folder)
    )


def contents(buffer: Any) -> Any:
    return decode_packet(buffer.packed(slice(None))).exclude("index")


# ---- without a cluster ----


def test_packets_round_trip_through_the_service() -> None:
    buffer, data = service(), trajectory(30)
    index = buffer.extend(encode_packet(data))
    assert index.tolist() == list(range(30))
    batch = decode_packet(buffer.sample())
    assert_same(batch.exclude("index"), data[batch["index"]])


def test_a_packet_that_is_sent_twice_is_stored_once() -> None:
    buffer, data = service(), trajectory(30)
    first = buffer.extend(encode_packet(data[:10], writer="a", number=1))
    again = buffer.extend(encode_packet(data[:10], writer="a", number=1))
    buffer.extend(encode_packet(data[10:20], writer="b", number=1))
    assert torch.equal(first, again)
    assert len(buffer) == 20


@pytest.mark.parametrize("saved_after", [None, 0, 3, 11])
def test_a_restarted_service_continues_where_it_stopped(tmp_path: Path, saved_after: int | None) -> None:
    data = trajectory(130)
    old = service(tmp_path)
    for number in range(12):
        old.extend(encode_packet(data[10 * number : 10 * number + 10], writer="a", number=number + 1))
        if number == saved_after:
            old.checkpoint()

    new = service(tmp_path)
    assert_same(contents(new), contents(old))
    # the client sends its last packet again
    repeated = new.extend(encode_packet(data[110:120], writer="a", number=12))
    assert repeated.tolist() == list(range(10, 20))
    new.extend(encode_packet(data[120:], writer="a", number=13))
    assert_same(contents(service(tmp_path)), contents(new))
    assert not list(tmp_path.rglob("*.pkl"))
    assert len(list(tmp_path.glob("journal-*"))) == 1


def test_a_long_journal_is_replaced_by_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sb3_extra_buffers._torchrl.service_files._MIN_JOURNAL_BYTES", 5000)
    buffer = service(tmp_path)
    for first in range(0, 120, 10):
        buffer.extend(encode_packet(trajectory(120)[first : first + 10]))
    assert len(list(tmp_path.glob("snapshot-*"))) == 1
    assert_same(contents(service(tmp_path)), contents(buffer))


def test_damage_inside_a_journal_raises_but_a_truncated_end_does_not(tmp_path: Path) -> None:
    data = trajectory(30)
    buffer = service(tmp_path)
    for first in (0, 10, 20):
        buffer.extend(encode_packet(data[first : first + 10]))
    [journal] = tmp_path.glob("journal-*")
    whole = journal.read_bytes()

    journal.write_bytes(whole[:-3])
    assert len(service(tmp_path)) == 20
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    journal.write_bytes(damaged)
    with pytest.raises(DamagedFileError, match=r"record 1 at byte \d+ is damaged"):
        service(tmp_path)
    assert journal.read_bytes() == damaged


def test_a_flipped_bit_anywhere_in_a_journal_loses_nothing_silently(tmp_path: Path) -> None:
    """A flipped bit in a record's length used to drop all records behind it."""
    data = trajectory(40)
    buffer = service(tmp_path)
    ends = []
    [journal] = tmp_path.glob("journal-*")
    for first in range(0, 40, 10):
        buffer.extend(encode_packet(data[first : first + 10]))
        ends.append(journal.stat().st_size)
    whole = journal.read_bytes()
    # in every record: all bytes of the header, and some of the body
    starts = [0, *ends[:-1]]
    for begin, end in zip(starts, ends, strict=True):
        for place in [*range(begin, begin + 40), *range(begin + 40, end, 97)]:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            journal.write_bytes(damaged)
            with pytest.raises((DamagedFileError, FileFormatError)):
                for _ in read_journal(journal):
                    pass
    journal.write_bytes(whole)
    assert_same(contents(service(tmp_path)), data)


def test_zeros_at_the_end_of_a_journal_count_as_a_power_cut(tmp_path: Path) -> None:
    data = trajectory(30)
    buffer = service(tmp_path)
    for first in (0, 10):
        buffer.extend(encode_packet(data[first : first + 10]))
    [journal] = tmp_path.glob("journal-*")
    for zeros in (1, 512, 4096):
        whole = journal.read_bytes()
        journal.write_bytes(whole + bytes(zeros))
        again = service(tmp_path)
        assert_same(contents(again), data[:20])
        assert journal.read_bytes() == whole
    again.extend(encode_packet(data[20:]))
    assert_same(contents(service(tmp_path)), data)


def test_a_full_disk_leaves_no_partial_packet(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    data = trajectory(30)
    buffer = service(tmp_path)
    buffer.extend(encode_packet(data[:10]))
    [journal] = tmp_path.glob("journal-*")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size + 100, limits[1]))
    try:
        with pytest.raises(FileWriteError, match="journal"):
            buffer.extend(encode_packet(data[10:20], writer="a", number=1))
        # a failed call stores nothing
        assert_same(contents(buffer), data[:10])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for _ in range(2):
        buffer.extend(encode_packet(data[10:20], writer="a", number=1))
    buffer.extend(encode_packet(data[20:]))
    assert_same(contents(buffer), data)
    assert_same(contents(service(tmp_path)), data)


def test_a_packet_that_cannot_be_stored_is_removed_from_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = trajectory(30)
    buffer = service(tmp_path)
    buffer.extend(encode_packet(data[:10], writer="a", number=1))

    def fail(*_: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        for name in ("write", "import_packet"):
            patch.setattr(buffer._storage.table.groups[0], name, fail)
        with pytest.raises(MemoryError):
            buffer.extend(encode_packet(data[10:20], writer="a", number=2))
    for bad in (b"nothing", encode_packet(data[:3].exclude("action")), encode_packet(data[:3], writer=3, number="x")):
        with pytest.raises((CorruptPayloadError, SpecMismatchError)):
            buffer.extend(bad)
    assert_same(contents(buffer), data[:10])
    assert_same(contents(service(tmp_path)), data[:10])
    buffer.extend(encode_packet(data[10:20], writer="a", number=2))
    buffer.extend(encode_packet(data[10:20], writer="a", number=2))
    assert_same(contents(buffer), data[:20])
    assert_same(contents(service(tmp_path)), data[:20])


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_packet_interrupted_anywhere_is_stored_once_after_a_retry(tmp_path: Path, error: type[BaseException]) -> None:
    data = trajectory(40)
    total = None
    for at in [None, *points(4000, 40)]:
        folder = tmp_path / str(at)
        buffer = service(folder, size=30)
        buffer.extend(encode_packet(data[:30], writer="a", number=1))
        packet = encode_packet(data[30:], writer="a", number=2)
        if at is None:
            total = count_bytecodes(partial(buffer.extend, packet))
        else:
            assert total is not None
            interrupt(partial(buffer.extend, packet), 1 + at * total // 4000, error("here"))
            buffer.extend(packet)
        expected = torch.cat([data[30:], data[10:30]])
        assert_same(contents(buffer), expected)
        assert_same(contents(service(folder, size=30)), expected)


def test_checkpoints_reach_the_disk_before_anything_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = service(tmp_path)
    buffer.extend(encode_packet(trajectory(30)))
    done: list[tuple[str, str]] = []
    names: dict[int, str] = {}
    for name in ("create", "fsync", "replace", "unlink", "sync_folder"):
        real = getattr(disk, name)

        def record(first: Any, *more: Any, name: str = name, real: Any = real) -> Any:
            found = real(first, *more)
            if name == "create":
                names[found] = Path(first).name
            what = names.get(first, "?") if name == "fsync" else Path(more[0] if more else first).name
            done.append((name, what))
            return found

        monkeypatch.setattr(disk, name, record)
    buffer.checkpoint()

    synced = done.index(("replace", "current.json"))
    snapshot = next(what for name, what in done if name == "sync_folder" and what.startswith("snapshot-"))
    for needed in (("replace", "manifest.json"), ("sync_folder", snapshot), ("fsync", "data-0001.bin")):
        assert done.index(needed) < synced
    deleted = [place for place, (name, _) in enumerate(done) if name == "unlink"]
    assert deleted
    assert ("sync_folder", tmp_path.name) in done[synced : min(deleted)]


def test_a_checkpoint_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = trajectory(60)
    buffer = service(tmp_path)
    buffer.extend(encode_packet(data[:20]))
    buffer.checkpoint()
    buffer.extend(encode_packet(data[20:40]))
    write_all = disk.write_all
    for failing in range(1, 4):
        left = [failing]

        def write(descriptor: int, parts: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] <= 0:
                raise OSError(28, "No space left on device")
            write_all(descriptor, parts)

        monkeypatch.setattr(disk, "write_all", write)
        with pytest.raises(FileWriteError):
            buffer.checkpoint()
        monkeypatch.setattr(disk, "write_all", write_all)
        assert len(list(tmp_path.iterdir())) == 3
        assert_same(contents(service(tmp_path)), data[:40])
    buffer.extend(encode_packet(data[40:]))
    buffer.checkpoint()
    assert_same(contents(service(tmp_path)), data)


def test_snapshots_include_the_sampler_state(tmp_path: Path) -> None:
    def make() -> Any:
        return CompressedReplayService(
            storage=partial(CompressedStorage, 100), sampler=SamplerWithoutReplacement(), batch_size=8,
            folder=str(tmp_path),
        )  # fmt: skip

    old = make()
    old.extend(encode_packet(trajectory(32)))
    seen = decode_packet(old.sample())["index"].tolist()
    old.checkpoint()
    new = make()
    for _ in range(3):
        seen += decode_packet(new.sample())["index"].tolist()
    assert sorted(seen) == list(range(32))
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pt", ".pkl", ".pickle")]
    assert new._writer._cursor == old._writer._cursor == 32


def test_a_folder_with_other_contents_raises(tmp_path: Path) -> None:
    (tmp_path / "current.json").write_text('{"format": "mine"}')
    with pytest.raises(FileFormatError, match=r"current\.json"):
        service(tmp_path)
    with pytest.raises(FileFormatError, match="folder"):
        service().checkpoint()


def test_a_service_killed_at_any_moment_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    """Kill a process with SIGKILL while it writes and saves; every packet that it acknowledged must be there."""
    code = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from sb3_extra_buffers._torchrl import service_files as module
        from sb3_extra_buffers._torchrl.wire import encode_packet
        from tests.replay_buffers.trajectories import trajectory
        from tests.replay_buffers.test_ray_buffer import service
        module._MIN_JOURNAL_BYTES = 3000
        data = trajectory(60)
        buffer = service(Path({str(tmp_path)!r}), size=100000)
        number = 0
        while True:
            number += 1
            data["action"][:] = number
            buffer.extend(encode_packet(data, writer="a", number=number))
            print(number, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        said: list[int] = []
        while len(said) < 25:
            line = child.stdout.readline()
            assert line, "the writer ended by itself"
            said += [int(line)] if line.strip().isdigit() else []
        os.kill(child.pid, signal.SIGKILL)
        said += [int(line) for line in child.stdout.read().split() if line.isdigit()]
    acknowledged = said[-1]

    again = service(tmp_path, size=100000)
    found = contents(again)
    # the packet in progress may be there as a whole, but not in part
    assert len(found) in (60 * acknowledged, 60 * (acknowledged + 1))
    expected = trajectory(60)
    for number in (1, acknowledged // 2, acknowledged):
        part = found[60 * (number - 1) : 60 * number]
        expected["action"][:] = number
        assert_same(part, expected)


# ---- a cluster ----


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}},
    )
    yield
    ray.shutdown()


class Collector:
    """Sends numbered transitions and records which were acknowledged."""

    def __init__(self, client: Any, log: str) -> None:
        self.client, self.log = client, log

    def process_id(self) -> int:
        return os.getpid()

    def collect(self, first: int, n_batches: int) -> int:
        data = trajectory(20)
        for number in range(first, first + n_batches):
            data["action"][:] = number
            self.client.extend(data)
            with Path(self.log).open("a") as file:
                file.write(f"{number}\n")
        return first + n_batches


def wait_for(condition: Any, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_buffer_that_cannot_start_says_why(cluster: None, tmp_path: Path) -> None:
    with pytest.raises(UnknownCodecError, match="made-up"):
        CompressedRayReplayBuffer(100, compression_method="made-up")
    with pytest.raises(ArgumentError, match="max_size"):
        CompressedRayReplayBuffer(0)
    saved = service(tmp_path, size=50)
    saved.extend(trajectory(20))
    saved.checkpoint()
    buffer = CompressedRayReplayBuffer(100, folder=tmp_path, remote_config={"num_cpus": 0})
    for _ in range(2):
        with pytest.raises(ServiceLostError, match=r"could not start: .* max_size=50, but this one has max_size=100$"):
            len(buffer)
    assert repr(buffer) == "CompressedRayReplayBuffer(100 items at most, held by another process)"
    buffer.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_killed_collectors_and_a_killed_buffer_lose_nothing(cluster: None, tmp_path: Path) -> None:
    buffer = CompressedRayReplayBuffer(
        100_000, batch_size=16, folder=tmp_path / "buffer", remote_config={"num_cpus": 0}
    )
    make: Any = ray.remote(num_cpus=0)(Collector)
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    collectors = [make.remote(buffer.client(), str(log)) for log in logs]
    victim: Any = ray.get(collectors[0].process_id.remote())
    running = [collectors[0].collect.remote(0, 10**6), collectors[1].collect.remote(10**7, 60)]

    def acknowledged(log: Path) -> list[int]:
        return [int(line) for line in log.read_text().splitlines()] if log.exists() else []

    wait_for(lambda: len(acknowledged(logs[0])) >= 20)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(running[0])
    # the learner continues
    assert buffer.sample().shape == (16,)
    holder = buffer.process_id()
    os.kill(holder, signal.SIGKILL)
    assert buffer.sample().shape == (16,)
    assert buffer.process_id() != holder
    ray.get(running[1])

    stored = buffer[:]
    counts = dict(zip(*(part.tolist() for part in stored["action"].unique(return_counts=True)), strict=True))
    for number in acknowledged(logs[0]) + acknowledged(logs[1]):
        assert counts[number] == 20
    # every item is complete and stored once
    assert set(counts.values()) == {20}
    assert len(acknowledged(logs[1])) == 60
    expected = trajectory(20)["observation"]
    assert torch.equal(stored["observation"].unflatten(0, (-1, 20)), expected.expand(len(counts), *expected.shape))

    with pytest.raises(SpecMismatchError):
        buffer.extend(3)
    with pytest.raises(Exception, match="first item"):
        buffer.extend(trajectory(3).exclude("action"))
    assert len(buffer) == len(stored)
    assert buffer.memory_usage().total < 0.1 * len(stored) * 2 * expected[0].nbytes
    buffer.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_unacknowledged_packets_survive_a_killed_buffer_in_order_and_once(cluster: None, tmp_path: Path) -> None:
    buffer = CompressedRayReplayBuffer(
        100_000, batch_size=16, folder=tmp_path / "buffer", max_pending=4, remote_config={"num_cpus": 0}
    )
    data = trajectory(20)
    holder = buffer.process_id()
    for number in range(30):
        data["action"][:] = number
        assert buffer.extend(data, wait=False) is None
        if number == 15:
            os.kill(holder, signal.SIGKILL)
    # waits for the others first
    data["action"][:] = 30
    index = buffer.extend(data)
    assert index.tolist() == list(range(600, 620))
    assert buffer[:]["action"].reshape(-1, 20)[:, 0].tolist() == list(range(31))
    # an error does not stay, and nothing behind it is stored
    buffer.extend(trajectory(3).exclude("action"), wait=False)
    buffer.extend(data, wait=False)
    with pytest.raises(SpecMismatchError, match="first item"):
        buffer.flush(60)
    buffer.extend(data, wait=False)
    buffer.flush(60)
    assert len(buffer) == 640
    # batches of another size do not get what was requested before
    assert [len(buffer.sample(size)) for size in (16, 16, 8, 8, 16)] == [16, 16, 8, 8, 16]
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    buffer.extend(data)
    assert set(buffer.sample()["action"].tolist()) == {30}
    buffer.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_waiting_learners_block_nobody_and_errors_say_that_the_buffer_is_gone(cluster: None) -> None:
    limiter = RateLimiter(samples_per_insert=100, min_size=20, tolerance=1e6, timeout=60)
    buffer = CompressedRayReplayBuffer(1000, batch_size=16, rate_limiter=limiter, remote_config={"num_cpus": 0})
    client = buffer.client()
    # waits in the actor for the first items, and keeps nobody else waiting
    batches: list[Any] = []
    learner = threading.Thread(target=lambda: batches.append(client.sample()))
    learner.start()
    time.sleep(0.2)
    assert len(buffer) == 0
    client.extend(trajectory(20))
    learner.join()
    assert batches[0].shape == (16,)
    os.kill(buffer.process_id(), signal.SIGKILL)

    def sample_often() -> None:
        # two batches were requested before
        for _ in range(4):
            client.sample()

    client.extend(trajectory(20), wait=False)
    calls: list[Any] = [
        client.flush, sample_often, client.__len__, client.stats, client.memory_usage, lambda: client[0],
        lambda: client.extend(trajectory(20)), lambda: client.update_priority([0], [1.0]), buffer.memory_usage,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ServiceLostError, match="the process that holds the buffer has ended"):
            call()
    buffer.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_shards_behind_one_client(cluster: None, tmp_path: Path) -> None:
    limiter = RateLimiter(samples_per_insert=2, min_size=60, tolerance=1000, timeout=60)
    buffer = ShardedRayReplayBuffer(
        2000, n_shards=2, batch_size=64, folder=tmp_path, rate_limiter=limiter, remote_config={"num_cpus": 0}
    )
    data = trajectory(100)
    collectors = [buffer.client() for _ in range(2)]
    index = torch.cat([collectors[0].extend(data[:80]), collectors[1].extend(data[80:90])])
    assert set((index // 1000).tolist()) == {0, 1}
    collectors[1].extend(data[90:], wait=False)
    collectors[1].flush()
    assert len(buffer) == 100
    second = int(index[-1]) // 1000
    index = torch.cat([index, 1000 * second + torch.arange(10, 20)])
    assert_same(buffer[index].exclude("index"), data)
    found: Any = torch.cat([buffer.sample() for _ in range(8)])
    batch, index_of = found.exclude("index"), {number: row for row, number in enumerate(index.tolist())}
    assert_same(batch, data[[index_of[number] for number in found["index"].tolist()]])
    assert len(set(found["index"].tolist())) > 90
    # eight batches, and two that are drawn ahead
    wait_for(lambda: buffer.rate()["samples"] == (8 + 2) * 64)
    assert len(buffer.memory_usage()) == 2
    buffer.checkpoint()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-0", "shard-1"]
    buffer.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_what_a_shard_did_not_store_or_draw_is_not_counted(cluster: None) -> None:
    limiter = RateLimiter(samples_per_insert=2, min_size=10, tolerance=1000, timeout=60)
    buffer = ShardedRayReplayBuffer(
        200, n_shards=2, batch_size=8, rate_limiter=limiter, prefetch=0, remote_config={"num_cpus": 0}
    )
    data, collectors = trajectory(40), [buffer.client() for _ in range(2)]
    for collector in collectors:
        collector.extend(data[:20])
    buffer.sample()
    counted = {"inserts": 40, "samples": 8, "balance": 2 * (40 - 10) - 8}
    wait_for(lambda: buffer.rate() == counted)

    other = data.exclude("action")
    with pytest.raises(SpecMismatchError):
        collectors[0].extend(other)
    collectors[0].extend(data[:20], wait=False)
    collectors[0].extend(other, wait=False)
    with pytest.raises(SpecMismatchError):
        collectors[0].flush()
    counted |= {"inserts": 60, "balance": counted["balance"] + 2 * 20}
    wait_for(lambda: buffer.rate() == counted)

    # Ray starts the process that holds the limiter again
    ray.kill(buffer._coordinator, no_restart=False)
    assert buffer.sample().shape == (8,)
    # the killed process may still have admitted this batch, but then it counts two, and the new process none
    wait_for(lambda: buffer.rate()["samples"] in (0, 8))
    n_samples = int(buffer.rate()["samples"]) + 8
    assert buffer.sample().shape == (8,)
    counted = {"inserts": 60, "samples": n_samples, "balance": -n_samples}
    wait_for(lambda: buffer.rate() == counted)

    os.kill(buffer._buffers[0].process_id(), signal.SIGKILL)
    lost = 0
    for collector in collectors:
        try:
            collector.extend(data[:20])
        except ServiceLostError:
            lost += 1
    assert lost == 1
    counted |= {"inserts": 80, "balance": counted["balance"] + 2 * 20}
    with pytest.raises(ServiceLostError):
        buffer.sample()
    wait_for(lambda: buffer.rate() == counted)
    buffer.close()
