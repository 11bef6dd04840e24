"""Record an agent while it plays."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from sb3_extra_buffers.recording.base import BaseRecordBuffer
from sb3_extra_buffers.recording.factory import buffer_for, observation_of

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

__all__ = ["record_agent"]


def record_agent(
    model: Any,
    env: VecEnv,
    n_steps: int = 1000,
    *,
    buffer: BaseRecordBuffer | None = None,
    deterministic: bool = True,
    render: bool = False,
    path: str | os.PathLike[str] | None = None,
) -> BaseRecordBuffer:
    """Record ``n_steps`` of the first environment while ``model`` plays.

    Args:
        model: Anything with SB3's ``predict``.
        env: Vectorised environments; the first one is recorded.
        n_steps: Number of steps.
        buffer: Buffer to record to; None to create one for the observations, with capacity for all steps.
        deterministic: Whether the model takes its best action.
        render: Record rendered frames instead of observations.
        path: File to export the recording to, such as ``"agent.gif"``.

    Examples:
        >>> from stable_baselines3 import PPO
        >>> from sb3_extra_buffers.recording import record_agent
        >>> from sb3_extra_buffers.training_utils.atari import make_env
        >>> env = make_env("PongNoFrameskip-v4", framestack=4)
        >>> recording = record_agent(PPO("CnnPolicy", env), env, n_steps=50, path="agent.gif")
        >>> recording.frames.shape
        (50, 4, 84, 84)
    """
    obs: Any = env.reset()
    state, starts = None, np.ones(env.num_envs, bool)
    for _ in range(n_steps):
        frame = env.get_images()[0] if render else observation_of(obs, 0)
        actions, state = model.predict(obs, state=state, episode_start=starts, deterministic=deterministic)
        obs, rewards, starts, _infos = env.step(actions)
        if buffer is None:
            buffer = buffer_for(frame, n_steps)
        buffer.add(frame, rewards[0], np.array(actions[0]), done=starts[0])
    if buffer is None:
        raise ValueError(f"n_steps must be at least 1, got {n_steps}")
    if path is not None:
        buffer.export(path)
    return buffer
