"""Buffers that hand one stream of experience to several buffers (experimental)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sb3_extra_buffers.vec_buf.fan_out import FanOutReplayBuffer, FanOutRolloutBuffer

__all__ = ["FanOutReplayBuffer", "FanOutRolloutBuffer"]


def __getattr__(name: str) -> Any:
    # imported when they are asked for: SB3 takes a second or two
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.fan_out"), name)


def __dir__() -> list[str]:
    return __all__
