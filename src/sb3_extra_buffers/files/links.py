"""What was saved where, as long as the buffer lives: so that the next save need only write what is new."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.files.blocks import SavedArrays
from sb3_extra_buffers.stores.heap import Heap


@dataclass(slots=True)
class StoreLink:
    """Where the payloads of a heap lie in the file."""

    heap: Heap
    starts: npt.NDArray[np.int64]  # per slot; those of slots that are not in use mean nothing
    chunks: npt.NDArray[np.int64]  # [stretch, 3]: offset, length, checksum
    file: Path | None = None  # where that is not the data file


@dataclass(slots=True)
class Link:
    """A buffer's last save."""

    folder: Path
    save_id: str
    folder_id: str
    number: int
    data_name: str
    data_size: int
    live_bytes: int
    arrays: SavedArrays
    stores: list[StoreLink | None]
    seen: tuple[int, ...] = ()  # of the manifest, as it was after that save
    alone: bool = False  # whether no other data files were in the folder then


_links: dict[int, Link] = {}


def get_link(buffer: Any) -> Link | None:
    """The last save of ``buffer``, if it was saved or loaded by this process."""
    return _links.get(id(buffer))


def set_link(buffer: Any, link: Link) -> None:
    """Remember ``link`` until ``buffer`` goes."""
    if id(buffer) not in _links:
        # by number: a buffer may compare like an array and have no hash
        weakref.finalize(buffer, _links.pop, id(buffer), None)
    _links[id(buffer)] = link
