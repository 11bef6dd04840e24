"""`CompressedStorage` behaves like TorchRL's own storages, in a fraction of the memory."""

from __future__ import annotations

import copy
import importlib
import json
import multiprocessing as mp
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

from sb3_extra_buffers._torchrl.tensors import to_numpy
from sb3_extra_buffers.errors import (
    CodecOptionError,
    DamagedFileError,
    FileFormatError,
    IndexOutOfRangeError,
    SharingError,
    SpecMismatchError,
    UnknownFieldError,
    UnsupportedVersionError,
)
from sb3_extra_buffers.files.manifest import dump
from sb3_extra_buffers.files.parts import flatten, unflatten
from sb3_extra_buffers.files.registry import from_parts
from sb3_extra_buffers.kernels import has_numba
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
from tests.replay_buffers.trajectories import SIDE, STACK, assert_same, steps, trajectory

prioritized = importlib.import_module("torchrl.data.replay_buffers.samplers.prioritized")
needs_trees = pytest.mark.skipif(
    prioritized.SumSegmentTreeFp32 is None,
    reason="TorchRL's wheel was built for another torch; python -m tests.conformance.torchrl_extension builds its own",
)

SAMPLERS: dict[str, Callable[[int], Any]] = {
    "random": lambda size: RandomSampler(),
    "without replacement": lambda size: SamplerWithoutReplacement(),
    "prioritised": lambda size: PrioritizedSampler(size, alpha=0.7, beta=0.5),
    "slices": lambda size: SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"), strict_length=False),
    "slices by end": lambda size: SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=False),
    "slices without replacement": lambda size: SliceSamplerWithoutReplacement(
        slice_len=4, traj_key=("collector", "traj_ids"), strict_length=False
    ),
}


def pair(size: int, sampler: str = "random", **options: Any) -> tuple[Any, Any]:
    ndim = options.get("ndim", 1)
    storages = [CompressedStorage(size, **options), LazyTensorStorage(size, ndim=ndim)]
    ours, theirs = (
        TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](size), batch_size=16) for storage in storages
    )
    return ours, theirs


def same_samples(ours: Any, theirs: Any, n_samples: int = 3, seed: int = 0) -> None:
    batches = []
    for buffer in (ours, theirs):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # the prioritised sampler draws from it
        batches.append([buffer.sample() for _ in range(n_samples)])
    for one, other in zip(*batches, strict=True):
        assert_same(one, other)


# ---- differential: TorchRL's own storages ----


