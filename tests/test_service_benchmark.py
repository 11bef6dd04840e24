"""The benchmark of the served buffer runs, and renders what it measured."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytest.importorskip("torchrl")
pytest.importorskip("matplotlib")

from tests.replay_buffers.trajectories import trajectory

service: Any = importlib.import_module("benchmarks.service")


def test_bytes_on_the_wire_are_a_fraction_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def packets(game: str, n_steps: int, count: int) -> list[Any]:
        data = trajectory(service.PACKET * count, n_envs=4)
        return list(data.split(4 * service.PACKET))

    monkeypatch.setattr(service, "packets", packets)
    sizes = service.wire("synthetic", 320, quick=True)

    assert 0 < sizes["in"] < 0.2 * sizes["plain"]
    assert 0 < sizes["windows"] < sizes["out"] < 0.5 * sizes["plain"]


def test_the_table_shows_reverb_beside_the_service_if_it_was_measured() -> None:
    ours = {"wire_bytes": "150", "plain_bytes": "50000"}
    rows = [
        {"what": "in 1", "per_second": "40000", **ours},
        {"what": "in 4", "per_second": "50000", **ours},
        {"what": "windows", "per_second": "", **ours},
    ]
    assert "| 40,000 |  | 150 | 0.30 % |" in service.table(rows)
    rows.append({"what": "reverb in", "per_second": "8000"})
    assert "| 40,000 | 8,000 | 150 | 0.30 % |" in service.table(rows)
    assert "windows" in service.table(rows)
