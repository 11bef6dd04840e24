"""What was saved where, kept on the object itself, so that its next save need only write what is new."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sb3_extra_buffers.files.blocks import SavedArrays
from sb3_extra_buffers.files.payloads import SavedPayloads


@dataclass(slots=True)
class LastSave:
    """An object's last save, or the one it was loaded from."""

    folder: Path
    record: dict[str, Any]
    """Its manifest."""
    arrays: SavedArrays
    stores: dict[str, SavedPayloads]
    _owner: Any = field(default=None, repr=False)

    @property
    def data_name(self) -> str:
        return str(self.record["data"]["name"])

    def __reduce__(self) -> Any:
        # a copy was never saved
        return _no_save, ()


def _no_save() -> None:
    return None


def get_last_save(saved: Any) -> LastSave | None:
    """The last save of ``saved``, if it was saved or loaded by this process."""
    found: LastSave | None = getattr(saved, "__dict__", {}).get("_last_save")
    return found if found is not None and found._owner() is saved else None


def set_last_save(saved: Any, last: LastSave) -> None:
    """Remember ``last`` as long as ``saved`` lives."""
    if hasattr(saved, "__dict__"):
        last._owner = weakref.ref(saved)
        saved.__dict__["_last_save"] = last
