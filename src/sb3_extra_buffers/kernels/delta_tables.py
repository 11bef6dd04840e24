"""The tables of a `DeviceFrameStore`, the format of its frames, and the arguments of a write.

A frame is encoded as its difference from a reference: the previous frame of its segment or, for the first frame, the
segment's keyframe; zeros if the segment has none. A frame that equals its reference has length 0. Any other frame is
cut into chunks of `CHUNK` bytes, which are encoded independently, and stored as

- a directory of two bytes per chunk: its length in the low 12 bits, and which of its groups changed in the high 4;
- the chunks. A chunk with changed groups consists of bit masks: the changed lines of each changed group (a byte per
  group), the changed words of each changed line (a byte per line) and the changed bytes of each changed word (a byte
  per word). A bit for each changed byte says whether its value differs from that of the changed byte before it; the
  values that do follow. A chunk without changed groups is unchanged if its length is 0, else stored uncompressed.

A word has 8 bytes, a line 8 words, a group 8 lines, a chunk 4 groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sb3_extra_buffers.kernels import policy
from sb3_extra_buffers.kernels.state import padded_bytes

__all__ = ["CHUNK", "SCRATCH", "DeviceTables", "FrameShape", "WriteJob"]

#: Bytes of a chunk.
CHUNK = 2048
#: Bytes of scratch memory for a chunk that is encoded: changed words or values, and a mask for each changed word.
SCRATCH = CHUNK + CHUNK // 8
#: An entry of `DeviceTables.entries` is an offset in the heap, shifted left by this many bits, plus a length.
LENGTH_BITS = 20

# columns of `DeviceTables.streams`
OPENED = 0  # number of the next segment; wraps around at `FrameShape.n_numbers`
COUNT = 1  # frames of the newest segment
CHAIN_BYTES = 2  # bytes of the differences in it
NEXT_RECENT = 3  # position in `DeviceTables.recent` that the next frame takes
COST = 4  # the fewest bytes that a first frame has taken against the first keyframe held
EXCESS = 5  # bytes that first frames have taken beyond that
FLOOR = 6  # the oldest segment that a step refers to; earlier ones are free
HELD = 7  # the first of N_HELD keyframes that the stream holds
N_COLUMNS = 10
# keyframes that a stream holds: those that other streams may use, and one that they may still be using
N_HELD, N_PUBLISHED = 3, 2

# entries of `DeviceTables.counters`: end of the heap, bytes that did not fit, programs that have finished this write
HEAD, NEEDED, DONE = 0, 1, 2
# entries of the report that a write leaves for the host: the end of the heap and the oldest position in use, the number
# of unused keyframes, the segments of the stream that uses the most, and the number of the write
REPORT_HEAD, REPORT_TAIL, REPORT_SPARE, REPORT_SEGMENTS, REPORT_LAUNCH = range(5)
N_REPORT = 5

# what the reading kernel looks up on the device, since these tables may grow: their addresses, and n_slots - 1
ADDRESS_HEAP, ADDRESS_ENTRIES, ADDRESS_KEYFRAMES, ADDRESS_KEYFRAME_ROWS, ADDRESS_MASK = range(5)
N_ADDRESSES = 5

# bytes past the end of the heap that a kernel may read, because it reads whole words
SLACK = 64
# the tail of a stream that has nothing in the heap
NO_TAIL = (1 << 62) - 1
# frames of an observation and its successor that a row of a batch may have: a bit of a word each
MAX_TARGETS = 64
# streams of which the first may make a keyframe that the others try, before any of them has one
LEADERS = 16


@dataclass(frozen=True)
class FrameShape:
    """How observations are cut into frames, and sizes that follow from it; kernels are compiled for each shape."""

    frame_bytes: int
    stack: int
    per_segment: int

    @property
    def n_recent(self) -> int:
        """Recent frames of a stream, to find repeated frames in; the newest is the reference of the next frame."""
        return max(self.stack, 2)

    @property
    def keyframe_bytes(self) -> int:
        return padded_bytes(self.frame_bytes)

    @property
    def n_chunks(self) -> int:
        return -(-self.frame_bytes // CHUNK)

    @property
    def directory_bytes(self) -> int:
        """Scratch memory for the directory of a frame that is encoded in several blocks."""
        return -(-2 * self.n_chunks // 16) * 16

    @property
    def max_bytes(self) -> int:
        """The most bytes that an encoded frame can take."""
        return 2 * self.n_chunks + self.frame_bytes

    @property
    def min_frames(self) -> int:
        """The fewest frames of a segment, other than the newest of its stream."""
        return min(policy.DEVICE_MIN_FRAMES, self.per_segment)

    @property
    def max_chain_bytes(self) -> int:
        """A segment of at least ``min_frames`` ends when its differences take more than this."""
        return int(policy.MAX_CHAIN_FRAMES_DEVICE * self.frame_bytes)

    @property
    def n_numbers(self) -> int:
        """Where segment numbers wrap around: a power of two that keeps frame ids below 2**30."""
        return 1 << (30 - (self.per_segment - 1).bit_length())


class DeviceTables(NamedTuple):
    """Tables of one device store.

    Each stream numbers its segments from 0 to ``FrameShape.n_numbers - 1``, then from 0 again. A segment is in the slot
    ``number % n_slots``, where ``n_slots`` is a power of two. The id of a frame is ``segment number * per_segment +
    position``. Heap positions only increase; a position modulo the capacity is an offset in the heap.
    """

    heap: torch.Tensor  # uint8 [capacity + SLACK]: encoded frames, a ring
    entries: torch.Tensor  # int64 [stream, slot, per_segment]: where a frame is in the heap, see LENGTH_BITS; 0: none
    starts: torch.Tensor  # int64 [stream, slot]: end of the heap when the segment was opened; its frames are after it
    keyframes: torch.Tensor  # int32 [stream, slot]: the keyframe that the segment starts from, or NONE
    frame_ids: torch.Tensor  # int32 [obs_index, stack]: frame ids + 1
    oldest_segments: torch.Tensor  # int32 [step, stream]: the oldest segment that the step refers to
    streams: torch.Tensor  # int64 [stream, N_COLUMNS]
    recent: torch.Tensor  # uint8 [stream, n_recent, keyframe_bytes]: the latest frames of a stream
    recent_ids: torch.Tensor  # int32 [stream, n_recent]
    last: torch.Tensor  # int32 [stream, stack]: the positions in `recent` of the frames of the stream's last row
    keyframe_rows: torch.Tensor  # uint8 [keyframe, keyframe_bytes]
    keyframe_refs: torch.Tensor  # int32 [keyframe]: segments that start from it plus streams that hold it
    published: torch.Tensor  # int32 [2, stream, N_PUBLISHED]: keyframes for all streams in this write and the next
    tails: torch.Tensor  # int64 [stream]: the oldest heap position that the stream uses, or NO_TAIL
    counters: torch.Tensor  # int64 [4]

    @property
    def n_slots(self) -> int:
        return self.entries.shape[1]


def capacity_of(tables: DeviceTables) -> int:
    """Usable bytes of the heap."""
    return tables.heap.numel() - SLACK


# a 64-bit argument of a kernel is passed as two numbers, of which the lower one has this many bits: Triton would
# compile another kernel for numbers of more than 32 bits
HALF_BITS = 31
_LOW = (1 << HALF_BITS) - 1


class WriteJob(NamedTuple):
    """One step to write, apart from its frames."""

    step: int
    oldest: int  # the oldest step that the ring holds once this one is written
    indices: tuple[int, ...]  # obs_index of the first stream, per set
    parity: int  # which half of `DeviceTables.published` is current
    tail: int  # the oldest heap position in use

    def arguments(self, tables: DeviceTables, launch: int) -> tuple[int, ...]:
        """The job as arguments of the kernel, from ``step`` to ``last_index``."""
        tail, capacity, indices = self.tail, tables.heap.numel() - SLACK, self.indices
        return (
            self.step, self.oldest, self.parity, tail >> HALF_BITS, tail & _LOW, capacity >> HALF_BITS, capacity & _LOW,
            launch >> HALF_BITS, launch & _LOW, tables.keyframe_refs.numel(), tables.entries.shape[1], indices[0],
            indices[-1],
        )  # fmt: skip
