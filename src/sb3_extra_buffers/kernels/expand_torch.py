"""Reference kernel that expands indices to the colours or numbers of a table, in PyTorch."""

from __future__ import annotations

import torch

__all__ = ["INSIDE", "OUTSIDE", "expand_reference"]

#: Where an observation is: unwritten (0), indices into the table, or from here on a row outside of the table.
INSIDE, OUTSIDE = 1, 2


def expand_reference(
    mapped: torch.Tensor,  # uint8 [row, unit]
    table: torch.Tensor,  # int64 [entry]
    places: torch.Tensor,  # int32 [obs_index]
    indices: torch.Tensor,  # int64 [row]
    outside: torch.Tensor,  # [slot, word]
    out: torch.Tensor,  # uint8 [row, byte]
    unit: int,
    plane: int,
) -> None:
    """Set the rows of ``out`` to the units that ``mapped`` names, see `kernels.tables.expand_rows`.

    Rows that are outside of the table are copied from ``outside``; unwritten ones are zeros.
    """
    n_rows, n_units = mapped.shape
    entries = table.view(torch.uint8).view(-1, 8)[:, :unit]
    units = entries[mapped.to(torch.int64)]  # [row, unit, byte]
    if plane:
        units = units.reshape(n_rows, n_units // plane, plane, unit).transpose(2, 3)
    place = places[indices]
    out.copy_(torch.where((place == INSIDE)[:, None], units.reshape(n_rows, -1), 0))
    is_outside = place >= OUTSIDE
    if bool(is_outside.any()):
        out[is_outside] = (
            outside[(place[is_outside] - OUTSIDE).to(torch.int64).to(outside.device)].view(torch.uint8).to(out.device)
        )
