"""SB3-style buffers for files: from a buffer to parts, back, and cut to intact steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape

from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers._sb3.sequence_states import check_shapes
from sb3_extra_buffers._sb3.views import BufferView
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import DamagedFileError, NotSaveableError
from sb3_extra_buffers.files.parts import Cut, LoadedParts, Parts, make_view
from sb3_extra_buffers.files.registry import class_of
from sb3_extra_buffers.files.spaces import space_from_json, space_to_json
from sb3_extra_buffers.files.values import value_from_json, value_to_json
from sb3_extra_buffers.kernels import has_numba
from sb3_extra_buffers.stores.checks import require, whole, within
from sb3_extra_buffers.stores.device_snapshot import from_host, to_host
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.timeline import TimelineStore
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]


class BufferFields(NamedTuple):
    """What is saved of a kind of buffer."""

    arguments: tuple[str, ...]
    """Arguments of the constructor that are attributes of the same name."""
    options: tuple[str, ...]
    """Arguments of the constructor that are kept in `storage_options`."""
    state: tuple[str, ...]
    """Other attributes."""
    columns: tuple[str, ...]
    """Arrays with a row per step."""


_BASIC_OPTIONS = ("dtypes", "normalize_images", "compression_method")
_OPTIONS = (*_BASIC_OPTIONS, "compression_kwargs", "decompression_kwargs", "output_dtype")
_LIMITS = ("max_bytes", "on_max_bytes")
_SB3 = ("optimize_memory_usage", "handle_timeout_termination")
_DEVICE = ("buffer_device", "heap_bytes", "compression_kwargs")
_HIDDEN = ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")
_STATE = ("pos", "full")
_OBSERVATIONS = ("observations", "next_observations")
_REPLAY = BufferFields(
    arguments=(*_SB3, "n_steps", "gamma"),
    options=_OPTIONS,
    state=(*_STATE, "n_evicted", "n_added"),
    columns=("actions", "rewards", "dones", "timeouts"),
)
_ROLLOUT = BufferFields(
    arguments=("gae_lambda", "gamma"),
    options=_OPTIONS,
    state=_STATE,
    columns=("actions", "rewards", "returns", "episode_starts", "values", "log_probs", "advantages"),
)
_HER_COLUMNS = ("ep_start", "ep_length")
_HER_ARGUMENTS = ("n_sampled_goal", "goal_selection_strategy", "copy_info_dict")
_GPU_REPLAY = BufferFields((*_SB3, *_DEVICE), (*_BASIC_OPTIONS, "output_dtype"), _STATE, _REPLAY.columns)
_SEQUENCE = ("recurrent_states", "recurrent_dtype", "prioritized", "alpha", "beta", "epsilon", "eta")
_PRIORITY_STATE = ("max_priority", "progress_remaining")
_FIELDS: dict[str, BufferFields] = {
    "replay": _REPLAY,
    "her-replay": _REPLAY._replace(arguments=(*_SB3, *_HER_ARGUMENTS), columns=(*_REPLAY.columns, *_HER_COLUMNS)),
    "prioritized-replay": _REPLAY._replace(
        arguments=(*_REPLAY.arguments, "alpha", "beta", "epsilon"),
        state=(*_REPLAY.state, *_PRIORITY_STATE),
    ),
    "sequence-replay": _REPLAY._replace(
        arguments=(*_REPLAY.arguments, *_SEQUENCE), state=(*_REPLAY.state, *_PRIORITY_STATE)
    ),
    "gpu-replay": _GPU_REPLAY,
    "gpu-n-step-replay": _GPU_REPLAY._replace(arguments=(*_GPU_REPLAY.arguments, "n_steps", "gamma")),
    "gpu-prioritized-replay": _GPU_REPLAY._replace(
        arguments=(*_GPU_REPLAY.arguments, "n_steps", "gamma", "alpha", "beta", "epsilon"),
        state=(*_STATE, "n_added", *_PRIORITY_STATE),
    ),
    "gpu-sequence-replay": _GPU_REPLAY._replace(
        arguments=(*_GPU_REPLAY.arguments, "gamma", *_SEQUENCE), state=(*_STATE, "n_added", *_PRIORITY_STATE)
    ),
    "gpu-her-replay": _GPU_REPLAY._replace(
        arguments=(*_GPU_REPLAY.arguments, *_HER_ARGUMENTS), columns=(*_REPLAY.columns, *_HER_COLUMNS)
    ),
    "rollout": _ROLLOUT,
    "maskable-rollout": _ROLLOUT._replace(columns=(*_ROLLOUT.columns, "action_masks")),
    "recurrent-rollout": _ROLLOUT._replace(
        arguments=(*_ROLLOUT.arguments, "hidden_state_shape"), columns=(*_ROLLOUT.columns, *_HIDDEN)
    ),
    "gpu-rollout": _ROLLOUT._replace(arguments=(*_ROLLOUT.arguments, *_DEVICE), options=_BASIC_OPTIONS),
}

# public attributes that the constructor derives from its arguments
_DERIVED = frozenset(
    {
        "observation_space", "action_space", "obs_shape", "action_dim", "device", "n_envs", "buffer_size",
        "observations", "next_observations", "generator_ready", "env", "her_ratio", "infos", "mask_dims", "pad",
        "pad_and_flatten", "seq_start_indices", "seq_end_indices", "flatten_config", "compression_method", "n_steps",
        "gamma", "storage_options", "obs_stores",
    }
)  # fmt: skip


def _fields_of(tag: str) -> BufferFields:
    return _FIELDS.get(tag) or _FIELDS[tag.replace("dict-", "").replace("n-step-", "")]


def _is_replay(tag: str) -> bool:
    """Whether buffers of this kind are rings."""
    return "rollout" not in tag


def _join_key(name: str, key: str) -> str:
    return f"{name}.{key}" if key else name


# ---- from a buffer ----


def to_parts(buffer: Any, tag: str) -> Parts:
    """The parts of ``buffer``, which is saved under ``tag``."""
    fields = _fields_of(tag)
    columns = {name: _by_step(buffer, name, _column(buffer, name)) for name in fields.columns}
    stores: dict[str, ObservationStore] = {}
    for name, view in _device_observations(buffer) if tag.startswith("gpu-") else _observations(buffer):
        if isinstance(view, np.ndarray):
            columns[name] = view
        else:
            # next observations are in the same store
            stores.setdefault(name.removeprefix("next_"), view.store if isinstance(view, StoreView) else view)
    description: dict[str, Any] = {
        "steps": int(buffer.buffer_size),
        "n_envs": int(buffer.n_envs),
        "observation_space": space_to_json(buffer.observation_space),
        "action_space": space_to_json(buffer.action_space),
        "device": str(buffer.device),
        "arguments": _arguments(buffer, fields),
        "state": {name: value_to_json(getattr(buffer, name), name) for name in fields.state},
    }
    if "her-" in tag:
        columns["current_ep_start"] = buffer._current_ep_start  # SB3 has no public name for it
        if buffer.copy_info_dict:
            columns["infos"] = _infos_to_column(buffer.infos)
    if "prioritized" in tag:
        columns["priorities"] = buffer.priorities
    if "sequence" in tag:
        columns |= buffer.sequence_columns()
    description["extra"] = {}
    for name, value in _added_attributes(buffer, fields).items():
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            columns[f"extra/{name}"] = value
        else:
            description["extra"][name] = value_to_json(value, name)
    return Parts(tag, description, columns, stores)


def _arguments(buffer: Any, fields: BufferFields) -> dict[str, Any]:
    arguments = {name: getattr(buffer, name) for name in fields.arguments}
    arguments |= {name: getattr(buffer.storage_options, name) for name in (*fields.options, *_LIMITS)}
    if callable(arguments.get("beta")):
        raise NotSaveableError(
            "beta is a function, which cannot be saved without pickle; pass a number or a pair of first and last values"
        )
    if "goal_selection_strategy" in arguments:
        arguments["goal_selection_strategy"] = arguments["goal_selection_strategy"].name.lower()
    return {name: value_to_json(value, name) for name, value in arguments.items()}


def _added_attributes(buffer: Any, fields: BufferFields) -> dict[str, Any]:
    """Public attributes that users or their subclasses have added to a buffer."""
    known = _DERIVED.union(fields.arguments, fields.columns, fields.state)
    return {
        name: value
        for name, value in vars(buffer).items()
        if name not in known and not name.startswith("_") and not hasattr(type(buffer), name)
    }


def _observations(buffer: Any) -> Iterator[tuple[str, Any]]:
    """Views and arrays of observations by name."""
    for name, views in buffer.obs_views().items():
        for key, view in views.by_key.items():
            yield _join_key(name, key), view


def _device_observations(buffer: Any) -> Iterator[tuple[str, Any]]:
    """Host stores and arrays with the observations of a device, by name."""
    for key, store in buffer.obs_stores.items():
        copied = to_host(store, _written_steps(buffer))
        for name, part in zip(_OBSERVATIONS, copied if isinstance(copied, list) else [copied], strict=False):
            yield _join_key(name, key), part


def _written_steps(buffer: Any) -> list[int]:
    """Steps in the order they were written."""
    newest = range(buffer.pos)
    return [*range(buffer.pos, buffer.buffer_size), *newest] if buffer.full else [*newest]


def _column(buffer: Any, name: str) -> Array:
    """A column in host memory."""
    column = getattr(buffer, name)
    return np.ascontiguousarray(column.cpu().numpy() if isinstance(column, th.Tensor) else column)


def _by_step(buffer: Any, name: str, column: Array) -> Array:
    """A column as ``[step, env, ...]``, also after ``get()`` has flattened a rollout."""
    n_steps, n_envs, is_hidden = buffer.buffer_size, buffer.n_envs, name in _HIDDEN
    ndim = 4 if is_hidden else 3 if name in ("actions", "action_masks") else 2
    if not getattr(buffer, "generator_ready", False) or (len(column) == n_steps and column.ndim == ndim):
        return column
    by_step = column.reshape(n_envs, n_steps, *column.shape[1:]).swapaxes(0, 1)
    return by_step.swapaxes(1, 2) if is_hidden else by_step.reshape(by_step.shape[:ndim])


def _infos_to_column(infos: Array) -> Array:
    """HER's infos as JSON: runs of equal ones, as ``[length, info]``."""
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
    """The buffer that `to_parts` described, built by its constructor; every column is checked before it is used."""
    fields = _fields_of(parts.kind)
    lead = parts.number("steps", low=1), parts.number("n_envs", low=1)
    buffer = _construct(parts, fields, lead)
    for name in fields.columns:
        empty = _column(buffer, name)
        setattr(buffer, name, parts.column(name, empty.dtype, empty.shape))
    _restore_state(buffer, parts, fields)
    if parts.kind.startswith("gpu-"):
        _restore_device_observations(buffer, parts)
    else:
        _restore_observations(buffer, parts, lead)
    return _finish(buffer, parts)


