"""This version loads the folders that earlier versions saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from sb3_extra_buffers import files
from tests.replay_buffers.golden import MAKERS, SAVED
from tests.replay_buffers.trajectories import assert_same, trajectory


def contents(made: Any) -> Any:
    if hasattr(made, "sample_all"):
        return made.sample_all()
    storage = getattr(made, "storage", made)
    storage.check()
    return storage.get(torch.arange(len(storage)))


@pytest.mark.parametrize("name", MAKERS)
def test_golden_folders_load_and_save_again(name: str, tmp_path: Path) -> None:
    loaded, expected = files.load(SAVED / name), MAKERS[name]()
    assert_same(contents(loaded), contents(expected))
    assert len(contents(loaded)) == 40
    files.save(loaded, tmp_path / "again")
    assert_same(contents(files.load(tmp_path / "again")), contents(expected))
    assert list(files.verify(SAVED / name)) == []


def test_loaded_golden_folders_can_be_written_to() -> None:
    storage, experience = files.load(SAVED / "torchrl-storage"), files.load(SAVED / "experience")
    storage.set(range(20, 40), trajectory(20, 1, seed=13))
    assert_same(storage.get(torch.arange(20, 40)), trajectory(20, 1, seed=13))
    assert experience.metadata == {"buffer_size": 40, "data_size": 40, "pointer": 10}
    state = files.load(SAVED / "replay-service")
    assert state.writer == {"_cursor": 20, "_write_count": 60}
    assert state.clients["a"][0] == 3
    assert state.clients["a"][1].tolist() == [4, 5]
