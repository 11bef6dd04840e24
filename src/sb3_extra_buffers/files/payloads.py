"""Payloads of stores in a file: where each lies, and checksums over stretches of them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import DamagedFileError
from sb3_extra_buffers.files.blocks import Appender
from sb3_extra_buffers.stores.arena import lengthen
from sb3_extra_buffers.stores.checks import column, require, within
from sb3_extra_buffers.stores.file_heap import FileHeap
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.heap import Heap, merge_runs
from sb3_extra_buffers.stores.restore import place_payloads

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

#: bytes of payloads that have a checksum of their own; these are only ever added
STRETCH = 1 << 14


@dataclass(slots=True)
class SavedPayloads:
    """Where the payloads of a heap lie in a file."""

    heap: Heap
    starts: npt.NDArray[np.int64]  # per slot; those of slots that are not in use mean nothing
    chunks: npt.NDArray[np.int64]  # [stretch, 3]: offset, length, checksum
    file: Path | None = None  # where that is not the data file

    @property
    def tables(self) -> dict[str, Array]:
        return {"starts": self.starts, "chunks": self.chunks}


# ---- writing ----


def put_payloads(out: Appender, heap: Heap, known: SavedPayloads | None) -> SavedPayloads:
    """Append the payloads that the file does not have."""
    known = known if known is not None and known.heap is heap and known.file is None else None
    payload_ids = heap.unsaved(everything=known is None)
    starts = np.zeros(0, np.int64) if known is None else known.starts
    # a copy: should the save fail, what is known stays as it is
    starts = lengthen(starts[: len(heap.starts)], len(heap.starts))
    lengths = heap.lengths[payload_ids].astype(np.int64)
    packed = np.cumsum(lengths) - lengths
    starts[payload_ids] = out.end + packed
    made = [] if known is None else [known.chunks]
    for start, _, length in merge_runs(heap.starts[payload_ids], packed, lengths):
        data = heap.data[start : start + length]
        made.append(_checksums(data, out.put(data.data)))
    return SavedPayloads(heap, starts, np.concatenate([np.zeros((0, 3), np.int64), *made]))


def count_payloads(heap: FileHeap, known: SavedPayloads | None) -> SavedPayloads:
    """Take the checksums of what was written to a file of its own."""
    known = known if known is not None and known.heap is heap and known.file == heap.file else None
    made = np.zeros((0, 3), np.int64) if known is None else known.chunks
    begin = int(made[-1, 0] + made[-1, 1]) if len(made) else 0
    chunks = np.concatenate([made, _checksums(heap.data[begin : heap.end], begin)])
    return SavedPayloads(heap, heap.starts.copy(), chunks, heap.file)


def _checksums(data: Bytes, offset: int) -> npt.NDArray[np.int64]:
    """Offset, length and checksum of each stretch of ``data``, which lies at ``offset`` of a file."""
    parts = [data[at : at + STRETCH].data for at in range(0, data.size, STRETCH)]
    rows = [(offset + STRETCH * place, len(part), zlib.crc32(part)) for place, part in enumerate(parts)]
    return np.array(rows, np.int64).reshape(-1, 3)


# ---- reading ----


def check_tables(tables: dict[str, Array], n_payloads: int, size: int) -> tuple[npt.NDArray[np.int64], Array]:
    """Where payloads lie, and the stretches that have checksums, in a file of ``size`` bytes."""
    starts, chunks = column(tables, "starts", np.int64, (n_payloads,)), column(tables, "chunks", np.int64, (None, 3))
    offsets, lengths, crcs = chunks.T
    for what, values, low, stop in (("offset", offsets, 0, size + 1), ("length", lengths, 1, STRETCH + 1),
                                    ("checksum", crcs, 0, 1 << 32)):  # fmt: skip
        within(values, low, stop, f"the {what} of a stretch of observations")
    ends = offsets + lengths
    require(bool((ends <= size).all() and (offsets[1:] >= ends[:-1]).all()), "stretches of observations overlap")
    return starts, chunks


def fill_heap(
    heap: Heap, payload_ids: npt.NDArray[np.int32], tables: dict[str, Array], data: Bytes, path: Path, copied: bool
) -> SavedPayloads:
    """Let ``heap`` hold what lies in ``data``: ``copied`` and checked now, or looked into where it lies."""
    starts, chunks = check_tables(tables, len(heap.lengths), data.size)
    _check_covered(starts[payload_ids], heap.lengths[payload_ids], chunks)
    bad = damaged_chunks(data, chunks) if copied else []
    if bad:
        raise DamagedFileError(
            f"{path}: {len(bad)} of {len(chunks)} stretches of observations are damaged, the first at byte "
            f"{chunks[bad[0], 0]}; 'sb3-extra-buffers repair' keeps what is whole"
        )
    place_payloads(heap, payload_ids, starts, data, copied)
    heap.saved()
    return SavedPayloads(heap, starts, chunks)


def _check_covered(starts: Array, lengths: Array, chunks: Array) -> None:
    """Raise unless every byte of the payloads has a checksum."""
    covered = np.concatenate([[0], np.cumsum(chunks[:, 1])])

    def covered_to(places: Array) -> Array:
        """Bytes with a checksum before each place."""
        index = np.searchsorted(chunks[:, 0], places, "right")
        before = np.maximum(index - 1, 0)
        inside = np.minimum(places - chunks[before, 0], chunks[before, 1]) if len(chunks) else np.zeros(len(places))
        return np.where(index > 0, covered[before] + inside, 0)

    ends = starts + lengths.astype(np.int64)
    require(covered_to(ends) - covered_to(starts) == ends - starts, "a segment lies where there is no checksum")


def damaged_chunks(data: Bytes, chunks: Array) -> list[int]:
    """Stretches whose checksum differs."""
    return [
        place
        for place, (offset, length, crc) in enumerate(chunks.tolist())
        if zlib.crc32(data[offset : offset + length].data) != crc
    ]


def lost_indices(inner: FrameStore, chunks: Array, bad: list[int]) -> npt.NDArray[np.bool_]:
    """Which cells have a payload that lies in one of the ``bad`` stretches."""
    heap, counts = inner.heap, np.bincount(bad, minlength=len(chunks)).cumsum()
    first, last = _stretches(heap.starts, heap.lengths, chunks)
    broken = (heap.lengths > 0) & (counts[last] - counts[first] + np.isin(first, bad) > 0)
    segments = (np.maximum(inner.frame_ids, 1) - 1) // inner.per_segment
    return np.asarray(((inner.frame_ids > 0) & broken[segments]).any(axis=1))


def _stretches(starts: Array, lengths: Array, chunks: Array) -> tuple[Array, Array]:
    """The first and the last stretch that each payload lies in."""
    ends = starts + lengths.astype(np.int64) - 1
    return tuple(np.maximum(np.searchsorted(chunks[:, 0], at, "right") - 1, 0) for at in (starts, ends))  # type: ignore[return-value]  # two


class PayloadCheck:
    """Checks stretches of a mapped file when they are first read."""

    def __init__(self, inner: FrameStore, chunks: Array, data: Bytes, path: Path) -> None:
        self._inner, self._chunks, self._data, self._path = inner, chunks, data, path
        self._left = np.ones(len(chunks), np.bool_)

    def __call__(self, indices: npt.NDArray[np.int64]) -> None:
        """Raise if a payload of ``cells`` lies in a stretch that is damaged."""
        if not self._left.any():
            return
        ids = np.unique(self._inner.frame_ids[indices])
        segments = np.unique((ids[ids > 0] - 1) // self._inner.per_segment)
        segments = segments[self._inner.heap.lengths[segments] > 0]
        heap = self._inner.heap
        first, last = _stretches(heap.starts[segments], heap.lengths[segments], self._chunks)
        # [segment, stretch], as many as the longest has
        places = first[:, None] + np.arange(int((last - first).max(initial=0)) + 1)
        places = np.unique(places[places <= last[:, None]])
        new = places[self._left[places]]
        bad = damaged_chunks(self._data, self._chunks[new])
        if bad:
            raise DamagedFileError(
                f"{self._path}: observations at byte {self._chunks[new[bad[0]], 0]} are damaged; "
                "'sb3-extra-buffers repair' keeps what is whole"
            )
        self._left[new] = False
