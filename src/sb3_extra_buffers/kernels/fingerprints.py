"""Fingerprints of pages, which tell a changed page without a copy of its old contents.

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

#: bytes of a page: each has its own fingerprint, and is saved as a whole
PAGE = 1 << 12
WORDS = PAGE // 8

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def fingerprints_of(data: Bytes, pages: npt.NDArray[np.int64] | None = None) -> Words:
    """Fingerprints of all pages of ``data``, or of some, as ``[page, 2]``. A short last page is padded with zeros."""
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
        data = data.copy()  # the compiled kernel knows one kind of array
    return data.view(np.uint64).reshape(-1, WORDS)


def fingerprint_pages(words: Words, keys: Words, out: Words) -> None:
    """Reference kernel: set ``out[i]`` to the fingerprint of ``words[i]``."""
    for first in range(0, len(words), 64):
        part = words[first : first + 64]
        low, high = part & _LOW, part >> _HALF
        for place in range(2):
            key = keys[place : place + WORDS]
            products = ((low + (key & _LOW)) & _LOW) * ((high + (key >> _HALF)) & _LOW)
            out[first : first + 64, place] = products.sum(axis=1, dtype=np.uint64)


@cache
def _keys() -> Words:
    return np.frombuffer(bytearray(os.urandom(8 * (WORDS + 1))), np.uint64)


@cache
def _kernel() -> Any:
    if not has_numba():
        return fingerprint_pages
    return importlib.import_module("sb3_extra_buffers.kernels.fingerprints_numba").fingerprint_pages
