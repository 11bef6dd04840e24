"""The byte work of `kernels.camera`, compiled; the rest of it is compiled as it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.kernels import camera as reference
from sb3_extra_buffers.kernels import (
    lz4_numba,  # noqa: F401  # compiles `copy_run`
    writing_numba,  # noqa: F401  # compiles `get_length`
)
from sb3_extra_buffers.kernels.camera import ABOVE, BEFORE, BEFORE_ABOVE, GRADIENT, TILE, ZEROS
from sb3_extra_buffers.kernels.camera_intrinsics import (
    add_unit,
    copy_unit,
    count_in_bytes,
    decode_tile_2,
    decode_tile_4,
    decode_tile_8,
    decode_unit,
    find_residuals_1,
    find_residuals_2,
    find_residuals_4,
    find_residuals_8,
    gather_values,
    join_colours_3,
    join_colours_4,
    join_tiles,
    largest_bytes,
    move_values_1,
    move_values_2,
    move_values_4,
    move_values_8,
    pack_unit,
    split_colours_3,
    split_colours_4,
    spread_widths,
    subtract_unit,
    unpack_unit,
)
from sb3_extra_buffers.kernels.columns_numba import as_column, keep
from sb3_extra_buffers.kernels.compiling import compiled, entry, inner, replaces, use_reference
from sb3_extra_buffers.kernels.delta_numba import _ones_between
from sb3_extra_buffers.kernels.intrinsics import (
    address_of,
    clear_bytes,
    copy_bytes,
    count_ones,
    load_byte,
    load_int,
    load_word,
    lowest_bits,
    store_word,
    stream_bytes,
)

_ONES = np.uint64(0x0101010101010101)
# where single tiles are in a work space: candidates of residuals, their widths, masks of partial tiles
_UNITS_AT = ZEROS
_FOUND_AT = _UNITS_AT + 4 * 8 * TILE
_MASKS_AT = _FOUND_AT + 4 * 64
# what makes the top bit of a byte show that its value is above 8
_ONE_LESS, _TOP_BITS = np.uint64(0x7777777777777777), np.uint64(0x8080808080808080)

replaces(reference.clear)(clear_bytes)


@inner
def _mixes(geometry: Any) -> bool:
    return geometry[4] == 1 and 3 <= geometry[2] <= 4


# ---- planes ----


@replaces(reference.split_planes)
@inner
def split_planes(frames: Any, at: int, geometry: Any, space: Any, planes_at: int) -> None:
    width, channels, itemsize = geometry[1], geometry[2], geometry[4]
    pixel, plane = _steps(geometry)
    across = (width + 7) // 8
    tile_step = across * TILE * itemsize
    for y in range(0, geometry[0], 8):
        n_rows = min(8, geometry[0] - y)
        for x in range(0, width, 8):
            n_columns = min(8, width - x)
            to = planes_at + y // 8 * channels * tile_step + x * 8 * itemsize
            start = at + (y * width + x) * pixel
            row_step = width * pixel
            if _mixes(geometry) and pixel > 1:
                source = frames
                if n_rows < 8 or n_columns < 8:
                    # a whole tile, because `split_colours` takes no other
                    for row in range(n_rows):
                        copy_bytes(
                            space, _UNITS_AT + row * 8 * pixel, frames, start + row * row_step, n_columns * pixel
                        )
                    source, start, row_step = space, _UNITS_AT, 8 * pixel
                if channels == 3:
                    split_colours_3(space, to, source, start, tile_step, row_step)
                else:
                    split_colours_4(space, to, source, start, tile_step, row_step)
                continue
            for channel in range(channels):
                if pixel == 1 and n_rows == 8 and n_columns == 8:
                    move_values_8(space, to + channel * tile_step, frames, start + channel * plane, 8, row_step)
                else:
                    _move_tile(
                        space, to + channel * tile_step, 8 * itemsize, itemsize, frames, start + channel * plane,
                        row_step, pixel, n_rows, n_columns, itemsize,
                    )  # fmt: skip
            if _mixes(geometry):
                subtract_unit(space, to, space, to + tile_step)
                subtract_unit(space, to + 2 * tile_step, space, to + tile_step)


@inner
def _join_row(space: Any, planes_at: int, n_rows: int, geometry: Any, out: Any, at: int, plane: int) -> None:
    """Undo `split_planes` for the row of tiles at ``planes_at``; channels are ``plane`` bytes apart in ``out``."""
    width, channels, itemsize = geometry[1], geometry[2], geometry[4]
    pixel = _steps(geometry)[0]
    across = (width + 7) // 8
    tile_step, row_step = across * TILE * itemsize, width * pixel
    done = 0
    if pixel == 1 and n_rows == 8:
        while done + 64 <= width:
            for channel in range(channels):
                begin = planes_at + done * 8 + channel * tile_step
                # zeros, or green
                added = planes_at + done * 8 + tile_step if _mixes(geometry) and channel % 2 == 0 and channel < 3 else 0
                join_tiles(out, at + done + channel * plane, space, begin, space, added, row_step)
            done += 64
    for x in range(done, width, 8):
        n_columns = min(8, width - x)
        begin = planes_at + x * 8 * itemsize
        start = at + x * pixel
        if _mixes(geometry) and pixel > 1:
            if n_rows == 8 and n_columns == 8:
                if channels == 3:
                    join_colours_3(out, start, space, begin, tile_step, row_step)
                else:
                    join_colours_4(out, start, space, begin, tile_step, row_step)
                continue
            if channels == 3:
                join_colours_3(space, _UNITS_AT, space, begin, tile_step, 8 * pixel)
            else:
                join_colours_4(space, _UNITS_AT, space, begin, tile_step, 8 * pixel)
            for row in range(n_rows):
                copy_bytes(out, start + row * row_step, space, _UNITS_AT + row * 8 * pixel, n_columns * pixel)
            continue
        for channel in range(channels):
            tile = begin + channel * tile_step
            if _mixes(geometry) and (channel == 0 or channel == 2):
                copy_unit(space, _UNITS_AT, space, tile)
                add_unit(space, _UNITS_AT, space, begin + tile_step)
                tile = _UNITS_AT
            if pixel == 1 and n_rows == 8 and n_columns == 8:
                move_values_8(out, start + channel * plane, space, tile, row_step, 8)
            else:
                _move_tile(
                    out, start + channel * plane, row_step, pixel, space, tile, 8 * itemsize, itemsize, n_rows,
                    n_columns, itemsize,
                )  # fmt: skip


@inner
def _write_row(
    work: Any, planes_at: int, y: int, geometry: Any, out: Any, out_at: int, streaming: bool, changes: int
) -> None:
    """Write a row of tiles to the frame at ``out[out_at:]``."""
    pixel, plane = _steps(geometry)
    n_rows = min(8, geometry[0] - y)
    at = out_at + y * geometry[1] * pixel
    n_parts = geometry[2] if geometry[3] else 1
    n_bytes = n_rows * geometry[1] * pixel
    if not streaming or n_bytes % 16 or (n_parts > 1 and plane % 16) or address_of(out, at) % 16:
        _join_row(work, planes_at, n_rows, geometry, out, at, plane)
        return
    # collect whole rows of pixels first: parts of a cache line cannot be written past the caches
    rows = changes + (geometry[1] + 7) // 8 * 8 * geometry[2] * geometry[4]
    _join_row(work, planes_at, n_rows, geometry, work, rows, n_bytes if n_parts > 1 else plane)
    for i in range(n_parts):
        stream_bytes(out, at + i * plane, work, rows + i * n_bytes, n_bytes)


@inner
def _steps(geometry: Any) -> Any:
    """Return how many bytes apart two values of a row are, and two planes."""
    channels, itemsize = geometry[2], geometry[4]
    if geometry[3] or channels == 1:
        return itemsize, geometry[0] * geometry[1] * itemsize
    return channels * itemsize, itemsize


@inner
def _move_tile(
    target: Any, to: int, to_row: int, to_step: int, source: Any, at: int, at_row: int, at_step: int, n_rows: int,
    n_columns: int, itemsize: int,
) -> None:  # fmt: skip
    """Copy a tile between arrays in which rows and values are so many bytes apart."""
    for _ in range(n_rows):
        if n_columns < 8:
            for i in range(n_columns * itemsize):
                step, byte = i // itemsize, i % itemsize
                target[to + step * to_step + byte] = source[at + step * at_step + byte]
        elif to_step == at_step:
            for i in range(0, 8 * itemsize, 8):
                store_word(target, to + i, load_word(source, at + i))
        elif itemsize == 1:
            move_values_1(target, to, source, at, to_step, at_step)
        elif itemsize == 2:
            move_values_2(target, to, source, at, to_step, at_step)
        elif itemsize == 4:
            move_values_4(target, to, source, at, to_step, at_step)
        else:
            move_values_8(target, to, source, at, to_step, at_step)
        to += to_row
        at += at_row


# ---- coding ----


@replaces(reference.encode_planes)
@inner
def encode_planes(
    space: Any, current: int, previous: int, sections: int, geometry: Any, reference: int, target: Any, at: int,
    size: int,
) -> int:  # fmt: skip
    itemsize = geometry[4]
    down, across = (geometry[0] + 7) // 8, (geometry[1] + 7) // 8
    row_bytes, step = across * geometry[2] * TILE * itemsize, TILE * itemsize
    n_tiles = down * across * geometry[2]
    changed = sections
    headers = changed + ((n_tiles + 7) >> 3)
    offsets = headers + n_tiles * itemsize
    rows = offsets + 3 * n_tiles * itemsize + 8
    clear_bytes(space, changed, headers - changed)
    _set_masks(space, geometry[0], geometry[1])
    headers_end, offsets_end, rows_end = headers, offsets, rows
    tile, x = 0, 0
    for y in range(down):
        for _ in range(across * geometry[2]):
            now = current + tile * step
            before = previous + tile * step if previous else 0
            above = now - row_bytes + 7 * 8 * itemsize if y else 0
            above_before = before - row_bytes + 7 * 8 * itemsize if y and previous else 0
            x = x + 1 if x < across else 1
            mask = _MASKS_AT + TILE * ((1 if x == across else 0) + (2 if y == down - 1 else 0))
            _find_residuals(space, now, before, above, above_before, mask, itemsize)
            predictor = _best_predictor(space, itemsize)
            if predictor >= 0:
                space[changed + (tile >> 3)] |= 1 << (tile & 7)
                for unit in range(predictor * itemsize, (predictor + 1) * itemsize):
                    bits, base, widths = _choose_widths(count_in_bytes(load_word(space, _FOUND_AT + 8 * unit)))
                    space[headers_end] = predictor | bits << 2 | base << 4
                    headers_end += 1
                    packed = gather_values(widths - np.uint64(base) * _ONES, np.uint64(bits))
                    store_word(space, offsets_end, packed)
                    offsets_end += bits
                    pack_unit(space, rows_end, space, _UNITS_AT + TILE * unit, widths)
                    rows_end += _sum_bytes(widths)
            tile += 1
    length = 1 + headers_end - changed + offsets_end - offsets + rows_end - rows
    if length >= size:
        return size
    target[at] = reference
    at += 1
    copy_bytes(target, at, space, changed, headers_end - changed)
    at += headers_end - changed
    copy_bytes(target, at, space, offsets, offsets_end - offsets)
    at += offsets_end - offsets
    copy_bytes(target, at, space, rows, rows_end - rows)
    return length


@inner
def _find_residuals(space: Any, now: int, before: int, above: int, above_before: int, mask: int, itemsize: int) -> None:
    if itemsize == 1:
        find_residuals_1(space, 0, _UNITS_AT, _FOUND_AT, now, before, above, above_before, mask)
    elif itemsize == 2:
        find_residuals_2(space, 0, _UNITS_AT, _FOUND_AT, now, before, above, above_before, mask)
    elif itemsize == 4:
        find_residuals_4(space, 0, _UNITS_AT, _FOUND_AT, now, before, above, above_before, mask)
    else:
        find_residuals_8(space, 0, _UNITS_AT, _FOUND_AT, now, before, above, above_before, mask)


@inner
def _best_predictor(space: Any, itemsize: int) -> int:
    """Return the predictor with the narrowest residuals; -1 if the tile equals that of the reference frame."""
    # the total and then the order in which they are tried, in one number: branches would be hard to predict
    best = _total(space, BEFORE, itemsize) << 2
    if best == 0:
        return -1
    best = min(best, _total(space, ABOVE, itemsize) << 2 | 1)
    best = min(best, _total(space, BEFORE_ABOVE, itemsize) << 2 | 2)
    best = min(best, _total(space, GRADIENT, itemsize) << 2 | 3)
    return ((best & 3) + BEFORE) & 3


@inner
def _total(space: Any, predictor: int, itemsize: int) -> int:
    """Return the sum of a tile's widths with a predictor."""
    total = np.uint64(0)
    for unit in range(itemsize):
        total += count_ones(load_word(space, _FOUND_AT + 8 * (predictor * itemsize + unit)))
    return np.int64(total)


