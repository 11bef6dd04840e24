"""`CompressedEmbodiedReplay` against a plain list of steps, through eviction, saves and interrupts."""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import pickle
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_extra_buffers import files
from sb3_extra_buffers.errors import (
    ArgumentError,
    FileFormatError,
    NotSaveableError,
    OutOfMemoryError,
    PriorityError,
    ReadOnlyBufferError,
    SpecMismatchError,
    UnknownCodecError,
    UnknownFieldError,
)
from sb3_extra_buffers.replay_buffers.embodied import CompressedEmbodiedReplay
from sb3_extra_buffers.replay_buffers.selectors import Fifo, Prioritized
from tests.torture.interrupts import Injector

Step = dict[str, Any]


def make_step(worker: int, number: int, episode: int = 10) -> Step:
    """A step that no other step equals; the image moves and has a border that stays."""
    image = np.zeros((24, 24, 3), np.uint8)
    image[number % 20 : number % 20 + 4, worker * 3 : worker * 3 + 3] = 1 + number % 250
    return {
        "image": image,
        "reward": np.float32(number + worker / 8),
        "is_first": np.bool_(number % episode == 0),
        "is_last": np.bool_(number % episode == episode - 1),
        "latent": np.zeros(3, np.float32),
        "worker": np.int32(worker),
        "number": np.int64(number),
    }


class Model:
    """What the replay must hold: a list of steps for each stream, and the windows in the order they were completed."""

    def __init__(self, length: int, capacity: int | None) -> None:
        self.length, self.capacity = length, capacity
        self.streams: dict[Any, list[Step]] = collections.defaultdict(list)
        self.windows: list[tuple[Any, int]] = []

    def add(self, step: Step, worker: Any) -> None:
        stream = self.streams[worker]
        stream.append(step)
        if len(stream) >= self.length:
            self.windows.append((worker, len(stream) - self.length))
            self.windows = self.windows[-self.capacity :] if self.capacity else self.windows

    def contents(self) -> list[list[Step]]:
        return [self.streams[worker][start : start + self.length] for worker, start in self.windows]


def all_windows(replay: CompressedEmbodiedReplay) -> dict[str, np.ndarray[Any, Any]]:
    """Every window, oldest first."""
    n_windows = len(replay)
    windows = list(range(replay._first_window, replay._first_window + n_windows))
    return replay._steps.read(replay._slots_of(windows)) if n_windows else {}  # type: ignore[union-attr]


def assert_holds(replay: CompressedEmbodiedReplay, model: Model) -> None:
    expected = model.contents()
    assert len(replay) == len(expected)
    if not expected:
        return
    found = all_windows(replay)
    for key in expected[0][0]:
        wanted = np.array([[step[key] for step in window] for window in expected])
        np.testing.assert_array_equal(found[key], wanted, err_msg=key)
        assert found[key].dtype == wanted.dtype
    replay.check()


def filled(n_steps: int, n_workers: int = 2, **options: Any) -> tuple[CompressedEmbodiedReplay, Model]:
    replay = CompressedEmbodiedReplay(**{"length": 5, "capacity": 40, **options})
    model = Model(replay.length, replay.capacity)
    for number in range(n_steps):
        for worker in range(n_workers):
            step = make_step(worker, number)
            replay.add(step, worker)
            model.add(step, worker)
    return replay, model


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 7),
    capacity=st.none() | st.integers(1, 60),
    chunksize=st.sampled_from([1, 2, 16, 1024]),
    # workers, and how many steps each adds in a row
    runs=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 1, 2, 10, 40])), min_size=1, max_size=60),
    method=st.sampled_from(["auto", "delta", "none", "zstd-3"]),
    reload=st.booleans(),
)
def test_windows_equal_those_of_a_list_of_steps(
    tmp_path_factory: pytest.TempPathFactory,
    length: int,
    capacity: int | None,
    chunksize: int,
    runs: list[tuple[int, int]],
    method: str,
    reload: bool,
) -> None:
    folder = tmp_path_factory.mktemp("replay")
    options: Any = {"directory": folder, "chunksize": chunksize, "compression_method": method}
    replay, model = CompressedEmbodiedReplay(length, capacity, **options), Model(length, capacity)
    counts: collections.Counter[Any] = collections.Counter()
    workers = [worker for worker, n_steps in runs for _ in range(n_steps)]
    for turn, worker in enumerate(workers):
        if reload and turn == len(workers) // 2:
            replay.save()
            replay = CompressedEmbodiedReplay(length, capacity, **options)
            replay.load()
            # workers begin new streams
            model.streams = collections.defaultdict(list, {("old", key): steps for key, steps in model.streams.items()})
            model.windows = [(("old", worker), start) for worker, start in model.windows]
            assert_holds(replay, model)
        step = make_step(worker, counts[worker])
        counts[worker] += 1
        replay.add(step, worker)
        model.add(step, worker)
        replay.check()
    assert_holds(replay, model)


