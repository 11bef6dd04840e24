"""The heap: what was written is there, the arena stays small, memory goes back."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sb3_extra_buffers.errors import ExtraBuffersError, HeapFullError
from sb3_extra_buffers.stores import heap as heap_module
from sb3_extra_buffers.stores.arena import resident_bytes
from sb3_extra_buffers.stores.heap import Heap
from tests.contracts.store import RESIDENT, examples, needs_proc, run_fresh

N_PAYLOADS = 24
LEAST = heap_module._MIN_SPARE
LARGEST = 90_000
# mostly small, and now and then one that is larger than the arena so far
SIZES = st.one_of(st.integers(1, 5000), st.integers(1, 5000), st.integers(5000, LARGEST))


def payload_of(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


class HeapMachine(RuleBasedStateMachine):
    """A heap beside a dict of bytes."""

    path: Path | None = None

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, bytes] = {}
        self.heap = Heap(N_PAYLOADS, path=self.path)
        self.most = 0
        self.next = 0

    @initialize(fill=st.booleans(), seed=st.integers(0, 99))
    def fill(self, fill: bool, seed: int) -> None:
        if fill:
            for payload_id in range(N_PAYLOADS):
                self.store([payload_id], [payload_of(seed + payload_id, 900 + payload_id)])

    def store(self, payload_ids: list[int], payloads: list[bytes]) -> None:
        self.heap.write(payload_ids, payloads)
        self.model.update(zip(payload_ids, payloads, strict=True))

    @rule(payload_id=st.integers(0, N_PAYLOADS - 1), size=SIZES, seed=st.integers(0, 1 << 20))
    def write(self, payload_id: int, size: int, seed: int) -> None:
        self.store([payload_id], [payload_of(seed, size)])

    @rule(
        payload_ids=st.lists(st.integers(0, N_PAYLOADS - 1), unique=True, max_size=N_PAYLOADS),
        sizes=st.lists(st.integers(1, 5000), min_size=N_PAYLOADS, max_size=N_PAYLOADS),
    )
    def write_batch(self, payload_ids: list[int], sizes: list[int]) -> None:
        self.store(
            payload_ids, [payload_of(payload_id, size) for payload_id, size in zip(payload_ids, sizes, strict=False)]
        )

    @rule(count=st.integers(1, 40), size=st.integers(1, 600), jitter=st.integers(0, 300))
    def write_round(self, count: int, size: int, jitter: int) -> None:
        for step in range(count):
            self.store([self.next], [payload_of(step, size + step * 7 % (jitter + 1))])
            self.next = (self.next + 1) % N_PAYLOADS

    @rule(payload_ids=st.lists(st.integers(0, N_PAYLOADS - 1), max_size=N_PAYLOADS))
    def free(self, payload_ids: list[int]) -> None:
        self.heap.free(payload_ids)
        for payload_id in payload_ids:
            self.model.pop(payload_id, None)

    @precondition(lambda self: len(self.model) > N_PAYLOADS // 2)
    @rule()
    def clear(self) -> None:
        self.heap.clear()
        self.model.clear()

    @rule()
    def pickle(self) -> None:
        self.heap = pickle.loads(pickle.dumps(self.heap))

    @rule()
    def copy_deeply(self) -> None:
        old, self.heap = self.heap, copy.deepcopy(self.heap)
        old.clear()

    @invariant()
    def holds_the_model(self) -> None:
        self.heap.check()
        assert {int(payload_id) for payload_id in np.flatnonzero(self.heap.lengths)} == set(self.model)
        for payload_id, payload in self.model.items():
            assert bytes(self.heap.read(payload_id)) == payload
        live = sum(map(len, self.model.values()))
        assert self.heap.live_bytes == live
        self.most = max(self.most, live)
        assert self.heap.capacity <= self.most * 9 // 8 + LEAST + LARGEST


def test_heap_holds_what_a_dict_holds() -> None:
    run_state_machine_as_test(HeapMachine, settings=examples(60, 40))


def test_heap_in_a_file_holds_what_a_dict_holds(tmp_path: Path) -> None:
    class FileMachine(HeapMachine):
        path = tmp_path / "heap.bin"

    run_state_machine_as_test(FileMachine, settings=examples(30, 30))

    assert {file.name for file in tmp_path.iterdir()} == {"heap.bin"}


@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
def test_fifo_overwrite_never_repacks(in_file: bool, tmp_path: Path) -> None:
    heap = Heap(100, path=tmp_path / "heap.bin" if in_file else None)
    for payload_id in range(100):
        heap.write([payload_id], [payload_of(payload_id, 777)])
    for payload_id in range(100):
        heap.write([payload_id], [payload_of(payload_id, 777)])
    n_repacks, capacity = heap.n_repacks, heap.capacity

    for step in range(1000):
        heap.write([step % 100], [payload_of(step, 777)])
        heap.check()

    assert heap.n_repacks == n_repacks
    assert heap.capacity == capacity
    for payload_id in range(100):
        assert bytes(heap.read(payload_id)) == payload_of(900 + payload_id, 777)


@pytest.mark.parametrize("by_kernel", [False, True], ids=["written", "adopted"])
def test_a_ring_takes_little_more_memory_than_its_payloads(by_kernel: bool) -> None:
    heap, size = Heap(200), 20_000
    for step in range(700):
        payload_id, payload = step % 200, np.frombuffer(payload_of(step, size), np.uint8)
        heap.free([payload_id])
        begin, end = heap.gap()
        if by_kernel and size <= end - begin:
            heap.data[begin : begin + size] = payload
            heap.starts[payload_id], heap.lengths[payload_id] = begin, size
            heap.adopt(np.array([payload_id], np.int32))
        else:
            heap.put(payload_id, payload)
    heap.check()

    assert heap.n_repacks == 0
    assert heap.live_bytes == 200 * size
    # up to an eighth is reserved, but not written to
    assert heap.capacity > 1.05 * heap.live_bytes
    assert resident_bytes(heap.data) < 1.05 * heap.live_bytes
    for payload_id in range(200):
        newest = 600 + payload_id if payload_id < 100 else 400 + payload_id
        assert bytes(heap.read(payload_id)) == payload_of(newest, size)


def test_a_ring_of_varying_payloads_seldom_repacks() -> None:
    rng = np.random.default_rng(0)
    heap, sizes = Heap(300), {}
    for step in range(6000):
        # the average varies by a fifth from round to round
        size = int(rng.integers(500, 1500) * (1 + 0.2 * np.sin(step / 250)))
        heap.put(step % 300, np.full(size, step % 251, np.uint8))
        sizes[step % 300] = size
    heap.check()

    assert heap.live_bytes == sum(sizes.values())
    assert heap.n_repacks < 10
    assert all(bytes(heap.read(i)) == bytes([(5700 + i) % 251]) * size for i, size in sizes.items())


def test_random_overwrite_stays_bounded() -> None:
    rng = np.random.default_rng(0)
    heap, model, most = Heap(200), dict[int, bytes](), 0
    for _ in range(4000):
        payload_id, payload = int(rng.integers(200)), rng.bytes(int(rng.integers(1, 3000)))
        heap.write([payload_id], [payload])
        model[payload_id] = payload
        most = max(most, heap.live_bytes)
        assert heap.capacity <= most * 9 // 8 + LEAST + 3000
    heap.check()
    for payload_id, payload in model.items():
        assert bytes(heap.read(payload_id)) == payload
    # an eighth of slack is refilled before the next repack: few bytes move for each one written
    assert heap.n_repacks < 4000 // 8


def test_a_payload_larger_than_the_arena_fits_behind_dead_ones() -> None:
    heap = Heap(20)
    for payload_id in range(10):
        heap.write([payload_id], [payload_of(payload_id, 5000)])
    heap.free(range(8))

    heap.write([11], [payload_of(11, 82_000)])

    heap.check()
    assert bytes(heap.read(11)) == payload_of(11, 82_000)
    assert bytes(heap.read(9)) == payload_of(9, 5000)


def test_arena_shrinks_after_frees() -> None:
    heap = Heap(300)
    heap.write(range(300), [payload_of(payload_id, 4000) for payload_id in range(300)])
    full = heap.capacity

    heap.free([payload_id for payload_id in range(300) if payload_id % 10])

    heap.check()
    assert full >= 300 * 4000
    assert heap.capacity <= 2 * heap.live_bytes + 4 * LEAST
    for payload_id in range(0, 300, 10):
        assert bytes(heap.read(payload_id)) == payload_of(payload_id, 4000)
    heap.clear()
    assert heap.capacity <= LEAST


def test_limit_is_an_error_that_changes_nothing() -> None:
    heap = Heap(10, limit=1000)
    heap.write(range(9), [payload_of(payload_id, 100) for payload_id in range(9)])

    with pytest.raises(HeapFullError, match=r"101 bytes does not fit: 900 of 1000 .* heap_bytes>=1001") as caught:
        heap.write([9], [payload_of(9, 101)])

    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, ExtraBuffersError)
    assert (caught.value.needed, caught.value.live, caught.value.limit) == (101, 900, 1000)
    heap.check()
    for payload_id in range(9):
        assert bytes(heap.read(payload_id)) == payload_of(payload_id, 100)
    assert heap.lengths[9] == 0
    # what a payload replaces does not count
    heap.write([3], [payload_of(99, 200)])
    assert bytes(heap.read(3)) == payload_of(99, 200)


def test_limit_holds_for_a_batch_as_a_whole() -> None:
    heap = Heap(10, limit=1000)
    with pytest.raises(HeapFullError):
        heap.write([0, 1, 2], [bytes(400)] * 3)
    assert heap.live_bytes == 0
    assert not heap.lengths.any()


def test_file_is_where_the_payloads_are(tmp_path: Path) -> None:
    path = tmp_path / "heap.bin"
    heap = Heap(4, path=path)
    heap.write([0, 1], [b"first payload", b"second payload"])
    assert b"first payload" in path.read_bytes()

    copied = pickle.loads(pickle.dumps(heap))

    # a copy has memory of its own: two heaps never share a file
    assert copied.path is None
    copied.write([0], [b"changed"])
    assert bytes(heap.read(0)) == b"first payload"
    assert bytes(copied.read(1)) == b"second payload"


def test_pickle_leaves_free_space_behind() -> None:
    heap = Heap(2000)
    heap.write(range(2000), [payload_of(payload_id, 500) for payload_id in range(2000)])
    heap.free(range(1000))
    assert len(pickle.dumps(heap)) < heap.live_bytes + 2000 * 40


@needs_proc
@pytest.mark.parametrize("how", ["drop", "clear", "free"])
def test_memory_goes_back_to_the_system(how: str) -> None:
    before, full, after = map(int, run_fresh(RESIDENT + FILL_AND_EMPTY, how).split())
    assert full - before > 30 << 20
    assert after - before < 6 << 20


FILL_AND_EMPTY = """
import sys
import numpy as np
from sb3_extra_buffers.stores.heap import Heap
payload = np.random.default_rng(0).bytes(4000)
warm = Heap(10); warm.write([1], [payload]); warm.free([1])
before = resident()
heap = Heap(9000)
for payload_id in range(9000):
    heap.write([payload_id], [payload])
full = resident()
if sys.argv[1] == "drop":
    del heap
elif sys.argv[1] == "clear":
    heap.clear()
else:
    heap.free(range(8900))
print(before, full, resident())
"""
