"""Reference kernels that copy uncompressed observations to and from a device's tables, in PyTorch."""

from __future__ import annotations

import torch

__all__ = ["FOLLOWS", "UNWRITTEN", "read_frames_reference", "read_timeline_reference"]

# entries of a timeline's table `side_ids`; others are the number of a side row + 1
UNWRITTEN, FOLLOWS = -1, 0


def read_timeline_reference(
    rows: torch.Tensor,  # [obs, word]
    side: torch.Tensor,  # [side row, word]
    side_ids: torch.Tensor,  # int32 [obs]
    indices: torch.Tensor,  # int64, any shape
    n_streams: int,
) -> torch.Tensor:
    """Observations ``[*indices.shape, word]``: ``index`` for an observation, ``index + obs`` for the next one.

    The next observation is the row of the same stream one step later, or a side row; unwritten ones are zeros.
    """
    n_obs = len(side_ids)
    is_next, at = indices >= n_obs, indices % n_obs
    side_id = side_ids[at]
    is_side = is_next & (side_id > 0)
    position = torch.where(is_next, (at + n_streams) % n_obs, at)
    is_written = (side_id != UNWRITTEN).unsqueeze(-1)
    # rows that are not read need not exist
    found = rows[torch.where(is_side | (side_id == UNWRITTEN), 0, position)]
    aside = side[torch.where(is_side, side_id - 1, 0)]
    return torch.where(is_written, torch.where(is_side.unsqueeze(-1), aside, found), 0)


def read_frames_reference(
    slots: torch.Tensor,  # [slot, word]
    frame_ids: torch.Tensor,  # int32 [obs_index, stack]
    indices: torch.Tensor,  # int64, any shape
) -> torch.Tensor:
    """Frames ``[*indices.shape, stack, word]``."""
    return slots[frame_ids[indices]]
