"""cpprb's replay buffers, with and without the options that save memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_systems.base import PRIORITIES, UNIFORM, WINDOWS, Case, Columns, Step, System


class Cpprb(System):
    """cpprb as its own examples use it."""

    title, package = "cpprb", "cpprb"
    calls = """\
env_dict = {"obs": {"shape": shape, "dtype": np.uint8}, "next_obs": ..., "act": ..., "rew": {}, "done": {}}
cpprb.ReplayBuffer(size, env_dict)
buffer.add(obs=obs, next_obs=next_obs, act=actions, rew=rewards, done=dones)
buffer.sample(256)
cpprb.PrioritizedReplayBuffer(size, env_dict, alpha=0.6)
batch = buffer.sample(256, beta=0.4)
buffer.update_priorities(batch["indexes"], td_errors)
buffer.save_transitions(path)
buffer.load_transitions(path)"""
    lacks = {WINDOWS: "samples single transitions and n-step returns only"}  # noqa: RUF012  # declared in System

    def __init__(self, case: Case, kind: str = UNIFORM) -> None:
        super().__init__(case, kind)
        self.buffer = self.make()

    def options(self) -> dict[str, Any]:
        return {}

    def make(self) -> Any:
        import cpprb

        observation = {"shape": self.case.shape, "dtype": self.case.dtype}
        columns: dict[str, Any] = {
            "obs": observation,
            "act": {"shape": self.case.action_shape, "dtype": self.case.action_dtype},
            "rew": {},
            "done": {},
        }
        options = self.options()
        if "next_of" not in options:
            columns["next_obs"] = observation
        if self.kind == PRIORITIES:
            return cpprb.PrioritizedReplayBuffer(self.case.size, columns, alpha=0.6, **options)
        return cpprb.ReplayBuffer(self.case.size, columns, **options)

    def prepare(self, step: Step) -> Any:
        names = ("obs", "next_obs", "act", "rew", "done")
        return dict(zip(names, step, strict=True))

    def add(self, data: Any) -> None:
        self.buffer.add(**data)

    def sample(self, batch: int) -> Any:
        return self.buffer.sample(batch)

    def sample_and_update(self) -> Any:
        batch = self.buffer.sample(256, beta=0.4)
        self.buffer.update_priorities(batch["indexes"], np.ones(256, np.float32))
        return batch

    def columns(self, batch: Any) -> Columns:
        return Columns(batch["obs"], batch["next_obs"], batch["act"], batch["rew"][:, 0], batch["done"][:, 0])

    def save(self, folder: Path) -> None:
        self.buffer.save_transitions(str(folder / "buffer.npz"))

    def load(self, folder: Path) -> System:
        other = self.like()
        other.buffer = other.make()
        other.buffer.load_transitions(str(folder / "buffer.npz"))
        return other  # type: ignore[no-any-return]


class CpprbShared(Cpprb):
    """cpprb that stores each observation once, and of stacks each frame once."""

    title = "cpprb, sharing frames"
    calls = """\
cpprb.ReplayBuffer(size, env_dict, next_of="obs", stack_compress="obs")  # stack_compress: stacks only
buffer.add(...)  # one environment after another, stacks along the last axis
buffer.on_episode_end()
buffer.save_transitions(path, safe=False)  # safe=True: once overwritten, it loads with other next observations"""
    order, channels_last = "streams", True

    def options(self) -> dict[str, Any]:
        return {"next_of": "obs"} | ({"stack_compress": "obs"} if self.case.stack > 1 else {})

    def save(self, folder: Path) -> None:
        self.buffer.save_transitions(str(folder / "buffer.npz"), safe=False)

    def prepare(self, step: Step) -> Any:
        """Parts that each end where an episode does, and whether they do."""
        data, parts, first = super().prepare(step), [], 0
        for stop in sorted({*(np.flatnonzero(step.dones) + 1), len(step.dones)}):
            parts.append(({name: column[first:stop] for name, column in data.items()}, bool(step.dones[stop - 1])))
            first = stop
        return parts

    def add(self, data: Any) -> None:
        for part, ends in data:
            self.buffer.add(**part)
            if ends:
                self.buffer.on_episode_end()
