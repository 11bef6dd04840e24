"""Observations on one time axis, compiled; `kernels.timeline` defines what reading and writing do.

Everything that Python calls is defined in this file, so that `kernels.dispatch` can find its cache entries.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sb3_extra_buffers.kernels import timeline as reference
from sb3_extra_buffers.kernels.addresses_numba import bytes_at, float32_at, int32_at, int64_at, rows_at
from sb3_extra_buffers.kernels.columns_numba import as_column
from sb3_extra_buffers.kernels.compiling import compiled, entry, inner, replaces, use_reference
from sb3_extra_buffers.kernels.intrinsics import (
    address_of,
    copy_bytes,
    copy_line,
    equal_bytes,
    load_word,
    prefetch,
    store_word,
)
from sb3_extra_buffers.kernels.timeline import COUNT, N_OBS, N_STREAMS, TimelineTables

_WORD, _INT32 = ir.IntType(64), ir.IntType(32)


@intrinsic
def _call_uint32(typing_context: Any, address: Any, argument: Any) -> Any:
    """Call the C function at ``address``, which takes a pointer and returns a uint32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], ir.FunctionType(_INT32, [_WORD]).as_pointer())
        return builder.zext(builder.call(function, [args[1]]), _WORD)

    return types.int64(types.int64, types.int64), generate


# ---- tables ----


def bind_tables(tables: TimelineTables) -> npt.NDArray[np.int64]:
    """The addresses and sizes of all tables, which the caller keeps alive."""
    entries = []
    for column in tables:
        if not column.flags.c_contiguous:
            raise TypeError("tables must be contiguous")
        entries += [column.ctypes.data, *column.shape]
    return np.array(entries, np.int64)


@inner
def timeline_tables(bound: Any) -> Any:
    return TimelineTables(
        rows_at(bound[0], (bound[1], bound[2])),
        bytes_at(bound[3], (bound[4],)),
        int32_at(bound[5], (bound[6],)),
        int64_at(bound[7], (bound[8],)),
        rows_at(bound[9], (bound[10], bound[11])),
        int64_at(bound[12], (bound[13],)),
    )


@inner
def copy_short(target: Any, to: Any, source: Any, begin: Any, size: Any) -> None:
    """`copy_bytes`, faster for rows of vectors: the last copy overlaps the one before."""
    if size >= 64:
        for at in range(0, size - 64, 64):
            copy_line(target, to + at, source, begin + at)
        copy_line(target, to + size - 64, source, begin + size - 64)
    elif size >= 8:
        for at in range(0, size - 8, 8):
            store_word(target, to + at, load_word(source, begin + at))
        store_word(target, to + size - 8, load_word(source, begin + size - 8))
    else:
        copy_bytes(target, to, source, begin, size)


@replaces(reference.copy_row)
@inner
def _copy_row(target: Any, to: Any, source: Any, row: Any) -> None:
    size = target.shape[1]
    copy_bytes(target, to * size, source, row * size, size)


@replaces(reference.is_same_row)
@inner
def _is_same_row(rows: Any, row: Any, others: Any, other: Any) -> bool:
    size = rows.shape[1]
    return equal_bytes(rows, row * size, others, other * size, size)


use_reference(reference)
_write_obs, _write_next, _write_rows = map(compiled, (reference.write_obs, reference.write_next, reference.write_rows))
_is_set, _row_aside, _following = map(compiled, (reference.is_set, reference.row_aside, reference.following))


@inner
def copy_next(target: Any, begin: Any, tables: Any, i: Any) -> None:
    """Copy next observation ``i`` to ``target``, from byte ``begin`` on."""
    size = tables.rows.shape[1]
    if _is_set(tables.is_aside, i):
        address = address_of(tables.aside, _row_aside(tables, i) * size)
    else:
        address = address_of(tables.rows, _following(tables, i) * size)
    copy_bytes(target, begin, bytes_at(address, (size,)), 0, size)


