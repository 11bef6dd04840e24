"""Fill replay buffers with what a trained model does, before another training run."""

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
    """Let ``model`` play in ``env`` and add what happens to one or more replay buffers.

    Args:
        model: Anything with SB3's ``predict``.
        env: Vectorised environments.
        buffer: A replay buffer, several, or several by name; None for ``model.replay_buffer``.
        n_steps: Transitions, all environments together; None to fill the largest buffer.
        deterministic: Whether the model takes its best action; more variety if not.
        progress_bar: Whether to show one.

    Returns:
        Seconds that each buffer took to add them.
    """
    from sb3_extra_buffers.training_utils.playing import Feed, play, progress

    if buffer is None:
        buffer = getattr(model, "replay_buffer", None)
        if buffer is None:
            raise EnvironmentOptionError(f"{type(model).__name__} has no replay buffer to fill; pass buffer=…")
    feed = Feed(buffer, env)
    if n_steps is None:
        n_steps = max(each.buffer_size for each in feed.buffers.values()) * env.num_envs
    if n_steps < 1 or n_steps % env.num_envs:
        more = max(-(-n_steps // env.num_envs), 1) * env.num_envs
        raise EnvironmentOptionError(
            f"{n_steps} transitions cannot be shared out evenly between {env.num_envs} environments; "
            f"pass n_steps={more}"
        )
    bar = progress(n_steps, "step", progress_bar)
    for step in itertools.islice(play(model, env, deterministic), n_steps // env.num_envs):
        feed.add(step)
        bar.update(env.num_envs)
    bar.close()
    return feed.seconds
