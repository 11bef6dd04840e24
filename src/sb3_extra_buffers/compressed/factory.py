"""`compressed`: makes a compressed class from any buffer class that keeps SB3's layout."""

from __future__ import annotations

from typing import Any

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
            ``observations`` where they put them.

    Returns:
        A class that takes the arguments of ``buffer_class`` and those of the compressed buffers.

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
    raise LayoutError(
        f"{buffer_class.__name__} is not one of SB3's buffers; pass a subclass of ReplayBuffer, RolloutBuffer or their "
        "Dict variants"
    )
