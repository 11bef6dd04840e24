"""TorchRL's slice samplers draw the same slices from a `CompressedStorage` as from TorchRL's own storages."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import Sampler

from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
from sb3_extra_buffers.stores import device_base
from tests.replay_buffers.trajectories import assert_same, steps

prioritized = importlib.import_module("torchrl.data.replay_buffers.samplers.prioritized")
needs_trees = pytest.mark.skipif(
    prioritized.SumSegmentTreeFp32 is None,
    reason="TorchRL's wheel was built for another torch; python -m tests.conformance.torchrl_extension builds its own",
)
on_gpu = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)

TRAJ, END, LENGTH, BATCH = ("collector", "traj_ids"), ("next", "done"), 5, 20

SAMPLERS: dict[str, Callable[[int], Any]] = {
    "by trajectory": lambda size: SliceSampler(slice_len=LENGTH, traj_key=TRAJ),
    "by end": lambda size: SliceSampler(slice_len=LENGTH, end_key=END),
    "by several ends": lambda size: SliceSampler(slice_len=LENGTH, end_keys=[END, ("next", "truncated")]),
    "by number": lambda size: SliceSampler(num_slices=BATCH // LENGTH, end_key=END),
    "cached ends": lambda size: SliceSampler(slice_len=LENGTH, end_key=END, cache_values=True),
    "no truncated key": lambda size: SliceSampler(slice_len=LENGTH, end_key=END, truncated_key=None),
    "shorter slices": lambda size: SliceSampler(slice_len=10, end_key=END, strict_length=False),
    "padded": lambda size: SliceSampler(slice_len=10, end_key=END, strict_length=False, pad_output=True),
    "over the ends": lambda size: SliceSampler(slice_len=LENGTH, traj_key=TRAJ, span=(2, 3)),
    "without replacement": lambda size: SliceSamplerWithoutReplacement(
        slice_len=LENGTH, end_key=END, strict_length=False
    ),
    "in order": lambda size: SliceSamplerWithoutReplacement(
        slice_len=LENGTH, traj_key=TRAJ, strict_length=False, shuffle=False
    ),
    "prioritised": lambda size: PrioritizedSliceSampler(size, 0.7, 0.9, slice_len=LENGTH, traj_key=TRAJ),
    "prioritised, shorter slices": lambda size: PrioritizedSliceSampler(
        size, 0.7, 0.9, slice_len=10, end_key=END, strict_length=False, cache_values=True
    ),
}
all_samplers = pytest.mark.parametrize(
    "sampler", [pytest.param(name, marks=needs_trees if "prioritised" in name else ()) for name in SAMPLERS]
)


@pytest.fixture(params=["host", "reference", on_gpu])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the storage is: in main memory, in the stores for GPUs with their reference kernels, or on a GPU."""
    if request.param == "reference":
        monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
        monkeypatch.setattr(device_base, "has_triton", lambda: True)
    return torch.device("cuda" if request.param == "cuda" else "cpu")


def pair(size: int, sampler: str, device: torch.device | str = "cpu", **options: Any) -> tuple[Any, Any]:
    storages = [
        CompressedStorage(size, device=device, **options),
        LazyTensorStorage(size, device=device, ndim=options.get("ndim", 1)),
    ]
    ours, theirs = (
        TensorDictReplayBuffer(
            storage=storage, sampler=SAMPLERS[sampler](size), batch_size=BATCH, priority_key="td_error"
        )
        for storage in storages
    )
    return ours, theirs


def episodes(n_steps: int, n_envs: int = 1, seed: int = 0) -> list[Any]:
    """Steps of ``n_envs`` environments, with all keys that samplers look for."""
    result = []
    for step in steps(n_steps, n_envs, seed):
        flags = torch.zeros(n_envs, 1, dtype=torch.bool)
        result.append(step.update({"is_init": flags, "next": {"terminated": step[END], "truncated": flags.clone()}}))
    return result


def batches(n_steps: int, n_envs: int = 1, ndim: int = 1, each: int = 9) -> Iterator[Any]:
    """What collectors return: ``each`` steps at a time, ``[environment, time]`` with ``ndim=2``."""
    played = episodes(n_steps, n_envs)
    for first in range(0, n_steps, each):
        part = played[first : first + each]
        yield torch.cat(part) if ndim == 1 else torch.stack(part, dim=1)


def same_samples(ours: Any, theirs: Any, seed: int = 0, n_samples: int = 2) -> Any:
    """Assert that both buffers sample the same slices, and update their priorities in the same way."""
    sampled: list[list[Any]] = []
    for buffer in (ours, theirs):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # the prioritised sampler draws from it
        sampled.append([])
        for number in range(n_samples):
            batch = buffer.sample()
            sampled[-1].append(batch.clone())
            if isinstance(buffer.sampler, PrioritizedSliceSampler):
                batch["td_error"] = torch.linspace(0.1, number + 1, len(batch), device=batch["action"].device)
                buffer.update_tensordict_priority(batch)
    for one, other in zip(*sampled, strict=True):
        assert_same(one, other)
        # no tensors that are decoded later
        assert {type(value) for value in one.values(True, True)} == {torch.Tensor}
    return sampled[0][-1]


