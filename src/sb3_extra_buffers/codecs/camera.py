"""``camera``: for images in which most pixels change a little, such as camera and depth images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sb3_extra_buffers.codecs.base import Codec, check_frames
from sb3_extra_buffers.codecs.identity import IdentityCodec


@dataclass(frozen=True, slots=True)
class CameraCodec(Codec):
    """Predicts tiles from neighbouring pixels and earlier frames, and packs the residuals into as few bits as possible.

    ``frames`` is the number of frames in a segment; at most three of them are decoded to read one.

    For single rows, this codec does nothing. The frame store encodes whole segments; `kernels.camera` documents the
    format.
    """

    codec_id: ClassVar[str] = "camera"
    options: ClassVar[tuple[str, ...] | None] = ("frames",)
    frames: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "frames", check_frames("camera", self.frames))

    def bound(self, nbytes: int) -> int:
        return nbytes

    def encode(self, row: memoryview) -> bytes:
        return bytes(row)

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        IdentityCodec().decode_into(payload, out)
