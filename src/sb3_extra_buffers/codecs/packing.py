"""zstd for byte strings of any length, as the last stage of another codec."""

from __future__ import annotations

from typing import Any

import zstandard

from sb3_extra_buffers.codecs.zstd import _context
from sb3_extra_buffers.errors import CorruptPayloadError

__all__ = ["pack", "unpack"]


def pack(data: Any, level: int) -> bytes:
    """Compress ``data``; its length must be kept elsewhere."""
    packed: bytes = _context(_packer, level).compress(data)
    return packed


def unpack(packed: Any, nbytes: int) -> bytes:
    """Undo `pack`, or raise `CorruptPayloadError` if that does not give ``nbytes``."""
    try:
        data: bytes = _context(_unpacker).decompress(packed, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as problem:
        raise CorruptPayloadError(f"zstd: {problem}") from problem
    if len(data) != nbytes:
        raise CorruptPayloadError(f"{len(packed)} packed bytes hold {len(data)} where {nbytes} are due")
    return data


def _packer(level: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=level, write_content_size=False, write_checksum=False)


def _unpacker() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor()
