"""Every example runs with --quick and prints what it is meant to show."""

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
# what memory_usage() prints: bytes and transitions held, and their share of what SB3's buffer takes for them
USAGE = r"[kM]B for {} transitions: (?P<percent>[\d.]+) % of the [\d.]+ MB in "
REPLAY, ROLLOUT = USAGE + "SB3's ReplayBuffer", USAGE + "SB3's RolloutBuffer"
TABLE = r"Compression +Memory +Memory % +Latency\n.*"
# required package, arguments, and pattern of the output
CASES = {
    "example_train_rollout": ("ale_py", "", ROLLOUT.format(256) + r".*saved .*ppo_pong\.zip"),
    "example_train_rollout raw": ("ale_py", "--compression raw --game mspacman", r"saved .*ppo_mspacman\.zip"),
    "example_train_replay": ("ale_py", "--game mspacman", REPLAY.format(512) + r".*saved .*dqn_mspacman\.zip"),
    "example_train_replay raw": ("ale_py", "--compression raw", r"saved .*dqn_pong\.zip"),
    "example_eval": ("ale_py", "", r"\(Final\) Evaluated 4 episodes, mean reward: .* \+/- .*\nQ1: .* \| Relative IQR:"),
    "example_eval dqn": ("ale_py", "--algorithm DQN --game mspacman", r"\(Final\) Evaluated 4 episodes"),
    "example_watch": ("cv2", "", r"20 steps, rewards .*agent\.gif"),
    "example_watch mp4": ("cv2", "--algorithm DQN --picture agent.mp4", r"20 steps, rewards .*agent\.mp4"),
    "example_eval_memory_saving": ("ale_py", "", TABLE + r"baseline +[\d.]+ MB +100\.0% +[\d.]+ s.*memory_saving\.png"),
    "example_eval_memory_loading": (
        "ale_py",
        "--batch-size 8 --compression auto,zstd-5",
        TABLE + r"baseline +[\d.]+ MB +100\.0% +[\d.]+ ms.*memory_loading\.png",
    ),
    "example_vizdoom_segmentation": (
        "vizdoom",
        "",
        ROLLOUT.format(256) + r".*as RGB, SB3's buffer would take .*\(Final\) Evaluated 2 episodes",
    ),
    "example_train_gpu_rollout": ("ale_py", "", ROLLOUT.format(256) + r".*saved .*ppo_pong\.zip"),
    "example_train_gpu_replay": ("ale_py", "--game mspacman", REPLAY.format(512) + r".*saved .*dqn_mspacman\.zip"),
    "example_watch_gpu_rollout": ("cv2", "", r"20 steps, rewards .*agent\.gif"),
    "example_watch_gpu_replay": ("cv2", "", r"20 steps, rewards .*agent\.gif"),
    "example_prioritized_dqn": ("ale_py", "", r"480 transitions of MsPacman.*, 480 steps, .* get \d+% of the samples"),
    "example_torchrl": (
        "torchrl",
        "",
        r"CompressedStorage: extend .*\nidentical samples: True\n.*" + USAGE.format(512),
    ),
    "example_cleanrl": ("ale_py", "", REPLAY.format(512)),
    "example_cleanrl_graph": ("ale_py", "", USAGE.format(512) + "dense tensors"),
    "example_cleanrl_graph dense": ("ale_py", "--buffer dense-cpu --buffer-size 512", r"[\d.]+ MB in dense arrays"),
    "example_recurrent_dqn": (
        "torch",
        "",
        r"(9\d|100)% of the last turns were right \(50% without memory\)\n[\d.]+ MB",
    ),
    "example_world_model": ("ale_py", "", r"update    40: [1-8]\d\.\d% of the error .*" + USAGE.format("3,200")),
    "example_sbx": ("sbx", "", REPLAY.format(512)),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Such small networks are slower with several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES)
# warnings of third-party libraries
@pytest.mark.filterwarnings("ignore")
def test_examples_run(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    required, arguments, pattern = CASES[case]
    pytest.importorskip(required)
    name = case.partition(" ")[0]
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    folder = ["--output", str(tmp_path)] if "from common import" in path.read_text() else []
    monkeypatch.setattr(sys, "argv", [str(path), "--quick", *folder, *arguments.split()])
    monkeypatch.chdir(tmp_path)

    runpy.run_path(str(path), run_name="__main__")

    output = capsys.readouterr().out
    found = re.search(pattern, output, re.DOTALL)
    assert found, output
    # --quick runs long enough to compress
    assert all(0.1 < float(percent) < 5 for percent in found.groupdict().values())
    for written in re.findall(r"\S+\.(?:zip|gif|mp4)", arguments):
        assert (tmp_path / written).stat().st_size > 1000


def test_every_example_is_short_and_tested() -> None:
    for path in EXAMPLES.glob("example_*.py"):
        n_lines = len(path.read_text().splitlines())
        assert n_lines < 80, f"{path.name} has {n_lines} lines: too long to be read as an example"
    # test_documents.py runs the demo
    tested = {case.partition(" ")[0] for case in CASES} | {
        "example_ray",
        "demo",
        "common",
        "runs",
        "small_dqn",
        "comparison",
        "graph_parts",
        "memory_maze",
    }
    assert tested == {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.mark.slow
def test_example_ray_loses_no_acknowledged_transition() -> None:
    pytest.importorskip("ray")
    pytest.importorskip("torchrl")
    # in its own process: Ray starts more processes, two of which are killed
    command = [sys.executable, str(EXAMPLES / "example_ray.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    found = re.search(r"it restarted with (\d+) transitions, (\d+) were acknowledged before", done.stdout)
    assert found is not None
    assert int(found[1]) >= int(found[2]) >= 256
    assert "512 transitions of the other collector were acknowledged" in done.stdout
    percent = re.search(r"they take [\d.]+ MB: ([\d.]+)% of those in TorchRL's LazyTensorStorage", done.stdout)
    assert percent is not None
    assert 0.1 < float(percent[1]) < 5


def test_example_sbx_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    path = EXAMPLES / "example_sbx.py"
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(path), "--quick"])
    monkeypatch.setitem(sys.modules, "sbx", None)

    with pytest.raises(SystemExit, match="pip install sbx-rl"):
        runpy.run_path(str(path), run_name="__main__")


@pytest.mark.filterwarnings("ignore")
def test_the_model_of_the_examples_has_learned_to_play(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ale_py")
    from sb3_extra_buffers.training_utils.atari import make_env
    from sb3_extra_buffers.training_utils.eval_model import eval_model

    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    module = runpy.run_path(str(EXAMPLES / "small_dqn.py"))
    whole_games = {"terminal_on_life_loss": False, "clip_reward": False}
    env = make_env("MsPacmanNoFrameskip-v4", n_envs=4, seed=0, native=True, wrapper_kwargs=whole_games)
    result = eval_model(module["load_small_dqn"](env, "cpu"), env, 4, progress_bar=False, verbose=False)
    env.close()

    assert module["WEIGHTS"].stat().st_size < 100_000
    assert result.mean > 350  # random actions: about 220


def test_example_eval_without_a_model_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ale_py")
    path = EXAMPLES / "example_eval.py"
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(path), "--output", str(tmp_path), "--n-envs", "1"])

    with pytest.raises(SystemExit, match="train one first"):
        runpy.run_path(str(path), run_name="__main__")
