"""Saving and loading: the loaded buffer equals the saved one and continues like it; failures change nothing."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.compressed import (
    CompressedArray,
    CompressedHerReplayBuffer,
    CompressedReplayBuffer,
    compressed,
)
from sb3_extra_buffers.errors import (
    DamagedFileError,
    FileFormatError,
    FileWriteError,
    FolderInUseError,
    LayoutError,
    NotSaveableError,
    ReadOnlyBufferError,
    UnsupportedVersionError,
)
from sb3_extra_buffers.files import disk, load, load_file, manifest, open_saved, repair, save, save_file, verify
from sb3_extra_buffers.files.checksums import crc32_function
from tests.contracts.store import method_params
from tests.files.filing import (
    ACTIONS,
    BOX,
    BUFFERS,
    N_ENVS,
    Feed,
    assert_same,
    fill_disk,
    finish,
    make_array,
    save_or_say,
    size_of,
)
from tests.torture.interrupts import Injector

every_buffer = pytest.mark.parametrize("name", BUFFERS)


@pytest.mark.parametrize("size", [0, 1, 63, 4096, 100_003])
def test_checksums_are_those_of_zlib(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert crc32_function()(data.data) == zlib.crc32(data.tobytes())


def assert_continues(name: str, feed: Feed, buffer: Any, loaded: Any) -> None:
    """Assert that the loaded buffer continues like the other."""
    if "rollout" in name:
        buffer.reset()
        loaded.reset()
    for _ in range(26):
        feed.add_to(buffer, loaded)
    assert_same(buffer, loaded)


@every_buffer
@pytest.mark.parametrize("n_steps", [0, 15, 61])
def test_a_loaded_buffer_equals_the_saved_one_and_continues_like_it(name: str, n_steps: int, tmp_path: Path) -> None:
    buffer, feed = BUFFERS[name](), Feed()
    if "rollout" in name:
        n_steps = min(n_steps, 26)
    for _ in range(n_steps):
        feed.add_to(buffer)

    buffer.save(tmp_path / "saved")
    loaded = type(buffer).load(tmp_path / "saved")

    finish(loaded)
    if n_steps > 10:
        assert_same(buffer, loaded)
    assert_continues(name, feed, buffer, loaded)


@every_buffer
def test_saving_changes_neither_the_buffer_nor_its_pickles(name: str, tmp_path: Path) -> None:
    buffer, untouched = BUFFERS[name](), BUFFERS[name]()
    feed = Feed()
    for step in range(26):
        feed.add_to(buffer, untouched)
        if step % 5 == 0:
            buffer.save(tmp_path / "saved")

    assert_same(buffer, untouched)
    again = pickle.loads(pickle.dumps(buffer))
    finish(again)
    assert_same(again, untouched)


@every_buffer
def test_a_second_save_is_incremental(name: str, tmp_path: Path) -> None:
    buffer, feed = BUFFERS[name](), Feed()
    for _ in range(20):
        feed.add_to(buffer)
    first = save(buffer, tmp_path / "saved")
    again = save(buffer, tmp_path / "saved")
    for _ in range(5):
        feed.add_to(buffer)
        report = save(buffer, tmp_path / "saved")

        assert report.incremental
        loaded = type(buffer).load(tmp_path / "saved")
        finish(loaded)
        assert_same(buffer, loaded)

    assert not first.incremental
    assert again.incremental
    # the index and the manifest are written every time
    assert again.n_bytes < first.n_bytes


@every_buffer
def test_open_reads_in_place_and_refuses_writes(name: str, tmp_path: Path) -> None:
    buffer, feed = BUFFERS[name](), Feed()
    for _ in range(26):
        feed.add_to(buffer)
    buffer.save(tmp_path / "saved")

    opened = type(buffer).open(tmp_path / "saved")
    other = open_saved(tmp_path / "saved")

    for each in (opened, other):
        finish(each)
    with pytest.raises(ReadOnlyBufferError, match=r"opened (read-only|to be read)"):
        feed.add_to(opened)
    before = {path: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    assert_same_reading(buffer, opened)
    assert_same_reading(buffer, other)
    assert before == {path: path.read_bytes() for path in (tmp_path / "saved").iterdir()}


def assert_same_reading(ours: Any, opened: Any) -> None:
    from tests.files.filing import batches, contents

    first, second = contents(ours), contents(opened)
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key], err_msg=key)
    for mine, other in zip(batches(ours), batches(opened), strict=True):
        for left, right in zip(mine, other, strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("method", ["delta", "gzip1"])
def test_an_interrupted_report_leaves_an_opened_array_readable(method: str, tmp_path: Path) -> None:
    array, truth = make_array(method=method)
    array.save(tmp_path / "saved")
    opened = open_saved(tmp_path / "saved")

    with Injector() as counter:
        opened.memory_usage()
    for at in range(1, counter.count, 9):
        with Injector(at, KeyboardInterrupt()), contextlib.suppress(KeyboardInterrupt):
            opened.memory_usage()
        np.testing.assert_array_equal(opened[...], truth)


@pytest.mark.parametrize("method", ["auto", "delta", "gzip1", "none"])
def test_arrays_are_saved_loaded_and_opened(method: str, tmp_path: Path) -> None:
    array, truth = make_array(method=method)
    array.save(tmp_path / "saved")

    loaded, opened = CompressedArray.load(tmp_path / "saved"), CompressedArray.open(tmp_path / "saved")

    np.testing.assert_array_equal(loaded, truth)
    np.testing.assert_array_equal(opened, truth)
    loaded[3] = truth[7]
    with pytest.raises(ReadOnlyBufferError):
        opened[3] = truth[7]
    np.testing.assert_array_equal(loaded[3], truth[7])


@pytest.mark.parametrize("method", method_params("delta", "delta2", "scroll", "scroll2", "camera"))
def test_observations_of_zeros_are_opened(method: str, tmp_path: Path) -> None:
    """No frame is stored for them."""
    array = CompressedArray(40, (4, 12, 12), np.uint8, compression_method=method)
    array[...] = 0
    array.save(tmp_path / "saved")
    opened = CompressedArray.open(tmp_path / "saved")
    np.testing.assert_array_equal(opened, array)
    np.testing.assert_array_equal(opened[7], array[7])


def test_a_store_without_a_chosen_method_is_saved_as_such(tmp_path: Path) -> None:
    array, truth = CompressedArray((1000, 2), BOX.shape, np.uint8), Feed(1)
    rows = [truth.images()[0] for _ in range(3)]
    for step, row in enumerate(rows):
        array[step] = row

    array.save(tmp_path / "saved")

    assert "not compressed yet" in array.store.describe()
    loaded = CompressedArray.load(tmp_path / "saved")
    assert "not compressed yet" in loaded.store.describe()
    np.testing.assert_array_equal(loaded[:3], rows)


@pytest.mark.parametrize("name", ["gpu", "gpu-frames", "gpu-dense", "gpu-frames-rollout"])
def test_gpu_buffers_load_on_a_machine_without_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, feed = BUFFERS[name](), Feed()
    for _ in range(26):
        feed.add_to(buffer)
    buffer.save(tmp_path / "saved")
    record = manifest.read(tmp_path / "saved")
    # as a machine with a GPU would have written it
    record["description"]["device"] = record["description"]["arguments"]["buffer_device"] = "cuda:0"
    manifest.write(tmp_path / "saved", manifest.dump(record))

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    loaded = type(buffer).load(tmp_path / "saved")

    assert loaded.device.type == "cpu"
    assert_same(buffer, loaded)
    assert_continues(name, feed, buffer, loaded)


def test_gpu_buffers_and_rollouts_cannot_be_kept_in_folders(tmp_path: Path) -> None:
    for name in ("gpu", "rollout"):
        buffer = BUFFERS[name]()
        buffer.save(tmp_path / name)
        with pytest.raises(LayoutError, match=r"cannot be kept in its folder, .* save\(\) it"):
            type(buffer).open(tmp_path / name, "r+")


def test_checkpoints_share_files_and_stay_independent(tmp_path: Path) -> None:
    buffer, feed = BUFFERS["replay"](), Feed()
    folders = []
    copies = []
    for turn in range(4):
        for _ in range(20):
            feed.add_to(buffer)
        folders.append(tmp_path / f"step-{turn}")
        report = save(buffer, folders[-1], base=folders[-2] if turn else None)
        copies.append(copy.deepcopy(buffer))
        assert report.incremental == (turn > 0)

    for folder, state in zip(folders, copies, strict=True):
        assert_same(state, CompressedReplayBuffer.load(folder))
    # continuing from an old checkpoint leaves the others unchanged
    old = CompressedReplayBuffer.load(folders[1])
    for _ in range(7):
        feed.add_to(old)
    old.save(folders[1])
    assert_same(old, CompressedReplayBuffer.load(folders[1]))
    assert_same(copies[3], CompressedReplayBuffer.load(folders[3]))
    assert_same(copies[2], CompressedReplayBuffer.load(folders[2]))


@pytest.mark.skipif(os.name == "nt", reason="files are not locked on Windows")
def test_checkpoints_that_share_a_file_may_be_saved_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, feed = BUFFERS["replay"](), Feed()
    for _ in range(20):
        feed.add_to(buffer)
    for name in ("first", "second"):
        save(buffer, tmp_path / name, base=tmp_path / "first")
    first, second = (CompressedReplayBuffer.load(tmp_path / name) for name in ("first", "second"))
    feed.add_to(first)
    for _ in range(9):
        feed.add_to(second)

    meanwhile(monkeypatch, lambda: second.save(tmp_path / "second"))
    first.save(tmp_path / "first")

    assert_same(first, CompressedReplayBuffer.load(tmp_path / "first"))
    assert_same(second, CompressedReplayBuffer.load(tmp_path / "second"))


def meanwhile(monkeypatch: pytest.MonkeyPatch, do: Any) -> None:
    """Call ``do`` in the next save, before that writes its data."""
    write_all = disk.write_all

    def call(descriptor: int, parts: Any) -> None:
        monkeypatch.setattr(disk, "write_all", write_all)
        do()
        write_all(descriptor, parts)

    monkeypatch.setattr(disk, "write_all", call)


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot lock folders")
def test_only_one_save_at_a_time_writes_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, feed = BUFFERS["replay"](), BUFFERS["replay-gzip"](), Feed()
    for buffer in (first, second):
        feed.add_to(buffer)
    errors: list[BaseException | None] = []

    def interfere() -> None:
        with pytest.raises(FolderInUseError, match=r"is saving to .*saved; save again when it has finished") as refused:
            second.save(tmp_path / "saved")
        errors.append(refused.value)

    meanwhile(monkeypatch, interfere)
    first.save(tmp_path / "saved")
    assert len(errors) == 1
    assert_same(first, CompressedReplayBuffer.load(tmp_path / "saved"))
    second.save(tmp_path / "saved")
    assert_same(second, CompressedReplayBuffer.load(tmp_path / "saved"))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(
    in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, feed = BUFFERS["replay"](), BUFFERS["replay"](), Feed()
    for buffer in (first, second):
        feed.add_to(buffer)
    first.save(tmp_path / "saved")
    read = manifest.read

    def replaced(folder: Path) -> dict[str, Any]:
        monkeypatch.setattr(manifest, "read", read)
        record = read(folder)
        second.save(folder)
        return record

    monkeypatch.setattr(manifest, "read", replaced)
    loaded = (open_saved if in_place else load)(tmp_path / "saved")

    np.testing.assert_array_equal(loaded.observations[:1], second.observations[:1])


@pytest.mark.parametrize("problem", ["cut", "missing"])
def test_a_save_does_not_append_to_a_data_file_that_lost_its_contents(
    problem: str, saved: tuple[Any, Any, Path]
) -> None:
    buffer, _, folder = saved
    path = next(folder.glob("data-*.bin"))
    if problem == "cut":
        os.truncate(path, 100)
    else:
        path.unlink()

    assert not save(buffer, folder).incremental
    assert_same(buffer, load(folder))


def test_data_files_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sb3_extra_buffers.files.saving._SPARE", 1 << 14)
    buffer, feed = BUFFERS["replay"](), Feed()
    most = 0
    for turn in range(120):
        for _ in range(5):
            feed.add_to(buffer)
        buffer.save(tmp_path / "saved")
        if turn % 10 == 0:
            assert_same(buffer, CompressedReplayBuffer.load(tmp_path / "saved"))
        most = max(most, size_of(tmp_path / "saved"))
    save(buffer, tmp_path / "fresh")

    # live bytes, as many dead ones, and the previous file until the new manifest is on the disk
    assert most < 6 * size_of(tmp_path / "fresh")
    assert len(list((tmp_path / "saved").glob("data-*.bin"))) <= 2


def test_two_buffers_can_take_turns_at_one_path(tmp_path: Path) -> None:
    first, second, feed = BUFFERS["replay"](), BUFFERS["replay-gzip"](), Feed()
    for _ in range(4):
        for buffer in (first, second):
            feed.add_to(buffer)
            buffer.save(tmp_path / "saved")
            assert_same(buffer, CompressedReplayBuffer.load(tmp_path / "saved"))


def test_a_copy_does_not_append_to_the_save_of_its_original(tmp_path: Path) -> None:
    buffer, feed = BUFFERS["replay"](), Feed()
    feed.add_to(buffer)
    buffer.save(tmp_path / "saved")
    twin = copy.deepcopy(buffer)
    for _ in range(9):
        feed.add_to(twin)
    for _ in range(4):
        feed.add_to(buffer)

    twin.save(tmp_path / "saved")
    assert_same(twin, CompressedReplayBuffer.load(tmp_path / "saved"))
    buffer.save(tmp_path / "saved")
    assert_same(buffer, CompressedReplayBuffer.load(tmp_path / "saved"))


def test_saving_a_copy_leaves_the_original_to_save_what_is_new(tmp_path: Path) -> None:
    space = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    buffer = CompressedReplayBuffer(40, space, spaces.Discrete(5), "cpu", compression_method="delta")
    rng = np.random.default_rng(0)
    for turn in range(20):
        # as another level of a game: the next segments need a new keyframe
        level = rng.integers(0, 256, (36, 36), np.uint8)
        for step in range(12):
            stacks = np.stack([level] * 5)
            stacks[:, step, turn] = np.arange(5)
            buffer.add(stacks[None, :4], stacks[None, 1:], np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
        copy.deepcopy(buffer).save(tmp_path / "copy")
        buffer.save(tmp_path / "saved")

        loaded = CompressedReplayBuffer.load(tmp_path / "saved")
        np.testing.assert_array_equal(np.asarray(loaded.observations), np.asarray(buffer.observations))


def test_priorities_round_trip(tmp_path: Path) -> None:
    buffer, feed = BUFFERS["prioritized"](), Feed()
    for turn in range(40):
        feed.add_to(buffer)
        if turn > 5:
            np.random.seed(turn)  # noqa: NPY002  # SB3 draws from this generator
            samples = buffer.sample(8)
            buffer.update_priorities(samples.indices, np.linspace(0.1, 3, 8))
            if turn % 7 == 0:
                buffer.save(tmp_path / "saved")
    buffer.save(tmp_path / "saved")

    assert_same(buffer, load(tmp_path / "saved"))


class UserBuffer(ReplayBuffer):
    """A user's buffer class."""


