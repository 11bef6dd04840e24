"""`compressed`: a compressed class from any buffer class that keeps SB3's layout."""

from __future__ import annotations

from typing import Any

import numpy as np
from stable_baselines3.common.buffers import DictReplayBuffer, DictRolloutBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_extra_buffers._sb3.base import CompressedBuffer, OptionsFirst
from sb3_extra_buffers._sb3.leaves import each_leaf, make_leaves
from sb3_extra_buffers._sb3.n_step import NStepReplayBuffer
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

# the most specific first
_BASES: list[tuple[type[Any], type[Any]]] = [
    (HerReplayBuffer, CompressedHerReplayBuffer),
    (DictReplayBuffer, CompressedDictReplayBuffer),
    (NStepReplayBuffer, CompressedNStepReplayBuffer),
    (ReplayBuffer, CompressedReplayBuffer),
    (DictRolloutBuffer, CompressedDictRolloutBuffer),
    (RolloutBuffer, CompressedRolloutBuffer),
]

# one class for each, so that instances of it know each other
_made: dict[type[Any], type[Any]] = {}


class _Checked(OptionsFirst):
    """`OptionsFirst` for classes nobody has looked at."""

    #: The class that was made a compressed one.
    _plain: type[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # set by the compressed base class, if its constructor ran
        if not {"_n_evicted", "_leaves"} & vars(self).keys():
            raise LayoutError(
                f"{self._plain.__name__} does not call super().__init__(), so its observations would not be "
                "compressed; call it there, with SB3's arguments"
            )
        buffer: Any = self
        wanted = dict(each_leaf(make_leaves(buffer.observation_space, buffer.obs_shape, (1, 1), buffer._options)))
        for key, leaf in each_leaf(buffer.observations):
            if isinstance(leaf, np.ndarray) and not isinstance(wanted[key], np.ndarray):
                raise LayoutError(
                    f"{self._plain.__name__} puts an array of its own in the place of observations, so they would not "
                    "be compressed; leave them where SB3's buffer puts them"
                )

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        if "_plain" not in vars(type(self)):
            return reduced
        # the class has no name that pickle could find it by
        return (_blank, (self._plain,), *reduced[2:])


def _blank(buffer_class: type[Any]) -> Any:
    made = compressed(buffer_class)
    return object.__new__(made)


def compressed(buffer_class: type[Any]) -> type[Any]:
    """A class that does what ``buffer_class`` does and keeps its observations compressed.

    ``buffer_class`` is a subclass of SB3's `ReplayBuffer`, `RolloutBuffer` or their Dict variants that leaves
    ``observations`` where these put them. The new class takes its arguments and those of the compressed buffers.

    Example:
        >>> class MyBuffer(ReplayBuffer):
        ...     '''My own.'''
        >>> buffer_class = compressed(MyBuffer)
    """
    if issubclass(buffer_class, CompressedBuffer):
        return buffer_class
    if buffer_class in _made:
        return _made[buffer_class]
    for plain, base in _BASES:
        if buffer_class is plain:
            return base
        if issubclass(buffer_class, plain):
            about = {
                "__module__": __name__,
                "__doc__": f"`{buffer_class.__name__}` with compressed observations.",
                "_plain": buffer_class,
            }
            _made[buffer_class] = type(f"Compressed{buffer_class.__name__}", (_Checked, buffer_class, base), about)
            return _made[buffer_class]
    raise LayoutError(
        f"{buffer_class.__name__} is none of SB3's buffers: subclass ReplayBuffer, RolloutBuffer or their Dict variants"
    )
