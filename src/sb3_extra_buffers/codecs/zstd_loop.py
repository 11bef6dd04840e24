"""The compiled loop around zstd's C function. Imports numba: only `zstd_direct` may import this module."""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sb3_extra_buffers.codecs.jit import cached_njit


@intrinsic
def call_words(typing_context: Any, address: Any, words: Any) -> Any:
    """Call the C function at ``address`` with a tuple of 64-bit ``words`` (pointers and sizes); return its result."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word] * len(signature.args[1]))
        function = builder.inttoptr(args[0], kind.as_pointer())
        return builder.call(function, cgutils.unpack_tuple(builder, args[1]))

    return types.int64(types.int64, types.UniTuple(types.int64, len(words))), generate


@intrinsic
def copy_memory(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy ``count`` bytes between two addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = [builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2]]
        cgutils.raw_memcpy(builder, *pointers, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


# addresses instead of arrays, and no code that raises: half the time to compile
@partial(cached_njit, nogil=True, error_model="numpy", no_cfunc_wrapper=True)
def decompress_rows(
    addresses: Any, heap: int, starts: Any, lengths: Any, frame: int, n_header: int, out: int, size: int
) -> int:
    """Decompress a payload of ``heap`` into each row of ``out``; return the first that does not fill it, or -1.

    ``addresses`` are those of the C function, its context and its dictionary. ``heap``, ``frame`` and ``out`` are
    addresses too. ``frame`` starts with the frame header and can hold the longest payload after it.
    """
    for row in range(len(starts)):
        length = lengths[row]
        copy_memory(frame + n_header, heap + starts[row], length)
        n_written = call_words(
            addresses[0], (addresses[1], out + row * size, size, frame, n_header + length, addresses[2])
        )
        if n_written != size:
            return row
    return -1
