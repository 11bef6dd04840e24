"""Every store on the host keeps the contract, with compiled and with reference kernels."""

from __future__ import annotations

import contextlib

import pytest

from sb3_extra_buffers.codecs import get_codec
from sb3_extra_buffers.errors import MissingExtraError
from sb3_extra_buffers.stores import (
    base,
    frame_tables,
    frames,
    layout,
    payloads,
    raw,
    segment_format,
    segments,
    tables,
    unit_table,
)
from sb3_extra_buffers.stores.registry import STORES, find_store
from tests.contracts.store import KERNELS, poison_empty
from tests.contracts.store_contract import CASES, Case, StoreContract


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(
        monkeypatch, base, frame_tables, frames, layout, payloads, raw, segment_format, segments, tables, unit_table
    )


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("case", CASES)
class TestHostStores(StoreContract):
    pass


def test_every_store_of_the_registry_is_tested() -> None:
    cases: list[Case] = [case.values[0] for case in CASES]  # type: ignore[misc]
    tested = set()
    for case in cases:
        with contextlib.suppress(MissingExtraError):  # its cases are skipped
            tested.add(find_store(get_codec(case.method), case.layout))
    assert tested == {entry.load() for entry in STORES if entry.place == "cpu"}
