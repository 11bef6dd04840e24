"""The buffer inside a Ray actor as parts that files keep: its storage, sampler, writer, and who wrote what."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from sb3_extra_buffers._torchrl.checkpoint import make_storage, move
from sb3_extra_buffers._torchrl.schema import parse_dtype
from sb3_extra_buffers._torchrl.stored_tensor import bits_of, to_numpy, to_torch
from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.files import values
from sb3_extra_buffers.files.parts import LoadedParts, Parts

__all__ = ["ServiceState", "make_state"]

_CPU = torch.device("cpu")
# newest packet of each writer, and where it went
Writers = dict[str, tuple[int, torch.Tensor]]


class ServiceState:
    """What a `CompressedReplayService` consists of; saved as it is, loaded to be given to another one."""

    def __init__(self, storage: Any, sampler: dict[str, Any], writer: dict[str, Any], writers: Writers) -> None:
        self.storage, self.writers = storage, writers
        # states, as TorchRL's `state_dict` has them
        self.sampler, self.writer = sampler, writer

    @property
    def _lock(self) -> Any:
        return self.storage._lock

    def to_parts(self) -> Parts:
        held = self.storage.to_parts()
        columns = dict(held.columns)
        names = list(self.writers)
        index = [self.writers[name][1].reshape(-1).to(_CPU, torch.int64) for name in names]
        columns["written"] = np.concatenate([np.zeros(0, np.int64), *(part.numpy() for part in index)])
        description = {
            "held": held.description,
            "sampler": _pack("sampler", self.sampler, columns),
            "writer": _pack("writer", self.writer, columns),
            "writers": [
                [name, self.writers[name][0], list(self.writers[name][1].shape)] for name in names
            ],
        }  # fmt: skip
        return Parts("replay-service", description, columns, held.stores)

    def give_to(self, storage: Any, sampler: Any, writer: Any) -> None:
        """Let a buffer's storage, sampler and writer be as these were."""
        sampler_state = _merge("sampler", self.sampler, sampler.state_dict())
        writer_state = _merge("writer", self.writer, writer.state_dict())
        cursor = writer_state.get("_cursor", 0)
        if not 0 <= cursor < max(self.storage._requested_size, 1):
            raise FileFormatError(f"the writer is at {cursor} of {self.storage._requested_size}")
        move(self.storage, storage)
        try:
            sampler.load_state_dict(sampler_state)
            writer.load_state_dict(writer_state)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise FileFormatError(f"what was saved suits no {type(sampler).__name__}: {error}") from error


def make_state(parts: LoadedParts) -> ServiceState:
    """The state that ``parts`` were taken from."""
    held = make_storage(LoadedParts("torchrl-storage", parts.entry("held", kind=dict), parts.columns, parts.stores))
    written = parts.column("written", np.int64, (None,))
    writers: Writers = {}
    at = 0
    for about in parts.entry("writers", kind=list):
        name, number, shape = about
        fits = isinstance(name, str) and type(number) is int and number >= 0 and isinstance(shape, list)
        if not fits or not all(type(n) is int and 0 <= n <= written.size for n in shape):
            raise FileFormatError(f"{about!r} tells of no packets")
        count = math.prod(shape)
        if at + count > written.size:
            raise FileFormatError("packets went to more places than were saved")
        writers[name] = number, torch.from_numpy(written[at : at + count].copy()).reshape(shape)
        at += count
    return ServiceState(held, _unpack("sampler", parts), _unpack("writer", parts), writers)


# ---- states of samplers and writers: numbers, text, tensors, and trees of priorities ----


def _pack(prefix: str, state: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    packed = {}
    for name, value in state.items():
        if _is_tree(value):
            value = value[torch.arange(len(value))]
        if isinstance(value, tuple) and any(isinstance(part, torch.Tensor) for part in value):
            # a priority and where it is
            value = tuple(part.item() if isinstance(part, torch.Tensor) else part for part in value)
        if isinstance(value, torch.Tensor):
            columns[f"{prefix}/{name}"] = to_numpy(value)
            packed[name] = {"tensor": str(value.dtype).removeprefix("torch.")}
        else:
            packed[name] = {"value": values.encode(value, f"the state {name!r} of a {prefix}")}
    return packed


def _unpack(prefix: str, parts: LoadedParts) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, about in parts.entry(prefix, kind=dict).items():
        if not isinstance(about, dict) or len(about) != 1:
            raise FileFormatError(f"{about!r} is no state of a {prefix}")
        if "tensor" in about:
            dtype, column = parse_dtype(about["tensor"]), parts.columns.get(f"{prefix}/{name}")
            bits = torch.empty(0, dtype=bits_of(dtype)).numpy().dtype
            if column is None or column.dtype != bits:
                raise FileFormatError(f"the state {name!r} of a {prefix} is missing")
            state[name] = to_torch(np.array(column), dtype, _CPU)
        else:
            state[name] = values.decode(about.get("value"))
    return state


def _merge(what: str, saved: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """``saved`` as a sampler or writer wants it whose own state is ``fresh``."""
    if saved.keys() - fresh.keys() - {"_generation"}:
        raise FileFormatError(f"the {what} that was saved was another: it had {sorted(saved.keys() - fresh.keys())}")
    merged = dict(fresh)
    for name, value in saved.items():
        mine: Any = fresh.get(name)
        if _is_tree(mine):
            if not isinstance(value, torch.Tensor) or value.shape != (len(mine),) or bool(value.isnan().any()):
                raise FileFormatError(f"{name} holds no priorities of {len(mine)} items")
            mine[torch.arange(len(mine))] = value
        else:
            numbers = isinstance(mine, (int, float)) and isinstance(value, (int, float))
            if not (numbers or mine is None or isinstance(value, type(mine))):
                raise FileFormatError(f"{name} is {value!r} where a {type(mine).__name__} is due")
            merged[name] = value
    return merged


def _is_tree(value: Any) -> bool:
    return "SegmentTree" in type(value).__name__
