"""Agents trained in parts, or with compressed buffers, are those of one training with SB3's buffers."""

from __future__ import annotations

import functools
import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

for name in ("ale_py", "tqdm"):
    pytest.importorskip(name)
agents: Any = importlib.import_module("benchmarks.agents")
runs: Any = importlib.import_module("benchmarks.agent_runs")
tables: Any = importlib.import_module("benchmarks.agent_tables")
training: Any = importlib.import_module("benchmarks.agent_training")
results: Any = importlib.import_module("benchmarks.results")

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = {"features_extractor_kwargs": {"features_dim": 16}}
# four segments; the replay buffer of 40 steps wraps around in the second
COMMON = ["--device", "cpu", "--n-envs", "2", "--timesteps", "256", "--segment", "64", "--row-steps", "16"]
COMMON += ["--evaluation-games", "0"]
HYPERPARAMETERS = {
    "ppo-pong": ["n_steps=8", "batch_size=8", "n_epochs=2"],
    "dqn-mspacman": ["buffer_size=80", "learning_starts=32", "target_update_interval=20", "exploration_fraction=0.9"],
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Such small networks are slower with several threads; other tests expect torch's usual kernels."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def train(output: Path, agent: str, *arguments: str, buffer: str = "compressed") -> list[dict[str, str]]:
    """Train, and return the log without times."""
    options = ["--agent", agent, "--buffer", buffer, "--output", str(output), *COMMON, *arguments]
    agents.main([*options, "--set", f"policy_kwargs={json.dumps(SMALL)}", *HYPERPARAMETERS[agent]])
    rows = results.read_rows(output / f"{agent}-{buffer}" / "log.csv")
    return [{column: value for column, value in row.items() if column != "seconds"} for row in rows]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stop-at", "0"], "--stop-at: expected a whole number of at least 1, got '0'"),
        (["--n-envs", "1.5"], "--n-envs: expected a whole number of at least 1, got '1.5'"),
        (["--seed", "-1"], "--seed: expected a whole number of at least 0, got '-1'"),
        (["--set", "n_steps"], "--set: expected NAME=VALUE with a value in JSON, such as n_steps=64, got 'n_steps'"),
        (["--set", "n_steps=8", "learning_rate=fast"], "such as n_steps=64, got 'learning_rate=fast'"),
    ],
)
def test_arguments_that_make_no_sense_are_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path, "dqn-mspacman", *arguments)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def whole_dqn(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The log of a DQN that was trained in one part."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    log = train(tmp_path_factory.mktemp("whole"), "dqn-mspacman")
    torch.set_num_threads(threads)
    return log


@pytest.mark.parametrize("agent", HYPERPARAMETERS)
def test_parts_give_the_result_of_one_training_and_of_sb3_s_buffer(
    agent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole", agent)
    train(tmp_path, agent, "--stop-at", "100")
    first = results.read_rows(tmp_path / f"{agent}-compressed" / "log.csv")
    parts = train(tmp_path, agent)
    dense = train(tmp_path, agent, buffer="dense")

    assert [int(row["timesteps"]) for row in whole] == list(range(16, 257, 16))
    assert len({row["weights"] for row in whole}) >= 14  # nearly every row follows an update
    assert int(first[-1]["timesteps"]) == 128
    assert parts == whole == dense
    state = json.loads((tmp_path / f"{agent}-compressed" / "run.json").read_text())
    assert [part["timesteps"] for part in state["progress"]["parts"]] == [128, 256]
    # two images of 28 kB for a transition of a replay buffer, one for a step of a rollout
    kept = {"ppo-pong": 16, "dqn-mspacman": 2 * 80}[agent] * 4 * 84 * 84
    assert kept < state["progress"]["dense_bytes"] < 1.01 * kept
    assert 0 < state["progress"]["buffer_bytes"] < kept
    agents.main(["--compare", "--agent", agent, "--output", str(tmp_path)])
    assert f"{agent}: 16 rows of the log, 256 steps: identical" in capsys.readouterr().out


def test_a_replay_buffer_that_was_not_saved_is_collected_again(whole_dqn: list[dict[str, str]], tmp_path: Path) -> None:
    agent = "dqn-mspacman"
    train(tmp_path, agent, "--stop-at", "150")
    folder = tmp_path / f"{agent}-compressed"
    saved = runs.Run.open(folder, "cpu")
    model = saved._load(training.make_training_env(saved.settings))
    shutil.rmtree(folder / "buffer_192")
    again = saved._load(training.make_training_env(saved.settings))

    assert model.replay_buffer.full
    assert model.replay_buffer.pos == again.replay_buffer.pos == 96 % 40
    for column in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        expected, collected = (getattr(buffer.replay_buffer, column)[:] for buffer in (model, again))
        np.testing.assert_array_equal(collected, expected, err_msg=column)
    assert train(tmp_path, agent) == whole_dqn


def test_a_part_that_was_killed_is_repeated_from_its_checkpoint(
    whole_dqn: list[dict[str, str]], tmp_path: Path
) -> None:
    agent = "dqn-mspacman"
    train(tmp_path, agent, "--stop-at", "64")
    folder = tmp_path / f"{agent}-compressed"
    # the log is ahead of the checkpoint, and a newer checkpoint was begun
    with (folder / "log.csv").open("a") as file:
        file.write("5,9.9,80,0,nan,0,nan,0,0\n")
    (folder / "model_128.zip").write_bytes(b"half")

    assert train(tmp_path, agent) == whole_dqn
    assert sorted(path.name for path in folder.glob("*_*")) == ["actions_256.npz", "buffer_256", "model_256.zip"]


def test_a_time_limit_ends_a_part_before_the_next_segment(tmp_path: Path) -> None:
    agent = "ppo-pong"
    train(tmp_path, agent, "--stop-at", "64")
    state = tmp_path / f"{agent}-compressed" / "run.json"
    before = json.loads(state.read_text())
    assert before["progress"]["segment_seconds"] > 0
    before["progress"]["segment_seconds"] = 100.0
    state.write_text(json.dumps(before))

    assert len(train(tmp_path, agent, "--seconds", "100")) == 4
    assert json.loads(state.read_text()) == before
    assert len(train(tmp_path, agent, "--seconds", "1000")) == 16


def test_segments_may_become_longer_and_other_settings_need_another_folder(tmp_path: Path) -> None:
    short = train(tmp_path, "ppo-pong", "--stop-at", "64")
    longer = train(tmp_path, "ppo-pong", "--stop-at", "192", "--segment", "128")

    assert longer[: len(short)] == short
    assert [row["timesteps"] for row in longer][-1] == "256"

    with pytest.raises(SystemExit, match=r"ppo-pong-compressed holds a run with .*'seed': 0"):
        train(tmp_path, "ppo-pong", "--seed", "1")


def test_differences_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = "ppo-pong"
    for buffer in ("compressed", "dense"):
        train(tmp_path, agent, "--stop-at", "64", buffer=buffer)
    log = tmp_path / f"{agent}-dense" / "log.csv"
    rows = results.read_rows(log)
    rows[2]["weights"] = "00000000"
    results.write_rows(log, rows)

    with pytest.raises(SystemExit):
        agents.main(["--compare", "--agent", agent, "dqn-mspacman", "--output", str(tmp_path)])

    output = capsys.readouterr().out
    assert re.search(r"ppo-pong: 1 of 4 rows differ; row 3: weights \w{8} and 00000000", output)
    assert "dqn-mspacman: needs the logs of both trainings" in output


def test_results_are_evaluated_recorded_and_rendered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    # short games
    short = functools.partial(training.make_evaluation_env, max_frames=400)
    monkeypatch.setattr(runs, "make_evaluation_env", short)
    agent, data, images = "dqn-mspacman", tmp_path / "data", tmp_path / "images"
    for folder in (data, images):
        folder.mkdir()
    train(tmp_path, agent, "--stop-at", "128", "--evaluation-games", "1", "--evaluation-steps", "128")
    output = ["--agent", agent, "--output", str(tmp_path), "--device", "cpu"]
    agents.main([*output, "--evaluate", "best", "final", "--games", "2", "--record", "--record-steps", "10"])
    printed = capsys.readouterr().out
    tables.collect(tmp_path, data, images)
    measured = tables.load(data)
    page, table = tables.section(measured), tables.summary(measured)
    tables.plot(measured, images / "agents.png")

    # one evaluation, after the second of two segments, and a curve that has it
    evaluated = [row for row in measured["curves"] if row["evaluation"]]
    assert [int(row["timesteps"]) for row in evaluated] == [128]
    assert float(evaluated[0]["evaluation"]) > 0
    assert int(measured["curves"][0]["timesteps"]) < 64
    report = re.search(r"\(Final\) Evaluated 2 episodes, mean reward: (.*)\nQ1.*", printed)
    assert report
    assert report[0] in page
    assert re.search(r"\(Best \) Evaluated 2 episodes", page)
    assert re.search(rf"\| DQN, MsPacman \| 128 \| .* \| {re.escape(report[1])} \| 3300.0 \+/- 770.79 \| 3379.2", table)
    assert re.search(r"128 of 256 steps in \d+ s, with `CompressedReplayBuffer` and `delta`: [\d.]+ kB", page)
    assert (images / f"agent_{agent}.gif").stat().st_size > 1000
    assert (images / "agents.png").stat().st_size > 1000


def test_without_results_nothing_is_rendered(tmp_path: Path) -> None:
    tables.collect(tmp_path, tmp_path, tmp_path)
    measured = tables.load(tmp_path)

    assert tables.section(measured) == tables.summary(measured) == ""


@pytest.mark.parametrize(
    ("agent", "example", "game"),
    [
        ("ppo-pong", "example_train_rollout", "pong"),
        ("ppo-mspacman", "example_train_gpu_rollout", "mspacman"),
        ("dqn-mspacman", "example_train_replay", "mspacman"),
        ("dqn-mspacman", "example_train_gpu_replay", "mspacman"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # warnings of third-party libraries
def test_agents_have_the_settings_of_the_examples(
    agent: str, example: str, game: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    monkeypatch.setattr(sys, "argv", [example, "--game", game, "--device", "cpu"])
    script: Any = importlib.import_module(example)
    found = []
    monkeypatch.setattr(script, "train", lambda model, options, *_: found.append((model, options.timesteps)))
    script.main()
    theirs, timesteps = found[0]

    settings = training.Settings(agent)
    ours = training.make_model(settings, training.make_training_env(settings))

    assert type(ours) is type(theirs)
    assert settings.timesteps == timesteps
    schedules = ("lr_schedule", "clip_range", "exploration_schedule")
    for name in schedules:
        schedule = getattr(ours, name, None)
        for remaining in (1.0, 0.95, 0.5, 0.0):
            assert schedule is None or schedule(remaining) == getattr(theirs, name)(remaining), name
    different = {
        name
        for name, value in vars(ours).items()
        if isinstance(value, int | float | str) and value != vars(theirs)[name]
    }
    assert different <= {"verbose", "start_time"}
    assert ours.n_envs == theirs.n_envs == 8
    assert ours.observation_space == theirs.observation_space
