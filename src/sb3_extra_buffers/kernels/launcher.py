"""Starting Triton's kernels with little to do on the host."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Launcher"]

Tensors = tuple[torch.Tensor, ...]

# kernels that were compiled, by what they were compiled for
_compiled: dict[tuple[Any, ...], Any] = {}


class Launcher:
    """Starts ``kernel`` on ``device``; its arguments are pointers, some of them to ``tables``, and then numbers.

    Triton looks at every argument of every call to find out which variant is meant, and asks the driver about every
    pointer. Here the caller says which variant it is, and pointers go as numbers, which takes a fraction of the time.
    ``dtypes`` are those of the pointers before and after the tables, and ``key`` says what else was compiled for.
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
        """Start the kernel with ``(*before, *tables, *after, *numbers)``.

        ``variant`` tells apart what has to be compiled apart: other constants among the numbers.
        """
        first = [tensor.data_ptr() for tensor in before]
        last = [tensor.data_ptr() for tensor in after]
        # a kernel is compiled for addresses that are multiples of 16, and again for others
        odd = tuple(address & 15 > 0 for address in (*first, *last))
        compiled = self._variants.get((variant, odd))
        if compiled is None or torch._C._cuda_getDevice() != self._device.index:
            self._start_slowly((variant, odd), grid, before, after, numbers)
            return
        run, function, metadata = compiled
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        try:
            run(*grid, stream, function, metadata, None, None, None, *first, *self._addresses, *last, *numbers)
        except TypeError:
            # a version of Triton whose kernels are started in another way, which it knows itself
            self._start_slowly((variant, odd), grid, before, after, numbers)

    def _start_slowly(
        self, key: Any, grid: tuple[int, int, int], before: Tensors, after: Tensors, numbers: tuple[Any, ...]
    ) -> None:
        parts = zip((before, after), self._dtypes, strict=True)
        first, last = ([t.view(-1).view(d) for t, d in zip(*part, strict=True)] for part in parts)
        args = (*first, *self._tables, *last, *numbers)
        if self._device.type != "cuda":
            self._kernel[grid](*args)  # Triton's interpreter
            return
        with torch.cuda.device(self._device):
            made = _compiled.get((self._kernel, self._device, self._key, key))
            if made is None:
                made = self._kernel[grid](*args, num_warps=self._n_warps)
                _compiled[(self._kernel, self._device, self._key, key)] = made
            else:
                made[grid](*args)
        self._variants[key] = made.run, made.function, made.packed_metadata
