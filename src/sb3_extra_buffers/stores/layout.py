"""How stacked observations are cut into frames."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.kernels import FrameKernels, as_contiguous

Frames = npt.NDArray[np.uint8]  # [row, stack, byte]


@dataclass(frozen=True, slots=True)
class StackLayout:
    """How an observation consists of ``stack`` frames along its first or last axis; with 1, it is a single frame."""

    spec: ObsSpec
    stack: int = 1
    axis: Literal["first", "last"] = "first"
    frame_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "frame_bytes", self.spec.nbytes // self.stack)

    @property
    def frame_spec(self) -> ObsSpec:
        """Shape and dtype of a frame; an axis of length one along which frames are stacked is dropped."""
        if self.stack == 1:
            return self.spec
        shape = list(self.spec.shape)
        axis = 0 if self.axis == "first" else -1
        shape[axis] //= self.stack
        if shape[axis] == 1 and len(shape) > 1:
            del shape[axis]
        return ObsSpec(tuple(shape), self.spec.dtype)

    @property
    def pixel_bytes(self) -> int:
        """Contiguous bytes of a frame in an observation that is stacked along the last axis; 0 for the first axis."""
        if self.axis == "first" or self.stack == 1:
            return 0
        return self.spec.shape[-1] // self.stack * self.spec.dtype.itemsize

    def split(self, rows: ByteRows, kernels: FrameKernels) -> Frames:
        """Cut rows into frames; a view where frames are contiguous."""
        rows = as_contiguous(rows)
        if self.axis == "first" or self.stack == 1:
            return rows.reshape(len(rows), self.stack, self.frame_bytes)
        frames = np.empty((len(rows), self.stack, self.frame_bytes), np.uint8)
        kernels.split_stack(self.pixels(rows), frames)
        return frames

    def join(self, frames: Frames, kernels: FrameKernels) -> ByteRows:
        """Undo `split`."""
        if self.axis == "first" or self.stack == 1:
            return frames.reshape(len(frames), self.spec.nbytes)
        rows = np.empty((len(frames), self.spec.nbytes), np.uint8)
        kernels.join_stack(frames, self.pixels(rows))
        return rows

    def newest(self, rows: ByteRows) -> ByteRows:
        """Return the newest frame of each row, ``[..., frame_bytes]``, of rows ``[..., nbytes]``."""
        if self.stack == 1:
            return rows
        if self.axis == "first":
            return np.ascontiguousarray(rows[..., -self.frame_bytes :])
        pixels = self.pixels(rows.reshape(-1, self.spec.nbytes))
        return np.ascontiguousarray(pixels[:, :, -1]).reshape(*rows.shape[:-1], self.frame_bytes)

    def pixels(self, rows: ByteRows) -> npt.NDArray[np.uint8]:
        """View rows that are stacked along the last axis as ``[row, pixel, frame, byte]``."""
        unit = self.spec.shape[-1] // self.stack * self.spec.dtype.itemsize
        return rows.reshape(len(rows), self.frame_bytes // unit, self.stack, unit)

    def __str__(self) -> str:
        return "whole observations" if self.stack == 1 else f"stacks of {self.stack} along the {self.axis} axis"


# pairs of observations to look at
_PAIRS = 16


def likely_layout(spec: ObsSpec) -> StackLayout:
    """What the shape of images suggests: planes along the first axis, or four along the last."""
    if len(spec.shape) == 3:
        first, _, last = spec.shape
        if 1 < first < last:
            return StackLayout(spec, first // 3 if first % 3 == 0 else first, "first")
        if last == 4:
            return StackLayout(spec, 4, "last")
    return StackLayout(spec)


def find_layout(spec: ObsSpec, streams: Iterable[ByteRows]) -> StackLayout:
    """Find the layout with the most frames under which each observation repeats frames of its predecessor.

    Each of ``streams`` holds consecutive observations. At least half of the pairs that differ must be the same
    observation moved on by one frame. A wrong guess costs memory, not correctness: frames are compared byte for byte
    before they are shared.
    """
    if not spec.shape:
        return StackLayout(spec)
    pairs = [pair for rows in streams for pair in pairwise(rows) if not np.array_equal(*pair)]
    if not pairs:
        return StackLayout(spec)
    before, after = (np.stack(part) for part in zip(*pairs[:: max(len(pairs) // _PAIRS, 1)], strict=True))
    axes: tuple[tuple[Literal["first", "last"], int], ...] = (("first", spec.shape[0]), ("last", spec.shape[-1]))
    for stack in range(64, 1, -1):
        for axis, length in axes:
            if length and length % stack == 0:
                layout = StackLayout(spec, stack, axis)
                if _follows(layout, before, after).mean() >= 0.5:
                    return layout
    return StackLayout(spec)


def _follows(layout: StackLayout, before: ByteRows, after: ByteRows) -> npt.NDArray[np.bool_]:
    """Whether each row of ``after`` is its row of ``before`` moved on by one frame."""
    if layout.axis == "first":
        moved = layout.frame_bytes
        return np.asarray((before[:, moved:] == after[:, :-moved]).all(axis=1))
    old, new = layout.pixels(before), layout.pixels(after)
    return np.asarray((old[:, :, 1:] == new[:, :, :-1]).all(axis=(1, 2, 3)))
