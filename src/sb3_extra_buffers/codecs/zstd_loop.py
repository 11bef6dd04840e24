"""The compiled loop around zstd's C function. Imports numba: only `zstd_direct` may import this module."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def call_words(typing_context: Any, address: Any, words: Any) -> Any:
    """Call the C function at ``address`` with a tuple of 64-bit ``words`` (pointers and sizes); return its result."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word] * len(signature.args[1]))
        function = builder.inttoptr(args[0], kind.as_pointer())
        return builder.call(function, cgutils.unpack_tuple(builder, args[1]))

    return types.int64(types.int64, types.UniTuple(types.int64, len(words))), generate


@njit(nogil=True, cache=True)
def decompress_rows(addresses: Any, heap: Any, starts: Any, lengths: Any, frame: Any, n_header: int, out: Any) -> int:
    """Decompress a payload of ``heap`` into each row of ``out``; return the first that does not fill it, or -1.

    ``addresses`` are those of the C function, its context and its dictionary. ``frame`` starts with the frame header
    and can hold the longest payload after it.
    """
    size = out.shape[1]
    target, source = out.ctypes.data, frame.ctypes.data
    for row in range(starts.size):
        start, length = starts[row], lengths[row]
        frame[n_header : n_header + length] = heap[start : start + length]
        n_written = call_words(
            addresses[0], (addresses[1], target + row * size, size, source, n_header + length, addresses[2])
        )
        if n_written != size:
            return row
    return -1