@all_samplers
@pytest.mark.parametrize("method", ["auto", "delta", "zstd-5"])
def test_slices_equal_those_of_a_tensor_storage(sampler: str, method: str) -> None:
    ours, theirs = pair(100, sampler, compression_method=method)
    for number, data in enumerate(batches(243)):  # wraps around twice
        for buffer in (ours, theirs):
            buffer.extend(data.clone())
        if number > 3:
            same_samples(ours, theirs, seed=number)
    ours.storage.check()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in TorchRL's prioritised sampler
@all_samplers
def test_slices_of_several_environments(sampler: str) -> None:
    ours, theirs = pair(180, sampler, ndim=2)
    for number, data in enumerate(batches(81, n_envs=3, ndim=2)):
        for buffer in (ours, theirs):
            buffer.extend(data.clone())
        if number > 3:
            same_samples(ours, theirs, seed=number)
    assert ours.storage.table.groups[0].store.n_streams == 3


@all_samplers
def test_slices_on_a_device(sampler: str, device: torch.device) -> None:
    ours, theirs = pair(100, sampler, device, n_envs=1)
    for number, data in enumerate(batches(153)):
        for buffer in (ours, theirs):
            buffer.extend(data.clone().to(device))
        if number > 3:
            batch = same_samples(ours, theirs, seed=number)
            assert batch["observation"].device.type == device.type


@all_samplers
def test_slices_of_a_loaded_buffer(sampler: str, tmp_path: Path) -> None:
    """TorchRL's own storages forget the position of the writer, and loaded ones return slices that span it."""
    ours, theirs = pair(100, sampler)
    again, _ = pair(100, sampler)
    for data in batches(135):
        for buffer in (ours, theirs):
            buffer.extend(data.clone())
    ours.dumps(tmp_path)
    again.loads(tmp_path)
    same_samples(again, theirs)
    for data in batches(36):
        for buffer in (again, theirs):
            buffer.extend(data.clone())
    same_samples(again, theirs, seed=1)


@all_samplers
def test_images_are_decoded_only_by_the_buffer(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, _ = pair(100, sampler)
    for data in batches(153):
        buffer.extend(data)
    [group] = buffer.storage.table.groups
    reads = []
    read = group.read_rows

    def count(positions: Any, which: Any = None) -> Any:
        reads.append(len(positions))
        return read(positions, which)

    monkeypatch.setattr(group, "read_rows", count)
    buffer.sampler.sample(buffer.storage, BATCH)
    assert not reads
    batch = buffer.sample()
    # observations together with next observations
    assert reads == [len(batch)]


def test_a_compiled_sampler_draws_the_same_slices_without_warnings() -> None:
    ours, theirs = (
        TensorDictReplayBuffer(
            storage=storage,
            sampler=SliceSampler(slice_len=LENGTH, end_key=END, compile={"backend": "eager"}),
            batch_size=BATCH,
        )
        for storage in (CompressedStorage(100), LazyTensorStorage(100))
    )
    for buffer in (ours, theirs):
        buffer.extend(torch.cat(episodes(60)))
    same_samples(ours, theirs)


class Bright(SliceSampler):  # type: ignore[misc]  # torchrl ships no types
    """A sampler that uses the images it has drawn, in TorchRL's own method."""

    def _maybe_emit_init_marker(self, info: dict[Any, Any], drawn: Any, *rest: Any) -> None:
        images = drawn["observation"]
        info["brightness"] = images.float().mean((1, 2, 3))
        info["first"] = images[0].expand(len(images), *images.shape[1:])
        # a copy, as with any other index
        images[:2] = 7
        images.add_(1)
        info["changed"] = images.clone()
        drawn.get(("next", "observation")).zero_()


def test_a_sampler_can_use_the_images_that_it_draws() -> None:
    storages = CompressedStorage(100), LazyTensorStorage(100)
    ours, theirs = (
        TensorDictReplayBuffer(storage=storage, sampler=Bright(slice_len=LENGTH, end_key=END), batch_size=BATCH)
        for storage in storages
    )
    for data in batches(90):
        for buffer in (ours, theirs):
            buffer.extend(data.clone())
    batch = same_samples(ours, theirs)
    assert (batch["changed"][:2] == 8).all()
    assert torch.equal(batch["changed"][2:], batch["observation"][2:] + 1)


class Keeping(Sampler):  # type: ignore[misc]
    """A user's sampler, which keeps what it reads."""

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        self.kept = storage[(torch.arange(batch_size),)], storage.get(torch.arange(batch_size))
        return torch.arange(batch_size), {}

    def _empty(self) -> None: ...
    def dumps(self, path: Any) -> None: ...
    def loads(self, path: Any) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Any) -> None: ...


def test_what_a_sampler_reads_is_a_copy() -> None:
    buffer = TensorDictReplayBuffer(storage=CompressedStorage(40), sampler=Keeping(), batch_size=BATCH)
    data: TensorDict = torch.cat(episodes(80))
    buffer.extend(data[:40].clone())
    buffer.sample()
    buffer.extend(data[40:].clone())
    for kept in buffer.sampler.kept:
        assert torch.equal(kept["observation"], data["observation"][:BATCH])
