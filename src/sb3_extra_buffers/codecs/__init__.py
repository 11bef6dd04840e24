"""Codecs: rows of bytes to payloads and back. Knows NumPy and nothing of what is stored."""

from __future__ import annotations

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import (
    available_codecs,
    codec_from_config,
    get_codec,
    is_available,
    known_codecs,
    parse_method,
)
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec

__all__ = [
    "ByteRows",
    "Codec",
    "ObsSpec",
    "available_codecs",
    "codec_from_config",
    "get_codec",
    "is_available",
    "known_codecs",
    "parse_method",
]
