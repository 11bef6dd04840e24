"""The tree of priorities, compiled: `_sb3.sum_tree` defines what writing and drawing do, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sb3_extra_buffers.kernels.addresses_numba import bytes_at, float64_at
from sb3_extra_buffers.kernels.columns_numba import as_column
from sb3_extra_buffers.kernels.compiling import entry, inner
from sb3_extra_buffers.kernels.intrinsics import load_word
from sb3_extra_buffers.kernels.timeline_numba import first_above

__all__ = ["bind_tree", "find", "write"]

FAN_OUT = 32

_WORD = ir.IntType(64)

# positions in a bound tree: the number of levels, the addresses of the flags of stale nodes and of the ends of the top
# nodes, and from _LEVELS on the addresses of the sums and minima of each level, and its size; leaves come first
_N_LEVELS, _STALE, _ENDS, _LEVELS = 0, 1, 2, 3


def bind_tree(sums: list[Any], mins: list[Any], stale: Any, ends: Any) -> npt.NDArray[np.int64]:
    """The addresses and sizes of all levels, which the caller keeps alive."""
    entries = [len(sums), stale.ctypes.data, ends.ctypes.data]
    for level_sums, level_mins in zip(sums, mins, strict=True):
        entries += [level_sums.ctypes.data, level_mins.ctypes.data, len(level_sums)]
    return np.array(entries, np.int64)


@intrinsic
def _float_before(typing_context: Any, value: Any) -> Any:
    """The largest float64 below ``value``, which is above zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.sub(builder.bitcast(args[0], _WORD), _WORD(1))
        return builder.bitcast(bits, ir.DoubleType())

    return types.float64(types.float64), generate


@inner
def _sums_of(bound: Any, level: Any) -> Any:
    return float64_at(bound[_LEVELS + 3 * level], (bound[_LEVELS + 3 * level + 2],))


@inner
def _mins_of(bound: Any, level: Any) -> Any:
    return float64_at(bound[_LEVELS + 3 * level + 1], (bound[_LEVELS + 3 * level + 2],))


@inner
def _sum_of_children(sums: Any, node: Any) -> float:
    """The sum of `FAN_OUT` numbers in the order in which NumPy adds them: eight partial sums, then those in pairs."""
    at = node * FAN_OUT
    a, b, c, d = sums[at], sums[at + 1], sums[at + 2], sums[at + 3]
    e, f, g, h = sums[at + 4], sums[at + 5], sums[at + 6], sums[at + 7]
    for i in range(at + 8, at + FAN_OUT, 8):
        a, b, c, d = a + sums[i], b + sums[i + 1], c + sums[i + 2], d + sums[i + 3]
        e, f, g, h = e + sums[i + 4], f + sums[i + 5], g + sums[i + 6], h + sums[i + 7]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@inner
def _least_above_zero(numbers: Any, start: Any, stop: Any) -> float:
    """The least of a multiple of four numbers, of those above zero."""
    a, b, c, d = np.inf, np.inf, np.inf, np.inf
    for i in range(start, stop, 4):
        a = min(a, numbers[i] if numbers[i] > 0 else np.inf)
        b = min(b, numbers[i + 1] if numbers[i + 1] > 0 else np.inf)
        c = min(c, numbers[i + 2] if numbers[i + 2] > 0 else np.inf)
        d = min(d, numbers[i + 3] if numbers[i + 3] > 0 else np.inf)
    return min(min(a, b), min(c, d))


@inner
def _is_any_stale(stale: Any, start: Any, stop: Any) -> bool:
    for at in range(start, stop, 8):  # noqa: SIM110  # numba compiles no generators here
        if load_word(stale, at):
            return True
    return False


