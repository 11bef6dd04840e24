"""Replay and rollout buffers whose observations live on a torch device, compressed or not."""

from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer, find_gpu_buffer_dtypes
from sb3_extra_buffers.gpu_buffers.compression import GpuCompressionMethods, has_zstd
from sb3_extra_buffers.gpu_buffers.metadata import SlotMetadata
from sb3_extra_buffers.gpu_buffers.raw_buffer import RawBuffer, SharedRawHeap
from sb3_extra_buffers.gpu_buffers.replay_buffer import GpuReplayBuffer
from sb3_extra_buffers.gpu_buffers.rollout_buffer import GpuRolloutBuffer
from sb3_extra_buffers.gpu_buffers.sequences import GpuSequenceReplayBuffer
from sb3_extra_buffers.gpu_buffers.stores import (
    DenseObservationStore,
    RawObservationStore,
    create_observation_store,
)
from sb3_extra_buffers.gpu_buffers.variants import (
    GpuHerReplayBuffer,
    GpuNStepReplayBuffer,
    GpuPrioritizedReplayBuffer,
)

__all__ = [
    "BaseGpuBuffer",
    "DenseObservationStore",
    "GpuCompressionMethods",
    "GpuHerReplayBuffer",
    "GpuNStepReplayBuffer",
    "GpuPrioritizedReplayBuffer",
    "GpuReplayBuffer",
    "GpuRolloutBuffer",
    "GpuSequenceReplayBuffer",
    "RawBuffer",
    "RawObservationStore",
    "SharedRawHeap",
    "SlotMetadata",
    "create_observation_store",
    "find_gpu_buffer_dtypes",
    "has_zstd",
]
