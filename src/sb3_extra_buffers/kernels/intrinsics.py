"""Machine operations that numba lacks: unaligned words, bit counts, block copies, lines of 64 bytes under a mask.

Imports numba: only the compiled half of `kernels` may import this module.

Compiled code passes a memory operand as two arguments, an array or column and a byte offset; the definitions below
receive a pointer. So ``def copy_bytes(builder, target, source, count)`` is called as ``copy_bytes(array, offset,
array, offset, count)``. Offsets are not checked, and arrays must be contiguous.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from sb3_extra_buffers.kernels.columns_numba import data_pointer

# what numba compiles for, unless it is configured for another processor
_FEATURES = {} if config.CPU_NAME or config.CPU_FEATURES else llvm.get_host_cpu_features()
# pdep and pext: one instruction on x86-64 since 2013; elsewhere a loop over the eight bytes
_HAS_BMI2 = bool(_FEATURES.get("bmi2", False))
#: whether the processor looks 64 bytes up in a table at once (AVX-512 VBMI), which the ``look_up_*`` operations need
HAS_TABLES = bool(_FEATURES.get("avx512vbmi", False) and _FEATURES.get("avx512bw", False))
#: whether it also moves 64 bytes under a mask (AVX-512 VBMI2), which the ``*_line`` operations need
HAS_LINES = bool(HAS_TABLES and _FEATURES.get("avx512vbmi2", False))
#: whether it also multiplies bytes by matrices of bits (GFNI), which `look_up_pixels` needs
HAS_MATRICES = HAS_TABLES and bool(_FEATURES.get("gfni", False))
#: whether one instruction shuffles bytes, at least 16 (SSSE3); otherwise `join_block` and `split_block` are slow
HAS_SHUFFLES = HAS_TABLES or bool(_FEATURES.get("ssse3", False))
#: pixels that `join_block` and `split_block` move; also the bytes that they store at once
BLOCK_PIXELS = 64 if HAS_TABLES else 32

_BYTE, _HALF, _INT32, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_LINE = ir.VectorType(_BYTE, 64)
_MASK = ir.VectorType(ir.IntType(1), 64)
_NO_LINE = ir.Constant(_LINE, None)

# kinds of operands; a memory operand is an array and a byte offset
_MEMORY = None
_UINT, _INT = types.uint64, types.int64


def _operation(result: Any, *operands: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic from a function that takes the LLVM builder and operands, and returns the LLVM result."""

    def decorate(build: Callable[..., Any]) -> Any:
        def define(typing_context: Any, *arguments: Any) -> Any:
            remaining = iter(arguments)
            parameters: list[Any] = []
            for kind in operands:
                parameters += [next(remaining), _INT] if kind is _MEMORY else [kind]
                next(remaining)

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                passed = iter(zip(signature.args, values, strict=True))
                built = []
                for kind in operands:
                    array_type, value = next(passed)
                    if kind is _MEMORY:
                        data = data_pointer(context, builder, array_type, value)
                        value = builder.gep(data, [next(passed)[1]])
                    built.append(value)
                returned = build(builder, *built)
                return context.get_dummy_value() if result is types.void else returned

            return result(*parameters), generate

        define.__name__, define.__doc__ = build.__name__, build.__doc__
        # numba wants every parameter by name
        names = ["typing_context"]
        for name, kind in zip(list(inspect.signature(build).parameters)[1:], operands, strict=True):
            names += [name, f"{name}_at"] if kind is _MEMORY else [name]
        define.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # mypy knows no such attribute
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        return intrinsic(define)

    return decorate


def _load(builder: Any, pointer: Any, kind: Any, align: int = 1) -> Any:
    value = builder.load(builder.bitcast(pointer, kind.as_pointer()))
    value.align = align
    return value


def _store(builder: Any, value: Any, pointer: Any, align: int = 1) -> Any:
    store = builder.store(value, builder.bitcast(pointer, value.type.as_pointer()))
    store.align = align
    return store


def _stream(builder: Any, value: Any, pointer: Any) -> None:
    """Store a vector past the caches, at an address that is a multiple of its size."""
    hint = builder.module.add_metadata([ir.Constant(_INT32, 1)])
    _store(builder, value, pointer, align=value.type.count).set_metadata("nontemporal", hint)


