"""Alias of `buffer_warmup`, which is documented under both names."""

from __future__ import annotations

from sb3_extra_buffers.training_utils.buffer_warmup import warm_up

__all__ = ["warm_up", "warmup"]

warmup = warm_up
