"""Batch kernels: each a plain definition and a fast version that a test compares with it."""

from sb3_extra_buffers.kernels.loading import FrameKernels, as_whole, frame_kernels, has_numba

__all__ = ["FrameKernels", "as_whole", "frame_kernels", "has_numba"]
