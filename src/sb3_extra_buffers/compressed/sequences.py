"""Compressed replay buffers that sample windows of consecutive steps, for recurrent agents and world models."""

from __future__ import annotations

from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer

from sb3_extra_buffers._sb3.sequence_replay import SequenceMixin
from sb3_extra_buffers._sb3.sequence_windows import SequenceSamples

__all__ = ["CompressedDictSequenceReplayBuffer", "CompressedSequenceReplayBuffer", "SequenceSamples"]


class CompressedSequenceReplayBuffer(SequenceMixin, ReplayBuffer):
    """`CompressedReplayBuffer` that also samples windows of consecutive steps, and stores recurrent states.

    `sample` returns the same transitions as SB3's buffer; `sample_sequences` returns windows. Takes the arguments of
    `CompressedReplayBuffer`, and:

    Args:
        recurrent_states: The shape of each recurrent state of the agent, by name, without the axis of environments. If
            given, pass the states before each step to `add`; batches contain the states before the first step of each
            window.
        recurrent_dtype: The dtype that recurrent states are stored in; float16 takes half the memory of float32.
        prioritized: Draw windows by priority, as R2D2 does.
        alpha: How strongly priorities count: 0 samples uniformly, 1 in proportion to TD errors.
        beta: How far importance weights correct the sampling bias: a number, a pair of first and last value, or a
            function of ``progress_remaining``, which goes from 1 to 0.
        epsilon: Added to every priority, so that every window can be drawn again.
        eta: The priority of a window is ``eta * max + (1 - eta) * mean`` of its TD errors.

    Examples:
        >>> import numpy as np
        >>> from gymnasium import spaces
        >>> from sb3_extra_buffers.compressed import CompressedSequenceReplayBuffer
        >>> buffer = CompressedSequenceReplayBuffer(
        ...     1000, spaces.Box(0, 255, (1, 84, 84), np.uint8), spaces.Discrete(4), device="cpu",
        ...     recurrent_states={"h": (256,), "c": (256,)},
        ... )
        >>> obs, state = np.zeros((1, 1, 84, 84), np.uint8), np.zeros((1, 256), np.float32)
        >>> for step in range(100):
        ...     done = np.array([step % 30 == 29])
        ...     buffer.add(obs, obs, np.array([0]), np.ones(1), done, [{}], recurrent_state={"h": state, "c": state})
        >>> batch = buffer.sample_sequences(16, length=20, burn_in=5)
        >>> batch.observations.shape, batch.recurrent_states["h"].shape
        (torch.Size([16, 25, 1, 84, 84]), torch.Size([16, 256]))
    """


class CompressedDictSequenceReplayBuffer(SequenceMixin, DictReplayBuffer):
    """`CompressedSequenceReplayBuffer` for Dict observations.

    Takes the arguments of `CompressedSequenceReplayBuffer` and of `CompressedDictReplayBuffer`.

    Examples:
        >>> from gymnasium import spaces
        >>> from sb3_extra_buffers.compressed import CompressedDictSequenceReplayBuffer
        >>> space = spaces.Dict({"image": spaces.Box(0, 255, (4, 84, 84), "uint8"), "speed": spaces.Box(0, 1, (3,))})
        >>> buffer = CompressedDictSequenceReplayBuffer(100_000, space, spaces.Discrete(6), prioritized=True)
    """
