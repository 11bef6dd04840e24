"""The Triton kernels write the same tables and read the same frames as the reference kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.kernels.delta_tables import HEAD, DeviceTables
from sb3_extra_buffers.stores import device_frames
from sb3_extra_buffers.stores.device_base import IndexBatch, has_triton
from sb3_extra_buffers.stores.device_columns import DeviceColumns
from sb3_extra_buffers.stores.device_frames import DeviceFrameStore
from sb3_extra_buffers.stores.layout import StackLayout
from tests.stores.test_device import Game, follow_rows, layouts, make_store, play, read
from tests.stores.test_device_columns import check_columns, random_columns

HERE = Path(__file__)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(not INTERPRETED, reason="on a CPU, kernels run only under Triton's interpreter"),
    ),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.mark.skipif(not has_triton(), reason="needs Triton 3")
@pytest.mark.skipif(INTERPRETED, reason="this is the inner run")
@pytest.mark.slow
@pytest.mark.parametrize(
    "patterns",
    [
        ("kernels/*_triton.py",),
        ("stores/test_device_*.py", "gpu_buffers/test_tensors.py", "tensor_buffers/test_graphs.py"),
    ],
)
def test_the_kernels_under_the_interpreter(patterns: tuple[str, ...]) -> None:
    """Triton decides whether to interpret when it is imported, so run these tests in other processes."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    files = [str(path) for pattern in patterns for path in HERE.parents[1].glob(pattern)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-m", "not gpu"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_layout", [0, 1, 3])  # frames of whole words, and others
def test_kernel_and_reference_write_the_same_tables(device: str, n_layout: int) -> None:
    layout = layouts()[n_layout]
    # a single stream: with several, which unused keyframe a stream takes depends on timing
    n_streams = 1
    ours = make_store(layout, 7, n_streams, 2, device, triton=True)
    theirs = make_store(layout, 7, n_streams, 2, "cpu", triton=False)
    game = Game(layout, n_streams)
    for step in range(26 if device == "cuda" else 9):
        rows = list(game.step())
        ours.write(step % 7, rows)
        theirs.write(step % 7, rows)
        ours.check()
        for name in DeviceTables._fields:
            if name == "heap":
                continue  # bytes beyond its end are undefined
            table, expected = getattr(ours.state.tables, name), getattr(theirs.state.tables, name)
            np.testing.assert_array_equal(table.cpu(), expected, name)
        # the interpreter is slow
        if step % 8 == 7:
            indices = np.arange(14 * n_streams).reshape(2, -1)[:, ::5]
            np.testing.assert_array_equal(read(ours, indices), read(theirs, indices))
    end = int(theirs.state.tables.counters[HEAD])
    assert end > 0
    assert torch.equal(ours.state.tables.heap[:end].cpu(), theirs.state.tables.heap[:end])


