"""Steps as journal records: pack the arguments of ``add``, and replay a journal.

An observation is usually the next observation of the step before, and a next observation usually the observation moved
on by a frame. Rows that can be predicted so are not written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.files.journal import read_journal
from sb3_extra_buffers.files.values import value_from_json, value_to_json
from sb3_extra_buffers.stores.checks import column, only_named_errors, require, whole, within
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]


class StepRecord(NamedTuple):
    """A step, ready for `Journal.append`."""

    fields: dict[str, Any]
    arrays: list[Array]
    next_rows: dict[str, Array]
    """The next observations by key: the prediction for the following step."""


def pack_step(
    buffer: Any, predicted: dict[str, Array], obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any
) -> StepRecord:
    """The arguments of ``buffer.add`` as a record."""
    arrays: list[Array] = []
    keys, next_rows = [], {}
    for key, leaf in _leaves(buffer):
        shape, dtype = leaf.shape[1:], _stored_dtype(leaf)
        rows, following = (_to_rows(part if key is None else part[key], shape, dtype) for part in (obs, next_obs))
        width = _frame_bytes(leaf) or rows.shape[1]
        head = following.shape[1] - width
        for part, prediction in ((rows, predicted.get(key or "")), (following[:, :head], rows[:, width:])):
            same = np.zeros(len(part), np.bool_) if prediction is None else (part == prediction).all(axis=1)
            arrays += [same, part[~same]]
        arrays.append(following[:, head:])
        keys.append([key, width])
        next_rows[key or ""] = following.copy()
    fields: dict[str, Any] = {"kind": "add", "keys": keys}
    if getattr(buffer, "copy_info_dict", False):
        fields["infos"] = [value_to_json(info, "infos") for info in infos]
    elif buffer.handle_timeout_termination:
        fields["truncated"] = [bool(info.get("TimeLimit.truncated", False)) for info in infos]
    states = buffer.step_states(infos) if hasattr(buffer, "step_states") else []
    return StepRecord(fields, [*arrays, *map(np.asarray, (action, reward, done)), *states], next_rows)


def _unpack_step(
    buffer: Any, predicted: dict[str, Array], fields: dict[str, Any], arrays: list[Array]
) -> tuple[Any, ...]:
    """The arguments that `pack_step` was given; ``predicted`` is updated."""
    leaves, keys = dict(_leaves(buffer)), fields["keys"]
    n_arrays, has_states = 5 * len(keys) + 3, hasattr(buffer, "with_step_states")
    fits = [key for key, _ in keys] == list(leaves) and (len(arrays) == n_arrays or has_states)
    require(fits and len(arrays) >= n_arrays, "a journal record does not belong to this buffer")
    remaining = iter(arrays[:n_arrays])
    obs: dict[str | None, Array] = {}
    next_obs: dict[str | None, Array] = {}
    for key, width in keys:
        leaf = leaves[key]
        dtype = _stored_dtype(leaf)
        n_envs, n_bytes = leaf.shape[1], int(np.prod(leaf.shape[2:], dtype=np.int64)) * dtype.itemsize
        head = n_bytes - whole(width, "the width of a frame", 0, n_bytes + 1)
        rows = _unpack_rows(predicted.get(key or ""), next(remaining), next(remaining), (n_envs, n_bytes))
        following = _unpack_rows(rows[:, width:], next(remaining), next(remaining), (n_envs, head))
        tails = column({"tails": next(remaining)}, "tails", np.uint8, (n_envs, width))
        predicted[key or ""] = following = np.concatenate([following, tails], axis=1)
        obs[key], next_obs[key] = (part.view(dtype).reshape(leaf.shape[1:]) for part in (rows, following))
    infos = [value_from_json(info) for info in fields.get("infos", [])]
    infos += [{"TimeLimit.truncated": bool(truncated)} for truncated in fields.get("truncated", [])]
    fits = len(infos) in (0, 1, buffer.n_envs) and all(isinstance(info, dict) for info in infos)
    require(fits, f"a journal record has {len(infos)} infos for {buffer.n_envs} environments")
    if has_states:
        infos = buffer.with_step_states(infos, arrays[n_arrays:])
    return (*(part[None] if set(part) == {None} else part for part in (obs, next_obs)), *remaining, infos)


def _unpack_rows(prediction: Array | None, same: Array, rows: Array, shape: tuple[int, int]) -> Array:
    """The rows that are as predicted where ``same``, and ``rows`` elsewhere."""
    column({"flags": same}, "flags", np.bool_, shape[:1])
    column({"rows": rows}, "rows", np.uint8, (shape[0] - int(same.sum()), shape[1]))
    require(prediction is not None or not same.any(), "a journal record continues one that is missing")
    out = np.zeros(shape, np.uint8) if prediction is None else prediction.copy()
    out[~same] = rows
    return out


def replay(buffer: Any, path: Path) -> None:
    """Apply every record of a journal to ``buffer``."""
    predicted: dict[str, Array] = {}
    for number, (fields, arrays) in enumerate(read_journal(path)):
        with only_named_errors(f"{path}: record {number}"):
            kind = fields.get("kind")
            if kind == "add" and not isinstance(buffer, StoreView):
                # not `add`: a subclass may have changed the step before it was recorded
                buffer.replay_step(*_unpack_step(buffer, predicted, fields, arrays))
            elif kind in ("write", "erase", "clear") and isinstance(buffer, StoreView):
                _check_change(buffer.store, kind, arrays)
                getattr(buffer.store, kind)(*arrays)
            else:
                raise FileFormatError(f"{path}: record {number} has the kind {kind!r}, unknown or of another buffer")


def _check_change(store: ObservationStore, kind: str, arrays: list[Array]) -> None:
    """Raise unless ``arrays`` are valid arguments of the method ``kind`` of ``store``."""
    names = ("indices", "streams", "rows")[: {"write": 3, "erase": 1, "clear": 0}[kind]]
    arguments = dict(zip(names, arrays, strict=True))
    for name, stop in (("indices", store.n_obs), ("streams", store.n_streams)):
        if name in arguments:
            within(column(arguments, name, np.int64, arrays[0].shape[:1]), 0, stop, f"one of {name}")
    if "rows" in arguments:
        column(arguments, "rows", np.uint8, (len(arrays[0]), store.spec.nbytes))


def _leaves(buffer: Any) -> list[tuple[str | None, Any]]:
    observations = buffer.observations
    return list(observations.items()) if isinstance(observations, dict) else [(None, observations)]


def _stored_dtype(leaf: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = leaf.stored_dtype if isinstance(leaf, StoreView) else leaf.dtype
    return dtype


def _to_rows(observations: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    array = np.asarray(observations).astype(dtype, copy=False)
    if array.shape != shape:
        array = array.reshape(shape) if array.size == int(np.prod(shape)) else np.broadcast_to(array, shape)
    return np.ascontiguousarray(array).reshape(shape[0], -1).view(np.uint8)


def _frame_bytes(leaf: Any) -> int:
    """Bytes of a frame, if observations are stacks of consecutive frames; else 0."""
    layout = leaf.store.layout if isinstance(leaf, StoreView) else None
    return layout.frame_bytes if layout is not None and layout.stack > 1 and layout.axis == "first" else 0
