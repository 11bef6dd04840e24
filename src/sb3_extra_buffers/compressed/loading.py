"""`load_replay_buffer`: a saved folder as the replay buffer of a model."""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers._sb3.algorithm import check_loaded
from sb3_extra_buffers.errors import AlgorithmMismatchError
from sb3_extra_buffers.files.loading import load

__all__ = ["load_replay_buffer"]


def load_replay_buffer(model: Any, path: str | os.PathLike[str], truncate_last_traj: bool = True) -> None:
    """Load the folder that ``buffer.save(path)`` wrote as the replay buffer of ``model``.

    Does what ``model.load_replay_buffer`` does with a pickle; that method itself cannot open a folder.

    Args:
        model: An off-policy algorithm, with the same spaces as the saved buffer.
        path: The folder.
        truncate_last_traj: As in SB3: for HER, whether to end the episode that was not complete.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from sb3_extra_buffers.compressed import CompressedReplayBuffer, load_replay_buffer
        >>> model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=CompressedReplayBuffer).learn(100)
        >>> model.save("model")
        >>> model.replay_buffer.save("buffer")
        >>> model = DQN.load("model", env=model.env)
        >>> load_replay_buffer(model, "buffer")
        >>> len(model.replay_buffer)
        100
    """
    if not hasattr(model, "load_replay_buffer"):
        raise AlgorithmMismatchError(f"{type(model).__name__} has no replay buffer to load")
    # SB3's own method completes the buffer: the environment and the last episode for HER, and the device
    model.load_replay_buffer(io.BytesIO(pickle.dumps(_SavedFolder(path))), truncate_last_traj)


class _SavedFolder:
    """Unpickles to the buffer that is saved there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def __reduce__(self) -> Any:
        return _load_checked, (self.path,)


def _load_checked(path: str) -> Any:
    buffer = load(path)
    if not isinstance(buffer, ReplayBuffer):
        raise AlgorithmMismatchError(f"{path} holds a {type(buffer).__name__}, which is not a replay buffer")
    check_loaded(buffer, vars(buffer))
    return buffer
