"""Windows of consecutive steps in a ring: their indices, and where they end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.stores.base import Indices

__all__ = ["append_next", "cut_at_ends", "mask_of", "pad_windows", "steps_to_end", "window_indices", "window_steps"]

Mask = npt.NDArray[np.bool_]


def window_steps(starts: Indices, length: int, n_steps: int) -> Indices:
    """Steps of windows that begin at ``starts [batch]`` in a ring of ``n_steps``: ``[batch, length]``."""
    return (starts[:, None] + np.arange(length, dtype=np.int64)) % n_steps


def window_indices(starts: Indices, streams: Indices, length: int, n_steps: int, n_streams: int) -> Indices:
    """Indices ``[batch, length]`` of windows in a ring of steps x streams, where a step's observations are together.

    Examples:
        >>> window_indices(np.array([3, 1]), np.array([0, 1]), 3, n_steps=5, n_streams=2)
        array([[6, 8, 0],
               [3, 5, 7]])
    """
    return window_steps(starts, length, n_steps) * n_streams + streams[:, None]


def mask_of(lengths: Indices, length: int) -> Mask:
    """Mask ``[batch, length]`` of the first ``lengths[i]`` steps of each window."""
    return np.arange(length) < lengths[:, None]


def cut_at_ends(ends: Mask) -> Indices:
    """How many steps of each window belong to the episode of its first step.

    ``ends [batch, length]`` says which steps are the last of their episode; that step itself still belongs to it.

    Examples:
        >>> cut_at_ends(np.array([[False, True, False], [False, False, False]]))
        array([2, 3])
    """
    length = ends.shape[1]
    if not length:
        return np.zeros(len(ends), np.int64)
    lengths: Indices = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, length)
    return lengths


def steps_to_end(ends: Mask, newest: int, n_valid: int | None = None) -> Indices:
    """Number of steps from each step of a ring to the end of its episode, or to the newest step, both included.

    Args:
        ends: Which steps are the last of their episode, ``[n_steps, n_streams]``.
        newest: The step that was written last.
        n_valid: Number of steps up to ``newest`` that are in use; None for all. The result is 0 for other steps.

    Returns:
        int64 ``[n_steps, n_streams]``. A window of ``length`` steps within one episode may begin where this is at
        least ``length``.

    Examples:
        >>> steps_to_end(np.array([[False], [True], [False], [False]]), newest=3).ravel()
        array([2, 1, 2, 1])
    """
    n_steps = len(ends)
    n_valid = n_steps if n_valid is None else n_valid
    # from the oldest step to the newest
    order = (newest + 1 - n_valid + np.arange(n_valid)) % n_steps
    found = np.zeros(ends.shape, np.int64)
    if not n_valid:
        return found
    at = np.arange(n_valid, dtype=np.int64)[:, None]
    is_last = ends[order]
    is_last[-1] = True
    # the nearest end at or after each step
    nearest = np.where(is_last, at, n_valid)[::-1]
    found[order] = np.minimum.accumulate(nearest, axis=0)[::-1] - at + 1
    return found


def pad_windows(indices: Indices, lengths: Indices) -> Indices:
    """Replace the indices after the end of each window by its last one, so that reading them costs little.

    ``lengths`` are at least 1.
    """
    columns = np.minimum(np.arange(indices.shape[1]), lengths[:, None] - 1)
    return np.take_along_axis(indices, columns, axis=1)


def append_next(indices: Indices, lengths: Indices, next_offset: int) -> Indices:
    """Pad windows, and append a column for the next observation of the last step of each window.

    Column ``lengths[i]`` and those after it are that next observation, so that the next observations of all steps of a
    window are ``[:, 1:]``.

    Args:
        indices: Observations of the steps, ``[batch, length]``.
        lengths: Number of steps that belong to each window, at least 1, as `cut_at_ends` returns it.
        next_offset: The index of a step's next observation minus the index of its observation.

    Returns:
        ``[batch, length + 1]``.
    """
    padded = pad_windows(np.concatenate([indices, indices[:, -1:]], axis=1), lengths)
    padded[np.arange(indices.shape[1] + 1) >= lengths[:, None]] += next_offset
    return padded
