"""How many environments take turns in the items of a storage, found from the first of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from sb3_extra_buffers._torchrl.indexing import Positions
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.stores.layout import find_layout

__all__ = ["PROBE_ROWS", "EnvProbe", "find_n_envs"]

#: Number of rows that are enough to count the environments.
PROBE_ROWS = 128
_MAX_ENVS = 64


class EnvProbe:
    """The first rows of a storage, until there are enough to count the environments. Immutable.

    Immutable so that a write that fails can restore the probe from before it.
    """

    def __init__(self, spec: ObsSpec, n_rows: int, parts: tuple[list[ByteRows], ...] = (), count: int = 0) -> None:
        self.spec = spec
        #: rows that were written so far
        self.count = count
        self._n_needed = min(PROBE_ROWS, n_rows)
        self._parts = parts

    def extend(self, positions: Positions, batches: Sequence[ByteRows]) -> int | EnvProbe:
        """Return the number of environments if there are enough rows now, else a probe that includes these rows.

        The number is 1 for rows that are not written in order.
        """
        if not np.array_equal(positions, np.arange(self.count, self.count + len(positions))):
            return 1
        part = [rows[: PROBE_ROWS - self.count].copy() for rows in batches]
        probe = EnvProbe(self.spec, self._n_needed, (*self._parts, part), self.count + len(positions))
        return probe.decide() if probe.count >= self._n_needed else probe

    def decide(self) -> int:
        """Return the number of environments, estimated from the rows so far."""
        if not self._parts:
            return 1
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        return find_n_envs(self.spec, columns[0], columns[1] if len(columns) > 1 else None)


def find_n_envs(spec: ObsSpec, rows: ByteRows, next_rows: ByteRows | None) -> int:
    """Return how many environments take turns in ``rows``: 1 if consecutive rows belong to the same one.

    A wrong answer only costs memory.
    """
    limit = min(_MAX_ENVS, len(rows) // 2)
    if next_rows is None:
        for n_envs in range(1, limit + 1):
            if find_layout(spec, [rows[env::n_envs] for env in range(n_envs)]).stack > 1:
                return n_envs
        return 1
    checksums = np.array([zlib.crc32(row) for row in rows])
    next_checksums = np.array([zlib.crc32(row) for row in next_rows])
    # the next observation of an environment equals its following observation, unless an episode ended
    matches = [float((checksums[n_envs:] == next_checksums[:-n_envs]).mean()) for n_envs in range(1, limit + 1)]
    best = int(np.argmax(matches)) if matches else 0
    return best + 1 if matches and matches[best] >= 0.5 else 1
