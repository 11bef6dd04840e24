"""`fingerprints.fingerprint_pages`, compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.jit import cached_njit

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@partial(cached_njit, nogil=True)
def fingerprint_pages(words: Any, keys: Any, out: Any) -> None:
    for page in range(words.shape[0]):
        first = second = np.uint64(0)
        for i in range(words.shape[1]):
            word, key, other = words[page, i], keys[i], keys[i + 1]
            high = word >> _HALF
            first += ((word + key) & _LOW) * ((high + (key >> _HALF)) & _LOW)
            second += ((word + other) & _LOW) * ((high + (other >> _HALF)) & _LOW)
        out[page, 0] = first
        out[page, 1] = second
