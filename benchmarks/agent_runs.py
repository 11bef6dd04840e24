"""Runs of ``python -m benchmarks.agents``: training in parts, checkpoints, evaluation and recording.

A run in parts ends with exactly the weights of a run without interruption. ale-py's vector environment cannot save its
games, so training consists of *segments*: after every ``settings.segment`` steps, at the end of an iteration, all games
are restarted and all random generators are seeded again, from the seed and the number of steps. Parts end where a
segment ends. A checkpoint therefore needs neither games nor generators, only the model with its optimiser and the
replay buffer.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from tqdm import tqdm

from benchmarks import results
from benchmarks.agent_training import (
    Log,
    SegmentEnd,
    Settings,
    Totals,
    make_deterministic,
    make_evaluation_env,
    make_model,
    make_training_env,
)
from benchmarks.results import replace_rows
from sb3_extra_buffers.files import save
from sb3_extra_buffers.files.last_save import get_last_save
from sb3_extra_buffers.recording import record_agent
from sb3_extra_buffers.training_utils.eval_model import EvalResult, eval_model

# seconds between two checkpoints of a part
CHECKPOINT_SECONDS = 300.0
# seeds of the games of an evaluation, relative to that of the training
SELECTION_GAMES, FINAL_GAMES, RECORDED_GAME = 1_000_000, 2_000_000, 3_000_000


@dataclasses.dataclass
class Progress(Totals):
    """What is known about a run at its last checkpoint."""

    best_reward: float | None = None
    best_timesteps: int = 0
    # steps and mean reward of each evaluation
    evaluations: list[list[float]] = dataclasses.field(default_factory=list)
    # bytes of the buffer, and of SB3's for the same transitions
    buffer_bytes: int = 0
    dense_bytes: int = 0
    segment_seconds: float = 0.0
    save_seconds: float = 10.0
    # date, machine, versions, and steps and seconds at the end of each part
    parts: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def machine(device: str) -> str:
    if torch.device(device).type == "cuda":
        return f"{torch.cuda.get_device_name()}, {os.cpu_count()} CPU cores"
    return results.machine()


class Run:
    """One training in a folder; ``run.json``, replaced atomically, says which files are the last checkpoint.

    Raises SystemExit if the folder holds a run with other settings.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings, self.progress = folder, settings, Progress()
        self._replay = settings.spec.kind == "replay"
        # actions of recent segments by their first step
        self._actions: dict[int, npt.NDArray[np.uint8]] = {}
        self._state = folder / "run.json"
        if self._state.exists():
            state = json.loads(self._state.read_text())
            if state["settings"] | {"segment": settings.segment} != dataclasses.asdict(settings):
                raise SystemExit(f"{folder} holds a run with the settings {state['settings']}; choose another --output")
            self.progress = Progress(**state["progress"])

    @classmethod
    def open(cls, folder: Path, device: str) -> Run:
        """The run in ``folder``, to be used on ``device``."""
        state = folder / "run.json"
        if not state.exists():
            raise SystemExit(f"there is no run in {folder}; train the agent first")
        run = cls(folder, Settings(**json.loads(state.read_text())["settings"]))
        run.settings = dataclasses.replace(run.settings, device=device)
        return run

    @property
    def name(self) -> str:
        return f"{self.settings.agent}, {self.settings.buffer} buffer"

    def path(self, kind: str) -> Path:
        """A file or folder of the last checkpoint."""
        return self.folder / f"{kind}_{self.progress.timesteps}{'.npz' if kind == 'actions' else ''}"

    # training

    def train(self, stop_at: int, seconds: float = math.inf, position: int | None = None) -> Any:
        """Train until ``stop_at`` steps, for less than ``seconds``; return the model."""
        began = time.perf_counter()
        self.folder.mkdir(parents=True, exist_ok=True)
        make_deterministic()
        env = make_training_env(self.settings)
        model = self._load(env) if self.progress.timesteps else make_model(self.settings, env)
        stop_at = min(stop_at, self.settings.timesteps)
        self._start_part()
        with tqdm(
            total=stop_at, initial=self.progress.timesteps, desc=self.name, unit="step", position=position, disable=None
        ) as bar:
            log = Log(self.folder / "log.csv", self.progress, self.settings.row_steps, bar.update)
            saved_at, trained = time.perf_counter(), False
            while self.progress.timesteps < stop_at:
                left = seconds - (time.perf_counter() - began)
                if left < 1.2 * self.progress.segment_seconds + 1.5 * self.progress.save_seconds:
                    break
                self._train_segment(model, log)
                trained = True
                if time.perf_counter() - saved_at > CHECKPOINT_SECONDS:
                    self._save(model)
                    saved_at = time.perf_counter()
            log.close()
        if trained:
            self._save(model)
        over = self.progress.timesteps >= stop_at
        print(f"{self.name}: {self.progress.timesteps:,} steps, {'done' if over else 'to be continued'}", flush=True)
        env.close()
        return model

    def _start_part(self) -> None:
        versions = results.versions("ale-py")
        date, where = datetime.date.today().isoformat(), machine(self.settings.device)
        part = {"date": date, "machine": where, "versions": versions, "segment": self.settings.segment}
        last = self.progress.parts[-1] if self.progress.parts else {}
        # the time that another machine needs, or shorter segments, says nothing about this part
        if any(last.get(name) != part[name] for name in ("machine", "segment")):
            self.progress.segment_seconds = 0.0
        self.progress.parts.append(part)

    def _train_segment(self, model: Any, log: Log) -> None:
        start, begin, seconds = self.progress.timesteps, time.perf_counter(), self.progress.seconds
        begin_segment(model, self.settings, start)
        log.start_segment(self.settings.segment_end(start))
        try:
            # a new call of `learn` continues the schedules
            left = self.settings.timesteps - start
            model.learn(left, callback=log, log_interval=None, reset_num_timesteps=False)
        except SegmentEnd:
            pass
        speed = (self.progress.timesteps - start) / (self.progress.seconds - seconds)
        if log.usage is not None:
            self.progress.buffer_bytes, self.progress.dense_bytes = log.usage.total, log.usage.dense
        if self._replay:
            self._actions[start] = np.array(log.actions)
            needed = self.progress.timesteps - model.replay_buffer.buffer_size * self.settings.n_envs
            for first, last in zip(list(self._actions), list(self._actions)[1:], strict=False):
                if last <= needed:
                    del self._actions[first]
        rewards = [episode["r"] for episode in model.ep_info_buffer]
        mean = np.mean(rewards) if rewards else math.nan
        text = f"{self.name}: {self.progress.timesteps:,} steps, {speed:,.0f} steps/s, mean reward {mean:.1f}"
        if self.settings.is_evaluated(start, self.progress.timesteps):
            text += self._evaluate(model)
        tqdm.write(text, file=sys.stderr)
        self.progress.segment_seconds = max(self.progress.segment_seconds, time.perf_counter() - begin)

    def _evaluate(self, model: Any) -> str:
        """Play some games and keep the best weights."""
        n_games = self.settings.evaluation_games
        reward = self._play(model.policy, n_games, SELECTION_GAMES).mean
        self.progress.evaluations.append([self.progress.timesteps, reward])
        if self.progress.best_reward is None or reward > self.progress.best_reward:
            self.progress.best_reward, self.progress.best_timesteps = reward, self.progress.timesteps
            model.policy.save(self.folder / f"best_{self.progress.timesteps}.zip")
        return f", {n_games} whole games {reward:.1f}"

    def _play(self, policy: Any, n_games: int, seed: int, **arguments: Any) -> EvalResult:
        env = make_evaluation_env(self.settings.spec.game, min(n_games, 50), self.settings.seed + seed)
        result = eval_model(policy, env, n_games, **{"progress_bar": False, "verbose": False} | arguments)
        env.close()
        return result

    # checkpoints

    def _save(self, model: Any) -> None:
        begin = time.perf_counter()
        if self._replay:
            if self.settings.buffer == "compressed":
                last = get_last_save(model.replay_buffer)
                save(model.replay_buffer, self.path("buffer"), base=None if last is None else last.folder)
            with self.path("actions").open("wb") as file:
                arrays: dict[str, Any] = {str(start): actions for start, actions in self._actions.items()}
                np.savez_compressed(file, **arrays)
        model.save(self.folder / f"model_{self.progress.timesteps}.zip")
        self.progress.save_seconds = time.perf_counter() - begin
        self.progress.parts[-1] |= {"timesteps": self.progress.timesteps, "seconds": self.progress.seconds}
        state = {"settings": dataclasses.asdict(self.settings), "progress": dataclasses.asdict(self.progress)}
        new = self._state.with_suffix(".new")
        new.write_text(json.dumps(state, indent=1) + "\n")
        new.replace(self._state)
        for path in self.folder.iterdir():
            kind, _, rest = path.name.partition("_")
            kept = self.progress.best_timesteps if kind == "best" else self.progress.timesteps
            if rest and _steps(path) != kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _load(self, env: Any) -> Any:
        """The model of the last checkpoint, with its replay buffer: loaded, or collected again if it was not saved."""
        algorithm: type[BaseAlgorithm] = self.settings.spec.algorithm
        path = self.folder / f"model_{self.progress.timesteps}.zip"
        model: Any = algorithm.load(path, env=env, device=self.settings.device)
        if self._replay:
            with np.load(self.path("actions")) as actions:
                self._actions = {int(start): actions[start] for start in actions}
            if self.path("buffer").exists():
                model.load_replay_buffer(self.path("buffer"))
            else:
                collect_again(model, self.settings, self._actions)
        return model

    # results

    def load_policy(self, which: str) -> tuple[Any, int]:
        """The ``"best"`` or ``"final"`` policy, and after how many steps."""
        spec, progress = self.settings.spec, self.progress
        if which == "best":
            path = self.folder / f"best_{progress.best_timesteps}.zip"
            if not path.exists():
                raise SystemExit(f"{self.folder} has no best agent; train with --evaluation-games")
            policy_class = spec.algorithm.policy_aliases["CnnPolicy"]
            return policy_class.load(path, device=self.settings.device), progress.best_timesteps
        path = self.folder / f"model_{progress.timesteps}.zip"
        if not path.exists():
            raise SystemExit(f"{self.folder} has no trained agent; train it first")
        # the model only plays, so any small buffer will do
        small: dict[str, Any] = {f"{spec.kind}_buffer_class": None, f"{spec.kind}_buffer_kwargs": {}}
        small |= {"buffer_size": 1} if self._replay else {"n_steps": 2}
        model = spec.algorithm.load(path, device=self.settings.device, custom_objects=small)
        return model.policy, progress.timesteps

    def evaluate(self, which: str, n_games: int) -> EvalResult:
        """Play whole games, print the report, and write the rewards to ``games.csv``."""
        policy, timesteps = self.load_policy(which)
        print(f"{self.name}, after {timesteps:,} steps:", flush=True)
        result = self._play(policy, n_games, FINAL_GAMES, name=which.title(), progress_bar=True, verbose=True)
        rewards, counts = np.unique(result.rewards, return_counts=True)
        info = {"agent": self.settings.agent, "model": which, "timesteps": timesteps}
        rows = [
            info | {"reward": reward, "games": count}
            for reward, count in zip(rewards.tolist(), counts.tolist(), strict=True)
        ]
        replace_rows(self.folder / "games.csv", rows, ("agent", "model"))
        return result

    def record(self, which: str, n_steps: int) -> Path:
        """Record part of a game as the agent sees it."""
        policy, _ = self.load_policy(which)
        env = make_evaluation_env(self.settings.spec.game, 1, self.settings.seed + RECORDED_GAME)
        path = self.folder / "play.gif"
        record_agent(policy, env, n_steps).export(path, scale=2, fps=30)
        env.close()
        print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
        return path


