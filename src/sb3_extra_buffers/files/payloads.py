"""Payloads of a heap in a file: where each is, and checksums over chunks of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import DamagedFileError
from sb3_extra_buffers.files.blocks import Appender
from sb3_extra_buffers.files.checksums import crc32_function
from sb3_extra_buffers.stores.arena import lengthen
from sb3_extra_buffers.stores.checks import column, require, within
from sb3_extra_buffers.stores.file_heap import FileHeap
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.heap import Heap, merge_runs
from sb3_extra_buffers.stores.restore import place_payloads

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

#: the most bytes of payloads under one checksum; chunks are only ever appended
CHUNK = 1 << 14


@dataclass(slots=True)
class SavedPayloads:
    """Where the payloads of a heap are in a file."""

    heap: Heap
    starts: npt.NDArray[np.int64]  # by payload id; meaningless for ids that are not in use
    chunks: npt.NDArray[np.int64]  # [chunk, 3]: offset, length, checksum
    file: Path | None = None  # None: the data file

    @property
    def tables(self) -> dict[str, Array]:
        return {"starts": self.starts, "chunks": self.chunks}


# ---- writing ----


def put_payloads(out: Appender, heap: Heap, last: SavedPayloads | None) -> SavedPayloads:
    """Append the payloads that the last save did not write."""
    if last is not None and (last.heap is not heap or last.file is not None):
        last = None
    payload_ids = heap.unsaved(everything=last is None)
    starts = np.zeros(0, np.int64) if last is None else last.starts
    # a copy: if the save fails, the last one still holds
    starts = lengthen(starts[: len(heap.starts)], len(heap.starts))
    lengths = heap.lengths[payload_ids].astype(np.int64)
    packed = np.cumsum(lengths) - lengths
    starts[payload_ids] = out.end + packed
    chunks = [np.zeros((0, 3), np.int64) if last is None else last.chunks]
    for start, _, length in merge_runs(heap.starts[payload_ids], packed, lengths):
        data = heap.data[start : start + length]
        chunks.append(_checksums(data, out.put(data.data)))
    return SavedPayloads(heap, starts, np.concatenate(chunks))


def checksum_heap(heap: FileHeap, last: SavedPayloads | None) -> SavedPayloads:
    """Checksum what was written to a heap's own file since the last save."""
    known = last is not None and last.heap is heap and last.file == heap.file
    chunks = last.chunks if last is not None and known else np.zeros((0, 3), np.int64)
    end = int(chunks[-1, 0] + chunks[-1, 1]) if len(chunks) else 0
    chunks = np.concatenate([chunks, _checksums(heap.data[end : heap.end], end)])
    return SavedPayloads(heap, heap.starts.copy(), chunks, heap.file)


def _checksums(data: Bytes, offset: int) -> npt.NDArray[np.int64]:
    """Offset, length and checksum of each chunk of ``data``, which starts at ``offset`` of a file."""
    chunks = [(offset + at, data[at : at + CHUNK].data) for at in range(0, data.size, CHUNK)]
    crc32 = crc32_function()
    rows = [(start, len(chunk), crc32(chunk)) for start, chunk in chunks]
    return np.array(rows, np.int64).reshape(-1, 3)


# ---- reading ----


def fill_heap(
    heap: Heap, payload_ids: npt.NDArray[np.int32], tables: dict[str, Array], data: Bytes, path: Path, copied: bool
) -> SavedPayloads:
    """Give ``heap`` the payloads in ``data``: checked and ``copied``, or mapped and checked later (`PayloadCheck`)."""
    starts = column(tables, "starts", np.int64, (len(heap.lengths),))
    chunks = column(tables, "chunks", np.int64, (None, 3))
    _check_chunks(chunks, data.size)
    _check_covered(starts[payload_ids], heap.lengths[payload_ids], chunks)
    bad = damaged_chunks(data, chunks) if copied else []
    if bad:
        raise DamagedFileError(
            f"{path}: {len(bad)} of {len(chunks)} chunks of observations are damaged, the first at byte "
            f"{chunks[bad[0], 0]}; 'sb3-extra-buffers repair' saves what is intact"
        )
    place_payloads(heap, payload_ids, starts, data, copied)
    heap.saved()
    return SavedPayloads(heap, starts, chunks)


