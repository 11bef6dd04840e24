"""The service inside a Ray actor: several threads, priorities, slices, shards; without a cluster."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchrl")

from torchrl.data.replay_buffers.samplers import PrioritizedSampler, PrioritizedSliceSampler, SliceSampler

from sb3_extra_buffers._torchrl.packet_group import decode_batch
from sb3_extra_buffers._torchrl.service import CompressedReplayService
from sb3_extra_buffers._torchrl.service_limiter import RateLimiter
from sb3_extra_buffers._torchrl.service_shards import merge_parts, split_batch
from sb3_extra_buffers._torchrl.wire import KeyframeCache, PacketEncoder, decode_packet, encode_packet
from sb3_extra_buffers.errors import (
    ArgumentError,
    CorruptPayloadError,
    DamagedFileError,
    EmptyBufferError,
    ExtraBuffersError,
    IndexOutOfRangeError,
    PriorityError,
    RateLimitError,
)
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
from tests.conformance import torchrl_extension
from tests.replay_buffers.trajectories import assert_same, trajectory

needs_trees = pytest.mark.skipif(not torchrl_extension.load(), reason="TorchRL's compiled trees are not built")


def service(size: int = 100, folder: Path | None = None, **options: Any) -> Any:
    place = None if folder is None else str(folder)
    return CompressedReplayService(storage=partial(CompressedStorage, size), folder=place, **options)


def prioritized(size: int = 100, folder: Path | None = None) -> Any:
    return service(size, folder, sampler=PrioritizedSampler(size, alpha=1.0, beta=1.0, eps=0.0))


def contents(buffer: Any) -> Any:
    return decode_packet(buffer.packed(slice(None))).exclude("index")


# ---- threads ----


def test_collectors_and_learners_in_threads_keep_every_packet_whole(tmp_path: Path) -> None:
    """Packets of one client stay in order, whatever the others do."""
    buffer, data = service(10_000, tmp_path), trajectory(20)
    failures: list[BaseException] = []

    def collect(name: str, worker: int) -> None:
        mine = data.clone()
        for number in range(15):
            mine["action"][:] = 1000 * worker + number
            buffer.extend(encode_packet(mine, writer=name, number=number + 1))

    def learn() -> None:
        for _ in range(30):
            batch = decode_packet(buffer.sample(16))
            whole = buffer[batch["index"]]
            assert torch.equal(whole["observation"], batch["observation"])

    def guarded(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            failures.append(error)

    buffer.extend(encode_packet(data))
    jobs = [(collect, str(worker), worker) for worker in range(3)] + [(learn,), (learn,)]
    threads = [threading.Thread(target=guarded, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for stored in (contents(buffer), contents(service(10_000, tmp_path))):
        actions = stored["action"][20:].reshape(-1, 20)
        assert (actions == actions[:, :1]).all()
        for worker in range(3):
            mine = actions[actions[:, 0] // 1000 == worker, 0]
            assert mine.tolist() == [1000 * worker + number for number in range(15)]
        assert torch.equal(stored["observation"][20:40], data["observation"])


def test_one_packet_sent_by_two_threads_is_stored_once() -> None:
    buffer, packet = service(), encode_packet(trajectory(10), writer="a", number=1)
    indices: list[Any] = []
    threads = [threading.Thread(target=lambda: indices.append(buffer.extend(packet))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(buffer) == 10
    assert all(torch.equal(index, torch.arange(10)) for index in indices)


def test_a_packet_that_arrives_twice_counts_once() -> None:
    limiter = RateLimiter(samples_per_insert=1, min_size=1, tolerance=1000)
    buffer, packet = service(rate_limiter=limiter), encode_packet(trajectory(20), writer="a", number=1)
    # both are there before either of them is stored
    barrier, admit = threading.Barrier(2, timeout=60), limiter.admit_items

    def admit_together(n_items: int) -> None:
        barrier.wait()
        admit(n_items)

    limiter.admit_items = admit_together  # type: ignore[method-assign]
    threads = [threading.Thread(target=buffer.extend, args=(packet,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(buffer) == 20
    assert buffer.rate() == {"inserts": 20, "samples": 0, "balance": 19.0}


@pytest.mark.parametrize("saved", ["before", "after", "never"])
def test_items_that_were_removed_do_not_come_back(tmp_path: Path, saved: str) -> None:
    buffer, data = service(100, tmp_path), trajectory(40)
    buffer.extend(encode_packet(data[:20], writer="a", number=1))
    if saved == "before":
        buffer.checkpoint()
    buffer.empty()
    if saved == "after":
        buffer.checkpoint()
    emptied = service(100, tmp_path)
    assert len(emptied) == 0
    for each in (buffer, emptied):
        # a retry of what was stored and removed
        each.extend(encode_packet(data[:20], writer="a", number=1))
        assert len(each) == 0
    index = buffer.extend(encode_packet(data[20:], writer="a", number=2))
    again = service(100, tmp_path)
    for each in (buffer, again):
        assert_same(contents(each), data[20:])
    assert index.tolist() == list(range(20))


def test_a_journal_that_broke_before_the_first_packet_is_replaced(tmp_path: Path) -> None:
    buffer, data = service(100, tmp_path), trajectory(20)
    buffer._journal.broken = True
    buffer.extend(encode_packet(data))
    assert_same(contents(service(100, tmp_path)), data)


def test_packets_in_one_call_are_stored_up_to_the_first_bad_one() -> None:
    buffer, data = service(), trajectory(40)
    packets = [encode_packet(data[first : first + 10], writer="a", number=first) for first in (10, 20, 30)]
    n_stored, error = buffer.extend_packets([packets[0], b"nothing", packets[1]])
    assert n_stored == 1
    assert "not a valid packet" in str(error)
    assert buffer.extend_packets(packets) == (3, None)
    assert_same(contents(buffer), data[10:])


# ---- the rate limiter ----


def test_the_limiter_makes_both_sides_wait_and_forgets_what_failed(tmp_path: Path) -> None:
    limiter = RateLimiter(1, min_size=20, tolerance=5, timeout=0.01)
    buffer = service(100, tmp_path, rate_limiter=limiter)
    data = trajectory(60)
    buffer.extend(encode_packet(data[:10], writer="a", number=1))
    with pytest.raises(RateLimitError, match="10 items are stored"):
        buffer.sample(8)
    for _ in range(2):
        # a repeated packet is not counted twice
        buffer.extend(encode_packet(data[10:28], writer="a", number=2))
    with pytest.raises(RateLimitError, match="balance is 8"):
        buffer.extend(encode_packet(data[28:], writer="a", number=3))
    assert len(buffer) == 28
    buffer.draw(5)
    buffer.extend(encode_packet(data[28:40], writer="a", number=3))
    assert buffer.rate() == {"inserts": 40, "samples": 5, "balance": 15}
    again = service(100, tmp_path, rate_limiter=RateLimiter(1, min_size=20, tolerance=5, timeout=0.01))
    assert again.rate() == {"inserts": 40, "samples": 0, "balance": 0}
    again.sample(8)


def test_a_learner_that_waits_for_the_limiter_does_not_block_collectors() -> None:
    buffer = service(rate_limiter=RateLimiter(1, min_size=20, timeout=30))
    batches: list[Any] = []
    learner = threading.Thread(target=lambda: batches.append(decode_packet(buffer.draw(4)[0])))
    learner.start()
    for _ in range(2):
        buffer.extend(encode_packet(trajectory(10)))
    learner.join(30)
    assert len(batches[0]) == 4


def test_a_limiter_that_could_never_be_satisfied_is_refused() -> None:
    with pytest.raises(ArgumentError, match="min_size=101 exceeds max_size=100"):
        service(rate_limiter=RateLimiter(1, min_size=101))


# ---- priorities ----


@needs_trees
def test_priorities_of_items_that_were_overwritten_since_are_refused(tmp_path: Path) -> None:
    buffer, data = prioritized(100, tmp_path), trajectory(260)
    buffer.extend(encode_packet(data[:100]))
    batch = decode_packet(buffer.sample(64))
    assert torch.equal(batch["index_generation"], batch["index"])
    # the first half is overwritten
    buffer.extend(encode_packet(data[100:150]))
    index, generation = batch["index"], batch["index_generation"]
    assert buffer.update_priority(index, torch.full((64,), 7.0), generation) == int((index >= 50).sum())
    tree = buffer._sampler._sum_tree
    assert (tree[index[index >= 50]] == 7).all()
    assert (tree[index[index < 50]] == 1).all()
    batch["td_error"] = torch.full((64,), 3.0)
    assert buffer.update_tensordict_priority(batch) == int((index >= 50).sum())
    assert (tree[index[index >= 50]] == 3).all()
    # numbers go on where they stopped
    buffer.checkpoint()
    buffer.extend(encode_packet(data[150:160]))
    again = prioritized(100, tmp_path)
    assert torch.equal(again._generations(torch.arange(100)), buffer._generations(torch.arange(100)))
    assert again._generations(torch.tensor([59, 60])).tolist() == [159, 60]


@needs_trees
def test_priorities_of_items_that_were_removed_are_refused() -> None:
    buffer, data = prioritized(), trajectory(60)
    buffer.extend(encode_packet(data[:30]))
    batch = decode_packet(buffer.sample(16))
    buffer.empty()
    buffer.extend(encode_packet(data[30:]))
    assert buffer.update_priority(batch["index"], torch.full((16,), 7.0), batch["index_generation"]) == 0
    batch = decode_packet(buffer.sample(16))
    assert buffer.update_priority(batch["index"], torch.full((16,), 7.0), batch["index_generation"]) == 16


@needs_trees
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([3, 100], [1.0, 1.0]), IndexOutOfRangeError),
        (([-1], [1.0]), IndexOutOfRangeError),
        (([1], [float("nan")]), PriorityError),
        (([1], [0.0]), PriorityError),  # nothing could be sampled any more, with eps=0
        (([1], [1e38]), PriorityError),
        (([1, 2], [1.0, -2.0]), PriorityError),
        (([1.5], [1.0]), PriorityError),
        (([1, 2], [1.0, 2.0], [1]), PriorityError),
    ],
)
def test_invalid_priorities_are_refused(arguments: Any, error: type[Exception]) -> None:
    buffer = prioritized()
    buffer.extend(encode_packet(trajectory(50)))
    before = buffer._sampler._sum_tree.query(0, 50)
    with pytest.raises(error):
        buffer.update_priority(*map(torch.tensor, arguments))
    assert buffer._sampler._sum_tree.query(0, 50) == before


@needs_trees
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_priorities_of_any_dtype_can_be_set(dtype: torch.dtype) -> None:
    """TorchRL's trees end the process if the dtype is not theirs."""
    buffer, data = prioritized(), trajectory(10)
    data["td_error"] = torch.full((10, 1), 2, dtype=dtype)
    buffer.extend(encode_packet(data))
    assert buffer.update_priority(np.array([3, 4]), torch.tensor([5, 7], dtype=dtype)) == 2
    assert buffer.contents().mass == 2 * 8 + 5 + 7