def test_a_user_class_is_loaded_by_its_own_load(tmp_path: Path) -> None:
    own = compressed(UserBuffer)
    buffer = own(40, BOX, ACTIONS, device="cpu", n_envs=N_ENVS)
    Feed().add_to(buffer)
    buffer.save(tmp_path / "saved")

    found = own.load(tmp_path / "saved")
    assert type(found) is own
    assert_same(buffer, found)
    # any other load() gives the registered base class
    for plain in (load(tmp_path / "saved"), CompressedReplayBuffer.load(tmp_path / "saved")):
        assert type(plain) is CompressedReplayBuffer
        assert_same(buffer, plain)


def test_attributes_that_users_add_round_trip(tmp_path: Path) -> None:
    buffer = BUFFERS["replay"]()
    buffer.note, buffer.curve = {"seed": 3, "names": ("a", "b")}, np.arange(5.0)
    buffer.save(tmp_path / "saved")

    found = load(tmp_path / "saved")

    assert found.note == {"seed": 3, "names": ("a", "b")}
    np.testing.assert_array_equal(found.curve, np.arange(5.0))


def test_loading_as_the_wrong_class_is_refused(tmp_path: Path) -> None:
    buffer = BUFFERS["her"]()
    buffer.save(tmp_path / "saved")

    assert type(load(tmp_path / "saved")) is CompressedHerReplayBuffer
    with pytest.raises(FileFormatError, match=r"call CompressedHerReplayBuffer.load\(\)"):
        CompressedReplayBuffer.load(tmp_path / "saved")
    with pytest.raises(FileFormatError, match="not a CompressedArray"):
        CompressedArray.load(tmp_path / "saved")


