"""Compiled decoding of segments; `kernels.reading` defines the result."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sb3_extra_buffers.codecs.delta import BLOCK
from sb3_extra_buffers.codecs.zstd_loop import call_words
from sb3_extra_buffers.kernels import (
    frames,
    lz4_block,
    writing_numba,  # noqa: F401  # compiles the functions of `frames`
)
from sb3_extra_buffers.kernels.columns_numba import flat, int64_part, part, stack_int64
from sb3_extra_buffers.kernels.compiling import compiled, inner
from sb3_extra_buffers.kernels.delta_numba import apply
from sb3_extra_buffers.kernels.intrinsics import (
    BLOCK_PIXELS,
    HAS_SHUFFLES,
    address_of,
    clear_bytes,
    copy_bytes,
    copy_line,
    join_block,
    load_word,
    prefetch,
    split_block,
    store_word,
    stream_bytes,
)
from sb3_extra_buffers.kernels.lz4_block import OVERRUN
from sb3_extra_buffers.kernels.state import PACKED_LZ4, PACKED_ZSTD
from sb3_extra_buffers.kernels.tables_numba import expand_row

get_length = compiled(frames.get_length)
unpack_block = compiled(lz4_block.unpack_block)

_COLOUR = np.uint64(0xFFFFFF)
_BITS_8, _BITS_16, _BITS_24, _BITS_48 = np.uint64(8), np.uint64(16), np.uint64(24), np.uint64(48)

# size from which on a batch is written past the caches, because they could not hold it anyway
_STREAMING_BYTES = 8 << 20
# size from which on four frames of bytes are interleaved past the caches, and how many bytes at a time: while memory
# that was used before is still in the last cache, that is slower
_STREAMING_FOURS, _FOURS = 24 << 20, 4096


class Expansion(NamedTuple):
    """How to expand frames of indices, see `expand_row`; and work space for a row's indices."""

    table: Any
    shades: Any
    unit: int
    plane: int
    indices: Any
    offsets: Any  # of the row's frames in ``indices``


# for how many frames to load segments into the caches before decoding them, and the most bytes of each segment
_FRAMES_AHEAD, _BYTES_AHEAD = 64, 1024


@inner
def _block_bytes(size: int) -> int:
    """A frame's length, padded so that every position that a difference can encode is inside."""
    return (size + BLOCK - 1) // BLOCK * BLOCK


@inner
def work_bytes(state: Any, frame_ids: Any, sets: Any) -> int:
    """Bytes of work space that `read_rows` needs."""
    block, n_frames = _block_bytes(state.config.frame_bytes), sets.shape[0] * frame_ids.shape[1]
    return (
        64 + 2 * block + BLOCK + block // 2 + block // 16 + 64 + 16 * n_frames + 8 * sets.shape[0]
        + state.config.per_segment * state.config.frame_bytes + OVERRUN
        + joined_bytes(state, frame_ids, sets)
    )  # fmt: skip


@inner
def joined_bytes(state: Any, frame_ids: Any, sets: Any) -> int:
    """Bytes of work space for the frames of a row that `join_row` interleaves; 0 if the batch holds whole frames."""
    if state.config.pixel_bytes == 0 or frame_ids.shape[1] == 1:
        return 0
    return sets.shape[0] * frame_ids.shape[1] * state.config.frame_bytes + 8


