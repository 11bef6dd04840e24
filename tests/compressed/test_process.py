"""Memory as the system sees it, threads, and forked children."""

from __future__ import annotations

import os

import pytest

from tests.contracts.store import RESIDENT, needs_proc, run_fresh

pytestmark = pytest.mark.same_without_extras

FILL = (
    RESIDENT
    + """
import sys
import numpy as np
from sb3_extra_buffers.compressed import CompressedArray, init_jit

def games(n_envs, seed, noisy=False):
    rng = np.random.default_rng(seed)
    screens = rng.integers(0, 8, (n_envs, 84, 84)).astype(np.uint8)
    stacks = np.zeros((n_envs, 4, 84, 84), np.uint8)
    step = 0
    while True:
        for env in range(n_envs):
            y, x = rng.integers(0, 76, 2)
            screens[env, y : y + 8, x : x + 8] = rng.integers(256)
            if noisy:
                screens[env, 20:50, 10:60] = rng.integers(0, 256, (30, 50))
        stacks = np.concatenate([stacks[:, 1:], screens[:, None]], axis=1)
        step += 1
        yield stacks

def fill(array, source, n_steps):
    for step in range(n_steps):
        array[step % len(array)] = next(source)
"""
)

WRAP_AND_DROP = (
    FILL
    + """
method = sys.argv[1]
warm = CompressedArray((60, 2), (4, 84, 84), np.uint8, compression_method=method)
source = games(2, 1, noisy=True)
fill(warm, source, 100)
warm[:]
warm.store.check()  # compiles what it calls
del warm
start = resident()
array = CompressedArray((600, 2), (4, 84, 84), np.uint8, compression_method=method)
fill(array, source, 600 * 2)
full = resident()
fill(array, source, 600 * 8)
array.store.check()
wrapped = resident()
del array
print(start, full, wrapped, resident())
"""
)


@needs_proc
@pytest.mark.parametrize("method", ["delta", "gzip1"])
def test_wrapping_round_ten_times_leaks_nothing(method: str) -> None:
    start, full, wrapped, dropped = map(int, run_fresh(WRAP_AND_DROP, method).split())
    dense = 1200 * 4 * 84 * 84
    # eight more laps: a leak of one would show as that many times what one takes
    assert 1 << 20 < full - start < dense // 2
    assert wrapped - full < 2 << 20
    assert dropped - start < 2 << 20


TRUTH = (
    FILL
    + """
init_jit("delta")
source = games(4, 2, noisy=True)
warm = CompressedArray((300, 4), (4, 84, 84), np.uint8)
fill(warm, source, 600)
del warm
start = resident()
array = CompressedArray((4000, 4), (4, 84, 84), np.uint8)
fill(array, source, 4000)
grown = resident() - start
usage = array.memory_usage()
print(grown, usage.total, usage.dense)
"""
)


@needs_proc
def test_memory_usage_agrees_with_the_resident_set() -> None:
    """Within a twentieth, and half a megabyte for what Python itself took meanwhile."""
    grown, total, dense = map(int, run_fresh(TRUTH).split())
    assert dense == 16_000 * 4 * 84 * 84
    assert total < dense // 8
    assert abs(grown - total) < 0.05 * total + (1 << 19)


THREADS = """
import threading, time
import numpy as np
from sb3_extra_buffers.compressed import CompressedArray, init_jit
init_jit("delta")
n_steps, n_envs = 64, 2
array = CompressedArray((n_steps, n_envs), (4, 40, 40), np.uint8, compression_method="METHOD")
pattern = np.random.default_rng(0).integers(0, 200, (40, 40)).astype(np.uint8)

def frame(number, env):
    # says which it is: the number in three bytes, the env, and a sum that no mixture of two frames has
    made = pattern.copy()
    made[0, :4] = number & 255, number >> 8 & 255, number >> 16, env
    made[number % 37 + 2, :] = number % 251
    made[1, :2] = number * 7 % 256, number // 7 % 256
    return made

def stack(number, env):
    return np.stack([frame(number + j, env) for j in range(4)])

def number_of(observation):
    return int(observation[0, 0, 0]) | int(observation[0, 0, 1]) << 8 | int(observation[0, 0, 2]) << 16

counter = n_steps
for step in range(n_steps):
    array[step] = np.stack([stack(step, env) for env in range(n_envs)])
stop, errors, reads = threading.Event(), [], [0] * 8

def read(which):
    rng = np.random.default_rng(which)
    try:
        while not stop.is_set():
            steps, envs = rng.integers(0, n_steps, 16), rng.integers(0, n_envs, 16)
            for step, env, observation in zip(steps, envs, array[steps, envs]):
                number = number_of(observation)
                assert number % n_steps == step, (number, step)
                np.testing.assert_array_equal(observation, stack(number, env))
            reads[which] += 1
    except BaseException as error:
        errors.append(error)
        stop.set()

readers = [threading.Thread(target=read, args=(which,)) for which in range(8)]
for reader in readers:
    reader.start()
start = time.monotonic()
# two seconds, or as long as a busy machine takes to go round twice
while not stop.is_set() and (time.monotonic() < start + 2 or counter <= 2 * n_steps or min(reads) == 0):
    array[counter % n_steps] = np.stack([stack(counter, env) for env in range(n_envs)])
    counter += 1
stop.set()
for reader in readers:
    reader.join()
if errors:
    raise errors[0]
array.store.check()
assert counter > 2 * n_steps and min(reads) > 0, (counter, reads)
"""


@pytest.mark.parametrize("method", ["delta", "gzip1"])
def test_eight_readers_and_a_writer(method: str) -> None:
    run_fresh(THREADS.replace("METHOD", method))


FORK = """
import os, signal, sys, threading, time
import numpy as np
from sb3_extra_buffers.compressed import CompressedArray, init_jit
init_jit("delta")
rng = np.random.default_rng(0)
dense = np.cumsum(rng.integers(0, 2, (300, 2, 4, 84, 84)), axis=0).astype(np.uint8)
array = CompressedArray((300, 2), (4, 84, 84), np.uint8, compression_method="METHOD")
for step in range(300):
    array[step] = dense[step]
stop = threading.Event()

def read():
    mine = np.random.default_rng(threading.get_ident())
    while not stop.is_set():
        array[mine.integers(0, 300, 200), mine.integers(0, 2, 200)]  # large enough for the pool

readers = [threading.Thread(target=read) for _ in range(3)]
for reader in readers:
    reader.start()
children = []
start = time.monotonic()
for turn in range(4):
    time.sleep(0.05)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a lock held by nobody here would be waited for in vain
        code = 1
        try:
            assert np.array_equal(array[::7], dense[::7])
            assert np.array_equal(array[:, 0], dense[:, 0])
            for step in range(40):
                array[step] = dense[299 - step]
            array.store.check()
            assert np.array_equal(array[:40], dense[::-1][:40])
            assert np.array_equal(array[40:], dense[40:])
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    children.append(child)
# less than one lock takes to be given up
assert time.monotonic() - start < 15, "fork waited for readers that waited for the fork"
ends = [os.waitpid(child, 0)[1] for child in children]
stop.set()
for reader in readers:
    reader.join()
assert ends == [0] * 4, ends
assert np.array_equal(np.asarray(array), dense)
array.store.check()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("method", ["delta", "gzip1"])
def test_a_child_forked_while_threads_read_has_its_own_copy(method: str) -> None:
    run_fresh(FORK.replace("METHOD", method))
