"""``rle-jit``: the format of ``rle``, with compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from sb3_extra_buffers.codecs.base import Bytes, Ints, check_payloads, read_only
from sb3_extra_buffers.codecs.jit import cached_njit
from sb3_extra_buffers.codecs.rle import RleCodec, bad_runs
from sb3_extra_buffers.codecs.spec import ByteRows


@dataclass(frozen=True, slots=True)
class RleJitCodec(RleCodec):
    """`RleCodec` with numba; each decodes what the other encoded."""

    name: ClassVar[str] = "rle-jit"

    def encode(self, row: memoryview) -> bytes:
        return self.encode_batch(np.frombuffer(row, np.uint8)[None])[0]

    def encode_batch(self, rows: ByteRows) -> list[bytes]:
        elements = rows.view(self.elem)
        # scratch for the worst case, shared by the batch
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

    def decode_heap(self, heap: Bytes, starts: Ints, lengths: Ints, out: ByteRows) -> None:
        check_payloads(heap, starts, lengths, out)
        self._decode(heap, starts, lengths, out)

    def _decode(self, heap: Any, starts: Any, lengths: Any, out: Any) -> None:
        elem, run = np.dtype(self.elem).itemsize, np.dtype(self.run).itemsize
        bad = _decode_rows(read_only(heap), starts, lengths, elem, run, out)
        if bad >= 0:
            raise bad_runs(lengths[bad], out.shape[1])


@partial(cached_njit, nogil=True)
def _encode_row(row: Any, lengths: Any, values: Any) -> int:
    """Fill ``lengths`` and ``values``; return the number of runs."""
    if row.size == 0:
        return 0
    n_runs = 0
    first = 0  # of the current run
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


@partial(cached_njit, nogil=True)
def _decode_rows(heap: Any, starts: Any, lengths: Any, elem: int, run: int, out: Any) -> int:
    """Decode all rows; return the index of the first corrupt one, or -1."""
    nbytes = out.shape[1]
    for k in range(out.shape[0]):
        n_runs = lengths[k] // (elem + run)
        if n_runs * (elem + run) != lengths[k]:
            return k
        at_run = starts[k]
        at_value = starts[k] + n_runs * run
        end = np.int64(0)  # of what has been decoded
        for _ in range(n_runs):
            # payloads have any alignment, so assemble words from bytes
            length = np.uint64(heap[at_run])
            for b in range(1, run):
                length |= np.uint64(heap[at_run + b]) << np.uint64(8 * b)
            # compare with what is left: a product could overflow
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
