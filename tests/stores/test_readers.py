"""Threads read at the same time beside one writer, and no interrupt leaves a lock held."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.stores.observation import ObservationStore
from tests.contracts.store import method_params
from tests.stores.test_transactions import SPEC, contents, filled, stacks

METHODS = method_params("delta", "delta2", "gzip", "zstd", "none")
STREAMS = np.zeros(40, np.int64)


def in_thread(work: Callable[[], Any], timeout: float = 20) -> Any:
    """Run ``work`` in another thread and return its result; fail if it does not finish."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(timeout)
    assert results, "the other thread failed, or waits for a lock"
    return results[0]


@pytest.mark.parametrize("method", METHODS)
def test_two_readers_are_inside_the_store_at_the_same_time(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rows = filled(method)
    both_inside = threading.Barrier(2, timeout=20)
    inner: Any = store.inner
    read = inner.read

    def wait_and_read(indices: Any) -> Any:
        both_inside.wait()
        return read(indices)

    monkeypatch.setattr(inner, "read", wait_and_read)
    batches: list[Any] = []
    threads = [threading.Thread(target=lambda: batches.append(contents(store))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not both_inside.broken
    for batch in batches:
        np.testing.assert_array_equal(batch, rows)


def test_a_writer_waits_for_readers_and_new_readers_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store, rows = filled("delta")
    other = stacks(40, 1)
    inner: Any = store.inner
    read, inside, leave = inner.read, threading.Event(), threading.Event()

    def read_slowly(indices: Any) -> Any:
        inside.set()
        assert leave.wait(20)
        return read(indices)

    monkeypatch.setattr(inner, "read", read_slowly)
    batches: list[Any] = []
    reader = threading.Thread(target=lambda: batches.append(contents(store)))
    reader.start()
    assert inside.wait(20)
    monkeypatch.setattr(inner, "read", read)
    writer = threading.Thread(target=lambda: store.write(np.arange(40), STREAMS, other))
    writer.start()
    while not store.readers.writing:
        pass
    late = threading.Thread(target=lambda: batches.append(contents(store)))
    late.start()
    late.join(0.05)
    assert writer.is_alive()
    assert late.is_alive()
    leave.set()
    for thread in (reader, writer, late):
        thread.join(20)

    np.testing.assert_array_equal(batches[0], rows)
    np.testing.assert_array_equal(batches[1], other)
    assert not store.readers.writing


@pytest.mark.parametrize("method", [*METHODS, "auto"])
def test_every_batch_read_beside_a_writer_is_a_state_between_two_writes(method: str) -> None:
    store = ObservationStore(SPEC, 1, method)
    store.allocate(80)  # auto decides in the middle
    versions = [stacks(40, seed) for seed in range(3)]
    store.write(np.arange(40), STREAMS, versions[0])
    expected = {version.tobytes() for version in versions}
    done = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not done.is_set():
            if store.read(np.arange(40)).tobytes() not in expected:
                wrong.append("a batch of no version")
                return

    readers = [threading.Thread(target=read) for _ in range(4)]
    for thread in readers:
        thread.start()
    try:
        for number in range(150):
            store.write(np.arange(40), STREAMS, versions[number % 3])
            if number % 10 == 0:
                store.memory_usage()
                store.commit()
                store.write(np.arange(40), STREAMS, versions[(number + 1) % 3])
                assert store.undo_write()
    finally:
        done.set()
        for thread in readers:
            thread.join()
    assert not wrong
    store.check()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="timers need POSIX signals")
@pytest.mark.parametrize("method", method_params("delta", "gzip", "none"))
def test_an_interrupt_leaves_no_lock_held(method: str) -> None:
    # reference kernels: numba reports an interrupt of the Python code that it calls as another error
    store, rows = filled(method, compiled=False)
    other = stacks(40, 1)
    rng = random.Random(0)
    n_interrupted = 0

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def work() -> None:
        for number in range(1000):
            store.read(np.arange(2))
            store.write(np.arange(2), STREAMS[:2], (other if number % 2 else rows)[:2])

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(60):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-5, 2e-3))
                work()
                signal.setitimer(signal.ITIMER_REAL, 0)
                continue
            n_interrupted += 1
            batch = in_thread(lambda: store.read(np.arange(40)))
            assert batch[:2].tobytes() in (rows[:2].tobytes(), other[:2].tobytes())
            np.testing.assert_array_equal(batch[2:], rows[2:])
            in_thread(lambda: [store.write(np.arange(2), STREAMS[:2], rows[:2])])
            assert not store.readers.writing
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert n_interrupted > 30
    store.check()
