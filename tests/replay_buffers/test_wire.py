"""Packets round-trip exactly, are small and are not trusted."""

from __future__ import annotations

import json
import shutil
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tensordict")

from tensordict import TensorDict

from sb3_extra_buffers._torchrl.wire import (
    ItemPacket,
    KeyframeCache,
    PacketEncoder,
    decode_packet,
    encode_packet,
    export_items,
    import_items,
    packet_note,
    parse_packet,
)
from sb3_extra_buffers.errors import CorruptPayloadError, FileFormatError, NotSaveableError, SpecMismatchError
from sb3_extra_buffers.replay_buffers import CompressedStorage
from tests.replay_buffers.trajectories import assert_same, steps, trajectory

GOLDEN = Path(__file__).parents[1] / "golden" / "packets"


def collected(kind: str) -> TensorDict:
    if kind == "one environment":
        return trajectory(40)
    if kind == "steps of three":
        return trajectory(30, 3)
    if kind == "trajectories":
        return torch.stack(list(steps(20, 3)), dim=1)
    if kind == "one item":
        return trajectory(1)
    if kind == "no next":
        return trajectory(20).select("observation")
    if kind == "vectors":
        return TensorDict({"x": torch.randn(9, 3), "y": {"z": torch.arange(9)}}, batch_size=[9])
    if kind == "unlike frames":
        return TensorDict({"image": torch.randn(6, 20, 20), "next": {"image": torch.randn(6, 20, 20)}}, batch_size=[6])
    if kind == "halves":
        return TensorDict({"image": torch.randn(6, 20, 20).bfloat16()}, batch_size=[6])
    sample = trajectory(200, 2)
    index = torch.randint(0, 400, (32,))
    return sample[index].set("index", index)


@pytest.mark.parametrize(
    "kind",
    [
        "one environment", "steps of three", "trajectories", "one item", "no next", "vectors", "unlike frames",
        "halves", "a sample",
    ],
)  # fmt: skip
def test_packets_round_trip(kind: str) -> None:
    data = collected(kind)
    packet = encode_packet(data, writer="me", number=3)

    assert_same(decode_packet(packet), data)
    assert packet_note(packet) == {"writer": "me", "number": 3}
    # the decoded tensors do not share the packet's memory
    decode_packet(packet).zero_()
    assert_same(decode_packet(packet), data)


@pytest.mark.parametrize(("kind", "most"), [("steps of three", 0.03), ("trajectories", 0.04), ("a sample", 0.12)])
def test_packets_are_small(kind: str, most: float) -> None:
    data = collected(kind)
    assert len(encode_packet(data)) < most * sum(value.nbytes for value in data.values(True, True))


def stored(n_steps: int, n_envs: int, **settings: Any) -> tuple[CompressedStorage, TensorDict]:
    data = trajectory(n_steps, n_envs)
    storage = CompressedStorage(2 * len(data), n_envs=n_envs, **settings)
    storage.set(range(len(data)), data)
    return storage, data


SETTINGS: list[dict[str, Any]] = [
    {},
    {"compression_method": "delta"},
    {"compression_method": {"observation": "gzip", ("next", "observation"): "gzip"}},
    {"compression_method": {"observation": "delta"}},
    {"compression_method": "none"},
]


@pytest.mark.parametrize("compress", [True, False, 3])
@pytest.mark.parametrize("settings", SETTINGS)
def test_items_are_sent_as_they_are_stored(settings: dict[str, Any], compress: bool | int) -> None:
    storage, data = stored(100, 2, **settings)
    cache = KeyframeCache()
    for seed in range(3):
        positions = np.random.default_rng(seed).integers(0, len(data), (32,))
        lease = cache.lease()
        extra = {"index": torch.from_numpy(positions)}
        packet = export_items(storage.table, positions, extra, lease.known, compress, number=seed)

        assert_same(decode_packet(packet, lease), data[positions].set("index", extra["index"]))
        assert packet_note(packet) == {"number": seed}


