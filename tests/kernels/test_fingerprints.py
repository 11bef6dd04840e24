"""Prints of blocks: equal for equal blocks, and for no others; compiled and plain kernels agree."""

from __future__ import annotations

import numpy as np
import pytest

from sb3_extra_buffers.kernels.dispatch import has_numba
from sb3_extra_buffers.kernels.fingerprints import PAGE, WORDS, fingerprint_pages, fingerprints_of

RNG = np.random.default_rng(0)


def test_every_changed_byte_changes_the_prints_of_its_block_alone() -> None:
    data = RNG.integers(0, 256, 3 * PAGE + 100, np.uint8)
    before = fingerprints_of(data)
    for place in [*range(0, data.size, 97), data.size - 1]:
        data[place] ^= 1 << int(RNG.integers(8))
        after = fingerprints_of(data)
        assert (before != after).any(axis=1).tolist() == [block == place // PAGE for block in range(4)]
        before = after


def test_values_that_change_places_are_noticed() -> None:
    # what sums would miss: a done one step earlier, two rewards exchanged
    column = np.zeros(PAGE // 4, np.float32)
    found = set()
    for first in range(64):
        for second in range(first + 1, 64):
            column[[first, second]] = 1.0, 1.0
            found.add(fingerprints_of(column.view(np.uint8)).tobytes())
            column[[first, second]] = 0
    assert len(found) == 64 * 63 // 2


@pytest.mark.parametrize("size", [0, 1, 8, PAGE - 1, PAGE, 5 * PAGE + 3])
def test_arrays_of_any_kind_have_the_prints_of_their_bytes(size: int) -> None:
    room = RNG.integers(0, 256, size + 1, np.uint8)
    odd, aligned = room[1:], room[1:].copy()
    frozen = aligned.copy()
    frozen.flags.writeable = False

    assert fingerprints_of(aligned).shape == (-(-size // PAGE), 2)
    for other in (odd, frozen):
        np.testing.assert_array_equal(fingerprints_of(other), fingerprints_of(aligned))


@pytest.mark.skipif(not has_numba(), reason="needs numba")
def test_compiled_and_plain_prints_agree() -> None:
    from sb3_extra_buffers.kernels import fingerprints_numba

    words = RNG.integers(0, 1 << 64, (70, WORDS), np.uint64)
    keys = RNG.integers(0, 1 << 64, WORDS + 1, np.uint64)
    plain, compiled = np.zeros((70, 2), np.uint64), np.ones((70, 2), np.uint64)
    fingerprint_pages(words, keys, plain)
    fingerprints_numba.fingerprint_pages(words, keys, compiled)

    np.testing.assert_array_equal(plain, compiled)
