"""The tables that the frame store's kernels work on, and the marks in them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

#: a frame of zeros has this id: nothing is stored for it, and unwritten observations are made of it
ZERO = -1
#: a place in a table that holds nothing
NONE = -2
#: flags of a segment whose differences were compressed together
PACKED_ZSTD = 1
PACKED_LZ4 = 2

# what each entry of `FrameState.counters` counts
N_UNUSED = 0  #: segments in ``free``
N_FREED = 1  #: segments in ``freed``
N_FRESH = 2  #: frames in ``fresh``
N_SEALED = 3  #: segments in ``sealed``
N_UNDO = 4  #: rows in ``undo_cells``
COMMITTED = 5  #: 1 where these rows will not be restored any more, so that the next write gives their frames up
N_COUNTERS = 6


class FrameState(NamedTuple):
    """Tables of one frame store. A frame's id is ``segment * frames_per_segment + position``."""

    heap: Bytes  # sealed segments
    keyframe_rows: Bytes  # [keyframe * whole lines of a frame]: whole frames that segments start from
    keyframe_refs: npt.NDArray[np.int32]  # per keyframe: segments that start from it
    starts: Ints  # per segment: its place in heap, or -1 - its place in stage while it is open
    lengths: npt.NDArray[np.int32]  # per segment: bytes in heap, 0 while it is open
    counts: npt.NDArray[np.int32]  # per segment: frames in it
    live: npt.NDArray[np.int32]  # per segment: frames referred to
    keyframes: npt.NDArray[np.int32]  # per segment: its keyframe, or NONE
    refs: npt.NDArray[np.int32]  # per frame: observations that contain it
    free: npt.NDArray[np.int32]  # ids of unused segments, a stack
    freed: npt.NDArray[np.int32]  # segments that lost their last reference
    sealed: npt.NDArray[np.int32]  # segments that were moved to the heap, in that order
    gap: Ints  # where the heap is free: begin and end
    counters: Ints  # how many of each: see `N_UNUSED` and those after it
    fresh: Ints  # new frames of this call, as row * stack + position
    fresh_ids: Ints  # their ids
    undo_indices: Ints  # observations that the last write replaced
    undo_ids: npt.NDArray[np.int32]  # [row, stack]: what ``slots`` held for them; these frames still count as in use
    stage: Bytes  # open segments, one room per stream
    stage_ends: Ints  # per stream: where its open segment ends, counted from its room
    open_segments: npt.NDArray[np.int32]  # per stream
    recent: npt.NDArray[np.uint8]  # [stream, place, padded frame]: the frames a stream saw last
    recent_ids: npt.NDArray[np.int32]  # [stream, place]
    heads: Ints  # per stream: the place that is overwritten next
    last: Ints  # [stream, stack]: places of the frames of the stream's last observation
    keyframe_of: npt.NDArray[np.int32]  # per stream: its keyframe, or NONE
    keyframe_cost: Ints  # [stream, 2]: best size of a first frame against that keyframe; bytes lost to its age
    chain_bytes: Ints  # per stream: bytes of differences in its open segment
    pool: npt.NDArray[np.int32]  # the newest keyframes
    scratch: Bytes


def keyframe_bytes(size: int) -> int:
    """Bytes that a keyframe takes: whole lines, the last one padded with zeros."""
    return (size + 63) // 64 * 64
