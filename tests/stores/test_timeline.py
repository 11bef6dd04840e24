"""Observations on one time axis: what a dict holds, under any order of writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.stores import timeline
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.timeline import TimelineStore
from tests.contracts.store import KERNELS, poison_empty
from tests.contracts.store_contract import Case, StoreContract


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch, timeline)


CASES = [
    pytest.param(Case("none", (5, 7)), id="3 streams"),
    pytest.param(Case("none", (4,), n_streams=1), id="1 stream"),
    pytest.param(Case("none", (3,), n_streams=12), id="a single step"),
    pytest.param(Case("none", (3,), n_streams=5), id="rows that are neither"),
]


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("case", CASES)
class TestTimeline(StoreContract):
    def make(self, case: Case, compiled: bool, n_obs: int = 24, **options: Any) -> Any:
        return TimelineStore(case.layout, n_obs, case.n_streams, compiled=compiled, **options)


@pytest.mark.parametrize("n_streams", [1, 3])
def test_written_indices_are_found_without_reading_all(n_streams: int) -> None:
    n_each = 8 * n_streams
    store = TimelineStore(StackLayout(ObsSpec((5,), np.dtype(np.uint8))), 2 * n_each, n_streams)
    rng = np.random.default_rng(0)
    for index in rng.permutation(2 * n_each)[: n_each + 3]:
        store.write(np.array([index]), np.array([0]), rng.integers(1, 256, (1, 5)).astype(np.uint8))
        written = np.flatnonzero(store.read(np.arange(2 * n_each)).any(axis=1))
        assert np.isin(written, store.find_written()).all()
        assert store.count_written() == len(written)
