"""The kernel that decodes segments of the ``camera`` format: `kernels.camera.unpack_camera` on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sb3_extra_buffers.kernels.bits_triton import load_word, low_bits, popcount
from sb3_extra_buffers.kernels.camera_groups import CHAIN, CameraGroups, CameraShape

__all__ = ["decode_camera"]

# values that are written at a time
_BLOCK = 2048
_GRADIENT, _BEFORE, _BEFORE_ABOVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(3)


@triton.jit
def _decode_kernel(
    heap_ptr,  # uint8 [byte]
    words_ptr,  # int64, the same memory
    starts_ptr,  # int64 [group]: where the segment starts
    bases_ptr,  # int32 [group]: the frames of a group are 0, base + 1, base + 2, ...
    counts_ptr,  # int32 [group]: how many
    targets_ptr,  # int32 [group, CHAIN]: the row of `out` that each goes to, or -1
    scratch_ptr,  # uint [group, 2, PLANE]
    out_ptr,  # uint [row, value]
    CHAIN: tl.constexpr,
    LENGTH: tl.constexpr,  # bytes of a length in a segment's header
    PER: tl.constexpr,  # a power of two, at least the frames of a segment
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLANAR: tl.constexpr,
    UNITS: tl.constexpr,  # bytes of a value
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,  # a power of two, at least the tiles of a row
    CHANGED: tl.constexpr,  # a power of two, at least the bytes with a bit per tile
    BLOCK: tl.constexpr,
):
    """Decode the frames of a group, each of which refers to the one before it; the grid is ``[group]``.

    Planes are in scratch memory: two frames in turn. A row of tiles is decoded at a time.
    """
    SIZE: tl.constexpr = HEIGHT * WIDTH * CHANNELS * UNITS
    PLANE: tl.constexpr = ROWS * COLUMNS * CHANNELS * 64
    group = tl.program_id(0).to(tl.int64)
    start = tl.load(starts_ptr + group)
    n_frames = tl.load(heap_ptr + start + 1).to(tl.int32)
    i = tl.arange(0, PER)
    lengths = tl.zeros([PER], tl.int32)
    for byte in tl.static_range(LENGTH):
        part = tl.load(heap_ptr + start + 2 + i * LENGTH + byte, mask=i < n_frames, other=0)
        lengths += part.to(tl.int32) << (8 * byte)
    begins = tl.cumsum(lengths, axis=0) - lengths
    base = tl.load(bases_ptr + group)
    for nth in range(tl.load(counts_ptr + group)):
        position = tl.where(nth == 0, 0, base + nth)
        length = tl.sum(tl.where(i == position, lengths, 0), axis=0)
        at = start + 2 + n_frames * LENGTH + tl.sum(tl.where(i == position, begins, 0), axis=0)
        now_ptr = scratch_ptr + (group * 2 + nth % 2) * PLANE
        before_ptr = scratch_ptr + (group * 2 + 1 - nth % 2) * PLANE
        if length == SIZE:
            _split_planes(words_ptr, at, now_ptr, HEIGHT, WIDTH, CHANNELS, PLANAR, UNITS, COLUMNS, BLOCK)
        else:
            _decode_planes(
                heap_ptr, words_ptr, at, now_ptr, before_ptr, CHANNELS, UNITS, COLUMNS, ROWS, TILES, CHANGED, BLOCK
            )
        tl.debug_barrier()
        target = tl.load(targets_ptr + group * CHAIN + nth).to(tl.int64)
        if target >= 0:
            to_ptr = out_ptr + target * (SIZE // UNITS)
            _join_planes(now_ptr, to_ptr, HEIGHT, WIDTH, CHANNELS, PLANAR, UNITS, COLUMNS, BLOCK)


@triton.jit
def _locate(
    i, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PLANAR: tl.constexpr, COLUMNS: tl.constexpr
):
    """The channel of value ``i`` of a frame, and where it is in the planes if its channel were 0."""
    if PLANAR:
        channel, pixel = i // (HEIGHT * WIDTH), i % (HEIGHT * WIDTH)
    else:
        channel, pixel = i % CHANNELS, i // CHANNELS
    y, x = pixel // WIDTH, pixel % WIDTH
    return channel, ((y // 8) * (CHANNELS * COLUMNS) + x // 8) * 64 + (y % 8) * 8 + x % 8


@triton.jit
def _split_planes(
    words_ptr, at, now_ptr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PLANAR: tl.constexpr,
    UNITS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a frame that is stored whole to planes."""
    MIXED: tl.constexpr = (UNITS == 1) & (CHANNELS >= 3) & (CHANNELS <= 4)
    N: tl.constexpr = HEIGHT * WIDTH * CHANNELS
    for first in range(0, N, BLOCK):
        i = first + tl.arange(0, BLOCK)
        channel, to = _locate(i, HEIGHT, WIDTH, CHANNELS, PLANAR, COLUMNS)
        value = load_word(words_ptr, at + i * UNITS, i < N).to(tl.uint32)
        if MIXED:
            is_mixed = (i < N) & (channel % 2 == 0) & (channel < 3)
            green = i + (1 - channel) * (HEIGHT * WIDTH if PLANAR else 1)
            value -= tl.where(is_mixed, load_word(words_ptr, at + green, is_mixed).to(tl.uint32), 0)
        tl.store(now_ptr + to + channel * (COLUMNS * 64), value.to(now_ptr.dtype.element_ty), mask=i < N)


