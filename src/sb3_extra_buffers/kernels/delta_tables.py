"""Tables of a device's frame store, and what the kernels that write and read them are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sb3_extra_buffers.codecs.delta import BLOCK
from sb3_extra_buffers.kernels import policy
from sb3_extra_buffers.kernels.state import padded_bytes

__all__ = ["DeviceTables", "FrameShape", "WriteJob"]

# columns of `DeviceTables.streams`
OPEN = 0  # the open segment, or -1
OPENED = 1  # segments opened so far
END = 2  # bytes of the open segment
COUNT = 3  # frames of the open segment
CHAIN_BYTES = 4  # bytes of the open segment's differences
NEXT_RECENT = 5  # position in `DeviceTables.recent` that the next frame takes
COST = 6  # what a first frame should cost against the first keyframe held
EXCESS = 7  # bytes by which first frames have exceeded that cost
HELD = 8  # N_HELD keyframes
FLOOR = 11  # the oldest segment that a step refers to; earlier ones are free
N_COLUMNS = 12
# keyframes that a stream holds: two that other streams may use, and one that they may still be using
N_HELD, N_PUBLISHED = 3, 2

# entries of `DeviceTables.counters`: end of the heap, bytes that did not fit, unused keyframes
HEAD, NEEDED, SPARE = 0, 1, 2
# columns of the report that a write leaves for the host: the counters HEAD and SPARE, the stream's tail, the launch
REPORT_HEAD, REPORT_TAIL, REPORT_SPARE, REPORT_LAUNCH = 0, 1, 2, 3
N_REPORT = 4

# bytes past the end of the heap that a reader of whole words may touch
SLACK = 64
# the tail of a stream that has nothing in the heap
NO_TAIL = (1 << 62) - 1
# relation of a row to the previous row of its stream: unknown, equal, or shifted by one frame
UNKNOWN, SAME, SHIFTED = 0, 1, 2


@dataclass(frozen=True)
class FrameShape:
    """Sizes that follow from how observations are cut into frames; a kernel is compiled for each."""

    frame_bytes: int
    stack: int
    per_segment: int
    segments_per_stream: int

    @property
    def n_recent(self) -> int:
        """Frames that a stream remembers to find repeats."""
        return self.stack + 1

    @property
    def keyframe_bytes(self) -> int:
        return padded_bytes(self.frame_bytes)

    @property
    def stage_bytes(self) -> int:
        """Capacity for a stream's open segment plus one worst-case difference."""
        size = self.frame_bytes
        return -(-(2 + 2 * self.per_segment + (self.per_segment + 1) * size + size // 2 + BLOCK) // 64) * 64

    @property
    def min_frames(self) -> int:
        """Frames that every sealed segment has."""
        return min(policy.DEVICE_MIN_FRAMES, self.per_segment)

    @property
    def max_chain_bytes(self) -> int:
        """Differences longer than this end a segment that has ``min_frames``."""
        return int(policy.MAX_CHAIN_FRAMES_DEVICE * self.frame_bytes)


class DeviceTables(NamedTuple):
    """Tables of one device store.

    A frame's id is ``segment * per_segment + position``; each stream numbers its segments in a ring of its own.
    Heap positions only ever increase; a position modulo the capacity is where its bytes are.
    """

    heap: torch.Tensor  # uint8 [capacity + SLACK]: sealed segments, a ring
    stage: torch.Tensor  # uint8 [stream * stage_bytes]: open segments
    starts: torch.Tensor  # int64 [segment]: heap position, or -1 - offset into stage while the segment is open
    lengths: torch.Tensor  # int32 [segment]
    keyframes: torch.Tensor  # int32 [segment]: its keyframe, or NONE
    frame_ids: torch.Tensor  # int32 [obs_index, stack]: frame ids + 1
    oldest_segments: torch.Tensor  # int32 [step, stream]: the oldest segment that the step refers to
    streams: torch.Tensor  # int64 [stream, N_COLUMNS]
    recent: torch.Tensor  # uint8 [stream, n_recent, keyframe_bytes]: the latest frames of a stream
    recent_ids: torch.Tensor  # int32 [stream, n_recent]
    recent_segments: torch.Tensor  # int32 [stream, n_recent]: their segments, numbered without wrapping
    keyframe_rows: torch.Tensor  # uint8 [keyframe, keyframe_bytes]
    keyframe_refs: torch.Tensor  # int32 [keyframe]: segments that start from it plus streams that hold it
    published: torch.Tensor  # int32 [2, stream, N_PUBLISHED]: keyframes for all streams, in this write and the next
    counters: torch.Tensor  # int64 [4]
    tails: torch.Tensor  # int64 [stream]: oldest heap position that the stream needs, or NO_TAIL
    scratch: torch.Tensor  # uint8 [stream, padded frame]


def capacity_of(tables: DeviceTables) -> int:
    """Usable bytes of the heap."""
    return tables.heap.numel() - SLACK


# entries of a packed `WriteJob`; JOB_INDICES starts one index per set, then come the relations
JOB_STEP, JOB_OLDEST, JOB_PARITY, JOB_TAIL, JOB_CAPACITY, JOB_KEYFRAMES, JOB_LAUNCH, JOB_LAST, JOB_INDICES = range(9)


class WriteJob(NamedTuple):
    """One step to write, apart from its frames."""

    step: int
    oldest: int  # the oldest step that remains once this one is written
    indices: tuple[int, ...]  # obs_index of the first stream, per set
    parity: int  # which half of `DeviceTables.published` is current
    tail: int  # oldest heap position that is needed
    last: int = 0  # obs_index of the first stream's previous row
    relations: tuple[int, ...] = ()  # [set * stream]: of each row to the previous one of its stream; empty: all unknown

    def pack(self, tables: DeviceTables, launch: int, n_streams: int) -> list[int]:
        """The job as the kernel reads it, in the order of the ``JOB_`` constants."""
        return [
            self.step, self.oldest, self.parity, self.tail, capacity_of(tables), tables.keyframe_refs.numel(), launch,
            self.last, *self.indices, *(self.relations or [UNKNOWN] * (len(self.indices) * n_streams)),
        ]  # fmt: skip
