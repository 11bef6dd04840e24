"""Decodes what `encode_png` writes."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np


def decode_png(data: bytes) -> Any:
    """Decode a PNG written by `encode_png`."""
    at, parts, size = 8, b"", (0, 0, 0)
    while at < len(data):
        length = struct.unpack(">I", data[at : at + 4])[0]
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert zlib.crc32(name + body) == struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0]
        if name == b"IHDR":
            width, height, _, kind = struct.unpack(">IIBB", body[:10])
            size = (height, width, {0: 1, 2: 3}[kind])
        parts += body if name == b"IDAT" else b""
        at += 12 + length
    rows = np.frombuffer(zlib.decompress(parts), np.uint8).reshape(size[0], 1 + size[1] * size[2])
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(size).squeeze()
