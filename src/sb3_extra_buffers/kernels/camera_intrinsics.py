"""Machine operations on tiles of 8 x 8 values, for the compiled `kernels.camera`. Imports numba.

Memory operands are two arguments, an array or column and a byte offset, as in `kernels.intrinsics`. A tile of values of
``n`` bytes takes ``64 * n`` bytes, row after row.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from sb3_extra_buffers.kernels.camera import TILE
from sb3_extra_buffers.kernels.intrinsics import (
    _BYTE,
    _FEATURES,
    _HAS_BMI2,
    _INT,
    _INT32,
    _MEMORY,
    _UINT,
    _WORD,
    _call,
    _load,
    _operation,
    _store,
)

# vpermb and vpmultishiftqb
_HAS_VBMI = bool(_FEATURES.get("avx512vbmi", False) and _FEATURES.get("avx512bw", False))

_ONES = _WORD(0x0101010101010101)
_UNIT = ir.VectorType(_BYTE, TILE)
_ROW = ir.VectorType(_BYTE, 8)
_WORDS = ir.VectorType(_WORD, 8)
_HALF = ir.VectorType(_BYTE, 16)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))


def _splat(value: int, kind: Any) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _repeat(builder: Any, value: Any, kind: Any) -> Any:
    """Return a vector of which every lane is ``value``."""
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _INT32(0))
    return _shuffle(builder, single, single, [0] * kind.count)


def _only_if(builder: Any, condition: Any, vector: Any) -> Any:
    """Return ``vector``, or zeros if ``condition`` is false."""
    kind = vector.type
    # not a select by the condition itself: LLVM turns one of whole vectors into a branch
    if _HAS_VBMI and kind.element.width == 8:
        lanes = builder.sext(condition, ir.IntType(kind.count))
        mask = builder.bitcast(lanes, ir.VectorType(ir.IntType(1), kind.count))
        return builder.select(mask, vector, ir.Constant(kind, None))
    return builder.and_(vector, _repeat(builder, builder.sext(condition, kind.element), kind))


def _at(builder: Any, pointer: Any, offset: int) -> Any:
    return builder.gep(pointer, [_WORD(offset)])


def _moved(builder: Any, tile: Any, by: int, group: int) -> Any:
    """Move lanes up by ``by`` inside of groups; zeros follow."""
    lanes = [i - by if i % group >= by else TILE for i in range(TILE)]
    return _shuffle(builder, tile, ir.Constant(tile.type, None), lanes)


# ---- packed units ----


@_operation(types.void, _MEMORY, _MEMORY, _UINT, _UINT)
def unpack_unit(builder: Any, target: Any, source: Any, widths: Any, ends: Any) -> None:
    """Unpack eight rows of eight bytes; byte ``i`` of ``widths`` is the width of row ``i``, of ``ends`` its end."""
    # in one piece: loads of more bytes than a store wrote have to wait for it
    _store(builder, _unpack(builder, source, widths, ends), target)


def _unpack(builder: Any, source: Any, widths: Any, ends: Any) -> Any:
    return (_unpack_rows if _HAS_VBMI else _unpack_words)(builder, source, widths, ends)


def _unpack_words(builder: Any, source: Any, widths: Any, ends: Any) -> Any:
    start = _WORD(0)
    unit = ir.Constant(_WORDS, ir.Undefined)
    for row in range(8):
        shift = _WORD(8 * row)
        width = builder.and_(builder.lshr(widths, shift), _WORD(15))
        packed = _load(builder, builder.gep(source, [start]), _WORD)
        start = builder.and_(builder.lshr(ends, shift), _WORD(255))
        values = _spread(builder, packed, width)
        unit = builder.insert_element(unit, values, _INT32(row))
    return unit


def _unpack_rows(builder: Any, source: Any, widths: Any, ends: Any) -> Any:
    """`_unpack_words`, all rows at once: move each row to a word of its own, then each value to a byte of its own."""
    widths, starts = builder.bitcast(widths, _ROW), builder.bitcast(builder.shl(ends, _WORD(8)), _ROW)
    lanes = _shuffle(builder, starts, starts, [i // 8 for i in range(TILE)])
    lanes = builder.add(lanes, ir.Constant(_UNIT, [i % 8 for i in range(TILE)]))
    packed = _call(builder, "llvm.x86.avx512.permvar.qi.512", _UNIT, _load(builder, source, _UNIT), lanes)
    # the first bit of each value: its index times the width, two at a time because bytes cannot be multiplied
    shorts = ir.VectorType(ir.IntType(16), TILE // 2)
    factors = ir.Constant(shorts, [2 * (i % 4) | (2 * (i % 4) + 1) << 8 for i in range(TILE // 2)])
    pairs = _shuffle(builder, widths, ir.Constant(_ROW, None), [8 if i % 2 else i // 8 for i in range(TILE)])
    bits = builder.bitcast(builder.mul(builder.bitcast(pairs, shorts), factors), _UNIT)
    values = _call(builder, "llvm.x86.avx512.pmultishift.qb.512", _UNIT, bits, packed)
    ones = _splat(0x0101010101010101, _WORDS)
    masks = builder.sub(builder.shl(ones, builder.zext(widths, _WORDS)), ones)
    return builder.and_(builder.bitcast(values, _WORDS), masks)


@_operation(types.void, _MEMORY, _MEMORY, _UINT)
def pack_unit(builder: Any, target: Any, source: Any, widths: Any) -> None:
    """Undo `unpack_unit`; writes up to eight bytes after the last row."""
    for row in range(8):
        width = builder.and_(builder.lshr(widths, _WORD(8 * row)), _WORD(15))
        values = _load(builder, _at(builder, source, 8 * row), _WORD)
        packed = _gather(builder, values, width)
        _store(builder, packed, target)
        target = builder.gep(target, [width])


@_operation(_UINT, _UINT, _UINT)
def gather_values(builder: Any, values: Any, width: Any) -> Any:
    """Return the lowest ``width`` bits of each byte, one after the other."""
    return _gather(builder, values, width)


def _gather(builder: Any, values: Any, width: Any) -> Any:
    if _HAS_BMI2:
        mask = builder.sub(builder.shl(_ONES, width), _ONES)
        return _call(builder, "llvm.x86.bmi.pext.64", _WORD, values, mask)
    packed = _WORD(0)
    for byte in reversed(range(8)):
        value = builder.and_(builder.lshr(values, _WORD(8 * byte)), _WORD(255))
        packed = builder.or_(builder.shl(packed, width), value)
    return packed


def _spread(builder: Any, packed: Any, width: Any) -> Any:
    """Undo `_gather`."""
    if _HAS_BMI2:
        mask = builder.sub(builder.shl(_ONES, width), _ONES)
        return _call(builder, "llvm.x86.bmi.pdep.64", _WORD, packed, mask)
    low = builder.sub(builder.shl(_WORD(1), width), _WORD(1))
    values = _WORD(0)
    for byte in range(8):
        values = builder.or_(values, builder.shl(builder.and_(packed, low), _WORD(8 * byte)))
        packed = builder.lshr(packed, width)
    return values


@_operation(_UINT, _INT, _UINT)
def spread_widths(builder: Any, header: Any, offsets: Any) -> Any:
    """Return the width of each row, from a unit's header and the bytes that start with its offsets."""
    bits = builder.and_(builder.lshr(header, _WORD(2)), _WORD(3))
    base = builder.mul(builder.lshr(header, _WORD(4)), _ONES)
    return builder.add(base, _spread(builder, offsets, bits))


