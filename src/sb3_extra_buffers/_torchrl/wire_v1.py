"""Version 1 of the wire format, which journals of earlier versions hold; only read.

Each frame is there once, as its difference to the frame before, and all of them are compressed together.
"""

from __future__ import annotations

import itertools
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from sb3_extra_buffers._torchrl.tensors import as_tensor, tensor_spec
from sb3_extra_buffers._torchrl.wire_header import PacketHeader, require
from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import CorruptPayloadError
from sb3_extra_buffers.kernels import frame_kernels
from sb3_extra_buffers.stores.layout import StackLayout

__all__ = ["MAGIC", "PacketV1"]

#: The first bytes of a packet.
MAGIC = b"XBT1"
# no codec compresses further than this
_MAX_RATIO = 1 << 16
# smaller sections are not compressed
_MIN_COMPRESSED = 1 << 12


class _Group(NamedTuple):
    """Leaves whose rows were encoded together, in ``section`` (frames) and the one after it (counts and order)."""

    leaves: list[int]
    section: int
    stack: int
    axis: Any
    frames: int


class PacketV1(PacketHeader):
    """A packet whose header was parsed and checked; its sections are not decoded yet."""

    def __init__(self, packet: Any) -> None:
        try:
            self._parse(packet)
        except (LookupError, TypeError, ValueError, OverflowError, RecursionError, struct.error) as error:
            raise CorruptPayloadError(f"not a valid packet: {error}") from error

    def _parse(self, packet: Any) -> None:
        header, body, first = self.read_text(packet, MAGIC)
        lengths = header["sections"]
        require(isinstance(lengths, list) and all(type(n) is int and 0 <= n <= len(body) for n in lengths), "sections")
        ends = list(itertools.accumulate(lengths, initial=first))
        require(len(lengths) > 0 and ends[-1] == len(body), f"{len(body)} bytes instead of {ends[-1]}")
        self.sections = [body[begin:end] for begin, end in itertools.pairwise(ends)]
        self.read_leaves(header)
        self.groups = [self._parse_group(group) for group in header["groups"]]
        self.find_small([group.leaves for group in self.groups], header["small"])

    def _parse_group(self, fields: Any) -> _Group:
        group = _Group(*(fields[name] for name in _Group._fields))
        numbers, section, stack, axis, frames = group
        self.check_group(numbers)
        # a group has two sections, and the last section is that of the small tensors
        require(type(section) is int and 0 <= section < len(self.sections) - 2, f"a group in section {section!r}")
        require(type(stack) is int and 1 <= stack <= 1 << 16 and axis in ("first", "last"), f"stacks of {stack!r}")
        limit = self.n_rows * len(numbers) * stack
        require(type(frames) is int and 0 < frames <= limit, f"{frames!r} frames")
        return group

    def decode(self) -> Any:
        try:
            return self._decode()
        except CorruptPayloadError:
            raise
        except (
            ArithmeticError,
            AssertionError,
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
            MemoryError,
        ) as error:
            raise CorruptPayloadError(f"the sections of a packet do not match its header: {error}") from error

    def _decode(self) -> Any:
        tensors: dict[int, torch.Tensor] = {}
        for group in self.groups:
            leaf = self.leaves[group.leaves[0]]
            spec = tensor_spec(leaf.shape[len(self.lead) :], leaf.dtype)
            for number, rows in zip(group.leaves, self._decode_rows(spec, group), strict=True):
                tensors[number] = as_tensor(rows.view(spec.dtype).reshape(leaf.shape), leaf.dtype)
        small = self._decode_small()
        first = 0
        for number in self.small:
            leaf = self.leaves[number]
            spec = tensor_spec(leaf.shape, leaf.dtype)
            part = small[first : first + spec.nbytes]
            tensors[number] = as_tensor(part.copy().view(spec.dtype).reshape(spec.shape), leaf.dtype)
            first += spec.nbytes
        named = {leaf.key: tensors[number] for number, leaf in enumerate(self.leaves)}
        return TensorDict(named, batch_size=self.lead)

    def _decode_small(self) -> npt.NDArray[np.uint8]:
        section, size = self.sections[-1], sum(self.leaves[number].nbytes for number in self.small)
        if size >= _MIN_COMPRESSED:
            return self._decompress(section, size)
        require(len(section) == size, f"{len(section)} bytes of small tensors instead of {size}")
        return np.frombuffer(section, np.uint8)

    def _decompress(self, section: memoryview, size: int) -> npt.NDArray[np.uint8]:
        require(size <= _MIN_COMPRESSED + len(section) * _MAX_RATIO, f"{size} bytes compressed to {len(section)}")
        out = np.empty(size, np.uint8)
        get_codec(self.codec).decode_into(section, out.data)
        return out

    def _decode_rows(self, spec: ObsSpec, group: _Group) -> list[ByteRows]:
        layout, n_rows, n_batches = StackLayout(spec, group.stack, group.axis), self.n_rows, len(group.leaves)
        along = spec.shape[0 if layout.axis == "first" else -1] if spec.shape else 1
        require(along % layout.stack == 0 and n_rows < 1 << 31, f"stacks of {layout.stack} along an axis of {along}")
        total = n_rows * n_batches
        tables = self._decompress(self.sections[group.section + 1], total + 4 * n_rows)
        counts, order = tables[:total], tables[total:].view("<i4").astype(np.int64)
        ends = np.cumsum(counts, dtype=np.int64)
        counts_fit = (counts <= layout.stack).all() and counts[0] == layout.stack and ends[-1] == group.frames
        require(bool(counts_fit), "rows of frames that it does not hold")
        require(np.array_equal(np.sort(order), np.arange(n_rows)), "an order that names rows twice")
        frames = self._decompress(self.sections[group.section], group.frames * layout.frame_bytes)
        frames = frames.reshape(group.frames, layout.frame_bytes)
        np.bitwise_xor.accumulate(frames, axis=0, out=frames)
        # a row is a stack of the newest frames at that point; then rows return to their own order
        inverse = np.empty_like(order)
        inverse[order] = np.arange(n_rows)
        windows = ends[:, None] - layout.stack + np.arange(layout.stack)
        windows = windows.reshape(n_rows, n_batches, layout.stack)[inverse]
        return [layout.join(frames[windows[:, batch]], frame_kernels()) for batch in range(n_batches)]
