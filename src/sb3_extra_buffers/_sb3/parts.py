"""What buffers of SB3's layout are made of, for files: from a buffer to parts, back, and cut to some of its steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape

from sb3_extra_buffers._sb3.views import BufferView
from sb3_extra_buffers.errors import DamagedFileError, NotSaveableError
from sb3_extra_buffers.files.parts import Cut, LoadedParts, Parts, make_view
from sb3_extra_buffers.files.registry import class_of
from sb3_extra_buffers.files.spaces import space_from_json, space_to_json
from sb3_extra_buffers.files.values import value_from_json, value_to_json
from sb3_extra_buffers.stores.checks import require, whole, within
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]


class Layout(NamedTuple):
    """How the buffers of a kind are made and what they hold."""

    arguments: tuple[str, ...]
    """Arguments of the constructor, each an attribute of the same name."""
    options: tuple[str, ...]
    """Arguments of the constructor that are kept in the options."""
    state: tuple[str, ...]
    """Other attributes that are saved."""
    columns: tuple[str, ...]
    """Arrays with a row for each step."""


_PLAIN = ("dtypes", "normalize_images", "compression_method")
_OPTIONS = (*_PLAIN, "compression_kwargs", "decompression_kwargs", "output_dtype")
_LIMITS = ("max_bytes", "on_max_bytes")
_SB3 = ("optimize_memory_usage", "handle_timeout_termination")
_DEVICE = ("buffer_device", "heap_bytes", "compression_kwargs")
_HIDDEN = ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")
_STATE = ("pos", "full")
_SETS = ("observations", "next_observations")
_REPLAY = Layout(
    (*_SB3, "n_steps", "gamma"), _OPTIONS, (*_STATE, "n_evicted", "n_added"),
    ("actions", "rewards", "dones", "timeouts"),
)  # fmt: skip
_ROLLOUT = Layout(
    ("gae_lambda", "gamma"), _OPTIONS, _STATE,
    ("actions", "rewards", "returns", "episode_starts", "values", "log_probs", "advantages"),
)  # fmt: skip
_LAYOUTS: dict[str, Layout] = {
    "replay": _REPLAY,
    "her-replay": _REPLAY._replace(
        arguments=(*_SB3, "n_sampled_goal", "goal_selection_strategy", "copy_info_dict"),
        columns=(*_REPLAY.columns, "ep_start", "ep_length"),
    ),
    "prioritized-replay": _REPLAY._replace(
        arguments=(*_REPLAY.arguments, "alpha", "beta", "epsilon"),
        state=(*_REPLAY.state, "max_priority", "progress_remaining"),
    ),
    "gpu-replay": Layout((*_SB3, *_DEVICE), (*_PLAIN, "output_dtype"), _STATE, _REPLAY.columns),
    "rollout": _ROLLOUT,
    "maskable-rollout": _ROLLOUT._replace(columns=(*_ROLLOUT.columns, "action_masks")),
    "recurrent-rollout": _ROLLOUT._replace(
        arguments=(*_ROLLOUT.arguments, "hidden_state_shape"), columns=(*_ROLLOUT.columns, *_HIDDEN)
    ),
    "gpu-rollout": _ROLLOUT._replace(arguments=(*_ROLLOUT.arguments, *_DEVICE), options=_PLAIN),
}


def _layout(tag: str) -> Layout:
    return _LAYOUTS[tag.replace("dict-", "").replace("n-step-", "")]


# attributes that follow from the arguments, or that are made again when they are missed
_FOLLOW = frozenset(
    {
        "observation_space", "action_space", "obs_shape", "action_dim", "device", "n_envs", "buffer_size",
        "observations", "next_observations", "generator_ready", "env", "her_ratio", "infos", "mask_dims", "pad",
        "pad_and_flatten", "seq_start_indices", "seq_end_indices", "flatten_config", "compression_method", "n_steps",
        "gamma", "storage_options",
    }
)  # fmt: skip


def is_ring(tag: str) -> bool:
    """Whether a buffer of this kind goes on at its beginning when it is full."""
    return "rollout" not in tag


# ---- from a buffer ----


def to_parts(buffer: Any, tag: str) -> Parts:
    """What ``buffer``, which is saved under ``tag``, is made of."""
    layout = _layout(tag)
    columns = {name: _laid_out(buffer, name, getattr(buffer, name)) for name in layout.columns}
    stores: dict[str, ObservationStore] = {}
    for name, leaf in _device_leaves(buffer) if tag.startswith("gpu-") else _leaves(buffer):
        if isinstance(leaf, np.ndarray):
            columns[name] = leaf
        else:
            stores.setdefault(name.removeprefix("next_"), leaf.store if isinstance(leaf, StoreView) else leaf)
    described = {
        "steps": int(buffer.buffer_size),
        "n_envs": int(buffer.n_envs),
        "observation_space": space_to_json(buffer.observation_space),
        "action_space": space_to_json(buffer.action_space),
        "device": str(buffer.device),
        "arguments": _arguments(buffer, layout),
        "state": {name: value_to_json(getattr(buffer, name), name) for name in layout.state},
    }
    if tag == "her-replay":
        columns["current_ep_start"] = buffer._current_ep_start
        if buffer.copy_info_dict:
            columns["infos"] = _infos_to_text(buffer.infos)
    if "prioritized" in tag:
        columns["priorities"] = buffer.priorities
    extra = buffer._extra_state() if hasattr(buffer, "_extra_state") else _extra_state(buffer, layout)
    described["extra"] = {name: value_to_json(value, name) for name, value in extra.items() if not _is_column(value)}
    columns |= {f"extra/{name}": value for name, value in extra.items() if _is_column(value)}
    return Parts(tag, described, columns, stores)


def _arguments(buffer: Any, layout: Layout) -> dict[str, Any]:
    found = {name: getattr(buffer, name) for name in layout.arguments}
    found |= {name: getattr(buffer.storage_options, name) for name in (*layout.options, *_LIMITS)}
    if callable(found.get("beta")):
        raise NotSaveableError(
            "beta is a function, which cannot be saved without pickle; pass a number or a pair of first and last values"
        )
    if "goal_selection_strategy" in found:
        found["goal_selection_strategy"] = found["goal_selection_strategy"].name.lower()
    return {name: value_to_json(value, name) for name, value in found.items()}


def _extra_state(buffer: Any, layout: Layout) -> dict[str, Any]:
    """What users, or their subclasses, have added to a buffer under public names."""
    known = _FOLLOW.union(layout.arguments, layout.columns, layout.state)
    return {
        name: value
        for name, value in vars(buffer).items()
        if name not in known and not name.startswith("_") and not hasattr(type(buffer), name)
    }


def _is_column(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biufc"


def _leaf_name(name: str, key: str | None) -> str:
    return f"{name}.{key}" if key else name


def _leaves(buffer: Any) -> list[tuple[str, Any]]:
    """Observations by name, as they lay before a rollout was read."""
    sets = buffer.obs_views().items()
    return [(_leaf_name(name, key), view) for name, views in sets for key, view in views.by_key.items()]


def _device_leaves(buffer: Any) -> Iterator[tuple[str, Any]]:
    """Observations behind a device by name, as the host would have them."""
    from sb3_extra_buffers.stores.device_snapshot import to_host

    for key, store in buffer._stores.items():
        found = to_host(store, _steps_of(buffer))
        for name, part in zip(_SETS, found if isinstance(found, list) else [found], strict=False):
            yield _leaf_name(name, key), part


def _steps_of(buffer: Any) -> list[int]:
    """Steps in the order in which they were written."""
    held = range(buffer.pos)
    return [*range(buffer.pos, buffer.buffer_size), *held] if buffer.full else [*held]


def _laid_out(buffer: Any, name: str, column: Array) -> Array:
    """A column as it was before a rollout was flattened to be read."""
    steps, n_envs, is_hidden = buffer.buffer_size, buffer.n_envs, name in _HIDDEN
    n_axes = 4 if is_hidden else 3 if name in ("actions", "action_masks") else 2
    if not getattr(buffer, "generator_ready", False) or (len(column) == steps and column.ndim == n_axes):
        return column
    found = column.reshape(n_envs, steps, *column.shape[1:]).swapaxes(0, 1)
    return found.swapaxes(1, 2) if is_hidden else found.reshape(found.shape[:n_axes])


def _infos_to_text(infos: Array) -> Array:
    """HER's infos as JSON: runs of equal ones, with their lengths."""
    runs: list[list[Any]] = []
    for info in infos.ravel():
        info = value_to_json(info, "infos")
        if runs and runs[-1][1] == info:
            runs[-1][0] += 1
        else:
            runs.append([1, info])
    return np.frombuffer(json.dumps(runs, separators=(",", ":")).encode(), np.uint8)