@triton.jit
def _join_planes(
    now_ptr, to_ptr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PLANAR: tl.constexpr,
    UNITS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write planes to a frame."""
    MIXED: tl.constexpr = (UNITS == 1) & (CHANNELS >= 3) & (CHANNELS <= 4)
    N: tl.constexpr = HEIGHT * WIDTH * CHANNELS
    for first in range(0, N, BLOCK):
        i = first + tl.arange(0, BLOCK)
        channel, place = _locate(i, HEIGHT, WIDTH, CHANNELS, PLANAR, COLUMNS)
        value = tl.load(now_ptr + place + channel * (COLUMNS * 64), mask=i < N, other=0).to(tl.uint32)
        if MIXED:
            is_mixed = (i < N) & (channel % 2 == 0) & (channel < 3)
            value += tl.load(now_ptr + place + COLUMNS * 64, mask=is_mixed, other=0).to(tl.uint32)
        tl.store(to_ptr + i, value.to(to_ptr.dtype.element_ty), mask=i < N)


@triton.jit
def _decode_planes(
    heap_ptr, words_ptr, at, now_ptr, before_ptr, CHANNELS: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, CHANGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode a coded frame to planes."""
    N: tl.constexpr = CHANNELS * COLUMNS  # tiles of a row
    reference = tl.load(heap_ptr + at).to(tl.int32)
    headers_at = at + 1 + (ROWS * N + 7) // 8
    offsets_at, rows_at = _find_sections(heap_ptr, at + 1, headers_at, ROWS * N, UNITS, CHANGED, BLOCK)
    tile = tl.arange(0, TILES)
    place = tile[:, None, None] * 64 + tl.arange(0, 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    inside = tl.broadcast_to((tile < N)[:, None, None], [TILES, 8, 8])
    is_last = tl.arange(0, 8)[None, :, None] == 7
    above = tl.zeros([TILES, 8], tl.uint32)
    above_before = tl.zeros([TILES, 8], tl.uint32)
    for row in range(ROWS):
        number = row * N + tile
        changed = (tl.load(heap_ptr + at + 1 + number // 8, mask=tile < N, other=0).to(tl.int32) >> (number % 8)) & 1
        rank = tl.cumsum(changed, axis=0) - changed
        residual, offset_bytes, row_bytes = _read_residuals(
            heap_ptr, words_ptr, headers_at, offsets_at, rows_at, changed, rank, UNITS, TILES
        )
        header = tl.load(heap_ptr + headers_at + rank * UNITS, mask=changed > 0, other=1).to(tl.int32)
        predictor = header & 3  # 1, BEFORE, for tiles that did not change
        headers_at += tl.sum(changed, axis=0) * UNITS
        offsets_at += offset_bytes
        rows_at += row_bytes
        before = tl.load(before_ptr + row * (N * 64) + place, mask=inside, other=0).to(tl.uint32)
        before = tl.where(reference > 0, before, 0)
        kind = predictor[:, None, None]
        residual = tl.where(kind == _GRADIENT, tl.cumsum(residual, axis=2), residual)
        first = above - tl.where(predictor[:, None] == _BEFORE_ABOVE, above_before, 0)
        value = tl.where(kind == _BEFORE, residual, tl.cumsum(residual, axis=1) + first[:, None, :])
        value += tl.where((kind & 1) > 0, before, 0)
        tl.store(now_ptr + row * (N * 64) + place, value.to(now_ptr.dtype.element_ty), mask=inside)
        above = tl.sum(tl.where(is_last, value, 0), axis=1)
        above_before = tl.sum(tl.where(is_last, before, 0), axis=1)


@triton.jit
def _find_sections(
    heap_ptr, changed_at, headers_at, N_TILES: tl.constexpr, UNITS: tl.constexpr, CHANGED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Where offsets and rows begin: after as many headers as tiles changed, and as many bytes as headers say."""
    byte = tl.arange(0, CHANGED)
    masks = tl.load(heap_ptr + changed_at + byte, mask=byte < (N_TILES + 7) // 8, other=0).to(tl.int32)
    n_headers = tl.sum(popcount(masks), axis=0) * UNITS
    n_bytes = tl.zeros([BLOCK], tl.int32)
    for first in range(0, n_headers, BLOCK):
        i = first + tl.arange(0, BLOCK)
        n_bytes += (tl.load(heap_ptr + headers_at + i, mask=i < n_headers, other=0).to(tl.int32) >> 2) & 3
    offsets_at = headers_at + n_headers
    return offsets_at, offsets_at + tl.sum(n_bytes, axis=0)


@triton.jit
def _read_residuals(
    heap_ptr, words_ptr, headers_at, offsets_at, rows_at, changed, rank, UNITS: tl.constexpr, TILES: tl.constexpr
):
    """The residuals ``[tile, 8, 8]`` of a row of tiles, and the bytes of their offsets and rows."""
    offset_bytes = tl.zeros([TILES], tl.int32)
    for unit in tl.static_range(UNITS):
        header = tl.load(heap_ptr + headers_at + rank * UNITS + unit, mask=changed > 0, other=0).to(tl.int32)
        offset_bytes += (header >> 2) & 3
    offset_at = offsets_at + tl.cumsum(offset_bytes, axis=0) - offset_bytes
    row_bytes = tl.zeros([TILES], tl.int32)
    at = offset_at
    for unit in tl.static_range(UNITS):
        header = tl.load(heap_ptr + headers_at + rank * UNITS + unit, mask=changed > 0, other=0).to(tl.int32)
        row_bytes += tl.sum(_row_widths(words_ptr, at, header, changed), axis=1)
        at += (header >> 2) & 3
    row_at = rows_at + tl.cumsum(row_bytes, axis=0) - row_bytes
    code = tl.zeros([TILES, 8, 8], tl.uint32)
    at = offset_at
    column = tl.arange(0, 8)[None, None, :]
    for unit in tl.static_range(UNITS):
        header = tl.load(heap_ptr + headers_at + rank * UNITS + unit, mask=changed > 0, other=0).to(tl.int32)
        widths = _row_widths(words_ptr, at, header, changed)
        begin = row_at[:, None] + tl.cumsum(widths, axis=1) - widths
        word = load_word(words_ptr, begin, widths > 0)[:, :, None]
        width = widths[:, :, None]
        part = (word >> (column * width).to(tl.uint64)) & low_bits(width)
        code |= part.to(tl.uint32) << (8 * unit)
        row_at += tl.sum(widths, axis=1)
        at += (header >> 2) & 3
    residual = tl.where((code & 1) > 0, ~(code >> 1), code >> 1)
    return residual, tl.sum(offset_bytes, axis=0), tl.sum(row_bytes, axis=0)


@triton.jit
def _row_widths(words_ptr, at, header, changed):
    """Bits per value of each of the eight rows of a unit, ``[tile, 8]``; 0 where nothing changed."""
    bits = (header >> 2) & 3
    offsets = load_word(words_ptr, at, (changed > 0) & (bits > 0))[:, None]
    shift = tl.arange(0, 8)[None, :] * bits[:, None]
    offset = (offsets >> shift.to(tl.uint64)).to(tl.int32) & ((1 << bits) - 1)[:, None]
    return tl.where((changed > 0)[:, None], (header >> 4)[:, None] + offset, 0)


def decode_camera(
    heap: torch.Tensor,
    groups: CameraGroups,
    out: torch.Tensor,
    shape: CameraShape,
    per_segment: int,
    length_bytes: int,
) -> None:
    """Decode frames of some segments of ``heap``, which extends 16 bytes past the last one.

    Segments are trusted: they come from a heap that this process has written.

    Args:
        heap: Segments: flags, number of frames, a length of ``length_bytes`` for each, coded or whole frames.
        groups: Which frames are decoded, and which rows of ``out`` they go to.
        out: uint8 ``[row, byte]``; rows that are not in ``groups`` stay as they are.
        shape: Sizes of a frame.
        per_segment: Frames of a segment, at most.
        length_bytes: Bytes of a length.
    """
    n_groups = groups.starts.numel()
    if not n_groups:
        return
    dtype: Any = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[shape.itemsize]
    scratch = torch.empty((n_groups, 2, shape.plane_values), dtype=dtype, device=heap.device)
    tiles = shape.columns * shape.channels
    _decode_kernel[(n_groups,)](
        heap, heap[: heap.numel() // 8 * 8].view(torch.int64), *groups, scratch, out.view(dtype),
        CHAIN, length_bytes, triton.next_power_of_2(per_segment), *shape, shape.columns, shape.rows,
        triton.next_power_of_2(tiles), triton.next_power_of_2(-(-tiles * shape.rows // 8)), _BLOCK,
        num_warps=4 if tiles <= 32 else 8,
    )  # fmt: skip
