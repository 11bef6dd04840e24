"""Untrusted files and packets: nothing in them runs, crashes or is used unchecked."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from sb3_extra_buffers._torchrl.memmaps import read_memmaps
from sb3_extra_buffers._torchrl.wire import decode_packet, encode_packet
from sb3_extra_buffers.errors import (
    CorruptPayloadError,
    DamagedFileError,
    ExtraBuffersError,
    FileFormatError,
    FileWriteError,
    UntrustedFileError,
)
from sb3_extra_buffers.files import disk
from sb3_extra_buffers.files.manifest import dump
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
from sb3_extra_buffers.replay_buffers.experience_memory import ReplayBuffer
from tests.replay_buffers.trajectories import assert_same, trajectory

CPU = torch.device("cpu")


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def filled(n_items: int = 70, size: int = 50, **options: Any) -> Any:
    buffer = TensorDictReplayBuffer(storage=CompressedStorage(size, **options), batch_size=8)
    buffer.extend(trajectory(n_items, 1))
    return buffer


# ---- pickles ----


def theirs(folder: Path) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=8)
    buffer.extend(trajectory(20))
    buffer.storage.dumps(folder)


def hide_pickle(folder: Path, how: str, trap: Path) -> None:
    """Put a pickle where TensorDict would open it."""
    code = pickle.dumps(Trap(trap))
    meta = json.loads((folder / "meta.json").read_text())
    if how == "an object among the tensors":
        (folder / "object").mkdir()
        (folder / "object" / "meta.json").write_text(
            json.dumps({"_type": "<class 'tensordict.tensorclass.NonTensorData'>", "_is_non_tensor": True})
        )
        (folder / "object" / "other.pickle").write_bytes(code)
        (folder / "object" / "pickle.pkl").write_bytes(code)
        meta["object"] = {"type": "NonTensorData"}
    elif how == "another class":
        (folder / "other.pickle").write_bytes(code)
        (folder / "pickle.pkl").write_bytes(code)
        meta["_type"] = "<class 'tensordict.tensorclass.NonTensorData'>"
    else:
        elsewhere = folder.parent / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "meta.json").write_text(json.dumps({"shape": [50], "device": "cpu", "_type": "NonTensorData"}))
        (elsewhere / "other.pickle").write_bytes(code)
        (elsewhere / "pickle.pkl").write_bytes(code)
        (folder / "linked").symlink_to(elsewhere)
        meta["linked"] = {"type": "TensorDict"}
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("how", ["an object among the tensors", "another class", "a linked folder"])
def test_no_pickle_in_a_folder_of_torchrl_is_opened(tmp_path: Path, how: str) -> None:
    theirs(tmp_path / "dump")
    hide_pickle(tmp_path / "dump", how, tmp_path / "trapped")
    target = filled(10)
    before = target[:].clone()

    with pytest.raises(UntrustedFileError):
        target.storage.loads(tmp_path / "dump")
    assert not (tmp_path / "trapped").exists()
    assert_same(target[:].clone(), before)


@pytest.mark.parametrize("storage", ["auto", "compressed"])
def test_pickles_beside_saved_experience_are_not_opened(tmp_path: Path, storage: Any) -> None:
    buffer = ReplayBuffer(CPU, CPU, 50, storage=storage)
    buffer.add_batch(trajectory(20))
    buffer.save(tmp_path / "buffer", contents=True)
    [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
    for name in ("pickle.pkl", "other.pickle", "meta.json"):
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))

    again = ReplayBuffer(CPU, CPU, 50, storage=storage)
    again.load(tmp_path / "buffer")
    assert not (tmp_path / "trapped").exists()
    assert_same(again.sample_all().exclude("index"), trajectory(20))


@pytest.mark.parametrize("folder", ["../../elsewhere", "/etc", "buffer.contents-0123456789ag", "", 3, ["x"]])
def test_metadata_cannot_name_another_folder(tmp_path: Path, folder: Any) -> None:
    buffer = ReplayBuffer(CPU, CPU, 50)
    buffer.add_batch(trajectory(20))
    buffer.save(tmp_path / "buffer", contents=True)
    note = json.loads((tmp_path / "buffer.metadata").read_text())
    (tmp_path / "buffer.metadata").write_text(json.dumps({**note, "contents": folder}))
    with pytest.raises(FileFormatError):
        buffer.load(tmp_path / "buffer")
    assert len(buffer) == 20


def test_saving_again_deletes_only_its_own_files(tmp_path: Path) -> None:
    buffer = ReplayBuffer(CPU, CPU, 50)
    buffer.add_batch(trajectory(20))
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "data-0001.bin").write_text("mine")
    (tmp_path / "buffer.contents-0123456789ab").symlink_to(keep)
    (tmp_path / "buffer.contents-mine").mkdir()
    buffer.save(tmp_path / "buffer", contents=True)
    buffer.save(tmp_path / "buffer", contents=True)
    assert (keep / "data-0001.bin").read_text() == "mine"
    assert (tmp_path / "buffer.contents-mine").exists()
    assert len([path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]) == 3


def edit_meta(folder: Path, key: str, **entries: Any) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    meta[key].update(entries)
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    "damage",
    [
        "short", "long", "dtype", "shape", "negative", "huge", "missing", "linked file", "fifo", "no json", "a list",
        "parent", "batch",
    ],
)  # fmt: skip
def test_inconsistent_folders_of_torchrl_raise(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "td"
    TensorDict({"a": torch.arange(12).reshape(4, 3), "n": {"b": torch.zeros(4)}}, [4]).memmap(folder)
    tensor = folder / "a.memmap"
    if damage == "short":
        tensor.write_bytes(tensor.read_bytes()[:-1])
    elif damage == "long":
        tensor.write_bytes(tensor.read_bytes() + b"x")
    elif damage == "dtype":
        edit_meta(folder, "a", dtype="torch.load")
    elif damage in ("shape", "negative", "huge"):
        edit_meta(folder, "a", shape={"shape": [4, 4], "negative": [-4, -3], "huge": [4, 1 << 60]}[damage])
    elif damage == "missing":
        tensor.unlink()
    elif damage == "linked file":
        tensor.rename(tmp_path / "other")
        tensor.symlink_to(tmp_path / "other")
    elif damage == "fifo":
        tensor.unlink()
        os.mkfifo(tensor)
    elif damage == "parent":
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps({**meta, "..": {"type": "TensorDict"}}))
    elif damage == "batch":
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps({**meta, "shape": [5]}))
    else:
        (folder / "meta.json").write_text("[1]" if damage == "a list" else "{")
    with pytest.raises((FileFormatError, DamagedFileError, UntrustedFileError)):
        read_memmaps(folder)


def test_folders_of_torchrl_are_read_as_torchrl_reads_them(tmp_path: Path) -> None:
    data = TensorDict(
        {
            "a": torch.arange(12).reshape(4, 3),
            "a b/c.d": torch.rand(4).to(torch.bfloat16),
            "none": torch.zeros(4, 0),
            "n": {"b": torch.rand(4, 2) < 0.5, "deep": {"c": torch.rand(4, dtype=torch.float64)}},
        },
        [4],
    )
    data.memmap(tmp_path / "td")
    assert_same(read_memmaps(tmp_path / "td"), data)


# ---- forged dumps ----


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and update its checksum."""
    record = json.loads((folder / "manifest.json").read_text())
    del record["crc32"]
    change(record)
    (folder / "manifest.json").write_bytes(dump(record))