def _call(builder: Any, name: str, result: Any, *operands: Any) -> Any:
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)


# ---- words and blocks ----


@_operation(_UINT, _MEMORY)
def load_word(builder: Any, source: Any) -> Any:
    """Load eight bytes of any alignment."""
    return _load(builder, source, _WORD)


@_operation(types.void, _MEMORY, _UINT)
def store_word(builder: Any, target: Any, value: Any) -> None:
    """Store eight bytes at any alignment."""
    _store(builder, value, target)


@_operation(_UINT, _MEMORY)
def load_byte(builder: Any, source: Any) -> Any:
    """Load a byte; unlike ``array[offset]`` this does not test whether the offset is negative."""
    return builder.zext(builder.load(source), _WORD)


@_operation(_INT, _MEMORY)
def load_int(builder: Any, source: Any) -> Any:
    """`load_byte` as a signed integer."""
    return builder.zext(builder.load(source), _WORD)


@_operation(_INT, _MEMORY)
def load_quad(builder: Any, source: Any) -> Any:
    """Load four bytes of any alignment."""
    return builder.zext(_load(builder, source, _INT32), _WORD)


@_operation(_INT, _MEMORY)
def load_half(builder: Any, source: Any) -> Any:
    """Load two bytes of any alignment."""
    return builder.zext(_load(builder, source, _HALF), _WORD)


@_operation(types.void, _MEMORY, _UINT)
def store_quad(builder: Any, target: Any, value: Any) -> None:
    """Store the lowest four bytes of ``value`` at any alignment."""
    _store(builder, builder.trunc(value, _INT32), target)


@_operation(types.void, _MEMORY, _UINT)
def store_half(builder: Any, target: Any, value: Any) -> None:
    """Store the lowest two bytes of ``value`` at any alignment."""
    _store(builder, builder.trunc(value, _HALF), target)


@_operation(types.void, _MEMORY, _UINT)
def store_byte(builder: Any, target: Any, value: Any) -> None:
    """Store the lowest byte of ``value``."""
    _store(builder, builder.trunc(value, _BYTE), target)


@_operation(_INT, _MEMORY)
def address_of(builder: Any, source: Any) -> Any:
    """Return the address of a memory operand."""
    return builder.ptrtoint(source, _WORD)


@_operation(types.void, _MEMORY, _MEMORY, _INT)
def copy_bytes(builder: Any, target: Any, source: Any, count: Any) -> None:
    """Copy ``count`` bytes; the ranges must not overlap."""
    cgutils.raw_memcpy(builder, target, source, count, 1)


@_operation(types.void, _MEMORY, _MEMORY)
def copy_line(builder: Any, target: Any, source: Any) -> None:
    """Copy 64 bytes of any alignment."""
    _store(builder, _load(builder, source, _LINE), target)


@_operation(types.void, _MEMORY, _MEMORY)
def copy_half_line(builder: Any, target: Any, source: Any) -> None:
    """Copy 32 bytes of any alignment."""
    _store(builder, _load(builder, source, _vector(32)), target)


@_operation(types.void, _MEMORY)
def prefetch(builder: Any, source: Any) -> None:
    """Start loading the cache line that holds a byte, wherever it is; nothing waits for it."""
    kept, read, data = _INT32(3), _INT32(0), _INT32(1)
    _call(builder, "llvm.prefetch.p0i8", ir.VoidType(), source, read, kept, data)


@_operation(types.void, _MEMORY, _INT)
def clear_bytes(builder: Any, target: Any, count: Any) -> None:
    """Set ``count`` bytes to zero."""
    cgutils.memset(builder, target, count, 0)


@_operation(types.void, _MEMORY, _MEMORY, _INT)
def stream_bytes(builder: Any, target: Any, source: Any, count: Any) -> None:
    """`copy_bytes` past the caches; ``count`` and the address of ``target`` must be multiples of 16."""
    first = builder.and_(builder.neg(builder.ptrtoint(target, _WORD)), _WORD(63))
    first = builder.select(builder.icmp_signed("<", first, count), first, count)
    last = builder.and_(builder.sub(count, first), _WORD(63))
    middle = builder.sub(builder.sub(count, first), last)
    # whole lines, and what precedes and follows them
    for start, size, width in ((_WORD(0), first, 16), (first, middle, 64), (builder.add(first, middle), last, 16)):
        with cgutils.for_range(builder, builder.udiv(size, _WORD(width))) as loop:
            offset = builder.add(start, builder.mul(loop.index, _WORD(width)))
            value = _load(builder, builder.gep(source, [offset]), _vector(width))
            _stream(builder, value, builder.gep(target, [offset]))


