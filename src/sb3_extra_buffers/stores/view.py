"""A store that indexes like the array it stands for."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.errors import ArgumentError, IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.kernels import frame_kernels
from sb3_extra_buffers.stores.frames import Indices
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.usage import MemoryUsage

if TYPE_CHECKING:
    from typing_extensions import Self

_ALL = slice(None)
_BYTE = np.dtype(np.uint8)
# NumPy 2 moved it
_ComplexWarning: Any = getattr(np, "exceptions", np).ComplexWarning


class StoreView(np.lib.mixins.NDArrayOperatorsMixin):
    """Looks like an array of shape ``(*lead_shape, *obs_shape)``; holds payloads, never that array.

    Reading gives fresh arrays, never views of the store: writing into a result changes nothing here. Views of the
    same store differ in the table of cells alone, so `swapaxes` and `reshape` copy no observation.
    """

    def __init__(
        self,
        store: ObservationStore,
        lead_shape: Sequence[int],
        indices: Indices | None = None,
        base: int | None = None,
    ) -> None:
        """View ``indices``, the observations from ``base`` on, or new ones."""
        self.store = store
        self.lead_shape = tuple(map(operator.index, lead_shape))
        self._indices = indices
        if indices is None and base is None:
            base = store.allocate(math.prod(self.lead_shape))
        self._base = base or 0
        # what writing a step needs every time; no step of a table of cells is written that way
        self._dtype = store.spec.dtype
        self._step_shape = self.shape[1:]
        self._n_steps = self.lead_shape[0] if self.lead_shape and indices is None and store.spec.nbytes else 0
        self._row_elements = math.prod(store.spec.shape)
        self._step_indices = np.arange(store.n_streams, dtype=np.int64)

    # ---- what an array tells of itself ----

    @property
    def obs_shape(self) -> tuple[int, ...]:
        return self.store.spec.shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lead_shape + self.obs_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.store.spec.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes held for these observations, not what a plain array would take (that is ``size * itemsize``).

        Views of one store share what it holds, each in proportion to its cells.
        """
        share = math.prod(self.lead_shape) / max(self.store.n_obs, 1)
        return round(self.store.memory_usage().total * share)

    def memory_usage(self) -> MemoryUsage:
        """What the store behind this view holds, by purpose."""
        return self.store.memory_usage()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, {self.store.describe()})"

    # ---- reading ----

    def __getitem__(self, index: Any) -> Any:
        indices, rest = self._locate(index)
        if indices is None:
            return self.__array__()[rest]
        if rest is not None:
            return self._read(indices)[rest]
        batch = self._read(indices)
        return batch if batch.ndim else batch[()]

    def __iter__(self) -> Iterator[Any]:
        return (self[step] for step in range(len(self)))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("compressed observations cannot become an array without a copy")
        array = self._read(self._table())
        return array if dtype is None else array.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [np.asarray(value) if isinstance(value, StoreView) else value for value in inputs]
        if any(isinstance(value, StoreView) for value in kwargs.get("out", ())):
            return NotImplemented
        return getattr(ufunc, method)(*plain, **kwargs)

    def copy(self) -> npt.NDArray[Any]:
        """All of it as a plain array."""
        return self.__array__()

    def astype(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """All of it as a plain array of another dtype."""
        return self.__array__().astype(dtype)

    def read_with(self, others: Sequence[StoreView], index: Any) -> list[npt.NDArray[Any]]:
        """``[self[index], *(other[index] for other in others)]``, frames they share decoded once.

        ``index`` selects observations, not parts of them; ``others`` are views of the same store.
        """
        sets = self._pairs(others, index)
        if sets is not None:
            rows = self.store.read(sets).view(self._dtype)
            return list(rows.reshape(*sets.shape, *self._step_shape[1:]))
        if any(other.store is not self.store for other in others):
            raise SpecMismatchError("views of different stores cannot be read together")
        indices = self._whole(index)
        sets = np.empty((1 + len(others), indices.size), np.int64)
        sets[0] = indices.reshape(-1)
        for place, other in enumerate(others, 1):
            if self._indices is None and other._indices is None and other.lead_shape == self.lead_shape:
                np.add(sets[0], other._base - self._base, out=sets[place])
            else:
                sets[place] = other._whole(index).reshape(-1)
        spec = self.store.spec
        batches = self.store.read(sets).view(spec.dtype).reshape(len(sets), *indices.shape, *spec.shape)
        return list(batches)

    def _pairs(self, others: Sequence[StoreView], index: Any) -> Indices | None:
        """Cells for a batch of (step, stream) pairs, as sampling asks for them; None for any other index."""
        if type(index) is not tuple or len(index) != 2 or len(self.lead_shape) != 2 or not self._n_steps:
            return None
        steps, envs = index
        if not (type(steps) is type(envs) is np.ndarray and steps.dtype == envs.dtype == np.int64):
            return None
        if steps.ndim != 1 or steps.shape != envs.shape:
            return None
        bases = [self._base]
        for other in others:
            if other.store is not self.store or other.lead_shape != self.lead_shape or not other._n_steps:
                return None
            bases.append(other._base)
        sets = np.empty((len(bases), len(steps)), np.int64)
        locate = frame_kernels().flat_indices
        bad = locate(steps, envs, self._n_steps, self.lead_shape[1], np.array(bases), sets)
        if bad >= 0:
            raise IndexOutOfRangeError(
                f"index ({steps[bad]}, {envs[bad]}) is out of bounds for axes of {self.lead_shape}"
            )
        return sets

    def _whole(self, index: Any) -> Indices:
        indices, rest = self._locate(index)
        if indices is None or rest is not None:
            raise IndexOutOfRangeError(f"{index!r} selects parts of observations; index those after reading")
        return indices

    def _read(self, indices: Indices) -> npt.NDArray[Any]:
        spec = self.store.spec
        rows = self.store.read(np.ascontiguousarray(indices).reshape(-1))
        return spec.from_rows(rows).reshape(indices.shape + spec.shape)

    # ---- writing ----

    def __setitem__(self, index: Any, value: Any) -> None:
        rows = self._step_rows(index, value)
        if rows is not None:
            self.store.write(self._step_indices + (self._base + index * len(rows)), self._step_indices, rows)
            return
        indices, rest = self._locate(index)
        if rest is None and indices is not None:
            batch = self._fit(value, indices.shape + self.obs_shape)
            self._write(indices.reshape(-1), batch)
            return
        # part of some observations: read them, change that part, write them back
        if indices is None:
            indices, rest = self._table(), index
        batch = self._read(indices)
        part = batch[rest]
        fitted = self._fit(value, part.shape)
        batch[rest] = fitted
        self._write(indices.reshape(-1), batch)

    def write_with(self, other: StoreView, step: int, batch: npt.NDArray[Any], other_batch: npt.NDArray[Any]) -> None:
        """``self[step] = batch`` and ``other[step] = other_batch``, in that order and in one go."""
        rows, more = self._step_rows(step, batch), self._step_rows(step, other_batch)
        if rows is None or more is None or other.store is not self.store or other._n_steps != self._n_steps:
            self[step] = batch
            other[step] = other_batch
            return
        index = step * len(rows)
        self.store.write_step(self._base + index, other._base + index, rows, more)

    def write_fitted(self, other: StoreView, step: int, batch: npt.NDArray[Any], other_batch: npt.NDArray[Any]) -> None:
        """`write_with` for a sibling and for batches that are known to have the shape and dtype of a step."""
        if not self._n_steps:
            self.write_with(other, step, batch, other_batch)
            return
        n_streams = len(self._step_indices)
        if not batch.flags.c_contiguous:
            batch = batch.copy()
        if not other_batch.flags.c_contiguous:
            other_batch = other_batch.copy()
        rows, more = batch.reshape(n_streams, -1), other_batch.reshape(n_streams, -1)
        if self._dtype is not _BYTE:
            rows, more = rows.view(np.uint8), more.view(np.uint8)
        index = step * n_streams
        self.store.write_step(self._base + index, other._base + index, rows, more)

    def _step_rows(self, step: Any, batch: Any) -> ByteRows | None:
        """One step of every stream as rows, as buffers write it; None where that is not what ``batch`` is."""
        if (
            type(step) is not int
            or type(batch) is not np.ndarray
            or batch.dtype != self._dtype
            or batch.shape != self._step_shape
            or not 0 <= step < self._n_steps
        ):
            return None
        if not batch.flags.c_contiguous:
            batch = batch.copy()
        rows: ByteRows = batch.reshape(len(self._step_indices), self._row_elements).view(np.uint8)
        return rows

    def _write(self, indices: Indices, batch: npt.NDArray[Any]) -> None:
        spec = self.store.spec
        rows = np.ascontiguousarray(batch).reshape(indices.size, spec.nbytes // max(spec.dtype.itemsize, 1))
        self.store.write(indices, indices % self.store.n_streams, rows.view(np.uint8))

    def _fit(self, value: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """``value`` as an array of ``shape`` and the store's dtype, or an error if that would change it."""
        try:
            array = np.asarray(value)
        except ValueError as problem:
            raise SpecMismatchError(f"cannot write what is no array: {problem}") from problem
        if array.dtype != self.dtype:
            array = _cast_exactly(array, self.dtype)
        if array.shape != shape:
            try:
                array = np.broadcast_to(array, shape)
            except ValueError:
                # as NumPy does, forget leading axes of one
                spare = array.ndim - len(shape)
                if spare <= 0 or array.shape[:spare] != (1,) * spare:
                    raise SpecMismatchError(
                        f"cannot write an array of shape {array.shape} where {shape} is expected"
                    ) from None
                return self._fit(array.reshape(array.shape[spare:]), shape)
        return array

    def erase(self, index: Any) -> None:
        """Make the observations that ``index`` selects unwritten, and give back what they took."""
        self.store.erase(self._whole(index).reshape(-1))

    def fill(self, value: Any) -> None:
        """Set every element to ``value``."""
        self[...] = value

    # ---- other shapes of the same cells ----

    def swapaxes(self, axis1: SupportsIndex, axis2: SupportsIndex) -> Self:
        """This view with two of its leading axes exchanged."""
        axes = _whole_numbers((axis1, axis2), "axes")
        axes = [axis + self.ndim if axis < 0 else axis for axis in axes]
        if not all(0 <= axis < len(self.lead_shape) for axis in axes):
            raise IndexOutOfRangeError(
                f"only the {len(self.lead_shape)} leading axes of {self.shape} can be exchanged, got {axis1}, {axis2}"
            )
        return self._with_indices(self._table().swapaxes(*axes))

    def reshape(self, *shape: Any) -> Self:
        """This view with other leading axes; those of an observation must stay as they are."""
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        wanted = tuple(_whole_numbers(wanted, "a shape"))
        lead, tail = wanted[: len(wanted) - len(self.obs_shape)], wanted[len(wanted) - len(self.obs_shape) :]
        if len(wanted) < len(self.obs_shape) or tail != self.obs_shape:
            raise SpecMismatchError(f"cannot reshape {self.shape} into {wanted}: it must end in {self.obs_shape}")
        try:
            return self._with_indices(self._table().reshape(lead))
        except ValueError as problem:
            raise SpecMismatchError(f"cannot reshape {self.shape} into {wanted}: {problem}") from None

    def _with_indices(self, indices: Indices) -> Self:
        view = object.__new__(type(self))
        StoreView.__init__(view, self.store, indices.shape, indices)
        return view

    def next_view(self) -> Self:
        """Another array of the same shape whose frames are shared with this one's.

        For what repeats this one, such as the next observations beside the observations.
        """
        if self._indices is not None:
            raise ValueError("only an array that was not reshaped can have a sibling")
        next_leaves = object.__new__(type(self))
        StoreView.__init__(next_leaves, self.store, self.lead_shape)
        return next_leaves

    # ---- indices ----

    def _table(self) -> Indices:
        if self._indices is not None:
            return self._indices
        count = math.prod(self.lead_shape)
        return np.arange(self._base, self._base + count, dtype=np.int64).reshape(self.lead_shape)

    def _locate(self, index: Any) -> tuple[Indices | None, Any]:
        """Cells that ``index`` touches, and what is left to apply to their observations.

        ``(cells, None)`` where whole observations are meant; ``(None, index)`` where only the whole array will do.
        """
        fast = self._locate_common(index)
        if fast is not None:
            return fast, None
        parts = _expand(index if isinstance(index, tuple) else (index,), self.shape)
        if parts is None:
            return None, index
        n_lead = len(self.lead_shape)
        lead: list[Any] = []
        axis = 0
        while parts and axis < n_lead:
            part = parts.pop(0)
            lead.append(part)
            axis += 0 if part is None or part is Ellipsis else 1
        if all(isinstance(part, slice) and part == _ALL for part in parts):
            return self._table()[tuple(lead)], None
        # an index into the observations as well: narrow the leading axes to what is used, keep NumPy's rules
        table = self._table()
        remapped: list[Any] = []
        axis = 0
        for part in lead:
            if part is None or part is Ellipsis:
                remapped.append(part)
                continue
            used, local = _narrow(part, table.shape[axis])
            table = np.take(table, used, axis=axis)
            remapped.append(local)
            axis += 1
        return table, (*remapped, *parts)

    def _locate_common(self, index: Any) -> Indices | None:
        """The forms that SB3 and loops use, without building the table."""
        if self._indices is not None or not self.lead_shape:
            return None
        if isinstance(index, (int, np.integer)) and not isinstance(index, (bool, np.bool_)):
            n_steps = self.lead_shape[0]
            step = int(index)
            if not -n_steps <= step < n_steps:
                raise IndexOutOfRangeError(f"index {step} is out of bounds for axis 0 with size {n_steps}")
            width = math.prod(self.lead_shape[1:])
            begin = self._base + (step % n_steps) * width
            indices = np.arange(begin, begin + width, dtype=np.int64)
            return indices.reshape(self.lead_shape[1:])
        if isinstance(index, tuple) and len(self.lead_shape) == 2 and 2 <= len(index) <= self.ndim:
            steps, envs, *rest = index
            whole = all(part is Ellipsis or (isinstance(part, slice) and part == _ALL) for part in rest)
            if whole and rest.count(Ellipsis) <= 1 and _are_indices(steps, envs):
                n_steps, n_envs = self.lead_shape
                return self._base + _wrap(steps, n_steps, 0) * n_envs + _wrap(envs, n_envs, 1)
        return None


def _whole_numbers(values: Iterable[Any], name: str) -> list[int]:
    try:
        return [operator.index(value) for value in values]
    except TypeError as problem:
        raise ArgumentError(f"{name} must be whole numbers: {problem}") from None


def _are_indices(*arrays: Any) -> bool:
    """Whether these are integer arrays of one shape."""
    return all(
        isinstance(array, np.ndarray) and array.dtype.kind in "iu" and array.shape == arrays[0].shape
        for array in arrays
    )


def _wrap(indices: npt.NDArray[Any], size: int, axis: int) -> npt.NDArray[np.int64]:
    """Indices counted from the front, or an error if one is outside."""
    indices = indices.astype(np.int64, copy=False)
    # one comparison finds those past the end and, read as huge numbers, the negative ones
    if (indices.view(np.uint64) >= size).any():
        outside = indices[(indices < -size) | (indices >= size)]
        if outside.size:
            raise IndexOutOfRangeError(f"index {outside[0]} is out of bounds for axis {axis} with size {size}")
        indices = np.where(indices < 0, indices + size, indices)
    return indices


def _expand(index: tuple[Any, ...], shape: tuple[int, ...]) -> list[Any] | None:
    """One part per axis: ellipses written out, masks as positions. None for forms that need the array itself."""
    parts: list[Any] = []
    for part in index:
        if part is None or part is Ellipsis or isinstance(part, slice):
            parts.append(part)
            continue
        if isinstance(part, (bool, np.bool_)):
            return None
        try:
            array = np.asarray(part)
        except ValueError as problem:
            raise IndexOutOfRangeError(f"{part!r} is no index: {problem}") from problem
        if array.dtype == np.bool_:
            if array.ndim == 0:
                return None
            at = sum(1 if isinstance(p, (slice, int, np.ndarray)) else 0 for p in parts)
            if Ellipsis in [p for p in parts if p is Ellipsis]:
                return None
            if array.shape != shape[at : at + array.ndim]:
                raise IndexOutOfRangeError(
                    f"boolean index of shape {array.shape} does not match axes of {shape[at : at + array.ndim]}"
                )
            parts.extend(np.nonzero(array))
        elif array.size == 0 and not isinstance(part, np.ndarray):
            parts.append(array.astype(np.int64))
        elif array.dtype.kind in "iu":
            parts.append(operator.index(part) if array.ndim == 0 and not isinstance(part, np.ndarray) else array)
        else:
            raise IndexOutOfRangeError(f"only integers, slices, masks, None and ... can index this, got {part!r}")
    ellipses = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) > 1:
        raise IndexOutOfRangeError("an index can only have a single ellipsis ('...')")
    n_axes = sum(part is not None and part is not Ellipsis for part in parts)
    if n_axes > len(shape):
        raise IndexOutOfRangeError(f"too many indices: the array has {len(shape)} axes, {n_axes} were indexed")
    filler: list[Any] = [_ALL] * (len(shape) - n_axes)
    if ellipses and not filler:
        # it stands for no axis, but indices on both sides of it are not neighbours
        filler = [Ellipsis]
    place = ellipses[0] if ellipses else len(parts)
    return [*parts[:place], *filler, *parts[place + len(ellipses) :]]


def _narrow(part: Any, size: int) -> tuple[npt.NDArray[np.int64], Any]:
    """Positions of an axis that ``part`` uses, and ``part`` counted among those."""
    if isinstance(part, slice):
        return np.arange(size)[part], _ALL
    positions = _wrap(np.asarray(part), size, 0)
    used, local = np.unique(positions, return_inverse=True)
    local = local.reshape(positions.shape)
    return used, int(local) if isinstance(part, int) else local


def _cast_exactly(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """``array`` as ``dtype`` if no value changes by it."""
    if array.dtype.kind != dtype.kind and not {array.dtype.kind, dtype.kind} <= set("biufc"):
        raise SpecMismatchError(f"values of dtype {array.dtype} are no values of dtype {dtype}")
    with np.errstate(invalid="ignore", over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", _ComplexWarning)
        cast = array.astype(dtype)
        # there and back as well: a large integer compares equal to the float it is rounded to
        same = (cast == array) & (cast.astype(array.dtype) == array)
        if array.dtype.kind in "fc" and dtype.kind in "fc":
            same |= np.isnan(array) & np.isnan(cast)
    if not np.all(same):
        first = np.argmin(same.ravel() if np.ndim(same) else [same])
        raise SpecMismatchError(
            f"{array.ravel()[first]!r} of dtype {array.dtype} is not a value of dtype {dtype}; "
            "convert the observations before they are stored"
        )
    return cast
