"""Choose a record buffer for what an environment returns."""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.recording.base import BaseRecordBuffer
from sb3_extra_buffers.recording.buffers import FramelessRecordBuffer, RecordBuffer

__all__ = ["buffer_for", "observation_of"]


def buffer_for(frame: Any, size: int) -> BaseRecordBuffer:
    """Create a buffer for frames like ``frame``; one without frames if ``frame`` is not an image."""
    if isinstance(frame, dict) or np.ndim(frame) not in (2, 3):
        return FramelessRecordBuffer(size=size)
    array = np.asarray(frame)
    shape = array.shape if array.ndim == 3 else (*array.shape, 1)
    # like SB3, take the shortest axis for the channels
    channels_first = int(np.argmin(shape)) == 0
    ch_num, res = (shape[0], shape[1:]) if channels_first else (shape[-1], shape[:2])
    return RecordBuffer((int(res[0]), int(res[1])), int(ch_num), size, dtype=array.dtype)


def observation_of(observations: Any, env_index: int) -> Any:
    """Return the observation of one environment, an array as a copy."""
    if isinstance(observations, dict):
        return {key: part[env_index] for key, part in observations.items()}
    return np.array(observations[env_index])
