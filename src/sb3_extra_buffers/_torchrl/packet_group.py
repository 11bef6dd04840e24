"""The encoded tensors of a packet as tensors, which a storage files without decoding them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDict

from sb3_extra_buffers._torchrl.groups import Group, GroupConfig
from sb3_extra_buffers._torchrl.indexing import Positions
from sb3_extra_buffers._torchrl.stored_tensor import StoredTensor
from sb3_extra_buffers._torchrl.tensors import CPU
from sb3_extra_buffers._torchrl.wire import GroupPacket, ItemPacket, Lease, only_corrupt, parse_packet
from sb3_extra_buffers._torchrl.wire_v1 import PacketV1
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.errors import ReadOnlyBufferError
from sb3_extra_buffers.stores.transfer import RowPacket
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["PacketGroup", "decode_batch", "packet_items", "whole_packet"]


class PacketGroup(Group):
    """The rows of a packet as a group that cannot be changed."""

    def __init__(self, packet: GroupPacket) -> None:
        self.packet = packet.rows
        n_rows = packet.rows.shape[1]
        super().__init__(GroupConfig(packet.keys, packet.rows.spec, packet.dtype, n_rows, "", {}), CPU)

    def read_rows(self, positions: Positions, which: Sequence[int] | None = None) -> list[ByteRows]:
        numbers = np.arange(len(self.keys)) if which is None else np.asarray(which, np.int64)
        return list(self.packet.read(numbers[:, None] * self.n_rows + positions))

    def write(self, positions: Positions, batches: Sequence[ByteRows]) -> NoReturn:
        raise ReadOnlyBufferError("the tensors of a packet cannot be changed; clone them first")

    def write_key(self, which: int, positions: Positions, rows: ByteRows) -> NoReturn:
        raise ReadOnlyBufferError("the tensors of a packet cannot be changed; clone them first")

    def clear(self) -> NoReturn:
        raise ReadOnlyBufferError("the tensors of a packet cannot be changed; clone them first")

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage(other=self.packet.nbytes)

    def describe(self) -> str:
        return "in a packet"

    def check(self) -> None:
        self.packet.verify()


def packet_items(parsed: ItemPacket | PacketV1) -> Any:
    """Return the TensorDict in a packet, or raise `CorruptPayloadError`; large tensors are decoded when used."""
    if not isinstance(parsed, ItemPacket) or len(parsed.lead) != 1:
        return parsed.decode()
    with only_corrupt():
        tensors: dict[Any, torch.Tensor] = parsed.dense()
        for part in parsed.groups():
            group = PacketGroup(part)
            for which, key in enumerate(part.keys):
                tensors[key] = StoredTensor(group, which, range(group.n_rows))
        return TensorDict({key: tensors[key] for key in parsed.specs}, batch_size=parsed.lead)


def decode_batch(packet: bytes, lease: Lease) -> Any:
    """Return the TensorDict in a packet that a service sent, or raise `CorruptPayloadError`."""
    parsed = parse_packet(packet)
    if not isinstance(parsed, ItemPacket):
        return parsed.decode()
    window = parsed.note.get("window")
    return parsed.decode(lease, window if type(window) is int and window > 1 else None)


def whole_packet(tensors: Sequence[torch.Tensor | None]) -> RowPacket | None:
    """Return the packet whose keys are ``tensors``: all of them, in order and whole; None if there is none."""
    first = tensors[0]
    group = first.group if isinstance(first, StoredTensor) else None
    if not isinstance(group, PacketGroup) or len(tensors) != len(group.keys):
        return None
    for which, tensor in enumerate(tensors):
        if not isinstance(tensor, StoredTensor) or tensor.group is not group or tensor.which != which:
            return None
        if tensor.steps != range(group.n_rows) or tensor.inner_shape:
            return None
    return group.packet