def _check_chunks(chunks: Array, size: int) -> None:
    """Raise unless the chunks are inside a file of ``size`` bytes, in order and apart."""
    offsets, lengths, crcs = chunks.T
    within(offsets, 0, size + 1, "the offset of a chunk of observations")
    within(lengths, 1, CHUNK + 1, "the length of a chunk of observations")
    within(crcs, 0, 1 << 32, "the checksum of a chunk of observations")
    ends = offsets + lengths
    require(bool((ends <= size).all() and (offsets[1:] >= ends[:-1]).all()), "chunks of observations overlap")


def _check_covered(starts: Array, lengths: Array, chunks: Array) -> None:
    """Raise unless every byte of the payloads has a checksum."""
    if not len(starts):
        return
    require(len(chunks) > 0, "observations have no checksums")
    offsets, ends = chunks[:, 0], chunks[:, 0] + chunks[:, 1]
    # number of the run of chunks without gaps that each chunk is in
    run = np.cumsum(np.concatenate([[0], offsets[1:] != ends[:-1]]))
    first, last = _chunks_of(starts, lengths, chunks)
    covered = (starts >= offsets[first]) & (starts + lengths <= ends[last]) & (run[first] == run[last])
    require(covered, "a segment is not covered by checksums")


def damaged_chunks(data: Bytes, chunks: Array) -> list[int]:
    """The chunks whose checksum does not match."""
    crc32 = crc32_function()
    return [
        chunk
        for chunk, (offset, length, crc) in enumerate(chunks.tolist())
        if crc32(data[offset : offset + length].data) != crc
    ]


def lost_indices(frames: FrameStore, chunks: Array, bad: list[int]) -> npt.NDArray[np.bool_]:
    """Flags the observations that have a payload in one of the ``bad`` chunks."""
    heap, n_bad = frames.heap, np.bincount(bad, minlength=len(chunks)).cumsum()
    first, last = _chunks_of(heap.starts, heap.lengths, chunks)
    damaged = (heap.lengths > 0) & (n_bad[last] - n_bad[first] + np.isin(first, bad) > 0)
    segments = (np.maximum(frames.frame_ids, 1) - 1) // frames.per_segment
    return np.asarray(((frames.frame_ids > 0) & damaged[segments]).any(axis=1))


def _chunks_of(starts: Array, lengths: Array, chunks: Array) -> tuple[Array, Array]:
    """The first and the last chunk of each payload."""
    ends = starts + lengths.astype(np.int64) - 1
    first, last = (np.maximum(np.searchsorted(chunks[:, 0], offsets, "right") - 1, 0) for offsets in (starts, ends))
    return first, last


class PayloadCheck:
    """Checks chunks of a mapped file when they are first read."""

    def __init__(self, frames: FrameStore, chunks: Array, data: Bytes, path: Path) -> None:
        self._frames, self._chunks, self._data, self._path = frames, chunks, data, path
        self._unchecked = np.ones(len(chunks), np.bool_)

    def __call__(self, indices: npt.NDArray[np.int64]) -> None:
        """Raise if a payload of these observations is in a damaged chunk."""
        if not self._unchecked.any():
            return
        frames, heap = self._frames, self._frames.heap
        ids = np.unique(frames.frame_ids[indices])
        segments = np.unique((ids[ids > 0] - 1) // frames.per_segment)
        segments = segments[heap.lengths[segments] > 0]
        first, last = _chunks_of(heap.starts[segments], heap.lengths[segments], self._chunks)
        # [segment, chunk], as wide as the longest segment needs
        chunks = first[:, None] + np.arange(int((last - first).max(initial=0)) + 1)
        chunks = np.unique(chunks[chunks <= last[:, None]])
        new = chunks[self._unchecked[chunks]]
        bad = damaged_chunks(self._data, self._chunks[new])
        if bad:
            raise DamagedFileError(
                f"{self._path}: observations at byte {self._chunks[new[bad[0]], 0]} are damaged; "
                "'sb3-extra-buffers repair' saves what is intact"
            )
        self._unchecked[new] = False
