"""Observations as they are, uncompressed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.kernels.policy import ReadWork, read_ns, write_ns
from sb3_extra_buffers.stores.arena import resident_bytes, zeros
from sb3_extra_buffers.stores.base import Array, Indices, Trial, rows_for
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.uncompressed import UncompressedStore
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.workers import run_split

if TYPE_CHECKING:
    from typing_extensions import Self

# bytes that a thread copies at a time
_PART_BYTES = 1 << 20


class RawStore(UncompressedStore):
    """One row per index in a single array. Pages take memory once they are written."""

    rows: ByteRows
    written: npt.NDArray[np.bool_]
    #: Indices, previous rows (none if all were unwritten) and whether they were written.
    replaced: tuple[Indices, ByteRows, npt.NDArray[np.bool_]] | None

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
        rows = zeros((n_obs, layout.spec.nbytes), np.uint8)
        self.__setstate__({"rows": rows, "written": zeros(n_obs, bool), "limit": heap_bytes})

    @classmethod
    def accepts(cls, codec: Codec, layout: StackLayout) -> bool:
        # stacks share frames: those are for `PackedStore`
        return codec.codec_id == "none" and layout.stack == 1

    @classmethod
    def from_arrays(cls, rows: ByteRows, written: npt.NDArray[np.bool_], limit: int | None) -> Self:
        """Create a store of arrays that were saved; they are not copied."""
        store = object.__new__(cls)
        store.__setstate__({"rows": rows, "written": written, "limit": limit})
        return store

    def allocate(self, n_obs: int) -> None:
        self.recover()
        n_before = len(self.rows)
        rows: ByteRows = zeros((n_before + n_obs, self.rows.shape[1]), np.uint8)
        rows[:n_before] = self.rows
        written: npt.NDArray[np.bool_] = zeros(len(rows), bool)
        written[:n_before] = self.written
        # an interrupt in between leaves this one longer than rows, which does no harm
        self.written = written
        self.rows = rows

    @property
    def row_bytes(self) -> int:
        return int(self.rows.shape[1])

    def _write(self, indices: Indices, rows: ByteRows) -> None:
        before = self.written[indices]
        # most rows are written for the first time, until a ring is full
        self.replaced = indices.copy(), self.rows[indices] if before.any() else np.zeros((0, 0), np.uint8), before
        self.dirty = True
        self.rows[indices] = rows
        self.written[indices] = True
        self.dirty = False

    def _count_new(self, indices: Indices) -> int:
        return int(np.count_nonzero(~self.written[indices]))

    def _put_back(self, replaced: tuple[Indices, ByteRows, npt.NDArray[np.bool_]]) -> None:
        indices, rows, written = replaced
        self.rows[indices] = rows if len(rows) else 0
        self.written[indices] = written

    def read(self, indices: Indices) -> ByteRows:
        if self.dirty:
            self.recover()
        return self.rows[indices]

    def read_windows(self, indices: Indices, newest_only: bool = False, out: ByteRows | None = None) -> ByteRows:
        if self.dirty:
            self.recover()
        flat, stored = indices.reshape(-1), self.rows
        if not flat.size or flat.min() < 0 or flat.max() >= len(stored):
            return super().read_windows(indices, newest_only, out)
        rows = rows_for(out, (*indices.shape, self.row_bytes))
        target = rows.reshape(flat.size, self.row_bytes)

        def work(first: int, stop: int) -> None:
            # the default mode would copy twice; indices are in range
            stored.take(flat[first:stop], axis=0, out=target[first:stop], mode="clip")

        run_split(work, flat.size, max(_PART_BYTES // max(self.row_bytes, 1), 1))
        return rows

    def erase(self, indices: Indices) -> None:
        self.commit()
        self.rows[indices] = 0
        self.written[indices] = False

    def clear(self) -> None:
        self.commit()
        self.rows, self.written = zeros(self.rows.shape, np.uint8), zeros(len(self.rows), bool)

    @property
    def held_bytes(self) -> int:
        return self.rows.nbytes + self.written.nbytes

    def memory_usage(self) -> MemoryUsage:
        # pages that were never written take no memory
        return MemoryUsage(payload=self.count_written() * self.row_bytes + resident_bytes(self.written))

    def count_written(self) -> int:
        return int(np.count_nonzero(self.written))

    def check(self) -> None:
        self.recover()
        if len(self.written) < len(self.rows):
            raise AssertionError(f"{len(self.rows)} rows, but flags for {len(self.written)} only")

    def find_written(self) -> Indices:
        return np.flatnonzero(self.written[: len(self.rows)])

    @classmethod
    def trial(cls, layout: StackLayout, codec: Codec, streams: Indices, rows: ByteRows, n_streams: int) -> Trial:
        size, work = layout.frame_bytes, ReadWork(2 * layout.spec.nbytes)
        return Trial(float(size), read_ns("none", work), *write_ns("none", size, size))

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Array]]:
        self.recover()
        return {"kind": "dense"}, {"rows": self.rows, "written": self.written[: len(self.rows)]}

    def __getstate__(self) -> dict[str, Any]:
        self.recover()
        return {"rows": np.array(self.rows), "written": np.array(self.written), "limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.rows, self.written, self.limit = state["rows"], state["written"], state["limit"]
        self.replaced, self.dirty = None, False
