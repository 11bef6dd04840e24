"""The benchmark of a million transitions on a desktop: its limit is enforced, and it refuses a wrong buffer."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT

pytest.importorskip("ale_py")
pytest.importorskip("matplotlib")
pytest.importorskip("psutil")

desktop: Any = importlib.import_module("benchmarks.desktop")
TINY = desktop.Sizes(200, 100, 10, 2, 2, 4)

pytestmark = pytest.mark.skipif(not desktop.peak_resident(), reason="the peak of the resident set is read from /proc")


def test_a_process_that_needs_more_than_the_limit_is_killed() -> None:
    command = [sys.executable, "-m", "benchmarks.desktop", "--quick", "--limit", "0.06"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    assert done.returncode == 1
    assert "MB were resident and the limit is 60.0 MB: training was stopped" in done.stderr
    assert not done.stdout


def test_a_peak_that_has_passed_counts() -> None:
    code = "import sys; x = bytearray(300_000_000); x[::4096] = b'1' * len(x[::4096]); del x; print('now'); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None
        process.stdout.read(3)
        peak = desktop.peak_resident(process.pid)
        assert peak > 300_000_000
        desktop.check_peak(peak, 400_000_000)
        with pytest.raises(SystemExit, match="limit is 200 MB"):
            desktop.check_peak(peak, 200_000_000)
        process.kill()


def test_measured_rows_become_a_section_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SB3_EXTRA_BUFFERS_CACHE", str(tmp_path))
    limit = desktop.measure_limit(TINY)
    assert limit["transitions"] == 200
    assert limit["compared"] == 20
    # both observations of 84x84x4, and the columns
    assert limit["dense_bytes"] == 200 * (2 * 28_224 + 20)
    stamp = {"date": "2026-01-01", "machine": "a computer", "versions": "Python 3", "game": "MsPacman"}
    rows = [
        stamp | {"what": "limit", "limit_bytes": 3_000_000_000} | limit,
        stamp | {"what": "speed"} | desktop.measure_speed(TINY),
    ]

    text = desktop.section(rows)
    assert "a buffer with 200 MsPacman transitions" in text
    assert "killed when more than 3.00 GB are resident" in text
    assert "| SB3's `DQN`, uniform, 1-step, dense | 100 |" in text
    assert desktop.summary(rows[:1]) == ""
    assert f"**{float(rows[1]['ratio_p50']):.2f}x** the time of a step of SB3's DQN" in desktop.summary(rows)


def test_a_buffer_that_returns_something_else_is_not_reported() -> None:
    model = desktop.make_model("ours", 80)
    with pytest.raises(SystemExit, match="not full"):
        desktop.verify(model.replay_buffer, {})
    recorded = desktop.fill(model, 5)
    assert desktop.verify(model.replay_buffer, recorded) == 16
    model.replay_buffer.rewards[10, 2] += 1
    with pytest.raises(SystemExit, match="step 10 was not returned"):
        desktop.verify(model.replay_buffer, recorded)
