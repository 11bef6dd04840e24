"""The bytes of a segment: flags, the number of frames, the length of each frame, then the frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.registry import is_available
from sb3_extra_buffers.errors import CorruptPayloadError
from sb3_extra_buffers.kernels import FrameKernels, as_contiguous, camera, compiled_kernels
from sb3_extra_buffers.kernels.camera import OVERREAD
from sb3_extra_buffers.kernels.lz4_block import OVERRUN, unpack_block
from sb3_extra_buffers.kernels.policy import PAYING_TENTHS
from sb3_extra_buffers.kernels.state import PACKED_CAMERA, PACKED_LZ4, PACKED_ZSTD, FrameConfig, Ints
from sb3_extra_buffers.stores.arena import SLACK
from sb3_extra_buffers.stores.checks import require
from sb3_extra_buffers.stores.heap import Heap

Bytes = npt.NDArray[np.uint8]


def length_dtype(config: FrameConfig) -> np.dtype[Any]:
    """How the length of a frame is stored."""
    return np.dtype(f"<u{config.length_bytes}")


def header_bytes(n_frames: Any, dtype: np.dtype[Any]) -> Any:
    """Bytes before the first frame of a segment; ``n_frames`` may be an array."""
    return 2 + n_frames * dtype.itemsize


def pack_frames(
    body: Bytes, count: int, kernels: FrameKernels, compress_above: int, zstd_level: int
) -> tuple[int, Bytes]:
    """Compress the ``count`` frames of a segment together if that saves enough; return flags and bytes."""
    flags, packed, tenths = 0, body, PAYING_TENTHS
    if zstd_level:
        from sb3_extra_buffers.codecs.zstd import compress_bytes  # needs zstandard

        flags, packed, tenths = PACKED_ZSTD, np.frombuffer(compress_bytes(body, zstd_level), np.uint8), 10
    elif body.size > compress_above * count:
        target = np.empty(body.size, np.uint8)
        source = np.concatenate([body, np.zeros(SLACK, np.uint8)])
        length = kernels.pack_block(source, body.size, target)
        flags, packed = PACKED_LZ4, target[: length or body.size]
    return (flags, packed) if 10 * packed.size < tenths * body.size else (0, body)


def inflate(
    payload: Bytes, dtype: np.dtype[Any], per_segment: int, frame_bytes: int, dictionary: Bytes | None = None
) -> Bytes:
    """Return a segment as it was before `pack_frames`; ``dictionary`` is the one that zstd used."""
    if not len(payload) or payload[0] == 0:
        return payload
    count = int(payload[1]) if len(payload) > 2 else 0
    body_at = header_bytes(count, dtype)
    if count > per_segment or body_at > len(payload):
        raise CorruptPayloadError(f"a segment of {len(payload)} bytes cannot hold {count} frames")
    lengths = payload[2:body_at].view(dtype)
    if count and int(lengths.max()) > frame_bytes:
        raise CorruptPayloadError(f"a segment holds a frame of {lengths.max()} bytes; at most {frame_bytes} are valid")
    size = int(lengths.sum(dtype=np.int64))
    plain = np.empty(body_at + size, np.uint8)
    plain[:body_at] = payload[:body_at]
    plain[0] = 0
    if payload[0] == PACKED_ZSTD:
        if not is_available("zstd"):
            raise CorruptPayloadError("a segment says that it is compressed with zstd, but its store does not use zstd")
        from sb3_extra_buffers.codecs.zstd import decompress_bytes  # needs zstandard

        plain[body_at:] = np.frombuffer(decompress_bytes(payload[body_at:], size, dictionary), np.uint8)
    else:
        body = np.empty(size + OVERRUN, np.uint8)
        if not unpack_block(payload, body_at, len(payload), body, size, size):
            raise CorruptPayloadError(f"a segment of {len(payload)} bytes is not an LZ4 block of {size} bytes")
        plain[body_at:] = body[:size]
    return plain


def pack_camera_frames(body: Bytes, geometry: Ints, compiled: bool) -> tuple[Bytes, Ints]:
    """Encode the frames of a segment; return their bytes and the length of each."""
    size = int(geometry[[0, 1, 2, 4]].prod())
    target, lengths = np.empty(body.size + OVERREAD, np.uint8), np.zeros(body.size // size, np.int64)
    if compiled:
        total = compiled_kernels("camera").pack_segment(
            as_contiguous(body), len(lengths), size, geometry, target, lengths
        )
    else:
        scratch = np.empty(camera.camera_scratch_bytes(size, geometry), np.uint8)
        total = camera.pack_camera(body, 0, len(lengths), size, geometry, target, 0, lengths, scratch)
    return target[:total], lengths


def unpack_camera_frames(payload: Bytes, dtype: np.dtype[Any], per_segment: int, geometry: Ints) -> Bytes:
    """Return a segment as it was before `pack_camera_frames`; with the reference kernels."""
    count, size = int(payload[1]) if len(payload) > 1 else 0, int(geometry[[0, 1, 2, 4]].prod())
    body_at = header_bytes(count, dtype)
    if not 0 < count <= per_segment or body_at > len(payload):
        raise CorruptPayloadError(f"a segment of {len(payload)} bytes cannot hold {count} frames")
    plain = np.empty(body_at + count * size, np.uint8)
    plain[:2] = 0, count
    plain[2:body_at].view(dtype)[:] = size
    source = np.concatenate([payload, np.zeros(OVERREAD, np.uint8)])
    positions = np.arange(count)
    work = np.zeros(camera.camera_work_bytes(size, geometry), np.uint8)
    if not camera.unpack_camera(
        source, body_at, len(payload), 2, dtype.itemsize, count, positions, body_at + positions * size, count, plain,
        geometry, work,
    ):  # fmt: skip
        raise CorruptPayloadError(f"a segment of {len(payload)} bytes cannot be decoded to {count} frames")
    return plain


def check_headers(
    heap: Heap, counts: npt.NDArray[np.int32], dtype: np.dtype[Any], per_segment: int, frame_bytes: int
) -> None:
    """Raise `FileFormatError` unless the header of every segment in ``heap`` agrees with the tables."""
    steps, width = np.arange(per_segment), dtype.itemsize
    sealed = np.flatnonzero(heap.lengths)
    for segments in np.array_split(sealed, max(len(sealed) >> 14, 1)):
        starts, lengths = heap.starts[segments], heap.lengths[segments].astype(np.int64)
        n_frames = counts[segments].astype(np.int64)
        headers = header_bytes(n_frames, dtype)
        require(lengths >= headers, "a segment is too short for its frames")
        flags = heap.data[starts]
        require(np.isin(flags, (0, PACKED_LZ4, PACKED_ZSTD, PACKED_CAMERA)), "a segment has unknown flags")
        require(heap.data[starts + 1] == n_frames, "a segment does not hold as many frames as the tables say")
        # [segment, frame, byte]; frames that do not exist read as the first one
        exists = steps < n_frames[:, None]
        offsets = (starts[:, None] + 2 + np.where(exists, steps, 0) * width)[..., None] + np.arange(width)
        frames = heap.data[offsets].reshape(-1, width).view(dtype).reshape(exists.shape)
        frames = np.where(exists, frames, 0).astype(np.int64)
        require(frames <= frame_bytes, f"an encoded frame takes more than the {frame_bytes} bytes of a raw one")
        fits = (headers + frames.sum(axis=1) == lengths) | (flags == PACKED_LZ4) | (flags == PACKED_ZSTD)
        require(fits, "the frames of a segment are not as long as the segment")
