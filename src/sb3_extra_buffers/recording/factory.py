"""A record buffer that suits what is seen."""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.recording.buffers import BaseRecordBuffer, FramelessRecordBuffer, RecordBuffer


def buffer_for(frame: Any, size: int, **options: Any) -> BaseRecordBuffer:
    """A buffer for frames like this one; without frames if it is no picture."""
    if isinstance(frame, dict) or np.ndim(frame) not in (2, 3):
        return FramelessRecordBuffer(size=size, **options)
    array = np.asarray(frame)
    shape = array.shape if array.ndim == 3 else (*array.shape, 1)
    # channels are the shortest axis, as SB3 takes it, too
    first = int(np.argmin(shape)) == 0
    ch_num, res = (shape[0], shape[1:]) if first else (shape[-1], shape[:2])
    return RecordBuffer((int(res[0]), int(res[1])), int(ch_num), size, dtype=array.dtype, **options)
