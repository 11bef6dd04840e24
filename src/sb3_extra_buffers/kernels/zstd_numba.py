"""The loop around zstd's own function."""

from __future__ import annotations

from typing import Any

from numba import njit

from sb3_extra_buffers.kernels.intrinsics import call_words


@njit(nogil=True, cache=True)
def decompress_rows(addresses: Any, heap: Any, starts: Any, lengths: Any, frame: Any, n_header: int, out: Any) -> int:
    """Decompress a payload of ``heap`` into each row of ``out``; the first that does not fill it, or -1.

    ``addresses`` are those of the function, its context and its dictionary. ``frame`` begins with the header of every
    frame, and has room for the longest payload behind it.
    """
    size = out.shape[1]
    target, source = out.ctypes.data, frame.ctypes.data
    for row in range(starts.size):
        start, length = starts[row], lengths[row]
        frame[n_header : n_header + length] = heap[start : start + length]
        made = call_words(
            addresses[0], (addresses[1], target + row * size, size, source, n_header + length, addresses[2])
        )
        if made != size:
            return row
    return -1
