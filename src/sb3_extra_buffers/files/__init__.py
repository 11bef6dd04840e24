"""Buffers in files: saved without pickle, checked when they are read, continued where they were."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sb3_extra_buffers.files.callback import BufferCheckpointCallback
    from sb3_extra_buffers.files.checking import Repair, repair, verify
    from sb3_extra_buffers.files.loading import load, load_file, open_saved
    from sb3_extra_buffers.files.saving import SaveReport, save, save_file

__all__ = [
    "BufferCheckpointCallback",
    "Repair",
    "SaveReport",
    "load",
    "load_file",
    "open_saved",
    "repair",
    "save",
    "save_file",
    "verify",
]

_MODULES = {
    "BufferCheckpointCallback": "callback",
    "Repair": "checking",
    "SaveReport": "saving",
    "load": "loading",
    "load_file": "loading",
    "open_saved": "loading",
    "repair": "checking",
    "save": "saving",
    "save_file": "saving",
    "verify": "checking",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
