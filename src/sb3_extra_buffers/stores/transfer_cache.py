"""Keyframes that a receiver of packets keeps, so that they are sent once."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_FINGERPRINT_BYTES = 16


class KeyframeCache:
    """The keyframes, dictionaries and codecs that were received last, by fingerprint; bounded.

    `lease` names them to the sender, which leaves them out of its answer. A lease holds on to what it named, whatever
    the cache drops in the meantime. Any number of threads may use a cache.
    """

    def __init__(self, max_entries: int = 1024, max_bytes: int = 64 << 20) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[bytes, Bytes] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def lease(self) -> Lease:
        """Return what the cache has now, for one request and its answer."""
        with self._lock:
            return Lease(self, dict(self._entries))

    def add(self, mark: bytes, part: Bytes) -> None:
        """Keep ``part``; the ones that were not used for longest are dropped."""
        with self._lock:
            if mark not in self._entries:
                self._entries[mark] = part
                self._nbytes += part.nbytes
                while len(self._entries) > self.max_entries or self._nbytes > self.max_bytes:
                    self._nbytes -= self._entries.popitem(last=False)[1].nbytes

    def touch(self, mark: bytes) -> None:
        """Count ``mark`` as just used."""
        with self._lock:
            if mark in self._entries:
                self._entries.move_to_end(mark)


class Lease:
    """What a `KeyframeCache` had when a packet was asked for."""

    def __init__(self, cache: KeyframeCache, entries: dict[bytes, Bytes]) -> None:
        self._cache, self._entries = cache, entries

    @property
    def known(self) -> bytes:
        """All fingerprints, one after the other, to be sent with the request; see `split_known`."""
        return b"".join(self._entries)

    def get(self, mark: bytes) -> Bytes | None:
        """The part with this fingerprint."""
        self._cache.touch(mark)
        return self._entries.get(mark)

    def add(self, mark: bytes, part: Bytes) -> Bytes:
        """Keep a copy of a part that was received; return it."""
        part = part.copy()
        self._cache.add(mark, part)
        return part


def split_known(known: bytes) -> frozenset[bytes]:
    """The fingerprints of `Lease.known`, which is not trusted."""
    return frozenset(known[at : at + _FINGERPRINT_BYTES] for at in range(0, len(known), _FINGERPRINT_BYTES))
