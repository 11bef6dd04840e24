"""Every example runs in its quick form, and says what it is there to say."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
# what each needs beyond the package, its arguments, and what its output has to hold
CASES = {
    "example_train_rollout": ("ale_py", "", r"a rollout takes .*% of .* dense.*saved .*ppo_pong\.zip"),
    "example_train_rollout raw": ("ale_py", "--compression raw --game mspacman", r"saved .*ppo_mspacman\.zip"),
    "example_train_replay": ("ale_py", "--game mspacman", r"64 transitions take .*saved .*dqn_mspacman\.zip"),
    "example_train_replay raw": ("ale_py", "--compression raw", r"saved .*dqn_pong\.zip"),
    "example_eval": ("ale_py", "", r"\(Final\) Evaluated 4 episodes, mean reward: .* \+/- .*\nQ1: .* \| Relative IQR:"),
    "example_eval dqn": ("ale_py", "--algorithm DQN --game mspacman", r"\(Final\) Evaluated 4 episodes"),
    "example_watch": ("cv2", "", r"20 steps, rewards .*agent\.gif"),
    "example_watch mp4": ("cv2", "--algorithm DQN --picture agent.mp4", r"20 steps, rewards .*agent\.mp4"),
    "example_eval_memory_saving": ("ale_py", "", r"baseline +[\d.]+ MB +100\.0%.*s"),
    "example_eval_memory_loading": ("ale_py", "--batch-size 8", r"baseline.*\nauto .* ms"),
    "example_vizdoom_segmentation": ("vizdoom", "", r"as dense RGB it would take .*\(Final\) Evaluated 2 episodes"),
    "example_train_gpu_rollout": ("ale_py", "", r"a rollout takes .*% of .* dense.*saved .*ppo_pong\.zip"),
    "example_train_gpu_replay": ("ale_py", "--game mspacman", r"64 transitions take .*saved .*dqn_mspacman\.zip"),
    "example_watch_gpu_rollout": ("cv2", "", r"20 steps, rewards .*agent\.gif"),
    "example_watch_gpu_replay": ("cv2", "", r"20 steps, rewards .*agent\.gif"),
    "example_prioritized_dqn": ("ale_py", "", r"240 transitions of MsPacman.*, 320 steps, .* makes \d+% of the draws"),
    "example_torchrl": ("torchrl", "", r"CompressedStorage: extend .*\nthe same samples: True\n.*% of"),
    "example_cleanrl": ("ale_py", "", r"64 transitions take .*% of"),
    "example_sbx": ("sbx", "", r"64 transitions take .*% of"),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Networks this small lose more by handing out work than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES)
# what the libraries around us warn of is theirs
@pytest.mark.filterwarnings("ignore")
def test_examples_run(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed, arguments, said = CASES[case]
    pytest.importorskip(needed)
    name = case.partition(" ")[0]
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    where = ["--output", str(tmp_path)] if "from common import" in path.read_text() else []
    monkeypatch.setattr(sys, "argv", [str(path), "--quick", *where, *arguments.split()])
    monkeypatch.chdir(tmp_path)

    runpy.run_path(str(path), run_name="__main__")

    assert re.search(said, capsys.readouterr().out, re.DOTALL)
    for written in re.findall(r"\S+\.(?:zip|gif|mp4)", arguments):
        assert (tmp_path / written).stat().st_size > 1000


def test_every_example_is_short_and_runs_here() -> None:
    for path in EXAMPLES.glob("*.py"):
        n_lines = len(path.read_text().splitlines())
        assert n_lines < 80, f"{path.name} has {n_lines} lines: too long to be read as an example"
    # the demo runs with the documents that show it
    run = {case.partition(" ")[0] for case in CASES} | {"example_ray", "demo", "common"}
    assert run == {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.mark.slow
def test_nothing_is_lost_in_the_example_of_ray() -> None:
    pytest.importorskip("ray")
    pytest.importorskip("torchrl")
    # in a process of its own: Ray starts others, and two of them are killed
    command = [sys.executable, str(EXAMPLES / "example_ray.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    held, there = re.search(r"killed the buffer; of (\d+) transitions (\d+)", done.stdout).groups()  # type: ignore[union-attr]
    assert int(there) >= int(held) >= 256
    assert "had acknowledged 512 in the end" in done.stdout


def test_without_sbx_its_example_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    path = EXAMPLES / "example_sbx.py"
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(path), "--quick"])
    monkeypatch.setitem(sys.modules, "sbx", None)

    with pytest.raises(SystemExit, match="pip install sbx-rl"):
        runpy.run_path(str(path), run_name="__main__")


def test_without_a_model_evaluation_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ale_py")
    path = EXAMPLES / "example_eval.py"
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(path), "--output", str(tmp_path), "--n-envs", "1"])

    with pytest.raises(SystemExit, match="train one first"):
        runpy.run_path(str(path), run_name="__main__")
