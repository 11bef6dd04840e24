"""``lz4-frame`` and ``lz4-block``: LZ4 with and without its container."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import lz4.block
import lz4.frame

from sb3_extra_buffers.codecs.base import Codec, check_level, decompress_into
from sb3_extra_buffers.errors import CorruptPayloadError

# LZ4 takes the acceleration as a C int and adds one to it
_ACCELERATED = range(-(2**31) + 2, 0)


@dataclass(frozen=True, slots=True)
class Lz4FrameCodec(Codec):
    """LZ4 frames at ``level`` 0 to 16, or with acceleration ``-level``."""

    codec_id: ClassVar[str] = "lz4-frame"
    level: int = 0

    def __post_init__(self) -> None:
        check_level(self.codec_id, self.level, [_ACCELERATED, range(17)], "0..16, or negative to accelerate")

    def bound(self, nbytes: int) -> int:
        # header, end mark, and a length before each block of 64 KiB; incompressible blocks are stored
        return nbytes + 4 * (nbytes // 65536 + 1) + 19 + 4

    def encode(self, row: memoryview) -> bytes:
        payload: bytes = lz4.frame.compress(row, compression_level=self.level, store_size=False)
        return payload

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        decompress_into("lz4-frame", lz4.frame.LZ4FrameDecompressor(), (RuntimeError, EOFError), payload, out)


@dataclass(frozen=True, slots=True)
class Lz4BlockCodec(Codec):
    """A bare LZ4 block: ``level`` 1 to 12 compresses harder, 0 is LZ4's default, ``-level`` accelerates."""

    codec_id: ClassVar[str] = "lz4-block"
    level: int = 0

    def __post_init__(self) -> None:
        described = "1..12 (high compression), 0 (default), or negative to accelerate"
        check_level(self.codec_id, self.level, [_ACCELERATED, range(13)], described)

    def bound(self, nbytes: int) -> int:
        return nbytes + nbytes // 255 + 16

    def encode(self, row: memoryview) -> bytes:
        if self.level > 0:
            mode = {"mode": "high_compression", "compression": self.level}
        elif self.level < 0:
            mode = {"mode": "fast", "acceleration": -self.level}
        else:
            mode = {"mode": "default"}
        payload: bytes = lz4.block.compress(row, store_size=False, **mode)
        return payload

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        try:
            row = lz4.block.decompress(payload, uncompressed_size=len(out))
        except (lz4.block.LZ4BlockError, ValueError) as problem:
            raise CorruptPayloadError(f"lz4-block: {problem}") from problem
        if len(row) != len(out):
            raise CorruptPayloadError(
                f"lz4-block: a payload of {len(payload)} bytes decodes to {len(row)} bytes, not {len(out)}"
            )
        out[:] = row