@_operation(types.boolean, _MEMORY, _MEMORY, _INT)
def equal_bytes(builder: Any, a: Any, b: Any, count: Any) -> Any:
    """Return whether ``count`` bytes are equal."""
    return builder.icmp_signed("==", _call(builder, "memcmp", _INT32, a, b, count), _INT32(0))


@_operation(types.void, _MEMORY, _MEMORY, _INT)
def add_to_eight(builder: Any, target: Any, source: Any, base: Any) -> None:
    """Set eight int32 of ``target`` to those of ``source`` plus ``base``."""
    eight = ir.VectorType(_INT32, 8)
    bases = ir.Constant(eight, ir.Undefined)
    for lane in range(8):
        bases = builder.insert_element(bases, builder.trunc(base, _INT32), _INT32(lane))
    _store(builder, builder.add(_load(builder, source, eight, align=4), bases), target, align=4)


# ---- bits ----


@_operation(_UINT, _UINT)
def count_ones(builder: Any, word: Any) -> Any:
    """Count the set bits of a word."""
    return builder.ctpop(word)


@_operation(_INT, _UINT)
def trailing_zeros(builder: Any, word: Any) -> Any:
    """Count the zero bits below the lowest set bit of a word, which must not be zero."""
    return builder.cttz(word, ir.IntType(1)(1))


@_operation(_UINT, _UINT, _UINT)
def spread_bytes(builder: Any, packed: Any, mask: Any) -> Any:
    """Move the low bytes of ``packed``, in order, to the bytes of ``mask`` that are 0xFF; the others become zero."""
    if _HAS_BMI2:
        return _call(builder, "llvm.x86.bmi.pdep.64", _WORD, packed, mask)
    result = _WORD(0)
    for byte in range(8):
        selected = builder.and_(mask, _WORD(0xFF << (8 * byte)))
        result = builder.or_(result, builder.and_(builder.shl(packed, _WORD(8 * byte)), selected))
        packed = builder.lshr(packed, builder.and_(builder.lshr(selected, _WORD(8 * byte)), _WORD(8)))
    return result


@_operation(_UINT, _UINT)
def byte_mask(builder: Any, bits: Any) -> Any:
    """Expand each of the eight low bits to a byte of 0xFF or 0; the other bits must be zero."""
    low = _WORD(0x0101010101010101)
    if _HAS_BMI2:
        ones = _call(builder, "llvm.x86.bmi.pdep.64", _WORD, bits, low)
    else:
        single = builder.and_(builder.mul(bits, low), _WORD(0x8040201008040201))
        ones = builder.and_(builder.lshr(builder.add(single, _WORD(0x7F7F7F7F7F7F7F7F)), _WORD(7)), low)
    return builder.mul(ones, _WORD(0xFF))


@_operation(_UINT, _UINT)
def nonzero_bytes(builder: Any, word: Any) -> Any:
    """Return one bit for each byte of a word: whether it is nonzero."""
    for shift in (4, 2, 1):
        word = builder.or_(word, builder.lshr(word, _WORD(shift)))
    low = builder.and_(word, _WORD(0x0101010101010101))
    return builder.lshr(builder.mul(low, _WORD(0x0102040810204080)), _WORD(56))


@_operation(_UINT, _UINT, _INT)
def lowest_bits(builder: Any, word: Any, count: Any) -> Any:
    """Return the lowest ``count`` bits of a word, all of them from 64 on."""
    some = builder.sub(builder.shl(_WORD(1), builder.and_(count, _WORD(63))), _WORD(1))
    every = builder.icmp_signed(">=", count, _WORD(64))
    return builder.select(every, word, builder.and_(word, some))


