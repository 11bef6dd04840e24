"""The way of small arrays to a device: packed, through pinned memory, in one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Staging", "torch_dtype"]

Array = npt.NDArray[Any]

# copies that may be under way at once
_DEPTH = 8
_ALIGNMENT = 64


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of the same bytes."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class Staging:
    """Uploads arrays to ``device``. What it returns is fresh memory there, and safe to keep."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rooms: list[tuple[torch.Tensor, Array, Any]] = []
        self._turn = 0

    def upload(self, arrays: Sequence[Array | Sequence[Array]]) -> list[torch.Tensor]:
        """Each array as a tensor; a sequence of them is stacked on the way."""
        if self.device.type != "cuda":
            stacked = [array if isinstance(array, np.ndarray) else np.stack(array) for array in arrays]
            return [torch.from_numpy(array.copy()).to(self.device) for array in stacked]
        shapes = []
        end = 0
        for array in arrays:
            one = array if isinstance(array, np.ndarray) else array[0]
            shape = one.shape if isinstance(array, np.ndarray) else (len(array), *one.shape)
            nbytes = one.nbytes if isinstance(array, np.ndarray) else one.nbytes * len(array)
            shapes.append((end, end + nbytes, one.dtype, shape))
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        room, host, copied = self._room(end)
        for array, (first, last, dtype, shape) in zip(arrays, shapes, strict=True):
            target = host[first:last].view(dtype).reshape(shape)
            if isinstance(array, np.ndarray):
                target[...] = array
            else:
                for place, part in zip(target, array, strict=True):
                    place[...] = part
        packed = torch.empty(end, dtype=torch.uint8, device=self.device)
        packed.copy_(room[:end], non_blocking=True)
        copied.record()
        return [
            packed[first:last].view(torch_dtype(dtype)).view(shape) if last > first
            else torch.empty(shape, dtype=torch_dtype(dtype), device=self.device)
            for first, last, dtype, shape in shapes
        ]  # fmt: skip

    def _room(self, nbytes: int) -> tuple[torch.Tensor, Array, Any]:
        if len(self._rooms) < _DEPTH:
            self._rooms.append(self._make(nbytes))
            return self._rooms[-1]
        self._turn = (self._turn + 1) % _DEPTH
        if self._rooms[self._turn][0].numel() < nbytes:
            self._rooms[self._turn][2].synchronize()
            self._rooms[self._turn] = self._make(nbytes)
        room = self._rooms[self._turn]
        room[2].synchronize()  # over long ago, as a rule
        return room

    @staticmethod
    def _make(nbytes: int) -> tuple[torch.Tensor, Array, Any]:
        room = torch.empty(max(nbytes, 1 << 12), dtype=torch.uint8, pin_memory=True)
        return room, room.numpy(), torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own

    def __getstate__(self) -> dict[str, Any]:
        return {"device": str(self.device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        device = torch.device(state["device"])
        if device.type == "cuda" and not torch.cuda.is_available():
            device = torch.device("cpu")
        self.__init__(device)  # type: ignore[misc]  # pinned memory does not travel