@pytest.mark.parametrize("n_steps", [19, 20, 21, 32, 36])
def test_a_worker_goes_on_after_all_its_windows_were_evicted(n_steps: int) -> None:
    replay, model = filled(n_steps, n_workers=1)
    for worker, count in ((1, 200), (0, 30), (1, 20)):
        for number in range(count):
            step = make_step(worker, number)
            replay.add(step, worker)
            model.add(step, worker)
    assert_holds(replay, model)


def test_batches_have_the_keys_shapes_and_annotations_of_embodied() -> None:
    replay, _ = filled(60)
    batch = replay.sample(16)

    assert list(batch) == [*make_step(0, 0), "stepid"]
    assert batch["image"].shape == (16, 5, 24, 24, 3)
    assert batch["stepid"].shape == (16, 5, 20)
    assert batch["stepid"].dtype == np.uint8
    assert len({step.tobytes() for step in batch["stepid"].reshape(-1, 20)}) == len(
        {(int(worker), int(number)) for worker, number in zip(batch["worker"].flat, batch["number"].flat, strict=True)}
    )
    assert (np.diff(batch["number"], axis=1) == 1).all()
    assert (batch["worker"] == batch["worker"][:, :1]).all()
    assert batch["is_first"][:, 0].all()
    assert (batch["is_first"][:, 1:] == (batch["number"][:, 1:] % 10 == 0)).all()
    for row, worker, number in zip(batch["image"], batch["worker"], batch["number"], strict=True):
        for image, one, count in zip(row, worker, number, strict=True):
            assert (image == make_step(int(one), int(count))["image"]).all()


def test_episodes_that_were_abandoned_get_a_last_step() -> None:
    replay = CompressedEmbodiedReplay(4, 100)
    for number in range(30):
        replay.add({"is_first": number % 7 == 0, "is_last": False, "number": number})
    batch = replay.sample(64)

    expected = batch["number"] % 7 == 6
    expected[:, -1] = False
    assert (batch["is_last"] == expected).all()


@pytest.mark.parametrize(("first", "last"), [("u1", "?"), ("?", "u1"), ("f4", "f4"), ("f4", "?")])
def test_flags_may_be_numbers(first: str, last: str) -> None:
    replay = CompressedEmbodiedReplay(6)
    for number in range(6):
        replay.add({"is_first": np.array(number == 3, first), "is_last": np.array(number == 5, last)})
    batch = replay.sample(1)
    assert batch["is_first"].tolist() == [[1, 0, 0, 1, 0, 0]]
    assert batch["is_last"].tolist() == [[0, 0, 1, 0, 0, 1]]


def test_every_window_is_drawn_about_equally_often() -> None:
    replay, _ = filled(30)
    counts = collections.Counter(
        (int(window[0]), int(number[0]))
        for _ in range(20)
        for batch in [replay.sample(100)]
        for window, number in zip(batch["worker"], batch["number"], strict=True)
    )

    assert len(counts) == len(replay) == 40
    assert min(counts.values()) > 20
    assert max(counts.values()) < 100


def test_the_online_queue_returns_each_step_once_before_random_windows() -> None:
    replay, _ = filled(20, n_workers=2, online=True)
    report = replay.sample(4, "report")
    first, second = replay.sample(4), replay.sample(8)

    assert report["number"].shape == (4, 5)
    online = np.concatenate([first["number"], second["number"][:4]])
    workers = np.concatenate([first["worker"], second["worker"][:4]])
    assert sorted(zip(workers.flat, online.flat, strict=True)) == [(w, n) for w in range(2) for n in range(20)]
    assert online[0, 0] == 0  # the longest in the queue comes first


def test_the_newest_window_can_be_sampled_at_once() -> None:
    replay = CompressedEmbodiedReplay(4, 50, online=True)
    for number in range(200):
        replay.add(make_step(0, number))
        if number % 4 == 3:
            assert replay.sample(1)["number"][0].tolist() == [number - 3, number - 2, number - 1, number]


