"""A TensorDict as bytes to be sent: each frame once, as what changed since the frame before, compressed."""

from __future__ import annotations

import itertools
import json
import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers._torchrl.groups import find_n_envs, join_keys
from sb3_extra_buffers._torchrl.schema import key_from_json, parse_dtype, parse_shape
from sb3_extra_buffers._torchrl.stored_tensor import leaf_spec, to_numpy, to_torch
from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import get_codec, is_available
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import CorruptPayloadError, MissingExtraError, NotSaveableError
from sb3_extra_buffers.kernels import frame_kernels
from sb3_extra_buffers.stores.choice import choose_unseen
from sb3_extra_buffers.stores.layout import StackLayout, find_layout

try:
    from tensordict import TensorDict, is_non_tensor
except ImportError as error:
    raise MissingExtraError("packing needs 'tensordict': pip install 'sb3-extra-buffers[torchrl]'") from error

__all__ = ["MOST_BYTES", "pack", "read_note", "unpack"]

_MAGIC = b"XBT1"
_CPU = torch.device("cpu")
# fastest first
_METHODS = ("zstd1", "igzip1", "gzip1")
_CODECS = tuple(method.rstrip("1") for method in _METHODS)
# no codec makes more of a byte
_MOST_RATIO = 1 << 16
_WORTH = 1 << 12  # bytes that are worth a codec
#: the most that the tensors of one packet may take
MOST_BYTES = 1 << 32
_MOST_HEADER = 1 << 22


def pack(data: Any, **note: Any) -> bytes:
    """``data``, a TensorDict of tensors, as bytes; `unpack` gives it back. ``note`` is JSON that travels along."""
    keys = list(data.keys(True, True))
    tensors = {key: data.get(key) for key in keys}
    others = [key for key, value in data.items(include_nested=True) if is_non_tensor(value)]
    if others:
        raise NotSaveableError(f"only tensors can be packed, but {others} hold something else")
    lead = tuple(data.shape)
    specs = {key: leaf_spec(tuple(tensor.shape[len(lead) :]), tensor.dtype) for key, tensor in tensors.items()}
    sections: list[bytes] = []
    leaves: list[dict[str, Any]] = []
    n_rows = math.prod(lead)
    large = [key for key in keys if n_rows and choose_unseen(specs[key]) is None]
    small = b"".join(to_numpy(tensors[key]).tobytes() for key in keys if key not in large)
    method = next(method for method in _METHODS if is_available(method.rstrip("1")))
    codec = get_codec(method)
    for key in keys:
        tensor = tensors[key]
        dtype = str(tensor.dtype).removeprefix("torch.")
        leaves.append({"key": list(key) if isinstance(key, tuple) else key, "shape": tensor.shape, "dtype": dtype})
    groups = []
    index = tensors.get("index")
    for joined in join_keys(large):
        parts = [joined] if len({specs[key] for key in joined}) == 1 else [[key] for key in joined]
        for part in parts:
            rows = [to_numpy(tensors[key]).reshape(n_rows, -1).view(np.uint8) for key in part]
            order = _order(specs[part[0]], lead, rows, index)
            groups.append(
                {"leaves": [keys.index(key) for key in part]} | _pack_rows(specs[part[0]], rows, order, codec, sections)
            )
    sections.append(codec.encode(memoryview(small)) if len(small) >= _WORTH else small)
    if sum(tensor.nbytes for tensor in tensors.values()) > MOST_BYTES:
        raise NotSaveableError(f"a packet holds {MOST_BYTES} bytes of tensors at most; send this in parts")
    header = {
        "codec": codec.codec_id, "lead": lead, "leaves": leaves, "groups": groups, "small": len(small),
        "sections": list(map(len, sections)), "note": note,
    }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([_MAGIC, struct.pack("<I", len(text)), text, *sections])


def read_note(packet: bytes) -> dict[str, Any]:
    """What `pack` was told to send along."""
    return _Packet(packet).note


def unpack(packet: bytes) -> Any:
    """The TensorDict that was packed, or `CorruptPayloadError`.

    Packets are not trusted: what one says is checked before anything is decoded, and it takes no more memory than its
    tensors do, `MOST_BYTES` at most.
    """
    return _Packet(packet).unpack()


