"""`StateColumns`: the recurrent states of an agent, one for each step of a replay buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.arguments import as_array, cast, check_count
from sb3_extra_buffers.errors import ArgumentError, SpecMismatchError
from sb3_extra_buffers.stores.arena import zeros

__all__ = ["StateColumns", "StateUpdate", "check_shapes"]

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

#: The key of `infos` under which `add` looks for the states of an environment.
INFO_KEY = "recurrent_state"
# limit for the states of one transition
_MAX_ROW_BYTES = 1 << 30


class StateUpdate(NamedTuple):
    """States to write at ``(positions[i], envs[i])``."""

    positions: Indices
    envs: Indices
    states: dict[str, Array]


def check_shapes(shapes: Any, dtype: Any) -> tuple[dict[str, tuple[int, ...]], str]:
    """Validate the shapes of states and their dtype; return both in a normal form."""
    if shapes is None:
        shapes = {}
    if not isinstance(shapes, Mapping) or not all(isinstance(name, str) and name for name in shapes):
        raise ArgumentError(f"recurrent_states must be a dict with the shape of each state by name, got {shapes!r}")
    checked = {}
    for name, shape in shapes.items():
        axes = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else (shape,)
        checked[name] = tuple(check_count(axis, f"an axis of recurrent_states[{name!r}]") for axis in axes)
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError) as problem:
        raise ArgumentError(f"recurrent_dtype must be a dtype of floats, got {dtype!r}") from problem
    if kind.kind != "f" or kind.itemsize > 8:
        raise ArgumentError(f"recurrent_dtype must be float16, float32 or float64, got {kind}")
    n_bytes = StateColumns.row_bytes(checked, kind.name)
    if n_bytes > _MAX_ROW_BYTES:
        raise ArgumentError(f"recurrent_states take {n_bytes} bytes per transition; the limit is {_MAX_ROW_BYTES}")
    return checked, kind.name


class StateColumns:
    """For each name, the state before each step: an array of shape ``[n_steps, n_envs, *shape]``."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: str, n_steps: int, n_envs: int) -> None:
        self.shapes, self.dtype, self.n_envs = dict(shapes), np.dtype(dtype), n_envs
        # pages that are never written take no memory
        self.columns: dict[str, Array] = {
            name: zeros((n_steps, n_envs, *shape), self.dtype) for name, shape in self.shapes.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    @staticmethod
    def row_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> int:
        """Bytes of the states of one transition."""
        return sum(map(math.prod, shapes.values())) * np.dtype(dtype).itemsize

    # ---- writing ----

    def fit(self, given: Any, infos: Any) -> dict[str, Array] | None:
        """Return the states of a step, ``[n_envs, *shape]`` by name: ``given``, or if it is None those in ``infos``."""
        if given is None:
            if not self.shapes:
                return None
            given = self._from_infos(infos)
        return self.fit_batch(given, (self.n_envs,), "recurrent_state")

    def _from_infos(self, infos: Any) -> dict[str, Any]:
        try:
            per_env = [info[INFO_KEY] for info in infos]
            return {name: np.stack([as_array(states[name], name) for states in per_env]) for name in self.shapes}
        except (IndexError, KeyError, TypeError, ValueError) as problem:
            raise SpecMismatchError(
                f"this buffer stores the recurrent states {', '.join(self.shapes)}; pass recurrent_state= to add(), "
                f"or a dict of them as {INFO_KEY!r} in the info of every environment ({problem!r})"
            ) from problem

    def fit_batch(self, given: Any, lead: tuple[int, ...], name: str) -> dict[str, Array]:
        """Return states of shape ``[*lead, *shape]`` by name, in the dtype of the columns."""
        if not isinstance(given, Mapping) or set(given) != set(self.shapes):
            names = ", ".join(map(repr, given)) if isinstance(given, Mapping) else f"a {type(given).__name__}"
            expected = ", ".join(map(repr, self.shapes)) or "none: pass recurrent_states to the constructor"
            raise SpecMismatchError(f"{name} has {names}; the states of this buffer are {expected}")
        fitted = {}
        for key, shape in self.shapes.items():
            array = as_array(given[key], f"{name}[{key!r}]")
            if array.dtype != self.dtype:
                array = cast(array, self.dtype, f"{name}[{key!r}]")
            if array.shape != lead + shape:
                raise SpecMismatchError(f"{name}[{key!r}] has shape {array.shape}, expected {lead + shape}")
            fitted[key] = array
        return fitted

    def write(self, position: int, states: dict[str, Array] | None) -> None:
        """Write a step; idempotent."""
        if states is not None:
            for name, array in states.items():
                self.columns[name][position] = array

    def apply(self, update: StateUpdate) -> None:
        """Write an update; idempotent."""
        for name, array in update.states.items():
            self.columns[name][update.positions, update.envs] = array

    # ---- reading ----

    def read(self, positions: Indices, envs: Indices) -> dict[str, Array]:
        """Copies of the states at ``(positions[i], envs[i])``."""
        return {name: column[positions, envs] for name, column in self.columns.items()}

    # ---- copies ----

    def frozen(self) -> StateColumns:
        """Return a copy."""
        copied = object.__new__(StateColumns)
        copied.__dict__.update(vars(self), columns={name: column.copy() for name, column in self.columns.items()})
        return copied
