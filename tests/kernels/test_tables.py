"""Tables: compiled kernels do what the reference does, for any bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb3_extra_buffers.kernels import has_numba, tables
from sb3_extra_buffers.kernels.tables import ENTRIES, CodeHash, codes_of, hash_codes, line_hash, table_kernels
from tests.contracts.store import KERNELS, UNWRITTEN, examples

# bytes per unit, units, and units in a plane (0: the bytes of a unit are together)
SHAPES = [
    (3, 1, 0),
    (3, 200, 0),
    (3, 210, 70),
    (3, 512, 256),
    (3, 400, 200),
    (4, 65, 0),
    (4, 128, 64),
    (4, 4, 1),
    (2, 130, 0),
    (8, 77, 0),
]


def make_table(unit: int, n_codes: int, seed: int = 0) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
    """Distinct codes with random bits, zero among them, and the table to expand them from."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, 256, (4 * n_codes, 8), np.uint8)
    drawn[:, unit:] = 0
    drawn[0] = 0
    codes = drawn.view("<u8")[:, 0].astype(np.uint64)
    codes = codes[np.sort(np.unique(codes, return_index=True)[1])][:n_codes]
    table = np.zeros(ENTRIES, "<u8")
    table[: len(codes)] = codes
    return codes, table.view(np.uint8)


def find(codes: npt.NDArray[np.uint64]) -> CodeHash:
    return hash_codes(codes, np.arange(len(codes), dtype=np.uint8))


@pytest.mark.parametrize("n_codes", [1, 2, 37, 180, 250, 256])
def test_lines_of_pixels_have_a_hash_without_collisions(n_codes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "has_line_hashes", lambda: True)
    codes, _ = make_table(3, n_codes)
    hashed = line_hash(codes, np.arange(n_codes, dtype=np.uint8))
    assert hashed[-1] == 1
    matrices = hashed[2 * ENTRIES : -1].reshape(2, 3, 8)
    # as the processor's manual has it: bit i is the parity of the bits that byte 7 - i of the matrix selects
    sums = np.zeros((2, n_codes), np.int64)
    for k in range(3):
        part = (codes >> np.uint64(8 * k)).astype(np.uint8)
        for bit in range(8):
            selected = matrices[:, k, 7 - bit][:, None] & part
            sums ^= (np.unpackbits(selected[..., None], axis=-1).sum(axis=-1) & 1).astype(np.int64) << bit
    slots = sums[1] ^ hashed[sums[0]]
    assert len(np.unique(slots)) == n_codes
    np.testing.assert_array_equal(hashed[ENTRIES + slots], np.arange(n_codes))


