"""The agents of ``python -m benchmarks.agents``: their settings, their models, and the log of a training."""

from __future__ import annotations

import csv
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import LinearSchedule

from benchmarks.results import read_rows
from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.training_utils.atari import make_env

# columns that must be identical in two runs with the same seed
SAME = ("timesteps", "games", "mean_reward", "rewards", "loss", "losses", "weights")
COLUMNS = ("iteration", "seconds", *SAME)
METHOD = "delta"
# environments of the example scripts
EXAMPLE_ENVS = 8
# steps of each environment between two starts of its games; a long game of Pong has 3,000
SEGMENT = 6250


@dataclass(frozen=True)
class Agent:
    """An agent whose results are documented; ``hyperparameters`` are those of the example scripts."""

    title: str
    game: str
    algorithm: Any
    hyperparameters: dict[str, Any]

    @property
    def kind(self) -> Literal["replay", "rollout"]:
        """Which buffer the algorithm has."""
        return "replay" if self.algorithm is DQN else "rollout"


# examples/example_train_rollout.py
_PPO = {
    "learning_rate": LinearSchedule(2.5e-4, 0.0, 1.0),
    "n_steps": 128,
    "batch_size": 256,
    "n_epochs": 4,
    "clip_range": LinearSchedule(0.1, 0.0, 1.0),
    "ent_coef": 0.01,
    "vf_coef": 0.5,
}
# examples/example_train_replay.py
_DQN = {
    "learning_rate": 1e-4,
    "buffer_size": 1_000_000,
    "learning_starts": 100_000,
    "target_update_interval": 1000,
    "train_freq": 4,
    "gradient_steps": 1,
    "exploration_fraction": 0.1,
    "exploration_final_eps": 0.01,
}
AGENTS = {
    "ppo-pong": Agent("PPO, Pong", "PongNoFrameskip-v4", PPO, _PPO),
    "ppo-mspacman": Agent("PPO, MsPacman", "MsPacmanNoFrameskip-v4", PPO, _PPO),
    "dqn-mspacman": Agent("DQN, MsPacman", "MsPacmanNoFrameskip-v4", DQN, _DQN),
}


@dataclass(frozen=True)
class Settings:
    """Everything that the result of a training depends on."""

    agent: str
    buffer: str = "compressed"
    seed: int = 0
    device: str = "cpu"
    timesteps: int = 10_000_000
    segment: int = SEGMENT * EXAMPLE_ENVS
    row_steps: int = 1000
    n_envs: int = EXAMPLE_ENVS
    evaluation_games: int = 50
    evaluation_steps: int = 500_000
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> Agent:
        return AGENTS[self.agent]

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Those of the example scripts; with more environments, as many updates for each transition."""
        values = self.spec.hyperparameters
        if self.spec.kind == "replay":
            values = values | {"gradient_steps": max(self.n_envs // EXAMPLE_ENVS, 1)}
        return values | self.overrides

    def segment_end(self, timesteps: int) -> int:
        """Where the segment ends that step ``timesteps`` is in."""
        return min((timesteps // self.segment + 1) * self.segment, self.timesteps)

    def is_evaluated(self, start: int, end: int) -> bool:
        """Whether the agent is evaluated after a segment from step ``start`` to ``end``."""
        every = self.evaluation_steps
        return self.evaluation_games > 0 and (start // every < end // every or end >= self.timesteps)

    def segment_seed(self, timesteps: int) -> int:
        """The seed of the segment that starts at ``timesteps``."""
        return int(np.random.SeedSequence((self.seed, timesteps)).generate_state(1)[0]) % 2**31


def make_deterministic() -> None:
    """Let torch use deterministic kernels only."""
    # read by cuBLAS when it starts
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # uninitialised memory is never read, so filling it would only cost time
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def make_training_env(settings: Settings) -> Any:
    return make_env(settings.spec.game, settings.n_envs, framestack=4, native=True, seed=settings.seed)


def make_evaluation_env(game: str, n_envs: int, seed: int, max_frames: int = 108_000) -> Any:
    """Whole games, of up to ``max_frames`` frames, with unclipped rewards."""
    wrapper = {"terminal_on_life_loss": False, "clip_reward": False}
    limit = {"max_num_frames_per_episode": max_frames}
    return make_env(game, n_envs, framestack=4, native=True, seed=seed, wrapper_kwargs=wrapper, env_kwargs=limit)


def buffer_arguments(settings: Settings) -> dict[str, Any]:
    """The arguments of the algorithm for its buffer; none for SB3's own."""
    if settings.buffer == "dense":
        return {}
    kind = settings.spec.kind
    options: dict[str, Any] = {"compression_method": METHOD}
    if torch.device(settings.device).type == "cuda":
        cls: Any = {"replay": GpuReplayBuffer, "rollout": GpuRolloutBuffer}[kind]
        options["buffer_device"] = settings.device
    else:
        cls = {"replay": CompressedReplayBuffer, "rollout": CompressedRolloutBuffer}[kind]
    return {f"{kind}_buffer_class": cls, f"{kind}_buffer_kwargs": options}


