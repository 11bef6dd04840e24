"""Windows of consecutive steps, compiled: `_sb3.sequence_windows.plan_windows` defines what planning does."""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.kernels.addresses_numba import bytes_at, float32_at, int64_at
from sb3_extra_buffers.kernels.columns_numba import as_column
from sb3_extra_buffers.kernels.compiling import entry, inner
from sb3_extra_buffers.kernels.intrinsics import address_of, clear_bytes
from sb3_extra_buffers.kernels.timeline_numba import copy_next, copy_short, draw_numbers, first_above, timeline_tables

__all__ = ["draw_windows", "read_windows"]


# ---- drawing ----

#: How windows treat the ends of episodes, as a number.
EPISODE_ENDS = {"stop": 0, "pad": 1, "continue": 2}
# `draw_numbers` draws less than this
_MAX_TOTAL = 2**32 - 1


@inner
def _count_windows(
    firsts: Any, ends: Any, oldest: Any, n_added: Any, length: Any, episode_end: Any, strict: Any, counts: Any
) -> int:
    """Set ``counts`` to how many windows begin in each episode and those before; return the number of all."""
    total, last = 0, n_added - length
    if not strict:
        last = max(last, oldest)
    for i in range(len(firsts)):
        first, end = max(firsts[i], oldest), min(ends[i], n_added)
        n_steps = max(end - first, 0)
        if episode_end == 2:
            count = max(min(end, last + 1) - first, 0)
        elif episode_end == 1 and not strict:
            count = n_steps
        else:
            count = max(n_steps - length + 1, 0)
            if not strict and n_steps:
                count = max(count, 1)
        total += count
        counts[i] = total
    return total


@entry
def draw_windows(
    firsts: Any, ends: Any, of_episodes: Any, oldest: int, n_added: int, length: int, episode_end: int, strict: bool,
    counts: Any, numbers: Any, envs: Any, function: int, state: int,
) -> int:  # fmt: skip
    """Draw the first step and the environment of windows, all equally likely; return how many there are to draw from.

    ``firsts``, ``ends`` and ``of_episodes`` are those of the episodes; ``counts`` is memory for as many. The generator
    is that of `timeline_numba.draw_numbers`.
    """
    firsts, ends, of_episodes, counts = as_column(firsts), as_column(ends), as_column(of_episodes), as_column(counts)
    numbers, envs = as_column(numbers), as_column(envs)
    total = _count_windows(firsts, ends, oldest, n_added, length, episode_end, strict, counts)
    if not 0 < total <= _MAX_TOTAL:
        return total
    draw_numbers(numbers, 0, total - 1, function, state)
    for i in range(len(numbers)):
        drawn = numbers[i]
        episode = first_above(counts, drawn)
        before = counts[episode - 1] if episode > 0 else 0
        numbers[i] = max(firsts[episode], oldest) + drawn - before
        envs[i] = of_episodes[episode]
    return total


# ---- reading ----

# positions in a plan: of the buffer, the addresses of its columns, and from PLAN_KEYS on those of the bound tables of
# each key with uncompressed observations
PLAN_STEPS, PLAN_ENVS, PLAN_N_KEYS, PLAN_STARTS = 0, 1, 2, 3
PLAN_ACTIONS, PLAN_ACTION_BYTES, PLAN_REWARDS, PLAN_DONES, PLAN_TIMEOUTS, PLAN_KEYS = 4, 5, 6, 7, 8, 9
# positions in a layout: where each result starts, -1 for those that are not wanted; from AT_KEYS on, the observations
(
    AT_DISCOUNTS, AT_IS_FIRST, AT_MASK, AT_LEARN_MASK, AT_STEPS, AT_ACTIONS, AT_REWARDS, AT_DONES,
    AT_ROWS, AT_N_AHEAD, AT_RESETS, AT_KEYS,
) = range(12)  # fmt: skip
# results start at multiples of this
ALIGNMENT = 64
# what `read_windows` returns: where the results start, whether the windows are whole, and the number of resets
IS_WHOLE, N_RESETS = ALIGNMENT, 2 * ALIGNMENT


@inner
def _count_steps(starts: Any, n_envs: Any, position: Any, env: Any, limit: Any, ring: Any) -> int:
    """How many of the ``limit`` steps from ``position`` on are in its episode."""
    for ahead in range(1, limit):
        position += 1
        if position == ring:
            position = 0
        if starts[position * n_envs + env]:
            return ahead
    return limit


