"""Damaged heaps: an error or some other observation, never a crash, a hang or any other exception."""

from __future__ import annotations

import pytest

from tests.contracts.store import KERNELS, needs, run_fresh

pytestmark = pytest.mark.same_without_extras

# runs in a process of its own: a read outside the heap may kill it
FUZZ = """
import ctypes, mmap, pickle, sys
import numpy as np
from sb3_extra_buffers.codecs import ObsSpec, get_codec
from sb3_extra_buffers.errors import ExtraBuffersError
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.registry import make_store
from sb3_extra_buffers.stores.layout import StackLayout
from tests.contracts.store import Walk

method, compiled, side, stack, count = sys.argv[1], sys.argv[2] == "True", *map(int, sys.argv[3:6])
layout = StackLayout(ObsSpec((stack, side, side), np.dtype(np.uint8)), stack)
store = make_store(layout, 200, 2, get_codec(method).bind(layout.frame_spec), compiled=compiled)
for stream in range(2):
    walk = Walk((side, side), stream + 5)
    walk.rng = np.random.default_rng(stream)
    frames = walk.frames(100 + stack - 1)
    rows = np.stack([frames[step : step + stack].reshape(-1) for step in range(100)])
    store.write(np.arange(stream, 200, 2), np.full(100, stream), rows)
truth = store.read(np.arange(200))
store = pickle.loads(pickle.dumps(store))  # whose arena ends where its last payload does
if sys.platform == "linux":
    # right before a page that must not be read: a step outside ends the process
    pages = -(-store.heap.data.size // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, pages + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages), mmap.PAGESIZE, 0) == 0
    moved = np.frombuffer(area, np.uint8)[pages - store.heap.data.size : pages]
    moved[:] = store.heap.data
    store.heap._arena = store.heap._arena._replace(area=area, data=moved)
    store._sync()
state = store.state
sealed = np.flatnonzero(state.lengths)
assert len(sealed) > 2
heap, lengths = state.heap.copy(), state.lengths.copy()
rng = np.random.default_rng(0)
refused = changed = same = 0
for turn in range(count):
    segment = int(rng.choice(sealed))
    start, length = int(state.starts[segment]), int(state.lengths[segment])
    kind = turn % 8
    header = min(length, 24)
    if kind == 0:  # a bit anywhere
        state.heap[start + rng.integers(length)] ^= 1 << int(rng.integers(8))
    elif kind == 1:  # a bit in flags, count or lengths
        state.heap[start + rng.integers(header)] ^= 1 << int(rng.integers(8))
    elif kind == 2:  # a count
        state.heap[start + min(1, length - 1)] = rng.choice([0, 1, 254, 255, int(rng.integers(256))])
    elif kind == 3:  # flags
        state.heap[start] = rng.integers(0, 4)
    elif kind == 4:  # lengths
        at = start + rng.integers(header)
        state.heap[at : min(at + 4, start + length)] = rng.choice([0, 255, int(rng.integers(256))])
    elif kind == 5:  # several bytes anywhere
        at = start + rng.integers(length)
        part = state.heap[at : min(at + 9, start + length)]
        part[:] = rng.integers(0, 256, len(part))
    elif kind == 6:  # cut short
        state.lengths[segment] = rng.integers(1, length + 1)
    else:  # all of it
        state.heap[start : start + length] = rng.integers(0, 256, length)
    indices = np.arange(200) if turn % 16 == 0 else rng.integers(0, 200, 6)
    try:
        rows = store.read(indices)
    except ExtraBuffersError:
        refused += 1
    else:
        assert rows.shape == (len(indices), layout.spec.nbytes), rows.shape
        assert rows.dtype == np.uint8
        if np.array_equal(rows, truth[indices]):
            same += 1
        else:
            changed += 1
    state.heap[: len(heap)] = heap
    state.lengths[:] = lengths
assert np.array_equal(store.read(np.arange(200)), truth)
assert refused > count // 20, (refused, changed, same)
print(refused, changed, same)
"""


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize(
    ("method", "side", "stack", "count"),
    [
        pytest.param(method, side, stack, count, id=f"{method}-{side}", marks=needs(extra) if extra else ())
        for method, side, stack, count, extra in (
            ("delta", 16, 4, 4000, ""),
            ("delta", 90, 1, 1500, ""),
            ("delta", 260, 1, 300, ""),  # lengths take four bytes
            ("delta2", 16, 4, 3000, "zstd"),
            ("none", 16, 4, 1500, ""),
            ("scroll", 16, 4, 1500, "scroll"),
            ("scroll2", 16, 4, 1500, "zstd"),
            ("camera", 16, 4, 1500, ""),
            ("camera", 90, 1, 600, ""),
            ("gzip", 16, 4, 600, ""),
            ("zstd", 16, 4, 600, "zstd"),
        )
    ],
)
def test_damaged_bytes_are_refused_or_read_as_something(
    method: str, side: int, stack: int, count: int, compiled: bool
) -> None:
    if not compiled:
        count //= 4
    run_fresh(FUZZ, method, str(compiled), str(side), str(stack), str(count))
