"""Fingerprints of pages, which reveal changed pages without a copy of their old contents.

A fingerprint is two NH hashes (the hash inside UMAC) under random keys: two different pages collide with a probability
of at most 2**-64.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.kernels.dispatch import has_numba

#: bytes per page, the unit of fingerprints and of incremental saves
PAGE = 1 << 12
WORDS = PAGE // 8

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def fingerprints_of(data: Bytes, pages: npt.NDArray[np.int64] | None = None) -> Words:
    """Return the fingerprints of all or some pages of ``data`` as ``[page, 2]``; a short last page is zero-padded."""
    n_whole, count = data.size // PAGE, -(-data.size // PAGE)
    last = count > n_whole and (pages is None or count - 1 in pages)
    words = _as_words(data[: n_whole * PAGE])
    if pages is not None:
        words = words[pages[pages < n_whole]]
    out: Words = np.empty((len(words) + last, 2), np.uint64)
    _kernel()(words, _keys(), out[: len(words)])
    if last:
        rest = np.zeros(PAGE, np.uint8)
        rest[: data.size - n_whole * PAGE] = data[n_whole * PAGE :]
        _kernel()(_as_words(rest), _keys(), out[-1:])
    return out


def _as_words(data: Bytes) -> Words:
    if not data.flags.writeable or data.ctypes.data % 8:
        data = data.copy()  # the compiled kernel is compiled for one kind of array
    return data.view(np.uint64).reshape(-1, WORDS)


def fingerprint_pages(words: Words, keys: Words, out: Words) -> None:
    """Reference kernel: set ``out[i]`` to the fingerprint of ``words[i]``."""
    for first in range(0, len(words), 64):
        part = words[first : first + 64]
        low, high = part & _LOW, part >> _HALF
        for i in range(2):
            key = keys[i : i + WORDS]
            products = ((low + (key & _LOW)) & _LOW) * ((high + (key >> _HALF)) & _LOW)
            out[first : first + 64, i] = products.sum(axis=1, dtype=np.uint64)


@cache
def _keys() -> Words:
    return np.frombuffer(bytearray(os.urandom(8 * (WORDS + 1))), np.uint64)


@cache
def _kernel() -> Any:
    if not has_numba():
        return fingerprint_pages
    return importlib.import_module("sb3_extra_buffers.kernels.fingerprints_numba").fingerprint_pages
