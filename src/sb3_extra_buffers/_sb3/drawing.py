"""Random indices of transitions as SB3 draws them, at a fraction of the cost of NumPy's calls."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.kernels import compiled_kernels, has_numba

__all__ = ["GlobalGenerator", "IndexDraws"]

Indices = npt.NDArray[np.int64]

# SB3 draws with this function; if it has been replaced, for example by a test, the replacement is called
_RANDINT = np.random.randint


class GlobalGenerator:
    """NumPy's global generator, for compiled code that draws from it."""

    def __init__(self) -> None:
        # a single attribute: after an interrupt, no generator may be left with the addresses of another
        self._found: tuple[Any, int, int] = None, 0, 0

    def find(self) -> tuple[Any, int, int] | None:
        """The bit generator, the address of its ``next_uint32`` and its state; None if `randint` has been replaced."""
        if np.random.randint is not _RANDINT:
            return None
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in NumPy's stubs
        found = self._found
        if generator is not found[0]:
            address = ctypes.cast(generator.ctypes.next_uint32, ctypes.c_void_p).value
            self._found = found = generator, address or 0, generator.ctypes.state_address
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return GlobalGenerator, ()  # addresses belong to this process


class IndexDraws:
    """Draws indices from NumPy's global generator; one compiled call, where numba is installed."""

    def __init__(self) -> None:
        self._kernel: Any = None
        self._random = GlobalGenerator()

    def fill(self, out: Indices, n_steps: int, n_envs: int, low: int, high: int, shift: int) -> None:
        """Fill ``out[2, count]`` with indices ``step * n_envs + env``, and the same plus ``n_steps * n_envs``.

        Steps are ``(np.random.randint(low, high, count) + shift) % n_steps``; environments, drawn afterwards, are
        ``np.random.randint(0, n_envs, count)``.
        """
        if self._kernel is None:
            self._kernel = compiled_kernels("draws").draw_indices if has_numba() else False
        found = self._random.find()
        if not self._kernel or found is None or n_steps >> 32 or n_envs >> 32:
            _fill(out, n_steps, n_envs, low, high, shift)
            return
        generator, function, state = found
        with generator.lock:
            self._kernel(out, n_steps, n_envs, low, high - low - 1, shift, function, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexDraws, ()


def _fill(out: Indices, n_steps: int, n_envs: int, low: int, high: int, shift: int) -> None:
    count = out.shape[1]
    steps = np.random.randint(low, high, size=count)
    if shift:
        steps = (steps + shift) % n_steps
    np.multiply(steps, n_envs, out=out[0])
    out[0] += np.random.randint(0, high=n_envs, size=(count,))
    np.add(out[0], n_steps * n_envs, out=out[1])