def test_an_attribute_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    buffer = BUFFERS["replay"]()
    buffer.helper = lambda: None

    with pytest.raises(NotSaveableError, match=r"helper is a builtins.function"):
        buffer.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_the_manifest_is_readable_and_names_no_code(tmp_path: Path) -> None:
    buffer, feed = BUFFERS["dict"](), Feed()
    feed.add_to(buffer)
    buffer.save(tmp_path / "saved")

    record = json.loads((tmp_path / "saved" / "manifest.json").read_text())

    assert record["kind"] == "dict-replay"
    assert record["description"]["observation_space"]["kind"] == "Dict"
    assert record["description"]["state"]["pos"] == 1
    text = (tmp_path / "saved" / "manifest.json").read_text()
    assert not any(word in text for word in ("sb3_extra_buffers", "Compressed", "ReplayBuffer", "_leaves", "_options"))
    for path in (tmp_path / "saved").iterdir():
        assert b"cnumpy" not in path.read_bytes()
        with pytest.raises(Exception):  # noqa: B017  # whatever pickle says of bytes that are none
            pickle.loads(path.read_bytes())


# ---- failures ----


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Any, Path]:
    """A buffer with a step since its last save, a copy of it as saved, and the folder."""
    buffer, feed = BUFFERS["replay"](), Feed()
    for _ in range(20):
        feed.add_to(buffer)
    buffer.save(tmp_path / "saved")
    state = copy.deepcopy(buffer)
    feed.add_to(buffer)
    return buffer, state, tmp_path / "saved"


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("one_file", [False, True])
def test_a_disk_error_at_any_call_leaves_the_previous_state(
    saved: tuple[Any, Any, Path], again: bool, one_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, state, folder = saved
    path = folder.parent / "one.file" if one_file else folder
    write, read = (save_file, load_file) if one_file else (save, load)
    write(state, path)
    n_calls = -1
    for fails_at in range(100):
        # appends to the last save, or writes a new file
        attempt = buffer if again else copy.deepcopy(buffer)
        before = snapshot(folder.parent)
        with monkeypatch.context() as patch:
            counted = fail_at(patch, fails_at)
            if not save_or_say(lambda: write(attempt, path)):  # noqa: B023  # called in this iteration
                n_calls = counted[0]
                break
        name = counted[1]
        if "renamed" in counted:
            # the save was committed before the call failed
            assert_same(attempt, read(path))
            write(state, path)
        else:
            assert_same(state, read(path))
            assert snapshot(folder.parent) == before, f"something was left behind when {name} failed"
    assert n_calls > (3 if again and not one_file else 4)
    assert_same(buffer, read(path))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def fail_at(patch: pytest.MonkeyPatch, number: int) -> list[Any]:
    """Let the disk call with this number fail; the returned list gets the count of calls and the name of that one."""
    counted: list[Any] = [0, ""]

    def wrap(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            counted[0] += 1
            if counted[0] == number + 1:
                counted[1] = name
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            found = function(*args)
            if name == "replace":
                counted.append("renamed")
            return found

        return call

    for name in ("create", "open_to_append", "write_all", "fsync", "replace", "link", "sync_folder", "make_folder"):
        patch.setattr(disk, name, wrap(name, getattr(disk, name)))
    return counted


def test_a_full_disk_leaves_the_previous_state(small_disk: Path) -> None:
    buffer, feed = BUFFERS["replay"](), Feed()
    for _ in range(20):
        feed.add_to(buffer)
    folder = small_disk / "saved"
    buffer.save(folder)
    state = copy.deepcopy(buffer)
    for _ in range(5):
        feed.add_to(buffer)
    n_failed = 0
    for n_free in range(40):
        fill_disk(small_disk, n_free)
        refused = save_or_say(lambda: buffer.save(folder))
        if not refused:
            break
        assert "what was saved before is untouched" in refused
        assert_same(state, CompressedReplayBuffer.load(folder))
        n_failed += 1
    # with enough space it works again
    assert n_failed > 1
    assert_same(buffer, CompressedReplayBuffer.load(folder))
    # a new folder
    fill_disk(small_disk, 2)
    with pytest.raises(FileWriteError, match="No space left"):
        buffer.save(small_disk / "other")
    assert not list((small_disk / "other").glob("data-*"))
    buffer.save(folder)
    assert_same(buffer, CompressedReplayBuffer.load(folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_folder_without_write_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(FileWriteError, match="Permission denied"):
            BUFFERS["replay"]().save(tmp_path / "saved")
    finally:
        tmp_path.chmod(0o700)


def test_a_read_only_file_system_is_named() -> None:
    with pytest.raises(FileWriteError, match=r"saving to /proc/saved failed"):
        BUFFERS["replay"]().save("/proc/saved")


def test_an_interrupted_close_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, close = disk.OpenFile(), os.close
    file.descriptor = disk.create(tmp_path / "first")

    def interrupted(descriptor: int) -> None:
        close(descriptor)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file.close()
    # the system uses the same number again
    other = disk.create(tmp_path / "second")
    file.close()
    assert os.fstat(other)
    os.close(other)


def test_foreign_files_and_folders_are_not_overwritten(tmp_path: Path) -> None:
    buffer = BUFFERS["replay"]()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "photo.jpg").write_text("mine")

    with pytest.raises(FileWriteError, match="is a file; a buffer is saved as a folder"):
        buffer.save(tmp_path / "file")
    with pytest.raises(FileWriteError, match=r"holds other files, such as 'photo.jpg'"):
        buffer.save(tmp_path / "folder")
    assert (tmp_path / "file").read_text() == "mine"
    assert len(list((tmp_path / "folder").iterdir())) == 1


def test_a_newer_format_is_neither_read_nor_overwritten(saved: tuple[Any, Any, Path]) -> None:
    buffer, _, folder = saved
    record = manifest.read(folder)
    manifest.write(folder, manifest.dump(record | {"version": manifest.VERSION + 1}))
    before = (folder / "manifest.json").read_bytes()

    for attempt in (lambda: CompressedReplayBuffer.load(folder), lambda: buffer.save(folder)):
        with pytest.raises(UnsupportedVersionError, match="has format version 3, but this release reads up to 2"):
            attempt()
    assert (folder / "manifest.json").read_bytes() == before


def test_loading_something_else_says_what_it_is(tmp_path: Path) -> None:
    buffer, feed = BUFFERS["replay"](), Feed()
    feed.add_to(buffer)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps([1]))
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "manifest.json").write_text('{"name": "a web page"}')
    save(buffer, tmp_path / "folder" / "checkpoint")
    save_file(buffer, tmp_path / "one")
    expected = {
        "nowhere": "nowhere: no such file or directory",
        "file/below": "below: no such file or directory",
        "x" * 300: "cannot be read: File name too long",
        "file": "file is not a saved buffer",
        "buffer.pkl": r"is a pickle, not a saved buffer; convert it first: .* convert .*buffer.pkl FOLDER --trust",
        "folder": r"folder is not a saved buffer: it has no manifest.json; it contains .*checkpoint",
        "site": "site is not a saved buffer: its manifest.json was written by another program",
    }
    for name, message in expected.items():
        for read in (load, lambda path: list(verify(path)), lambda path: repair(path, tmp_path / "repaired")):
            with pytest.raises(FileFormatError, match=message):
                read(tmp_path / name)
    with pytest.raises(FileFormatError, match=r"is a file; .* read by load_file\(\)"):
        load(tmp_path / "one")
    with pytest.raises(DamagedFileError, match="empty is empty"):
        load_file(tmp_path / "empty")
    (tmp_path / "folder" / "checkpoint" / "manifest.json").unlink()
    with pytest.raises(DamagedFileError, match=r"manifest.json is missing; repair\(\) may"):
        load(tmp_path / "folder" / "checkpoint")
    report = repair(tmp_path / "folder" / "checkpoint", tmp_path / "repaired")
    assert_same(buffer, load(tmp_path / "repaired"))
    assert report.n_steps == len(buffer)
    save(make_array(7)[0], tmp_path / "array")
    assert repair(tmp_path / "array", tmp_path / "repaired array").n_steps == 7 * N_ENVS


def test_a_missing_data_file_is_named(saved: tuple[Any, Any, Path]) -> None:
    folder = saved[2]
    next(folder.glob("data-*.bin")).unlink()

    with pytest.raises(DamagedFileError, match=r"data-0001.bin is missing"):
        load(folder)