@inner
def _choose_widths(widths: Any) -> Any:
    """Return the offsets' number of bits, the smallest width, and each row's width."""
    largest = widths
    for shift in (np.uint64(32), np.uint64(16), np.uint64(8)):
        largest = largest_bytes(largest, largest >> shift)
    top = np.int64(largest & np.uint64(255))
    best = top << 5
    for bits in range(1, 4):
        total = bits + _sum_bytes(largest_bytes(widths, np.uint64(max(top + 1 - (1 << bits), 0)) * _ONES))
        best = min(best, total << 2 | bits)
    bits = best & 3
    base = max(top + 1 - (1 << bits), 0)
    return bits, base, largest_bytes(widths, np.uint64(base) * _ONES)


@inner
def _sum_bytes(word: Any) -> int:
    return np.int64((word * _ONES) >> np.uint64(56))


@inner
def _set_masks(space: Any, height: int, width: int) -> None:
    """Set the masks of tiles: whole, at the right edge, at the bottom edge, and in the corner."""
    n_rows, n_columns = (height - 1) % 8 + 1, (width - 1) % 8 + 1
    for kind in range(4):
        for row in range(8):
            word = ~np.uint64(0)
            if kind & 1:
                word = lowest_bits(word, 8 * n_columns)
            if kind & 2 and row >= n_rows:
                word = np.uint64(0)
            store_word(space, _MASKS_AT + TILE * kind + 8 * row, word)


