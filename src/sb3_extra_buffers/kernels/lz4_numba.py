"""The byte work of `kernels.lz4_block`, compiled; the rest of it is compiled as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sb3_extra_buffers.kernels import lz4_block as reference
from sb3_extra_buffers.kernels.columns_numba import ColumnType, make_column
from sb3_extra_buffers.kernels.compiling import compiled, inner, replaces, use_reference
from sb3_extra_buffers.kernels.intrinsics import (
    copy_bytes,
    copy_half_line,
    copy_line,
    load_byte,
    load_int,
    load_quad,
    load_word,
    store_word,
    trailing_zeros,
)

# for an offset of n bytes, up to 8: a mask of n bytes, a factor that repeats them in a word, a multiple of n from 8 on
_LOW_BYTES = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)
_REPEATED = np.array([0] + [sum(1 << 8 * i for i in range(0, 8, n)) for n in range(1, 9)], np.uint64)
_BACK = np.array([0] + [-(-8 // n) * n for n in range(1, 9)], np.int64)


@replaces(reference.new_table)
@intrinsic
def new_table(typing_context: Any) -> Any:
    kind = ColumnType(types.int32, 1)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # on the stack, reserved once per call of the kernel
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(32), reference.TABLE))
        cgutils.memset(builder, memory, ir.IntType(64)(4 * reference.TABLE), 0xFF)
        return make_column(context, builder, kind, memory, [ir.IntType(64)(reference.TABLE)])

    return kind(), generate


@replaces(reference.common_length)
@inner
def common_length(source: Any, a: Any, b: Any, stop: Any) -> Any:
    count = 0
    while b + count + 8 <= stop:
        difference = load_word(source, a + count) ^ load_word(source, b + count)
        if difference:
            return count + (trailing_zeros(difference) >> 3)
        count += 8
    while b + count < stop and load_byte(source, a + count) == load_byte(source, b + count):
        count += 1
    return count


@replaces(reference.extend_length)
@inner
def extend_length(source: Any, start: Any, stop: Any, length: Any) -> Any:
    # adds one more byte without a branch, because that would be hard to predict; most lengths have no second one
    has_more, more = np.int64(length == 15), load_int(source, start)
    first = more * has_more
    if first == 255 or start >= stop:
        return get_length(source, start, stop) if has_more else (start, length)
    return start + has_more, length + first


@replaces(reference.copy_ahead)
@inner
def copy_ahead(target: Any, to: Any, source: Any, at: Any, count: Any) -> None:
    # always the first 32: cheaper than a branch that is hard to predict
    copy_half_line(target, to, source, at)
    i = 32
    while i < count:
        copy_line(target, to + i, source, at + i)
        i += 64


@replaces(reference.repeat)
@inner
def repeat(target: Any, to: Any, offset: Any, count: Any) -> None:
    if count > 16 and offset >= 64:
        i = 0
        while i < count:
            copy_line(target, to + i, target, to + i - offset)
            i += 64
        return
    # an offset of n < 8 bytes: fill one word with the repeated bytes, then copy words from a multiple of n before. No
    # branch up to 16 bytes, because that would be hard to predict
    near = min(offset, 8)
    store_word(target, to, (load_word(target, to - offset) & _LOW_BYTES[near]) * _REPEATED[near])
    back = max(offset, _BACK[near])
    store_word(target, to + 8, load_word(target, to + 8 - back))
    for i in range(16, count, 8):
        store_word(target, to + i, load_word(target, to + i - back))


replaces(reference.load)(load_int)
replaces(reference.load_quad)(load_quad)
replaces(reference.copy_run)(copy_bytes)
use_reference(reference)
get_length = compiled(reference.get_length)