@_operation(_UINT, _UINT, _UINT)
def gather_bytes(builder: Any, word: Any, mask: Any) -> Any:
    """Undo `spread_bytes`: move the bytes of ``word`` where ``mask`` is 0xFF together at the low end."""
    if _HAS_BMI2:
        return _call(builder, "llvm.x86.bmi.pext.64", _WORD, word, mask)
    result, shift = _WORD(0), _WORD(0)
    for byte in range(8):
        selected = builder.and_(builder.lshr(mask, _WORD(8 * byte)), _WORD(0xFF))
        value = builder.and_(builder.lshr(word, _WORD(8 * byte)), selected)
        # a shift by 64 would be undefined; the masked one shifts a zero
        result = builder.or_(result, builder.shl(value, builder.and_(shift, _WORD(63))))
        shift = builder.add(shift, builder.and_(selected, _WORD(8)))
    return result


# ---- lines of 64 bytes, only where `HAS_LINES` ----


def _expand(builder: Any, source: Any, mask: Any, rest: Any) -> Any:
    """Return a line with the bytes at ``source``, in order, where ``mask`` is set, and those of ``rest`` elsewhere.

    Reads no more bytes than ``mask`` has set bits.
    """
    return _call(builder, "llvm.masked.expandload.v64i8", _LINE, source, builder.bitcast(mask, _MASK), rest)


@_operation(_UINT, _MEMORY, _MEMORY)
def unequal_line(builder: Any, a: Any, b: Any) -> Any:
    """Return one bit for each of 64 bytes: whether they differ."""
    return builder.bitcast(builder.icmp_unsigned("!=", _load(builder, a, _LINE), _load(builder, b, _LINE)), _WORD)


@_operation(types.void, _MEMORY, _MEMORY, _UINT)
def cut_line(builder: Any, target: Any, source: Any, mask: Any) -> None:
    """Move those of 64 bytes that ``mask`` selects together in ``target``; what follows them there is undefined."""
    # compress in a register: storing under a mask is slow on some processors
    name = "llvm.x86.avx512.mask.compress.v64i8"
    line = _load(builder, source, _LINE)
    _store(builder, _call(builder, name, _LINE, line, _NO_LINE, builder.bitcast(mask, _MASK)), target)


@_operation(types.void, _MEMORY, _MEMORY, _UINT)
def fill_line(builder: Any, target: Any, source: Any, mask: Any) -> None:
    """Put bytes of ``source`` where ``mask`` is set and repeat each up to the next.

    The first byte of ``source`` is what precedes them, the others follow. Reads 65 bytes, however few are needed.
    """
    words = ir.VectorType(_WORD, 8)
    # the number of set bits up to each lane: within its word, by adding up bytes of 0 and 1, then of the words before
    counts = builder.bitcast(builder.zext(builder.bitcast(mask, _MASK), _LINE), words)
    for shift in (8, 16, 32):
        counts = builder.add(counts, builder.shl(counts, ir.Constant(words, [shift] * 8)))
    totals = _call(builder, "llvm.ctpop.v8i8", _vector(8), builder.bitcast(mask, _vector(8)))
    before = builder.mul(builder.bitcast(totals, _WORD), _WORD(0x0101010101010101 << 8 & 0xFFFFFFFFFFFFFFFF))
    before = builder.bitcast(before, _vector(8))
    before = _shuffle(builder, before, before, [lane // 8 for lane in range(64)])
    lanes = builder.add(builder.bitcast(counts, _LINE), before)
    lanes = builder.add(lanes, ir.Constant(_LINE, [255] * 64))
    following = _load(builder, builder.gep(source, [_WORD(1)]), _LINE)
    line = _call(builder, "llvm.x86.avx512.permvar.qi.512", _LINE, following, lanes)
    single = builder.insert_element(_NO_LINE, builder.load(source), _INT32(0))
    repeated = _shuffle(builder, single, _NO_LINE, [0] * 64)
    _store(builder, builder.select(builder.icmp_signed("<", lanes, _NO_LINE), repeated, line), target)


@_operation(types.void, _MEMORY, _MEMORY, _UINT)
def merge_line(builder: Any, target: Any, source: Any, mask: Any) -> None:
    """Overwrite those of 64 bytes that ``mask`` selects with the bytes of ``source``, in order."""
    _store(builder, _expand(builder, source, mask, _load(builder, target, _LINE)), target)


# ---- tables, only where `HAS_TABLES` ----


def _load_table(builder: Any, table: Any) -> list[Any]:
    return [_load(builder, builder.gep(table, [_WORD(64 * part)]), _LINE) for part in range(4)]


def _look_up(builder: Any, parts: list[Any], indices: Any) -> Any:
    """The entries of a table of 256 bytes that a line of indices names."""
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    # the instruction uses seven bits of an index
    low, high = (_call(builder, name, _LINE, first, indices, second) for first, second in (parts[:2], parts[2:]))
    return builder.select(builder.icmp_signed("<", indices, _NO_LINE), high, low)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))


