"""``gzip``: available everywhere, through the standard library's zlib."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

from sb3_extra_buffers.codecs.base import Codec, check_level, decompress_into

GZIP_WBITS = 31  # asks zlib for a 32 KiB window with gzip's header and trailer


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
        # gzip.compress writes a time stamp on some Python versions; equal rows must give equal payloads
        deflate = zlib.compressobj(self.level, zlib.DEFLATED, GZIP_WBITS)
        return deflate.compress(row) + deflate.flush()

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        decompress_into("gzip", zlib.decompressobj(GZIP_WBITS), zlib.error, payload, out)


def gzip_bound(nbytes: int) -> int:
    """Bound for any deflate encoder: zlib-ng's fastest level may spend nine bits on every byte."""
    return nbytes + (nbytes >> 3) + 64
