"""Saving and loading without pickle: incremental, checksummed, crash-safe, and safe for untrusted files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sb3_extra_buffers._lazy import attach

if TYPE_CHECKING:
    from sb3_extra_buffers.files.callback import BufferCheckpointCallback as BufferCheckpointCallback
    from sb3_extra_buffers.files.loading import load as load
    from sb3_extra_buffers.files.loading import load_file as load_file
    from sb3_extra_buffers.files.loading import open_saved as open_saved
    from sb3_extra_buffers.files.repairing import Repair as Repair
    from sb3_extra_buffers.files.repairing import repair as repair
    from sb3_extra_buffers.files.saving import SaveReport as SaveReport
    from sb3_extra_buffers.files.saving import save as save
    from sb3_extra_buffers.files.saving import save_file as save_file
    from sb3_extra_buffers.files.verifying import verify as verify

__all__ = [
    "BufferCheckpointCallback", "Repair", "SaveReport", "load", "load_file", "open_saved", "repair", "save",
    "save_file", "verify",
]  # fmt: skip

__getattr__, __dir__ = attach(
    __name__,
    {
        "callback": ["BufferCheckpointCallback"],
        "loading": ["load", "load_file", "open_saved"],
        "repairing": ["Repair", "repair"],
        "saving": ["SaveReport", "save", "save_file"],
        "verifying": ["verify"],
    },
)
