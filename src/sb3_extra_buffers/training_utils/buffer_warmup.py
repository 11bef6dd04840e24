"""Fill replay buffers with the transitions of a trained model before training."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sb3_extra_buffers.errors import EnvironmentOptionError

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

__all__ = ["warm_up"]


def warm_up(
    model: Any,
    env: VecEnv,
    buffer: Any | Sequence[Any] | Mapping[str, Any] | None = None,
    n_steps: int | None = None,
    *,
    deterministic: bool = False,
    progress_bar: bool = True,
) -> dict[str, float]:
    """Let ``model`` play in ``env`` and add the transitions to one or more replay buffers.

    Args:
        model: Anything with SB3's ``predict``.
        env: Vectorised environments.
        buffer: Replay buffers to fill: one, a sequence, or a dict by name; None for ``model.replay_buffer``.
        n_steps: Number of transitions in all environments together; None to fill the largest buffer.
        deterministic: Whether the model takes its best action; False gives more variety.
        progress_bar: Whether to show a progress bar.

    Returns:
        Seconds that each buffer took to add the transitions.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from stable_baselines3.common.env_util import make_vec_env
        >>> from sb3_extra_buffers.compressed import CompressedReplayBuffer
        >>> from sb3_extra_buffers.training_utils.buffer_warmup import warm_up
        >>> env = make_vec_env("CartPole-v1", n_envs=2)
        >>> model = DQN("MlpPolicy", env, buffer_size=1000, replay_buffer_class=CompressedReplayBuffer)
        >>> seconds = warm_up(model, env, n_steps=200, progress_bar=False)
        >>> model.replay_buffer.size()  # steps of each environment
        100
    """
    from sb3_extra_buffers.training_utils.playing import TimedBuffers, make_progress_bar, play

    if buffer is None:
        buffer = getattr(model, "replay_buffer", None)
        if buffer is None:
            raise EnvironmentOptionError(f"{type(model).__name__} has no replay buffer to fill; pass buffer=")
    timed = TimedBuffers(buffer, env)
    if n_steps is None:
        n_steps = max(each.buffer_size for each in timed.buffers.values()) * env.num_envs
    if n_steps < 1 or n_steps % env.num_envs:
        next_multiple = max(-(-n_steps // env.num_envs), 1) * env.num_envs
        raise EnvironmentOptionError(
            f"{n_steps} transitions cannot be divided evenly among {env.num_envs} environments; "
            f"pass n_steps={next_multiple}"
        )
    bar = make_progress_bar(n_steps, "step", progress_bar)
    for step in itertools.islice(play(model, env, deterministic), n_steps // env.num_envs):
        timed.add(step)
        bar.update(env.num_envs)
    bar.close()
    return timed.seconds
