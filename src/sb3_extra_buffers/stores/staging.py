"""The way of small arrays to a device: packed, through pinned memory, in one copy that nobody waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Layout", "Lease", "Staging", "torch_dtype"]

Array = npt.NDArray[Any]

# copies that may be under way at once
_DEPTH = 8
_ALIGNMENT = 64
# layouts that are remembered; batch sizes are few, as a rule
_MOST_LAYOUTS = 64


@cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of the same bytes."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class Layout:
    """How arrays of these shapes and dtypes lie one after the other. Whoever lends often keeps it: it is a key."""

    def __init__(self, *parts: tuple[tuple[int, ...], np.dtype[Any]]) -> None:
        self.parts = parts
        self.nbytes = max(sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in parts), _ALIGNMENT)


class Lease(NamedTuple):
    """Arrays in memory that a device can read, to be filled in and handed over."""

    arrays: tuple[Array, ...]
    tensors: tuple[torch.Tensor, ...]  # the same memory
    whole: torch.Tensor  # all of it, as bytes
    entries: tuple[tuple[Any, ...], ...]
    room: Any


class _Room:
    """Pinned memory for one copy under way, and how arrays that went through it before were laid out there."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.copied: Any = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]  # torch's own
        self.lease: dict[Layout, Lease] = {}

    def acquire(self, layout: Layout) -> Lease:
        found = self.lease.get(layout)
        if found is None:
            if len(self.lease) >= _MOST_LAYOUTS:
                self.lease.clear()
            found = self.lease[layout] = _lay_out(self, layout)
        return found


class Staging:
    """Uploads arrays to ``device``, as many as ``depth`` at once. What it returns is fresh memory there."""

    def __init__(self, device: torch.device, depth: int = _DEPTH) -> None:
        self.device, self.depth = device, depth
        self._rooms: list[_Room] = []
        self._turn = 0
        self._layouts: dict[Any, Layout] = {}
        self._streams: dict[int, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory that are held for what is under way."""
        return sum(room.memory.numel() for room in self._rooms)

    def upload(self, arrays: Sequence[Array | Sequence[Array]]) -> list[torch.Tensor]:
        """Each array as a tensor; a sequence of them is stacked on the way."""
        lease = self.acquire(self.layout(*[
            (array.shape, array.dtype) if type(array) is np.ndarray else ((len(array), *array[0].shape), array[0].dtype)
            for array in arrays
        ]))  # fmt: skip
        for view, array in zip(lease.arrays, arrays, strict=True):
            if type(array) is np.ndarray:
                view[...] = array
            else:
                for place, part in zip(view, array, strict=True):
                    place[...] = part
        return self.send(lease)

    def layout(self, *parts: tuple[tuple[int, ...], np.dtype[Any]]) -> Layout:
        """The layout of these parts, the same one every time."""
        found = self._layouts.get(parts)
        if found is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            found = self._layouts[parts] = Layout(*parts)
        return found

    def acquire(self, layout: Layout) -> Lease:
        """Arrays to be filled in, for `send` or for a kernel that reads them where they are.

        Whoever reads them calls `read` once that has been started; until then nobody else gets this memory.
        """
        return self._next_room(layout.nbytes).acquire(layout)

    def send(self, lease: Lease) -> list[torch.Tensor]:
        """What was filled in, in fresh memory on the device."""
        if self.device.type != "cuda":
            return [torch.from_numpy(array.copy()).to(self.device) for array in lease.arrays]
        packed = torch.empty(lease.whole.numel(), dtype=torch.uint8, device=self.device)
        packed.copy_(lease.whole, non_blocking=True)
        self.release(lease)
        return [
            packed.view(dtype).as_strided(shape, strides, offset) for dtype, shape, strides, offset in lease.entries
        ]

    def release(self, lease: Lease) -> None:
        """Say that the last reader of what was lent has been started."""
        if lease.room.copied is None:
            return
        index = self.device.index
        number = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if index is None else index)
        stream = self._streams.get(number)
        if stream is None:
            # asking for it takes longer than everything else here
            stream = self._streams[number] = torch.cuda.current_stream(self.device)
        lease.room.copied.record(stream)

    def _next_room(self, nbytes: int) -> _Room:
        pinned = self.device.type == "cuda"
        if len(self._rooms) < self.depth:
            self._rooms.append(_Room(max(nbytes, 1 << 14), pinned))
            return self._rooms[-1]
        self._turn = (self._turn + 1) % self.depth
        room = self._rooms[self._turn]
        if pinned:
            room.copied.synchronize()  # over long ago, as a rule
        if room.memory.numel() < nbytes:
            room = self._rooms[self._turn] = _Room(nbytes, pinned)
        return room

    def __getstate__(self) -> dict[str, Any]:
        return {"device": str(self.device), "depth": self.depth}

    def __setstate__(self, state: dict[str, Any]) -> None:
        device = torch.device(state["device"])
        if device.type == "cuda" and not torch.cuda.is_available():
            device = torch.device("cpu")
        self.__init__(device, state["depth"])  # type: ignore[misc]  # pinned memory does not travel


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _lay_out(room: _Room, layout: Layout) -> Lease:
    """Arrays of these shapes and dtypes, one after the other."""
    host = room.memory.numpy()
    arrays, tensors, entries = [], [], []
    end = 0
    for shape, dtype in layout.parts:
        nbytes = math.prod(shape) * dtype.itemsize
        array = host[end : end + nbytes].view(dtype).reshape(shape)
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        arrays.append(array)
        tensors.append(torch.from_numpy(array))
        entries.append((torch_dtype(dtype), shape, strides, end // dtype.itemsize))
        end += _aligned(nbytes)
    return Lease(tuple(arrays), tuple(tensors), room.memory[: layout.nbytes], tuple(entries), room)
