"""Reference kernel that copies many ranges of bytes, such as the segments that a packet consists of."""

from __future__ import annotations

from sb3_extra_buffers.kernels.dispatch import compiled_kernels, has_numba
from sb3_extra_buffers.kernels.state import Bytes, Ints


def copy_ranges(source: Bytes, starts: Ints, target: Bytes, targets: Ints, lengths: Ints) -> None:
    """Copy ``source[starts[i]:][:lengths[i]]`` to ``target[targets[i]:]`` for every i. Offsets must be valid."""
    if has_numba():
        compiled_kernels("transfer").copy_ranges(source, starts, target, targets, lengths)
    else:
        copy_each(source, starts, target, targets, lengths)


def copy_each(source: Bytes, starts: Ints, target: Bytes, targets: Ints, lengths: Ints) -> None:
    """`copy_ranges` in plain Python."""
    for start, to, length in zip(starts.tolist(), targets.tolist(), lengths.tolist(), strict=True):
        target[to : to + length] = source[start : start + length]
