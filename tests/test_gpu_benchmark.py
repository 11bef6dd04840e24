"""Results of the GPU benchmarks: parts measured at different times end up in one file, and the page shows them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

gpu: Any = importlib.import_module("benchmarks.gpu")
results: Any = importlib.import_module("benchmarks.results")


def measured(part: str, figure: str, **values: list[float]) -> list[dict[str, Any]]:
    report = gpu.Report(part, "cpu")
    report.add(figure, "us", values)
    rows: list[dict[str, Any]] = report.rows
    return rows


def test_each_row_has_quantiles_and_the_ratios_to_the_candidates_of_its_run() -> None:
    rows = measured("sample", "sample(256)", sb3=[8.0, 8.0, 8.0], none=[1.0, 2.0, 3.0], delta=[4.0])

    assert [row["p50"] for row in rows] == ["8", "2", "4"]
    assert (rows[1]["p20"], rows[1]["p80"]) == ("1.4", "2.6")
    assert [row["of_none"] for row in rows] == ["4", "1", "2"]
    assert [row["of_sb3"] for row in rows] == ["1", "0.25", "0.5"]
    assert [row["of_torchrl"] for row in rows] == [""] * 3
    assert [row["repeats"] for row in rows] == [3, 3, 1]


def test_a_part_replaces_its_own_rows_and_keeps_those_of_other_parts(tmp_path: Path) -> None:
    target, source = tmp_path / "gpu.csv", tmp_path / "new.csv"
    results.write_rows(target, measured("sample", "sample(32)", delta=[1.0]) + measured("add", "old", delta=[2.0]))
    results.write_rows(source, measured("add", "new", delta=[3.0]) + measured("tree", "update", buffer=[4.0]))

    gpu.merge(target, [source])

    rows = results.read_rows(target)
    assert [(row["part"], row["figure"], row["p50"]) for row in rows] == [
        ("sample", "sample(32)", "1"),
        ("add", "new", "3"),
        ("tree", "update", "4"),
    ]


def test_a_part_that_fails_leaves_the_figures_it_has_measured(tmp_path: Path) -> None:
    target = tmp_path / "gpu.csv"
    results.write_rows(target, measured("add", "a", delta=[1.0]) + measured("add", "b", none=[2.0]))

    report = gpu.Report("add", "cpu", output=target)
    report.add("b", "us", {"delta": [3.0]})

    assert [(row["figure"], row["buffer"], row["p50"]) for row in results.read_rows(target)] == [
        ("a", "delta", "1"),
        ("b", "delta", "3"),
    ]
    report.finish()
    assert [row["figure"] for row in results.read_rows(target)] == ["b"]


def test_parts_end_when_their_time_is_over(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--device", "cpu", "--quick", "--parts", "tree,memory", "--seconds", "0"])

    with pytest.raises(SystemExit, match="failed: tree, memory"):
        gpu.main()
    assert capsys.readouterr().out.count("stopped: --seconds is over") == 2


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"missing\.csv: no rows"):
        gpu.merge(tmp_path / "gpu.csv", [tmp_path / "missing.csv"])
    assert not (tmp_path / "gpu.csv").exists()


def test_the_page_shows_every_part_and_plots_adds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables: Any = importlib.import_module("benchmarks.gpu_tables")
    rows = measured("sample", "sample(256)", sb3=[4000.0], none=[100.0], delta=[60.0])
    for n_envs in (4, 256):
        rows += measured("add", f"add of {n_envs} environments, NumPy", sb3=[90.0], none=[50.0], delta=[n_envs * 1.0])
    rows += measured("tree", "prioritised sample", torchrl=[20.0], buffer=[10.0])
    rows += measured("dqn", "DQN", dense=[30.0], delta=[9.0])

    read = [{name: str(value) for name, value in row.items()} for row in rows]

    page = tables.section(read)
    tables.plot(read, tmp_path / "add.png")

    assert "| sample(256) | 4.00 ms | 100 µs | 60.0 µs | 0.60x | 0.015x |" in page
    assert "| add of 256 environments, NumPy | 90.0 µs | 50.0 µs | 256 µs | 5.12x | 2.84x |" in page
    assert "| `TensorReplayBuffer` | 10.0 µs | 0.50x |" in page
    assert "| `delta` | 9.00 µs | 0.30x |" in page
    assert "(gpu_add.png)" in page
    assert (tmp_path / "add.png").stat().st_size > 1000


def test_intervals_of_training_are_read_from_what_the_example_prints() -> None:
    pytest.importorskip("ale_py")
    training: Any = importlib.import_module("benchmarks.gpu_training")
    printed = """
        0 steps, 0 per second, mean of 20 scores 0.0
    5,000 steps, 10,000 per second, mean of 20 scores 0.0
   10,000 steps, 5,000 per second, mean of 20 scores 0.0
   15,000 steps, 5,000 per second, mean of 20 scores 0.0
   20,004 steps, 4,000 per second, mean of 20 scores 0.0
"""

    assert training.milliseconds(printed) == pytest.approx([200, 399.9], abs=0.1)
