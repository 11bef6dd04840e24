"""``none``: rows without compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.errors import CorruptPayloadError


@dataclass(frozen=True, slots=True)
class IdentityCodec(Codec):
    """The payload is the row."""

    codec_id: ClassVar[str] = "none"

    def bound(self, nbytes: int) -> int:
        return nbytes

    def encode(self, row: memoryview) -> bytes:
        return bytes(row)

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        if len(payload) != len(out):
            raise CorruptPayloadError(f"none: a payload of {len(payload)} bytes cannot be a row of {len(out)}")
        out[:] = payload
