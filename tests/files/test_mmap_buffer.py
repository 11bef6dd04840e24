"""Buffers kept in a folder (``storage="mmap"``)."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedArray, CompressedHerReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.errors import DamagedFileError, FileWriteError
from sb3_extra_buffers.files import disk, load, mmap_buffer, open_saved, repair
from sb3_extra_buffers.stores.file_heap import FileHeap
from tests.files.filing import (
    ACTIONS,
    BOX,
    BUFFERS,
    GOALS,
    IMAGE,
    N_ENVS,
    Feed,
    GoalEnv,
    assert_same,
    fill_disk,
    finish,
    save_or_say,
)

KINDS = ["replay", "replay-delta", "replay-gzip", "replay-dense", "n-step", "dict", "her", "her-infos"]


@pytest.fixture(autouse=True)
def _checkpoint_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap_buffer, "_MAX_RECORDS", 7)
    monkeypatch.setattr(mmap_buffer, "_SPARE", 1 << 12)


def release(buffer: Any) -> None:
    """Release the folder, as the end of the process does."""
    buffer.mmap_folder.close()


@pytest.mark.parametrize("name", KINDS)
def test_the_folder_always_holds_every_added_step(name: str, tmp_path: Path) -> None:
    buffer, plain, feed = BUFFERS[name](), BUFFERS[name](), Feed()
    mmap_buffer.keep_in_file(buffer, tmp_path / "live")
    for step in range(75):
        feed.add_to(buffer, plain)
        if step % 11 == 10:
            found = load(tmp_path / "live")
            finish(found)
            assert_same(plain, found)
    release(buffer)
    assert_same(plain, buffer)

    # continue in the folder
    again = open_saved(tmp_path / "live", mode="r+")
    finish(again)
    for _ in range(20):
        feed.add_to(again, plain)
    found = load(tmp_path / "live")
    finish(found)
    assert_same(plain, found)
    assert found.storage_options.storage == "memory"


def test_storage_mmap_creates_the_folder(tmp_path: Path) -> None:
    buffer = CompressedReplayBuffer(
        26 * N_ENVS, BOX, ACTIONS, device="cpu", n_envs=N_ENVS, storage="mmap", path=tmp_path / "live"
    )
    plain, feed = BUFFERS["replay"](), Feed()
    for _ in range(40):
        feed.add_to(buffer, plain)

    assert_same(plain, CompressedReplayBuffer.load(tmp_path / "live"))
    assert buffer.observations.store.inner.heap.file.parent == tmp_path / "live"


def test_infos_may_be_an_iterator(tmp_path: Path) -> None:
    """They are read twice: for the buffer and for the journal."""
    buffer = CompressedReplayBuffer(20, BOX, ACTIONS, device="cpu", n_envs=2, storage="mmap", path=tmp_path / "live")
    obs: Any = np.zeros((2, *BOX.shape), BOX.dtype)
    step = obs, obs, np.zeros((2, 1)), np.zeros(2), np.ones(2)
    infos: list[dict[str, Any]] = [{"TimeLimit.truncated": True}, {}]
    buffer.add(*step, iter(infos))  # type: ignore[arg-type]
    buffer.extend(*([part] for part in step), [iter(infos)])
    assert buffer.timeouts[:2].tolist() == [[1, 0], [1, 0]]
    found = load(tmp_path / "live")
    assert found.size() == 2
    np.testing.assert_array_equal(found.timeouts, buffer.timeouts)


@pytest.mark.parametrize("space", [BOX, spaces.Box(-1, 1, (3,), np.float32)], ids=["images", "vectors"])
def test_a_step_that_is_recorded_but_interrupted_is_neither_in_the_folder_nor_in_the_buffer(
    space: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Any = tmp_path / "live"
    buffer: Any = CompressedReplayBuffer(52, space, ACTIONS, device="cpu", n_envs=1, storage="mmap", path=place)
    obs = np.zeros((1, *space.shape), space.dtype)
    step: Any = obs, obs, np.zeros((1, 1)), np.ones(1), np.zeros(1), [{}]
    for _ in range(3):
        buffer.add(*step)
    record = buffer.mmap_folder.record_step

    def interrupt(*args: Any) -> None:
        record(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(buffer.mmap_folder, "record_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            buffer.add(*step)
    assert buffer.pos == load(place).pos == 3
    buffer.add(*step)
    assert buffer.pos == load(place).pos == 4


class DoubledRewards(CompressedReplayBuffer):
    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        super().add(obs, next_obs, action, 2 * reward, done, infos)


def test_an_overridden_add_changes_each_step_once(tmp_path: Path) -> None:
    place: Any = tmp_path / "live"
    buffer = DoubledRewards(20, BOX, ACTIONS, device="cpu", storage="mmap", path=place)
    obs = np.zeros((1, *BOX.shape), BOX.dtype)
    for step in range(3):
        buffer.add(obs, obs, np.zeros((1, 1)), np.full(1, step), np.zeros(1), [{}])
    release(buffer)

    again = DoubledRewards.open(place, mode="r+")
    assert again.rewards[:3].ravel().tolist() == buffer.rewards[:3].ravel().tolist() == [0, 2, 4]


def test_her_accepts_storage_mmap(tmp_path: Path) -> None:
    env: Any = GoalEnv()
    buffer = CompressedHerReplayBuffer(
        52, GOALS, ACTIONS, env, device="cpu", n_envs=N_ENVS, storage="mmap", path=tmp_path / "live"
    )
    plain, feed = BUFFERS["her"](), Feed()
    for _ in range(40):
        feed.add_to(buffer, plain)

    found = CompressedHerReplayBuffer.load(tmp_path / "live")
    finish(found)
    assert_same(plain, found)


def test_arrays_are_kept_in_folders_too(tmp_path: Path) -> None:
    array = CompressedArray((30, N_ENVS), IMAGE, np.uint8, storage="mmap", path=tmp_path / "live")
    truth, feed = np.zeros(array.shape, np.uint8), Feed()
    for step in range(50):
        truth[step % 30] = feed.images()[0]
        array[step % 30] = truth[step % 30]
        if step % 13 == 12:
            array.erase(2)
            truth[2] = 0
        np.testing.assert_array_equal(CompressedArray.load(tmp_path / "live"), truth)
    del array

    again = CompressedArray.open(tmp_path / "live", "r+")
    again[5] = truth[6]
    truth[5] = truth[6]
    np.testing.assert_array_equal(CompressedArray.load(tmp_path / "live"), truth)


def test_copies_and_pickles_are_kept_in_memory(tmp_path: Path) -> None:
    buffer, feed = BUFFERS["replay"](), Feed()
    mmap_buffer.keep_in_file(buffer, tmp_path / "live")
    for _ in range(30):
        feed.add_to(buffer)

    for twin in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        before = sorted((path.name, path.stat().st_size) for path in (tmp_path / "live").iterdir())
        for _ in range(30):
            feed.add_to(twin)
        assert before == sorted((path.name, path.stat().st_size) for path in (tmp_path / "live").iterdir())
    array = CompressedArray((30, N_ENVS), IMAGE, np.uint8, storage="mmap", path=tmp_path / "array")
    copy.deepcopy(array)[3] = 7
    assert not CompressedArray.load(tmp_path / "array")[3].any()


def test_a_save_to_another_folder_is_independent(tmp_path: Path) -> None:
    buffer, feed = BUFFERS["replay"](), Feed()
    mmap_buffer.keep_in_file(buffer, tmp_path / "live")
    for _ in range(30):
        feed.add_to(buffer)
    buffer.save(tmp_path / "elsewhere")
    for _ in range(5):
        feed.add_to(buffer)
    buffer.save(tmp_path / "live")

    assert len(list((tmp_path / "elsewhere").glob("heap-*"))) == 0
    assert CompressedReplayBuffer.load(tmp_path / "elsewhere").pos == 30 % 26
    assert CompressedReplayBuffer.load(tmp_path / "live").pos == 35 % 26


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")

    with pytest.raises(FileWriteError, match="is not empty; load or open the buffer that is there"):
        CompressedReplayBuffer(52, BOX, ACTIONS, device="cpu", n_envs=N_ENVS, storage="mmap", path=tmp_path)
    with pytest.raises(ValueError, match="'mmap' with the path of a folder"):
        CompressedReplayBuffer(52, BOX, ACTIONS, device="cpu", n_envs=N_ENVS, storage="mmap")


@pytest.mark.parametrize("n_steps", [3, 30])
def test_a_folder_that_has_lost_its_manifest_is_not_started_over(n_steps: int, tmp_path: Path) -> None:
    options: Any = {"device": "cpu", "n_envs": N_ENVS, "storage": "mmap", "path": tmp_path / "live"}
    buffer, feed = CompressedReplayBuffer(52, BOX, ACTIONS, **options), Feed()
    for _ in range(n_steps):
        feed.add_to(buffer)
    release(buffer)
    (tmp_path / "live" / "manifest.json").unlink()
    with pytest.raises(DamagedFileError, match=r"manifest.json is missing.*repair"):
        CompressedReplayBuffer(52, BOX, ACTIONS, **options)
    assert repair(tmp_path / "live", tmp_path / "repaired").n_lost == 0
    assert_same(buffer, load(tmp_path / "repaired"))


def test_a_failed_write_raises_and_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, plain, feed = BUFFERS["replay"](), BUFFERS["replay"](), Feed()
    mmap_buffer.keep_in_file(buffer, tmp_path / "live")
    for _ in range(9):
        feed.add_to(buffer, plain)

    def refuse(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_all", refuse)
        with pytest.raises(FileWriteError, match=r"appending to journal-.* failed: No space left"):
            feed.add_to(buffer)

    assert_same(plain, CompressedReplayBuffer.load(tmp_path / "live"))


@pytest.mark.parametrize("name", ["replay-delta", "replay-gzip"])
def test_a_full_disk_loses_no_completed_step(name: str, small_disk: Path) -> None:
    buffer, feed = BUFFERS[name](), Feed()
    mmap_buffer.keep_in_file(buffer, small_disk / "live")
    n_failed = 0
    good = copy.deepcopy(buffer)
    for step in range(60):
        if step % 9 == 5:
            fill_disk(small_disk, n_free=step % 4)
        if step % 9 == 8:
            fill_disk(small_disk, n_free=1000)
        refused = save_or_say(lambda: feed.add_to(buffer))
        found = load(small_disk / "live")
        if refused:
            n_failed += 1
            # every completed step is there, with or without the one that failed
            assert_same(buffer if found.pos == buffer.pos else good, found)
        else:
            good = copy.deepcopy(buffer)
            assert_same(good, found)
    assert n_failed


def test_a_file_heap_raises_on_a_full_disk_and_continues_after(small_disk: Path) -> None:
    heap = FileHeap(small_disk / "heap.bin")
    heap.grow(3)
    payload = np.arange(1 << 19, dtype=np.uint32).view(np.uint8)
    heap.put(0, payload[:1000])
    fill_disk(small_disk, n_free=5)

    for _ in range(2):
        with pytest.raises(FileWriteError, match=r"cannot allocate \d+ bytes: No space left"):
            heap.put(1, payload)
    with pytest.raises(FileWriteError, match="No space left"):
        heap.compact(small_disk / "other.bin")
    np.testing.assert_array_equal(heap.read(0), payload[:1000])
    heap.check()
    (small_disk / "filler").unlink()
    heap.put(1, payload)
    np.testing.assert_array_equal(heap.read(1), payload)
    heap.compact(small_disk / "other.bin")
    np.testing.assert_array_equal(heap.read(0), payload[:1000])


def test_heap_and_journal_files_stay_small(tmp_path: Path) -> None:
    buffer, feed = BUFFERS["replay-delta"](), Feed()
    mmap_buffer.keep_in_file(buffer, tmp_path / "live")
    heap = buffer.observations.store
    most = 0
    for _ in range(700):
        feed.add_to(buffer)
        inner = heap.inner
        if inner is not None:
            most = max(most, inner.heap.end / max(inner.heap.live_bytes, 1))

    # as much dead as live, 4 kB, and what is written between two checkpoints
    assert most < 6
    assert len(list((tmp_path / "live").glob("heap-*"))) <= 2
    assert len(list((tmp_path / "live").glob("journal-*"))) <= 2


def test_repair_keeps_the_steps_before_a_damaged_record(tmp_path: Path) -> None:
    buffer, feed = BUFFERS["replay-delta"](), Feed()
    mmap_buffer.keep_in_file(buffer, tmp_path / "live")
    for _ in range(12):
        feed.add_to(buffer)
    journal = max((tmp_path / "live").glob("journal-*"))
    data = bytearray(journal.read_bytes())
    data[-40] ^= 1  # in the last of five records
    journal.write_bytes(data)

    with pytest.raises(DamagedFileError, match="record 4"):
        load(tmp_path / "live")
    report = repair(tmp_path / "live", tmp_path / "repaired")

    assert report.n_steps == 11 * N_ENVS
    found = load(tmp_path / "repaired")
    np.testing.assert_array_equal(found.observations[:11], buffer.observations[:11])


@pytest.mark.parametrize("name", ["replay-delta", "her", "replay-gzip"])
@pytest.mark.parametrize("n_steps", range(1, 30, 3))
def test_a_buffer_in_memory_can_be_moved_to_a_folder_at_any_step(name: str, n_steps: int, tmp_path: Path) -> None:
    buffer, plain, feed = BUFFERS[name](), BUFFERS[name](), Feed()
    for _ in range(n_steps):
        feed.add_to(buffer, plain)
    mmap_buffer.keep_in_file(buffer, tmp_path / "live")
    for store in buffer.to_parts().stores.values():
        store.check()
    for _ in range(9):
        feed.add_to(buffer, plain)

    found = load(tmp_path / "live")
    finish(found)
    assert_same(plain, found)


@pytest.mark.parametrize("function", ["create", "write_all", "fsync", "flush", "replace", "sync_folder", "unlink"])
def test_a_checkpoint_interrupted_at_any_call_loses_no_step(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted right before a call, or right after."""
    buffer, plain, feed = BUFFERS["replay-delta"](), BUFFERS["replay-delta"](), Feed()
    kept = mmap_buffer.keep_in_file(buffer, tmp_path / "live")
    original = getattr(disk, function)
    for number in range(12):
        feed.add_to(buffer, plain)
        calls = 0

        def interrupted(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != number // 2 + 1:  # noqa: B023  # called in this iteration
                return original(*args)
            if number % 2:  # noqa: B023
                original(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(disk, function, interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                kept.checkpoint()
        assert_same(plain, load(tmp_path / "live"))
    feed.add_to(buffer, plain)
    assert_same(plain, load(tmp_path / "live"))
