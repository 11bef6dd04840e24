"""The settings of a tensor buffer, and their validation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from sb3_extra_buffers.arguments import check_count
from sb3_extra_buffers.errors import ArgumentError
from sb3_extra_buffers.tensor_buffers.fields import Field

__all__ = ["Settings", "find_device", "make_generator"]

# some kernels number transitions with 32 bits
_MAX_TRANSITIONS = 1 << 30


@dataclass(frozen=True)
class Settings:
    """The arguments of a buffer, apart from those of its observation stores."""

    #: a multiple of ``n_envs``
    capacity: int
    n_envs: int
    observations: dict[str, Field]
    columns: dict[str, Field]
    n_steps: int
    gamma: float
    alpha: float | None
    epsilon: float
    image_dtype: torch.dtype | None
    scale: float
    random_shift: int
    channels_last: bool

    def __post_init__(self) -> None:
        if self.capacity > _MAX_TRANSITIONS:
            raise ArgumentError(f"capacity must be at most {_MAX_TRANSITIONS}, got {self.capacity}")
        check_count(self.n_steps, "n_steps")
        check_count(self.random_shift, "random_shift", 0)
        if not 0 <= self.gamma <= 1:
            raise ArgumentError(f"gamma must be from 0 to 1, got {self.gamma}")
        dtype: Any = self.image_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(f"image_dtype must be a floating-point dtype such as torch.float32, got {dtype!r}")
        if self.n_steps > 1:
            self._check_endings()
        if (dtype is not None or self.random_shift) and not any(field.is_image for field in self.observations.values()):
            raise ArgumentError(
                "image_dtype and random_shift are for images (uint8 with at least two axes); no observation is an image"
            )
        taken = {field.name for field in self.extras()} & set(self.columns)
        if taken:
            raise ArgumentError(
                f"with these options, batches already have {', '.join(sorted(taken))}; give your field another name"
            )

    def extras(self) -> list[Field]:
        """The fields that batches have in addition to those of ``specs``."""
        extras = [Field("discounts", (), torch.float32)] if self.n_steps > 1 else []
        if self.alpha is not None:
            extras += [Field("indices", (), torch.int64), Field("weights", (), torch.float32)]
        return extras

    def _check_endings(self) -> None:
        for name, dtype in (("rewards", "float32"), ("dones", "bool")):
            field = self.columns.get(name)
            if field is None or math.prod(field.shape) != 1 or (name == "rewards" and field.dtype != torch.float32):
                got = "none" if field is None else f"{field.dtype} {field.shape}"
                raise ArgumentError(
                    f"n_steps={self.n_steps} needs a field {name!r} with one {dtype} per transition, got {got}"
                )

    @property
    def n_ring_steps(self) -> int:
        """Steps that the buffer holds when it is full."""
        return self.capacity // self.n_envs


def make_generator(generator: Any, seed: Any, device: torch.device) -> torch.Generator | None:
    """Return ``generator``, or a new one with ``seed``; None if neither is given."""
    if generator is not None and seed is not None:
        raise ArgumentError("pass a generator or a seed, not both")
    if seed is not None:
        return torch.Generator(device).manual_seed(check_count(seed, "seed", 0))
    if generator is None:
        return None
    if not isinstance(generator, torch.Generator):
        raise ArgumentError(f"generator must be a torch.Generator, got {generator!r}")
    if generator.device.type != device.type:
        raise ArgumentError(f"the generator is on {generator.device}, the buffer on {device}")
    return generator


def find_device(device: str | torch.device) -> torch.device:
    """Return the device of this name, with its index; ``"auto"`` is a GPU if there is one."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device={device!r} is not a torch device: {error}") from None
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and not torch.cuda.is_available()):
        has = "a CUDA device and the CPU" if torch.cuda.is_available() else "the CPU only"
        raise ArgumentError(f"device={str(device)!r} cannot be used; torch can use {has} here")
    return torch.empty(0, device=found).device