@inner
def _fill(out: Any, at: Any, count: Any, value: Any) -> None:
    for i in range(at, at + count):
        out[i] = value


@inner
def _plan_whole(plan: Any, layout: Any, begin: Any, number: Any, first: Any, shape: Any, power: Any) -> None:
    """`_plan_window` for a window with as many steps of an episode as it reads, in loops that are vectorised."""
    window, length, burn_in, n_steps = shape
    at = window * length
    is_start = 1 if bytes_at(plan[PLAN_STARTS], (0,))[first] else 0
    _fill(float32_at(begin + layout[AT_DISCOUNTS], (0,)), at, length, power)
    is_first, learn_mask = bytes_at(begin + layout[AT_IS_FIRST], (0,)), bytes_at(begin + layout[AT_LEARN_MASK], (0,))
    _fill(is_first, at, length, 0)
    is_first[at] = is_start
    _fill(bytes_at(begin + layout[AT_MASK], (0,)), at, length, 1)
    _fill(learn_mask, at, burn_in, is_start)
    _fill(learn_mask, at + burn_in, length - burn_in, 1)
    steps = int64_at(begin + layout[AT_STEPS], (0,))
    for column in range(length):
        steps[at + column] = number + column
    if layout[AT_N_AHEAD] >= 0:
        _fill(int64_at(begin + layout[AT_N_AHEAD], (0,)), at, length, n_steps)


@inner
def _write_rows(plan: Any, out: Any, first: Any, n_held: Any, n_rows: Any) -> None:
    """Write the indices of the observations of one window, and that of the last next observation after its end."""
    n_envs = plan[PLAN_ENVS]
    n_obs = plan[PLAN_STEPS] * n_envs
    for row in range(n_rows):
        index = first + min(row, n_held - 1) * n_envs
        index = index - n_obs if index >= n_obs else index
        out[row] = index if row < n_held else index + n_obs


@inner
def _plan_window(
    plan: Any, layout: Any, begin: Any, number: Any, first: Any, n_held: Any, shape: Any, powers: Any, resets: Any
) -> Any:
    """Write masks, discounts and numbers of the steps of one window; return the number of resets so far.

    ``first`` is the index of the first step, of which ``n_held`` belong to the window; ``shape`` is the number of the
    window, its length, burn-in and steps of a return.
    """
    ring, n_envs = plan[PLAN_STEPS], plan[PLAN_ENVS]
    window, length, burn_in, n_steps = shape
    n_obs, n_columns = ring * n_envs, length + n_steps - 1
    starts, at = bytes_at(plan[PLAN_STARTS], (n_obs,)), window * length
    discounts = float32_at(begin + layout[AT_DISCOUNTS], (0,))
    is_first, mask = bytes_at(begin + layout[AT_IS_FIRST], (0,)), bytes_at(begin + layout[AT_MASK], (0,))
    learn_mask, steps = bytes_at(begin + layout[AT_LEARN_MASK], (0,)), int64_at(begin + layout[AT_STEPS], (0,))
    is_known = False
    for column in range(length):
        index = first + column * n_envs
        is_start = column < n_held and starts[index - n_obs if index >= n_obs else index] != 0
        is_known = is_known or is_start
        is_first[at + column], mask[at + column] = is_start, column < n_held
        learn_mask[at + column] = column < n_held and (column >= burn_in or is_known)
        steps[at + column] = number + column if column < n_held else -1
    # from the last column on: the next one at which an episode begins
    end = n_held
    for column in range(n_columns - 1, -1, -1):
        if column < length:
            n_ahead = max(min(end - column, n_steps), 0)
            discounts[at + column] = powers[n_ahead]
            if layout[AT_N_AHEAD] >= 0:
                int64_at(begin + layout[AT_N_AHEAD], (0,))[at + column] = n_ahead
            if column + n_steps >= end and end < n_held:
                found = int64_at(begin + layout[AT_RESETS] + 24 * resets, (3,))
                last = first + (end - 1) * n_envs
                found[0], found[1], found[2] = window, column, (last - n_obs if last >= n_obs else last) + n_obs
                resets += 1
        index = first + column * n_envs
        if 0 < column < n_held and starts[index - n_obs if index >= n_obs else index]:
            end = column
    return resets