@entry
def write_rows(bound: Any, indices: Any, source: Any) -> None:
    _write_rows(timeline_tables(as_column(bound)), as_column(indices), as_column(source))


@entry
def read_rows(bound: Any, indices: Any, out: Any) -> int:
    tables, wanted, target = timeline_tables(as_column(bound)), as_column(indices), as_column(out)
    n_obs, size = tables.counters[N_OBS], tables.rows.shape[1]
    n_all = n_obs + len(tables.rows)
    for number in range(len(wanted)):
        index = wanted[number]
        if index < 0 or index >= n_all:
            return number
        if n_obs <= index < 2 * n_obs:
            copy_next(target, number * size, tables, index - n_obs)
        else:
            copy_bytes(target, number * size, tables.rows, (index - n_obs if index >= n_obs else index) * size, size)
    return -1


@entry
def read_pairs(bound: Any, steps: Any, streams: Any, base: int, out: Any) -> int:
    tables, steps, streams, out = (
        timeline_tables(as_column(bound)),
        as_column(steps),
        as_column(streams),
        as_column(out),
    )
    n_obs, n_streams, size = tables.counters[N_OBS], tables.counters[N_STREAMS], tables.rows.shape[1]
    n_steps = n_obs // n_streams
    for number in range(len(steps)):
        step, stream = steps[number], streams[number]
        if step < 0:
            step += n_steps
        if stream < 0:
            stream += n_streams
        if not (0 <= step < n_steps and 0 <= stream < n_streams):
            return number
        i = step * n_streams + stream
        if base:
            copy_next(out, number * size, tables, i)
        else:
            copy_bytes(out, number * size, tables.rows, i * size, size)
    return -1


# ---- steps and batches of a replay buffer ----

# positions in a plan: numbers of environments, steps and keys, addresses of the columns and of the staged values of a
# step, and from PLAN_KEYS on three addresses per key: its bound tables, its staged observations and next observations
PLAN_ENVS, PLAN_STEPS, PLAN_N_KEYS = 0, 1, 2
PLAN_ACTIONS, PLAN_ACTION_BYTES, PLAN_REWARDS, PLAN_DONES, PLAN_TIMEOUTS = 3, 4, 5, 6, 7
PLAN_ACTION, PLAN_REWARD, PLAN_DONE, PLAN_TIMEOUT = 8, 9, 10, 11
PLAN_KEYS = 12
# tensors of a batch start at multiples of this
ALIGNMENT = 64
# how many transitions ahead memory is prefetched
_AHEAD = 6


@inner
def _update(target: Any, source: Any, size: Any) -> None:
    """Copy ``size`` bytes between addresses, unless they are equal: zeros that are never written take no memory."""
    to, new = bytes_at(target, (size,)), bytes_at(source, (size,))
    if not equal_bytes(to, 0, new, 0, size):
        copy_bytes(to, 0, new, 0, size)


@inner
def _write_key(plan: Any, key: Any, first: Any, obs: Any, next_obs: Any) -> None:
    """Write the observations and next observations of all environments, given by their addresses."""
    n_envs = plan[PLAN_ENVS]
    tables = timeline_tables(int64_at(plan[PLAN_KEYS + 3 * key], (14,)))
    size = tables.rows.shape[1]
    staged, next_staged = rows_at(obs, (n_envs, size)), rows_at(next_obs, (n_envs, size))
    for env in range(n_envs):
        _write_obs(tables, first + env, staged, env)
    for env in range(n_envs):
        _write_next(tables, first + env, next_staged, env)


@inner
def write_columns(plan: Any, position: Any, action: Any, reward: Any) -> None:
    n_envs, first = plan[PLAN_ENVS], position * plan[PLAN_ENVS]
    size = n_envs * plan[PLAN_ACTION_BYTES]
    copy_bytes(bytes_at(plan[PLAN_ACTIONS], (0,)), position * size, bytes_at(action, (0,)), 0, size)
    _update(plan[PLAN_REWARDS] + 4 * first, reward, 4 * n_envs)
    _update(plan[PLAN_DONES] + 4 * first, plan[PLAN_DONE], 4 * n_envs)
    if plan[PLAN_TIMEOUT]:
        _update(plan[PLAN_TIMEOUTS] + 4 * first, plan[PLAN_TIMEOUT], 4 * n_envs)


