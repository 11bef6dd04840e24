"""Which frame store a codec asks for."""

from __future__ import annotations

from pathlib import Path

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.payloads import PayloadStore
from sb3_extra_buffers.stores.segments import SegmentStore


def make_frame_store(
    layout: StackLayout,
    n_obs: int,
    n_streams: int,
    codec: Codec,
    heap_bytes: int | None = None,
    path: Path | None = None,
    compiled: bool | None = None,
) -> FrameStore:
    """A store for ``n_cells`` observations that ``codec`` encodes."""
    if isinstance(codec, DeltaCodec):
        return SegmentStore(layout, n_obs, n_streams, codec, heap_bytes, path, compiled)
    return PayloadStore(layout, n_obs, n_streams, codec, heap_bytes, path, compiled)
