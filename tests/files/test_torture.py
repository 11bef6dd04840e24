"""The short form of `make torture`."""

from __future__ import annotations

import os

import pytest

from tests.files.torture import forge, fuzz, kill_live, kill_writers

NAMES = ["replay-delta", "replay-gzip", "dict", "her", "rollout", "gpu-frames", "array"]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_named_or_harmless(name: str) -> None:
    outcomes = fuzz(name, 60, seed=1)

    assert outcomes["DamagedFileError"] > 10
    # a GPU buffer cannot be cut: what is repaired there goes back to the save before, if that is whole
    if name != "gpu-frames":
        assert outcomes["repaired"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_forged_files_are_refused_or_harmless(name: str) -> None:
    assert forge(name, 60, seed=1)["FileFormatError"] > 10


@needs_fork
@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded: what forks is pytest, not us
def test_a_writer_that_is_killed_leaves_a_whole_state() -> None:
    outcomes = kill_writers("replay-delta", 12, seed=1)

    assert outcomes.total() == 12


@needs_fork
@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("name", ["replay-delta", "her"])
def test_a_live_file_has_every_step_that_was_completed(name: str) -> None:
    outcomes = kill_live(name, 10, seed=1)

    assert outcomes.total() == 10
