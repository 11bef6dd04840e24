"""Threads that share a batch: torch's, or those of the library."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from sb3_extra_buffers.stores import workers


@pytest.fixture(params=["torch", "own"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two threads of either kind."""
    monkeypatch.setattr(workers, "n_workers", lambda: 2)
    monkeypatch.setitem(workers._pauses, "torch", 0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(2 if request.param == "torch" else 1)
    if request.param == "torch" and workers.torch_team() is None:
        torch.set_num_threads(before)
        pytest.skip("torch does not use OpenMP threads here")
    yield request.param
    torch.set_num_threads(before)


def test_every_chunk_is_done_once_and_both_threads_help(threads: str) -> None:
    done: list[tuple[int, int, int]] = []

    def work(first: int, stop: int) -> int:
        done.append((first, stop, threading.get_ident()))
        time.sleep(0.02)
        return first

    results = workers.run_split(work, 11, 3)
    assert sorted(results) == [0, 3, 6, 9]
    assert sorted(part[:2] for part in done) == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert len({ident for _, _, ident in done}) == 2


def test_an_error_in_a_helping_thread_is_raised(threads: str) -> None:
    here = threading.get_ident()
    failed = threading.Event()

    def work(first: int, stop: int) -> None:
        if threading.get_ident() == here:
            assert failed.wait(10)
        else:
            failed.set()
            raise MemoryError("not enough")

    with pytest.raises(MemoryError, match="not enough"):
        workers.run_split(work, 2, 1)
    assert workers.run_split(lambda first, stop: first, 2, 1) in ([0, 1], [1, 0])


def test_an_interrupted_thread_waits_for_those_that_help_it(threads: str) -> None:
    """They decode from tables that the next write changes."""
    # a shell starts background processes with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    here = threading.get_ident()
    helping, finished = threading.Event(), threading.Event()

    def work(first: int, stop: int) -> None:
        if threading.get_ident() == here:
            assert helping.wait(10)
            return
        helping.set()
        time.sleep(0.05)  # until the other thread waits for this one
        signal.pthread_kill(here, signal.SIGINT)
        time.sleep(0.05)
        finished.set()

    with pytest.raises(KeyboardInterrupt):
        workers.run_split(work, 2, 1)
    assert finished.is_set()


def test_no_interrupt_of_torch_threads_is_lost(threads: str) -> None:
    """Every call returns all results or raises."""
    if threads == "own":
        pytest.skip("no function of C is called")

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename == workers.__file__:
                raise InterruptedError
            frame = frame.f_back

    gc.disable()  # what is raised in a callback of the collector is ignored
    before = signal.signal(signal.SIGALRM, interrupt)
    n_interrupted = 0
    try:
        for number in range(200):
            workers._pauses["torch"] = 0.0
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + number % 40 * 5e-6)
            try:
                results = workers.run_split(lambda first, stop: sum(range(300)) * 0 + first, 8, 1)
            except InterruptedError:
                n_interrupted += 1
            else:
                assert sorted(results) == list(range(8))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert n_interrupted > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(threads: str) -> None:
    assert workers.run_split(lambda first, stop: first, 2, 1) in ([0, 1], [1, 0])
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=lambda: queue.put(workers.run_split(lambda first, stop: first, 4, 1)))
    process.start()
    process.join(30)
    if process.is_alive():
        process.kill()
        raise AssertionError("the child waits for threads that it does not have")
    assert sorted(queue.get()) == [0, 1, 2, 3]


def test_busy_threads_of_torch_are_left_alone(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that starts late keeps its team waiting, although nothing is left to do."""
    if threads == "own":
        pytest.skip("they do not have to wait for one another")
    team = workers.torch_team()
    assert team is not None

    def late(function: object, argument: None, n_threads: int, flags: int) -> None:
        team(function, argument, n_threads, flags)
        time.sleep(0.01)

    monkeypatch.setitem(workers._teams, "torch", late)
    assert sorted(workers.run_split(lambda first, stop: first, 4, 1)) == [0, 1, 2, 3]
    assert workers.torch_team() is None
    assert sorted(workers.run_split(lambda first, stop: first, 4, 1)) == [0, 1, 2, 3]