class _Packet:
    """A packet whose header was read and checked; its sections are not decoded yet."""

    def __init__(self, packet: Any) -> None:
        try:
            self._parse(packet)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError, struct.error) as error:
            raise CorruptPayloadError(f"this is no packet: {error}") from error

    def _parse(self, packet: Any) -> None:
        if not isinstance(packet, (bytes, bytearray, memoryview)) or len(packet) < 8:
            raise ValueError(f"a {type(packet).__name__} is no packet")
        body = memoryview(packet).cast("B")
        magic, length = struct.unpack_from("<4sI", body)
        if magic != _MAGIC or length > min(len(body) - 8, _MOST_HEADER):
            raise ValueError(f"it begins with {magic!r} and a header of {length} bytes")
        header = json.loads(bytes(body[8 : 8 + length]))
        lengths = header["sections"]
        _require(isinstance(lengths, list) and all(type(n) is int and 0 <= n <= len(body) for n in lengths), "sections")
        ends = list(itertools.accumulate(lengths, initial=8 + length))
        _require(len(lengths) > 0 and ends[-1] == len(body), f"{len(body)} bytes instead of {ends[-1]}")
        self.sections = [body[first:end] for first, end in itertools.pairwise(ends)]
        self.note: dict[str, Any] = header["note"]
        _require(isinstance(self.note, dict), "a note that is none")
        _require(header["codec"] in _CODECS, f"the codec {header['codec']!r}")
        self.codec = get_codec(header["codec"])
        self.lead = parse_shape(header["lead"])
        self.leaves = [_Leaf(about, self.lead) for about in header["leaves"]]
        _require(len({leaf.key for leaf in self.leaves}) == len(self.leaves), "a key twice")
        total = sum(leaf.nbytes for leaf in self.leaves)
        _require(total <= MOST_BYTES, f"tensors of {total} bytes")
        self.groups = [self._group(group) for group in header["groups"]]
        taken = [place for group in self.groups for place in group["leaves"]]
        _require(len(set(taken)) == len(taken), "a tensor twice")
        self.rest = [place for place in range(len(self.leaves)) if place not in taken]
        self.small = sum(self.leaves[place].nbytes for place in self.rest)
        _require(header["small"] == self.small, f"{header['small']!r} bytes of small tensors, not {self.small}")

    def _group(self, group: Any) -> dict[str, Any]:
        places, section, stack = group["leaves"], group["section"], group["stack"]
        _require(
            isinstance(places, list)
            and len(places) in (1, 2)
            and all(type(place) is int and 0 <= place < len(self.leaves) for place in places),
            f"tensors {places!r}",
        )
        first = self.leaves[places[0]]
        alike = all(
            (leaf.shape, leaf.dtype) == (first.shape, first.dtype) for leaf in map(self.leaves.__getitem__, places)
        )
        _require(alike and first.nbytes > 0, f"tensors {places} together")
        # the last section is that of small tensors
        _require(type(section) is int and 0 <= section < len(self.sections) - 2, f"section {section!r}")
        n_rows = math.prod(self.lead) * len(places)
        _require(type(stack) is int and 1 <= stack <= 1 << 16 and group["axis"] in ("first", "last"), "frames")
        _require(type(group["frames"]) is int and 0 < group["frames"] <= n_rows * stack, f"{group['frames']!r} frames")
        return {name: group[name] for name in ("leaves", "section", "stack", "axis", "frames")}

    def unpack(self) -> Any:
        try:
            return self._unpack()
        except (
            ArithmeticError,
            AssertionError,
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
            MemoryError,
        ) as error:
            if isinstance(error, CorruptPayloadError):
                raise
            raise CorruptPayloadError(f"a packet contradicts itself: {error}") from error

    def _unpack(self) -> Any:
        tensors: dict[int, Any] = {}
        for group in self.groups:
            leaf = self.leaves[group["leaves"][0]]
            spec = leaf_spec(leaf.shape[len(self.lead) :], leaf.dtype)
            n_rows, n_batches = math.prod(self.lead), len(group["leaves"])
            batches = _unpack_rows(spec, group, n_batches, n_rows, self.codec, self.sections)
            for place, rows in zip(group["leaves"], batches, strict=True):
                tensors[place] = to_torch(rows.view(spec.dtype).reshape(leaf.shape), leaf.dtype, _CPU)
        small = _decode(self.codec, self.sections[-1], self.small)
        at = 0
        for place in self.rest:
            leaf = self.leaves[place]
            spec = leaf_spec(leaf.shape, leaf.dtype)
            part = small[at : at + spec.nbytes]
            tensors[place] = to_torch(part.copy().view(spec.dtype).reshape(spec.shape), leaf.dtype, _CPU)
            at += spec.nbytes
        named = {leaf.key: tensors[place] for place, leaf in enumerate(self.leaves)}
        return TensorDict(named, batch_size=self.lead)


class _Leaf:
    """One tensor of a packet, as its header has it."""

    def __init__(self, about: Any, lead: tuple[int, ...]) -> None:
        self.key, self.shape, self.dtype = (
            key_from_json(about["key"]), parse_shape(about["shape"]), parse_dtype(about["dtype"]),
        )  # fmt: skip
        _require(not isinstance(self.key, int) and self.shape[: len(lead)] == lead, f"{self.key!r} of {self.shape}")
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise CorruptPayloadError(f"this is no packet: it has {what}")