@inner
def _update(bound: Any) -> float:
    """Sum all nodes with stale children; return the minimum."""
    n_levels = bound[_N_LEVELS]
    top = n_levels - 1
    # flags are padded to a multiple of FAN_OUT
    n_nodes = bound[_LEVELS + 2] // FAN_OUT
    n_flags = (n_nodes + FAN_OUT - 1) // FAN_OUT * FAN_OUT
    stale = bytes_at(bound[_STALE], (n_flags,))
    sums, ends = _sums_of(bound, top), float64_at(bound[_ENDS], (0,))
    if not _is_any_stale(stale, 0, n_flags):
        return _least_above_zero(_mins_of(bound, top), 0, len(sums))
    n_below = 1  # nodes above the leaves, below each node of a level
    for level in range(1, n_levels):
        sums, mins = _sums_of(bound, level), _mins_of(bound, level)
        sums_below, mins_below = _sums_of(bound, level - 1), _mins_of(bound, level - 1)
        for first in range(0, n_flags, max(n_below, 8)):
            if not _is_any_stale(stale, first, min(first + max(n_below, 8), n_flags)):
                continue
            for node in range(first // n_below, first // n_below + max(8 // n_below, 1)):
                if n_below > 1 or stale[node]:
                    sums[node] = _sum_of_children(sums_below, node)
                    mins[node] = _least_above_zero(mins_below, node * FAN_OUT, (node + 1) * FAN_OUT)
        n_below *= FAN_OUT
    total = 0.0
    for node in range(len(sums)):
        total = total + sums[node]
        ends[node] = total
    for at in range(n_flags):
        stale[at] = 0
    return _least_above_zero(_mins_of(bound, top), 0, len(sums))


@inner
def _find_child(sums: Any, node: Any, point: Any) -> Any:
    """The child of ``node`` that ends after ``point``, and where in it that is; if none does, -1 and their sum."""
    # without branches, which depend on random numbers: so the processor works on several points at a time
    at, end, before, n_before = node * FAN_OUT, 0.0, 0.0, 0
    for child in range(at, at + FAN_OUT):
        end = end + sums[child]
        is_before = end <= point
        n_before += is_before
        before = end if is_before else before
    if n_before == FAN_OUT:
        return -1, end
    return at + n_before, point - before


@inner
def _find_leaf(bound: Any, point: Any) -> int:
    top = bound[_N_LEVELS] - 1
    n_ends = bound[_LEVELS + 3 * top + 2]
    ends = float64_at(bound[_ENDS], (n_ends,))
    last = ends[n_ends - 1]
    if point >= last and last > 0:
        point = _float_before(last)
    # the first node that ends after the point, which cannot be empty
    node = first_above(ends, point)
    if node > 0:
        point = point - ends[node - 1]
    for level in range(top - 1, -1, -1):
        sums = _sums_of(bound, level)
        child, rest = _find_child(sums, node, point)
        if child < 0:
            # rounding has moved the point past the end of its node
            child, rest = _find_child(sums, node, _float_before(rest) if rest > 0 else rest)
        node, point = (child, rest) if child >= 0 else (node * FAN_OUT, point)
    return node


@entry
def find(bound: Any, points: Any, leaves: Any, is_draw: bool) -> float:
    """Set ``leaves`` to those at ``points``, and ``points`` to their priorities; return the minimum of the tree.

    With ``is_draw`` the points are random numbers from 0 to 1, one for each of as many equal parts of the total. If the
    tree is empty, nothing is found.
    """
    bound, points, leaves = as_column(bound), as_column(points), as_column(leaves)
    minimum = _update(bound)
    top = bound[_N_LEVELS] - 1
    n_ends, count = bound[_LEVELS + 3 * top + 2], len(points)
    total = float64_at(bound[_ENDS], (n_ends,))[n_ends - 1]
    if not count or total == 0:
        return minimum
    part, priorities = total / count, _sums_of(bound, 0)
    for number in range(count):
        leaf = _find_leaf(bound, (number + points[number]) * part if is_draw else points[number])
        leaves[number] = leaf
        points[number] = priorities[leaf]
    return minimum


@entry
def write(bound: Any, indices: Any, priorities: Any, n_leaves: int) -> int:
    """Set the priorities of the leaves ``indices % n_leaves``, in order, and mark their nodes as stale."""
    bound, indices, priorities = as_column(bound), as_column(indices), as_column(priorities)
    leaves = _sums_of(bound, 0)
    stale = bytes_at(bound[_STALE], (len(leaves) // FAN_OUT,))
    for number in range(len(indices)):
        leaf = indices[number] % n_leaves
        stale[leaf // FAN_OUT] = 1
        leaves[leaf] = priorities[number]
    return 0