@pytest.mark.parametrize(
    "sampler", [pytest.param(name, marks=needs_trees if name == "prioritised" else ()) for name in SAMPLERS]
)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_samples_equal_those_of_a_tensor_storage_at_the_same_seed(sampler: str, n_envs: int) -> None:
    if n_envs > 1 and "slices" in sampler:
        pytest.skip("steps of several environments are no trajectories")
    ours, theirs = pair(60, sampler)
    for step, data in enumerate(steps(140 // n_envs, n_envs)):  # wraps around twice
        for buffer in (ours, theirs):
            buffer.extend(data.clone())
        if step > 16 and step % 7 == 0:
            same_samples(ours, theirs, 1, seed=step)
    same_samples(ours, theirs)
    ours.storage.check()


@pytest.mark.parametrize("sampler", ["random", "slices"])
def test_samples_with_ndim_2_equal_those_of_a_tensor_storage(sampler: str) -> None:
    ours, theirs = pair(90, sampler, ndim=2)
    for first in range(0, 100, 10):
        # as collectors return it: [environment, time]
        data = torch.stack(list(steps(first + 10, 3))[first:], dim=1)
        for buffer in (ours, theirs):
            buffer.extend(data.clone())
    same_samples(ours, theirs)
    assert ours.storage.table.groups[0].store.n_streams == 3
    assert ours.storage.shape == theirs.storage.shape
    assert_same(ours[:], theirs[:])
    assert_same(ours.storage[2:7, 1], theirs.storage[2:7, 1])


@pytest.mark.parametrize("ndim", [1, 2])
def test_items_without_elements(ndim: int, tmp_path: Path) -> None:
    """Such as a list of objects that is empty in this task."""
    ours, theirs = pair(30, ndim=ndim)
    lead = (3, 4) if ndim == 2 else (12,)
    leaves = {"objects": torch.zeros(*lead, 0), "masks": torch.zeros(*lead, 4, 0, 7, dtype=torch.uint8)}
    for number in range(6):
        data = TensorDict({**leaves, "number": torch.full(lead, number)}, batch_size=lead)
        for buffer in (ours, theirs):
            buffer.extend(data.clone())
        same_samples(ours, theirs)
    ours.dumps(tmp_path)
    again, _ = pair(30, ndim=ndim)
    again.loads(tmp_path)
    same_samples(again, theirs)


@pytest.mark.parametrize("method", ["auto", "delta"])
def test_writes_with_ndim_2_read_back(method: str) -> None:
    ours, theirs = pair(90, ndim=2, compression_method=method)
    data = torch.stack(list(steps(25, 3)), dim=1)
    other: Any = torch.stack(list(steps(25, 3, seed=1)), dim=1)
    for buffer in (ours, theirs):
        buffer.extend(data.clone())
        buffer[0, 3:5] = other[0, 3:5].set("index", torch.zeros(2, dtype=torch.int64))
        buffer[:, 7:9] = other[:, 7:9].set("index", torch.zeros(3, 2, dtype=torch.int64))
        buffer[:]["observation"][1, 12] = other["observation"][1, 12]
    assert_same(ours[:].clone(), theirs[:].clone())
    assert torch.equal(ours[2, 8]["observation"], other["observation"][2, 8])
    assert torch.equal(ours[:]["observation"][1:].clone(), theirs[:]["observation"][1:])


@needs_trees
def test_prioritized_sampling_equals_that_of_a_tensor_storage() -> None:
    buffers = [
        TensorDictPrioritizedReplayBuffer(storage=storage, alpha=0.7, beta=0.9, batch_size=16, priority_key="error")
        for storage in (CompressedStorage(100), LazyTensorStorage(100))
    ]
    for buffer in buffers:
        buffer.extend(trajectory(80))
    for round_ in range(3):
        batches = []
        for buffer in buffers:
            torch.manual_seed(round_)
            np.random.seed(round_)  # noqa: NPY002
            batch = buffer.sample()
            batches.append(batch.clone())
            batch["error"] = torch.linspace(0, round_ + 1, 16)
            buffer.update_tensordict_priority(batch)
        assert_same(*batches)


def test_max_value_writer() -> None:
    buffers = [
        TensorDictReplayBuffer(
            storage=storage, writer=TensorDictMaxValueWriter(rank_key=("next", "reward")), batch_size=8
        )
        for storage in (CompressedStorage(20), LazyTensorStorage(20))
    ]
    for first in range(0, 60, 12):
        for buffer in buffers:
            buffer.extend(trajectory(60)[first : first + 12].clone())
    same_samples(*buffers)
    assert_same(buffers[0][:], buffers[1][:])


@pytest.mark.parametrize("storage", [CompressedStorage, LazyTensorStorage, LazyMemmapStorage])
def test_a_slice_of_the_whole_buffer_reads_back(storage: Any) -> None:
    data = trajectory(50, 2)
    buffer = ReplayBuffer(storage=storage(120), batch_size=4)
    buffer.extend(data)

    assert_same(buffer[:].clone(), data)
    assert_same(buffer[7], data[7])
    assert_same(buffer[-3], data[-3])
    assert_same(buffer[10:20:3].clone(), data[10:20:3])
    assert_same(buffer[torch.tensor([3, 3, -1])], data[torch.tensor([3, 3, -1])])
    assert_same(buffer[[5, 1]], data[[5, 1]])
    assert torch.equal(buffer["observation"], data["observation"])
    assert torch.equal(buffer["next", "observation"][60:], data["next", "observation"][60:])
    assert (3 in buffer.storage, 100 in buffer.storage) == (True, False)


def test_items_are_overwritten_by_index_and_by_slice() -> None:
    data, other = trajectory(40), trajectory(40, seed=1)
    ours, theirs = (
        ReplayBuffer(storage=storage, batch_size=4) for storage in (CompressedStorage(40), LazyTensorStorage(40))
    )
    for buffer in (ours, theirs):
        buffer.extend(data)
        buffer[3] = other[3]
        buffer[10:14] = other[10:14]
        buffer[torch.tensor([30, 20])] = other[torch.tensor([30, 20])]
        buffer[torch.tensor(35)] = other[35]
        buffer.storage[np.array(36)] = other[36]
        buffer.set_at_("observation", other["observation"][5:7], torch.tensor([5, 6]))
        buffer.update_({"action": torch.arange(40)})
        buffer.set_(("next", "observation"), other["next", "observation"])
        # several large leaves in one call
        buffer[:20].update_(other[20:].select("observation", ("next", "observation")))

    assert_same(ours[:].clone(), theirs[:].clone())
    ours.storage.check()


def test_items_can_be_overwritten_without_the_index_key() -> None:
    data, other = trajectory(20), trajectory(20, seed=1)
    ours, theirs = pair(30)
    for buffer in (ours, theirs):
        buffer.extend(data.clone())
        buffer[3] = other[3]
        buffer[5:7] = other[5:7]
    assert_same(ours[:].clone(), theirs[:].clone())
    assert ours[:]["index"].tolist() == list(range(20))


@pytest.mark.parametrize("ndim", [1, 2])
def test_lazy_stacks_are_stored(ndim: int) -> None:
    ours, theirs = pair(90, ndim=ndim)
    for first in range(0, 40, 10):
        played = list(steps(first + 10, 3))[first:]
        for buffer in (ours, theirs):
            parts = [data.clone() if ndim == 2 else data[0].clone() for data in played]
            buffer.extend(LazyStackedTensorDict.lazy_stack(parts, dim=ndim - 1))
    assert_same(ours[:].clone(), theirs[:].clone())


def test_an_emptied_buffer_can_be_filled_again() -> None:
    ours, theirs = pair(50)
    for buffer in (ours, theirs):
        buffer.extend(trajectory(40))
        buffer.empty()
        assert len(buffer) == 0
        buffer.extend(trajectory(30, seed=3))
    same_samples(ours, theirs)


def test_tensorclasses_and_plain_tensors() -> None:
    @tensorclass
    class Seen:
        pixels: torch.Tensor
        value: torch.Tensor

    data = trajectory(30)
    seen: Any = Seen(  # type: ignore[call-arg]  # the decorator ships no types
        pixels=data["observation"], value=data["action"], batch_size=[30]
    )
    storage = CompressedStorage(40)
    storage.set(range(30), seen)
    found = storage.get(torch.tensor([4, 2]))
    assert isinstance(found, Seen)
    assert torch.equal(found.pixels, seen.pixels[[4, 2]])

    plain = CompressedStorage(40)
    plain.set(range(30), data["observation"])
    assert torch.equal(plain.get(torch.tensor([4, 2])), data["observation"][[4, 2]])
    assert torch.equal(plain.get(29), data["observation"][29])


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("named", [False, True])
def test_nested_batch_sizes_and_names_of_axes_are_kept(ndim: int, named: bool, tmp_path: Path) -> None:
    lead = [4, 5][:ndim]
    agents = TensorDict({"pixels": torch.zeros(*lead, 3, 40, 40, dtype=torch.uint8)}, [*lead, 3])
    data = TensorDict({"agents": agents, "reward": torch.ones(*lead, 1)}, lead)
    if named:
        data.names = ["env", "time"][:ndim]
        agents.names = [*data.names, "agent"]
    ours, theirs = (
        TensorDictReplayBuffer(storage=kind(20, ndim=ndim), batch_size=6)
        for kind in (CompressedStorage, LazyTensorStorage)
    )
    for buffer in (ours, theirs):
        buffer.extend(data)
    ours.storage.dumps(tmp_path)
    loaded = CompressedStorage(20, ndim=ndim)
    loaded.loads(tmp_path)
    for storage in (ours.storage, pickle.loads(pickle.dumps(ours.storage)), copy.deepcopy(ours.storage), loaded):
        copied = TensorDictReplayBuffer(storage=storage, batch_size=6)
        for found, expected in ((copied.sample(), theirs.sample()), (copied[:], theirs[:])):
            assert (found.shape, found.names) == (expected.shape, expected.names)
            assert found["agents"].shape == expected["agents"].shape
            assert found["agents"].names == expected["agents"].names


@pytest.mark.parametrize(
    "batches", [3, [3], [["agents", [3]]], [["no", [3], [None]]], [["reward", [3], [None]]], [["agents", [4], [None]]],
                [["agents", [3], [None, None]]], [["agents", [3], [[]]]]],
)  # fmt: skip
def test_forged_batch_sizes_are_refused(batches: Any) -> None:
    agents = TensorDict({"pixels": torch.zeros(4, 3, 40, 40, dtype=torch.uint8)}, [4, 3])
    storage = CompressedStorage(20)
    storage.set(range(4), TensorDict({"agents": agents, "reward": torch.ones(4, 1)}, [4]))
    described, arrays = flatten(storage.to_parts())
    assert described["description"]["batches"] == [["agents", [3], [None]]]
    from_parts(unflatten(described, arrays))
    described["description"]["batches"] = batches
    with pytest.raises(FileFormatError):
        from_parts(unflatten(described, arrays))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint16, torch.complex64]
)
def test_every_dtype_round_trips_exactly(dtype: torch.dtype) -> None:
    bits = torch.arange(40 * 16 * 16).reshape(40, 16, 16) % 251
    data = TensorDict({"image": bits.to(dtype), "next": {"image": (bits + 1).to(dtype)}}, batch_size=[40])
    if dtype.is_floating_point:
        data["image"][3, 4, 5] = float("nan")
        data["image"][3, 4, 6] = -0.0
    storage = CompressedStorage(40, compression_method={"image": "gzip1"})
    storage.set(range(40), data)

    found = storage.get(torch.arange(40))
    assert found["image"].dtype == dtype
    for one, other in ((found["image"], data["image"]), (found["next", "image"], data["next", "image"])):
        assert to_numpy(one).tobytes() == to_numpy(other).tobytes()


