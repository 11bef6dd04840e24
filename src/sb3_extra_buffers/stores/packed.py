"""Whole frames, several to a segment, which is packed when it is full: the store of ``none`` and ``scroll``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.kernels.state import NONE, PACKED_ZSTD, Bytes
from sb3_extra_buffers.stores.base import Indices
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.segment_format import header_bytes, inflate
from sb3_extra_buffers.stores.segments import SegmentStore

# frames of a raw segment: enough that its table entries take little
_RAW_FRAMES = 8
# more than any frame takes: the kernel then seals segments without compressing them
_NEVER = 1 << 40


class PackedStore(SegmentStore):
    """A frame store whose open segments hold whole frames; a segment is packed as a whole when it is sealed.

    With ``none`` segments stay as they are, and reading is a gather: each frame is stored once, however many
    observations contain it.
    """

    @classmethod
    def accepts(cls, codec: Codec, layout: StackLayout) -> bool:
        # an observation that is a single frame needs no frame ids
        return codec.codec_id == "scroll" or (codec.codec_id == "none" and layout.stack > 1)

    @staticmethod
    def frames_per_segment(codec: Codec) -> int:
        return getattr(codec, "frames", _RAW_FRAMES)

    def _follow_kernels(self) -> None:
        compress_above = _NEVER if self.codec.codec_id == "none" else -1
        config = self.state.config._replace(whole=True, max_chain_bytes=_NEVER, compress_above=compress_above)
        self._replace(config=config)
        self._packed_flags = self._unreadable_flags()
        self._n_packed = self._count_packed(np.flatnonzero(self.state.lengths))

    # ---- writing ----

    def _seal(self, stream: int) -> None:
        state, dtype = self.state, self._length_dtype
        segment, begin = int(state.open_segments[stream]), stream * self.state.config.stage_bytes
        count, end = int(state.counts[segment]), begin + int(state.stage_ends[stream])
        header = state.stage[begin : begin + header_bytes(count, dtype)].copy()
        body = state.stage[begin + header_bytes(self.per_segment, dtype) : end]
        flags, packed = self._pack(body)
        header[:2] = flags, count
        payload = np.concatenate([header, packed])
        self.heap.check_limit(segment, payload.size)
        self.heap.put(segment, payload)
        self._n_packed += flags in self._packed_flags
        state.open_segments[stream] = NONE
        self._note_sealed(np.array([segment]))

    def _pack(self, body: Bytes) -> tuple[int, Bytes]:
        """Compress the frames of a segment; return flags and bytes."""
        if not self._zstd_level:
            return 0, body
        from sb3_extra_buffers.codecs.zstd import compress_bytes  # needs zstandard

        packed = np.frombuffer(compress_bytes(body, self._zstd_level), np.uint8)
        return (PACKED_ZSTD, packed) if packed.size < body.size else (0, body)

    # ---- reading ----

    def _read_kernel(self) -> Callable[..., int]:
        return _read_packed() if self._kernels.compiled else self._kernels.read_frames

    def _inflate(self, payload: Bytes, segment: int) -> Bytes:
        return inflate(payload, self._length_dtype, self.per_segment, self.layout.frame_bytes)

    @classmethod
    def trial_bytes(cls, layout: StackLayout, codec: Codec, streams: Indices, rows: ByteRows, n_streams: int) -> float:
        store = cls(layout, len(rows), n_streams, codec)
        store.write(np.arange(len(rows)), streams, rows)
        return store.packed_bytes() / max(int(store.state.counts.sum()), 1)

    def packed_bytes(self) -> int:
        """Bytes of all segments, with open ones as they would be packed now."""
        self.collect_segments()
        state, header = self.state, header_bytes(self.per_segment, self._length_dtype)
        nbytes = self.heap.live_bytes
        for stream in np.flatnonzero(state.open_segments >= 0).tolist():
            begin = stream * state.config.stage_bytes
            nbytes += self._pack(state.stage[begin + header : begin + int(state.stage_ends[stream])])[1].size
        return nbytes


@cache
def _read_packed() -> Callable[..., int]:
    module: Any = importlib.import_module("sb3_extra_buffers.kernels.packed_numba")
    read: Callable[..., int] = module.read_packed
    return read
