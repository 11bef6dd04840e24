"""`SavedAsFolder`: the save, load and open methods of buffers and arrays."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Literal

from sb3_extra_buffers.files import loading, registry, saving

if TYPE_CHECKING:
    from typing_extensions import Self

    from sb3_extra_buffers.files.last_save import LastSave
    from sb3_extra_buffers.files.mmap_buffer import MmapFolder
    from sb3_extra_buffers.files.parts import Parts

__all__ = ["SavedAsFolder"]


class SavedAsFolder:
    """`save`, `load` and `open` for buffers and arrays."""

    #: The folder that this is kept in (``storage="mmap"``).
    mmap_folder: MmapFolder | None = None
    #: The last save, which the next one appends to; see `files.last_save`.
    last_save: LastSave | None = None

    @property
    def lock(self) -> Any:
        """Held while this is changed or saved."""
        return contextlib.nullcontext()

    def recover(self) -> None:
        """Complete or undo a write that was interrupted."""

    def to_parts(self) -> Parts:
        """The parts to save: a tag, a description, columns and stores."""
        return registry.registered_parts(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save this as the folder ``path``, without pickle; a second save writes only what is new.

        What was saved there before stays intact until the new state is complete. `files.save` has more options.
        """
        saving.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load what `save` wrote to ``path``: from the same random state, it samples the same batches."""
        loaded: Self = loading.load(path, cls)
        return loaded

    @classmethod
    def open(cls, path: str | os.PathLike[str], mode: Literal["r", "r+"] = "r") -> Self:
        """Open the folder ``path`` in place.

        ``mode`` is ``"r"`` to read, from many processes at a time, or ``"r+"`` to continue there.
        """
        opened: Self = loading.open_saved(path, cls, mode)
        return opened
