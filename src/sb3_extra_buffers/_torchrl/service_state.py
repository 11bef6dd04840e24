"""The state of the buffer inside a Ray actor: its storage, sampler and writer, and the newest packet of each client."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from sb3_extra_buffers._torchrl.checkpoint import embedded_storage, tensor_column
from sb3_extra_buffers._torchrl.tensors import CPU, dtype_name, parse_tensor_dtype, to_numpy
from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.files import values
from sb3_extra_buffers.files.parts import LoadedParts, Parts

__all__ = ["ServiceState", "restore_state"]

# for each client the number of its newest packet, and the indices that its items were stored at
Clients = dict[str, tuple[int, torch.Tensor]]


class ServiceState:
    """The parts of a `CompressedReplayService`; ``sampler`` and ``writer`` are their `state_dict`."""

    def __init__(self, storage: Any, sampler: dict[str, Any], writer: dict[str, Any], clients: Clients) -> None:
        self.storage, self.sampler, self.writer, self.clients = storage, sampler, writer, clients

    @property
    def lock(self) -> Any:
        """Held while this is saved."""
        return self.storage.lock

    def to_parts(self) -> Parts:
        """Return what `files.save` stores."""
        held = self.storage.to_parts()
        columns = dict(held.columns)
        indices = [index.reshape(-1).to(CPU, torch.int64).numpy() for _, index in self.clients.values()]
        columns["written"] = np.concatenate([np.zeros(0, np.int64), *indices])
        description = {
            "held": held.description,
            "sampler": _state_to_json("sampler", self.sampler, columns),
            "writer": _state_to_json("writer", self.writer, columns),
            "writers": [[name, number, list(index.shape)] for name, (number, index) in self.clients.items()],
        }
        return Parts("replay-service", description, columns, held.stores)

    def apply_to(self, storage: Any, sampler: Any, writer: Any) -> None:
        """Load this state into the storage, sampler and writer of a buffer."""
        sampler_state = _merge("sampler", self.sampler, sampler.state_dict())
        writer_state = _merge("writer", self.writer, writer.state_dict())
        cursor = writer_state.get("_cursor", 0)
        if not 0 <= cursor < self.storage.capacity:
            raise FileFormatError(f"the writer's cursor is {cursor}, but the storage has {self.storage.capacity} items")
        storage.take_over(self.storage)
        try:
            sampler.load_state_dict(sampler_state)
            writer.load_state_dict(writer_state)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise FileFormatError(f"the saved state does not fit a {type(sampler).__name__}: {error}") from error


def restore_state(parts: LoadedParts) -> ServiceState:
    """Return the state in ``parts``, which are not trusted."""
    storage = embedded_storage(parts)
    written = parts.column("written", np.int64, (None,))
    clients: Clients = {}
    first = 0
    for entry in parts.entry("writers", kind=list):
        name, number, shape = entry
        fits = isinstance(name, str) and type(number) is int and number >= 0 and isinstance(shape, list)
        if not fits or not all(type(n) is int and 0 <= n <= written.size for n in shape):
            raise FileFormatError(f"expected a client's [name, packet number, shape], got {entry!r}")
        stop = first + math.prod(shape)
        if stop > written.size:
            raise FileFormatError(f"the clients wrote {stop} or more items, but {written.size} indices were saved")
        clients[name] = number, torch.from_numpy(written[first:stop].copy()).reshape(shape)
        first = stop
    return ServiceState(storage, _state_from_json("sampler", parts), _state_from_json("writer", parts), clients)


# ---- states of samplers and writers: numbers, strings, tensors and trees of priorities ----


def _state_to_json(prefix: str, state: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    encoded = {}
    for name, value in state.items():
        if _is_segment_tree(value):
            value = value[torch.arange(len(value))]
        if isinstance(value, tuple) and any(isinstance(part, torch.Tensor) for part in value):
            # the largest priority and its index
            value = tuple(part.item() if isinstance(part, torch.Tensor) else part for part in value)
        if isinstance(value, torch.Tensor):
            columns[f"{prefix}/{name}"] = to_numpy(value)
            encoded[name] = {"tensor": dtype_name(value.dtype)}
        else:
            encoded[name] = {"value": values.value_to_json(value, f"the state {name!r} of a {prefix}")}
    return encoded


def _state_from_json(prefix: str, parts: LoadedParts) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, entry in parts.entry(prefix, kind=dict).items():
        if not isinstance(entry, dict) or len(entry) != 1:
            raise FileFormatError(f"expected a tensor or a value as state {name!r} of a {prefix}, got {entry!r}")
        if "tensor" in entry:
            state[name] = tensor_column(parts, f"{prefix}/{name}", parse_tensor_dtype(entry["tensor"]))
        else:
            state[name] = values.value_from_json(entry.get("value"))
    return state


def _merge(kind: str, saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return ``saved`` in the form that a sampler or writer expects whose present state is ``own``."""
    if saved.keys() - own.keys() - {"_generation"}:
        raise FileFormatError(f"another {kind} was saved: it has the state {sorted(saved.keys() - own.keys())}")
    merged = dict(own)
    for name, value in saved.items():
        current: Any = own.get(name)
        if _is_segment_tree(current):
            if not isinstance(value, torch.Tensor) or value.shape != (len(current),) or bool(value.isnan().any()):
                raise FileFormatError(f"the state {name!r} does not hold the priorities of {len(current)} items")
            current[torch.arange(len(current))] = value
        else:
            are_numbers = isinstance(current, (int, float)) and isinstance(value, (int, float))
            if not (are_numbers or current is None or isinstance(value, type(current))):
                raise FileFormatError(f"the state {name!r} is {value!r}, expected a {type(current).__name__}")
            merged[name] = value
    return merged


def _is_segment_tree(value: Any) -> bool:
    return "SegmentTree" in type(value).__name__
