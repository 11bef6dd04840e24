"""`WindowReader`: plans windows of a replay buffer and gathers their columns in one compiled call."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers._sb3.sequence_windows import Gathered, Request, Windows, discount_powers
from sb3_extra_buffers.kernels import as_contiguous, window_kernels
from sb3_extra_buffers.stores.timeline import TimelineStore

__all__ = ["WindowReader"]

# as in `kernels.windows_numba`, which imports numba
ALIGNMENT, IS_WHOLE, N_RESETS = 64, 64, 128
# offsets are int64
_MAX_BYTES = 1 << 62

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

_COLUMNS = ("actions", "rewards", "dones", "timeouts")
# of rows that are not needed
_NO_ROWS: Indices = np.zeros((0, 0), np.int64)
_FLOAT32, _INT64, _BOOL = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.bool_)


class _Layout(NamedTuple):
    """The memory of a batch."""

    nbytes: int
    #: Shape, dtype and offset of each result.
    parts: list[tuple[tuple[int, ...], np.dtype[Any], int]]
    #: Shape and offset of indices that only some batches need, by name.
    others: dict[str, tuple[tuple[int, ...], int]]
    #: Of everything, as the kernel takes them.
    offsets: Indices
    powers: Array


class WindowReader:
    """The columns of a replay buffer, and its observations in `TimelineStore`s, by their addresses.

    `is_current` says whether the buffer still has the same arrays. The caller holds the lock of the buffer, which the
    stores share.
    """

    def __init__(self, buffer: Any) -> None:
        self._read_windows: Any = window_kernels().read_windows
        self._columns = [getattr(buffer, name) for name in _COLUMNS]
        self._starts = buffer._index.starts
        self._stores = [(view.store, view.store.inner, view.store.inner.state) for _, view, _ in buffer._raw]
        #: Whether there are observations in other stores, for which the indices are needed.
        self._has_others = len(buffer._raw) < len(buffer._views.by_key)
        self._keys = [key for key, _, _ in buffer._raw]
        self._specs = [(view.shape[2:], view.dtype) for _, view, _ in buffer._raw]
        actions, rewards, dones, timeouts = self._columns
        self._action: tuple[tuple[int, ...], np.dtype[Any]] = actions.shape[2:], actions.dtype
        plan = [buffer.buffer_size, buffer.n_envs, len(self._stores), self._starts.ctypes.data, actions.ctypes.data]
        plan += [actions[0, 0].nbytes, rewards.ctypes.data, dones.ctypes.data, timeouts.ctypes.data]
        plan += [state[1].ctypes.data for _, _, state in self._stores]
        self._plan = np.array(plan, np.int64)
        # one attribute: after an interrupt, no request may be left with the layout of another
        self._laid_out: tuple[Request | None, Any] = None, None

    @classmethod
    def of(cls, buffer: Any) -> WindowReader | None:
        """Return a reader of ``buffer``, or None if there is no compiled code for it."""
        lead = int(buffer.buffer_size), int(buffer.n_envs)
        if window_kernels() is None or buffer._calls_sb3 or not _fits(buffer._index.starts, lead, _BOOL):
            return None
        for _, view, next_view in buffer._raw:
            inner = view.store.inner
            fits = isinstance(inner, TimelineStore) and inner.is_compiled and view.dtype == view.stored_dtype
            fits = fits and view.indices is None and next_view.indices is None and view.first_index == 0
            fits = fits and view.lead_shape == next_view.lead_shape == lead and view.store.n_streams == lead[1]
            if not fits or next_view.first_index != lead[0] * lead[1]:
                return None
            inner.recover()
        actions = buffer.actions
        if actions.ndim != 3 or not _fits(actions, (*lead, *actions.shape[2:]), actions.dtype):
            return None
        return cls(buffer) if all(_fits(getattr(buffer, name), lead, _FLOAT32) for name in _COLUMNS[1:]) else None

    def is_current(self, buffer: Any) -> bool:
        """Whether the buffer still has the arrays that this object was made for."""
        actions, rewards, dones, timeouts = self._columns
        if (
            buffer.actions is not actions
            or buffer.rewards is not rewards
            or buffer.dones is not dones
            or buffer.timeouts is not timeouts
            or buffer._index.starts is not self._starts
        ):
            return False
        for store, inner, state in self._stores:
            if store.inner is not inner or inner.state is not state or inner.dirty:
                return False
        return True

    def read(self, request: Request, numbers: Indices, envs: Indices, n_added: int) -> Windows:
        """Return the windows that begin at these steps, which are held."""
        of_request, layout = self._laid_out
        if request is not of_request:
            layout = self._make_layout(request)
            self._laid_out = request, layout
        out = np.empty(layout.nbytes, np.uint8)
        rules, n_steps = request.rules, request.n_steps
        found: int = self._read_windows(
            self._plan, layout.offsets, as_contiguous(numbers), as_contiguous(envs), layout.powers, out, n_added,
            rules.length, request.burn_in, n_steps, rules.episode_end == "continue",
        )  # fmt: skip
        start, is_whole = found % ALIGNMENT, found & IS_WHOLE != 0
        arrays = [np.ndarray(shape, dtype, out, start + offset) for shape, dtype, offset in layout.parts]
        discounts, is_first, mask, learn_mask, steps, actions, rewards, dones, *observed = arrays
        n_ahead, rows, resets = None, _NO_ROWS, None
        if layout.others:
            others = {name: np.ndarray(shape, _INT64, out, start + at) for name, (shape, at) in layout.others.items()}
            rows = others.get("rows", _NO_ROWS)
            n_ahead = None if is_whole else others.get("n_ahead")
            if found >= N_RESETS:
                resets = tuple(others["resets"][: found // N_RESETS].T.copy())
        gathered = Gathered(dict(zip(self._keys, observed, strict=True)), actions, rewards, dones)
        return Windows(
            request, numbers, envs, rows, rows[:, :-1] if self._has_others else rows, mask, is_whole, is_first, n_ahead,
            resets, learn_mask, discounts, steps, gathered,
        )  # fmt: skip

    def _make_layout(self, request: Request) -> _Layout:
        batch, length, n_steps = request.batch_size, request.rules.length, request.n_steps
        each, n_columns = (batch, length), length + n_steps - 1
        # in the order of the kernel's offsets, with those that are not always wanted in the middle
        shapes: list[tuple[tuple[int, ...], np.dtype[Any]]] = [
            (each, _FLOAT32), (each, _BOOL), (each, _BOOL), (each, _BOOL), (each, _INT64),
            ((batch, n_columns, *self._action[0]), self._action[1]), *2 * [((batch, n_columns), _FLOAT32)],
        ]  # fmt: skip
        others = {
            "rows": (batch * self._has_others, n_columns + 1),
            "n_ahead": (batch * (n_steps > 1), length),
            "resets": (batch * length * (request.rules.episode_end == "continue"), 3),
        }
        observed = [((batch, n_columns + 1, *shape), dtype) for shape, dtype in self._specs]
        offsets, nbytes = [], 0
        for shape, dtype in [*shapes, *((shape, _INT64) for shape in others.values()), *observed]:
            size = math.prod(shape) * dtype.itemsize
            offsets.append(nbytes if size else -1)
            nbytes += -(-size // ALIGNMENT) * ALIGNMENT
        if nbytes >= _MAX_BYTES:
            raise MemoryError(f"a batch would take {nbytes} bytes")
        at, end = len(shapes), len(shapes) + len(others)
        return _Layout(
            nbytes + ALIGNMENT,
            [(*each, offset) for each, offset in zip(shapes + observed, offsets[:at] + offsets[end:], strict=True)],
            {name: (shape, i) for (name, shape), i in zip(others.items(), offsets[at:end], strict=True) if i >= 0},
            np.array(offsets, np.int64),
            discount_powers(request),
        )


def _fits(column: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether compiled code can read ``column`` by its address."""
    fits: bool = type(column) is np.ndarray and column.flags.carray and column.shape == shape
    return fits and column.dtype == dtype and not dtype.hasobject
