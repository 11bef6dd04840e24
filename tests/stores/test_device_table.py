"""`DeviceTableStore`: indices into a table are expanded to what was written.

`test_delta_triton` also runs these under Triton's interpreter.
"""

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
from sb3_extra_buffers.stores.device_base import DevicePlace, DeviceRing
from sb3_extra_buffers.stores.device_host import HostDecodedStore
from sb3_extra_buffers.stores.device_table import DeviceTableStore
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.registry import find_store
from tests.contracts.store import needs
from tests.stores.test_device_raw import INTERPRETED, PLACES, Model

Array = npt.NDArray[Any]

BYTE, FLOAT = np.dtype(np.uint8), np.dtype(np.float32)
LAYOUTS = {
    "RGB": StackLayout(ObsSpec((10, 11, 3), BYTE)),
    "planar": StackLayout(ObsSpec((3, 10, 11), BYTE)),
    "stack": StackLayout(ObsSpec((6, 8, 9), BYTE), 2, "first"),
    "channels last": StackLayout(ObsSpec((8, 9, 6), BYTE), 2, "last"),
    "four channels": StackLayout(ObsSpec((4, 9, 9), BYTE)),
    "floats": StackLayout(ObsSpec((2, 9, 10), FLOAT), 2, "first"),
    "halves": StackLayout(ObsSpec((12, 13), np.dtype(np.float16))),
    "doubles": StackLayout(ObsSpec((5, 7), np.dtype(np.float64))),
}
N_STEPS, N_STREAMS = 7, 2


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_base, "has_triton", lambda: True)


class Pictures:
    """Steps of frames with few colours or numbers, which now and then have more than a table can hold."""

    def __init__(self, layout: StackLayout, p_many: float = 0.0) -> None:
        self.layout, self.p_many = layout, p_many
        self.random = np.random.default_rng(0)
        self.stacks = [[self._frame() for _ in range(layout.stack)] for _ in range(N_STREAMS)]

    def _frame(self) -> Array:
        layout = self.layout
        shape = list(layout.spec.shape)
        axis = 0 if layout.axis == "first" else -1
        if layout.stack > 1:
            shape[axis] //= layout.stack
        if self.random.random() < self.p_many:
            return self.random.integers(0, 2000, shape).astype(layout.spec.dtype)
        if layout.spec.dtype != BYTE:
            return (self.random.integers(0, 200, shape) / 255).astype(layout.spec.dtype)
        # one value for all channels of a pixel
        channels = 0 if shape[0] in (3, 4) else -1
        shape[channels] = 1
        n_channels = 4 if 4 in (layout.spec.shape[0], layout.spec.shape[-1]) else 3
        return np.repeat(self.random.integers(0, 90, shape), n_channels, axis=channels).astype(BYTE)

    def _observations(self) -> Array:
        axis = 0 if self.layout.axis == "first" else -1
        return np.stack([np.concatenate(stack, axis) if len(stack) > 1 else stack[0] for stack in self.stacks])

    def step(self) -> list[Array]:
        obs = self._observations().astype(self.layout.spec.dtype)
        self.stacks = [[*stack[1:], self._frame()] for stack in self.stacks]
        return [obs, self._observations().astype(self.layout.spec.dtype)]


def make(layout: StackLayout, method: str, place: tuple[str, bool, bool]) -> DeviceTableStore:
    device, triton, pinned = place
    ring = DeviceRing(layout.spec, N_STEPS, N_STREAMS, 2, DevicePlace(torch.device(device), pinned))
    codec = get_codec(method).bind(layout.frame_spec)
    assert DeviceTableStore.accepts(codec, layout)
    return DeviceTableStore(ring, layout, codec, method, {}, triton=triton)


def method_for(name: str, inner: str) -> str:
    return f"{'palette' if LAYOUTS[name].spec.dtype == BYTE else 'table'}:{inner}"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("p_many", [0.0, 0.2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_step_is_kept_until_it_is_overwritten(name: str, p_many: float, place: tuple[str, bool, bool]) -> None:
    model = Model(make(LAYOUTS[name], method_for(name, "none"), place))
    pictures = Pictures(LAYOUTS[name], p_many)
    model.check()
    for i in range(18):
        model.write(i % N_STEPS, pictures.step())
        # the interpreter is slow
        if i % (8 if INTERPRETED else 3) == 0:
            model.check()
    model.check()
    assert model.store.table.n_used > 10
    again = Model(pickle.loads(pickle.dumps(model.store.frozen())))
    again.arrays[...] = model.arrays
    again.check()
    again.write(18 % N_STEPS, pictures.step())
    again.check()
    model.store.clear()
    model.arrays[...] = 0
    model.check()


@pytest.mark.parametrize("name", ["RGB", "floats"])
def test_indices_may_be_stored_as_differences(name: str) -> None:
    model = Model(make(LAYOUTS[name], method_for(name, "delta"), ("cpu", False, False)))
    pictures = Pictures(LAYOUTS[name], 0.1)
    for i in range(18):
        model.write(i % N_STEPS, pictures.step())
        model.check()


@pytest.mark.parametrize("inner", ["camera", pytest.param("scroll", marks=needs("scroll"))])
def test_a_host_store_expands_its_indices_itself(inner: str) -> None:
    layout = LAYOUTS["floats"]
    codec = get_codec(f"table:{inner}").bind(layout.frame_spec)

    assert find_store(codec, layout, "cuda") is HostDecodedStore
