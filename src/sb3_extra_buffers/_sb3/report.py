"""`ReportingBuffer`: the size, the memory and the representation of every buffer with SB3's layout."""

from __future__ import annotations

import html
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.stores.usage import MemoryUsage, format_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ReportingBuffer"]

# whose buffers compressed ones replace
_OWNERS = {"stable_baselines3": "SB3's ", "sb3_contrib": "sb3-contrib's "}


class ReportingBuffer:
    """Says how much a buffer holds and what that takes, compared with the uncompressed class that it replaces."""

    if TYPE_CHECKING:
        # of SB3's buffer, which follows in the MRO
        buffer_size: int
        n_envs: int
        observation_space: Any
        pos: int
        full: bool

        def size(self) -> int: ...

        @property
        def lock(self) -> Any: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # before __init__, which would only say that it does not know an argument; `info` runs without SB3
        if "stable_baselines3.common.base_class" in sys.modules:
            from sb3_extra_buffers._sb3.algorithm import check_class

            check_class(cls)
        return super().__new__(cls)

    #: Observations of a transition: 2 with the next one.
    _obs_per_transition = 2

    def _observation_usage(self, n_written: int) -> MemoryUsage:
        """Bytes in use for observations, of which the first ``n_written`` steps were written."""
        raise NotImplementedError

    def _observation_specs(self) -> dict[str, ObsSpec]:
        """Shape and dtype of the observations of each key, ``""`` for a Box; empty before they are laid out."""
        raise NotImplementedError

    def _extra_bytes(self) -> int:
        """Bytes of a full buffer that the class it replaces does not have."""
        return 0

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays with a row for each step or, in a rollout that was flattened, for each transition."""
        lengths = (self.buffer_size, self.buffer_size * self.n_envs)
        return {
            name: column
            for name, column in vars(self).items()
            if isinstance(column, np.ndarray) and column.ndim and len(column) in lengths
            and name not in ("observations", "next_observations")
        }  # fmt: skip

    def memory_usage(self) -> MemoryUsage:
        """The memory that the buffer holds, and what SB3's own buffer would hold for the same transitions."""
        with self.lock:
            n_steps, n_written = max(self.buffer_size, 1), self.buffer_size if self.full else self.pos
            usage, size = self._observation_usage(n_written), self.size()
            column_bytes = sum(column.nbytes for column in self._columns().values())
            per_observation = sum(spec.nbytes for spec in self._observation_specs().values())
            dense_observations = size * self.n_envs * self._obs_per_transition * per_observation
            return replace(
                usage,
                # memory that was never written is not resident
                other=usage.other + (column_bytes + self._extra_bytes()) * n_written // n_steps,
                transitions=size * self.n_envs,
                dense=dense_observations + column_bytes * size // n_steps,
                dense_observations=dense_observations,
                baseline=self._replaced_class(),
            )

    def _replaced_class(self) -> str:
        """The name of the class that this one replaces, and whose it is."""
        # not at the top: the command line reads saved buffers without SB3 and torch, which take seconds to import
        from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer, RolloutBuffer

        mro = type(self).__mro__
        replaced = next(cls for cls in mro if issubclass(cls, BaseBuffer) and not issubclass(cls, ReportingBuffer))
        name, owner = replaced.__name__, _OWNERS.get(replaced.__module__.partition(".")[0], "")
        # GPU buffers have one class for both
        is_dict = isinstance(self.observation_space, spaces.Dict) and replaced in (ReplayBuffer, RolloutBuffer)
        return f"{owner}{'Dict' if is_dict else ''}{name}"

    def __len__(self) -> int:
        """How many transitions the buffer holds, of all environments; `size` counts the steps of one."""
        return self.size() * self.n_envs

    def __bool__(self) -> bool:
        # as without __len__: an empty buffer is still a buffer
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._facts())})"

    def _facts(self) -> list[str]:
        specs = self._observation_specs()
        if not specs:
            return ["not initialized"]
        usage = self.memory_usage()
        size = f"{usage.transitions:,} of {self.buffer_size * self.n_envs:,} transitions"
        facts = [size if self.n_envs == 1 else f"{size} of {self.n_envs} envs"]
        for key, spec in specs.items():
            # without the reason for the choice
            method = usage.codecs[key].partition(" ")[0]
            facts.append(f"{key}{': ' if key else ''}{spec.shape} {spec.dtype} {method}")
        return [*facts, format_bytes(usage.total)]

    def _repr_html_(self) -> str:
        """What the buffer holds, for notebooks."""
        if not self._observation_specs():
            return html.escape(repr(self))
        return f"<p>{html.escape(repr(self))}</p>{self.memory_usage()._repr_html_()}"
