"""A buffer and the SB3 algorithm that creates or loads it: checks, and the space that they share."""

from __future__ import annotations

import copy
import sys
from typing import Any

from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, DictRolloutBuffer, ReplayBuffer, RolloutBuffer

from sb3_extra_buffers.errors import AlgorithmMismatchError, ObservationSpaceError

_MAX_DEPTH = 20


def calling_algorithm(method: str) -> Any:
    """Return the SB3 algorithm whose ``method`` is running, or None.

    SB3 has no hook for this: it creates a custom buffer class without ``n_steps`` and ``gamma``, and unpickles a buffer
    without looking at its spaces. The call stack is the only place that knows the algorithm. It is used to raise
    errors, never to change what the user asked for.
    """
    from stable_baselines3.common.base_class import BaseAlgorithm

    frame = sys._getframe(1)
    for _ in range(_MAX_DEPTH):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code.co_name == method:
            algorithm = frame.f_locals.get("self")
            if isinstance(algorithm, BaseAlgorithm):
                return algorithm
    return None


def check_class(buffer_class: type[Any]) -> None:
    """Raise if the algorithm that creates a ``buffer_class`` needs another kind of buffer, and name it."""
    algorithm = calling_algorithm("_setup_model")
    name = type(algorithm).__name__
    is_maskable = _is_for("Maskable", type(algorithm))
    for argument, base, kind in (
        ("replay_buffer_class", ReplayBuffer, "Replay"),
        ("rollout_buffer_class", RolloutBuffer, f"{'Maskable' if is_maskable else ''}Rollout"),
    ):
        if algorithm is None or getattr(algorithm, argument, None) is not buffer_class:
            continue
        # sb3-contrib is not imported here: it is optional
        fits = issubclass(buffer_class, base)
        if is_maskable:
            fits = _is_for("Maskable", buffer_class)
        elif _is_for("Recurrent", buffer_class):
            fits = _is_for("Recurrent", type(algorithm))
        if fits:
            continue
        family = "Gpu" if buffer_class.__name__.startswith("Gpu") and not is_maskable else "Compressed"
        if isinstance(algorithm.observation_space, spaces.Dict) and family == "Compressed":
            kind = kind.replace("R", "DictR")
        raise AlgorithmMismatchError(
            f"{name} cannot train with a {buffer_class.__name__}; pass {argument}={family}{kind}Buffer"
        )


def _is_for(kind: str, cls: type[Any]) -> bool:
    return any(kind in base.__name__ for base in cls.__mro__)


def check_space(buffer: Any, space: Any) -> None:
    """Raise if ``buffer`` is for another kind of observation space, and name the class for ``space``."""
    name = type(buffer).__name__
    needs_dict = isinstance(buffer, (DictReplayBuffer, DictRolloutBuffer))
    if needs_dict == isinstance(space, spaces.Dict) or isinstance(space, spaces.Tuple):
        return  # SB3 itself refuses tuples
    if needs_dict:
        other, what = name.replace("Dict", ""), f"must be used with Dict obs space only, got {space}"
    else:
        is_rollout = isinstance(buffer, RolloutBuffer)
        other = name.replace("Rollout", "DictRollout") if is_rollout else name.replace("Compressed", "CompressedDict")
        what = f"cannot hold Dict observations, and the space has the keys {', '.join(space)}"
    exists = type(buffer).__module__.startswith("sb3_extra_buffers.compressed.") and not hasattr(buffer, "_made_from")
    raise ObservationSpaceError(f"{name} {what}" + (f"; use {other}" if exists and other != name else ""))


def own_space(space: Any) -> Any:
    """Return the observation space that a buffer keeps.

    SB3's `VecNormalize` replaces the images of a Dict space in place. The buffer's space must go on describing what
    the buffer holds, or the buffer could not be loaded again once it is saved.
    """
    if not isinstance(space, spaces.Dict):
        return space
    own = copy.copy(space)
    own.spaces = dict(space.spaces)
    return own


def check_n_steps(buffer: Any) -> None:
    """Raise if the algorithm expects n-step returns that ``buffer`` does not compute; SB3 would train one-step."""
    algorithm = calling_algorithm("_setup_model")
    n_steps = getattr(algorithm, "n_steps", 1)
    if algorithm is None or not hasattr(algorithm, "replay_buffer_class") or n_steps <= 1:
        return
    if n_steps != buffer.n_steps or algorithm.gamma != buffer.gamma:
        raise AlgorithmMismatchError(
            f"{type(algorithm).__name__}(n_steps={n_steps}, gamma={algorithm.gamma}) has a {type(buffer).__name__} "
            f"with n_steps={buffer.n_steps}, gamma={buffer.gamma}: SB3 does not pass them on; "
            f"add replay_buffer_kwargs=dict(n_steps={n_steps}, gamma={algorithm.gamma})"
        )


def check_loaded(buffer: Any, state: dict[str, Any]) -> None:
    """Raise if the spaces of a saved buffer differ from those of the model that loads it."""
    algorithm = calling_algorithm("load_replay_buffer")
    if algorithm is None:
        return
    for name in ("observation_space", "action_space"):
        saved, expected = state.get(name), getattr(algorithm, name, None)
        if expected is not None and saved != expected:
            raise AlgorithmMismatchError(
                f"the saved {type(buffer).__name__} has {name} {saved}, but the {type(algorithm).__name__} that loads "
                f"it has {expected}; load it into a model of the same environment"
            )
