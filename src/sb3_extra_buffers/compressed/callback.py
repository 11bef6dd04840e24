"""`BufferUsageCallback`: logs the memory of a compressed buffer."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from sb3_extra_buffers._sb3.base import CompressedBuffer
from sb3_extra_buffers.errors import LayoutError

__all__ = ["BufferUsageCallback"]


class BufferUsageCallback(BaseCallback):
    """Logs the memory of the model's buffer under ``buffer/``, to wherever SB3 logs: stdout, TensorBoard, CSV.

    Args:
        log_freq: Calls of ``env.step()`` between two records.
        verbose: As in SB3's callbacks.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from sb3_extra_buffers.compressed import BufferUsageCallback, CompressedReplayBuffer
        >>> model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=CompressedReplayBuffer)
        >>> model = model.learn(1000, callback=BufferUsageCallback())
    """

    def __init__(self, log_freq: int = 1000, verbose: int = 0) -> None:
        super().__init__(verbose)
        self.log_freq = log_freq

    def _buffer(self) -> Any:
        for name in ("replay_buffer", "rollout_buffer"):
            buffer = getattr(self.model, name, None)
            if isinstance(buffer, CompressedBuffer):
                return buffer
        raise LayoutError(
            f"{type(self.model).__name__} has no compressed buffer; pass replay_buffer_class or rollout_buffer_class"
        )

    def _on_training_start(self) -> None:
        self._buffer()

    def _on_step(self) -> bool:
        if self.n_calls % self.log_freq == 0:
            self._log()
        return True

    def _on_training_end(self) -> None:
        self._log()

    def _log(self) -> None:
        usage = self._buffer().memory_usage()
        figures = {"megabytes": usage.total / 1e6, "percent_of_dense": 100 * usage.ratio}
        for name in ("payload", "index", "keyframes", "other"):
            figures[f"{name}_megabytes"] = getattr(usage, name) / 1e6
        for name, value in figures.items():
            self.logger.record(f"buffer/{name}", value)
        for key, method in usage.codecs.items():
            # without the reason for the choice, which is too long for a table
            self.logger.record(f"buffer/method_{key}" if key else "buffer/method", method.partition(" ")[0])
