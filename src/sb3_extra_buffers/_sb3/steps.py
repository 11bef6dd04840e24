"""Arguments of ``add``, checked and converted before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.arguments import as_array, cast, check_flags
from sb3_extra_buffers.errors import IndexOutOfRangeError, SpecMismatchError

__all__ = [
    "as_list",
    "fit_actions",
    "fit_column",
    "fit_flags",
    "fit_observations",
    "fit_truncations",
    "position_assigned",
    "step_numbers",
]

Array = npt.NDArray[Any]

_BOOLS = frozenset({bool, np.bool_})


def step_numbers(steps: npt.NDArray[np.int64], n_added: int, pos: int, n_steps: int) -> npt.NDArray[np.int64]:
    """How many steps were added before each of ``steps``, which are positions in a ring of ``n_steps``."""
    return n_added - 1 - (pos - 1 - steps) % n_steps


def position_assigned(buffer: Any) -> IndexOutOfRangeError:
    """The error for a buffer that counts its steps, if ``pos`` or ``full`` does not agree with their number."""
    n_added, n_steps = buffer.n_added, buffer.buffer_size
    return IndexOutOfRangeError(
        f"after {n_added} steps, pos should be {n_added % n_steps} of {n_steps}, but pos={buffer.pos} and "
        f"full={buffer.full} were assigned, so the order of steps is unknown; call reset()"
    )


def fit_observations(observations: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> Array:
    """Return the observations of all environments in ``shape``, which starts with ``n_envs``, and ``dtype``.

    As in SB3, shapes are broadcast and floats are rounded to the precision of the space.
    """
    array = as_array(observations, name)
    if array.dtype != dtype:
        array = cast(array, dtype, name)
    if array.shape == shape:
        return array
    # Discrete observations come without their last axis
    if array.shape == shape[:1] and shape[1:] == (1,):
        return array.reshape(shape)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise SpecMismatchError(
            f"{name} has shape {array.shape}, expected {shape}: (n_envs, *observation shape); check n_envs and the "
            "observation space"
        ) from None


def fit_actions(column: Array, actions: Any) -> Array:
    """Return the actions of all environments in the shape and dtype of one step of ``column``."""
    array, shape = as_array(actions, "action"), column.shape[1:]
    if array.dtype != column.dtype:
        array = cast(array, column.dtype, "action")
    try:
        return array.reshape(shape)
    except ValueError:
        raise SpecMismatchError(
            f"action has shape {array.shape}, expected {shape}: (n_envs, numbers per action); check n_envs and the "
            "action space"
        ) from None


def fit_column(values: Any, n_envs: int, name: str, dtype: Any = np.float32) -> Array:
    """Return one number for each environment, such as rewards; a single number is repeated."""
    # fast path: an array of one number for each environment is at most cast
    if type(values) is np.ndarray and values.shape == (n_envs,) and values.dtype.kind in "biuf":
        return values if values.dtype == dtype else values.astype(dtype)
    array = as_array(values, name)
    if array.dtype.kind not in "biuf":
        raise SpecMismatchError(f"{name} has dtype {array.dtype}; pass a number for each of {n_envs} environments")
    if array.size != 1 and array.shape not in ((n_envs,), (1, n_envs)):
        raise SpecMismatchError(f"{name} has shape {array.shape}, but there are {n_envs} environments; check n_envs")
    # cast here, not when it is stored: NumPy's overflow warning may be turned into an error
    array = array.astype(dtype, copy=False)
    return array.reshape(-1) if array.size == n_envs else np.broadcast_to(array.reshape(-1), (n_envs,))


def fit_flags(values: Any, n_envs: int, name: str) -> Array:
    """Return for each environment whether an episode ended or began, as float32."""
    flags = fit_column(values, n_envs, name)
    check_flags(flags, name)
    return flags


def as_list(infos: Any) -> Any:
    """Return ``infos``, which may be read more than once, as a list if they are an iterator."""
    return list(infos) if isinstance(infos, Iterator) else infos


def fit_truncations(infos: Any, n_envs: int) -> Any:
    """Return whether each environment was truncated, from ``infos`` as vectorised environments return them."""
    try:
        truncated: Any = [info.get("TimeLimit.truncated", False) for info in infos]
        if not _BOOLS.issuperset(map(type, truncated)):
            truncated = np.array(truncated, np.float32).ravel()  # some environments return arrays of one element
    except (AttributeError, TypeError, ValueError) as problem:
        raise SpecMismatchError(
            f"infos must be a list of {n_envs} dicts, with a bool as 'TimeLimit.truncated': {problem}"
        ) from problem
    if len(truncated) != n_envs and len(truncated) != 1:
        raise SpecMismatchError(f"got {len(truncated)} infos for {n_envs} environments; check n_envs")
    if type(truncated) is not list:
        check_flags(truncated, "'TimeLimit.truncated'")
    return truncated