@entry
def write_step(plan: Any, position: int) -> None:
    """Write the staged values to step ``position``; idempotent."""
    plan = as_column(plan)
    for key in range(plan[PLAN_N_KEYS]):
        at = PLAN_KEYS + 3 * key
        _write_key(plan, key, position * plan[PLAN_ENVS], plan[at + 1], plan[at + 2])
    write_columns(plan, position, plan[PLAN_ACTION], plan[PLAN_REWARD])


@inner
def _write_arrays(plan: Any, position: Any, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any) -> int:
    n_envs = plan[PLAN_ENVS]
    if len(reward) != n_envs or len(done) != n_envs or not 0 <= position < plan[PLAN_STEPS]:
        return 0
    staged = float32_at(plan[PLAN_DONE], (n_envs,))
    for env in range(n_envs):
        staged[env] = done[env]
    _write_key(plan, 0, position * n_envs, address_of(obs, 0), address_of(next_obs, 0))
    write_columns(plan, position, address_of(action, 0), address_of(reward, 0))
    return 1


@inner
def _fits(plan: Any, obs: Any, next_obs: Any, n_action_bytes: Any) -> bool:
    tables = timeline_tables(int64_at(plan[PLAN_KEYS], (14,)))
    if tables.counters[COUNT] + 2 * plan[PLAN_ENVS] > len(tables.keys):
        return False
    size = tables.rows.shape[1]
    fits = obs.shape[0] == next_obs.shape[0] == plan[PLAN_ENVS] and obs.shape[1] * obs.itemsize == size
    return fits and obs.shape[1] == next_obs.shape[1] and n_action_bytes == plan[PLAN_ENVS] * plan[PLAN_ACTION_BYTES]


def _write_direct(address: int, position: int, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any) -> int:
    """The fast path of `add`: write a step of a single key, without truncations, from the arrays passed to `add`.

    ``address`` is that of the plan.

    Returns 1, or 0 if there is no space or an array does not have the shape of a step; then nothing has been changed.
    """
    plan = int64_at(address, (PLAN_KEYS,))
    if not _fits(plan, obs, next_obs, action.size * action.itemsize):
        return 0
    return _write_arrays(
        plan, position, as_column(obs), as_column(next_obs), as_column(action), as_column(reward), as_column(done)
    )


def _direct_entry(obs_dtype: str, action_dtype: str) -> Any:
    """`_write_direct` under a name of its own, by which numba caches it: `entry` allows one signature for each."""
    name = f"write_{obs_dtype}_{action_dtype}"
    copy = FunctionType(_write_direct.__code__, globals(), name)
    copy.__qualname__ = name
    # so short that releasing the interpreter's lock would take longer than it helps other threads
    return entry(copy, nogil=False)


# a kernel for each combination of dtypes: numba checks dtypes faster than Python does
_DIRECT = {
    (obs, action): _direct_entry(obs, action) for obs in ("float32", "float64") for action in ("float32", "int64")
}


def direct_kernel(plan: Any, obs: Any, action: Any) -> Any:
    """The kernel for steps of these dtypes, which raises `TypeError` for arrays of any other kind; None without one."""
    kernel = _DIRECT.get((str(obs.dtype), str(action.dtype)))
    if kernel is None or obs.ndim != 2:
        return None
    if kernel._can_compile:
        # position -1 writes nothing: compile the kernel, or load it, for these dtypes only
        kernel(
            int(plan.ctypes.data), -1, obs, obs, action, np.zeros(len(obs), np.float32), np.zeros(len(obs), np.bool_)
        )
        kernel.disable_compile()
    return kernel


