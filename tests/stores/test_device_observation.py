"""`DeviceObservationStore`: first steps held as they come, as arrays or tensors, then in the store that suits them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_base import DevicePlace, IndexBatch
from sb3_extra_buffers.stores.device_observation import DeviceObservationStore
from tests.contracts.store import transitions

Array = npt.NDArray[Any]

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
IMAGE = ObsSpec((4, 36, 36), np.dtype(np.uint8))
METHODS = ["none", "delta", "auto", "gzip1", "rle", "camera", "palette:delta"]


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store observations as on a GPU, with reference kernels."""
    monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
    monkeypatch.setattr(device_base, "has_triton", lambda: True)


def make(n_steps: int, n_streams: int, device: str, method: str, **options: Any) -> DeviceObservationStore:
    return DeviceObservationStore(IMAGE, n_steps, n_streams, 2, DevicePlace(torch.device(device)), method, **options)


def steps(n_streams: int, count: int) -> list[list[Array]]:
    return [list(pair) for pair in transitions((36, 36), 4, "first", n_streams, count)]


def read_all(store: DeviceObservationStore) -> Array:
    indices = torch.arange(2 * store.n_obs, device=store.place.device).view(2, -1)
    found: Array = store.read(IndexBatch(None, indices)).cpu().numpy()
    np.testing.assert_array_equal(store.read(IndexBatch(indices.cpu().numpy())).cpu(), found)
    return found.reshape(2, *store.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_tensors_are_stored_like_arrays(method: str, device: str) -> None:
    n_steps, n_streams = 100, 3
    store, other = make(n_steps, n_streams, device, method), make(n_steps, n_streams, device, method)
    expected = np.zeros((2, *store.shape), np.uint8)
    for i, sets in enumerate(steps(n_streams, 130)):
        tensors = [torch.from_numpy(batch.copy()).to(device) for batch in sets]
        store.write(i % n_steps, tensors)
        other.write(i % n_steps, sets)
        for tensor in tensors:
            tensor.fill_(7)  # the caller may use the memory again
        expected[:, i % n_steps] = sets
        if i in (0, 20, 60, 129):
            np.testing.assert_array_equal(read_all(store), expected)
    assert store.inner is not None
    assert store.describe() == other.describe()
    store.check()


@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_held_as_arrays_and_tensors_until_a_method_is_chosen(device: str) -> None:
    store = make(200, 2, device, "delta")
    expected = np.zeros((2, *store.shape), np.uint8)
    assert not read_all(store).any()
    for i, sets in enumerate(steps(2, 20)):
        store.write(i, [torch.from_numpy(batch).to(device) for batch in sets] if i % 3 else sets)
        expected[:, i] = sets
    assert store.inner is None
    assert store.collected_bytes == 20 * 4 * IMAGE.nbytes
    np.testing.assert_array_equal(read_all(store), expected)
    assert store.read(IndexBatch(np.zeros((2, 0), np.int64))).shape == (2, 0, *IMAGE.shape)
    out = torch.full((1, 2, *IMAGE.shape), 0xAA, dtype=torch.uint8, device=device)
    assert store.read(IndexBatch(np.array([[3, 300]])), out) is out
    np.testing.assert_array_equal(out.cpu()[0], [expected[0, 1, 1], np.zeros(IMAGE.shape)])
    again = pickle.loads(pickle.dumps(store.frozen()))
    np.testing.assert_array_equal(read_all(again), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["none", "auto"])
def test_thousands_of_streams(method: str, device: str) -> None:
    n_streams = 2048
    spec = ObsSpec((2, 8, 12), np.dtype(np.uint8))
    store = DeviceObservationStore(spec, 32, n_streams, 2, DevicePlace(torch.device(device)), method)
    batches = list(transitions((8, 12), 2, "first", n_streams, 5))
    for i, sets in enumerate(batches):
        store.write(i, [torch.from_numpy(batch).to(device) for batch in sets])
    # enough to see that frames are stacked, from a few streams
    assert store.inner is not None
    assert store.inner.layout is not None
    indices = np.arange(5 * n_streams)[None] + np.array([[0], [store.n_obs]])
    expected = np.stack([np.concatenate(part) for part in zip(*batches, strict=True)])
    np.testing.assert_array_equal(store.read(IndexBatch(indices)).cpu(), expected)


def test_a_decision_needs_consecutive_steps_even_of_many_streams() -> None:
    store = make(320, 200, "cpu", "delta")
    for i, sets in enumerate(steps(200, 8)):
        assert store.inner is None
        store.write(i, sets)
    assert store.inner is not None
    assert store.inner.layout is not None
    assert store.inner.layout.stack == 4


def test_tensors_of_another_shape_are_refused() -> None:
    store = make(40, 2, "cpu", "none")
    good = torch.zeros((2, *IMAGE.shape), dtype=torch.uint8)
    for wrong in (good[:, 1:], good.float()):
        with pytest.raises(SpecMismatchError, match="expected a batch of"):
            store.write(0, [good, wrong])
    with pytest.raises(SpecMismatchError, match="expected 2 batches of 2 observations"):
        store.write(0, [good, good[:1]])
    assert store.collected_bytes == 0
