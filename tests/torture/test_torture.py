"""The short form of `make torture`."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest

from sb3_extra_buffers.stores.locks import ReaderLocks
from tests.torture import arguments, copies, flips, forgery, interrupts, kills, power_cuts, starvation
from tests.torture.interrupts import Injector
from tests.torture.saveables import saveables
from tests.torture.subjects import subjects

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    # is multi-threaded: what forks is pytest, not us
    pytest.mark.filterwarnings("ignore:This process"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def _of(names: tuple[str, ...] | list[str], there: dict[str, object]) -> list[str]:
    """Those of ``names`` whose packages are installed."""
    return [name for name in names if name in there]


SUBJECTS: dict[str, object] = dict(subjects())
SAVEABLES: dict[str, object] = dict(saveables())
#: the long form forges and damages all kinds
FORGED = ["delta", "gzip", "none", "mmap", "prioritized", "sequence", "dict", "her", "recurrent-rollout", "gpu-delta",
          "gpu-zstd", "array-delta", "torchrl-delta", "recording", "embodied", "experience",
          "service"]  # fmt: skip


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_an_interrupted_add_leaves_the_state_before_or_after_the_step(name: str) -> None:
    # a storage of TorchRL takes long to make
    interrupts.torture(name, 9 if "torchrl" in name else 18, seed=1).check()


@pytest.mark.parametrize("name", _of(["delta", "zstd"], SUBJECTS))
def test_an_interrupted_add_is_whole_with_the_reference_kernels(name: str) -> None:
    interrupts.torture(name, 12, seed=1, reference=True).check()


@pytest.mark.parametrize("name", _of(starvation.KINDS, SUBJECTS))
def test_a_failed_allocation_of_an_array_changes_nothing(name: str) -> None:
    report = starvation.starve_arrays(name, seed=1, steps_at=(1, 11, 33))

    # some kinds allocate nothing at these steps
    assert not report.defects, report.distinct()


@pytest.mark.skipif(not starvation.can_starve_objects(), reason="needs CPython's _testcapi")
@pytest.mark.parametrize("name", _of(["delta", "none"], SUBJECTS))
def test_a_failed_allocation_of_the_interpreter_changes_nothing(name: str) -> None:
    starvation.starve_objects(name, seed=1, every=29, steps_at=(1, 12)).check()


@pytest.mark.parametrize("name", _of(["delta", "zstd", "mmap"], SUBJECTS))
def test_a_full_address_space_changes_nothing(name: str) -> None:
    starvation.starve_of_space(name, 8, seed=1).check()


@pytest.mark.parametrize("name", _of(FORGED, SAVEABLES))
def test_a_forged_file_is_refused_or_harmless(name: str) -> None:
    forgery.torture(name, 40, seed=1).check()


@pytest.mark.parametrize("name", list(power_cuts.scenarios()))
def test_what_was_promised_is_there_after_a_power_cut(name: str) -> None:
    power_cuts.torture(name, 30, seed=1).check()


@pytest.mark.parametrize("name", _of(FORGED, SAVEABLES))
def test_damage_is_named_or_harmless(name: str) -> None:
    flips.torture(name, 25, seed=1).check()


@pytest.mark.parametrize("name", _of([*kills.SAVED, *kills.LIVE], SAVEABLES))
def test_a_writer_that_is_killed_leaves_a_whole_state(name: str) -> None:
    report = kills.torture(name, 6, seed=1)

    report.check()
    assert report.outcomes["the newest"] + report.outcomes["the one before"] > 0


@pytest.mark.parametrize("how", [*copies.COPIES, "fork"])
@pytest.mark.parametrize("name", _of(["delta", "her", "gpu-delta", "torchrl-delta"], SUBJECTS))
def test_a_copy_beside_a_writer_is_a_state_between_two_steps(name: str, how: str) -> None:
    copies.torture(name, how, 16, seed=1).check()


def test_a_second_writer_of_a_folder_is_refused() -> None:
    assert copies.second_writer() is None


@pytest.mark.parametrize("name", _of(list(arguments.CLASSES.values()), SAVEABLES))
def test_bad_arguments_are_named_and_change_nothing(name: str) -> None:
    arguments.torture(name, stride=4).check()


@pytest.mark.parametrize("name", _of(list(arguments.CLASSES.values()), SAVEABLES))
def test_what_sb3_takes_is_taken(name: str) -> None:
    assert arguments.generous(name) == []


@pytest.mark.parametrize("name", _of(list(arguments.CLASSES.values()), SAVEABLES))
def test_every_public_method_is_tried(name: str) -> None:
    assert arguments.uncovered(name) == []


def test_an_injected_interrupt_leaves_no_lock_acquired() -> None:
    """Python handles no signals between the body of a `with` and the call of ``__exit__``."""
    interrupted, at = True, 0
    while interrupted:
        at += 1
        with contextlib.suppress(KeyboardInterrupt), Injector(at, KeyboardInterrupt()) as injector:
            ReaderLocks().add_stripe()
        interrupted = injector.where != ""
        other = threading.Thread(target=ReaderLocks().add_stripe, daemon=True)
        other.start()
        other.join(20)
        assert not other.is_alive(), f"a lock is still acquired after an interrupt at bytecode {at}"
    assert at > 10
