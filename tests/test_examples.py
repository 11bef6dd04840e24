"""Every example runs in its quick form, and says what it is there to say."""

from __future__ import annotations

import re
import runpy
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
    monkeypatch.setattr(sys, "argv", [str(path), "--quick", "--output", str(tmp_path), *arguments.split()])
    monkeypatch.chdir(tmp_path)

    runpy.run_path(str(path), run_name="__main__")

    assert re.search(said, capsys.readouterr().out, re.DOTALL)
    for written in re.findall(r"\S+\.(?:zip|gif|mp4)", arguments):
        assert (tmp_path / written).stat().st_size > 1000


def test_every_example_here_is_short() -> None:
    for name in {case.partition(" ")[0] for case in CASES} | {"common"}:
        n_lines = len((EXAMPLES / f"{name}.py").read_text().splitlines())
        assert n_lines < 80, f"{name}.py has {n_lines} lines: too long to be read as an example"


def test_without_a_model_evaluation_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ale_py")
    path = EXAMPLES / "example_eval.py"
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(path), "--output", str(tmp_path), "--n-envs", "1"])

    with pytest.raises(SystemExit, match="train one first"):
        runpy.run_path(str(path), run_name="__main__")