def _look_up_lines(store: Callable[..., Any]) -> Any:
    @_operation(types.void, _MEMORY, _MEMORY, _MEMORY, _INT)
    def look_up_lines(builder: Any, target: Any, table: Any, source: Any, count: Any) -> None:
        """Set ``count`` times 64 bytes to the entries of a table of 256 bytes that those of ``source`` name.

        `stream_look_up_lines` writes past the caches; ``target`` must then be aligned to 64 bytes.
        """
        parts = _load_table(builder, table)
        with cgutils.for_range(builder, count) as loop:
            offset = [builder.mul(loop.index, _WORD(64))]
            line = _look_up(builder, parts, _load(builder, builder.gep(source, offset), _LINE))
            store(builder, line, builder.gep(target, offset))

    return look_up_lines


look_up_lines, stream_look_up_lines = _look_up_lines(_store), _look_up_lines(_stream)


@_operation(_UINT, _MEMORY, _MEMORY, _INT, _MEMORY, _MEMORY)
def look_up_pixels(builder: Any, target: Any, source: Any, plane: Any, hashed: Any, shades: Any) -> Any:
    """Set 64 bytes to the indices of pixels whose three bytes are ``plane`` bytes apart, only where `HAS_MATRICES`.

    ``hashed`` is a `tables.line_hash`, and ``shades`` the three tables that indices stand for. Returns one bit for each
    pixel: whether it is unknown.
    """
    name = "llvm.x86.vgf2p8affineqb.512"
    eight = ir.VectorType(_WORD, 8)
    lines = [_load(builder, builder.gep(source, [builder.mul(plane, _WORD(k))]), _LINE) for k in range(3)]
    sums = []
    for first in (0, 3):
        total = None
        for k, line in enumerate(lines):
            matrix = _load(builder, builder.gep(hashed, [_WORD(512 + 8 * (first + k))]), _WORD)
            single = builder.insert_element(ir.Constant(eight, ir.Undefined), matrix, _INT32(0))
            zeros = ir.Constant(ir.VectorType(_INT32, 8), [0] * 8)
            spread = builder.bitcast(builder.shuffle_vector(single, single, zeros), _LINE)
            product = _call(builder, name, _LINE, line, spread, _BYTE(0))
            total = product if total is None else builder.xor(total, product)
        sums.append(total)
    slots = builder.xor(sums[1], _look_up(builder, _load_table(builder, hashed), sums[0]))
    indices = _look_up(builder, _load_table(builder, builder.gep(hashed, [_WORD(256)])), slots)
    _store(builder, indices, target)
    unknown = None
    for k, line in enumerate(lines):
        shade = _look_up(builder, _load_table(builder, builder.gep(shades, [_WORD(256 * k)])), indices)
        wrong = builder.bitcast(builder.icmp_unsigned("!=", shade, line), _WORD)
        unknown = wrong if unknown is None else builder.or_(unknown, wrong)
    return unknown


def _look_up_units(join: Callable[..., list[Any]], unit: int, store: Callable[..., Any]) -> Any:
    @_operation(types.void, _MEMORY, _MEMORY, _MEMORY, _INT)
    def look_up_units(builder: Any, target: Any, tables: Any, source: Any, count: Any) -> None:
        """`look_up_lines` for units of several bytes, with a table for each of these; writes 64 units at a time."""
        parts = [_load_table(builder, builder.gep(tables, [_WORD(256 * byte)])) for byte in range(unit)]
        with cgutils.for_range(builder, count) as loop:
            indices = _load(builder, builder.gep(source, [builder.mul(loop.index, _WORD(64))]), _LINE)
            lines = join(builder, [_look_up(builder, part, indices) for part in parts])
            for number, line in enumerate(lines):
                offset = builder.add(builder.mul(loop.index, _WORD(64 * unit)), _WORD(64 * number))
                store(builder, line, builder.gep(target, [offset]))

    return look_up_units


