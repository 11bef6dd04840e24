"""Atari games as vectorised environments, preprocessed, stacked and channel-first."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sb3_extra_buffers.errors import (
    EnvironmentOptionError,
    MissingExtraError,
    MissingRomError,
    UnknownEnvironmentError,
)

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

__all__ = ["make_env"]


def make_env(
    env_id: str,
    n_envs: int = 1,
    framestack: int | None = 4,
    *,
    seed: int | None = None,
    native: bool = False,
    vec_env_cls: type[Any] | None = None,
    vec_env_kwargs: Mapping[str, Any] | None = None,
    wrapper_kwargs: Mapping[str, Any] | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    monitor_dir: str | None = None,
) -> VecEnv:
    """``n_envs`` games with SB3's Atari preprocessing; observations are ``(framestack, 84, 84)`` bytes.

    Args:
        env_id: A registered game, such as ``"PongNoFrameskip-v4"``.
        n_envs: How many games are played at once.
        framestack: Frames in an observation; None or 1 for single frames.
        seed: Of the first environment; the others count on from it.
        native: Play in ale-py's own threads (`NativeAtariVecEnv`, where the differences are listed), which is faster
            than SB3's wrappers and needs no OpenCV.
        vec_env_cls: SB3's ``DummyVecEnv`` (the default) or ``SubprocVecEnv``.
        vec_env_kwargs: Arguments of that class, or ``dict(n_threads=…)`` with ``native``.
        wrapper_kwargs: Arguments of SB3's ``AtariWrapper``; ``native`` knows them, too.
        env_kwargs: Arguments of the game itself, such as ``dict(render_mode="rgb_array")``.
        monitor_dir: Where SB3's ``Monitor`` writes what episodes gave.

    Example:
        >>> env = make_env(env_id="PongNoFrameskip-v4", n_envs=8, framestack=4)
        >>> env.observation_space.shape
        (4, 84, 84)
    """
    check_counts(n_envs, framestack)
    game = game_options(env_id) | dict(env_kwargs or {})
    wrapper, rest = dict(wrapper_kwargs or {}), dict(vec_env_kwargs or {})
    if native:
        from sb3_extra_buffers.training_utils.atari_native import NativeAtariVecEnv

        if vec_env_cls is not None or monitor_dir is not None:
            raise EnvironmentOptionError("native=True has a vec_env_cls of its own and writes no monitor files")
        return NativeAtariVecEnv(n_envs=n_envs, framestack=framestack, seed=seed, game=game, **wrapper, **rest)
    if importlib.util.find_spec("cv2") is None:
        raise MissingExtraError(
            "SB3's Atari wrapper needs 'cv2': pip install 'sb3-extra-buffers[extra]', or pass native=True"
        )
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecTransposeImage

    env = make_atari_env(
        functools.partial(_make_game, env_id),
        n_envs=n_envs,
        seed=seed,
        monitor_dir=monitor_dir,
        wrapper_kwargs=wrapper,
        # the wrapper repeats actions; ids that do so themselves would do it twice
        env_kwargs={"frameskip": 1, **(env_kwargs or {})},
        vec_env_cls=vec_env_cls,
        vec_env_kwargs=rest,
    )
    if framestack is not None and framestack > 1:
        env = VecFrameStack(env, framestack)
    return VecTransposeImage(env)


def _make_game(env_id: str, **options: Any) -> Any:
    """One game, in whichever process: a fresh one knows no Atari games before ale-py is registered there."""
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    return gymnasium.make(env_id, **{"render_mode": "rgb_array", **options})


def game_options(env_id: str) -> dict[str, Any]:
    """What ``env_id`` was registered with, or an error that says why it cannot be played."""
    if importlib.util.find_spec("ale_py") is None:
        raise MissingExtraError("Atari games need 'ale-py': pip install 'sb3-extra-buffers[extra]'")
    import ale_py
    import ale_py.roms
    import gymnasium

    gymnasium.register_envs(ale_py)
    try:
        spec = gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        raise UnknownEnvironmentError(
            f"no environment {env_id!r}: {error} Games are named as in 'PongNoFrameskip-v4'"
        ) from None
    if spec.entry_point != "ale_py.env:AtariEnv":
        raise UnknownEnvironmentError(
            f"{env_id!r} is no Atari game; use stable_baselines3.common.env_util.make_vec_env for it"
        )
    options: dict[str, Any] = dict(spec.kwargs)
    folder = Path(os.environ.get("ALE_ROMS_DIR") or Path(ale_py.roms.__file__).parent)
    rom = folder / f"{options['game']}.bin"
    if not rom.exists():
        raise MissingRomError(
            f"the ROM of {env_id!r} is not at {rom}; install ale-py>=0.10, which brings the ROMs, and unset "
            "ALE_ROMS_DIR or point it to where they are"
        )
    return options


def check_counts(n_envs: Any, framestack: Any) -> None:
    if isinstance(n_envs, bool) or not hasattr(n_envs, "__index__") or n_envs < 1:
        raise EnvironmentOptionError(f"n_envs must be a whole number from 1 on, got {n_envs!r}")
    if framestack is None:
        return
    if isinstance(framestack, bool) or not hasattr(framestack, "__index__") or framestack < 1:
        raise EnvironmentOptionError(
            f"framestack must be a whole number from 1 on, or None for single frames, got {framestack!r}"
        )
