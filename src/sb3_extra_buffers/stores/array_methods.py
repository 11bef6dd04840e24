"""The everyday methods of ``ndarray``, for what can be decoded into one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

__all__ = ["ArrayMethods"]

Array = npt.NDArray[Any]

# bytes to decode at a time
_BLOCK_BYTES = 1 << 24
# integers below are exact in float64
_EXACT = 1 << 53
# reductions of bools and integers, whose order does not matter
_COMBINE: dict[str, np.ufunc] = {
    "sum": np.add, "min": np.minimum, "max": np.maximum, "any": np.logical_or, "all": np.logical_and,
}  # fmt: skip


def _decoding(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.__array__(), name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, f"Return ``np.asarray(self).{name}(...)``."
    return method


def _reduction(name: str) -> Any:
    def method(self: Any, axis: Any = None, out: Any = None, keepdims: bool = False, **more: Any) -> Any:
        return self._reduce(name, axis, keepdims, out=out, **more)

    method.__name__, method.__doc__ = name, f"Return ``np.asarray(self).{name}(...)``."
    return method


class ArrayMethods:
    """Methods with the arguments of ``ndarray``'s; results are those of the decoded array, to the last bit.

    Reductions of bools and integers decode a part of the array at a time. Floats are added in an order that depends on
    the whole array, so the whole array is decoded.
    """

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> np.dtype[Any]: ...
        @property
        def size(self) -> int: ...
        def __getitem__(self, index: Any) -> Any: ...
        def __array__(self) -> Any: ...

    min, max, any, all = map(_reduction, ("min", "max", "any", "all"))
    std, var, argmin, argmax = map(_decoding, ("std", "var", "argmin", "argmax"))
    astype, ravel, transpose = map(_decoding, ("astype", "ravel", "transpose"))
    tolist, tobytes, item = map(_decoding, ("tolist", "tobytes", "item"))

    def __contains__(self, value: Any) -> bool:
        return value in self.__array__()

    def copy(self, order: Any = "C") -> Array:
        """Return the decoded array."""
        return np.asarray(self.__array__(), order=order)

    def flatten(self, order: Any = "C") -> Any:
        """Return the decoded array with a single axis."""
        return self.ravel(order)

    @property
    def T(self) -> Any:  # noqa: N802  # NumPy's name
        """The decoded array with its axes reversed."""
        return self.transpose()

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False, **more: Any) -> Any:
        """Return ``np.asarray(self).sum(...)``."""
        more |= {} if dtype is None else {"dtype": dtype}
        return self._reduce("sum", axis, keepdims, out=out, **more)

    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False, **more: Any) -> Any:
        """Return ``np.asarray(self).mean(...)``."""
        largest = {"b": 1, "i": 1 << 8 * self.dtype.itemsize, "u": 1 << 8 * self.dtype.itemsize}.get(self.dtype.kind)
        if largest is None or dtype is not None or out is not None or more or not 0 < self.size < _EXACT // largest:
            return self.__array__().mean(axis, dtype, out, keepdims=keepdims, **more)
        # the sum is exact, also as a float
        total = self._reduce("sum", axis, keepdims)
        return total / (self.size // np.size(total))

    def _reduce(self, name: str, axis: Any, keepdims: bool, out: Any = None, **more: Any) -> Any:
        if out is not None or more or self.dtype.kind not in "biu" or not self.size or not self.shape:
            return getattr(self.__array__(), name)(axis=axis, out=out, keepdims=keepdims, **more)
        axes = range(len(self.shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        over_blocks = 0 in axes or -len(self.shape) in axes
        parts: list[Array] = []
        for block in self._blocks():
            part = getattr(block, name)(axis=axis, keepdims=True)
            if parts and over_blocks:
                parts[0] = _COMBINE[name](parts[0], part)
            else:
                parts.append(part)
        reduced = np.concatenate(parts)
        return reduced if keepdims else reduced.squeeze(tuple(axes))[()]

    def _blocks(self) -> Iterator[Array]:
        """Decoded parts of the first axis."""
        n_rows = max(_BLOCK_BYTES * self.shape[0] // (self.size * self.dtype.itemsize), 1)
        return (self[start : start + n_rows] for start in range(0, self.shape[0], n_rows))
