"""Stable-Baselines3's replay buffer, and those with its interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import feed
from benchmarks.peer_systems.base import LENGTH, N_WINDOWS, PRIORITIES, UNIFORM, WINDOWS, Case, Columns, Step, System

_NO_WINDOWS = "samples single transitions only"
_NO_PRIORITIES = "no prioritised sampling"


class Sb3(System):
    """SB3's `ReplayBuffer` as it is by default."""

    title, package = "SB3", "stable-baselines3"
    calls = """\
ReplayBuffer(size, obs_space, action_space, device="cpu", n_envs=4)
buffer.add(obs, next_obs, actions, rewards, dones, infos)
buffer.sample(256)
save_to_pkl(path, buffer)
load_from_pkl(path)"""
    lacks = {WINDOWS: _NO_WINDOWS, PRIORITIES: _NO_PRIORITIES}  # noqa: RUF012  # declared in System

    def __init__(self, case: Case, kind: str = UNIFORM) -> None:
        super().__init__(case, kind)
        self.buffer = self.make()
        self._infos = [{} for _ in range(feed.N_ENVS)]

    def make(self) -> Any:
        from stable_baselines3.common.buffers import ReplayBuffer

        return ReplayBuffer(self.case.size, *self.case.spaces(), device="cpu", n_envs=feed.N_ENVS)

    def prepare(self, step: Step) -> Any:
        return (*step, self._infos)

    def add(self, data: Any) -> None:
        self.buffer.add(*data)

    def sample(self, batch: int) -> Any:
        return self.buffer.sample(batch)

    def gather_windows(self) -> Any:
        """Windows as a user would gather them from SB3's arrays: the measure for systems that have windows."""
        import torch

        buffer, last = self.buffer, self.case.n_steps - LENGTH
        first = buffer.pos + np.random.randint(0, last, (N_WINDOWS, 1))  # noqa: NPY002  # as SB3 draws
        steps = (first + np.arange(LENGTH)) % self.case.n_steps
        envs = np.random.randint(0, feed.N_ENVS, (N_WINDOWS, 1))  # noqa: NPY002
        arrays = (buffer.observations, buffer.actions, buffer.rewards, buffer.dones)
        return [torch.from_numpy(array[steps, envs]) for array in arrays]

    def columns(self, batch: Any) -> Columns:
        obs, actions, next_obs, dones, rewards = (part.numpy() for part in batch[:5])
        return Columns(obs, next_obs, actions, rewards[:, 0], dones[:, 0])

    def save(self, folder: Path) -> None:
        from stable_baselines3.common.save_util import save_to_pkl

        save_to_pkl(folder / "buffer.pkl", self.buffer)

    def load(self, folder: Path) -> System:
        from stable_baselines3.common.save_util import load_from_pkl

        other = self.like()
        other.buffer = load_from_pkl(folder / "buffer.pkl")
        return other  # type: ignore[no-any-return]


class Sb3Optimized(Sb3):
    """SB3's `ReplayBuffer` that stores each observation once."""

    title = "SB3, `optimize_memory_usage`"
    calls = """\
ReplayBuffer(
    size,
    obs_space,
    action_space,
    device="cpu",
    n_envs=4,
    optimize_memory_usage=True,
    handle_timeout_termination=False,
)"""
    next_at_ends = False

    def make(self) -> Any:
        from stable_baselines3.common.buffers import ReplayBuffer

        return ReplayBuffer(
            self.case.size, *self.case.spaces(), device="cpu", n_envs=feed.N_ENVS, optimize_memory_usage=True,
            handle_timeout_termination=False,
        )  # fmt: skip


class Pypi(Sb3):
    """The package of that name on PyPI, which has the same import name as ours: only its own process can import it."""

    title, package = "PyPI's sb3-extra-buffers, `zstd-5`", "sb3-extra-buffers"
    calls = """\
dtypes = find_buffer_dtypes(obs_space.shape, obs_space.dtype, "zstd-5")
kwargs = {"dtypes": dtypes, "compression_method": "zstd-5"}
CompressedReplayBuffer(size, obs_space, action_space, device="cpu", n_envs=4, **kwargs)"""
    environment = "pypi"
    method = "zstd-5"

    def make(self) -> Any:
        from sb3_extra_buffers.compressed import CompressedReplayBuffer, find_buffer_dtypes

        obs_space, action_space = self.case.spaces()
        return CompressedReplayBuffer(
            self.case.size, obs_space, action_space, device="cpu", n_envs=feed.N_ENVS, compression_method=self.method,
            dtypes=find_buffer_dtypes(obs_space.shape, obs_space.dtype.type, self.method),
        )  # fmt: skip


class PypiIgzip(Pypi):
    """The same with a method whose payloads take as much memory as they have bytes.

    Those of the ``zstd`` package that it uses keep the memory of the largest possible payload.
    """

    title = "PyPI's sb3-extra-buffers, `igzip1`"
    calls = """\
# as above, with "igzip1": payloads of the zstd package keep memory for the largest possible size"""
    method = "igzip1"


class Ours(Sb3):
    """This library's buffers for SB3, with the default method."""

    title, package = "**this library**", ""
    calls = """\
CompressedReplayBuffer(size, obs_space, action_space, device="cpu", n_envs=4)
CompressedSequenceReplayBuffer(...).sample_sequences(16, length=65, strict_length=True)
buffer = CompressedPrioritizedReplayBuffer(...)
batch = buffer.sample(256)
buffer.update_priorities(batch.indices, td_errors)
buffer.save(folder)
CompressedReplayBuffer.load(folder)"""
    lacks = {}  # noqa: RUF012

    def make(self) -> Any:
        from sb3_extra_buffers import compressed

        names = {UNIFORM: "", WINDOWS: "Sequence", PRIORITIES: "Prioritized"}
        kind: Any = getattr(compressed, f"Compressed{names[self.kind]}ReplayBuffer")
        return kind(self.case.size, *self.case.spaces(), device="cpu", n_envs=feed.N_ENVS)

    def windows(self) -> Any:
        return self.buffer.sample_sequences(N_WINDOWS, length=LENGTH, strict_length=True)

    def sample_and_update(self) -> Any:
        batch = self.buffer.sample(256)
        self.buffer.update_priorities(batch.indices, batch.weights)
        return batch

    def columns(self, batch: Any) -> Columns:
        if self.kind == WINDOWS:
            columns = (batch.observations, batch.actions, batch.rewards, batch.dones)
            obs, actions, rewards, dones = (column.numpy() for column in columns)
            return Columns(obs, None, actions, rewards, dones)
        return super().columns(batch)

    def save(self, folder: Path) -> None:
        self.buffer.save(folder / "buffer")

    def load(self, folder: Path) -> System:
        other = self.like()
        other.buffer = type(self.buffer).load(folder / "buffer")
        return other  # type: ignore[no-any-return]
