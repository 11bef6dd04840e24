"""Batch kernels: each a plain definition and a fast version that a test compares with it."""

from sb3_extra_buffers.kernels.dispatch import FrameKernels, as_contiguous, frame_kernels, has_numba

__all__ = ["FrameKernels", "as_contiguous", "frame_kernels", "has_numba"]
