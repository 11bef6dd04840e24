"""What a buffer or array that can be saved as a folder has: `SavedAsFolder`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing_extensions import Self

    from sb3_extra_buffers.files.parts import Parts

__all__ = ["SavedAsFolder"]


class SavedAsFolder:
    """`save`, `load` and `open` for buffers and arrays."""

    def to_parts(self) -> Parts:
        """What this is made of, for a file: a tag, a description, columns and stores."""
        from sb3_extra_buffers.files.kinds import take_parts

        return take_parts(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save this as the folder ``path``, without pickle; a second time, only what is new is written.

        What was saved there before stays whole until the new state is. `files.save` has more to choose from.
        """
        from sb3_extra_buffers.files.saving import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """What `save` wrote, as it was: the same batches follow from the same random state."""
        from sb3_extra_buffers.files.loading import load

        loaded: Self = load(path, cls)
        return loaded

    @classmethod
    def open(cls, path: str | os.PathLike[str], mode: Literal["r", "r+"] = "r") -> Self:
        """What `save` wrote, in its file: ``"r"`` to read, from many processes; ``"r+"`` to go on there."""
        from sb3_extra_buffers.files.loading import open_saved

        opened: Self = open_saved(path, cls, mode)
        return opened
