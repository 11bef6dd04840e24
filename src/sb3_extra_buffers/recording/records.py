"""What a record buffer returns: records and episodes, and how an index selects records."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import IndexOutOfRangeError

__all__ = ["Episode", "Record", "find_episodes", "resolve_index"]

Array = npt.NDArray[Any]


class Record(NamedTuple):
    """One recorded step; for several steps, every field has an additional leading axis.

    Examples:
        >>> from sb3_extra_buffers.recording import FramelessRecordBuffer
        >>> record_buffer = FramelessRecordBuffer(size=100)
        >>> record_buffer.add(None, reward=1.0, action=3)
        >>> float(record_buffer[0].reward), int(record_buffer[0].action)
        (1.0, 3)
    """

    frame: Any
    """What the agent saw; None if the buffer records no frames."""
    reward: Any
    """Reward for the action."""
    action: Any
    """What the agent did."""
    features: dict[str, Any]
    """Additional values, by name."""
    done: Any
    """Whether the episode ended with this step."""


class Episode(NamedTuple):
    """Records ``start`` to ``stop - 1`` of a buffer.

    Examples:
        >>> from sb3_extra_buffers.recording import FramelessRecordBuffer
        >>> record_buffer = FramelessRecordBuffer(size=100)
        >>> for step in range(5):
        ...     record_buffer.add(None, reward=1.0, action=0, done=step == 2)
        >>> [(len(episode), episode.reward, episode.whole) for episode in record_buffer.episodes]
        [(3, 3.0, True), (2, 2.0, False)]
    """

    start: int
    """Index of the first record."""
    stop: int
    """Index after the last record."""
    reward: float
    """Sum of the rewards of the records that are still in the buffer."""
    whole: bool
    """Whether the buffer holds the episode from its first step to its end."""

    @property
    def indices(self) -> slice:
        """A slice to index the buffer with: ``buffer[episode.indices]``."""
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


def find_episodes(dones: Array, starts: Array, rewards: Array) -> list[Episode]:
    """Split records, oldest first, into episodes; the first may lack its beginning, the last may be unfinished."""
    stops = (np.flatnonzero(dones) + 1).tolist()
    if len(dones) and not dones[-1]:
        stops.append(len(dones))
    episodes, start = [], 0
    for stop in stops:
        whole = bool(starts[start] and dones[stop - 1])
        episodes.append(Episode(start, stop, float(rewards[start:stop].sum()), whole))
        start = stop
    return episodes


def resolve_index(index: Any, n: int) -> npt.NDArray[np.int64]:
    """Return the record numbers, 0 to ``n - 1``, selected by an integer, a slice, a mask or a list of integers."""
    try:
        selected: Array = np.arange(*index.indices(n)) if isinstance(index, slice) else np.asarray(index)
    except (TypeError, ValueError) as problem:
        raise IndexOutOfRangeError(f"{index!r} is not a valid index: {problem}") from problem
    if isinstance(index, slice):
        return selected
    if selected.dtype == bool:
        if selected.shape != (n,):
            raise IndexOutOfRangeError(f"the mask has shape {selected.shape}, but there are {n} records")
        return np.flatnonzero(selected)
    if selected.dtype.kind not in "iu" and selected.size:
        raise IndexOutOfRangeError(f"records are indexed by integers, slices or masks, not {index!r}")
    if ((selected < -n) | (selected >= n)).any():
        raise IndexOutOfRangeError(f"index {index} is out of bounds for {n} records")
    return np.where(selected < 0, selected + n, selected).astype(np.int64)