@inner
def draw_numbers(out: Any, low: Any, span: Any, function: Any, state: Any) -> None:
    """Fill ``out`` as ``np.random.randint(low, low + span + 1)`` does; ``span`` is less than 2**32 - 1."""
    mask = span
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> shift
    for number in range(len(out)):
        value = np.int64(0)
        if span > 0:
            value = _call_uint32(function, state) & mask
            while value > span:
                value = _call_uint32(function, state) & mask
        out[number] = low + value


@inner
def first_above(ascending: Any, value: Any) -> int:
    """The position of the first of ``ascending`` numbers above ``value``."""
    first, stop = 0, len(ascending)
    while first < stop:
        middle = (first + stop) >> 1
        if ascending[middle] > value:
            stop = middle
        else:
            first = middle + 1
    return first


@inner
def _aligned(size: Any) -> int:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@entry
def read_batch(
    plan: Any, steps: Any, envs: Any, out: Any, low: int, span: int, shift: int, function: int, state: int
) -> int:
    """Copy the transitions ``(steps[i], envs[i])`` to ``out``; return where they start, at a multiple of `ALIGNMENT`.

    ``out`` gets for each key the observations and the next observations, then actions, dones that are not timeouts,
    and rewards; each starts at a multiple of `ALIGNMENT`. If transition ``i`` does not exist, returns ``-1 - i``.

    If ``function`` is not 0 the transitions are drawn first, with the bit generator of this ``next_uint32`` and
    ``state``: for each step a number from ``low`` to ``low + span``, plus ``shift``, and then all environments.
    """
    plan, steps, envs, out = as_column(plan), as_column(steps), as_column(envs), as_column(out)
    n_envs, n_steps, count = plan[PLAN_ENVS], plan[PLAN_STEPS], len(steps)
    if function:
        draw_numbers(steps, low, span, function, state)
        draw_numbers(envs, 0, n_envs - 1, function, state)
        if shift:
            for number in range(count):
                steps[number] = (steps[number] + shift) % n_steps
    for number in range(count):
        if not (0 <= steps[number] < n_steps and 0 <= envs[number] < n_envs):
            return -1 - number
    start = -address_of(out, 0) & (ALIGNMENT - 1)
    begin = start
    for key in range(plan[PLAN_N_KEYS]):
        tables = timeline_tables(int64_at(plan[PLAN_KEYS + 3 * key], (14,)))
        size = tables.rows.shape[1]
        next_begin = begin + _aligned(count * size)
        for number in range(count):
            if number + _AHEAD < count:
                ahead = steps[number + _AHEAD] * n_envs + envs[number + _AHEAD]
                prefetch(tables.rows, ahead * size)
                prefetch(tables.rows, (ahead + n_envs) * size)
            i = steps[number] * n_envs + envs[number]
            copy_bytes(out, begin + number * size, tables.rows, i * size, size)
            copy_next(out, next_begin + number * size, tables, i)
        begin = next_begin + _aligned(count * size)
    n_all = n_steps * n_envs
    size = plan[PLAN_ACTION_BYTES]
    actions = bytes_at(plan[PLAN_ACTIONS], (0,))
    rewards, is_done = float32_at(plan[PLAN_REWARDS], (n_all,)), float32_at(plan[PLAN_DONES], (n_all,))
    is_timeout = float32_at(plan[PLAN_TIMEOUTS], (n_all,))
    dones_at = begin + _aligned(count * size)
    out_dones = float32_at(address_of(out, dones_at), (count,))
    out_rewards = float32_at(address_of(out, dones_at + _aligned(4 * count)), (count,))
    for number in range(count):
        i = steps[number] * n_envs + envs[number]
        copy_bytes(out, begin + number * size, actions, i * size, size)
        out_dones[number] = is_done[i] * (np.float32(1) - is_timeout[i])
        out_rewards[number] = rewards[i]
    return start
