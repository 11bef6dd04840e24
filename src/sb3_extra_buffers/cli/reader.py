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
from sb3_extra_buffers.files.parts import views_of
from sb3_extra_buffers.files.saved_parts import SavedParts, errors_about
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


def open_buffer(path: str | os.PathLike[str], compiled: bool | None = None) -> tuple[SavedParts, Any]:
    """Open a saved buffer, array or recording for reading; without ``compiled`` kernels it takes less time to open."""
    saved = open_saved(path)
    if saved.kind.endswith(("replay", "rollout")):
        with errors_about(saved.path):
            return saved, SavedBuffer(saved.read_parts(compiled))
    if saved.kind in ("array", "recording"):
        with errors_about(saved.path):
            return saved, registry.from_parts(saved.read_parts(compiled))
    name = registry.class_name(saved.kind)
    raise FileFormatError(f"{path} holds a {name}, which only the commands info, verify and repair can read")


@dataclass(frozen=True, slots=True)
class EpisodeSteps:
    """Consecutive steps of one environment."""

    env: int
    steps: npt.NDArray[np.int64]  # counted from the oldest step of the buffer
    rewards: Array
    ended: bool

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
        if self.is_array:
            self.n_steps: int = buffer.lead_shape[0] if buffer.lead_shape else 0
            self.n_envs: int = math.prod(buffer.lead_shape[1:])
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
        return column[self.order] if column.shape[:2] == (self.buffer.buffer_size, self.n_envs) else None

    def episodes(self) -> list[EpisodeSteps]:
        """Return the episodes of all environments, ordered by their first step."""
        ends, rewards = self._ends(), self.column("rewards")
        if rewards is None:
            rewards = np.zeros(ends.shape, np.float32)
        episodes = []
        for env in range(self.n_envs):
            bounds = np.unique([0, *(np.flatnonzero(ends[:, env]) + 1), self.n_steps]).tolist()
            for start, stop in itertools.pairwise(bounds):
                steps, ended = np.arange(start, stop), bool(ends[stop - 1, env])
                episodes.append(EpisodeSteps(env, steps, rewards[start:stop, env], ended))
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

    def image_leaf(self, key: str | None = None) -> Any:
        """Return the observations that are images: those of ``key``, or the first in a Dict."""
        leaves: Any = self.buffer if self.is_array else self.buffer.observations
        if not isinstance(leaves, dict):
            leaves = {"": leaves}
        images = {name: leaf for name, leaf in leaves.items() if len(leaf.shape) >= 4}
        if not images:
            raise FileFormatError("the observations are not images: they have fewer than two axes")
        if key is not None and key not in images:
            raise ArgumentError(f"there are no images under the key {key!r}; keys with images: {sorted(images)}")
        return images[key] if key is not None else next(iter(images.values()))

    def read(self, leaf: Any, steps: Array, envs: Array) -> Array:
        """Return observations of pairs of step, counted from the oldest, and environment."""
        rows = self.order[steps]
        if not self.is_array:
            return np.asarray(leaf[rows, envs])
        # an array may have any number of axes between steps and observations
        inner_shape = leaf.lead_shape[1:]
        return np.asarray(leaf[(rows, *np.unravel_index(envs, inner_shape))] if inner_shape else leaf[rows])


def memory_of(buffer: Any) -> MemoryUsage | None:
    """Return the memory report of a buffer; None if it stores nothing in compressed form."""
    if hasattr(buffer, "memory_usage"):
        usage: MemoryUsage = buffer.memory_usage()
        return usage
    usages = list({id(view.store): view.memory_usage() for _, view in views_of(buffer)}.values())
    return sum(usages[1:], usages[0]) if usages else None
