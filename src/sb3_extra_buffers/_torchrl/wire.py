"""The wire format: items of a storage as bytes, their large tensors encoded as stores hold them."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from sb3_extra_buffers._torchrl import wire_v1
from sb3_extra_buffers._torchrl.env_probe import find_n_envs
from sb3_extra_buffers._torchrl.groups import Group, HostGroup
from sb3_extra_buffers._torchrl.indexing import Positions
from sb3_extra_buffers._torchrl.layout import join_keys
from sb3_extra_buffers._torchrl.schema import (
    Key,
    key_to_json,
    non_tensor_keys,
)
from sb3_extra_buffers._torchrl.table import ItemTable
from sb3_extra_buffers._torchrl.tensors import as_rows, as_tensor, dtype_name, flatten_lead, tensor_spec, to_numpy
from sb3_extra_buffers._torchrl.wire_header import CODECS, MAX_BYTES, MAX_ITEMS, PacketHeader, require
from sb3_extra_buffers.codecs.registry import get_codec, is_available
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import CorruptPayloadError, FileFormatError, NotSaveableError
from sb3_extra_buffers.stores.choice import choose_unseen
from sb3_extra_buffers.stores.transfer import RowPacket, export_rows, import_rows, rows_packet
from sb3_extra_buffers.stores.transfer_cache import KeyframeCache, Lease, split_known
from sb3_extra_buffers.stores.transfer_encoder import RowEncoder

__all__ = [
    "MAX_BYTES",
    "GroupPacket",
    "ItemPacket",
    "ItemParts",
    "KeyframeCache",
    "Lease",
    "PacketEncoder",
    "decode_packet",
    "encode_packet",
    "export_items",
    "gather_items",
    "import_items",
    "only_corrupt",
    "packet_note",
]

_MAGIC = b"XBT2"
# no codec compresses further than this
_MAX_RATIO = 1 << 16
# smaller sections are not compressed
_MIN_COMPRESSED = 1 << 12

# errors that invalid packets cause where no check raises a named error
_CONSEQUENCES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, MemoryError,
    struct.error,
)  # fmt: skip


class GroupPacket(NamedTuple):
    """The rows of a key, or of a key and its ``("next", key)``."""

    keys: list[Key]
    dtype: torch.dtype
    rows: RowPacket  # [key, item]


# ---- writing packets ----


class PacketEncoder:
    """Encodes items in the process that collects them. Packets reuse the keyframes of earlier packets. Not thread-safe.

    ``n_envs`` is the number of environments that take turns in the items; if it is None, it is detected. ``compress``
    is as in `export_items`.
    """

    def __init__(
        self,
        method: str = "auto",
        options: Mapping[str, Any] | None = None,
        n_envs: int | None = None,
        compress: bool | int = True,
    ) -> None:
        self._method, self._options, self._n_envs, self._compress = method, options, n_envs, compress
        self._encoders: dict[tuple[Any, ...], RowEncoder] = {}

    def encode(self, data: Any, **note: Any) -> bytes:
        """Encode ``data``, a TensorDict of tensors; ``note`` is JSON that is sent along."""
        tensors = {key: data.get(key) for key in data.keys(True, True)}
        others = non_tensor_keys(data)
        if others:
            raise NotSaveableError(f"only tensors can be sent, but {others} hold something else")
        lead = tuple(data.shape)
        n_rows = math.prod(lead)
        _check_size(n_rows, tensors)
        specs = {key: tensor_spec(tuple(tensor.shape[len(lead) :]), tensor.dtype) for key, tensor in tensors.items()}
        large = [key for key in tensors if n_rows and choose_unseen(specs[key]) is None]
        groups = []
        for keys in join_keys(large, specs):
            rows = [as_rows(specs[keys[0]], tensors[key]) for key in keys]
            packet = self._encoder(keys, specs[keys[0]], lead, rows).encode(rows)
            groups.append(GroupPacket(keys, tensors[keys[0]].dtype, packet))
        return _pack(lead, tensors, groups, (), self._compress, note)

    def _encoder(self, keys: list[Key], spec: ObsSpec, lead: tuple[int, ...], rows: list[Any]) -> RowEncoder:
        name = (*keys, spec, len(lead) > 1)
        encoder = self._encoders.get(name)
        if encoder is None:
            # whole trajectories: time is the last axis in TorchRL
            n_envs = 1 if len(lead) > 1 else self._n_envs
            if n_envs is None:
                n_envs = find_n_envs(spec, rows[0][:64], rows[1][:64] if len(rows) > 1 else None)
            encoder = RowEncoder(spec, n_envs, self._method, self._options)
            # few items do not show how many environments there are
            if len(rows[0]) >= 2 * n_envs:
                self._encoders[name] = encoder
        return encoder


def encode_packet(data: Any, **note: Any) -> bytes:
    """Encode a single packet; for several packets, a `PacketEncoder` is faster and its packets are smaller."""
    return PacketEncoder().encode(data, **note)


def export_items(
    table: ItemTable,
    positions: Positions,
    extra: Mapping[Key, torch.Tensor] | None = None,
    known: bytes = b"",
    compress: bool | int = True,
    **note: Any,
) -> bytes:
    """Return the items at ``positions``, one axis or more, as they are stored.

    ``extra`` tensors are sent along, in place of keys of the same name. ``known`` are the keyframes that the receiver
    has (`Lease.known`). Without ``compress``, the packet is larger and takes less time; a number is the level of zstd:
    level 3 takes 1.5 times as long as level 1, and saves an eighth.
    """
    return gather_items(table, positions, extra or {}).pack(known, compress, **note)


class ItemParts(NamedTuple):
    """The parts of a packet; ``tensors`` has all keys in order, with a tensor for each key that is not in a group."""

    lead: tuple[int, ...]
    tensors: Mapping[Key, torch.Tensor | None]
    groups: Sequence[GroupPacket]

    def pack(self, known: bytes = b"", compress: bool | int = True, **note: Any) -> bytes:
        """Return the packet; the storage may have changed since its parts were gathered."""
        return _pack(self.lead, self.tensors, self.groups, split_known(known), compress, note)


def gather_items(table: ItemTable, positions: Positions, extra: Mapping[Key, torch.Tensor]) -> ItemParts:
    """Return copies of what is stored at ``positions``, as in `export_items`."""
    lead = tuple(positions.shape)
    flat = positions.reshape(-1)
    extra = dict(extra)
    keys = {key for group in table.groups for key in group.keys}
    dense = table.read(flat, [key for key in table.dense if key not in extra])
    tensors: dict[Key, torch.Tensor | None] = {}
    for key in table.specs:
        value = dense.get(key)
        tensors[key] = None if value is None else value.reshape(*lead, *value.shape[1:])
    tensors.update(extra)
    if keys & extra.keys():
        raise NotSaveableError(f"{keys & extra.keys()} cannot be replaced, because they are sent as they are stored")
    groups = [GroupPacket(list(group.keys), group.dtype, _export_group(group, flat)) for group in table.groups]
    return ItemParts(lead, tensors, groups)


def _export_group(group: Group, positions: Positions) -> RowPacket:
    if isinstance(group, HostGroup):
        return export_rows(group.store, positions + np.array(group.bases, np.int64)[:, None])
    return rows_packet(group.spec, np.stack(group.read_rows(positions)))


def _check_size(n_rows: int, tensors: Mapping[Key, torch.Tensor]) -> None:
    if n_rows > MAX_ITEMS:
        raise NotSaveableError(f"{n_rows} items exceed the {MAX_ITEMS} of a packet; send several packets")
    n_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if n_bytes > MAX_BYTES:
        raise NotSaveableError(f"{n_bytes} bytes of tensors exceed the {MAX_BYTES} of a packet; send several packets")


def _pack(
    lead: tuple[int, ...],
    tensors: Mapping[Key, torch.Tensor | None],
    groups: Sequence[GroupPacket],
    known: Collection[bytes],
    compress: bool | int,
    note: Mapping[str, Any],
) -> bytes:
    """Write a packet; ``tensors`` is as in `ItemParts`."""
    keys = list(tensors)
    buffers: list[Any] = []
    records = []
    grouped: dict[Key, tuple[tuple[int, ...], torch.dtype]] = {}
    for group in groups:
        parts = group.rows.to_buffers(known)
        records.append(
            {"leaves": [keys.index(key) for key in group.keys], "first": len(buffers), "sections": len(parts)}
        )
        buffers += parts
        grouped.update(dict.fromkeys(group.keys, ((*lead, *group.rows.spec.shape), group.dtype)))
    small = [to_numpy(value) for key, value in tensors.items() if value is not None and key not in grouped]
    buffers.append(b"".join(value.tobytes() for value in small))
    codec = _best_codec() if compress else CODECS[0]
    sections = [_compress(codec, int(compress), buffer) if compress else buffer for buffer in buffers]
    leaves = []
    for key, value in tensors.items():
        if key not in grouped and value is None:
            raise NotSaveableError(f"no tensor of {key!r}")
        shape, dtype = grouped[key] if value is None or key in grouped else (tuple(value.shape), value.dtype)
        leaves.append({"key": key_to_json(key), "shape": shape, "dtype": dtype_name(dtype)})
    header = {
        "codec": codec, "lead": lead, "leaves": leaves, "groups": records,
        "sections": [[len(section), len(buffer)] for section, buffer in zip(sections, buffers, strict=True)],
        "note": note,
    }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([_MAGIC, struct.pack("<I", len(text)), text, *sections])


@cache
def _best_codec() -> str:
    """The fastest codec that is installed."""
    return next(name for name in CODECS if is_available(name))


def _compress(codec: str, level: int, buffer: Any) -> Any:
    """Return ``buffer``, compressed if that makes it smaller."""
    if len(buffer) < _MIN_COMPRESSED:
        return buffer
    if codec == "zstd":
        from sb3_extra_buffers.codecs.zstd import compress_bytes  # needs zstandard

        packed = compress_bytes(buffer, level)
    else:
        packed = get_codec(f"{codec}1").encode(memoryview(buffer))
    return packed if len(packed) < len(buffer) else buffer


# ---- reading packets ----


def packet_note(packet: bytes) -> dict[str, Any]:
    """Return the note that was sent along."""
    return parse_packet(packet).note


def decode_packet(packet: bytes, lease: Lease | None = None, window: int | None = None) -> Any:
    """Return the TensorDict in a packet, or raise `CorruptPayloadError`.

    Packets are not trusted: the header is checked before anything is decoded, and decoding takes no more memory than
    the tensors, which are limited to `MAX_BYTES`. ``lease`` is the one whose `Lease.known` the packet was asked with.
    If the items are windows of ``window`` consecutive steps, each frame of a window is decoded once.
    """
    parsed = parse_packet(packet)
    return parsed.decode() if isinstance(parsed, wire_v1.PacketV1) else parsed.decode(lease, window)


def parse_packet(packet: Any) -> ItemPacket | wire_v1.PacketV1:
    """Parse and check the header of a packet, of this version or the one before."""
    if isinstance(packet, (bytes, bytearray, memoryview)) and bytes(packet[:4]) == wire_v1.MAGIC:
        return wire_v1.PacketV1(packet)
    return ItemPacket(packet)


class _GroupEntry(NamedTuple):
    """Leaves whose rows are encoded together, in ``sections`` sections from ``first`` on."""

    leaves: list[int]
    first: int
    sections: int


class ItemPacket(PacketHeader):
    """A packet whose header was parsed and checked; its sections are not decoded yet."""

    def __init__(self, packet: Any) -> None:
        try:
            self._parse(packet)
        except (*_CONSEQUENCES, OverflowError, RecursionError) as error:
            if isinstance(error, CorruptPayloadError):
                raise
            raise CorruptPayloadError(f"not a valid packet: {error}") from error

    def _parse(self, packet: Any) -> None:
        header, body, first = self.read_text(packet, _MAGIC)
        self._parse_sections(header["sections"], body, first)
        self.read_leaves(header)
        self._groups = [self._parse_group(group) for group in header["groups"]]
        self.find_small([group.leaves for group in self._groups], self._raw_bytes[-1])

    def _parse_sections(self, lengths: Any, body: memoryview, first: int) -> None:
        def is_pair(pair: Any) -> bool:
            return isinstance(pair, list) and [*map(type, pair)] == [int, int] and min(pair) >= 0

        require(isinstance(lengths, list) and len(lengths) > 0 and all(map(is_pair, lengths)), "invalid sections")
        self._raw_bytes = [raw for _, raw in lengths]
        for stored, raw in lengths:
            require(raw == stored or stored < raw <= stored * _MAX_RATIO, f"{raw} bytes compressed to {stored}")
        require(sum(self._raw_bytes) <= MAX_BYTES, f"{sum(self._raw_bytes)} bytes of sections")
        ends = list(itertools.accumulate((stored for stored, _ in lengths), initial=first))
        require(ends[-1] == len(body), f"{len(body)} bytes instead of {ends[-1]}")
        self._sections = [body[begin:end] for begin, end in itertools.pairwise(ends)]

    def _parse_group(self, fields: Any) -> _GroupEntry:
        group = _GroupEntry(*(fields[name] for name in _GroupEntry._fields))
        numbers, first, count = group
        self.check_group(numbers)
        # the last section is that of the small tensors
        fits = type(first) is int and type(count) is int and first >= 0 and 0 < count <= len(self._sections) - 1 - first
        require(fits, f"a group in {count!r} sections from {first!r} on")
        return group

    # ---- contents ----

    @property
    def specs(self) -> dict[Key, tuple[tuple[int, ...], torch.dtype]]:
        """Shape, without the axes that count items, and dtype of each key."""
        return {leaf.key: (leaf.shape[len(self.lead) :], leaf.dtype) for leaf in self.leaves}

    def groups(self, lease: Lease | None = None) -> list[GroupPacket]:
        """Return the encoded tensors; nothing is decoded, and everything but the encoded bytes is checked."""
        return [self._group(group, lease) for group in self._groups]

    def dense(self) -> dict[Key, torch.Tensor]:
        """Return the tensors that are not encoded, ``[*lead, ...]``."""
        small = self._section(len(self._sections) - 1)
        tensors, first = {}, 0
        for number in self.small:
            leaf = self.leaves[number]
            spec = tensor_spec(leaf.shape, leaf.dtype)
            part = small[first : first + spec.nbytes]
            tensors[leaf.key] = as_tensor(part.copy().view(spec.dtype).reshape(spec.shape), leaf.dtype)
            first += spec.nbytes
        return tensors

    def decode(self, lease: Lease | None = None, window: int | None = None) -> Any:
        """Return the items as a TensorDict; ``window`` consecutive items share frames, by default the last axis."""
        if window is None and len(self.lead) > 1:
            window = self.lead[-1]
        with only_corrupt():
            tensors = self.dense()
            for keys, dtype, packet in self.groups(lease):
                shape = (*self.lead, *packet.spec.shape)
                is_windows = window is not None and window > 1 and self.n_rows % window == 0
                decoded = packet.read_windows(window) if window is not None and is_windows else packet.read()
                for key, rows in zip(keys, decoded.reshape(len(keys), -1, packet.spec.nbytes), strict=True):
                    tensors[key] = as_tensor(rows.view(packet.spec.dtype).reshape(shape), dtype)
            return TensorDict({leaf.key: tensors[leaf.key] for leaf in self.leaves}, batch_size=self.lead)

    def _group(self, group: _GroupEntry, lease: Lease | None) -> GroupPacket:
        leaf = self.leaves[group.leaves[0]]
        spec = tensor_spec(leaf.shape[len(self.lead) :], leaf.dtype)
        sections = [self._section(number) for number in range(group.first, group.first + group.sections)]
        rows = RowPacket.from_buffers(spec, sections, lease)
        expected = len(group.leaves), self.n_rows
        require(rows.shape == expected, f"encoded rows of shape {rows.shape} instead of {expected}")
        return GroupPacket([self.leaves[number].key for number in group.leaves], leaf.dtype, rows)

    def _section(self, number: int) -> npt.NDArray[np.uint8]:
        section, size = self._sections[number], self._raw_bytes[number]
        if len(section) == size:
            return np.frombuffer(section, np.uint8)
        if self.codec == "zstd":
            try:
                from sb3_extra_buffers.codecs.zstd import decompress_bytes
            except ImportError:
                get_codec("zstd")  # raises an error that says what to install
                raise
            return np.frombuffer(decompress_bytes(section, size), np.uint8)
        out = np.empty(size, np.uint8)
        get_codec(self.codec).decode_into(section, out.data)
        return out


@contextlib.contextmanager
def only_corrupt() -> Iterator[None]:
    """Turn every error that the sections of an invalid packet cause into `CorruptPayloadError`."""
    try:
        yield
    except _CONSEQUENCES as error:
        if isinstance(error, CorruptPayloadError):
            raise
        raise CorruptPayloadError(f"the sections of a packet do not match its header: {error}") from error


def import_items(table: ItemTable, positions: Positions, packet: ItemPacket) -> None:
    """Store the items of ``packet`` at ``positions`` of a table that has its keys; may be repeated.

    Observations are stored without decoding them. Each group is a transaction; a storage combines them into one.
    """
    dense, groups = packet.dense(), packet.groups()
    if {key: table.specs.get(key) for key in packet.specs} != packet.specs:
        raise FileFormatError(f"a packet of {packet.specs} does not fit a storage of {table.specs}")
    if len(positions) != packet.n_rows:
        raise FileFormatError(f"{packet.n_rows} items cannot be stored at {len(positions)} positions")
    by_keys = {tuple(group.keys): group for group in table.groups}
    for keys, dtype, rows in groups:
        group = by_keys.pop(tuple(keys), None)
        if isinstance(group, HostGroup):
            indices = positions + np.array(group.bases, np.int64)[:, None]
            import_rows(group.store, indices, np.broadcast_to(positions % group.n_streams, indices.shape), rows)
        elif group is not None:
            group.write(positions, [group.stage(_tensor(part, rows.spec, dtype)) for part in rows.read()])
        else:
            for key, part in zip(keys, rows.read(), strict=True):
                dense[key] = _tensor(part, rows.spec, dtype)
    for group in by_keys.values():
        tensors = [flatten_lead(dense.pop(key), group.spec.shape) for key in group.keys]
        group.write(positions, [group.stage(tensor) for tensor in tensors])
    index = torch.from_numpy(positions)
    for key, value in dense.items():
        leaf = table.dense[key]
        leaf[index.to(leaf.device)] = flatten_lead(value, leaf.shape[1:]).to(leaf.device)


def _tensor(rows: npt.NDArray[np.uint8], spec: ObsSpec, dtype: torch.dtype) -> torch.Tensor:
    return as_tensor(rows.view(spec.dtype).reshape(len(rows), *spec.shape), dtype)