@inner
def read_rows(
    state: Any, frame_ids: Any, sets: Any, out: Any, first: int, stop: int, space: Any, zstd: Any, by_row: bool,
    expansion: Any,
) -> Any:  # fmt: skip
    """Decode rows ``first`` to ``stop``, each segment of a row once; return -1, or the number of a damaged segment.

    ``zstd`` holds the addresses that `inflate_zstd` needs. With ``by_row``, the observations of a row are contiguous.
    ``expansion`` is None, or an `Expansion` by which to expand frames while they are in the cache.

    One function for the whole loop: a helper that takes the state would cost reads 3 to 5 %.
    """
    size, per_segment, width = state.config.frame_bytes, state.config.per_segment, state.config.length_bytes
    n_frames = sets.shape[0] * frame_ids.shape[1]
    block = _block_bytes(size)
    at = -address_of(space, 0) % 64  # lines of frames are faster to load and store where they are aligned
    frame = part(space, at, block)  # the frame that is being decoded
    at += block
    values = part(space, at, block + BLOCK)
    at += block + BLOCK
    words = part(space, at, block // 2 + 32)  # int32
    at += block // 2 + 32
    lines = part(space, at, block // 16 + 32)  # int32
    at += block // 16 + 32
    ids = int64_part(space, at, n_frames)
    at += 8 * n_frames
    targets = int64_part(space, at, n_frames)  # offsets in target
    at += 8 * n_frames
    joined = int64_part(space, at, sets.shape[0])  # where the frames of each observation are in target
    at += 8 * sets.shape[0]
    unpacked = part(space, at, per_segment * size + OVERRUN)  # differences of a compressed segment
    at += per_segment * size + OVERRUN
    n_joined = joined_bytes(state, frame_ids, sets)
    target = part(space, at, n_joined) if n_joined else flat(out)
    streaming = n_joined == 0 and is_streaming(batch_bytes(state, frame_ids, sets, expansion), size, out)
    ahead = rows_ahead(n_frames)
    for row in range(first, stop):
        if (row - first) % ahead == 0:
            prefetch_segments(state, frame_ids, sets, row, min(row + ahead, stop))
        n_frames = list_row(frame_ids, sets, row, size, n_joined > 0, by_row, ids, targets, joined)
        i = 0
        if ids[0] < 0:
            clear_bytes(frame, 0, size)
        while i < n_frames and ids[i] < 0:
            put_frame(target, targets[i], frame, 0, size, streaming, n_joined > 0, expansion)
            i += 1
        while i < n_frames:
            segment = ids[i] // per_segment
            begin = segment * per_segment  # compared with below: divisions are slow
            start = state.starts[segment]
            if start < 0:
                source, start = state.stage, -1 - start
                end = start + state.stage_ends[start // state.config.stage_bytes]
                at = start + 2 + per_segment * width
            else:
                source = state.heap
                end = start + state.lengths[segment]
                at = start + 2 + np.int64(source[start + 1]) * width
            count = np.int64(source[start + 1])
            if at > end:
                return segment
            body = source
            if source[start] == PACKED_LZ4:
                last = i
                while last + 1 < n_frames and ids[last + 1] < begin + per_segment:
                    last += 1
                end = _unpack(source, start + 2, at, end, count, ids[last] - begin, width, unpacked)
                body, at = unpacked, 0
            elif source[start] == PACKED_ZSTD:
                end = _unpack_zstd(source, start + 2, at, end, count, width, unpacked, zstd)
                body, at = unpacked, 0
            if source[start] > PACKED_LZ4 or end < 0:
                return segment
            keyframe = state.keyframes[segment]
            if keyframe >= 0:
                copy_frame(frame, 0, state.keyframe_rows, keyframe * state.config.keyframe_bytes, size)
            else:
                clear_bytes(frame, 0, size)
            position = 0
            while i < n_frames and ids[i] < begin + per_segment:
                wanted = ids[i] - begin
                if wanted >= count:
                    return segment
                while position <= wanted:
                    length = get_length(source, start + 2 + position * width, width)
                    if length > size or at + length > end:
                        return segment
                    if length == size:
                        copy_frame(frame, 0, body, at, size)
                    elif length > 0 and not apply(body, at, at + length, frame, size, words, lines, values):
                        return segment
                    at += length
                    position += 1
                put_frame(target, targets[i], frame, 0, size, streaming, n_joined > 0, expansion)
                i += 1
        if n_joined:
            join_row(state, frame_ids, sets, row, by_row, joined, target, out, expansion)
    return -1


@inner
def batch_bytes(state: Any, frame_ids: Any, sets: Any, expansion: Any) -> int:
    """Bytes of all observations of ``sets``."""
    n_units = sets.shape[0] * sets.shape[1] * frame_ids.shape[1] * state.config.frame_bytes
    if expansion is None:
        return n_units
    return n_units * expansion.unit


@inner
def put_frame(
    target: Any, to: int, source: Any, at: int, size: int, streaming: bool, is_work: bool, expansion: Any
) -> None:
    """Write a decoded frame to the batch, or as it is to the work space of `join_row`."""
    if expansion is None:
        if streaming:
            stream_bytes(target, to, source, at, size)
        else:
            copy_frame(target, to, source, at, size)
    elif is_work:
        copy_frame(target, to, source, at, size)
    else:
        expand_frame(source, at, size, target, to, streaming, expansion)


@inner
def expand_frame(source: Any, at: int, size: int, target: Any, to: int, streaming: bool, expansion: Any) -> None:
    """Expand ``size`` indices; ``to`` counts those before them in the batch."""
    unit, plane = expansion.unit, expansion.plane
    expand_row(source, at, size, expansion.table, expansion.shades, unit, plane, target, to * unit, streaming)


@inner
def rows_ahead(n_frames: int) -> int:
    """For how many rows of ``n_frames`` to call `prefetch_segments` at once."""
    return max(_FRAMES_AHEAD // n_frames, 1)


@inner
def prefetch_segments(state: Any, frame_ids: Any, sets: Any, first: int, stop: int) -> None:
    """Load the segments of rows ``first`` to ``stop`` into the caches, all at once.

    A frame is found through three tables, each of which says where to look in the next. Decoding alone would wait for
    memory at each of them, segment by segment.
    """
    for row in range(first, stop):
        for number in range(sets.shape[0]):
            prefetch(frame_ids, 4 * frame_ids.shape[1] * sets[number, row])
    _prefetch_step(state, frame_ids, sets, first, stop, True)
    _prefetch_step(state, frame_ids, sets, first, stop, False)


@inner
def _prefetch_step(state: Any, frame_ids: Any, sets: Any, first: int, stop: int, tables: bool) -> None:
    """Load the entries of segments in the ``tables``; or, where these entries say, their bytes and keyframes."""
    stack, per_segment, keyframe_bytes = frame_ids.shape[1], state.config.per_segment, state.config.keyframe_bytes
    begin = -per_segment
    for row in range(first, stop):
        for number in range(sets.shape[0]):
            for j in range(0, stack, max(stack - 1, 1)):  # the oldest and the newest frame
                frame_id = np.int64(frame_ids[sets[number, row], j]) - 1
                if frame_id < 0 or begin <= frame_id < begin + per_segment:
                    continue
                segment = frame_id // per_segment
                begin = segment * per_segment
                if tables:
                    prefetch(state.starts, 8 * segment)
                    prefetch(state.lengths, 4 * segment)
                    prefetch(state.keyframes, 4 * segment)
                elif state.starts[segment] >= 0:
                    for offset in range(0, min(np.int64(state.lengths[segment]), _BYTES_AHEAD), 64):
                        prefetch(state.heap, state.starts[segment] + offset)
                    if state.keyframes[segment] >= 0:
                        prefetch(state.keyframe_rows, state.keyframes[segment] * keyframe_bytes)


@inner
def copy_frame(target: Any, to: int, source: Any, at: int, size: int) -> None:
    """`copy_bytes` in lines with aligned targets, which is faster than C's ``memcpy`` for some kilobytes."""
    last = size - 64
    if last < 64:
        copy_bytes(target, to, source, at, size)
        return
    copy_line(target, to, source, at)
    offset = 64 - address_of(target, to) % 64
    while offset + 192 < last:
        copy_line(target, to + offset, source, at + offset)
        copy_line(target, to + offset + 64, source, at + offset + 64)
        copy_line(target, to + offset + 128, source, at + offset + 128)
        copy_line(target, to + offset + 192, source, at + offset + 192)
        offset += 256
    while offset < last:
        copy_line(target, to + offset, source, at + offset)
        offset += 64
    copy_line(target, to + last, source, at + last)


@inner
def is_streaming(n_bytes: int, size: int, out: Any) -> bool:
    """Whether to write a batch of ``n_bytes`` with non-temporal stores, past the caches."""
    return n_bytes >= _STREAMING_BYTES and size % 16 == 0 and address_of(out, 0) % 16 == 0


@inner
def output_row(sets: Any, number: int, row: int, by_row: bool) -> int:
    """Where in the output the observation ``sets[number, row]`` is, counted in observations."""
    if by_row:
        return row * sets.shape[0] + number
    return number * sets.shape[1] + row


@inner
def join_row(
    state: Any, frame_ids: Any, sets: Any, row: int, by_row: bool, joined: Any, frames: Any, out: Any, expansion: Any
) -> None:
    """Interleave the decoded frames of a row's observations, which are stacked along their last axis."""
    stack, unit, size = frame_ids.shape[1], state.config.pixel_bytes, state.config.frame_bytes
    n_bytes = batch_bytes(state, frame_ids, sets, expansion)
    streaming = n_bytes >= _STREAMING_BYTES
    fours = n_bytes >= _STREAMING_FOURS and unit == 1 and stack == 4 and size % 4 == 0 and address_of(out, 0) % 16 == 0
    for number in range(sets.shape[0]):
        to = output_row(sets, number, row, by_row) * stack * size
        if expansion is not None:
            join_frames(frames, joined[number], size, unit, stack, expansion.indices, 0, False)
            expand_frame(expansion.indices, 0, stack * size, out, to, streaming, expansion)
        elif fours:
            _stream_fours(frames, joined[number], size, out, to)
        else:
            join_frames(frames, joined[number], size, unit, stack, out, to, streaming)


@inner
def _stream_fours(frames: Any, at: int, size: int, out: Any, to: int) -> None:
    """`join_frames` of four frames of bytes, past the caches."""
    fours = part(stack_int64(_FOURS // 8), 0, _FOURS)
    for first in range(0, size, _FOURS // 4):
        count = min(_FOURS // 4, size - first)
        for pixel in range(count):
            here = at + first + pixel
            fours[4 * pixel] = frames[here]
            fours[4 * pixel + 1] = frames[here + size]
            fours[4 * pixel + 2] = frames[here + 2 * size]
            fours[4 * pixel + 3] = frames[here + 3 * size]
        stream_bytes(out, to + 4 * first, fours, 0, 4 * count)


@inner
def _has_blocks(size: int, unit: int, stack: int) -> bool:
    """Whether to use `join_block` and `split_block`: a frame has at least one block, and shuffles are fastest."""
    return HAS_SHUFFLES and size >= BLOCK_PIXELS * unit and 1 < stack < 5 and (unit == 3 or (unit == 1 and stack < 4))


@inner
def join_frames(source: Any, at: int, size: int, unit: int, stack: int, target: Any, to: int, streaming: bool) -> None:
    """Interleave the ``stack`` frames of ``size`` bytes at ``source[at:]``; with ``streaming``, past the caches."""
    if unit == 1 and stack == 4:
        # spelled out so that the compiler vectorises it, with faster instructions than shuffles
        for pixel in range(size):
            target[to + 4 * pixel] = source[at + pixel]
            target[to + 4 * pixel + 1] = source[at + size + pixel]
            target[to + 4 * pixel + 2] = source[at + 2 * size + pixel]
            target[to + 4 * pixel + 3] = source[at + 3 * size + pixel]
    elif _has_blocks(size, unit, stack):
        _join_blocks(source, at, size, unit, stack, target, to, streaming)
    else:
        _join_words(source, at, size, unit, stack, target, to)


@inner
def _join_blocks(source: Any, at: int, size: int, unit: int, stack: int, target: Any, to: int, streaming: bool) -> None:
    """Interleave blocks of pixels; the last one ends with the frames and overlaps the one before."""
    width = unit * stack
    last = size // unit - BLOCK_PIXELS
    # the second block starts where the lines of the target are aligned, if there is such a pixel
    following = 0
    while following < BLOCK_PIXELS and address_of(target, to + following * width) % BLOCK_PIXELS:
        following += 1
    if following == 0:
        following = BLOCK_PIXELS
    pixel = 0
    while True:
        pixel_to = to + pixel * width
        aligned = streaming and address_of(target, pixel_to) % BLOCK_PIXELS == 0
        join_block(target, pixel_to, source, at + pixel * unit, size, unit, stack, np.int64(aligned))
        if pixel == last:
            break
        pixel = min(following, last)
        following += BLOCK_PIXELS


@inner
def _join_words(source: Any, at: int, size: int, unit: int, stack: int, target: Any, to: int) -> None:
    """Interleave whole words, each of which overwrites the excess bytes of the one before, and bytes at the end."""
    pixels = size // unit
    n_fast = max(pixels - 8 // unit - 1, 0) if unit <= 8 else 0
    if unit == 3 and stack <= 4:
        _join_colours(source, at, size, stack, target, to, n_fast)
        to += 3 * stack * n_fast
    else:
        for pixel in range(n_fast):
            for j in range(stack):
                store_word(target, to, load_word(source, at + j * size + pixel * unit))
                to += unit
    for pixel in range(n_fast, pixels):
        for j in range(stack):
            for byte in range(unit):
                target[to] = source[at + j * size + pixel * unit + byte]
                to += 1


@inner
def _join_colours(source: Any, at: int, size: int, stack: int, target: Any, to: int, n_pixels: int) -> None:
    """Interleave pixels of two to four frames of three channels; reads and writes up to seven bytes more."""
    for pixel in range(n_pixels):
        here = at + 3 * pixel
        word = load_word(source, here) & _COLOUR | (load_word(source, here + size) & _COLOUR) << _BITS_24
        if stack > 2:
            third = load_word(source, here + 2 * size) & _COLOUR
            word |= third << _BITS_48
            third >>= _BITS_16
            if stack > 3:
                third |= load_word(source, here + 3 * size) << _BITS_8
            store_word(target, to, word)
            store_word(target, to + 8, third)
        else:
            store_word(target, to, word)
        to += 3 * stack


@inner
def split_frames(source: Any, at: int, size: int, unit: int, stack: int, target: Any, to: int) -> None:
    """Undo `join_frames`."""
    pixels, width = size // unit, unit * stack
    if unit == 1 and stack == 4:
        # spelled out so that the compiler vectorises it
        for pixel in range(pixels):
            target[to + pixel] = source[at + 4 * pixel]
            target[to + size + pixel] = source[at + 4 * pixel + 1]
            target[to + 2 * size + pixel] = source[at + 4 * pixel + 2]
            target[to + 3 * size + pixel] = source[at + 4 * pixel + 3]
    elif _has_blocks(size, unit, stack):
        pixel, last = 0, pixels - BLOCK_PIXELS
        while True:
            split_block(target, to + pixel * unit, source, at + pixel * width, size, unit, stack)
            if pixel == last:
                break
            pixel = min(pixel + BLOCK_PIXELS, last)
    else:
        # whole words, each of which overwrites the excess bytes of the one before; bytes at the end of a frame
        n_fast = max(pixels - 8 // unit - 1, 0) if unit <= 8 else 0
        for j in range(stack):
            for pixel in range(n_fast):
                store_word(target, to + j * size + pixel * unit, load_word(source, at + (pixel * stack + j) * unit))
            for pixel in range(n_fast, pixels):
                for byte in range(unit):
                    target[to + j * size + pixel * unit + byte] = source[at + (pixel * stack + j) * unit + byte]


@inner
def list_row(
    frame_ids: Any, sets: Any, row: int, size: int, has_joined: bool, by_row: bool, ids: Any, targets: Any, joined: Any
) -> int:
    """List a row's frames and their targets, ordered by id: frames of a segment come together and in order.

    Targets are offsets in the batch. If observations are joined, they are offsets in the work space of `join_row`,
    where ``joined`` says where the frames of each observation begin; an observation that repeats all frames of the one
    before it but the oldest has only its newest frame listed. Returns the number of frames listed.
    """
    stack, count = frame_ids.shape[1], 0
    first, apart = output_row(sets, 0, row, by_row), 1 if by_row else sets.shape[1]
    at = 0
    for number in range(sets.shape[0]):
        index, begin = sets[number, row], 0
        if has_joined:
            if number > 0 and _follows(frame_ids, sets[number - 1, row], index):
                begin, at = stack - 1, at + size
            elif number > 0:
                at += stack * size
            joined[number] = at
            base = at
        else:
            base = (number * apart + first) * stack * size
        for j in range(begin, stack):
            frame_id = np.int64(frame_ids[index, j]) - 1
            k = count
            while k > 0 and ids[k - 1] > frame_id:
                ids[k] = ids[k - 1]
                targets[k] = targets[k - 1]
                k -= 1
            ids[k] = frame_id
            targets[k] = base + j * size
            count += 1
    return count


@inner
def _follows(frame_ids: Any, before: int, index: int) -> bool:
    """Whether an observation's frames are those of the observation ``before`` moved on by one."""
    j, last = 0, frame_ids.shape[1] - 1
    while j < last and frame_ids[index, j] == frame_ids[before, j + 1]:
        j += 1
    return j == last


@inner
def _unpack(source: Any, table: int, at: int, end: int, count: Any, last: int, width: int, unpacked: Any) -> int:
    """Decompress the frames of a segment up to frame ``last``; return their total length, or -1 if it is damaged."""
    total = needed = 0
    for i in range(count):
        total += get_length(source, table + i * width, width)
        if i <= last:
            needed = total
    if total + OVERRUN > len(unpacked) or not unpack_block(source, at, end, unpacked, total, needed):
        return -1
    return needed


@inner
def _unpack_zstd(source: Any, table: int, at: int, end: int, count: Any, width: int, unpacked: Any, zstd: Any) -> int:
    """`_unpack` for a segment that was compressed with zstd, which is always decompressed as a whole."""
    total = 0
    for i in range(count):
        total += get_length(source, table + i * width, width)
    if total + OVERRUN > len(unpacked) or not inflate_zstd(source, at, end, unpacked, total, zstd, source, 0, 0):
        return -1
    return total


@inner
def inflate_zstd(
    source: Any, at: int, end: int, target: Any, size: int, zstd: Any, dictionary: Any, dictionary_at: int,
    dictionary_bytes: int,
) -> bool:  # fmt: skip
    """Decompress ``source[at:end]`` with zstd's C function, to exactly ``size`` bytes; return False if that fails.

    ``zstd`` holds the addresses of ``ZSTD_decompress_usingDict`` and of a context; empty if zstd cannot be called.
    """
    if len(zstd) < 2:
        return False
    arguments = (
        zstd[1], address_of(target, 0), size, address_of(source, at), end - at, address_of(dictionary, dictionary_at),
        dictionary_bytes,
    )  # fmt: skip
    return call_words(zstd[0], arguments) == size
