"""``palette``: frames of few colours as one index a pixel, then a byte codec."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import get_codec, is_available
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import CodecOptionError, CorruptPayloadError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PaletteCodec"]

_RAW, _OWN, _LEARNT = 0, 1, 2  # first byte of a payload
_MAX_COLOURS = 256
_N_SAMPLES = 256

# colours are looked up by a multiplicative hash of 16 bits; where two meet, the next factor is tried
_FACTORS = tuple(np.uint32(factor) for factor in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1))


@dataclass(frozen=True, slots=True)
class PaletteCodec(Codec):
    """Pixels of 3 or 4 bytes as indices into a palette, through the ``inner`` method.

    A payload says how it was written: all colours of the frame are in the palette that `train` learnt, or
    the frame brings its own of at most 256, or it has more and the row goes to ``inner`` as it is.
    So does every row that is no image.
    """

    codec_id: ClassVar[str] = "palette"
    options: ClassVar[tuple[str, ...]] = ("inner",)
    inner: str = ""
    channels: int = 0  # bytes of a pixel; 0 for rows that are no image
    planar: bool = False  # whether each channel is a plane of its own
    learnt: bytes = field(default=b"", repr=False)  # the palette, sorted

    def __post_init__(self) -> None:
        if not self.inner:
            object.__setattr__(self, "inner", "zstd1" if is_available("zstd") else "gzip1")
        codec = get_codec(self.inner)
        if codec.codec_id in ("palette", "delta"):
            raise CodecOptionError(f"palette needs a byte codec such as 'zstd1' inside, got {self.inner!r}")

    def config(self) -> dict[str, Any]:
        return {**Codec.config(self), "learnt": base64.b64encode(self.learnt).decode("ascii")}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(**{**config, "learnt": base64.b64decode(config.get("learnt", ""), validate=True)})

    def describe(self) -> str:
        return f"palette over {self.inner}"

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
        """Return a copy that knows the colours of ``rows``, if they are few enough; `bind` first."""
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
            found = _index(colours)
            if found is not None:
                indices, palette = found
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
            raise CorruptPayloadError(f"palette: a payload of kind {kind} for a row of {len(out)} bytes")

    def _inner(self, nbytes: int) -> Codec:
        # the most it is given: an index for each pixel and as many colours
        most = nbytes // self.channels * (self.channels + 1) if self.channels else nbytes
        return _bound_inner(self.inner, most)

    def _colours(self, row: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
        """Each pixel as one number, its first byte the lowest."""
        pixels = np.zeros((len(row) // self.channels, 4), np.uint8)
        planes = row.reshape(self.channels, -1) if self.planar else row.reshape(-1, self.channels).T
        for channel, plane in enumerate(planes):
            pixels[:, channel] = plane
        return pixels.view("<u4").reshape(-1)

    def _to_bytes(self, colours: npt.NDArray[np.uint32]) -> bytes:
        return colours.astype("<u4").view(np.uint8).reshape(-1, 4)[:, : self.channels].tobytes()

    def _paint(self, palette: npt.NDArray[np.uint8], indices: npt.NDArray[np.uint8], out: memoryview) -> None:
        palette = palette.reshape(-1, self.channels)
        if indices.max() >= len(palette):
            raise CorruptPayloadError(f"palette: a pixel of colour {indices.max()} of {len(palette)}")
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


def _hash(colours: npt.NDArray[np.uint32], factor: np.uint32) -> npt.NDArray[np.intp]:
    # as the type that NumPy indexes by: it would convert at each use
    return ((colours * factor) >> np.uint32(16)).astype(np.intp)


def _index(
    colours: npt.NDArray[np.uint32],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]] | None:
    """Indices and the sorted palette they point into, or None when there are too many colours."""
    table = np.empty(65536, np.uint32)
    for factor in _FACTORS:
        slots = _hash(colours, factor)
        used = np.zeros(65536, np.bool_)
        used[slots] = True
        filled = np.flatnonzero(used)
        if len(filled) > _MAX_COLOURS:
            return None
        table[slots] = colours
        if np.array_equal(table[slots], colours):
            palette = table[filled]
            order = np.argsort(palette)
            ranks = np.empty(65536, np.uint8)
            ranks[filled[order]] = np.arange(len(filled), dtype=np.uint8)
            return ranks[slots], palette[order]
    palette, inverse = np.unique(colours, return_inverse=True)
    return (inverse.astype(np.uint8), palette) if len(palette) <= _MAX_COLOURS else None


def _lookup(
    colours: npt.NDArray[np.uint32],
    palette: npt.NDArray[np.uint32],
    factor: np.uint32,
    ranks: npt.NDArray[np.uint8],
) -> npt.NDArray[np.uint8] | None:
    """Indices into ``palette``, or None when a colour is not in it."""
    indices = ranks[_hash(colours, factor)]
    return indices if np.array_equal(palette.take(indices), colours) else None


@lru_cache(maxsize=16)
def _table(learnt: bytes, channels: int) -> tuple[npt.NDArray[np.uint32], np.uint32, npt.NDArray[np.uint8]]:
    """The palette, a factor that keeps its colours apart, and the index of each in its slot."""
    pixels = np.zeros((len(learnt) // channels, 4), np.uint8)
    pixels[:, :channels] = np.frombuffer(learnt, np.uint8).reshape(-1, channels)
    palette = pixels.view("<u4").reshape(-1).astype(np.uint32)
    # about every second odd number will do; the last is used even if it does not, and such frames
    # then bring their own palette
    for factor in np.random.default_rng(0).integers(0, 2**32, 64, np.uint32) | np.uint32(1):
        slots = _hash(palette, factor)
        if len(np.unique(slots)) == len(palette):
            break
    # an empty slot says 0: no colour that falls into it is the first one, so the comparison fails
    ranks = np.zeros(65536, np.uint8)
    ranks[slots] = np.arange(len(palette), dtype=np.uint8)
    return palette, factor, ranks
