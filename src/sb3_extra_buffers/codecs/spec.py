"""Shape and dtype of observations, and their conversion to rows of bytes and back."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import SpecMismatchError

ByteRows: TypeAlias = npt.NDArray[np.uint8]  # (n, nbytes), C-contiguous

_NUMBERS = "biufc"


def _casts_exactly(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether every value of dtype ``source`` is also a value of dtype ``target``."""
    if source == target:
        return True
    if source.kind not in _NUMBERS or target.kind not in _NUMBERS:
        return False
    if source.kind in "iu" and target.kind in "fc":
        # NumPy considers int64 to float64 safe, although it rounds above 2**53
        return 8 * source.itemsize <= np.finfo(target).nmant + 1
    return np.can_cast(source, target, "safe")


@dataclass(frozen=True, slots=True)
class ObsSpec:
    """Shape and dtype of one observation leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(operator.index, self.shape)))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.dtype.hasobject or self.dtype.itemsize == 0 or min(self.shape, default=0) < 0:
            raise SpecMismatchError(
                f"observations need a dtype of fixed size, got shape {self.shape} of {self.dtype!r}"
            )

    @property
    def nbytes(self) -> int:
        """Size of one observation."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_batch(self, batch: npt.ArrayLike) -> npt.NDArray[Any]:
        """Return a ``(n, *shape)`` batch in this dtype; copies only if values must be widened."""
        array = np.asarray(batch)
        if array.ndim == 0 or array.shape[1:] != self.shape or not _casts_exactly(array.dtype, self.dtype):
            raise SpecMismatchError(
                f"expected a batch of {('n', *self.shape)} {self.dtype}, got {array.shape} {array.dtype}"
            )
        return np.asarray(array, dtype=self.dtype)

    def to_rows(self, batch: npt.ArrayLike) -> ByteRows:
        """View a ``(n, *shape)`` batch as byte rows; copies only if it is not contiguous or must be widened."""
        array = np.ascontiguousarray(self.to_batch(batch))
        return array.reshape(len(array), math.prod(self.shape)).view(np.uint8)

    def from_rows(self, rows: ByteRows) -> npt.NDArray[Any]:
        """Undo `to_rows` without copying."""
        if rows.ndim != 2 or rows.shape[1] != self.nbytes:
            raise SpecMismatchError(f"expected rows of {self.nbytes} bytes, got an array of shape {rows.shape}")
        return rows.view(self.dtype).reshape(len(rows), *self.shape)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'}-{self.dtype}"
