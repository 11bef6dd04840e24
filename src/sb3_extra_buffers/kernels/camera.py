"""The ``camera`` format, for images in which most pixels change a little: predicted tiles, bit-packed residuals.

A frame consists of planes, one per channel. In images with three or four channels of bytes, channels 0 and 2 are stored
minus channel 1 (green). A plane is cut into tiles of 8 x 8 values; those at the right and bottom edges may be partial.
Values are unsigned integers of the dtype's size, and all differences are modulo ``2 ** bits``.

Coded frames follow each other. A coded frame has five sections:

====================  ==========================================================================
``reference``         a byte: the frame it refers to (`NO_FRAME`, `FRAME_BEFORE`, `FIRST_FRAME`)
``changed``           one bit per tile: 0 if it equals the same tile of the reference frame
``headers``           one byte per unit of a changed tile: predictor (bits 0 and 1), bits per offset (bits 2
                      and 3), smallest width (bits 4 to 7)
``offsets``           eight offsets per unit, each of 0 to 3 bits
``rows``              eight rows per unit, each of ``smallest width + offset`` bytes
====================  ==========================================================================

Tiles are ordered by their tile row, then by plane, then from left to right. A tile with values of ``n`` bytes has ``n``
units of 8 x 8 bytes: the lowest byte of each residual, then the next one, and so on. The *width* of a row of a unit is
the number of bits stored for each of its eight bytes, at least as many as the largest one needs; such a row takes
``width`` bytes. Bits are numbered from the least significant.

A residual is the difference between a value and its prediction, zigzag-coded (0, -1, 1, -2, ... become 0, 1, 2, 3, ...)
and zero outside of the frame. With ``p`` for the value in the reference frame, ``u`` for the value above and ``l`` for
the one to the left, the predictors are:

====================  ==========================================================================
0 `GRADIENT`          ``u + l - ul``, in a tile's first column ``u``
1 `BEFORE`            ``p``
2 `ABOVE`             ``u``
3 `BEFORE_ABOVE`      ``p + u - pu``
====================  ==========================================================================

Values above the first row, and those of no reference frame, are zero. Nothing refers to the tile on the left, and no
length depends on decoded values, so a row of tiles can be decoded in parallel.

A frame that coding would not make smaller is stored whole. Every second frame refers to the first one of its segment,
the others refer to the frame before: to read one frame, at most three are decoded.

The functions at the end of this file process every byte of a frame; `kernels.camera_numba` replaces them, and compiles
the others as they are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.kernels.frames import get_length
from sb3_extra_buffers.kernels.lz4_block import copy_run
from sb3_extra_buffers.kernels.state import Bytes, Ints

#: first byte of a coded frame
NO_FRAME, FRAME_BEFORE, FIRST_FRAME = 0, 1, 2
#: predictors
GRADIENT, BEFORE, ABOVE, BEFORE_ABOVE = 0, 1, 2, 3
#: bytes past a coded frame that decoding may read
OVERREAD = 64

#: values in a tile
TILE = 64
#: every so many frames, one refers to the first of the segment
STRIDE = 2
#: bytes of zeros at the start of a work space: a tile of the largest values
ZEROS = 8 * TILE
#: bytes after the zeros that belong to single tiles
TILE_SPACE = 4 * 8 * TILE + 4 * 64 + 4 * TILE

_BIT_LENGTHS = np.array([value.bit_length() for value in range(256)], np.uint8)
# the order in which predictors are tried; the first of those with the fewest bytes is used
_ORDER = (BEFORE, ABOVE, BEFORE_ABOVE, GRADIENT)


def frames_to_decode(n_wanted: int, per_segment: int) -> float:
    """How many frames are decoded on average to read ``n_wanted`` consecutive ones."""
    total = 0
    for last in range(per_segment):
        decoded: set[tuple[int, int]] = set()
        for frame in range(last - n_wanted + 1, last + 1):
            segment, position = divmod(frame, per_segment)
            decoded |= {(segment, 0)} | {(segment, at) for at in range(position // STRIDE * STRIDE, position + 1)}
        total += len(decoded)
    return total / per_segment


def camera_geometry(spec: ObsSpec) -> Ints:
    """Return ``[height, width, channels, planar, itemsize]`` of a frame, as the kernels take it."""
    shape, itemsize = spec.shape, spec.dtype.itemsize
    if len(shape) == 3 and itemsize in (1, 2, 4, 8):
        planar = shape[0] < shape[2]
        height, width, channels = (shape[1], shape[2], shape[0]) if planar else shape
        return np.array([height, width, channels, planar, itemsize], np.int64)
    height, width = math.prod(shape[:-1]), shape[-1] if shape else 1
    if itemsize not in (1, 2, 4, 8):
        width, itemsize = width * itemsize, 1
    return np.array([height, width, 1, 0, itemsize], np.int64)


def plane_bytes(geometry: Ints) -> int:
    """Size of a frame's planes in a work space, with partial tiles padded."""
    return int((geometry[0] + 7) // 8 * ((geometry[1] + 7) // 8) * geometry[2] * geometry[4] * TILE)


def camera_work_bytes(size: int, geometry: Ints) -> int:
    """Bytes of work space that `unpack_camera` needs: two frames' planes, and nine rows of pixels."""
    row_bytes = int((geometry[1] + 7) // 8 * 8 * geometry[2] * geometry[4])
    return ZEROS + TILE_SPACE + 2 * plane_bytes(geometry) + 9 * row_bytes


def camera_scratch_bytes(size: int, geometry: Ints) -> int:
    """Bytes of work space that `pack_camera` needs: three frames' planes, and the longest possible sections."""
    planes = plane_bytes(geometry)
    n_units = planes // TILE
    return ZEROS + TILE_SPACE + 4 * planes + 4 * n_units + n_units // 8 + 64


def pack_camera(
    frames: Bytes, frames_at: int, count: int, size: int, geometry: Ints, target: Bytes, target_at: int, lengths: Ints,
    scratch: Bytes,
) -> int:  # fmt: skip
    """Code ``count`` frames of ``size`` bytes at ``target[target_at:]``; return the total length.

    ``lengths`` gets the length of each coded frame; it is never above ``size``.
    """
    planes = plane_bytes(geometry)
    first = ZEROS + TILE_SPACE
    clear(scratch, 0, ZEROS)
    current = previous = 0
    at = target_at
    for i in range(count):
        before = current
        current = first + planes * (0 if i == 0 else 2 - i % 2)
        reference, previous = FRAME_BEFORE, before
        if i == 0:
            reference = NO_FRAME
        elif i % STRIDE == 0:
            reference, previous = FIRST_FRAME, first
        frame = frames_at + i * size
        split_planes(frames, frame, geometry, scratch, current)
        length = encode_planes(scratch, current, previous, first + 3 * planes, geometry, reference, target, at, size)
        if length == size:
            copy_run(target, at, frames, frame, size)
        lengths[i] = length
        at += length
    return at - target_at


def unpack_camera(
    source: Bytes, body_at: int, end: int, table_at: int, width: int, count: int, positions: Ints, targets: Ints,
    n_wanted: int, out: Bytes, geometry: Ints, work: Bytes, streaming: bool = False,
) -> bool:  # fmt: skip
    """Decode ``n_wanted`` frames of a segment, whose coded frames start at ``source[body_at]``; False if it is damaged.

    The table at ``source[table_at]`` has ``count`` lengths of ``width`` bytes each. ``positions`` are those of the
    frames in the segment, in ascending order; frame ``i`` of them is written to ``out[targets[i]:]``. ``source``
    extends `OVERREAD` bytes past ``end``. With ``streaming``, frames are written past the caches.
    """
    size = geometry[0] * geometry[1] * geometry[2] * geometry[4]
    first = ZEROS + TILE_SPACE
    second = first + plane_bytes(geometry)
    has_first = False
    decoded = 0  # position of the frame in the second planes; the first planes are those of frame 0
    clear(work, 0, ZEROS)
    for i in range(n_wanted):
        position = positions[i]
        if position < 0 or position >= count:
            return False
        if i > 0 and position == positions[i - 1]:
            copy_run(out, targets[i], out, targets[i - 1], size)
            continue
        at = body_at
        for j in range(position):
            at += get_length(source, table_at + j * width, width)
        # go back to a frame that has no reference, or whose reference is frame 0 or was just decoded
        start = position
        while needs_frame_before(source, at, end, size, table_at, width, start) and start - 1 != decoded:
            start -= 1
            at -= get_length(source, table_at + start * width, width)
        while start <= position:
            length = get_length(source, table_at + start * width, width)
            if length == 0 or length > size or at + length > end:
                return False
            if not has_first and (start == 0 or (length < size and source[at] != NO_FRAME)):
                stop = body_at + get_length(source, table_at, width)
                out_at = targets[i] if position == 0 else -1
                if stop > end or not decode_frame(
                    source, body_at, stop, size, work, first, 0, geometry, out, out_at, streaming
                ):
                    return False
                has_first = True
            if start > 0:
                previous = first if start == 1 or source[at] == FIRST_FRAME else second
                out_at = targets[i] if start == position else -1
                if not decode_frame(
                    source, at, at + length, size, work, second, previous, geometry, out, out_at, streaming
                ):
                    return False
                decoded = start
            at += length
            start += 1
    return True


def needs_frame_before(source: Bytes, at: int, end: int, size: int, table_at: int, width: int, position: int) -> bool:
    """Whether the coded frame at ``source[at]`` refers to the one before, and that is not the first of the segment."""
    length = get_length(source, table_at + position * width, width)
    return position > 1 and 0 < length < size and at + length <= end and source[at] == FRAME_BEFORE


def decode_frame(
    source: Bytes, at: int, end: int, size: int, work: Bytes, current: int, previous: int, geometry: Ints, out: Bytes,
    out_at: int, streaming: bool,
) -> bool:  # fmt: skip
    """Decode a frame to planes, as `decode_planes` does, or copy it if it is stored whole."""
    if end - at == size:
        if out_at >= 0:
            copy_run(out, out_at, source, at, size)
        split_planes(source, at, geometry, work, current)
        return True
    if at >= end or source[at] > FIRST_FRAME:
        return False
    if source[at] == NO_FRAME:
        previous = 0
    return decode_planes(source, at, end, work, current, previous, geometry, out, out_at, streaming)


# ---- functions that process every byte; `camera_numba` replaces these ----


def clear(work: Bytes, at: int, count: int) -> None:
    work[at : at + count] = 0


def split_planes(frames: Bytes, at: int, geometry: Ints, space: Bytes, planes_at: int) -> None:
    """Write the frame at ``frames[at:]`` to ``space`` as planes, cut into tiles."""
    height, width, channels, planar, itemsize = map(int, geometry)
    size = height * width * channels * itemsize
    values = frames[at : at + size].view(f"u{itemsize}")
    planes = values.reshape(channels, height, width)
    if not planar:
        planes = values.reshape(height, width, channels).transpose(2, 0, 1)
    padded = np.zeros((channels, -(-height // 8) * 8, -(-width // 8) * 8), values.dtype)
    padded[:, :height, :width] = planes
    if _mixes(channels, itemsize):
        padded[0:3:2] -= padded[1]
    tiles = padded.reshape(channels, -1, 8, padded.shape[2] // 8, 8).transpose(1, 0, 3, 2, 4)
    _tiles(space, planes_at, geometry)[...] = tiles


def _join_planes(tiles: npt.NDArray[Any], geometry: Ints, out: Bytes, at: int) -> None:
    """Undo `split_planes`."""
    height, width, channels, planar, itemsize = map(int, geometry)
    planes = tiles.transpose(1, 0, 3, 2, 4).reshape(channels, tiles.shape[0] * 8, tiles.shape[2] * 8)
    planes = planes[:, :height, :width].copy()
    if _mixes(channels, itemsize):
        planes[0:3:2] += planes[1]
    values = planes if planar else planes.transpose(1, 2, 0)
    out[at : at + values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _mixes(channels: int, itemsize: int) -> bool:
    """Whether channels 0 and 2 are stored minus channel 1."""
    return itemsize == 1 and 3 <= channels <= 4


def _tiles(space: Bytes, at: int, geometry: Ints) -> npt.NDArray[Any]:
    """View planes as ``[tile row, channel, tile column, row, column]``; ``at`` 0 stands for zeros."""
    height, width, channels, _, itemsize = map(int, geometry)
    shape = (-(-height // 8), channels, -(-width // 8), 8, 8)
    if at == 0:
        return np.zeros(shape, f"u{itemsize}")
    return space[at : at + math.prod(shape) * itemsize].view(f"u{itemsize}").reshape(shape)


def _above(tiles: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the value above each value, 0 above the first row."""
    above = np.empty_like(tiles)
    above[..., 1:, :] = tiles[..., :-1, :]
    above[0, ..., 0, :] = 0
    above[1:, ..., 0, :] = tiles[:-1, ..., 7, :]
    return above


def encode_planes(
    space: Bytes, current: int, previous: int, sections: int, geometry: Ints, reference: int, target: Bytes, at: int,
    size: int,
) -> int:  # fmt: skip
    """Code the planes at ``space[current]`` against those at ``previous`` (0: zeros); return the length.

    Writes nothing and returns ``size`` if the length would not be below ``size``. The compiled kernel builds the
    sections at ``space[sections]``.
    """
    height, width, _, _, itemsize = map(int, geometry)
    now, before = _tiles(space, current, geometry), _tiles(space, previous, geometry)
    change, slope = now - before, now - _above(now)
    gradient = slope.copy()
    gradient[..., 1:] -= slope[..., :-1]
    by_predictor = {BEFORE: change, ABOVE: slope, BEFORE_ABOVE: change - _above(change), GRADIENT: gradient}
    residuals = np.stack([by_predictor[predictor] for predictor in _ORDER])
    zero = residuals.dtype.type(0)  # with a plain 0, NumPy 1 would make floats of 64-bit integers
    sign = np.where(residuals >> np.array(8 * itemsize - 1, residuals.dtype), ~zero, zero)
    residuals = (residuals << np.array(1, residuals.dtype)) ^ sign
    rows, columns = np.arange(now.shape[0] * 8) < height, np.arange(now.shape[2] * 8) < width
    inside = rows.reshape(-1, 1, 1, 8, 1) & columns.reshape(1, 1, -1, 1, 8)
    # [predictor, tile, unit, row, column]
    units = np.ascontiguousarray(np.where(inside, residuals, 0).astype(residuals.dtype))
    units = units.view(np.uint8).reshape(4, -1, 8, 8, itemsize).transpose(0, 1, 4, 2, 3)
    widths = _BIT_LENGTHS[units.max(axis=4)]
    totals = widths.sum(axis=(2, 3), dtype=np.int64)  # [predictor, tile]
    changed = totals[_ORDER.index(BEFORE)] != 0
    choice = totals.argmin(axis=0)[changed]
    where = np.flatnonzero(changed)
    units, widths = units[choice, where].reshape(-1, 8, 8), widths[choice, where].reshape(-1, 8).astype(np.int64)
    smallest = np.maximum(widths.max(axis=1, initial=0) - np.array([[0], [1], [3], [7]]), 0)  # [bits, unit]
    lengths = np.maximum(widths, smallest[..., None]).sum(axis=2) + np.arange(4)[:, None]
    bits = lengths.argmin(axis=0)
    base = smallest[bits, np.arange(len(bits))]
    widths = np.maximum(widths, base[:, None])
    headers = np.repeat(np.array(_ORDER)[choice], itemsize) | bits << 2 | base << 4
    coded = np.concatenate(
        [
            np.array([reference], np.uint8),
            np.packbits(changed, bitorder="little"),
            headers.astype(np.uint8),
            _pack_bits((widths - base[:, None]).astype(np.uint8), np.repeat(bits, 8).reshape(-1, 8)),
            _pack_bits(units, np.repeat(widths, 8).reshape(-1, 8, 8)),
        ]
    )
    if coded.size >= size:
        return size
    target[at : at + coded.size] = coded
    return coded.size


def _pack_bits(values: Bytes, widths: npt.NDArray[np.int64]) -> Bytes:
    """Return the lowest ``widths`` bits of each value, one after the other."""
    bits = np.unpackbits(values.reshape(-1, 1), axis=1, bitorder="little")
    return np.packbits(bits[np.arange(8) < widths.reshape(-1, 1)], bitorder="little")


def _unpack_bits(packed: Bytes, widths: npt.NDArray[np.int64]) -> Bytes:
    """Undo `_pack_bits`."""
    bits = np.zeros((widths.size, 8), np.uint8)
    bits[np.arange(8) < widths.reshape(-1, 1)] = np.unpackbits(packed, bitorder="little")
    return np.packbits(bits, axis=1, bitorder="little").reshape(widths.shape)


def decode_planes(
    source: Bytes, at: int, end: int, work: Bytes, current: int, previous: int, geometry: Ints, out: Bytes, out_at: int,
    streaming: bool,
) -> bool:  # fmt: skip
    """Decode the frame ``source[at:end]`` to the planes at ``work[current]``; return False if it is damaged.

    The planes at ``previous`` (0: zeros) are those of its reference, and may be the same. Unless ``out_at`` is
    negative, the frame is also written to ``out[out_at:]``.
    """
    before = _tiles(work, previous, geometry).copy()
    parts = _read_sections(source, at, end, geometry)
    if parts is None:
        return False
    predictors, residuals = parts
    now = np.empty_like(before)
    for row in range(len(now)):
        predictor, residual = predictors[row][..., None, None], residuals[row]
        above = now[row - 1, ..., 7, :] if row else np.zeros_like(now[0, ..., 7, :])
        above_before = before[row - 1, ..., 7, :] if row else above
        sums = np.where(predictor == GRADIENT, residual.cumsum(axis=3, dtype=now.dtype), residual)
        first = np.where(predictor[..., 0] == BEFORE_ABOVE, above - above_before, above)
        down = sums.cumsum(axis=2, dtype=now.dtype) + first[..., None, :]
        value = np.where(predictor == BEFORE, sums, down)
        now[row] = value + np.where(predictor & 1, before[row], 0).astype(now.dtype)
    _tiles(work, current, geometry)[...] = now
    if out_at >= 0:
        _join_planes(now, geometry, out, out_at)
    return True


def _read_sections(
    source: Bytes, at: int, end: int, geometry: Ints
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]] | None:
    """Return the predictor and the residuals of each tile of a coded frame; None if it is damaged."""
    itemsize = int(geometry[4])
    shape = _tiles(source, 0, geometry).shape
    n_tiles = math.prod(shape[:3])
    headers_at = at + 1 + (n_tiles + 7) // 8
    if headers_at > end:
        return None
    changed = np.flatnonzero(np.unpackbits(source[at + 1 : headers_at], bitorder="little"))
    if changed.size and changed[-1] >= n_tiles:
        return None
    offsets_at = headers_at + changed.size * itemsize
    headers = source[headers_at:offsets_at].astype(np.int64)
    bits = headers >> 2 & 3
    rows_at = offsets_at + int(bits.sum())
    if rows_at > end:
        return None
    offsets = _unpack_bits(source[offsets_at:rows_at], np.repeat(bits, 8).reshape(-1, 8))
    widths = (headers >> 4)[:, None] + offsets
    if widths.max(initial=0) > 8 or rows_at + int(widths.sum()) != end:
        return None
    units = _unpack_bits(source[rows_at:end], np.repeat(widths, 8).reshape(-1, itemsize, 64)).transpose(0, 2, 1)
    codes = np.ascontiguousarray(units).view(f"u{itemsize}")[..., 0]
    one = codes.dtype.type(1)
    residuals = np.zeros((n_tiles, 64), codes.dtype)
    residuals[changed] = (codes >> one) ^ (codes & one) * ~codes.dtype.type(0)
    predictors = np.full(n_tiles, BEFORE, np.int64)
    predictors[changed] = headers[::itemsize] & 3
    return predictors.reshape(shape[:3]), residuals.reshape(shape)
