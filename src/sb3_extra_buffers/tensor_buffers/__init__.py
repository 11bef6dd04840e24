"""A replay buffer of named tensors, on the CPU or a GPU, for training loops without a framework."""

from sb3_extra_buffers.tensor_buffers.replay_buffer import TensorReplayBuffer

__all__ = ["TensorReplayBuffer"]
