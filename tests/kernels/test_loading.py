"""Compiled kernels are cached between runs, until any of their sources changes."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sb3_extra_buffers
from sb3_extra_buffers.compressed import CompressedArray

PACK = """
import numpy as np
from sb3_extra_buffers.kernels.dispatch import frame_kernels
kernels = frame_kernels()
kernels.pack_block(np.zeros(64, np.uint8), 64, np.empty(128, np.uint8))
print("cached" if kernels.pack_block.stats.cache_hits else "compiled")
"""


def pack(where: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(where)}
    environment.pop("NUMBA_CACHE_DIR", None)
    ran = subprocess.run(
        [sys.executable, "-c", PACK], cwd=where, env=environment, capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()


def test_kernels_are_compiled_again_when_an_imported_source_changes(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    package = tmp_path / "sb3_extra_buffers"
    shutil.copytree(Path(sb3_extra_buffers.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    assert pack(tmp_path) == "compiled"
    assert pack(tmp_path) == "cached"
    os.utime(package / "kernels" / "lz4_block.py")
    assert pack(tmp_path) == "compiled"
    assert pack(tmp_path) == "cached"


WITHOUT_CACHE = f"""
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []  # as if no folder were writable
import sb3_extra_buffers.kernels.fingerprints_numba, sb3_extra_buffers.codecs.zstd_loop
from sb3_extra_buffers.compressed import init_jit
init_jit("rle-jit", (4,))
{PACK}"""


def test_kernels_are_compiled_where_nothing_can_be_cached() -> None:
    pytest.importorskip("numba")
    ran = subprocess.run([sys.executable, "-c", WITHOUT_CACHE], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "compiled", ran.stderr


INTERRUPTED = """
import os, signal, sys
from sb3_extra_buffers.codecs.jit import cached_njit


def interrupt(frame, kind, argument):
    # while numba reads its lists of types: it would not survive an exception there
    if frame.f_code.co_name == "stream_list":
        sys.settrace(None)
        os.kill(os.getpid(), signal.SIGINT)


def double(x):
    return 2 * x


# not the handler at the start of a process in the background, which ignores it
signal.signal(signal.SIGINT, signal.default_int_handler)
kernel = cached_njit(double)
sys.settrace(interrupt)
try:
    kernel(3)
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", kernel(3), kernel(1.5))
try:
    kernel(object())
except Exception as error:
    print(type(error).__name__)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_an_interrupt_while_a_kernel_is_compiled_does_no_harm() -> None:
    pytest.importorskip("numba")
    ran = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert ran.stdout.split("\n") == ["interrupted 6 3.0", "TypingError", ""], ran.stderr


WRITER_INTERRUPTED = """
import os, signal, sys
from sb3_extra_buffers.kernels.frames_numba import writer_address


def interrupt(frame, kind, argument):
    if frame.f_code.co_name == "stream_list":
        sys.settrace(None)
        os.kill(os.getpid(), signal.SIGINT)


signal.signal(signal.SIGINT, signal.default_int_handler)
sys.settrace(interrupt)
try:
    writer_address()
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", writer_address() > 0)
"""


