"""A TensorDict as bytes to be sent: each frame once, as what changed since the frame before, compressed."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import get_codec, is_available
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import CorruptPayloadError, MissingExtraError, NotSaveableError
from sb3_extra_buffers.kernels import frame_kernels
from sb3_extra_buffers.replay_buffers.groups import find_n_envs, join_keys
from sb3_extra_buffers.replay_buffers.stored_tensor import leaf_spec, to_numpy, to_torch
from sb3_extra_buffers.stores.choice import choose_unseen
from sb3_extra_buffers.stores.layout import StackLayout, find_layout

try:
    from tensordict import TensorDict, is_non_tensor
except ImportError as error:
    raise MissingExtraError("packing needs 'tensordict': pip install 'sb3-extra-buffers[torchrl]'") from error

__all__ = ["pack", "unpack"]

_MAGIC = b"XBT1"
_CPU = torch.device("cpu")
# fastest first
_METHODS = ("zstd1", "igzip1", "gzip1")
_WORTH = 1 << 12  # bytes that are worth a codec


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
    header = {
        "codec": codec.codec_id, "lead": lead, "leaves": leaves, "groups": groups, "small": len(small),
        "sections": list(map(len, sections)), "note": note,
    }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([_MAGIC, struct.pack("<I", len(text)), text, *sections])


def read_note(packet: bytes) -> dict[str, Any]:
    """What `pack` was told to send along."""
    note: dict[str, Any] = _header(packet)[0]["note"]
    return note


def unpack(packet: bytes) -> Any:
    """The TensorDict that was packed, or `CorruptPayloadError`."""
    header, at = _header(packet)
    try:
        return _unpack(memoryview(packet)[at:], header)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, CorruptPayloadError):
            raise
        raise CorruptPayloadError(f"a packet contradicts itself: {error}") from error


def _header(packet: bytes) -> tuple[dict[str, Any], int]:
    try:
        magic, length = packet[:4], struct.unpack_from("<I", packet, 4)[0]
        if magic != _MAGIC:
            raise ValueError(f"it begins with {magic!r}")
        header: dict[str, Any] = json.loads(packet[8 : 8 + length])
        at = 8 + length
        if at + sum(header["sections"]) != len(packet):
            raise ValueError(f"it has {len(packet)} bytes instead of {at + sum(header['sections'])}")
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise CorruptPayloadError(f"this is no packet: {error}") from error
    return header, at


def _unpack(body: memoryview, header: dict[str, Any]) -> Any:
    codec = get_codec(header["codec"])
    ends = np.cumsum(header["sections"]).tolist()
    sections = [body[first:end] for first, end in zip([0, *ends[:-1]], ends, strict=True)]
    lead = tuple(header["lead"])
    leaves = header["leaves"]
    tensors: list[Any] = [None] * len(leaves)
    for group in header["groups"]:
        mine = [leaves[place] for place in group["leaves"]]
        dtype = getattr(torch, mine[0]["dtype"])
        spec = leaf_spec(tuple(mine[0]["shape"][len(lead) :]), dtype)
        batches = _unpack_rows(spec, group, len(mine), math.prod(lead), codec, sections)
        for place, rows in zip(group["leaves"], batches, strict=True):
            array = rows.view(spec.dtype).reshape(leaves[place]["shape"])
            tensors[place] = to_torch(array, dtype, _CPU)
    small = _decode(codec, sections[-1], header["small"])
    at = 0
    for place, leaf in enumerate(leaves):
        if tensors[place] is not None:
            continue
        dtype = getattr(torch, leaf["dtype"])
        spec = leaf_spec(tuple(leaf["shape"]), dtype)
        part = small[at : at + spec.nbytes]
        tensors[place] = to_torch(part.copy().view(spec.dtype).reshape(spec.shape), dtype, _CPU)
        at += spec.nbytes
    named = {
        tuple(leaf["key"]) if isinstance(leaf["key"], list) else leaf["key"]: tensor
        for leaf, tensor in zip(leaves, tensors, strict=True)
    }
    return TensorDict(named, batch_size=lead)


def _decode(codec: Codec, section: memoryview, size: int) -> npt.NDArray[np.uint8]:
    if size < _WORTH:
        return np.frombuffer(section, np.uint8, size)
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
    total = n_rows * n_batches
    tables = np.empty(total + 4 * n_rows, np.uint8)
    codec.decode_into(sections[group["section"] + 1], tables.data)
    counts, order = tables[:total], tables[total:].view("<i4").astype(np.int64)
    ends = np.cumsum(counts, dtype=np.int64)
    if (counts > layout.stack).any() or counts[0] != layout.stack or ends[-1] != group["frames"]:
        raise CorruptPayloadError("a packet names frames that it does not hold")
    if not np.array_equal(np.sort(order), np.arange(n_rows)):
        raise CorruptPayloadError("a packet names rows twice")
    frames = np.empty((group["frames"], layout.frame_bytes), np.uint8)
    codec.decode_into(sections[group["section"]], frames.reshape(-1).data)
    np.bitwise_xor.accumulate(frames, axis=0, out=frames)
    # a row is the last frames that had come by then; rows go back to where they were
    back = np.empty_like(order)
    back[order] = np.arange(n_rows)
    windows = (ends[:, None] - layout.stack + np.arange(layout.stack)).reshape(n_rows, n_batches, layout.stack)[back]
    return [layout.join(frames[windows[:, place]], frame_kernels()) for place in range(n_batches)]