def _steps(path: Path) -> int:
    """The number of steps in the name of a file."""
    return int(path.stem.rpartition("_")[2])


def begin_segment(model: Any, settings: Settings, timesteps: int) -> None:
    """Seed all generators and the games, which start again in the next call of ``learn``."""
    model.set_random_seed(settings.segment_seed(timesteps))
    model._last_obs = None


def collect_again(model: Any, settings: Settings, segments: dict[int, npt.NDArray[np.uint8]]) -> None:
    """Fill the replay buffer with the transitions it held, by taking the same actions in the same games."""
    buffer, env = model.replay_buffer, model.env
    n_rows = model.num_timesteps // settings.n_envs
    oldest = max(n_rows - buffer.buffer_size, 0)
    blank = np.zeros((settings.n_envs, *env.observation_space.shape), np.uint8)
    zeros = np.zeros(settings.n_envs)
    # until the oldest transition gets the position that it had; they are overwritten later
    for _ in range(oldest % buffer.buffer_size):
        buffer.add(blank, blank, zeros[:, None], zeros, zeros, [{}] * settings.n_envs)
    with tqdm(total=n_rows - min(segments) // settings.n_envs, desc="collecting the buffer again", disable=None) as bar:
        for start, actions in segments.items():
            begin_segment(model, settings, start)
            model._last_obs = env.reset()
            for row, action in enumerate(actions, start // settings.n_envs):
                obs, rewards, dones, infos = env.step(action)
                if row >= oldest:
                    model._store_transition(buffer, action.astype(np.int64), obs, rewards, dones, infos)
                model._last_obs = obs
                bar.update(1)
