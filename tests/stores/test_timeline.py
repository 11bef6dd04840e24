"""Observations on one time axis: what a dict holds, under any order of writes."""

from __future__ import annotations

from typing import Any

import pytest

from sb3_extra_buffers.stores import timeline
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