@_operation(_UINT, _UINT, _UINT)
def largest_bytes(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger one of each pair of bytes."""
    a, b = builder.bitcast(a, _ROW), builder.bitcast(b, _ROW)
    return builder.bitcast(builder.select(builder.icmp_unsigned(">", a, b), a, b), _WORD)


@_operation(_UINT, _UINT)
def count_in_bytes(builder: Any, word: Any) -> Any:
    """Count the set bits of each byte of a word."""
    for shift, pattern in ((1, 0x55), (2, 0x33), (4, 0x0F)):
        mask = _WORD(pattern * 0x0101010101010101)
        word = builder.add(builder.and_(word, mask), builder.and_(builder.lshr(word, _WORD(shift)), mask))
    return word


# ---- prediction ----


def _add_across(builder: Any, values: Any, condition: Any) -> Any:
    """Return the running sum of each row of a tile if ``condition`` is true, otherwise ``values``."""
    before = builder.block
    with builder.if_then(condition):
        sums = values
        for by in (1, 2, 4):
            sums = builder.add(sums, _moved(builder, sums, by, 8))
        after = builder.block
    result = builder.phi(values.type)
    result.add_incoming(values, before)
    result.add_incoming(sums, after)
    return result


def _set_tile(
    builder: Any, values: Any, zeros: Any, current: Any, previous: Any, above: Any, change: Any, predictor: Any
) -> None:
    """Set a tile from the codes of its residuals; see `_decode_tile`."""
    kind, row_kind = values.type, ir.VectorType(values.type.element, 8)
    one = _splat(1, kind)
    values = builder.xor(builder.lshr(values, one), builder.neg(builder.and_(values, one)))
    gradient = builder.icmp_unsigned("==", predictor, _WORD(0))
    values = _add_across(builder, values, gradient)
    vertical = builder.icmp_unsigned("!=", predictor, _WORD(1))
    for by in (8, 16, 32):
        values = builder.add(values, _only_if(builder, vertical, _moved(builder, values, by, TILE)))
    # what is not added is zeros from elsewhere: choosing an address is cheaper than a mask
    both = builder.icmp_unsigned("==", predictor, _WORD(3))
    start = _choose(builder, vertical, _choose(builder, both, change, above), zeros)
    first = _load(builder, start, row_kind)
    values = builder.add(values, _shuffle(builder, first, first, [i % 8 for i in range(TILE)]))
    temporal = builder.icmp_unsigned("!=", builder.and_(predictor, _WORD(1)), _WORD(0))
    values = builder.add(values, _load(builder, _choose(builder, temporal, previous, zeros), kind))
    last_before = _load(builder, _at(builder, previous, 56 * kind.element.width // 8), row_kind)
    last = builder.sub(_shuffle(builder, values, values, list(range(56, 64))), last_before)
    _store(builder, last, change)
    _store(builder, values, current)


def _choose(builder: Any, condition: Any, a: Any, b: Any) -> Any:
    """Select one of two pointers; as integers, or LLVM would load from both."""
    chosen = builder.select(condition, builder.ptrtoint(a, _WORD), builder.ptrtoint(b, _WORD))
    return builder.inttoptr(chosen, a.type)


@_operation(types.void, _MEMORY, _INT, _INT, _INT, _INT, _MEMORY, _UINT, _UINT, _UINT)
def decode_unit(
    builder: Any, space: Any, current: Any, previous: Any, above: Any, change: Any, source: Any, widths: Any, ends: Any,
    predictor: Any,
) -> None:  # fmt: skip
    """`unpack_unit`, then set a tile of bytes as `_decode_tile` does."""
    values = builder.bitcast(_unpack(builder, source, widths, ends), _UNIT)
    at = [builder.gep(space, [offset]) for offset in (current, previous, above, change)]
    _set_tile(builder, values, space, *at, predictor)


def _decode_tile(itemsize: int) -> Any:
    kind = ir.VectorType(ir.IntType(8 * itemsize), TILE)

    @_operation(types.void, _MEMORY, _INT, _INT, _INT, _INT, _INT, _UINT)
    def decode_tile(
        builder: Any, space: Any, current: Any, previous: Any, above: Any, change: Any, units: Any, predictor: Any
    ) -> None:
        """Set the tile at ``current`` from its residuals; all offsets are in ``space``.

        ``above`` is the row above the tile, and ``change`` the difference of that row to the one of the reference.
        ``change`` is then set to that of the tile's last row. Only `GRADIENT`, the rarest predictor, takes a branch:
        others would be hard to predict.
        """
        values = ir.Constant(kind, None)
        for unit in range(itemsize):
            byte = builder.zext(_load(builder, _at(builder, builder.gep(space, [units]), TILE * unit), _UNIT), kind)
            values = builder.or_(values, builder.shl(byte, _splat(8 * unit, kind)))
        at = [builder.gep(space, [offset]) for offset in (current, previous, above, change)]
        _set_tile(builder, values, space, *at, predictor)

    return decode_tile


def _find_residuals(itemsize: int) -> Any:
    bits = ir.IntType(8 * itemsize)
    kind, row_kind = ir.VectorType(bits, TILE), ir.VectorType(bits, 8)

    def slope(builder: Any, tile: Any, above: Any) -> Any:
        """Return the difference of each value to the one above."""
        first = _shuffle(builder, above, above, [*range(8), *[0] * (TILE - 8)])
        return builder.sub(tile, _shuffle(builder, first, tile, [*range(8), *range(TILE, 2 * TILE - 8)]))

    @_operation(types.void, _MEMORY, _INT, _INT, _INT, _INT, _INT, _INT, _INT)
    def find_residuals(
        builder: Any, space: Any, units: Any, found: Any, current: Any, previous: Any, above: Any, above_before: Any,
        inside: Any,
    ) -> None:  # fmt: skip
        """Set ``units`` to the zigzag codes of a tile's residuals, by predictor and unit; all offsets are in ``space``.

        ``found`` gets a word for each of these units; byte ``i`` has as many low bits set as row ``i`` is wide.
        ``inside`` is a mask of the tile's bytes.
        """
        units, found, current, previous, above, above_before, inside = (
            builder.gep(space, [offset]) for offset in (units, found, current, previous, above, above_before, inside)
        )
        now, before = _load(builder, current, kind), _load(builder, previous, kind)
        slopes = slope(builder, now, _load(builder, above, row_kind))
        slopes_before = slope(builder, before, _load(builder, above_before, row_kind))
        gradient = builder.sub(slopes, _moved(builder, slopes, 1, 8))
        mask = _load(builder, inside, _UNIT)
        residuals = (gradient, builder.sub(now, before), slopes, builder.sub(slopes, slopes_before))
        for predictor, residual in enumerate(residuals):
            sign = builder.ashr(residual, _splat(8 * itemsize - 1, kind))
            codes = builder.xor(builder.shl(residual, _splat(1, kind)), sign)
            for unit in range(itemsize):
                byte = codes
                if itemsize > 1:
                    byte = builder.trunc(builder.lshr(codes, _splat(8 * unit, kind)), _UNIT)
                byte = builder.and_(byte, mask)
                index = predictor * itemsize + unit
                _store(builder, byte, _at(builder, units, TILE * index))
                rows = builder.bitcast(byte, _WORDS)
                for shift in (32, 16, 8):
                    rows = builder.or_(rows, builder.lshr(rows, _splat(shift, _WORDS)))
                low = builder.trunc(rows, _ROW)
                for shift in (1, 2, 4):
                    low = builder.or_(low, builder.lshr(low, _splat(shift, _ROW)))
                _store(builder, low, _at(builder, found, 8 * index))

    return find_residuals


decode_tile_2, decode_tile_4, decode_tile_8 = map(_decode_tile, (2, 4, 8))
find_residuals_1, find_residuals_2, find_residuals_4, find_residuals_8 = map(_find_residuals, (1, 2, 4, 8))


# ---- planes of colours ----


@_operation(types.void, _MEMORY, _MEMORY)
def copy_unit(builder: Any, target: Any, source: Any) -> None:
    """Copy 64 bytes."""
    _store(builder, _load(builder, source, _UNIT), target)


@_operation(types.void, _MEMORY, _MEMORY)
def add_unit(builder: Any, target: Any, source: Any) -> None:
    """Add 64 bytes to 64 others."""
    _store(builder, builder.add(_load(builder, target, _UNIT), _load(builder, source, _UNIT)), target)


@_operation(types.void, _MEMORY, _MEMORY)
def subtract_unit(builder: Any, target: Any, source: Any) -> None:
    """Subtract 64 bytes from 64 others."""
    _store(builder, builder.sub(_load(builder, target, _UNIT), _load(builder, source, _UNIT)), target)


def _split_colours(channels: int) -> Any:
    # the rows' bytes in vectors of 16, of which a shuffle takes two
    rest = 8 * channels - 16

    @_operation(types.void, _MEMORY, _MEMORY, _INT, _INT)
    def split_colours(builder: Any, target: Any, source: Any, tile_step: Any, row_step: Any) -> None:
        """Split eight rows of eight pixels into tiles ``tile_step`` bytes apart, red and blue minus green."""
        for row in range(8):
            left = _load(builder, source, _HALF)
            right = _load(builder, _at(builder, source, 16), ir.VectorType(_BYTE, rest))
            right = _shuffle(builder, right, right, [*range(rest), *[0] * (16 - rest)])
            planes = [_shuffle(builder, left, right, [channels * i + c for i in range(8)]) for c in range(channels)]
            planes[0], planes[2] = builder.sub(planes[0], planes[1]), builder.sub(planes[2], planes[1])
            to = _at(builder, target, 8 * row)
            for plane in planes:
                _store(builder, plane, to)
                to = builder.gep(to, [tile_step])
            source = builder.gep(source, [row_step])

    return split_colours


def _join_colours(channels: int) -> Any:
    @_operation(types.void, _MEMORY, _MEMORY, _INT, _INT)
    def join_colours(builder: Any, target: Any, source: Any, tile_step: Any, row_step: Any) -> None:
        """Undo `_split_colours`."""
        lanes = [i % channels * 8 + i // channels for i in range(8 * channels)]
        for row in range(8):
            at = _at(builder, source, 8 * row)
            planes = []
            for _ in range(channels):
                planes.append(_load(builder, at, _ROW))
                at = builder.gep(at, [tile_step])
            planes[0], planes[2] = builder.add(planes[0], planes[1]), builder.add(planes[2], planes[1])
            left = _shuffle(builder, planes[0], planes[1], list(range(16)))
            right = _shuffle(builder, planes[2], planes[-1], list(range(16)))
            _store(builder, _shuffle(builder, left, right, lanes[:16]), target)
            _store(builder, _shuffle(builder, left, right, lanes[16:]), _at(builder, target, 16))
            target = builder.gep(target, [row_step])

    return join_colours


@_operation(types.void, _MEMORY, _MEMORY, _MEMORY, _INT)
def join_tiles(builder: Any, target: Any, source: Any, added: Any, row_step: Any) -> None:
    """Write eight tiles of bytes as eight rows of 64 bytes, each byte plus that of the tiles at ``added``."""
    rows = []
    for tile in range(8):
        values, more = (_load(builder, _at(builder, start, TILE * tile), _UNIT) for start in (source, added))
        rows.append(builder.bitcast(builder.add(values, more), _WORDS))
    # transpose: exchange single words, then pairs of them, then halves
    for apart in (1, 2, 4):
        # lanes without that bit, of both; then those with it
        lanes = [lane & ~apart | 8 * bool(lane & apart) for lane in range(8)]
        for row in (row for row in range(8) if not row & apart):
            a, b = rows[row], rows[row + apart]
            rows[row] = _shuffle(builder, a, b, lanes)
            rows[row + apart] = _shuffle(builder, a, b, [lane + apart for lane in lanes])
    for row in rows:
        _store(builder, row, target)
        target = builder.gep(target, [row_step])


split_colours_3, split_colours_4 = map(_split_colours, (3, 4))
join_colours_3, join_colours_4 = map(_join_colours, (3, 4))


def _move_values(itemsize: int) -> Any:
    @_operation(types.void, _MEMORY, _MEMORY, _INT, _INT)
    def move_values(builder: Any, target: Any, source: Any, target_step: Any, source_step: Any) -> None:
        """Copy eight values between arrays in which they are so many bytes apart."""
        for _ in range(8):
            _store(builder, _load(builder, source, ir.IntType(8 * itemsize)), target)
            target, source = builder.gep(target, [target_step]), builder.gep(source, [source_step])

    return move_values


move_values_1, move_values_2, move_values_4, move_values_8 = map(_move_values, (1, 2, 4, 8))