# ---- to a buffer ----


def buffer_from_parts(parts: LoadedParts) -> Any:
    """The buffer that `to_parts` saw, made by its constructor; every column is checked before it is put there."""
    layout = _layout(parts.kind)
    lead = parts.number("steps", low=1), parts.number("n_envs", low=1)
    buffer = _construct(parts, layout, lead)
    for name in layout.columns:
        due = getattr(buffer, name)
        setattr(buffer, name, parts.column(name, due.dtype, due.shape))
    _put_state(buffer, parts, layout)
    if parts.kind.startswith("gpu-"):
        _put_device_observations(buffer, parts)
    else:
        _put_observations(buffer, parts, lead)
    return _finish(buffer, parts)


def _construct(parts: LoadedParts, layout: Layout, lead: tuple[int, int]) -> Any:
    steps, n_envs = lead
    spaces = {name: space_from_json(parts.entry(name)) for name in ("observation_space", "action_space")}
    arguments = value_from_json(parts.entry("arguments", kind=dict))
    known = {*layout.arguments, *layout.options, *_LIMITS}
    require(set(arguments) == known, f"a {parts.kind} is not made from {', '.join(map(repr, arguments))}")
    shapes: dict[str, Any] = {"actions": (*lead, get_action_dim(spaces["action_space"]))}
    shapes |= dict.fromkeys(_HIDDEN, arguments.get("hidden_state_shape"))
    shapes["action_masks"] = (*lead, _mask_dims(spaces["action_space"]))
    _check_sizes(parts, layout, lead, spaces["observation_space"], shapes)
    limits = {name: arguments.pop(name) for name in _LIMITS}
    if parts.kind == "her-replay":
        arguments["env"] = None
    if "buffer_device" in arguments:
        arguments["buffer_device"] = _device(arguments["buffer_device"])
    size = steps * n_envs if is_ring(parts.kind) else steps
    buffer = class_of(parts.kind)(size, **spaces, device=_device(parts.entry("device")), n_envs=n_envs, **arguments)
    require(buffer.buffer_size == steps, f"{steps} steps of {n_envs} make a buffer of {buffer.buffer_size}")
    # only now: with a limit, a constructor lays out as many steps as it thinks will fit
    buffer.storage_options = replace(buffer.storage_options, **limits)
    return buffer


