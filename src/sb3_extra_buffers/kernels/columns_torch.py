"""The reference kernel for the columns of a transition, in PyTorch."""

from __future__ import annotations

import torch

from sb3_extra_buffers.kernels.launcher import Columns

__all__ = ["gather_columns_reference"]


def gather_columns_reference(indices: torch.Tensor, columns: Columns) -> None:
    """Fill ``columns`` with the records at ``indices [row]``."""
    floats, actions, records = columns
    _, (action, _, at, _) = columns.arguments()
    found = records.index_select(0, indices)
    numbers = found.view(torch.float32)
    torch.mul(numbers[:, 1:2], 1 - numbers[:, 2:3], out=floats[0])
    floats[1] = numbers[:, :1]
    actions.copy_(found[:, at : at + action].contiguous().view(actions.dtype).view(actions.shape))
