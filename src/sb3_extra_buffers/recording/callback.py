"""An SB3 callback that records one environment during training."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from sb3_extra_buffers.recording.base import BaseRecordBuffer
from sb3_extra_buffers.recording.factory import buffer_for, observation_of

__all__ = ["RecordCallback"]


class RecordCallback(BaseCallback):
    """Records what the agent sees and does in one environment, and its rewards.

    Args:
        buffer: Buffer to record to; None to create one for the observations, without frames if they are not images.
        size: Size of the buffer if one is created.
        env_index: Index of the environment to record.
        render: Record rendered frames instead of observations.
        path: File to export the recording to when training ends, such as ``"agent.gif"``.
        verbose: As in SB3's callbacks.

    Examples:
        >>> from stable_baselines3 import PPO
        >>> from sb3_extra_buffers.recording import RecordCallback
        >>> from sb3_extra_buffers.training_utils.atari import make_env
        >>> env = make_env("PongNoFrameskip-v4", framestack=4)
        >>> callback = RecordCallback(path="agent.gif")
        >>> model = PPO("CnnPolicy", env, n_steps=32, n_epochs=1).learn(32, callback=callback)
        >>> len(callback.record_buffer)
        32
    """

    def __init__(
        self,
        buffer: BaseRecordBuffer | None = None,
        size: int = 40_000,
        env_index: int = 0,
        render: bool = False,
        path: str | os.PathLike[str] | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        self.record_buffer = buffer
        self.size = size
        self.env_index = env_index
        self.render = render
        self.path = path
        self._rendered: Any = None

    def _on_training_start(self) -> None:
        if not 0 <= self.env_index < self.training_env.num_envs:
            raise IndexError(f"env_index is {self.env_index}, but there are {self.training_env.num_envs} environments")
        self._render()

    def _render(self) -> None:
        if self.render:
            self._rendered = self.training_env.get_images()[self.env_index]

    def _on_step(self) -> bool:
        index = self.env_index
        # SB3 has no public name for the observation that was acted on; it is replaced after this callback
        observations: Any = self.model._last_obs
        if self.model.get_vec_normalize_env() is not None:
            # off-policy algorithms keep the observation from before normalisation
            observations = getattr(self.model, "_last_original_obs", observations)
        frame = self._rendered if self.render else observation_of(observations, index)
        if self.record_buffer is None:
            self.record_buffer = buffer_for(frame, self.size)
        actions = self.locals.get("clipped_actions", self.locals["actions"])
        self.record_buffer.add(
            frame, self.locals["rewards"][index], np.array(actions[index]), done=self.locals["dones"][index]
        )
        self._render()
        return True

    def _on_training_end(self) -> None:
        if self.path is not None and self.record_buffer is not None:
            self.record_buffer.export(self.path)