@needs_trees
@pytest.mark.parametrize("value", [float("nan"), -1.0, 1e38])
def test_packets_with_invalid_priorities_are_refused_before_they_are_stored(value: float, tmp_path: Path) -> None:
    buffer, data = prioritized(folder=tmp_path), trajectory(10)
    data["td_error"] = torch.ones(10)
    buffer.extend(encode_packet(data))
    data["td_error"][4] = value
    with pytest.raises(PriorityError):
        buffer.extend(encode_packet(data))
    for stored in (buffer, prioritized(folder=tmp_path)):
        assert len(stored) == 10
        assert decode_packet(stored.sample(20)).batch_size == (20,)


# ---- windows ----


def test_slices_are_sampled_through_the_service() -> None:
    """The same seed draws the same windows as a sampler over the storage."""
    make = partial(SliceSampler, slice_len=5, traj_key=("collector", "traj_ids"))
    buffer, data = service(sampler=make()), trajectory(90)
    buffer.extend(encode_packet(data))
    torch.manual_seed(3)
    packet = buffer.sample(40)
    batch = decode_batch(packet, KeyframeCache().lease())
    assert_same(batch, decode_packet(packet))
    batch["index"] = batch["index"].squeeze(-1)
    torch.manual_seed(3)
    [index], info = make().sample(buffer._storage, 40)
    assert torch.equal(batch["index"], index)
    assert torch.equal(batch["next", "truncated"], info["next", "truncated"])
    # the sampler marks the ends of slices in these
    keys = [key for key in data.keys(True, True) if key != ("next", "done")]
    assert_same(batch.select(*keys), data.select(*keys)[batch["index"]])
    starts = batch["index"].reshape(-1, 5)
    assert torch.equal(starts, starts[:, :1] + torch.arange(5))


