"""Launching Triton kernels with little work on the host."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch

__all__ = [
    "BYTES_AT",
    "COLUMN_DTYPES",
    "COLUMN_SOURCES",
    "NO_COLUMNS",
    "SOURCE_DTYPES",
    "Columns",
    "Launcher",
    "StepColumns",
    "TableLayout",
]

Tensors = tuple[torch.Tensor, ...]

_address_of = torch.Tensor.data_ptr

# compiled kernels, by everything that they were compiled for
_compiled: dict[tuple[Any, ...], Any] = {}


class Columns(NamedTuple):
    """The columns of a batch: the tensors to fill, and the records to gather them from.

    The record of a transition holds the reward, whether the episode ended and whether that was a timeout, as float32,
    then the action, aligned to its dtype.
    """

    floats: torch.Tensor  # float32 [2, row, 1]: done * (1 - timeout), then the reward
    actions: torch.Tensor  # [row, ...]
    records: torch.Tensor  # uint8 [obs, record_bytes]

    def arguments(self) -> tuple[Tensors, tuple[int, int, int, int]]:
        """Pointers for a kernel (`COLUMN_DTYPES`), and its constants: see `columns_triton.gather_columns`."""
        floats, actions, records = self
        itemsize = actions.element_size()
        action = actions.stride(0) * itemsize
        at = 16 if itemsize == 8 else 12
        return (floats, actions, records, records), (action, 1 << (action - 1).bit_length(), at, records.stride(0))


class TableLayout(NamedTuple):
    """Where the columns of a step's rows are: float32 numbers, and actions as bytes."""

    numbers: torch.Tensor  # float32, of all columns
    column: int  # elements from one number of a row to the next
    row: int  # elements from a number to that of the next row
    n_numbers: int  # numbers that are written with a step
    actions: torch.Tensor  # uint8
    # bytes from row to row, bytes before the first action, bytes of an action, the next power of two
    action: tuple[int, int, int, int]

    def constants(self) -> tuple[int, ...]:
        """The constants of a kernel that writes to the table: see `columns_triton.store_columns`."""
        return (self.row, *self.action, self.n_numbers)


class StepColumns(NamedTuple):
    """The columns of a step, contiguous, where the device can read them."""

    action: torch.Tensor
    numbers: Tensors  # float32 or bool, at most 4; those left out are stored as 0

    def arguments(self) -> tuple[Tensors, int]:
        """Pointers for a kernel (`COLUMN_SOURCES`), and bits that say which numbers are given and which are bytes."""
        action, numbers = self
        given = (1 << len(numbers)) - 1
        for i, number in enumerate(numbers):
            if number.dtype is torch.bool:
                given |= 1 << (i + BYTES_AT)
        return (action, *numbers, *(action,) * (4 - len(numbers))), given


#: The first bit of `StepColumns.arguments` that says which numbers are bytes.
BYTES_AT = 8
#: Parameters of kernels that take `StepColumns.arguments`. One kernel must do for all of them, whatever their
#: alignment is, because another one would be compiled in the middle of training.
COLUMN_SOURCES = ("action_ptr", "first_ptr", "second_ptr", "third_ptr", "fourth_ptr")
SOURCE_DTYPES = (torch.uint8,) * 5


#: Dtypes of the pointers of `Columns.arguments`.
COLUMN_DTYPES = (torch.float32, torch.uint8, torch.float32, torch.uint8)
#: Constants of a kernel that gathers no columns; any tensors serve as its pointers.
NO_COLUMNS = (0, 1, 0, 0)


class Launcher:
    """Launches ``kernel`` on ``device``; its arguments are pointers, some of them to ``tables``, then numbers.

    Triton inspects every argument of every call to find the variant to run, and asks the driver about every pointer.
    Here the caller names the variant, and pointers are passed as numbers, which takes a fraction of the time.
    ``dtypes`` are those of the pointers before and after the tables; ``key`` is what else the kernel is compiled for.
    With fewer registers (``max_registers``) more programs run at a time.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        key: Any,
        tables: Tensors,
        dtypes: tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]],
        n_warps: int,
        max_registers: int | None = None,
    ) -> None:
        self._kernel, self._device = kernel, device
        # every product is rounded, as on the host
        self._options: dict[str, Any] = {"num_warps": n_warps, "enable_fp_fusion": False}
        if max_registers is not None:
            self._options["maxnreg"] = max_registers
        self._tables, self._dtypes = tables, dtypes
        self._addresses = tuple(table.data_ptr() for table in tables)
        self._key = (key, tuple(address & 15 > 0 for address in self._addresses))
        self._variants: dict[Any, Any] = {}

    def start(
        self, variant: Any, grid: tuple[int, int, int], before: Tensors, after: Tensors, numbers: tuple[Any, ...]
    ) -> None:
        """Launch the kernel with ``(*before, *tables, *after, *numbers)``.

        ``variant`` distinguishes calls with different compile-time constants among the numbers.
        """
        first = [*map(_address_of, before)]
        last = [*map(_address_of, after)]
        # Triton compiles one kernel for addresses that are multiples of 16, and another for any address
        bits = reduce(or_, last, reduce(or_, first, 0))
        key = variant if not bits & 15 else (variant, tuple(address & 15 > 0 for address in (*first, *last)))
        compiled = self._variants.get(key)
        index = self._device.index
        # private functions of torch: the public ones take longer than the launch
        if compiled is None or torch._C._cuda_getDevice() != index:
            self._start_slowly(key, grid, before, after, numbers)
            return
        run, function, metadata = compiled
        stream = torch._C._cuda_getCurrentRawStream(index)
        try:
            run(*grid, stream, function, metadata, None, None, None, *first, *self._addresses, *last, *numbers)
        except TypeError:
            # a version of Triton with another launch signature
            self._start_slowly(key, grid, before, after, numbers)

    def _start_slowly(
        self, variant: Any, grid: tuple[int, int, int], before: Tensors, after: Tensors, numbers: tuple[Any, ...]
    ) -> None:
        """Launch through Triton, and remember the compiled kernel."""
        parts = zip((before, after), self._dtypes, strict=True)
        first, last = ([t.view(-1).view(d) for t, d in zip(*part, strict=True)] for part in parts)
        args = (*first, *self._tables, *last, *numbers)
        if self._device.type != "cuda":
            self._kernel[grid](*args)  # Triton's interpreter
            return
        key = (self._kernel, self._device, self._key, variant)
        with torch.cuda.device(self._device):
            compiled = _compiled.get(key)
            if compiled is None:
                compiled = _compiled[key] = self._kernel[grid](*args, **self._options)
            else:
                compiled[grid](*args)
        self._variants[variant] = compiled.run, compiled.function, compiled.packed_metadata
