"""`CompressedStorage` on a GPU behaves like TorchRL's tensor storage there.

Without a GPU the same tests run on the CPU with the reference kernels.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from torchrl.data import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer

from sb3_extra_buffers._torchrl.device_group import DeviceGroup
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
from sb3_extra_buffers.replay_buffers.experience_memory import ReplayBuffer
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_frames import DeviceFrameStore
from tests.gpu import never_waits, noting
from tests.replay_buffers.trajectories import SIDE, STACK, assert_same, steps, trajectory

on_gpu = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)


@pytest.fixture(params=["reference", on_gpu])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda":
        return torch.device("cuda")
    monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
    monkeypatch.setattr(device_base, "has_triton", lambda: True)
    # indices count as being on a GPU
    for module in ("storage", "table", "transactions"):
        monkeypatch.setattr(f"sb3_extra_buffers._torchrl.{module}.is_on_gpu", torch.is_tensor)
    return torch.device("cpu")


def pair(device: torch.device, size: int, **options: Any) -> tuple[Any, Any]:
    storages = [
        CompressedStorage(size, device=device, **options),
        LazyTensorStorage(size, device=device, ndim=options.get("ndim", 1)),
    ]
    ours, theirs = (TensorDictReplayBuffer(storage=storage, batch_size=16) for storage in storages)
    return ours, theirs


def same_samples(ours: Any, theirs: Any, seed: int = 0) -> None:
    batches = []
    for buffer in (ours, theirs):
        torch.manual_seed(seed)
        batches.append(buffer.sample())
    assert batches[0]["observation"].device == batches[1]["observation"].device
    assert_same(*batches)


def is_on_device(storage: CompressedStorage) -> bool:
    return all(isinstance(group.store.inner, DeviceFrameStore) for group in storage.table.groups)


@pytest.mark.parametrize(("n_envs", "given"), [(1, None), (3, None), (3, 3)])
def test_samples_equal_those_of_a_tensor_storage_at_the_same_seed(
    device: torch.device, n_envs: int, given: int | None
) -> None:
    # not a whole number of steps, so that the last step is never complete
    ours, theirs = pair(device, 61, n_envs=given)
    for step, data in enumerate(steps(140 // n_envs, n_envs)):
        for buffer in (ours, theirs):
            buffer.extend(data.clone().to(device))
        if step > 16 and step % 9 == 0:
            same_samples(ours, theirs, seed=step)
    [group] = ours.storage.table.groups
    assert isinstance(group, DeviceGroup)
    assert is_on_device(ours.storage)
    assert_same(ours[:].clone(), theirs[:].clone())
    ours.storage.check()


def test_samples_with_ndim_2(device: torch.device) -> None:
    ours, theirs = pair(device, 60, ndim=2)
    for first in range(0, 40, 10):
        data = torch.stack(list(steps(first + 10, 3))[first:], dim=1)
        for buffer in (ours, theirs):
            buffer.extend(data.clone().to(device))
    same_samples(ours, theirs)
    assert ours.storage.table.groups[0].store.n_streams == 3
    assert_same(ours[:].clone(), theirs[:].clone())


@pytest.mark.parametrize("ndim", [1, 2])
def test_items_are_found_by_indices_on_the_device(device: torch.device, ndim: int) -> None:
    ours, theirs = pair(device, 60, **({"ndim": 2} if ndim == 2 else {"n_envs": 3}))
    given = list(steps(30, 3))
    for data in given if ndim == 1 else [torch.stack(given[i : i + 10], dim=1) for i in (0, 10, 20)]:
        for buffer in (ours, theirs):
            buffer.extend(data.clone().to(device))
    index: Any = torch.tensor([[3, 59, 0], [-1, 33, 34]], device=device)
    if ndim == 2:
        index = (index // 3, index % 3)
    assert_same(ours.storage.get(index), theirs.storage.get(index))
    [observation] = ours.storage.get_fields(index, ["observation"])
    assert torch.equal(observation, theirs.storage.get(index)["observation"])
    if ndim == 1:
        for buffer in (ours, theirs):
            buffer[33] = buffer[9].clone()  # stays raw
        assert_same(ours.storage.get(index), theirs.storage.get(index))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("method", ["none", "delta"])
def test_extending_and_reading_never_wait_for_the_gpu(method: str) -> None:
    n_envs = 4
    storage = CompressedStorage(60 * n_envs, device="cuda", n_envs=n_envs, compression_method=method)
    ours = TensorDictReplayBuffer(storage=storage, batch_size=16)
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(60 * n_envs, device="cuda"), batch_size=16)
    data = [step.to("cuda") for step in steps(150, n_envs)]
    index = torch.randint(0, 60 * n_envs, (64,), device="cuda")
    for step in data[:70]:
        ours.extend(step.clone())
        theirs.extend(step.clone())
    storage.get(index)
    given = [step.clone() for step in data[70:]]
    torch.cuda.synchronize()
    names: list[str] = []
    with noting(names), never_waits():
        for step in given:
            ours.extend(step)
        found = storage.get(index)
    assert names
    assert not any("DtoH" in name or "HtoD" in name for name in names), names
    for step in data[70:]:
        theirs.extend(step.clone())
    assert_same(found, theirs.storage.get(index))


def test_single_items_and_partial_steps(device: torch.device) -> None:
    data: Any = trajectory(40, 3)
    ours, theirs = pair(device, 90, n_envs=3)
    for buffer in (ours, theirs):
        for first in range(0, 115, 5):
            buffer.extend(data[first : first + 5].clone().to(device))
        buffer.add(data[115].clone().to(device))
    same_samples(ours, theirs)
    assert is_on_device(ours.storage)
    # only those of the step in progress
    assert max(raw.count for raw in ours.storage.table.groups[0]._raw) <= 2


def test_items_overwritten_out_of_order(device: torch.device) -> None:
    data, other = trajectory(40), trajectory(40, seed=1)
    ours, theirs = pair(device, 40)
    for buffer in (ours, theirs):
        buffer.extend(data.clone().to(device))
        buffer[3] = other[3].to(device)
        buffer[10:14] = other[10:14].to(device)
        buffer[torch.tensor([30, 20])] = other[torch.tensor([30, 20])].to(device)
        buffer.set_at_("observation", other["observation"][5:7].to(device), torch.tensor([5, 6]))
        buffer.extend(trajectory(13, seed=2).to(device))
        buffer.set_(("next", "observation"), other["next", "observation"].to(device))
    assert_same(ours[:].clone(), theirs[:].clone())
    ours.storage.check()


def test_many_rows_out_of_order_are_reordered(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sb3_extra_buffers._torchrl.device_group._MIN_RAW", 4)
    buffers = [
        TensorDictReplayBuffer(
            storage=storage, writer=TensorDictMaxValueWriter(rank_key=("next", "reward")), batch_size=8
        )
        for storage in (CompressedStorage(20, device=device), LazyTensorStorage(20, device=device))
    ]
    for first in range(0, 60, 12):
        for buffer in buffers:
            buffer.extend(trajectory(60)[first : first + 12].to(device).clone())
    assert_same(buffers[0][:].clone(), buffers[1][:].clone())
    [group] = buffers[0].storage.table.groups
    assert max(raw.count for raw in group._raw) <= 4
    buffers[0].storage.check()


def test_an_emptied_buffer_can_be_filled_again(device: torch.device) -> None:
    ours, theirs = pair(device, 50)
    for buffer in (ours, theirs):
        buffer.extend(trajectory(40).to(device))
        buffer.empty()
        buffer.extend(trajectory(30, seed=3).to(device))
    same_samples(ours, theirs)
    ours.storage.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_dtype_round_trips_exactly(device: torch.device, dtype: torch.dtype) -> None:
    frames = (torch.arange(40 * 16 * 16).reshape(40, 16, 16) % 251).to(dtype)
    storage = CompressedStorage(40, device=device, compression_method="delta")
    storage.set(range(40), frames)
    found = storage.get(torch.tensor([4, 39, 0]))
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), frames[[4, 39, 0]])


@pytest.mark.parametrize("n_items", [30, 140])
def test_save_load_and_copy(device: torch.device, tmp_path: Path, n_items: int) -> None:
    ours, theirs = pair(device, 90, n_envs=2)
    for data in steps(n_items // 2, 2):
        for buffer in (ours, theirs):
            buffer.extend(data.clone().to(device))
    ours.storage.dumps(tmp_path)
    again, _ = pair(device, 90)
    again.storage.loads(tmp_path)
    again.writer._cursor = ours.writer._cursor
    for buffer in (ours, again, theirs):
        for data in steps(8, 2, seed=5):
            buffer.extend(data.clone().to(device))
    assert_same(again[:].clone(), theirs[:].clone())
    # the next step continues in order
    assert max(raw.count for raw in again.storage.table.groups[0]._raw) == 0
    for copied in (copy.deepcopy(ours.storage), pickle.loads(pickle.dumps(ours.storage))):
        assert_same(copied[:].clone(), theirs.storage[:].clone())


def test_a_file_saved_on_one_device_loads_on_another(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair(device, 90, n_envs=2)
    for data in steps(70, 2):
        for buffer in (ours, theirs):
            buffer.extend(data.clone().to(device))
    ours.storage.dumps(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(device_base, "stays_on_host", lambda device: True)
        on_host = CompressedStorage(90)
        on_host.loads(tmp_path)
        assert not isinstance(on_host.table.groups[0], DeviceGroup)
        assert_same(on_host[:].clone(), theirs[:].clone().cpu())
        on_host.dumps(tmp_path / "host")
    again = CompressedStorage(90, device=device)
    again.loads(tmp_path / "host")
    assert isinstance(again.table.groups[0], DeviceGroup)
    assert_same(again[:].clone(), theirs[:].clone())


def test_memory_usage_is_small_and_names_the_method(device: torch.device) -> None:
    buffer, _ = pair(device, 2000, n_envs=1)
    buffer.extend(trajectory(150))
    usage = buffer.storage.memory_usage()
    assert usage.codecs["observation"].startswith("delta")
    assert usage.dense_observations == 150 * 2 * STACK * SIDE * SIDE
    # a heap starts with 1 MiB
    assert usage.payload < 1.1 * 2**20


def test_data_that_differs_raises_and_changes_nothing(device: torch.device) -> None:
    buffer, _ = pair(device, 50)
    buffer.extend(trajectory(20))
    before = buffer[:].clone()
    with pytest.raises(SpecMismatchError, match="first item"):
        buffer.extend(trajectory(8).exclude("action"))
    assert_same(buffer[:].clone(), before)


def test_replay_buffer_on_the_device(device: torch.device) -> None:
    buffer = ReplayBuffer(device, device, 50, storage="compressed")
    buffer.add_batch(trajectory(60))
    data = trajectory(60)
    one = buffer.sample_by_index_fields([0, 5], fields=["observation"])
    assert one.device.type == device.type
    assert torch.equal(one.cpu(), data["observation"][[50, 55]])


def test_a_replay_buffer_loads_onto_the_device(device: torch.device, tmp_path: Path) -> None:
    """It used to stay on the host."""
    buffer, again = (ReplayBuffer(device, device, 50, storage="compressed") for _ in range(2))
    buffer.add_batch(trajectory(60).to(device))
    buffer.save(tmp_path / "memory", contents=True)
    again.load(tmp_path / "memory")
    assert again.memory.storage.device.type == device.type
    assert isinstance(again.memory.storage.table.groups[0], DeviceGroup)
    assert_same(again.sample_all(), buffer.sample_all())


def test_a_tree_of_tensors_keeps_its_structure_on_the_device(device: torch.device, tmp_path: Path) -> None:
    """It used to become a tuple when it was loaded onto a device."""
    frames = (torch.arange(40 * 16 * 16).reshape(40, 16, 16) % 251).to(torch.uint8)
    tree = {"frame": frames.to(device), "rest": (torch.arange(40, device=device),)}
    storage, again = (CompressedStorage(40, device=device, compression_method="delta") for _ in range(2))
    storage.set(range(40), tree)
    storage.dumps(tmp_path)
    again.set(0, {"frame": frames[1].to(device), "rest": (torch.tensor(7, device=device),)})
    again.loads(tmp_path)
    loaded = again.get(range(40))
    assert torch.equal(loaded["frame"].cpu(), frames)
    assert torch.equal(loaded["rest"][0].cpu(), torch.arange(40))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_game_stays_on_the_gpu() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    import importlib

    from tensordict import TensorDict

    native_steps = importlib.import_module("benchmarks.feed").native_steps
    # enough items to outweigh the staging memory, 1.8 MB regardless of the number of items
    ours, theirs = pair(torch.device("cuda"), 3000)
    for step in native_steps("ms_pacman", 800):
        data = TensorDict(
            {
                "observation": torch.from_numpy(step.obs),
                "next": {"observation": torch.from_numpy(step.next_obs), "done": torch.from_numpy(step.dones.copy())},
            },
            batch_size=[len(step.obs)],
        )
        for buffer in (ours, theirs):
            buffer.extend(data.clone().to("cuda"))
    same_samples(ours, theirs)
    assert is_on_device(ours.storage)
    usage = ours.storage.memory_usage()
    assert usage.total < 0.05 * usage.dense
