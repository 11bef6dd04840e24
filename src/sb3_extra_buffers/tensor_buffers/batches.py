"""The tensors of a batch: their layout, their allocation, and the tensors that the caller passes as ``out``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.kernels.images_torch import ImageTransform
from sb3_extra_buffers.tensor_buffers.fields import Field

__all__ = ["BatchLayout", "Outputs", "Scratch"]


class Outputs(NamedTuple):
    """The tensors that a batch is written to."""

    #: Observations ``[2, n, ...]``, with the next observations; None where the store is to allocate them.
    pairs: list[torch.Tensor | None]
    #: One tensor ``[n, ...]`` for each column.
    columns: list[torch.Tensor]
    #: Discounts of n-step returns, indices and importance weights, if the buffer has them.
    extras: list[torch.Tensor]


class Scratch(NamedTuple):
    """Memory that sampling needs besides its outputs."""

    #: Random numbers: one for each transition, then those of the image transforms.
    uniform: torch.Tensor
    #: int64 ``[2, n]``
    indices: torch.Tensor
    #: Observations as they are stored, for those that are transformed; None where the store is to allocate them.
    stored: list[torch.Tensor | None]


@dataclass(frozen=True)
class BatchLayout:
    """Names, shapes and dtypes of the tensors of a batch."""

    observations: list[Field]
    transforms: list[ImageTransform | None]
    columns: list[Field]
    extras: list[Field]
    device: torch.device

    def obs_dtype(self, i: int) -> torch.dtype:
        transform = self.transforms[i]
        return self.observations[i].dtype if transform is None else transform.dtype

    def allocate(self, count: int, lazily: bool = False) -> Outputs:
        """Return new outputs for ``count`` transitions; ``lazily`` leaves out observations that stores allocate."""
        pairs = [
            None
            if lazily and self.transforms[i] is None
            else torch.empty((2, count, *field.shape), dtype=self.obs_dtype(i), device=self.device)
            for i, field in enumerate(self.observations)
        ]
        columns, extras = (
            [torch.empty((count, *field.shape), dtype=field.dtype, device=self.device) for field in fields]
            for fields in (self.columns, self.extras)
        )
        return Outputs(pairs, columns, extras)

    def allocate_scratch(self, count: int) -> Scratch:
        n_shifted = sum(transform is not None and transform.pad > 0 for transform in self.transforms)
        uniform = torch.empty(count * (1 + 4 * n_shifted), dtype=torch.float64, device=self.device)
        indices = torch.empty((2, count), dtype=torch.int64, device=self.device)
        stored = [
            None
            if transform is None or self.device.type == "cpu"
            else torch.empty((2, count, *field.shape), dtype=field.dtype, device=self.device)
            for field, transform in zip(self.observations, self.transforms, strict=True)
        ]
        return Scratch(uniform, indices, stored)

    def as_dict(self, outs: Outputs) -> dict[str, torch.Tensor]:
        """The batch by name."""
        batch = {}
        for field, pair in zip(self.observations, outs.pairs, strict=True):
            assert pair is not None
            batch[field.name], batch[f"next_{field.name}"] = pair[0], pair[1]
        for fields, tensors in ((self.columns, outs.columns), (self.extras, outs.extras)):
            batch.update({field.name: tensor for field, tensor in zip(fields, tensors, strict=True)})
        return batch

    def names(self) -> list[str]:
        """The names of a batch."""
        observations = [name for field in self.observations for name in (field.name, f"next_{field.name}")]
        return observations + [field.name for field in (*self.columns, *self.extras)]

    def check(self, out: Mapping[str, Any], count: int) -> None:
        """Raise unless ``out`` has a tensor of the right kind for each name."""
        names = self.names()
        if not isinstance(out, Mapping) or set(out) != set(names):
            got = ", ".join(map(str, out)) if isinstance(out, Mapping) else repr(out)
            raise SpecMismatchError(f"out must be a dict of {', '.join(names)}, as sample() returns it; got {got}")
        wanted = [
            (name, field.shape, self.obs_dtype(i))
            for i, field in enumerate(self.observations)
            for name in (field.name, f"next_{field.name}")
        ]
        wanted += [(field.name, field.shape, field.dtype) for field in (*self.columns, *self.extras)]
        for name, shape, dtype in wanted:
            tensor, expected = out[name], (count, *shape)
            if (
                not isinstance(tensor, torch.Tensor)
                or (tuple(tensor.shape), tensor.dtype, tensor.device) != (expected, dtype, self.device)
                or not tensor.is_contiguous()
                or tensor.requires_grad
            ):
                got = (
                    f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
                    if isinstance(tensor, torch.Tensor)
                    else repr(tensor)
                )
                raise SpecMismatchError(
                    f"out[{name!r}] must be a contiguous tensor, {dtype} {expected} on {self.device}, without "
                    f"requires_grad; got {got}"
                )
        ranges = sorted((out[name].data_ptr(), out[name].nbytes, name) for name in names)
        for (begin, size, name), (following, _, other) in pairwise(ranges):
            if begin + size > following:
                raise SpecMismatchError(f"out[{name!r}] and out[{other!r}] share memory; pass a tensor for each")

    def outputs_in(self, out: Mapping[str, torch.Tensor], spare: list[torch.Tensor | None]) -> Outputs:
        """Return the outputs in ``out``, which has been checked.

        If observations and next observations are not adjacent in memory, unlike those of `allocate`, they are written
        to a tensor in ``spare`` first, which is allocated if necessary.
        """
        pairs: list[torch.Tensor | None] = []
        for i, field in enumerate(self.observations):
            pair = _join(out[field.name], out[f"next_{field.name}"])
            if pair is None:
                pair = spare[i]
                if pair is None:
                    obs = out[field.name]
                    pair = spare[i] = torch.empty((2, *obs.shape), dtype=obs.dtype, device=obs.device)
            pairs.append(pair)
        columns = [out[field.name] for field in self.columns]
        return Outputs(pairs, columns, [out[field.name] for field in self.extras])

    def copy_pairs(self, outs: Outputs, out: Mapping[str, torch.Tensor]) -> None:
        """Copy observations that were written to spare memory to ``out``."""
        for field, pair in zip(self.observations, outs.pairs, strict=True):
            assert pair is not None
            if pair.data_ptr() != out[field.name].data_ptr():
                out[field.name].copy_(pair[0])
                out[f"next_{field.name}"].copy_(pair[1])


def _join(obs: torch.Tensor, next_obs: torch.Tensor) -> torch.Tensor | None:
    """Return ``obs`` and ``next_obs`` as one tensor ``[2, ...]`` if they are adjacent in memory, else None."""
    if (
        obs.untyped_storage().data_ptr() != next_obs.untyped_storage().data_ptr()
        or next_obs.storage_offset() != obs.storage_offset() + obs.numel()
    ):
        return None
    return obs.as_strided((2, *obs.shape), (obs.numel(), *obs.stride()), obs.storage_offset())
