"""Converting images to scaled floats and shifting them at random: reference kernel, in PyTorch."""

from __future__ import annotations

import math

import torch

__all__ = ["ImageTransform"]


class ImageTransform:
    """Scales images of bytes to ``dtype``, and shifts each by up to ``pad`` pixels in a random direction.

    Pixels outside of an image repeat its border: this is padding by replication and a random crop of the original size,
    as in DrQ. All channels of an image, and so all frames of a stack, are shifted together. Without a scale, values
    stay as they are.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        scale: float | None,
        pad: int,
        channels_last: bool,
        device: torch.device,
    ) -> None:
        self.dtype, self.pad = dtype, pad
        channels_last = channels_last and len(shape) > 2
        n_inner = shape[-1] if channels_last else 1
        height, width = shape[-3:-1] if channels_last else shape[-2:]
        #: channels before the height, height, width, channels after the width
        self.sizes = (math.prod(shape) // (height * width * n_inner), height, width, n_inner)
        self.scale = torch.ones(1, device=device) if scale is None else torch.tensor([scale], device=device)
        self.is_scaled = scale is not None

    def apply(self, images: torch.Tensor, uniform: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``images``, uint8 ``[n, *shape]``, to ``out``; ``uniform`` is float64 ``[n, 2]``, from 0 to 1."""
        n_outer, height, width, n_inner = self.sizes
        parts = images.view(-1, n_outer, height, width, n_inner)
        if self.pad:
            offsets = (uniform * (2 * self.pad + 1)).long().clamp(max=2 * self.pad) - self.pad
            rows, columns = (
                (torch.arange(size, device=images.device) + offsets[:, axis, None]).clamp(0, size - 1)
                for axis, size in enumerate((height, width))
            )
            which = torch.arange(len(parts), device=images.device)
            # the axes that are indexed come first: [n, height, width, n_outer, n_inner]
            found = parts[which[:, None, None], :, rows[:, :, None], columns[:, None, :]]
            parts = found.permute(0, 3, 1, 2, 4)
        out.copy_(((parts.float() * self.scale) if self.is_scaled else parts).reshape(out.shape))