def test_windows_of_items_are_sent_as_they_are_stored() -> None:
    storage, data = stored(100, 2)
    positions = np.array([[2, 4, 6, 8], [51, 53, 55, 57]])
    expected = data[torch.from_numpy(positions)]

    assert_same(decode_packet(export_items(storage.table, positions)), expected)
    flat = export_items(storage.table, positions.reshape(-1))
    assert_same(decode_packet(flat, window=4), expected.reshape(-1))


@pytest.mark.parametrize("compress", [True, False])
def test_items_without_elements_are_sent_and_filed(compress: bool) -> None:
    leaves = {"objects": torch.zeros(40, 0), "masks": torch.zeros(40, 4, 0, 7, dtype=torch.uint8)}
    data = TensorDict({**leaves, "number": torch.arange(40)}, batch_size=[40])
    storage = CompressedStorage(80)
    storage.set(range(40), data)
    positions = np.arange(3, 9)
    assert_same(decode_packet(export_items(storage.table, positions, compress=compress)), data[3:9])
    packet = parse_packet(PacketEncoder(compress=compress).encode(data))
    assert isinstance(packet, ItemPacket)
    import_items(storage.table, np.arange(40, 80), packet)
    assert_same(TensorDict(storage.table.read(np.arange(40, 80)), batch_size=[40]), data)