def _device(name: Any) -> str:
    """The device, or the CPU where this machine has none of its kind."""
    import torch

    if str(name) == "pinned" or torch.device(str(name)).type == "cuda":
        return str(name) if torch.cuda.is_available() else "cpu"
    return str(name)


def _check_sizes(parts: LoadedParts, layout: Layout, lead: tuple[int, int], observed: Any, shapes: Any) -> None:
    """Raise unless the columns are as long as a constructor will lay them out; before it takes memory for them."""
    for name in layout.columns:
        due, found = shapes.get(name, lead), parts.columns.get(name)
        require(found is not None and found.shape == due, f"{name} are missing, or not of shape {due}")
    observations: Any = get_obs_shape(observed)
    for key, shape in observations.items() if isinstance(observations, dict) else [(None, observations)]:
        name, dtype = _leaf_name("observations", key), np.dtype(observed.dtype if key is None else observed[key].dtype)
        store = parts.stores.get(name)
        if store is None:
            parts.column(name, dtype, (*lead, *shape))
        else:
            fits = (store.spec.shape, store.spec.dtype, store.n_streams) == (tuple(shape), dtype, lead[1])
            require(fits, f"{name} are not those of {observed}")


def _mask_dims(space: Any) -> int:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return sum(map(int, space.nvec.ravel()))
    return 2 * math.prod(space.shape) if isinstance(space, spaces.MultiBinary) else -1


