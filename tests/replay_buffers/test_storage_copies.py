"""Copies made while another thread writes are consistent; invalid arguments raise named errors."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from sb3_extra_buffers import files
from sb3_extra_buffers.errors import ExtraBuffersError, IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.replay_buffers import CompressedEmbodiedReplay
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
from sb3_extra_buffers.replay_buffers.experience_memory import ReplayBuffer
from tests.replay_buffers.trajectories import assert_same, trajectory

N_ITEMS = 24


def numbered(number: int) -> TensorDict:
    """Return items that all carry ``number``, in compressed and in dense leaves."""
    data = trajectory(N_ITEMS, 2, seed=3)[:N_ITEMS]
    data["observation"][:, :, :2] = number % 251
    data["next", "observation"][:, :, :2] = number % 251
    data["action"][:] = number
    return data


def is_consistent(storage: Any) -> bool:
    """Whether all items of ``storage`` come from one write."""
    data = storage.get(torch.arange(len(storage)))
    [number] = set(data["action"].tolist())
    marks = torch.cat([data["observation"][:, :, :2].ravel(), data["next", "observation"][:, :, :2].ravel()])
    return len(data) == N_ITEMS and bool((marks == number % 251).all())


def check_during_writes(storage: Any, look: Callable[[], bool], times: int) -> None:
    over, failed = threading.Event(), []

    def write() -> None:
        number = 1
        try:
            while not over.is_set():
                storage.set(torch.arange(N_ITEMS), numbered(number), set_cursor=False)
                number += 1
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert all(look() for _ in range(times))
    finally:
        over.set()
        thread.join()
    assert not failed


@pytest.fixture
def storage() -> CompressedStorage:
    made = CompressedStorage(N_ITEMS, n_envs=2)
    made.set(torch.arange(N_ITEMS), numbered(0))
    return made


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "state", "get"])
def test_a_copy_made_during_writes_is_consistent(storage: CompressedStorage, way: str) -> None:
    def look() -> bool:
        if way == "get":
            return is_consistent(storage)
        if way == "state":
            again = CompressedStorage(N_ITEMS, n_envs=2)
            again.load_state_dict(storage.state_dict())
            return is_consistent(again)
        copied = pickle.loads(pickle.dumps(storage)) if way == "pickle" else copy.deepcopy(storage)
        copied.check()
        return is_consistent(copied)

    check_during_writes(storage, look, 25)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_during_writes_reads_consistent_items(storage: CompressedStorage) -> None:
    def look() -> bool:
        child = os.fork()
        if not child:
            # exit without the cleanup of the test process
            code = 1
            try:
                storage.check()
                code = 0 if is_consistent(storage) else 2
            finally:
                os._exit(code)
        return os.waitpid(child, 0)[1] == 0

    check_during_writes(storage, look, 15)


# ---- bad arguments ----


@pytest.mark.parametrize(
    "options",
    [
        {"max_size": 0}, {"max_size": -3}, {"max_size": 2.5}, {"max_size": "9"}, {"max_size": float("nan")},
        {"max_size": None}, {"max_size": True}, {"max_size": 1 << 80}, {"ndim": 0}, {"ndim": "x"}, {"n_envs": 0},
        {"n_envs": 1.5}, {"n_envs": 2, "ndim": 2}, {"device": "nowhere"}, {"device": 3.5}, {"compression_method": 3},
        {"compression_method": "nosuch"}, {"compression_method": {"a": None}}, {"compression_method": {"a": "nosuch"}},
        {"compression_kwargs": 3}, {"compression_kwargs": {"level": 1}, "compression_method": "nosuch"},
        {"compression_kwargs": {"nosuch": 1}, "compression_method": "gzip"},
    ],
)  # fmt: skip
def test_invalid_options_raise(options: dict[str, Any]) -> None:
    with pytest.raises(ExtraBuffersError):
        CompressedStorage(**{"max_size": 10, **options})


@pytest.mark.parametrize("cursor", [99, -99, [0, 99], "x", None, 1.5, torch.rand(3), object(), slice("a", "b"), {}])
def test_writing_to_an_invalid_cursor_raises_and_changes_nothing(cursor: Any) -> None:
    buffer: Any = TensorDictReplayBuffer(storage=CompressedStorage(30, n_envs=1), batch_size=4)
    buffer.extend(trajectory(20))
    before = buffer[:].clone()
    with pytest.raises((IndexOutOfRangeError, SpecMismatchError)):
        buffer.storage.set(cursor, trajectory(3))
    assert_same(buffer[:].clone(), before)
    assert buffer.writer._cursor == 20


@pytest.mark.parametrize("data", [None, 3, "text", [], [1, 2], {}, np.zeros(3), object(), {"a": "text"}, [None, None]])
def test_storing_anything_but_tensors_raises_and_changes_nothing(data: Any) -> None:
    for storage in (CompressedStorage(30), CompressedStorage(30, n_envs=1)):
        if storage.n_envs:
            storage.set(range(20), trajectory(20))
        before = len(storage), storage.initialized
        with pytest.raises(SpecMismatchError):
            storage.set(range(2), data)
        assert (len(storage), storage.initialized) == before


def test_arrays_and_lists_as_cursors() -> None:
    storage = CompressedStorage(30, n_envs=1)
    data: Any = trajectory(20)
    storage.set(np.arange(20), data)
    storage.set([3, 5, 3], data[[7, 8, 9]])
    assert storage._last_cursor_index == 3
    assert_same(storage.get([3, 5]), data[[9, 8]])


@pytest.mark.parametrize("kind", ["storage", "experience", "embodied"])
def test_what_is_intact_is_repaired_to_itself(tmp_path: Path, kind: str) -> None:
    data, saved = trajectory(40), tmp_path / "saved"
    if kind == "storage":
        storage = CompressedStorage(100)
        storage.set(range(40), data)
        storage.dumps(saved)
    elif kind == "experience":
        memory = ReplayBuffer(torch.device("cpu"), torch.device("cpu"), 100, storage="compressed")
        memory.add_batch(data)
        files.save(memory, saved)
    else:
        replay = CompressedEmbodiedReplay(length=5, capacity=100, directory=saved)
        for number in range(40):
            replay.add({"image": np.full((12, 12, 3), number, np.uint8), "is_first": number == 0, "is_last": False})
        replay.save()

    report = files.repair(saved, tmp_path / "repaired")
    assert (report.n_steps, report.n_lost, report.findings) == (40, 0, [])
    assert list(files.verify(tmp_path / "repaired")) == []
    assert len(files.load(tmp_path / "repaired")) == (36 if kind == "embodied" else 40)