# ---- decoding ----


@replaces(reference.decode_planes)
@inner
def decode_planes(
    source: Any, at: int, end: int, work: Any, current: int, previous: int, geometry: Any, out: Any, out_at: int,
    streaming: bool,
) -> bool:  # fmt: skip
    channels, itemsize = geometry[2], geometry[4]
    down, across = (geometry[0] + 7) // 8, (geometry[1] + 7) // 8 * channels
    changed = at + 1
    headers = changed + ((down * across + 7) >> 3)
    if headers > end:
        return False
    offsets = headers + _ones_between(source, changed, headers) * itemsize
    if offsets > end:
        return False
    rows = offsets + _offset_bytes(source, headers, offsets)
    if rows > end:
        return False
    headers_end, offsets_end = offsets, rows
    changes = _changes_at(geometry)
    clear_bytes(work, changes, across * 8 * itemsize)
    step = TILE * itemsize if previous else 0
    row_bytes = TILE * itemsize * across
    tile = 0
    for y in range(down):
        above = current + (y - 1) * row_bytes + 7 * 8 * itemsize if y else 0
        above_step = TILE * itemsize if y else 0
        now, before = current + y * row_bytes, previous + y * across * step
        if itemsize == 1:
            headers, offsets, rows = _decode_bytes(
                source, changed, tile, headers, offsets, rows, end, work, now, before, -1 if previous else 0, above,
                -1 if y else 0, changes, across,
            )  # fmt: skip
        else:
            headers, offsets, rows = _decode_values(
                source, changed, tile, headers, offsets, rows, end, work, now, before, step, above, above_step,
                changes, across, itemsize,
            )  # fmt: skip
        if headers > headers_end or offsets > offsets_end or rows > end:
            return False
        tile += across
        if out_at >= 0:
            _write_row(work, current + y * row_bytes, 8 * y, geometry, out, out_at, streaming, changes)
    return headers == headers_end and offsets == offsets_end and rows == end


