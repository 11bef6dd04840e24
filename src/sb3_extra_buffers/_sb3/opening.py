"""Lets ``load_replay_buffer`` of SB3's algorithms load the folder of a saved buffer."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

from stable_baselines3.common import save_util
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers._sb3.algorithm import calling_algorithm, check_loaded
from sb3_extra_buffers.errors import AlgorithmMismatchError
from sb3_extra_buffers.files.loading import load


class _SavedFolder:
    """Unpickles to the buffer that is saved there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return _load_checked, (self.path,)


def _load_checked(path: str) -> Any:
    buffer = load(path)
    if not isinstance(buffer, ReplayBuffer):
        raise AlgorithmMismatchError(f"{path} holds a {type(buffer).__name__}, which is not a replay buffer")
    check_loaded(buffer, vars(buffer))
    return buffer


# `load_replay_buffer` opens its path with `open_path`, which dispatches on the type of the path, then unpickles what it
# opened and completes the buffer: its device and, for HER, its environment.
@save_util.open_path.register(str)
@save_util.open_path.register(Path)
def open_saved(path: str | Path, mode: str, verbose: int = 0, suffix: str | None = None) -> Any:
    """Open ``path`` as SB3 does, or a folder as a pickle of the buffer saved there."""
    if mode == "r" and os.path.isdir(path) and calling_algorithm("load_replay_buffer") is not None:
        return io.BytesIO(pickle.dumps(_SavedFolder(os.fspath(path))))
    return save_util.open_path_pathlib(Path(path), mode, verbose, suffix)
