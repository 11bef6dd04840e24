"""Flashbax's buffers, whose functions are compiled by JAX for the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import feed
from benchmarks.peer_systems.base import (
    BATCHES,
    LENGTH,
    N_WINDOWS,
    PRIORITIES,
    UNIFORM,
    WINDOWS,
    Case,
    Columns,
    Step,
    System,
)


class _Functions:
    """The compiled functions of a buffer."""

    def __init__(self, buffer: Any, jax: Any) -> None:
        self.init, self.sample = buffer.init, jax.jit(buffer.sample)
        self.add = jax.jit(buffer.add, donate_argnums=0)
        if hasattr(buffer, "set_priorities"):
            self.set_priorities = jax.jit(buffer.set_priorities, donate_argnums=0)


_compiled: dict[Any, dict[int, _Functions]] = {}


class FlashbaxItem(System):
    """Flashbax's item buffer: transitions with their next observations."""

    title, package = "Flashbax, item buffer", "flashbax"
    calls = """\
buffer = flashbax.make_item_buffer(size, min_length=1, sample_batch_size=256, add_batches=True)
state = buffer.init(transition)
state = jax.jit(buffer.add, donate_argnums=0)(state, transitions)  # converted to JAX arrays beforehand
jax.jit(buffer.sample)(state, key)  # waiting for the result
buffer = flashbax.make_prioritised_item_buffer(size, min_length=1, sample_batch_size=256, add_batches=True)
state = buffer.set_priorities(state, batch.indices, priorities)  # compiled, after buffer.sample
Vault("replay", state.experience, rel_dir=folder).write(state, source_interval=(0, length))
Vault("replay", rel_dir=folder, vault_uid=uid).read()"""
    lacks = {WINDOWS: "samples single transitions only"}  # noqa: RUF012  # declared in System

    def __init__(self, case: Case, kind: str = UNIFORM) -> None:
        import jax

        super().__init__(case, kind)
        self.jax, self.key = jax, jax.random.PRNGKey(0)
        # compiled once for all buffers of a size, so that the memory of compiling is not measured
        key = type(self), kind, case.size
        if key not in _compiled:
            buffers = {batch: self.make(batch) for batch in (BATCHES if kind == UNIFORM else BATCHES[-1:])}
            _compiled[key] = {batch: _Functions(buffer, jax) for batch, buffer in buffers.items()}
        self.functions = _compiled[key]
        self.largest = self.functions[BATCHES[-1]]
        self.state = self.largest.init(self.item())

    def make(self, batch: int) -> Any:
        import flashbax

        make = flashbax.make_prioritised_item_buffer if self.kind == PRIORITIES else flashbax.make_item_buffer
        return make(self.case.size, min_length=1, sample_batch_size=batch, add_batches=True)

    def item(self) -> dict[str, Any]:
        """One transition."""
        numpy, case = self.jax.numpy, self.case
        observation = numpy.zeros(case.shape, case.dtype)
        action = numpy.zeros(case.action_shape, numpy.float32 if case.is_vector else numpy.int32)
        rest = {"action": action, "reward": numpy.zeros(()), "done": numpy.zeros((), bool)}
        return {"obs": observation, "next_obs": observation} | rest

    def prepare(self, step: Step) -> Any:
        names = ("obs", "next_obs", "action", "reward", "done")
        columns = dict(zip(names, step, strict=True))
        columns["action"] = step.actions.astype(np.float32 if self.case.is_vector else np.int32)
        # copies: JAX may use the memory of a NumPy array, which here changes later
        return self.jax.block_until_ready({name: self.jax.numpy.array(column) for name, column in columns.items()})

    def add(self, data: Any) -> None:
        self.state = self.jax.block_until_ready(self.largest.add(self.state, data))

    def sample(self, batch: int) -> Any:
        if batch not in self.functions:  # only checks draw other batches than those that are timed
            batch = BATCHES[-1]
        self.key, key = self.jax.random.split(self.key)
        return self.jax.block_until_ready(self.functions[batch].sample(self.state, key))

    def sample_and_update(self) -> Any:
        batch = self.sample(256)
        ones = self.jax.numpy.ones(256)
        self.state = self.jax.block_until_ready(self.largest.set_priorities(self.state, batch.indices, ones))
        return batch

    def columns(self, batch: Any) -> Columns:
        found = {name: np.asarray(column) for name, column in batch.experience.items()}
        return Columns(found["obs"], found["next_obs"], found["action"], found["reward"], found["done"])

    def save(self, folder: Path) -> None:
        from flashbax.vault import Vault

        vault = Vault("replay", self.state.experience, rel_dir=str(folder))
        # without an interval, only the steps since the ring was last full are written
        length = self.state.experience["reward"].shape[1]
        vault.write(self.state, source_interval=(0, length))

    def load(self, folder: Path) -> System:
        from flashbax.vault import Vault

        (uid,) = (path.name for path in (folder / "replay").iterdir())
        other = self.like()
        other.state = Vault("replay", rel_dir=str(folder), vault_uid=uid).read()
        return other  # type: ignore[no-any-return]


class FlashbaxFlat(FlashbaxItem):
    """Flashbax's flat and trajectory buffers, which store each observation once."""

    title = "Flashbax, flat buffer"
    calls = """\
flashbax.make_flat_buffer(size, min_length=4, sample_batch_size=256, add_batch_size=4)
flashbax.make_trajectory_buffer(  # windows
    add_batch_size=4,
    sample_batch_size=16,
    sample_sequence_length=65,
    period=1,
    min_length_time_axis=65,
    max_length_time_axis=size // 4,
)
flashbax.make_prioritised_flat_buffer(size, min_length=4, sample_batch_size=256, add_batch_size=4)"""
    next_at_ends = False
    lacks = {}  # noqa: RUF012

    def make(self, batch: int) -> Any:
        import flashbax

        if self.kind == WINDOWS:
            return flashbax.make_trajectory_buffer(
                add_batch_size=feed.N_ENVS, sample_batch_size=N_WINDOWS, sample_sequence_length=LENGTH, period=1,
                min_length_time_axis=LENGTH, max_length_time_axis=self.case.n_steps,
            )  # fmt: skip
        make = flashbax.make_prioritised_flat_buffer if self.kind == PRIORITIES else flashbax.make_flat_buffer
        return make(self.case.size, min_length=feed.N_ENVS, sample_batch_size=batch, add_batch_size=feed.N_ENVS)

    def item(self) -> dict[str, Any]:
        return {name: value for name, value in super().item().items() if name != "next_obs"}

    def prepare(self, step: Step) -> Any:
        data = super().prepare(step)
        del data["next_obs"]
        return {name: column[:, None] for name, column in data.items()} if self.kind == WINDOWS else data

    def windows(self) -> Any:
        return self.sample(256)

    def columns(self, batch: Any) -> Columns:
        pair = batch.experience
        first = pair if self.kind == WINDOWS else pair.first
        found = {name: np.asarray(column) for name, column in first.items()}
        next_obs = None if self.kind == WINDOWS else np.asarray(pair.second["obs"])
        return Columns(found["obs"], next_obs, found["action"], found["reward"], found["done"])
