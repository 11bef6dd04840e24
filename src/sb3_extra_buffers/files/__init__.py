"""Buffers in files: saved without pickle, checked when they are read, continued where they were."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sb3_extra_buffers.files.callback import BufferCheckpointCallback as BufferCheckpointCallback
    from sb3_extra_buffers.files.checking import Repair as Repair
    from sb3_extra_buffers.files.checking import repair as repair
    from sb3_extra_buffers.files.checking import verify as verify
    from sb3_extra_buffers.files.loading import load as load
    from sb3_extra_buffers.files.loading import load_file as load_file
    from sb3_extra_buffers.files.loading import open_saved as open_saved
    from sb3_extra_buffers.files.saving import SaveReport as SaveReport
    from sb3_extra_buffers.files.saving import save as save
    from sb3_extra_buffers.files.saving import save_file as save_file

_MODULES = {
    "callback": ["BufferCheckpointCallback"],
    "checking": ["Repair", "repair", "verify"],
    "loading": ["load", "load_file", "open_saved"],
    "saving": ["SaveReport", "save", "save_file"],
}

__all__ = sorted(name for names in _MODULES.values() for name in names)  # a list


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
