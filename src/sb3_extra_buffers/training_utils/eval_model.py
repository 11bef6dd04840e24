"""Evaluate a model in vectorised environments, optionally filling and timing buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import EnvironmentOptionError

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from sb3_extra_buffers.training_utils.playing import Transition

__all__ = ["EvalResult", "eval_model"]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Result of an evaluation.

    Examples:
        >>> import numpy as np
        >>> from sb3_extra_buffers.training_utils.eval_model import EvalResult
        >>> result = EvalResult(rewards=np.array([21.0, 20.0, 19.0]), lengths=np.array([900, 950, 990]), n_steps=2840)
        >>> result.mean, result.quartiles
        (20.0, (19.5, 20.0, 20.5))
    """

    rewards: npt.NDArray[np.float64]
    """Total reward of each episode, in the order in which they ended."""
    lengths: npt.NDArray[np.int64]
    """Length of each episode."""
    n_steps: int
    """Number of transitions in all environments together; every buffer received all of them."""
    add_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each buffer took to add the transitions."""

    @property
    def mean(self) -> float:
        """Mean reward."""
        return float(self.rewards.mean())

    @property
    def std(self) -> float:
        """Standard deviation of the rewards."""
        return float(self.rewards.std())

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The three quartiles of the rewards."""
        q1, q2, q3 = np.percentile(self.rewards, (25, 50, 75)).tolist()
        return q1, q2, q3

    @property
    def relative_iqr(self) -> float:
        """Interquartile range divided by the median."""
        q1, q2, q3 = self.quartiles
        return (q3 - q1) / abs(q2) if q2 else 0.0 if q1 == q3 else float("inf")

    def report(self, name: str | None = None) -> str:
        """Return two lines: ``name``, number of episodes and mean reward, then quartiles."""
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
    """Let ``model`` play ``n_eval_episodes`` and report their rewards.

    Every environment plays an equal share of the episodes, so that short episodes are not overrepresented. If a
    `Monitor` reports episodes, its rewards are used: those of whole games, not clipped.

    Args:
        model: Anything with SB3's ``predict``.
        env: Vectorised environments.
        n_eval_episodes: Number of episodes to play.
        buffer: Replay buffers to add every transition to: one, a sequence, or a dict by name; each is timed.
        deterministic: Whether the model takes its best action.
        name: Printed before the report, such as ``"Best"`` or ``"Final"``.
        progress_bar: Whether to show a progress bar.
        verbose: Whether to print the report.

    Examples:
        >>> from stable_baselines3 import PPO
        >>> from stable_baselines3.common.env_util import make_vec_env
        >>> from sb3_extra_buffers.training_utils.eval_model import eval_model
        >>> env = make_vec_env("CartPole-v1", n_envs=2, seed=0)
        >>> result = eval_model(PPO("MlpPolicy", env, seed=0), env, 10, name="Final", progress_bar=False)
        (Final) Evaluated 10 episodes, mean reward: ...
        Q1: ... | Q2: ... | Q3: ... | Relative IQR: ... | Min: ... | Max: ...
        >>> len(result.rewards)
        10
    """
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecMonitor, is_vecenv_wrapped

    from sb3_extra_buffers.training_utils.playing import TimedBuffers, make_progress_bar, play

    if n_eval_episodes < 1:
        raise EnvironmentOptionError(f"n_eval_episodes must be at least 1, got {n_eval_episodes}")
    buffers = TimedBuffers(buffer, env)
    monitored = is_vecenv_wrapped(env, VecMonitor) or all(env.env_is_wrapped(Monitor))
    left = (n_eval_episodes + np.arange(env.num_envs)) // env.num_envs
    sums, counts = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)
    rewards: list[float] = []
    lengths: list[int] = []
    n_steps = 0
    bar = make_progress_bar(n_eval_episodes, "episode", progress_bar)
    for step in play(model, env, deterministic):
        buffers.add(step)
        n_steps += env.num_envs
        for index, reward, length in _ended_episodes(step, sums, counts, monitored):
            if left[index] > 0:
                left[index] -= 1
                rewards.append(reward)
                lengths.append(length)
                bar.update(1)
        if not left.any():
            break
    bar.close()
    result = EvalResult(np.array(rewards), np.array(lengths), n_steps, buffers.seconds)
    if verbose:
        print(result.report(name))
    return result


def _ended_episodes(step: Transition, sums: Any, counts: Any, monitored: bool) -> Iterator[tuple[int, float, int]]:
    """Add ``step`` to the reward and length of each environment's episode; yield those of episodes that ended."""
    sums += step.rewards
    counts += 1
    for index in np.flatnonzero(step.dones).tolist():
        # a Monitor reports no episode when a life is lost
        episode = step.infos[index].get("episode") if monitored else {"r": sums[index], "l": counts[index]}
        if episode is not None:
            yield index, float(episode["r"]), int(episode["l"])
        sums[index], counts[index] = 0, 0
