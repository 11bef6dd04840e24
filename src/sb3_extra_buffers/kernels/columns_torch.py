"""Reference kernels that gather columns and compute n-step returns, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.kernels.launcher import Columns

__all__ = ["NStepReturns", "gather_columns_reference", "n_step_reference"]

Array = npt.NDArray[Any]


class NStepReturns(NamedTuple):
    """n-step returns of a batch, and where they end."""

    indices: torch.Tensor  # int64 [2, row]: of the observations, and of the next observations in the second set
    dones: torch.Tensor  # float32 [row, 1]
    returns: torch.Tensor  # float32 [row, 1]
    discounts: torch.Tensor  # float32 [row, 1]


def gather_columns_reference(indices: torch.Tensor, columns: Columns) -> None:
    """Fill ``columns`` with the records at ``indices [row]``."""
    floats, actions, records = columns
    _, (action, _, at, _) = columns.arguments()
    if records.device.type == "cpu":
        _gather_arrays(indices.numpy(), floats.numpy(), actions.numpy(), records.numpy(), at)
        return
    found = records.index_select(0, indices)
    numbers = found.view(torch.float32)
    torch.mul(numbers[:, 1:2], 1 - numbers[:, 2:3], out=floats[0])
    floats[1] = numbers[:, :1]
    actions.copy_(found[:, at : at + action].contiguous().view(actions.dtype).view(actions.shape))


def _gather_arrays(indices: Array, floats: Array, actions: Array, records: Array, at: int) -> None:
    """The same with NumPy, whose calls cost a fraction of torch's."""
    found = records.take(indices, axis=0)
    rewards, dones, timeouts = found.view(np.float32)[:, :3].T
    np.multiply(dones, 1 - timeouts, out=floats[0, :, 0])
    floats[1, :, 0] = rewards
    first = at // actions.itemsize
    actions[...] = found.view(actions.dtype)[:, first : first + actions.shape[1]]


def n_step_reference(
    indices: torch.Tensor,  # int64 [row]
    records: torch.Tensor,  # uint8 [obs, record_bytes]
    powers: torch.Tensor,  # float32 [n_steps + 1]: of gamma
    newest: int,  # the step after it is the oldest one
    n_envs: int,
    normalize: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> NStepReturns:
    """Returns up to the first end of an episode or the newest step, bit-identical to SB3's `NStepReplayBuffer`."""
    n_obs, offsets = len(records), torch.arange(len(powers) - 1, device=indices.device)
    ahead = (indices[:, None] + offsets * n_envs) % n_obs  # (row, n_steps)
    numbers = records.view(torch.float32).index_select(0, ahead.view(-1))
    rewards, dones, timeouts = (numbers[:, i].reshape(ahead.shape) for i in range(3))
    if normalize is not None:
        rewards = normalize(rewards)
    is_last = (dones != 0) | (timeouts != 0) | (ahead // n_envs == newest)
    is_last[:, -1] = True
    n_more = is_last.int().argmax(dim=1, keepdim=True)
    returns = _sum_as_numpy(rewards * powers[:-1] * (offsets <= n_more))
    ends = ahead.gather(1, n_more)[:, 0]
    ended = dones.gather(1, n_more) * (1 - timeouts.gather(1, n_more))
    return NStepReturns(torch.stack((indices, ends + n_obs)), ended, returns, powers[n_more[:, 0] + 1][:, None])


def _sum_as_numpy(parts: torch.Tensor) -> torch.Tensor:
    """The sum of each row ``[row, 1]``, added in NumPy's order: eight partial sums, if there are that many columns."""
    columns = list(parts.unbind(1))
    total: torch.Tensor | None = None
    if len(columns) >= 8:
        whole = len(columns) // 8 * 8
        sums = columns[:8]
        for i in range(8, whole):
            sums[i % 8] = sums[i % 8] + columns[i]
        total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
        columns = columns[whole:]
    for column in columns:
        total = column if total is None else total + column
    assert total is not None
    return total[:, None]