def test_an_interrupt_while_the_kernel_that_writes_frames_is_compiled_does_no_harm(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", WRITER_INTERRUPTED], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == "interrupted True", ran.stderr


@contextmanager
def handled(*numbers: int, by: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle signals, then as before."""
    before = {number: signal.signal(number, by) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_handlers_of_all_signals_run_once_and_stay_whichever_of_them_raise() -> None:
    pytest.importorskip("numba")
    from sb3_extra_buffers.codecs import jit

    numbers, called = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM), []

    def handle(number: int, frame: Any) -> None:
        called.append(number)
        raise KeyboardInterrupt

    def work() -> None:
        for number in (*numbers, numbers[0]):
            os.kill(os.getpid(), number)
        assert not called

    with handled(*numbers, by=handle):
        with pytest.raises(KeyboardInterrupt):
            jit.without_signals(work)
        assert sorted(called) == sorted(numbers)
        assert all(signal.getsignal(number) is handle for number in numbers)


def test_a_signal_at_any_line_while_handlers_are_replaced_is_handled_once() -> None:
    pytest.importorskip("numba")
    from sb3_extra_buffers.codecs import jit

    numbers, called, left = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM), [0], [0]

    def handle(number: int, frame: Any) -> None:
        called[0] += 1
        raise KeyboardInterrupt

    def trace(frame: Any, kind: str, argument: Any) -> Any:
        if frame.f_code.co_filename != jit.__file__:
            return None
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        return trace

    n_lines = 0
    with handled(*numbers, by=handle):
        while left[0] <= 0:
            n_lines += 1
            left[0], called[0] = n_lines, 0
            tracing = sys.gettrace()
            sys.settrace(trace)
            try:
                jit.without_signals(int)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(tracing)
            assert called[0] == (left[0] <= 0)
            assert all(signal.getsignal(number) is handle for number in numbers)
    assert n_lines > 100


def test_a_process_forked_by_another_thread_handles_signals_at_once() -> None:
    pytest.importorskip("numba")
    from sb3_extra_buffers.codecs import jit

    def stop(number: int, frame: Any) -> None:
        os._exit(7)

    statuses = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            for _ in range(100):
                time.sleep(0.01)
            os._exit(0)
        statuses.append(os.waitpid(child, 0)[1])

    def work() -> None:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    with handled(signal.SIGTERM, by=stop):
        jit.without_signals(work)
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [7]


def test_arrays_of_every_kind_use_one_signature() -> None:
    pytest.importorskip("numba")
    kernel: Any = importlib.import_module("sb3_extra_buffers.kernels.frames_numba")._write
    known = 0
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 255, (40, 3, 8, 9)).astype(np.uint8)
    frozen = steps.copy()
    frozen.flags.writeable = False
    shifted = np.frombuffer(bytearray(steps.size + 1), np.uint8, offset=1).reshape(steps.shape)
    shifted[...] = steps
    for number, source in enumerate([steps, frozen, shifted, np.asfortranarray(steps), steps[:, ::-1][:, ::-1]]):
        array = CompressedArray((40, 3), (8, 9), np.uint8, compression_method="delta")
        other = array.next_view()
        for step in range(39):
            array.write_with(other, step, source[step], source[step + 1])
        array[39] = source[39]
        array[[3, 4], [0, 1]] = source[[3, 4], [0, 1]]
        np.testing.assert_array_equal(array[...], steps)
        compiled = len(kernel.signatures)
        assert number == 0 or compiled == known
        known = compiled


WARMUP = """
import numpy as np
from numba.core import event
from sb3_extra_buffers.compressed import CompressedArray, warmup
warmup()
steps = np.add.outer(np.arange(60), np.arange(4) * 7)[:, None, :, None, None] + np.zeros((1, 1, 1, 64, 64))
steps = (steps // 7 * np.tri(64)).astype(np.uint8)
with event.install_recorder("numba:compile") as recorder:
    for method in ("delta", "zstd"):
        array = CompressedArray((60, 1), (4, 64, 64), np.uint8, compression_method=method)
        other = array.next_view()
        for step in range(59):
            array.write_with(other, step, steps[step], steps[step + 1])
        array.store.choose_method()
        assert (array.read_with([other], (np.arange(20), np.zeros(20, int)))[1] == steps[1:21, 0]).all()
print(len(recorder.buffer))
"""


def test_warmup_compiles_everything_once_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    pytest.importorskip("zstandard")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", WARMUP], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.strip() for run in runs] == ["0", "0"]  # nothing was left to compile
    assert runs[0].stderr.count("compiling its kernels") == 1
    assert str(tmp_path) in runs[0].stderr
    assert runs[1].stderr == ""
