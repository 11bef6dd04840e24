"""Threads that share a batch: torch's, or those of the library."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

import pytest
import torch

from sb3_extra_buffers.stores import workers

pytestmark = pytest.mark.same_without_extras


@pytest.fixture(params=["torch", "own"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two threads of either kind."""
    monkeypatch.setattr(workers, "n_cores", lambda: 2)
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_torch_works_in_a_forked_process_of_one_that_shared_a_batch() -> None:
    child = """
pid = os.fork()
if not pid:
    (torch.ones(1_000_000) + 1).sum()
    os._exit(0)
deadline = time.time() + 20
while not os.waitpid(pid, os.WNOHANG)[0]:
    if time.time() > deadline:
        os.kill(pid, 9)
        raise SystemExit("the child waits for threads that it does not have")
    time.sleep(0.01)
print("finished")
"""
    assert run_script("torch", "assert sorted(share()) == [0, 1, 2, 3]" + child) == "finished"


def run_script(threads: str, script: str) -> str:
    """Run a script that can ``share()`` four chunks with torch's threads or our own; return what it prints."""
    begin = f"""
import atexit, os, sys, threading, time
import torch
from sb3_extra_buffers.stores import workers

workers.n_cores = lambda: 2
torch.set_num_threads(2 if "{threads}" == "torch" else 1)

def share():
    return workers.run_split(lambda first, stop: first, 4, 1)

"""
    command = [sys.executable, "-W", "ignore", "-c", begin + script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.strip()


@pytest.mark.parametrize("threads", ["torch", "own"])
@pytest.mark.parametrize(
    "script",
    [
        "atexit.register(lambda: print(sum(share())))",
        """
def late():
    threading.main_thread().join()
    time.sleep(0.1)
    print(sum(share()))

threading.Thread(target=late).start()
""",
        """
class Late:
    def __del__(self):
        print(sum(share()))

sys.last_value = Late()  # deleted when threads cannot run Python any more
""",
    ],
    ids=["atexit", "thread", "finalizer"],
)
def test_batches_are_shared_while_the_interpreter_exits(threads: str, script: str) -> None:
    assert run_script(threads, "share()\n" + script) == "6"


def test_interrupts_leave_no_lock_acquired(threads: str) -> None:
    if threads == "torch":
        pytest.skip("two interrupts of a function that C calls are reported as unraisable")
    left = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal left
        while left and frame is not None:
            if frame.f_code.co_filename == workers.__file__:
                left -= 1
                raise InterruptedError
            frame = frame.f_back

    def work(first: int, stop: int) -> int:
        return sum(range(300)) * 0 + first

    gc.disable()  # what is raised in a callback of the collector is ignored
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(1500):
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + number % 40 * 5e-6, 4e-5)
            left = 2
            with suppress(InterruptedError):
                assert sorted(workers.run_split(work, 8, 1)) == list(range(8))
            left = 0
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert sorted(workers.run_split(work, 8, 1)) == list(range(8))


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
