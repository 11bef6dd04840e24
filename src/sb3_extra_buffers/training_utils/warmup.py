"""`buffer_warmup` under its other documented name."""

from __future__ import annotations

from sb3_extra_buffers.training_utils.buffer_warmup import warm_up

__all__ = ["warm_up", "warmup"]

warmup = warm_up