def _construct(parts: LoadedParts, fields: BufferFields, lead: tuple[int, int]) -> Any:
    n_steps, n_envs = lead
    both_spaces = {name: space_from_json(parts.entry(name)) for name in ("observation_space", "action_space")}
    arguments = value_from_json(parts.entry("arguments", kind=dict))
    expected = {*fields.arguments, *fields.options, *_LIMITS}
    require(set(arguments) == expected, f"a {parts.kind} takes other arguments than {', '.join(map(repr, arguments))}")
    _check_sizes(parts, fields, lead, both_spaces, arguments)
    limits = {name: arguments.pop(name) for name in _LIMITS}
    if "her-" in parts.kind:
        arguments["env"] = None
    if "buffer_device" in arguments:
        arguments["buffer_device"] = _available_device(arguments["buffer_device"])
    arguments |= both_spaces | {"device": _available_device(parts.entry("device")), "n_envs": n_envs}
    buffer = class_of(parts.kind)(n_steps * n_envs if _is_replay(parts.kind) else n_steps, **arguments)
    require(buffer.buffer_size == n_steps, f"{n_steps} steps of {n_envs} make a buffer of {buffer.buffer_size}")
    # not earlier: the constructor would lay out only as many steps as it expects to fit the limit
    buffer.storage_options = replace(buffer.storage_options, **limits)
    return buffer


