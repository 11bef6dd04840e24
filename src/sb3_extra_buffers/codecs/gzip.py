"""``gzip``: the codec that is always there, through the standard library's zlib."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

from sb3_extra_buffers.codecs.base import Codec, check_level
from sb3_extra_buffers.errors import CorruptPayloadError

__all__ = ["GZIP_WBITS", "GzipCodec", "gzip_bound", "inflate_into"]

GZIP_WBITS = 31  # zlib's way to ask for a 32 KiB window and gzip's header and trailer


@dataclass(frozen=True, slots=True)
class GzipCodec(Codec):
    """gzip at ``level`` 0 (stored) to 9 (smallest)."""

    codec_id: ClassVar[str] = "gzip"
    level: int = 6

    def __post_init__(self) -> None:
        check_level(self.codec_id, self.level, [range(10)], "0..9")

    def bound(self, nbytes: int) -> int:
        return gzip_bound(nbytes)

    def encode(self, row: memoryview) -> bytes:
        # unlike gzip.compress this writes no time stamp on any Python: equal rows, equal payloads
        deflate = zlib.compressobj(self.level, zlib.DEFLATED, GZIP_WBITS)
        return deflate.compress(row) + deflate.flush()

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        inflate_into(zlib.decompressobj(GZIP_WBITS), zlib.error, payload, out)


def gzip_bound(nbytes: int) -> int:
    # every literal in the nine bits of fixed Huffman codes, which zlib-ng's fastest level may write;
    # zlib itself stores such rows and stays below
    return nbytes + (nbytes >> 3) + 64


def inflate_into(inflate: Any, error: type[Exception], payload: memoryview, out: memoryview) -> None:
    """Decode one gzip member that must be exactly ``payload`` and give exactly ``out``."""
    try:
        # one byte of room more than the row, so that a longer one shows and is not inflated further
        row = inflate.decompress(payload, len(out) + 1)
    except error as problem:
        raise CorruptPayloadError(f"gzip: {problem}") from problem
    if not inflate.eof or inflate.unused_data or len(row) != len(out):
        raise CorruptPayloadError(f"gzip: a payload of {len(payload)} bytes is not one member for a row of {len(out)}")
    out[:] = row