@needs_trees
def test_priorities_of_slices_go_back_through_the_service() -> None:
    sampler = PrioritizedSliceSampler(100, 0.7, 0.5, slice_len=5, traj_key=("collector", "traj_ids"))
    buffer, data = service(sampler=sampler), trajectory(90)
    buffer.extend(encode_packet(data))
    batch = decode_packet(buffer.sample(40))
    index = batch["index"].reshape(-1, 5)
    assert torch.equal(index, index[:, :1] + torch.arange(5))
    assert torch.equal(batch["index_generation"], batch["index"])
    before = buffer.contents()
    batch["td_error"] = torch.full((40, 1), 5.0)
    assert buffer.update_tensordict_priority(batch.select("td_error", "index", "index_generation")) == 40
    after = buffer.contents()
    assert after.mass > before.mass
    assert after.unit == 5


# ---- shards ----


def sharded_sample(shards: list[Any], planned: list[Any], batch_size: int, rng: Any) -> tuple[Any, list[Any]]:
    """What `ShardedRayClient` does, without Ray."""
    counts = split_batch(planned, batch_size, rng)
    answers = [
        shard.draw(count, max(1, known.n_items)) for shard, count, known in zip(shards, counts, planned, strict=True)
    ]
    drawn = [answer[1] for answer in answers]
    parts = [decode_packet(packet) if packet else None for packet, _ in answers]
    return merge_parts(parts, planned, drawn, 100, rng), drawn


