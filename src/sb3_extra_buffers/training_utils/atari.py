"""Atari games as vectorised environments: preprocessed, stacked and channel-first."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sb3_extra_buffers._extras import import_extra
from sb3_extra_buffers.errors import EnvironmentOptionError, MissingRomError, UnknownEnvironmentError

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
    """Create ``n_envs`` games with SB3's Atari preprocessing; observations are ``(framestack, 84, 84)`` bytes.

    Args:
        env_id: A registered game, such as ``"PongNoFrameskip-v4"``.
        n_envs: Number of environments.
        framestack: Frames per observation; None or 1 for single frames.
        seed: Seed of the first environment; each of the others has the next integer.
        native: Use ale-py's own threads (`NativeAtariVecEnv`, which lists the differences): faster than SB3's
            wrappers, and OpenCV is not needed.
        vec_env_cls: SB3's ``DummyVecEnv`` (the default) or ``SubprocVecEnv``.
        vec_env_kwargs: Arguments of that class, or ``dict(n_threads=…)`` with ``native``.
        wrapper_kwargs: Arguments of SB3's ``AtariWrapper``, also with ``native``.
        env_kwargs: Arguments of the game itself, such as ``dict(render_mode="rgb_array")``.
        monitor_dir: Folder for the log files of SB3's ``Monitor``.

    Examples:
        >>> from sb3_extra_buffers.training_utils.atari import make_env
        >>> env = make_env(env_id="PongNoFrameskip-v4", n_envs=8, framestack=4)
        >>> env.observation_space.shape
        (4, 84, 84)
    """
    check_counts(n_envs, framestack)
    game = game_options(env_id) | dict(env_kwargs or {})
    wrapper_kwargs, vec_env_kwargs = dict(wrapper_kwargs or {}), dict(vec_env_kwargs or {})
    if native:
        from sb3_extra_buffers.training_utils.atari_native import NativeAtariVecEnv

        if vec_env_cls is not None or monitor_dir is not None:
            raise EnvironmentOptionError("native=True supports neither vec_env_cls nor monitor_dir")
        return NativeAtariVecEnv(game, n_envs, framestack, seed, **wrapper_kwargs, **vec_env_kwargs)
    import_extra("cv2", user="SB3's Atari wrapper", alternative="pass native=True")
    from stable_baselines3.common.env_util import make_atari_env

    env = make_atari_env(
        functools.partial(_make_game, env_id),
        n_envs=n_envs,
        seed=seed,
        monitor_dir=monitor_dir,
        wrapper_kwargs=wrapper_kwargs,
        # the wrapper skips frames: disable the game's own frame skipping
        env_kwargs={"frameskip": 1, **(env_kwargs or {})},
        vec_env_cls=vec_env_cls,
        vec_env_kwargs=vec_env_kwargs,
    )
    return stack_frames(env, framestack)


def stack_frames(env: VecEnv, framestack: int | None) -> VecEnv:
    """Stack frames, channels last, along the channel axis, and make the observations channel-first."""
    from stable_baselines3.common.vec_env import VecFrameStack, VecTransposeImage

    if framestack is not None and framestack > 1:
        env = VecFrameStack(env, framestack, channels_order="last")
    return VecTransposeImage(env)


def _make_game(env_id: str, **options: Any) -> Any:
    """Create one game, possibly in a new process, in which ale-py's games are not registered yet."""
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    return gymnasium.make(env_id, **{"render_mode": "rgb_array", **options})


def game_options(env_id: str) -> dict[str, Any]:
    """Return the arguments ``env_id`` was registered with; raise if it is not an Atari game or its ROM is missing."""
    ale_py, roms = (import_extra(name, user="an Atari game") for name in ("ale_py", "ale_py.roms"))
    import gymnasium

    gymnasium.register_envs(ale_py)
    try:
        spec = gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        raise UnknownEnvironmentError(
            f"there is no environment {env_id!r}: {error} Game ids look like 'PongNoFrameskip-v4'"
        ) from None
    if spec.entry_point != "ale_py.env:AtariEnv":
        raise UnknownEnvironmentError(
            f"{env_id!r} is not an Atari game; use stable_baselines3.common.env_util.make_vec_env"
        )
    options: dict[str, Any] = dict(spec.kwargs)
    folder = Path(os.environ.get("ALE_ROMS_DIR") or Path(roms.__file__).parent)
    rom = folder / f"{options['game']}.bin"
    if not rom.exists():
        raise MissingRomError(
            f"the ROM of {env_id!r} is missing at {rom}; install ale-py>=0.10, which includes the ROMs, and unset "
            "ALE_ROMS_DIR or set it to their folder"
        )
    return options


def check_counts(n_envs: Any, framestack: Any) -> None:
    """Raise unless ``n_envs`` and ``framestack`` are positive integers; ``framestack`` may be None."""
    for name, value in (("n_envs", n_envs), ("framestack", 1 if framestack is None else framestack)):
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise EnvironmentOptionError(f"{name} must be an integer of at least 1, got {value!r}")
