"""Checks of the arguments of tensor buffers."""

from __future__ import annotations

import math
from typing import Any

import torch

from sb3_extra_buffers.errors import ArgumentError
from sb3_extra_buffers.kernels.sum_tree_torch import MAX_ERROR

__all__ = ["check_beta", "check_options", "find_device"]


def find_device(device: str | torch.device) -> torch.device:
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and not torch.cuda.is_available()):
        has = "a CUDA device and the CPU" if torch.cuda.is_available() else "the CPU only"
        raise ArgumentError(f"device={str(device)!r} cannot be used; torch can use {has} here")
    # with the number of the GPU, which tensors also have
    return torch.empty(0, device=found).device


def check_options(gamma: float, alpha: float | None, beta: float, epsilon: float, image_dtype: Any) -> None:
    if not 0 <= gamma <= 1:
        raise ArgumentError(f"gamma must be from 0 to 1, got {gamma}")
    if alpha is not None and not 0 <= alpha <= 1:
        raise ArgumentError(f"alpha must be from 0 (uniform) to 1 (proportional), got {alpha}")
    check_beta(beta)
    if not 0 < epsilon <= MAX_ERROR:
        raise ArgumentError(
            f"epsilon must be above 0, or transitions whose TD error is 0 are never sampled; got {epsilon}"
        )
    if image_dtype is not None and not (isinstance(image_dtype, torch.dtype) and image_dtype.is_floating_point):
        raise ArgumentError(f"image_dtype must be a floating-point dtype such as torch.float32, got {image_dtype!r}")


def check_beta(beta: float) -> None:
    if not 0 <= beta < math.inf:
        raise ArgumentError(f"beta must be 0 or more, got {beta}")
