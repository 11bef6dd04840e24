"""`StackLayout.split` and `join` for tensors."""

from __future__ import annotations

import torch

from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.staging import torch_dtype

__all__ = ["join_frames", "split_frames"]


def split_frames(rows: torch.Tensor, layout: StackLayout) -> torch.Tensor:
    """Frames ``[set, stream, stack, byte]``, padded to whole words, of rows (or words) ``[set, stream, byte]``."""
    lead, size = rows.shape[:2], layout.frame_bytes
    if layout.axis == "last" and layout.stack > 1:
        unit = layout.spec.shape[-1] // layout.stack * layout.spec.dtype.itemsize
        frames = rows.view(*lead, size // unit, layout.stack, unit).transpose(2, 3)
        frames = frames.reshape(*lead, layout.stack, size).contiguous()
    else:
        frames = rows.view(*lead, layout.stack, size)
    return frames if size % 8 == 0 else torch.nn.functional.pad(frames, (0, 8 - size % 8))


def join_frames(frames: torch.Tensor, layout: StackLayout) -> torch.Tensor:
    """Observations ``[set, n, *shape]`` of frames ``[set, n, stack, byte]``."""
    lead, spec, dtype = frames.shape[:2], layout.spec, torch_dtype(layout.spec.dtype)
    if layout.axis == "last" and layout.stack > 1:
        unit = spec.shape[-1] // layout.stack * spec.dtype.itemsize
        frames = frames.reshape(*lead, layout.stack, layout.frame_bytes // unit, unit).transpose(2, 3)
    if not frames.numel():
        return frames.new_empty((*lead, *spec.shape), dtype=dtype)
    rows = frames.reshape(*lead, spec.nbytes)
    return (rows if dtype is torch.uint8 else rows.contiguous().view(dtype)).reshape(*lead, *spec.shape)
