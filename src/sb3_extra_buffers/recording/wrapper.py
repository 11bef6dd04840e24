"""A Gymnasium wrapper that records every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from sb3_extra_buffers.recording.base import BaseRecordBuffer
from sb3_extra_buffers.recording.factory import buffer_for

__all__ = ["RecordWrapper"]


class RecordWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Records observation, action and reward of every step of ``env`` in ``record_buffer``.

    Args:
        env: The environment.
        buffer: Buffer to record to; None to create one for the observations, without frames if they are not images.
        size: Size of the buffer if one is created.
        render: Record rendered frames instead of observations.
        info_keys: Keys of numbers in ``info`` to record as features; steps without a key are recorded without it.

    Examples:
        >>> import gymnasium
        >>> from sb3_extra_buffers.recording import RecordWrapper
        >>> env = RecordWrapper(gymnasium.make("CartPole-v1"))
        >>> obs, info = env.reset()
        >>> obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
        >>> float(env.record_buffer[-1].reward)
        1.0
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
        self._last_frame: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.record_buffer is not None:
            # the previous episode may not have ended
            self.record_buffer.end_episode()
        obs, info = super().reset(seed=seed, options=options)
        self._last_frame = self._frame(obs)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.record_buffer is None:
            self.record_buffer = buffer_for(self._last_frame, self._size)
        features = {key: info[key] for key in self._info_keys if key in info}
        self.record_buffer.add(self._last_frame, reward, action, features, done=terminated or truncated)
        self._last_frame = self._frame(obs)
        return obs, reward, terminated, truncated, info

    def _frame(self, obs: Any) -> Any:
        frame = self.env.render() if self._render else obs
        # copied: environments may reuse the array for the next observation
        return frame if isinstance(frame, dict) else np.array(frame)
