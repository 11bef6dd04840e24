"""The kernel that decodes run lengths: `kernels.rle_torch` on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["decode_rle"]

_STEP, _WARPS = 2048, 4


@triton.jit
def _decode_kernel(
    heap_ptr,  # uint8 [capacity]
    starts_ptr,  # int64 [row]
    lengths_ptr,  # int32 [row]
    out_ptr,  # uint8 [row, N_ELEM * ELEM]
    N_ELEM: tl.constexpr,
    ELEM: tl.constexpr,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
):
    """Mark the start of each run in the row itself; counting marks then gives the run of each element.

    The grid is ``[row]``.
    """
    row = tl.program_id(0).to(tl.int64)
    payload = heap_ptr + tl.load(starts_ptr + row)
    n_runs = tl.load(lengths_ptr + row) // (ELEM + RUN)
    out = out_ptr + row * (N_ELEM * ELEM)
    lane = tl.arange(0, STEP)
    zero = tl.zeros([STEP], tl.uint8)
    for base in range(0, N_ELEM, STEP):
        element = base + lane
        tl.store(out + element * ELEM, zero, mask=element < N_ELEM)
    tl.debug_barrier()
    end = tl.full([], 0, tl.int64)
    for base in range(0, n_runs, STEP):
        i = base + lane
        count = tl.zeros([STEP], tl.int64)
        for byte in tl.static_range(RUN):
            part = tl.load(payload + i.to(tl.int64) * RUN + byte, mask=i < n_runs, other=0)
            count += part.to(tl.int64) << (8 * byte)
        begin = end + tl.cumsum(count, axis=0) - count
        # a run that starts past the end is not marked, so nothing outside of the row is written
        tl.store(out + begin * ELEM, zero + 1, mask=(i < n_runs) & (begin < N_ELEM))
        end += tl.sum(count, axis=0)
    tl.debug_barrier()
    values = payload + n_runs.to(tl.int64) * RUN
    seen = tl.full([], 0, tl.int32)
    for base in range(0, N_ELEM, STEP):
        element = base + lane
        mark = tl.load(out + element * ELEM, mask=element < N_ELEM, other=0).to(tl.int32)
        nth = seen + tl.cumsum(mark, axis=0) - 1
        seen += tl.sum(mark, axis=0)
        # each mark is read only by the thread that overwrites it
        for byte in tl.static_range(ELEM):
            known = (element < N_ELEM) & (nth >= 0)
            value = tl.load(values + nth.to(tl.int64) * ELEM + byte, mask=known, other=0)
            tl.store(out + element * ELEM + byte, value, mask=element < N_ELEM)


def decode_rle(
    heap: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, elem: int, run: int
) -> None:
    """`decode_rle_reference` in one launch. ``starts`` is int64 and ``lengths`` int32."""
    n_elem = out.shape[-1] // elem
    if starts.numel() and n_elem:
        step = min(_STEP, triton.next_power_of_2(n_elem))
        _decode_kernel[(starts.numel(),)](heap, starts, lengths, out, n_elem, elem, run, step, num_warps=_WARPS)