@pytest.mark.parametrize("device", DEVICES)
def test_reading_writes_every_byte_of_the_output(device: str) -> None:
    store = make_store(layouts()[0], 9, 1, 2, device, triton=True)
    game = Game(store.layout, 1)
    rows = [game.step() for _ in range(9)]
    for step in range(9):
        store.write(step, list(rows[step]))
    indices = torch.arange(18, device=device).reshape(2, -1)
    out = torch.full((2, 9, 4, 400), 0xAA, dtype=torch.uint8, device=device)

    store.reader.read(indices, out)

    expected = np.stack(rows).transpose(1, 0, 2, 3).reshape(2, 9, 4, 400)
    np.testing.assert_array_equal(out.cpu().numpy(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_layout", [0, 1, 3])  # frames of whole words, and others
def test_windows_are_read_whole_or_as_their_newest_frames(device: str, n_layout: int) -> None:
    layout, n_streams = layouts()[n_layout], 2
    store = make_store(layout, 6, n_streams, 2, device, triton=True)
    game = Game(layout, n_streams)
    rows = np.stack([game.step() for _ in range(6)])  # [step, set, stream, ...]
    for step in range(6):
        store.write(step, list(rows[step]))
    flat = np.ascontiguousarray(np.moveaxis(rows, 1, 0)).reshape(12 * n_streams, -1).view(np.uint8)
    windows = np.array([[1, 3, 5, 7], [6, 8, 10, 22]])  # the last is a next observation

    for expected, newest_only in ((flat, False), (layout.newest(flat), True)):
        found = store.read_windows(IndexBatch(windows), newest_only).cpu().numpy()
        shape = layout.frame_spec.shape if newest_only else layout.spec.shape
        assert found.shape == (2, 4, *shape)
        np.testing.assert_array_equal(found.reshape(2, 4, -1).view(np.uint8), expected[windows])
        out = torch.from_numpy(np.full_like(found, 1)).to(device)
        assert store.read_windows(IndexBatch(windows), newest_only, out) is out
        np.testing.assert_array_equal(out.cpu(), found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stack", [16, 17, 32])  # two sets have more frames than an int32 has bits
def test_every_frame_of_a_large_stack_is_read(device: str, stack: int) -> None:
    layout = StackLayout(ObsSpec((stack, 8), np.dtype(np.uint8)), stack, "first")
    store = make_store(layout, 2, 1, 2, device, triton=True)
    rows = np.random.default_rng(0).integers(0, 256, (2, 1, stack * 8)).astype(np.uint8)
    rows[1, :, -8:] = 0

    store.write(0, list(rows))

    np.testing.assert_array_equal(read(store, np.array([[0], [2]])), rows)


def test_larger_stacks_are_left_to_other_stores() -> None:
    layouts = [StackLayout(ObsSpec((stack, 8), np.dtype(np.uint8)), stack, "first") for stack in (32, 33)]
    accepted = [DeviceFrameStore.accepts(DeltaCodec(), layout) for layout in layouts]
    assert accepted == [has_triton(), False]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n_actions", "dtype"), [(1, np.int64), (3, np.float32), (5, np.int8)])
def test_columns_are_gathered_with_a_batch(device: str, n_actions: int, dtype: type) -> None:
    store = make_store(layouts()[0], 5, 1, 2, device, triton=True)
    game = Game(store.layout, 1)
    for step in range(3):
        store.write(step, list(game.step()))
    table, expected = random_columns(5, 1, n_actions, dtype, device)
    floats, actions = table.empty(3)
    indices = np.array([[2, 0, 2], [7, 5, 7]])

    rows = store.read_batch(torch.from_numpy(indices).to(device), floats, actions, table.records)

    assert torch.equal(rows, store.read(IndexBatch(indices)))
    check_columns(floats, actions, expected, indices[0])


@pytest.mark.parametrize("device", DEVICES)
def test_frames_of_several_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    delta_triton: Any = pytest.importorskip("sb3_extra_buffers.kernels.delta_triton")
    monkeypatch.setattr(delta_triton, "_FEW", delta_triton._FEW._replace(n_chunks=1))
    layout = StackLayout(ObsSpec((2, 49, 50), np.dtype(np.uint8)), 2, "first")
    ours = make_store(layout, 5, 1, 2, device, triton=True)
    theirs = make_store(layout, 5, 1, 2, "cpu", triton=False)
    game = Game(layout, 1)
    for step in range(7):
        rows = list(game.step())
        ours.write(step % 5, rows)
        theirs.write(step % 5, rows)
    ours.check()
    for name in ("entries", "keyframes", "frame_ids", "recent", "streams"):
        np.testing.assert_array_equal(getattr(ours.state.tables, name).cpu(), getattr(theirs.state.tables, name), name)
    indices = np.arange(10).reshape(2, -1)
    np.testing.assert_array_equal(read(ours, indices), read(theirs, indices))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("shape", "stack"), [((256, 256, 3), 1), ((3, 200, 300), 3), ((640, 480, 3), 1)])
def test_large_frames_on_the_gpu(shape: tuple[int, ...], stack: int) -> None:
    layout = StackLayout(ObsSpec(shape, np.dtype(np.uint8)), stack, "first")
    play(make_store(layout, 9, 3, 2, "cuda"), 25, check_every=6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_store_is_not_freed_while_it_is_written_to() -> None:
    layout = layouts()[0]
    game = Game(layout, 2)
    for _ in range(5):
        store = make_store(layout, 4, 2, 2, "cuda", triton=True)
        store.write(0, list(game.step()))
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # torch has no public way
        store.write(1, list(game.step()))
        del store
        # torch would hand out the same pinned memory again
        others = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for size in (40, 64, 128, 1 << 14) * 4]
        torch.cuda.synchronize()
        assert not any(bool(other.any()) for other in others)


@pytest.mark.parametrize("device", DEVICES)
def test_large_steps_are_uploaded_in_pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_frames, "_IN_PLACE", 0)
    layout = layouts()[0]
    store = make_store(layout, 4, 2, 2, device, triton=True)
    game = Game(layout, 2)
    written = []
    for step in range(4):
        rows = game.step()
        rows.setflags(write=step % 2 == 0)
        store.write(step, list(rows))
        written.append(rows)
    found = read(store, np.arange(16).reshape(2, -1))
    np.testing.assert_array_equal(found.reshape(2, 4, 2, -1), np.stack(written, axis=1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("effort", "n_programs"), [("_FEW", 2), ("_FEW", 132), ("_MANY", 2)])
def test_columns_are_written_with_a_step(
    device: str, effort: str, n_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta_triton: Any = pytest.importorskip("sb3_extra_buffers.kernels.delta_triton")
    chosen = getattr(delta_triton, effort)._replace(n_programs=n_programs)
    monkeypatch.setattr(delta_triton, "_effort", lambda n_streams: chosen)
    layout, n_streams = layouts()[0], 3
    store = make_store(layout, 4, n_streams, 2, device, triton=True)
    table = DeviceColumns(4, n_streams, 2, np.dtype(np.int16), torch.device(device), triton=True)
    store.use_columns(table.layout)
    game, rng = Game(layout, n_streams), np.random.default_rng(0)
    expected: dict[str, list[Any]] = {name: [] for name in table.names}
    for step in range(4):
        actions = rng.integers(0, 99, (n_streams, 2), dtype=np.int16)
        rewards = np.array([-0.0, rng.normal(), 2], np.float32)
        # bytes at an odd address; the third number is missing at times
        dones = torch.from_numpy(rng.random(n_streams + 1) < 0.5).to(device)[1:]
        timeouts = rng.random(n_streams) < 0.5
        values = [actions, rewards, dones, timeouts][: 3 + step % 2]
        plan = store.plan(step, list(game.step()))
        assert plan.take_columns(table.plan(values))
        assert not any(table.arrays()["rewards"][step])
        plan.commit()
        given = [actions, rewards, dones.cpu().numpy(), timeouts * (step % 2)]
        for name, value in zip(expected, given, strict=True):
            expected[name].append(value)
    for name, column in table.arrays().items():
        np.testing.assert_array_equal(column, np.stack(expected[name]), name)
    assert np.signbit(table.arrays()["rewards"][:, 0]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(4, 20, 20), (20, 20, 4), (3, 21, 7)])
def test_tensors_are_written_like_arrays(device: str, shape: tuple[int, ...]) -> None:
    layout = StackLayout(
        ObsSpec(shape, np.dtype(np.uint8)), 4 if 4 in shape else 1, "last" if shape[-1] == 4 else "first"
    )
    ours, theirs = (make_store(layout, 5, 1, 2, device, triton=True) for _ in range(2))
    game = Game(layout, 1)
    for step in range(7):
        rows = [row.reshape(1, *shape) for row in game.step()]
        tensors = [torch.from_numpy(row.copy()).to(device) for row in rows]
        ours.write(step % 5, tensors)
        for tensor in tensors:
            tensor.fill_(7)  # the caller may reuse the memory
        theirs.write(step % 5, rows)
    indices = np.arange(10).reshape(2, -1)
    np.testing.assert_array_equal(read(ours, indices), read(theirs, indices))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("n_steps", [1, 2, 7])
@pytest.mark.parametrize("stack", [1, 4])
def test_rows_that_repeat_shift_or_change_on_the_gpu(stack: int, n_steps: int) -> None:
    layout = StackLayout(ObsSpec((stack, 4, 6), np.dtype(np.uint8)), stack, "first")
    for n_sets in (1, 2):
        follow_rows(make_store(layout, n_steps, 3, n_sets, "cuda"), 100)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("n_layout", range(len(layouts())))
@pytest.mark.parametrize("noise", [0.001, 0.02, 0.4])
def test_every_step_is_kept_on_the_gpu(pinned: bool, n_layout: int, noise: float) -> None:
    layout = layouts()[n_layout]
    play(make_store(layout, 33, 5, 2, "cuda", pinned=pinned), 150, check_every=7, noise=noise)
    small = make_store(layout, 12, 2, 2, "cuda", heap_bytes=60 * layout.spec.nbytes)
    play(small, 100, check_every=5, noise=noise)