@pytest.mark.parametrize("method", ["auto", "delta", "gzip"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_packets_are_filed_in_storages(settings: dict[str, Any], method: str) -> None:
    storage, _ = stored(100, 2, **settings)
    encoder = PacketEncoder(method, n_envs=2)
    more = trajectory(64, 2, seed=1)
    for first in (0, 64):
        packet = parse_packet(encoder.encode(more[first : first + 64]))
        assert isinstance(packet, ItemPacket)
        import_items(storage.table, np.arange(200 + first, 264 + first), packet)

    storage.check()
    table = storage.table.read(np.arange(200, 328))
    assert_same(TensorDict(table, batch_size=[128]), more)


def test_packets_of_other_items_are_refused() -> None:
    storage, data = stored(20, 1)
    for other in (data.exclude("action").set("act", data["action"]), data.clone().set("action", data["action"].int())):
        packet = parse_packet(encode_packet(other))
        assert isinstance(packet, ItemPacket)
        with pytest.raises(FileFormatError):
            import_items(storage.table, np.arange(20), packet)
    packet = parse_packet(encode_packet(data))
    assert isinstance(packet, ItemPacket)
    with pytest.raises(FileFormatError):
        import_items(storage.table, np.arange(19), packet)
    assert_same(storage.get(torch.arange(20)), data)


def test_every_packet_of_an_encoder_can_be_decoded_by_itself() -> None:
    encoder, data = PacketEncoder(), trajectory(300)
    packets = [encoder.encode(data[first : first + 50]) for first in range(0, 300, 50)]
    for number, packet in enumerate(packets):
        assert_same(decode_packet(packet), data[50 * number : 50 * number + 50])


@pytest.mark.parametrize(
    ("name", "n_steps", "n_envs"),
    [
        ("items-1", 12, 1), ("items-1-three-envs", 10, 3), ("items-2", 12, 1), ("items-2-gzip", 12, 1),
        ("items-2-scroll", 12, 1), ("items-2-palette", 12, 1),
    ],
)  # fmt: skip
def test_packets_of_every_version_can_be_read(name: str, n_steps: int, n_envs: int) -> None:
    packet = (GOLDEN / f"{name}.bin").read_bytes()
    assert_same(decode_packet(packet), trajectory(n_steps, n_envs))
    assert packet_note(packet) == ({"writer": "a", "number": 3} if n_envs == 1 else {})


def test_a_service_loads_a_journal_of_packets_of_the_first_version(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from sb3_extra_buffers.replay_buffers.ray import CompressedReplayService

    folder = Path(shutil.copytree(GOLDEN / "service-1", tmp_path / "service"))
    buffer = CompressedReplayService(storage=partial(CompressedStorage, 100), batch_size=8, folder=str(folder))
    data = trajectory(50)
    assert_same(decode_packet(buffer.packed(slice(None))).exclude("index"), data[:40])

    buffer.extend(encode_packet(data[30:40], writer="a", number=3))  # is there already
    buffer.extend(encode_packet(data[40:], writer="a", number=4))
    again = CompressedReplayService(storage=partial(CompressedStorage, 100), batch_size=8, folder=str(folder))
    assert_same(decode_packet(again.packed(slice(None))).exclude("index"), data)


def test_damaged_packets_raise() -> None:
    packet = encode_packet(trajectory(10))
    for damaged in (b"", b"hello world", packet[:-1], packet + b"x", packet[:3] + b"9" + packet[4:]):
        with pytest.raises(CorruptPayloadError):
            decode_packet(damaged)
    for place in range(8, len(packet), max(len(packet) // 200, 1)):
        changed = bytearray(packet)
        changed[place] ^= 0x15
        try:
            decode_packet(bytes(changed))
        except CorruptPayloadError:
            continue


def service() -> Any:
    pytest.importorskip("torchrl")
    from sb3_extra_buffers._torchrl.service import CompressedReplayService

    return CompressedReplayService(storage=partial(CompressedStorage, 100))


def forged(header: dict[str, Any], tensors: bytes = b"", version: int = 2) -> bytes:
    """A packet of uncompressed tensors."""
    sections: Any = [[len(tensors)] * 2] if version == 2 else [len(tensors)]
    header = {"codec": "gzip", "groups": [], "sections": sections, "small": len(tensors), "note": {}, **header}
    text = json.dumps(header).encode()
    return b"XBT%d" % version + struct.pack("<I", len(text)) + text + tensors


def leaf(key: Any, *shape: int) -> dict[str, Any]:
    return {"key": key, "shape": shape, "dtype": "uint8"}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "header",
    [
        # keys that a TensorDict cannot have at the same time
        {"lead": [2], "leaves": [leaf("a", 2), leaf(["a", "b"], 2)]},
        {"lead": [2], "leaves": [leaf(["a", "b", "c"], 2), leaf("a", 2)]},
        {"lead": [2], "leaves": [leaf("a", 2), leaf(["a"], 2)]},
        # items without bytes, of which a few hundred bytes could claim any number
        {"lead": [1 << 28], "leaves": []},
        {"lead": [1 << 40], "leaves": [leaf("a", 1 << 40, 0)]},
        {"lead": [1 << 20, 1 << 10], "leaves": [leaf("a", 1 << 20, 1 << 10, 0)]},
    ],
)
def test_packets_of_impossible_items_are_refused(header: dict[str, Any], version: int) -> None:
    packet = forged(header, b"abcd" if header["lead"] == [2] else b"", version)
    buffer = service()
    with pytest.raises(CorruptPayloadError):
        decode_packet(packet)
    with pytest.raises(CorruptPayloadError):
        buffer.extend(packet)
    assert len(buffer) == 0
    buffer.extend(forged({"lead": [2], "leaves": [leaf("a", 2)]}, b"ab", version))
    assert len(buffer) == 2


def test_a_service_needs_an_axis_of_items() -> None:
    buffer = service()
    with pytest.raises(SpecMismatchError, match="single"):
        buffer.extend(encode_packet(trajectory(1)[0]))
    buffer.add(trajectory(1)[0])
    assert len(buffer) == 1


def test_more_items_than_fit_a_packet_are_refused() -> None:
    with pytest.raises(NotSaveableError, match="several packets"):
        encode_packet(TensorDict({"x": torch.zeros(1).expand(1 << 25)}, batch_size=[1 << 25]))


def test_packets_cannot_hold_objects() -> None:
    data: Any = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    data["name"] = "a string"
    with pytest.raises(NotSaveableError):
        encode_packet(data)
