"""Observations of a saved buffer as images: every frame of a stack, or the newest one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.cli.reader import BufferReader, obs_shape
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.stores.layout import StackLayout, find_layout
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]
Frames = npt.NDArray[np.uint8]  # (n, n_frames, height, width, channels), with 1 or 3 channels

# observations to look at to find the stack and the range of values
_N_EXAMINED = 32


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether an observation of this shape is shown as an image rather than as numbers."""
    return len(shape) >= 2 and sorted(shape)[-2] >= 8


class FrameReader:
    """Reads observations of one key as images.

    An observation consists of one or more frames: those of a stack, or planes that are neither grey nor RGB.

    Attributes:
        is_stack: Whether the frames are a stack in chronological order.
        n_frames: Frames of an observation.
    """

    def __init__(self, reader: BufferReader, leaf: Any, space: Any = None) -> None:
        self._reader, self._leaf = reader, leaf
        self._shape = obs_shape(leaf)
        steps = np.arange(min(_N_EXAMINED, reader.n_steps))
        first = reader.read(leaf, steps, np.zeros(len(steps), np.int64))
        self._low, high = _value_range(first, space)
        # one value only is shown as black
        self._scale = 255 / (high - self._low) if high > self._low else 0.0
        self.is_stack = len(self._shape) > 3
        self._channels = self._frame_channels(first)
        self.n_frames = self._split(first[:1]).shape[1]

    def read(self, steps: Array, envs: Array) -> Frames:
        """Return the frames of pairs of step, counted from the oldest, and environment; the newest frame is last."""
        return self._to_bytes(self._split(self._reader.read(self._leaf, steps, envs)))

    def _frame_channels(self, first: Array) -> int:
        """Return how many channels one frame has, from a look at the first observations."""
        if len(self._shape) != 3:
            return 3 if len(self._shape) > 3 and self._shape[-1] in (3, 4) else 1
        planes = _channels_last(first)
        n_planes = int(planes.shape[-1])
        layout = self._find_stack(first)
        if layout is not None and n_planes // layout.stack in (1, 3, 4):
            self.is_stack = True
            return n_planes // layout.stack
        if n_planes == 4 and first.dtype == np.uint8 and (planes[..., 3] == 255).all():
            return 4
        return 3 if n_planes % 3 == 0 and n_planes <= 12 else 1

    def _find_stack(self, first: Array) -> StackLayout | None:
        """Return how the channels are a stack of frames; None if they are not."""
        layout = self._leaf.store.layout if isinstance(self._leaf, StoreView) else None
        if layout is None or layout.stack == 1:
            # not chosen yet, or stored without frames
            rows = np.ascontiguousarray(first).reshape(len(first), -1).view(np.uint8)
            layout = find_layout(ObsSpec(self._shape, first.dtype), [rows])
        length = self._shape[0 if layout.axis == "first" else -1]
        return layout if layout.stack > 1 and length == min(self._shape) else None

    def _split(self, batch: Array) -> Array:
        """Cut observations into frames, as ``(n, n_frames, height, width, channels)``."""
        n = len(batch)
        if len(self._shape) == 2:
            return batch[:, None, ..., None]
        if len(self._shape) > 3:
            # one axis or more in front of the images
            images = batch.reshape(n, math.prod(self._shape[:-3]), *self._shape[-3:])
            if self._shape[-1] in (1, 3, 4):
                return images[..., :3]
            return images.reshape(n, -1, *self._shape[-2:])[..., None]
        planes = _channels_last(batch)
        height, width, n_planes = planes.shape[1:]
        frames = planes.reshape(n, height, width, n_planes // self._channels, self._channels)
        return np.moveaxis(frames[..., :3], 3, 1)

    def _to_bytes(self, frames: Array) -> Frames:
        if frames.dtype == np.uint8:
            return frames
        with np.errstate(invalid="ignore", over="ignore"):
            values = (frames.astype(np.float64) - self._low) * self._scale
        return np.clip(np.nan_to_num(values), 0, 255).round().astype(np.uint8)


def _channels_last(batch: Array) -> Array:
    """Move the channels of images to the last axis; the shorter of the first and the last axis holds them."""
    return np.moveaxis(batch, 1, -1) if batch.shape[1] < batch.shape[-1] else batch


def _value_range(values: Array, space: Any) -> tuple[float, float]:
    """Return the values to show as black and white: bounds of the space, else the smallest and largest value."""
    if values.dtype == np.bool_:
        return 0.0, 1.0
    low, high = (float(np.min(getattr(space, "low", -np.inf))), float(np.max(getattr(space, "high", np.inf))))
    finite = values[np.isfinite(values)]
    if not (np.isfinite(low) and np.isfinite(high)) or high - low > 1e9:
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        if low >= 0 and high <= 1:
            low, high = 0.0, 1.0
    return low, high
