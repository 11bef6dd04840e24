"""A Reverb table; server and client share a process, which is the fastest that Reverb offers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import feed
from benchmarks.peer_systems.base import LENGTH, N_WINDOWS, PRIORITIES, UNIFORM, WINDOWS, Case, Columns, Step, System


class Reverb(System):
    """Each frame is stored once; an item is a trajectory of the frames of an observation and of the next one."""

    title, package, environment = "Reverb", "dm-reverb", ".venv-reverb"
    calls = """\
table = reverb.Table("replay", Uniform(), Fifo(), size, MinSize(1), signature=signature)
server = reverb.Server([table], port=None)
client = reverb.Client(f"localhost:{server.port}")
writer = client.trajectory_writer(num_keep_alive_refs=5)  # one for each environment
writer.append(step)
writer.create_item("replay", 1.0, trajectory)
writer.flush()  # every 32 steps
TrajectoryDataset.from_table_signature(...).batch(256).prefetch(2)
client.mutate_priorities("replay", {key: priority})  # with Prioritized(0.6) in place of Uniform()
client.checkpoint()
reverb.Server([table], checkpointer=DefaultCheckpointer(folder))"""
    #: a writer is flushed, and a batch is timed, in blocks: work goes on in other threads
    block = 32

    def __init__(self, case: Case, kind: str = UNIFORM) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        super().__init__(case, kind)
        self.stack = case.stack
        # of a stack of channels-first images, each channel is a frame
        self.frame_shape = case.shape[1:] if case.stack > 1 else case.shape
        self.length = LENGTH if kind == WINDOWS else 1
        self.serve(self.scratch())
        keep = self.length + self.stack + 1
        self.writers = [self.client.trajectory_writer(num_keep_alive_refs=keep) for _ in range(feed.N_ENVS)]
        self.ages = [0] * feed.N_ENVS  # steps since the beginning of the episode
        self.n_added = 0

    def serve(self, folder: Path) -> None:
        """A new server, which restores the newest checkpoint in ``folder``."""
        import reverb
        import tensorflow as tf

        n_frames = self.stack + self.length
        signature = {
            "frames": tf.TensorSpec([n_frames, *self.frame_shape], self.case.dtype),
            "action": tf.TensorSpec([self.length, *self.case.action_shape], self.case.action_dtype),
            "reward": tf.TensorSpec([self.length], tf.float32),
            "done": tf.TensorSpec([self.length], tf.bool),
        }
        kind = reverb.selectors.Prioritized(0.6) if self.kind == PRIORITIES else reverb.selectors.Uniform()
        table = reverb.Table(
            "replay", kind, reverb.selectors.Fifo(), self.case.size, reverb.rate_limiters.MinSize(1),
            signature=signature,
        )  # fmt: skip
        checkpointer = reverb.checkpointers.DefaultCheckpointer(str(folder))
        self.server = reverb.Server([table], port=None, checkpointer=checkpointer)
        self.client = reverb.Client(f"localhost:{self.server.port}")
        self.iterators: dict[int, Any] = {}

    def prepare(self, step: Step) -> Any:
        return step

    def add(self, data: Any) -> None:
        frames, following = (
            column.reshape(feed.N_ENVS, self.stack, *self.frame_shape) for column in (data.obs, data.next_obs)
        )
        for env, writer in enumerate(self.writers):
            columns = {"action": data.actions[env], "reward": data.rewards[env], "done": data.dones[env]}
            if not self.ages[env]:
                for frame in frames[env]:
                    writer.append({"frame": frame, **columns})
            writer.append({"frame": following[env, -1], **columns})
            self.ages[env] += 1
            if self.ages[env] >= self.length:
                history = writer.history
                trajectory = {name: history[name][-self.length :] for name in columns}
                trajectory["frames"] = history["frame"][-self.stack - self.length :]
                writer.create_item("replay", 1.0, trajectory)
            if data.dones[env]:
                writer.end_episode()
                self.ages[env] = 0
        self.n_added += 1
        if self.n_added % self.block == 0:
            self.finish()

    def outdated(self) -> int:
        # windows do not begin in the last steps of an episode; writers are flushed in turn
        return self.case.size if self.kind == WINDOWS else 2 * self.block * feed.N_ENVS

    def finish(self) -> None:
        for writer in self.writers:
            writer.flush()

    def draw(self, batch: int) -> Any:
        """The next batch of a dataset, which samples ahead."""
        import reverb

        if batch not in self.iterators:
            dataset = reverb.TrajectoryDataset.from_table_signature(
                f"localhost:{self.server.port}", "replay", max_in_flight_samples_per_worker=2 * batch
            )
            self.iterators = {batch: iter(dataset.batch(batch, drop_remainder=True).prefetch(2))}
        return next(self.iterators[batch])

    def columns_of(self, data: dict[str, Any]) -> tuple[Any, ...]:
        """Contiguous observations and next observations, and the rest."""
        frames = data["frames"].numpy()
        pair = (np.ascontiguousarray(frames[:, part]) for part in (np.s_[: self.stack], np.s_[1:]))
        return *pair, *(data[name].numpy() for name in ("action", "reward", "done"))

    def sample(self, batch: int) -> Any:
        return self.columns_of(self.draw(batch).data)

    def windows(self) -> Any:
        data = self.draw(N_WINDOWS).data
        frames = data["frames"].numpy()
        # [window, step, frame of the stack, ...]
        stacks = np.stack([frames[:, first : first + LENGTH] for first in range(self.stack)], axis=2)
        return stacks, None, *(data[name].numpy() for name in ("action", "reward", "done"))

    def sample_and_update(self) -> Any:
        found = self.draw(256)
        self.client.mutate_priorities("replay", dict.fromkeys(found.info.key.numpy().tolist(), 1.0))
        return self.columns_of(found.data)

    def columns(self, batch: Any) -> Columns:
        obs, next_obs, actions, rewards, dones = batch
        leading = rewards.shape if self.kind == WINDOWS else rewards.shape[:1]
        obs, next_obs = (part if part is None else part.reshape(*leading, *self.case.shape) for part in (obs, next_obs))
        actions = actions.reshape(*leading, *self.case.action_shape)
        return Columns(obs, next_obs, actions, rewards.reshape(leading), dones.reshape(leading))

    def save(self, folder: Path) -> None:
        Path(self.client.checkpoint()).rename(folder / "checkpoint")

    def load(self, folder: Path) -> System:
        other = self.like()
        other.serve(folder)
        return other  # type: ignore[no-any-return]