def test_next_of_next_is_stored() -> None:
    """A chain of three such keys used to raise a KeyError."""
    frames = (torch.arange(32 * 24 * 24).reshape(32, 24, 24) % 249).to(torch.uint8)
    second: Any = TensorDict({"frame": frames[1:31], "next": {"frame": frames[2:]}}, batch_size=[30])
    data = TensorDict({"frame": frames[:30], "next": second}, batch_size=[30])
    storage = CompressedStorage(30, compression_method="delta")
    storage.set(range(30), data)
    assert_same(storage.get(torch.arange(30)), data)


# ---- memory ----


@pytest.mark.parametrize(("n_envs", "given"), [(1, None), (4, None), (4, 4), (7, None)])
def test_next_observations_and_interleaved_environments_cost_almost_no_memory(n_envs: int, given: int | None) -> None:
    storage = CompressedStorage(4000, n_envs=given)
    buffer = TensorDictReplayBuffer(storage=storage)
    for data in steps(1000 // n_envs, n_envs):
        buffer.extend(data)

    [group] = storage.table.groups
    assert group.keys == ["observation", ("next", "observation")]
    assert group.store.n_streams == n_envs
    assert storage.memory_usage().payload < 0.03 * 1000 * 2 * STACK * SIDE * SIDE
    assert "delta" in storage.memory_usage().codecs["next.observation"]


def test_n_envs_is_detected_without_next_observations() -> None:
    storage = CompressedStorage(1000)
    buffer = TensorDictReplayBuffer(storage=storage)
    for data in steps(100, 3):
        buffer.extend(data.select("observation", "action"))

    assert storage.table.groups[0].store.n_streams == 3


@pytest.mark.parametrize("first", [0, 10, 40])
def test_n_envs_is_detected_in_one_large_batch(first: int) -> None:
    storage = CompressedStorage(1000)
    buffer = TensorDictReplayBuffer(storage=storage)
    data: Any = trajectory(100, 4)
    for part in (data[:first], data[first:]) if first else (data,):
        buffer.extend(part.clone())

    assert storage.table.groups[0].store.n_streams == 4
    assert_same(storage.get(torch.arange(400)).exclude("index"), data)


def test_consecutive_trajectories_use_one_stream() -> None:
    storage = CompressedStorage(1000)
    data: Any = torch.stack(list(steps(60, 4)), dim=1).reshape(-1)
    TensorDictReplayBuffer(storage=storage).extend(data)

    assert storage.table.groups[0].store.n_streams == 1
    assert_same(storage.get(torch.arange(240)).exclude("index"), data.exclude("index"))


def test_reading_one_field_decodes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = CompressedStorage(100, n_envs=1)
    data = trajectory(60)
    storage.set(range(60), data)

    def fail(*_: Any) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr(storage.table.groups[0].store, "read", fail)
    [actions] = storage.get_fields([4, 5], ["action"])
    assert torch.equal(actions, data["action"][4:6])
    # slice samplers read this
    assert torch.equal(storage[:]["next", "done"], data["next", "done"])


# ---- bad input ----


def bad(what: str) -> Any:
    data = trajectory(8)
    if what == "a key is missing":
        return data.exclude("action")
    if what == "a key is new":
        return data.set("more", torch.zeros(8))
    if what == "another shape":
        return data.set("observation", torch.zeros(8, STACK, SIDE, SIDE + 1, dtype=torch.uint8))
    if what == "another dtype":
        return data.set(("next", "observation"), data["observation"].float())
    return data.set("action", torch.zeros(8, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    "what", ["a key is missing", "a key is new", "another shape", "another dtype", "another small shape"]
)
@pytest.mark.parametrize("batched", [True, False])
def test_data_that_differs_from_the_first_item_raises_and_changes_nothing(what: str, batched: bool) -> None:
    buffer = TensorDictReplayBuffer(storage=CompressedStorage(50))
    buffer.extend(trajectory(20))
    before, cursor, written = buffer[:].clone(), buffer.writer._cursor, buffer.write_count

    write = buffer.extend if batched else buffer.add
    data = bad(what) if batched else bad(what)[0]
    with pytest.raises(SpecMismatchError, match="first item"):
        write(data)

    assert (len(buffer), buffer.writer._cursor, buffer.write_count) == (20, cursor, written)
    assert_same(buffer[:].clone(), before)


def test_scalars_can_be_compressed() -> None:
    storage = CompressedStorage(30, compression_method="delta")
    storage.set(range(20), TensorDict({"a": torch.arange(20), "b": torch.rand(20, 1)}, [20]))
    assert int(storage.get(7)["a"]) == 7
    assert storage.get(torch.tensor([3, 4]))["a"].tolist() == [3, 4]
    assert storage[:]["a"].tolist() == list(range(20))


@pytest.mark.parametrize("shape", [(), (40, 40)])
def test_plain_tensors_are_never_cast(shape: tuple[int, ...]) -> None:
    buffer = ReplayBuffer(storage=CompressedStorage(20), batch_size=4)
    buffer.extend(torch.ones(6, *shape, dtype=torch.int64))
    with pytest.raises(SpecMismatchError, match=r"float32.*int64"):
        buffer.extend(torch.full((6, *shape), 0.5))
    with pytest.raises(SpecMismatchError, match="nothing was stored"):
        buffer[2:4] = torch.full((2, *shape), 0.5)
    with pytest.raises(SpecMismatchError, match="several shapes"):
        CompressedStorage(5).set(
            range(2), LazyStackedTensorDict(TensorDict({"a": torch.ones(3)}), TensorDict({"a": torch.ones(4)}))
        )
    assert len(buffer) == 6
    assert (buffer[:] == 1).all()


def test_an_index_out_of_range_is_in_the_error() -> None:
    storage = CompressedStorage(50)
    storage.set(range(20), trajectory(20))
    for index in (20, -21, [3, 20], torch.tensor([-21])):
        with pytest.raises(IndexOutOfRangeError, match=r"2[01]"):
            storage.get(index)
    with pytest.raises(IndexOutOfRangeError, match="50"):
        storage.set(50, trajectory(1)[0])
    with pytest.raises(UnknownFieldError, match="reward"):
        storage.get_fields([1], ["reward"])
    assert len(storage) == 20


def test_only_tensors_are_stored() -> None:
    data: Any = trajectory(4)
    data["name"] = "a string"
    storage = CompressedStorage(10)
    with pytest.raises(SpecMismatchError, match="name"):
        storage.set(range(4), data)
    assert not storage.initialized
    storage.set(range(4), trajectory(4))


def test_invalid_options_raise() -> None:
    with pytest.raises(ValueError, match="max_size"):
        CompressedStorage(0)
    with pytest.raises(ValueError, match="n_envs"):
        CompressedStorage(10, n_envs=0)
    with pytest.raises(ValueError, match="ndim=2"):
        CompressedStorage(10, n_envs=2, ndim=2)


# ---- files and other processes ----


def filled(size: int = 90, n_items: int = 140, **options: Any) -> Any:
    buffer = TensorDictReplayBuffer(storage=CompressedStorage(size, **options), batch_size=16)
    for data in steps(n_items // 2, 2):
        buffer.extend(data)
    return buffer


@pytest.mark.parametrize("method", ["auto", "delta", "gzip1"])
@pytest.mark.parametrize("n_items", [10, 140])
def test_dumps_and_loads_round_trip(tmp_path: Path, method: str, n_items: int) -> None:
    buffer = filled(n_items=n_items, compression_method=method)
    buffer.dumps(tmp_path / "dump")
    again = TensorDictReplayBuffer(storage=CompressedStorage(90, compression_method=method), batch_size=16)
    again.loads(tmp_path / "dump")

    assert {path.name for path in (tmp_path / "dump" / "storage").iterdir()} == {"manifest.json", "data-0001.bin"}
    for data in steps(20, 2, seed=8):
        buffer.extend(data.clone())
        again.extend(data.clone())
    same_samples(again, buffer)
    again.storage.check()


def test_a_dump_replaces_the_previous_one_and_is_small(tmp_path: Path) -> None:
    buffer = filled()
    buffer.dumps(tmp_path)
    for data in steps(9, 2, seed=5):
        buffer.extend(data)
    buffer.dumps(tmp_path)
    again = TensorDictReplayBuffer(storage=CompressedStorage(90), batch_size=16)
    again.loads(tmp_path)

    assert_same(again[:].clone(), buffer[:].clone())
    assert len(list((tmp_path / "storage").iterdir())) == 2
    manifest = json.loads((tmp_path / "storage" / "manifest.json").read_text())
    assert (manifest["kind"], manifest["description"]["length"]) == ("torchrl-storage", 90)
    assert sum(path.stat().st_size for path in (tmp_path / "storage").iterdir()) < 0.2 * 90 * 2 * STACK * SIDE * SIDE


def test_state_dicts_copies_and_pickles_hold_the_same_items() -> None:
    buffer = filled()
    state = buffer.state_dict()
    again = TensorDictReplayBuffer(storage=CompressedStorage(90), batch_size=16)
    again.load_state_dict(state)
    same_samples(again, buffer)

    for copied in (copy.deepcopy(buffer.storage), pickle.loads(pickle.dumps(buffer.storage))):
        assert_same(copied.get(torch.arange(90)), buffer.storage.get(torch.arange(90)))
        copied.set(0, trajectory(1, seed=9)[0].set("index", torch.tensor(0)))
        assert not torch.equal(copied.get(0)["observation"], buffer.storage.get(0)["observation"])


def rewrite_manifest(path: Path, **entries: Any) -> None:
    """Change entries of a manifest and update its checksum."""
    record = json.loads(path.read_text())
    del record["crc32"]
    path.write_bytes(dump({**record, **entries}))


@pytest.mark.parametrize("damage", ["no manifest", "other json", "no json", "cut", "changed", "newer", "size"])
def test_a_failed_load_changes_nothing(tmp_path: Path, damage: str) -> None:
    buffer, target = filled(), filled(n_items=30)
    before = target[:].clone()
    buffer.storage.dumps(tmp_path / "s")
    manifest = tmp_path / "s" / "manifest.json"
    errors: dict[str, tuple[type[Exception], str]] = {
        "no manifest": (DamagedFileError, "manifest.json is missing"),
        "other json": (DamagedFileError, "manifest"),
        "no json": (DamagedFileError, "manifest"),
        "cut": (DamagedFileError, "cut short"),
        "changed": (DamagedFileError, "damaged"),
        "newer": (UnsupportedVersionError, "version 99"),
        "size": (SpecMismatchError, "max_size=90"),
    }
    data = tmp_path / "s" / "data-0001.bin"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "other json":
        manifest.write_text("[1, 2]")
    elif damage == "no json":
        manifest.write_text("{")
    elif damage == "cut":
        data.write_bytes(data.read_bytes()[: json.loads(manifest.read_text())["data"]["size"] // 2])
    elif damage == "changed":
        content = bytearray(data.read_bytes())
        content[200] ^= 1
        data.write_bytes(content)
    elif damage == "newer":
        rewrite_manifest(manifest, version=99)
    else:
        target = filled(size=91, n_items=30)

    kind, words = errors[damage]
    with pytest.raises(kind, match=words):
        target.storage.loads(tmp_path / "s")
    assert_same(target[:].clone(), before)


def test_loading_other_keys_raises(tmp_path: Path) -> None:
    other = TensorDictReplayBuffer(storage=CompressedStorage(90))
    other.extend(TensorDict({"pixels": torch.zeros(5, 30, 30)}, batch_size=[5]))
    other.storage.dumps(tmp_path)
    target = filled()

    with pytest.raises(SpecMismatchError, match="pixels"):
        target.storage.loads(tmp_path)
    assert len(target) == 90


def test_trees_of_tensors_load_into_a_storage_that_knows_their_structure(tmp_path: Path) -> None:
    storage = CompressedStorage(10)
    tree = (torch.rand(5, 40, 40), {"b": torch.arange(5)})
    storage.set(range(5), tree)
    storage.dumps(tmp_path)

    again = CompressedStorage(10)
    with pytest.raises(SpecMismatchError, match="tree of 2 tensors"):
        again.loads(tmp_path)
    again.set(0, (torch.zeros(40, 40), {"b": torch.tensor(0)}))
    again.loads(tmp_path)
    found = again.get(torch.arange(5))
    assert torch.equal(found[0], tree[0])
    assert torch.equal(found[1]["b"], tree[1]["b"])


@pytest.mark.parametrize("way", ["state", "folder", "hook"])
def test_saves_of_torchrl_storages_are_loaded(tmp_path: Path, way: str) -> None:
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(90), batch_size=16)
    for data in steps(70, 2):
        theirs.extend(data)
    ours = TensorDictReplayBuffer(storage=CompressedStorage(90), batch_size=16)
    if way == "state":
        ours.load_state_dict(theirs.state_dict())
    else:
        theirs.dumps(tmp_path)
        if way == "hook":
            ours.register_load_hook(lambda data, out=None: data.clone())
        ours.loads(tmp_path)
    same_samples(ours, theirs)
    assert ours.storage.table.groups[0].store.n_streams == 2
    for buffer in (ours, theirs):
        buffer.extend(trajectory(9, seed=3))
    same_samples(ours, theirs)

    with pytest.raises(SpecMismatchError, match="holds at most 50"):
        CompressedStorage(50).load_state_dict(theirs.storage.state_dict())


def test_save_hooks_see_decoded_data(tmp_path: Path) -> None:
    class Hook:
        shift: Any = None

        def __call__(self, data: Any, path: Any = None) -> Any:
            return data.exclude("collector")

    buffer = filled(n_items=40)
    hook = Hook()
    buffer.register_save_hook(hook)
    buffer.dumps(tmp_path)
    again = TensorDictReplayBuffer(storage=LazyTensorStorage(90), batch_size=16)
    again.loads(tmp_path)

    assert hook.shift == 40
    assert_same(again[:], buffer[:].exclude("collector"))


def _write_in_child(storage: Any, queue: Any) -> None:
    try:
        storage.set(0, trajectory(1)[0])
    except SharingError as error:
        queue.put(("refused", str(error), len(storage), int(storage.get(3)["action"])))
    else:
        queue.put(("written", "", 0, 0))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_can_read_but_not_write() -> None:
    storage = CompressedStorage(20)
    data = trajectory(10)
    storage.set(range(10), data)
    context = mp.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_write_in_child, args=(storage, queue))
    child.start()
    said = queue.get(timeout=60)
    child.join(60)

    assert said[0] == "refused"
    assert "Ray" in said[1]
    assert said[2:] == (10, int(data["action"][3]))
    assert len(storage) == 10


# ---- a real game ----


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
def test_a_real_game_takes_less_than_a_fiftieth_of_the_memory() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    native_steps = importlib.import_module("benchmarks.feed").native_steps

    ours, theirs = pair(1000)
    for step in native_steps("ms_pacman", 300):
        data = TensorDict(
            {
                "observation": torch.from_numpy(step.obs),
                "next": {"observation": torch.from_numpy(step.next_obs), "done": torch.from_numpy(step.dones.copy())},
            },
            batch_size=[len(step.obs)],
        )
        for buffer in (ours, theirs):
            buffer.extend(data.clone())
    same_samples(ours, theirs)
    usage = ours.storage.memory_usage()
    assert ours.storage.table.groups[0].store.n_streams == 4
    assert usage.total < 0.02 * usage.dense


def test_prefer_is_for_keys_that_are_left_to_auto() -> None:
    storage = CompressedStorage(100, compression_method={"a": "gzip1"}, prefer="memory")
    assert storage.compression("a") == ("gzip1", {})
    assert storage.compression("b") == ("auto", {"prefer": "memory"})
    with pytest.raises(CodecOptionError, match="is for compression_method='auto', got 'gzip1'"):
        CompressedStorage(100, compression_method="gzip1", prefer="memory")