def test_samples_are_uniform_over_shards_however_full_they_are() -> None:
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    shards, data = [service() for _ in range(3)], trajectory(130)
    shards[0].extend(encode_packet(data[:90]))
    shards[2].extend(encode_packet(data[90:100]))
    planned = [shard.contents() for shard in shards]
    # these arrived after the sizes were known: drawn from the next time on
    shards[1].extend(encode_packet(data[100:]))
    shards[2].extend(encode_packet(data[100:]))
    seen = torch.zeros(300)
    for _ in range(40):
        batch, drawn = sharded_sample(shards, planned, 500, rng)
        assert len(batch) == 500
        seen += torch.bincount(batch["index"], minlength=300)
    expected = torch.cat([torch.arange(90), torch.arange(200, 210)])
    assert torch.equal(seen.nonzero().squeeze(-1), expected)
    # 200 of each on average; five standard deviations
    assert (seen[expected] - 200).abs().max() < 5 * 200**0.5
    batch, _ = sharded_sample(shards, drawn, 4000, rng)
    assert len(batch["index"].unique()) == 160
    local, number = batch["index"] % 100, batch["index"] // 100
    for which, stored in ((0, data[:90]), (1, data[100:]), (2, data[90:])):
        mine = batch[number == which].exclude("index")
        assert_same(mine.select(*data.keys(True, True)), stored[local[number == which]])
    # in random order
    assert (number.diff() != 0).sum() > 500


@needs_trees
def test_prioritised_samples_over_shards_follow_all_priorities() -> None:
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  # TorchRL's sampler uses it
    shards, data = [prioritized() for _ in range(2)], trajectory(100)
    shards[0].extend(encode_packet(data[:60]))
    shards[1].extend(encode_packet(data[60:]))
    priorities = torch.rand(100) + 0.1
    shards[0].update_priority(torch.arange(60), priorities[:60])
    planned = [shard.contents() for shard in shards]
    # the masses that are known are old: the weights make up for it
    shards[1].update_priority(torch.arange(40), priorities[60:])
    known = torch.cat([torch.arange(60), 100 + torch.arange(40)])
    for plan in (planned, [shard.contents() for shard in shards]):
        batch, drawn = sharded_sample(shards, plan, 50_000, rng)
        counts = torch.bincount(batch["index"], minlength=200)[known].double()
        share = torch.tensor([plan[0].mass, plan[1].mass]).double()
        share /= share.sum()
        wanted = priorities.double() * torch.cat(
            [(share[0] / drawn[0].mass).expand(60), (share[1] / drawn[1].mass).expand(40)]
        )
        assert (counts - 50_000 * wanted).abs().max() < 5 * (50_000 * wanted.max()) ** 0.5
        weights = torch.zeros(200).index_put((batch["index"],), batch["priority_weight"].float())[known]
        torch.testing.assert_close(weights.double(), wanted.min() / wanted, rtol=1e-4, atol=1e-5)


def test_batches_that_cannot_be_split_are_refused() -> None:
    rng = np.random.default_rng(0)
    empty = [service().contents(), service().contents()]
    with pytest.raises(EmptyBufferError, match="all shards are empty"):
        split_batch(empty, 32, rng)
    slices = [service(sampler=SliceSampler(num_slices=4)).contents()]
    with pytest.raises(ArgumentError, match="slice_len"):
        split_batch(slices, 32, rng)
    slices = [service(sampler=SliceSampler(slice_len=5)).contents()]
    with pytest.raises(ArgumentError, match="not divisible by slice_len=5"):
        split_batch(slices, 32, rng)


