"""The kernel that expands indices to the colours or numbers of a table: `kernels.expand_torch` on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["expand"]

_BLOCK, _WARPS = 1024, 4
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["per_piece"])
def _expand_kernel(
    mapped_ptr,  # uint8 [row, N_UNITS]
    table_ptr,  # int64 [entry]
    places_ptr,  # int32 [obs_index]
    indices_ptr,  # int64 [row]
    addresses_ptr,  # int64 [piece]: of the rows outside of the table
    out_ptr,  # [row, value]: bytes, or words of a unit each
    per_piece,
    N_UNITS: tl.constexpr,
    UNIT: tl.constexpr,  # values of a unit
    PLANE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Expand ``BLOCK`` units of a row; the grid is ``[row, block]``."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N_UNITS
    # a vector, as masks are
    place = tl.load(places_ptr + tl.load(indices_ptr + row)) + tl.zeros([BLOCK], tl.int32)
    index = tl.load(mapped_ptr + row * N_UNITS + i, mask=inside, other=0).to(tl.int32)
    code = tl.load(table_ptr + index, mask=inside & (place == 1), other=0)
    is_outside = inside & (place > 1)
    slot = tl.maximum(place - 2, 0).to(tl.int64)
    address = tl.load(addresses_ptr + slot // per_piece, mask=is_outside, other=0)
    other_ptr = address.to(out_ptr.dtype) + (slot % per_piece) * (N_UNITS * UNIT)
    for nth in tl.static_range(UNIT):
        at = i * UNIT + nth
        if PLANE > 0:
            at = (i // PLANE) * (UNIT * PLANE) + nth * PLANE + i % PLANE
        value = (code >> (8 * nth)).to(out_ptr.dtype.element_ty)
        kept = tl.load(other_ptr + at, mask=is_outside, other=0)
        tl.store(out_ptr + row * (N_UNITS * UNIT) + at, tl.where(is_outside, kept, value), mask=inside)


def expand(
    mapped: torch.Tensor,
    table: torch.Tensor,
    places: torch.Tensor,
    indices: torch.Tensor,
    addresses: torch.Tensor,
    per_piece: int,
    out: torch.Tensor,
    unit: int,
    plane: int,
) -> None:
    """`expand_reference` in one launch; rows outside of the table are in pieces of ``per_piece`` at ``addresses``."""
    n_rows, n_units = mapped.shape
    if not n_rows:
        return
    # numbers are written as words
    dtype = _WORDS.get(unit, torch.uint8) if not plane else torch.uint8
    n_values = unit if dtype is torch.uint8 else 1
    block = min(_BLOCK, triton.next_power_of_2(n_units))
    _expand_kernel[(n_rows, -(-n_units // block))](
        mapped, table, places, indices, addresses, out.view(dtype), per_piece, n_units, n_values, plane, block,
        num_warps=_WARPS,
    )  # fmt: skip
