"""Machine operations that numba lacks: unaligned words, bit counts, block copies.

Imports numba: only the compiled half of `kernels` may import this module.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

_WORD = ir.IntType(64)

# what numba compiles for, unless it is told of another processor
_FEATURES = {} if config.CPU_NAME or config.CPU_FEATURES else llvm.get_host_cpu_features()
# pdep and pext: one instruction on x86-64 since 2013; elsewhere a loop over the eight bytes
_HAS_BMI2 = bool(_FEATURES.get("bmi2", False))
#: whether 64 bytes can be moved by a mask at once
HAS_LINES = bool(_FEATURES.get("avx512vbmi2", False) and _FEATURES.get("avx512bw", False))


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(data, cgutils.voidptr_t), [offset])


def _call(builder: Any, name: str, words: Any) -> Any:
    kind = ir.FunctionType(_WORD, [_WORD] * len(words))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), words)


@intrinsic
def load_word(typing_context: Any, array: Any, offset: Any) -> Any:
    """The eight bytes at byte ``offset`` of a contiguous array, whatever its alignment."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _pointer(context, builder, signature.args[0], args[0], args[1])
        word = builder.load(builder.bitcast(at, _WORD.as_pointer()))
        word.align = 1
        return word

    return types.uint64(array, types.int64), generate


@intrinsic
def store_word(typing_context: Any, array: Any, offset: Any, value: Any) -> Any:
    """Set the eight bytes at byte ``offset`` of a contiguous array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _pointer(context, builder, signature.args[0], args[0], args[1])
        store = builder.store(args[2], builder.bitcast(at, _WORD.as_pointer()))
        store.align = 1
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


@intrinsic
def load_byte(typing_context: Any, array: Any, offset: Any) -> Any:
    """The byte at ``offset`` of a contiguous array; unlike ``array[offset]`` it does not ask if that is negative."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(_pointer(context, builder, signature.args[0], args[0], args[1])), _WORD)

    return types.uint64(array, types.int64), generate


@intrinsic
def list_children(typing_context: Any, found: Any, count: Any, table: Any, mask: Any, base: Any) -> Any:
    """Set ``found[count : count + 8]`` to ``base + table[mask]``, eight int32 at once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found, count, table, mask, base = args
        half = ir.IntType(32)
        eight = ir.VectorType(half, 8)
        to = _pointer(context, builder, signature.args[0], found, builder.mul(count, _WORD(4)))
        at = _pointer(context, builder, signature.args[2], table, builder.mul(mask, _WORD(32)))
        bits = builder.load(builder.bitcast(at, eight.as_pointer()))
        bits.align = 4
        bases = ir.Constant(eight, ir.Undefined)
        for lane in range(8):
            bases = builder.insert_element(bases, builder.trunc(base, half), half(lane))
        store = builder.store(builder.add(bits, bases), builder.bitcast(to, eight.as_pointer()))
        store.align = 4
        return context.get_dummy_value()

    return types.void(found, types.int64, table, types.int64, types.int64), generate


@intrinsic
def copy_bytes(typing_context: Any, target: Any, to: Any, source: Any, at: Any, count: Any) -> Any:
    """Copy ``count`` bytes between two arrays that do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, to, source, at, count = args
        cgutils.raw_memcpy(
            builder,
            _pointer(context, builder, signature.args[0], target, to),
            _pointer(context, builder, signature.args[2], source, at),
            count,
            1,
        )
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), generate


@intrinsic
def stream_bytes(typing_context: Any, target: Any, to: Any, source: Any, at: Any, count: Any) -> Any:
    """`copy_bytes` past the caches; the place in ``target`` and ``count`` are multiples of 16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, to, source, at, count = args
        first = _pointer(context, builder, signature.args[0], target, to)
        second = _pointer(context, builder, signature.args[2], source, at)
        pair = ir.VectorType(_WORD, 2).as_pointer()
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        with cgutils.for_range(builder, builder.udiv(count, _WORD(16))) as loop:
            offset = builder.mul(loop.index, _WORD(16))
            value = builder.load(builder.bitcast(builder.gep(second, [offset]), pair))
            value.align = 1
            store = builder.store(value, builder.bitcast(builder.gep(first, [offset]), pair))
            store.align = 16
            store.set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), generate


@intrinsic
def address_of(typing_context: Any, array: Any) -> Any:
    """Where an array begins."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, _WORD)

    return types.int64(array), generate


@intrinsic
def count_ones(typing_context: Any, word: Any) -> Any:
    """How many bits of an unsigned word are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@intrinsic
def low_zeros(typing_context: Any, word: Any) -> Any:
    """How many bits below the lowest one that is set; of a word that is not zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.uint64), generate


@intrinsic
def spread_bytes(typing_context: Any, packed: Any, places: Any) -> Any:
    """Lay the low bytes of ``packed``, in order, where ``places`` has bytes of 0xFF."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed, places = args
        if _HAS_BMI2:
            return _call(builder, "llvm.x86.bmi.pdep.64", args)
        result = ir.Constant(_WORD, 0)
        for byte in range(8):
            here = builder.and_(places, ir.Constant(_WORD, 0xFF << (8 * byte)))
            shifted = builder.shl(packed, ir.Constant(_WORD, 8 * byte))
            result = builder.or_(result, builder.and_(shifted, here))
            step = builder.and_(builder.lshr(here, ir.Constant(_WORD, 8 * byte)), ir.Constant(_WORD, 8))
            packed = builder.lshr(packed, step)
        return result

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def equal_bytes(typing_context: Any, a: Any, at: Any, b: Any, bt: Any, count: Any) -> Any:
    """Whether ``count`` bytes of two arrays are the same."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, at, b, bt, count = args
        order = ir.IntType(32)
        compare = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(order, [cgutils.voidptr_t, cgutils.voidptr_t, _WORD]), "memcmp"
        )
        first = _pointer(context, builder, signature.args[0], a, at)
        second = _pointer(context, builder, signature.args[2], b, bt)
        return builder.icmp_signed("==", builder.call(compare, [first, second, count]), order(0))

    return types.boolean(a, types.int64, b, types.int64, types.int64), generate


