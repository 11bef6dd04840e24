"""Write images and animations: PNG, GIF and MP4."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers._extras import import_extra
from sb3_extra_buffers.errors import ExportError

__all__ = ["Image", "encode_png", "enlarge", "tile", "write_gif", "write_mp4"]

# pixels of an image in each direction, at most: the limit of GIF
_MAX_SIDE = 65_535

Image = npt.NDArray[np.uint8]  # (height, width) or (height, width, 3)


def encode_png(image: Image) -> bytes:
    """Encode an image as PNG, without Pillow; RGB images with equal channels are stored as greyscale."""
    if image.ndim == 3 and (image == image[..., :1]).all():
        image = image[..., 0]
    height, width = image.shape[:2]
    # each row starts with its filter type, 0 for none
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)
    color_type = 0 if image.ndim == 2 else 2
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0),
        b"IDAT": zlib.compress(rows.tobytes(), 9),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks.items()
    )


def enlarge(images: Image, scale: int) -> Image:
    """Repeat each pixel ``scale`` times in both directions; images are ``(..., height, width, channels)``."""
    height, width = (length * scale for length in images.shape[-3:-1])
    if max(height, width) > _MAX_SIDE:
        raise ExportError(
            f"images of {height}x{width} pixels are too large (scale={scale}); each side has at most {_MAX_SIDE}"
        )
    return images if scale == 1 else images.repeat(scale, axis=-3).repeat(scale, axis=-2)


def tile(images: Iterable[Image], count: int, columns: int, gap: int = 0, background: int = 0) -> Image:
    """Arrange ``count`` images of equal shape on one sheet, row by row."""
    sheet: Image | None = None
    for index, image in enumerate(images):
        height, width = image.shape[:2]
        if sheet is None:
            rows = -(-count // columns)
            shape = (rows * (height + gap) + gap, columns * (width + gap) + gap, *image.shape[2:])
            sheet = np.full(shape, background, np.uint8)
        top, left = gap + index // columns * (height + gap), gap + index % columns * (width + gap)
        sheet[top : top + height, left : left + width] = image
    assert sheet is not None, "there are no images to arrange"
    return sheet


def write_gif(path: Path, images: Iterable[Image], fps: float) -> None:
    """Write an animated GIF, with Pillow."""
    pillow = import_extra("PIL.Image", user="writing a GIF")
    frames = map(pillow.fromarray, images)
    # GIF durations are multiples of 10 ms, and players slow down frames shorter than 20 ms
    duration = max(round(100 / fps), 2) * 10
    # Pillow leaves a file open that it has opened itself, if an image raises
    with path.open("wb") as file:
        next(frames).save(file, "GIF", save_all=True, append_images=frames, duration=duration, loop=0)


def write_mp4(path: Path, images: Iterable[Image], fps: float) -> None:
    """Write an MP4 video, with OpenCV."""
    cv2 = import_extra("cv2", user="writing an MP4", alternative="write a .gif")
    writer: Any = None
    try:
        for image in images:
            height, width = image.shape[:2]
            if writer is None:
                # the encoder needs even dimensions
                size = (width + width % 2, height + height % 2)
                writer = cv2.VideoWriter(_encodable(path), cv2.VideoWriter_fourcc(*"mp4v"), fps, size)
                if not writer.isOpened():
                    # an error of its own if that is why
                    path.open("wb").close()
                    raise ExportError(f"OpenCV has no encoder for MP4 images of {height}x{width}; write a .gif instead")
            rgb = image if image.ndim == 3 else np.stack([image] * 3, axis=-1)
            padded = np.pad(rgb, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            writer.write(np.ascontiguousarray(padded[..., ::-1]))  # OpenCV expects BGR
    finally:
        if writer is not None:
            writer.release()


def _encodable(path: Path) -> str:
    """Return ``path`` as text; OpenCV crashes if its bytes are not valid Unicode."""
    text = str(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ExportError(
            f"OpenCV cannot write to {text!r}, which is not valid Unicode; write a .gif instead"
        ) from None
    return text
