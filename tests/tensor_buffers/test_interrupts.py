"""A step that is interrupted anywhere leaves a `TensorReplayBuffer` unchanged, or is added completely."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from sb3_extra_buffers.stores.device_base import IndexBatch
from sb3_extra_buffers.tensor_buffers import TensorReplayBuffer
from tests.tensor_buffers.test_replay_buffer import assert_is_of, make
from tests.torture.interrupts import Injector


def contents(buffer: TensorReplayBuffer) -> dict[str, Any]:
    """Everything that can be read."""
    buffer.recover()
    held = np.arange(len(buffer))
    store = buffer._stores["obs"]
    found = {name: column.flatten(0, 1)[held].numpy() for name, column in buffer.columns.items()}
    found["obs"] = store.read(IndexBatch(np.stack([held, held + buffer.capacity]))).numpy()
    if buffer.alpha is not None:
        found["priorities"] = buffer.priorities.numpy()
    return {**found, "n_added": np.array(buffer.n_added)}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in left)


def interrupt_everywhere(n_added: int, n_points: int, **options: Any) -> None:
    filled, game = make(n_added=n_added, capacity=36, **options)
    saved, step, later = pickle.dumps(filled), game.step(), game.step()
    before, done = contents(pickle.loads(saved)), pickle.loads(saved)
    with Injector() as counter:
        done.add(step)
    after, seen = contents(done), set()
    for point in np.unique(np.linspace(1, counter.count, n_points).astype(int)).tolist():
        buffer = pickle.loads(saved)
        injector = Injector(point, MemoryError("injected") if point % 3 == 0 else KeyboardInterrupt())
        with contextlib.suppress(KeyboardInterrupt, MemoryError), injector:
            buffer.add(step)
        if not injector.where:
            break  # the first write took more bytecodes: something was cached
        whole = same(contents(buffer), after)
        assert whole or same(contents(buffer), before), injector.where
        seen.add(whole)
        buffer.check()
        if not whole:
            buffer.add(step)
        buffer.add(later)
        buffer.check()
        assert_is_of(buffer.sample(50), game, ["obs", "logits"])
    assert False in seen


@pytest.mark.parametrize("n_added", [0, 5, 11, 12, 30])
@pytest.mark.parametrize("options", [{}, {"alpha": 0.6, "n_steps": 3}, {"compression_method": "none"}])
def test_interrupted_steps(n_added: int, options: dict[str, Any]) -> None:
    interrupt_everywhere(n_added, 30, **options)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("n_added", [0, 3, 11, 30])
@pytest.mark.parametrize("options", [{"alpha": 0.6}, {"compression_method": "none"}])
def test_interrupted_steps_of_device_stores(n_added: int, options: dict[str, Any]) -> None:
    interrupt_everywhere(n_added, 25, **options)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("method", ["delta", "none", "auto"])
def test_device_stores_return_what_was_added(method: str) -> None:
    buffer, game = make(n_added=70, compression_method=method, alpha=0.5, image_dtype=torch.float16, scale=1.0)
    batch, names = buffer.sample(300), ["obs", "next_obs", "rewards", "dones", "logits"]

    assert_is_of(batch, game, names)
    assert set(batch["actions"].tolist()) <= set(range(150, 210))
    buffer.reset()
    buffer.add(game.step())
    buffer.check()
    assert_is_of(buffer.sample(9), game, names)


def test_an_interrupted_update_leaves_priorities_that_can_be_used() -> None:
    filled, game = make(n_added=25, alpha=0.6)
    saved, numbers = pickle.dumps(filled), torch.arange(20, 40)
    with Injector() as counter:
        pickle.loads(saved).update_priorities(numbers, numbers.float())
    for point in range(1, counter.count + 1, 29):
        buffer = pickle.loads(saved)
        with contextlib.suppress(KeyboardInterrupt), Injector(point, KeyboardInterrupt()):
            buffer.update_priorities(numbers, numbers.float())
        assert_is_of(buffer.sample(50), game, ["obs"])
        buffer.check()
        buffer.update_priorities(numbers, numbers.float())
        buffer.check()
        np.testing.assert_allclose(buffer.priorities.flatten()[20:40], (numbers.double() + 1e-6) ** 0.6, rtol=1e-12)
