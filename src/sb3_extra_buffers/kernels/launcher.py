"""Launching Triton kernels with little work on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["Columns", "Launcher"]

Tensors = tuple[torch.Tensor, ...]

# compiled kernels, by everything that they were compiled for
_compiled: dict[tuple[Any, ...], Any] = {}


class Columns(NamedTuple):
    """What else belongs to the rows of a batch: where it goes, and where it comes from."""

    floats: torch.Tensor  # float32 [2, row, ...]
    floats_from: torch.Tensor
    actions: torch.Tensor  # [row, ...]
    actions_from: torch.Tensor


class Launcher:
    """Launches ``kernel`` on ``device``; its arguments are pointers, some of them to ``tables``, then numbers.

    Triton inspects every argument of every call to find the variant to run, and asks the driver about every pointer.
    Here the caller names the variant, and pointers are passed as numbers, which takes a fraction of the time.
    ``dtypes`` are those of the pointers before and after the tables; ``key`` is what else the kernel is compiled for.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        key: Any,
        tables: Tensors,
        dtypes: tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]],
        n_warps: int,
    ) -> None:
        self._kernel, self._device, self._key, self._n_warps = kernel, device, key, n_warps
        self._tables, self._dtypes = tables, dtypes
        self._addresses = tuple(table.data_ptr() for table in tables)
        self._variants: dict[Any, Any] = {}

    def start(
        self, variant: Any, grid: tuple[int, int, int], before: Tensors, after: Tensors, numbers: tuple[Any, ...]
    ) -> None:
        """Launch the kernel with ``(*before, *tables, *after, *numbers)``.

        ``variant`` distinguishes calls with different compile-time constants among the numbers.
        """
        first = [tensor.data_ptr() for tensor in before]
        last = [tensor.data_ptr() for tensor in after]
        # Triton compiles one kernel for addresses that are multiples of 16, and another for any address
        unaligned = tuple(address & 15 > 0 for address in (*first, *last))
        compiled = self._variants.get((variant, unaligned))
        # private functions of torch: the public ones take longer than the launch
        if compiled is None or torch._C._cuda_getDevice() != self._device.index:
            self._start_slowly((variant, unaligned), grid, before, after, numbers)
            return
        run, function, metadata = compiled
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        try:
            run(*grid, stream, function, metadata, None, None, None, *first, *self._addresses, *last, *numbers)
        except TypeError:
            # a version of Triton with another launch signature
            self._start_slowly((variant, unaligned), grid, before, after, numbers)

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
                compiled = _compiled[key] = self._kernel[grid](*args, num_warps=self._n_warps)
            else:
                compiled[grid](*args)
        self._variants[variant] = compiled.run, compiled.function, compiled.packed_metadata
