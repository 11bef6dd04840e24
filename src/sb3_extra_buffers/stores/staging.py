"""Uploads of small arrays to a device: packed into pinned memory, sent in one copy, without waiting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.stores.device_base import usable_device, wait_before_freeing

__all__ = ["LaunchDone", "Lease", "Staging", "StagingLayout", "torch_dtype"]

Array = npt.NDArray[Any]

# copies that may be in flight at a time
_DEPTH = 8
_ALIGNMENT = 64
# layouts to remember; batches usually come in a few sizes
_MAX_LAYOUTS = 64
# a large array is copied in about this many pieces; their size is a power of two with an exponent in this range
_PIECES, _PIECE_BITS = 8, (19, 22)


@cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of the same bytes."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class StagingLayout:
    """Where arrays of these shapes and dtypes are in a block. Keep the object: leases are cached by its identity."""

    def __init__(self, *parts: tuple[tuple[int, ...], np.dtype[Any]]) -> None:
        self.parts = parts
        self.nbytes = max(sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in parts), _ALIGNMENT)


class Lease(NamedTuple):
    """Arrays in memory that a device can read, to be filled and then sent."""

    arrays: tuple[Array, ...]
    tensors: tuple[torch.Tensor, ...]  # the same memory
    whole: torch.Tensor  # all of it, as bytes
    entries: tuple[tuple[Any, ...], ...]  # dtype, shape, strides and offset of each tensor
    block: _Block


class _Block:
    """Pinned memory for one copy in flight, and its leases by layout."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.event: Any = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]  # torch's own
        #: tells when the memory can be used again
        self.copied: Any = self.event
        self.leases: dict[StagingLayout, Lease] = {}

    def is_free(self) -> bool:
        """Whether the device is done with the memory."""
        return self.copied is None or self.copied.query()

    def acquire(self, layout: StagingLayout) -> Lease:
        lease = self.leases.get(layout)
        if lease is None:
            if len(self.leases) >= _MAX_LAYOUTS:
                self.leases.clear()
            lease = self.leases[layout] = self._lease(layout)
        return lease

    def _lease(self, layout: StagingLayout) -> Lease:
        memory = self.memory.numpy()
        arrays, entries, end = [], [], 0
        for shape, dtype in layout.parts:
            nbytes = math.prod(shape) * dtype.itemsize
            arrays.append(memory[end : end + nbytes].view(dtype).reshape(shape))
            strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
            entries.append((torch_dtype(dtype), shape, strides, end // dtype.itemsize))
            end += _aligned(nbytes)
        tensors = tuple(torch.from_numpy(array) for array in arrays)
        return Lease(tuple(arrays), tensors, self.memory[: layout.nbytes], tuple(entries), self)


class LaunchDone:
    """Tells when a launch has finished whose kernel reports its number in pinned memory; cheaper than an event."""

    __slots__ = ("_launch", "_reported", "_wait")

    def __init__(self, launch: int, reported: Array, wait: Callable[[], None]) -> None:
        # ``reported`` is an array whose first number is that of the last finished launch
        self._launch, self._reported, self._wait = launch, reported, wait

    def query(self) -> bool:
        """Whether the launch has finished."""
        return bool(self._reported[0] >= self._launch)

    def synchronize(self) -> None:
        """Wait until the launch has finished."""
        self._wait()


class Staging:
    """Uploads arrays to ``device``; up to ``depth`` uploads can be in flight. Returned tensors are newly allocated."""

    def __init__(self, device: torch.device, depth: int = _DEPTH) -> None:
        self.device, self.depth = device, depth
        self._blocks: list[_Block] = []
        self._turn = 0
        self._layouts: dict[Any, StagingLayout] = {}
        self._streams: dict[int, Any] = {}
        wait_before_freeing(self, device)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(block.memory.numel() for block in self._blocks)

    def upload(self, arrays: Sequence[Array | Sequence[Array]]) -> list[torch.Tensor]:
        """Each array as a tensor; a sequence of arrays is stacked on the way."""
        lease = self.acquire(self.layout(*[
            (array.shape, array.dtype) if type(array) is np.ndarray else ((len(array), *array[0].shape), array[0].dtype)
            for array in arrays
        ]))  # fmt: skip
        for target, array in zip(lease.arrays, arrays, strict=True):
            if type(array) is np.ndarray:
                target[...] = array
            else:
                for row, part in zip(target, array, strict=True):
                    row[...] = part
        return self.send(lease)

    def upload_in_pieces(self, array: Array) -> torch.Tensor:
        """The bytes of a large contiguous ``array`` as a tensor.

        All of torch's threads copy a piece to pinned memory while the device fetches the piece before, so two blocks
        (``depth``) are enough.
        """
        flat = array.reshape(-1).view(np.uint8)
        # torch takes no arrays that cannot be written to
        source = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
        if self.device.type != "cuda":
            return source.to(self.device, copy=True)
        n_bytes = len(source)
        low, high = _PIECE_BITS
        bits = min(max((n_bytes // _PIECES).bit_length() - 1, low), high)
        piece = min(1 << bits, max(n_bytes, 1))
        layout = self.layout(((piece,), flat.dtype))
        target = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        for first in range(0, n_bytes, piece):
            part, lease = source[first : first + piece], self.acquire(layout)
            pinned = lease.whole[: len(part)].copy_(part)
            target[first : first + piece].copy_(pinned, non_blocking=True)
            self.release(lease)
        return target

    def layout(self, *parts: tuple[tuple[int, ...], np.dtype[Any]]) -> StagingLayout:
        """The layout of these parts; equal parts give the same object."""
        layout = self._layouts.get(parts)
        if layout is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[parts] = StagingLayout(*parts)
        return layout

    def acquire(self, layout: StagingLayout) -> Lease:
        """Arrays to fill, for `send` or for a kernel that reads them in place.

        After launching such a kernel, call `release`; until then, this memory is not used for anything else.
        """
        blocks = self._blocks
        # fast path: the next block has had this layout before, and the device is done with it
        if len(blocks) == self.depth:
            turn = self._turn + 1
            block = blocks[turn if turn < self.depth else 0]
            lease = block.leases.get(layout)
            if lease is not None and block.is_free():
                self._turn = turn if turn < self.depth else 0
                return lease
        return self._next_block(layout.nbytes).acquire(layout)

    def send(self, lease: Lease) -> list[torch.Tensor]:
        """Copy the arrays of ``lease`` to new tensors on the device, and release it."""
        if self.device.type != "cuda":
            return [torch.from_numpy(array.copy()).to(self.device) for array in lease.arrays]
        packed = torch.empty(lease.whole.numel(), dtype=torch.uint8, device=self.device)
        packed.copy_(lease.whole, non_blocking=True)
        self.release(lease)
        return [
            packed.view(dtype).as_strided(shape, strides, offset) for dtype, shape, strides, offset in lease.entries
        ]

    def release(self, lease: Lease, done: LaunchDone | None = None) -> None:
        """Allow the memory to be used again when ``done`` says so, or once everything launched so far is done."""
        block = lease.block
        if block.event is None:
            return
        if done is not None:
            block.copied = done
            return
        index = self.device.index
        # private: torch.cuda.current_stream() takes longer than everything else here
        number = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if index is None else index)
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = torch.cuda.current_stream(self.device)
        block.event.record(stream)
        block.copied = block.event

    def _next_block(self, nbytes: int) -> _Block:
        pinned = self.device.type == "cuda"
        if len(self._blocks) < self.depth:
            self._blocks.append(_Block(max(nbytes, 1 << 14), pinned))
            return self._blocks[-1]
        self._turn = (self._turn + 1) % self.depth
        block = self._blocks[self._turn]
        if not block.is_free():
            block.copied.synchronize()  # rare: usually done long ago
        if block.memory.numel() < nbytes:
            block = self._blocks[self._turn] = _Block(nbytes, pinned)
        return block

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_staging, (str(self.device), self.depth)  # staged bytes and pinned memory are not pickled


def _restore_staging(device: str, depth: int) -> Staging:
    return Staging(usable_device(device), depth)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
