"""Spawned processes use the storage of the process that created it."""

from __future__ import annotations

import copy
import gc
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchrl")

from torch import multiprocessing as mp
from torchrl.data import TensorDictReplayBuffer

from sb3_extra_buffers._torchrl.sharing import RemoteGroup
from sb3_extra_buffers.errors import SharingError, SpecMismatchError
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
from tests.replay_buffers.trajectories import assert_same, steps, trajectory


def child(buffer: Any, asked: Any, answers: Any) -> None:
    """Carry out requests in a spawned process."""
    while True:
        request = asked.get(timeout=60)
        try:
            if request == "write":
                answers.put(buffer.extend(trajectory(30, seed=7)).tolist())
            elif request == "replace":
                buffer[3] = trajectory(1, seed=9)[0]
                buffer.set_at_("observation", trajectory(2, seed=11)["observation"], torch.tensor([5, 6]))
                answers.put(len(buffer))
            elif request == "read":
                answers.put(buffer[:].clone())
            elif request == "sample":
                torch.manual_seed(3)
                answers.put(buffer.sample(8))
            elif request == "bad":
                buffer.extend(trajectory(3).exclude("action"))
            elif request == "copy":
                copy.deepcopy(buffer.storage)
            elif request == "describe":
                answers.put(repr(buffer[:]["observation"]))
            else:
                return
        except (SharingError, SpecMismatchError) as error:
            answers.put(f"{type(error).__name__}: {error}")


def test_a_spawned_process_reads_and_writes_the_same_storage() -> None:
    buffer = TensorDictReplayBuffer(storage=CompressedStorage(60), batch_size=8).share(True)
    twin = TensorDictReplayBuffer(storage=CompressedStorage(60), batch_size=8)
    for data in steps(20, 2):
        buffer.extend(data.clone())
        twin.extend(data.clone())
    context = mp.get_context("spawn")
    asked, answers = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(buffer, asked, answers), daemon=True)
    process.start()

    def ask(request: str) -> Any:
        asked.put(request)
        return answers.get(timeout=60)

    # n_envs was detected early, because it cannot change after sharing
    assert buffer.storage.table.groups[0].store.n_streams == 2
    assert ask("write") == twin.extend(trajectory(30, seed=7)).tolist()
    assert len(buffer) == 60
    assert_same(buffer[:].clone(), twin[:].clone())

    revision = buffer.storage._mutation_revision
    assert ask("replace") == 60
    twin[3] = trajectory(1, seed=9)[0]
    twin.set_at_("observation", trajectory(2, seed=11)["observation"], torch.tensor([5, 6]))
    for one in (buffer, twin):
        one.extend(trajectory(4, seed=13))
    assert_same(buffer[:].clone(), twin[:].clone())
    assert_same(ask("read"), twin[:].clone())
    assert buffer.storage._mutation_revision > revision
    torch.manual_seed(3)
    assert_same(ask("sample"), twin.sample(8))
    buffer.storage.check()

    assert "first item" in ask("bad")
    assert "SharingError" in ask("copy")
    assert "delta" in ask("describe")
    with pytest.raises(SharingError, match="before they are started"):
        buffer.storage.load_state_dict(twin.storage.state_dict())
    assert_same(copy.deepcopy(buffer.storage)[:].clone(), twin[:].clone())
    asked.put("end")
    process.join(60)
    assert process.exitcode == 0


def test_requests_raise_after_the_storage_is_gone() -> None:
    data = trajectory(10)
    storage = CompressedStorage(20)
    storage.set(range(10), data)
    storage._share()
    assert storage._server is not None
    remote = RemoteGroup(storage._server.address, 0, storage.table.groups[0])
    with pytest.raises(AuthenticationError):
        Client(storage._server.address, authkey=b"somebody else's")
    first, following = remote.read(np.arange(10))
    assert torch.equal(first, data["observation"])
    assert torch.equal(following, data["next", "observation"])
    assert remote.describe() == storage.table.groups[0].describe()

    del storage
    gc.collect()
    with pytest.raises(SharingError, match="has ended"):
        remote.read(np.arange(10))


def test_sharing_an_empty_storage_raises() -> None:
    process = mp.get_context("spawn").Process(target=child, args=(CompressedStorage(20), None, None))
    with pytest.raises(SharingError, match="initialized"):
        process.start()
