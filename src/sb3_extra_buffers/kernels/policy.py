"""Tuned constants: when a segment ends, when it is compressed, which keyframe it starts from, and what methods cost.

``auto`` compares methods by the costs of reading and writing.

The rules are plain functions of integers, so that the reference kernels, numba (`register_jitable`) and Triton
(`triton.jit`) can all compile this one definition. `docs/architecture.md` has the measurements behind the numbers.
"""

from __future__ import annotations

from typing import NamedTuple

# ---- how long a segment gets ----

#: Frames per segment on a GPU, unless the codec asks for a number of its own. One program decodes each segment of a
#: row, so short segments are read faster. On the host the codec's level decides: 8, 32 or 64 (`codecs.delta`).
DEVICE_FRAMES_PER_SEGMENT = 4
#: Frames that a segment on a GPU has at least before its chain may end it; bounds how many segments a stream can need.
DEVICE_MIN_FRAMES = 4

#: A segment ends early when its differences, which a reader applies one after the other, take more than this many
#: frames. The reference kernels decode more slowly and therefore end segments sooner.
MAX_CHAIN_FRAMES = 1.5
MAX_CHAIN_FRAMES_REFERENCE = 0.5
MAX_CHAIN_FRAMES_DEVICE = 0.75

# ---- when a segment is compressed with LZ4 ----

#: A segment is compressed when its frames take more than this share of an observation on average. (Not of a frame: a
#: stacked observation shares its frames with its neighbours, so it is small already.)
COMPRESS_ABOVE = 0.015
#: The compressed form is kept when it takes less than this many tenths of the original.
PAYING_TENTHS = 9

# ---- which keyframe a segment starts from ----

#: Keyframes besides the stream's own that a new segment may start from.
POOL_SIZE = 8


def initial_cost(frame_bytes: int) -> int:
    """What a first frame is expected to cost against a new keyframe, until one has been encoded."""
    return frame_bytes // 4


def should_search(length: int, best: int) -> bool:
    """Whether to try the pool's keyframes: ``length`` is well above the ``best`` of the stream's own keyframe."""
    return 4 * length > 5 * best


def should_switch(length: int, current: int) -> bool:
    """Whether another keyframe's ``length`` is enough of an improvement; a switch resets the stream's statistics."""
    return 8 * length < 7 * current


def needs_keyframe(length: int, excess: int, frame_bytes: int) -> bool:
    """Whether to store a first frame whole, as a new keyframe.

    Either no keyframe halves the frame, or the keyframe's age has cost ``excess`` bytes, more than a new keyframe
    does. This is the ski-rental rule: never more than about twice the optimum.
    """
    return (2 * length > frame_bytes) | (excess > frame_bytes)


# ---- costs of reading and writing, for the choice of a method ----


class ReadWork(NamedTuple):
    """The work of reading an observation and its successor: one row of a batch."""

    copied: float
    """Bytes written to the batch."""
    n_parts: float = 0.0
    """Segments or payloads that are looked up and decoded."""
    decoded: float = 0.0
    """Bytes of frames that are decoded or copied before they are written to the batch."""
    parsed: float = 0.0
    """Encoded bytes that are parsed."""
    unpacked: float = 0.0
    """How many of the parsed bytes have to be decompressed first."""
    sequences: float = 0.0
    """LZ4 sequences to decode; each is a run of literals and a match."""


class ReadCosts(NamedTuple):
    """Nanoseconds per row, and per unit of each field of its `ReadWork`."""

    row: float
    copied: float
    part: float = 0.0
    decoded: float = 0.0
    parsed: float = 0.0
    unpacked: float = 0.0
    sequence: float = 0.0


class WriteCosts(NamedTuple):
    """Nanoseconds per new frame, per byte of it, and per encoded byte."""

    frame: float
    byte: float
    encoded: float = 0.0
    #: The share of the time that is spent in every write; the rest is spent when a segment is complete.
    every: float = 1.0


