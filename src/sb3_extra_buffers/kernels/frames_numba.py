"""The frame store's kernels compiled: `write_frames` as it is, the byte work rewritten for speed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.experimental import structref
from numba.extending import overload, register_jitable

from sb3_extra_buffers.codecs.delta import BLOCK
from sb3_extra_buffers.errors import OutOfMemoryError
from sb3_extra_buffers.kernels import frames as plain
from sb3_extra_buffers.kernels import lz4_block
from sb3_extra_buffers.kernels.delta_numba import apply, encode
from sb3_extra_buffers.kernels.intrinsics import (
    address_of,
    copy_bytes,
    equal_bytes,
    load_byte,
    load_word,
    low_zeros,
    store_word,
    stream_bytes,
)
from sb3_extra_buffers.kernels.state import PACKED_LZ4, FrameState, keyframe_bytes

# not parallel=True: numba's default thread layer aborts when two threads enter it at once
# What others call is compiled into them: a cache entry of its own would outlive changes to what it calls. And what has
# one should meet one signature (`as_contiguous`): two processes that cache two at
# once can leave one under the name of the other.
_INNER: dict[str, Any] = {"nogil": True}
_OPTIONS: dict[str, Any] = {**_INNER, "cache": True}

# bytes of a batch from which on it is written past the caches
_STREAMED = 8 << 20
# for each number of bytes below eight: a mask of them, a factor that repeats them in a word, a multiple that fills one
_LOWEST = np.array([(1 << 8 * n) - 1 for n in range(8)], np.uint64)
_REPEATED = np.array([0] + [sum(1 << 8 * i for i in range(0, 8, n)) for n in range(1, 8)], np.uint64)
_BACK = np.array([0] + [-(-8 // n) * n for n in range(1, 8)], np.int64)


@structref.register
class _TablesType(types.StructRef):  # type: ignore[misc]  # numba has no types
    pass


class Tables(structref.StructRefProxy):  # type: ignore[misc]  # numba has no types
    """`FrameState` as one argument: numba takes 0.4 us to look at each array it is passed."""

    def __new__(cls, *columns: Any) -> Any:
        return structref.StructRefProxy.__new__(cls, *columns)


structref.define_proxy(Tables, _TablesType, FrameState._fields)


def bind_state(state: FrameState) -> Any:
    """What the compiled kernels take for ``state``; it keeps the same arrays alive."""
    try:
        return Tables(*state)
    except TypeError as problem:
        # what numba makes of an allocation that failed in it
        raise OutOfMemoryError(f"there is no memory for the tables of compiled kernels: {problem}") from problem


for _function in (
    plain.drop_frame,
    plain.is_full,
    plain.is_frame,
    plain.encode_against,
    plain.encode_first,
    plain.get_length,
    plain.seal_segment,
    keyframe_bytes,
    plain.set_length,
):
    register_jitable(**_INNER)(_function)


@overload(plain.is_same, jit_options=_INNER)
def _is_same(frames: Any, row: Any, j: Any, recent: Any, stream: Any, place: Any) -> Any:
    def run(frames: Any, row: Any, j: Any, recent: Any, stream: Any, place: Any) -> bool:
        _, stack, size = frames.shape
        return equal_bytes(
            frames, (row * stack + j) * size, recent, (stream * recent.shape[1] + place) * recent.shape[2], size
        )

    return run


@overload(plain.is_zero, jit_options=_INNER)
def _is_zero(frames: Any, row: Any, j: Any) -> Any:
    def run(frames: Any, row: Any, j: Any) -> bool:
        _, stack, size = frames.shape
        start = (row * stack + j) * size
        done = 0
        while size - done >= 8:
            if load_word(frames, start + done):
                return False
            done += 8
        for i in range(done, size):  # noqa: SIM110  # numba compiles no generator
            if frames[row, j, i]:
                return False
        return True

    return run


@overload(plain.put_frame, jit_options=_INNER)
def _put_frame(recent: Any, stream: Any, place: Any, frames: Any, row: Any, j: Any) -> Any:
    def run(recent: Any, stream: Any, place: Any, frames: Any, row: Any, j: Any) -> None:
        _, stack, size = frames.shape
        to = (stream * recent.shape[1] + place) * recent.shape[2]
        copy_bytes(recent, to, frames, (row * stack + j) * size, size)

    return run


@overload(plain.put_whole, jit_options=_INNER)
def _put_whole(target: Any, at: Any, recent: Any, stream: Any, place: Any, size: Any) -> Any:
    def run(target: Any, at: Any, recent: Any, stream: Any, place: Any, size: Any) -> None:
        copy_bytes(target, at, recent, (stream * recent.shape[1] + place) * recent.shape[2], size)

    return run


@overload(plain.encode_frame, jit_options=_INNER)
def _encode_frame(
    target: Any,
    at: Any,
    recent: Any,
    stream: Any,
    place: Any,
    reference: Any,
    reference_at: Any,
    size: Any,
    scratch: Any,
) -> Any:
    def run(
        target: Any,
        at: Any,
        recent: Any,
        stream: Any,
        place: Any,
        reference: Any,
        reference_at: Any,
        size: Any,
        scratch: Any,
    ) -> int:
        row_at = (stream * recent.shape[1] + place) * recent.shape[2]
        length = encode(target, at, recent, row_at, reference, reference_at, size, scratch)
        if length >= size:
            copy_bytes(target, at, recent, row_at, size)
            return size
        return length

    return run


@overload(lz4_block.quad, jit_options=_INNER)
def _quad(source: Any, at: Any) -> Any:
    def run(source: Any, at: Any) -> int:
        return np.int64(load_word(source, at) & np.uint64(0xFFFFFFFF))

    return run


@overload(lz4_block.byte, jit_options=_INNER)
def _byte(source: Any, at: Any) -> Any:
    def run(source: Any, at: Any) -> int:
        return np.int64(load_byte(source, at))

    return run


@overload(lz4_block.alike, jit_options=_INNER)
def _alike(source: Any, a: Any, b: Any, stop: Any) -> Any:
    def run(source: Any, a: Any, b: Any, stop: Any) -> int:
        count = 0
        while b + count + 8 <= stop:
            difference = load_word(source, a + count) ^ load_word(source, b + count)
            if difference:
                return count + (low_zeros(difference) >> 3)
            count += 8
        while b + count < stop and load_byte(source, a + count) == load_byte(source, b + count):
            count += 1
        return count

    return run


@overload(lz4_block.copy_run, jit_options=_INNER)
def _copy_run(target: Any, to: Any, source: Any, at: Any, count: Any) -> Any:
    def run(target: Any, to: Any, source: Any, at: Any, count: Any) -> None:
        copy_bytes(target, to, source, at, count)

    return run


@overload(lz4_block.copy_ahead, jit_options=_INNER)
def _copy_ahead(target: Any, to: Any, source: Any, at: Any, count: Any) -> Any:
    def run(target: Any, to: Any, source: Any, at: Any, count: Any) -> None:
        # two words every time: cheaper than a branch that is hard to foresee
        store_word(target, to, load_word(source, at))
        store_word(target, to + 8, load_word(source, at + 8))
        for i in range(16, count, 8):
            store_word(target, to + i, load_word(source, at + i))

    return run


@overload(lz4_block.repeat, jit_options=_INNER)
def _repeat(target: Any, to: Any, offset: Any, count: Any) -> Any:
    def run(target: Any, to: Any, offset: Any, count: Any) -> None:
        if offset >= 8:
            store_word(target, to, load_word(target, to - offset))
            store_word(target, to + 8, load_word(target, to + 8 - offset))
            for i in range(16, count, 8):
                store_word(target, to + i, load_word(target, to + i - offset))
        else:
            # the bytes that repeat, as often as a word holds them
            word = load_word(target, to - offset) & _LOWEST[offset]
            store_word(target, to, word * _REPEATED[offset])
            # then words from a multiple of the offset before, no less than a word
            back = _BACK[offset]
            for i in range(8, count, 8):
                store_word(target, to + i, load_word(target, to + i - back))

    return run


for _function in (
    lz4_block.put_length,
    lz4_block.put_sequence,
    lz4_block.slot_of,
    lz4_block.find_match,
    lz4_block.pack_block,
    lz4_block.unpack_block,
):
    register_jitable(**_INNER)(_function)


# not njit(lz4_block.pack_block): what is compiled for other kernels to call and what Python calls would share
# a place in numba's cache, and only the latter can be called from Python
@njit(**_OPTIONS)
def pack_block(source: Any, size: int, target: Any, table: Any) -> int:
    return lz4_block.pack_block(source, size, target, table)


@njit(**_OPTIONS)
def read_frames(
    state: Any, frame_ids: Any, sets: Any, out: Any, size: int, per_segment: int, wide: bool, first: int, stop: int
) -> int:
    """Decode rows ``first`` to ``stop``, each one's segments walked once from front to back."""
    n_tops = (size + BLOCK - 1) // BLOCK
    row = np.zeros(n_tops * BLOCK, np.uint8)
    values = np.empty((n_tops + 1) * BLOCK, np.uint8)
    a = np.empty(n_tops * (BLOCK // 8) + 8, np.int32)
    b = np.empty(n_tops * (BLOCK // 64) + 8, np.int32)
    n_sets, n_rows = sets.shape
    stack = frame_ids.shape[1]
    n_frames = n_sets * stack
    ids = np.empty(n_frames, np.int64)
    targets = np.empty(n_frames, np.int64)
    width = 4 if wide else 2
    room = state.stage.size // state.open_segments.size
    unpacked = np.empty(0, np.uint8)
    # a batch larger than the caches: do not fetch what is about to be overwritten
    streaming = out.size >= _STREAMED and size % 16 == 0 and address_of(out) % 16 == 0
    for r in range(first, stop):
        # by id, so that frames of one segment come together and in order
        for i in range(n_frames):
            frame_id = np.int64(frame_ids[sets[i // stack, r], i % stack]) - 1
            j = i
            while j > 0 and ids[j - 1] > frame_id:
                ids[j] = ids[j - 1]
                targets[j] = targets[j - 1]
                j -= 1
            ids[j] = frame_id
            targets[j] = (((i // stack) * n_rows + r) * stack + i % stack) * size
        i = 0
        while i < n_frames and ids[i] < 0:
            to = targets[i]
            for byte in range(size):
                out[to + byte] = 0
            i += 1
        while i < n_frames:
            segment = ids[i] // per_segment
            start = state.starts[segment]
            opened = start < 0
            if opened:
                source = state.stage
                start = -1 - start
                end = start + state.stage_ends[start // room]
                count = per_segment
            else:
                source = state.heap
                end = start + state.lengths[segment]
                count = np.int64(source[start + 1])
            table = start + 2
            at = table + count * width
            if at > end:
                return segment
            count = np.int64(source[start + 1])
            body = source
            if source[start] == PACKED_LZ4:
                # the last frame wanted of this segment says how much of it is needed
                last = i
                while last + 1 < n_frames and ids[last + 1] // per_segment == segment:
                    last += 1
                total = needed = 0
                for i_length in range(count):
                    total += plain.get_length(source, table, i_length, wide)
                    if i_length <= ids[last] % per_segment:
                        needed = total
                if total > per_segment * size:
                    return segment
                if unpacked.size == 0:
                    unpacked = np.empty(per_segment * size + lz4_block.OVERRUN, np.uint8)
                if not lz4_block.unpack_block(source, at, end, unpacked, total, needed):
                    return segment
                body, at, end = unpacked, 0, needed
            elif source[start] != 0:
                return segment
            keyframe = state.keyframes[segment]
            if keyframe >= 0:
                copy_bytes(row, 0, state.keyframe_rows, keyframe * keyframe_bytes(size), size)
            else:
                for byte in range(size):
                    row[byte] = 0
            position = 0
            while i < n_frames and ids[i] // per_segment == segment:
                wanted = ids[i] % per_segment
                if wanted >= count:
                    return segment
                while position <= wanted:
                    length = plain.get_length(source, table, position, wide)
                    if length > size or at + length > end:
                        return segment
                    if length == size:
                        copy_bytes(row, 0, body, at, size)
                    elif length > 0 and not apply(body, at, at + length, row, size, a, b, values):
                        return segment
                    at += length
                    position += 1
                if streaming:
                    stream_bytes(out, targets[i], row, 0, size)
                else:
                    copy_bytes(out, targets[i], row, 0, size)
                i += 1
    return -1


@njit(**_OPTIONS)
def split_stack(observations: Any, frames: Any) -> None:
    n_rows, pixels, stack, unit = observations.shape
    for r in range(n_rows):
        flat = observations[r].reshape(-1)
        if stack == 4 and unit == 1:
            # the common case, spelled out so that the compiler can vectorise it
            a, b, c, d = frames[r, 0], frames[r, 1], frames[r, 2], frames[r, 3]
            for pixel in range(pixels):
                a[pixel] = flat[4 * pixel]
                b[pixel] = flat[4 * pixel + 1]
                c[pixel] = flat[4 * pixel + 2]
                d[pixel] = flat[4 * pixel + 3]
        else:
            for j in range(stack):
                frame = frames[r, j]
                for pixel in range(pixels):
                    for byte in range(unit):
                        frame[pixel * unit + byte] = flat[(pixel * stack + j) * unit + byte]


@njit(**_OPTIONS)
def join_stack(frames: Any, observations: Any) -> None:
    n_rows, pixels, stack, unit = observations.shape
    for r in range(n_rows):
        flat = observations[r].reshape(-1)
        if stack == 4 and unit == 1:
            a, b, c, d = frames[r, 0], frames[r, 1], frames[r, 2], frames[r, 3]
            for pixel in range(pixels):
                flat[4 * pixel] = a[pixel]
                flat[4 * pixel + 1] = b[pixel]
                flat[4 * pixel + 2] = c[pixel]
                flat[4 * pixel + 3] = d[pixel]
        else:
            for pixel in range(pixels):
                for j in range(stack):
                    for byte in range(unit):
                        flat[(pixel * stack + j) * unit + byte] = frames[r, j, pixel * unit + byte]


# What Python calls is defined here, so that numba compiles it anew when this file changes; each argument has a name,
# because finding out the type of ``*arguments`` takes 200 us a call.
for _function in (plain.flat_indices, plain.release_rows, plain.write_frames, plain.write_step):
    register_jitable(**_INNER)(_function)


@njit(**_OPTIONS)
def flat_indices(steps: Any, streams: Any, n_steps: int, n_streams: int, bases: Any, sets: Any) -> int:
    return plain.flat_indices(steps, streams, n_steps, n_streams, bases, sets)


@njit(**_OPTIONS)
def write_step(
    state: Any, frame_ids: Any, frames: Any, next_frames: Any, index: int, next_index: int, first: int,
    per_segment: int, max_chain_bytes: int, compress_above: int, wide: bool,
) -> int:  # fmt: skip
    return plain.write_step(
        state,
        frame_ids,
        frames,
        next_frames,
        index,
        next_index,
        first,
        per_segment,
        max_chain_bytes,
        compress_above,
        wide,
    )


@njit(**_OPTIONS)
def write_frames(
    state: Any, frame_ids: Any, frames: Any, streams: Any, indices: Any, first: int,
    per_segment: int, max_chain_bytes: int, compress_above: int, delta: bool, wide: bool, logged: bool,
) -> int:  # fmt: skip
    return plain.write_frames(
        state,
        frame_ids,
        frames,
        streams,
        indices,
        first,
        per_segment,
        max_chain_bytes,
        compress_above,
        delta,
        wide,
        logged,
    )


@njit(**_OPTIONS)
def release_rows(state: Any, per_segment: int) -> None:
    plain.release_rows(state, per_segment)
