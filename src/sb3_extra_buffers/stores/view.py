"""A store that indexes like the array it stands for."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.arguments import as_array, cast_exactly, narrow
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.errors import ArgumentError, IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.kernels import as_contiguous, frame_kernels
from sb3_extra_buffers.stores.array_methods import ArrayMethods
from sb3_extra_buffers.stores.base import Indices
from sb3_extra_buffers.stores.indexing import ALL, are_index_arrays, as_integers, locate, select, wrap
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.usage import MemoryUsage

if TYPE_CHECKING:
    from typing_extensions import Self

_BYTE = np.dtype(np.uint8)
# the CPU's number in DLPack
_CPU = (1, 0)


class StoreView(ArrayMethods, np.lib.mixins.NDArrayOperatorsMixin):
    """Looks like an array of shape ``(*lead_shape, *obs_shape)``, and decodes what is read.

    Reading returns new arrays, never views of the store: writing into a result changes nothing here. Views of one store
    differ only in which observations they show, so `swapaxes` and `reshape` copy no observation.

    A view shows the observations in ``indices``, an array of shape ``lead_shape``; or consecutive ones from
    ``first_index`` on; or, with neither, new ones that are appended to the store.

    A view of another ``dtype`` than the store's converts what is read, and raises if a value that is written does not
    survive the conversion exactly.
    """

    def __init__(
        self,
        store: ObservationStore,
        lead_shape: Sequence[int],
        indices: Indices | None = None,
        first_index: int | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        self.store = store
        self.lead_shape = tuple(map(operator.index, lead_shape))
        self.indices = indices
        if first_index is None:
            first_index = store.allocate(math.prod(self.lead_shape)) if indices is None else 0
        self.first_index = first_index
        self._dtype = store.spec.dtype if dtype is None else dtype
        # for writing steps; n_steps is 0 if a step is not a run of consecutive observations
        self._step_shape = self.shape[1:]
        self.n_steps = self.lead_shape[0] if self.lead_shape and indices is None and store.spec.nbytes else 0
        self._row_elements = math.prod(store.spec.shape)
        self._step_indices = np.arange(store.n_streams, dtype=np.int64)

    # ---- attributes of an array ----

    @property
    def obs_shape(self) -> tuple[int, ...]:
        return self.store.spec.shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lead_shape + self.obs_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """Dtype that observations are stored in."""
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
        """Bytes in use for these observations, not those of a plain array (``size * itemsize``).

        Views of one store share what it holds, in proportion to their observations.
        """
        share = math.prod(self.lead_shape) / max(self.store.n_obs, 1)
        return round(self.store.memory_usage().total * share)

    def memory_usage(self) -> MemoryUsage:
        """Bytes in use by the store behind this view, compared with an array of the same observations."""
        usage = self.store.memory_usage()
        dense = usage.transitions * math.prod(self.obs_shape) * self.itemsize
        return replace(usage, dense=dense, dense_observations=dense)

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
            return select(self.__array__(), rest)
        if rest is not None:
            return select(self._read(indices), rest)
        batch = self._read(indices)
        return batch if batch.ndim else batch[()]

    def __iter__(self) -> Iterator[Any]:
        return (self[step] for step in range(len(self)))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("compressed observations cannot be converted to an array without a copy")
        array = self._read(self._table())
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        # without this, torch.as_tensor would read number by number
        if options.get("copy") is False:
            raise BufferError("compressed observations cannot be converted to a tensor without a copy")
        return self.__array__().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [np.asarray(value) if isinstance(value, StoreView) else value for value in inputs]
        if any(isinstance(value, StoreView) for value in kwargs.get("out", ())):
            return NotImplemented
        return getattr(ufunc, method)(*plain, **kwargs)

    def read_with(self, others: Sequence[StoreView], index: Any) -> list[npt.NDArray[Any]]:
        """Return ``[self[index], *(other[index] for other in others)]``; shared frames are decoded once.

        ``index`` selects whole observations; ``others`` are views of the same store.
        """
        sets = self._locate_pairs(others, index)
        if sets is not None:
            rows = self.store.read(sets).view(self.stored_dtype)
            return list(self._converted(rows.reshape(*sets.shape, *self._step_shape[1:])))
        if any(other.store is not self.store for other in others):
            raise SpecMismatchError("views of different stores cannot be read together")
        indices = self.locate_whole(index)
        sets = np.empty((1 + len(others), indices.size), np.int64)
        sets[0] = indices.reshape(-1)
        for number, other in enumerate(others, 1):
            if self.indices is None and other.indices is None and other.lead_shape == self.lead_shape:
                np.add(sets[0], other.first_index - self.first_index, out=sets[number])
            else:
                sets[number] = other.locate_whole(index).reshape(-1)
        spec = self.store.spec
        batches = self.store.read(sets).view(spec.dtype).reshape(len(sets), *indices.shape, *spec.shape)
        return list(self._converted(batches))

    def read_windows(
        self,
        steps: Indices,
        envs: Indices,
        newest_only: bool = False,
        out: npt.NDArray[Any] | None = None,
        next_view: StoreView | None = None,
    ) -> npt.NDArray[Any]:
        """Read windows, consecutive steps of one environment each, and decode each frame once.

        Args:
            steps: Steps of each window, ``[batch, length]``; negative ones count from the end.
            envs: The environment of each window, ``[batch]``.
            newest_only: Return the newest frame of each stack, ``[batch, length, *layout.frame_spec.shape]``.
                Observations that are not stacked, or whose layout is not known yet, are returned whole.
            out: C-contiguous memory of the stored dtype for the result.
            next_view: The view of the next observations. The result then has one more column: the next observation of
                the last step. Within an episode the other next observations are ``result[:, 1:]``.
        """
        steps, envs = as_array(steps, "steps"), as_array(envs, "envs")
        is_windows = steps.ndim == 2 and envs.shape == steps.shape[:1]
        is_windows = is_windows and steps.dtype.kind in "iu" and envs.dtype.kind in "iu"
        if len(self.lead_shape) != 2 or not is_windows:
            raise IndexOutOfRangeError(
                f"expected integer steps [batch, length] and envs [batch] for axes of {self.lead_shape}, "
                f"got {steps.dtype} of shape {steps.shape} and {envs.dtype} of shape {envs.shape}"
            )
        indices = self._locate_windows(steps, envs)
        if next_view is not None:
            if not isinstance(next_view, StoreView) or next_view.store is not self.store:
                raise SpecMismatchError("next_view must be a view of the same store")
            following = next_view._locate_windows(steps[:, -1:], envs)
            indices = np.concatenate([indices, following], axis=1)
        store = self.store
        rows = store.read_windows(indices, newest_only, None if out is None else self._out_rows(out, indices.shape))
        if out is not None:
            return self._converted(out)
        spec = store.spec
        if rows.shape[-1] != spec.nbytes:
            assert store.layout is not None  # rows are frames of stacks
            spec = store.layout.frame_spec
        return self._converted(rows.view(spec.dtype).reshape(*indices.shape, *spec.shape))

    def _out_rows(self, out: npt.NDArray[Any], lead_shape: tuple[int, ...]) -> ByteRows:
        """The bytes of ``out``, ``[batch, length, n_bytes]``, without a copy."""
        dtype = self.store.spec.dtype
        is_array = isinstance(out, np.ndarray) and out.dtype == dtype and out.flags.c_contiguous
        if not is_array or out.shape[:2] != lead_shape:
            got = f"{out.dtype} of shape {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
            raise SpecMismatchError(
                f"out must be a C-contiguous {dtype} array of shape {(*lead_shape, '...')}, got {got}"
            )
        return out.reshape(*lead_shape, math.prod(out.shape[2:])).view(np.uint8)

    def _locate_windows(self, steps: Indices, envs: Indices) -> Indices:
        """The store's indices of windows, ``[batch, length]``."""
        pairs = steps.reshape(-1), np.repeat(envs, steps.shape[1])
        located = self._locate_pairs((), pairs)
        return (self.locate_whole(pairs) if located is None else located).reshape(steps.shape)

    def _converted(self, batch: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return batch if self._dtype == batch.dtype else batch.astype(self._dtype)

    def _locate_pairs(self, others: Sequence[StoreView], index: Any) -> Indices | None:
        """Indices of a batch of (step, stream) pairs, as used by sampling, in each view; None for any other index."""
        if type(index) is not tuple or len(index) != 2 or len(self.lead_shape) != 2 or not self.n_steps:
            return None
        steps, envs = index
        if not (type(steps) is type(envs) is np.ndarray and steps.dtype == envs.dtype == np.int64):
            return None
        if steps.ndim != 1 or steps.shape != envs.shape:
            return None
        bases = [self.first_index]
        for other in others:
            if other.store is not self.store or other.lead_shape != self.lead_shape or not other.n_steps:
                return None
            bases.append(other.first_index)
        sets = np.empty((len(bases), len(steps)), np.int64)
        flat_indices = frame_kernels().flat_indices
        steps, envs = as_contiguous(steps), as_contiguous(envs)
        bad = flat_indices(steps, envs, self.n_steps, self.lead_shape[1], np.array(bases), sets)
        if bad >= 0:
            raise IndexOutOfRangeError(
                f"index ({steps[bad]}, {envs[bad]}) is out of bounds for axes of {self.lead_shape}"
            )
        return sets

    def locate_whole(self, index: Any) -> Indices:
        """The store's indices of the observations that ``index`` selects; raise if it selects parts of them."""
        indices, rest = self._locate(index)
        if indices is None or rest is not None:
            raise IndexOutOfRangeError(f"{index!r} selects parts of observations; index those after reading")
        return indices

    def _read(self, indices: Indices) -> npt.NDArray[Any]:
        spec = self.store.spec
        rows = self.store.read(np.ascontiguousarray(indices).reshape(-1))
        return self._converted(spec.from_rows(rows).reshape(indices.shape + spec.shape))

    # ---- writing ----

    def __setitem__(self, index: Any, value: Any) -> None:
        rows = self._step_rows(index, value)
        if rows is not None:
            self.store.write(self._step_indices + (self.first_index + index * len(rows)), self._step_indices, rows)
            return
        indices, rest = self._locate(index)
        if rest is None and indices is not None:
            batch = self._fit(value, indices.shape + self.obs_shape)
            self._write(indices.reshape(-1), batch)
            return
        # parts of observations: read them, change these parts, write them back
        if indices is None:
            indices, rest = self._table(), index
        batch = self._read(indices)
        batch[rest] = self._fit(value, select(batch, rest).shape)
        self._write(indices.reshape(-1), batch)

    def write_with(self, other: StoreView, step: int, batch: npt.NDArray[Any], other_batch: npt.NDArray[Any]) -> None:
        """Run ``self[step] = batch`` and ``other[step] = other_batch`` as one write."""
        rows, other_rows = self._step_rows(step, batch), self._step_rows(step, other_batch)
        if rows is None or other_rows is None or other.store is not self.store or other.n_steps != self.n_steps:
            self[step] = batch
            other[step] = other_batch
            return
        index = step * len(rows)
        self.store.write_step(self.first_index + index, other.first_index + index, rows, other_rows)

    def write_fitted(self, other: StoreView, step: int, batch: npt.NDArray[Any], other_batch: npt.NDArray[Any]) -> None:
        """`write_with` for a view from `next_view`, and batches of a step's shape and the store's dtype."""
        if not self.n_steps:
            self.write_with(other, step, batch, other_batch)
            return
        n_streams = len(self._step_indices)
        if not batch.flags.c_contiguous:
            batch = batch.copy()
        if not other_batch.flags.c_contiguous:
            other_batch = other_batch.copy()
        rows, other_rows = batch.reshape(n_streams, -1), other_batch.reshape(n_streams, -1)
        if self.stored_dtype is not _BYTE:
            rows, other_rows = rows.view(np.uint8), other_rows.view(np.uint8)
        index = step * n_streams
        self.store.write_step(self.first_index + index, other.first_index + index, rows, other_rows)

    def _step_rows(self, step: Any, batch: Any) -> ByteRows | None:
        """One step of every stream as rows, as buffers write it; None if ``batch`` has another shape or dtype."""
        if (
            type(step) is not int
            or type(batch) is not np.ndarray
            or batch.dtype != self.stored_dtype
            or batch.shape != self._step_shape
            or not 0 <= step < self.n_steps
        ):
            return None
        if not batch.flags.c_contiguous:
            batch = batch.copy()
        rows: ByteRows = batch.reshape(len(self._step_indices), self._row_elements).view(np.uint8)
        return rows

    def _write(self, indices: Indices, batch: npt.NDArray[Any]) -> None:
        spec = self.store.spec
        if batch.dtype != spec.dtype:
            batch = narrow(batch, spec.dtype, "the array")
        rows = np.ascontiguousarray(batch).reshape(indices.size, spec.nbytes // max(spec.dtype.itemsize, 1))
        self.store.write(indices, indices % self.store.n_streams, rows.view(np.uint8))

    def _fit(self, value: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """``value`` as an array of ``shape`` and the store's dtype; raise if that changes a value."""
        try:
            array = np.asarray(value)
        except ValueError as problem:
            raise SpecMismatchError(f"observations cannot be converted to an array: {problem}") from problem
        if array.dtype != self.dtype and array.dtype != self.stored_dtype:
            array = cast_exactly(array, self.dtype, "observations")
        if array.shape != shape:
            try:
                array = np.broadcast_to(array, shape)
            except ValueError:
                # as NumPy does, drop leading axes of length one
                spare = array.ndim - len(shape)
                if spare <= 0 or array.shape[:spare] != (1,) * spare:
                    raise SpecMismatchError(
                        f"cannot write an array of shape {array.shape} where {shape} is expected"
                    ) from None
                return self._fit(array.reshape(array.shape[spare:]), shape)
        return array

    def erase(self, index: Any) -> None:
        """Make the observations that ``index`` selects unwritten, and free what they took."""
        self.store.erase(self.locate_whole(index).reshape(-1))

    def fill(self, value: Any) -> None:
        """Set every element to ``value``."""
        self[...] = value

    # ---- other views of the store ----

    def swapaxes(self, axis1: SupportsIndex, axis2: SupportsIndex) -> Self:
        """Exchange the leading axes ``axis1`` and ``axis2``."""
        axes = as_integers((axis1, axis2), "axes")
        axes = [axis + self.ndim if axis < 0 else axis for axis in axes]
        if not all(0 <= axis < len(self.lead_shape) for axis in axes):
            raise IndexOutOfRangeError(
                f"only the {len(self.lead_shape)} leading axes of {self.shape} can be exchanged, got {axis1}, {axis2}"
            )
        return self._with_indices(self._table().swapaxes(*axes))

    def reshape(self, *shape: Any) -> Self:
        """Change the leading axes; those of an observation must stay as they are."""
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        wanted = tuple(as_integers(wanted, "the axes of a shape"))
        lead, tail = wanted[: len(wanted) - len(self.obs_shape)], wanted[len(wanted) - len(self.obs_shape) :]
        if len(wanted) < len(self.obs_shape) or tail != self.obs_shape:
            raise SpecMismatchError(
                f"cannot reshape {self.shape} into {wanted}: it must end in {self.obs_shape}; reshape "
                "np.asarray(array), a decoded copy"
            )
        try:
            return self._with_indices(self._table().reshape(lead))
        except ValueError as problem:
            raise SpecMismatchError(f"cannot reshape {self.shape} into {wanted}: {problem}") from None

    def _with_indices(self, indices: Indices) -> Self:
        view = object.__new__(type(self))
        StoreView.__init__(view, self.store, indices.shape, indices, dtype=self.dtype)
        return view

    def next_view(self) -> Self:
        """Add as many observations again to the store, and return a view of them.

        Meant for observations that repeat these, such as next observations: shared frames are stored once.
        """
        if self.indices is not None:
            raise ArgumentError("a reshaped array cannot have a sibling; call sibling() on the whole array")
        first_index = self.store.allocate(math.prod(self.lead_shape), are_next=True)
        view = object.__new__(type(self))
        StoreView.__init__(view, self.store, self.lead_shape, first_index=first_index, dtype=self.dtype)
        return view

    # ---- indices ----

    def _table(self) -> Indices:
        if self.indices is not None:
            return self.indices
        count = math.prod(self.lead_shape)
        return np.arange(self.first_index, self.first_index + count, dtype=np.int64).reshape(self.lead_shape)

    def _locate(self, index: Any) -> tuple[Indices | None, Any]:
        """See `indexing.locate`."""
        indices = self._locate_common(index)
        return locate(index, self.shape, self._table()) if indices is None else (indices, None)

    def _locate_common(self, index: Any) -> Indices | None:
        """The forms that SB3 and loops use, without building a table of all indices; None for others."""
        if self.indices is not None or not self.lead_shape:
            return None
        if isinstance(index, (int, np.integer)) and not isinstance(index, (bool, np.bool_)):
            n_steps = self.lead_shape[0]
            step = int(index)
            if not -n_steps <= step < n_steps:
                raise IndexOutOfRangeError(f"index {step} is out of bounds for axis 0 with size {n_steps}")
            width = math.prod(self.lead_shape[1:])
            begin = self.first_index + (step % n_steps) * width
            indices = np.arange(begin, begin + width, dtype=np.int64)
            return indices.reshape(self.lead_shape[1:])
        if isinstance(index, tuple) and len(self.lead_shape) == 2 and 2 <= len(index) <= self.ndim:
            steps, envs, *rest = index
            whole = all(part is Ellipsis or (isinstance(part, slice) and part == ALL) for part in rest)
            if whole and rest.count(Ellipsis) <= 1 and are_index_arrays(steps, envs):
                n_steps, n_envs = self.lead_shape
                return self.first_index + wrap(steps, n_steps, 0) * n_envs + wrap(envs, n_envs, 1)
        return None
