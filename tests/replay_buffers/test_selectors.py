"""Selectors draw windows with the probabilities that they promise, whatever was added, removed and prioritised."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_extra_buffers.errors import ArgumentError, EmptyBufferError, PriorityError
from sb3_extra_buffers.replay_buffers.selectors import Fifo, Mixture, Prioritized, Recency, Uniform

N_DRAWS = 4000


def step_ids(stream: int, start: int, length: int) -> Any:
    """Ids of consecutive steps of a stream."""
    ids = np.zeros((length, 20), np.uint8)
    ids[:, 0] = stream
    ids[:, 16:] = np.arange(start, start + length, dtype=">u4")[:, None].view(np.uint8)
    return ids


def shares(selector: Any) -> dict[int, float]:
    counts = collections.Counter(selector() for _ in range(N_DRAWS))
    return {window: count / N_DRAWS for window, count in counts.items()}


def assert_close(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() <= {window for window, share in expected.items() if share > 0}
    for window, share in expected.items():
        assert abs(found.get(window, 0) - share) < 5 * np.sqrt(share * (1 - share) / N_DRAWS) + 1e-9


def test_uniform_draws_what_is_there() -> None:
    selector = Uniform(seed=3)
    for window in range(20):
        selector[window] = None
        selector[window] = None  # adding or removing one twice has no further effect
    for window in range(12):
        del selector[window]
        del selector[window]

    assert len(selector) == 8
    assert_close(shares(selector), dict.fromkeys(range(12, 20), 1 / 8))


@pytest.mark.parametrize("n_windows", [5, 40])
def test_recency_draws_by_age(n_windows: int) -> None:
    weights = 1.0 / np.arange(1, 21)
    selector = Recency(weights, seed=3)
    for window in range(n_windows):
        selector[window] = None
    count = min(n_windows, 20)
    expected = weights[:count] / weights[:count].sum()

    assert_close(shares(selector), {n_windows - 1 - age: float(share) for age, share in enumerate(expected)})


def test_mixtures_draw_in_their_fractions() -> None:
    selector = Mixture(
        {"fifo": Fifo(), "uniform": Uniform(), "unused": Recency([1.0])}, {"fifo": 0.5, "uniform": 0.5, "unused": 0}
    )
    for window in range(4):
        selector[window] = None

    assert not selector.needs_step_ids
    assert len(selector.selectors) == 2
    assert_close(shares(selector), {0: 0.5 + 0.125, 1: 0.125, 2: 0.125, 3: 0.125})


class Plain:
    """Priorities by step in a dict."""

    def __init__(self, exponent: float, initial: float, maxfrac: float) -> None:
        self.exponent, self.initial, self.maxfrac = exponent, initial, maxfrac
        self.windows: dict[int, list[bytes]] = {}
        self.priorities: dict[bytes, float] = {}

    def add(self, window: int, ids: Any) -> None:
        self.windows[window] = [step.tobytes() for step in ids]
        for step in self.windows[window]:
            self.priorities.setdefault(step, self.initial)

    def remove(self, window: int) -> None:
        del self.windows[window]
        held = {step for steps in self.windows.values() for step in steps}
        self.priorities = {step: value for step, value in self.priorities.items() if step in held}

    def shares(self) -> dict[int, float]:
        values = {}
        for window, steps in self.windows.items():
            powers = [self.priorities[step] ** self.exponent for step in steps]
            mean = sum(powers) / len(powers)
            values[window] = self.maxfrac * max(powers) + (1 - self.maxfrac) * mean if self.maxfrac else mean
        if any(np.isinf(value) for value in values.values()):
            values = {window: float(np.isinf(value)) for window, value in values.items()}
        total = sum(values.values())
        return {window: value / total if total else 1 / len(values) for window, value in values.items()}


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 5),
    capacity=st.integers(1, 100),
    exponent=st.sampled_from([0.5, 1.0]),
    initial=st.sampled_from([1.0, 0.0, np.inf]),
    maxfrac=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
)
def test_priorities_equal_those_of_a_dict_of_steps(
    length: int, capacity: int, exponent: float, initial: float, maxfrac: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    selector, model = Prioritized(exponent, initial, maxfrac=maxfrac, seed=seed), Plain(exponent, initial, maxfrac)
    counts = [0, 0, 0]
    for window in range(150):
        stream = int(rng.integers(3))
        ids = step_ids(stream, counts[stream], length)
        counts[stream] += 1
        selector[window] = ids
        model.add(window, ids)
        if len(model.windows) > capacity:
            oldest = window - capacity
            del selector[oldest]
            model.remove(oldest)
        if rng.random() < 0.3:
            steps = list(model.priorities)
            chosen = [steps[i] for i in rng.integers(len(steps), size=5)]
            values = rng.integers(0, 4, 5).astype(float)
            selector.prioritize([*chosen, b"x" * 20], [*values, 9.0])  # no window has the last one
            model.priorities.update(zip(chosen, values, strict=True))
    assert len(selector) == len(model.windows)
    assert len(selector._row_of) == len(model.priorities)
    # exactly: draws would have to be very many
    tree = selector._infinite if selector._infinite.total else selector._finite
    expected = model.shares()
    if tree.total:
        leaves = tree.read(np.array(list(expected)) % len(selector._rows))
        np.testing.assert_allclose(leaves / tree.total, list(expected.values()), atol=1e-12)
    assert all(expected[selector()] > 0 for _ in range(20))


def test_windows_that_were_drawn_wait_for_a_new_priority() -> None:
    selector = Prioritized(initial=np.inf, zero_on_sample=True)
    for window in range(10):
        selector[window] = step_ids(0, 2 * window, 2)  # windows without common steps

    assert sorted(selector() for _ in range(10)) == list(range(10))
    selector.prioritize(step_ids(0, 6, 2), [1.0, 1.0])
    assert selector() == 3


def test_invalid_arguments_and_empty_selectors_are_named() -> None:
    for wrong in ([1.0, 2.0], [], [np.nan], [0.0]):
        with pytest.raises(ArgumentError):
            Recency(wrong)
    with pytest.raises(ArgumentError):
        Mixture({"fifo": Fifo()}, {"fifo": 0.5})
    with pytest.raises(ArgumentError):
        Prioritized(maxfrac=2)
    with pytest.raises(EmptyBufferError):
        Uniform()()
    selector = Prioritized()
    selector[0] = step_ids(0, 0, 2)
    for values in ([np.nan, 1.0], [-1.0, 1.0], [1.0]):
        with pytest.raises(PriorityError):
            selector.prioritize(step_ids(0, 0, 2), values)
