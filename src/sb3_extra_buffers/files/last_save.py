"""An object's last save, remembered on the object itself so that the next one writes only what is new."""

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
    owner: weakref.ref[Any] | None = field(default=None, repr=False)
    """The object that was saved. A copy of its ``__dict__`` has the attribute too, but was never saved."""

    @property
    def data_name(self) -> str:
        return str(self.record["data"]["name"])

    def __reduce__(self) -> Any:
        return _no_save, ()  # a pickled copy was never saved


def _no_save() -> None:
    return None


def get_last_save(saved: Any) -> LastSave | None:
    """The last save of ``saved``, if this process saved or loaded it."""
    last: LastSave | None = getattr(saved, "last_save", None)
    return last if last is not None and last.owner is not None and last.owner() is saved else None


def set_last_save(saved: Any, last: LastSave) -> None:
    """Remember ``last`` on ``saved``."""
    last.owner = weakref.ref(saved)
    saved.last_save = last
