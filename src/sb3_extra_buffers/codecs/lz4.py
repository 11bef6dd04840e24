"""``lz4-frame`` and ``lz4-block``: LZ4 with and without its container."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import lz4.block
import lz4.frame

from sb3_extra_buffers.codecs.base import Codec, check_level
from sb3_extra_buffers.errors import CorruptPayloadError

__all__ = ["Lz4BlockCodec", "Lz4FrameCodec"]

# acceleration is a C int on the other side, and LZ4 adds one to it
_NEGATIVE = range(-(2**31) + 2, 0)


@dataclass(frozen=True, slots=True)
class Lz4FrameCodec(Codec):
    """LZ4 frames at ``level`` 0 to 16, or with acceleration ``-level``."""

    codec_id: ClassVar[str] = "lz4-frame"
    level: int = 0

    def __post_init__(self) -> None:
        check_level(self.codec_id, self.level, [_NEGATIVE, range(17)], "0..16, or negative to accelerate")

    def bound(self, nbytes: int) -> int:
        # header, end mark, and a length before each block of 64 KiB; a block that grows is stored
        return nbytes + 4 * (nbytes // 65536 + 1) + 19 + 4

    def encode(self, row: memoryview) -> bytes:
        payload: bytes = lz4.frame.compress(row, compression_level=self.level, store_size=False)
        return payload

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        frame = lz4.frame.LZ4FrameDecompressor()
        try:
            # one byte of room more than the row, so that a longer one shows and is not decoded further
            row = frame.decompress(payload, max_length=len(out) + 1)
        except (RuntimeError, EOFError) as problem:
            raise CorruptPayloadError(f"lz4-frame: {problem}") from problem
        if not frame.eof or frame.unused_data or len(row) != len(out):
            raise CorruptPayloadError(
                f"lz4-frame: a payload of {len(payload)} bytes is not one frame for a row of {len(out)}"
            )
        out[:] = row


@dataclass(frozen=True, slots=True)
class Lz4BlockCodec(Codec):
    """A bare LZ4 block: ``level`` 1 to 12 compresses harder, 0 is LZ4's default, ``-level`` accelerates."""

    codec_id: ClassVar[str] = "lz4-block"
    level: int = 0

    def __post_init__(self) -> None:
        check_level(
            self.codec_id,
            self.level,
            [_NEGATIVE, range(13)],
            "1..12 (high compression), 0 (default), or negative to accelerate",
        )

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
            raise CorruptPayloadError(f"lz4-block: {len(row)} bytes decoded for a row of {len(out)}")
        out[:] = row
