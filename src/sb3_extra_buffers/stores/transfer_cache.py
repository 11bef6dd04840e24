"""Keyframes that a receiver of packets keeps, so that they are sent once."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_FINGERPRINT_BYTES = 16


class KeyframeCache:
    """The most recently received keyframes, dictionaries and codecs, by fingerprint, up to a limit.

    A request contains the fingerprints of a `lease`, so that the sender leaves these parts out of its answer. A lease
    keeps its parts, even if the cache drops them in the meantime. Any number of threads may use a cache.
    """

    def __init__(self, max_entries: int = 1024, max_bytes: int = 64 << 20) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[bytes, Bytes] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def lease(self) -> Lease:
        """Return the current contents of the cache, for one request and its answer."""
        with self._lock:
            return Lease(self, dict(self._entries))

    def add(self, mark: bytes, part: Bytes) -> None:
        """Add ``part``; if the cache is full, the least recently used parts are dropped."""
        with self._lock:
            if mark not in self._entries:
                self._entries[mark] = part
                self._nbytes += part.nbytes
                while len(self._entries) > self.max_entries or self._nbytes > self.max_bytes:
                    self._nbytes -= self._entries.popitem(last=False)[1].nbytes

    def touch(self, mark: bytes) -> None:
        """Mark the part with the fingerprint ``mark`` as just used."""
        with self._lock:
            if mark in self._entries:
                self._entries.move_to_end(mark)


class Lease:
    """The contents of a `KeyframeCache` when a packet was requested."""

    def __init__(self, cache: KeyframeCache, entries: dict[bytes, Bytes]) -> None:
        self._cache, self._entries = cache, entries

    @property
    def known(self) -> bytes:
        """All fingerprints, concatenated, to send with the request; see `split_known`."""
        return b"".join(self._entries)

    def get(self, mark: bytes) -> Bytes | None:
        """The part with this fingerprint."""
        self._cache.touch(mark)
        return self._entries.get(mark)

    def add(self, mark: bytes, part: Bytes) -> Bytes:
        """Add a copy of a received part to the cache; return the copy."""
        part = part.copy()
        self._cache.add(mark, part)
        return part


def split_known(known: bytes) -> frozenset[bytes]:
    """Return the fingerprints in `Lease.known`, which is not trusted."""
    return frozenset(known[at : at + _FINGERPRINT_BYTES] for at in range(0, len(known), _FINGERPRINT_BYTES))