def _join_threes(builder: Any, bytes_of_units: list[Any]) -> list[Any]:
    a, b, c = bytes_of_units
    lines = []
    for line in range(3):
        places = [divmod(64 * line + byte, 3) for byte in range(64)]
        joined = _shuffle(builder, a, b, [unit + 64 * (plane % 2) for unit, plane in places])
        lanes = [64 + unit if plane == 2 else byte for byte, (unit, plane) in enumerate(places)]
        lines.append(_shuffle(builder, joined, c, lanes))
    return lines


def _join_fours(builder: Any, bytes_of_units: list[Any]) -> list[Any]:
    a, b, c, d = bytes_of_units
    lines = []
    for half in range(2):
        # bytes 0, 64, 1, 65, ... of two lines, then pairs of those
        lanes = [32 * half + byte // 2 + 64 * (byte % 2) for byte in range(64)]
        first, second = _shuffle(builder, a, b, lanes), _shuffle(builder, c, d, lanes)
        for part in range(2):
            lanes = [32 * part + byte // 4 * 2 + byte % 2 + 64 * (byte // 2 % 2) for byte in range(64)]
            lines.append(_shuffle(builder, first, second, lanes))
    return lines


look_up_threes, look_up_fours = _look_up_units(_join_threes, 3, _store), _look_up_units(_join_fours, 4, _store)


# ---- stacks along the last axis: ``[pixel, stack, unit]``, made of frames ``[pixel, unit]`` ----

# units and stacks that blocks are defined for
_KINDS = [(1, 2), (1, 3), (3, 2), (3, 3), (3, 4)]


def _vector(count: int) -> Any:
    return ir.VectorType(_BYTE, count)


def _concatenate(builder: Any, a: Any, b: Any) -> Any:
    return _shuffle(builder, a, b, list(range(2 * a.type.count)))


def _at(builder: Any, pointer: Any, offset: int) -> Any:
    return builder.gep(pointer, [_WORD(offset)])


def _gather_line(builder: Any, sources: list[Any], size: int, places: list[tuple[int, int]]) -> Any:
    """Return 64 bytes, each from its ``(source, offset)``; reads none from offset ``size`` on.

    Loads vectors of 32 or 64 bytes, two registers full of them if possible: a shuffle takes two.
    """
    width = 64 if len(sources) <= 2 else 32
    parts, lanes = _load_parts(builder, sources, size, places, width)
    if width == 32:
        pairs = [(parts[i], parts[min(i + 1, len(parts) - 1)]) for i in range(0, len(parts), 2)]
        parts = [_concatenate(builder, *pair) for pair in pairs]
    line = _shuffle(builder, parts[0], parts[min(1, len(parts) - 1)], [lane if lane < 128 else 0 for lane in lanes])
    for number, part in enumerate(parts[2:], 2):
        moved = [64 + lane % 64 if lane // 64 == number else i for i, lane in enumerate(lanes)]
        line = _shuffle(builder, line, part, moved)
    return line


def _load_parts(
    builder: Any, sources: list[Any], size: int, places: list[tuple[int, int]], width: int
) -> tuple[list[Any], list[int]]:
    """Load vectors that contain the bytes at ``places``; return the vectors, and each byte's lane in all of them."""
    parts: list[Any] = []
    lanes = [-1] * len(places)
    while -1 in lanes:
        number, first = min(place for place, lane in zip(places, lanes, strict=True) if lane < 0)
        first = min(first, size - width)
        for i, (source, offset) in enumerate(places):
            if lanes[i] < 0 and source == number and offset < first + width:
                lanes[i] = len(parts) * width + offset - first
        parts.append(_load(builder, _at(builder, sources[number], first), _vector(width)))
    return parts, lanes


def _gather_halves(builder: Any, sources: list[Any], size: int, places: list[tuple[int, int]]) -> Any:
    """`_gather_line` for 32 bytes, with shuffles that stay inside of 16 bytes."""
    zeros, none = ir.Constant(_vector(32), None), ir.Constant(_vector(16), None)
    low, low_lanes = _load_parts(builder, sources, size, places[:16], 16)
    high, high_lanes = _load_parts(builder, sources, size, places[16:], 16)
    result = zeros
    for number, halves in enumerate(zip_longest(low, high, fillvalue=none)):
        start = 16 * number
        lanes = [lane - start if start <= lane < start + 16 else 32 for lane in low_lanes]
        lanes += [16 + lane - start if start <= lane < start + 16 else 32 for lane in high_lanes]
        moved = _shuffle(builder, _concatenate(builder, *halves), zeros, lanes)
        result = builder.or_(result, moved)
    return result


@contextmanager
def _cases(builder: Any, value: Any) -> Iterator[Callable[[int], Any]]:
    """Build a switch; its cases are the blocks of ``with case(number):``."""
    end = builder.append_basic_block("end")
    switch = builder.switch(value, end)

    @contextmanager
    def case(number: int) -> Iterator[None]:
        block = builder.append_basic_block("case")
        switch.add_case(_WORD(number), block)
        with builder.goto_block(block):
            yield
            builder.branch(end)

    yield case
    builder.position_at_end(end)


def _join_block(gather: Callable[..., Any], pixels: int) -> Any:
    @_operation(types.void, _MEMORY, _MEMORY, _INT, _INT, _INT, _INT)
    def join_block(builder: Any, target: Any, source: Any, size: Any, unit: Any, stack: Any, streaming: Any) -> None:
        """Interleave a block of frames that are ``size`` bytes apart; for the units and stacks of `_KINDS`.

        With ``streaming``, writes past the caches; ``target`` must then be aligned to `BLOCK_PIXELS` bytes.
        """
        hint = builder.module.add_metadata([ir.Constant(_INT32, 1)])
        key = builder.add(builder.mul(builder.add(builder.mul(unit, _WORD(8)), stack), _WORD(2)), streaming)
        with _cases(builder, key) as case:
            for (n_bytes, n_frames), streams in ((kind, streams) for kind in _KINDS for streams in (0, 1)):
                with case(2 * (8 * n_bytes + n_frames) + streams):
                    frames = [builder.gep(source, [builder.mul(size, _WORD(j))]) for j in range(n_frames)]
                    places = [
                        (j, pixel * n_bytes + byte)
                        for pixel in range(pixels)
                        for j in range(n_frames)
                        for byte in range(n_bytes)
                    ]
                    for at in range(0, len(places), pixels):
                        line = gather(builder, frames, pixels * n_bytes, places[at : at + pixels])
                        stored = _store(builder, line, _at(builder, target, at), align=pixels if streams else 1)
                        if streams:
                            stored.set_metadata("nontemporal", hint)

    return join_block


def _split_block(gather: Callable[..., Any], pixels: int) -> Any:
    @_operation(types.void, _MEMORY, _MEMORY, _INT, _INT, _INT)
    def split_block(builder: Any, target: Any, source: Any, size: Any, unit: Any, stack: Any) -> None:
        """Undo `join_block`."""
        with _cases(builder, builder.add(builder.mul(unit, _WORD(8)), stack)) as case:
            for n_bytes, n_frames in _KINDS:
                with case(8 * n_bytes + n_frames):
                    for j in range(n_frames):
                        frame = builder.gep(target, [builder.mul(size, _WORD(j))])
                        places = [
                            (0, (pixel * n_frames + j) * n_bytes + byte)
                            for pixel in range(pixels)
                            for byte in range(n_bytes)
                        ]
                        for at in range(0, len(places), pixels):
                            line = gather(builder, [source], pixels * n_frames * n_bytes, places[at : at + pixels])
                            _store(builder, line, _at(builder, frame, at))

    return split_block


# lines are as long as a block has pixels, so that a block is a whole number of them
join_block_64, split_block_64 = _join_block(_gather_line, 64), _split_block(_gather_line, 64)
join_block_32, split_block_32 = _join_block(_gather_halves, 32), _split_block(_gather_halves, 32)
join_block, split_block = (join_block_64, split_block_64) if HAS_TABLES else (join_block_32, split_block_32)
