"""A ring of rows that a device allocates itself, with memory only where rows are in use."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.stores.device_base import DevicePlace, wait_before_freeing

__all__ = ["SideRows", "SideUse"]

Array = npt.NDArray[Any]

# the report counts launches modulo this number; see `kernels.gather_torch.write_frames_reference`
_LAUNCHES = 1 << 16
# launches whose bounds are remembered
_REMEMBERED = 256


class SideUse(NamedTuple):
    """Writes launched so far, and an upper bound of the rows that they took."""

    launch: int = 0
    issued: int = 0


class SideRows:
    """Rows of ``n_words`` words on a device (in host memory with ``place.pinned``), in a ring of positions.

    The device takes positions in order. The host does not know how many a write takes, so it maps as many pages ahead
    as the writes in flight may need. Each write reports in pinned memory how many rows were taken and where the oldest
    row in use is; pages before it are used again.
    """

    def __init__(
        self, per_page: int, n_pages: int, n_words: int, dtype: torch.dtype, place: DevicePlace, triton: bool
    ) -> None:
        self.per_page, self.capacity, self.n_words = per_page, per_page * n_pages, n_words
        self.dtype, self.place, self.triton = dtype, place, triton
        #: int64 [page]: the address of each page; without Triton, its first row in `whole`.
        self.table = torch.zeros(n_pages, dtype=torch.int64, device=place.device)
        #: All pages, without Triton.
        self.whole = self._new(1)
        # number and memory of each mapped page, the oldest first; numbers only increase
        self._pages: deque[tuple[int, Any]] = deque()
        self._allocated = 0  # rows of `whole` in pages
        self._end = 0  # the first page that is not mapped
        self._head, self._tail = 0, 0  # positions as last reported; they only increase
        self._set_up_report(np.zeros(2, np.int64))

    def _set_up_report(self, values: Array) -> None:
        #: int64 [2]: the position after the last row taken and the number of the write, then the oldest row in use.
        self.report = torch.from_numpy(values.astype(np.int64))
        if self.place.device.type == "cuda":
            self.report = self.report.pin_memory()
            wait_before_freeing(self, self.place.device)
        self._notes = self.report.numpy()
        # the bound of the rows taken up to each of the last launches
        self._bounds = [0] * _REMEMBERED

    def _new(self, n_rows: int) -> torch.Tensor:
        return self.place.empty((n_rows, self.n_words), self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        pages = sum(page.nbytes for _, page in self._pages) if self.triton else 0
        return pages + self.whole.nbytes + self.table.nbytes

    def in_flight(self, use: SideUse) -> tuple[int, int]:
        """Writes that the device has not reported yet, and how many rows they may take."""
        packed = int(self._notes[0])
        count = (use.launch - packed) % _LAUNCHES
        # from the same word as the count, so both are of the same write
        self._head += (packed // _LAUNCHES - self._head) % self.capacity
        if count >= _REMEMBERED:
            return count, self.capacity
        return count, use.issued - self._bounds[(use.launch - count) % _REMEMBERED]

    def remember(self, use: SideUse) -> None:
        """Note the bound of a launch; idempotent."""
        self._bounds[use.launch % _REMEMBERED] = use.issued

    def reserve(self, count: int) -> None:
        """Map pages for ``count`` rows after those reported. Changes nothing that can be read, even if interrupted."""
        stop = -(-(self._head + count) // self.per_page)
        if stop <= self._end:
            return
        self._tail += (int(self._notes[1]) - self._tail) % self.capacity
        self._end = max(self._end, self._head // self.per_page)
        while self._end < stop:
            oldest = self._pages[0][0] if self._pages else self._end
            is_free = (oldest + 1) * self.per_page <= self._tail
            self._map(self._end, self._pages.popleft()[1] if is_free else self._new_page())
            self._end += 1

    def _new_page(self) -> Any:
        if self.triton:
            return self._new(self.per_page)
        # torch needs a single tensor
        first, stop = self._allocated, self._allocated + self.per_page
        if stop > len(self.whole):
            grown = self._new(max(stop, min(first + first // 2, self.capacity)))
            grown[: len(self.whole)] = self.whole
            self.whole = grown
        self._allocated = stop
        return first

    def _map(self, number: int, page: Any) -> None:
        # a kernel launch, which does not wait
        self.table[number % len(self.table)].fill_(page.data_ptr() if self.triton else page)
        self._pages.append((number, page))

    # ---- copies ----

    def frozen(self) -> SideRows:
        """A copy in host memory, to be pickled; everything launched so far must be done."""
        copied = object.__new__(SideRows)
        pages = deque((number, page.to("cpu", copy=True) if self.triton else page) for number, page in self._pages)
        copied.__dict__.update(
            self.__dict__, whole=self.whole.to("cpu", copy=True), _pages=pages, _notes=self._notes.copy()
        )
        return copied

    def __getstate__(self) -> dict[str, Any]:
        names = ("per_page", "capacity", "n_words", "dtype", "place", "triton", "_end", "_head", "_tail")
        rows = [(number, self._rows_of(page).cpu().numpy()) for number, page in self._pages]
        return {name: self.__dict__[name] for name in names} | {"rows": rows, "notes": self._notes.copy()}

    def _rows_of(self, page: Any) -> torch.Tensor:
        return page if self.triton else self.whole[page : page + self.per_page]

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows, notes = state.pop("rows"), state.pop("notes")
        self.__dict__.update(state)
        # rows from a machine with a GPU
        self.triton &= self.place.device.type == "cuda"
        self.table = torch.zeros(self.capacity // self.per_page, dtype=torch.int64, device=self.place.device)
        self.whole, self._allocated = self._new(1), 0
        self._pages = deque()
        for number, values in rows:
            page = self._new_page()
            self._rows_of(page).copy_(torch.from_numpy(np.array(values)))
            self._map(number, page)
        self._set_up_report(notes)
