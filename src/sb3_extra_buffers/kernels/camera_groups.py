"""Which frames of ``camera`` segments a device decodes together, and the sizes that its kernel is compiled for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.kernels.camera import STRIDE

__all__ = ["CHAIN", "CameraGroups", "CameraShape", "group_frames"]

#: Maximum number of frames in a group: the first one of the segment, one that refers to it, and those that follow.
CHAIN = 1 + STRIDE
# maximum number of values that a program of the kernel holds in registers
_MAX_VALUES = 1 << 14


class CameraShape(NamedTuple):
    """Sizes of frames, as `kernels.camera.camera_geometry` returns them."""

    height: int
    width: int
    channels: int
    planar: int
    itemsize: int

    @property
    def columns(self) -> int:
        """Tiles from left to right."""
        return -(-self.width // 8)

    @property
    def rows(self) -> int:
        """Tiles from top to bottom."""
        return -(-self.height // 8)

    @property
    def plane_values(self) -> int:
        """Values of all planes, with partial tiles padded."""
        return self.rows * self.columns * self.channels * 64

    @property
    def is_supported(self) -> bool:
        """Whether the kernel can decode such frames: a row of tiles must fit into registers."""
        tiles = self.columns * self.channels
        return self.itemsize <= 4 and self.rows > 0 and 0 < tiles * 64 <= _MAX_VALUES


class CameraGroups(NamedTuple):
    """Frames to decode, in arrays or tensors.

    The frames of a group are 0, base + 1, base + 2 and so on; each refers to none or to the one before it.
    """

    starts: Any  # int64 [group]: where the segment starts
    bases: Any  # int32 [group]
    counts: Any  # int32 [group]: frames of the group
    targets: Any  # int32 [group, CHAIN]: the row that each frame goes to, or -1


def group_frames(starts: npt.NDArray[np.int64], positions: npt.NDArray[Any], rows: npt.NDArray[Any]) -> CameraGroups:
    """Group frames that are decoded from the same reference; frames must be ordered by segment and position.

    Args:
        starts: Where the segment of each frame starts.
        positions: The position of each frame in its segment.
        rows: The row that each frame goes to.
    """
    nth_group = positions // STRIDE
    is_first = np.ones(len(starts), np.bool_)
    is_first[1:] = (starts[1:] != starts[:-1]) | (nth_group[1:] != nth_group[:-1])
    group = np.cumsum(is_first) - 1
    first = np.flatnonzero(is_first)
    bases = np.maximum(nth_group[first] * STRIDE - 1, 0)
    nth = positions - bases[group]
    targets = np.full((len(first), CHAIN), -1, np.int32)
    targets[group, nth] = rows
    last = np.append(first[1:], len(starts)) - 1
    counts = nth[last] + 1 if len(starts) else nth
    return CameraGroups(starts[first], bases.astype(np.int32), counts.astype(np.int32), targets)
