"""``palette``: images of few colours as one palette index per pixel, then another codec."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Bytes, Codec
from sb3_extra_buffers.codecs.registry import get_codec, is_available
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.codecs.table import check_inner
from sb3_extra_buffers.errors import CorruptPayloadError

if TYPE_CHECKING:
    from typing_extensions import Self

Colours = npt.NDArray[np.uint32]  # one per pixel, its first byte the lowest

# first byte of a payload: the row as it is, a palette of its own, or the learnt one
_RAW, _OWN, _LEARNT = 0, 1, 2
_MAX_COLOURS = 256
_N_SAMPLES = 256

# colours are looked up by a multiplicative hash of 16 bits; where two collide, the next factor is tried
_FACTORS = tuple(np.uint32(factor) for factor in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1))


@dataclass(frozen=True, slots=True)
class PaletteCodec(Codec):
    """Pixels of 3 or 4 bytes as indices into a palette, compressed by the ``inner`` method.

    Images are stored by a `TableStore`, with one palette for all of them. The format described here is for rows that
    are not images, and for files of earlier versions.

    The first byte of a payload says which palette: the one that `train` learnt, if it has all colours of the image; or
    one of the image's own, of at most 256 colours. Images with more colours, and rows that are not images, go to
    ``inner`` as they are.
    """

    codec_id: ClassVar[str] = "palette"
    options: ClassVar[tuple[str, ...]] = ("inner",)
    inner: str = ""  # empty: the store's default
    channels: int = 0  # bytes per pixel; 0 for rows that are not images
    planar: bool = False  # channels first
    learnt: bytes = field(default=b"", repr=False)  # the palette, sorted

    def __post_init__(self) -> None:
        if self.inner:
            check_inner(self.codec_id, self.inner)

    @property
    def byte_method(self) -> str:
        """The inner method of payloads."""
        return self.inner or ("zstd1" if is_available("zstd") else "gzip1")

    def resolved(self) -> Self:
        return replace(self, inner=self.byte_method)

    def describe(self) -> str:
        return f"palette over {self.byte_method}"

    def bind(self, spec: ObsSpec) -> Self:
        channels, planar = 0, False
        if spec.dtype.itemsize == 1 and len(spec.shape) >= 2:
            if spec.shape[-1] in (3, 4):
                channels = spec.shape[-1]
            elif spec.shape[0] in (3, 4) and len(spec.shape) == 3:
                channels, planar = spec.shape[0], True
        return replace(self, channels=channels, planar=planar, learnt=b"")

    @property
    def trainable(self) -> bool:
        return self.channels > 0

    def train(self, rows: ByteRows) -> Self:
        """Return a copy with a palette of the colours in ``rows``, if they are few enough; call `bind` first."""
        if not self.trainable or not rows.size:
            return self
        step = max(len(rows) // _N_SAMPLES, 1)
        colours = np.unique(np.concatenate([np.unique(self._colours(row)) for row in rows[::step]]))
        return replace(self, learnt=self._to_bytes(colours) if len(colours) <= _MAX_COLOURS else b"")

    def bound(self, nbytes: int) -> int:
        n_pixels = nbytes // self.channels if self.channels else 0
        own = n_pixels + min(n_pixels, _MAX_COLOURS) * self.channels
        return 2 + max(self._inner(nbytes).bound(nbytes), self._inner(nbytes).bound(own))

    def encode(self, row: memoryview) -> bytes:
        inner, nbytes = self._inner(len(row)), len(row)
        if self.channels and nbytes:
            colours = self._colours(np.frombuffer(row, np.uint8))
            if self.learnt:
                indices = _lookup(colours, *_table(self.learnt, self.channels))
                if indices is not None:
                    return bytes((_LEARNT,)) + inner.encode(indices.data)
            indexed = _index(colours)
            if indexed is not None:
                indices, palette = indexed
                own = indices.tobytes() + self._to_bytes(palette)
                return bytes((_OWN, len(palette) - 1)) + inner.encode(memoryview(own))
        return bytes((_RAW,)) + inner.encode(row)

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        inner, kind = self._inner(len(out)), payload[0] if len(payload) else None
        n_pixels = len(out) // self.channels if self.channels else 0
        if kind == _RAW:
            inner.decode_into(payload[1:], out)
        elif kind == _LEARNT and self.learnt and n_pixels:
            indices = np.empty(n_pixels, np.uint8)
            inner.decode_into(payload[1:], indices.data)
            self._paint(np.frombuffer(self.learnt, np.uint8), indices, out)
        elif kind == _OWN and n_pixels and len(payload) > 1 and payload[1] < n_pixels:
            own = np.empty(n_pixels + (payload[1] + 1) * self.channels, np.uint8)
            inner.decode_into(payload[2:], own.data)
            self._paint(own[n_pixels:], own[:n_pixels], out)
        else:
            raise CorruptPayloadError(f"palette: a payload of kind {kind} cannot be a row of {len(out)} bytes")

    def _inner(self, nbytes: int) -> Codec:
        # upper limit of what it has to encode: one index and one colour per pixel
        limit = nbytes // self.channels * (self.channels + 1) if self.channels else nbytes
        return _bound_inner(self.byte_method, limit)

    def _colours(self, row: Bytes) -> Colours:
        pixels = np.zeros((len(row) // self.channels, 4), np.uint8)
        planes = row.reshape(self.channels, -1) if self.planar else row.reshape(-1, self.channels).T
        for channel, plane in enumerate(planes):
            pixels[:, channel] = plane
        return pixels.view("<u4").reshape(-1)

    def _to_bytes(self, colours: Colours) -> bytes:
        return colours.astype("<u4").view(np.uint8).reshape(-1, 4)[:, : self.channels].tobytes()

    def _paint(self, palette: Bytes, indices: Bytes, out: memoryview) -> None:
        palette = palette.reshape(-1, self.channels)
        if indices.max() >= len(palette):
            raise CorruptPayloadError(f"palette: a pixel has colour {indices.max()} of {len(palette)}")
        pixels = np.frombuffer(out, np.uint8)
        if self.planar:
            for plane, shades in zip(pixels.reshape(self.channels, -1), palette.T, strict=True):
                np.take(shades, indices, out=plane, mode="clip")
        else:
            pixel = np.dtype((np.void, self.channels))
            colours = np.ascontiguousarray(palette).view(pixel).reshape(-1)
            np.take(colours, indices, out=pixels.view(pixel), mode="clip")


@lru_cache(maxsize=64)
def _bound_inner(method: str, nbytes: int) -> Codec:
    return get_codec(method).bind(ObsSpec((nbytes,), np.dtype(np.uint8)))


def _hash(colours: Colours, factor: np.uint32) -> npt.NDArray[np.intp]:
    # intp, because NumPy would convert any other type at each use as an index
    return ((colours * factor) >> np.uint32(16)).astype(np.intp)


def _index(colours: Colours) -> tuple[Bytes, Colours] | None:
    """Return palette indices and the sorted palette, or None if there are too many colours."""
    table = np.empty(65536, np.uint32)
    for factor in _FACTORS:
        hashes = _hash(colours, factor)
        used = np.zeros(65536, np.bool_)
        used[hashes] = True
        filled = np.flatnonzero(used)
        if len(filled) > _MAX_COLOURS:
            return None
        table[hashes] = colours
        if np.array_equal(table[hashes], colours):
            palette = table[filled]
            order = np.argsort(palette)
            ranks = np.empty(65536, np.uint8)
            ranks[filled[order]] = np.arange(len(filled), dtype=np.uint8)
            return ranks[hashes], palette[order]
    palette, inverse = np.unique(colours, return_inverse=True)
    return (inverse.astype(np.uint8), palette) if len(palette) <= _MAX_COLOURS else None


def _lookup(colours: Colours, palette: Colours, factor: np.uint32, ranks: Bytes) -> Bytes | None:
    """Return indices into ``palette``, or None if a colour is not in it."""
    indices = ranks[_hash(colours, factor)]
    return indices if np.array_equal(palette.take(indices), colours) else None


@lru_cache(maxsize=16)
def _table(learnt: bytes, channels: int) -> tuple[Colours, np.uint32, Bytes]:
    """Return the palette, a hash factor without collisions, and the palette index for each hash."""
    pixels = np.zeros((len(learnt) // channels, 4), np.uint8)
    pixels[:, :channels] = np.frombuffer(learnt, np.uint8).reshape(-1, channels)
    palette = pixels.view("<u4").reshape(-1).astype(np.uint32)
    # about every second odd number has no collisions; if none does, the last one is used, and images with colours
    # that collide get palettes of their own
    for factor in np.random.default_rng(0).integers(0, 2**32, 64, np.uint32) | np.uint32(1):
        hashes = _hash(palette, factor)
        if len(np.unique(hashes)) == len(palette):
            break
    # unused hashes map to index 0; `_lookup` compares, so other colours with such a hash are noticed
    ranks = np.zeros(65536, np.uint8)
    ranks[hashes] = np.arange(len(palette), dtype=np.uint8)
    return palette, factor, ranks
