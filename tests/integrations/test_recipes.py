"""The recipes of docs/integrations.md run, and print what the page shows.

RL Zoo replaces classes of Gymnasium, and JAX starts threads: their recipes run in processes of their own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import DQN

from tests.pages import ROOT, Block, blocks_of, difference, run_python

PAGE = ROOT / "docs" / "integrations.md"


def section(heading: str) -> list[Block]:
    """The code blocks below ``heading``, up to the next heading of its level or a higher one."""
    text, level = PAGE.read_text(), heading.count("#")
    start = text.index(f"\n{heading}\n") + 1
    following = re.compile(rf"^#{{2,{level}}} ", re.MULTILINE).search(text, start + len(heading))
    end = following.start() if following else len(text)
    return [block for block in blocks_of(PAGE) if start < block.start < end]


def texts(heading: str, language: str) -> list[str]:
    return [block.text for block in section(heading) if block.language == language]


def require(*modules: str) -> None:
    """Skip the test unless ``modules`` are installed; does not import them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def run_child(folder: Path, *arguments: str, stdin: str = "") -> str:
    """Run Python in ``folder``, with the modules that are found here, and return what it prints."""
    command, env = [sys.executable, *arguments], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=folder, env=env, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def execute(code: str) -> dict[str, Any]:
    """Run a snippet in this process and return its variables."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "snippet", "exec"), variables)
    return variables


def buffer_rows(log: str) -> dict[str, str]:
    """The rows of the last ``buffer/`` table of a log."""
    _, _, rest = log.rpartition("| buffer/ ")
    rows: dict[str, str] = dict(re.findall(r"^\| {4}(\w+) +\| (\S+) +\|$", rest, re.MULTILINE))
    return {name: rows[name] for name in ("size", "bytes", "sb3_bytes", "ratio", "observation_ratio", "method")}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """The commands of the RL Zoo recipes, run in order in one folder, each with its output."""
    require("rl_zoo3", "ale_py", "cv2")
    folder = tmp_path_factory.mktemp("zoo")
    for text in texts("## RL Zoo", "yaml") + texts("## RL Zoo", "python"):
        # the first line names the file
        (folder / text.partition("\n")[0].removeprefix("# ")).write_text(text)
    commands = "".join(text for text in texts("## RL Zoo", "sh") if "rl_zoo3." in text)
    output = run_child(folder, os.fspath(Path(__file__).with_name("run_commands.py")), stdin=commands)
    runs = [run.split("\n", 1) for run in output.split("$ python -m rl_zoo3.")[1:]]
    return [(command, text) for command, text in runs]


@pytest.mark.parametrize("config", ["dqn.yml", "dqn.py", "ppo.py", "ppo.yml", "ppo_lstm.py"])
def test_rl_zoo_trains_and_plays(zoo: list[tuple[str, str]], config: str) -> None:
    (number,) = (n for n, (command, _) in enumerate(zoo) if f"-conf {config} " in command and " -i " not in command)
    (_, training), (command, playing) = zoo[number : number + 2]
    saved = re.search(r"^Saving to (\S+)$", training, re.MULTILINE)
    assert saved is not None
    assert command.startswith("enjoy ")
    assert f"Loading {saved[1]}/PongNoFrameskip-v4.zip\n" in playing
    # one report, at the end
    assert training.count("| buffer/ ") == 1
    assert 0 < float(buffer_rows(training)["observation_ratio"]) < 0.05


def test_rl_zoo_prints_what_the_page_shows(zoo: list[tuple[str, str]]) -> None:
    (shown,) = texts("## RL Zoo", "output")
    printed, expected = buffer_rows(zoo[0][1]), buffer_rows(shown)
    assert printed.pop("method") == expected.pop("method")
    for name, value in expected.items():
        assert float(printed[name]) == pytest.approx(float(value), rel=0.1), name


def test_rl_zoo_continues_with_the_saved_buffer(zoo: list[tuple[str, str]]) -> None:
    (continued,) = (text for command, text in zoo if " -i " in command)

    assert buffer_rows(continued)["size"] == "1200"  # 1000 of the first run


@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
@pytest.mark.parametrize("heading", ["## sb3-contrib", "## TorchRL"])
def test_snippets_print_what_the_page_shows(heading: str) -> None:
    require("ale_py", "cv2", "sb3_contrib", "torchrl")
    for code, shown in zip(texts(heading, "python"), texts(heading, "output"), strict=True):
        printed = run_python(code)

        assert difference(shown, printed) is None, printed


def test_snippets_with_sbx_print_what_the_page_shows(tmp_path: Path) -> None:
    require("ale_py", "sbx")
    (code,), (shown,) = texts("## SBX", "python"), texts("## SBX", "output")
    printed = run_child(tmp_path, "-c", code)

    assert difference(shown, printed) is None, printed


def test_snippets_with_imitation_run(tmp_path: Path) -> None:
    require("ale_py", "imitation")
    for code in texts("## imitation", "python"):
        run_child(tmp_path, "-c", code)


@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
def test_cleanrl_diff_applies_and_trains_the_same_weights() -> None:
    require("ale_py", "cv2")
    (loop,), (diff,) = texts("## CleanRL", "python"), texts("## CleanRL", "diff")
    changed = loop
    for old, new in re.findall(r"^-(.*)\n\+(.*)$", diff, re.MULTILINE):
        assert loop.count(f"{old}\n") == 1
        changed = changed.replace(f"{old}\n", f"{new}\n")

    dense, compressed = execute(loop), execute(changed)

    for name, weight in dense["q_network"].state_dict().items():
        np.testing.assert_array_equal(weight.numpy(), compressed["q_network"].state_dict()[name].numpy())
    assert type(dense["rb"]).__name__ == "ReplayBuffer"
    assert type(compressed["rb"]).__name__ == "CompressedReplayBuffer"
    assert compressed["rb"].memory_usage().ratio < 0.05


@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
def test_a_shared_model_loads_without_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("ale_py")
    monkeypatch.chdir(tmp_path)
    saving, loading = texts("## Sharing a model", "python")
    execute(saving)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sb3_extra_buffers"]:
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ImportError, match="sb3_extra_buffers"):
        DQN.load("dqn_pong")
    model = execute(loading)["model"]

    assert type(model.replay_buffer).__name__ == "ReplayBuffer"
    assert model.buffer_size == 1
