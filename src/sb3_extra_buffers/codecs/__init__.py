"""Codecs: rows of bytes to payloads and back. This layer needs NumPy only and knows nothing of stores.

To add a codec, write one module and one line in `registry`:

1. A module with a frozen dataclass that subclasses `Codec` and defines ``codec_id``, ``bound``, ``encode`` and
   ``decode_into``; `gzip` is a short example. Its fields are the options users can set. It may import an optional
   package at the top: codec modules are imported when a codec is built.
2. An entry in ``registry._ENTRIES``: the name in method strings, the class, and the package and extra it needs, if any.

The contract tests in ``tests/codecs`` run for every registered codec. Add golden bytes with ``tests/golden/make.py``,
so that later versions keep decoding them.
"""

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
