"""The algorithm that is making or loading a buffer: SB3 tells a custom buffer class nothing of it."""

from __future__ import annotations

import sys
from typing import Any

from sb3_extra_buffers.errors import AlgorithmMismatchError

_DEPTH = 20


def calling_algorithm(method: str) -> Any:
    """The SB3 algorithm whose ``method`` is running further up the stack, or None."""
    from stable_baselines3.common.base_class import BaseAlgorithm

    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code.co_name == method:
            algorithm = frame.f_locals.get("self")
            if isinstance(algorithm, BaseAlgorithm):
                return algorithm
    return None


def check_n_steps(buffer: Any) -> None:
    """Refuse to train one-step silently where the algorithm was asked for more.

    SB3 hands ``n_steps`` and ``gamma`` only to the buffer class it chooses itself.
    """
    algorithm = calling_algorithm("_setup_model")
    wanted = getattr(algorithm, "n_steps", 1)
    if algorithm is None or not hasattr(algorithm, "replay_buffer_class") or wanted <= 1:
        return
    if wanted == buffer.n_steps and algorithm.gamma == buffer.gamma:
        return
    raise AlgorithmMismatchError(
        f"{type(algorithm).__name__}(n_steps={wanted}, gamma={algorithm.gamma}) has a {type(buffer).__name__} with "
        f"n_steps={buffer.n_steps}, gamma={buffer.gamma}: SB3 does not pass them on; "
        f"add replay_buffer_kwargs=dict(n_steps={wanted}, gamma={algorithm.gamma})"
    )


def check_loaded(buffer: Any, state: dict[str, Any]) -> None:
    """Refuse a pickled buffer whose spaces are not those of the model that is loading it."""
    algorithm = calling_algorithm("load_replay_buffer")
    if algorithm is None:
        return
    for name in ("observation_space", "action_space"):
        ours, theirs = state.get(name), getattr(algorithm, name, None)
        if theirs is not None and ours != theirs:
            raise AlgorithmMismatchError(
                f"the saved {type(buffer).__name__} has {name} {ours}, the {type(algorithm).__name__} that loads it "
                f"has {theirs}; load it into a model of the same environment"
            )
