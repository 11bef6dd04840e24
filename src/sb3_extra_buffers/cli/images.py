"""Images of the observations in a saved buffer: single ones, contact sheets and animations."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers._extras import import_extra
from sb3_extra_buffers.cli.frames import FrameReader
from sb3_extra_buffers.cli.reader import BufferReader
from sb3_extra_buffers.errors import ArgumentError, EmptyBufferError
from sb3_extra_buffers.recording.images import Image, encode_png, enlarge, tile, write_gif, write_mp4

Array = npt.NDArray[Any]

# observations to decode at a time
_BLOCK = 64


def read_images(reader: BufferReader, key: str | None, steps: Array, envs: Array) -> Iterator[Image]:
    """Yield the newest frame, as RGB, of the observation at each pair of step and environment."""
    frames = FrameReader(reader, reader.image_leaf(key))
    for start in range(0, len(steps), _BLOCK):
        block = slice(start, start + _BLOCK)
        newest = frames.read(steps[block], envs[block])[:, -1]
        yield from newest if newest.shape[-1] == 3 else newest.repeat(3, axis=-1)


def montage(reader: BufferReader, count: int, columns: int, key: str | None, scale: int) -> Image:
    """Return a contact sheet of ``count`` observations, evenly spaced over the buffer."""
    total = reader.n_transitions
    if not total:
        raise EmptyBufferError("the buffer is empty: there is nothing to show")
    chosen = np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))
    images = read_images(reader, key, chosen // reader.n_envs, chosen % reader.n_envs)
    return tile(
        (enlarge(image, scale) for image in images), len(chosen), min(columns, len(chosen)), gap=2, background=32
    )


def choose_steps(reader: BufferReader, episode: int | None) -> tuple[npt.NDArray[np.int64], int]:
    """Return the steps and the environment of an episode; all steps of environment 0 if ``episode`` is None."""
    if not reader.n_transitions:
        raise EmptyBufferError("the buffer is empty: there is nothing to show")
    if episode is None:
        return np.arange(reader.n_steps), 0
    episodes = reader.episodes()
    if not -len(episodes) <= episode < len(episodes):
        raise ArgumentError(f"there is no episode {episode}; episodes are numbered 0 to {len(episodes) - 1}")
    return episodes[episode].steps, episodes[episode].env


def write_animation(path: Path, images: Iterable[Image], fps: float, scale: int) -> None:
    """Write a GIF or an MP4, depending on the suffix of ``path``."""
    writer = write_mp4 if path.suffix.lower() == ".mp4" else write_gif
    writer(path, (enlarge(image, scale) for image in images), fps)


def encode_image(image: Image, suffix: str) -> bytes:
    """Encode an image in the format of a file's suffix; all but PNG need Pillow."""
    if suffix.lower() == ".png":
        return encode_png(image)
    pillow, out = import_extra("PIL.Image", user=f"writing a {suffix} image", alternative="write a .png"), io.BytesIO()
    # best quality: the images have few pixels
    options = {".jpg": {"format": "JPEG", "quality": 95}, ".webp": {"format": "WEBP", "lossless": True}}
    chosen = options.get(suffix.lower().replace("jpeg", "jpg"), {"format": "GIF"})
    pillow.fromarray(image).save(out, **chosen)
    return out.getvalue()