def test_only_pixels_of_three_bytes_have_a_hash_for_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "has_line_hashes", lambda: True)
    codes, _ = make_table(4, 9)
    assert not line_hash(codes, np.arange(9, dtype=np.uint8)).any()


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("n_codes", [1, 2, 37, 256])
@pytest.mark.parametrize(("unit", "n_units", "plane"), SHAPES)
def test_rows_are_mapped_and_expanded_again(unit: int, n_units: int, plane: int, n_codes: int, compiled: bool) -> None:
    kernels, (codes, table) = table_kernels(compiled), make_table(unit, n_codes)
    indices = np.random.default_rng(1).integers(0, len(codes), (5, n_units)).astype(np.uint8)
    guarded = np.full((7, n_units * unit), UNWRITTEN, np.uint8)
    kernels.expand_rows(np.concatenate([indices[:1], indices, indices[:1]]), table, unit, plane, 1, 6, guarded)
    assert (guarded[[0, 6]] == UNWRITTEN).all()
    rows = guarded[1:6].copy()
    np.testing.assert_array_equal(codes_of(rows, unit, plane), codes[indices])

    out, outside = np.full_like(indices, UNWRITTEN), np.zeros(5, np.uint8)
    assert kernels.map_rows(rows, *find(codes), table, unit, plane, 0, False, out, outside) == 5
    np.testing.assert_array_equal(out, indices)
    assert not outside.any()


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize(("unit", "n_units", "plane"), SHAPES)
def test_an_unknown_unit_anywhere_is_noticed(unit: int, n_units: int, plane: int, compiled: bool) -> None:
    kernels, (codes, table) = table_kernels(compiled), make_table(unit, 40)
    known, unknown = find(codes[:30]), 35
    for position in {0, n_units // 2, n_units - 1}:
        indices = np.zeros((3, n_units), np.uint8)
        indices[1, position] = unknown
        rows = np.empty((3, n_units * unit), np.uint8)
        kernels.expand_rows(indices, table, unit, plane, 0, 3, rows)
        out, outside = np.full_like(indices, UNWRITTEN), np.zeros(3, np.uint8)

        assert kernels.map_rows(rows, *known, table, unit, plane, 0, False, out, outside) == 1
        assert kernels.map_rows(rows, *known, table, unit, plane, 0, True, out, outside) == 3
        assert outside.tolist() == [0, 1, 0]
        assert not out.any()
        step, none = np.empty((6, n_units), np.uint8), np.empty((0, n_units), np.uint8)
        assert not kernels.map_step(rows, rows, *known, table, unit, plane, none, False, step)


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize(("unit", "n_units", "plane"), SHAPES)
def test_steps_are_mapped_with_and_without_a_guess(unit: int, n_units: int, plane: int, compiled: bool) -> None:
    kernels, (codes, table), rng = table_kernels(compiled), make_table(unit, 9), np.random.default_rng(2)
    hashed = find(codes)
    out, guess = np.empty((4, n_units), np.uint8), np.empty((2, n_units), np.uint8)
    indices = rng.integers(0, 9, (2, n_units)).astype(np.uint8)
    for step in range(6):
        before, indices = indices, indices.copy()
        indices[:, : n_units * (step % 3) // 2] ^= 1
        if step == 4:
            before = rng.integers(0, 9, (2, n_units)).astype(np.uint8)  # not what came next in the last step
        indices %= 9
        rows = np.empty((4, n_units * unit), np.uint8)
        kernels.expand_rows(np.concatenate([before, indices]), table, unit, plane, 0, 4, rows)

        assert kernels.map_step(rows[:2].copy(), rows[2:].copy(), *hashed, table, unit, plane, guess, step > 0, out)

        np.testing.assert_array_equal(out, np.concatenate([before, indices]))
        np.testing.assert_array_equal(guess, indices)


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
@examples(60)
@given(data=st.data(), shape=st.sampled_from(SHAPES), n_codes=st.integers(1, 256), closed=st.booleans())
def test_compiled_kernels_agree_with_the_reference(data: Any, shape: Any, n_codes: int, closed: bool) -> None:
    unit, n_units, plane = shape
    codes, table = make_table(unit, n_codes, data.draw(st.integers(0, 5)))
    hashed = find(codes)
    rows = np.frombuffer(data.draw(st.binary(min_size=2 * n_units * unit, max_size=2 * n_units * unit)), np.uint8)
    rows = rows.reshape(2, -1).copy()
    results = []
    for compiled in (True, False):
        out, outside = np.zeros((2, n_units), np.uint8), np.zeros(2, np.uint8)
        stop = table_kernels(compiled).map_rows(rows, *hashed, table, unit, plane, 0, closed, out, outside)
        results.append((stop, out[:stop].tolist(), outside.tolist()))
    assert results[0] == results[1]


@examples(100)
@given(codes=st.sets(st.integers(0, 2**64 - 1), min_size=1, max_size=256))
def test_any_codes_of_eight_bytes_are_found_and_no_others(codes: set[int]) -> None:
    wanted = np.array(sorted(codes), np.uint64)
    hashed, table = find(wanted), np.zeros(ENTRIES, "<u8")
    table[: len(wanted)] = wanted
    others = np.array([0, 1, 2**64 - 1, *(code ^ 1 for code in codes)], np.uint64)
    tried = np.concatenate([wanted, others[~np.isin(others, wanted)]])
    rows = tried.astype("<u8").view(np.uint8).reshape(-1, 8)
    out, outside = np.zeros((len(rows), 1), np.uint8), np.zeros(len(rows), np.uint8)
    table_kernels(False).map_rows(rows, *hashed, table.view(np.uint8), 8, 0, 0, True, out, outside)
    assert outside.tolist() == [0] * len(wanted) + [1] * (len(tried) - len(wanted))
    assert out[: len(wanted), 0].tolist() == list(range(len(wanted)))
