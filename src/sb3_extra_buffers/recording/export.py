"""Export the frames of a recording as an image or an animation."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import EmptyBufferError, ExportError
from sb3_extra_buffers.files import disk
from sb3_extra_buffers.recording.images import Image, encode_png, enlarge, tile, write_gif, write_mp4
from sb3_extra_buffers.recording.records import Episode, resolve_index

Array = npt.NDArray[Any]

_SUFFIXES = (".gif", ".mp4", ".png")
# frames to decode at a time
_BLOCK = 64


def export(
    buffer: Any,
    path: str | os.PathLike[str],
    which: Any = None,
    *,
    fps: float = 30,
    scale: int = 1,
    channels: Sequence[int] | int | None = None,
    stretch: bool = False,
) -> Path:
    """Implement `BaseRecordBuffer.export`."""
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ExportError(f"cannot write {target.name!r}; use a name that ends with {', '.join(_SUFFIXES)}")
    if isinstance(fps, bool) or not isinstance(fps, int | float | np.integer | np.floating) or not 0.1 <= fps <= 1000:
        raise ExportError(f"fps must be a number from 0.1 to 1000, got {fps!r}")
    fps = float(fps)
    if not hasattr(scale, "__index__") or scale < 1:
        raise ExportError(f"scale must be an integer of at least 1, got {scale!r}")
    frames = buffer.frames
    if frames is None:
        raise EmptyBufferError(f"a {type(buffer).__name__} holds no frames; record with a RecordBuffer")
    index = slice(None) if which is None else which.indices if isinstance(which, Episode) else which
    indices = np.ravel(resolve_index(index, len(frames)))
    if not len(indices):
        raise EmptyBufferError(f"no frames to write: {which!r} selects none of {len(frames)} records")
    selected = _select_channels(buffer.ch_num, channels)
    channels_first = frames.obs_shape == (buffer.ch_num, *buffer.res)

    def blocks() -> Iterator[Array]:
        """Yield a few frames at a time, channels last."""
        for start in range(0, len(indices), _BLOCK):
            block = frames[indices[start : start + _BLOCK]]
            if block.ndim == 3:
                block = block[..., None]
            elif channels_first:
                block = np.moveaxis(block, 1, -1)
            yield block[..., selected]

    low, high = _value_range(blocks(), frames.dtype, stretch)
    images = (_to_image(frame, low, high, scale) for block in blocks() for frame in block)
    with disk.named_errors(target, f"creating {target.parent}"):
        target.parent.mkdir(parents=True, exist_ok=True)
    with disk.replacing(target) as staged:
        if suffix == ".png":
            staged.write_bytes(encode_png(tile(images, len(indices), math.ceil(math.sqrt(len(indices))))))
        elif suffix == ".gif":
            write_gif(staged, images, fps)
        else:
            write_mp4(staged, images, fps)
    return target


def _select_channels(count: int, channels: Sequence[int] | int | None) -> list[int]:
    if channels is None:
        # the newest frame of a stack: RGB if the number of channels allows it, else greyscale
        return list(range(count - 3, count)) if count % 3 == 0 else [count - 1]
    selected = list(channels) if isinstance(channels, Sequence) else [channels]
    valid = all(type(channel) is int and -count <= channel < count for channel in selected)
    if len(selected) not in (1, 3) or not valid:
        raise ExportError(f"channels must be one or three of {count}, got {channels!r}")
    return selected


def _value_range(blocks: Iterator[Array], dtype: np.dtype[Any], stretch: bool) -> tuple[float, float]:
    """Return the values to show as black and white."""
    if stretch:
        finite = (values for block in blocks if (values := block[np.isfinite(block)]).size)
        ranges = [(values.min(), values.max()) for values in finite] or [(0.0, 1.0)]
        return float(min(low for low, _ in ranges)), float(max(high for _, high in ranges))
    return 0.0, float(np.iinfo(dtype).max) if dtype.kind in "iu" else 1.0


def _to_image(frame: Array, low: float, high: float, scale: int) -> Image:
    if frame.dtype != np.uint8 or (low, high) != (0.0, 255.0):
        fraction = (frame.astype(np.float64) - low) / ((high - low) or 1.0)
        frame = np.rint(255 * np.nan_to_num(fraction.clip(0, 1))).astype(np.uint8)
    frame = enlarge(frame, scale)
    return np.ascontiguousarray(frame[..., 0] if frame.shape[-1] == 1 else frame)