#: By `Codec.codec_id`, or by a store's `cost_kind`; fitted to measurements by ``benchmarks/fit_read_costs.py``.
READ_COSTS: dict[str, ReadCosts] = {
    "none": ReadCosts(100, 0.06),
    "delta": ReadCosts(0, 0.0258, 0, 0.102, 0.249, 0, 5.39),
    "delta-zstd": ReadCosts(4890, 0.0174, 0, 0.266, 0.576, 0.576),
    "scroll": ReadCosts(0, 0.058, 0, 0, 0.259, 0, 6.75),
    "scroll-zstd": ReadCosts(0, 0.0653, 0, 0.147, 1.2),
    "camera": ReadCosts(0, 0.201, 0, 0, 0.224),
    "zstd": ReadCosts(0, 0.272, 0, 0.0402, 1.35),
    "gzip": ReadCosts(100, 0.294, 0, 0, 10.3),
    "igzip": ReadCosts(100, 0.292, 0, 0, 5.87),
    "lz4-frame": ReadCosts(100, 0.32, 0, 0, 0.831),
    "lz4-block": ReadCosts(100, 0.32, 0, 0, 0.831),
    "rle": ReadCosts(100, 0.386, 0, 0, 0.236),
}
WRITE_COSTS: dict[str, WriteCosts] = {
    "none": WriteCosts(5000, 0.6),
    "delta": WriteCosts(6340, 0, 7.56),
    "delta-zstd": WriteCosts(8400, 0.106, 7.49, 0.7),
    "scroll": WriteCosts(19_400, 0, 27.1, 0.15),
    "scroll-zstd": WriteCosts(7890, 0.851, 3.04, 0.3),
    "camera": WriteCosts(8680, 0.252, 3.32, 0.3),
    "zstd": WriteCosts(22_300, 1.66, 2.42),
    "gzip": WriteCosts(29_800, 0, 43),
    "igzip": WriteCosts(33_700, 0, 13.1),
    "lz4-frame": WriteCosts(25_200, 0.203, 5.52),
    "lz4-block": WriteCosts(25_200, 0.203, 5.52),
    "rle": WriteCosts(32_800, 0),
}
#: Nanoseconds per byte of a batch to interleave frames that are stacked along the last axis.
JOIN_NS = 0.05
#: Nanoseconds of SB3's own buffer: per byte of an observation and its successor that is read or written, and per `add`.
SB3_READ_NS, SB3_WRITE_NS, SB3_ADD_NS = 0.25, 0.15, 2000.0
#: For codecs that were not measured: slower than all that were.
UNKNOWN_READ, UNKNOWN_WRITE = ReadCosts(2000, 0.2, 20_000, 5.0), WriteCosts(20_000, 20.0)


def read_ns(codec_id: str, work: ReadWork) -> float:
    """Modelled nanoseconds to read one row of a large batch, by one thread."""
    costs = READ_COSTS.get(codec_id, UNKNOWN_READ)
    return costs.row + sum(cost * amount for cost, amount in zip(costs[1:], work, strict=True))


def write_ns(codec_id: str, frame_bytes: int, encoded_bytes: float) -> tuple[float, float]:
    """Modelled nanoseconds to write a new frame of ``frame_bytes``, and the part that is spent in every write."""
    costs = WRITE_COSTS.get(codec_id, UNKNOWN_WRITE)
    total = costs.frame + costs.byte * frame_bytes + costs.encoded * encoded_bytes
    return total, costs.every * total


def expand_ns(nbytes: int) -> float:
    """Modelled nanoseconds to expand table indices to ``nbytes`` of pixels or numbers."""
    return 0.05 * nbytes


def map_ns(n_units: int) -> float:
    """Modelled nanoseconds to look up the ``n_units`` pixels or numbers of a new frame in a table."""
    return 2000 + 1.6 * n_units
