"""Compressed buffers and arrays for observations in main memory."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from sb3_extra_buffers.compressed.array import CompressedArray
from sb3_extra_buffers.compressed.dtypes import (
    find_buffer_dtypes,
    find_smallest_dtype,
    has_igzip,
    has_lz4,
    has_numba,
    has_zstd,
    init_jit,
)

if TYPE_CHECKING:
    from sb3_extra_buffers.compressed.buffers import (
        CompressedDictNStepReplayBuffer,
        CompressedDictReplayBuffer,
        CompressedDictRolloutBuffer,
        CompressedHerReplayBuffer,
        CompressedNStepReplayBuffer,
        CompressedReplayBuffer,
        CompressedRolloutBuffer,
    )
    from sb3_extra_buffers.compressed.callback import BufferUsageCallback
    from sb3_extra_buffers.compressed.contrib import (
        CompressedMaskableDictRolloutBuffer,
        CompressedMaskableRolloutBuffer,
        CompressedRecurrentDictRolloutBuffer,
        CompressedRecurrentRolloutBuffer,
        use_rollout_buffer,
    )
    from sb3_extra_buffers.compressed.factory import compressed
    from sb3_extra_buffers.compressed.priorities import (
        CompressedDictPrioritizedReplayBuffer,
        CompressedPrioritizedReplayBuffer,
        PrioritizedReplayBufferSamples,
        prioritized,
    )

__all__ = [
    "BufferUsageCallback",
    "CompressedArray",
    "CompressedDictNStepReplayBuffer",
    "CompressedDictPrioritizedReplayBuffer",
    "CompressedDictReplayBuffer",
    "CompressedDictRolloutBuffer",
    "CompressedHerReplayBuffer",
    "CompressedMaskableDictRolloutBuffer",
    "CompressedMaskableRolloutBuffer",
    "CompressedNStepReplayBuffer",
    "CompressedPrioritizedReplayBuffer",
    "CompressedRecurrentDictRolloutBuffer",
    "CompressedRecurrentRolloutBuffer",
    "CompressedReplayBuffer",
    "CompressedRolloutBuffer",
    "PrioritizedReplayBufferSamples",
    "compressed",
    "find_buffer_dtypes",
    "find_smallest_dtype",
    "has_igzip",
    "has_lz4",
    "has_numba",
    "has_zstd",
    "init_jit",
    "prioritized",
    "use_rollout_buffer",
]

# imported when they are asked for: SB3 takes a second or two, sb3-contrib may be absent
_CONTRIB = [name for name in __all__ if "Maskable" in name or "Recurrent" in name] + ["use_rollout_buffer"]
_PRIORITIZED = [name for name in __all__ if "rioritized" in name]
_MODULES = {"BufferUsageCallback": "callback", "compressed": "factory"}
_MODULES |= dict.fromkeys(_CONTRIB, "contrib") | dict.fromkeys(_PRIORITIZED, "priorities")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _CONTRIB and importlib.util.find_spec("sb3_contrib") is None:
        from sb3_extra_buffers.errors import MissingExtraError

        raise MissingExtraError(f"{name} needs 'sb3-contrib': pip install 'sb3-extra-buffers[contrib]'")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'buffers')}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
