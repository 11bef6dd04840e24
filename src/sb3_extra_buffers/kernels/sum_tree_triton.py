"""Priorities of the transitions of a ring on a GPU: the kernels of `kernels.sum_tree_torch`, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sb3_extra_buffers.kernels.launcher import Launcher
from sb3_extra_buffers.kernels.sum_tree_torch import FAN_OUT, MAX_ERROR, TorchSumTree

__all__ = ["TritonSumTree"]

_FAN = tl.constexpr(FAN_OUT)
_MAX_ERROR = tl.constexpr(MAX_ERROR)
# draws, updates and nodes of one program
_DRAWS, _UPDATES, _NODES = 128, 128, 64
# leaves that a single program fills at a time, and in all
_LEAVES, _MAX_FILL = 512, 1 << 15
_WARPS = 4


@triton.jit
def _sum_nodes(sums_ptr, mins_ptr, start, below, n_padded, node, is_node, LEVEL: tl.constexpr):
    """Sum the children of the nodes ``node`` of a level above the leaves, which are ``n_padded``."""
    child = below + node[:, None] * _FAN + tl.arange(0, _FAN)[None, :]
    value = tl.load(sums_ptr + child, mask=is_node[:, None], other=0)
    if LEVEL == 1:
        smallest = tl.where(value > 0, value, float("inf"))
    else:
        smallest = tl.load(mins_ptr + child - n_padded, mask=is_node[:, None], other=float("inf"))
    tl.store(sums_ptr + start + node, tl.sum(value, axis=1), mask=is_node)
    tl.store(mins_ptr + start - n_padded + node, tl.min(smallest, axis=1), mask=is_node)


@triton.jit
def _power(base, exponent):
    return tl.exp2(exponent * tl.log2(base))


@triton.jit(do_not_specialize=["first", "count"])
def _fill_kernel(
    sums_ptr, mins_ptr, offsets_ptr, max_ptr, options_ptr, first, count,
    N_LEVELS: tl.constexpr, LEAVES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Set consecutive leaves to the highest priority, and sum the nodes above them; a single program."""
    value = _power(tl.load(max_ptr), tl.load(options_ptr)) + tl.zeros([LEAVES], tl.float64)
    low, high = first.to(tl.int64), first.to(tl.int64) + count - 1
    for base in range(low, high + 1, LEAVES):
        leaf = base + tl.arange(0, LEAVES)
        tl.store(sums_ptr + leaf, value, mask=leaf <= high)
    lane = tl.arange(0, NODES)
    below, n_padded = tl.load(offsets_ptr), tl.load(offsets_ptr + (N_LEVELS > 1))
    for level in tl.static_range(1, N_LEVELS):
        # the children were written by other threads
        tl.debug_barrier()
        low, high = low // _FAN, high // _FAN
        start = tl.load(offsets_ptr + level)
        for base in range(low, high + 1, NODES):
            _sum_nodes(sums_ptr, mins_ptr, start, below, n_padded, base + lane, base + lane <= high, level)
        below = start


@triton.jit
def _load_updates(numbers_ptr, errors_ptr, counts_ptr, item, is_item):
    """Transitions and their errors, and which of them are held and finite."""
    number = tl.load(numbers_ptr + item, mask=is_item, other=-1)
    error = tl.abs(tl.load(errors_ptr + item, mask=is_item, other=0).to(tl.float64))
    n_added = tl.load(counts_ptr)
    is_held = (number < n_added) & (number >= n_added - tl.load(counts_ptr + 1))
    return number, error, is_item & is_held & (error <= _MAX_ERROR)


@triton.jit(do_not_specialize=["n_updates", "n_leaves"])
def _claim_kernel(
    numbers_ptr,  # int64 [update]
    errors_ptr,  # float [update]
    counts_ptr, claims_ptr, epoch_ptr,
    max_ptr,  # the bits of a float64, which sort like integers as it is positive
    skipped_ptr, options_ptr, n_updates, n_leaves,
    UPDATES: tl.constexpr,
):  # fmt: skip
    """Find the last update of each leaf, and the highest priority."""
    item = tl.program_id(0) * UPDATES + tl.arange(0, UPDATES)
    is_item = item < n_updates
    number, error, is_valid = _load_updates(numbers_ptr, errors_ptr, counts_ptr, item, is_item)
    stamp = (tl.load(epoch_ptr) << 32) + item
    tl.atomic_max(claims_ptr + tl.where(is_valid, number % n_leaves, 0), stamp, mask=is_valid, sem="relaxed")
    highest = tl.max(tl.where(is_valid, error + tl.load(options_ptr + 2), 0.0), axis=0)
    bits = highest.to(tl.int64, bitcast=True)
    tl.atomic_max(max_ptr, bits, mask=bits > tl.load(max_ptr), sem="relaxed")
    n_skipped = tl.sum((is_item & (is_valid == 0)).to(tl.int64), axis=0)
    tl.atomic_add(skipped_ptr, n_skipped, mask=n_skipped > 0, sem="relaxed")


