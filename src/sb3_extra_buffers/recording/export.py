"""Frames of a recording as pictures that move or do not."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import EmptyBufferError, ExportError, IndexOutOfRangeError, MissingExtraError

Pixels = npt.NDArray[np.uint8]
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
    """See `BaseRecordBuffer.export`."""
    target = Path(path)
    writers = {".gif": _write_gif, ".mp4": _write_mp4, ".png": _write_png}
    writer = writers.get(target.suffix.lower())
    if writer is None:
        raise ExportError(f"cannot write {target.name!r}; give it a name that ends with {', '.join(writers)}")
    if not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise ExportError(f"fps must be a positive number, got {fps!r}")
    if not hasattr(scale, "__index__") or scale < 1:
        raise ExportError(f"scale must be a whole number from 1 on, got {scale!r}")
    frames = buffer.frames
    if frames is None:
        raise EmptyBufferError(f"a {type(buffer).__name__} holds no frames; record with a RecordBuffer")
    indices = _indices(which, len(frames))
    if not len(indices):
        raise EmptyBufferError(f"no frames to write: {which!r} selects none of {len(frames)} records")
    picked = _channels(buffer, channels)
    first_axis = frames.obs_shape == (buffer.ch_num, *buffer.res)

    def blocks() -> Iterator[npt.NDArray[Any]]:
        """Frames, a few at a time, channels last."""
        for start in range(0, len(indices), _BLOCK):
            block = frames[indices[start : start + _BLOCK]]
            if block.ndim == 3:
                block = block[..., None]
            elif first_axis:
                block = np.moveaxis(block, 1, -1)
            yield block[..., picked]

    low, high = _range(blocks(), frames.dtype, stretch)

    def pictures() -> Iterator[Pixels]:
        for block in blocks():
            for frame in block:
                yield _picture(frame, low, high, scale)

    target.parent.mkdir(parents=True, exist_ok=True)
    writer(target, pictures(), len(indices), fps)
    return target


def _indices(which: Any, n: int) -> npt.NDArray[np.int64]:
    if which is None:
        return np.arange(n)
    if hasattr(which, "indices") and not isinstance(which, slice):
        which = which.indices
    if isinstance(which, slice):
        return np.arange(*which.indices(n))
    if not hasattr(which, "__index__") or not -n <= which < n:
        raise IndexOutOfRangeError(f"index {which!r} is out of bounds for {n} records")
    return np.array([which % n])


def _channels(buffer: Any, channels: Sequence[int] | int | None) -> list[int]:
    count = buffer.ch_num
    if channels is None:
        # the newest of a stack: three planes where they come in threes, one otherwise
        return list(range(count - 3, count)) if count % 3 == 0 else [count - 1]
    picked = list(channels) if isinstance(channels, Sequence) else [channels]
    if len(picked) not in (1, 3) or not all(type(channel) is int and -count <= channel < count for channel in picked):
        raise ExportError(f"a picture has one channel or three of {count}, got {channels!r}")
    return picked


def _range(blocks: Iterator[npt.NDArray[Any]], dtype: np.dtype[Any], stretch: bool) -> tuple[float, float]:
    """The values that become black and white."""
    if stretch:
        ends = [(block.min(), block.max()) for block in blocks]
        return float(min(low for low, _ in ends)), float(max(high for _, high in ends))
    return (0.0, 1.0) if dtype.kind == "f" else (0.0, float(np.iinfo(dtype).max) if dtype.kind in "iu" else 1.0)


def _picture(frame: npt.NDArray[Any], low: float, high: float, scale: int) -> Pixels:
    if frame.dtype != np.uint8 or (low, high) != (0.0, 255.0):
        spread = (frame.astype(np.float64) - low) / ((high - low) or 1.0)
        frame = np.rint(255 * spread.clip(0, 1)).astype(np.uint8)
    if scale > 1:
        frame = frame.repeat(scale, 0).repeat(scale, 1)
    return np.ascontiguousarray(frame[..., 0] if frame.shape[-1] == 1 else frame)


def _write_gif(path: Path, pictures: Iterator[Pixels], n: int, fps: float) -> None:
    image = _pillow()
    first, *rest = (image.fromarray(picture) for picture in pictures)
    # GIF counts in hundredths of a second, and players take 0 or 1 for ten
    first.save(path, save_all=True, append_images=rest, duration=max(round(100 / fps), 2) * 10, loop=0)


def _write_png(path: Path, pictures: Iterator[Pixels], n: int, fps: float) -> None:
    image = _pillow()
    across = math.ceil(math.sqrt(n))
    sheet: Pixels | None = None
    for number, picture in enumerate(pictures):
        height, width = picture.shape[:2]
        if sheet is None:
            sheet = np.zeros((math.ceil(n / across) * height, across * width, *picture.shape[2:]), np.uint8)
        row, column = divmod(number, across)
        sheet[row * height : (row + 1) * height, column * width : (column + 1) * width] = picture
    image.fromarray(sheet).save(path)


def _write_mp4(path: Path, pictures: Iterator[Pixels], n: int, fps: float) -> None:
    if importlib.util.find_spec("cv2") is None:
        raise MissingExtraError("writing MP4 needs 'cv2': pip install 'sb3-extra-buffers[extra]', or write a .gif")
    cv2: Any = importlib.import_module("cv2")
    film: Any = None
    for picture in pictures:
        height, width = picture.shape[:2]
        if film is None:
            # the format wants an even number of rows and columns
            size = (width + width % 2, height + height % 2)
            film = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), fps, size)
            if not film.isOpened():
                raise ExportError(f"this OpenCV cannot write {path.name!r}; write a .gif")
        colours = picture if picture.ndim == 3 else np.stack([picture] * 3, axis=-1)
        padded = np.pad(colours, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        film.write(np.ascontiguousarray(padded[..., ::-1]))
    film.release()


def _pillow() -> Any:
    if importlib.util.find_spec("PIL") is None:
        raise MissingExtraError("writing pictures needs 'pillow': pip install 'sb3-extra-buffers[extra]'")
    from PIL import Image

    return Image
