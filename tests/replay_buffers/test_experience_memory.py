"""`ReplayBuffer` behaves as documented, with memory-mapped and with compressed storage."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

from sb3_extra_buffers.errors import (
    ArgumentError,
    DamagedFileError,
    EmptyBufferError,
    FileFormatError,
    IndexOutOfRangeError,
    SpecMismatchError,
    UnknownFieldError,
)
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
from sb3_extra_buffers.replay_buffers.experience_memory import ReplayBuffer
from tests.replay_buffers.trajectories import assert_same, trajectory

CPU = torch.device("cpu")
STORAGES = ["auto", "compressed"]


def make(storage: Any, size: int = 50, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(device=CPU, storing_device=CPU, buffer_size=size, storage=storage, **options)


@pytest.fixture(params=STORAGES)
def buffer(request: pytest.FixtureRequest) -> ReplayBuffer:
    """Return a buffer of size 50 that 60 tuples were added to."""
    made = make(request.param)
    for experience in trajectory(60)[:25]:
        made.add(experience)
    made.add_batch(trajectory(60)[25:])
    return made


def stored() -> TensorDict:
    """Return the contents of ``buffer`` in storage order."""
    data = trajectory(60)
    return torch.cat([data[50:], data[10:50]])


def test_the_documented_signatures() -> None:
    parameters = list(inspect.signature(ReplayBuffer).parameters.values())
    assert [p.name for p in parameters[:4]] == ["device", "storing_device", "buffer_size", "print_gc_warning"]
    assert parameters[3].default is False
    names = {
        "reset": ["buffer_size"],
        "add": ["experience"],
        "add_batch": ["batch"],
        "sample_batch": ["batch_size"],
        "sample_random": ["batch_size"],
        "sample_by_index": ["indices"],
        "sample_by_index_fields": ["indices", "fields"],
        "sample_all": [],
        "get_next_batch": ["batch_size"],
        "load": ["path"],
    }
    for name, expected in names.items():
        assert list(inspect.signature(getattr(ReplayBuffer, name)).parameters)[1:] == expected
    assert list(inspect.signature(ReplayBuffer.save).parameters)[1:2] == ["path"]
    assert list(inspect.signature(ReplayBuffer.create_epoch_iterator).parameters)[1:3] == ["batch_size", "n_epochs"]
    assert list(inspect.signature(ReplayBuffer.calculate_num_batches).parameters)[1:2] == ["batch_size"]
    steps = inspect.signature(ReplayBuffer.get_steps_and_iterator).parameters
    assert list(steps)[1:4] == ["n_epochs", "max_iter", "batch_size"]


def test_an_empty_buffer_is_true_and_describes_itself() -> None:
    buffer = make("compressed", size=5000)
    assert buffer
    assert repr(buffer) == "ReplayBuffer(0 of 5,000 tuples, storage='compressed')"


def test_storage_class_by_device_and_option() -> None:
    plain, compressed = make("auto"), make("compressed")
    assert isinstance(plain.memory, TensorDictReplayBuffer)
    assert isinstance(plain._get_storage(9, CPU), LazyMemmapStorage)
    for device in ("cuda", "mps"):
        storage = plain._get_storage(9, torch.device(device, 0))
        assert type(storage) is LazyTensorStorage
        assert storage.device.type == device
    assert isinstance(compressed._get_storage(9, CPU), CompressedStorage)


def test_sample_by_index_returns_what_was_added(buffer: ReplayBuffer) -> None:
    expected = stored()
    assert len(buffer) == buffer.size == 50
    assert_same(buffer.sample_by_index([0, 5, 9]).exclude("index"), expected[[0, 5, 9]])
    assert_same(buffer.sample_by_index(range(10, 20, 3)).exclude("index"), expected[10:20:3])
    assert_same(buffer.sample_by_index(torch.tensor([-1, 3])).exclude("index"), expected[[-1, 3]])
    assert_same(buffer.sample_all().exclude("index"), expected)


def test_sample_by_index_fields(buffer: ReplayBuffer) -> None:
    expected = stored()
    one = buffer.sample_by_index_fields([0, 5], fields=["observation"])
    assert torch.equal(one, expected["observation"][[0, 5]])
    several = buffer.sample_by_index_fields([0, 5], fields=["action", ("next", "observation")])
    assert isinstance(several, tuple)
    assert torch.equal(several[0], expected["action"][[0, 5]])
    assert torch.equal(several[1], expected["next", "observation"][[0, 5]])


def test_random_batches_hold_stored_tuples_and_follow_the_seed() -> None:
    buffers = [make(storage) for storage in STORAGES]
    batches = []
    for buffer in buffers:
        buffer.add_batch(trajectory(30))
        torch.manual_seed(3)
        batches.append([buffer.sample_batch(64), buffer.sample_random(8)])
    for one, other in zip(*batches, strict=True):
        assert_same(one, other)
    assert batches[0][0].shape == (64,)
    assert set(batches[0][0]["index"].tolist()) <= set(range(30))
    assert len(set(batches[0][0]["index"].tolist())) > 15


def test_every_epoch_visits_each_tuple_once_in_a_new_order(buffer: ReplayBuffer) -> None:
    batches = list(buffer.create_epoch_iterator(batch_size=10, n_epochs=3))
    assert len(batches) == 15
    epochs = [torch.cat([batch["index"] for batch in batches[5 * epoch : 5 * epoch + 5]]) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(50))
    assert not torch.equal(epochs[0], epochs[1])

    in_order = list(buffer.create_epoch_iterator(batch_size=20, shuffle=False))
    assert [len(batch) for batch in in_order] == [20, 20, 10]
    assert torch.cat([batch["index"] for batch in in_order]).tolist() == list(range(50))
    full_only = buffer.create_epoch_iterator(batch_size=20, n_epochs=2, shuffle=False, drop_last=True)
    assert [len(batch) for batch in full_only] == [20] * 4


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 10, 49, 50, 51, 200])
def test_as_many_batches_as_calculated(buffer: ReplayBuffer, batch_size: int, drop_last: bool) -> None:
    batches = list(buffer.create_epoch_iterator(batch_size, n_epochs=2, drop_last=drop_last))
    assert len(batches) == 2 * buffer.calculate_num_batches(batch_size, drop_last=drop_last)
    assert len(batches) == buffer.get_steps_and_iterator(2, 0, batch_size, drop_last=drop_last)
    assert sum(map(len, batches)) == 2 * (50 // batch_size * batch_size if drop_last else 50)


def test_steps_by_epochs_and_by_max_iter(buffer: ReplayBuffer) -> None:
    assert buffer.calculate_num_batches(16) == 4
    n_steps = buffer.get_steps_and_iterator(n_epochs=2, max_iter=99, batch_size=16)
    assert n_steps == 8
    seen = [buffer.get_next_batch(16)["index"] for _ in range(n_steps)]
    for epoch in (seen[:4], seen[4:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(50))
    # after the last epoch: random batches of the given size
    assert buffer.get_next_batch(7).shape == (7,)

    assert buffer.get_steps_and_iterator(n_epochs=0, max_iter=5, batch_size=16) == 5
    assert buffer.get_next_batch(9).shape == (9,)


def test_reset_empties_and_resizes(buffer: ReplayBuffer) -> None:
    iterator = buffer.create_epoch_iterator(10)
    next(iterator)
    buffer.reset()
    assert (len(buffer), buffer.buffer_size) == (0, 50)
    with pytest.raises(EmptyBufferError, match="reset"):
        next(iterator)
    buffer.reset(buffer_size=7)
    # an empty buffer accepts another shape
    buffer.add_batch(TensorDict({"x": torch.arange(9)}, batch_size=[9]))
    assert (len(buffer), buffer.buffer_size) == (7, 7)


def test_reset_warns_before_garbage_collection_on_request() -> None:
    buffer = ReplayBuffer(CPU, CPU, 5, print_gc_warning=True)
    with pytest.warns(UserWarning, match="garbage collector"):
        buffer.reset()


def test_batches_are_moved_to_the_device(buffer: ReplayBuffer) -> None:
    buffer.device = torch.device("meta")
    assert buffer.sample_batch(3)["observation"].device.type == "meta"
    assert buffer.sample_by_index_fields([1], ["action"]).device.type == "meta"
    assert buffer.sample_all()["next", "observation"].device.type == "meta"


def test_add_does_not_modify_its_argument(buffer: ReplayBuffer) -> None:
    batch = trajectory(3)
    buffer.add_batch(batch)
    assert "index" not in batch.keys()  # noqa: SIM118  # a TensorDict is no dict


def test_plain_dicts_are_accepted_and_objects_are_not(buffer: ReplayBuffer) -> None:
    batch = trajectory(3)
    buffer.add(batch[0].to_dict())
    buffer.add_batch(batch.to_dict())
    assert_same(buffer.sample_by_index(range(10, 14)).exclude("index"), batch[[0, 0, 1, 2]])
    batch["name"] = "a string"
    with pytest.raises(SpecMismatchError, match="name"):
        buffer.add_batch(batch)


# ---- files ----


def test_save_and_load_metadata_only(buffer: ReplayBuffer, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "buffer.v1"
    buffer.save(str(path))
    assert [file.name for file in path.parent.iterdir()] == ["buffer.v1.metadata"]
    saved = json.loads((tmp_path / "deep" / "buffer.v1.metadata").read_text())
    assert {name: saved[name] for name in ("buffer_size", "data_size", "pointer")} == buffer.metadata

    other = make(buffer.storage, 9)
    other.add_batch(trajectory(4))
    other.load(str(path))
    assert other.loaded_metadata == {"buffer_size": 50, "data_size": 50, "pointer": 10}
    assert (other.buffer_size, other.data_size, other.pointer) == (50, 4, 4)
    # loading its own metadata keeps the experience
    buffer.load(str(path))
    assert (len(buffer), buffer.data_size, buffer.pointer) == (50, 50, 10)


@pytest.mark.parametrize(("n_added", "capacity"), [(0, 30), (5, 30), (20, 30), (33, 30), (33, 20), (33, 7)])
def test_metadata_of_another_capacity_keeps_the_experience(
    buffer: ReplayBuffer, tmp_path: Path, n_added: int, capacity: int
) -> None:
    make(buffer.storage, capacity).save(tmp_path / "buffer")
    other = make(buffer.storage, 20)
    added = trajectory(50)
    if n_added:
        other.add_batch(added[:n_added])
    kept = min(n_added, 20)
    other.load(tmp_path / "buffer")
    assert len(other) == kept
    assert other.buffer_size == (capacity if capacity >= kept else 20)
    other.add_batch(added[n_added : n_added + 2])
    newest = added[: n_added + 2][-min(kept + 2, other.buffer_size) :]
    found = other.sample_all().exclude("index")
    oldest = other.pointer if len(other) == other.buffer_size else 0
    for key, column in newest.items(True, True):
        assert torch.equal(found[key].roll(-oldest, 0), column)


def test_save_and_load_with_contents(buffer: ReplayBuffer, tmp_path: Path) -> None:
    buffer.save(tmp_path / "buffer", contents=True)
    buffer.save(tmp_path / "buffer", contents=True)
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pkl", ".pickle")]
    assert len(list(tmp_path.iterdir())) == 2

    again = make(buffer.storage, 3)
    again.load(tmp_path / "buffer")
    assert again.metadata == buffer.metadata
    for one in (again, buffer):
        one.add_batch(trajectory(5, seed=4))
    assert_same(again.sample_all(), buffer.sample_all())
    with pytest.raises(SpecMismatchError):
        again.add(TensorDict({"x": torch.zeros(2)}))


def damage_files(folder: Path, damage: str) -> None:
    metadata = folder / "buffer.metadata"
    contents = next(path for path in folder.iterdir() if path.is_dir())
    if damage == "nothing":
        metadata.unlink()
    elif damage == "text":
        metadata.write_text("hello")
    elif damage == "another file":
        metadata.write_text('{"format": "mine"}')
    elif damage == "a number is gone":
        metadata.write_text(metadata.read_text().replace("pointer", "painter"))
    elif damage == "numbers that cannot be":
        metadata.write_text(metadata.read_text().replace('"pointer": 10', '"pointer": 50'))
    elif damage == "numbers of another":
        metadata.write_text(metadata.read_text().replace('"pointer": 10', '"pointer": 11'))
    else:
        for path in contents.rglob("*.json"):
            path.unlink()


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        ("nothing", FileFormatError),
        ("text", FileFormatError),
        ("another file", FileFormatError),
        ("a number is gone", DamagedFileError),
        ("no contents", (DamagedFileError, FileFormatError)),
        ("numbers that cannot be", FileFormatError),
        ("numbers of another", DamagedFileError),
    ],
)
def test_a_failed_load_changes_nothing(buffer: ReplayBuffer, tmp_path: Path, damage: str, error: Any) -> None:
    buffer.save(tmp_path / "buffer", contents=True)
    damage_files(tmp_path, damage)
    target = make(buffer.storage, 20)
    target.add_batch(trajectory(8))

    with pytest.raises(error):
        target.load(tmp_path / "buffer")
    assert (len(target), target.buffer_size, target.loaded_metadata) == (8, 20, None)


def test_loading_the_contents_of_another_storage_kind_raises(tmp_path: Path) -> None:
    buffer = make("compressed")
    buffer.add_batch(trajectory(8))
    buffer.save(tmp_path / "buffer", contents=True)
    with pytest.raises(FileFormatError, match="storage='auto'"):
        make("auto").load(tmp_path / "buffer")


# ---- bad input ----


@pytest.mark.parametrize("change", ["missing", "new", "shape", "dtype"])
def test_experience_that_differs_from_the_first_raises(buffer: ReplayBuffer, change: str) -> None:
    before = buffer.sample_all()
    batch = trajectory(4)
    if change == "missing":
        batch = batch.exclude("action")
    elif change == "new":
        batch["more"] = torch.zeros(4)
    elif change == "shape":
        batch["action"] = torch.zeros(4, 2, dtype=torch.int64)
    else:
        batch["next", "observation"] = batch["observation"].float()

    with pytest.raises(SpecMismatchError, match="nothing was stored"):
        buffer.add_batch(batch)
    with pytest.raises(SpecMismatchError, match="nothing was stored"):
        buffer.add(batch[0])
    assert buffer.metadata["pointer"] == 10
    assert_same(buffer.sample_all(), before)


def test_sampling_from_an_empty_buffer_raises() -> None:
    buffer = make("auto")
    with pytest.raises(EmptyBufferError, match="empty"):
        buffer.sample_batch(4)
    with pytest.raises(EmptyBufferError):
        buffer.sample_all()
    assert buffer.calculate_num_batches(4) == 0
    assert list(buffer.create_epoch_iterator(4)) == []


def test_unknown_indices_and_fields_are_in_the_error(buffer: ReplayBuffer) -> None:
    for indices in ([50], [-51], torch.tensor([3, 99])):
        with pytest.raises(IndexOutOfRangeError, match="out of range"):
            buffer.sample_by_index(indices)
    with pytest.raises(IndexOutOfRangeError, match="integers"):
        buffer.sample_by_index(torch.tensor([0.5]))
    with pytest.raises(UnknownFieldError, match="reward"):
        buffer.sample_by_index_fields([0], ["reward"])
    with pytest.raises(UnknownFieldError, match="at least one"):
        buffer.sample_by_index_fields([0], [])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda b: b.sample_batch(0), ValueError),
        (lambda b: b.sample_batch(2.5), ArgumentError),
        (lambda b: b.create_epoch_iterator(4, n_epochs=-1), ValueError),
        (lambda b: b.reset(buffer_size=0), ValueError),
        (lambda b: b.add(trajectory(3)), SpecMismatchError),
        (lambda b: b.add_batch(trajectory(3)[0]), SpecMismatchError),
        (lambda b: b.add_batch([1, 2]), SpecMismatchError),
    ],
)
def test_invalid_arguments_raise(buffer: ReplayBuffer, call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call(buffer)
    assert len(buffer) == 50


def test_invalid_options_raise() -> None:
    with pytest.raises(ValueError, match="storage"):
        make("zip")
    with pytest.raises(ValueError, match="n_envs"):
        make("auto", n_envs=4)
