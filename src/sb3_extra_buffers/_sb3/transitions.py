"""Steps and batches of replay buffers with vectors, each written or read by one compiled call."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers._sb3.drawing import GlobalGenerator
from sb3_extra_buffers.errors import IndexOutOfRangeError
from sb3_extra_buffers.kernels import as_contiguous, step_kernels
from sb3_extra_buffers.kernels.dispatch import is_refusal
from sb3_extra_buffers.kernels.timeline import COUNT
from sb3_extra_buffers.stores.timeline import TimelineStore
from sb3_extra_buffers.stores.view import StoreView

__all__ = ["Transitions"]

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]
#: A key, the view of its observations and that of its next observations.
Pair = tuple[str, StoreView, StoreView]
Layout = tuple[int, list[tuple[Any, ...]], tuple[Indices, Indices]]

_COLUMNS = ("actions", "rewards", "dones", "timeouts")
# NumPy has a single object for each of these dtypes, so they can be compared with `is`
_ARRAY, _FLOAT32, _BOOL = np.ndarray, np.dtype(np.float32), np.dtype(np.bool_)
# how many steps are staged after one that the kernel refused: its error takes longer than anything else
_N_STAGED = 64
# maximum number of cached batch layouts
_MAX_LAYOUTS = 64


class Transitions:
    """The columns of a replay buffer and its observations in `TimelineStore`s, by their addresses, for compiled code.

    `is_current` says whether the buffer still has the same arrays. The caller holds the lock of the buffer, which the
    stores share.
    """

    def __init__(self, buffer: Any, pairs: list[Pair]) -> None:
        self._kernels: Any = step_kernels()
        self._write_step, self._read_batch = self._kernels.write_step, self._kernels.read_batch
        self.keys = [key for key, _, _ in pairs]
        # each store with its tables, and the largest number of rows aside that leaves space for a step
        self._stores = [_watch(view.store) for _, view, _ in pairs]
        self._actions, self._rewards, self._dones, self._timeouts = (getattr(buffer, name) for name in _COLUMNS)
        self._readers = pairs[0][1].store.readers
        self._n_envs, self._n_steps = int(buffer.n_envs), int(buffer.buffer_size)
        # staged values of a step, which compiled code copies; NumPy handles casts and strides when they are assigned
        self._obs = [(key, np.zeros(v.shape[1:], v.dtype), np.zeros(v.shape[1:], v.dtype)) for key, v, _ in pairs]
        self._action = np.zeros(self._actions.shape[1:], self._actions.dtype)
        self._reward, self._done, self._timeout = (np.zeros(self._n_envs, np.float32) for _ in range(3))
        self._has_timeout = False
        self._with_timeouts = bool(buffer.handle_timeout_termination)
        self._plan = self._make_plan(self._with_timeouts)
        # numba takes an integer faster than an array
        self._plan_address = int(self._plan.ctypes.data)
        # SB3 passes discrete actions without their last axis
        self._flat_actions = self._action.dtype == np.int64 and self._action.ndim == 2
        self._direct: Any = None
        # of the observations of a step that have several axes
        self._matrix_shape: tuple[int, ...] | None = None
        self._is_dict = bool(buffer.obs_views()["observations"].is_dict)
        if not self._is_dict:
            action = self._action.reshape(-1) if self._flat_actions else self._action
            row = self._obs[0][1]
            if row.ndim > 2:
                self._matrix_shape = row.shape
                row = row.reshape(len(row), -1)
            self._direct = self._kernels.direct_kernel(self._plan, row, action)
        # the kernel that `_direct` is again after this many steps
        self._kernel, self._n_staged = self._direct, 0
        #: The only store, with its tables, if a kernel writes the arrays that are passed to `add`.
        self._single = None if self._direct is None else self._stores[0][:3]
        self._layouts: dict[int, Layout] = {}
        self._random = GlobalGenerator()

    @classmethod
    def of(cls, buffer: Any, pairs: list[Pair]) -> Transitions | None:
        """Return the transitions of ``buffer``, or None if there is no compiled code for it."""
        if not pairs or step_kernels() is None:
            return None
        lead = int(buffer.buffer_size), int(buffer.n_envs)
        for _, view, next_view in pairs:
            inner = view.store.inner
            fits = isinstance(inner, TimelineStore) and inner.is_compiled and view.dtype == view.stored_dtype
            fits = fits and view.indices is None and next_view.indices is None
            fits = fits and view.lead_shape == next_view.lead_shape == lead and view.store.n_streams == lead[1]
            if not fits or view.first_index or next_view.first_index != lead[0] * lead[1]:
                return None
        for name in _COLUMNS:
            column, is_action = getattr(buffer, name), name == "actions"
            fits = type(column) is np.ndarray and column.flags.carray and column.shape[:2] == lead
            if not fits or column.ndim != 2 + is_action or not (is_action or column.dtype == np.float32):
                return None
            if column.dtype.hasobject:
                return None
        return cls(buffer, pairs)

    def _make_plan(self, with_timeouts: bool) -> Indices:
        """See the constants ``PLAN_*`` of `kernels.timeline_numba`."""
        plan = [self._n_envs, self._n_steps, len(self.keys), self._actions.ctypes.data]
        plan += [self._action.nbytes // self._n_envs, self._rewards.ctypes.data, self._dones.ctypes.data]
        plan += [self._timeouts.ctypes.data, self._action.ctypes.data, self._reward.ctypes.data]
        plan += [self._done.ctypes.data, self._timeout.ctypes.data if with_timeouts else 0]
        for (_, _, (_, bound), _, _), (_, obs, next_obs) in zip(self._stores, self._obs, strict=True):
            plan += [bound.ctypes.data, obs.ctypes.data, next_obs.ctypes.data]
        return np.array(plan, np.int64)

    def raw_copy(self, copier: Any) -> Transitions:
        """See `RawCopier`: of these, a copied buffer looks only at the type."""
        return self

    def is_of(self, buffer: Any) -> bool:
        """Whether the buffer still has the arrays that this object was made for."""
        if (
            buffer.actions is not self._actions
            or buffer.rewards is not self._rewards
            or buffer.dones is not self._dones
            or buffer.timeouts is not self._timeouts
            or buffer.handle_timeout_termination != self._with_timeouts
        ):
            return False
        for store, inner, state, _, _ in self._stores:
            if store.inner is not inner or inner.state is not state or inner.replaced is not None:
                return False
        return True

    def is_current(self, buffer: Any) -> bool:
        """Whether the buffer still has the same arrays, with space for another step."""
        return self.is_of(buffer) and self._has_space()

    def _has_space(self) -> bool:
        for _, _, _, counters, most in self._stores:  # noqa: SIM110  # a generator takes three times as long
            if counters.item(COUNT) > most:
                return False
        return True

    # ---- writing ----

    def put(
        self, buffer: Any, position: int, number: int, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any,
        infos: Any,
    ) -> bool:  # fmt: skip
        """The fast path of `ReplayMixin.add`: write a step that needs no conversion and was not truncated.

        Returns False for any other step, and changes nothing.
        """
        single = self._single
        if single is None:
            if not self.is_of(buffer):
                return False
        else:
            # `is_of`, inlined
            store, inner, state = single
            if (
                buffer.actions is not self._actions
                or buffer.rewards is not self._rewards
                or buffer.dones is not self._dones
                or buffer.timeouts is not self._timeouts
                or buffer.handle_timeout_termination != self._with_timeouts
                or store.inner is not inner
                or inner.state is not state
                or inner.replaced is not None
            ):
                return False
        if self._with_timeouts:
            if type(infos) is not list or len(infos) != self._n_envs:
                return False
            for info in infos:
                if type(info) is not dict or info.get("TimeLimit.truncated", False) is not False:
                    return False
            if self._has_timeout:
                self._timeout[...] = 0
                self._has_timeout = False
        kernel = self._direct
        if kernel is None:
            if self._n_staged:
                self._n_staged -= 1
                if not self._n_staged:
                    self._direct = self._kernel
            fits = 0 <= position < self._n_steps and self._has_space()
            if not (fits and self._stage(obs, next_obs, action, reward, done)):
                return False
            self._write_staged(position)
            return True
        if self._flat_actions and type(action) is _ARRAY and action.ndim == 2:
            action = action.reshape(-1)
        shape = self._matrix_shape
        if shape is not None:
            if type(obs) is not _ARRAY or type(next_obs) is not _ARRAY or not obs.shape == next_obs.shape == shape:
                return False
            obs, next_obs = obs.reshape(shape[0], -1), next_obs.reshape(shape[0], -1)
        readers = self._readers
        try:
            readers.writing = True
            if readers.stripes:
                readers.wait()
            written: int = kernel(self._plan_address, position, obs, next_obs, action, reward, done)
            return written == 1
        except (TypeError, ValueError) as problem:
            if not is_refusal(problem):
                raise
            # an argument is not an array, or not of the stored dtype; those of the next steps will probably be the same
            self._n_staged = _N_STAGED
            self._direct = None
            return False
        finally:
            readers.writing = False

    def _stage(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any) -> bool:
        """Stage a step that needs no conversion; return False for any other."""
        if self._is_dict and (type(obs) is not dict or type(next_obs) is not dict):
            return False
        for key, staged, next_staged in self._obs:
            value, next_value = (obs.get(key), next_obs.get(key)) if self._is_dict else (obs, next_obs)
            shape, dtype = staged.shape, staged.dtype
            if type(value) is not _ARRAY or value.shape != shape:
                return False
            if type(next_value) is not _ARRAY or next_value.shape != shape:
                return False
            # a dtype that was unpickled is another object
            if (value.dtype is not dtype and value.dtype != dtype) or (
                next_value.dtype is not dtype and next_value.dtype != dtype
            ):
                return False
            staged[...] = value
            next_staged[...] = next_value
        staged = self._action
        if type(action) is not _ARRAY or (action.dtype is not staged.dtype and action.dtype != staged.dtype):
            return False
        if action.shape != staged.shape:
            if not self._flat_actions or action.size != staged.size:
                return False
            action = action.reshape(staged.shape)
        shape = self._reward.shape
        if type(reward) is not _ARRAY or reward.dtype is not _FLOAT32 or reward.shape != shape:
            return False
        if type(done) is not _ARRAY or done.dtype is not _BOOL or done.shape != shape:
            return False
        staged[...] = action
        self._reward[...] = reward
        self._done[...] = done
        return True

    def _write_staged(self, position: int) -> None:
        """Write the staged values; idempotent."""
        readers = self._readers
        try:
            readers.writing = True
            if readers.stripes:
                readers.wait()
            self._write_step(self._plan, position)
        finally:
            readers.writing = False

    def write(
        self, position: int, obs: dict[str, Array], next_obs: dict[str, Array], action: Array, reward: Array,
        done: Array, truncated: Any,
    ) -> None:  # fmt: skip
        """Write a step, with arguments as `ReplayMixin._fit_step` returns them; idempotent."""
        for key, staged, next_staged in self._obs:
            staged[...] = obs[key]
            next_staged[...] = next_obs[key]
        self._action[...] = action
        self._reward[...] = reward
        self._done[...] = done
        if truncated is not None:
            self._timeout[...] = truncated
            self._has_timeout = True
        self._write_staged(position)

    # ---- reading ----

    def read(self, steps: Indices, envs: Indices) -> list[Array]:
        """Return the transitions ``(steps[i], envs[i])`` as arrays that share one allocation.

        For each key the observations and the next observations, then actions, dones that are not timeouts, and rewards.
        """
        steps, envs = as_contiguous(np.asarray(steps, np.int64)), as_contiguous(np.asarray(envs, np.int64))
        nbytes, layout, _ = self._layout(len(steps))
        out = np.empty(nbytes, np.uint8)
        start = self._read_batch(self._plan, steps, envs, out, 0, 0, 0, 0, 0)
        if start < 0:
            return self.read(_wrap(steps, self._n_steps, 0), _wrap(envs, self._n_envs, 1))
        return [np.ndarray(shape, dtype, out, start + offset) for shape, dtype, offset in layout]

    def draw(self, count: int, low: int, high: int, shift: int) -> list[Array] | None:
        """`read` random steps and environments; None if `np.random.randint` has been replaced.

        Steps are those of ``(np.random.randint(low, high, count) + shift) % n_steps``; environments, drawn afterwards,
        those of ``np.random.randint(0, n_envs, count)``.
        """
        found = self._random.find()
        if found is None:
            return None
        generator, function, state = found
        nbytes, layout, drawn = self._layouts.get(count) or self._layout(count)
        out = np.empty(nbytes, np.uint8)
        with generator.lock:
            start = self._read_batch(self._plan, *drawn, out, low, high - low - 1, shift, function, state)
        return [np.ndarray(shape, dtype, out, start + offset) for shape, dtype, offset in layout]

    def _layout(self, count: int) -> Layout:
        """For a batch of ``count``: total bytes; shape, dtype and offset of each array; arrays for drawn indices."""
        if count in self._layouts:
            return self._layouts[count]
        alignment = self._kernels.ALIGNMENT
        shapes: list[tuple[Any, Any]] = []
        for _, staged, _ in self._obs:
            shapes += 2 * [((count, *staged.shape[1:]), staged.dtype)]
        shapes += [((count, *self._action.shape[1:]), self._action.dtype)]
        shapes += 2 * [((count, 1), self._reward.dtype)]
        layout, offset = [], 0
        for shape, dtype in shapes:
            layout.append((shape, dtype, offset))
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            offset += -(-nbytes // alignment) * alignment
        if len(self._layouts) >= _MAX_LAYOUTS:
            self._layouts.clear()
        drawn = np.empty(count, np.int64), np.empty(count, np.int64)
        self._layouts[count] = offset + alignment, layout, drawn
        return self._layouts[count]


def _watch(store: Any) -> tuple[Any, Any, Any, Indices, int]:
    """Return a store, its tables, and how many rows may be aside so that another step still fits."""
    inner: TimelineStore = store.inner
    inner.commit()
    inner.reserve(2 * store.n_streams)
    tables = inner.tables
    return store, inner, inner.state, tables.counters, len(tables.keys) - 2 * store.n_streams


def _wrap(indices: Indices, size: int, axis: int) -> Indices:
    """Count negative indices from the end, as NumPy does."""
    outside = (indices < -size) | (indices >= size)
    if outside.any():
        raise IndexOutOfRangeError(f"index {indices[outside][0]} is out of bounds for axis {axis} with size {size}")
    return np.where(indices < 0, indices + size, indices)
