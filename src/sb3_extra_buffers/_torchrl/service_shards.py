"""Drawing one batch from several served buffers, as if they were one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from sb3_extra_buffers._torchrl.service import Contents
from sb3_extra_buffers.errors import ArgumentError, EmptyBufferError

__all__ = ["merge_parts", "split_batch"]

_WEIGHT = "priority_weight"


def split_batch(shards: Sequence[Contents], batch_size: int, rng: np.random.Generator) -> list[int]:
    """Return how many items of a batch to draw from each shard: at random, in proportion to their masses."""
    unit = shards[0].unit
    if unit < 1:
        raise ArgumentError(
            "this sampler cannot draw a batch from several buffers; use RandomSampler, PrioritizedSampler or a "
            "SliceSampler with slice_len=..."
        )
    if batch_size % unit:
        raise ArgumentError(f"batch_size={batch_size} is not divisible by slice_len={unit}")
    masses = np.array([shard.mass if shard.n_items else 0.0 for shard in shards])
    if masses.sum() <= 0:
        raise EmptyBufferError("cannot sample: all shards are empty")
    counts: list[int] = (rng.multinomial(batch_size // unit, masses / masses.sum()) * unit).tolist()
    return counts


def merge_parts(
    parts: Sequence[Any],
    planned: Sequence[Contents],
    drawn: Sequence[Contents],
    shard_size: int,
    rng: np.random.Generator,
) -> Any:
    """Return the items that were drawn from the shards as one batch in random order; None for a shard without items.

    ``planned`` are the contents that decided how many items to draw from each shard, ``drawn`` those at the moment of
    the draw. Importance weights become what they would be in one buffer, for the probabilities that were used.
    """
    present = [(number, part) for number, part in enumerate(parts) if part is not None]
    # the smallest probability in all shards that could have been drawn from
    smallest = min(
        now.lowest * before.mass / now.mass
        for before, now in zip(planned, drawn, strict=True)
        if before.n_items and now.n_items
    )
    for number, part in present:
        part.set("index", part.get("index") + number * shard_size)
        weight = part.get(_WEIGHT, None)
        if weight is not None:
            now, before = drawn[number], planned[number]
            # (p / lowest) ** -beta becomes (q / smallest q) ** -beta, where q = p * before.mass / now.mass
            part.set(_WEIGHT, weight * (now.lowest * before.mass / now.mass / smallest) ** -now.beta)
    if len(present) == 1:
        return present[0][1]
    if drawn[0].unit > 1:
        return torch.cat([part for _, part in present])
    order = rng.permutation(sum(len(part) for _, part in present))
    return _interleave([part for _, part in present], order)


def _interleave(parts: Sequence[Any], order: npt.NDArray[np.int64]) -> Any:
    """Return the rows of ``parts``, one after the other, at the positions ``order``; one copy."""
    ends = np.cumsum([len(part) for part in parts])
    places = [torch.from_numpy(place) for place in np.split(order, ends[:-1])]
    tensors = {}
    for key, first in parts[0].items(True, True):
        out = torch.empty((len(order), *first.shape[1:]), dtype=first.dtype)
        for part, place in zip(parts, places, strict=True):
            out[place] = part.get(key)
        tensors[key] = out
    return TensorDict(tensors, batch_size=[len(order)])