def test_windows_that_were_evicted_leave_the_online_queue() -> None:
    replay, _ = filled(100, online=True, capacity=10)
    batch = replay.sample(30)

    assert batch["number"].min() >= 100 - 10 // 2 - 5


def test_update_writes_back_and_skips_evicted_steps() -> None:
    replay, _ = filled(20, n_workers=1, capacity=10, length=4)
    old = replay.sample(8)
    latent = old["number"][..., None].astype(np.float32) * [1, 2, 3]

    assert replay.update({"stepid": old["stepid"], "latent": latent}).all()
    held = {int(number) for number in old["number"].flat}
    for number in range(20, 26):
        replay.add(make_step(0, number))
    found = all_windows(replay)
    for number, value in zip(found["number"].flat, found["latent"].reshape(-1, 3), strict=True):
        assert value.tolist() == ([number, 2 * number, 3 * number] if int(number) in held else [0, 0, 0])

    before = {key: value.copy() for key, value in found.items()}
    written = replay.update({"stepid": old["stepid"], "latent": latent + 1000})
    assert (written == (old["number"] >= found["number"].min())).all()
    after = all_windows(replay)
    assert (after["number"] == before["number"]).all()
    changed = (after["latent"] != before["latent"]).any(axis=-1)
    assert {int(n) for n in after["number"][changed]} == {int(n) for n in old["number"][written]}


def test_keys_without_elements_can_be_updated() -> None:
    replay = CompressedEmbodiedReplay(4, 20)
    for number in range(10):
        replay.add({**make_step(0, number), "objects": np.zeros((0, 3), np.float32)}, 0)
    batch = replay.sample(3)
    assert batch["objects"].shape == (3, 4, 0, 3)
    assert replay.update({"stepid": batch["stepid"], "objects": batch["objects"]}).all()


def test_updates_of_another_replay_are_refused() -> None:
    ours, _ = filled(20)
    theirs, _ = filled(20)
    batch = theirs.sample(4)

    assert not ours.update({"stepid": batch["stepid"], "latent": batch["latent"] + 1}).any()
    assert not all_windows(ours)["latent"].any()


def test_consecutive_parts_share_their_prefix() -> None:
    replay, _ = filled(60, length=9)
    dataset = replay.dataset(3, length=4, prefix=1)
    first, second, third = next(dataset), next(dataset), next(dataset)

    assert first["number"].shape == (3, 5)
    assert (first["number"][:, -1:] == second["number"][:, :1]).all()
    assert [part["consec"][0, 0] for part in (first, second, third)] == [0, 1, 0]
    assert first["is_first"][:, 0].all()
    assert (second["is_first"][:, 0] == (second["number"][:, 0] % 10 == 0)).all()
    with pytest.raises(ArgumentError, match="do not fit"):
        replay.dataset(1, length=5, consec=2)


def test_stats_count_since_the_last_call() -> None:
    replay, _ = filled(20)
    batch = replay.sample(8)
    replay.sample(8, "report")
    replay.update({"stepid": batch["stepid"]})
    stats = replay.stats()

    assert (stats["items"], stats["streams"], stats["inserts"], stats["samples"]) == (32, 2, 32, 8)
    assert stats["updates"] == 40
    assert stats["replay_ratio"] == 5 * 8 / 32
    assert stats["ram_gb"] > 0
    assert replay.stats()["samples"] == 0


def test_images_are_stored_in_a_fraction_of_their_size() -> None:
    replay, _ = filled(2000, capacity=None, n_workers=4)
    usage = replay.memory_usage()

    assert usage.transitions == 8000
    assert usage.dense == 8000 * (24 * 24 * 3 + 4 + 2 + 12 + 4 + 8)
    assert usage.observation_ratio is not None
    assert usage.observation_ratio < 0.1
    assert "image" in usage.codecs


def test_memory_does_not_grow_once_the_replay_is_full() -> None:
    replay, _ = filled(300, capacity=200)
    before = replay.memory_usage()
    for number in range(300, 3000):
        for worker in range(2):
            replay.add(make_step(worker, number), worker)

    assert len(replay._table.by_serial) * replay._table.size < 300
    assert replay.memory_usage().total < 1.5 * before.total


