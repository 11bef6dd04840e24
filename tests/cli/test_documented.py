"""The commands in docs/cli.md print what the page says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from sb3_extra_buffers.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
[RECORD] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXAMPLES = [
    (command, output.splitlines())
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for command, output in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", block, re.MULTILINE)
]
# depend on the day, the version and the machine
VARYING = re.compile(r"^(saved: \d{4}-.*|library: .*)$|\s*\d[\d.]* us")
NUMBER = re.compile(r"\d[\d,]*\.?\d*")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("ale_py", "cv2"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("documented")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(RECORD, "docs/cli.md", "exec"), {"__name__": "__main__"})
    return folder


def assert_agree(line: str, documented: str) -> None:
    """Assert that lines agree but for what varies; other versions of ALE and OpenCV change sizes by a few bytes."""
    line, documented = (VARYING.sub("", text) for text in (line, documented))
    assert NUMBER.sub("#", line) == NUMBER.sub("#", documented)
    for number, expected in zip(NUMBER.findall(line), NUMBER.findall(documented), strict=True):
        assert float(number.replace(",", "")) == pytest.approx(float(expected.replace(",", "")), rel=0.02)


@pytest.mark.filterwarnings("ignore")  # of Minari and gymnasium
def test_commands_print_what_the_page_shows(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("numba", "zstandard", "PIL", "h5py", "zarr", "minari", "matplotlib"):
        pytest.importorskip(module)
    monkeypatch.chdir(recorded)
    shown = set()
    for command, documented in EXAMPLES:
        program, *arguments = shlex.split(command)
        if program == "sb3-extra-buffers":
            shown.add(arguments[0])
            main(arguments)
            output = capsys.readouterr()
            lines = (output.out + output.err).splitlines()
        else:
            lines = subprocess.check_output(command, shell=True, text=True).splitlines()
        assert len(lines) == len(documented), command
        for line, expected in zip(lines, documented, strict=True):
            assert_agree(line, expected)
    assert shown == {"info", "verify", "repair", "montage", "play", "view", "convert", "bench", "recommend"}


def test_json_has_the_documented_keys(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = PAGE.partition("prints the same facts as numbers")[2].partition("## ")[0]
    documented = {
        key for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)
    }

    assert main(["info", str(recorded / "pong"), "--json"]) == 0

    assert json.loads(capsys.readouterr().out).keys() == documented - {"steps_since_checkpoint"}
