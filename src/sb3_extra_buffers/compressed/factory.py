"""`compressed`: makes a compressed class from any buffer class that keeps SB3's layout."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import (
    DictReplayBuffer,
    DictRolloutBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
)
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_extra_buffers._sb3.base import CompressedBuffer, OptionsFirst
from sb3_extra_buffers._sb3.generated import Generated, generate_class
from sb3_extra_buffers.compressed.buffers import (
    CompressedDictReplayBuffer,
    CompressedDictRolloutBuffer,
    CompressedHerReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)
from sb3_extra_buffers.errors import LayoutError

__all__ = ["compressed"]

# most specific first
_BASES: list[tuple[type[Any], type[Any]]] = [
    (HerReplayBuffer, CompressedHerReplayBuffer),
    (DictReplayBuffer, CompressedDictReplayBuffer),
    (NStepReplayBuffer, CompressedNStepReplayBuffer),
    (ReplayBuffer, CompressedReplayBuffer),
    (DictRolloutBuffer, CompressedDictRolloutBuffer),
    (RolloutBuffer, CompressedRolloutBuffer),
]


class _Checked(Generated, OptionsFirst):
    """`OptionsFirst` for classes of users, which may not keep SB3's layout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        buffer: Any = self
        buffer.check_layout(self._made_from[1].__name__)


def compressed(buffer_class: type[Any]) -> type[Any]:
    """Return a class like ``buffer_class`` that keeps its observations compressed.

    Args:
        buffer_class: A subclass of SB3's `ReplayBuffer`, `RolloutBuffer` or their Dict variants that leaves
            ``observations`` where they put them; or sb3-contrib's `RecurrentPPO`, which has no argument for the class
            of its buffer.

    Returns:
        A class that takes the arguments of ``buffer_class`` and those of the compressed buffers; for `RecurrentPPO`,
        the latter as ``rollout_buffer_kwargs``.

    Examples:
        >>> from stable_baselines3.common.buffers import ReplayBuffer
        >>> from sb3_extra_buffers.compressed import compressed
        >>> class MyBuffer(ReplayBuffer):
        ...     pass
        >>> compressed(MyBuffer).__name__
        'CompressedMyBuffer'
    """
    if issubclass(buffer_class, CompressedBuffer):
        return buffer_class
    for plain, base in _BASES:
        if buffer_class is plain:
            return base
        if issubclass(buffer_class, plain):
            doc = f"`{buffer_class.__name__}` with compressed observations."
            return generate_class(compressed, buffer_class, "Compressed", (_Checked, buffer_class, base), doc)
    if issubclass(buffer_class, BaseAlgorithm):
        return _compressed_algorithm(buffer_class)
    raise LayoutError(
        f"{buffer_class.__name__} is not one of SB3's buffers; pass a subclass of ReplayBuffer, RolloutBuffer or their "
        "Dict variants"
    )


def _compressed_algorithm(algorithm: type[Any]) -> type[Any]:
    """`RecurrentPPO`, or a subclass, with a compressed buffer."""
    name = algorithm.__name__
    if not any(cls.__name__ == "RecurrentPPO" for cls in algorithm.__mro__):
        raise LayoutError(
            f"{name} is an algorithm; pass replay_buffer_class or rollout_buffer_class to it, or its buffer class here"
        )
    from sb3_extra_buffers.compressed.contrib import CompressedRecurrentTraining

    if issubclass(algorithm, CompressedRecurrentTraining):
        return algorithm
    bases = (Generated, CompressedRecurrentTraining, algorithm)
    return generate_class(compressed, algorithm, "Compressed", bases, f"`{name}` with a compressed rollout buffer.")
