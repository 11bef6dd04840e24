"""Checks of a buffer against the SB3 algorithm that creates or loads it."""

from __future__ import annotations

import sys
from typing import Any

from sb3_extra_buffers.errors import AlgorithmMismatchError

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
    """Raise if the spaces of a pickled buffer differ from those of the model that loads it."""
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
