"""Threads that decode large batches and pack segments, shared by all stores of a process."""

from __future__ import annotations

import _thread
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, TypeVar

Result = TypeVar("Result")
# OpenMP's GOMP_parallel(function, argument, number of threads, flags) calls a function in all threads of a team
_Team = Callable[[Any, None, int, int], None]
_TeamFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# A call of a team returns when its last thread has finished, even if that thread was late, because its core was busy,
# and found nothing left to do. After waiting more than _LONG_WAIT seconds for such a thread, torch's team is not used
# for _PAUSE_FACTOR times as long: waiting then takes at most 2 % of the time
_LONG_WAIT = 200e-6
_PAUSE_FACTOR = 50

_pools: dict[int, _Pool] = {}
_teams: dict[str, _Team | None] = {}
_team_users: set[int] = set()  # threads that have used the team
_pauses: dict[str, float] = {"torch": 0.0}  # the time at which the team may be used again


def n_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def n_workers() -> int:
    """The most threads that may share a batch: one for each available core, up to 8."""
    return max(min(n_cores(), 8), 1)


def split_seconds() -> tuple[float, float]:
    """How many seconds of work are worth splitting among threads, and how many each thread should take at a time."""
    # torch's threads are often still awake, and start sooner than those of a pool
    return (150e-6, 60e-6) if torch_team() else (500e-6, 150e-6)


