"""Compressed buffers and arrays for observations in main memory."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from sb3_extra_buffers._extras import import_extra
from sb3_extra_buffers._lazy import attach
from sb3_extra_buffers.compressed.array import CompressedArray
from sb3_extra_buffers.compressed.dtypes import (
    find_buffer_dtypes,
    find_smallest_dtype,
    has_igzip,
    has_lz4,
    has_numba,
    has_zstd,
    init_jit,
    warmup,
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
    from sb3_extra_buffers.compressed.sequences import (
        CompressedDictSequenceReplayBuffer,
        CompressedSequenceReplayBuffer,
        SequenceSamples,
    )
    from sb3_extra_buffers.compressed.shared import SharedHandle, SharedReader

__all__ = [
    "BufferUsageCallback",
    "CompressedArray",
    "CompressedDictNStepReplayBuffer",
    "CompressedDictPrioritizedReplayBuffer",
    "CompressedDictReplayBuffer",
    "CompressedDictRolloutBuffer",
    "CompressedDictSequenceReplayBuffer",
    "CompressedHerReplayBuffer",
    "CompressedMaskableDictRolloutBuffer",
    "CompressedMaskableRolloutBuffer",
    "CompressedNStepReplayBuffer",
    "CompressedPrioritizedReplayBuffer",
    "CompressedRecurrentDictRolloutBuffer",
    "CompressedRecurrentRolloutBuffer",
    "CompressedReplayBuffer",
    "CompressedRolloutBuffer",
    "CompressedSequenceReplayBuffer",
    "PrioritizedReplayBufferSamples",
    "SequenceSamples",
    "SharedHandle",
    "SharedReader",
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
    "warmup",
]

_OF_CONTRIB = [
    "CompressedMaskableDictRolloutBuffer",
    "CompressedMaskableRolloutBuffer",
    "CompressedRecurrentDictRolloutBuffer",
    "CompressedRecurrentRolloutBuffer",
    "use_rollout_buffer",
]
if find_spec("sb3_contrib") is None:
    # otherwise "from sb3_extra_buffers.compressed import *" would fail
    __all__ = [name for name in __all__ if name not in _OF_CONTRIB]


def _check_contrib(module: str, name: str) -> None:
    if module == "contrib":
        import_extra("sb3_contrib", "contrib", name)


# imported on first use: SB3 takes a second or two, and sb3-contrib is optional
__getattr__, __dir__ = attach(
    __name__,
    {
        "buffers": [
            "CompressedDictNStepReplayBuffer",
            "CompressedDictReplayBuffer",
            "CompressedDictRolloutBuffer",
            "CompressedHerReplayBuffer",
            "CompressedNStepReplayBuffer",
            "CompressedReplayBuffer",
            "CompressedRolloutBuffer",
        ],
        "callback": ["BufferUsageCallback"],
        "contrib": _OF_CONTRIB,
        "factory": ["compressed"],
        "priorities": [
            "CompressedDictPrioritizedReplayBuffer",
            "CompressedPrioritizedReplayBuffer",
            "PrioritizedReplayBufferSamples",
            "prioritized",
        ],
        "sequences": [
            "CompressedDictSequenceReplayBuffer",
            "CompressedSequenceReplayBuffer",
            "SequenceSamples",
        ],
        "shared": ["SharedHandle", "SharedReader"],
    },
    _check_contrib,
)
