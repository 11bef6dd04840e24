"""``table``: numbers with few distinct values, as one-byte table indices that another method stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import CodecOptionError, CorruptPayloadError, SpecMismatchError

if TYPE_CHECKING:
    from typing_extensions import Self

#: Sizes of numbers that a table can hold.
NUMBER_BYTES = (2, 4, 8)
# an axis longer than this is not taken for the channels of stacked images
_MAX_CHANNELS = 64


def check_inner(name: str, method: str) -> None:
    """Raise unless ``method`` can store indices for the method ``name``."""
    if not isinstance(method, str) or method == "auto" or get_codec(method).codec_id in ("palette", "table"):
        raise CodecOptionError(
            f"the inner method of {name} must be a byte codec, 'none', 'delta', 'scroll' or 'camera', got {method!r}"
        )


def find_unit(spec: ObsSpec) -> tuple[int, bool] | None:
    """Return the bytes per unit (number or pixel) of observations or frames, and whether channels come first.

    Numbers of 2, 4 or 8 bytes are units. With dtypes of one byte, the pixels of images are: those with three or four
    channels, or of stacked images with three channels each. Returns None if there are no units.
    """
    if spec.dtype.itemsize > 1:
        return (spec.dtype.itemsize, False) if spec.dtype.itemsize in NUMBER_BYTES and spec.nbytes else None
    if len(spec.shape) < 2 or not spec.nbytes:
        return None
    first, last = spec.shape[0], spec.shape[-1]
    if last in (3, 4):
        return last, False
    if len(spec.shape) != 3:
        return None
    if first in (3, 4):
        return first, True
    # stacked images: the channels are the shorter axis
    channels, planar = min((last, False), (first, True))
    return (3, planar) if channels <= _MAX_CHANNELS and channels % 3 == 0 else None


@dataclass(frozen=True, slots=True)
class TableCodec(Codec):
    """Indices into a table of at most 256 numbers of 2, 4 or 8 bytes, stored by the ``inner`` method.

    The table belongs to the store, and indices follow the order of the numbers: observations such as ``image / 255`` as
    float32 take as much memory as the image. For single rows, this codec does nothing.
    """

    codec_id: ClassVar[str] = "table"
    inner: str = "delta"

    def __post_init__(self) -> None:
        check_inner(self.codec_id, self.inner)

    def describe(self) -> str:
        return f"table over {self.inner}"

    def bind(self, spec: ObsSpec) -> Self:
        if spec.dtype.itemsize not in NUMBER_BYTES:
            raise SpecMismatchError(
                f"'table' is for numbers of 2, 4 or 8 bytes, such as float32, not for observations of {spec}; "
                "use 'palette' for images of few colours, or 'delta'"
            )
        return self

    def bound(self, nbytes: int) -> int:
        return nbytes

    def encode(self, row: memoryview) -> bytes:
        return bytes(row)

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        if len(payload) != len(out):
            raise CorruptPayloadError(f"table: a payload of {len(payload)} bytes cannot be a row of {len(out)}")
        out[:] = payload
