"""Tables of a device's frame store, the format of its frames, and what the kernels that write and read them are told.

A frame is cut into chunks of `CHUNK` bytes, which are encoded independently: a chunk that did not change takes nothing
but its entry in the frame's directory. Encoded, a frame is

- the directory: two bytes per chunk, its length in the low 12 bits and which of its groups changed in the high 4;
- the chunks. A chunk with groups is a difference: which lines of each changed group changed (a byte per group), which
  words of each changed line (a byte per line), which bytes of each changed word (a byte per word), for each changed
  byte whether its value differs from the one before (a bit each), and the values that do. A chunk without groups is
  stored as it is, or has not changed if its length is 0.

A word has 8 bytes, a line 8 words, a group 8 lines, a chunk 4 groups. A frame of length 0 equals its reference: the
previous frame of its segment or, for the first one, the segment's keyframe; zeros where it has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sb3_extra_buffers.kernels import policy
from sb3_extra_buffers.kernels.state import padded_bytes

__all__ = ["CHUNK", "DeviceTables", "FrameShape", "WriteJob"]

#: Bytes of a chunk.
CHUNK = 2048
#: An entry of `DeviceTables.entries` is an offset in the heap, shifted by this many bits, and a length.
LENGTH_BITS = 20

# columns of `DeviceTables.streams`
OPENED = 0  # segments opened so far; their numbers start again at `FrameShape.n_numbers`
COUNT = 1  # frames of the newest segment
CHAIN_BYTES = 2  # bytes of its differences
NEXT_RECENT = 3  # position in `DeviceTables.recent` that the next frame takes
COST = 4  # what a first frame should cost against the first keyframe held
EXCESS = 5  # bytes by which first frames have exceeded that cost
FLOOR = 6  # the oldest segment that a step refers to; earlier ones are free
HELD = 7  # N_HELD keyframes
N_COLUMNS = 10
# keyframes that a stream holds: two that other streams may use, and one that they may still be using
N_HELD, N_PUBLISHED = 3, 2

# entries of `DeviceTables.counters`: end of the heap, bytes that did not fit, programs that are done with this write
HEAD, NEEDED, DONE = 0, 1, 2
# entries of the report that a write leaves for the host: the end of the heap and the oldest position that is needed,
# unused keyframes, segments of the stream that uses most, and the number of the write
REPORT_HEAD, REPORT_TAIL, REPORT_SPARE, REPORT_SEGMENTS, REPORT_LAUNCH = range(5)
N_REPORT = 5

# addresses and sizes that the reading kernel looks up, so that it finds tables that have grown
ADDRESS_HEAP, ADDRESS_ENTRIES, ADDRESS_KEYFRAMES, ADDRESS_KEYFRAME_ROWS, ADDRESS_MASK = range(5)
N_ADDRESSES = 5

# bytes past the end of the heap that a reader of whole words may touch
SLACK = 64
# the tail of a stream that has nothing in the heap
NO_TAIL = (1 << 62) - 1
# frames of an observation and its successor that a row of a batch may have: a bit of a word each
MAX_TARGETS = 64
# streams of which the first may make a keyframe that the others try, before any of them has one
LEADERS = 16


@dataclass(frozen=True)
class FrameShape:
    """Sizes that follow from how observations are cut into frames; a kernel is compiled for each."""

    frame_bytes: int
    stack: int
    per_segment: int

    @property
    def n_recent(self) -> int:
        """Frames that a stream remembers to find repeats; one of them is the reference of the next frame."""
        return max(self.stack, 2)

    @property
    def keyframe_bytes(self) -> int:
        return padded_bytes(self.frame_bytes)

    @property
    def n_chunks(self) -> int:
        return -(-self.frame_bytes // CHUNK)

    @property
    def max_bytes(self) -> int:
        """Bytes of an encoded frame at most."""
        return 2 * self.n_chunks + self.frame_bytes

    @property
    def min_frames(self) -> int:
        """Frames of every segment but the newest."""
        return min(policy.DEVICE_MIN_FRAMES, self.per_segment)

    @property
    def max_chain_bytes(self) -> int:
        """Differences longer than this end a segment that has ``min_frames``."""
        return int(policy.MAX_CHAIN_FRAMES_DEVICE * self.frame_bytes)

    @property
    def n_numbers(self) -> int:
        """Numbers of segments, a power of two: ids are below 2**30."""
        return 1 << (30 - (self.per_segment - 1).bit_length())


class DeviceTables(NamedTuple):
    """Tables of one device store.

    A stream numbers its segments from 0; `FrameShape.n_numbers` is followed by 0. The segment of a number has the slot
    ``number % n_slots``, a power of two. A frame's id is ``segment number * per_segment + position``. Heap positions
    only ever increase; a position modulo the capacity is where its bytes are.
    """

    heap: torch.Tensor  # uint8 [capacity + SLACK]: encoded frames, a ring
    entries: torch.Tensor  # int64 [stream, slot, per_segment]: where a frame is in the heap, see LENGTH_BITS; 0: none
    starts: torch.Tensor  # int64 [stream, slot]: end of the heap when the segment was opened; its frames are beyond
    keyframes: torch.Tensor  # int32 [stream, slot]: the keyframe that the segment starts from, or NONE
    frame_ids: torch.Tensor  # int32 [obs_index, stack]: frame ids + 1
    oldest_segments: torch.Tensor  # int32 [step, stream]: the oldest segment that the step refers to
    streams: torch.Tensor  # int64 [stream, N_COLUMNS]
    recent: torch.Tensor  # uint8 [stream, n_recent, keyframe_bytes]: the latest frames of a stream
    recent_ids: torch.Tensor  # int32 [stream, n_recent]
    last: torch.Tensor  # int32 [stream, stack]: where the frames of the stream's last row were among the recent ones
    keyframe_rows: torch.Tensor  # uint8 [keyframe, keyframe_bytes]
    keyframe_refs: torch.Tensor  # int32 [keyframe]: segments that start from it plus streams that hold it
    published: torch.Tensor  # int32 [2, stream, N_PUBLISHED]: keyframes for all streams, in this write and the next
    tails: torch.Tensor  # int64 [stream]: oldest heap position that the stream needs, or NO_TAIL
    counters: torch.Tensor  # int64 [4]

    @property
    def n_slots(self) -> int:
        return self.entries.shape[1]


def capacity_of(tables: DeviceTables) -> int:
    """Usable bytes of the heap."""
    return tables.heap.numel() - SLACK


# entries of a packed `WriteJob`; JOB_INDICES starts one index per set
JOB_STEP, JOB_OLDEST, JOB_PARITY, JOB_TAIL, JOB_CAPACITY, JOB_KEYFRAMES, JOB_LAUNCH, JOB_SLOTS, JOB_INDICES = range(9)


class WriteJob(NamedTuple):
    """One step to write, apart from its frames."""

    step: int
    oldest: int  # the oldest step that remains once this one is written
    indices: tuple[int, ...]  # obs_index of the first stream, per set
    parity: int  # which half of `DeviceTables.published` is current
    tail: int  # oldest heap position that is needed

    def pack(self, tables: DeviceTables, launch: int) -> list[int]:
        """The job as the kernel reads it, in the order of the ``JOB_`` constants."""
        return [
            self.step, self.oldest, self.parity, self.tail, capacity_of(tables), tables.keyframe_refs.numel(), launch,
            tables.n_slots, *self.indices,
        ]  # fmt: skip
