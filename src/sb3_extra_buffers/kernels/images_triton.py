"""Converting images to scaled floats and shifting them at random: `kernels.images_torch` in one launch on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sb3_extra_buffers.kernels.images_torch import ImageTransform
from sb3_extra_buffers.kernels.launcher import Launcher

__all__ = ["TritonImageTransform"]

_BLOCK, _WARPS = 1024, 4


@triton.jit
def _transform_kernel(
    images_ptr,  # uint8 [image, OUTER, HEIGHT, WIDTH, INNER]
    uniform_ptr,  # float64 [image, 2]
    out_ptr,  # the same shape as the images
    scale_ptr,
    OUTER: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    PAD: tl.constexpr, IS_SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``BLOCK`` values of an image; the grid is ``[image, block]``."""
    image = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = OUTER * HEIGHT * WIDTH * INNER
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = i
    if PAD > 0:
        down = (tl.load(uniform_ptr + 2 * image) * (2 * PAD + 1)).to(tl.int32)
        right = (tl.load(uniform_ptr + 2 * image + 1) * (2 * PAD + 1)).to(tl.int32)
        inner, x, y = i % INNER, (i // INNER) % WIDTH, (i // (INNER * WIDTH)) % HEIGHT
        y = tl.minimum(tl.maximum(y + tl.minimum(down, 2 * PAD) - PAD, 0), HEIGHT - 1)
        x = tl.minimum(tl.maximum(x + tl.minimum(right, 2 * PAD) - PAD, 0), WIDTH - 1)
        source = ((i // (INNER * WIDTH * HEIGHT) * HEIGHT + y) * WIDTH + x) * INNER + inner
    value = tl.load(images_ptr + image * size + source, mask=i < size, other=0)
    if IS_SCALED:
        scaled = value.to(tl.float32) * tl.load(scale_ptr)
        tl.store(out_ptr + image * size + i, scaled.to(out_ptr.dtype.element_ty), mask=i < size)
    else:
        tl.store(out_ptr + image * size + i, value.to(out_ptr.dtype.element_ty), mask=i < size)


class TritonImageTransform(ImageTransform):
    """`ImageTransform` in one launch."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        scale: float | None,
        pad: int,
        channels_last: bool,
        device: torch.device,
    ) -> None:
        super().__init__(shape, dtype, scale, pad, channels_last, device)
        constants = (*self.sizes, pad, self.is_scaled, _BLOCK)
        self._launcher = Launcher(
            _transform_kernel, device, (constants, dtype), (), ((torch.uint8, torch.float64, dtype, torch.float32), ()),
            _WARPS,
        )  # fmt: skip
        self._constants = constants

    def apply(self, images: torch.Tensor, uniform: torch.Tensor, out: torch.Tensor) -> None:
        n_images = len(images)
        if n_images:
            grid = (n_images, -(-images[0].numel() // _BLOCK), 1)
            self._launcher.start((), grid, (images, uniform, out, self.scale), (), self._constants)
