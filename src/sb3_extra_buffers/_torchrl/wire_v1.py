"""Version 1 of the wire format, which journals of earlier versions hold; only read.

Each frame is there once, as its difference to the frame before, and all of them are compressed together.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from sb3_extra_buffers._torchrl.schema import Key, check_keys, key_from_json, parse_tensor_shape
from sb3_extra_buffers._torchrl.tensors import as_tensor, parse_tensor_dtype, tensor_spec
from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import CorruptPayloadError
from sb3_extra_buffers.kernels import frame_kernels
from sb3_extra_buffers.stores.layout import StackLayout

__all__ = ["MAGIC", "MAX_ITEMS", "PacketV1"]

#: The first bytes of a packet.
MAGIC = b"XBT1"
# fastest first
_METHODS = ("zstd1", "igzip1", "gzip1")
_CODECS = tuple(method.rstrip("1") for method in _METHODS)
# no codec compresses further than this
_MAX_RATIO = 1 << 16
# smaller sections are not compressed
_MIN_COMPRESSED = 1 << 12
# limit for the tensors of one packet, in bytes
_MAX_BYTES = 1 << 32
_MAX_HEADER = 1 << 22
#: Limit for the items of one packet: they may have no bytes at all, and each is given an index.
MAX_ITEMS = 1 << 24


class _Leaf(NamedTuple):
    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Group(NamedTuple):
    """Leaves whose rows were encoded together, in ``section`` (frames) and the one after it (counts and order)."""

    leaves: list[int]
    section: int
    stack: int
    axis: Any
    frames: int


class PacketV1:
    """A packet whose header was parsed and checked; its sections are not decoded yet."""

    def __init__(self, packet: Any) -> None:
        try:
            self._parse(packet)
        except (LookupError, TypeError, ValueError, OverflowError, RecursionError, struct.error) as error:
            raise CorruptPayloadError(f"not a valid packet: {error}") from error

    def _parse(self, packet: Any) -> None:
        if not isinstance(packet, (bytes, bytearray, memoryview)) or len(packet) < 8:
            raise ValueError(f"expected bytes, got a {type(packet).__name__}")
        body = memoryview(packet).cast("B")
        magic, length = struct.unpack_from("<4sI", body)
        if magic != MAGIC or length > min(len(body) - 8, _MAX_HEADER):
            raise ValueError(f"it begins with {magic!r} and a header of {length} bytes")
        header = json.loads(bytes(body[8 : 8 + length]))
        lengths = header["sections"]
        _require(isinstance(lengths, list) and all(type(n) is int and 0 <= n <= len(body) for n in lengths), "sections")
        ends = list(itertools.accumulate(lengths, initial=8 + length))
        _require(len(lengths) > 0 and ends[-1] == len(body), f"{len(body)} bytes instead of {ends[-1]}")
        self.sections = [body[first:end] for first, end in itertools.pairwise(ends)]
        self.note: dict[str, Any] = header["note"]
        _require(isinstance(self.note, dict), f"the note {self.note!r}")
        _require(header["codec"] in _CODECS, f"the codec {header['codec']!r}")
        self.codec = get_codec(header["codec"])
        self.lead = parse_tensor_shape(header["lead"])
        self.n_rows = math.prod(self.lead)
        _require(self.n_rows <= MAX_ITEMS, f"{self.n_rows} items")
        self.leaves = [self._parse_leaf(leaf) for leaf in header["leaves"]]
        check_keys([leaf.key for leaf in self.leaves])
        total = sum(leaf.nbytes for leaf in self.leaves)
        _require(total <= _MAX_BYTES, f"{total} bytes of tensors")
        self.groups = [self._parse_group(group) for group in header["groups"]]
        grouped = [number for group in self.groups for number in group.leaves]
        _require(len(set(grouped)) == len(grouped), "a tensor twice")
        self.small = [number for number in range(len(self.leaves)) if number not in grouped]
        n_small = sum(self.leaves[number].nbytes for number in self.small)
        _require(header["small"] == n_small, f"{header['small']!r} bytes of small tensors instead of {n_small}")

    def _parse_leaf(self, leaf: Any) -> _Leaf:
        key, shape = key_from_json(leaf["key"]), parse_tensor_shape(leaf["shape"])
        _require(not isinstance(key, int) and shape[: len(self.lead)] == self.lead, f"{key!r} of shape {shape}")
        return _Leaf(key, shape, parse_tensor_dtype(leaf["dtype"]))

    def _parse_group(self, fields: Any) -> _Group:
        group = _Group(*(fields[name] for name in _Group._fields))
        numbers, section, stack, axis, frames = group
        _require(
            isinstance(numbers, list)
            and len(numbers) in (1, 2)
            and all(type(number) is int and 0 <= number < len(self.leaves) for number in numbers),
            f"a group of the tensors {numbers!r}",
        )
        first, last = self.leaves[numbers[0]], self.leaves[numbers[-1]]
        alike = (first.shape, first.dtype) == (last.shape, last.dtype)
        _require(alike and first.nbytes > 0, f"a group of the tensors {numbers}, which differ or are empty")
        # a group has two sections, and the last section is that of the small tensors
        _require(type(section) is int and 0 <= section < len(self.sections) - 2, f"a group in section {section!r}")
        _require(type(stack) is int and 1 <= stack <= 1 << 16 and axis in ("first", "last"), f"stacks of {stack!r}")
        limit = self.n_rows * len(numbers) * stack
        _require(type(frames) is int and 0 < frames <= limit, f"{frames!r} frames")
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
        _require(len(section) == size, f"{len(section)} bytes of small tensors instead of {size}")
        return np.frombuffer(section, np.uint8)

    def _decompress(self, section: memoryview, size: int) -> npt.NDArray[np.uint8]:
        _require(size <= _MIN_COMPRESSED + len(section) * _MAX_RATIO, f"{size} bytes compressed to {len(section)}")
        out = np.empty(size, np.uint8)
        self.codec.decode_into(section, out.data)
        return out

    def _decode_rows(self, spec: ObsSpec, group: _Group) -> list[ByteRows]:
        layout, n_rows, n_batches = StackLayout(spec, group.stack, group.axis), self.n_rows, len(group.leaves)
        along = spec.shape[0 if layout.axis == "first" else -1] if spec.shape else 1
        _require(along % layout.stack == 0 and n_rows < 1 << 31, f"stacks of {layout.stack} along an axis of {along}")
        total = n_rows * n_batches
        tables = self._decompress(self.sections[group.section + 1], total + 4 * n_rows)
        counts, order = tables[:total], tables[total:].view("<i4").astype(np.int64)
        ends = np.cumsum(counts, dtype=np.int64)
        counts_fit = (counts <= layout.stack).all() and counts[0] == layout.stack and ends[-1] == group.frames
        _require(bool(counts_fit), "rows of frames that it does not hold")
        _require(np.array_equal(np.sort(order), np.arange(n_rows)), "an order that names rows twice")
        frames = self._decompress(self.sections[group.section], group.frames * layout.frame_bytes)
        frames = frames.reshape(group.frames, layout.frame_bytes)
        np.bitwise_xor.accumulate(frames, axis=0, out=frames)
        # a row is a stack of the newest frames at that point; then rows return to their own order
        inverse = np.empty_like(order)
        inverse[order] = np.arange(n_rows)
        windows = ends[:, None] - layout.stack + np.arange(layout.stack)
        windows = windows.reshape(n_rows, n_batches, layout.stack)[inverse]
        return [layout.join(frames[windows[:, batch]], frame_kernels()) for batch in range(n_batches)]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise CorruptPayloadError(f"not a valid packet: it has {what}")