@inner
def _decode_bytes(
    source: Any, changed: int, first: int, headers: int, offsets: int, rows: int, end: int, work: Any, now: int,
    before: int, has_before: int, above: int, has_above: int, change: int, count: int,
) -> Any:  # fmt: skip
    """Decode a row of ``count`` tiles of bytes; return how far the sections were read, past ``end`` if damaged.

    ``has_before`` and ``has_above`` are -1; or 0, and then ``before`` or ``above`` is zeros for all tiles.
    """
    too_wide = np.uint64(0)
    for i in range(count):
        tile, at = first + i, TILE * i
        if (load_int(source, changed + (tile >> 3)) >> (tile & 7)) & 1:
            header = load_int(source, headers)
            widths = spread_widths(header, load_word(source, offsets))
            ends = widths * _ONES
            start = rows
            rows += np.int64(ends >> np.uint64(56))
            if rows > end:
                return headers, offsets, end + 1
            too_wide |= widths + _ONE_LESS
            decode_unit(
                work, 0, now + at, before + (at & has_before), above + (at & has_above), change + 8 * i, source, start,
                widths, ends, np.uint64(header & 3),
            )  # fmt: skip
            headers += 1
            offsets += (header >> 2) & 3
        else:
            if before != now:
                copy_unit(work, now + at, work, before + (at & has_before))
            store_word(work, change + 8 * i, np.uint64(0))
    return headers, offsets, rows if not too_wide & _TOP_BITS else end + 1


