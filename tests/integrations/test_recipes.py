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

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
CONFIGS = {"dqn": ("dqn.yml", "dqn.py"), "ppo": ("ppo.py", "ppo.yml")}


def blocks(heading: str, language: str) -> list[str]:
    """The code blocks in one language below ``heading``, up to the next heading of the same level or a higher one."""
    level = len(heading.partition(" ")[0])
    rest = PAGE.read_text().partition(f"\n{heading}\n")[2]
    text = re.split(rf"^#{{2,{level}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def require(*modules: str) -> None:
    """Skip the test unless ``modules`` are installed; does not import them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def run(folder: Path, *arguments: str, stdin: str = "") -> str:
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


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder in which the commands of the RL Zoo recipes were run, and the output of each command."""
    require("rl_zoo3", "ale_py", "cv2")
    folder = tmp_path_factory.mktemp("zoo")
    for language in ("yaml", "python"):
        for text in blocks("## RL Zoo", language):
            # the first line names the file
            (folder / text.partition("\n")[0].removeprefix("# ")).write_text(text)
    commands = "".join(block for block in blocks("## RL Zoo", "sh") if "rl_zoo3." in block)
    output = run(folder, os.fspath(Path(__file__).with_name("run_commands.py")), stdin=commands)
    _, *runs = output.split("$ python -m rl_zoo3.")
    return folder, dict(text.split("\n", 1) for text in runs)


@pytest.mark.parametrize("algo", CONFIGS)
def test_rl_zoo_trains_and_plays_with_each_config(zoo: tuple[Path, dict[str, str]], algo: str) -> None:
    folder, runs = zoo
    for number, config in enumerate(CONFIGS[algo], start=1):
        model = f"logs/{algo}/PongNoFrameskip-v4_{number}"
        (trained,) = (text for command, text in runs.items() if f"-conf {config} " in command and "-i " not in command)
        assert f"Saving to {model}" in trained
        assert (folder / model / "PongNoFrameskip-v4.zip").stat().st_size > 1e6


def test_rl_zoo_continues_with_the_saved_buffer(zoo: tuple[Path, dict[str, str]]) -> None:
    _, runs = zoo
    (continued,) = (text for command, text in runs.items() if " -i " in command)

    assert "Loading replay buffer" in continued


@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
@pytest.mark.parametrize("heading", ["## sb3-contrib", "## TorchRL"])
def test_snippets_run(heading: str) -> None:
    require("ale_py", "cv2", "sb3_contrib", "torchrl")
    for code in blocks(heading, "python"):
        execute(code)


@pytest.mark.parametrize(("heading", "module"), [("## SBX", "sbx"), ("## imitation", "imitation")])
def test_snippets_of_large_packages_run(heading: str, module: str, tmp_path: Path) -> None:
    require(module, "ale_py")
    for code in blocks(heading, "python"):
        run(tmp_path, "-c", code)


@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
def test_cleanrl_diff_applies_and_trains_the_same_weights() -> None:
    require("ale_py", "cv2")
    (loop,), (diff,) = blocks("## CleanRL", "python"), blocks("## CleanRL", "diff")
    changed = loop
    for old, new in re.findall(r"^-(.*)\n\+(.*)$", diff, re.MULTILINE):
        assert loop.count(f"{old}\n") == 1
        changed = changed.replace(f"{old}\n", f"{new}\n")

    dense, compressed = execute(loop), execute(changed)

    for name, weight in dense["q_network"].state_dict().items():
        np.testing.assert_array_equal(weight.numpy(), compressed["q_network"].state_dict()[name].numpy())
    assert type(dense["rb"]).__name__ == "ReplayBuffer"
    assert type(compressed["rb"]).__name__ == "CompressedReplayBuffer"
    assert compressed["rb"].memory_usage().total < 0.05 * dense["rb"].observations[: dense["rb"].size()].nbytes


@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
def test_a_shared_model_loads_without_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("ale_py")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("## Sharing a model", "python")
    variables = execute(code)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sb3_extra_buffers"]:
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ImportError, match="sb3_extra_buffers"):
        variables["DQN"].load("dqn_pong")
    model = variables["DQN"].load("dqn_pong", custom_objects=variables["plain"])

    assert type(model.replay_buffer).__name__ == "ReplayBuffer"
    assert model.buffer_size == 1
