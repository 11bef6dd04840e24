"""Observations and next observations on one time axis, uncompressed: for vectors and other small observations."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.errors import IndexOutOfRangeError
from sb3_extra_buffers.kernels import as_contiguous, timeline_kernels
from sb3_extra_buffers.kernels.timeline import COUNT, N_OBS, N_STREAMS, N_TOUCHED, TimelineTables, rebuild
from sb3_extra_buffers.stores.arena import resident_bytes, zeros
from sb3_extra_buffers.stores.base import Array, Indices, rows_for
from sb3_extra_buffers.stores.checks import column, require, whole, within
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.uncompressed import UncompressedStore
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.workers import run_split

if TYPE_CHECKING:
    from typing_extensions import Self

# least capacity for next observations aside; the newest one of each stream is always there
_MIN_CAPACITY = 16
# bytes of observations that are read at a time to count them
_CHUNK_BYTES = 1 << 24
# size from which on a batch is read by several threads, and how many bytes each of them takes at a time
_SPLIT_BYTES, _PART_BYTES = 1 << 20, 1 << 19


class TimelineStore(UncompressedStore):
    """Stores a next observation only if it differs from the following observation of its stream.

    The first half of the indices are observations, ``n_streams`` for each step; the second half are the next
    observations of the same steps. Next observation ``i`` is normally observation ``i + n_streams``; the first step
    follows the last one. If the two differ, as at the end of an episode, the next observation is kept *aside*, in a
    table of its own; so is that of the newest step until its successor is written. Observations may be written in any
    order: a next observation that relies on an overwritten observation is first copied aside. Indices that are
    allocated later are independent rows.

    `kernels.timeline` describes the tables.
    """

    #: The tables, and the form in which the kernels take them; replaced whenever a table is reallocated.
    state: tuple[TimelineTables, Any]
    compiled: bool | None
    #: Indices and previous rows of what the last write changed.
    replaced: tuple[Indices, ByteRows] | None

    def __init__(
        self,
        layout: StackLayout,
        n_obs: int,
        n_streams: int = 1,
        codec: Codec | None = None,
        heap_bytes: int | None = None,
        path: Path | None = None,
        compiled: bool | None = None,
    ) -> None:
        n_each = n_obs // (2 * n_streams) * n_streams
        self._use(_make_tables(n_obs - n_each, layout.spec.nbytes, n_each, n_streams), heap_bytes, compiled)

    def _use(self, tables: TimelineTables, limit: int | None, compiled: bool | None) -> None:
        self.limit, self.compiled = limit, compiled
        self._kernels = timeline_kernels(compiled)
        self.replaced, self.dirty = None, False
        self._set_tables(tables)

    def _set_tables(self, tables: TimelineTables) -> None:
        # one assignment: an interrupt leaves the old tables or the new ones. The tuple is never modified, so that its
        # identity tells whether tables were replaced
        self.state = tables, self._kernels.bind_tables(tables)

    @property
    def is_compiled(self) -> bool:
        """Whether the kernels are compiled, so that nothing can interrupt them."""
        return self._kernels.compiled

    @property
    def tables(self) -> TimelineTables:
        return self.state[0]

    @classmethod
    def accepts(cls, codec: Codec, layout: StackLayout) -> bool:
        # not through the registry: only `ObservationStore` knows which indices are next observations
        return False

    @classmethod
    def from_rows(
        cls, rows: ByteRows, next_rows: ByteRows, n_streams: int, limit: int | None, compiled: bool | None
    ) -> Self:
        """Create a store of observations and as many next observations; ``rows`` are not copied if possible."""
        n_each, row_bytes = rows.shape
        keys = [np.zeros(0, np.int64)]
        for first in range(0, n_each, 1 << 14):
            numbers = np.arange(first, min(first + (1 << 14), n_each))
            differs = (rows[(numbers + n_streams) % n_each] != next_rows[numbers]).any(axis=1)
            keys.append(numbers[differs])
        is_aside = np.concatenate(keys)
        tables = _make_tables(0, row_bytes, n_each, n_streams, is_aside, next_rows[is_aside])
        return cls._of(tables._replace(rows=as_contiguous(rows)), limit, compiled)

    @classmethod
    def _of(cls, tables: TimelineTables, limit: int | None, compiled: bool | None) -> Self:
        tables.counters[N_TOUCHED] = _n_written(tables.rows)
        store = object.__new__(cls)
        store._use(tables, limit, compiled)
        return store

    def allocate(self, n_obs: int) -> None:
        self.recover()
        rows = np.zeros((len(self.tables.rows) + n_obs, self.row_bytes), np.uint8)
        rows[: self._n_touched] = self.tables.rows[: self._n_touched]
        self._set_tables(self.tables._replace(rows=rows))

    # ---- counters ----

    @property
    def row_bytes(self) -> int:
        return int(self.tables.rows.shape[1])

    @property
    def n_aside(self) -> int:
        """Next observations that are kept aside."""
        return int(self.tables.counters[COUNT])

    @property
    def _n_each(self) -> int:
        return int(self.tables.counters[N_OBS])

    @property
    def _n_touched(self) -> int:
        return int(self.tables.counters[N_TOUCHED])

    # ---- writing ----

    def _write(self, indices: Indices, rows: ByteRows) -> None:
        n_each, n_streams = self._n_each, int(self.tables.counters[N_STREAMS])
        self.reserve(len(indices))
        # the next observation of the step before may be stored as this observation
        before = n_each + (indices[indices < n_each] - n_streams) % max(n_each, 1)
        affected = np.unique(np.concatenate([indices, before]))
        self.replaced = affected, self.read(affected)
        self.dirty = True
        self._kernels.write_rows(self.state[1], as_contiguous(indices), as_contiguous(rows))
        self.dirty = False

    def reserve(self, n_rows: int) -> None:
        """Reserve space for ``n_rows`` more next observations aside."""
        needed, capacity = self.n_aside + n_rows, len(self.tables.keys)
        if needed > capacity:
            self._resize(max(capacity + capacity // 2, needed))

    def _resize(self, capacity: int) -> None:
        old, count = self.tables, self.n_aside
        tables = old._replace(
            is_aside=np.zeros_like(old.is_aside),
            slots=np.zeros(_table_size(capacity), np.int32),
            keys=np.zeros(capacity, np.int64),
            aside=_new_aside(capacity, old.aside.shape[1]),
        )
        tables.keys[:count], tables.aside[:count] = old.keys[:count], old.aside[:count]
        rebuild(tables)
        self._set_tables(tables)

    def _count_new(self, indices: Indices) -> int:
        return int(np.count_nonzero(~self.read(indices).any(axis=1)))

    def read(self, indices: Indices) -> ByteRows:
        return self.read_windows(indices)

    def read_windows(self, indices: Indices, newest_only: bool = False, out: ByteRows | None = None) -> ByteRows:
        if self.dirty:
            self.recover()
        out = rows_for(out, (*indices.shape, self.row_bytes))
        flat = as_contiguous(indices).reshape(-1)
        rows, bound = out.reshape(-1, out.shape[-1]), self.state[1]
        if rows.nbytes < _SPLIT_BYTES or not self._kernels.compiled:
            bad = self._kernels.read_rows(bound, flat, rows)
        else:

            def work(first: int, stop: int) -> int:
                wrong: int = self._kernels.read_rows(bound, flat[first:stop], rows[first:stop])
                return first + wrong if wrong >= 0 else -1

            bad = max(run_split(work, len(rows), max(_PART_BYTES // rows.shape[1], 1)))
        if bad >= 0:
            raise IndexOutOfRangeError(f"index {flat[bad]} is out of bounds for {self._n_all} observations")
        return out

    def read_pairs(self, steps: Indices, streams: Indices, are_next: bool) -> ByteRows:
        """Return observations, or next observations, by step and stream; negative numbers count from the end."""
        if self.dirty:
            self.recover()
        out: ByteRows = np.empty((len(steps), self.tables.rows.shape[1]), np.uint8)
        base = self._n_each if are_next else 0
        steps, streams = as_contiguous(steps), as_contiguous(streams)
        bad = self._kernels.read_pairs(self.state[1], steps, streams, base, out)
        if bad >= 0:
            n_streams = int(self.tables.counters[N_STREAMS])
            axes = self._n_each // n_streams, n_streams
            raise IndexOutOfRangeError(f"index ({steps[bad]}, {streams[bad]}) is out of bounds for axes of {axes}")
        return out

    @property
    def _n_all(self) -> int:
        return self._n_each + len(self.tables.rows)

    def erase(self, indices: Indices) -> None:
        self.commit()
        # next observations first: otherwise erasing an observation would copy aside what is erased next
        ordered = np.sort(np.unique(indices))[::-1]
        self._write(ordered, np.zeros((len(ordered), self.row_bytes), np.uint8))
        self.commit()
        if len(self.tables.keys) > max(4 * self.n_aside, _MIN_CAPACITY):
            self._resize(max(2 * self.n_aside, _MIN_CAPACITY))

    def clear(self) -> None:
        self.commit()
        n_rows, row_bytes = self.tables.rows.shape
        self._set_tables(_make_tables(n_rows, row_bytes, self._n_each, int(self.tables.counters[N_STREAMS])))

    def _put_back(self, replaced: tuple[Indices, ByteRows]) -> None:
        if not self._kernels.compiled:
            rebuild(self.tables)
        self.reserve(len(replaced[0]))
        self._kernels.write_rows(self.state[1], *replaced)

    # ---- reports ----

    @property
    def held_bytes(self) -> int:
        tables = self.tables
        return int(tables.rows.nbytes + self.n_aside * tables.aside.shape[1] + self._index_bytes)

    @property
    def _index_bytes(self) -> int:
        tables = self.tables
        return int(resident_bytes(tables.is_aside) + tables.slots.nbytes + tables.keys.nbytes + tables.counters.nbytes)

    def memory_usage(self) -> MemoryUsage:
        # pages that were never written take no memory
        return MemoryUsage(payload=(self._n_touched + self.n_aside) * self.row_bytes, index=self._index_bytes)

    def count_written(self) -> int:
        # observations of zeros count as unwritten
        indices = self.find_written()
        chunk = max(_CHUNK_BYTES // max(self.row_bytes, 1), 1)
        parts = (indices[first : first + chunk] for first in range(0, len(indices), chunk))
        return sum(int(np.count_nonzero(self.read(part).any(axis=1))) for part in parts)

    def find_written(self) -> Indices:
        self.recover()
        tables, n_each = self.tables, self._n_each
        n_rows = int(tables.counters[N_TOUCHED])
        written = np.arange(min(n_rows, n_each))
        # in a ring, the next observation of the last step is the observation of the first
        follows = (written - int(tables.counters[N_STREAMS])) % max(n_each, 1)
        others = np.arange(n_each, n_rows) + n_each
        return np.unique(np.concatenate([written, n_each + follows, n_each + tables.keys[: self.n_aside], others]))

    def check(self) -> None:
        self.recover()
        tables, count = self.tables, self.n_aside
        keys = tables.keys[:count]
        bits = np.unpackbits(tables.is_aside, bitorder="little")
        if len(np.unique(keys)) < count or not np.array_equal(np.flatnonzero(bits), np.sort(keys)):
            raise AssertionError("the bits of next observations that are aside do not match the keys")
        if not np.array_equal(np.sort(tables.slots[tables.slots > 0]), np.arange(1, count + 1)):
            raise AssertionError("the hash table does not list every row once")
        if tables.rows[self._n_touched :].any():
            raise AssertionError("a row that counts as unwritten is not zero")

    # ---- saving and copies ----

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Array]]:
        self.recover()
        tables, count = self.tables, self.n_aside
        arrays: dict[str, Array] = {
            "rows": tables.rows,
            "following": tables.keys[:count],
            "aside": tables.aside[:count],
        }
        return {"kind": "timeline", "n_each": self._n_each}, arrays

    @classmethod
    def from_parts(
        cls,
        record: Mapping[str, Any],
        arrays: Mapping[str, Array],
        n_obs: int,
        n_streams: int,
        row_bytes: int,
        limit: int | None,
        compiled: bool | None,
    ) -> Self:
        """Create the store that `to_parts` described; raise `FileFormatError` if anything about it is wrong."""
        n_each = whole(record["n_each"], "n_each", 1, n_obs // 2 + 1)
        require(n_each % n_streams == 0 and row_bytes > 0, f"{n_each} observations do not fit {n_streams} streams")
        rows = column(arrays, "rows", np.uint8, (n_obs - n_each, row_bytes))
        keys = column(arrays, "following", np.int64, (None,))
        aside = column(arrays, "aside", np.uint8, (len(keys), row_bytes))
        within(keys, 0, n_each, "a next observation that is aside")
        require(len(np.unique(keys)) == len(keys), "a next observation is aside twice")
        tables = _make_tables(0, row_bytes, n_each, n_streams, keys, aside)
        return cls._of(tables._replace(rows=as_contiguous(rows)), limit, compiled)

    def lost_indices(self, bad_rows: npt.NDArray[np.bool_], bad_aside: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Flags of the indices whose row, or row aside, is damaged."""
        n_each, n_streams = self._n_each, int(self.tables.counters[N_STREAMS])
        following = np.roll(bad_rows[:n_each], -n_streams)
        following[self.tables.keys[: self.n_aside]] = bad_aside
        return np.concatenate([bad_rows[:n_each], following, bad_rows[n_each:]])

    def after_raw_copy(self) -> None:
        """See `RawCopier`: the bound tables were the original's."""
        self._set_tables(self.tables)

    def __getstate__(self) -> dict[str, Any]:
        self.recover()
        tables, count = self.tables, self.n_aside
        return {
            "rows": tables.rows[: self._n_touched].copy(),
            "n_rows": len(tables.rows),
            "keys": tables.keys[:count].copy(),
            "aside": tables.aside[:count].copy(),
            "n_each": self._n_each,
            "n_streams": int(tables.counters[N_STREAMS]),
            "limit": self.limit,
            "compiled": self.compiled,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = state["rows"]
        tables = _make_tables(
            state["n_rows"], rows.shape[1], state["n_each"], state["n_streams"], state["keys"], state["aside"]
        )
        tables.rows[: len(rows)] = rows
        tables.counters[N_TOUCHED] = len(rows)
        self._use(tables, state["limit"], state["compiled"])


def _make_tables(
    n_rows: int, row_bytes: int, n_each: int, n_streams: int, keys: Array | None = None, aside: Array | None = None
) -> TimelineTables:
    """Create tables of unwritten rows; ``aside`` are the next observations ``keys``."""
    keys = np.zeros(0, np.int64) if keys is None else keys
    count = len(keys)
    capacity = max(_MIN_CAPACITY, 4 * n_streams, count)
    counters = np.zeros(4, np.int64)
    counters[COUNT], counters[N_OBS], counters[N_STREAMS] = count, n_each, n_streams
    tables = TimelineTables(
        # like SB3's arrays: pages take memory once they are written
        rows=np.zeros((n_rows, row_bytes), np.uint8),
        is_aside=np.zeros(-(-n_each // 8), np.uint8),
        slots=np.zeros(_table_size(capacity), np.int32),
        keys=np.zeros(capacity, np.int64),
        aside=_new_aside(capacity, row_bytes),
        counters=counters,
    )
    if aside is not None:
        tables.keys[:count], tables.aside[:count] = keys, aside
        rebuild(tables)
    return tables


def _new_aside(capacity: int, row_bytes: int) -> ByteRows:
    """Space for rows aside. Not from ``malloc``, which fills reused memory with zeros and so makes it resident."""
    shape = capacity, row_bytes
    return zeros(shape, np.uint8) if capacity * row_bytes >= mmap.PAGESIZE else np.zeros(shape, np.uint8)


def _table_size(capacity: int) -> int:
    """The length of a hash table for ``capacity`` rows: a power of two, at most four fifths full."""
    return 1 << (capacity + capacity // 4).bit_length()


def _n_written(rows: ByteRows) -> int:
    """One more than the index of the last row that is not all zeros."""
    for first in reversed(range(0, len(rows), 1 << 14)):
        written = np.flatnonzero(rows[first : first + (1 << 14)].any(axis=1))
        if len(written):
            return first + int(written[-1]) + 1
    return 0
