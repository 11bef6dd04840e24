"""Read saved buffers: their steps in chronological order, columns and episodes."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.cli.saved_buffer import SavedBuffer
from sb3_extra_buffers.errors import ArgumentError, FileFormatError
from sb3_extra_buffers.files import manifest, registry
from sb3_extra_buffers.files.saved_parts import SavedParts, errors_about
from sb3_extra_buffers.recording.base import BaseRecordBuffer
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]
Item = TypeVar("Item")


def with_progress(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Iterate over ``items``, with a progress bar on stderr if it is a terminal and tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield from items
        return
    yield from tqdm(items, desc=description, total=total, disable=None, leave=False)


def open_saved(path: str | os.PathLike[str]) -> SavedParts:
    """Open a saved folder or file."""
    source = Path(path)
    manifest.check_is_saved(source)
    return SavedParts.of_folder(source) if source.is_dir() else SavedParts.of_file(source)


def open_buffer(path: str | os.PathLike[str], measured: bool = False) -> tuple[SavedParts, Any]:
    """Open a saved buffer, array or recording for reading, or only to ask for its memory when it is loaded."""
    saved = open_saved(path)
    if saved.kind.endswith(("replay", "rollout")):
        with errors_about(saved.path):
            return saved, SavedBuffer(saved.read_parts(measured))
    if saved.kind in ("array", "recording"):
        with errors_about(saved.path):
            return saved, registry.from_parts(saved.read_parts(measured))
    name = registry.class_name(saved.kind)
    raise FileFormatError(f"{path} holds a {name}, which only the commands info, verify and repair can read")


@dataclass(frozen=True, slots=True)
class EpisodeSteps:
    """Consecutive steps of one environment."""

    env: int
    steps: npt.NDArray[np.int64]  # counted from the oldest step of the buffer
    rewards: Array
    ended: bool
    cut_at_start: bool
    """Whether earlier steps of the episode are not in the buffer, as far as the buffer can tell."""

    @property
    def is_complete(self) -> bool:
        return self.ended and not self.cut_at_start

    @property
    def total_reward(self) -> float:
        return float(self.rewards.sum(dtype=np.float64))


class BufferReader:
    """The contents of a buffer in chronological order.

    Attributes:
        order: Index in the buffer of each step, oldest first.
    """

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.is_array = isinstance(buffer, StoreView)
        self.is_recording = isinstance(buffer, BaseRecordBuffer)
        if self.is_array:
            self.n_steps: int = buffer.lead_shape[0] if buffer.lead_shape else 0
            self.n_envs: int = math.prod(buffer.lead_shape[1:])
            self.order = np.arange(self.n_steps)
        elif self.is_recording:
            # its properties are in chronological order
            self.n_steps, self.n_envs = len(buffer), 1
            self.order = np.arange(self.n_steps)
        else:
            self.n_steps, self.n_envs = int(buffer.size()), int(buffer.n_envs)
            self.order = (int(buffer.pos) - self.n_steps + np.arange(self.n_steps)) % int(buffer.buffer_size)

    @property
    def n_transitions(self) -> int:
        return self.n_steps * self.n_envs

    def column(self, name: str) -> Array | None:
        """Return a column as ``(n_steps, n_envs, ...)``, oldest first; None if the buffer has no such column."""
        column = getattr(self.buffer, name, None)
        if self.is_array or not isinstance(column, np.ndarray):
            return None
        if self.is_recording:
            return column[:, None] if len(column) == self.n_steps else None
        return column[self.order] if column.shape[:2] == (self.buffer.buffer_size, self.n_envs) else None

    def episodes(self) -> list[EpisodeSteps]:
        """Return the episodes of all environments, ordered by their first step."""
        ends, rewards = self._ends(), self.column("rewards")
        if rewards is None:
            rewards = np.zeros(ends.shape, np.float32)
        episodes, cut_at_start = [], self._cut_at_start()
        for env in range(self.n_envs):
            bounds = np.unique([0, *(np.flatnonzero(ends[:, env]) + 1), self.n_steps]).tolist()
            for start, stop in itertools.pairwise(bounds):
                steps, ended = np.arange(start, stop), bool(ends[stop - 1, env])
                cut = start == 0 and bool(cut_at_start[env])
                episodes.append(EpisodeSteps(env, steps, rewards[start:stop, env], ended, cut))
        return sorted(episodes, key=lambda episode: (episode.steps[0], episode.env))

    def _ends(self) -> npt.NDArray[np.bool_]:
        """Return which steps are the last of their episode, as ``(n_steps, n_envs)``."""
        dones = self.column("dones")
        if dones is not None:
            return dones.astype(np.bool_)
        ends = np.zeros((self.n_steps, self.n_envs), np.bool_)
        starts = self.column("episode_starts")
        if starts is not None:
            ends[:-1] = starts[1:].astype(np.bool_)
        return ends

    def _cut_at_start(self) -> npt.NDArray[np.bool_]:
        """Return, for each environment, whether the episode of its oldest step began before that step."""
        starts = self.column("episode_starts")
        if starts is not None and len(starts):
            return np.asarray(~starts[0].astype(np.bool_))
        if self.is_recording:
            episodes = self.buffer.episodes
            cut = self.buffer.full and bool(episodes) and not episodes[0].whole
        else:
            # a replay buffer does not know whether the step that it overwrote or evicted last ended an episode
            cut = not self.is_array and self._has_dropped_steps()
        return np.full(self.n_envs, cut)

    def _has_dropped_steps(self) -> bool:
        added = getattr(self.buffer, "n_added", None)
        return bool((self.buffer.full and added != self.buffer.buffer_size) or getattr(self.buffer, "n_evicted", 0))

    def leaves(self) -> dict[str, Any]:
        """Return the observations by key; those that are not a Dict have the key ``""``."""
        if self.is_recording:
            return {} if self.buffer.frames is None else {"": self.buffer.frames}
        leaves: Any = self.buffer if self.is_array else self.buffer.observations
        return dict(leaves) if isinstance(leaves, dict) else {"": leaves}

    def image_leaf(self, key: str | None = None) -> Any:
        """Return the observations that are images: those of ``key``, or the first in a Dict."""
        images = {name: leaf for name, leaf in self.leaves().items() if len(obs_shape(leaf)) >= 2}
        if not images:
            raise FileFormatError("the observations are not images: they have fewer than two axes")
        if key is not None and key not in images:
            raise ArgumentError(f"there are no images under the key {key!r}; keys with images: {sorted(images)}")
        return images[key] if key is not None else next(iter(images.values()))

    def read(self, leaf: Any, steps: Array, envs: Array) -> Array:
        """Return observations of pairs of step, counted from the oldest, and environment."""
        rows = self.order[steps]
        # an array may have any number of axes between steps and observations
        inner_shape = leaf.lead_shape[1:] if isinstance(leaf, StoreView) else (self.n_envs,)
        return np.asarray(leaf[(rows, *np.unravel_index(envs, inner_shape))] if inner_shape else leaf[rows])


def obs_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of one observation of a leaf, which is a view or an array ``(n_steps, n_envs, ...)``."""
    return leaf.obs_shape if isinstance(leaf, StoreView) else tuple(leaf.shape[2:])


def memory_of(buffer: Any) -> MemoryUsage | None:
    """Return the memory report of a buffer; None if it has none."""
    return buffer.memory_usage() if hasattr(buffer, "memory_usage") else None
