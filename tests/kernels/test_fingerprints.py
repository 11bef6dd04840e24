"""Fingerprints of pages: equal for equal pages only; compiled and reference kernels agree."""

from __future__ import annotations

import numpy as np
import pytest

from sb3_extra_buffers.kernels.dispatch import has_numba
from sb3_extra_buffers.kernels.fingerprints import PAGE, WORDS, fingerprint_pages, fingerprints_of

RNG = np.random.default_rng(0)


def test_changed_byte_changes_the_fingerprint_of_its_page_only() -> None:
    data = RNG.integers(0, 256, 3 * PAGE + 100, np.uint8)
    before = fingerprints_of(data)
    for offset in [*range(0, data.size, 97), data.size - 1]:
        data[offset] ^= 1 << int(RNG.integers(8))
        after = fingerprints_of(data)
        assert (before != after).any(axis=1).tolist() == [page == offset // PAGE for page in range(4)]
        before = after


def test_swapped_values_are_noticed() -> None:
    # sums would miss these: a done one step earlier, two rewards exchanged
    column = np.zeros(PAGE // 4, np.float32)
    distinct = set()
    for first in range(64):
        for second in range(first + 1, 64):
            column[[first, second]] = 1.0, 1.0
            distinct.add(fingerprints_of(column.view(np.uint8)).tobytes())
            column[[first, second]] = 0
    assert len(distinct) == 64 * 63 // 2


@pytest.mark.parametrize("size", [0, 1, 8, PAGE - 1, PAGE, 5 * PAGE + 3])
def test_fingerprints_depend_on_the_bytes_only(size: int) -> None:
    padded = RNG.integers(0, 256, size + 1, np.uint8)
    odd, aligned = padded[1:], padded[1:].copy()
    frozen = aligned.copy()
    frozen.flags.writeable = False

    assert fingerprints_of(aligned).shape == (-(-size // PAGE), 2)
    for other in (odd, frozen):
        np.testing.assert_array_equal(fingerprints_of(other), fingerprints_of(aligned))


@pytest.mark.skipif(not has_numba(), reason="needs numba")
def test_compiled_and_reference_kernels_agree() -> None:
    from sb3_extra_buffers.kernels import fingerprints_numba

    words = RNG.integers(0, 1 << 64, (70, WORDS), np.uint64)
    keys = RNG.integers(0, 1 << 64, WORDS + 1, np.uint64)
    reference, compiled = np.zeros((70, 2), np.uint64), np.ones((70, 2), np.uint64)
    fingerprint_pages(words, keys, reference)
    fingerprints_numba.fingerprint_pages(words, keys, compiled)

    np.testing.assert_array_equal(reference, compiled)
