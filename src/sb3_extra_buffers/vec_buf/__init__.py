"""Buffers that pass one stream of experience on to several buffers (experimental)."""

from typing import TYPE_CHECKING

from sb3_extra_buffers._lazy import attach

if TYPE_CHECKING:
    from sb3_extra_buffers.vec_buf.fan_out import FanOutReplayBuffer, FanOutRolloutBuffer

__all__ = ["FanOutReplayBuffer", "FanOutRolloutBuffer"]

# imported on first use: importing SB3 takes a second or two
__getattr__, __dir__ = attach(__name__, {"fan_out": __all__})
