"""``rle``: run-length encoding, vectorised in NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import CorruptPayloadError

if TYPE_CHECKING:
    from typing_extensions import Self

_RUN_DTYPES = ("|u1", "<u2", "<u4", "<u8")


@dataclass(frozen=True, slots=True)
class RleCodec(Codec):
    """Payload: all run lengths (``run``), then one value per run (``elem``), little-endian."""

    codec_id: ClassVar[str] = "rle"
    options: ClassVar[tuple[str, ...]] = ()
    elem: str = "|u1"
    run: str = "<u8"

    def bind(self, spec: ObsSpec) -> Self:
        # elements are compared as unsigned words, so NaN and -0.0 survive; other sizes (complex numbers, strings) are
        # split into the widest words that divide them
        word = math.gcd(spec.dtype.itemsize, 8)
        n_elem = spec.nbytes // word
        run = next(dtype for dtype in _RUN_DTYPES if n_elem <= np.iinfo(dtype).max)
        return replace(self, elem=np.dtype(f"<u{word}").str, run=run)

    def bound(self, nbytes: int) -> int:
        elem, run = np.dtype(self.elem), np.dtype(self.run)
        return nbytes // elem.itemsize * (elem.itemsize + run.itemsize)

    def encode(self, row: memoryview) -> bytes:
        values = np.frombuffer(row, self.elem)
        if not len(values):
            return b""
        last = np.append(np.flatnonzero(values[1:] != values[:-1]), len(values) - 1)
        runs = np.diff(last, prepend=-1).astype(self.run)
        return b"".join((runs.tobytes(), values[last].tobytes()))

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        elem, run = np.dtype(self.elem), np.dtype(self.run)
        n_runs, rest = divmod(len(payload), elem.itemsize + run.itemsize)
        runs = np.frombuffer(payload, run, n_runs)
        values = np.frombuffer(payload, elem, n_runs, offset=n_runs * run.itemsize)
        n_elem = len(out) // elem.itemsize
        # check the longest run first: then the sum cannot overflow
        if rest or runs.max(initial=0) > n_elem or runs.sum(dtype=np.uint64) != n_elem:
            raise bad_runs(len(payload), len(out))
        np.frombuffer(out, elem)[:] = np.repeat(values, runs.astype(np.intp, copy=False))


def bad_runs(n_payload: int, n_row: int) -> CorruptPayloadError:
    return CorruptPayloadError(f"rle: the runs of a payload of {n_payload} bytes do not add up to a row of {n_row}")
