"""An SB3 callback that records one of the environments while a model learns."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from sb3_extra_buffers.recording.buffers import BaseRecordBuffer
from sb3_extra_buffers.recording.factory import buffer_for

__all__ = ["RecordCallback"]


class RecordCallback(BaseCallback):
    """Records what the agent sees, does and is given in one environment.

    Args:
        buffer: Where to record; None for a buffer that suits the observations, without frames if they are no pictures.
        size: Of that buffer.
        env_index: Which environment.
        render: Whether frames are what the environment renders, instead of observations.
        path: Where to export the recording to when training ends, such as ``"agent.gif"``.

    Example:
        >>> model.learn(10_000, callback=RecordCallback(path="agent.gif"))  # doctest: +SKIP
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
        self._shown: Any = None

    def _on_training_start(self) -> None:
        if not 0 <= self.env_index < self.training_env.num_envs:
            raise IndexError(f"env_index is {self.env_index}, but there are {self.training_env.num_envs} environments")
        self._look()

    def _look(self) -> None:
        if self.render:
            self._shown = self.training_env.get_images()[self.env_index]

    def _on_step(self) -> bool:
        index = self.env_index
        # SB3 calls this after the step and before it moves on: the last observation is what was acted on
        seen: Any = self.model._last_obs
        if self.model.get_vec_normalize_env() is not None:
            # off-policy algorithms keep what came before it was normalised
            seen = getattr(self.model, "_last_original_obs", seen)
        frame = self._shown if self.render else _of(seen, index)
        if self.record_buffer is None:
            self.record_buffer = buffer_for(frame, self.size)
        actions = self.locals.get("clipped_actions", self.locals["actions"])
        self.record_buffer.add(
            frame, self.locals["rewards"][index], np.array(actions[index]), done=self.locals["dones"][index]
        )
        self._look()
        return True

    def _on_training_end(self) -> None:
        if self.path is not None and self.record_buffer is not None:
            self.record_buffer.export(self.path)


def _of(observations: Any, index: int) -> Any:
    if isinstance(observations, dict):
        return {key: part[index] for key, part in observations.items()}
    return np.array(observations[index])
