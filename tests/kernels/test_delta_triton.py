"""The Triton kernels write the same tables and read the same frames as their references."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.kernels.delta_torch import DeviceTables
from sb3_extra_buffers.stores.device import DeviceFrameStore
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.staging import Layout, Staging
from tests.stores.test_device import Game, follow_rows, layouts, play, read

HERE = Path(__file__)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(not INTERPRETED, reason="kernels run on a CPU only where Triton interprets them"),
    ),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(INTERPRETED, reason="this is the inner run")
@pytest.mark.slow
def test_the_kernels_interpreted() -> None:
    """Triton decides whether to interpret when it is imported, so these tests run in a process of their own."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    files = [str(HERE), str(HERE.with_name("test_rle_triton.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-m", "not gpu"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_layout", [0, 1, 3])  # the first of whole words, the others not
def test_both_write_the_same_tables(device: str, n_layout: int) -> None:
    layout = layouts()[n_layout]
    # one stream at a time: which keyframe of several unused ones a stream takes is a matter of who comes first
    n_streams = 1
    ours = DeviceFrameStore(layout, 7, n_streams, DeltaCodec(), device, 2, triton=True)
    theirs = DeviceFrameStore(layout, 7, n_streams, DeltaCodec(), "cpu", 2, triton=False)
    game = Game(layout, n_streams)
    for step in range(26 if device == "cuda" else 9):
        rows = list(game.step())
        ours.write(step % 7, rows)
        theirs.write(step % 7, rows)
        ours.check()
        for name in DeviceTables._fields:
            if name in ("heap", "stage", "scratch"):
                continue  # what lies between payloads may be anything
            np.testing.assert_array_equal(getattr(ours.tables, name).cpu(), getattr(theirs.tables, name), name)
        # the interpreter takes its time
        if step % 8 == 7:
            indices = np.arange(14 * n_streams).reshape(2, -1)[:, ::5]
            np.testing.assert_array_equal(read(ours, indices), read(theirs, indices))
    n_sealed = int(theirs.tables.counters[0])
    assert n_sealed > 0 or layout.stack == 1
    assert torch.equal(ours.tables.heap[:n_sealed].cpu(), theirs.tables.heap[:n_sealed])


@pytest.mark.parametrize("device", DEVICES)
def test_no_byte_is_left_unwritten(device: str) -> None:
    store = DeviceFrameStore(layouts()[0], 9, 1, DeltaCodec(), device, 2, triton=True)
    game = Game(store.layout, 1)
    rows = [game.step() for _ in range(9)]
    for step in range(9):
        store.write(step, list(rows[step]))
    from sb3_extra_buffers.kernels.delta_triton import DeviceKernels

    indices = torch.arange(18, device=device).reshape(2, -1)
    out = torch.full((2, 9, 4, 400), 0xAA, dtype=torch.uint8, device=device)

    DeviceKernels(store.tables, store.shape).read(indices, out)

    expected = np.stack(rows).transpose(1, 0, 2, 3).reshape(2, 9, 4, 400)
    np.testing.assert_array_equal(out.cpu().numpy(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n_envs", "dtype"), [(1, np.int64), (3, np.float32), (5, np.int8)])
def test_columns_come_with_a_batch(device: str, n_envs: int, dtype: type) -> None:
    store = DeviceFrameStore(layouts()[0], 5, 1, DeltaCodec(), device, 2, triton=True)
    game = Game(store.layout, 1)
    for step in range(3):
        store.write(step, list(game.step()))
    shapes = ((2, 3), np.int64), ((2, 3, 1), np.float32), ((3, n_envs), dtype)
    lease = Staging(store.device).acquire(Layout(*[(shape, np.dtype(kind)) for shape, kind in shapes]))
    random = np.random.default_rng(0)
    lease.arrays[0][:] = [[2, 0, 2], [7, 5, 7]]
    lease.arrays[1][:] = random.standard_normal((2, 3, 1))
    lease.arrays[2][:] = random.integers(-100, 100, (3, n_envs))

    rows, numbers, actions = store.read_batch(lease)

    assert torch.equal(rows, store.read(torch.tensor([[2, 0, 2], [7, 5, 7]], device=device)))
    np.testing.assert_array_equal(numbers.cpu(), lease.arrays[1])
    np.testing.assert_array_equal(actions.cpu(), lease.arrays[2])
    assert actions.dtype == torch.from_numpy(lease.arrays[2]).dtype


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("n_steps", [1, 2, 7])
@pytest.mark.parametrize("stack", [1, 4])
def test_rows_that_repeat_move_on_or_jump_on_the_gpu(stack: int, n_steps: int) -> None:
    layout = StackLayout(ObsSpec((stack, 4, 6), np.dtype(np.uint8)), stack, "first")
    for n_sets in (1, 2):
        follow_rows(DeviceFrameStore(layout, n_steps, 3, DeltaCodec(), "cuda", n_sets), 100)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("n_layout", range(len(layouts())))
@pytest.mark.parametrize("noise", [0.001, 0.02, 0.4])
def test_every_step_is_kept_on_the_gpu(pinned: bool, n_layout: int, noise: float) -> None:
    layout = layouts()[n_layout]
    play(DeviceFrameStore(layout, 33, 5, DeltaCodec(), "cuda", 2, pinned=pinned), 150, check_every=7, noise=noise)
    small = DeviceFrameStore(layout, 12, 2, DeltaCodec(), "cuda", 2, heap_bytes=60 * layout.spec.nbytes)
    play(small, 100, check_every=5, noise=noise)
