"""Images of the observations in a saved buffer: single ones, contact sheets and animations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.cli.frames import FrameReader
from sb3_extra_buffers.cli.reader import BufferReader
from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.recording.images import Image, enlarge, tile, write_gif, write_mp4

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
        raise FileFormatError("the buffer is empty: there is nothing to show")
    chosen = np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))
    images = read_images(reader, key, chosen // reader.n_envs, chosen % reader.n_envs)
    return tile(
        (enlarge(image, scale) for image in images), len(chosen), min(columns, len(chosen)), gap=2, background=32
    )


def episode_images(
    reader: BufferReader, episode: int | None, key: str | None, max_steps: int, scale: int
) -> list[Image]:
    """Return the images of one episode, or of all steps of environment 0 if ``episode`` is None."""
    if episode is None:
        env, steps = 0, np.arange(reader.n_steps)
    else:
        episodes = reader.episodes()
        if not -len(episodes) <= episode < len(episodes):
            raise FileFormatError(f"there is no episode {episode}; episodes are numbered 0 to {len(episodes) - 1}")
        env, steps = episodes[episode].env, episodes[episode].steps
    steps = steps[:max_steps]
    if not len(steps):
        raise FileFormatError("the buffer is empty: there is nothing to show")
    return [enlarge(image, scale) for image in read_images(reader, key, steps, np.full(len(steps), env))]


def write_animation(path: Path, images: Iterator[Image] | list[Image], fps: float) -> None:
    """Write a GIF or an MP4, depending on the suffix of ``path``."""
    writer = {".gif": write_gif, ".mp4": write_mp4}.get(path.suffix.lower())
    if writer is None:
        raise FileFormatError(f"cannot write {path}: the suffix must be .gif or .mp4")
    writer(path, images, fps)
