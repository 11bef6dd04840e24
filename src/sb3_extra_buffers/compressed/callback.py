"""`BufferUsageCallback`: logs the memory of a compressed buffer."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from sb3_extra_buffers._sb3.report import ReportingBuffer
from sb3_extra_buffers.arguments import check_count
from sb3_extra_buffers.errors import LayoutError

__all__ = ["BufferUsageCallback"]


class BufferUsageCallback(BaseCallback):
    """Logs the size and memory of the model's buffer to wherever SB3 logs: stdout, TensorBoard, CSV.

    | key | value |
    |---|---|
    | `buffer/size` | transitions held |
    | `buffer/bytes` | memory held, in bytes |
    | `buffer/sb3_bytes` | what SB3's own buffer would hold for these transitions, in bytes |
    | `buffer/ratio` | `bytes` divided by `sb3_bytes`; left out until observations are compressed |
    | `buffer/observation_ratio` | the same for observations alone |
    | `buffer/method` | the compression method; one for each key of a Dict |

    The last values are logged when training ends, so that even a short run reports them once.

    Warning:
        As in SB3's own callbacks, ``log_freq`` counts calls of ``env.step()``, and with several environments each call
        makes ``n_envs`` steps. To log every so many steps, pass ``log_freq=max(log_freq // n_envs, 1)``.

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
        self.log_freq = check_count(log_freq, "log_freq")
        self._training = False

    def _buffer(self) -> Any:
        for name in ("replay_buffer", "rollout_buffer"):
            buffer = getattr(self.model, name, None)
            if isinstance(buffer, ReportingBuffer):
                return buffer
        raise LayoutError(
            f"{type(self.model).__name__} has no compressed buffer; pass replay_buffer_class or rollout_buffer_class"
        )

    def _on_training_start(self) -> None:
        self._buffer()  # raises now rather than after log_freq calls
        self._training = True

    def _on_step(self) -> bool:
        if self.n_calls % self.log_freq == 0:
            self._record()
        return True

    def _on_training_end(self) -> None:
        # RL Zoo calls this twice
        if self._training:
            self._record()
            # SB3 does not write its log again after this
            self.logger.dump(self.num_timesteps)
        self._training = False

    def _record(self) -> None:
        usage = self._buffer().memory_usage()
        figures: dict[str, Any] = {
            "size": usage.transitions,
            "bytes": usage.total,
            "sb3_bytes": usage.dense,
            "ratio": usage.ratio,
            "observation_ratio": usage.observation_ratio,
        }
        for key, method in usage.codecs.items():
            # without the reason for the choice, which is too long for a table
            figures[f"method_{key}" if key else "method"] = method.partition(" ")[0] if usage.decided else None
        for name, value in figures.items():
            if value is not None:
                self.logger.record(f"buffer/{name}", value)
