"""``scroll``: consecutive frames compressed together, so that content that has moved is found in earlier frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sb3_extra_buffers.codecs.base import Codec, check_frames
from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.errors import CodecLevelError

# level: (frames per segment, zstd level; 0 for LZ4)
_LEVELS = {1: (4, 0), 2: (8, 1), 3: (32, 9)}


@dataclass(frozen=True, slots=True)
class ScrollCodec(Codec):
    """Consecutive frames compressed together, for scrolling views and returning scenery.

    Level 1 compresses 4 frames with LZ4, which decompresses fastest. Level 2 uses zstd, with a dictionary of earlier
    frames if that saves memory: smaller, and several times slower to read. Level 3 is for archives: 32 frames, and a
    higher level of zstd. ``frames`` sets the number of frames in a segment.

    Single rows are encoded with LZ4 or zstd. The frame store compresses whole segments.
    """

    codec_id: ClassVar[str] = "scroll"
    options: ClassVar[tuple[str, ...] | None] = ("level", "frames")
    level: int = 1
    frames: int = 0  # 0: the default of the level

    def __post_init__(self) -> None:
        if self.level not in _LEVELS:
            raise CodecLevelError(f"scroll level must be 1..3, got {self.level!r}")
        frames = _LEVELS[self.level][0] if self.frames == 0 else self.frames
        object.__setattr__(self, "frames", check_frames("scroll", frames))
        self._row_codec()  # if zstd is missing, raises an error that says what to install

    @property
    def pack_level(self) -> int:
        """zstd level for segments; 0 for LZ4."""
        return _LEVELS[self.level][1]

    def describe(self) -> str:
        return "scroll" if self.level == 1 else f"scroll{self.level}"

    def bound(self, nbytes: int) -> int:
        return self._row_codec().bound(nbytes)

    def encode(self, row: memoryview) -> bytes:
        return self._row_codec().encode(row)

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        self._row_codec().decode_into(payload, out)

    def _row_codec(self) -> Codec:
        return get_codec(f"zstd{self.pack_level}" if self.pack_level else "lz4-block/3")
