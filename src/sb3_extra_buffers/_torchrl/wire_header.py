"""The header of a packet: what all versions of the wire format have in common."""

from __future__ import annotations

import json
import math
import struct
from typing import Any, NamedTuple

import torch

from sb3_extra_buffers._torchrl.schema import Key, check_keys, key_from_json, parse_tensor_shape
from sb3_extra_buffers._torchrl.tensors import parse_tensor_dtype
from sb3_extra_buffers.errors import CorruptPayloadError

__all__ = ["CODECS", "MAX_BYTES", "MAX_ITEMS", "Leaf", "PacketHeader", "require"]

#: Codecs that sections may be compressed with, the fastest first.
CODECS = ("zstd", "igzip", "gzip")
#: Limit for the tensors of one packet, in bytes.
MAX_BYTES = 1 << 32
#: Limit for the items of one packet: they may have no bytes at all, and each is given an index.
MAX_ITEMS = 1 << 24
_MAX_HEADER = 1 << 22


class Leaf(NamedTuple):
    """A tensor of the items."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PacketHeader:
    """Reads the header of a packet, which is not trusted; each version of the format extends this class.

    Raises `CorruptPayloadError`, or one of the errors that invalid values cause.
    """

    note: dict[str, Any]
    lead: tuple[int, ...]
    n_rows: int
    codec: str
    leaves: list[Leaf]
    #: Numbers of the leaves that are in no group.
    small: list[int]

    def read_text(self, packet: Any, magic: bytes) -> tuple[Any, memoryview, int]:
        """Return the header as JSON, the whole packet, and where the sections begin."""
        if not isinstance(packet, (bytes, bytearray, memoryview)):
            raise ValueError(f"expected bytes, got a {type(packet).__name__}")
        if len(packet) < 8:
            raise ValueError(f"it has {len(packet)} bytes, fewer than its header begins with")
        body = memoryview(packet).cast("B")
        found, length = struct.unpack_from("<4sI", body)
        if found != magic or length > min(len(body) - 8, _MAX_HEADER):
            raise ValueError(f"it begins with {found!r} and a header of {length} bytes")
        return json.loads(bytes(body[8 : 8 + length])), body, 8 + length

    def read_leaves(self, header: Any) -> None:
        """Set everything but groups."""
        self.note = header["note"]
        require(isinstance(self.note, dict), f"the note {self.note!r}")
        self.codec = header["codec"]
        require(self.codec in CODECS, f"the codec {self.codec!r}")
        self.lead = parse_tensor_shape(header["lead"])
        self.n_rows = math.prod(self.lead)
        require(self.n_rows <= MAX_ITEMS, f"{self.n_rows} items")
        self.leaves = [self._read_leaf(leaf) for leaf in header["leaves"]]
        check_keys([leaf.key for leaf in self.leaves])
        total = sum(leaf.nbytes for leaf in self.leaves)
        require(total <= MAX_BYTES, f"{total} bytes of tensors")

    def _read_leaf(self, leaf: Any) -> Leaf:
        key, shape = key_from_json(leaf["key"]), parse_tensor_shape(leaf["shape"])
        require(not isinstance(key, int) and shape[: len(self.lead)] == self.lead, f"{key!r} of shape {shape}")
        return Leaf(key, shape, parse_tensor_dtype(leaf["dtype"]))

    def check_group(self, numbers: Any) -> None:
        """Check the leaves of a group, which are encoded together."""
        require(
            isinstance(numbers, list)
            and len(numbers) in (1, 2)
            and all(type(number) is int and 0 <= number < len(self.leaves) for number in numbers),
            f"a group of the tensors {numbers!r}",
        )
        first, last = self.leaves[numbers[0]], self.leaves[numbers[-1]]
        alike = (first.shape, first.dtype) == (last.shape, last.dtype)
        require(alike and first.nbytes > 0, f"a group of the tensors {numbers}, which differ or are empty")

    def find_small(self, groups: list[list[int]], n_sent: Any) -> None:
        """Set `small`, given the leaves of all groups; ``n_sent`` bytes of small tensors were sent."""
        grouped = [number for group in groups for number in group]
        require(len(set(grouped)) == len(grouped), "a tensor twice")
        self.small = [number for number in range(len(self.leaves)) if number not in grouped]
        n_small = sum(self.leaves[number].nbytes for number in self.small)
        require(n_sent == n_small, f"{n_sent!r} bytes of small tensors instead of {n_small}")


def require(holds: bool, what: str) -> None:
    """Raise `CorruptPayloadError` unless ``holds``."""
    if not holds:
        raise CorruptPayloadError(f"not a valid packet: it has {what}")
