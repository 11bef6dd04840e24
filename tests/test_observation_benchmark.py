"""The benchmark of all kinds of observations: it refuses wrong answers, and its tables follow from its rows."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pages import ROOT

pytest.importorskip("psutil")
pytest.importorskip("tqdm")

observations: Any = importlib.import_module("benchmarks.observations")
tables: Any = importlib.import_module("benchmarks.observation_tables")


def make_row(stream: str, kind: str, method: str, nbytes: int, sample_us: float, chosen: str = "") -> dict[str, str]:
    """Measurements of a stream of which SB3 holds 1000 bytes and samples in 100 microseconds."""
    times = {
        f"{who}{figure}_us_{cut}": str(sample_us if not who and figure == "sample256" else 100.0)
        for who in ("", "sb3_")
        for figure in ("add", "overwrite", "sample32", "sample256")
        for cut in ("p20", "p50", "p80")
    }
    row = {
        "date": "2026-01-01", "machine": "a computer", "versions": "Python 3", "stream": stream, "kind": kind,
        "shape": "3x4", "dtype": "uint8", "n_transitions": "50", "obs_bytes": "12", "method": method,
        "resident_bytes": str(nbytes), "reported_bytes": str(nbytes), "optimized_bytes": "1000", "sb3_bytes": "2000",
        "chosen": chosen, "why": "", "fill_s": "1.0", "sb3_fill_s": "2.0",
    }  # fmt: skip
    return row | times


ROWS = [
    make_row("Pong", "Atari", "auto", 10, 50.0, "delta"),
    make_row("Pong", "Atari", "none", 900, 40.0),
    make_row("Pong", "Atari", "delta", 10, 50.0),
    make_row("video-last", "video", "auto", 600, 200.0, "zstd1"),
    make_row("video-last", "video", "none", 1000, 60.0),
    make_row("video-float-last", "float images", "auto", 1200, 100.0, "zstd1"),
    make_row("17 floats", "vectors", "auto", 1000, 30.0, "none"),
    make_row("17 floats", "vectors", "sb3 optimized", 1000, 100.0),
]


def test_the_cost_of_auto_is_compared_with_the_cheapest_method_of_each_stream() -> None:
    assert {stream: row["method"] for stream, row in tables.best_methods(ROWS).items()} == {
        "Pong": "delta", "video-last": "none",
    }  # fmt: skip
    assert tables.regrets(ROWS) == {"Pong": 1.0, "video-last": 2.0}


def test_float_images_are_compared_with_the_same_images_as_integers() -> None:
    assert tables.float_growth(ROWS) == {"video-float-last": 2.0}


def test_targets_name_the_stream_that_misses_them() -> None:
    text = tables.targets(ROWS)

    assert re.search(r"memory, worst +1\.200 .*MISSED +largest: video-float-last", text)
    assert re.search(r"sample\(256\), worst +2\.000 .*met +largest: video-last", text)
    assert re.search(r"vectors: sample\(256\), worst +0\.300 .*met", text)


def test_the_table_of_kinds_has_means_and_worst_streams() -> None:
    lines = tables.kind_table(ROWS).splitlines()

    assert lines[2:] == [
        "| Atari games | 1 | 1.00 % | 1.00x | 1.00x | 0.50x |",
        "| real video | 1 | 60.0 % | 1.00x | 1.00x | 2.00x |",
        "| images as floats | 1 | 120 % | 1.00x | 1.00x | 1.00x |",
        "| vectors | 1 | 100 % | 1.00x | 1.00x | 0.30x |",
        "| **all** | 4 | 70.2 % (worst 120 %) | 1.00x (worst 1.00x) | 1.00x (worst 1.00x) | 0.74x (worst 2.00x) |",
    ]


def test_every_stream_is_in_the_table_with_what_auto_chose() -> None:
    text = tables.stream_table(ROWS)

    assert "| video-last | 3x4 uint8 | 50 | zstd1 | 600 B | 60.0 % | 100 % | 1.00x | 1.00x | 2.00x | 0.50x |" in text
    assert "| `none`, 2.00x |" in text
    assert len(text.splitlines()) == 2 + 4


def test_the_plot_has_a_point_for_every_stream(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    tables.plot(ROWS, tmp_path / "plot.png")

    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_measured_streams_are_in_the_catalogue() -> None:
    measured = importlib.import_module("benchmarks.results").read_rows(ROOT / "benchmarks/data/observations.csv")

    assert {row["stream"] for row in measured} <= observations.STREAMS.keys()
    assert {stream.kind for stream in observations.STREAMS.values()} <= tables.KINDS.keys()
    assert {*observations.FLOAT_PAIRS, *observations.FLOAT_PAIRS.values()} <= observations.STREAMS.keys()


@pytest.fixture
def recorded_noise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A short recording of random pixels."""
    streams: Any = importlib.import_module("benchmarks.streams")
    monkeypatch.setenv("SB3_EXTRA_BUFFERS_CACHE", str(tmp_path))
    monkeypatch.setitem(streams.STREAMS, "noise", streams.STREAMS["noise"]._replace(n_steps=24))
    importlib.import_module("benchmarks.feed").record("noise", 24)
    return observations.STREAMS["noise-last"]


def test_every_buffer_is_timed_next_to_sb3(recorded_noise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observations, "WARM_UP_STEPS", 8)
    monkeypatch.setattr(observations, "BATCHES", (4,))
    case = observations.Case(recorded_noise)

    measured = observations.speed(case, case.applicable(["none", "nosuch", "table", "auto"]), 0.0)

    assert list(measured) == ["sb3 optimized", "auto", "none"]
    for figures in measured.values():
        assert figures.keys() >= {"fill_s", "sb3_fill_s", "add_us_p50", "sb3_add_us_p20", "sb3_sample4_us_p80"}


def test_a_wrong_batch_is_not_timed(recorded_noise: Any) -> None:
    case = observations.Case(recorded_noise)
    buffers = {name: case.make(name) for name in ("sb3", "none")}
    for step in observations.replay(recorded_noise):
        columns = case.transition(step)
        for buffer in buffers.values():
            buffer.add(*columns)
    observations.check(recorded_noise, buffers)

    buffers["none"].observations[:] = np.zeros(case.shape, case.dtype)

    with pytest.raises(SystemExit, match="noise-last, none: the batches differ"):
        observations.check(recorded_noise, buffers)
