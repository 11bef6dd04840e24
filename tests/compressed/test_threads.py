"""Threads that sample while another one adds get whole transitions."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces

from sb3_extra_buffers.compressed import (
    CompressedNStepReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
)

IMAGE = spaces.Box(0, 255, (4, 20, 16), np.uint8)
ACTION = spaces.Box(-1e9, 1e9, (1,), np.float32)
N_ENVS, GAMMA = 2, 0.5


@pytest.fixture(autouse=True)
def _switch_threads_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def observation(number: int) -> npt.NDArray[np.uint8]:
    """A stack whose frames tell their number, for each environment."""
    frames = np.zeros((N_ENVS, 4, 20, 16), np.uint8)
    for plane in range(4):
        frame = number + plane
        frames[:, plane, 0, :3] = frame & 255, frame >> 8 & 255, frame >> 16
        frames[:, plane, 1 + frame % 19] = frame % 251
    return frames


def add(buffer: Any, number: int) -> None:
    values = np.full((N_ENVS, 1), number, np.float32)
    infos: list[dict[str, Any]] = [{}] * N_ENVS
    buffer.add(observation(number), observation(number + 1), values, values[:, 0], np.zeros(N_ENVS), infos)


def number_of(image: npt.NDArray[np.uint8]) -> int:
    number = int(image[0, 0, 0]) | int(image[0, 0, 1]) << 8 | int(image[0, 0, 2]) << 16
    np.testing.assert_array_equal(image, observation(number)[0])
    return number


def check_batch(batch: Any) -> None:
    for index, image in enumerate(batch.observations.numpy()):
        number, last = number_of(image), number_of(batch.next_observations[index].numpy()) - 1
        assert batch.actions[index, 0] == number
        n_steps = last - number + 1
        assert batch.rewards[index, 0] == sum(GAMMA**offset * (number + offset) for offset in range(n_steps))
        if batch.discounts is not None:
            assert batch.discounts[index, 0] == GAMMA**n_steps


@pytest.mark.same_without_extras
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (CompressedReplayBuffer, {}),
        (CompressedReplayBuffer, {"optimize_memory_usage": True}),
        (CompressedReplayBuffer, {"max_bytes": 30_000}),
        (CompressedNStepReplayBuffer, {"n_steps": 3, "gamma": GAMMA}),
        (CompressedPrioritizedReplayBuffer, {}),
        (CompressedPrioritizedReplayBuffer, {"n_steps": 3, "gamma": GAMMA}),
    ],
    ids=["replay", "optimized", "evicting", "n-step", "prioritized", "prioritized-n-step"],
)
def test_samples_beside_a_writer_are_whole_transitions(cls: Any, options: dict[str, Any]) -> None:
    # a short ring: drawn steps are often overwritten while they are read
    buffer = cls(12 * N_ENVS, IMAGE, ACTION, "cpu", n_envs=N_ENVS, compression_method="delta", **options)
    for number in range(20):
        add(buffer, number)
    stop, errors, n_batches = threading.Event(), [], [0, 0, 0]

    def sample(reader: int) -> None:
        try:
            while not stop.is_set():
                check_batch(buffer.sample(8))
                n_batches[reader] += 1
        except BaseException as error:
            errors.append(error)
            stop.set()

    readers = [threading.Thread(target=sample, args=(reader,)) for reader in range(len(n_batches))]
    for reader in readers:
        reader.start()
    start, number = time.monotonic(), 20
    while not stop.is_set() and (time.monotonic() < start + 1.5 or min(n_batches) == 0):
        add(buffer, number)
        number += 1
    stop.set()
    for reader in readers:
        reader.join()
    if errors:
        raise errors[0]
    assert number > 40


def test_sampling_does_not_hold_the_lock_while_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = CompressedReplayBuffer(40, IMAGE, ACTION, "cpu", n_envs=N_ENVS, compression_method="delta")
    for number in range(10):
        add(buffer, number)
    read = buffer._samples_at
    still_running: list[bool] = []

    def add_meanwhile(*args: Any) -> Any:
        adder = threading.Thread(target=add, args=(buffer, 10))
        adder.start()
        adder.join(timeout=30)
        still_running.append(adder.is_alive())
        return read(*args)

    monkeypatch.setattr(buffer, "_samples_at", add_meanwhile)
    check_batch(buffer.sample(8))
    assert still_running == [False]
    assert buffer.n_added == 11
