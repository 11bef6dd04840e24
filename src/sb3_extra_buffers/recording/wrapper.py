"""A Gymnasium environment that records what is done in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from sb3_extra_buffers.recording.buffers import BaseRecordBuffer
from sb3_extra_buffers.recording.factory import buffer_for

__all__ = ["RecordWrapper"]


class RecordWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Records every step of ``env`` in ``record_buffer``: what was seen, what was done, what it gave.

    Args:
        env: The environment.
        buffer: Where to record; None for a buffer that suits the observations, without frames if they are no pictures.
        size: Of that buffer.
        render: Whether frames are what ``env`` renders, instead of observations.
        info_keys: Numbers in ``info`` that are recorded as features.

    Example:
        >>> env = RecordWrapper(gymnasium.make("CartPole-v1", render_mode="rgb_array"), render=True)
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        buffer: BaseRecordBuffer | None = None,
        size: int = 40_000,
        render: bool = False,
        info_keys: Sequence[str] = (),
    ) -> None:
        super().__init__(env)
        self.record_buffer = buffer
        self._size = size
        self._render = render
        self._info_keys = tuple(info_keys)
        self._seen: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.record_buffer is not None:
            # an episode may be left before its end
            self.record_buffer.end_episode()
        obs, info = super().reset(seed=seed, options=options)
        self._seen = self._frame(obs)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.record_buffer is None:
            self.record_buffer = buffer_for(self._seen, self._size)
        features = {key: info[key] for key in self._info_keys} if self._info_keys else None
        self.record_buffer.add(self._seen, reward, action, features, done=terminated or truncated)
        self._seen = self._frame(obs)
        return obs, reward, terminated, truncated, info

    def _frame(self, obs: Any) -> Any:
        frame = self.env.render() if self._render else obs
        # environments may write the next observation over this one
        return frame if isinstance(frame, dict) else np.array(frame)
