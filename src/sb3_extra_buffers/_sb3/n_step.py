"""SB3's n-step replay buffer, which exists since SB3 2.7."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stable_baselines3.common import buffers as sb3_buffers

__all__ = ["HAS_N_STEP", "NStepReplayBuffer"]

if TYPE_CHECKING:
    from stable_baselines3.common.buffers import NStepReplayBuffer
else:
    # before, an empty class that nothing is an instance of
    NStepReplayBuffer = getattr(sb3_buffers, "NStepReplayBuffer", type("NStepReplayBuffer", (), {}))

#: Whether the installed SB3 has it.
HAS_N_STEP = hasattr(sb3_buffers, "NStepReplayBuffer")
