"""`DeviceFrameStore` with reference kernels: rings that wrap, heaps that fill, copies and rejected writes."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import HeapFullError, SpecMismatchError
from sb3_extra_buffers.kernels.delta_tables import COUNT, REPORT_SEGMENTS, REPORT_SPARE, capacity_of
from sb3_extra_buffers.stores.device_base import DevicePlace, DeviceRing, IndexBatch
from sb3_extra_buffers.stores.device_frames import DeviceFrameStore
from sb3_extra_buffers.stores.layout import StackLayout
from tests.torture.interrupts import Injector

pytestmark = pytest.mark.same_without_extras

Rows = npt.NDArray[np.uint8]  # [set, stream, byte]


class Game:
    """Streams of stacked frames: usually a few pixels change, sometimes all of them, and episodes end."""

    def __init__(self, layout: StackLayout, n_streams: int, seed: int = 0, noise: float = 0.02) -> None:
        self.layout, self.noise = layout, noise
        self.random = np.random.default_rng(seed)
        self.frames = [self._keyframe() for _ in range(n_streams)]
        self.stacks = [[np.zeros_like(frame)] * (layout.stack - 1) + [frame] for frame in self.frames]

    def _keyframe(self) -> Rows:
        size = self.layout.frame_bytes
        return np.repeat(self.random.integers(0, 255, size // 5 + 1), 5)[:size].astype(np.uint8)

    def _next(self, frame: Rows) -> Rows:
        chance = self.random.random()
        if chance < 0.1:
            return frame
        if chance < 0.13:
            return self._keyframe()
        if chance < 0.15:
            return self.random.integers(0, 256, frame.size).astype(np.uint8)
        moved = frame.copy()
        where = self.random.integers(0, frame.size, max(int(self.noise * frame.size), 1))
        moved[where] = self.random.integers(0, 4, where.size)
        return moved

    def _row(self, stack: list[Rows]) -> Rows:
        frames = np.stack(stack)
        if self.layout.axis == "last" and self.layout.stack > 1:
            unit = self.layout.spec.shape[-1] // self.layout.stack * self.layout.spec.dtype.itemsize
            frames = frames.reshape(self.layout.stack, -1, unit).transpose(1, 0, 2)
        return np.ascontiguousarray(frames).reshape(-1)

    def step(self) -> Rows:
        """Rows of ``obs`` and ``next_obs``."""
        obs, following = [], []
        for s, stack in enumerate(self.stacks):
            obs.append(self._row(stack))
            stack = [*stack[1:], self._next(stack[-1])]
            following.append(self._row(stack))
            if self.random.random() < 0.05:
                first = self._keyframe()
                stack = [np.zeros_like(first)] * (self.layout.stack - 1) + [first]
            self.stacks[s] = stack
        return np.stack([np.stack(obs), np.stack(following)])


def layouts() -> list[StackLayout]:
    byte = np.dtype(np.uint8)
    return [
        StackLayout(ObsSpec((4, 20, 20), byte), 4, "first"),
        StackLayout(ObsSpec((21, 21, 3), byte), 3, "last"),
        StackLayout(ObsSpec((2, 8, 9), np.dtype(np.float32)), 2, "first"),
        StackLayout(ObsSpec((71,), byte)),
        StackLayout(ObsSpec((9, 1000), byte)),
    ]


def make_store(
    layout: StackLayout,
    n_steps: int,
    n_streams: int,
    n_sets: int = 1,
    device: str = "cpu",
    heap_bytes: int | None = None,
    pinned: bool = False,
    triton: bool | None = None,
    codec: DeltaCodec | None = None,
) -> DeviceFrameStore:
    place = DevicePlace(torch.device(device), pinned)
    ring = DeviceRing(layout.spec, n_steps, n_streams, n_sets, place, heap_bytes)
    return DeviceFrameStore(ring, layout, codec or DeltaCodec(), triton=triton)


def read(store: DeviceFrameStore, indices: npt.NDArray[np.int64]) -> Rows:
    observations = store.read(IndexBatch(indices))
    assert observations.is_contiguous()
    found = observations.cpu().numpy()
    assert found.shape == (*indices.shape, *store.layout.spec.shape)
    assert found.dtype == store.layout.spec.dtype
    return np.ascontiguousarray(found).reshape(*indices.shape, -1).view(np.uint8)


def play(store: DeviceFrameStore, n_steps: int, check_every: int = 1, noise: float = 0.02, seed: int = 0) -> Rows:
    """Write ``n_steps`` and compare every observation in the ring; return its last contents."""
    game = Game(store.layout, store.n_streams, seed, noise)
    ring: Rows = np.zeros((store.n_sets, store.n_steps, store.n_streams, store.layout.spec.nbytes), np.uint8)
    indices = np.arange(store.n_sets * store.n_steps * store.n_streams).reshape(store.n_sets, -1)
    for i in range(n_steps):
        rows = game.step()[: store.n_sets]
        store.write(i % store.n_steps, list(rows))
        ring[:, i % store.n_steps] = rows
        if i % check_every == 0 or i == n_steps - 1:
            store.check()
            np.testing.assert_array_equal(read(store, indices), ring.reshape(*indices.shape, -1))
    return ring


@pytest.mark.parametrize("layout", layouts(), ids=str)
@pytest.mark.parametrize("n_sets", [1, 2])
def test_every_step_is_kept_until_it_is_overwritten(layout: StackLayout, n_sets: int) -> None:
    play(make_store(layout, 17, 3, n_sets), 60, check_every=3)


@pytest.mark.parametrize("n_sets", [1, 2])
@pytest.mark.parametrize("n_steps", [1, 2, 3, 7])
@pytest.mark.parametrize("stack", [1, 2, 4])
def test_rows_that_repeat_shift_or_change(stack: int, n_steps: int, n_sets: int) -> None:
    layout = StackLayout(ObsSpec((stack, 4, 6), np.dtype(np.uint8)), stack, "first")
    store = make_store(layout, n_steps, 3, n_sets)
    follow_rows(store, 60)


def follow_rows(store: DeviceFrameStore, count: int) -> None:
    """Write rows that repeat, shift by a frame, or consist of old frames; each stream on its own."""
    layout, n_steps, n_streams, n_sets = store.layout, store.n_steps, store.n_streams, store.n_sets
    random = np.random.default_rng(count + n_steps)
    size = layout.frame_bytes
    # few frames, so that they recur; one is zeros
    pool = random.integers(0, 3, (12, size)).astype(np.uint8)
    pool[0] = 0
    last = np.zeros((n_streams, layout.stack, size), np.uint8)
    ring = np.zeros((n_sets, n_steps, n_streams, layout.spec.nbytes), np.uint8)
    indices = np.arange(ring[..., 0].size).reshape(n_sets, -1)
    for i in range(count):
        for place in range(n_sets):
            for stream in range(n_streams):
                kind = random.integers(0, 4)
                if kind == 1:
                    last[stream] = pool[random.integers(0, len(pool), layout.stack)]
                elif kind > 1:
                    last[stream] = np.concatenate([last[stream, 1:], pool[random.integers(0, len(pool), 1)]])
            ring[place, i % n_steps] = last.reshape(n_streams, -1)
        rows = [np.array(ring[place, i % n_steps]) for place in range(n_sets)]
        store.write(i % n_steps, rows)
        for row in rows:
            row[:] = 7  # the caller may reuse the memory
        store.check()
        np.testing.assert_array_equal(read(store, indices), ring.reshape(*indices.shape, -1))


def test_more_observations_than_kernels_can_number_are_refused() -> None:
    with pytest.raises(SpecMismatchError, match="2,000,000,000,000 observations are more than"):
        make_store(layouts()[0], 10**9, 1000, 2)


@pytest.mark.parametrize("noise", [0.001, 0.3])
def test_a_small_heap_is_packed_as_needed(noise: float) -> None:
    layout = StackLayout(ObsSpec((4, 30, 30), np.dtype(np.uint8)), 4, "first")
    store = make_store(layout, 12, 2, 2, heap_bytes=90_000)

    play(store, 120, noise=noise)

    assert capacity_of(store.state.tables) <= 90_000


def test_a_full_heap_raises_and_keeps_its_contents() -> None:
    layout = StackLayout(ObsSpec((1, 40, 40), np.dtype(np.uint8)))
    store = make_store(layout, 64, 2, 1, heap_bytes=60_000)
    random = np.random.default_rng(0)
    ring: Rows = np.zeros((1, 64, 2, 1600), np.uint8)
    indices = np.arange(128).reshape(1, -1)
    for step in range(64):
        rows = random.integers(0, 256, (1, 2, 1600)).astype(np.uint8)
        try:
            store.write(step, list(rows))
        except HeapFullError:
            break
        ring[:, step] = rows
    assert 5 < step < 63
    for _ in range(2):
        store.check()
        np.testing.assert_array_equal(read(store, indices), ring.reshape(1, 128, -1))
        with pytest.raises(HeapFullError, match="heap_bytes>=") as full:
            store.write(step, list(rows))
        assert full.value.limit == 60_000
        assert 0 < full.value.live <= 60_000 < full.value.live + full.value.needed


def test_a_stream_that_stands_still_does_not_fill_the_heap() -> None:
    layout = StackLayout(ObsSpec((1, 40, 40), np.dtype(np.uint8)))
    store = make_store(layout, 8, 2, 1, heap_bytes=120_000)
    random = np.random.default_rng(0)
    still = random.integers(0, 256, (12, 1600)).astype(np.uint8)
    for step in range(300):
        moving = random.integers(0, 256, 1600).astype(np.uint8)
        # the first stream seals a segment early and needs it from then on
        rows = np.stack([still[min(step, 11)], moving])
        store.write(step % 8, [rows])
        store.check()
        np.testing.assert_array_equal(read(store, np.array([[step % 8 * 2, step % 8 * 2 + 1]]))[0], rows)


@pytest.mark.parametrize("change", [DeviceFrameStore.compact, DeviceFrameStore._reserve_tables])
def test_an_interrupt_while_tables_are_replaced_changes_nothing(change: Any) -> None:
    store = make_store(StackLayout(ObsSpec((80,), np.dtype(np.uint8))), 60, 2)
    rows = np.random.default_rng(0).integers(0, 256, (14, 2, 80)).astype(np.uint8)
    for step in range(13):
        store.write(step, [rows[step]])
    # as if the tables of keyframes and of segments were full
    store.state.notes[REPORT_SPARE], store.state.notes[REPORT_SEGMENTS] = 0, store.state.tables.n_slots
    saved = pickle.dumps(store)
    with Injector() as counter:
        change(pickle.loads(saved))
    for point in range(1, counter.count + 1):
        store = pickle.loads(saved)
        with contextlib.suppress(KeyboardInterrupt), Injector(point, KeyboardInterrupt()):
            change(store)
        store.check()
        store.write(13, [rows[13]])
        np.testing.assert_array_equal(read(store, np.arange(28)[None])[0], rows.reshape(28, 80))


def test_compacting_changes_nothing() -> None:
    layout = layouts()[0]
    store = make_store(layout, 20, 2, 2)
    ring = play(store, 55, check_every=50)
    indices = np.arange(80).reshape(2, -1)

    store.compact()

    store.check()
    np.testing.assert_array_equal(read(store, indices), ring.reshape(2, 40, -1))


def test_a_lone_keyframe_does_not_free_newer_frames() -> None:
    layout = StackLayout(ObsSpec((3, 300), np.dtype(np.uint8)), 3, "first")
    # each frame is a segment, and those that became keyframes have no bytes in the heap
    store = make_store(layout, 8, 3, 2, heap_bytes=12_000, codec=DeltaCodec(frames=1))
    for seed in range(4):
        store.clear()
        play(store, 30, noise=0.2, seed=seed)
        store.compact()
        store.check()


class LateReport(np.ndarray[Any, np.dtype[np.int64]]):
    """The report on a write that is under way until some of its entries were read."""

    arrives_after: Any
    report: Any

    def __array_finalize__(self, parent: Any) -> None:
        self.arrives_after, self.report = getattr(parent, "arrives_after", None), getattr(parent, "report", None)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return super().__getitem__(key)
        self.arrives_after[0] -= 1
        value = super().__getitem__(key)
        if self.arrives_after[0] == 0:
            self.report[0][:] = self.report[1]
        return value

    def tolist(self) -> Any:
        return [int(self[i]) for i in range(len(self))]


@pytest.mark.parametrize("n_reads", range(1, 8))
def test_a_report_may_arrive_while_it_is_read(n_reads: int) -> None:
    layout = StackLayout(ObsSpec((400,), np.dtype(np.uint8)))
    store = make_store(layout, 4, 8, heap_bytes=23_000)
    random = np.random.default_rng(0)
    ring: Rows = np.zeros((1, 4, 8, 400), np.uint8)
    before = store.state.notes.copy()
    for step in range(60):
        ring[0, step % 4] = random.integers(0, 256, (8, 400))
        store.write(step % 4, list(ring[:, step % 4]))
        np.testing.assert_array_equal(read(store, np.arange(32)[None]), ring.reshape(1, 32, -1))
        after = np.array(store.state.notes)
        notes = before.view(LateReport)
        notes.arrives_after, notes.report = [n_reads], (before, after)
        store.state = store.state._replace(notes=notes)
        before = after.copy()


def test_late_reports_do_not_make_the_keyframes_grow_again_and_again() -> None:
    layout = StackLayout(ObsSpec((80,), np.dtype(np.uint8)))
    counts = []
    for delay in (1, 12):
        store = make_store(layout, 80, 2)
        random = np.random.default_rng(0)
        reports = [store.state.notes.copy()] * (delay - 1)
        for step in range(100):
            store.write(step % 80, [random.integers(0, 256, (2, 80)).astype(np.uint8)])
            # the device is some writes behind
            reports.append(store.state.notes.copy())
            store.state.notes[:] = reports.pop(0)
        store.check()
        counts.append(store.state.tables.keyframe_refs.numel())
    assert 40 < counts[0] <= counts[1] < 2 * counts[0]


def test_a_cleared_store_can_be_filled_again() -> None:
    store = make_store(layouts()[0], 9, 2)
    for seed in range(3):
        play(store, 9, seed=seed)
        store.clear()
        store.check()
        assert not read(store, np.arange(18).reshape(1, -1)).any()


def test_unwritten_indices_read_as_zeros() -> None:
    store = make_store(layouts()[0], 9, 2)
    assert not read(store, np.arange(18).reshape(1, -1)).any()
    assert store.read(IndexBatch(np.zeros((2, 0), np.int64))).numel() == 0


def test_a_pickled_store_continues_where_it_was() -> None:
    store = make_store(layouts()[0], 9, 2, 2)
    ring = play(store, 21)
    again = pickle.loads(pickle.dumps(store))
    indices = np.arange(36).reshape(2, -1)

    for copy in (again, store):
        np.testing.assert_array_equal(read(copy, indices), ring.reshape(2, 18, -1))
    rows = Game(store.layout, 2, 5).step()
    again.write(3, list(rows))
    again.check()
    np.testing.assert_array_equal(read(again, indices)[:, 6:8], rows)
    np.testing.assert_array_equal(read(store, indices), ring.reshape(2, 18, -1))


def test_frames_are_stored_once() -> None:
    layout = layouts()[0]
    store = make_store(layout, 100, 1, 2)
    game = Game(layout, 1)
    for step in range(40):
        store.write(step, list(game.step()))
    # each step shows eight frames, but only one is new, plus one per new episode
    assert len(torch.unique(store.state.tables.frame_ids)) < 60
    assert int(store.state.tables.streams[0, COUNT]) >= 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_store_pickled_on_a_gpu_continues_without_one() -> None:
    store = make_store(layouts()[0], 9, 2, 2)
    ring = play(store, 21)
    # the state as a machine with a GPU pickles it
    gpu_ring = dataclasses.replace(store.ring, place=DevicePlace(torch.device("cuda:0"), pinned=True))
    state = store.__getstate__() | {"ring": gpu_ring, "_triton": True}
    again = DeviceFrameStore.__new__(DeviceFrameStore)
    again.__setstate__(pickle.loads(pickle.dumps(state)))
    indices = np.arange(36).reshape(2, -1)

    np.testing.assert_array_equal(read(again, indices), ring.reshape(2, 18, -1))
    rows = Game(store.layout, 2, 5).step()
    again.write(3, list(rows))
    again.check()
    np.testing.assert_array_equal(read(again, indices)[:, 6:8], rows)


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_a_single_number_may_have_any_stride(dtype: Any) -> None:
    store = make_store(StackLayout(ObsSpec((1,), np.dtype(dtype))), 3, 1)
    numbers = torch.from_numpy(np.arange(1, 5).astype(dtype))
    store.write(0, [numbers.view(1, 4)[:, 1::2][:, :1]])
    assert store.read(IndexBatch(np.array([[0]]))).tolist() == [[[2]]]


@pytest.mark.parametrize("n_sets", [1, 2])
@pytest.mark.parametrize("n_failures", range(1, 10))
def test_rejected_writes_leave_no_trace(n_failures: int, n_sets: int) -> None:
    layout = layouts()[0]
    store = make_store(layout, 30, 2, n_sets)
    game = Game(layout, 2)
    ring: Rows = np.zeros((n_sets, 30, 2, layout.spec.nbytes), np.uint8)
    for step in range(24):
        rows = game.step()[:n_sets]
        if step in (3, 12):
            for _ in range(n_failures):
                with pytest.raises(SpecMismatchError, match="2 streams, got 1"):
                    store.write(step, [*rows[:-1], rows[-1][:1]])
        store.write(step, list(rows))
        ring[:, step] = rows

    np.testing.assert_array_equal(read(store, np.arange(60 * n_sets).reshape(n_sets, -1)), ring.reshape(n_sets, 60, -1))
