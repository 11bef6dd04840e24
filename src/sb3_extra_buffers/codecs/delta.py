"""The ``delta`` format: a row as the bytes that differ from a reference row.

A difference consists of six sections. The length of each follows from the contents of those before it:

====================  ==========================================================================
``top``               one bit per 512 bytes of the row: whether anything changes there
``groups``            one byte per set bit: which of its eight 64-byte lines change
``lines``             one byte per changed line: which of its eight 8-byte words change
``words``             one byte per changed word: which of its eight bytes change
``fresh``             one bit per changed byte: whether its value differs from the changed byte before
``values``            the new value of every changed byte whose ``fresh`` bit is set
====================  ==========================================================================

Bits are numbered from the least significant. Every position is a running count of set bits, so NumPy, numba, torch and
Triton can all read and write whole batches of differences. A difference as long as the row is the row itself; an empty
one means that nothing changed.

`encode_delta` and `apply_delta` are the reference for all kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Bytes, Codec, check_frames
from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.errors import CodecLevelError, CorruptPayloadError

#: bytes of a row that one byte of ``top`` covers
BLOCK = 4096

# level: (frames per segment, zstd level for a segment's differences; 0: LZ4 where that pays)
_LEVELS = {1: (8, 0), 2: (32, 3), 3: (64, 9)}


def top_bytes(nbytes: int) -> int:
    """Length of the ``top`` section for rows of ``nbytes``."""
    return -(-nbytes // BLOCK)


def padded(nbytes: int) -> int:
    """Row length rounded up so that every position that a difference can encode is inside."""
    return max(top_bytes(nbytes), 1) * BLOCK


@dataclass(frozen=True, slots=True)
class DeltaCodec(Codec):
    """Differences to a reference row, in segments that start from a shared keyframe.

    Alone, this codec encodes a row as its difference to zeros. The frame store encodes each frame against the one
    before it, ``frames`` per segment; the first one of a segment against a keyframe, which many segments share.

    Level 1 decodes fastest; it compresses only segments in which much changes, with LZ4. Levels 2 and 3 have longer
    segments and compress all of them with zstd: less memory, slower reads.
    """

    codec_id: ClassVar[str] = "delta"
    options: ClassVar[tuple[str, ...] | None] = ("level", "frames")
    level: int = 1
    frames: int = 0  # 0: the default of the level

    def __post_init__(self) -> None:
        if self.level not in _LEVELS:
            raise CodecLevelError(f"delta level must be 1..3, got {self.level!r}")
        frames = _LEVELS[self.level][0] if self.frames == 0 else self.frames
        object.__setattr__(self, "frames", check_frames("delta", frames))
        if self.level > 1:
            get_codec("zstd")  # raises, and says what to install, where it is missing

    @property
    def pack_level(self) -> int:
        """zstd level for all segments; 0: LZ4, and only for segments in which much changes."""
        return _LEVELS[self.level][1]

    def describe(self) -> str:
        return "delta" if self.level == 1 else f"delta{self.level}"

    def bound(self, nbytes: int) -> int:
        return nbytes

    def encode(self, row: memoryview) -> bytes:
        current = np.frombuffer(row, np.uint8)
        return encode_delta(current, np.zeros_like(current))

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        row = np.zeros(padded(len(out)), np.uint8)
        apply_delta(np.frombuffer(payload, np.uint8), row, len(out))
        np.frombuffer(out, np.uint8)[:] = row[: len(out)]


def encode_delta(row: Bytes, reference: Bytes) -> bytes:
    """Encode ``row`` as its difference to ``reference``, or as itself where the difference would not be shorter."""
    size = row.size
    bits = changed = row != reference
    sections: list[Bytes] = []
    for _ in range(3):
        masks = np.packbits(bits, bitorder="little")
        bits = masks != 0
        sections.append(masks[bits])
    if not sections[-1].size:
        return b""
    values = row[changed]
    fresh = np.empty(values.size, bool)
    fresh[0] = True
    np.not_equal(values[1:], values[:-1], out=fresh[1:])
    top = np.packbits(bits, bitorder="little")
    payload = np.concatenate([top, *reversed(sections), np.packbits(fresh, bitorder="little"), values[fresh]])
    return payload.tobytes() if payload.size < size else row.tobytes()


def apply_delta(payload: Bytes, row: Bytes, size: int) -> None:
    """Apply a difference to the reference ``row[:size]``; ``row`` has `padded` bytes, scratch past ``size``."""
    if payload.size == 0:
        return
    if payload.size == size:
        row[:size] = payload
        return
    positions, values = delta_positions(payload, size)
    row[positions] = values


def delta_positions(payload: Bytes, size: int) -> tuple[npt.NDArray[np.intp], Bytes]:
    """Return the positions and new values of all bytes that a difference to a row of ``size`` bytes changes."""
    at = top_bytes(size)
    if payload.size < at:
        raise CorruptPayloadError(f"delta: a payload of {payload.size} bytes is shorter than its first section of {at}")
    where = np.flatnonzero(np.unpackbits(payload[:at], bitorder="little"))
    for _ in range(3):
        masks = payload[at : at + where.size]
        if masks.size < where.size:
            raise CorruptPayloadError(
                f"delta: a payload of {payload.size} bytes should have at least {at + where.size}"
            )
        at += where.size
        bits = np.unpackbits(masks, bitorder="little").reshape(-1, 8)
        parent, bit = np.nonzero(bits)
        where = where[parent] * 8 + bit
    fresh_bytes = -(-where.size // 8)
    if payload.size < at + fresh_bytes:
        raise CorruptPayloadError(f"delta: a payload of {payload.size} bytes should have at least {at + fresh_bytes}")
    fresh = np.unpackbits(payload[at : at + fresh_bytes], bitorder="little")
    at += fresh_bytes
    if payload.size != at + int(fresh.sum()):
        raise CorruptPayloadError(f"delta: a payload of {payload.size} bytes should have {at + int(fresh.sum())}")
    ranks = np.cumsum(fresh[: where.size], dtype=np.intp) + (at - 1)
    return where, payload[ranks]