def leaves_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of the numbers, strings and empty containers in a description."""
    if isinstance(value, dict) and value:
        return [found for key, part in value.items() for found in leaves_of(part, (*path, key))]
    if isinstance(value, list) and value:
        return [found for place, part in enumerate(value) for found in leaves_of(part, (*path, place))]
    return [path]


def put(record: Any, path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        record = record[part]
    record[path[-1]] = value


def forged_values(old: Any, rng: random.Random) -> Any:
    others: list[Any] = [None, -1, 0, 1, 2, 3, 7, 1 << 31, 1 << 47, 1 << 62, 0.5, "", "x", "zstd-3", "float32", [], {}]
    others += [True, [-1], {"a": 1}, "../../../etc/passwd"]
    others += [old + 1, old - 1, old * 2] if type(old) is int else []
    return rng.choice(others)


def check_forged(folder: Path, target: Any, before: Any) -> bool:
    """Load a forged dump and use the result; return whether it was accepted."""
    try:
        target.storage.loads(folder)
    except ExtraBuffersError:
        assert_same(target[:].clone(), before)
        return False
    target.storage.check()
    if len(target):
        target.sample()
        target[:].clone()
    target.storage.set(range(3), trajectory(3).set("index", torch.arange(3)))
    target.storage._empty()
    return True


def run_forgeries(tmp_path: Path, count: int, seed: int) -> int:
    rng = random.Random(seed)
    filled(n_envs=1).storage.dumps(tmp_path / "dump")
    whole = (tmp_path / "dump" / "manifest.json").read_bytes()
    record = json.loads(whole)
    places = [("description", *path) for path in leaves_of(record["description"])]
    places += [("stores", *path) for path in leaves_of(record["stores"])]
    places += [("columns", *path) for path in leaves_of(record["columns"])]
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    accepted = 0
    for _ in range(count):
        path = rng.choice(places)

        def change(forged: dict[str, Any], path: tuple[Any, ...] = path) -> None:
            old = forged
            for part in path:
                old = old[part]
            put(forged, path, forged_values(copy.deepcopy(old), rng))

        forge(tmp_path / "dump", change)
        target = filled(10, n_envs=1)
        accepted += check_forged(tmp_path / "dump", target, target[:].clone())
        (tmp_path / "dump" / "manifest.json").write_bytes(whole)
        assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == names
    return accepted


def test_a_forged_description_raises_or_is_harmless(tmp_path: Path) -> None:
    accepted = run_forgeries(tmp_path, 150, seed=1)
    assert accepted < 60


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_forged_descriptions(tmp_path: Path, seed: int) -> None:
    run_forgeries(tmp_path, 1500, seed=100 + seed)


@pytest.mark.parametrize("table", ["slots", "lengths", "counts", "scenes", "streams"])
def test_a_state_with_forged_tables_raises(table: str) -> None:
    """Arrays of a state are checked before compiled code uses them: these used to crash on read or write."""
    state = filled(n_envs=1, compression_method="delta").storage.state_dict()
    name = next(name for name in state["arrays"] if name.endswith(f"/{table}"))
    array = state["arrays"][name]
    target = filled(10, n_envs=1, compression_method="delta")
    before = target[:].clone()
    for value in (1 << 30, -7):
        forged = array.clone()
        forged.view(-1)[:] = value
        state["arrays"][name] = forged
        with pytest.raises(ExtraBuffersError):
            target.storage.load_state_dict(state)
        assert_same(target[:].clone(), before)


def test_a_dump_cannot_name_other_files(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    filled(n_envs=1).storage.dumps(tmp_path / "dump")
    record = json.loads((tmp_path / "dump" / "manifest.json").read_text())
    for name in ("path", "_path", "heap", "file"):
        for value in (str(victim), {"name": str(victim), "size": 100}, {"name": "../victim", "size": 8}):

            def change(forged: dict[str, Any], name: str = name, value: Any = value) -> None:
                for store in forged["stores"].values():
                    store[name] = value
                    store["record"][name] = value

            forge(tmp_path / "dump", change)
            target = filled(10, n_envs=1)
            check_forged(tmp_path / "dump", target, target[:].clone())
            assert victim.read_text() == "precious"
    assert record["kind"] == "torchrl-storage"


@pytest.mark.parametrize("state", [None, 3, {}, {"arrays": 1}, {"arrays": {}}, {"_storage": {}, "_len": "x"}])
def test_invalid_states_raise(state: Any) -> None:
    target = filled(10)
    with pytest.raises(FileFormatError):
        target.storage.load_state_dict(state)
    assert len(target) == 10


# ---- packets ----


def header_of(packet: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(packet[4:8], "little")
    return json.loads(packet[8 : 8 + length]), packet[8 + length :]


def packed(header: dict[str, Any], body: bytes, magic: bytes = b"XBT2") -> bytes:
    text = json.dumps(header).encode()
    return magic + len(text).to_bytes(4, "little") + text + body


def old_packet() -> bytes:
    """A packet of the first version, whose header and sections are other ones."""
    return (Path(__file__).parents[1] / "golden" / "packets" / "items-1.bin").read_bytes()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_forged_packets_raise_one_kind_of_error(seed: int, version: int) -> None:
    rng = random.Random(seed)
    packet = encode_packet(trajectory(12), writer="a", number=3) if version == 2 else old_packet()
    header, body = header_of(packet)
    places = leaves_of(header)
    for _ in range(400):
        forged = copy.deepcopy(header)
        path = rng.choice(places)
        old: Any = forged
        for part in path:
            old = old[part]
        put(forged, path, forged_values(old, rng))
        try:
            found = decode_packet(packed(forged, body, packet[:4]))
        except CorruptPayloadError:
            continue
        assert found.numel() <= 12
        assert sum(value.nbytes for value in found.values(True, True)) < 1 << 20


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["leaves"][0].update(dtype="load"),
        lambda header: header["leaves"][0].update(shape=[12, 1 << 40]),
        lambda header: header["groups"][0].update(first=1 << 40),
        lambda header: header["groups"][0].update(first=-1),
        lambda header: header["groups"][0].update(sections=0),
        lambda header: header["groups"][0].update(leaves=[0, 0]),
        lambda header: header["sections"][0].__setitem__(1, 1 << 40),
        lambda header: header.update(codec="palette", sections=[[n, n + 1] for n, _ in header["sections"]]),
        lambda header: header.update(codec="palette"),
        lambda header: header.update(lead=[1 << 40]),
        lambda header: header["sections"][-1].__setitem__(1, 1 << 40),
    ],
)
def test_the_header_of_a_packet_is_checked_before_decoding(change: Any) -> None:
    header, body = header_of(encode_packet(trajectory(12)))
    change(header)
    with pytest.raises(CorruptPayloadError):
        decode_packet(packed(header, body))


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["leaves"][0].update(dtype="load"),
        lambda header: header["leaves"][0].update(shape=[12, 1 << 40]),
        lambda header: header["groups"][0].update(frames=1 << 40),
        lambda header: header["groups"][0].update(section=-1),
        lambda header: header["groups"][0].update(leaves=[0, 0]),
        lambda header: header["groups"][0].update(stack=3),
        lambda header: header.update(codec="palette"),
        lambda header: header.update(lead=[1 << 40]),
        lambda header: header.update(small=1 << 40),
    ],
)
def test_the_header_of_an_old_packet_is_checked_before_decoding(change: Any) -> None:
    header, body = header_of(old_packet())
    change(header)
    with pytest.raises(CorruptPayloadError):
        decode_packet(packed(header, body, b"XBT1"))


@pytest.mark.parametrize(
    "packet", [b"", b"XBT1", b"XBT2", 3, None, "text", b"XBT1\xff\xff\xff\xff{}", b"XBT2\xff\xff\xff\xff{}", b"x" * 100]
)
def test_anything_but_a_packet_raises(packet: Any) -> None:
    with pytest.raises(CorruptPayloadError):
        decode_packet(packet)


# ---- full disks ----


@pytest.mark.parametrize("saver", ["storage", "experience", "experience of tensors"])
def test_a_full_disk_raises_and_keeps_the_previous_save(
    tmp_path: Path, saver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if saver == "storage":
        buffer: Any = filled(30)
        save: Any = lambda: buffer.storage.dumps(tmp_path / "saved")  # noqa: E731
    else:
        buffer = ReplayBuffer(CPU, CPU, 50, storage="compressed" if saver == "experience" else "auto")
        buffer.add_batch(trajectory(30))
        save = lambda: buffer.save(tmp_path / "saved", contents=True)  # noqa: E731
    save()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write_all, calls = disk.write_all, [0]
    for failing in range(1, 3):
        calls[0] = 0

        def write(descriptor: int, parts: Any, failing: int = failing) -> None:
            calls[0] += 1
            if calls[0] >= failing:
                raise OSError(errno.ENOSPC, "No space left on device")
            write_all(descriptor, parts)

        monkeypatch.setattr(disk, "write_all", write)
        (buffer.extend if saver == "storage" else buffer.add_batch)(trajectory(3, seed=5))
        with pytest.raises(FileWriteError):
            save()
        assert calls[0] == failing
        monkeypatch.setattr(disk, "write_all", write_all)
        for path, content in before.items():
            assert path.read_bytes()[: len(content)] == content
        again: Any = filled(5) if saver == "storage" else ReplayBuffer(CPU, CPU, 50, storage=buffer.storage)
        if saver == "storage":
            again.storage.loads(tmp_path / "saved")
        else:
            again.load(tmp_path / "saved")
        assert len(again) == 30
    save()


def test_checksums_cover_what_was_written(tmp_path: Path) -> None:
    """Changing any bit of a dump raises an error or changes nothing."""
    filled(20, n_envs=1).storage.dumps(tmp_path / "dump")
    data = tmp_path / "dump" / "data-0001.bin"
    whole = data.read_bytes()
    size = json.loads((tmp_path / "dump" / "manifest.json").read_text())["data"]["size"]
    expected = trajectory(20)
    for place in np.random.default_rng(0).integers(0, size, 60).tolist():
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        assert zlib.crc32(changed) != zlib.crc32(whole)
        data.write_bytes(changed)
        target: Any = TensorDictReplayBuffer(storage=CompressedStorage(50, n_envs=1), batch_size=8)
        try:
            target.storage.loads(tmp_path / "dump")
        except ExtraBuffersError:
            continue
        assert_same(target[:].clone().exclude("index"), expected)
