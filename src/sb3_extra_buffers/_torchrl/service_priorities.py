"""Checks of the priorities and indices that clients of a served buffer send."""

from __future__ import annotations

from typing import Any

import torch

from sb3_extra_buffers.errors import PriorityError

__all__ = ["as_tensor", "check_priorities", "check_weights"]


def as_tensor(values: Any, what: str, is_float: bool) -> torch.Tensor:
    """Return ``values`` as a tensor of integers, or of any numbers if ``is_float``."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PriorityError(f"expected {what}, got {values!r}: {error}") from None
    if tensor.is_complex() or tensor.dtype == torch.bool or (tensor.is_floating_point() and not is_float):
        raise PriorityError(f"expected {what}, got a tensor of {tensor.dtype}")
    return tensor


def check_priorities(values: Any, count: int) -> torch.Tensor:
    """Return the priorities of ``count`` items, or a single one for all of them, as a tensor ``[count]``."""
    priority = as_tensor(values, "priorities", True)
    if priority.numel() not in (1, count):
        raise PriorityError(f"priorities of shape {tuple(priority.shape)} for {count} items")
    valid = torch.isfinite(priority) & (priority >= 0)
    if not bool(valid.all()):
        raise PriorityError(f"a priority must be a finite number of at least 0, got {priority[~valid][0].item()}")
    return priority.reshape(-1).expand(count)


def check_weights(priority: torch.Tensor, sampler: Any, capacity: int) -> torch.Tensor:
    """Return ``priority`` in the dtype of the trees of ``sampler``, which end the process if it is another one."""
    dtype = torch.float64 if sampler.dtype == torch.float64 else torch.float32
    converted = priority.to(dtype)
    weights = (converted + sampler._eps) ** sampler._alpha
    # TorchRL cannot sample with a weight of zero, or if their sum is infinite
    bad = ~((weights > 0) & (weights <= torch.finfo(dtype).max / capacity))
    if bool(bad.any()):
        raise PriorityError(
            f"with alpha={sampler._alpha} and eps={sampler._eps}, the priority {priority[bad][0].item():g} has the "
            f"weight {weights[bad][0].item():g}; weights must be above 0, and {capacity} of them must have a finite sum"
        )
    return converted