@inner
def _decode_values(
    source: Any, changed: int, first: int, headers: int, offsets: int, rows: int, end: int, work: Any, now: int,
    before: int, step: int, above: int, above_step: int, change: int, count: int, itemsize: int,
) -> Any:  # fmt: skip
    """`_decode_bytes` for values of several bytes."""
    too_wide = np.uint64(0)
    for tile in range(first, first + count):
        if (load_int(source, changed + (tile >> 3)) >> (tile & 7)) & 1:
            predictor = load_byte(source, headers) & np.uint64(3)
            for unit in range(itemsize):
                header = load_int(source, headers)
                widths = spread_widths(header, load_word(source, offsets))
                ends = widths * _ONES
                start = rows
                rows += np.int64(ends >> np.uint64(56))
                if rows > end:
                    return headers, offsets, end + 1
                too_wide |= widths + _ONE_LESS
                unpack_unit(work, _UNITS_AT + TILE * unit, source, start, widths, ends)
                headers += 1
                offsets += (header >> 2) & 3
            if itemsize == 2:
                decode_tile_2(work, 0, now, before, above, change, _UNITS_AT, predictor)
            elif itemsize == 4:
                decode_tile_4(work, 0, now, before, above, change, _UNITS_AT, predictor)
            else:
                decode_tile_8(work, 0, now, before, above, change, _UNITS_AT, predictor)
        else:
            if before != now:
                copy_bytes(work, now, work, before, TILE * itemsize)
            clear_bytes(work, change, 8 * itemsize)
        now += TILE * itemsize
        before += step
        above += above_step
        change += 8 * itemsize
    return headers, offsets, rows if not too_wide & _TOP_BITS else end + 1


@inner
def _changes_at(geometry: Any) -> int:
    """Where a work space has the changes of the last row of the tiles above."""
    return _first_planes + 2 * plane_bytes(geometry)


@inner
def _offset_bytes(source: Any, begin: int, end: int) -> int:
    """Return the total length of the offsets that headers announce."""
    total = np.uint64(0)
    while begin < end:
        word = lowest_bits(load_word(source, begin), 8 * (end - begin))
        total += (((word >> np.uint64(2)) & np.uint64(0x0303030303030303)) * _ONES) >> np.uint64(56)
        begin += 8
    return np.int64(total)


use_reference(reference)
plane_bytes = compiled(reference.plane_bytes)
_first_planes = ZEROS + reference.TILE_SPACE
pack_camera, unpack_camera = compiled(reference.pack_camera), compiled(reference.unpack_camera)
camera_work_bytes, camera_scratch_bytes = (
    compiled(reference.camera_work_bytes),
    compiled(reference.camera_scratch_bytes),
)


@entry
def pack_segment(frames: Any, count: int, size: int, geometry: Any, target: Any, lengths: Any) -> int:
    """Encode the concatenated ``frames``; return the total length."""
    shape = as_column(geometry)
    scratch = np.empty(camera_scratch_bytes(size, shape), np.uint8)
    total = pack_camera(
        as_column(frames), 0, count, size, shape, as_column(target), 0, as_column(lengths), as_column(scratch)
    )
    return keep(scratch, total)


@entry
def unpack_segment(
    source: Any, body_at: int, end: int, table_at: int, width: int, count: int, positions: Any, targets: Any, out: Any,
    geometry: Any, streaming: bool,
) -> bool:  # fmt: skip
    """Decode the frames at ``positions`` of a segment; False if it is damaged."""
    shape = as_column(geometry)
    work = np.empty(camera_work_bytes(0, shape), np.uint8)
    good = unpack_camera(
        as_column(source), body_at, end, table_at, width, count, as_column(positions), as_column(targets),
        len(positions), as_column(out), shape, as_column(work), streaming,
    )  # fmt: skip
    return keep(work, good)