@pytest.mark.parametrize(
    ("problem", "step"),
    [
        ("keys", {"image": np.zeros((24, 24, 3), np.uint8)}),
        ("shape", make_step(0, 0) | {"reward": np.zeros(2, np.float32)}),
        ("cannot hold", make_step(0, 0) | {"reward": np.float64(0.1)}),
        ("dtype", make_step(0, 0) | {"reward": "much"}),
        ("dict", [1, 2]),
    ],
)
def test_invalid_steps_change_nothing(problem: str, step: Any) -> None:
    replay, model = filled(20)
    with pytest.raises(SpecMismatchError, match=problem):
        replay.add(step, 0)
    with pytest.raises(SpecMismatchError):
        replay.add(step, "another worker")
    assert_holds(replay, model)
    assert replay.stats()["streams"] == 2


def test_logs_and_step_ids_are_not_stored() -> None:
    replay = CompressedEmbodiedReplay(2)
    for _ in range(3):
        replay.add({"reward": 1.0, "log/score": "any", "stepid": np.zeros(20, np.uint8)})

    assert set(replay.sample(1)) == {"reward", "stepid"}


def test_invalid_arguments_are_named() -> None:
    for options in (
        {"length": 0}, {"length": 4, "capacity": 0.5}, {"length": 4, "compressed_keys": "image"},
        {"length": 4, "compressed_keys": 1}, {"length": 4, "selector": "uniform"}, {"length": 4, "selector": {}},
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            CompressedEmbodiedReplay(**options)
    with pytest.raises(UnknownCodecError):
        CompressedEmbodiedReplay(4, compression_method="nosuch")
    with pytest.raises(SpecMismatchError, match="compressed_keys"):
        CompressedEmbodiedReplay(4, compressed_keys=["picture"]).add(make_step(0, 0))
    replay, _ = filled(20)
    batch = replay.sample(2)
    for data, error in (
        ({"latent": batch["latent"]}, ArgumentError),
        ({"stepid": batch["stepid"][0]}, SpecMismatchError),
        ({"stepid": batch["stepid"], "latent": batch["latent"][:1]}, SpecMismatchError),
        ({"stepid": batch["stepid"], "image": batch["image"]}, UnknownFieldError),
        ({"stepid": batch["stepid"], "nosuch": batch["latent"]}, UnknownFieldError),
        ({"stepid": batch["stepid"], "priority": batch["reward"]}, ArgumentError),
    ):
        with pytest.raises(error):
            replay.update(data)
    with pytest.raises(ArgumentError, match="mode"):
        replay.sample(2, "play")


# ---- files ----


def test_saves_append_and_load_continues(tmp_path: Path) -> None:
    replay, model = filled(100, directory=tmp_path / "replay")
    replay.save()
    batch = replay.sample(4)
    size = sum(path.stat().st_size for path in (tmp_path / "replay").iterdir())
    for number in range(100, 105):
        step = make_step(0, number)
        replay.add(step, 0)
        model.add(step, 0)
    replay.save()
    assert sum(path.stat().st_size for path in (tmp_path / "replay").iterdir()) < 2 * size

    again = CompressedEmbodiedReplay(5, 40, directory=tmp_path / "replay")
    again.load()
    assert_holds(again, model)
    # ids stay valid
    held = again.update({"stepid": batch["stepid"], "latent": batch["latent"] + 1})
    assert held.any()
    again.load()  # holds it already
    assert_holds_windows_of(again, model)
    again.save()


def assert_holds_windows_of(replay: CompressedEmbodiedReplay, model: Model) -> None:
    assert (all_windows(replay)["number"] == [[step["number"] for step in window] for window in model.contents()]).all()


def test_loading_into_another_length_and_amount(tmp_path: Path) -> None:
    replay, model = filled(100, directory=tmp_path / "replay")
    replay.save()
    longer = CompressedEmbodiedReplay(8, 1000)
    longer.load(directory=tmp_path / "replay")
    windows = all_windows(longer)["number"]
    assert len(longer) == 40 - 2 * 3
    assert (np.diff(windows, axis=1) == 1).all()

    few = CompressedEmbodiedReplay(5, 1000)
    few.load(directory=tmp_path / "replay", amount=7)
    model.windows = model.windows[-7:]
    assert_holds(few, model)
    CompressedEmbodiedReplay(5).load(directory=tmp_path / "nothing")


def test_loading_into_a_replay_that_has_windows_adds_to_them(tmp_path: Path) -> None:
    theirs, model = filled(100, directory=tmp_path / "replay")
    theirs.save()
    ours = CompressedEmbodiedReplay(5, 60)
    for number in range(20):
        ours.add(make_step(3, number), "ours")
    ours.load(directory=tmp_path / "replay")

    assert len(ours) == 16 + 40
    found = all_windows(ours)
    assert (found["worker"][:16] == 3).all()
    wanted = np.array([[step["image"] for step in window] for window in model.contents()])
    np.testing.assert_array_equal(found["image"][16:], wanted)


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("chunksize", [3, 1024])
def test_loading_again_adds_what_another_replay_has_saved_since(tmp_path: Path, has_own: bool, chunksize: int) -> None:
    theirs, _ = filled(20, directory=tmp_path, capacity=1000)
    ours = CompressedEmbodiedReplay(5, 100, chunksize=chunksize)
    for number in range(5 * has_own):
        ours.add(make_step(3, number), "ours")
    theirs.save()
    ours.load(directory=tmp_path)
    assert len(ours) == 2 * 16 + has_own
    n_chunks = len(ours._table.by_serial)
    for turn in range(1, 13):
        for number in range(20 * turn, 20 * turn + 20):
            for worker in range(2):
                theirs.add(make_step(worker, number), worker)
        theirs.save()
        for _ in range(2):
            ours.load(directory=tmp_path)
            numbers = all_windows(ours)["number"]
            # a replay without steps takes over what it loads, and streams end there
            starts = [*range(0 if has_own else 20, 20 * turn + 16)]
            n_new = min(2 * len(starts), 100)
            assert numbers[-n_new:, 0].tolist() == sorted(2 * starts)[-n_new:]
            assert (numbers == numbers[:, :1] + np.arange(5)).all()
            assert len(ours) == min(2 * len(starts) + (1 if has_own else 32), 100)
            ours.check()
    # what only evicted windows needed holds no chunks
    assert len(ours._table.by_serial) <= max(4 * n_chunks, 12)


def test_a_load_that_fails_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, _ = filled(20, directory=tmp_path, capacity=1000)
    theirs.save()
    ours = CompressedEmbodiedReplay(5, 1000)
    ours.add(make_step(3, 0), "ours")
    add, calls = ours._add_step, itertools.count()

    def fail(*args: Any) -> None:
        if next(calls) == 15:
            raise KeyboardInterrupt
        add(*args)

    monkeypatch.setattr(ours, "_add_step", fail)
    with pytest.raises(KeyboardInterrupt):
        ours.load(directory=tmp_path)
    ours.check()
    ours.load(directory=tmp_path)
    ours.check()
    numbers = all_windows(ours)["number"]
    assert sorted(numbers[:, 0].tolist()) == sorted(2 * [*range(16)])
    assert (numbers == numbers[:, :1] + np.arange(5)).all()


def test_saves_of_fewer_steps_than_a_window_are_loaded_too(tmp_path: Path) -> None:
    theirs = CompressedEmbodiedReplay(5, 1000, directory=tmp_path)
    ours = CompressedEmbodiedReplay(5, 1000, chunksize=3)
    ours.add(make_step(3, 0), "ours")
    for number in range(30):
        for worker in range(2):
            theirs.add(make_step(worker, number), worker)
        theirs.save()
        ours.load(directory=tmp_path)
        ours.check()
    numbers = all_windows(ours)["number"]
    # when a stream is shorter than a window, its steps are not loaded
    assert sorted(numbers[:, 0].tolist()) == sorted(2 * [*range(4, 26)])
    assert (numbers == numbers[:, :1] + np.arange(5)).all()


def test_a_copied_stream_ends_with_the_one_it_was_copied_from(tmp_path: Path) -> None:
    theirs = CompressedEmbodiedReplay(5, 20, directory=tmp_path)
    ours = CompressedEmbodiedReplay(5, 1000)
    ours.add(make_step(3, 0), "ours")
    for turn in range(6):
        for number in range(30):
            theirs.add(make_step(turn, number), turn)
        theirs.save()
        ours.load(directory=tmp_path)
        ours.check()
        assert ours.stats()["streams"] == 2
    numbers = all_windows(ours)
    assert numbers["worker"][:, 0].tolist() == sorted(numbers["worker"][:, 0].tolist())
    assert len(ours) == 6 * 20


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_replay_that_is_copied_says_what_to_do_instead(duplicate: Any) -> None:
    replay, model = filled(30)
    with pytest.raises(NotSaveableError, match=r"save\(\) it, and load\(\) it in another one"):
        duplicate(replay)
    assert_holds(replay, model)


def test_a_replay_can_be_opened_read_only(tmp_path: Path) -> None:
    replay, model = filled(100)
    files.save(replay, tmp_path / "replay")
    opened = files.open_saved(tmp_path / "replay")

    assert opened.sample(4)["image"].shape == (4, 5, 24, 24, 3)
    assert_holds(opened, model)
    with pytest.raises(ReadOnlyBufferError):
        opened.add(make_step(0, 0))
    assert files.verify(tmp_path / "replay") is not None


def test_a_save_without_its_manifest_is_loaded_if_it_was_complete(tmp_path: Path) -> None:
    """As after kill -9 at any moment of the first save, or if somebody deleted the manifest."""
    replay, model = filled(100, directory=tmp_path / "replay")
    replay.save()
    for step in range(100, 110):
        replay.add(make_step(0, step), 0)
        model.add(make_step(0, step), 0)
    replay.save()
    (tmp_path / "replay" / "manifest.json").unlink()

    restarted = CompressedEmbodiedReplay(replay.length, directory=tmp_path / "replay")
    restarted.load()
    assert_holds(restarted, model)
    restarted.save()
    again = CompressedEmbodiedReplay(replay.length, directory=tmp_path / "replay")
    again.load()
    assert_holds(again, model)

    # killed in the middle of the first save: nothing was ever saved
    (tmp_path / "replay" / "manifest.json").unlink()
    (data,) = (tmp_path / "replay").glob("data-*.bin")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    restarted = CompressedEmbodiedReplay(replay.length, directory=tmp_path / "replay")
    restarted.load()
    assert len(restarted) == 0
    restarted.save()


def test_an_empty_replay_can_be_saved(tmp_path: Path) -> None:
    CompressedEmbodiedReplay(5, 40, directory=tmp_path / "replay").save()
    replay = CompressedEmbodiedReplay(5, 40, directory=tmp_path / "replay")
    replay.load()
    assert len(replay) == 0
    replay.add(make_step(0, 0))


def test_forged_descriptions_are_refused(tmp_path: Path) -> None:
    from sb3_extra_buffers.files.parts import flatten, unflatten
    from sb3_extra_buffers.files.registry import from_parts

    replay, model = filled(100)
    described, arrays = flatten(replay.to_parts())
    assert_holds(from_parts(unflatten(described, arrays)), model)
    forged_arrays: dict[str, Any] = {
        "columns/chunks/successors": lambda a: np.where(a >= 0, 0, a),
        "columns/chunks/serials": lambda a: np.where(a > 0, 1, a),
        "columns/chunks/used": lambda a: a + 5,
        "columns/chunks/starts": lambda a: a - 50,
        "columns/numbers": lambda a: a - 1000,
        "columns/key-1": lambda a: a[:-1],
        "columns/key-2": lambda a: a.view(np.uint8) + 7,
    }
    for name, forge in forged_arrays.items():
        with pytest.raises(FileFormatError):
            from_parts(unflatten(described, arrays | {name: forge(arrays[name])}))
    entries: dict[str, Any] = {
        "length": 0, "capacity": -3, "keys": [["image", [1], "|u1", True]], "replay_id": "00", "chunks": {"size": 0},
        "compression": ["nosuch", {}], "online": 1, "compressed_keys": 3,
    }  # fmt: skip
    for name, value in entries.items():
        with pytest.raises(ValueError):  # all named errors here are ValueErrors
            from_parts(unflatten(described | {"description": described["description"] | {name: value}}, arrays))


@pytest.mark.parametrize(("name", "value"), [("length", 1 << 24), ("capacity", 1 << 24), ("n_chunks", 1 << 20)])
def test_numbers_in_a_file_take_no_memory(name: str, value: int) -> None:
    from sb3_extra_buffers.files.parts import flatten, unflatten
    from sb3_extra_buffers.files.registry import from_parts

    replay, _ = filled(100)
    described, arrays = flatten(replay.to_parts())
    description = described["description"]
    (description["chunks"] if name == "n_chunks" else description)[name] = value
    tracemalloc.start()
    try:
        with contextlib.suppress(FileFormatError, OutOfMemoryError):
            from_parts(unflatten(described, arrays))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("arguments", [{"length": 8, "capacity": 1 << 44}, {"length": 1 << 46, "capacity": 10}])
def test_a_size_that_no_machine_has_raises_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(OutOfMemoryError, match="lower the capacity"):
        CompressedEmbodiedReplay(**arguments)


# ---- interrupts and threads ----


def test_an_interrupted_add_is_complete_or_undone() -> None:
    """A KeyboardInterrupt at every line of the library that `add` runs."""
    replay, model = filled(30, capacity=11, chunksize=2)
    number, worker = 30, 0
    n_lines = 1
    while n_lines:
        left = n_lines

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal left
            if "sb3_extra_buffers" not in frame.f_code.co_filename:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return trace

        step = make_step(worker, number)
        before = replay._n_added
        sys.settrace(trace)
        try:
            replay.add(step, worker)
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        with replay.lock:
            replay.recover()
        if replay._n_added > before:
            model.add(step, worker)
            worker = (worker + 1) % 2
            number += worker == 0
        assert_holds(replay, model)
        n_lines = n_lines + 1 if interrupted else 0


def test_an_interrupted_sample_loses_no_online_window() -> None:
    """A KeyboardInterrupt at bytecodes all over `sample`."""
    replay, _ = filled(20, 1, length=3, online=True, capacity=None)
    queue, was_interrupted, at = list(replay._queue), True, 1
    assert len(queue) > 5
    while was_interrupted:
        with contextlib.suppress(KeyboardInterrupt), Injector(at, KeyboardInterrupt()) as injector:
            replay.sample(5)
        was_interrupted, at = injector.where != "", at + 37
        assert list(replay._queue) == (queue if was_interrupted else queue[5:])
    with pytest.raises(OutOfMemoryError):
        replay.sample(1 << 40)
    assert list(replay._queue) == queue[5:]


def test_an_interrupted_selector_draws_only_windows_that_it_has() -> None:
    """A KeyboardInterrupt at every bytecode of every change; a replay repeats a change that was interrupted."""
    selector = Prioritized(maxfrac=0.5, zero_on_sample=True)
    ids = np.zeros((4000, 20), np.uint8)
    ids[:, :4] = np.arange(4000, dtype=np.int32)[:, None].view(np.uint8)
    interrupted, window = True, 0
    while interrupted:
        interrupted, steps = False, ids[window : window + 3]
        for change in (
            lambda: selector.__setitem__(window, steps),  # noqa: B023  # called in this turn
            lambda: selector.__delitem__(window - 4),  # noqa: B023
            lambda: selector.prioritize(steps, [1, 2, 3]),  # noqa: B023
            selector,
        ):
            with contextlib.suppress(KeyboardInterrupt), Injector(window + 1, KeyboardInterrupt()) as injector:
                change()
            interrupted |= injector.count > window
            change()
            assert {selector() for _ in range(20)} <= set(range(selector.first, window + 1))
        window += 1
    # steps of windows that are gone are forgotten
    assert len(selector._row_of) == len(selector) + 2 == 6


def test_threads_add_sample_and_update() -> None:
    replay = CompressedEmbodiedReplay(5, 128, chunksize=32, online=True)
    running, problems = True, []

    def add() -> None:
        number, worker = 0, threading.get_ident() % 4
        try:
            while running:
                replay.add({**make_step(worker, number), "ident": threading.get_ident()}, threading.get_ident())
                number += 1
        except Exception as problem:  # reported below
            problems.append(problem)

    def sample() -> None:
        try:
            while running:
                batch = replay.sample(4)
                assert (np.diff(batch["number"], axis=1) == 1).all()
                assert (batch["ident"] == batch["ident"][:, :1]).all()
                for image, number in zip(batch["image"][0], batch["number"][0], strict=True):
                    assert (image == make_step(int(batch["worker"][0, 0]), int(number))["image"]).all()
                replay.update({"stepid": batch["stepid"], "latent": batch["latent"] + 1})
        except Exception as problem:  # reported below
            problems.append(problem)

    threads = [threading.Thread(target=target) for target in (add, add, sample, sample)]
    for thread in threads:
        thread.start()
    threads[0].join(1.0)
    running = False
    for thread in threads:
        thread.join()

    assert problems == []
    assert len(replay) == 128


def test_a_window_whose_images_are_being_erased_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = CompressedEmbodiedReplay(2, 32, chunksize=2, selector=Fifo(), compression_method="delta")
    for number in range(34):
        replay.add(make_step(0, number))
    drawn, erased, read = threading.Event(), threading.Event(), threading.Event()
    steps: Any = replay._steps
    erase_slots, read_slots = steps.erase, steps.read

    def erase(*slots: Any) -> None:
        erase_slots(*slots)
        erased.set()
        read.wait(10)

    def read_late(slots: Any) -> Any:
        drawn.set()
        erased.wait(10)
        batch = read_slots(slots)
        read.set()
        return batch

    monkeypatch.setattr(steps, "erase", erase)
    monkeypatch.setattr(steps, "read", read_late)
    batches: list[Any] = []
    thread = threading.Thread(target=lambda: batches.append(replay.sample(1)))
    thread.start()
    drawn.wait(10)
    while not erased.is_set():
        number += 1
        replay.add(make_step(0, number))
    thread.join(10)

    for image, number in zip(batches[0]["image"][0], batches[0]["number"][0], strict=True):
        np.testing.assert_array_equal(image, make_step(0, int(number))["image"])


def test_sample_waits_for_the_first_window() -> None:
    replay = CompressedEmbodiedReplay(3, 10)
    batches: list[Any] = []
    thread = threading.Thread(target=lambda: batches.append(replay.sample(2)))
    thread.start()
    for number in range(3):
        replay.add({"number": number})
    thread.join(10)

    assert batches[0]["number"].tolist() == [[0, 1, 2], [0, 1, 2]]


# ---- selectors of others ----


def test_selectors_with_embodieds_interface_are_used() -> None:
    class Newest:
        def __init__(self) -> None:
            self.windows: dict[int, Any] = {}

        def __call__(self) -> int:
            return max(self.windows)

        def __setitem__(self, window: int, step_ids: Any) -> None:
            self.windows[window] = step_ids

        def __delitem__(self, window: int) -> None:
            del self.windows[window]

    selector = Newest()
    replay, _ = filled(50, capacity=10, n_workers=1, selector=selector)
    batch = replay.sample(2)

    assert len(selector.windows) == 10
    assert (batch["number"] == [45, 46, 47, 48, 49]).all()
    assert (selector.windows[selector()] == batch["stepid"][0]).all()


def test_a_fifo_selector_draws_the_oldest_window() -> None:
    replay, _ = filled(50, capacity=10, n_workers=1, selector=Fifo())
    assert replay.sample(3)["number"][:, 0].tolist() == [36, 36, 36]


def test_priorities_decide_which_windows_are_drawn() -> None:
    replay, _ = filled(100, capacity=50, n_workers=1, length=3, selector=Prioritized(maxfrac=0.5))
    batch = replay.sample(400)
    priority = np.where(batch["number"] == 80, 1e6, 0)
    replay.update({"stepid": batch["stepid"], "priority": priority})
    drawn = replay.sample(64)["number"]

    assert (drawn == 80).any(axis=1).all()
    assert set(drawn[:, 0]) == {78, 79, 80}


def test_a_wrong_priority_changes_nothing() -> None:
    replay, _ = filled(20, selector=Prioritized())
    batch = replay.sample(2)
    for bad in (-1.0, np.nan):
        priority = np.full(batch["reward"].shape, bad)
        with pytest.raises(PriorityError):
            replay.update({"stepid": batch["stepid"], "latent": batch["latent"] + 7, "priority": priority})
    for latent, step in zip(all_windows(replay)["latent"], all_windows(replay)["number"], strict=True):
        np.testing.assert_array_equal(latent, np.stack([make_step(0, int(number))["latent"] for number in step]))


@pytest.mark.parametrize("exponent", [1.0, 3.0])
def test_huge_priorities_are_drawn_first(exponent: float) -> None:
    replay = CompressedEmbodiedReplay(1, selector=Prioritized(exponent, maxfrac=0.5))
    for number in range(100):
        replay.add({"number": number})
    ids = replay._table.step_ids(replay._slots_of([0, 1, 2]), replay.replay_id)
    replay.update({"stepid": ids, "priority": np.full((3, 1), 1e308)})

    assert set(replay.sample(100)["number"].ravel()) == {0, 1, 2}


def test_importing_it_loads_no_framework() -> None:
    code = "import sys, sb3_extra_buffers.replay_buffers.embodied; "
    code += "print(*({'torch', 'jax', 'gymnasium', 'stable_baselines3', 'torchrl'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []
