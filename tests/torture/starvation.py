"""No memory, at every allocation of `add` and `sample`: a named error, and the buffer is as it was or has the step.

Three ways to be without: the interpreter's own allocations fail one after the other (`_testcapi.set_nomemory`), the
allocations of arrays and maps do, and the address space of the process is limited.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sb3_extra_buffers.errors import ExtraBuffersError
from tests.torture.interrupts import Trial
from tests.torture.running import Outcome, Report, brief, exit_code, parser, run_trials
from tests.torture.subjects import Step, Subject, make_steps, subjects, use_reference_kernels

#: steps of a life that are starved: the first ones, the choice of a method, before and after the ring wraps
STEPS = (0, 1, 5, 10, 11, 12, 19, 20, 27, 33, 41, 52)

KINDS = (
    "auto", "delta", "zstd", "none", "palette", "mmap", "evict", "n-step", "prioritized", "sequence", "dict", "her",
    "rollout", "recurrent-rollout", "gpu-none", "gpu-delta", "gpu-zstd", "gpu-rollout-delta", "array-delta",
    "array-zstd", "record", "torchrl-delta",
)  # fmt: skip
OBJECT_STEPS = (1, 11, 12, 33)
#: those that need nothing but NumPy and the interpreter
OBJECTS = ("auto", "delta", "none", "gzip", "mmap", "evict", "prioritized", "dict", "her", "array-delta", "record")


class StarvedError(MemoryError):
    """Raised in the place of an allocation."""


# ---- allocations of the interpreter ----


@contextlib.contextmanager
def no_object(at: int, forever: bool = False) -> Iterator[None]:
    """The ``at``-th allocation of the interpreter fails, or all from there on."""
    import _testcapi  # type: ignore[import-not-found]  # of CPython's own tests

    _testcapi.set_nomemory(at, 0 if forever else at + 1)
    try:
        yield
    finally:
        _testcapi.remove_mem_hooks()


def can_starve_objects() -> bool:
    """Whether this interpreter can be told to fail."""
    try:
        import _testcapi
    except ImportError:
        return False
    return hasattr(_testcapi, "set_nomemory")


# ---- allocations of arrays and maps ----

_ARRAYS = ("empty", "zeros", "ones", "full", "concatenate", "stack", "arange", "array", "empty_like", "zeros_like",
           "repeat", "flatnonzero", "unique", "argsort", "cumsum", "where")  # fmt: skip


class Seams:
    """Counts what our modules ask of NumPy and of the system; the ``at``-th request fails."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.count, self.hit = at, 0, False

    def _ask(self, error: Callable[[], Exception]) -> None:
        self.count += 1
        if self.count - 1 == self.at:
            self.hit = True
            raise error()

    def __enter__(self) -> Seams:
        self._undo: list[tuple[Any, str, Any]] = []
        for name in _ARRAYS:
            self._replace(np, name, lambda: StarvedError("no array"))
        self._replace(os, "ftruncate", lambda: OSError(errno.ENOSPC, "No space left on device"))
        seams, plain = self, mmap.mmap

        class Map(plain):  # type: ignore[misc, valid-type]
            """A map that may not be had, nor grow."""

            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                seams._ask(lambda: OSError(errno.ENOMEM, "Cannot allocate memory"))
                return plain.__new__(cls, *args, **kwargs)

            def resize(self, size: int) -> None:
                seams._ask(lambda: OSError(errno.ENOMEM, "Cannot allocate memory"))
                plain.resize(self, size)

        self._undo.append((mmap, "mmap", plain))
        mmap.mmap = Map  # type: ignore[misc]
        return self

    def _replace(self, module: Any, name: str, error: Callable[[], Exception]) -> None:
        kept = getattr(module, name)

        def instead(*args: Any, **kwargs: Any) -> Any:
            if "sb3_extra_buffers" in sys._getframe(1).f_code.co_filename:
                self._ask(error)
            return kept(*args, **kwargs)

        self._undo.append((module, name, kept))
        setattr(module, name, instead)

    def __exit__(self, *_: object) -> None:
        for module, name, kept in reversed(self._undo):
            setattr(module, name, kept)


# ---- trials ----


def _operate(run: Trial, what: str) -> None:
    if what == "add":
        run.subject.add(run.buffer, run.steps[run.at])
    else:
        run.subject.batch(run.buffer, 3)


def _after(run: Trial, what: str, error: BaseException | None, where: str) -> None:
    """Compare once memory is there again."""
    # NumPy forgets to set an error in places, of which the interpreter makes this one
    forgotten = isinstance(error, SystemError) and "exception" in str(error)
    if error is not None and not isinstance(error, (MemoryError, ExtraBuffersError)) and not forgotten:
        run.outcomes["unnamed"] += 1
        run.lines.append(f"{where}: {brief(error)}")
    if what == "add" and error is None:
        # what failed could be done without
        run.subject.add(run.model, run.steps[run.at])
        run.at += 1
        run._prepare()  # the step is there: what comes next is compared with that
    if run.interrupted(f"{where} ({'done' if error is None else brief(error)})"):
        run.finish()


def count_seams(subject: Subject, steps: list[Step], at: int, what: str) -> int:
    """How many allocations of arrays and maps an operation makes."""
    with tempfile.TemporaryDirectory() as place:
        run = Trial(subject, steps, Path(place))
        run.go_to(at)
        run._prepare()
        with Seams() as seams:
            _operate(run, what)
        return seams.count


def starve_objects(name: str, seed: int = 0, every: int = 1, steps_at: tuple[int, ...] = STEPS) -> Report:
    """Fail every allocation of the interpreter in turn, or every ``every``-th, of ``add`` and ``sample``.

    With the reference kernels: numba's own dispatch does not survive it.
    """
    subject, steps = subjects()[name], make_steps(seed, 64)
    points = [("add", at) for at in steps_at] + [("sample", at) for at in steps_at[2::4]]
    done: set[tuple[str, int]] = set()

    def set_up() -> None:
        use_reference_kernels()
        _warm_up(subject, steps)

    def trial(number: int) -> Outcome:
        point, chunk = points[number // _CHUNKS], number % _CHUNKS
        outcomes, lines, failed = Counter[str](), [], False
        for n in range(chunk * _CHUNK, (chunk + 1) * _CHUNK):
            if n % every != seed % every or point in done:
                continue
            found, said, hit = _starve_once(subject, steps, *point, n, no_object(n))
            failed |= hit
            outcomes.update(found)
            lines += said
        if not failed and chunk:
            # no operation asks for as much
            done.add(point)
        return outcomes, lines

    label = f"starvation of objects, {name}"
    report = run_trials(label, trial, len(points) * _CHUNKS, set_up=set_up, timeout=120)
    # NumPy does not survive every one of them, whoever calls it; crashes of our own show in the other two ways
    report.outcomes["interpreter died"] = report.outcomes.pop("crashes", 0)
    return report


# allocations that are failed in one trial, and how many trials there are for an operation at most
_CHUNK, _CHUNKS = 40, 40


def _warm_up(subject: Subject, steps: list[Step]) -> None:
    """Have everything made that is made on first use."""
    with tempfile.TemporaryDirectory() as place:
        warm = Trial(subject, steps, Path(place))
        warm.go_to(len(steps))
        subject.batch(warm.buffer, 3)


def _starve_once(
    subject: Subject, steps: list[Step], what: str, at: int, n: int, starved: Any
) -> tuple[Counter[str], list[str], bool]:
    with tempfile.TemporaryDirectory() as place:
        run = Trial(subject, steps, Path(place))
        run.go_to(at)
        run._prepare()
        error: BaseException | None = None
        try:
            with starved:
                _operate(run, what)
        except BaseException as found:
            error = found
        _after(run, what, error, f"{what} of step {at}, allocation {n}")
    return run.outcomes, run.lines, error is not None


def starve_arrays(name: str, seed: int = 0, every: int = 1, steps_at: tuple[int, ...] = STEPS) -> Report:
    """Fail every allocation of an array or a map in turn, or every ``every``-th, of ``add`` and ``sample``."""
    subject, steps = subjects()[name], make_steps(seed, 64)
    _warm_up(subject, steps)
    points = [
        (what, at, n)
        for what in ("add", "sample")
        for at in (steps_at if what == "add" else steps_at[2::4])
        for n in range(seed % every, count_seams(subject, steps, at, what), every)
    ]

    def trial(number: int) -> Outcome:
        what, at, n = points[number]
        return _starve_once(subject, steps, what, at, n, Seams(n))[:2]

    return run_trials(f"starvation of arrays, {name}", trial, len(points), timeout=60)


def starve_of_space(name: str, count: int, seed: int = 0) -> Report:
    """Limit the address space to a little more than is in use, add until it is full, and go on without the limit."""
    subject, steps = subjects()[name], make_steps(seed, 64)

    def trial(number: int) -> Outcome:
        rng = random.Random(f"{seed} {name} {number}")
        with tempfile.TemporaryDirectory() as place:
            run = Trial(subject, steps, Path(place))
            run.go_to(rng.randrange(40))
            run._prepare()
            before = resource.getrlimit(resource.RLIMIT_AS)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            # what the allocators keep in reserve would do for long
            hoard = _take_free_memory()
            limit = pages * resource.getpagesize() + rng.choice([0, 1 << 12, 1 << 16, 1 << 17])
            error: BaseException | None = None
            while run.at < len(steps) - 3 and error is None:
                run._prepare()
                resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
                try:
                    run.subject.add(run.buffer, steps[run.at])
                except BaseException as found:
                    error = found
                finally:
                    resource.setrlimit(resource.RLIMIT_AS, before)
                if error is None:
                    run.subject.add(run.model, steps[run.at])
                    run.at += 1
            del hoard
            _after(run, "space", error, f"step {run.at}, {limit} bytes of address space")
        return run.outcomes, run.lines

    return run_trials(f"starvation of space, {name}", trial, count, timeout=60)


def _take_free_memory() -> list[Any]:
    """Blocks of the sizes that arrays have, so that the next one must be asked of the system."""
    return [np.empty(size, np.uint8) for size in (5184, 10368, 1296, 2592, 65536) for _ in range(60)]


def reports(names: list[str], seed: int, every: int, n_limits: int) -> Iterator[Report]:
    for name in names:
        yield starve_arrays(name, seed, every)
        if name in OBJECTS and can_starve_objects():
            yield starve_objects(name, seed, 3 * every, OBJECT_STEPS)
        yield starve_of_space(name, n_limits, seed)


def main() -> int:
    options = parser(__doc__, 40, "runs with limited address space, for every kind")
    options.add_argument("--every", type=int, default=1, help="fail every n-th allocation only")
    args = options.parse_args()
    names = [args.only] if args.only else [name for name in KINDS if name in subjects()]
    return exit_code(reports(names, args.seed, args.every, args.count), args.examples)


if __name__ == "__main__":
    sys.exit(main())