def _put_state(buffer: Any, parts: LoadedParts, layout: Layout) -> None:
    size = buffer.buffer_size
    ring = is_ring(parts.kind)
    full = parts.entry("state", "full", kind=bool)
    pos = parts.number("state", "pos", stop=size + (not ring))
    require(ring or full == (pos == size), f"position {pos} of {size} steps, and full is {full}")
    buffer.pos, buffer.full = pos, full
    if "n_evicted" in layout.state:
        buffer.n_evicted = parts.number("state", "n_evicted", stop=(size if full else pos) + 1)
        buffer.n_added = parts.number("state", "n_added", stop=1 << 60)
    if parts.kind == "her-replay":
        _put_episodes(buffer, parts)
    if "prioritized" in parts.kind:
        _put_priorities(buffer, parts)


def _put_episodes(buffer: Any, parts: LoadedParts) -> None:
    size, lead = buffer.buffer_size, (buffer.buffer_size, buffer.n_envs)
    starts, lengths = buffer.ep_start, buffer.ep_length
    current = parts.column("current_ep_start", np.int64, (buffer.n_envs,))
    for what, values, stop in (("start", starts, size), ("length", lengths, size + 1), ("beginning", current, size)):
        within(values, 0, stop, f"the {what} of an episode")
    steps, envs = np.nonzero(lengths)
    first, length = starts[steps, envs], lengths[steps, envs]
    # all steps of an episode are there, and say the same of it
    counts = np.bincount(first * buffer.n_envs + envs, minlength=lengths.size)
    fits = ((steps - first) % size < length) & (counts[first * buffer.n_envs + envs] == length)
    fits &= lengths[first, envs] == length
    require(fits & (buffer.full | (steps < buffer.pos)), "a step is in an episode that it is no part of")
    buffer._current_ep_start = current
    if buffer.copy_info_dict:
        buffer.infos = _infos_from_text(parts.column("infos", np.uint8, (None,)), lead)


def _infos_from_text(text: Array, shape: tuple[int, int]) -> Array:
    runs = [(length, info) for length, info in json.loads(text.tobytes())]
    count = sum(whole(length, "a number of infos", 1) for length, _ in runs)
    require(count == math.prod(shape), f"infos are not as many as {shape}")
    infos = [value_from_json(info) for length, info in runs for _ in range(length)]
    require(all(isinstance(info, dict) for info in infos), "an info is no dict")
    out = np.empty(len(infos), object)
    out[:] = infos
    return out.reshape(shape)


def _put_priorities(buffer: Any, parts: LoadedParts) -> None:
    leaves = parts.column("priorities", np.float64, (buffer.buffer_size, buffer.n_envs))
    require(np.isfinite(leaves) & (leaves >= 0), "a priority is negative or not finite")
    for name, low in (("max_priority", 0.0), ("progress_remaining", -1e300)):
        value = parts.entry("state", name, kind=(int, float))
        require(low <= value < 1e300, f"{name} is {value}")
        setattr(buffer, name, float(value))
    buffer.restore_priorities(leaves)


def _put_observations(buffer: Any, parts: LoadedParts, lead: tuple[int, int]) -> None:
    found: dict[str, dict[str, Any]] = {}
    for name, leaf in _leaves(buffer):
        attribute, _, key = name.partition(".")
        store = parts.stores.get(name.removeprefix("next_"))
        if store is None:
            found.setdefault(attribute, {})[key] = parts.column(name, leaf.dtype, leaf.shape)
        else:
            base = math.prod(lead) * name.startswith("next_")
            found.setdefault(attribute, {})[key] = make_view(BufferView, store, lead, base)
            store.may_stay_dense = buffer.storage_options.max_bytes is None
    buffer.restore_obs_views(found)


def _put_device_observations(buffer: Any, parts: LoadedParts) -> None:
    from sb3_extra_buffers.stores.device_snapshot import from_host

    for key, into in buffer._stores.items():
        names = [_leaf_name(each, key) for each in _SETS[: into.n_sets]]
        store = parts.stores.get(names[0])
        fits = store is None or store.n_obs == into.n_obs * into.n_sets
        require(fits, f"{names[0]} are not as many as {into.n_obs * into.n_sets}")
        from_host(into, store or [parts.column(name, into.dtype, into.shape) for name in names], _steps_of(buffer))


