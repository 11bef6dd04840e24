"""The numbers in a buffer as charts over the steps of an episode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers._extras import import_extra
from sb3_extra_buffers.cli.reader import BufferReader, obs_shape
from sb3_extra_buffers.errors import ArgumentError, UnknownEnvironmentError

Array = npt.NDArray[Any]

# curves in a chart
_MAX_CURVES = 32
# columns of rollout buffers to show, by the title of their chart
_ROLLOUT_CHARTS = {
    "value and return": ("values", "returns"),
    "advantage": ("advantages",),
    "log probability": ("log_probs",),
}


@dataclass(frozen=True)
class Chart:
    """One chart; ``read`` returns ``(n, curves)`` values for some steps of an environment."""

    title: str
    curves: Sequence[str]
    read: Callable[[Array, int], Array]
    kind: str = "line"
    """``"line"``, ``"bars"`` from zero, or ``"levels"``, a bar for each distinct value."""
    values: dict[int, str] = field(default_factory=dict)
    """Names of the values of a chart with levels."""
    n_left_out: int = 0

    @property
    def description(self) -> dict[str, Any]:
        note = f"{self.n_left_out} more values are not shown" if self.n_left_out else ""
        values = [[value, name] for value, name in self.values.items()]
        return {"title": self.title, "curves": list(self.curves), "kind": self.kind, "values": values, "note": note}


def make_charts(reader: BufferReader, vectors: dict[str, Any], action_names: Sequence[str] = ()) -> list[Chart]:
    """Return the charts of a buffer: rewards, actions, what else it stores, and observations that are not images.

    Args:
        reader: The buffer.
        vectors: Observations to show as numbers, by key.
        action_names: Names of discrete actions, or of the components of an action.
    """
    return [
        *_reward_charts(reader),
        *_action_charts(reader, action_names),
        *_rollout_charts(reader),
        *(_observation_chart(reader, name, leaf) for name, leaf in vectors.items()),
        *_feature_charts(reader),
    ]


def _reward_charts(reader: BufferReader) -> list[Chart]:
    rewards = reader.column("rewards")
    if rewards is None:
        return []

    def returns(steps: Array, env: int) -> Array:
        return np.cumsum(rewards[steps, env], dtype=np.float64)[:, None]

    return [
        Chart("reward", ["reward"], _column_reader(rewards), "bars"),
        Chart("return so far", ["return"], returns),
    ]


def _action_charts(reader: BufferReader, names: Sequence[str]) -> list[Chart]:
    actions = reader.column("actions")
    if actions is None:
        nested = _flatten("action", getattr(reader.buffer, "actions", None)) if reader.is_recording else {}
        return [_value_chart(name, column[:, None]) for name, column in nested.items()]
    n_values = int(np.prod(actions.shape[2:]))
    if n_values != 1 or actions.dtype.kind not in "iu":
        if names and len(names) != n_values:
            raise ArgumentError(f"got {len(names)} action names for actions of {n_values} values")
        return [_value_chart("action", actions, names)]
    space = getattr(reader.buffer, "action_space", None)
    first, count = int(getattr(space, "start", 0)), int(getattr(space, "n", 0))
    highest = first + count - 1 if count else int(actions.max(initial=0))
    if names and len(names) <= highest - first:
        raise ArgumentError(f"got {len(names)} action names for actions {first} to {highest}")
    if not names and count <= _MAX_CURVES:
        names = [str(first + number) for number in range(count)]
    labels = {first + number: name for number, name in enumerate(names)}
    return [Chart("action", ["action"], _column_reader(actions), "levels", labels)]


def _rollout_charts(reader: BufferReader) -> Iterator[Chart]:
    for title, names in _ROLLOUT_CHARTS.items():
        columns = {name: column for name in names if (column := reader.column(name)) is not None and column.any()}
        if columns:
            yield Chart(title, list(columns), _column_reader(np.stack(list(columns.values()), axis=-1)))


def _observation_chart(reader: BufferReader, name: str, leaf: Any) -> Chart:
    n_values = int(np.prod(obs_shape(leaf)))
    curves = [str(number) for number in range(min(n_values, _MAX_CURVES))]

    def read(steps: Array, env: int) -> Array:
        batch = reader.read(leaf, steps, np.full(len(steps), env))
        return batch.reshape(len(steps), n_values)[:, : len(curves)]

    return Chart(name or "observation", curves, read, n_left_out=n_values - len(curves))


def _feature_charts(reader: BufferReader) -> list[Chart]:
    if not reader.is_recording:
        return []
    return [_value_chart(name, column[:, None]) for name, column in _flatten("", reader.buffer.features).items()]


def _value_chart(title: str, column: Array, names: Sequence[str] = ()) -> Chart:
    """Return a chart with a curve for each value of a column ``(n_steps, n_envs, ...)``."""
    flat = column.reshape(*column.shape[:2], -1)
    count = flat.shape[-1]
    curves = (names or [str(number) for number in range(count)] if count > 1 else [title])[:_MAX_CURVES]
    return Chart(title, curves, _column_reader(flat[..., : len(curves)]), n_left_out=count - len(curves))


def _column_reader(column: Array) -> Callable[[Array, int], Array]:
    return lambda steps, env: column[steps, env].reshape(len(steps), -1)


def _flatten(name: str, value: Any) -> dict[str, Array]:
    """Return the arrays in nested dicts and tuples by the path that leads to them."""
    if isinstance(value, dict | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: leaf for key, part in items for path, leaf in _flatten(f"{name}/{key}".lstrip("/"), part).items()}
    return {} if value is None else {name: np.asanyarray(value)}


def action_names_of(env_id: str) -> list[str]:
    """Return the names of an environment's actions, which Atari environments know."""
    import gymnasium

    if "NoFrameskip" in env_id or env_id.startswith("ALE/"):
        gymnasium.register_envs(import_extra("ale_py", user=env_id))
    try:
        env = gymnasium.make(env_id)
    except (gymnasium.error.Error, ImportError) as problem:
        raise UnknownEnvironmentError(f"there is no environment {env_id!r}: {problem}") from problem
    try:
        names: Sequence[Any] = getattr(env.unwrapped, "get_action_meanings", list)()
    finally:
        env.close()
    if not names:
        raise UnknownEnvironmentError(f"{env_id} does not name its actions; pass --action-names")
    return [str(name) for name in names]


def to_json(values: Array) -> list[Any]:
    """Return values as JSON can hold them: six significant digits, words for what is not finite, None if masked."""
    if isinstance(values, np.ma.MaskedArray):
        numbers = zip(to_json(values.data), np.ma.getmaskarray(values), strict=True)
        return [None if masked else number for number, masked in numbers]
    if values.dtype.kind == "b":
        values = values.astype(np.int64)
    if values.dtype.kind in "iu":
        return list(values.tolist())
    return [float(f"{value:.6g}") if np.isfinite(value) else str(float(value)) for value in values]
