"""The tables that the frame store's kernels work on, and the constants that mark their entries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

#: Id of an all-zero frame. Nothing is stored for it, and unwritten observations consist of it.
ZERO = -1
#: Marks an unused table entry.
NONE = -2

#: First byte of a segment: how its differences are compressed; 0 where they are not.
PACKED_ZSTD = 1
PACKED_LZ4 = 2
PACKED_CAMERA = 3

# entries of `FrameState.counters`
N_UNUSED = 0  #: entries in ``unused``
N_FREED = 1  #: entries in ``freed``
N_NEW = 2  #: entries in ``new_frames`` and ``new_ids``
N_SEALED = 3  #: entries in ``sealed``
N_UNDO = 4  #: rows in ``undo_indices`` and ``undo_ids``
COMMITTED = 5  #: 1 once those rows will not be restored, so that the next write may release their frames
N_COUNTERS = 6


class FrameConfig(NamedTuple):
    """Constants of one frame store."""

    frame_bytes: int
    per_segment: int  # frames per segment, at most
    length_bytes: int  # width of a frame's length in the segment header: 2, or 4 for frames over 65,535 bytes
    stage_bytes: int  # capacity of an open segment
    delta: bool  # encode frames into segments; otherwise list them in ``new_frames`` for a byte codec
    max_chain_bytes: int = 0  # a segment with more bytes of differences is full
    compress_above: int = -1  # compress a segment with more bytes per frame; -1: the caller seals segments
    whole: bool = False  # keep the frames of open segments as they are, instead of their differences
    keyframe_bytes: int = 0  # bytes of an entry of ``keyframe_rows``, with padding
    pixel_bytes: int = 0  # bytes of a frame's pixel if observations are stacked along the last axis, otherwise 0


class FrameState(NamedTuple):
    """Tables of one frame store. A frame's id is ``segment * per_segment + position in the segment``."""

    config: FrameConfig
    heap: Bytes  # sealed segments
    keyframe_rows: Bytes  # [keyframe * config.keyframe_bytes]: whole frames that segments start from, or dictionaries
    keyframe_refs: Ints32  # [keyframe]: number of segments that start from it
    starts: Ints  # [segment]: offset in heap, or -1 - offset in stage while it is open
    lengths: Ints32  # [segment]: bytes in heap, 0 while it is open
    counts: Ints32  # [segment]: number of frames in it
    live: Ints32  # [segment]: number of its frames that are referenced
    keyframes: Ints32  # [segment]: keyframe it starts from, or NONE
    refs: Ints32  # [frame id]: number of observations that contain it
    unused: Ints32  # stack of unused segment ids; see N_UNUSED
    freed: Ints32  # segments that lost their last reference; see N_FREED
    sealed: Ints32  # segments moved to the heap, in that order; see N_SEALED
    gap: Ints  # [2]: begin and end of the heap's free range
    counters: Ints  # [N_COUNTERS]: see `N_UNUSED` and those after it
    new_frames: Ints  # new frames of this call, as row * stack + index in the stack; see N_NEW
    new_ids: Ints  # ids of ``new_frames``
    undo_indices: Ints  # [undo row]: observations that the last write replaced; see N_UNDO
    undo_ids: Ints32  # [undo row, stack]: their entries in frame_ids before; these frames still count as referenced
    stage: Bytes  # [stream * stage_bytes]: open segments
    stage_ends: Ints  # [stream]: end of its open segment, as an offset in its part of stage
    open_segments: Ints32  # [stream]: its open segment, or NONE
    recent: Bytes  # [stream, position, padded_bytes(frame_bytes)]: ring of the frames last added to a stream
    recent_ids: Ints32  # [stream, position]: their ids, or NONE
    recent_next: Ints  # [stream]: position in the ring that is overwritten next
    last_stack: Ints  # [stream, stack]: position in the ring of each frame of the stream's last observation
    stream_keyframes: Ints32  # [stream]: keyframe that its next segment will try first, or NONE
    keyframe_cost: Ints  # [stream, 2]: smallest first frame against that keyframe; bytes spent above it since
    chain_bytes: Ints  # [stream]: bytes of differences in its open segment
    pool: Ints32  # the newest keyframes
    scratch: Bytes  # work space of the encoder
    geometry: Ints  # shape of a frame, for the camera codec


def padded_bytes(size: int) -> int:
    """Size of a frame in the tables of recent frames and keyframes: padded with zeros to a multiple of 64 bytes."""
    return (size + 63) // 64 * 64
