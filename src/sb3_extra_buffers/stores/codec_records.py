"""Codecs as JSON, in files and packets, neither of which is trusted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import codec_from_config, is_available, known_codecs
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.stores.checks import only_named_errors, require

# options of a codec that follow from the observations
_FROM_SPEC = frozenset({"elem", "run", "channels", "planar"})


def codec_to_record(codec: Codec) -> list[Any]:
    """Return name, id and settings of a codec as JSON."""
    return [codec.name or codec.codec_id, codec.codec_id, codec.config()]


def read_codecs(records: Any, spec: ObsSpec) -> list[Codec]:
    """Undo `codec_to_record` for a list of codecs of one store with frames of ``spec``."""
    require(isinstance(records, list) and 1 <= len(records) <= 256, "the list of codecs is invalid")
    codecs = []
    for name, codec_id, config in records:
        known = isinstance(name, str) and codec_id in known_codecs() and isinstance(config, dict)
        require(known, f"unknown codec {name!r}; update sb3-extra-buffers")
        # a codec of the same id reads the same payloads
        codec = codec_from_config(name if is_available(name) else codec_id, config)
        bound = codec.bind(spec).config()
        fits = all(bound[key] == value for key, value in codec.config().items() if key in _FROM_SPEC)
        require(fits, f"codec {name!r} with {config!r} does not fit frames of {spec}")
        codecs.append(codec)
    # one that learns is trained again, but stays of its kind
    require(len({codec.codec_id for codec in codecs}) == 1, "a store has payloads of several codecs")
    return codecs


def codec_to_bytes(codec: Codec) -> npt.NDArray[np.uint8]:
    """Return a codec as bytes, for packets; equal codecs have equal bytes."""
    return np.frombuffer(json.dumps(codec_to_record(codec), sort_keys=True).encode(), np.uint8)


def codecs_from_bytes(parts: Sequence[npt.NDArray[np.uint8]], spec: ObsSpec) -> list[Codec]:
    """Undo `codec_to_bytes` for the codecs of one packet."""
    with only_named_errors("a codec"):
        return list(_parse_codecs(tuple(part.tobytes() for part in parts), spec))


@lru_cache(maxsize=8)
def _parse_codecs(texts: tuple[bytes, ...], spec: ObsSpec) -> list[Codec]:
    return read_codecs([json.loads(text) for text in texts], spec)


def same_codec(one: Codec, other: Codec) -> bool:
    """Whether two codecs decode the same payloads."""
    return one.codec_id == other.codec_id and one.config() == other.config()
