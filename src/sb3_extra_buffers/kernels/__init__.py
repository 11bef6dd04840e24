"""Batch kernels: each has a reference version, which defines it, and fast versions that tests compare with it."""

from sb3_extra_buffers.kernels.dispatch import (
    FrameKernels,
    TimelineKernels,
    as_contiguous,
    compiled_kernels,
    frame_kernels,
    has_numba,
    step_kernels,
    sum_tree_kernels,
    timeline_kernels,
    window_kernels,
)

__all__ = [
    "FrameKernels",
    "TimelineKernels",
    "as_contiguous",
    "compiled_kernels",
    "frame_kernels",
    "has_numba",
    "step_kernels",
    "sum_tree_kernels",
    "timeline_kernels",
    "window_kernels",
]
