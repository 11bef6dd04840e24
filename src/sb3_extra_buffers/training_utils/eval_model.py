"""Evaluate a model in vectorised environments, and fill and time buffers on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import EnvironmentOptionError

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

__all__ = ["EvalResult", "eval_model"]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What an evaluation found."""

    rewards: npt.NDArray[np.float64]
    """Reward of each episode, in the order in which they ended."""
    lengths: npt.NDArray[np.int64]
    """Length of each episode."""
    n_steps: int
    """Transitions played, all environments together; each buffer was given as many."""
    add_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each buffer took to add them."""

    @property
    def mean(self) -> float:
        return float(self.rewards.mean())

    @property
    def std(self) -> float:
        return float(self.rewards.std())

    @property
    def quartiles(self) -> tuple[float, float, float]:
        q1, q2, q3 = np.percentile(self.rewards, (25, 50, 75)).tolist()
        return q1, q2, q3

    @property
    def relative_iqr(self) -> float:
        """Distance of the outer quartiles as a part of the median."""
        q1, q2, q3 = self.quartiles
        return (q3 - q1) / abs(q2) if q2 else 0.0 if q1 == q3 else float("inf")

    def report(self, name: str | None = None) -> str:
        """Two lines: episodes and mean, then quartiles."""
        label = "" if name is None else f"({name:<5}) "
        q1, q2, q3 = self.quartiles
        return (
            f"{label}Evaluated {len(self.rewards)} episodes, mean reward: {self.mean:.1f} +/- {self.std:.2f}\n"
            f"Q1: {_number(q1):>4} | Q2: {_number(q2):>4} | Q3: {_number(q3):>4} | "
            f"Relative IQR: {self.relative_iqr:.2f} | "
            f"Min: {_number(float(self.rewards.min()))} | Max: {_number(float(self.rewards.max()))}"
        )

    def __str__(self) -> str:
        return self.report()


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.2f}"


def eval_model(
    model: Any,
    env: VecEnv,
    n_eval_episodes: int = 100,
    buffer: Any | Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    deterministic: bool = True,
    name: str | None = None,
    progress_bar: bool = True,
    verbose: bool = True,
) -> EvalResult:
    """Let ``model`` play ``n_eval_episodes`` and report on their rewards.

    Every environment plays its share of the episodes, so that short ones do not count more often. Where a `Monitor`
    reports episodes, its rewards are taken: whole games, not clipped.

    Args:
        model: Anything with SB3's ``predict``.
        env: Vectorised environments.
        n_eval_episodes: Episodes to play.
        buffer: A replay buffer that is given every transition, several, or several by name; each is timed.
        deterministic: Whether the model takes its best action.
        name: Printed before the report, such as ``"Best"`` or ``"Final"``.
        progress_bar: Whether to show one.
        verbose: Whether to print the report.
    """
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecMonitor, is_vecenv_wrapped

    from sb3_extra_buffers.training_utils.playing import Feed, play, progress

    if n_eval_episodes < 1:
        raise EnvironmentOptionError(f"n_eval_episodes must be at least 1, got {n_eval_episodes}")
    feed = Feed(buffer, env)
    monitored = is_vecenv_wrapped(env, VecMonitor) or all(env.env_is_wrapped(Monitor))
    left = (n_eval_episodes + np.arange(env.num_envs)) // env.num_envs
    sums, counts = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)
    rewards: list[float] = []
    lengths: list[int] = []
    n_steps = 0
    bar = progress(n_eval_episodes, "episode", progress_bar)
    for step in play(model, env, deterministic):
        feed.add(step)
        n_steps += env.num_envs
        sums += step.rewards
        counts += 1
        for index in np.flatnonzero(step.dones):
            episode = step.infos[index].get("episode") if monitored else {"r": sums[index], "l": counts[index]}
            sums[index], counts[index] = 0, 0
            # a lost life is no end of a game
            if episode is not None and left[index] > 0:
                left[index] -= 1
                rewards.append(float(episode["r"]))
                lengths.append(int(episode["l"]))
                bar.update(1)
        if not left.any():
            break
    bar.close()
    result = EvalResult(np.array(rewards), np.array(lengths), n_steps, feed.seconds)
    if verbose:
        print(result.report(name))
    return result
