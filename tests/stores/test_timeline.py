"""Observations on one time axis: what a dict holds, under any order of writes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.codecs import ObsSpec
from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.kernels.timeline import TimelineTables, rebuild, row_aside
from sb3_extra_buffers.stores import base, timeline
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.timeline import TimelineStore
from tests.contracts.store import KERNELS, poison_empty
from tests.contracts.store_contract import Case, StoreContract


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch, base, timeline)


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


def test_next_observations_that_follow_take_no_memory() -> None:
    rng = np.random.default_rng(0)
    walk = rng.integers(1, 256, (101, 2, 68)).astype(np.uint8)
    store = TimelineStore(Case("none", (68,)).layout, 2 * 100 * 2, 2)
    for step in range(100):
        store.write_step(2 * step, 200 + 2 * step, walk[step], walk[step + 1])
        store.check()
        assert store.n_aside <= 4  # of the newest step, and zeros before the first one
    np.testing.assert_array_equal(store.read(np.arange(200)), walk[:100].reshape(200, -1))
    np.testing.assert_array_equal(store.read(200 + np.arange(200)), walk[1:].reshape(200, -1))
    # flags of a fifth of a percent, and tables of fixed size
    assert store.memory_usage().index < 200 / 8 + 400


def test_nan_payloads_and_negative_zeros_are_different_values() -> None:
    values = np.array([0x7FC00000, 0x7FC00001, 0x80000000, 0x00000000], np.uint32).view(np.uint8).reshape(4, 1, 4)
    store = TimelineStore(Case("none", (4,)).layout, 8, 1)
    for step, (obs, following) in enumerate(itertools.product(range(4), repeat=2)):
        store.write_step(step % 4, 4 + step % 4, values[obs], values[following])
        assert store.read(np.array([step % 4]))[0].tobytes() == values[obs].tobytes()
        assert store.read(np.array([4 + step % 4]))[0].tobytes() == values[following].tobytes()
        store.check()


@pytest.mark.parametrize("n_streams", [1, 3])
def test_compiled_and_reference_kernels_keep_the_same_tables(n_streams: int) -> None:
    pytest.importorskip("numba")
    layout = Case("none", (2,)).layout
    stores = [TimelineStore(layout, 24, n_streams, compiled=compiled) for compiled in (True, False)]
    rng = np.random.default_rng(0)
    for _ in range(300):
        indices = rng.integers(0, 24, rng.integers(1, 6))
        # few values, so that many are equal by chance
        rows = rng.integers(0, 2, (len(indices), 2)).astype(np.uint8)
        for store in stores:
            store.write(indices, indices % n_streams, rows)
        for ours, theirs in zip(stores[0].tables, stores[1].tables, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        wanted = rng.integers(0, 24, 9)
        np.testing.assert_array_equal(stores[0].read(wanted), stores[1].read(wanted))
        n_steps = 12 // n_streams
        steps, streams = rng.integers(-n_steps, n_steps, 9), rng.integers(-n_streams, n_streams, 9)
        for are_next in (False, True):
            pairs = [store.read_pairs(steps, streams, are_next) for store in stores]
            expected = stores[0].read(12 * are_next + steps % n_steps * n_streams + streams % n_streams)
            np.testing.assert_array_equal(pairs[0], expected)
            np.testing.assert_array_equal(pairs[1], expected)


@pytest.mark.parametrize("compiled", KERNELS)
def test_an_index_out_of_range_is_an_error(compiled: bool) -> None:
    store = TimelineStore(Case("none", (2,)).layout, 24, 3, compiled=compiled)
    for index in (-1, 24, 1 << 40):
        with pytest.raises(IndexError, match=f"index {index} "):
            store.read(np.array([0, index]))
    for steps, streams in ((4, 0), (-5, 0), (0, 3), (0, -4)):
        with pytest.raises(IndexError, match="out of bounds"):
            store.read_pairs(np.array([0, steps]), np.array([0, streams]), are_next=True)


@pytest.mark.parametrize("compiled", KERNELS)
def test_rows_aside_are_found_and_removed_in_any_number(compiled: bool) -> None:
    n_each = 400
    store = TimelineStore(Case("none", (3,)).layout, 2 * n_each, 2, compiled=compiled)
    rng = np.random.default_rng(0)
    model = np.zeros((2 * n_each, 3), np.uint8)
    for _ in range(40):
        # multiples of a power of two would share one place of a simple hash table
        indices = n_each + rng.permutation(n_each // 8)[: rng.integers(1, 50)] * 8
        rows = rng.integers(0, 3, (len(indices), 1)).repeat(3, axis=1).astype(np.uint8)
        store.write(indices, indices % 2, rows)
        model[indices] = rows
        np.testing.assert_array_equal(store.read(np.arange(2 * n_each)), model)
        store.check()
    store.erase(np.arange(2 * n_each))
    assert store.n_aside == 0
    assert len(store.tables.keys) < 100  # memory was freed


@pytest.mark.parametrize("compiled", KERNELS)
def test_erasing_needs_no_space(compiled: bool) -> None:
    store = TimelineStore(Case("none", (3,)).layout, 24, 2, heap_bytes=12, compiled=compiled)
    store.write(np.arange(4), np.arange(4) % 2, np.ones((4, 3), np.uint8))

    store.erase(np.arange(2, 24))  # most of which was never written

    assert store.count_written() == 2


def saved(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    observations = ObservationStore(ObsSpec((2,), np.dtype(np.float32)), 2)
    observations.allocate(6)
    observations.allocate(6, are_next=True)
    for step in range(3):
        values = np.arange(4, dtype=np.float32).reshape(2, 2) + step
        rows, following = values.view(np.uint8), (values + (5 if step == 1 else 1)).view(np.uint8)
        observations.write_step(2 * step, 6 + 2 * step, rows, following)
    record, arrays, _, _ = observations.to_parts()
    arrays = {name: array.copy() for name, array in arrays.items()}
    for name, value in changes.items():
        if name in arrays:
            arrays[name] = value(arrays[name])
        else:
            record[name] = value(record[name])
    return record, arrays


def test_a_saved_store_is_restored() -> None:
    record, arrays = saved()
    assert record["kind"] == "timeline"
    store = ObservationStore.from_parts(record, arrays, lambda *_: None)
    assert isinstance(store.inner, TimelineStore)
    store.check()
    steps = np.arange(3, dtype=np.float32)[:, None, None] + np.arange(4, dtype=np.float32).reshape(2, 2)
    assert store.read(np.arange(6)).tobytes() == steps.tobytes()
    following = steps + np.array([1, 5, 1], np.float32)[:, None, None]
    assert store.read(6 + np.arange(6)).tobytes() == following.tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"n_each": lambda n: n + 1},
        {"n_each": lambda n: -n},
        {"n_each": lambda n: 0},
        {"n_each": lambda n: 10**9},
        {"n_each": lambda n: "6"},
        {"n_cells": lambda n: n + 2},
        {"n_streams": lambda n: 5},
        {"rows": lambda rows: rows[:-1]},
        {"rows": lambda rows: rows.astype(np.int8)},
        {"following": lambda keys: keys + 6},
        {"following": lambda keys: keys - 6},
        {"following": lambda keys: keys * 0},
        {"following": lambda keys: keys.astype(np.int32)},
        {"aside": lambda rows: rows[1:]},
        {"aside": lambda rows: rows[:, 1:]},
        {"choice": lambda choice: ["gzip1", ""]},
    ],
)
def test_files_are_not_trusted(changes: Any) -> None:
    record, arrays = saved(**changes)
    with pytest.raises(FileFormatError):
        ObservationStore.from_parts(record, arrays, lambda *_: None)


@pytest.mark.parametrize("count", [0, 1, 40, 400])
def test_a_rebuilt_table_finds_every_row(count: int) -> None:
    random = np.random.default_rng(count)
    # nearly full, and half of the keys next to each other, so that many want the same position
    keys = random.choice(np.append(np.arange(200), random.integers(200, 10_000, 800)), count, replace=False)
    keys = random.permutation(np.unique(keys))
    tables = TimelineTables(
        rows=np.zeros((0, 4), np.uint8), is_aside=np.full(1250, 0xAA, np.uint8), slots=np.full(512, 7, np.int32),
        keys=keys, aside=np.zeros((len(keys), 4), np.uint8), counters=np.array([len(keys), 10_000, 1, 0]),
    )  # fmt: skip
    rebuild(tables)
    assert [row_aside(tables, key) for key in keys.tolist()] == list(range(len(keys)))
    assert np.flatnonzero(np.unpackbits(tables.is_aside, bitorder="little")).tolist() == sorted(keys.tolist())
    assert np.count_nonzero(tables.slots) == len(keys)
