"""TorchRL's replay buffers over several storages, among them this library's."""

from __future__ import annotations

import importlib
import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.peer_systems.base import LENGTH, N_WINDOWS, PRIORITIES, UNIFORM, WINDOWS, Case, Columns, Step, System


class TorchrlTensor(System):
    """TorchRL with everything in tensors."""

    title, package = "TorchRL, `LazyTensorStorage`", "torchrl"
    calls = """\
TensorDictReplayBuffer(storage=LazyTensorStorage(size), batch_size=256)
buffer.extend(tensordict)  # 4 transitions; created beforehand
buffer.sample(256)
ReplayBuffer(  # windows
    storage=LazyTensorStorage(size, ndim=2),
    batch_size=16 * 65,
    sampler=SliceSampler(slice_len=65, end_key=("next", "done")),
).sample()
TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=..., batch_size=256)
batch = buffer.sample()
batch["td_error"] = td_errors
buffer.update_tensordict_priority(batch)
buffer.dumps(folder)
buffer.loads(folder)"""
    #: whether keys must not be nested
    flat: ClassVar[bool] = False

    def __init__(self, case: Case, kind: str = UNIFORM) -> None:
        super().__init__(case, kind)
        self.buffer = self.make()

    def storage(self, **options: Any) -> Any:
        from torchrl.data import LazyTensorStorage

        return LazyTensorStorage(self.case.size, **options)

    def make(self) -> Any:
        from torchrl.data import ReplayBuffer, SliceSampler, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

        if self.kind == WINDOWS:
            # TensorDictReplayBuffer cannot add one step of each environment to a storage of two dimensions
            sampler = SliceSampler(slice_len=LENGTH, end_key=("next", "done"))
            size = N_WINDOWS * LENGTH
            return ReplayBuffer(storage=self.storage(ndim=2), sampler=sampler, batch_size=size)
        if self.kind == PRIORITIES:
            try:
                importlib.import_module("torchrl._torchrl")
            except ImportError as error:
                version = importlib.metadata.version("torch")
                raise SystemExit(f"its compiled sampler does not load with torch {version}") from error
            return TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=self.storage(), batch_size=256)
        return TensorDictReplayBuffer(storage=self.storage(), batch_size=256)

    def prepare(self, step: Step) -> Any:
        import torch
        from tensordict import TensorDict

        obs, next_obs, actions, rewards, dones = (torch.from_numpy(column.copy()) for column in step)
        following = {
            "observation": next_obs,
            "reward": rewards[:, None],
            "done": dones[:, None],
            "terminated": dones[:, None].clone(),
        }
        data = TensorDict({"observation": obs, "action": actions, "next": following}, batch_size=[len(obs)])
        if self.kind == WINDOWS:
            return data[:, None]
        return data.flatten_keys(".") if self.flat else data

    def add(self, data: Any) -> None:
        self.buffer.extend(data)

    def sample(self, batch: int) -> Any:
        return self.buffer.sample(batch)

    def windows(self) -> Any:
        return self.buffer.sample()

    def sample_and_update(self) -> Any:
        import torch

        batch = self.buffer.sample()
        batch["td_error"] = torch.ones(len(batch))
        self.buffer.update_tensordict_priority(batch)
        return batch

    def columns(self, batch: Any) -> Columns:
        if self.flat:
            batch = batch.unflatten_keys(".")
        shape = (N_WINDOWS, LENGTH) if self.kind == WINDOWS else (len(batch),)
        keys = ("observation", ("next", "observation"), "action", ("next", "reward"), ("next", "done"))
        obs, next_obs, actions, rewards, dones = (np.asarray(batch[key]) for key in keys)
        obs, next_obs, actions = (column.reshape(*shape, *column.shape[1:]) for column in (obs, next_obs, actions))
        return Columns(obs, next_obs, actions, rewards.reshape(shape), dones.reshape(shape))

    def save(self, folder: Path) -> None:
        self.buffer.dumps(folder)

    def load(self, folder: Path) -> System:
        other = self.like()
        other.buffer = other.make()
        other.buffer.loads(folder)
        return other  # type: ignore[no-any-return]


class TorchrlMemmap(TorchrlTensor):
    """TorchRL with everything in memory-mapped files."""

    title = "TorchRL, `LazyMemmapStorage`"
    calls = "# as above, with LazyMemmapStorage(size, scratch_dir=folder)"

    def storage(self, **options: Any) -> Any:
        from torchrl.data import LazyMemmapStorage

        # a folder for each storage: a loaded one must not write to the files of the first
        folder = tempfile.mkdtemp(dir=self.scratch())
        return LazyMemmapStorage(self.case.size, scratch_dir=folder, **options)


class TorchrlList(TorchrlTensor):
    """TorchRL with every transition compressed by itself."""

    title = "TorchRL, `CompressedListStorage`"
    calls = "# as above, with CompressedListStorage(size)  # zstd where it is installed; keys flattened"
    flat = True
    most = 4000
    lacks = {WINDOWS: "has one dimension only, and no nested keys"}  # noqa: RUF012  # declared in System

    def storage(self, **options: Any) -> Any:
        from torchrl.data import CompressedListStorage

        return CompressedListStorage(self.case.size)


class TorchrlOurs(TorchrlTensor):
    """TorchRL with this library's storage."""

    title = "**this library**, in TorchRL"
    calls = "# as above, with sb3_extra_buffers.replay_buffers.CompressedStorage(size)"

    def storage(self, **options: Any) -> Any:
        from sb3_extra_buffers.replay_buffers import CompressedStorage

        return CompressedStorage(self.case.size, **options)