@triton.jit(do_not_specialize=["n_updates", "n_leaves"])
def _write_kernel(
    numbers_ptr, errors_ptr, counts_ptr, claims_ptr, epoch_ptr, sums_ptr, options_ptr, n_updates, n_leaves,
    UPDATES: tl.constexpr,
):  # fmt: skip
    """Write the leaves that `_claim_kernel` has claimed."""
    item = tl.program_id(0) * UPDATES + tl.arange(0, UPDATES)
    is_item = item < n_updates
    number, error, is_valid = _load_updates(numbers_ptr, errors_ptr, counts_ptr, item, is_item)
    leaf = tl.where(is_valid, number % n_leaves, 0)
    stamp = (tl.load(epoch_ptr) << 32) + item
    is_last = is_valid & (tl.load(claims_ptr + leaf, mask=is_valid, other=0) == stamp)
    tl.store(sums_ptr + leaf, _power(error + tl.load(options_ptr + 2), tl.load(options_ptr)), mask=is_last)


@triton.jit(do_not_specialize=["n_items", "n_leaves", "start", "below", "n_padded", "per_node"])
def _sum_kernel(
    numbers_ptr, epoch_ptr, sums_ptr, mins_ptr, n_items, n_leaves, start, below, n_padded, per_node,
    LEVEL: tl.constexpr, IS_LAST: tl.constexpr, BY_NUMBER: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Sum the nodes of a level: all of them, or those above the transitions ``numbers``."""
    node = tl.program_id(0).to(tl.int64) * NODES + tl.arange(0, NODES)
    is_node = node < n_items
    if BY_NUMBER:
        number = tl.load(numbers_ptr + node, mask=is_node, other=-1)
        # nodes above skipped updates may be summed again, which does no harm
        is_node = is_node & (number >= 0)
        node = tl.where(is_node, number % n_leaves, 0) // per_node
    _sum_nodes(sums_ptr, mins_ptr, start.to(tl.int64), below.to(tl.int64), n_padded, node, is_node, LEVEL)
    # nested, since IS_LAST is known at compile time
    if IS_LAST:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(epoch_ptr, tl.load(epoch_ptr) + 1)


@triton.jit(do_not_specialize=["n_draws", "n_leaves"])
def _draw_kernel(
    uniform_ptr,  # float64 [draw]
    leaves_ptr,  # int64 [draw]
    numbers_ptr,  # int64 [draw]
    weights_ptr,  # float32 [draw]
    counts_ptr, sums_ptr, mins_ptr, offsets_ptr, options_ptr, n_draws, n_leaves,
    N_LEVELS: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """Descend from the root to the leaf at each of ``DRAWS`` points."""
    draw = tl.program_id(0) * DRAWS + tl.arange(0, DRAWS)
    is_draw = draw < n_draws
    lane = tl.arange(0, _FAN)
    top = tl.load(offsets_ptr + N_LEVELS - 1)
    total = tl.sum(tl.load(sums_ptr + top + lane), axis=0)
    uniform = tl.load(uniform_ptr + draw, mask=is_draw, other=0)
    point = (draw.to(tl.float64) + uniform) * (total / n_draws.to(tl.float64))
    node = tl.zeros([DRAWS], tl.int64)
    priority = tl.zeros([DRAWS], tl.float64)
    for down in tl.static_range(N_LEVELS):
        first = tl.load(offsets_ptr + N_LEVELS - 1 - down) + node * _FAN
        # one thread per point reads the children one after the other: fewer instructions than a parallel scan
        end = tl.zeros([DRAWS], tl.float64)
        before = tl.zeros([DRAWS], tl.float64)
        chosen = tl.zeros([DRAWS], tl.int32)
        is_found = chosen > 0
        for child in tl.static_range(_FAN):
            value = tl.load(sums_ptr + first + child)
            # the last child that is not empty, if rounding has moved the point past the end of its node
            is_candidate = (value > 0) & (is_found == 0)
            before = tl.where(is_candidate, end, before)
            chosen = tl.where(is_candidate, child, chosen)
            priority = tl.where(is_candidate, value, priority)
            end += value
            is_found = is_found | (is_candidate & (end > point))
        point = tl.maximum(point - before, 0.0)
        node = node * _FAN + chosen
    if N_LEVELS == 1:
        leaf = tl.load(sums_ptr + lane)
        smallest = tl.min(tl.where(leaf > 0, leaf, float("inf")), axis=0)
    else:
        smallest = tl.min(tl.load(mins_ptr + top - tl.load(offsets_ptr + 1) + lane), axis=0)
    weight = _power(smallest / tl.where(priority > 0, priority, 1.0), tl.load(options_ptr + 1))
    n_added = tl.load(counts_ptr)
    # % is negative for negative numbers
    age = (n_added % n_leaves + n_leaves - 1 - node) % n_leaves
    tl.store(leaves_ptr + draw, node, mask=is_draw)
    tl.store(numbers_ptr + draw, n_added - 1 - age, mask=is_draw)
    tl.store(weights_ptr + draw, weight.to(tl.float32), mask=is_draw)


class TritonSumTree(TorchSumTree):
    """`TorchSumTree` in a launch to draw or to fill, and a few to update."""

    def __init__(self, n_leaves: int, counts: torch.Tensor, alpha: float, beta: float, epsilon: float) -> None:
        super().__init__(n_leaves, counts, alpha, beta, epsilon)
        ints, doubles, floats = torch.int64, torch.float64, torch.float32
        device, n_levels = counts.device, len(self.sizes)
        max_bits = self.max_priority.view(ints)
        self._start_fill = Launcher(
            _fill_kernel, device, n_levels, (self.sums, self.mins, self.offsets, self.max_priority, self.options),
            ((), ()), _WARPS,
        )  # fmt: skip
        updates = (self.counts, self.claims, self.epoch, max_bits, self.n_skipped, self.options)
        # TD errors are usually float32, but need not be
        self._start_claim = {
            dtype: Launcher(_claim_kernel, device, dtype, updates, ((ints, dtype), ()), _WARPS)
            for dtype in (floats, doubles, torch.float16, torch.bfloat16)
        }
        written = (self.counts, self.claims, self.epoch, self.sums, self.options)
        self._start_write = {
            dtype: Launcher(_write_kernel, device, dtype, written, ((ints, dtype), ()), _WARPS)
            for dtype in self._start_claim
        }
        self._start_sum = Launcher(_sum_kernel, device, None, (self.epoch, self.sums, self.mins), ((ints,), ()), _WARPS)
        self._start_draw = Launcher(
            _draw_kernel, device, n_levels, (self.counts, self.sums, self.mins, self.offsets, self.options),
            ((doubles, ints, ints, floats), ()), _WARPS,
        )  # fmt: skip

    def _fill(self, first: int, count: int) -> None:
        if count > _MAX_FILL:
            super()._fill(first, count)
            return
        self._start_fill.start((), (1, 1, 1), (), (), (first, count, len(self.sizes), _LEAVES, _NODES))

    def _update(self, numbers: torch.Tensor, errors: torch.Tensor) -> None:
        if errors.dtype not in self._start_claim:
            errors = errors.float()
        numbers, errors = numbers.contiguous(), errors.contiguous()
        n_updates = len(numbers)
        grid, sizes = (-(-n_updates // _UPDATES), 1, 1), (n_updates, self.n_leaves, _UPDATES)
        self._start_claim[errors.dtype].start((), grid, (numbers, errors), (), sizes)
        self._start_write[errors.dtype].start((), grid, (numbers, errors), (), sizes)
        if len(self.sizes) == 1:
            self.epoch.add_(1)
        for level in range(1, len(self.sizes)):
            n_nodes = self.sizes[level - 1] // FAN_OUT
            by_number = n_updates < n_nodes
            n_items, is_last = min(n_updates, n_nodes), level == len(self.sizes) - 1
            variant = (level > 1, is_last, by_number)
            numbers_of_kernel = (
                n_items, self.n_leaves, self.starts[level], self.starts[level - 1], self.sizes[0], FAN_OUT**level,
                1 + (level > 1), is_last, by_number, _NODES,
            )  # fmt: skip
            self._start_sum.start(variant, (-(-n_items // _NODES), 1, 1), (numbers,), (), numbers_of_kernel)

    def _draw(self, uniform: torch.Tensor, leaves: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> None:
        n_draws = len(uniform)
        if not n_draws:
            return
        self._start_draw.start(
            (), (-(-n_draws // _DRAWS), 1, 1), (uniform, leaves, numbers, weights), (),
            (n_draws, self.n_leaves, len(self.sizes), _DRAWS),
        )  # fmt: skip
