"""Which store keeps observations of a codec, in host memory or on a device.

A new store is one module and one entry in `STORES`. Modules are imported when their store is first used.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.stores.base import Store
from sb3_extra_buffers.stores.layout import StackLayout

__all__ = ["STORES", "Place", "StoreEntry", "find_store", "make_store"]

Place = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """A kind of store and where it keeps its bytes; its ``accepts(codec, layout)`` says what it can store."""

    kind: str
    place: Place
    target: str  # module:class

    def load(self) -> type[Any]:
        """Import the class."""
        module, _, name = self.target.partition(":")
        store: type[Any] = getattr(importlib.import_module(module), name)
        return store


_HERE = "sb3_extra_buffers.stores"

#: Stores in order of preference: the first one that accepts a codec is used.
STORES: tuple[StoreEntry, ...] = (
    StoreEntry("raw", "cpu", f"{_HERE}.raw:RawStore"),
    StoreEntry("packed", "cpu", f"{_HERE}.packed:PackedStore"),
    StoreEntry("table", "cpu", f"{_HERE}.tables:TableStore"),
    StoreEntry("segments", "cpu", f"{_HERE}.segments:SegmentStore"),
    StoreEntry("payloads", "cpu", f"{_HERE}.payloads:PayloadStore"),
    StoreEntry("device-timeline", "cuda", f"{_HERE}.device_timeline:DeviceTimelineStore"),
    StoreEntry("device-delta", "cuda", f"{_HERE}.device_frames:DeviceFrameStore"),
    StoreEntry("device-rle", "cuda", f"{_HERE}.device_host:DeviceRleStore"),
    StoreEntry("device-camera", "cuda", f"{_HERE}.device_camera:DeviceCameraStore"),
    StoreEntry("device-table", "cuda", f"{_HERE}.device_table:DeviceTableStore"),
    StoreEntry("device-host", "cuda", f"{_HERE}.device_host:HostDecodedStore"),
)


def find_store(codec: Codec, layout: StackLayout, place: Place = "cpu", of_frames: bool = False) -> type[Any]:
    """Return the class of the first store at ``place`` that accepts frames of ``layout`` encoded by ``codec``.

    ``of_frames`` leaves out ``raw`` and ``table``, so that the result is a frame store, as for palettes in files of
    earlier versions.
    """
    for entry in STORES:
        if entry.place == place and not (of_frames and entry.kind in ("raw", "table")):
            store = entry.load()
            if store.accepts(codec, layout):
                return store
    raise LookupError(f"no store on {place!r} accepts codec {codec.codec_id!r}; add one to stores.registry.STORES")


def make_store(
    layout: StackLayout,
    n_obs: int,
    n_streams: int,
    codec: Codec,
    heap_bytes: int | None = None,
    path: Path | None = None,
    compiled: bool | None = None,
) -> Store:
    """Create a host store of unwritten observations.

    Args:
        layout: The observations, and the frames that they consist of.
        n_obs: The number of observations.
        n_streams: The number of streams that writes may continue.
        codec: Encodes frames; bound to ``layout.frame_spec``.
        heap_bytes: The most that encoded observations may take; a write beyond raises `HeapFullError`.
        path: The file to keep encoded observations in, instead of memory.
        compiled: Whether to use compiled kernels; None for those that are available.
    """
    store: Store = find_store(codec, layout)(layout, n_obs, n_streams, codec, heap_bytes, path, compiled)
    return store
