"""``rle-jit``: the payloads of ``rle``, written and read by compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numba
import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import check_segments, read_only
from sb3_extra_buffers.codecs.rle import RleCodec
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.errors import CorruptPayloadError

__all__ = ["RleJitCodec"]


@dataclass(frozen=True, slots=True)
class RleJitCodec(RleCodec):
    """`RleCodec` with numba; each decodes what the other encoded."""

    name: ClassVar[str] = "rle-jit"

    def encode(self, row: memoryview) -> bytes:
        return self.encode_batch(np.frombuffer(row, np.uint8)[None])[0]

    def encode_batch(self, rows: ByteRows) -> list[bytes]:
        elements = rows.view(self.elem)
        # scratch for the worst case, shared by the batch: payloads are copied out at their size
        lengths = np.empty(elements.shape[1], np.int64)
        values = np.empty(elements.shape[1], elements.dtype)
        payloads = []
        for row in elements:
            n_runs = _encode_row(read_only(row), lengths, values)
            payloads.append(lengths[:n_runs].astype(self.run).tobytes() + values[:n_runs].tobytes())
        return payloads

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        whole = np.frombuffer(payload, np.uint8)
        start, length = np.zeros(1, np.int64), np.array([len(whole)], np.int64)
        self._decode(whole, start, length, np.frombuffer(out, np.uint8)[None])

    def decode_batch(self, payloads: Sequence[memoryview], out: ByteRows) -> None:
        lengths = np.array([len(payload) for payload in payloads], np.int64)
        heap = np.frombuffer(b"".join(payloads), np.uint8)
        self.decode_heap(heap, np.cumsum(lengths) - lengths, lengths, out)

    def decode_heap(
        self,
        heap: npt.NDArray[np.uint8],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: ByteRows,
    ) -> None:
        check_segments(heap, starts, lengths, out)
        self._decode(heap, starts, lengths, out)

    def _decode(self, heap: Any, starts: Any, lengths: Any, out: Any) -> None:
        elem, run = np.dtype(self.elem).itemsize, np.dtype(self.run).itemsize
        bad = _decode_rows(read_only(heap), starts, lengths, elem, run, out)
        if bad >= 0:
            raise CorruptPayloadError(
                f"rle: the runs of a payload of {lengths[bad]} bytes do not make a row of {out.shape[1]}"
            )


@numba.njit(nogil=True, cache=True)
def _encode_row(row: Any, lengths: Any, values: Any) -> int:
    """Fill ``lengths`` and ``values``; return how many runs there are."""
    if row.size == 0:
        return 0
    n_runs = 0
    first = 0  # where the present run began
    value = row[0]
    for i in range(1, row.size):
        if row[i] != value:
            lengths[n_runs] = i - first
            values[n_runs] = value
            n_runs += 1
            first = i
            value = row[i]
    lengths[n_runs] = row.size - first
    values[n_runs] = value
    return n_runs + 1


@numba.njit(nogil=True, cache=True)
def _decode_rows(heap: Any, starts: Any, lengths: Any, elem: int, run: int, out: Any) -> int:
    """Decode all rows; return the index of the first that is corrupt, or -1."""
    nbytes = out.shape[1]
    for k in range(out.shape[0]):
        n_runs = lengths[k] // (elem + run)
        if n_runs * (elem + run) != lengths[k]:
            return k
        at_run = starts[k]
        at_value = starts[k] + n_runs * run
        end = np.int64(0)  # of what is decoded so far
        for _ in range(n_runs):
            # payloads lie at any address, so words are put together from bytes
            length = np.uint64(heap[at_run])
            for b in range(1, run):
                length |= np.uint64(heap[at_run + b]) << np.uint64(8 * b)
            # compared with what is left, so that no product can wrap round
            if length > np.uint64((nbytes - end) // elem):
                return k
            stop = end + np.int64(length) * elem
            if elem == 1:
                value = heap[at_value]
                for i in range(end, stop):
                    out[k, i] = value
            else:
                for i in range(end, stop, elem):
                    for b in range(elem):
                        out[k, i + b] = heap[at_value + b]
            end = stop
            at_run += run
            at_value += elem
        if end != nbytes:
            return k
    return -1
