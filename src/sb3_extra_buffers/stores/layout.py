"""How a stacked observation is cut into the frames it was stacked from."""

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
    """``stack`` equal frames along the first or the last axis; one frame is the whole row."""

    spec: ObsSpec
    stack: int = 1
    axis: Literal["first", "last"] = "first"
    frame_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "frame_bytes", self.spec.nbytes // self.stack)

    @property
    def frame_spec(self) -> ObsSpec:
        """What one frame looks like; a lone plane loses its axis of one."""
        if self.stack == 1:
            return self.spec
        shape = list(self.spec.shape)
        place = 0 if self.axis == "first" else -1
        shape[place] //= self.stack
        if shape[place] == 1 and len(shape) > 1:
            del shape[place]
        return ObsSpec(tuple(shape), self.spec.dtype)

    def split(self, rows: ByteRows, kernels: FrameKernels) -> Frames:
        """Frames of each row; a view where they already lie one after the other."""
        rows = as_contiguous(rows)
        if self.axis == "first" or self.stack == 1:
            return rows.reshape(len(rows), self.stack, self.frame_bytes)
        frames = np.empty((len(rows), self.stack, self.frame_bytes), np.uint8)
        kernels.split_stack(self._pixels(rows), frames)
        return frames

    def join(self, frames: Frames, kernels: FrameKernels) -> ByteRows:
        """Undo `split`."""
        if self.axis == "first" or self.stack == 1:
            return frames.reshape(len(frames), self.spec.nbytes)
        rows = np.empty((len(frames), self.spec.nbytes), np.uint8)
        kernels.join_stack(frames, self._pixels(rows))
        return rows

    def _pixels(self, rows: ByteRows) -> npt.NDArray[np.uint8]:
        unit = self.spec.shape[-1] // self.stack * self.spec.dtype.itemsize
        return rows.reshape(len(rows), self.frame_bytes // unit, self.stack, unit)

    def __str__(self) -> str:
        return "whole observations" if self.stack == 1 else f"stacks of {self.stack} along the {self.axis} axis"


# pairs of observations that are enough to see how they are stacked
_PAIRS = 16


def find_layout(spec: ObsSpec, streams: Iterable[ByteRows]) -> StackLayout:
    """The finest cut under which observations of a stream repeat the frames of the one before.

    Each of ``streams`` holds successive observations. Pairs in which nothing moved prove nothing; at least half
    of the others must be the observation before, moved on by one frame. A wrong guess costs memory,
    not correctness: frames are compared byte for byte whenever they are shared.
    """
    if not spec.shape:
        return StackLayout(spec)
    pairs = [pair for rows in streams for pair in pairwise(rows) if not np.array_equal(*pair)]
    if not pairs:
        return StackLayout(spec)
    some = pairs[:: max(len(pairs) // _PAIRS, 1)]
    before, after = (np.stack(part) for part in zip(*some, strict=True))
    candidates: list[StackLayout] = []
    for axis, length in (("first", spec.shape[0]), ("last", spec.shape[-1])):
        for stack in range(min(length, 64), 1, -1):
            if length % stack == 0:
                candidates.append(StackLayout(spec, stack, "first" if axis == "first" else "last"))
    best, most = StackLayout(spec), 0
    for layout in sorted(candidates, key=lambda layout: -layout.stack):
        if _follows(layout, before, after).mean() >= 0.5 and layout.stack > most:
            best, most = layout, layout.stack
    return best


def _follows(layout: StackLayout, before: ByteRows, after: ByteRows) -> npt.NDArray[np.bool_]:
    """Whether each row of ``after`` is its row of ``before`` moved on by one frame."""
    if layout.axis == "first":
        moved = layout.frame_bytes
        return np.asarray((before[:, moved:] == after[:, :-moved]).all(axis=1))
    old, new = layout._pixels(before), layout._pixels(after)
    return np.asarray((old[:, :, 1:] == new[:, :, :-1]).all(axis=(1, 2, 3)))
