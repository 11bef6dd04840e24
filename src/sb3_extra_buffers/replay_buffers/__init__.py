"""Replay memory on TorchRL: the documented buffer, a compressed storage, and both behind Ray."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
    from sb3_extra_buffers.replay_buffers.experience_memory import ReplayBuffer
    from sb3_extra_buffers.replay_buffers.ray import CompressedRayReplayBuffer

__all__ = ["CompressedRayReplayBuffer", "CompressedStorage", "ReplayBuffer"]

# imported when they are asked for: TorchRL takes seconds, and may be absent
_MODULES = {
    "CompressedRayReplayBuffer": "ray",
    "CompressedStorage": "compressed_storage",
    "ReplayBuffer": "experience_memory",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