@inner
def _read_observations(plan: Any, layout: Any, begin: Any, window: Any, first: Any, n_held: Any, n_rows: Any) -> None:
    """Copy the uncompressed observations of one window, and repeat the last next observation after its end."""
    n_envs = plan[PLAN_ENVS]
    n_obs = plan[PLAN_STEPS] * n_envs
    for key in range(plan[PLAN_N_KEYS]):
        tables = timeline_tables(int64_at(plan[PLAN_KEYS + key], (14,)))
        size = tables.rows.shape[1]
        out, index = bytes_at(begin + layout[AT_KEYS + key] + window * n_rows * size, (0,)), first
        for row in range(n_held):
            copy_short(out, row * size, tables.rows, index * size, size)
            index += n_envs
            if index >= n_obs:
                index -= n_obs
        last = index - n_envs
        for row in range(n_held, n_rows):
            copy_next(out, row * size, tables, last + n_obs if last < 0 else last)


@inner
def _read_columns(
    plan: Any, layout: Any, begin: Any, window: Any, first: Any, n_held: Any, n_columns: Any, pads: Any
) -> None:
    """Copy actions, rewards and dones of one window; after its end zeros, or with ``pads`` those of its last step."""
    n_envs, size = plan[PLAN_ENVS], plan[PLAN_ACTION_BYTES]
    n_obs, at = plan[PLAN_STEPS] * n_envs, window * n_columns
    actions, out_actions = bytes_at(plan[PLAN_ACTIONS], (0,)), bytes_at(begin + layout[AT_ACTIONS], (0,))
    rewards, out_rewards = float32_at(plan[PLAN_REWARDS], (0,)), float32_at(begin + layout[AT_REWARDS], (0,))
    is_done, out_dones = float32_at(plan[PLAN_DONES], (0,)), float32_at(begin + layout[AT_DONES], (0,))
    is_timeout = float32_at(plan[PLAN_TIMEOUTS], (0,))
    for column in range(n_columns if pads else n_held):
        index = first + min(column, n_held - 1) * n_envs
        if index >= n_obs:
            index -= n_obs
        copy_short(out_actions, (at + column) * size, actions, index * size, size)
        out_rewards[at + column] = rewards[index]
        out_dones[at + column] = is_done[index] * (np.float32(1) - is_timeout[index])
    if not pads:
        clear_bytes(out_actions, (at + n_held) * size, (n_columns - n_held) * size)
        for column in range(n_held, n_columns):
            out_rewards[at + column] = out_dones[at + column] = np.float32(0)


@entry
def read_windows(
    plan: Any, layout: Any, numbers: Any, envs: Any, powers: Any, out: Any, n_added: int, length: int, burn_in: int,
    n_steps: int, continues: bool,
) -> int:  # fmt: skip
    """Plan the windows that begin at these steps, and gather their columns and uncompressed observations, to ``out``.

    Every step must be held. ``powers`` are the discounts by number of rewards ahead. With ``n_steps > 1``, actions,
    rewards and dones after the end of a window are those of its last step, else zeros.
    """
    plan, layout, numbers, envs = as_column(plan), as_column(layout), as_column(numbers), as_column(envs)
    powers, out = as_column(powers), as_column(out)
    ring, n_envs, n_columns = plan[PLAN_STEPS], plan[PLAN_ENVS], length + n_steps - 1
    start = -address_of(out, 0) & (ALIGNMENT - 1)
    begin, n_obs = address_of(out, start), ring * n_envs
    starts = bytes_at(plan[PLAN_STARTS], (n_obs,))
    resets, is_whole = 0, True
    for window in range(len(numbers)):
        number, env = numbers[window], envs[window]
        position = number % ring
        n_held = min(n_added - number, n_columns)
        n_in_episode = _count_steps(starts, n_envs, position, env, n_held, ring)
        is_whole = is_whole and n_in_episode == n_columns
        if not continues:
            n_held = n_in_episode
        first = position * n_envs + env
        shape = window, length, burn_in, n_steps
        if n_in_episode == n_columns:
            _plan_whole(plan, layout, begin, number, first, shape, powers[n_steps])
        else:
            resets = _plan_window(plan, layout, begin, number, first, n_held, shape, powers, resets)
        if layout[AT_ROWS] >= 0:
            rows = int64_at(begin + layout[AT_ROWS] + 8 * window * (n_columns + 1), (0,))
            _write_rows(plan, rows, first, n_held, n_columns + 1)
        _read_observations(plan, layout, begin, window, first, n_held, n_columns + 1)
        _read_columns(plan, layout, begin, window, first, n_held, n_columns, n_steps > 1)
    return start + (IS_WHOLE if is_whole else 0) + N_RESETS * resets