@intrinsic
def gather_bytes(typing_context: Any, word: Any, places: Any) -> Any:
    """Undo `spread_bytes`: the bytes of ``word`` where ``places`` has 0xFF, moved together at the low end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, places = args
        if _HAS_BMI2:
            return _call(builder, "llvm.x86.bmi.pext.64", args)
        result, shift = ir.Constant(_WORD, 0), ir.Constant(_WORD, 0)
        for byte in range(8):
            here = builder.and_(builder.lshr(places, _WORD(8 * byte)), _WORD(0xFF))
            value = builder.and_(builder.lshr(word, _WORD(8 * byte)), here)
            # a shift by 64 means nothing; no byte is ever moved that far
            result = builder.or_(result, builder.shl(value, builder.and_(shift, _WORD(63))))
            shift = builder.add(shift, builder.and_(here, _WORD(8)))
        return result

    return types.uint64(types.uint64, types.uint64), generate


# ---- lines of 64 bytes, where `HAS_LINES` says so ----

_LINE = ir.VectorType(ir.IntType(8), 64)
_MASK = ir.VectorType(ir.IntType(1), 64)


def _line_at(builder: Any, place: Any) -> Any:
    line = builder.load(builder.bitcast(place, _LINE.as_pointer()))
    line.align = 1
    return line


def _put_line(builder: Any, line: Any, place: Any) -> None:
    builder.store(line, builder.bitcast(place, _LINE.as_pointer())).align = 1


def _expand(builder: Any, place: Any, mask: Any, rest: Any) -> Any:
    """The bytes at ``place``, in order, where ``mask`` is set, and ``rest`` elsewhere; reads no more than it lays."""
    kind = ir.FunctionType(_LINE, [ir.IntType(8).as_pointer(), _MASK, _LINE])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.expandload.v64i8")
    return builder.call(function, [place, mask, rest])


@intrinsic
def unequal_line(typing_context: Any, a: Any, at: Any, b: Any, bt: Any) -> Any:
    """One bit for each of 64 bytes in which two arrays differ."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, at, b, bt = args
        first = _line_at(builder, _pointer(context, builder, signature.args[0], a, at))
        second = _line_at(builder, _pointer(context, builder, signature.args[2], b, bt))
        return builder.bitcast(builder.icmp_unsigned("!=", first, second), _WORD)

    return types.uint64(a, types.int64, b, types.int64), generate


@intrinsic
def cut_line(typing_context: Any, target: Any, to: Any, source: Any, at: Any, mask: Any) -> Any:
    """Move those of 64 bytes that ``mask`` names together; what lies after them in ``target`` is anything."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, to, source, at, mask = args
        line = _line_at(builder, _pointer(context, builder, signature.args[2], source, at))
        kind = ir.FunctionType(_LINE, [_LINE, _LINE, _MASK])
        compress = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.mask.compress.v64i8")
        # in a register: storing by mask is slow on some processors
        cut = builder.call(compress, [line, ir.Constant(_LINE, None), builder.bitcast(mask, _MASK)])
        _put_line(builder, cut, _pointer(context, builder, signature.args[0], target, to))
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.uint64), generate


@intrinsic
def fill_line(typing_context: Any, target: Any, to: Any, source: Any, at: Any, mask: Any, before: Any) -> Any:
    """Lay bytes of ``source`` where ``mask`` is set, and repeat each until the next; ``before`` up to the first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, to, source, at, mask, before = args
        place = _pointer(context, builder, signature.args[2], source, at)
        none = ir.Constant(_LINE, None)
        line = _expand(builder, place, builder.bitcast(mask, _MASK), none)
        filled = mask
        for shift in (1, 2, 4, 8, 16, 32):
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), 64), [max(i - shift, 0) for i in range(64)])
            moved = builder.shuffle_vector(line, none, lanes)
            line = builder.select(builder.bitcast(filled, _MASK), line, moved)
            filled = builder.or_(filled, builder.shl(filled, _WORD(shift)))
        first = builder.insert_element(none, builder.trunc(before, ir.IntType(8)), ir.IntType(32)(0))
        repeated = builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64))
        line = builder.select(builder.bitcast(filled, _MASK), line, repeated)
        _put_line(builder, line, _pointer(context, builder, signature.args[0], target, to))
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.uint64, types.uint64), generate


@intrinsic
def merge_line(typing_context: Any, row: Any, to: Any, source: Any, at: Any, mask: Any) -> Any:
    """Overwrite those of 64 bytes that ``mask`` names with the bytes of ``source``, in order."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, to, source, at, mask = args
        place = _pointer(context, builder, signature.args[0], row, to)
        values = _pointer(context, builder, signature.args[2], source, at)
        _put_line(builder, _expand(builder, values, builder.bitcast(mask, _MASK), _line_at(builder, place)), place)
        return context.get_dummy_value()

    return types.void(row, types.int64, source, types.int64, types.uint64), generate
