"""SB3's n-step replay buffer, where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stable_baselines3.common import buffers as sb3_buffers

__all__ = ["HAS_N_STEP", "NStepReplayBuffer"]

if TYPE_CHECKING:
    from stable_baselines3.common.buffers import NStepReplayBuffer
else:
    # SB3 has it since 2.7; before that there is nothing to be an instance of
    NStepReplayBuffer = getattr(sb3_buffers, "NStepReplayBuffer", type("NStepReplayBuffer", (), {}))

#: Whether SB3 has one.
HAS_N_STEP = hasattr(sb3_buffers, "NStepReplayBuffer")
