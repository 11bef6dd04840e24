"""rlox's replay buffers, which are written in Rust and store vectors of float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peer_systems.base import LENGTH, N_WINDOWS, PRIORITIES, UNIFORM, WINDOWS, Case, Columns, Step, System


class Rlox(System):
    """rlox; images are flattened and converted to float32."""

    title, package = "rlox", "rlox"
    calls = """\
rlox.ReplayBuffer(size, obs_dim=17, act_dim=6)  # images: flattened, converted to float32 beforehand
buffer.push_batch(obs, next_obs, actions, rewards, terminated, truncated)
buffer.sample(256, seed)
rlox.SequenceReplayBuffer(size, 17, 6).sample_sequences(16, 65, seed)  # one environment after another
rlox.PrioritizedReplayBuffer(size, 17, 6, alpha=0.6, beta=0.4)
batch = buffer.sample(256, seed)
buffer.update_priorities(batch["indices"], td_errors)"""
    # the sequences must be of one environment, and do not matter to the others
    order = "streams"
    lacks = {"files": "no function for saving"}  # noqa: RUF012  # declared in System

    def __init__(self, case: Case, kind: str = UNIFORM) -> None:
        import rlox

        super().__init__(case, kind)
        dimensions = int(np.prod(case.shape)), int(np.prod(case.action_shape))
        kinds = {
            UNIFORM: rlox.ReplayBuffer,
            WINDOWS: rlox.SequenceReplayBuffer,
            PRIORITIES: rlox.PrioritizedReplayBuffer,
        }
        self.buffer = kinds[kind](case.size, *dimensions)

    def prepare(self, step: Step) -> Any:
        vectors = [column.reshape(len(column), -1).astype(np.float32) for column in step[:3]]
        if self.kind == UNIFORM:
            ends = step.dones.astype(np.uint8)
            return (*(column.reshape(-1) for column in vectors), step.rewards, ends, np.zeros_like(ends))
        rows = zip(*vectors, step.rewards.tolist(), step.dones.tolist(), strict=True)
        if self.kind == WINDOWS:
            return [(obs, next_obs, action, reward, done, False) for obs, next_obs, action, reward, done in rows]
        return [(obs, action, reward, done, False, next_obs) for obs, next_obs, action, reward, done in rows]

    def add(self, data: Any) -> None:
        if self.kind == UNIFORM:
            self.buffer.push_batch(*data)
        else:
            for row in data:
                self.buffer.push(*row)

    def sample(self, batch: int) -> Any:
        self.seed += 1
        return self.buffer.sample(batch, self.seed)

    def windows(self) -> Any:
        self.seed += 1
        return self.buffer.sample_sequences(N_WINDOWS, LENGTH, self.seed)

    def sample_and_update(self) -> Any:
        batch = self.sample(256)
        self.buffer.update_priorities(batch["indices"], np.ones(256))
        return batch

    def columns(self, batch: Any) -> Columns:
        rewards = batch["rewards"]
        obs, next_obs = (batch[name].reshape(*rewards.shape, *self.case.shape) for name in ("obs", "next_obs"))
        actions = batch["actions"].reshape(*rewards.shape, *self.case.action_shape)
        return Columns(obs, next_obs, actions, rewards, batch["terminated"])
