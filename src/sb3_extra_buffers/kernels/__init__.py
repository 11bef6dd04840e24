"""Batch kernels: each has a reference version, which defines it, and fast versions that tests compare with it."""

from sb3_extra_buffers.kernels.dispatch import FrameKernels, as_contiguous, compiled_kernels, frame_kernels, has_numba

__all__ = ["FrameKernels", "as_contiguous", "compiled_kernels", "frame_kernels", "has_numba"]