def _decode(codec: Codec, section: memoryview, size: int) -> npt.NDArray[np.uint8]:
    if size < _WORTH:
        _require(len(section) == size, f"{len(section)} bytes of small tensors")
        return np.frombuffer(section, np.uint8)
    return _decompress(codec, section, size)


def _decompress(codec: Codec, section: memoryview, size: int) -> npt.NDArray[np.uint8]:
    _require(size <= _WORTH + len(section) * _MOST_RATIO, f"{size} bytes in {len(section)}")
    out = np.empty(size, np.uint8)
    codec.decode_into(section, out.data)
    return out


# ---- rows of observations ----


def _order(spec: ObsSpec, lead: tuple[int, ...], rows: list[ByteRows], index: Any) -> npt.NDArray[np.int64]:
    """The order in which rows resemble the one before them: environment by environment, or by age."""
    count = len(rows[0])
    if index is not None and index.numel() == count:
        return np.argsort(to_numpy(index).ravel(), kind="stable")
    if len(lead) > 1:
        # trajectories already lie one after the other: time is the last axis in TorchRL
        return np.arange(count)
    n_envs = find_n_envs(spec, rows[0][:64], rows[1][:64] if len(rows) > 1 else None)
    return np.concatenate([np.arange(env, count, n_envs) for env in range(n_envs)])


def _pack_rows(
    spec: ObsSpec, batches: list[ByteRows], order: npt.NDArray[np.int64], codec: Codec, sections: list[bytes]
) -> dict[str, Any]:
    rows = np.stack([batch[order] for batch in batches], axis=1).reshape(-1, spec.nbytes)
    pairs = rows.reshape(-1, 2, spec.nbytes) if len(batches) == 2 else [rows]
    layout = find_layout(spec, list(pairs[:32]))
    kernels = frame_kernels()
    frames = layout.split(rows, kernels)
    before, after = frames[:-1], frames[1:]
    # a row that repeats the one before brings nothing, one that moved on by a frame brings one
    counts = np.full(len(frames), layout.stack, np.uint8)
    if layout.stack > 1:
        counts[1:][(before[:, 1:] == after[:, :-1]).all(axis=(1, 2))] = 1
    counts[1:][(before == after).all(axis=(1, 2))] = 0
    fresh = np.arange(layout.stack) >= layout.stack - counts[:, None].astype(np.int64)
    kept = frames[fresh]
    changes = kept.copy()
    np.bitwise_xor(kept[1:], kept[:-1], out=changes[1:])
    start = len(sections)
    sections.append(codec.encode(changes.reshape(-1).data))
    tables = counts.tobytes() + order.astype("<i4").tobytes()
    sections.append(codec.encode(memoryview(tables)))
    return {"stack": layout.stack, "axis": layout.axis, "frames": len(kept), "section": start}


def _unpack_rows(
    spec: ObsSpec, group: dict[str, Any], n_batches: int, n_rows: int, codec: Codec, sections: list[memoryview]
) -> list[ByteRows]:
    layout = StackLayout(spec, group["stack"], group["axis"])
    along = spec.shape[0 if layout.axis == "first" else -1] if spec.shape else 1
    _require(along % layout.stack == 0 and n_rows < 1 << 31, f"stacks of {layout.stack} along an axis of {along}")
    total = n_rows * n_batches
    tables = _decompress(codec, sections[group["section"] + 1], total + 4 * n_rows)
    counts, order = tables[:total], tables[total:].view("<i4").astype(np.int64)
    ends = np.cumsum(counts, dtype=np.int64)
    if (counts > layout.stack).any() or counts[0] != layout.stack or ends[-1] != group["frames"]:
        raise CorruptPayloadError("a packet names frames that it does not hold")
    if not np.array_equal(np.sort(order), np.arange(n_rows)):
        raise CorruptPayloadError("a packet names rows twice")
    frames = _decompress(codec, sections[group["section"]], group["frames"] * layout.frame_bytes)
    frames = frames.reshape(group["frames"], layout.frame_bytes)
    np.bitwise_xor.accumulate(frames, axis=0, out=frames)
    # a row is the last frames that had come by then; rows go back to where they were
    back = np.empty_like(order)
    back[order] = np.arange(n_rows)
    windows = (ends[:, None] - layout.stack + np.arange(layout.stack)).reshape(n_rows, n_batches, layout.stack)[back]
    return [layout.join(frames[windows[:, place]], frame_kernels()) for place in range(n_batches)]