def _available_device(name: Any) -> str:
    """The device ``name``, or the CPU on a machine without CUDA."""
    needs_cuda = str(name) == "pinned" or th.device(str(name)).type == "cuda"
    return "cpu" if needs_cuda and not th.cuda.is_available() else str(name)


def _check_sizes(
    parts: LoadedParts,
    fields: BufferFields,
    lead: tuple[int, int],
    both_spaces: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    """Raise unless columns and stores have the sizes that a constructor would allocate, before it does."""
    observed, actions = both_spaces["observation_space"], both_spaces["action_space"]
    shapes: dict[str, Any] = dict.fromkeys(_HIDDEN, arguments.get("hidden_state_shape"))
    shapes |= {"actions": (*lead, get_action_dim(actions)), "action_masks": (*lead, _mask_dims(actions))}
    for name in fields.columns:
        shape, column = shapes.get(name, lead), parts.columns.get(name)
        require(column is not None and column.shape == shape, f"the column {name!r} is missing or not of shape {shape}")
    if "sequence" in parts.kind:
        states, _ = check_shapes(arguments["recurrent_states"], arguments["recurrent_dtype"])
        for name, shape in states.items():
            column = parts.columns.get(f"states/{name}")
            fits = column is not None and column.shape == (*lead, *shape)
            require(fits, f"the state {name!r} is missing or not of shape {shape}")
    obs_shapes: Any = get_obs_shape(observed)
    options = StorageOptions(arguments["dtypes"])
    for key, obs_shape in obs_shapes.items() if isinstance(obs_shapes, dict) else [("", obs_shapes)]:
        name, store = _join_key("observations", key), parts.stores.get(_join_key("observations", key))
        spec = ObsSpec(tuple(obs_shape), np.dtype(observed[key].dtype if key else observed.dtype))
        stored_dtype = options.stored_dtype(key, spec)
        if store is None:
            parts.column(name, stored_dtype if parts.kind.startswith("gpu-") else spec.dtype, (*lead, *obs_shape))
        else:
            fits = store.spec.shape == spec.shape and store.n_streams == lead[1]
            # earlier versions ignored dtypes
            fits &= store.spec.dtype in (spec.dtype, stored_dtype)
            require(fits, f"the store {name!r} does not fit {observed}")


def _mask_dims(space: Any) -> int:
    """The length of an action mask, as sb3-contrib has it; -1 for spaces that cannot be masked."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return sum(map(int, space.nvec.ravel()))
    return 2 * math.prod(space.shape) if isinstance(space, spaces.MultiBinary) else -1


def _restore_state(buffer: Any, parts: LoadedParts, fields: BufferFields) -> None:
    n_steps, is_replay = buffer.buffer_size, _is_replay(parts.kind)
    full = parts.entry("state", "full", kind=bool)
    pos = parts.number("state", "pos", stop=n_steps + (not is_replay))
    require(is_replay or full == (pos == n_steps), f"full is {full}, but the position is {pos} of {n_steps} steps")
    buffer.pos, buffer.full = pos, full
    if "n_evicted" in fields.state:
        buffer.n_evicted = parts.number("state", "n_evicted", stop=(n_steps if full else pos) + 1)
    if "n_added" in fields.state:
        buffer.n_added = parts.number("state", "n_added", stop=1 << 60)
    if "her-" in parts.kind:
        _restore_episodes(buffer, parts)
    if "prioritized" in parts.kind:
        _restore_priorities(buffer, parts)
    if "sequence" in parts.kind:
        buffer.restore_sequences(parts)


def _restore_episodes(buffer: Any, parts: LoadedParts) -> None:
    n_steps, n_envs = buffer.buffer_size, buffer.n_envs
    starts, lengths = buffer.ep_start, buffer.ep_length
    current = parts.column("current_ep_start", np.int64, (n_envs,))
    within(starts, 0, n_steps, "the start of an episode")
    within(lengths, 0, n_steps + 1, "the length of an episode")
    within(current, 0, n_steps, "the start of a running episode")
    steps, envs = np.nonzero(lengths)
    first, length = starts[steps, envs], lengths[steps, envs]
    # every step of an episode is present and gives the same start and length
    counts = np.bincount(first * n_envs + envs, minlength=lengths.size)
    fits = ((steps - first) % n_steps < length) & (counts[first * n_envs + envs] == length)
    fits &= lengths[first, envs] == length
    require(fits & (buffer.full | (steps < buffer.pos)), "a step is outside of the episode that it claims to be in")
    running = (np.arange(n_steps)[:, None] - current) % n_steps < (buffer.pos - current) % n_steps
    fits = ~running | ((lengths == 0) & (starts == current))
    require(fits & (buffer.full | (current <= buffer.pos)), "a running episode contains steps of another one")
    buffer._current_ep_start = current  # SB3 has no public name for it
    if buffer.copy_info_dict:
        buffer.infos = _infos_from_column(parts.column("infos", np.uint8, (None,)), (n_steps, n_envs))


def _infos_from_column(column: Array, shape: tuple[int, int]) -> Array:
    runs = [(length, info) for length, info in json.loads(column.tobytes())]
    count = sum(whole(length, "a number of infos", 1) for length, _ in runs)
    require(count == math.prod(shape), f"there are {count} infos for {shape} steps")
    infos = [value_from_json(info) for length, info in runs for _ in range(length)]
    require(all(isinstance(info, dict) for info in infos), "an info is not a dict")
    out = np.empty(len(infos), object)
    out[:] = infos
    return out.reshape(shape)


def _restore_priorities(buffer: Any, parts: LoadedParts) -> None:
    priorities = parts.column("priorities", np.float64, (buffer.buffer_size, buffer.n_envs))
    require(np.isfinite(priorities) & (priorities >= 0), "a priority is negative or not finite")
    for name, low in (("max_priority", 0.0), ("progress_remaining", -1e300)):
        value = parts.entry("state", name, kind=(int, float))
        require(low <= value < 1e300, f"{name} is {value}")
        setattr(buffer, name, float(value))
    buffer.restore_priorities(priorities)


def _restore_observations(buffer: Any, parts: LoadedParts, lead: tuple[int, int]) -> None:
    restored: dict[str, dict[str, Any]] = {}
    for name, view in _observations(buffer):
        attribute, _, key = name.partition(".")
        store = parts.stores.get(name.removeprefix("next_"))
        if store is None and isinstance(view, StoreView):
            # files of earlier versions have observations and next observations as arrays
            if attribute == "observations":
                both = (parts.column(_join_key(each, key), view.dtype, view.shape) for each in _OBSERVATIONS)
                view.store.adopt_pairs(*(view.store.spec.to_rows(array.reshape(-1, *view.obs_shape)) for array in both))
            restored.setdefault(attribute, {})[key] = view
        elif store is None:
            restored.setdefault(attribute, {})[key] = parts.column(name, view.dtype, view.shape)
        elif isinstance(view, np.ndarray) and isinstance(store.inner, TimelineStore):
            # this buffer keeps vectors in arrays
            base = math.prod(lead) * name.startswith("next_")
            require(base + math.prod(lead) <= store.n_obs, f"the store {name!r} does not hold {lead} observations")
            rows = store.spec.from_rows(store.read(base + np.arange(math.prod(lead))))
            restored.setdefault(attribute, {})[key] = rows.reshape(view.shape)
        else:
            if len(buffer.obs_views()) == 2 and has_numba():
                store.share_next()
            base = math.prod(lead) * name.startswith("next_")
            restored.setdefault(attribute, {})[key] = make_view(BufferView, store, lead, base, dtype=view.dtype)
            store.may_stay_dense = buffer.storage_options.max_bytes is None
    buffer.restore_obs_views(restored)


def _restore_device_observations(buffer: Any, parts: LoadedParts) -> None:
    for key, device_store in buffer.obs_stores.items():
        names = [_join_key(name, key) for name in _OBSERVATIONS[: device_store.n_sets]]
        store, n_obs = parts.stores.get(names[0]), device_store.n_obs * device_store.n_sets
        require(store is None or store.n_obs == n_obs, f"the store {names[0]!r} does not hold {n_obs} observations")
        saved = store or [parts.column(name, device_store.dtype, device_store.shape) for name in names]
        from_host(device_store, saved, _written_steps(buffer))


def _finish(buffer: Any, parts: LoadedParts) -> Any:
    """``buffer`` as an instance of the requested class, with the attributes that users had added."""
    target = parts.target
    if target is not None and not issubclass(type(buffer), target):
        # without its constructor, whose work was done when the buffer was first made
        built, buffer = buffer, object.__new__(target)
        vars(buffer).update(vars(built))
        if _is_replay(parts.kind) and not parts.kind.startswith("gpu-"):
            # the cached views depend on which methods the class overrides
            buffer.restore_obs_views({name: views.by_key for name, views in built.obs_views().items()})
    added = value_from_json(parts.entry("extra", kind=dict))
    added |= {name.removeprefix("extra/"): column for name, column in parts.columns.items() if name[:6] == "extra/"}
    for name, value in added.items():
        fits = name.isidentifier() and not name.startswith("_") and not hasattr(buffer, name)
        require(fits, f"{name!r} cannot be added to a {type(buffer).__name__}: not a new, public attribute")
        setattr(buffer, name, value)
    if parts.read_only:
        buffer.read_only = True
    return buffer


# ---- repair ----


def cut(parts: LoadedParts, bad_rows: dict[str, Flags], bad_indices: dict[str, Flags]) -> Cut:
    """Keep the longest run of intact steps, at their positions, and forget all others."""
    if parts.kind.startswith("gpu-"):
        raise DamagedFileError("a damaged GPU buffer cannot be cut to its intact steps")
    n_steps, n_envs = parts.number("steps", low=1), parts.number("n_envs", low=1)
    full, is_replay = parts.entry("state", "full", kind=bool), _is_replay(parts.kind)
    pos = parts.number("state", "pos", stop=n_steps + 1)
    n_evicted = parts.number("state", "n_evicted", stop=n_steps + 1) if is_replay else 0
    n_held = (n_steps if full else pos) - n_evicted
    oldest = (pos if full and is_replay else 0) + n_evicted
    held = (oldest + np.arange(n_held)) % n_steps  # steps, oldest first
    is_lost = _lost_steps(n_steps, n_envs, bad_rows, bad_indices)
    first, count = _longest_run(~is_lost[held], from_start=not is_replay)
    kept = held[first : first + count]
    end = int(kept[-1]) + 1 if count else 0
    full = (full if is_replay else count == n_steps) and count > 0
    state = parts.description["state"] | {"pos": end % n_steps if is_replay else end, "full": full}
    if is_replay:
        # steps between the newest that is kept and the oldest count as evicted
        state["n_evicted"] = n_steps - count if full else end - count
    if "n_added" in state:
        # numbers of steps continue, so that indices from before stay stale
        state["n_added"] = (parts.number("state", "n_added", stop=1 << 60) // n_steps + 2) * n_steps + state["pos"]
    columns = dict(parts.columns)
    forgotten = np.setdiff1d(np.arange(n_steps), kept)
    for name, column in columns.items():
        if column.shape[:1] == (n_steps,) and not name.startswith("extra/") and name != "infos":
            column[forgotten] = 0
    if parts.kind == "her-replay":
        _cut_episodes(columns, kept, count == n_held - first, end % n_steps)
    if "sequence" in parts.kind:
        # an episode whose next steps are lost does not go on
        columns["next_is_first"] = columns["next_is_first"] | (count != n_held - first)
    steps = kept[:, None] * n_envs + np.arange(n_envs)
    indices = {
        name: [batch + base for batch in steps for base in range(0, store.n_obs, n_steps * n_envs)]
        for name, store in parts.stores.items()
    }
    return Cut(parts.description | {"state": state}, columns, indices, count * n_envs, (n_held - count) * n_envs)


def _lost_steps(n_steps: int, n_envs: int, bad_rows: dict[str, Flags], bad_indices: dict[str, Flags]) -> Flags:
    """Flags of the steps with a damaged row or observation."""
    is_lost = np.zeros(n_steps, np.bool_)
    for name, rows in bad_rows.items():
        if len(rows) != n_steps:
            raise DamagedFileError(f"the column {name!r} is damaged, and every step depends on it")
        is_lost |= rows
    for lost in bad_indices.values():
        n_sets = lost.size // (n_steps * n_envs)
        is_lost |= lost[: n_sets * n_steps * n_envs].reshape(n_sets, n_steps, n_envs).any(axis=(0, 2))
    return is_lost


def _longest_run(flags: Flags, from_start: bool) -> tuple[int, int]:
    """Start and length of the longest run of True, or of the one at the start."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    runs = [(int(start), int(end - start)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return max((run for run in runs if not from_start or run[0] == 0), key=lambda run: run[1], default=(0, 0))


def _cut_episodes(columns: dict[str, Array], kept: npt.NDArray[np.int64], newest_is_kept: bool, end: int) -> None:
    """Forget HER's incomplete episodes, whose goals are gone; running ones continue if the newest step is kept."""
    starts, lengths, current = columns["ep_start"], columns["ep_length"], columns["current_ep_start"]
    n_steps, count, oldest = len(starts), len(kept), int(kept[0]) if len(kept) else 0
    lengths[(starts - oldest) % n_steps + lengths > count] = 0
    is_kept = (current - oldest) % n_steps < count
    current[~is_kept | (not newest_is_kept)] = end
