"""The way of small arrays to a device: packed, through pinned memory, in one copy that nobody waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Staging", "torch_dtype"]

Array = npt.NDArray[Any]

# copies that may be under way at once
_DEPTH = 8
_ALIGNMENT = 64


@cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of the same bytes."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class _Room:
    """Pinned memory for one copy under way, and how arrays that went through it before were laid out there."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        self.views: dict[Any, tuple[list[Array], torch.Tensor]] = {}


class Staging:
    """Uploads arrays to ``device``. What it returns is fresh memory there, and safe to keep."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rooms: list[_Room] = []
        self._turn = 0
        self._plans: dict[Any, tuple[int, list[tuple[Any, ...]]]] = {}

    def upload(self, arrays: Sequence[Array | Sequence[Array]]) -> list[torch.Tensor]:
        """Each array as a tensor; a sequence of them is stacked on the way."""
        if self.device.type != "cuda":
            stacked = [array if isinstance(array, np.ndarray) else np.stack(array) for array in arrays]
            return [torch.from_numpy(array.copy()).to(self.device) for array in stacked]
        key = tuple(
            (array.shape, array.dtype) if type(array) is np.ndarray else ((len(array), *array[0].shape), array[0].dtype)
            for array in arrays
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _lay_out(key)
        end, entries = plan
        room = self._next_room(end)
        views, source = room.views.get(key) or _views(room, key, plan)
        for view, array in zip(views, arrays, strict=True):
            if type(array) is np.ndarray:
                view[...] = array
            else:
                for place, part in zip(view, array, strict=True):
                    place[...] = part
        packed = torch.empty(end, dtype=torch.uint8, device=self.device)
        packed.copy_(source, non_blocking=True)
        room.copied.record()
        return [
            packed.view(dtype).as_strided(shape, strides, offset) for dtype, shape, strides, offset, _, _, _ in entries
        ]

    def _next_room(self, nbytes: int) -> _Room:
        if len(self._rooms) < _DEPTH:
            self._rooms.append(_Room(max(nbytes, 1 << 14)))
            return self._rooms[-1]
        self._turn = (self._turn + 1) % _DEPTH
        room = self._rooms[self._turn]
        room.copied.synchronize()  # over long ago, as a rule
        if room.memory.numel() < nbytes:
            room = self._rooms[self._turn] = _Room(nbytes)
        return room

    def __getstate__(self) -> dict[str, Any]:
        return {"device": str(self.device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        device = torch.device(state["device"])
        if device.type == "cuda" and not torch.cuda.is_available():
            device = torch.device("cpu")
        self.__init__(device)  # type: ignore[misc]  # pinned memory does not travel


def _lay_out(key: tuple[Any, ...]) -> tuple[int, list[tuple[Any, ...]]]:
    """Where arrays of these shapes and dtypes go, one after the other; and how many bytes they take."""
    entries: list[tuple[Any, ...]] = []
    end = 0
    for shape, dtype in key:
        nbytes = math.prod(shape) * dtype.itemsize
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        entries.append((torch_dtype(dtype), shape, strides, end // dtype.itemsize, end, end + nbytes, dtype))
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return max(end, _ALIGNMENT), entries


def _views(room: _Room, key: Any, plan: tuple[int, list[tuple[Any, ...]]]) -> tuple[list[Array], torch.Tensor]:
    """Arrays of a layout in a room, and the part of it that is copied."""
    host = room.memory.numpy()
    views = [host[first:last].view(dtype).reshape(shape) for _, shape, _, _, first, last, dtype in plan[1]]
    if len(room.views) > 64:
        room.views.clear()
    room.views[key] = views, room.memory[: plan[0]]
    return room.views[key]
