"""Pictures in files: PNG by hand, GIF and MP4 through the packages that know them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.cli.contents import Contents, need, progress
from sb3_extra_buffers.errors import FileFormatError

Picture = npt.NDArray[np.uint8]  # [height, width, 3]


def encode_png(picture: Picture) -> bytes:
    """A picture as PNG, lossless; grey ones take a byte a pixel."""
    grey = bool((picture[..., 0] == picture[..., 1]).all() and (picture[..., 0] == picture[..., 2]).all())
    rows = picture[..., 0] if grey else picture.reshape(len(picture), -1)
    height, width = picture.shape[:2]
    # every row begins with its filter: none
    data = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if grey else 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(data, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


def enlarge(pictures: Picture, scale: int) -> Picture:
    """Pixels ``scale`` times as large."""
    return pictures.repeat(scale, axis=-3).repeat(scale, axis=-2)


def montage(contents: Contents, count: int, columns: int, key: str | None, scale: int) -> Picture:
    """A contact sheet: ``count`` observations, evenly spread over the buffer, row by row."""
    total = contents.n_transitions
    if not total:
        raise FileFormatError("there is nothing in the buffer to show")
    chosen = np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))
    source = contents.pictures(key)
    columns = min(columns, len(chosen))
    shown = [
        source[chosen[first : first + 64] // contents.n_envs, chosen[first : first + 64] % contents.n_envs]
        for first in progress(range(0, len(chosen), 64), "reading")
    ]
    pictures = enlarge(np.concatenate(shown), scale)
    height, width = pictures.shape[1:3]
    gap = 2
    n_rows = -(-len(chosen) // columns)
    sheet = np.full((n_rows * (height + gap) + gap, columns * (width + gap) + gap, 3), 32, np.uint8)
    for place, picture in enumerate(pictures):
        top, left = gap + place // columns * (height + gap), gap + place % columns * (width + gap)
        sheet[top : top + height, left : left + width] = picture
    return sheet


def film(contents: Contents, episode: int | None, key: str | None, most: int, scale: int) -> list[Picture]:
    """The pictures of one episode, or of everything that one environment did."""
    episodes = contents.episodes()
    if episode is None:
        env, steps = 0, np.arange(contents.n_steps)
    else:
        if not -len(episodes) <= episode < len(episodes):
            raise FileFormatError(f"there is no episode {episode}; there are {len(episodes)}, counted from 0")
        env, steps = episodes[episode].env, episodes[episode].steps
    steps = steps[:most]
    source = contents.pictures(key)
    found: list[Picture] = []
    for first in progress(range(0, len(steps), 64), "reading"):
        part = steps[first : first + 64]
        found.extend(enlarge(source[part, np.full(len(part), env)], scale))
    if not found:
        raise FileFormatError("there is nothing in the buffer to show")
    return found


def write_film(path: Path, pictures: Sequence[Picture], fps: float) -> None:
    """A GIF or an MP4, by the name of ``path``."""
    if path.suffix.lower() == ".gif":
        image = need("PIL.Image", "extra")
        frames = [image.fromarray(picture) for picture in pictures]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=1000 / fps, loop=0)
    elif path.suffix.lower() == ".mp4":
        _write_mp4(path, pictures, fps)
    else:
        raise FileFormatError(f"{path} is neither a .gif nor an .mp4")


def _write_mp4(path: Path, pictures: Sequence[Picture], fps: float) -> None:
    cv2: Any = need("cv2", "extra")
    height, width = pictures[0].shape[:2]
    # codecs want even sides
    even = (width + width % 2, height + height % 2)
    out = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), fps, even)
    if not out.isOpened():
        raise FileFormatError(f"{path} cannot be written: OpenCV has no MP4 encoder here; write a .gif")
    for picture in progress(pictures, "writing"):
        padded = np.zeros((even[1], even[0], 3), np.uint8)
        padded[:height, :width] = picture[..., ::-1]
        out.write(padded)
    out.release()