def make_model(settings: Settings, env: Any) -> Any:
    arguments = settings.hyperparameters | buffer_arguments(settings)
    return settings.spec.algorithm("CnnPolicy", env, seed=settings.seed, device=settings.device, **arguments)


def weights_checksum(model: Any) -> str:
    parameters = torch.cat([part.detach().flatten() for part in model.policy.parameters()])
    return f"{zlib.crc32(parameters.cpu().numpy()):08x}"


@dataclass
class Totals:
    """What adds up over the parts of a run: seconds of training, and games that ended."""

    timesteps: int = 0
    seconds: float = 0.0
    games: int = 0


class SegmentEnd(Exception):  # noqa: N818  # not an error
    """Raised between two iterations, to leave ``learn`` where a segment ends."""


class Log(BaseCallback):
    """Writes a row after every ``row_steps`` steps and ends each segment.

    A row has checksums of all rewards and losses since the row before, and of the weights. Rows after
    ``totals.timesteps`` are from a part that was not saved, and are dropped.
    """

    def __init__(self, path: Path, totals: Totals, row_steps: int, progress: Callable[[int], None]) -> None:
        super().__init__()
        self._totals, self._row_steps, self._progress = totals, row_steps, progress
        # actions of the segment, from which its transitions can be made again
        self.actions: list[npt.NDArray[Any]] = []
        # memory of the buffer at the end of the segment; None for SB3's
        self.usage: MemoryUsage | None = None
        kept = [row for row in read_rows(path) if int(row["timesteps"]) <= totals.timesteps]
        self._iteration = len(kept)
        new = path.with_suffix(".new")
        with new.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
        new.replace(path)
        self._file = path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")

    def start_segment(self, end: int) -> None:
        self._end, self.actions = end, []

    def close(self) -> None:
        self._file.close()

    def _on_training_start(self) -> None:
        self._start = time.perf_counter() - self._totals.seconds
        self._stepped, self._rewards, self._losses = False, 0, 0
        self._last_row = self.num_timesteps

    def _on_step(self) -> bool:
        self._rewards = zlib.crc32(self.locals["rewards"].tobytes(), self._rewards)
        self._totals.games += sum("episode" in info for info in self.locals["infos"])
        # replayed only to fill a replay buffer
        if "buffer_actions" in self.locals:
            self.actions.append(self.locals["buffer_actions"].astype(np.uint8))
        self._stepped = True
        self._progress(len(self.locals["rewards"]))
        return True

    def _on_rollout_start(self) -> None:
        # every rollout but the first follows an update
        if self._stepped:
            self._finish_iteration()
        if self.num_timesteps >= self._end:
            raise SegmentEnd

    def _on_rollout_end(self) -> None:
        # PPO empties its buffer before the segment ends
        if self.num_timesteps >= self._end:
            model: Any = self.model
            buffer = model.replay_buffer if hasattr(model, "replay_buffer") else model.rollout_buffer
            self.usage = buffer.memory_usage() if hasattr(buffer, "memory_usage") else None

    def _on_training_end(self) -> None:
        self._finish_iteration()

    def _finish_iteration(self) -> None:
        logged = self.logger.name_to_value
        losses = {name: repr(float(logged[name])) for name in sorted(logged) if name.startswith("train/")}
        self._losses = zlib.crc32(repr(losses).encode(), self._losses)
        steps = self.num_timesteps
        if steps // self._row_steps > self._last_row // self._row_steps or steps >= self._end:
            self._write_row(losses.get("train/loss", "nan"))

    def _write_row(self, loss: str) -> None:
        finished = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        weights = weights_checksum(self.model)
        self._iteration += 1
        self._last_row = self._totals.timesteps = self.num_timesteps
        # the weights have been copied, so the device is done
        self._totals.seconds = time.perf_counter() - self._start
        row = {
            "iteration": self._iteration,
            "seconds": round(self._totals.seconds, 3),
            "timesteps": self.num_timesteps,
            "games": self._totals.games,
            "mean_reward": repr(float(np.mean(finished))) if finished else "nan",
            "rewards": f"{self._rewards:08x}",
            # all digits, so that rounding hides no difference
            "loss": loss,
            "losses": f"{self._losses:08x}",
            "weights": weights,
        }
        self._writer.writerow(row)
        self._file.flush()
        self._rewards = self._losses = 0
