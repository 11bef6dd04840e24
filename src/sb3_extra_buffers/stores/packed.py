"""Segments of whole frames that are packed when they are full: the store of ``none``, ``scroll`` and ``camera``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.errors import CorruptPayloadError
from sb3_extra_buffers.kernels import compiled_kernels
from sb3_extra_buffers.kernels.camera import camera_geometry, frames_to_decode
from sb3_extra_buffers.kernels.policy import ReadWork, read_ns, write_ns
from sb3_extra_buffers.kernels.state import NONE, PACKED_CAMERA, PACKED_LZ4, PACKED_ZSTD, Bytes, Ints, padded_bytes
from sb3_extra_buffers.stores.base import Indices, Trial
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.segment_format import (
    header_bytes,
    inflate,
    pack_camera_frames,
    unpack_camera_frames,
)
from sb3_extra_buffers.stores.segments import SegmentStore
from sb3_extra_buffers.stores.workers import run_split

#: flags of a segment, its bytes, the number of its dictionary or NONE, and the lengths of coded frames or None
Packed = tuple[int, Bytes, int, Ints | None]

# frames of an uncompressed segment: enough that its table entries take little memory in comparison
_RAW_FRAMES = 8
# maximum size of a dictionary
_DICTIONARY_FRAMES = 16
_DICTIONARY_BYTES = 1 << 18
# zeros before the frames of a dictionary: zstd takes content that starts with its magic number for a trained dictionary
_DICTIONARY_START = 64
# segments sealed between two checks of the dictionary
_CHECK_EVERY = 32
# larger than any frame or segment; as `compress_above`, the kernel seals segments without compressing them
_NEVER = 1 << 40


class PackedStore(SegmentStore):
    """A frame store whose open segments hold whole frames; a segment is packed as a whole when it is sealed.

    With ``none`` segments stay as they are, and reading is a gather: each frame is stored once, however many
    observations contain it.

    With ``scroll`` segments are compressed with LZ4, or with zstd and a dictionary. Dictionaries are in the table of
    keyframes. Each consists of frames of several segments, so that returning scenery is found there. New segments use
    the dictionary ``state.pool[0]``. As for keyframes, a new one is stored when the lack of it has cost as many bytes
    as it takes (the ski-rental rule).

    With ``camera`` the frames of a segment are coded as `kernels.camera` describes.
    """

    # frames for the next dictionary, and the number of segments sealed since the last check
    _samples: deque[Bytes]
    _n_sealed = 0
    # bytes that a newer dictionary would have saved
    _excess = 0
    # number of the current dictionary, and the dictionary prepared for compression
    _prepared: tuple[int, Any] = (NONE, None)

    @classmethod
    def accepts(cls, codec: Codec, layout: StackLayout) -> bool:
        return codec.codec_id in ("none", "camera", "scroll")

    @staticmethod
    def frames_per_segment(codec: Codec) -> int:
        return getattr(codec, "frames", _RAW_FRAMES)

    @property
    def _n_dictionary(self) -> int:
        """Frames in a dictionary."""
        return min(max(_DICTIONARY_BYTES // self.layout.frame_bytes, 1), _DICTIONARY_FRAMES)

    @property
    def _keyframe_size(self) -> int:
        return self._n_dictionary * self.layout.frame_bytes

    def _follow_kernels(self) -> None:
        compress_above = _NEVER if self.codec.codec_id == "none" else -1
        if self.codec.codec_id == "camera":
            self._replace(geometry=camera_geometry(self.layout.frame_spec))
        config = self.state.config._replace(whole=True, max_chain_bytes=_NEVER, compress_above=compress_above)
        if self._zstd_level:
            config = config._replace(keyframe_bytes=padded_bytes(_DICTIONARY_START + self._keyframe_size))
        self._replace(config=config)
        self._samples = deque(maxlen=self._n_dictionary)
        self._prepared = NONE, None
        self._packed_flags = self._unreadable_flags()
        self._n_packed = self._count_packed(np.flatnonzero(self.state.lengths))

    # ---- writing ----

    def _seal_streams(self, streams: list[int]) -> None:
        packed: dict[int, Packed] = {}
        if not self._zstd_level and len(streams) > 1:  # a zstd context must not be used by several threads

            def work(first: int, stop: int) -> None:
                for stream in streams[first:stop]:
                    packed[stream] = self._pack(self._body(stream))

            run_split(work, len(streams), 1)
        for stream in streams:
            self._seal(stream, packed.get(stream))

    def _body(self, stream: int) -> Bytes:
        """The frames of a stream's open segment."""
        begin = stream * self.state.config.stage_bytes
        header = header_bytes(self.per_segment, self._length_dtype)
        return self.state.stage[begin + header : begin + int(self.state.stage_ends[stream])]

    def _seal(self, stream: int, packed: Packed | None = None) -> None:
        """Move a stream's open segment to the heap; ``packed`` is the result of `_pack`, if it was called before."""
        state, dtype = self.state, self._length_dtype
        segment, begin = int(state.open_segments[stream]), stream * self.state.config.stage_bytes
        count, body = int(state.counts[segment]), self._body(stream)
        header = state.stage[begin : begin + header_bytes(count, dtype)].copy()
        flags, content, dictionary, lengths = self._pack(body) if packed is None else packed
        header[:2] = flags, count
        if lengths is not None:
            header[2:].view(dtype)[:] = lengths
        payload = np.concatenate([header, content])
        self.heap.check_limit(segment, payload.size)
        if dictionary >= 0:
            # before the payload is stored: an open segment needs no dictionary, a sealed one does
            self.state.keyframe_refs[dictionary] += 1
            self.state.keyframes[segment] = dictionary
        self.heap.put(segment, payload)
        self._n_packed += flags in self._packed_flags
        state.open_segments[stream] = NONE
        self._note_sealed(np.array([segment]))
        if self._zstd_level:
            self._update_dictionary(body)

    def _pack(self, body: Bytes) -> Packed:
        """Pack the frames of a segment, or return them as they are if that does not make them smaller."""
        as_is: Packed = 0, body, NONE, None
        if self.codec.codec_id == "none":
            return as_is
        if self.codec.codec_id == "camera":
            packed, lengths = pack_camera_frames(body, self.state.geometry, self._kernels.compiled)
            return (PACKED_CAMERA, packed, NONE, lengths) if packed.size < body.size else as_is
        if not self._zstd_level:
            packed = np.frombuffer(self.codec.encode(body.data), np.uint8)
            return (PACKED_LZ4, packed, NONE, None) if packed.size < body.size else as_is
        number, dictionary = self._dictionary(int(self.state.pool[0]), body.size)
        packed = self._compress(body, dictionary)
        return (PACKED_ZSTD, packed, number, None) if packed.size < body.size else as_is

    def _compress(self, body: Bytes, dictionary: Any) -> Bytes:
        from sb3_extra_buffers.codecs.zstd import compress_bytes  # needs zstandard

        return np.frombuffer(compress_bytes(body, self._zstd_level, dictionary), np.uint8)

    # ---- dictionaries ----

    def _dictionary(self, number: int, nbytes: int) -> tuple[int, Any]:
        """The dictionary ``number``, prepared for compressing about ``nbytes``."""
        if self._prepared[0] != number:
            self._prepared = number, None if number < 0 else self._prepare(self._content(number), nbytes)
        return self._prepared

    def _prepare(self, content: Bytes, nbytes: int) -> Any:
        from sb3_extra_buffers.codecs.zstd import RawDictionary  # needs zstandard

        return RawDictionary(content, self._zstd_level, nbytes)

    def _content(self, number: int) -> Bytes:
        width = self.state.config.keyframe_bytes
        return self.state.keyframe_rows[number * width : (number + 1) * width]

    def _update_dictionary(self, body: Bytes) -> None:
        """Store a new dictionary if the lack of it has cost as many bytes as it takes; drop one that does not help."""
        size = self.layout.frame_bytes
        self._samples.append(body[:size].copy())
        self._n_sealed += 1
        if self._n_sealed < _CHECK_EVERY or len(self._samples) < self._n_dictionary:
            return
        self._n_sealed = 0
        content = np.zeros(self.state.config.keyframe_bytes, np.uint8)
        frames = np.concatenate(self._samples)
        content[_DICTIONARY_START : _DICTIONARY_START + frames.size] = frames
        plain = self._compress(body, None).size
        number, present = self._dictionary(int(self.state.pool[0]), body.size)
        current = self._compress(body, present).size
        # for a fair comparison, leave out this segment's own frame, which is the last one
        content[_DICTIONARY_START + frames.size - size : _DICTIONARY_START + frames.size] = 0
        newer = self._compress(body, self._prepare(content, body.size)).size
        if number >= 0 and plain <= current:
            self.state.pool[0] = NONE
        self._excess = max(self._excess + (min(plain, current) - newer) * _CHECK_EVERY, 0)
        if self._excess > self._keyframe_size:
            self._excess = 0
            content[_DICTIONARY_START + frames.size - size : _DICTIONARY_START + frames.size] = body[:size]
            self._add_dictionary(content)

    def _add_dictionary(self, content: Bytes) -> None:
        number = self._add_row(content, {int(self.state.pool[0])})
        self.state.pool[0] = number
        self._prepared = NONE, None

    # ---- reading ----

    def _read_kernel(self, expands: bool) -> Callable[..., int]:
        if not self._kernels.compiled:
            return self._kernels.read_frames
        read: Callable[..., int] = compiled_kernels("expanded" if expands else "packed").read_packed
        return read

    def _inflate(self, payload: Bytes, segment: int) -> Bytes:
        if payload[0] == PACKED_CAMERA:
            if not len(self.state.geometry):
                raise CorruptPayloadError(f"a segment of {self.codec.codec_id!r} is flagged as one of 'camera'")
            return unpack_camera_frames(payload, self._length_dtype, self.per_segment, self.state.geometry)
        count = int(payload[1]) if len(payload) > 1 else 0
        header = header_bytes(count, self._length_dtype)
        is_lz4 = payload[0] == PACKED_LZ4 and self.codec.codec_id == "scroll" and not self._zstd_level
        if is_lz4 and 0 < count <= self.per_segment and header <= len(payload):
            # faster than the reference decoder that `inflate` uses
            plain = np.empty(header + count * self.layout.frame_bytes, np.uint8)
            plain[:header] = payload[:header]
            plain[0] = 0
            self.codec.decode_into(payload[header:].data, plain[header:].data)
            return plain
        number = int(self.state.keyframes[segment])
        dictionary = self._content(number) if number >= 0 else None
        return inflate(payload, self._length_dtype, self.per_segment, self.layout.frame_bytes, dictionary)

    @classmethod
    def trial(cls, layout: StackLayout, codec: Codec, streams: Indices, rows: ByteRows, n_streams: int) -> Trial:
        if codec.codec_id != "none":
            return super().trial(layout, codec, streams, rows, n_streams)
        # does not depend on the contents of the rows
        size, per_segment = layout.frame_bytes, cls.frames_per_segment(codec)
        work = ReadWork(2 * layout.spec.nbytes, 1 + layout.stack / per_segment)
        return Trial(float(size), read_ns("none", work), *write_ns("none", size, size))

    def trial_size(self) -> int:
        return self.packed_bytes()

    @property
    def cost_kind(self) -> str:
        return self.codec.codec_id + "-zstd" * bool(self._zstd_level)

    def read_work(self) -> ReadWork:
        layout, per_segment = self.layout, self.per_segment
        n_parts = 1 + layout.stack / per_segment
        if self._zstd_level:
            n_frames = n_parts * per_segment  # decompressed as a whole
        elif self.codec.codec_id == "camera":
            n_frames = frames_to_decode(layout.stack + 1, per_segment)
        else:
            n_frames = (per_segment + 1) / 2 + layout.stack  # from the first one to the last one needed
        parsed = n_frames * self.packed_bytes() / max(int(self.state.counts.sum()), 1)
        sequences = n_frames * self.sequences_per_frame()
        return ReadWork(2 * layout.spec.nbytes, n_parts, n_frames * layout.frame_bytes, parsed, 0.0, sequences)

    def packed_bytes(self) -> int:
        """Bytes of all segments, with open ones as they would be packed now."""
        self.collect_segments()
        opened = np.flatnonzero(self.state.open_segments >= 0).tolist()
        return self.heap.live_bytes + sum(self._pack(self._body(stream))[1].size for stream in opened)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # zstd's objects cannot be copied
        for name in ("_samples", "_prepared"):
            state.pop(name, None)
        return state
