"""A replay buffer of episodes in npz files, as DrQ-v2 and Dreamer's first versions keep them: the plainest form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import feed
from benchmarks.peer_systems.base import (
    LENGTH,
    N_WINDOWS,
    PRIORITIES,
    UNIFORM,
    Array,
    Case,
    Columns,
    Step,
    System,
)


class NpzFiles(System):
    """Every sample is read from the file of its episode."""

    title, package = "npz files, read when sampled", "numpy"
    calls = """\
np.savez_compressed(path, obs=..., action=..., reward=..., done=...)  # when an episode ends
np.load(path)  # each episode of a batch, drawn at random"""
    keeps_episodes = False
    lacks = {  # noqa: RUF012  # declared in System
        PRIORITIES: "no priorities",
        "files": "its episodes are files already",
    }

    def __init__(self, case: Case, kind: str = UNIFORM) -> None:
        super().__init__(case, kind)
        self.random = np.random.default_rng(0)
        self.open_episodes: list[list[tuple[Array, ...]]] = [[] for _ in range(feed.N_ENVS)]
        self.paths: list[Path] = []
        self.lengths: list[int] = []
        self.kept: dict[Path, dict[str, Array]] = {}
        self.n_episodes = 0

    def prepare(self, step: Step) -> Any:
        return step

    def outdated(self) -> int:
        # episodes that are still open, and the beginning of long ones
        return sum(map(len, self.open_episodes)) + feed.N_ENVS * max(self.lengths)

    def add(self, data: Any) -> None:
        for env in range(feed.N_ENVS):
            episode = self.open_episodes[env]
            # a copy: the caller may use its arrays again
            episode.append(tuple(np.array(column[env]) for column in (data.obs, *data[2:])))
            if data.dones[env]:
                self.write(episode, data.next_obs[env])
                episode.clear()

    def write(self, episode: list[tuple[Array, ...]], last: Array) -> None:
        """Save an episode, and remove the oldest ones where there are too many transitions."""
        obs, *rest = (np.stack(column) for column in zip(*episode, strict=True))
        columns = dict(zip(("action", "reward", "done"), rest, strict=True))
        self.paths.append(self.scratch() / f"{self.n_episodes}.npz")
        self.lengths.append(len(obs))
        self.n_episodes += 1
        np.savez_compressed(self.paths[-1], obs=np.concatenate([obs, last[None]]), **columns)
        while sum(self.lengths) > self.case.size:
            oldest = self.paths.pop(0)
            self.lengths.pop(0)
            self.kept.pop(oldest, None)
            oldest.unlink()

    def read(self, number: int) -> dict[str, Array]:
        path = self.paths[number]
        if path in self.kept:
            return self.kept[path]
        with np.load(path) as file:
            episode = dict(file)
        if self.keeps_episodes:
            self.kept[path] = episode
        return episode

    def draw(self, count: int, length: int) -> list[tuple[Array, ...]]:
        """Pieces of ``length`` steps and the observation after them, from episodes drawn at random; each is read once.

        An episode is drawn in proportion to the number of pieces that begin in it.
        """
        starts = np.maximum(np.array(self.lengths) - length + 1, 0)
        numbers = np.sort(self.random.choice(len(starts), count, p=starts / starts.sum()))
        pieces: list[tuple[Array, ...]] = []
        for number in np.unique(numbers):
            episode = self.read(int(number))
            for first in self.random.integers(0, starts[number], (numbers == number).sum()):
                steps = slice(first, first + length)
                columns = tuple(episode[name][steps] for name in ("action", "reward", "done"))
                pieces.append((episode["obs"][first : first + length + 1], *columns))
        return pieces

    def sample(self, batch: int) -> Any:
        obs, *rest = zip(*self.draw(batch, 1), strict=True)
        columns = [np.concatenate(column) for column in rest]
        return np.stack([pair[0] for pair in obs]), np.stack([pair[1] for pair in obs]), *columns

    def windows(self) -> Any:
        obs, *rest = zip(*self.draw(N_WINDOWS, LENGTH), strict=True)
        return np.stack([piece[:-1] for piece in obs]), None, *(np.stack(column) for column in rest)

    def columns(self, batch: Any) -> Columns:
        return Columns(*batch)


class NpzKept(NpzFiles):
    """Episodes stay in memory once they were read, as in the workers of DrQ-v2."""

    title = "npz files, episodes kept in memory"
    calls = "# as above, with each episode kept in a dict"
    keeps_episodes = True
