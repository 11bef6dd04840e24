"""Windows from a device are those of the compressed buffer on the CPU, and of a plain list of transitions."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sb3_extra_buffers.compressed import CompressedDictSequenceReplayBuffer, CompressedSequenceReplayBuffer
from sb3_extra_buffers.files import load, save
from sb3_extra_buffers.gpu_buffers import GpuSequenceReplayBuffer
from sb3_extra_buffers.stores import device_base
from tests.contracts.sequences import IMAGES, MIXED, SPACES, STATES, VECTORS, Model, drawn_steps
from tests.gpu_buffers.test_buffers import DEVICES

ACTIONS = spaces.Discrete(5)


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A buffer_device; ``reference`` stores observations as on a GPU, in main memory."""
    if request.param != "reference":
        return str(request.param)
    monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
    monkeypatch.setattr(device_base, "has_triton", lambda: True)
    return "cpu"


def make(space: Any, place: str, size: int = 40, n_envs: int = 2, **options: Any) -> Any:
    device = "cuda" if place in ("cuda", "pinned") else "cpu"
    return GpuSequenceReplayBuffer(
        size * n_envs, space, ACTIONS, device=device, n_envs=n_envs, buffer_device=place, **options
    )


def on_cpu(batch: Any) -> Any:
    """A batch in main memory."""

    def moved(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: moved(each) for key, each in part.items()}
        return part.cpu() if isinstance(part, th.Tensor) else part

    return type(batch)._make(map(moved, batch))


@pytest.mark.parametrize("place", DEVICES, indirect=True)
@pytest.mark.parametrize("method", ["none", "delta"])
@pytest.mark.parametrize("name", SPACES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_windows_equal_a_list_of_transitions(place: str, method: str, name: str, data: Any) -> None:
    n_envs, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 25))
    options: dict[str, Any] = {"recurrent_states": STATES, "prioritized": data.draw(st.booleans())}
    buffer = make(SPACES[name], place, size, n_envs, compression_method=method, **options)
    model = Model(SPACES[name], n_envs, data.draw(st.integers(0, 99)), data.draw(st.sampled_from([1.5, 4.0, 30.0])))
    for count in data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)):
        model.add_to(buffer, count=count)
        request: dict[str, Any] = {
            "length": data.draw(st.integers(1, 9)),
            "burn_in": data.draw(st.integers(0, 4)),
            "n_steps": data.draw(st.integers(1, 4)),
            "episode_end": data.draw(st.sampled_from(["stop", "pad", "continue"])),
        }
        batch = buffer.sample_sequences(7, **request, online=data.draw(st.booleans()))
        assert batch.rewards.device.type == batch.mask.device.type == buffer.device.type
        model.check(on_cpu(batch), model.n_added - buffer.size(), **request)
        if data.draw(st.booleans()):
            buffer = pickle.loads(pickle.dumps(buffer))
    buffer.check()


@pytest.mark.parametrize("place", DEVICES, indirect=True)
@pytest.mark.parametrize("method", ["none", "delta", "rle"])
def test_the_same_windows_as_on_the_cpu(place: str, method: str) -> None:
    options: dict[str, Any] = {"recurrent_states": STATES, "prioritized": True}
    ours = make(MIXED, place, compression_method=method, **options)
    theirs = CompressedDictSequenceReplayBuffer(80, MIXED, ACTIONS, device="cpu", n_envs=2, **options)
    model = Model(MIXED, 2)
    model.add_to(ours, theirs, count=70)
    hows: list[dict[str, Any]] = [{}, {"sample": "steps", "frames": "newest"}]
    for how in (*hows, {"sample": "episodes", "episode_end": "continue"}):
        batches = []
        for buffer in (ours, theirs):
            np.random.seed(1)  # noqa: NPY002  # windows are drawn from this generator
            batches.append(on_cpu(buffer.sample_sequences(6, 5, 2, 3, **how)))
            buffer.update_priorities(batches[-1], np.arange(30.0).reshape(6, 5))
        for mine, other in zip(*batches, strict=True):
            for key in other if isinstance(other, dict) else [None]:
                np.testing.assert_array_equal(mine[key] if key else mine, other[key] if key else other)


def test_saved_on_a_device_and_loaded(tmp_path: Path) -> None:
    buffer, model = make(IMAGES, "cpu", recurrent_states=STATES, prioritized=True, gamma=0.9), Model(IMAGES, 2)
    model.add_to(buffer, count=55)
    save(buffer, tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    assert loaded.gamma == 0.9
    model.add_to(loaded, count=20)
    loaded.check()
    model.check(loaded.sample_sequences(20, 4, n_steps=2), model.n_added - 40, 4, 2, gamma=0.9)


def test_steps_from_before_a_reset_are_gone() -> None:
    buffer, model = make(VECTORS, "cpu", 20, prioritized=True), Model(VECTORS, 2)
    model.add_to(buffer, count=33)
    batch = buffer.sample_sequences(5, 3)
    buffer.reset()
    model.add_to(buffer, count=4)
    assert not buffer.holds(batch).any()
    assert min(drawn_steps(buffer.sample_sequences(20, 2)))[0] >= 33
    buffer.check()


def test_plain_samples_stay_the_same() -> None:
    ours = make(IMAGES, "cpu")
    theirs = CompressedSequenceReplayBuffer(80, IMAGES, ACTIONS, device="cpu", n_envs=2)
    Model(IMAGES, 2).add_to(ours, theirs, count=55)
    batches = []
    for buffer in (ours, theirs):
        np.random.seed(2)  # noqa: NPY002  # SB3 draws from this generator
        batches.append(buffer.sample(16))
    for mine, other in zip(*batches, strict=True):
        assert other is None or th.equal(mine, other)
