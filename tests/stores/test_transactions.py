"""A write is stored as a whole or not at all, whatever ends it, and limits count from the first byte."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import FileWriteError, HeapFullError
from sb3_extra_buffers.stores.file_heap import FileHeap
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.observation import ObservationStore
from tests.contracts.store import KERNELS
from tests.torture.interrupts import Injector

SPEC = ObsSpec((4, 12, 12), np.dtype(np.uint8))
METHODS = ["delta", "gzip", "none"]


def stacks(count: int, seed: int) -> np.ndarray[Any, Any]:
    """Successive stacks of four frames that change a little."""
    rng = np.random.default_rng(seed)
    frames = np.zeros((count + 3, 12, 12), np.uint8)
    for number in range(1, len(frames)):
        frames[number] = frames[number - 1]
        frames[number, rng.integers(12), :5] = rng.integers(1, 256, 5)
    return np.stack([frames[start : start + 4] for start in range(count)]).reshape(count, -1)


def filled(method: str, compiled: bool | None = None, n_obs: int = 40) -> tuple[ObservationStore, Any]:
    store = ObservationStore(SPEC, 1, method, compiled=compiled)
    store.allocate(n_obs)
    rows = stacks(n_obs, 0)
    for index in range(n_obs):
        store.write(np.array([index]), np.array([0]), rows[index : index + 1])
    return store, rows


def contents(store: ObservationStore) -> Any:
    return store.read(np.arange(store.n_obs))


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("method", METHODS)
def test_a_write_can_be_undone(method: str, compiled: bool) -> None:
    store, rows = filled(method, compiled)
    store.commit()
    indices = np.array([3, 4, 5, 3])  # one of them twice

    store.write(indices, np.zeros(4, np.int64), stacks(4, 1))
    assert store.undo_write()

    store.check()
    np.testing.assert_array_equal(contents(store), rows)
    assert not store.undo_write()  # once only
    store.write(indices[:3], np.zeros(3, np.int64), stacks(3, 2))
    store.check()
    np.testing.assert_array_equal(contents(store)[3:6], stacks(3, 2))


@pytest.mark.parametrize("method", METHODS)
def test_a_committed_write_cannot_be_undone(method: str) -> None:
    store, _ = filled(method)
    store.write(np.array([3]), np.array([0]), stacks(1, 1))
    store.commit()

    assert not store.undo_write()

    np.testing.assert_array_equal(contents(store)[3], stacks(1, 1)[0])


def test_a_write_can_be_undone_before_and_while_a_method_is_chosen() -> None:
    store = ObservationStore(SPEC, 1, "auto")
    store.allocate(40)
    rows = stacks(40, 0)
    for index in range(40):
        store.commit()
        store.write(np.array([index]), np.array([0]), rows[index : index + 1])
        assert store.undo_write()
        assert not contents(store)[index].any()
        store.write(np.array([index]), np.array([0]), rows[index : index + 1])
    assert store.layout is not None
    store.check()
    np.testing.assert_array_equal(contents(store), rows)


@pytest.mark.parametrize("report", ["memory_usage", "held_bytes", "check", "to_parts"])
@pytest.mark.parametrize("method", ["table", "delta", "none"])
def test_a_write_is_undone_after_a_report_as_a_whole_or_not_at_all(method: str, report: str) -> None:
    store = ObservationStore(ObsSpec((4, 12, 12), np.dtype(np.float32)), 1, method)
    store.allocate(80)
    before, after = ((stacks(40, seed) / np.float32(255)).astype(np.float32).view(np.uint8) for seed in (0, 1))
    store.write(np.arange(40), np.zeros(40, np.int64), before)
    store.write(np.arange(20, 60), np.zeros(40, np.int64), after)

    value = getattr(store, report)
    if callable(value):
        value()
    undone = store.undo_write()

    expected = np.zeros((80, store.spec.nbytes), np.uint8)
    expected[:40] = before
    if not undone:
        expected[20:60] = after
    np.testing.assert_array_equal(contents(store), expected)


def test_choosing_a_method_leaves_nothing_to_undo() -> None:
    store = ObservationStore(SPEC, 1, "auto")
    store.allocate(40)
    for index, row in enumerate(stacks(5, 0)):
        store.write(np.array([index]), np.array([0]), row[None])

    store.choose_method()

    assert not store.undo_write()
    np.testing.assert_array_equal(contents(store)[:5], stacks(5, 0))


@pytest.mark.parametrize("method", METHODS)
def test_a_change_that_its_listener_refuses_is_undone(method: str) -> None:
    store, rows = filled(method)

    def refuse(*_: Any) -> None:
        raise FileWriteError(28, "no space")

    store.on_change = refuse
    with pytest.raises(FileWriteError):
        store.write(np.array([3]), np.array([0]), stacks(1, 1))
    with pytest.raises(FileWriteError):
        store.erase(np.array([3]))

    store.on_change = None
    store.check()
    np.testing.assert_array_equal(contents(store), rows)


@pytest.mark.parametrize("method", ["delta", "gzip"])
def test_a_heap_that_cannot_grow_leaves_every_observation_as_it_was(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rows = filled(method)
    n_calls = 0

    def fail(self: Heap, nbytes: int) -> int:
        nonlocal n_calls
        n_calls += 1
        raise FileWriteError(28, f"no space for {nbytes} bytes")

    noise = np.random.default_rng(0).integers(0, 256, (40, SPEC.nbytes)).astype(np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(Heap, "_reserve", fail)
        with pytest.raises(FileWriteError):
            store.write(np.arange(40), np.zeros(40, np.int64), noise)
    assert n_calls

    store.check()
    np.testing.assert_array_equal(contents(store), rows)
    store.write(np.arange(40), np.zeros(40, np.int64), noise)
    store.check()
    np.testing.assert_array_equal(contents(store), noise)


def test_a_heap_whose_compaction_was_interrupted_holds_every_observation(tmp_path: Path) -> None:
    store, rows = filled("delta")
    inner = store.inner
    assert isinstance(inner, FrameStore)
    inner.move_payloads(FileHeap(tmp_path / "heap"))

    def compact(name: str, at: int = 0) -> int:
        heap = inner.heap
        assert isinstance(heap, FileHeap)
        with Injector(at, KeyboardInterrupt()) as injector, contextlib.suppress(KeyboardInterrupt):
            store.run_exclusively(lambda: inner.compact_heap(lambda: heap.compact(tmp_path / name)))
        return injector.count

    n_points = compact("counted")
    for at in range(1, n_points, 7):
        compact(f"heap-{at}", at)
        np.testing.assert_array_equal(contents(store), rows)
        store.check()


@pytest.mark.parametrize("method", ["auto", "delta", "gzip", "none"])
def test_a_limit_counts_from_the_first_byte(method: str) -> None:
    """Also what is collected before a method is chosen, what is open and what is dense."""
    limit = 20_000
    store = ObservationStore(SPEC, 1, method, heap_bytes=limit)
    store.allocate(4000)
    noise = np.random.default_rng(0).integers(0, 256, (4000, SPEC.nbytes)).astype(np.uint8)
    stored = 0
    with contextlib.suppress(HeapFullError):
        while stored < store.n_obs:
            store.write(np.array([stored]), np.array([0]), noise[stored : stored + 1])
            stored += 1
    assert stored < store.n_obs  # refused
    usage = store.memory_usage()
    # a few bytes to an observation say where it is, and a few frames are held to find repeats
    assert usage.payload <= limit + 16 * stored + store.n_obs
    assert usage.payload + usage.keyframes <= limit + 16 * stored + store.n_obs + 16 * SPEC.nbytes
    assert stored >= limit // SPEC.nbytes - 8
    store.check()
    np.testing.assert_array_equal(contents(store)[:stored], noise[:stored])
    assert not contents(store)[stored:].any()


@pytest.mark.parametrize("make", [copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))])
@pytest.mark.parametrize("method", METHODS)
def test_a_copy_beside_a_writer_is_a_state_between_two_writes(
    method: str, make: Callable[[ObservationStore], ObservationStore]
) -> None:
    store, rows = filled(method)
    other = stacks(40, 1)
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            number += 1
            store.write(np.arange(40), np.zeros(40, np.int64), other if number % 2 else rows)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            copied = make(store)
            copied.check()
            batch = contents(copied)
            assert np.array_equal(batch, rows) or np.array_equal(batch, other)
    finally:
        done.set()
        writer.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_beside_a_writer_is_a_state_between_two_writes() -> None:
    store, rows = filled("delta")
    other = stacks(40, 1)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            store.write(np.arange(40), np.zeros(40, np.int64), other)
            store.write(np.arange(40), np.zeros(40, np.int64), rows)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                batch = contents(store)
                os._exit(0 if np.array_equal(batch, rows) or np.array_equal(batch, other) else 1)
            assert os.waitpid(child, 0)[1] == 0
            time.sleep(0.001)
    finally:
        done.set()
        writer.join()
