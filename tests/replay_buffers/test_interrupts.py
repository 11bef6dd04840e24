"""A write to a storage is a transaction: interrupted anywhere, it is complete or has no effect."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from torchrl.data import TensorDictReplayBuffer

from sb3_extra_buffers._torchrl.device_group import DeviceGroup
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
from sb3_extra_buffers.stores import device_observation
from tests.replay_buffers.interrupts import count_bytecodes, interrupt, points
from tests.replay_buffers.trajectories import trajectory

N_POINTS = 150


def filled(n_items: int, **options: Any) -> Any:
    buffer = TensorDictReplayBuffer(storage=CompressedStorage(60, **options), batch_size=8)
    if n_items:
        buffer.extend(trajectory(n_items, 1, seed=1))
    return buffer


def state(buffer: Any) -> tuple[Any, ...]:
    contents = buffer[:].clone() if len(buffer) else None
    return len(buffer), buffer.writer._cursor, buffer.write_count, contents


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    if one[:3] != other[:3] or (one[3] is None) != (other[3] is None):
        return False
    return one[3] is None or all(torch.equal(one[3].get(key), other[3].get(key)) for key in one[3].keys(True, True))


Call = Callable[[Any], Callable[[], Any]]


def extend_by(n_items: int) -> Call:
    def prepare(buffer: Any) -> Callable[[], Any]:
        data = trajectory(n_items, 1, seed=2)
        return lambda: buffer.extend(data)

    return prepare


def add(buffer: Any) -> Callable[[], Any]:
    data: Any = trajectory(1, 1, seed=2)
    return lambda: buffer.add(data[0])


def assign(buffer: Any) -> Callable[[], Any]:
    data = trajectory(6, 1, seed=2).set("index", torch.arange(3, 9))

    def run() -> None:
        buffer[3:9] = data

    return run


CALLS: dict[str, tuple[int, dict[str, Any], Call]] = {
    "first extend": (0, {}, extend_by(7)),
    "first extend, larger than the storage": (0, {}, extend_by(70)),
    "extend while there is room": (20, {"n_envs": 2}, extend_by(7)),
    "extend that finds out how many environments there are": (20, {}, extend_by(40)),
    "extend over the end": (55, {"n_envs": 1}, extend_by(9)),
    "extend that overwrites": (60, {"n_envs": 2}, extend_by(9)),
    "add": (20, {"n_envs": 1}, add),
    "add that overwrites": (60, {"n_envs": 1}, add),
    "buffer[i] = items": (20, {"n_envs": 1}, assign),
    "small items only": (60, {"compression_method": "none"}, extend_by(9)),
}


def check_points(name: str, error: type[BaseException], n_points: int) -> None:
    n_items, options, call = CALLS[name]
    original, following = pickle.dumps(filled(n_items, **options)), trajectory(5, 1, seed=3)
    done, undone = pickle.loads(original), pickle.loads(original)
    before, total = state(undone), count_bytecodes(call(done))
    ends = [(before, undone), (state(done), done)]
    for _, buffer in ends:
        buffer.extend(following.clone())
    outcomes = set()
    for number, at in enumerate(points(total, n_points)):
        buffer = pickle.loads(original)
        interrupt(call(buffer), at, error("here"))
        if number % 2:
            # otherwise the next write is the first use: it must recover by itself
            buffer.storage.check()
            assert any(same(state(buffer), end) for end, _ in ends), f"interrupted at {at} of {total}"
        buffer.extend(following.clone())
        buffer.storage.check()
        outcome = [same(state(buffer), state(expected)) for _, expected in ends]
        assert any(outcome), f"neither before nor after, interrupted at {at} of {total}"
        outcomes.add(outcome[1])
        assert buffer.sample().shape == (8,)
    assert outcomes == {False, True}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("name", CALLS)
def test_an_exception_anywhere_leaves_the_state_before_or_after_the_call(name: str, error: type[BaseException]) -> None:
    check_points(name, error, 40)


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_a_thousand_points_leaves_the_state_before_or_after_the_call(name: str) -> None:
    check_points(name, KeyboardInterrupt, 1000)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("name", ["extend while there is room", "extend that overwrites", "add that overwrites"])
def test_an_exception_anywhere_leaves_device_groups_before_or_after_the_call(
    name: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_observation, "stays_on_host", lambda device: False)
    monkeypatch.setattr(device_observation, "has_triton", lambda: True)
    assert isinstance(filled(5).storage.table.groups[0], DeviceGroup)
    check_points(name, error, 60)