@pytest.mark.parametrize("method", ["auto", "delta", "zstd-1", "none"])
def test_batches_can_be_drawn_with_every_method(method: str) -> None:
    """The index that is sent with a batch replaces the one that TorchRL stores with each item."""
    buffer = CompressedReplayService(storage=partial(CompressedStorage, 100, compression_method=method), batch_size=8)
    data = trajectory(20)
    index = buffer.extend(PacketEncoder(method=method).encode(data, writer="a", number=1))
    assert index.tolist() == list(range(20))
    batch = decode_packet(buffer.sample())
    assert_same(batch.exclude("index"), data[batch["index"]])


# ---- packets that are damaged ----


def test_damaged_packets_are_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    buffer, data = service(2000, tmp_path), trajectory(60)
    buffer.extend(encode_packet(data, writer="a", number=1))
    packet = encode_packet(data[:20])
    expected, n_refused = 60, 0
    for place in range(8, len(packet), max(1, len(packet) // 60)):
        damaged = bytearray(packet)
        damaged[place] ^= 1 << place % 8
        try:
            buffer.extend(bytes(damaged))
            expected += 20
        except ExtraBuffersError:
            n_refused += 1
        assert len(buffer) == expected
    assert n_refused > 10
    buffer._storage.check()
    stored = contents(buffer)
    assert_same(stored[:60], data)
    assert_same(contents(service(2000, tmp_path)), stored)


def test_observations_are_filed_without_decoding_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment that the storage has chosen its method."""
    buffer, data, encoder = service(2000), trajectory(300), PacketEncoder()
    buffer.extend(encoder.encode(data[:200]))

    def fail(*_: Any) -> Any:
        raise AssertionError("rows were encoded again")

    [group] = buffer._storage.table.groups
    with monkeypatch.context() as patch:
        for name in ("write", "write_step"):
            patch.setattr(group.store, name, fail)
        buffer.extend(encoder.encode(data[200:]))
    assert_same(contents(buffer), data)


def test_items_at_no_index_are_a_packet() -> None:
    buffer = service()
    buffer.extend(encode_packet(trajectory(10)))
    for index in (torch.zeros(0, dtype=torch.int64), torch.zeros(10, dtype=torch.bool), slice(0, 0)):
        assert decode_packet(buffer.packed(index)).batch_size == (0,)
    with pytest.raises(CorruptPayloadError, match="it has 3 bytes"):
        buffer.extend(b"abc")


def test_many_small_packets_take_no_more_memory_than_local_writes() -> None:
    """Filed as they are, they would take ten times as much: each of them begins with complete frames."""
    buffer, local, data = service(1000), CompressedStorage(1000), trajectory(800)
    encoder = PacketEncoder()
    for first in range(0, 800, 2):
        items = data[first : first + 2]
        buffer.extend(encoder.encode(items))
        local.set(torch.arange(first, first + 2), items)
    assert_same(contents(buffer), data)
    assert buffer._storage.memory_usage().total < 1.2 * local.memory_usage().total


def test_keyframes_that_the_learner_has_are_not_sent_again() -> None:
    buffer, data, cache = service(2000), trajectory(400), KeyframeCache()
    buffer.extend(encode_packet(data))
    sizes = []
    for _ in range(2):
        torch.manual_seed(0)
        lease = cache.lease()
        packet = buffer.sample(32, known=lease.known)
        batch = decode_packet(packet, lease)
        assert_same(batch.exclude("index"), data[batch["index"]])
        sizes.append(len(packet))
    assert sizes[1] < sizes[0]


def test_a_folder_without_the_file_that_names_the_others_is_not_started_over(tmp_path: Path) -> None:
    service(100, tmp_path)
    (tmp_path / "current.json").unlink()
    service(100, tmp_path)  # killed at its first start: nothing is lost
    buffer = service(100, tmp_path)
    buffer.extend(encode_packet(trajectory(20)))
    current = (tmp_path / "current.json").read_bytes()
    for _ in range(2):
        (tmp_path / "current.json").unlink()
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(DamagedFileError, match=r"current.json is missing, but (journal|snapshot)-\w+ is there"):
            service(100, tmp_path)
        assert sorted(tmp_path.rglob("*")) == before
        (tmp_path / "current.json").write_bytes(current)
        buffer = service(100, tmp_path)
        assert len(buffer) == 20
        buffer.checkpoint()
        current = (tmp_path / "current.json").read_bytes()
