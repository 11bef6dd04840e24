"""Replay memory for TorchRL and DreamerV3: a compressed storage, replay buffers, and a buffer served by Ray."""

from typing import TYPE_CHECKING

from sb3_extra_buffers._lazy import attach

if TYPE_CHECKING:
    from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
    from sb3_extra_buffers.replay_buffers.embodied import CompressedEmbodiedReplay
    from sb3_extra_buffers.replay_buffers.experience_memory import ReplayBuffer
    from sb3_extra_buffers.replay_buffers.ray import CompressedRayReplayBuffer, RateLimiter
    from sb3_extra_buffers.replay_buffers.served_shards import ShardedRayReplayBuffer

__all__ = [
    "CompressedEmbodiedReplay",
    "CompressedRayReplayBuffer",
    "CompressedStorage",
    "RateLimiter",
    "ReplayBuffer",
    "ShardedRayReplayBuffer",
]

# importing TorchRL takes seconds, and it may not be installed
__getattr__, __dir__ = attach(
    __name__,
    {
        "compressed_storage": ["CompressedStorage"],
        "embodied": ["CompressedEmbodiedReplay"],
        "experience_memory": ["ReplayBuffer"],
        "ray": ["CompressedRayReplayBuffer", "RateLimiter"],
        "served_shards": ["ShardedRayReplayBuffer"],
    },
)