def run_split(work: Callable[[int, int], Result], n_rows: int, chunk: int) -> list[Result]:
    """Call ``work(first, stop)`` for every ``chunk`` of ``range(n_rows)``, in this thread and in others.

    Each thread takes the next chunk when it has finished one, so if the other cores are busy, this thread does nearly
    everything itself. The threads are torch's if `torch_team` finds them, else those of a pool. torch's threads keep
    spinning for some milliseconds after each calculation, and a pool would compete with them for the cores.
    """
    starts = iter(range(0, n_rows, chunk))  # next() is atomic

    def drain() -> list[Result]:
        return [work(first, min(first + chunk, n_rows)) for first in starts]

    n_chunks = -(-n_rows // chunk)
    n_threads = min(n_workers(), n_chunks)
    if n_threads <= 1:
        return drain()
    team = torch_team()
    if team is None:
        return _run_in_pool(starts, n_threads, drain)
    # all of torch's threads, even for fewer chunks: OpenMP would end the others, and start them again for torch
    return _run_in_team(team, sys.modules["torch"].get_num_threads(), starts, n_chunks, drain)


# ---- torch's threads ----


class _ThreadState(threading.local):
    is_kept = False


_thread_state = _ThreadState()


def torch_team() -> _Team | None:
    """Return ``GOMP_parallel`` of the OpenMP library that torch uses, or None if torch's threads cannot be used.

    They cannot if torch has a single thread, more threads than may share a batch, or no such library; for a while after
    they were found busy; and outside the main thread, because OpenMP has separate threads for each calling thread. They
    need not if they leave half of the cores to others.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return None
    n_threads = torch.get_num_threads()
    if not 2 <= n_threads <= n_workers() or 2 * n_threads <= n_cores():
        return None
    if perf_counter() < _pauses["torch"] or threading.get_ident() != threading.main_thread().ident:
        return None
    if sys.is_finalizing():  # no other thread can run Python any more
        return None
    if "torch" not in _teams:
        # a lookup also finds the symbols of the libraries that this one depends on
        library = Path(torch.__path__[0]) / "lib" / "libtorch_cpu.so"
        _teams["torch"] = getattr(ctypes.CDLL(str(library)), "GOMP_parallel", None) if library.exists() else None
    return _teams["torch"]


def _leave_team() -> None:
    _teams["torch"] = None
    if threading.get_ident() in _team_users:
        # torch would wait for them as well, even if it has not used them before the fork
        sys.modules["torch"].set_num_threads(1)


if hasattr(os, "register_at_fork"):
    # threads do not survive a fork, but OpenMP would wait for them
    os.register_at_fork(after_in_child=_leave_team)


def _run_in_team(
    team: _Team, n_threads: int, starts: Iterator[int], n_chunks: int, drain: Callable[[], list[Result]]
) -> list[Result]:
    results: list[Result] = []
    problems: list[BaseException] = []
    finished: list[float] = []

    def in_thread() -> Iterator[None]:
        try:
            yield
            if not _thread_state.is_kept:
                # keeps the interpreter's state of this thread, and thread-local objects such as zstd contexts, after
                # the call
                ctypes.pythonapi.PyGILState_Ensure()
                _thread_state.is_kept = True
            done = drain()
            results.extend(done)
            if done:
                finished.append(perf_counter())
        except GeneratorExit:  # OpenMP used fewer threads
            return
        except BaseException as problem:
            problems.append(problem)
            for _ in starts:  # leave nothing to do for the other threads
                pass
        yield

    # An interrupt must not be raised in a function that OpenMP calls, where it would be lost. A generator that is
    # resumed within its `try` catches everything, and no other Python code runs
    calls = [in_thread() for _ in range(n_threads)]
    for call in calls:
        next(call)
    _team_users.add(threading.get_ident())
    team(_TeamFunction(partial(next, map(next, calls))), None, n_threads, 0)
    now = perf_counter()
    waited = now - max(finished, default=now)
    if waited > _LONG_WAIT:
        _pauses["torch"] = now + _PAUSE_FACTOR * waited
    if problems:
        raise problems[0]
    if len(results) < n_chunks:
        raise KeyboardInterrupt  # a second interrupt replaced the first before it was recorded
    return results


# ---- a pool of threads ----


class _Pool:
    """Threads that call functions. They do not keep the interpreter from exiting.

    An interrupt can leave locks of ThreadPoolExecutor acquired, and the next call would wait for ever. Everything here
    is a single operation.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._threads: list[int] = []

    def submit(self, call: Callable[[], None], n_threads: int) -> None:
        """Make each of ``n_threads`` threads call a function, or fewer if no more can be started."""
        with suppress(RuntimeError):
            while len(self._threads) < n_threads:
                self._threads.append(_thread.start_new_thread(self._run, ()))
        for _ in self._threads[:n_threads]:
            self._calls.put(call)

    def _run(self) -> None:
        while True:
            self._calls.get()()


def _run_in_pool(starts: Iterator[int], n_threads: int, drain: Callable[[], list[Result]]) -> list[Result]:
    # threads do not survive a fork: a child process starts its own
    pool = _pools.get(os.getpid())
    if pool is None:
        _pools.clear()
        pool = _pools.setdefault(os.getpid(), _Pool())
    results: list[Result] = []
    problems: list[BaseException] = []
    began: list[None] = []
    ended: list[None] = []
    ending: SimpleQueue[None] = SimpleQueue()

    def in_thread() -> None:
        began.append(None)  # before it takes a chunk
        try:
            results.extend(drain())
        except BaseException as problem:
            problems.append(problem)
        ended.append(None)
        ending.put(None)

    try:
        pool.submit(in_thread, n_threads - 1)
        results.extend(drain())
    finally:
        _end_threads(starts, began, ended, ending)
    if problems:
        raise problems[0]
    return results


def _end_threads(starts: Iterator[int], began: list[None], ended: list[None], ending: SimpleQueue[None]) -> None:
    """Return once no other thread uses the caller's arrays, even if this thread is interrupted meanwhile."""
    interrupt: BaseException | None = None
    while True:
        try:
            for _ in starts:  # none are left, unless this thread was interrupted; threads that begin later do nothing
                pass
            while len(ended) < len(began):
                with suppress(Empty):
                    ending.get(timeout=0.01)  # an interrupt may have lost one
            break
        except BaseException as problem:
            interrupt = problem
    if interrupt is not None:
        raise interrupt
