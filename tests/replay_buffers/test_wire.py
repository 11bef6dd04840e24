"""Packets round-trip exactly, are small and are not trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tensordict")

from tensordict import TensorDict

from sb3_extra_buffers._torchrl.wire import decode_packet, encode_packet, packet_note
from sb3_extra_buffers.errors import CorruptPayloadError, NotSaveableError
from tests.replay_buffers.trajectories import assert_same, steps, trajectory


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


@pytest.mark.parametrize(("name", "n_steps", "n_envs"), [("items-1", 12, 1), ("items-1-three-envs", 10, 3)])
def test_packets_of_the_first_version_can_be_read(name: str, n_steps: int, n_envs: int) -> None:
    packet = (Path(__file__).parents[1] / "golden" / "packets" / f"{name}.bin").read_bytes()
    assert_same(decode_packet(packet), trajectory(n_steps, n_envs))
    assert packet_note(packet) == ({"writer": "a", "number": 3} if n_envs == 1 else {})


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


def test_packets_cannot_hold_objects() -> None:
    data: Any = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    data["name"] = "a string"
    with pytest.raises(NotSaveableError):
        encode_packet(data)
