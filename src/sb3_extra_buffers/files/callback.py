"""A callback that saves model and buffer during training; each checkpoint writes only what is new."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from sb3_extra_buffers.arguments import check_count
from sb3_extra_buffers.errors import LayoutError
from sb3_extra_buffers.files.folders import SavedAsFolder
from sb3_extra_buffers.files.last_save import get_last_save
from sb3_extra_buffers.files.saving import save

__all__ = ["BufferCheckpointCallback"]


class BufferCheckpointCallback(BaseCallback):
    """Saves the model and its buffer every ``save_freq`` calls of ``env.step()``, and keeps the last ``keep_last``.

    Like SB3's `CheckpointCallback`, but a checkpoint of the buffer costs time and disk space only for what is new since
    the one before, as they share files. Each is a folder that can be loaded, copied and deleted on its own. The last
    one is made when training ends.

    Warning:
        As in SB3's `CheckpointCallback`, each call of ``env.step()`` makes ``n_envs`` steps. To save every so many
        steps, pass ``save_freq=max(save_freq // n_envs, 1)``.

    Args:
        save_freq: Calls of ``env.step()`` between two checkpoints.
        save_path: The folder for the checkpoints.
        name_prefix: Prefix of their names.
        keep_last: How many to keep; ``None`` for all.
        save_model: Whether to save the model too.
        verbose: 1 to print every checkpoint.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from sb3_extra_buffers.compressed import CompressedReplayBuffer
        >>> from sb3_extra_buffers.files import BufferCheckpointCallback
        >>> model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=CompressedReplayBuffer)
        >>> model = model.learn(100, callback=BufferCheckpointCallback(50, "checkpoints"))
        >>> model = DQN.load("checkpoints/rl_model_100_steps")
        >>> model.load_replay_buffer("checkpoints/rl_model_buffer_100_steps")
    """

    def __init__(
        self,
        save_freq: int,
        save_path: str | os.PathLike[str],
        name_prefix: str = "rl_model",
        keep_last: int | None = 3,
        save_model: bool = True,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        self.save_freq = check_count(save_freq, "save_freq")
        self.save_path = Path(save_path)
        self.name_prefix = name_prefix
        self.keep_last = None if keep_last is None else check_count(keep_last, "keep_last")
        self.save_model = save_model
        self._saved_steps = -1

    def _buffer(self) -> Any:
        for name in ("replay_buffer", "rollout_buffer"):
            buffer = getattr(self.model, name, None)
            if isinstance(buffer, SavedAsFolder):
                return buffer
        raise LayoutError(
            f"{type(self.model).__name__} has no compressed buffer to save; pass replay_buffer_class, or use SB3's "
            "CheckpointCallback"
        )

    def _init_callback(self) -> None:
        self.save_path.mkdir(parents=True, exist_ok=True)

    def _on_training_start(self) -> None:
        self._buffer()  # raises now rather than at the first checkpoint

    def _on_step(self) -> bool:
        if self.n_calls % self.save_freq == 0:
            self._save()
        return True

    def _on_training_end(self) -> None:
        if self._saved_steps != self.num_timesteps:
            self._save()

    def _save(self) -> None:
        buffer = self._buffer()
        steps = self._saved_steps = self.num_timesteps
        last = get_last_save(buffer)
        folder = self.save_path / f"{self.name_prefix}_buffer_{steps}_steps"
        report = save(buffer, folder, base=None if last is None else last.folder)
        if self.save_model:
            self.model.save(self.save_path / f"{self.name_prefix}_{steps}_steps.zip")
        self._delete_old()
        if self.verbose:
            print(f"saved {folder}: {report.n_bytes} bytes written")

    def _delete_old(self) -> None:
        if self.keep_last is None:
            return
        pattern = re.compile(rf"{re.escape(self.name_prefix)}_(buffer_)?(\d+)_steps(\.zip)?")
        checkpoints: dict[int, list[Path]] = {}
        for path in self.save_path.iterdir():
            match = pattern.fullmatch(path.name)
            if match:
                checkpoints.setdefault(int(match[2]), []).append(path)
        # by age: an earlier training in this folder may have counted further
        ages = {steps: max(path.stat().st_mtime_ns for path in paths) for steps, paths in checkpoints.items()}
        oldest_first = sorted(ages, key=lambda steps: (steps == self._saved_steps, ages[steps], steps))
        for steps in oldest_first[: -self.keep_last]:
            for path in checkpoints[steps]:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
