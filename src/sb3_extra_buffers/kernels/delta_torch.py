"""Reference kernels for frames on a device, on tensors in main memory.

`kernels.delta_triton` does the same on a GPU. `kernels.delta_tables` describes the format. Each stream frees its
segments in the order in which it wrote them, so only keyframes are reference-counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.errors import CorruptPayloadError
from sb3_extra_buffers.kernels import delta_tables as dt
from sb3_extra_buffers.kernels import policy
from sb3_extra_buffers.kernels.delta_tables import CHUNK, DeviceTables, FrameShape, WriteJob
from sb3_extra_buffers.kernels.state import NONE, ZERO

__all__ = ["decode_frame", "encode_frame", "read_rows_reference", "write_rows_reference"]

Bytes = npt.NDArray[np.uint8]

_LENGTH = (1 << dt.LENGTH_BITS) - 1


# ---- one frame ----


def _masks(changed: npt.NDArray[np.bool_]) -> tuple[Bytes, Bytes, Bytes, int]:
    """Masks of the changed bytes of a chunk: of bytes in a word, words in a line, lines in a group, groups."""
    whole = np.zeros(CHUNK, np.bool_)
    whole[: len(changed)] = changed
    words = np.packbits(whole, bitorder="little")
    lines = np.packbits(words != 0, bitorder="little")
    groups = np.packbits(lines != 0, bitorder="little")
    return words, lines, groups, int(np.packbits(groups != 0, bitorder="little")[0])


def encode_frame(frame: Bytes, reference: Bytes) -> Bytes:
    """``frame`` encoded as its difference from ``reference``."""
    if np.array_equal(frame, reference):
        return np.zeros(0, np.uint8)
    directory, payloads = [], []
    for first in range(0, len(frame), CHUNK):
        part = frame[first : first + CHUNK]
        changed = part != reference[first : first + CHUNK]
        words, lines, groups, top = _masks(changed)
        values = part[changed]
        is_fresh = np.ones(len(values), np.bool_)
        is_fresh[1:] = values[1:] != values[:-1]
        sections = [masks[masks != 0] for masks in (groups, lines, words)]
        payload = np.concatenate([*sections, np.packbits(is_fresh, bitorder="little"), values[is_fresh]])
        if len(payload) >= len(part):
            payload, top = part, 0
        directory += [len(payload) & 255, len(payload) >> 8 | top << 4]
        payloads.append(payload)
    return np.concatenate([np.array(directory, np.uint8), *payloads])


def encoded_bound(frame: Bytes, reference: Bytes) -> int:
    """The length of `encode_frame` if no value repeated the previous one."""
    total = 0
    for first in range(0, len(frame), CHUNK):
        part = frame[first : first + CHUNK]
        changed = part != reference[first : first + CHUNK]
        n_values = int(changed.sum())
        sections = sum(int(np.count_nonzero(masks)) for masks in _masks(changed)[:3])
        total += 2 + min(sections + -(-n_values // 8) + n_values, len(part))
    return total


def decode_frame(payload: Bytes, frame: Bytes) -> None:
    """Apply the difference ``payload`` to ``frame``, in place."""
    if not len(payload):
        return
    n_chunks = -(-len(frame) // CHUNK)
    at = 2 * n_chunks
    for chunk in range(n_chunks):
        low, high = payload[2 * chunk : 2 * chunk + 2].tolist()
        length, top = low | (high & 15) << 8, high >> 4
        part = frame[chunk * CHUNK : (chunk + 1) * CHUNK]
        encoded = payload[at : at + length]
        at += length
        if not top:
            part[:length] = encoded
            continue
        masks = np.array([top], np.uint8)
        end, n_masks = 0, 4
        for _ in range(3):
            is_set = np.unpackbits(masks, bitorder="little")[:n_masks] != 0
            inner = np.zeros(n_masks, np.uint8)
            count = int(np.count_nonzero(is_set))
            inner[is_set] = encoded[end : end + count]
            end, masks, n_masks = end + count, inner, 8 * n_masks
        where = np.flatnonzero(np.unpackbits(masks, bitorder="little"))
        n_bits = -(-len(where) // 8)
        is_fresh = np.unpackbits(encoded[end : end + n_bits], bitorder="little")[: len(where)]
        values = encoded[end + n_bits :]
        part[where] = values[np.cumsum(is_fresh) - 1]


# ---- writing ----


def write_rows_reference(
    tables: DeviceTables,
    shape: FrameShape,
    frames: list[torch.Tensor],
    job: WriteJob,
    report: torch.Tensor,
    launch: int,
) -> None:
    """Store ``frames[set][stream, stack, byte]`` as one step, one set after the other.

    A frame is shared if it equals one of its stream's recent frames, byte for byte; if not, it is added to the stream's
    newest segment. Bytes that do not fit into the heap are counted in ``counters[NEEDED]``, and the tables must then be
    discarded. ``report[N_REPORT]`` is filled for the host.
    """
    views: Any = DeviceTables(*(table.numpy() for table in tables))  # type: ignore[arg-type]  # the same as arrays
    rows = np.stack([part.numpy()[..., : shape.frame_bytes] for part in frames])
    writers = [_StreamWriter(views, shape, stream, job) for stream in range(rows.shape[1])]
    for stream, writer in enumerate(writers):
        writer.write(rows[:, stream])
    report[dt.REPORT_HEAD], report[dt.REPORT_TAIL] = tables.counters[dt.HEAD], tables.tails.min()
    report[dt.REPORT_SPARE] = torch.count_nonzero(tables.keyframe_refs == 0)
    report[dt.REPORT_SEGMENTS] = max(writer.n_segments for writer in writers)
    report[dt.REPORT_LAUNCH] = launch


class _StreamWriter:
    """One stream's part of a write."""

    def __init__(self, tables: Any, shape: FrameShape, stream: int, job: WriteJob) -> None:
        self.tables, self.shape, self.stream, self.job = tables, shape, stream, job
        self.row = tables.streams[stream]
        self.switched = False  # whether this write has changed the keyframe that the stream holds

    @property
    def n_segments(self) -> int:
        """Segments in use."""
        return self._since(int(self.row[dt.FLOOR]))

    def _since(self, number: int) -> int:
        """How many segments were opened from ``number`` on."""
        return int((int(self.row[dt.OPENED]) - number) % self.shape.n_numbers)

    def _slot(self, number: int) -> int:
        return int(number % self.tables.entries.shape[1])

    def write(self, sets: npt.NDArray[np.uint8]) -> None:
        tables, row, stream, job, shape = self.tables, self.row, self.stream, self.job, self.shape
        known = tables.recent_ids[stream]
        since = max((self._since(number // shape.per_segment) for number in known[known >= 0].tolist()), default=0)
        tables.oldest_segments[job.step, stream] = (int(row[dt.OPENED]) - since) % shape.n_numbers
        self._release(int(tables.oldest_segments[job.oldest, stream]))
        for which, (first, stack) in enumerate(zip(job.indices, sets, strict=True)):
            is_shifted = which == len(sets) - 1
            before = tables.last[stream].copy()
            for j, frame in enumerate(stack):
                hint = int(before[min(j + is_shifted, shape.stack - 1)])
                position, frame_id = self._find_or_add(frame, hint)
                tables.last[stream, j] = position
                tables.frame_ids[first + stream, j] = frame_id + 1
        tables.published[1 - job.parity, stream] = row[dt.HELD : dt.HELD + dt.N_PUBLISHED]
        tables.tails[stream] = self._tail()

    def _tail(self) -> int:
        """The oldest heap position that the stream uses."""
        start = self.tables.starts[self.stream, self._slot(int(self.row[dt.FLOOR]))]
        return int(start) if self.n_segments else dt.NO_TAIL

    def _release(self, new_floor: int) -> None:
        """Free the segments before ``new_floor``; nothing if that is out of the range in use."""
        floor = int(self.row[dt.FLOOR])
        n_freed = (new_floor - floor) % self.shape.n_numbers
        if n_freed > self.n_segments:
            return
        for number in range(floor, floor + n_freed):
            keyframe = self.tables.keyframes[self.stream, self._slot(number)]
            if keyframe >= 0:
                self.tables.keyframe_refs[keyframe] -= 1
        self.row[dt.FLOOR] = new_floor

    def _find_or_add(self, frame: Bytes, hint: int) -> tuple[int, int]:
        """The position of the frame in `recent`, and its id; the position of a frame of zeros is -1."""
        tables, stream, n_recent = self.tables, self.stream, self.shape.n_recent
        if not frame.any():
            return -1, ZERO
        for i in range(n_recent):
            position = (max(hint, 0) + i) % n_recent
            frame_id = int(tables.recent_ids[stream, position])
            if frame_id >= 0 and np.array_equal(tables.recent[stream, position, : len(frame)], frame):
                return position, frame_id
        return self._add(frame)

    def _add(self, frame: Bytes) -> tuple[int, int]:
        tables, shape, row, stream = self.tables, self.shape, self.row, self.stream
        size, n_recent = shape.frame_bytes, shape.n_recent
        count = int(row[dt.COUNT])
        is_long = count >= shape.min_frames and row[dt.CHAIN_BYTES] > shape.max_chain_bytes
        if count >= shape.per_segment or is_long or not self.n_segments:
            row[dt.OPENED] = (row[dt.OPENED] + 1) % shape.n_numbers
            row[[dt.COUNT, dt.CHAIN_BYTES]] = count = 0
            slot = self._slot((int(row[dt.OPENED]) - 1) % shape.n_numbers)
            tables.entries[stream, slot] = 0
            tables.starts[stream, slot] = tables.counters[dt.HEAD]
        number, position = (int(row[dt.OPENED]) - 1) % shape.n_numbers, int(row[dt.NEXT_RECENT])
        if count == 0:
            payload = self._encode_first(frame)
        else:
            payload = encode_frame(frame, tables.recent[stream, (position + n_recent - 1) % n_recent, :size])
        tables.entries[stream, self._slot(number), count] = self._allocate(payload)
        frame_id = number * shape.per_segment + count
        tables.recent[stream, position, :size] = frame
        tables.recent_ids[stream, position] = frame_id
        row[dt.NEXT_RECENT] = (position + 1) % n_recent
        row[dt.CHAIN_BYTES] += len(payload) if len(payload) < size else 0
        row[dt.COUNT] += 1
        return position, frame_id

    def _allocate(self, payload: Bytes) -> int:
        """Store ``payload`` in the heap; return its entry."""
        tables, length = self.tables, len(payload)
        if not length:
            return 0
        capacity = tables.heap.size - dt.SLACK
        start = int(tables.counters[dt.HEAD])
        if start % capacity + length > capacity:
            start += length  # skip the seam: no frame is split in two
        if start % capacity + length > capacity or start + length - self.job.tail > capacity:
            tables.counters[dt.NEEDED] += length
            return 0
        tables.counters[dt.HEAD] = start + length
        at = start % capacity
        tables.heap[at : at + length] = payload
        return int(at << dt.LENGTH_BITS | length)

    # ---- keyframes ----

    def _encode_first(self, frame: Bytes) -> Bytes:
        """Encode a segment's first frame against the best keyframe, or make it a keyframe."""
        tables, row, size, stream = self.tables, self.row, self.shape.frame_bytes, self.stream
        slot, held = self._slot((int(row[dt.OPENED]) - 1) % self.shape.n_numbers), int(row[dt.HELD])
        keyframe, least = self._choose_keyframe(frame, held)
        cost, excess = (int(row[dt.COST]), int(row[dt.EXCESS])) if keyframe == held else (least, 0)
        cost = min(cost, least)
        excess += least - cost
        is_leader = keyframe < 0 and stream % dt.LEADERS == 0
        if (is_leader or policy.needs_keyframe(least, excess, size)) and not self.switched:
            made = self._claim()
            if made >= 0:
                tables.keyframe_rows[made, :size] = frame
                self._hold(made)
                row[[dt.COST, dt.EXCESS]] = policy.initial_cost(size), 0
                tables.keyframes[stream, slot] = made
                return frame[:0]
        if keyframe != held and not self.switched:
            self._hold(keyframe)
            held = keyframe
        if keyframe == held:
            row[[dt.COST, dt.EXCESS]] = cost, excess
        tables.keyframes[stream, slot] = keyframe if keyframe >= 0 else NONE
        if keyframe >= 0:
            tables.keyframe_refs[keyframe] += 1
        return encode_frame(frame, self._keyframe(keyframe))

    def _keyframe(self, keyframe: int) -> Bytes:
        size = self.shape.frame_bytes
        return self.tables.keyframe_rows[keyframe, :size] if keyframe >= 0 else np.zeros(size, np.uint8)

    def _choose_keyframe(self, frame: Bytes, held: int) -> tuple[int, int]:
        """The keyframe to encode ``frame`` against, negative if there is none, and a bound on the length."""
        keyframe, least = held, encoded_bound(frame, self._keyframe(held))
        if held >= 0 and not policy.should_search(least, int(self.row[dt.COST])):
            return keyframe, least
        published = self.tables.published[self.job.parity].reshape(-1)
        leader = self.stream - self.stream % dt.LEADERS
        for i in range(min(policy.POOL_SIZE, published.size)):
            # the leader's keyframes, then those of the following streams
            first = leader if i < dt.N_PUBLISHED else self.stream
            other = int(published[(first * dt.N_PUBLISHED + i) % published.size])
            if other >= 0 and other != keyframe:
                bound = encoded_bound(frame, self._keyframe(other))
                if policy.should_switch(bound, least):
                    keyframe, least = other, bound
        return keyframe, least

    def _hold(self, keyframe: int) -> None:
        """Hold ``keyframe`` and drop the oldest one held; once per write, as other streams may read the first two."""
        refs, row = self.tables.keyframe_refs, self.row
        dropped = int(row[dt.HELD + dt.N_HELD - 1])
        if dropped >= 0:
            refs[dropped] -= 1
        row[dt.HELD + 1 : dt.HELD + dt.N_HELD] = row[dt.HELD : dt.HELD + dt.N_HELD - 1].copy()
        row[dt.HELD] = keyframe
        refs[keyframe] += 1
        self.switched = True

    def _claim(self) -> int:
        """Take an unused keyframe, with one reference for the segment; -1 if there is none."""
        refs = self.tables.keyframe_refs
        unused = np.flatnonzero(refs == 0)
        if not len(unused):
            return -1
        keyframe = int(unused[np.argmin((unused - self.stream) % refs.size)])
        refs[keyframe] = 1
        return keyframe


# ---- reading ----


def read_rows_reference(
    tables: DeviceTables, shape: FrameShape, n_streams: int, indices: torch.Tensor, out: torch.Tensor
) -> None:
    """Decode ``indices[set, row]`` into ``out[set, row, frame, byte]``: the newest frames of each stack, or all.

    Bytes past the end of a frame are left alone.
    """
    heap, entries, keyframes = tables.heap.numpy(), tables.entries.numpy(), tables.keyframes.numpy()
    rows, size = out.numpy().reshape(-1, *out.shape[2:]), shape.frame_bytes
    decoded: dict[tuple[int, int], list[Bytes]] = {}
    for row, index in zip(rows, indices.numpy().ravel().tolist(), strict=True):
        stream = index % n_streams
        for j, frame_id in enumerate((tables.frame_ids[index, -rows.shape[1] :].numpy() - 1).tolist()):
            if frame_id < 0:
                row[j, :size] = 0
                continue
            number, position = divmod(frame_id, shape.per_segment)
            slot = number % entries.shape[1]
            frames = decoded.setdefault((stream, number), [])
            if not frames:
                keyframe = int(keyframes[stream, slot])
                first = (
                    tables.keyframe_rows[keyframe, :size].numpy().copy() if keyframe >= 0 else np.zeros(size, np.uint8)
                )
                frames.append(first)
            while len(frames) < position + 2:
                entry = int(entries[stream, slot, len(frames) - 1])
                at, length = entry >> dt.LENGTH_BITS, entry & _LENGTH
                frame = frames[-1].copy()
                try:
                    decode_frame(heap[at : at + length], frame)
                except (IndexError, ValueError) as error:
                    raise CorruptPayloadError(
                        f"a frame at {at} of the heap is damaged and cannot be decoded"
                    ) from error
                frames.append(frame)
            row[j, :size] = frames[position + 1]
