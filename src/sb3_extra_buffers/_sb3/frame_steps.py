"""Steps of replay buffers with images, each written by one compiled call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.kernels import compiled_kernels
from sb3_extra_buffers.stores.frame_tables import FREE_BATCH
from sb3_extra_buffers.stores.segments import SegmentStore
from sb3_extra_buffers.stores.view import StoreView

__all__ = ["FrameSteps"]

Array = npt.NDArray[Any]

_COLUMNS = ("actions", "rewards", "dones", "timeouts")
_ARRAY, _BYTE = np.ndarray, np.dtype(np.uint8)
# how many steps are not tried after one that the kernel refused
_N_SKIPPED = 64


def _unbound() -> None:
    """In place of a reference to bound tables."""


class FrameSteps:
    """The columns of a replay buffer and its observations in a `SegmentStore`, by their addresses, for compiled code.

    The compiled call also commits the step, so that an interrupt comes either before or after that; `has_written` tells
    which. The caller holds the lock of the buffer.
    """

    def __init__(self, buffer: Any, view: StoreView, next_view: StoreView, inner: SegmentStore) -> None:
        at = self._kernels = compiled_kernels("steps")
        self._store, self._inner = view.store, inner
        self._columns = self._actions, self._rewards, self._dones, self._timeouts = [
            getattr(buffer, name) for name in _COLUMNS
        ]
        self._n_envs = int(buffer.n_envs)
        #: Rows of a step: observations and next observations.
        self.n_rows = 2 * self._n_envs
        self._with_timeouts = bool(buffer.handle_timeout_termination)
        # values of a step that compiled code converts, or writes as they are
        self._done, self._timeout = np.zeros(self._n_envs, np.float32), np.zeros(self._n_envs, np.float32)
        self._last = np.zeros(1, np.int64)
        self._counters = inner.state.counters
        # number of steps until the kernel is tried again
        self._n_skipped = 0
        action = np.zeros(self._actions.shape[1:], self._actions.dtype)
        # SB3 passes discrete actions without their last axis
        self._flat_actions = action.dtype == np.int64
        self._plan = np.zeros(at.PLAN_SIZE, np.int64)
        # numba takes an integer faster than an array
        self._plan_address = int(self._plan.ctypes.data)
        values = {
            at.PLAN_ENVS: self._n_envs,
            at.PLAN_STEPS: len(self._actions),
            at.PLAN_ACTION_BYTES: action.nbytes // self._n_envs,
            at.PLAN_DONE: self._done.ctypes.data,
            at.PLAN_TIMEOUT: self._timeout.ctypes.data if self._with_timeouts else 0,
            at.PLAN_WRITER: at.writer_address(),
            at.PLAN_COUNTERS: self._counters.ctypes.data,
            at.PLAN_INDEX: view.first_index,
            at.PLAN_NEXT_INDEX: next_view.first_index,
            at.PLAN_STACK: inner.layout.stack,
            at.PLAN_MAX_FREED: FREE_BATCH,
            at.PLAN_LAST: self._last.ctypes.data,
        }
        values |= {where: column.ctypes.data for where, column in zip(at.PLAN_COLUMNS, self._columns, strict=True)}
        values |= {at.PLAN_SHAPE + axis: length for axis, length in enumerate(view.obs_shape)}
        for where, value in values.items():
            self._plan[where] = value
        # weak: tables keep their arrays, and a heap that an array refers to cannot grow in place
        self._bound: Callable[[], Any] = _unbound
        self.bind(inner)
        obs = np.zeros(view.shape[1:], np.uint8)
        #: The kernel, or None if there is none for this dtype of actions.
        self.write: Any = at.direct_kernel(self._plan, obs, action.reshape(-1) if self._flat_actions else action)

    @classmethod
    def of(cls, buffer: Any, view: StoreView, next_view: StoreView) -> FrameSteps | None:
        """Return the steps of ``buffer``, or None if there is no compiled code for them."""
        inner, lead = view.store.inner, (int(buffer.buffer_size), int(buffer.n_envs))
        if not isinstance(inner, SegmentStore) or not inner.is_compiled or inner.layout.pixel_bytes:
            return None
        if view.dtype != _BYTE or view.stored_dtype != _BYTE or len(view.obs_shape) != 3:
            return None
        fits = view.indices is None and next_view.indices is None and inner.heap.limit is None
        fits = fits and view.lead_shape == next_view.lead_shape == lead and view.store.n_streams == lead[1]
        for name in _COLUMNS:
            column, is_action = getattr(buffer, name), name == "actions"
            fits = fits and type(column) is _ARRAY and column.flags.carray and column.shape[:2] == lead
            fits = fits and column.ndim == 2 + is_action and (is_action or column.dtype == np.float32)
        if not fits:
            return None
        steps = cls(buffer, view, next_view, inner)
        return None if steps.write is None else steps

    # ---- for `SegmentStore.write_direct` ----

    def is_bound_to(self, inner: SegmentStore) -> bool:
        """Whether the addresses are those of the tables that ``inner`` has now."""
        bound = inner.bound
        return (
            bound is not None
            and bound is self._bound()
            and inner.frame_ids is self._frame_ids
            and inner.dirty_pages is self._pages
        )

    def bind(self, inner: SegmentStore, first: int = 0) -> None:
        """Take the addresses of all tables of ``inner``, to begin a step or to continue one with row ``first``."""
        at, plan = self._kernels, self._plan
        # an interrupt must not leave addresses of the old tables that count as those of the new ones
        self._bound = _unbound
        bound, self._frame_ids, self._pages = inner.bind(self.n_rows), inner.frame_ids, inner.dirty_pages
        plan[at.PLAN_BOUND] = bound.ctypes.data
        plan[at.PLAN_FRAME_IDS] = self._frame_ids.ctypes.data
        plan[at.PLAN_PAGES] = self._pages.ctypes.data
        plan[at.PLAN_FIRST] = first
        self._bound = weakref.ref(bound)

    def skip_steps(self) -> None:
        """Do not try the next steps: their arrays will probably be of the same kind as those that were refused."""
        self._n_skipped = _N_SKIPPED

    # ---- writing ----

    def is_of(self, buffer: Any) -> bool:
        """Whether the buffer still has the arrays that this object was made for."""
        return (
            buffer.actions is self._actions
            and buffer.rewards is self._rewards
            and buffer.dones is self._dones
            and buffer.timeouts is self._timeouts
            and buffer.handle_timeout_termination == self._with_timeouts
        )

    def put(
        self, buffer: Any, position: int, number: int, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any,
        infos: Any,
    ) -> bool:  # fmt: skip
        """Write a step that needs no conversion and was not truncated; ``number`` is that of the step.

        Returns False for any other step, and changes nothing.
        """
        if self._n_skipped:
            self._n_skipped -= 1
            return False
        if not self.is_of(buffer):
            return False
        if self._with_timeouts:
            if type(infos) is not list or len(infos) != self._n_envs:
                return False
            for info in infos:
                if type(info) is not dict or info.get("TimeLimit.truncated", False) is not False:
                    return False
        if self._flat_actions and type(action) is _ARRAY and action.ndim == 2:
            action = action.reshape(-1)
        arguments = self._plan_address, position, number, obs, next_obs, action, reward, done
        return self._store.write_direct(self, self._inner, arguments)

    def has_written(self, number: int) -> bool:
        """Whether step ``number`` was written by the last call, which was interrupted; recovers the store."""
        self._store.run_exclusively(self._inner.recover)
        return bool(self._last[0] == number)
