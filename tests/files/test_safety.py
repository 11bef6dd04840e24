"""Untrusted files, several writers, repair: only files of the folder are opened, and only one process writes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.compressed import CompressedArray, CompressedPrioritizedReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.errors import (
    ArgumentError,
    DamagedFileError,
    ExtraBuffersError,
    FileFormatError,
    FolderInUseError,
    NotSaveableError,
    SharingError,
)
from sb3_extra_buffers.files import (
    load,
    load_file,
    manifest,
    mmap_buffer,
    open_saved,
    registry,
    repair,
    save,
    save_file,
    verify,
)
from sb3_extra_buffers.files.journal import Journal, read_journal
from sb3_extra_buffers.files.parts import LoadedParts, flatten, unflatten
from sb3_extra_buffers.files.saved_parts import SavedParts
from tests.contracts.store import run_fresh
from tests.files.filing import ACTIONS, BOX, BUFFERS, IMAGE, N_ENVS, Feed, assert_same, batches, finish, make_array


def fill(name: str, n_steps: int = 26) -> Any:
    buffer, feed = BUFFERS[name](), Feed()
    for _ in range(n_steps):
        feed.add_to(buffer)
    return buffer


def open_to_write(folder: Path) -> Any:
    return open_saved(folder, mode="r+")


def closed_mmap_buffer(folder: Path) -> Any:
    """A buffer that was kept in ``folder``, which is closed."""
    buffer, feed = BUFFERS["replay-delta"](), Feed()
    kept = mmap_buffer.keep_in_file(buffer, folder)
    for _ in range(20):
        feed.add_to(buffer)
    kept.checkpoint()
    kept.close()
    return buffer


# ---- other files ----


def test_a_hard_linked_heap_file_is_not_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    buffer = closed_mmap_buffer(folder)
    heap = next(folder.glob("heap-*.bin"))
    os.link(heap, tmp_path / "elsewhere.bin")
    before = heap.read_bytes()

    with pytest.raises(FileFormatError, match="hard-linked"):
        open_to_write(folder)

    assert heap.read_bytes() == before
    assert_same(load(folder), buffer)


@pytest.mark.parametrize("replaced", ["data-0001.bin", "heap-0-0001.bin", "journal-*.bin", "manifest.json"])
@pytest.mark.parametrize("by", ["link", "fifo", "folder"])
def test_links_fifos_and_folders_are_not_opened(replaced: str, by: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    closed_mmap_buffer(folder)
    target = next(folder.glob(replaced))
    elsewhere = tmp_path / "elsewhere.bin"
    target.rename(elsewhere)
    before = elsewhere.read_bytes()
    if by == "link":
        target.symlink_to(elsewhere)
    elif by == "fifo":
        os.mkfifo(target)
    else:
        target.mkdir()

    for way in (load, open_to_write):
        with pytest.raises(ExtraBuffersError, match=r"symbolic link|not a regular file"):
            way(folder)
    # succeeds if the file is not needed, or another state is found
    with contextlib.suppress(ExtraBuffersError):
        open_saved(folder)
    with contextlib.suppress(ExtraBuffersError):
        repair(folder, tmp_path / "repaired")
    assert [finding for finding in verify(folder) if "symbolic link" in finding or "regular file" in finding]
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize(
    "name", ["../elsewhere.bin", "/etc/passwd", "data-0001.bin\n", "data-1.bin", "heap-0-0001.bin", 3, None, "", ["x"]]
)
def test_manifests_cannot_refer_to_other_files(name: Any, tmp_path: Path) -> None:
    save(fill("replay-delta"), tmp_path / "saved")
    record = manifest.read(tmp_path / "saved")
    victim = tmp_path / "elsewhere.bin"
    victim.write_bytes(bytes(5000))
    store = record["stores"]["observations"]
    forged = [
        record | {"data": record["data"] | {"name": name}},
        record | {"stores": {"observations": store | {"heap": {"name": name, "size": 4000}}}},
    ]
    if name is not None:
        forged.append(record | {"journal": name})
    if name == "heap-0-0001.bin":
        forged = forged[:1]
    for changed in forged:
        manifest.write(tmp_path / "saved", manifest.dump(changed))
        for way in (load, open_to_write):
            with pytest.raises(ExtraBuffersError):
                way(tmp_path / "saved")
    assert victim.read_bytes() == bytes(5000)


@pytest.mark.parametrize(
    "kind", ["nosuch", "os:system", "sb3_extra_buffers.cli.main:main", None, 3, {"$torch": "load"}]
)
def test_an_unknown_kind_is_refused(kind: Any, tmp_path: Path) -> None:
    save(fill("replay", 3), tmp_path / "saved")
    manifest.write(tmp_path / "saved", manifest.dump(manifest.read(tmp_path / "saved") | {"kind": kind}))

    with pytest.raises(FileFormatError, match=r"unknown kind .* update sb3-extra-buffers"):
        load(tmp_path / "saved")


# ---- forged contents with valid checksums ----


def change_description(folder: Path, change: Callable[[Any], Any]) -> None:
    record = manifest.read(folder)
    change(record["description"])
    manifest.write(folder, manifest.dump(record))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("replay", lambda d: d.update(steps=1 << 40)),
        ("replay", lambda d: d.update(n_envs=1 << 40)),
        ("replay", lambda d: d.update(steps=27)),
        ("replay", lambda d: d["state"].update(pos=26)),
        ("replay", lambda d: d["state"].update(pos=-1)),
        ("replay", lambda d: d["state"].update(full=1)),
        ("replay", lambda d: d["state"].update(n_evicted=27)),
        ("replay", lambda d: d["observation_space"].update(shape=[2, 18, 21])),
        ("replay", lambda d: d["observation_space"].update(shape=[1 << 20, 1 << 20])),
        ("replay", lambda d: d["action_space"].update(kind="Box")),
        ("replay", lambda d: d["arguments"].update(path="/tmp/x", storage="mmap")),
        ("replay", lambda d: d["arguments"].pop("gamma")),
        ("replay", lambda d: d["arguments"].update(n_steps=-3)),
        ("replay", lambda d: d["extra"].update(sample=3)),
        ("replay", lambda d: d["extra"].update(_options=3)),
        ("replay", lambda d: d["extra"].update(pos=3)),
        ("her", lambda d: d["arguments"].update(goal_selection_strategy="nosuch")),
        ("prioritized", lambda d: d["state"].update(n_added=5)),
        ("prioritized", lambda d: d["state"].update(max_priority=-1)),
        ("rollout", lambda d: d["state"].update(full=False)),
        ("recurrent-rollout", lambda d: d["arguments"].update(hidden_state_shape=[1 << 20] * 4)),
        ("maskable-rollout", lambda d: d["action_space"].update(n=1 << 40)),
        ("gpu", lambda d: d["state"].update(pos=26)),
        ("gpu", lambda d: d.update(steps=27)),
        ("gpu-frames", lambda d: d.update(n_envs=1)),
        ("gpu-frames", lambda d: d["observation_space"].update(shape=[2, 18, 21])),
        ("gpu-dense", lambda d: d["observation_space"].update(shape=[2, 18, 21])),
    ],
)  # fmt: skip
def test_invalid_descriptions_are_refused(name: str, change: Callable[[Any], Any], tmp_path: Path) -> None:
    if name not in BUFFERS:
        pytest.skip("needs sb3-contrib")
    save(fill(name), tmp_path / "saved")
    change_description(tmp_path / "saved", change)

    with pytest.raises(FileFormatError, match=re.escape(str(tmp_path / "saved"))):
        load(tmp_path / "saved")
    with pytest.raises(ExtraBuffersError):
        open_saved(tmp_path / "saved")
    assert list(verify(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("name", "column", "change"),
    [
        ("her", "ep_start", lambda column: column.fill(1000)),
        ("her", "ep_length", lambda column: column.fill(-1)),
        ("her", "ep_length", lambda column: column.fill(26)),
        ("her", "current_ep_start", lambda column: column.fill(99)),
        ("her", "current_ep_start", lambda column: column.fill(17)),  # in another episode
        ("prioritized", "priorities", lambda column: column.fill(np.nan)),
        ("prioritized", "priorities", lambda column: column.fill(-1)),
        ("prioritized", "priorities", lambda column: column.fill(0)),
        ("her-infos", "infos", lambda column: column.fill(ord("["))),
    ],
)
def test_columns_out_of_range_are_refused(name: str, column: str, change: Any) -> None:
    described, arrays = flatten(fill(name).to_parts())
    arrays = {key: array.copy() for key, array in arrays.items()}
    change(arrays[f"columns/{column}"])

    with pytest.raises(ExtraBuffersError):
        registry.from_parts(unflatten(described, arrays))


def test_a_view_that_does_not_fit_its_store_is_refused(tmp_path: Path) -> None:
    array, _ = make_array()
    array.save(tmp_path / "saved")
    for change in ({"lead_shape": [0, 2], "base": 90}, {"lead_shape": [40, 3]}, {"base": 1}, {"lead_shape": [-1, 2]}):
        shutil.copytree(tmp_path / "saved", tmp_path / "forged", dirs_exist_ok=True)
        change_description(tmp_path / "forged", lambda described: described.update(change))  # noqa: B023  # called in this iteration
        with pytest.raises(FileFormatError):
            load(tmp_path / "forged")


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("write", [(4,), (3,), (4, 720)]),
        ("write", [(4,), (4,), (3, 720)]),
        ("write", [(4,), (4,), (4, 719)]),
        ("write", [(4,)]),
        ("erase", [(4,), (4,)]),
        ("erase", [(2, 2)]),
        ("clear", [(4,)]),
        ("add", []),
        ("unknown", []),
    ],
)
def test_forged_records_of_an_array_are_refused(kind: str, shapes: Any, tmp_path: Path) -> None:
    array = CompressedArray((30, N_ENVS), IMAGE, np.uint8, storage="mmap", path=tmp_path / "live")
    array[0] = 3
    assert array.mmap_folder is not None
    array.mmap_folder.close()
    path = next((tmp_path / "live").glob("journal-*"))
    path.unlink()
    arrays = [np.zeros(shape, np.uint8 if len(shape) == 2 and shape[1] > 9 else np.int64) for shape in shapes]
    Journal(path).append({"kind": kind}, arrays)

    for way in (load, open_to_write):
        with pytest.raises(FileFormatError):
            way(tmp_path / "live")


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("size", [0, 1, 3])
def test_forged_records_of_a_step_are_refused(index: int, size: int, tmp_path: Path) -> None:
    buffer, feed = BUFFERS["replay-delta"](), Feed()
    kept = mmap_buffer.keep_in_file(buffer, tmp_path / "live")
    for _ in range(15):
        feed.add_to(buffer)
    kept.close()
    path = next((tmp_path / "live").glob("journal-*"))
    records = list(read_journal(path))
    fields, arrays = records[-1]
    path.unlink()
    journal = Journal(path)
    for record in records[:-1]:
        journal.append(*record)
    forged = list(arrays)
    forged[index] = np.resize(arrays[index], (size, *arrays[index].shape[1:]))
    if forged[index].shape == arrays[index].shape:
        forged[index] = arrays[index].astype(np.complex128)
    journal.append(fields, forged)

    if index in (6, 7) and size == 1:
        load(tmp_path / "live")  # one reward for all environments, which SB3 accepts
        return
    with pytest.raises(ExtraBuffersError):
        load(tmp_path / "live")


# ---- one writer ----


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    buffer = fill("replay-delta")
    mmap_buffer.keep_in_file(buffer, tmp_path / "live")

    for attempt in (
        lambda: open_saved(tmp_path / "live", mode="r+"),
        lambda: mmap_buffer.keep_in_file(fill("replay"), tmp_path / "live"),
        lambda: save(fill("replay"), tmp_path / "live"),
    ):
        with pytest.raises(FolderInUseError, match=rf"another buffer is writing to {tmp_path}.*mode='r'"):
            attempt()
    code = f"from sb3_extra_buffers.files import open_saved; open_saved({str(tmp_path / 'live')!r}, mode='r+')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "FolderInUseError" in ran.stderr
    # reading is always allowed
    assert_same(buffer, load(tmp_path / "live"))
    open_saved(tmp_path / "live")
    # the lock is released with the buffer
    del buffer
    open_saved(tmp_path / "live", mode="r+")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded: pytest, not the library
def test_a_forked_child_cannot_write_and_does_not_hold_the_lock(tmp_path: Path) -> None:
    buffer, feed = BUFFERS["replay-delta"](), Feed()
    mmap_buffer.keep_in_file(buffer, tmp_path / "live")
    for _ in range(12):
        feed.add_to(buffer)
    before = {path.name: path.read_bytes() for path in (tmp_path / "live").iterdir()}
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                feed.add_to(buffer)
            except SharingError as error:
                os.write(writing, str(error).encode())
        finally:
            os.close(writing)
            os.read(os.open("/dev/null", os.O_RDONLY), 1)
            os._exit(0)
    os.close(writing)
    said = os.read(reading, 1000).decode()
    os.waitpid(child, 0)

    assert "belongs to the process that opened it" in said
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "live").iterdir()}
    feed.add_to(buffer)
    assert_same(buffer, load(tmp_path / "live"))


# ---- single files, rollouts, repair ----


def test_a_single_file_holds_everything(tmp_path: Path) -> None:
    for name in ("replay-delta", "her-infos", "gpu-frames"):
        buffer = fill(name)
        save_file(buffer, tmp_path / "one")
        found = load_file(tmp_path / "one")
        finish(found)
        assert_same(buffer, found)
        assert not list(verify(tmp_path / "one"))
    data = (tmp_path / "one").read_bytes()
    for cut in (1, 40, 400, len(data) // 2, len(data)):
        (tmp_path / "one").write_bytes(data[: len(data) - cut])
        with pytest.raises(DamagedFileError):
            load_file(tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_rollout_can_be_saved_while_it_is_read(tmp_path: Path) -> None:
    for name in BUFFERS:
        if "rollout" not in name:
            continue
        buffer = fill(name)
        expected = batches(buffer)
        next(buffer.get(7))
        buffer.save(tmp_path / name)
        found = load(tmp_path / name)

        for mine, other in zip(expected, batches(found), strict=True):
            for left, right in zip(mine, other, strict=True):
                np.testing.assert_array_equal(left, right)
        found.reset()
        Feed().add_to(found)


def test_a_function_as_beta_is_refused(tmp_path: Path) -> None:
    buffer = CompressedPrioritizedReplayBuffer(
        40, BOX, ACTIONS, device="cpu", n_envs=N_ENVS, beta=lambda remaining: 1 - remaining
    )

    with pytest.raises(NotSaveableError, match=r"beta is a function.*pass a number or a pair"):
        buffer.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_repair_cuts_priorities_with_their_steps(tmp_path: Path) -> None:
    buffer = fill("prioritized", 40)
    save(buffer, tmp_path / "saved")
    path = next((tmp_path / "saved").glob("data-*"))
    saved = bytearray(path.read_bytes())
    offset = int(SavedParts.of_folder(tmp_path / "saved").blocks.read("stores/observations/chunks")[-1, 0])
    saved[offset + 3] ^= 1
    path.write_bytes(saved)
    with pytest.raises(DamagedFileError):
        load(tmp_path / "saved")

    (tmp_path / "link").symlink_to("saved")
    for target in ("saved", "link"):
        with pytest.raises(ArgumentError, match="cannot be repaired in place"):
            repair(tmp_path / "saved", tmp_path / target)
    assert path.read_bytes() == saved
    report = repair(tmp_path / "saved", tmp_path / "repaired")
    found = load(tmp_path / "repaired")

    found.check()
    assert found.size() * N_ENVS == report.n_steps == 26 * N_ENVS - report.n_lost
    steps = (found.pos + found.n_evicted * found.full + np.arange(found.size())) % 26
    if found.size():
        np.testing.assert_array_equal(found.observations[steps], buffer.observations[steps])
        np.testing.assert_array_equal(found.rewards[steps], buffer.rewards[steps])
        found.sample(8)


def test_repair_uses_the_copy_of_a_damaged_manifest(tmp_path: Path) -> None:
    buffer = fill("replay-gzip")
    save(buffer, tmp_path / "saved")
    (tmp_path / "saved" / "manifest.json").write_text("{}")

    with pytest.raises(DamagedFileError):
        load(tmp_path / "saved")
    repair(tmp_path / "saved", tmp_path / "repaired")
    assert_same(buffer, CompressedReplayBuffer.load(tmp_path / "repaired"))


def test_forged_tables_are_refused_and_repaired_from_the_copy(tmp_path: Path) -> None:
    save(fill("replay-delta"), tmp_path / "saved")
    record = manifest.read(tmp_path / "saved")
    tables = record["stores"]["observations"]["arrays"]
    for name in tables:
        for forged in ([], [1, 2, 3], ["<i4", [0], 0], ["<i8", [1 << 40], 0], ["|u1", [3, 3], 0], ["<f8", [1], 0]):
            changed = json.loads(json.dumps(record))
            changed["stores"]["observations"]["arrays"][name] = forged
            manifest.write(tmp_path / "saved", manifest.dump(changed))
            for way in (load, open_saved):
                with pytest.raises(ExtraBuffersError):
                    way(tmp_path / "saved")
            repair(tmp_path / "saved", tmp_path / "repaired")  # from the copy in the data file
            assert list(verify(tmp_path / "saved"))


def test_a_forged_number_of_observations_takes_no_memory(tmp_path: Path) -> None:
    save(fill("replay-delta"), tmp_path / "saved")
    record = manifest.read(tmp_path / "saved")
    record["stores"]["observations"]["record"]["n_cells"] = 1 << 30
    manifest.write(tmp_path / "saved", manifest.dump(record))
    tracemalloc.start()
    try:
        assert list(verify(tmp_path / "saved"))
        repair(tmp_path / "saved", tmp_path / "repaired")
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


def test_decoding_everything_skips_what_was_never_written(tmp_path: Path) -> None:
    array = CompressedArray(1 << 40, IMAGE, np.uint8)
    array[5] = np.ones(IMAGE, np.uint8)
    save(array, tmp_path / "saved")

    shown = run_fresh(
        "import sys; from sb3_extra_buffers.files import verify; print(list(verify(sys.argv[1], deep=True)))",
        str(tmp_path / "saved"), timeout=60,
    )  # fmt: skip
    assert shown == "[]\n"


@pytest.mark.parametrize("part", ["first", "middle", "last", "all"])
def test_payloads_without_checksums_are_refused(part: str, tmp_path: Path) -> None:
    save(fill("replay-gzip", 60), tmp_path / "saved")
    saved = SavedParts.of_folder(tmp_path / "saved")
    names = saved.stores["observations"]["arrays"]
    tables = {name: saved.blocks.read(f"stores/observations/{name}") for name in names}
    saved.make_store("observations", tables, read_only=True)
    # split into short chunks, then drop some
    data, (offset, length, _) = saved.data, tables["chunks"][0]
    ends = np.linspace(offset, offset + length, 4).astype(np.int64)
    chunks = [(start, end - start, zlib.crc32(data[start:end].data)) for start, end in itertools.pairwise(ends)]
    chunks += [tuple(chunk) for chunk in tables["chunks"][1:]]
    saved.make_store("observations", tables | {"chunks": np.array(chunks)}, read_only=True)
    kept = {"first": chunks[1:], "middle": [chunks[0], *chunks[2:]], "last": chunks[:-1], "all": []}[part]

    with pytest.raises(FileFormatError, match="checksums"):
        saved.make_store("observations", tables | {"chunks": np.array(kept, np.int64).reshape(-1, 3)}, read_only=True)


def test_every_tag_stands_for_an_existing_class() -> None:
    for tag in registry.REGISTRY:
        try:
            cls = registry.class_of(tag)
        except ExtraBuffersError:
            continue
        assert registry.tag_of(cls) == tag
        with pytest.raises(ExtraBuffersError):
            registry.from_parts(LoadedParts(tag, {}, {}, {}))
