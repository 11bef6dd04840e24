"""``igzip``: gzip by ISA-L: several times faster than zlib, payloads somewhat larger."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

from isal import igzip_lib, isal_zlib

from sb3_extra_buffers.codecs.base import Codec, check_level, decompress_into
from sb3_extra_buffers.codecs.gzip import GZIP_WBITS, gzip_bound


@dataclass(frozen=True, slots=True)
class IgzipCodec(Codec):
    """gzip members at ISA-L's ``level`` 0 (fastest) to 3 (smallest)."""

    codec_id: ClassVar[str] = "igzip"
    level: int = 2

    def __post_init__(self) -> None:
        check_level(self.codec_id, self.level, [range(4)], "0..3")

    def bound(self, nbytes: int) -> int:
        return gzip_bound(nbytes)

    def encode(self, row: memoryview) -> bytes:
        payload: bytes = igzip_lib.compress(row, level=self.level, flag=igzip_lib.COMP_GZIP)
        if len(payload) <= self.bound(len(row)):
            return payload
        # ISA-L documents no bound; store what it cannot shrink
        stored = zlib.compressobj(0, zlib.DEFLATED, GZIP_WBITS)
        return stored.compress(row) + stored.flush()

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        decompress_into("igzip", isal_zlib.decompressobj(GZIP_WBITS), isal_zlib.error, payload, out)
