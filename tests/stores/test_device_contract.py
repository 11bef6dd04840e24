"""Every device store of the registry keeps its contract, with reference kernels in main memory and on a GPU."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_base import (
    DevicePlace,
    DeviceRing,
    DeviceStore,
    IndexBatch,
    PlannedWrite,
    finish_writes,
)
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.registry import STORES, find_store
from tests.contracts.store import transitions

METHODS = {
    "device-timeline": "none",
    "device-delta": "delta",
    "device-rle": "rle",
    "device-camera": "camera",
    "device-table": "palette:delta",
    "device-host": "gzip1",
}
KINDS = [entry.kind for entry in STORES if entry.place == "cuda"]
on_gpu = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)
N_STEPS, N_STREAMS, N_SETS = 7, 3, 2
SPEC = ObsSpec((4, 12, 12), np.dtype(np.uint8))
# whole observations, of four channels for a palette; others are stacks
LAYOUTS = {"device-timeline": StackLayout(SPEC), "device-table": StackLayout(SPEC)}
STACKED = StackLayout(SPEC, 4, "first")
Step = list[npt.NDArray[Any]]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(device_base, "has_triton", lambda: True)
    return str(request.param)


@pytest.fixture(params=["cpu", on_gpu])
def store(kind: str, request: pytest.FixtureRequest) -> DeviceStore:
    ring = DeviceRing(SPEC, N_STEPS, N_STREAMS, N_SETS, DevicePlace(torch.device(request.param)))
    layout = LAYOUTS.get(kind, STACKED)
    codec = get_codec(METHODS[kind]).bind(layout.frame_spec)
    made: DeviceStore = find_store(codec, layout, "cuda")(ring, layout, codec, METHODS[kind], {})
    return made


def steps(count: int, seed: int = 0) -> list[Step]:
    return [list(pair) for pair in transitions((12, 12), 4, "first", N_STREAMS, count, seed)]


def contents(store: DeviceStore) -> npt.NDArray[Any]:
    """All observations, ``[set, step, stream, ...]``."""
    indices = np.arange(N_SETS * N_STEPS * N_STREAMS).reshape(N_SETS, -1)
    observations = store.read(IndexBatch(indices)).cpu().numpy()
    assert observations.shape == (N_SETS, N_STEPS * N_STREAMS, *SPEC.shape)
    assert observations.dtype == SPEC.dtype
    return observations.reshape(N_SETS, N_STEPS, N_STREAMS, *SPEC.shape)


def write(store: DeviceStore, batches: list[Step], first: int = 0) -> npt.NDArray[Any]:
    """Write steps from ``first`` on; return what the ring must hold if it was empty."""
    ring = np.zeros((N_SETS, N_STEPS, N_STREAMS, *SPEC.shape), SPEC.dtype)
    for i, sets in enumerate(batches, first):
        store.write(i % N_STEPS, sets)
        ring[:, i % N_STEPS] = sets
    return ring


def test_the_registry_finds_the_store_by_its_codec(kind: str) -> None:
    entry = next(entry for entry in STORES if entry.kind == kind)
    layout = LAYOUTS.get(kind, STACKED)
    codec = get_codec(METHODS[kind]).bind(layout.frame_spec)

    assert find_store(codec, layout, "cuda") is entry.load()
    assert issubclass(entry.load(), DeviceStore)


@pytest.mark.parametrize("count", [0, 1, N_STEPS, 3 * N_STEPS + 2])
def test_a_ring_holds_the_steps_written_last(store: DeviceStore, count: int) -> None:
    ring = write(store, steps(count))

    np.testing.assert_array_equal(contents(store), ring)
    store.check()


def test_a_batch_of_indices_is_an_array_a_tensor_or_both() -> None:
    array = np.arange(6).reshape(2, 3)
    device = torch.device("cpu")
    for indices in (IndexBatch(array), IndexBatch(None, torch.from_numpy(array)), IndexBatch(array, torch.arange(6))):
        assert indices.shape == (2, 3)
        np.testing.assert_array_equal(indices.host, array)
        np.testing.assert_array_equal(indices.on(device).reshape(2, 3), array)
    with pytest.raises(ValueError, match="got neither"):
        IndexBatch(None)


def test_a_batch_is_read_into_given_memory_with_indices_on_the_device(store: DeviceStore) -> None:
    ring = write(store, steps(N_STEPS + 2))
    device = store.ring.place.device  # type: ignore[attr-defined]  # every store of a ring has one
    for indices in (np.array([[3, 0, 20], [24, 21, 41]]), np.zeros((2, 0), np.int64)):
        out = torch.full((*indices.shape, *SPEC.shape), 0xAA, dtype=torch.uint8, device=device)

        found = store.read(IndexBatch(None, torch.from_numpy(indices).to(device)), out)

        assert found is out
        np.testing.assert_array_equal(out.cpu(), ring.reshape(-1, *SPEC.shape)[indices])


def test_windows_hold_what_single_reads_hold(store: DeviceStore) -> None:
    ring = write(store, steps(N_STEPS + 2)).reshape(-1, *SPEC.shape)
    device = store.ring.place.device  # type: ignore[attr-defined]  # every store of a ring has one
    layout = StackLayout(SPEC) if store.layout is None else store.layout
    newest = layout.newest(ring.reshape(len(ring), -1)).reshape(len(ring), *layout.frame_spec.shape)
    windows = np.array([[3, 6, 9, 12], [18, 0, 3, 24], [5, 5, 5, 5]])
    for indices in (windows, windows[:1], windows[:, :1], windows[:0], windows[:, :0]):
        for whole, newest_only in ((ring, False), (newest, True)):
            found = store.read_windows(IndexBatch(indices), newest_only)
            np.testing.assert_array_equal(found.cpu(), whole[indices])
            out = torch.full(found.shape, 0xAA, dtype=torch.uint8, device=device)

            uploaded = IndexBatch(None, torch.from_numpy(indices).to(device))
            assert store.read_windows(uploaded, newest_only, out) is out

            np.testing.assert_array_equal(out.cpu(), whole[indices])


def test_steps_are_written_as_tensors(store: DeviceStore) -> None:
    device = store.ring.place.device  # type: ignore[attr-defined]  # every store of a ring has one
    ring = np.zeros((N_SETS, N_STEPS, N_STREAMS, *SPEC.shape), SPEC.dtype)
    for i, sets in enumerate(steps(2 * N_STEPS + 2)):
        # arrays and tensors may take turns
        tensors = [torch.from_numpy(batch.copy()).to(device) for batch in sets]
        store.write(i % N_STEPS, tensors if i % 5 else sets)
        ring[:, i % N_STEPS] = sets
        for tensor in tensors:
            tensor.fill_(7)  # the caller may use the memory again
        np.testing.assert_array_equal(contents(store), ring)
    store.check()


def test_a_planned_write_is_invisible_until_it_is_committed(store: DeviceStore) -> None:
    ring = write(store, steps(5))
    sets = steps(1, seed=1)[0]

    plan = store.plan(5, sets)

    np.testing.assert_array_equal(contents(store), ring)
    plan.commit()
    ring[:, 5] = sets
    np.testing.assert_array_equal(contents(store), ring)
    store.check()


class Refused(PlannedWrite):
    """A write that was not committed and is completed by `finish`."""

    finished = False

    def finish(self) -> None:
        self.finished = True


def test_interrupted_writes_are_all_completed_or_all_cancelled(store: DeviceStore) -> None:
    ring = write(store, steps(5))
    sets, other = steps(1, seed=1)[0], Refused()
    plan = store.plan(5, sets)

    is_written = finish_writes([plan, other])

    # only a write that may fail is cancelled
    assert is_written == other.finished == (not plan.may_fail)
    if is_written:
        ring[:, 5] = sets
    np.testing.assert_array_equal(contents(store), ring)
    following = 6 if is_written else 5
    store.write(following, sets)
    ring[:, following] = sets
    np.testing.assert_array_equal(contents(store), ring)
    store.check()


def test_a_cleared_store_reads_as_zeros_and_can_be_filled_again(store: DeviceStore) -> None:
    write(store, steps(10))

    store.clear()

    assert not contents(store).any()
    ring = write(store, steps(4, seed=2))
    store.compact()
    np.testing.assert_array_equal(contents(store), ring)
    store.check()


def test_copies_do_not_change_with_the_original(store: DeviceStore) -> None:
    ring = write(store, steps(9))
    frozen = store.frozen()
    store.write(2, steps(1, seed=3)[0])

    copied = pickle.loads(pickle.dumps(frozen))

    np.testing.assert_array_equal(contents(copied), ring)
    sets = steps(1, seed=4)[0]
    copied.write(2, sets)
    ring[:, 2] = sets
    np.testing.assert_array_equal(contents(copied), ring)
    copied.check()


def test_the_rows_of_a_step_may_be_changed_once_it_is_written(store: DeviceStore) -> None:
    batches = steps(6)
    ring = write(store, batches)

    for sets in batches:
        for batch in sets:
            batch[...] = 7

    np.testing.assert_array_equal(contents(store), ring)


def test_memory_is_reported(store: DeviceStore) -> None:
    write(store, steps(3))

    assert store.memory_usage().total > 0
