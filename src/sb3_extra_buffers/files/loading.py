"""Loads and opens what was saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from sb3_extra_buffers.errors import ArgumentError, DamagedFileError, FileFormatError
from sb3_extra_buffers.files import manifest
from sb3_extra_buffers.files.mmap_buffer import resume
from sb3_extra_buffers.files.saved_parts import SavedParts

# attempts to read a folder that another process writes to
_ATTEMPTS = 5


def load(path: str | os.PathLike[str], target: type[Any] | None = None) -> Any:
    """Load the folder ``path`` into memory; the next save to ``path`` writes only what is new.

    Args:
        path: The folder.
        target: The class to load; ``None`` for the one that was saved.

    Examples:
        >>> from sb3_extra_buffers.compressed import CompressedArray
        >>> from sb3_extra_buffers.files import load, save
        >>> report = save(CompressedArray(1000, (84, 84)), "frames")
        >>> load("frames").shape
        (1000, 84, 84)
    """
    return _read(Path(path), target)


def _read(folder: Path, target: type[Any] | None, read_only: bool = False) -> Any:
    for _ in range(_ATTEMPTS):
        record = manifest.read(folder)
        try:
            return SavedParts.of_folder(folder, record).load(target, read_only)
        except DamagedFileError:
            # not damage if another process has saved there in the meantime, and deleted these files: try again
            if manifest.read(folder).get("save_id") == record.get("save_id"):
                raise
    raise FileFormatError(f"{folder} was changed by another process during each of {_ATTEMPTS} attempts to read it")


def load_file(path: str | os.PathLike[str], target: type[Any] | None = None) -> Any:
    """Load the single file ``path``, written by `save_file`.

    Args:
        path: The file.
        target: The class to load; ``None`` for the one that was saved.

    Examples:
        >>> from sb3_extra_buffers.compressed import CompressedArray
        >>> from sb3_extra_buffers.files import load_file, save_file
        >>> path = save_file(CompressedArray(1000, (84, 84)), "frames.seb")
        >>> load_file(path).shape
        (1000, 84, 84)
    """
    return SavedParts.of_file(Path(path)).load(target)


def open_saved(path: str | os.PathLike[str], target: type[Any] | None = None, mode: Literal["r", "r+"] = "r") -> Any:
    """Open the folder ``path`` in place: observations stay on disk until they are read.

    Mode ``"r"`` is read-only, for any number of processes at a time; observations are checked when they are first read.
    Of a buffer that another process keeps there (``storage="mmap"``), it shows the last checkpoint. Mode ``"r+"``
    continues in the folder, like ``storage="mmap"``, and only one process can hold it.

    Args:
        path: The folder.
        target: The class to load; ``None`` for the one that was saved.
        mode: ``"r"`` or ``"r+"``.

    Examples:
        >>> from sb3_extra_buffers.compressed import CompressedArray
        >>> from sb3_extra_buffers.files import open_saved, save
        >>> report = save(CompressedArray(1000, (84, 84)), "frames")
        >>> open_saved("frames")[0].max()
        np.uint8(0)
    """
    if mode not in ("r", "r+"):
        raise ArgumentError(f"mode must be 'r' or 'r+', got {mode!r}")
    if mode == "r+":
        return resume(Path(path), target)
    return _read(Path(path), target, read_only=True)
