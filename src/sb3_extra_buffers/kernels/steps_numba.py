"""Whole steps of a replay buffer with images, each written by one call. Only compiled: there is no reference kernel.

Everything that Python calls is defined in this file, so that `kernels.dispatch` can find its cache entries.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np

from sb3_extra_buffers.kernels.addresses_numba import bytes_at, call_native, float32_at, int64_at
from sb3_extra_buffers.kernels.columns_numba import as_column
from sb3_extra_buffers.kernels.compiling import entry, inner
from sb3_extra_buffers.kernels.fingerprints import PAGE
from sb3_extra_buffers.kernels.frames_numba import writer_address
from sb3_extra_buffers.kernels.intrinsics import address_of
from sb3_extra_buffers.kernels.state import COMMITTED, N_FREED
from sb3_extra_buffers.kernels.timeline_numba import (
    PLAN_ACTION_BYTES,
    PLAN_ACTIONS,
    PLAN_DONE,
    PLAN_DONES,
    PLAN_ENVS,
    PLAN_KEYS,
    PLAN_REWARDS,
    PLAN_STEPS,
    PLAN_TIMEOUT,
    PLAN_TIMEOUTS,
    write_columns,
)

__all__ = ["PLAN_TIMEOUT", "direct_kernel", "writer_address"]

# a plan starts like those of `timeline_numba`; then follow the address of the kernel that writes frames, the addresses
# of the bound tables, of the table of frame ids, of its pages that changed and of the counters,
PLAN_WRITER, PLAN_BOUND, PLAN_FRAME_IDS, PLAN_PAGES, PLAN_COUNTERS = range(PLAN_KEYS, PLAN_KEYS + 5)
# the indices of the first observation and the first next observation, the frames and the shape of an observation,
PLAN_INDEX, PLAN_NEXT_INDEX, PLAN_STACK, PLAN_SHAPE = range(PLAN_COUNTERS + 1, PLAN_COUNTERS + 5)
# how many freed segments may be listed, the address of the number of the last step that was written, and the row to
# continue with, if the step was begun before
PLAN_MAX_FREED, PLAN_LAST, PLAN_FIRST = range(PLAN_SHAPE + 3, PLAN_SHAPE + 6)
PLAN_SIZE = PLAN_FIRST + 1
# the columns in a plan
PLAN_COLUMNS = PLAN_ACTIONS, PLAN_REWARDS, PLAN_DONES, PLAN_TIMEOUTS


@inner
def _fits(plan: Any, position: Any, obs: Any, action_bytes: Any, n_rewards: Any, n_dones: Any) -> bool:
    n_envs = plan[PLAN_ENVS]
    fits = obs.shape[0] == n_rewards == n_dones == n_envs and 0 <= position < plan[PLAN_STEPS]
    fits = fits and obs.shape[1] == plan[PLAN_SHAPE] and obs.shape[2] == plan[PLAN_SHAPE + 1]
    return fits and obs.shape[3] == plan[PLAN_SHAPE + 2] and action_bytes == n_envs * plan[PLAN_ACTION_BYTES]


@inner
def _mark_pages(plan: Any, index: Any) -> None:
    """`FrameStore._mark_dirty_run` for the observations of a step."""
    width, pages = 4 * plan[PLAN_STACK], bytes_at(plan[PLAN_PAGES], (0,))
    for page in range(index * width // PAGE, ((index + plan[PLAN_ENVS]) * width - 1) // PAGE + 1):
        pages[page] = 1


@inner
def _write_step(
    plan: Any, position: Any, number: Any, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any
) -> int:
    n_envs = plan[PLAN_ENVS]
    index, next_index = plan[PLAN_INDEX] + position * n_envs, plan[PLAN_NEXT_INDEX] + position * n_envs
    written = call_native(
        plan[PLAN_WRITER],
        (
            plan[PLAN_BOUND], plan[PLAN_FRAME_IDS], plan[PLAN_STACK], address_of(obs, 0), n_envs,
            address_of(next_obs, 0), n_envs, 0, 0, index, next_index, plan[PLAN_FIRST], 1,
        ),
    )  # fmt: skip
    if written < 2 * n_envs:
        return written
    _mark_pages(plan, index)
    _mark_pages(plan, next_index)
    dones = float32_at(plan[PLAN_DONE], (n_envs,))
    for env in range(n_envs):
        dones[env] = done[env]
    write_columns(plan, position, address_of(action, 0), address_of(reward, 0))
    counters, last = int64_at(plan[PLAN_COUNTERS], (0,)), int64_at(plan[PLAN_LAST], (1,))
    # from here on, nothing undoes the step
    counters[COMMITTED] = 1
    last[0] = number
    return written + (counters[N_FREED] > plan[PLAN_MAX_FREED])


def _write_direct(
    address: int, position: int, number: int, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any
) -> int:
    """Write step ``position``, without truncations, from the arrays passed to `add`; ``number`` counts the steps.

    ``address`` is that of the plan. Observations and next observations of all environments are rows. Returns the row
    where capacity ran out: the caller makes space, and calls again with this row as ``PLAN_FIRST``. Returns the number
    of rows once the whole step is written and committed, or one more if the caller should free segments. Returns -1 if
    an array does not have the shape of a step; then nothing has been changed.
    """
    plan = int64_at(address, (PLAN_SIZE,))
    action_bytes = action.size * action.itemsize
    if not (
        _fits(plan, position, obs, action_bytes, len(reward), len(done))
        and _fits(plan, position, next_obs, action_bytes, len(reward), len(done))
    ):
        return -1
    return _write_step(
        plan, position, number, as_column(obs), as_column(next_obs), as_column(action), as_column(reward),
        as_column(done),
    )  # fmt: skip


def _direct_entry(action_dtype: str) -> Any:
    """`_write_direct` under a name of its own, by which numba caches it: `entry` allows one signature for each."""
    name = f"write_{action_dtype}"
    copy = FunctionType(_write_direct.__code__, globals(), name)
    copy.__qualname__ = name
    return entry(copy)


# a kernel for each dtype of actions: numba checks dtypes faster than Python does
_DIRECT = {dtype: _direct_entry(dtype) for dtype in ("float32", "int64")}


def direct_kernel(plan: Any, obs: Any, action: Any) -> Any:
    """The kernel for steps with arrays of these kinds, which raises `TypeError` for any other kind; None without one.

    ``obs`` has four axes of bytes. int64 actions have one axis, float32 ones have two.
    """
    kernel = _DIRECT.get(str(action.dtype))
    if kernel is None or obs.ndim != 4 or obs.dtype != np.uint8 or action.ndim != 1 + (action.dtype == np.float32):
        return None
    if kernel._can_compile:
        # position -1 writes nothing: compile the kernel, or load it, for these arrays only
        kernel(
            int(plan.ctypes.data), -1, 0, obs, obs, action, np.zeros(len(obs), np.float32), np.zeros(len(obs), np.bool_)
        )
        kernel.disable_compile()
    return kernel


def compile_all() -> None:
    """Compile the kernels for all dtypes of actions, or load them from the cache."""
    for action in (np.zeros((1, 1), np.float32), np.zeros(1, np.int64)):
        direct_kernel(np.zeros(PLAN_SIZE, np.int64), np.zeros((1, 1, 1, 1), np.uint8), action)
