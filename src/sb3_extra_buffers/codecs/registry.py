"""The table of codecs, and the conversion of method strings such as ``"zstd-5"`` to codecs."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.errors import (
    CodecLevelError,
    CodecOptionError,
    MissingExtraError,
    UnknownCodecError,
)

__all__ = [
    "CodecEntry",
    "available_codecs",
    "codec_from_config",
    "get_codec",
    "is_available",
    "known_codecs",
    "parse_method",
]


@dataclass(frozen=True, slots=True)
class CodecEntry:
    """Where a codec is defined, the package it needs and our extra that installs that; imported by `load`."""

    target: str
    requires: str | None = None
    extra: str = ""

    @property
    def available(self) -> bool:
        return self.requires is None or importlib.util.find_spec(self.requires) is not None

    def load(self) -> type[Codec]:
        module, _, name = self.target.partition(":")
        codec: type[Codec] = getattr(importlib.import_module(module), name)
        return codec


_HERE = "sb3_extra_buffers.codecs"
_ENTRIES = {
    "none": CodecEntry(f"{_HERE}.identity:IdentityCodec"),
    "rle": CodecEntry(f"{_HERE}.rle:RleCodec"),
    "rle-jit": CodecEntry(f"{_HERE}.rle_jit:RleJitCodec", "numba", "numba"),
    "gzip": CodecEntry(f"{_HERE}.gzip:GzipCodec"),
    "igzip": CodecEntry(f"{_HERE}.igzip:IgzipCodec", "isal", "isal"),
    "zstd": CodecEntry(f"{_HERE}.zstd:ZstdCodec", "zstandard", "zstd"),
    "lz4-frame": CodecEntry(f"{_HERE}.lz4:Lz4FrameCodec", "lz4", "lz4"),
    "lz4-block": CodecEntry(f"{_HERE}.lz4:Lz4BlockCodec", "lz4", "lz4"),
    "delta": CodecEntry(f"{_HERE}.delta:DeltaCodec"),
    "scroll": CodecEntry(f"{_HERE}.scroll:ScrollCodec", "lz4", "lz4"),
    "camera": CodecEntry(f"{_HERE}.camera:CameraCodec"),
    "palette": CodecEntry(f"{_HERE}.palette:PaletteCodec"),
    "table": CodecEntry(f"{_HERE}.table:TableCodec"),
}

# "gzip5", "zstd-5"; a name that contains a dash takes its level after a slash: "lz4-frame/5"
_METHOD = re.compile(r"((?:[A-Za-z]+)|(?:[\w\-]+/))(\-?[0-9]+)")

# not a codec: stores choose one from the data
_AUTO = "auto"


def parse_method(method: str) -> tuple[str, int | None]:
    """Split ``"zstd-5"`` into ``("zstd", -5)``; for ``"zstd"`` and ``"palette:zstd-5"``, the level is ``None``."""
    if not isinstance(method, str):
        raise UnknownCodecError(f"the compression method must be a string, got {method!r}; 'none' does not compress")
    name, colon, _ = method.partition(":")
    match = _METHOD.fullmatch(method)
    if match is None or colon:
        return name if colon else method, None
    return match[1].removesuffix("/"), int(match[2])


def known_codecs() -> tuple[str, ...]:
    """Names of all codecs, whether or not their packages are installed."""
    return tuple(_ENTRIES)


def is_available(name: str) -> bool:
    """Whether ``name`` is known and the package it needs, if any, is installed."""
    entry = _ENTRIES.get(name)
    return entry is not None and entry.available


def available_codecs() -> tuple[str, ...]:
    """Names of the codecs whose packages are installed."""
    return tuple(name for name, entry in _ENTRIES.items() if entry.available)


def get_codec(method: str, **options: Any) -> Codec:
    """Build the codec for ``method``, or raise an error that says why that is impossible.

    Options are the codec's own, such as ``dictionary=16384`` for ``zstd``; ``level``, also spelled
    ``compresslevel``, overrides the one in ``method``. ``"palette:zstd1"`` is ``"palette"`` with ``inner="zstd1"``.
    """
    name, level = parse_method(method)
    codec = _load(name, method)
    if ":" in method:
        options.setdefault("inner", method.partition(":")[2])
    levels = [options.pop(key) for key in ("level", "compresslevel") if options.get(key) is not None]
    if len(levels) == 2 and levels[0] != levels[1]:
        raise CodecOptionError(
            f"level and compresslevel are one option, got {levels[0]!r} and {levels[1]!r}; pass one of them"
        )
    level = levels[0] if levels else level
    options = {key: value for key, value in options.items() if key not in ("level", "compresslevel")}
    allowed = _options(codec)
    if level is not None:
        if "level" not in allowed:
            raise CodecLevelError(f"codec {name!r} has no levels, got {level!r}; leave the level out")
        options["level"] = level
    unknown = sorted(options.keys() - set(allowed))
    if unknown:
        raise CodecOptionError(
            f"codec {name!r} has no option {', '.join(map(repr, unknown))}; "
            f"it takes {', '.join(map(repr, allowed)) or 'none'}"
        )
    return codec(**options)


def codec_from_config(name: str, config: Mapping[str, Any]) -> Codec:
    """Rebuild a codec from its name or ``codec_id`` and the result of `Codec.config`."""
    codec = _load(name, name)
    unknown = sorted(config.keys() - {f.name for f in fields(codec)})  # type: ignore[arg-type]  # a dataclass
    if unknown:
        raise CodecOptionError(
            f"codec {name!r} has no field {', '.join(map(repr, unknown))}; was this written by a newer version?"
        )
    return codec.from_config(config)


def _load(name: str, method: str) -> type[Codec]:
    entry = _ENTRIES.get(name)
    if entry is None:
        raise UnknownCodecError(
            f"unknown compression method {method!r}; known: {', '.join([_AUTO, *_ENTRIES])}, "
            "optionally with a level ('igzip3', 'zstd-5', 'lz4-frame/5')"
        )
    if not entry.available:
        raise MissingExtraError(
            f"codec {name!r} needs the package {entry.requires!r}: {MissingExtraError.hint(entry.extra)}"
        )
    return entry.load()


def _options(codec: type[Codec]) -> tuple[str, ...]:
    if codec.options is not None:
        return codec.options
    return tuple(f.name for f in fields(codec) if f.init)  # type: ignore[arg-type]  # a dataclass


def codec_options(
    method: str, compression: Mapping[str, Any] | None, decompression: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the options for `get_codec`. There are none for decompression: payloads need no options to decode."""
    if decompression:
        raise CodecOptionError(
            f"{method!r} takes no decompression_kwargs, got {', '.join(map(repr, decompression))}; remove them"
        )
    options = dict(compression or {})
    # files describe options in JSON, which has no NumPy scalars
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()}
