"""`DeviceCameraStore`: the device decodes what the host has encoded.

`test_delta_triton` also runs these under Triton's interpreter.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.kernels import camera
from sb3_extra_buffers.stores import device_base, packed
from sb3_extra_buffers.stores.device_base import DevicePlace, DeviceRing, IndexBatch
from sb3_extra_buffers.stores.device_camera import DeviceCameraStore
from sb3_extra_buffers.stores.device_host import HostDecodedStore
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.registry import find_store
from sb3_extra_buffers.stores.segment_format import pack_camera_frames as pack

Array = npt.NDArray[Any]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="on a CPU, kernels run only under Triton's interpreter")
DEVICES = [
    pytest.param("cpu", marks=interpreted),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]
LAYOUTS = {
    "RGB": StackLayout(ObsSpec((24, 20, 3), np.dtype(np.uint8))),
    "planar": StackLayout(ObsSpec((3, 19, 24), np.dtype(np.uint8))),
    "stack": StackLayout(ObsSpec((2, 16, 16), np.dtype(np.uint8)), 2, "first"),
    "channels last": StackLayout(ObsSpec((16, 16, 6), np.dtype(np.uint8)), 2, "last"),
    "depth": StackLayout(ObsSpec((18, 17), np.dtype(np.float32))),
}
# frames of 192 KiB
LARGE = {
    "RGB": StackLayout(ObsSpec((256, 256, 3), np.dtype(np.uint8))),
    "channels last": StackLayout(ObsSpec((256, 256, 6), np.dtype(np.uint8)), 2, "last"),
    "planar": StackLayout(ObsSpec((6, 256, 256), np.dtype(np.uint8)), 2, "first"),
}
N_STEPS, N_STREAMS = 24, 2


class Cameras:
    """Streams of images that drift under a little noise; episodes end at random."""

    def __init__(self, layout: StackLayout, seed: int = 0) -> None:
        self.layout, self.random = layout, np.random.default_rng(seed)
        self.stacks = [self._first() for _ in range(N_STREAMS)]

    def _first(self) -> list[Array]:
        spec = self.layout.frame_spec
        picture = self.random.integers(0, 12, spec.shape).cumsum(axis=0)
        return [np.zeros(spec.shape, spec.dtype)] * (self.layout.stack - 1) + [picture.astype(spec.dtype)]

    def _next(self, frame: Array) -> Array:
        if self.random.random() < 0.1:
            return frame
        moved = np.roll(frame, 1, axis=frame.ndim // 2) + self.random.integers(0, 2, frame.shape)
        return moved.astype(frame.dtype)

    def _observations(self) -> Array:
        layout = self.layout
        if layout.stack == 1:
            return np.stack([stack[0] for stack in self.stacks])
        axis = 0 if layout.axis == "first" else -1
        frames = [[frame if frame.ndim == 3 else np.expand_dims(frame, axis) for frame in s] for s in self.stacks]
        return np.stack([np.concatenate(stack, axis=axis) for stack in frames])

    def step(self) -> list[Array]:
        obs = self._observations()
        self.stacks = [[*stack[1:], self._next(stack[-1])] for stack in self.stacks]
        following = self._observations()
        self.stacks = [self._first() if self.random.random() < 0.03 else stack for stack in self.stacks]
        return [obs, following]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_device_decodes_what_was_written(name: str, device: str) -> None:
    layout = LAYOUTS[name]
    ring = DeviceRing(layout.spec, N_STEPS, N_STREAMS, 2, DevicePlace(torch.device(device)))
    codec = get_codec("camera").bind(layout.frame_spec)
    store = DeviceCameraStore(ring, layout, codec, "camera", {})
    store._triton = True
    cameras = Cameras(layout)
    arrays = np.zeros((2, N_STEPS, N_STREAMS, *layout.spec.shape), layout.spec.dtype)
    flat = arrays.reshape(-1, *layout.spec.shape)
    random = np.random.default_rng(1)
    for i in range(2 * N_STEPS + 9):
        batches = cameras.step()
        store.write(i % N_STEPS, batches)
        arrays[:, i % N_STEPS] = batches
        if i % 19 == 18:
            # the interpreter is slow
            indices = random.integers(0, ring.n_obs, (2, 4 if device == "cuda" else 2)) + np.array([[0], [ring.n_obs]])
            found = store.read(IndexBatch(indices)).cpu().numpy()
            np.testing.assert_array_equal(found, flat[indices])
    store.check()
    assert store.layout == layout
    again = pickle.loads(pickle.dumps(store.frozen()))
    indices = np.arange(2 * ring.n_obs).reshape(2, -1)
    np.testing.assert_array_equal(again.read(IndexBatch(indices)).cpu().numpy(), flat[indices])
    if device == "cuda":
        np.testing.assert_array_equal(store.read(IndexBatch(indices)).cpu().numpy(), flat[indices])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LARGE)
def test_large_frames_are_decoded_by_the_device(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu" and name != "channels last":
        pytest.skip("the interpreter is slow")
    monkeypatch.setattr(device_base, "has_triton", lambda: True)
    layout = LARGE[name]
    codec = get_codec("camera").bind(layout.frame_spec)
    assert find_store(codec, layout, "cuda") is DeviceCameraStore
    ring = DeviceRing(layout.spec, 16, N_STREAMS, 2, DevicePlace(torch.device(device)))
    store = DeviceCameraStore(ring, layout, codec, "camera", {})
    store._triton = True
    indices = np.array([[34]]) if device == "cpu" else np.arange(64).reshape(2, -1)
    monkeypatch.setattr(HostDecodedStore, "read", None)
    cameras, arrays = Cameras(layout), np.zeros((2, 16, N_STREAMS, *layout.spec.shape), np.uint8)
    for i in range(16):
        batches = cameras.step()
        store.write(i, [torch.from_numpy(batch).to(device) for batch in batches])
        arrays[:, i] = batches
    found = store.read(IndexBatch(None, torch.from_numpy(indices).to(device)))
    np.testing.assert_array_equal(found.cpu(), arrays.reshape(-1, *layout.spec.shape)[indices])


@pytest.mark.parametrize("written_with", [2, 3, 4])
def test_segments_of_another_version_are_decoded_by_the_host(
    written_with: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LAYOUTS["RGB"]
    ring = DeviceRing(layout.spec, N_STEPS, N_STREAMS, 2, DevicePlace(torch.device("cpu")))
    store = DeviceCameraStore(ring, layout, get_codec("camera"), "camera", {})
    known = camera.STRIDE
    monkeypatch.setattr(camera, "STRIDE", written_with)
    monkeypatch.setattr(packed, "pack_camera_frames", lambda body, geometry, compiled: pack(body, geometry, False))
    cameras = Cameras(layout)
    for i in range(N_STEPS):
        store.write(i, cameras.step())
    copied = pickle.loads(pickle.dumps(store))
    copied._triton = True
    inner = copied.store.inner

    assert copied._can_decode(inner) == (written_with == known)