def _finish(buffer: Any, parts: LoadedParts) -> Any:
    """Make ``buffer`` one of the class that was asked for, with what its users had added."""
    target = parts.target
    if target is not None and not issubclass(type(buffer), target):
        # what its constructor does was done when it was first made
        made = object.__new__(target)
        vars(made).update(vars(buffer))
        buffer = made
    extra = value_from_json(parts.entry("extra", kind=dict))
    extra |= {name.removeprefix("extra/"): column for name, column in parts.columns.items() if name[:6] == "extra/"}
    if hasattr(buffer, "_set_extra_state"):
        buffer._set_extra_state(extra)
    else:
        for name, value in extra.items():
            fits = name.isidentifier() and not name.startswith("_") and not hasattr(buffer, name)
            require(fits, f"{name!r} is no attribute to add to a {type(buffer).__name__}")
            setattr(buffer, name, value)
    if parts.read_only:
        buffer.read_only = True
    return buffer


# ---- cutting ----


def cut(parts: LoadedParts, bad_rows: dict[str, Flags], bad_indices: dict[str, Flags]) -> Cut:
    """What is left without damaged steps: the longest run of whole ones, where they are, all others forgotten."""
    if parts.kind.startswith("gpu-"):
        raise DamagedFileError("a buffer of a device is damaged, and cannot be cut")
    size, n_envs = parts.number("steps", low=1), parts.number("n_envs", low=1)
    full = parts.entry("state", "full", kind=bool)
    pos, ring = parts.number("state", "pos", stop=size + 1), is_ring(parts.kind)
    lost = np.zeros(size, np.bool_)
    for name, rows in bad_rows.items():
        if len(rows) != size:
            raise DamagedFileError(f"{name!r} is damaged, and belongs to every step")
        lost |= rows
    for indices in bad_indices.values():
        lost |= indices[: indices.size // (size * n_envs) * size * n_envs].reshape(-1, size, n_envs).any(axis=(0, 2))
    n_evicted = parts.number("state", "n_evicted", stop=size + 1) if ring else 0
    held = (size if full else pos) - n_evicted
    oldest = (pos if full and ring else 0) + n_evicted
    order = (oldest + np.arange(held)) % size
    first, count = longest_run(~lost[order], from_start=not ring)
    kept = order[first : first + count]
    state = dict(parts.description["state"])
    end = int(kept[-1]) + 1 if count else 0
    full = (full if ring else count == size) and count > 0
    # what lies between the newest step that is kept and the oldest one counts as evicted
    state |= {"pos": end % size if ring else end, "full": full}
    if ring:
        state["n_evicted"] = size - count if full else end - count
    columns = dict(parts.columns)
    gone = np.ones(size, np.bool_)
    gone[kept] = False
    for name, column in columns.items():
        if column.shape[:1] == (size,) and not name.startswith("extra/") and name != "infos":
            column[gone] = 0
    if parts.kind == "her-replay":
        _cut_episodes(columns, kept, count == held - first, end % size)
    if "n_added" in state:
        # numbers go on, so that indices of before stay stale
        state["n_added"] = (parts.number("state", "n_added", stop=1 << 60) // size + 2) * size + state["pos"]
    steps = kept[:, None] * n_envs + np.arange(n_envs)
    batches = {
        name: [batch + base for batch in steps for base in range(0, store.n_obs, size * n_envs)]
        for name, store in parts.stores.items()
    }
    description = parts.description | {"state": state}
    return Cut(description, columns, batches, count * n_envs, (held - count) * n_envs)


def _cut_episodes(columns: dict[str, Array], kept: npt.NDArray[np.int64], goes_on: bool, end: int) -> None:
    """HER: no goal may be taken from an episode that is not there as a whole."""
    starts, lengths, current = columns["ep_start"], columns["ep_length"], columns["current_ep_start"]
    size, count, oldest = len(starts), len(kept), int(kept[0]) if len(kept) else 0
    whole = (starts - oldest) % size + lengths <= count
    lengths[~whole] = 0
    is_kept = (current - oldest) % size < count
    current[~is_kept | (not goes_on)] = end


def longest_run(whole: Flags, from_start: bool = False) -> tuple[int, int]:
    """Start and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], whole, [False]]).astype(np.int8)))
    runs = [(int(begin), int(end - begin)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    if from_start:
        runs = [run for run in runs if run[0] == 0]
    return max(runs, key=lambda run: run[1], default=(0, 0))
