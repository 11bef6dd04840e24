"""``igzip``: gzip by ISA-L, which trades some size for several times the speed."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

from isal import igzip_lib, isal_zlib

from sb3_extra_buffers.codecs.base import Codec, check_level
from sb3_extra_buffers.codecs.gzip import GZIP_WBITS, gzip_bound, inflate_into

__all__ = ["IgzipCodec"]


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
        # ISA-L promises no bound; what it cannot shrink is stored
        stored = zlib.compressobj(0, zlib.DEFLATED, GZIP_WBITS)
        return stored.compress(row) + stored.flush()

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        # isal's stub has an instance where the module has the class
        inflate_into(isal_zlib.decompressobj(GZIP_WBITS), isal_zlib.error, payload, out)  # type: ignore[arg-type]
