"""Drawing indices of transitions as NumPy does, in one compiled call."""

from __future__ import annotations

from typing import Any

from sb3_extra_buffers.kernels.compiling import entry
from sb3_extra_buffers.kernels.timeline_numba import draw_numbers

__all__ = ["draw_indices"]


@entry
def draw_indices(
    out: Any, n_steps: int, n_envs: int, low: int, span: int, shift: int, function: int, state: int
) -> None:
    """Fill ``out[2, count]`` with ``step * n_envs + env``, and the same plus ``n_steps * n_envs``.

    Steps and environments are drawn as `timeline_numba.read_batch` draws them.
    """
    draw_numbers(out[0], low, span, function, state)
    draw_numbers(out[1], 0, n_envs - 1, function, state)
    for i in range(out.shape[1]):
        step = out[0, i] + shift
        if step >= n_steps:
            step -= n_steps
        index = step * n_envs + out[1, i]
        out[0, i], out[1, i] = index, index + n_steps * n_envs
