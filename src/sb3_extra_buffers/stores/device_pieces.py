"""Rows on a device that are allocated when they are needed, and a list of free rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.stores.device_base import DevicePlace

__all__ = ["Pieces", "SlotChange", "SlotPool", "Slots", "word_dtype"]

Array = npt.NDArray[Any]
Slots = npt.NDArray[np.int32]

# pieces that the expected rows are divided into
_N_PIECES = 64
_WORDS = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.int16), np.dtype(np.uint8))


def word_dtype(nbytes: int) -> np.dtype[Any]:
    """The widest integer that divides ``nbytes``."""
    return next(dtype for dtype in _WORDS if nbytes % dtype.itemsize == 0)


class Pieces:
    """Rows of ``n_words`` words on a device (in host memory with ``place.pinned``), at most ``max_rows`` of them.

    With ``triton``, rows are in pieces of ``per_piece`` rows that never move, and kernels find them by ``addresses``.
    Without, torch needs a single tensor, which is copied when it grows.

    Args:
        max_rows: Rows that may be reserved.
        expected: Rows that will usually be reserved; a piece is a fraction of them.
        together: The number of rows that one piece must hold together, such as those of a step.
        n_words: Words of a row.
        dtype: A dtype of `word_dtype`.
        place: Where the rows are.
        triton: Whether Triton kernels read them.
    """

    def __init__(
        self,
        max_rows: int,
        expected: int,
        together: int,
        n_words: int,
        dtype: np.dtype[Any],
        place: DevicePlace,
        triton: bool,
    ) -> None:
        self.n_words, self.itemsize, self.place, self.triton = n_words, dtype.itemsize, place, triton
        self.dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        per_piece = max(-(-expected // (_N_PIECES * together)), 1) * together
        self.per_piece = per_piece if triton else max(max_rows, 1)
        self.max_rows = max_rows
        self._tensors: list[torch.Tensor | None] = [None] * -(-max(max_rows, 1) // self.per_piece)
        #: int64 [piece], on the device: where each piece is, 0 if it is not allocated.
        self.addresses = torch.zeros(len(self._tensors), dtype=torch.int64, device=place.device)
        if not triton:
            self._tensors[0] = self._new(1)

    def _new(self, n_rows: int) -> torch.Tensor:
        return self.place.empty((n_rows, self.n_words), self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in self._tensors if tensor is not None) + self.addresses.nbytes

    @property
    def whole(self) -> torch.Tensor:
        """All rows that were reserved, in one tensor; only without Triton."""
        tensor = self._tensors[0]
        assert not self.triton
        assert tensor is not None
        return tensor

    def reserve(self, first: int, stop: int) -> None:
        """Allocate rows ``first`` to ``stop``. Changes nothing that can be read, even if it is interrupted."""
        if not self.triton:
            tensor = self.whole
            if stop > len(tensor):
                grown = self._new(max(stop, min(len(tensor) + len(tensor) // 2, self.max_rows)))
                grown[: len(tensor)] = tensor
                self._tensors[0] = grown
            return
        for piece in range(first // self.per_piece, -(-stop // self.per_piece)):
            if self._tensors[piece] is None:
                self._place(piece, self._new(min(self.per_piece, self.max_rows - piece * self.per_piece)))

    def _place(self, piece: int, tensor: torch.Tensor) -> None:
        # a kernel launch, which does not wait; first, so that a piece that exists has an address
        self.addresses[piece].fill_(tensor.data_ptr())
        self._tensors[piece] = tensor

    def put(self, rows: Slots, values: Array) -> None:
        """Copy ``values``, bytes of a row each, to reserved rows."""
        words = torch.from_numpy(np.ascontiguousarray(values)).view(self.dtype)
        pieces, offsets = np.divmod(rows.astype(np.int64), self.per_piece)
        for piece in np.unique(pieces).tolist():
            tensor, here = self._tensors[piece], torch.from_numpy(np.flatnonzero(pieces == piece))
            assert tensor is not None
            to = torch.from_numpy(offsets)[here].to(tensor.device)
            tensor[to] = words[here].to(tensor.device)

    def frozen(self) -> Pieces:
        """A copy in host memory, to be pickled."""
        copied = object.__new__(Pieces)
        tensors = [None if tensor is None else tensor.to("cpu", copy=True) for tensor in self._tensors]
        copied.__dict__.update(
            self.__dict__, _tensors=tensors, addresses=torch.zeros_like(self.addresses, device="cpu")
        )
        return copied

    def __getstate__(self) -> dict[str, Any]:
        pieces = {i: tensor.cpu().numpy() for i, tensor in enumerate(self._tensors) if tensor is not None}
        names = ("n_words", "itemsize", "dtype", "place", "triton", "per_piece", "max_rows")
        return {name: self.__dict__[name] for name in names} | {"pieces": pieces}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pieces: dict[int, Array] = state.pop("pieces")
        self.__dict__.update(state)
        was_triton, per_piece = self.triton, self.per_piece
        # rows from a machine with a GPU: torch needs them in one tensor
        self.triton &= self.place.device.type == "cuda"
        if was_triton and not self.triton:
            self.per_piece = max(self.max_rows, 1)
        self._tensors = [None] * -(-max(self.max_rows, 1) // self.per_piece)
        self.addresses = torch.zeros(len(self._tensors), dtype=torch.int64, device=self.place.device)
        if not self.triton:
            n_rows = max([i * per_piece + len(rows) for i, rows in pieces.items()], default=1)
            whole = self._tensors[0] = self._new(max(n_rows, 1))
            for i, rows in pieces.items():
                whole[i * per_piece : i * per_piece + len(rows)] = torch.from_numpy(np.array(rows))
            return
        for i, rows in pieces.items():
            tensor = self._new(len(rows))
            tensor.copy_(torch.from_numpy(np.array(rows)))
            self._place(i, tensor)


class SlotChange(NamedTuple):
    """Slots taken and freed by one write, and the state of the pool after it."""

    taken: Slots
    freed: Slots
    first: int  # where ``freed`` goes in the list of free slots
    n_free: int
    end: int


class SlotPool:
    """Which slots, numbered from ``first``, are free; kept on the host.

    A change is planned and then committed; committing is idempotent.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = self.end = first  # every slot from `end` on is free and was never taken
        self.n_free = 0
        self._free: Slots = np.zeros(16, np.int32)

    @property
    def nbytes(self) -> int:
        return self._free.nbytes

    @property
    def free(self) -> Slots:
        """Free slots below `end`."""
        return self._free[: self.n_free]

    def peek(self, count: int) -> Slots:
        """The next ``count`` slots to take."""
        n_old = min(count, self.n_free)
        taken = self._free[self.n_free - n_old : self.n_free]
        return np.concatenate([taken, np.arange(self.end, self.end + count - n_old, dtype=np.int32)])

    def plan(self, taken: Slots, freed: Slots) -> SlotChange:
        """Take slots that `peek` returned, and free others."""
        n_old = min(len(taken), self.n_free)
        first, end = self.n_free - n_old, self.end + len(taken) - n_old
        n_free = first + len(freed)
        if n_free > len(self._free):
            self._free = np.concatenate([self._free, np.zeros(n_free, np.int32)])
        return SlotChange(taken, freed, first, n_free, end)

    def commit(self, change: SlotChange) -> None:
        self._free[change.first : change.n_free] = change.freed
        # one call, which no signal can interrupt
        self.__dict__.update(n_free=change.n_free, end=change.end)

    def clear(self) -> None:
        self.__dict__.update(n_free=0, end=self.first)

    def check(self, used: Array) -> None:
        """Raise unless every slot below `end` is either free or in ``used``, once."""
        everything = np.sort(np.concatenate([self.free, used]))
        if not np.array_equal(everything, np.arange(self.first, self.end)):
            raise AssertionError("a slot is used twice, used while it is free, or lost")

    def copy(self) -> SlotPool:
        copied = SlotPool(self.first)
        copied.__dict__.update(self.__dict__, _free=self._free.copy())
        return copied
